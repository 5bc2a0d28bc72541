"""A job that is killed at any file operation of a save leaves a checkpoint that loads, and the next save cleans up."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import io
import multiprocessing
import os
import pickle
import shutil
import sys
import time
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
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_zerocompile.checkpoint import files
from lightning_zerocompile.checkpoint.checkpoints import Checkpoints
from lightning_zerocompile.checkpoint.directory import _IndexUnpickler
from lightning_zerocompile.checkpoint.files import META, AtomicCheckpointIO, check_replaceable, local_path, locate

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
    checkpoints = Checkpoints(sharded, io=AsyncCheckpointIO() if background else None)
    checkpoints.save(_checkpoint(Model(), sharded, value), path, None)
    checkpoints.finish()


def _load(path: Path) -> int:
    """The value that the checkpoint was saved with; it must be the same in all parts."""
    model = Model()
    checkpoint = Checkpoints(True).load(path, None, model, True)
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


def _exit_with(body: Callable[[], int]) -> None:
    code = 100
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        code = body()
    finally:
        if code == 100:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(code)


def _in_fork(body: Callable[[], int]) -> int:
    """What ``body`` returns in a process of its own with a process group of one."""
    pid = os.fork()
    if pid == 0:
        _exit_with(body)
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
        body, *arguments = task
        pipe.send(body(*arguments))


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
    forking.send((_kill_everywhere, str(tmp_path), before, after, background))
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


# ---- two jobs on one path ----


def _write_always(path: str, value: int, sharded: bool, exchanging: bool, seconds: float) -> int:
    if not exchanging:
        files._rename = lambda *_: False  # as on filesystems that cannot exchange two names
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until or count < 3:
        _save(sharded, value, Path(path))
        count += 1
    return 0


def _read_always(path: Path, sharded: bool, exchanging: bool, writers: list[int]) -> tuple[list[int], set[int]]:
    """How the writers ended, and what was found until then; every look must find a whole checkpoint."""
    seen: list[int] = []
    ended: list[int] = []
    while len(ended) < len(writers):
        found = locate(path)
        if not sharded:
            files.check_file(found)
            seen.append(torch.load(found)["mine"])
        else:
            seen.append(int(found.is_dir() or not exchanging))  # two moves leave a moment without either
        for pid in [pid for pid in writers if pid not in ended]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0
                ended.append(pid)
    assert all(seen) and len(seen) >= 24, (seen.count(0), len(seen))
    return seen, set(seen)


def _two_jobs(folder: str, sharded: bool, exchanging: bool) -> tuple[int, list[str], int]:
    path = Path(folder, "a.ckpt")
    assert _in_fork(lambda: _save(sharded, 1, path) or 0) == 0
    writers = []
    for value in (1, 2):
        pid = os.fork()
        if pid == 0:
            _exit_with(partial(_write_always, str(path), value, sharded, exchanging, 3.0))
        writers.append(pid)
    seen, _ = _read_always(path, sharded, exchanging, writers)
    return len(seen), os.listdir(folder), _in_fork(lambda: _load(path))


def test_a_directory_that_another_job_moves_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names cannot be exchanged, a look at what is inside may come between the other job's two moves."""
    path, whole, is_file = tmp_path / "a", tmp_path / "b", Path.is_file
    path.mkdir()
    whole.mkdir()
    (whole / META).touch()
    looks: list[Path] = []

    def between(self: Path) -> bool:
        looks.append(self)
        if len(looks) > 1:
            return is_file(self)
        os.rename(path, tmp_path / "previous")
        os.rename(whole, path)
        return False

    monkeypatch.setattr(Path, "is_file", between)
    check_replaceable(path)
    assert looks == [path / META] * 2
    (path / META).unlink()
    with pytest.raises(IsADirectoryError, match="is a directory and no checkpoint"):
        check_replaceable(path)


@pytest.mark.parametrize(
    ("sharded", "exchanging"), [(False, True), (True, True), (True, False)], ids=["full", "sharded", "two-moves"]
)
def test_two_jobs_save_to_one_path(forking: Connection, sharded: bool, exchanging: bool, tmp_path: Path) -> None:
    """A requeued job and the one before it: no save raises, the last is whole, and no litter stays.

    Each look at a file finds a whole one; each look at a directory finds one, where names can be exchanged.
    """
    forking.send((_two_jobs, str(tmp_path), sharded, exchanging))
    looks, names, value = forking.recv()
    assert looks >= 24 and names == ["a.ckpt"] and value in (1, 2)


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the name: what a link points to is never written to."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    names = iter(["planted", "planted", "free"])
    monkeypatch.setattr(files, "_unique", lambda prefix: next(names))
    for folder, directory in (("a", False), ("b", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "planted").symlink_to(precious)
        with pytest.raises(FileExistsError, match="planted"):
            files.Draft(tmp_path / folder / "x.ckpt", directory)
    with pytest.raises(FileExistsError, match="planted"):
        files.write(tmp_path / "a" / "planted", lambda file: file.write(b"x"))
    AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "a" / "x.ckpt")
    assert precious.read_text() == "mine" and sorted(os.listdir(tmp_path / "a")) == ["planted", "x.ckpt"]
    assert torch.load(tmp_path / "a" / "x.ckpt") == {"a": 1}
    old = tmp_path / f".zerocompile-saving-{hashlib.sha256(b'y.ckpt').hexdigest()[:12]}"
    old.symlink_to(precious)  # the one name that a save had before
    monkeypatch.undo()
    AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "y.ckpt")
    assert precious.read_text() == "mine" and old.is_symlink()


