"""Checkpoints on disk: they appear whole or not at all, and damage is found before anything is loaded.

[Note: replacing a directory] A file takes the place of another in one operation; a directory cannot. The old one is
moved aside under a name that is derived from its own, the new one moves in, the old one goes. A job that is killed
between the two moves leaves the old checkpoint under that name: :func:`locate` finds it for the path that was asked
for, and the name matches what ``ckpt_path="last"`` looks for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
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


# ---- names beside a checkpoint ----


def _hidden(path: Path, purpose: str) -> Path:
    # free of the checkpoint's own name, which Lightning searches for when it looks for the last or the HPC checkpoint
    return path.with_name(f".zerocompile-{purpose}-{hashlib.sha256(path.name.encode()).hexdigest()[:12]}")


def saving_name(path: Path) -> Path:
    """Where what will become ``path`` is written; the same for each save of it, so a killed one leaves no litter."""
    return _hidden(path, "saving")


def previous_name(path: Path) -> Path:
    """Where the checkpoint at ``path`` is while another takes its place: see [Note: replacing a directory]."""
    return path.with_name(f"{path.stem}.zerocompile-previous{path.suffix}")


# ---- appearing and going ----


def write(path: Path, content: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file through to the disk."""
    with open(path, "wb") as file:
        content(file)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes the names in a directory last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_replaceable(path: Path) -> None:
    """Raises if a checkpoint at ``path`` would destroy something else.

    Raises:
        IsADirectoryError: ``path`` is a directory that is no checkpoint.
    """
    if path.is_dir() and not path.is_symlink() and not (path / META).is_file():
        raise IsADirectoryError(f"`{path}` is a directory and no checkpoint; save under another name, or remove it.")


def commit(temporary: Path, path: Path) -> None:
    """Lets the finished file or directory take the place of ``path``; see [Note: replacing a directory]."""
    previous = previous_name(path)
    if temporary.is_dir() or (path.is_dir() and not path.is_symlink()):
        if os.path.lexists(path):
            remove(previous)  # left by a killed save that had moved in already
            os.rename(path, previous)
        os.rename(temporary, path)
    else:
        os.replace(temporary, path)
    sync_directory(path.parent)
    remove(previous)


def remove(path: Path) -> None:
    """Removes a checkpoint; at no time does half of it bear the checkpoint's name."""
    going = _hidden(path, "removing")
    shutil.rmtree(going, ignore_errors=True)  # left by a killed removal
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        os.rename(path, going)
        shutil.rmtree(going)


def locate(path: Path) -> Path:
    """``path``, or the checkpoint that was there before a save that did not finish."""
    previous = previous_name(path)
    if path.exists() or not previous.exists():
        return path
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


def check_file(path: Path) -> None:
    """Raises if a file of ``torch.save`` does not have the content it was written with.

    Raises:
        RuntimeError: names the file. It is cut short, or a record does not match the checksum that torch keeps of it.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04" or not torch.serialization.get_crc32_options():
            return  # an old format, which has no checksums, or the user's torch does not write them
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise RuntimeError(f"The checkpoint `{path}` is damaged: {error}. Load another one.") from error
    if damaged is not None:
        raise RuntimeError(
            f"The checkpoint `{path}` is damaged: its record `{damaged}` does not match its checksum. Load another one."
        )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's single file, which takes its place only when all of it is on the disk.

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
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        check_replaceable(local)
        local.parent.mkdir(parents=True, exist_ok=True)
        temporary = saving_name(local)
        try:
            if temporary.is_dir():  # left by a killed save of the other format
                shutil.rmtree(temporary)
            write(temporary, lambda file: torch.save(checkpoint, file))
            commit(temporary, local)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        local = local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        else:
            remove(local)
