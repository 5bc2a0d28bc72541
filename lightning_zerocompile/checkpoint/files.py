"""Checkpoints on disk: they appear whole or not at all, and damage is found before anything is loaded.

[Note: replacing a directory] A file takes the place of another file in one operation. A directory takes the place of
another one in one operation only where the filesystem can exchange two names. Elsewhere the old directory is moved
aside, to a name that is derived from its own, the new one moves in, and the old one is removed. A job that is killed
between the two moves leaves the old checkpoint under the derived name. :func:`locate` then finds it for the path that
was asked for, and ``ckpt_path="last"`` finds it, too, since the name matches its pattern.

[Note: drafts] A draft is a checkpoint that is still being written. Its name is one that no other save has, since two
jobs may save to one path at once: for example a requeued job, and its predecessor that is not dead yet. The job that
finishes last wins. Each draft is locked by the process that writes it, and the kernel drops the lock of a process that
dies. So a later save knows which drafts are dead and removes them. Where the filesystem keeps locks local, a lock tells
nothing about a process on another machine. So drafts of other machines, and of this machine before its last start, are
removed only when their lock is free and nothing has been written to them for a day.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import stat
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

META = _METADATA_FILENAME  # Lightning's: what its consolidation commands look for in a directory


def local_path(path: _PATH) -> Path | None:
    """The absolute local path, or None for one on a remote filesystem."""
    return Path(get_filesystem(path)._strip_protocol(str(path))) if _is_local_file_protocol(path) else None


_SAVING, _REMOVING = ".zerocompile-saving-", ".zerocompile-removing-"
_ABANDONED = 24 * 3600.0  # seconds without a write, after which another machine's draft counts as dead
_NO_REPLACE, _EXCHANGE = 1, 2  # of Linux' renameat2
_AT_FDCWD = -100
_ATTEMPTS = 100
# errors that say that another job's checkpoint has appeared meanwhile where this one is to go
_MEANWHILE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


# ---- names beside a checkpoint ----


def _machine() -> str:
    """Identifies this machine since its last start: on it a lock tells for certain whether a process lives."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = platform.node()
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


def _unique(prefix: str) -> str:
    # without the checkpoint's own name: Lightning searches for that when it looks for the last or the HPC checkpoint
    return f"{prefix}{_machine()}-{secrets.token_hex(8)}"


def previous_name(path: Path) -> Path:
    """Where the checkpoint at ``path`` is while another takes its place: see [Note: replacing a directory]."""
    return path.with_name(f"{path.stem}.zerocompile-previous{path.suffix}")


# ---- writing ----


