"""``state_dict_type="sharded"`` with ``AsyncCheckpointIO``: directories are written while the training goes on."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.checkpoint import directory, files
from lightning_zerocompile.ranks.errors import CommunicationError
from tests.support import alive, checkpoints, models
from tests.support.checkpoints import FullDisk, Look, Saved
from tests.support.harness import Ranks, on_ranks, two_scripts

SAVING: dict[str, Any] = {"enable_checkpointing": True}


def _background(stage: int = 3, **options: Any) -> ZeroCompileStrategy:
    return checkpoints.strategy(
        "sharded", stage, checkpoint_io=AsyncCheckpointIO(), timeout=timedelta(seconds=30), **options
    )


class Writer(FileSystemWriter):
    """Writes when ``before`` has returned, in whatever thread."""

    before: Callable[[], Any]

    def write_data(self, *args: Any, **options: Any) -> Any:
        type(self).before()
        return super().write_data(*args, **options)


@contextmanager
def _writing(before: Callable[[], Any]) -> Iterator[None]:
    Writer.before = staticmethod(before)
    directory.FileSystemWriter = Writer  # type: ignore[misc]
    try:
        yield
    finally:
        directory.FileSystemWriter = FileSystemWriter  # type: ignore[misc]


class Gate:
    """Keeps one rank from writing until it is opened."""

    def __init__(self, rank: int) -> None:
        self.rank, self.waits, self._open = rank, False, threading.Event()

    def __call__(self) -> None:
        if models.rank() == self.rank:
            self.waits = True
            assert self._open.wait(60), "nobody has opened the gate"
            self.waits = False

    def open(self) -> None:
        self._open.set()


class At(L.Callback):
    """Calls ``action`` after a step."""

    def __init__(self, step: int, action: Callable[[L.Trainer], Any]) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.action(trainer)


def _names(folder: str | Path) -> list[str]:
    dist.barrier()
    names = sorted(os.listdir(folder))
    dist.barrier()
    return names


# ---- what is written, and when ----


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2))])
@on_ranks()
def test_saving_while_training(stage: int, tmp_path: Path) -> None:
    """Three steps pass while a rank cannot write; the directory equals one saved at the call, so does a resumed run."""
    folder = str(tmp_path)
    gate, live, seen = Gate(1), ["before"], []

    def save(trainer: L.Trainer) -> None:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint()
        checkpoint["live"] = live
        directory.save(checkpoint, Path(folder, "now.ckpt"))
        with _writing(gate):
            trainer.strategy.save_checkpoint(checkpoint, f"{folder}/later.ckpt")
            until = time.monotonic() + 40
            while models.rank() == 1 and not gate.waits and time.monotonic() < until:
                time.sleep(0.01)  # the writer is made in the thread
            dist.barrier()
        live.append("after")

    def look(trainer: L.Trainer) -> None:
        assert gate.waits == (models.rank() == 1)
        seen.append(_names(folder))
        gate.open()

    strategy, look_end = _background(stage), Look("end")
    checkpoints.fit(Saved(), strategy, callbacks=[At(1, save), At(4, look), look_end], **SAVING)
    [temporary] = [name for name in seen[0] if name != "now.ckpt"]  # three steps of training later
    assert re.fullmatch(r"\.zerocompile-saving-\w{8}-\w{16}", temporary), temporary  # one name on all ranks
    assert _names(folder) == ["later.ckpt", "now.ckpt"]
    now, later = (_load_distributed_checkpoint(Path(folder, f"{name}.ckpt")) for name in ("now", "later"))
    assert checkpoints.differences(now, later) == [] and later["live"] == ["before"] and later["global_step"] == 1
    for name in ("__0_0.distcp", "__1_0.distcp", "meta.pt") if models.device() == "cpu" else ():
        assert Path(folder, "now.ckpt", name).read_bytes() == Path(folder, "later.ckpt", name).read_bytes(), name
    assert checkpoints.differences(later["model"], look_end.state["weights"])  # what was saved has changed since
    assert strategy._checkpoints._background._group is None and not strategy.checkpoint_io._executor  # type: ignore[attr-defined]
    resumed = {}
    for name in ("now", "later"):
        module, look_end = Saved(), Look("end")
        checkpoints.fit(module, _background(stage), 1, f"{folder}/{name}.ckpt", callbacks=[look_end])
        resumed[name] = (module.losses, look_end.state)
    assert len(resumed["later"][0]) == 3 and checkpoints.differences(resumed["later"], resumed["now"]) == []


@on_ranks()
def test_older_directories_go_after_newer_ones_came(tmp_path: Path) -> None:
    """While the second save is held up nothing is removed; in the end only the last is there."""
    folder = str(tmp_path)
    gate, seen, strategy = Gate(0), [], _background()
    one = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    writes: list[Callable[[], None]] = [lambda: None, gate, gate, gate]

    def look(trainer: L.Trainer) -> None:  # before ModelCheckpoint, which comes last, saves this step
        if trainer.global_step == 2:
            strategy.checkpoint_io._executor.submit(int).result()  # type: ignore[attr-defined]
        seen.append([name for name in _names(folder) if name.startswith("step")])
        if trainer.global_step == 4:
            gate.open()

    with _writing(lambda: writes.pop(0)()):
        checkpoints.fit(Saved(), strategy, callbacks=[one, *(At(step, look) for step in (2, 3, 4))], **SAVING)
    assert seen == [["step=1.ckpt"]] * 3 and _names(folder) == ["step=4.ckpt"]
    module = Saved()
    checkpoints.fit(module, _background(), 2, f"{folder}/step=4.ckpt")
    assert len(module.losses) == 4


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks()
def test_loading_waits_for_saving(kind: str, tmp_path: Path) -> None:
    """A checkpoint that is still on its way is loaded when it is there, and not the one before it."""
    folder = str(tmp_path)
    plugin, path = AsyncCheckpointIO(), f"{folder}/a.ckpt"
    trainer = checkpoints.fit(Saved(), checkpoints.strategy(kind, 3), plugins=[plugin])
    save = torch.save

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(0.5)
        save(*args, **options)

    if kind == "full":
        torch.save = slow  # type: ignore[assignment]
    try:
        with _writing(lambda: time.sleep(0.5)):
            for epoch in (1, 2):
                trainer.save_checkpoint(path)
                module = Saved()
                trainer.fit_loop.max_epochs = epoch + 1
                trainer.fit(module, checkpoints.data(), ckpt_path=path)
                assert len(module.losses) == 4 and module.seen == 4 * (epoch + 1)
    finally:
        torch.save = save


@on_ranks()
def test_a_job_that_is_requeued_has_its_checkpoint(tmp_path: Path) -> None:
    """Behind this save SLURM ends the job: it is waited for."""
    folder = str(tmp_path)
    trainer = checkpoints.fit(Saved(), _background())
    with _writing(lambda: time.sleep(0.3)):
        trainer.save_checkpoint(f"{folder}/hpc_ckpt_1.ckpt")
    assert os.listdir(folder) == ["hpc_ckpt_1.ckpt"]


@pytest.mark.long
@on_ranks()
def test_nothing_is_left_of_a_fit(tmp_path: Path) -> None:
    """Threads, files and tensors are the same after the third fit and the last: the thread and its group are gone."""
    folder = str(tmp_path)
    seen = []
    for number in range(8):
        every = ModelCheckpoint(f"{folder}/{number}", "{step}", every_n_train_steps=1, save_top_k=-1)
        checkpoints.fit(Saved(), _background(), callbacks=[every], **SAVING)
        seen.append(alive.held_by_process())
    for name in ("python threads", "threads", "files", "tensors"):
        assert seen[-1][name] == seen[2][name], (name, [one[name] for one in seen])


# ---- what fails ----


def _no_space(rank: int) -> None:
    if models.rank() == rank:
        raise OSError(28, "No space left on device")


@on_ranks()
def test_one_rank_cannot_write(tmp_path: Path) -> None:
    """All ranks raise, at the next save or at the end of the fit; the checkpoints before it load, no litter is left."""
    folder = str(tmp_path)
    plugin = AsyncCheckpointIO()
    for name, step in (("next", 2), ("end", 4)):
        here = f"{folder}/{name}"
        every = ModelCheckpoint(here, "{step}", every_n_train_steps=1, save_top_k=-1)
        writes = [lambda: None] * (step - 1) + [lambda: _no_space(1)] + [lambda: None] * 9
        module = Saved()
        settle = At(step + 1, lambda trainer: plugin._executor.submit(int).result())  # type: ignore[union-attr]
        with (
            _writing(lambda writes=writes: writes.pop(0)()),  # type: ignore[misc]
            pytest.raises(RuntimeError, match=rf"Saving the checkpoint `.*step={step}\.ckpt` failed.*rank 1: .*space"),
        ):
            checkpoints.fit(
                module, checkpoints.strategy("sharded", 3), callbacks=[every, settle], plugins=[plugin], **SAVING
            )
        assert len(module.losses) == min(step + 1, 4), len(module.losses)  # at the next save, or at the end
        assert _names(here) == [f"step={number}.ckpt" for number in range(1, step)]
        again = Saved()
        checkpoints.fit(again, checkpoints.strategy("sharded", 3), 1, f"{here}/step={step - 1}.ckpt", plugins=[plugin])
        assert len(again.losses) == 5 - step
    trainer = checkpoints.fit(Saved(), strategy := _background())
    with _writing(lambda: _no_space(0)):
        trainer.save_checkpoint(f"{folder}/a.ckpt")
        with pytest.raises(RuntimeError, match=r"rank 0: .*No space"):
            trainer.strategy.load_checkpoint(f"{folder}/a.ckpt")  # tells it, too
    trainer.save_checkpoint(f"{folder}/a.ckpt")  # what was told is not told again
    strategy.checkpoint_io.teardown()
    assert _names(folder) == ["a.ckpt", "end", "next"]


@on_ranks()
def test_what_raises_at_once(tmp_path: Path) -> None:
    """On every rank: what can be found at the call, and plugins that would be passed by."""
    folder = str(tmp_path)
    Path(folder, "mine").mkdir(exist_ok=True)
    trainer = checkpoints.fit(Saved(), _background())
    with pytest.raises((IsADirectoryError, RuntimeError), match="is a directory and no checkpoint"):
        trainer.save_checkpoint(f"{folder}/mine")
    state = trainer._checkpoint_connector.dump_checkpoint()
    state["mine"] = lambda: 0  # cannot be pickled
    with pytest.raises((AttributeError, RuntimeError, TypeError), match=r"pickle|local"):
        trainer.strategy.save_checkpoint(state, f"{folder}/a.ckpt")
    assert _names(folder) == ["mine"]

    class Own(AsyncCheckpointIO):
        pass

    for plugin, name in ((Own(), "Own"), (AsyncCheckpointIO(FullDisk()), r"AsyncCheckpointIO\(FullDisk\)")):
        with pytest.raises(MisconfigurationException, match=f"`{name}` cannot write state_dict_type='sharded'"):
            checkpoints.fit(Saved(), checkpoints.strategy("sharded", 3), plugins=[plugin])
    checkpoints.fit(Saved(), checkpoints.strategy("sharded", 3), plugins=[AsyncCheckpointIO(TorchCheckpointIO())])


class Boom(Exception):
    """The user's."""


