"""Checkpoints that are damaged, dangerous or could not be written: what is wrong is named, on every rank."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.checkpoint import directory, files
from tests.support import checkpoints, models
from tests.support.checkpoints import FullDisk, Saved
from tests.support.harness import Ranks, on_ranks


def _fit(module: L.LightningModule, kind: str, epochs: int = 1, path: Path | None = None, **more: Any) -> L.Trainer:
    strategy = ZeroCompileStrategy(compile=False, state_dict_type=kind)  # type: ignore[arg-type]
    trainer = models.make_trainer(strategy, max_epochs=epochs, limit_val_batches=0, **more)
    trainer.fit(module, checkpoints.data(), ckpt_path=path)
    return trainer


def _on_first(action: Any) -> None:
    """Rank 0 changes files while the others wait."""
    dist.barrier()
    if models.rank() == 0:
        action()
    dist.barrier()


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# ---- damage ----


@on_ranks()
def test_damaged_directory(tmp_path: Path) -> None:
    """A flipped bit in any file, and any missing file, is reported on every rank with the file's name."""
    folder = str(tmp_path)
    whole, errors = Path(folder, "a.ckpt"), {}
    _fit(Saved(), "sharded").save_checkpoint(whole)
    names = sorted(os.listdir(whole))
    for name in names:
        for what, damage in (("flipped", _flip), ("missing", Path.unlink)):
            path = Path(folder, f"{what}{name}.ckpt")

            def copy(path: Path = path, damage: Any = damage, name: str = name) -> None:
                shutil.copytree(whole, path)
                damage(path / name)

            _on_first(copy)
            try:
                directory.load(path, {}, None, True)
            except RuntimeError as error:
                errors[f"{what} {name}"] = str(error)
    with pytest.raises(RuntimeError, match=r"flipped__1_0.distcp.ckpt` is damaged: `__1_0.distcp` does not match"):
        _fit(Saved(), "full", 2, Path(folder, "flipped__1_0.distcp.ckpt"))
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt", "checksums.json"):
        assert f"`{name}` does not match its checksum" in errors[f"flipped {name}"]
        if name != "checksums.json":  # without it the directory is one of Lightning's
            assert f"`{name}` is missing" in errors[f"missing {name}"]