def test_only_dead_drafts_are_removed(tmp_path: Path) -> None:
    """What a living process writes stays, and what another machine may be writing, until it has been idle for a day."""
    living = [files.Draft(tmp_path / f"{directory}.ckpt", directory) for directory in (False, True)]
    mine, other = f".zerocompile-saving-{files._machine()}-", ".zerocompile-saving-00000000-"
    for name in (f"{mine}1", f"{other}1", f"{other}2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").touch()
    (tmp_path / ".zerocompile-removing-x").mkdir()
    (tmp_path / f"{mine}link").symlink_to(tmp_path)
    for path in (tmp_path / f"{other}2" / "shard", tmp_path / f"{other}2"):
        os.utime(path, (0, time.time() - 2 * 24 * 3600))
    held = os.open(tmp_path / f"{other}2", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    files.remove_dead_drafts(tmp_path)
    stay = {draft.path.name for draft in living} | {f"{other}1", f"{mine}link"}
    assert set(os.listdir(tmp_path)) == stay | {f"{other}2"}
    os.close(held)
    files.remove_dead_drafts(tmp_path)
    assert set(os.listdir(tmp_path)) == stay
    living[0].discard()
    living[1].commit()
    living[1].discard()
    assert set(os.listdir(tmp_path)) == {f"{other}1", f"{mine}link", "True.ckpt"}


def test_a_draft_that_is_taken_for_dead_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job may clean up between the making of a draft and its lock."""
    lock, taken = files._lock, []

    def late(descriptor: int) -> bool | None:
        if not taken:
            [name] = os.listdir(tmp_path)
            taken.append(name)
            (tmp_path / name).unlink()
        return lock(descriptor)

    monkeypatch.setattr(files, "_lock", late)
    draft = files.Draft(tmp_path / "a.ckpt", False)
    assert os.listdir(tmp_path) == [draft.path.name] != taken
    monkeypatch.setattr(files, "_lock", lambda _: None)  # no locks on this filesystem: it is written all the same
    draft.discard()
    AtomicCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_every_flipped_byte_is_found_or_harmless(tmp_path: Path) -> None:
    """At any place of a file; also where it is cut, empty or something else. The error names the file."""
    path = tmp_path / "a.ckpt"
    value = {"weight": torch.arange(7.0)}
    AtomicCheckpointIO().save_checkpoint(value, path)
    content = path.read_bytes()
    found = 0
    for place in [*range(64), *range(64, len(content), 7)]:
        damaged = bytearray(content)
        damaged[place] ^= 0x41
        path.write_bytes(damaged)
        try:
            loaded = _load_file(path)
        except RuntimeError as error:
            assert str(path) in str(error) and "damaged" in str(error), (place, error)
            found += 1
        else:
            assert torch.equal(loaded["weight"], value["weight"]), place
    assert found > 30
    for other in (b"", b"P", b"\x00" * 100, content[1:], content[:-30], b"text"):
        path.write_bytes(other)
        with pytest.raises(RuntimeError, match=rf"{path}` is damaged.*Load another one"):
            _load_file(path)
    torch.save(value, path, _use_new_zipfile_serialization=False)
    assert torch.equal(_load_file(path)["weight"], value["weight"])


def _load_file(path: Path) -> Any:
    files.check_file(path)
    with files.unreadable(path):
        return AtomicCheckpointIO().load_checkpoint(path)


class _Attribute:
    """Is pickled as an attribute of something: members of an enum are, by Python before 3.11.4."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, tuple[object, str]]:
        return getattr, (self.owner, self.name)


def test_an_index_of_an_older_python_is_read() -> None:
    """And no other attribute is: its pickle could reach all of Python by them."""
    member = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST

    def read(attribute: _Attribute) -> object:
        return _IndexUnpickler(io.BytesIO(pickle.dumps(attribute))).load()

    assert read(_Attribute(_MEM_FORMAT_ENCODING, member.name)) is member
    for owner, name in ((_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__"), (member, "name")):
        with pytest.raises(pickle.UnpicklingError, match="asks for"):
            read(_Attribute(owner, name))