@on_ranks()
def test_a_failed_fit_does_not_wait(tmp_path: Path) -> None:
    """The user's exception comes out while a rank cannot write; the checkpoint comes whole all the same."""
    folder = str(tmp_path)
    gate, plugin, path = Gate(1), AsyncCheckpointIO(), f"{folder}/a.ckpt"

    def fail(trainer: L.Trainer) -> None:
        raise Boom

    callbacks = [At(1, lambda trainer: trainer.save_checkpoint(path)), At(2, fail)]
    start = time.monotonic()
    with _writing(gate):
        with pytest.raises(Boom):
            strategy = checkpoints.strategy("sharded", 3, timeout=timedelta(seconds=30))
            checkpoints.fit(Saved(), strategy, callbacks=callbacks, plugins=[plugin], **SAVING)
        assert time.monotonic() - start < 25 and not Path(path).exists()
        threading.Timer(0.5, gate.open).start()
        module = Saved()
        checkpoints.fit(
            module, checkpoints.strategy("sharded", 3), 1, path, plugins=[plugin]
        )  # waits for what is still on its way
        assert len(module.losses) == 3


def _killed(folder: str) -> None:
    save = At(1, lambda trainer: trainer.save_checkpoint(f"{folder}/a.ckpt"))
    checkpoints.fit(Saved(), _background(), callbacks=[save])

    def die(file: Path) -> str:
        os._exit(3)  # its shards are written, the checkpoint is not finished

    if models.rank() == 1:
        files.checksum = die
    try:
        checkpoints.fit(Saved(), _background(), 3, callbacks=[save])
    except CommunicationError:
        raise
    except Exception as error:
        raise AssertionError("another error") from error