def write(path: Path, content: Callable[[IO[bytes]], Any]) -> None:
    """Writes a new file through to the disk.

    Raises:
        FileExistsError: something has that name already, even if it is a link.
    """
    with os.fdopen(_create(path), "wb") as file:
        _write(file, content)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _write(file: IO[bytes], content: Callable[[IO[bytes]], Any]) -> None:
    content(file)
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Writes the names in a directory through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Draft:
    """A checkpoint that is still being written and will take its place at ``target``: see [Note: drafts].

    Args:
        target: where the finished checkpoint will be. Its folder is made.
        directory: whether the checkpoint is a directory.

    Raises:
        IsADirectoryError: ``target`` is a directory that is no checkpoint.
    """

    def __init__(self, target: Path, directory: bool) -> None:
        check_replaceable(target)
        self._target, self._descriptor = target, -1
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_dead_drafts(target.parent)
        for _ in range(_ATTEMPTS):
            self.path = target.with_name(_unique(_SAVING))
            if self._begin(directory):
                return
        raise RuntimeError(f"Something keeps removing the files that are being written for the checkpoint `{target}`.")

    def _begin(self, directory: bool) -> bool:
        if directory:
            self.path.mkdir()
        else:
            self._descriptor = _create(self.path)
        begun = False
        try:
            if directory:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            # before this call another job may have taken the draft for a dead one's and removed it
            begun = _lock(self._descriptor) is not False and _is_at(self._descriptor, self.path)
        except FileNotFoundError:
            pass
        finally:
            if not begun:
                _delete(self.path)
                self._close()
        return begun

    def write(self, content: Callable[[IO[bytes]], Any]) -> None:
        """Writes a draft that is a file, through to the disk."""
        with os.fdopen(os.dup(self._descriptor), "wb") as file:
            _write(file, content)

    def commit(self, replace: bool = True) -> None:
        """Lets the finished draft take its place. All files of a directory must be on the disk.

        Raises:
            FileExistsError: something is at that place already, and ``replace`` is False.
        """
        if replace:
            commit(self.path, self._target)
        elif not _rename(self.path, self._target, _NO_REPLACE):
            if os.path.lexists(self._target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self._target))
            os.rename(self.path, self._target)
        self._close()

    def discard(self) -> None:
        """Removes what has been written; after :meth:`commit` this does nothing."""
        if self._descriptor >= 0:
            try:
                _delete(self.path)
            finally:
                self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):  # a fork shares the lock, so closing alone may not release it
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether this process holds the lock of an open file now; None where the filesystem has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def remove_dead_drafts(folder: Path) -> None:
    """Removes what killed saves and removals of this user have left in a folder; drafts that may be alive stay."""
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if entry.name.startswith((_SAVING, _REMOVING))]
    for entry in found:
        with suppress(OSError):  # another job may remove it at the same time
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid() or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                continue
            if entry.name.startswith(_REMOVING):
                _delete(Path(entry.path))
            else:
                _remove_if_dead(Path(entry.path))


