"""Checkpoints that are written while the training goes on: with Lightning's ``AsyncCheckpointIO``, in its one thread.

[Note: saving in the background] At the call each rank copies its shards to the CPU, and rank 0 pickles the rest, so
what training writes next is not saved. When all ranks say that they have their copies, each hands the writing to its
plugin's thread. From then on the threads wait only for each other, through a process group of their own. They all come
to its collectives, whatever becomes of the training. If a rank's process dies, gloo ends the others' wait; if it hangs,
`timeout` ends it.

So a rank whose training has failed waits for its thread for a moment only, in which most saves end. Python joins the
thread before the process ends. By then a checkpoint that was being written is complete, or has failed.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Mapping
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_zerocompile.checkpoint import directory, files
from lightning_zerocompile.checkpoint.directory import on_all_ranks

_GRACE = timedelta(seconds=5)  # at most a tenth of the timeout
_WHAT = "Saving a checkpoint in the background"


class Background:
    """Saves in the thread of the user's ``AsyncCheckpointIO``: see [Note: saving in the background].

    Without that plugin nothing is saved here, and there is nothing to wait for.

    Args:
        plugin: the user's; None: everything is saved at once, not in the background.
        timeout: how long the threads wait for each other in one collective.
    """

    def __init__(self, plugin: AsyncCheckpointIO | None, timeout: timedelta) -> None:
        self._plugin, self._timeout = plugin, timeout
        self._group: dist.ProcessGroup | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None}

    @property
    def is_used(self) -> bool:
        """Whether checkpoints are saved in the background."""
        return self._plugin is not None

    def save(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        """:func:`directory.save` in the background: this call only makes the copies; collective.

        Each save that is not complete holds a copy of this rank's shards on the CPU.

        Raises:
            IsADirectoryError: ``path`` is a directory that is no checkpoint.
            RuntimeError: a rank could not copy or pickle its part. Later errors are raised by :meth:`raise_pending`.
        """
        state, rest = directory.parts(checkpoint)
        copied: dict[str, Any] = {}
        content = io.BytesIO()

        def take() -> None:
            directory.refuse_dtensors(rest)
            if dist.get_rank() == 0:
                files.check_replaceable(path)
                torch.save(rest, content)
            copied.update(snapshot(state))

        on_all_ranks(directory.saving(path), take)
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        group = self._group
        self._submit(lambda: directory.write(copied, lambda f: f.write(content.getbuffer()), path, group))

    def after_saves(self, action: Callable[[], object]) -> None:
        """Runs ``action`` when the saves in progress are on the disk; at once if nothing was ever saved here."""
        if self._plugin is None or self._plugin._executor is None:
            action()
        else:
            self._submit(action)

    def _submit(self, action: Callable[[], object]) -> None:
        """Runs ``action`` in the plugin's thread; the first error is kept for :meth:`raise_pending`."""
        plugin = self._plugin
        assert plugin is not None

        def guarded() -> None:
            try:
                action()
            except Exception as error:
                if plugin._error is None:
                    plugin._error = error

        plugin._ensure_setup()
        assert plugin._executor is not None
        plugin._executor.submit(guarded)

    def raise_pending(self, wait: bool) -> None:
        """Raises the error of a save that has failed since the last call; collective if there is a plugin.

        Args:
            wait: whether to wait for all saves in progress first.

        Raises:
            RuntimeError: a save has failed; raised on all ranks alike. If the error was the same on all ranks, it is
                raised itself.
        """
        plugin = self._plugin
        if plugin is None:
            return

        def look() -> bool:
            if wait:
                _drain(plugin)
            return plugin._error is not None

        def report() -> None:
            _drain(plugin)  # if one rank has failed the others will fail, too, perhaps a little later
            error, plugin._error = plugin._error, None
            if error is not None:
                raise error

        if any(on_all_ranks(_WHAT, look)):
            on_all_ranks(_WHAT, report)

    def finish(self) -> None:
        """Waits for all saves and destroys the threads' process group; collective if there is a plugin.

        Raises:
            RuntimeError: see :meth:`raise_pending`.
        """
        self.raise_pending(wait=True)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def abandon(self) -> None:
        """After a failure: waits for a moment only. Saves in progress go on, and warn if they fail.

        The process group stays until the process ends, as those of the training do.
        """
        self._group = None
        if self._plugin is not None and self._plugin._executor is not None:  # kept, so that later saves wait for these
            moment = min(_GRACE, self._timeout / 10).total_seconds()
            futures.wait([self._plugin._executor.submit(_warn, self._plugin)], moment)

    def forget_error(self) -> None:
        """Drops the error of a save that has failed: it was told already, and the next run must not raise it."""
        if self._plugin is not None:
            self._plugin._error = None


def _drain(plugin: AsyncCheckpointIO) -> None:
    if plugin._executor is not None:
        plugin._executor.submit(int).result()  # the only thread runs this after everything before it


def _warn(plugin: AsyncCheckpointIO) -> None:
    error, plugin._error = plugin._error, None
    if error is not None:
        warnings.warn(f"{_WHAT} has failed, too: {type(error).__name__}: {error}", stacklevel=1)


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """A copy on the CPU, which does not change when the training writes to the original."""
    copies: dict[int, Any] = {id(leaf): _on_cpu(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)}
    # torch's own stagers copy the whole storage of each tensor, of which it may be a part, or do not copy 0-dim tensors
    return copy.deepcopy(state, copies)


def _on_cpu(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.detach().to("cpu", copy=True)
    local = value._local_tensor.detach().to("cpu", copy=True)
    return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