def _resumed(folder: str) -> None:
    module, strategy = Saved(), _background()
    trainer = checkpoints.fit(module, strategy, 1, f"{folder}/a.ckpt")
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    strategy.checkpoint_io.teardown()
    assert len(module.losses) == 3 and _names(folder) == ["a.ckpt"]


def test_a_rank_is_killed_while_it_saves(ranks: Ranks, tmp_path: Path) -> None:
    """The others end; the former checkpoint loads, and the next save cleans up. (NCCL's watchdog ends what waits on a
    device, at the timeout of the process group.)"""
    text = ranks.expect_error(_killed, str(tmp_path))
    assert "rank 1 died with exit code 3" in text, text
    assert ranks.device == "cuda" or "CommunicationError: zerocompile: rank 0 lost" in text, text
    ranks.run(_resumed, str(tmp_path))


# ---- the end of the process ----

SCRIPT = """
import sys, time, torch
from datetime import timedelta
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.checkpoint import files
from tests.support import models

checksum = files.checksum

def slow(file):
    time.sleep(2)
    return checksum(file)

class Saving(models.Module):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        files.checksum = slow
        self.trainer.save_checkpoint(sys.argv[1])
        raise ValueError("boom")

torch.set_num_threads(1)
strategy = ZeroCompileStrategy(compile=False, state_dict_type="sharded", timeout=timedelta(seconds=10))
trainer = models.make_trainer(strategy, max_steps=1, plugins=[AsyncCheckpointIO()])
module = models.Module() if sys.argv[2] == "succeeds" else Saving()
trainer.fit(module, models.Batches(models.rank()))
files.checksum = slow
trainer.save_checkpoint(sys.argv[1])
"""


@pytest.mark.long
@pytest.mark.parametrize("end", ["succeeds", "raises"])
def test_the_process_ends_with_its_checkpoint(end: str, tmp_path: Path) -> None:
    """Python waits for the thread, also after an exception."""
    path = tmp_path / "a.ckpt"
    with two_scripts(SCRIPT, str(path), end) as ranks:
        for rank in ranks:
            _, errors = rank.communicate(timeout=100)
            assert rank.returncode == (0 if end == "succeeds" else 1) and ("boom" in errors) == (end == "raises"), (
                errors
            )
    assert os.listdir(tmp_path) == ["a.ckpt"] and (path / "checksums.json").is_file()
