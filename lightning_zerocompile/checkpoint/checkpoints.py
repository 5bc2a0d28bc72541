"""Checkpoints: state that does not depend on the stage or on the world size, under the module's own names.

A checkpoint is one file with full tensors, or a directory to which every rank writes its part (directory.py). The
strategy loads either kind, whichever of them it writes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_zerocompile.checkpoint import directory, files
from lightning_zerocompile.checkpoint.background import Background
from lightning_zerocompile.checkpoint.directory import on_all_ranks
from lightning_zerocompile.checkpoint.files import AtomicCheckpointIO
from lightning_zerocompile.checkpoint.state import (
    full_optimizer_state,
    full_state_dict,
    load_optimizer_state,
    named_optimizer_state,
    positional_optimizer_state,
)
from lightning_zerocompile.optim.supported import sees_whole_values


class Checkpoints:
    """Saves and loads for the strategy, through the user's plugin.

    Args:
        sharded: whether checkpoints are directories of shards; else they are single files with full tensors.
        full_param_optimizers: names of the user's optimizers that keep state of other shapes whole on every rank.
        timeout: how long ranks wait for each other while shards are saved in the background.
        io: the user's plugin; None: one whose files appear only when they are complete.
    """

    def __init__(
        self,
        sharded: bool,
        full_param_optimizers: Sequence[str] = (),
        timeout: timedelta = timedelta(minutes=30),
        io: CheckpointIO | None = None,
    ) -> None:
        self._sharded, self._full_param_optimizers, self._timeout = sharded, full_param_optimizers, timeout
        self.io = io
        # weak: masters that optimizers hold outlive the sharded model; this table must not keep the others alive
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_names"}  # weak: it cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_names": WeakTensorKeyDictionary()}

    @property
    def io(self) -> CheckpointIO:
        """The user's plugin, or one that writes atomically if the user has chosen none."""
        if isinstance(self._io, _WrappingCheckpointIO) and self._io.checkpoint_io is None:
            self._io.checkpoint_io = AtomicCheckpointIO()
        return self._io

    @io.setter
    def io(self, io: CheckpointIO | None) -> None:
        self._io = AtomicCheckpointIO() if io is None or type(io) is TorchCheckpointIO else io
        self._background = Background(self._io if isinstance(self._io, AsyncCheckpointIO) else None, self._timeout)

    def attach(self, module: nn.Module) -> None:
        """Stores the names of the parameters that optimizers hold, or will hold when a parameter group is added."""
        self._names = WeakTensorKeyDictionary({parameter: name for name, parameter in module.named_parameters()})

    def note_whole(self, module: nn.Module) -> None:
        """Stores the names of whole parameters, too: optimizers that were made elsewhere hold these after a run."""
        self._names.update({parameter: name for name, parameter in module.named_parameters()})

    # ---- states ----

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's state: its shards, or full tensors on rank 0; collective."""
        if self._names:  # `torch.nn.utils.prune` gives parameters other names
            self._names.update({parameter: name for name, parameter in module.named_parameters()})
        return dict(module.state_dict()) if self._sharded else full_state_dict(module, keep=is_first_rank())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state: its shards by their parameters' names, or full tensors on rank 0; collective."""
        if not self._sharded:
            return full_optimizer_state(optimizer, keep=is_first_rank())
        return named_optimizer_state(optimizer, self._names_of(optimizer))

    def load_optimizers(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Loads states of either kind."""
        for optimizer, state in zip(optimizers, states, strict=False):
            whole = sees_whole_values(optimizer, self._full_param_optimizers)
            load_optimizer_state(optimizer, positional_optimizer_state(optimizer, state, self._names), whole)

    def _names_of(self, optimizer: Optimizer) -> dict[Tensor, str]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        names = {p: self._names.get(p) for p in held}
        found = {p: name for p, name in names.items() if name is not None}
        if len(found) < len(names):
            raise RuntimeError(
                f"{type(optimizer).__name__} holds parameters that are not the model's, so they have no names in a "
                "checkpoint. Assign new optimizers to `trainer.strategy.optimizers` while the model is sharded."
            )
        return found

    # ---- files ----

    def save(self, checkpoint: dict[str, Any], path: _PATH, options: Any) -> None:
        """Writes Lightning's dictionary, or lets ``AsyncCheckpointIO`` do it in the background; collective.

        Raises:
            TypeError: storage options are given, or the dictionary holds shards beside the model's.
            ValueError: a directory of shards cannot be written to a remote path.
            RuntimeError: an earlier save in the background failed. It is raised on all ranks, and nothing is saved.
        """
        self._background.raise_pending(wait=False)
        if self._sharded and dist.is_initialized():
            self._save_shards(checkpoint, path, options)
        else:
            self._save_file(checkpoint, path, options)
        if Path(path).name.startswith("hpc_ckpt_"):
            self._background.raise_pending(wait=True)  # Lightning lets SLURM end the job right after this save

    def _save_shards(self, checkpoint: dict[str, Any], path: _PATH, options: Any) -> None:
        if options is not None:
            raise TypeError("`storage_options` are for files: state_dict_type='sharded' takes none.")
        local = _local(dist_broadcast(path))
        if self._background.is_used:
            self._background.save(checkpoint, local)
        else:
            directory.save(checkpoint, local)

    def _save_file(self, checkpoint: dict[str, Any], path: _PATH, options: Any) -> None:
        def write() -> None:
            if is_first_rank():
                directory.refuse_dtensors(checkpoint)
                self.io.save_checkpoint(checkpoint, path, storage_options=options)

        on_all_ranks(f"Saving the checkpoint `{path}`", write)

    def load(
        self,
        path: _PATH,
        weights_only: bool | None,
        module: nn.Module,
        with_optimizers: bool,
    ) -> dict[str, Any]:
        """Lightning's dictionary from a file or a directory, see :meth:`read`."""
        return directory.as_lightning(self.read(path, weights_only, module, with_optimizers))

    def read(self, path: _PATH, weights_only: bool | None, module: nn.Module, with_optimizers: bool) -> dict[str, Any]:
        """What a file holds, or Lightning's dictionary from a directory; collective. It waits for saves in progress.

        Raises:
            RuntimeError: a file is missing or damaged; the message names it. Or a save in the background failed.
            UnpicklingError: a file holds more than tensors and plain containers, and ``weights_only`` is not False.
        """
        self._background.raise_pending(wait=True)
        torch.cuda.empty_cache()  # as Lightning does before it loads
        given, path = path, dist_broadcast(path)
        local = files.local_path(path)
        if local is None:  # torch.load's own default for URLs would unpickle anything
            with directory.refusals(path):
                return self.io.load_checkpoint(path, weights_only=weights_only is not False)
        local, kind = self._found(files.locate(local))
        if kind == "a directory":
            masters = dict(module.named_parameters(remove_duplicate=False))
            return directory.load(local, masters, weights_only, with_optimizers)
        own = type(_inner(self.io)) in (AtomicCheckpointIO, TorchCheckpointIO)  # others may write another format
        if kind == "a file":
            first = is_first_rank()  # one rank checks the whole file, since the others would find the same
            on_all_ranks(f"Reading the checkpoint `{path}`", lambda: files.check_file(local, own) if first else None)
        with directory.refusals(str(local)), files.unreadable(local) if own else nullcontext():
            place = local if own else given if os.fspath(given) == path else path
            return self.io.load_checkpoint(place, weights_only=weights_only)

    def _found(self, path: Path) -> tuple[Path, str]:
        """What is at ``path``, alike on all ranks; collective.

        Raises:
            RuntimeError: ranks find different things, for example on disks of their own.
        """
        what = f"Reading the checkpoint `{path}`"

        def look() -> str:
            if path.is_dir() and (type(_inner(self.io)) is AtomicCheckpointIO or (path / files.META).is_file()):
                return "a directory"
            return "a file" if path.is_file() else "nothing"

        kinds = on_all_ranks(what, look)
        if len(set(kinds)) > 1:
            found = ", ".join(f"rank {rank} finds {kind}" for rank, kind in enumerate(kinds))
            raise RuntimeError(
                f"{what} failed: there {found}. It must be on a filesystem that all ranks see, or be copied to "
                "every node before."
            )
        return path, kinds[0]

    def remove(self, path: _PATH) -> None:
        """Removes a checkpoint, on rank 0, when the checkpoints that are still being saved are complete."""
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        remover = AtomicCheckpointIO() if self._sharded else self.io
        # not at once: it could be gone before the checkpoint that replaces it is on the disk
        self._background.after_saves(lambda: remover.remove_checkpoint(path))

    def finish(self) -> None:
        """Waits for saves in progress; collective if saves can be in the background.

        Raises:
            RuntimeError: a save in the background failed. It is raised on all ranks.
        """
        self._background.finish()
        self.io.teardown()

    def abandon(self) -> None:
        """:meth:`finish` after a failure: waits for other ranks for a moment only, and raises nothing."""
        if self._sharded and self._background.is_used:
            self._background.abandon()
            return
        try:
            self.io.teardown()  # a file is written by one rank alone
        except Exception as error:
            self._background.forget_error()
            warnings.warn(f"A checkpoint could not be saved: {type(error).__name__}: {error}", stacklevel=2)

    def check_plugin(self) -> None:
        """Raises if the user's plugin would not be used.

        Raises:
            MisconfigurationException: names the plugin and the remedy.
        """
        io, inner = self.io, _inner(self.io)
        if self._sharded and type(inner) not in (AtomicCheckpointIO, TorchCheckpointIO):
            name = type(io).__name__ + ("" if inner is io else f"({type(inner).__name__})")
            raise MisconfigurationException(
                f"The plugin `{name}` cannot write state_dict_type='sharded': all ranks write to a directory, which no "
                "plugin can do for them. Use state_dict_type='full', or leave out the plugin; Lightning's own "
                "AsyncCheckpointIO() saves directories in the background."
            )


def _inner(io: CheckpointIO) -> CheckpointIO:
    """The plugin that writes for Lightning's ``AsyncCheckpointIO``; any other plugin as it is."""
    return io.checkpoint_io or io if type(io) is AsyncCheckpointIO else io


def is_first_rank() -> bool:
    """Whether this is rank 0. Without a process group the environment says which rank this is."""
    return bool((dist.get_rank() if dist.is_initialized() else rank_zero_only.rank) == 0)  # type: ignore[attr-defined]


def dist_broadcast(path: _PATH) -> str:
    """Rank 0's path on all ranks: it may hold a time or a random name."""
    paths = [os.fspath(path)]
    if dist.is_initialized():
        dist.broadcast_object_list(paths, 0)
    return paths[0]


def _local(path: str) -> Path:
    local = files.local_path(path)
    if local is None:
        raise ValueError(
            f"state_dict_type='sharded' writes to a filesystem that all ranks see, not to `{path}`. Save to a local "
            "path, or use state_dict_type='full'."
        )
    return local
