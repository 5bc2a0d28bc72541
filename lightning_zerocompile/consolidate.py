"""Makes one file of a checkpoint that is a directory of shards: ``python -m lightning_zerocompile.consolidate``.

The file is what Lightning's own command makes of the directory: ``load_from_checkpoint``, a plain Trainer and every
other strategy load it. Unlike Lightning's command this one finds damage before it writes anything, and it runs no code
from the directory unless it is told to trust it. It needs neither ranks nor GPUs, but memory for the whole checkpoint.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_zerocompile.checkpoint import directory as checkpoint_directory
from lightning_zerocompile.checkpoint import files


def consolidate(directory: Path, file: Path, trust: bool = False, force: bool = False) -> None:
    """Writes the checkpoint in ``directory`` to ``file``.

    Args:
        directory: written with ``state_dict_type="sharded"``, or by Lightning's FSDP or model-parallel strategy.
        file: appears only when all of it is on the disk.
        trust: whether objects of any class are unpickled, which can run any code.
        force: whether a file that is there is replaced.

    Raises:
        NotADirectoryError, FileNotFoundError: ``directory`` is a file, or is not there.
        FileExistsError: ``file`` is there already, and ``force`` is False.
        IsADirectoryError: ``file`` is a directory.
        RuntimeError: a file of the directory is missing or damaged; it is named.
        UnpicklingError: the directory holds more than tensors and plain containers, and ``trust`` is False.
    """
    directory = files.locate(directory)
    if not directory.is_dir():
        if directory.exists():
            raise NotADirectoryError(f"`{directory}` is a file: only directories of shards need this command.")
        raise FileNotFoundError(f"There is no directory `{directory}`.")
    _check_target(file, force)
    checkpoint = checkpoint_directory.load(directory, {}, weights_only=not trust, with_optimizers=True)
    draft = files.Draft(file, directory=False)
    try:
        draft.write(lambda target: torch.save(checkpoint, target))
        _check_target(file, force)
        draft.commit(replace=force)
    finally:
        draft.discard()


def _check_target(file: Path, force: bool) -> None:
    if file.is_dir():
        raise IsADirectoryError(f"`{file}` is a directory: name another file.")
    if os.path.lexists(file) and not force:
        raise FileExistsError(f"`{file}` is there already: name another file, or replace it with --force.")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1 if nothing could be written, or 2 for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_zerocompile.consolidate",
        description="Makes one file, as a plain Trainer loads it, of a checkpoint that is a directory of shards. All "
        "checksums are compared before anything is written.",
    )
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="the checkpoint")
    parser.add_argument(
        "file", type=Path, metavar="FILE", nargs="?", help="what to write (default: DIRECTORY.consolidated)"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    parser.add_argument(
        "--trust", action="store_true", help="unpickle objects of any class, which can run any code in the directory"
    )
    options = parser.parse_args(arguments)
    directory = options.directory.absolute()
    file = directory.with_name(f"{directory.name}.consolidated") if options.file is None else options.file.absolute()
    try:
        consolidate(directory, file, options.trust, options.force)
        if not (directory / checkpoint_directory.CHECKSUMS).is_file():
            print("warning: the directory has no checksums, so damage could not be looked for", file=sys.stderr)
    except (OSError, RuntimeError, pickle.UnpicklingError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