def _remove_if_dead(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if _lock(descriptor) is not True or not _is_at(descriptor, path):
            return
        if path.name.startswith(f"{_SAVING}{_machine()}-") or time.time() - _last_write(path) > _ABANDONED:
            _delete(path)
    finally:
        os.close(descriptor)


def _last_write(path: Path) -> float:
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    return max(file.stat(follow_symlinks=False).st_mtime for file in files)


# ---- appearing and going ----


def check_replaceable(path: Path) -> None:
    """Raises if a checkpoint at ``path`` would destroy something else.

    Raises:
        IsADirectoryError: ``path`` is a directory that is no checkpoint.
    """
    while path.is_dir() and not path.is_symlink() and not (path / META).is_file():
        # Another job may have moved it in between, and put a checkpoint there: then there is another look.
        if _is_no_checkpoint(path):
            raise IsADirectoryError(
                f"`{path}` is a directory and no checkpoint; save under another name, or remove it."
            )


def _is_no_checkpoint(path: Path) -> bool:
    """Whether one and the same directory is at ``path`` before and after it was seen to be no checkpoint."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # another job has put something else there
            return False
        raise
    try:
        os.stat(META, dir_fd=descriptor)
    except FileNotFoundError:
        return _is_at(descriptor, path)
    finally:
        os.close(descriptor)
    return False


def commit(temporary: Path, path: Path) -> None:
    """Lets the finished file or directory take the place of ``path``; see [Note: replacing a directory]."""
    if temporary.is_dir() or (path.is_dir() and not path.is_symlink()):
        check_replaceable(path)
        _exchange(temporary, path)
    else:
        os.replace(temporary, path)
    sync_directory(path.parent)
    _delete(temporary)  # if the names were exchanged this is the old checkpoint
    remove(previous_name(path))


def _exchange(temporary: Path, path: Path) -> None:
    """Lets ``temporary`` take the place of whatever is at ``path``, also while other jobs do the same."""
    previous = previous_name(path)
    for _ in range(_ATTEMPTS):
        if _rename(temporary, path, _EXCHANGE):
            return
        try:
            if os.path.lexists(path):
                remove(previous)  # left by a save that was killed after its checkpoint had moved in
                with suppress(FileNotFoundError):  # another job has moved it
                    os.rename(path, previous)
            os.rename(temporary, path)
            return
        except OSError as error:
            if error.errno in _MEANWHILE:
                continue
            if not os.path.lexists(path):
                with suppress(OSError):
                    os.rename(previous, path)
            raise
    raise RuntimeError(f"Other jobs keep replacing `{path}`. Let one job save to it.")


def _rename(source: Path, target: Path, flag: int) -> bool:
    """Linux' renameat2 with one of its flags; False if it fails, for whatever reason."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return function is not None and function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0


def remove(path: Path) -> None:
    """Removes a checkpoint. At no time is there a half-removed one under the checkpoint's name."""
    while os.path.lexists(path):
        with suppress(FileNotFoundError, IsADirectoryError):  # another job removes it, or has put another one there
            if path.is_dir() and not path.is_symlink():
                going = path.with_name(_unique(_REMOVING))
                os.rename(path, going)
                remove_dead_drafts(path.parent)
                _delete(going)
            else:
                path.unlink()
            return


def _delete(path: Path) -> None:
    """Removes a file, link or directory, if it is there."""
    while os.path.lexists(path):
        with suppress(FileNotFoundError):  # another job may remove it at the same time
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def locate(path: Path) -> Path:
    """``path``, or the old checkpoint if a save was killed while it replaced that one."""
    previous = previous_name(path)
    for _ in range(10):  # another job may be between its two moves
        if path.exists() or not previous.exists():
            return path
        time.sleep(0.05)
    warnings.warn(
        f"`{path}` does not exist: the job was killed while another checkpoint took its place. The one that was there "
        f"before is used, `{previous}`.",
        stacklevel=2,
    )
    return previous


# ---- damage ----


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch.save begin


def check_file(path: Path, torch_format: bool = True) -> None:
    """Raises if a file of ``torch.save`` does not have the content with which it was written.

    Args:
        path: of the file.
        torch_format: whether the file can only be one of ``torch.save``; else it may have another format.

    Raises:
        RuntimeError: the file is cut short, does not begin as it was written, or has a record that does not match the
            checksum that torch keeps of it. The message names the file.
    """
    with open(path, "rb") as file:
        beginning = file.read(len(_LEGACY))
    if beginning[:4] != _ZIP:
        if beginning == _LEGACY:
            return  # an old format, which has no checksums
        if zipfile.is_zipfile(path):
            raise damaged(path, "its first bytes are not those that it was written with")
        if torch_format:
            raise damaged(path, "it does not begin as a file of torch.save" if beginning else "it is empty")
        return
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip() if torch.serialization.get_crc32_options() else None
    # OSError, OverflowError: damage has changed a record's place to one outside the file
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, OSError, OverflowError) as error:
        raise damaged(path, str(error)) from error
    if record is not None:
        raise damaged(path, f"its record `{record}` does not match its checksum")


def damaged(path: Path | str, reason: str) -> RuntimeError:
    """The error for a checkpoint that is not what it was when it was written."""
    return RuntimeError(f"The checkpoint `{path}` is damaged: {reason}. Load another one.")


@contextmanager
def unreadable(path: Path | str) -> Iterator[None]:
    """Turns torch's errors about bytes that make no sense into one that names the file and the remedy.

    Raises:
        RuntimeError: names the file.
    """
    try:
        yield
    except (EOFError, IndexError, KeyError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise damaged(path, f"it cannot be read ({type(error).__name__}: {error})") from error
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):  # torch's reader of such files
            raise
        raise damaged(path, str(error).splitlines()[0].rstrip(".")) from error


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's single file, which takes its place only when all of it is on the disk.

    Remote paths are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """As Lightning's.

        Raises:
            TypeError: ``storage_options`` are given.
            IsADirectoryError: ``path`` is a directory that is no checkpoint.
        """
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        draft = Draft(local, directory=False)
        try:
            draft.write(lambda file: torch.save(checkpoint, file))
            draft.commit()
        finally:
            draft.discard()

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        local = local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        else:
            remove(local)