@on_ranks()
def test_damaged_file(tmp_path: Path) -> None:
    """A flipped bit in a weight, a file that is cut short, and none at all."""
    folder = str(tmp_path)
    whole = Path(folder, "a.ckpt")
    _fit(Saved(), "full").save_checkpoint(whole)
    size = whole.stat().st_size
    for name, content in (("cut", slice(0, size // 2)), ("short", slice(0, size - 1))):
        path = Path(folder, f"{name}.ckpt")
        _on_first(lambda path=path, content=content: path.write_bytes(whole.read_bytes()[content]))  # type: ignore[misc]
        with pytest.raises(RuntimeError, match=rf"{name}\.ckpt` is damaged"):
            _fit(Saved(), "sharded", 2, path)
    weight = torch.load(whole)["state_dict"]["model.layers.0.up.weight"].numpy().tobytes()

    def flip_weight() -> None:
        content = bytearray(whole.read_bytes())
        content[content.index(weight) + 17] ^= 4
        whole.write_bytes(content)

    _on_first(flip_weight)
    with pytest.raises(RuntimeError, match=r"a\.ckpt` is damaged: its record `.*data/\d+` does not match its checksum"):
        _fit(Saved(), "sharded", 2, whole)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _fit(Saved(), "sharded", 2, Path(folder, "nowhere.ckpt"))


# ---- code in checkpoints ----


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (self.trace,)


class Trapped(models.Module):
    """Has an object where it is asked for: in the rest of the checkpoint, or among the model's values."""

    def __init__(self, place: str, trace: str) -> None:
        super().__init__()
        self.place, self.trap = place, Trap(trace)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        target = checkpoint["state_dict"] if self.place == "value" else checkpoint
        target["extra"] = self.trap


@on_ranks()
def test_nothing_is_run_when_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """An object in the rest, among the values or in the index is refused by name, and was not made."""
    folder = str(tmp_path)
    trace = Path(folder, "trace")
    for kind, place in (("full", "rest"), ("sharded", "rest"), ("sharded", "value")):
        path = Path(folder, f"{kind}-{place}.ckpt")
        _fit(Trapped(place, str(trace)), kind).save_checkpoint(path)
        name = {"full": "full-rest.ckpt", "rest": "meta.pt", "value": "model.extra"}[
            "full" if kind == "full" else place
        ]
        with pytest.raises(pickle.UnpicklingError, match=rf"{name}` holds more than tensors.*add_safe_globals"):
            _fit(models.Module(), "full", 2, path)
        assert not trace.exists()
    index = Path(folder, "sharded-rest.ckpt")

    module, name, argument = (
        b"\x8c" + bytes([len(text)]) + text.encode()
        for text in ("torch.distributed.checkpoint.metadata", "os.mkdir", str(trace))
    )
    borrowed = b"\x80\x04" + module + name + b"\x93" + argument + b"\x85R."  # mkdir, as an allowed module's
    _on_first((index / "checksums.json").unlink)  # as another strategy would have written it
    for content in (pickle.dumps(Trap(str(trace))), borrowed):
        _on_first(lambda content=content: (index / ".metadata").write_bytes(content))  # type: ignore[misc]
        with pytest.raises(pickle.UnpicklingError, match=r"\.metadata` holds more than tensors.*mkdir"):
            _fit(models.Module(), "full", 2, index)
        assert not trace.exists()


class Evaluated(models.Module):
    """Has every kind of step, and a path among its hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"data": Path("x")})
        self.found: list[Any] = []

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found.append(checkpoint["hyper_parameters"])


@on_ranks()
def test_weights_only_false_trusts_the_checkpoint(tmp_path: Path) -> None:
    """What is refused otherwise loads, through every entry point of the Trainer."""
    folder = str(tmp_path)
    for kind in ("full", "sharded"):
        path, module = Path(folder, f"{kind}.ckpt"), Evaluated()
        _fit(Evaluated(), kind).save_checkpoint(path)
        trainer = models.make_trainer(ZeroCompileStrategy(compile=False), max_epochs=2, limit_val_batches=1)
        trainer.fit(module, checkpoints.data(), None, None, path, False)
        trainer.validate(module, checkpoints.data(), ckpt_path=path, weights_only=False, verbose=False)
        trainer.test(module, checkpoints.data(), ckpt_path=path, weights_only=False, verbose=False)
        trainer.predict(module, checkpoints.data(), ckpt_path=path, weights_only=False)
        assert module.found == [{"data": Path("x")}] * 4 and len(module.losses) == 4
        with pytest.raises(pickle.UnpicklingError, match=r"pass `weights_only=False` to `Trainer\.fit`"):
            trainer.validate(Evaluated(), checkpoints.data(), ckpt_path=path)  # what was said before counts no longer


# ---- what raises ----


class Careless(Saved):
    """Puts shards beside the model's state, on one rank or on all."""

    where: tuple[int, ...] = ()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weight = self.model._parameters["scale"]
        checkpoint["average"] = {"scale": weight if models.rank() in self.where else 0}


@on_ranks()
def test_refusals(tmp_path: Path) -> None:
    """On every rank, without a hang; the checkpoint that is there stays, and nothing is left beside it."""
    folder = str(tmp_path)
    Path(folder, "mine").mkdir(exist_ok=True)
    Path(folder, "file").touch()
    for kind in ("full", "sharded"):
        saved = f"{folder}/{kind}.ckpt"
        trainer = _fit(Saved(), kind)
        trainer.save_checkpoint(saved)
        with pytest.raises((IsADirectoryError, RuntimeError), match="is a directory and no checkpoint"):
            trainer.save_checkpoint(f"{folder}/mine")
        with pytest.raises((OSError, RuntimeError), match=r"file"):
            trainer.save_checkpoint(f"{folder}/file/a.ckpt")
        with pytest.raises((TypeError, RuntimeError), match="storage_options"):
            trainer.save_checkpoint(saved, storage_options={})
        for where in ((0, 1), (1,) if kind == "sharded" else (0,)):
            module = Careless()
            module.where = where
            shards = models.make_trainer(
                ZeroCompileStrategy(compile=False, state_dict_type=kind, unshard_after_fit=False)
            )
            shards.fit_loop.max_epochs = 1
            shards.fit(module, checkpoints.data())
            assert isinstance(module.model._parameters["scale"], DTensor)
            with pytest.raises((TypeError, RuntimeError), match=r"checkpoint\['average'\]\['scale'\].*full_tensor"):
                shards.save_checkpoint(saved)
        _fit(Saved(), kind, 2, Path(saved))  # none of it has touched what was there
    with pytest.raises(ValueError, match="state_dict_type='sharded' writes to a filesystem"):
        trainer.save_checkpoint("memory://a.ckpt")
    with pytest.raises(RuntimeError, match="no checkpoint"):
        _fit(Saved(), "full", 2, Path(folder, "mine"))
    with pytest.raises(MisconfigurationException, match="`FullDisk` cannot write state_dict_type='sharded'"):
        _fit(Saved(), "sharded", plugins=[FullDisk()])
    there = sorted(p.name for p in Path(folder).iterdir())
    assert there == ["file", "full.ckpt", "mine", "sharded.ckpt"], there


# ---- saves that fail ----


@on_ranks()
def test_failing_save(tmp_path: Path) -> None:
    """One rank's failure raises on all of them; the former checkpoint stays and nothing is left beside it."""
    folder = str(tmp_path)
    path = Path(folder, "a.ckpt")
    trainer = _fit(models.Module(optimizer="adamw"), "sharded")
    trainer.save_checkpoint(path)
    before = torch.load(path / "meta.pt")
    state = trainer._checkpoint_connector.dump_checkpoint()
    if models.rank() == 1:
        state["state_dict"]["extra"] = lambda: 0  # cannot be pickled, and only this rank has it
    with pytest.raises(RuntimeError, match=r"Saving the checkpoint `.*a.ckpt` failed.*rank 1: .*pickle"):
        trainer.strategy.save_checkpoint(state, path)
    assert torch.load(path / "meta.pt") == before
    assert models.rank() > 0 or os.listdir(folder) == ["a.ckpt"]  # rank 0 cleans up
    full = ZeroCompileStrategy(compile=False, checkpoint_io=FullDisk())
    trainer = models.make_trainer(full, max_epochs=1)
    trainer.fit(models.Module(), checkpoints.data())
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        trainer.save_checkpoint(path)
    late = ModelCheckpoint(folder, "late", every_n_epochs=1)
    background = AsyncCheckpointIO(FullDisk())
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        _fit(models.Module(), "full", plugins=[background], callbacks=[late], enable_checkpointing=True)


def _killed(folder: str) -> None:
    path = Path(folder, "a.ckpt")
    trainer = _fit(Saved(), "sharded")
    trainer.save_checkpoint(path)
    if models.rank() == 1:
        files.checksum = lambda file: os._exit(3)  # its shards are written, the checkpoint is not finished
    trainer.save_checkpoint(path)


def _resumed(folder: str) -> None:
    module = Saved()
    _fit(module, "sharded", 2, Path(folder, "a.ckpt")).save_checkpoint(Path(folder, "a.ckpt"))
    assert len(module.losses) == 4 and os.listdir(folder) == ["a.ckpt"]


def test_killed_rank(ranks: Ranks, tmp_path: Path) -> None:
    """The others cannot finish; the former checkpoint loads, and the next save cleans up."""
    assert "rank 1 died" in ranks.expect_error(_killed, str(tmp_path))
    ranks.run(_resumed, str(tmp_path))
