"""A job that is killed at any file operation of a save leaves a checkpoint that loads, and the next save cleans up."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_zerocompile.checkpoint import Checkpoints
from lightning_zerocompile.files import AtomicCheckpointIO, check_replaceable, local_path, locate

KILLED = 9
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate")


class Model(nn.Module):
    """One sharded parameter."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (1,))
        self.weight = nn.Parameter(DTensor.from_local(torch.zeros(5, 3), mesh, [Shard(0)]))


def _checkpoint(model: Model, sharded: bool, value: int) -> dict[str, Any]:
    weight = torch.full_like(model.weight.detach(), value)
    moment = torch.full_like(model.weight.detach(), 10 * value)
    if not sharded:
        weight, moment = weight.full_tensor(), moment.full_tensor()  # type: ignore[attr-defined]
    entry = {"exp_avg": moment, "step": torch.tensor(float(value))}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["weight"]}]
    optimizer = {"state": {"weight": entry}, "param_groups": groups}
    return {
        "state_dict": {"weight": weight}, "optimizer_states": [optimizer], "lr_schedulers": [], "mine": value,
    }  # fmt: skip


def _save(sharded: bool, value: int, path: Path, background: bool = False) -> None:
    io = AsyncCheckpointIO(AtomicCheckpointIO()) if background else AtomicCheckpointIO()
    checkpoints = Checkpoints(sharded)
    checkpoints.save(io, _checkpoint(Model(), sharded, value), path, None)
    checkpoints.finish(io)


def _load(path: Path) -> int:
    """The value that the checkpoint was saved with; it must be the same in all parts."""
    model = Model()
    checkpoint = Checkpoints(True).load(AtomicCheckpointIO(), path, None, model, True)
    weight, state = checkpoint["state_dict"]["weight"], checkpoint["optimizer_states"][0]
    entry, value = state["state"]["weight"], checkpoint["mine"]
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    moment = entry["exp_avg"].full_tensor() if isinstance(weight, DTensor) else entry["exp_avg"]
    assert (whole == value).all() and (moment == 10 * value).all() and entry["step"] == value
    assert state["param_groups"][0]["betas"] == (0.9, 0.99)
    return int(value)


def _kill_at(number: int) -> None:
    """Ends the process at the given change to a file, before it is made."""
    seen = 0
    save, sync = torch.save, os.fsync

    def reached() -> bool:
        nonlocal seen
        seen += 1
        return seen == number

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and reached():
            os._exit(KILLED)

    def save_half(value: Any, file: Any, *rest: Any, **options: Any) -> None:
        if not reached():
            save(value, file, *rest, **options)
            return
        content = io.BytesIO()
        save(value, content)
        file.write(content.getvalue()[: content.tell() // 2])
        file.flush()
        os._exit(KILLED)

    def before_sync(descriptor: int) -> None:
        if reached():
            os._exit(KILLED)
        sync(descriptor)

    torch.save, os.fsync = save_half, before_sync  # type: ignore[assignment]
    sys.addaudithook(watch)


def _in_fork(body: Callable[[], int]) -> int:
    """What ``body`` returns in a process of its own with a process group of one."""
    pid = os.fork()
    if pid == 0:
        code = 100
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            code = body()
        finally:
            if code == 100:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _killed_save(sharded: bool, path: Path, number: int, background: bool) -> int:
    _kill_at(number)
    _save(sharded, 2, path, background)
    return 0


def _afterwards(sharded: bool, path: Path) -> int:
    """What is loaded, by the path and as the last checkpoint; then saves once more."""
    found = _load(path)
    candidates = ModelCheckpoint(path.parent)._find_last_checkpoints(None)  # type: ignore[arg-type]
    newest = max(candidates, key=os.path.getmtime)
    assert _load(Path(newest)) == found, candidates
    _save(sharded, 3, path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert _load(path) == 3
    return found


def _kill_everywhere(folder: str, before: bool, after: bool, background: bool) -> list[tuple[int, int]]:
    """How the process ended at each kill point, and the value that was loaded afterwards."""
    old, found = Path(folder, "old", "last.ckpt"), []
    assert _in_fork(lambda: _save(before, 1, old) or 0) == 0
    number, status = 0, KILLED
    while status == KILLED:
        number += 1
        path = Path(folder, str(number), "last.ckpt")
        shutil.copytree(old.parent, path.parent)
        kill = partial(_killed_save, after, path, number, background)
        status = _in_fork(kill)
        found.append((status, _in_fork(lambda path=path: _afterwards(after, path))))  # type: ignore[misc]
    return found


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a fork need not copy what a collection would look at
    while (task := pipe.recv()) is not None:
        pipe.send(_kill_everywhere(*task))


@pytest.fixture(scope="module")
def forking() -> Iterator[Connection]:
    """A process that has imported everything and has no threads, so that it can fork."""
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    yield mine
    mine.send(None)
    process.join()


@pytest.mark.parametrize(
    ("before", "after", "background"),
    [
        pytest.param(False, False, False, marks=pytest.mark.long),
        pytest.param(True, True, False, marks=pytest.mark.long),
        pytest.param(False, True, False, marks=pytest.mark.long),
        pytest.param(True, False, False, marks=pytest.mark.long),
        (True, True, True),
    ],
    ids=["full", "sharded", "sharded-over-full", "full-over-sharded", "sharded-in-background"],
)
def test_killed_at_every_file_operation(
    forking: Connection, before: bool, after: bool, background: bool, tmp_path: Path
) -> None:
    """The old or the new checkpoint, whole; by its path and for ``ckpt_path="last"``; no litter after the next save."""
    forking.send((str(tmp_path), before, after, background))
    found = forking.recv()
    assert found[-1] == (0, 2)
    assert all(status == KILLED and value in (1, 2) for status, value in found[:-1]), found
    values = [value for _, value in found]
    assert values == sorted(values) and values.count(1) >= (15 if after else 4) and values.count(2) >= 2, values


# ---- one process is enough ----


def test_a_directory_that_is_no_checkpoint_stays(tmp_path: Path) -> None:
    """Neither kind replaces it."""
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError, match=r"a` is a directory and no checkpoint"):
        check_replaceable(tmp_path / "a")
    with pytest.raises(IsADirectoryError, match="no checkpoint"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "a")
    assert (tmp_path / "a").is_dir()


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    """What cannot be pickled is found in the middle of the write."""
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": 1}, path)
    with pytest.raises((AttributeError, RuntimeError, TypeError), match=r"pickle|local"):
        AtomicCheckpointIO().save_checkpoint({"a": lambda: 0}, str(path))
    assert torch.load(path) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_where_a_checkpoint_is(tmp_path: Path) -> None:
    """A killed replacement is announced; URLs are not local."""
    path, previous = tmp_path / "a.ckpt", tmp_path / "a.zerocompile-previous.ckpt"
    assert locate(path) == path
    previous.mkdir()
    with pytest.warns(UserWarning, match=r"a\.ckpt` does not exist.*killed"):
        assert locate(path) == previous
    assert local_path(f"file://{path}") == path and local_path("memory://a.ckpt") is None
