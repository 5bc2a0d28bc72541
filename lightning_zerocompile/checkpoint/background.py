"""Checkpoints that are written while the training goes on: with Lightning's ``AsyncCheckpointIO``, in its one thread.

[Note: saving in the background] At the call each rank copies its shards to the CPU, and rank 0 pickles the rest: what
training writes next is not saved. When all ranks say that they have it, each hands the writing to its plugin's thread.
From there on threads wait for each other only, through a process group of their own, and all of them come to it
whatever becomes of the training. If a rank's process dies, gloo ends the others' wait; if it hangs, `timeout` does.

So a rank whose training has failed leaves its thread alone, but for a moment in which most saves come to their end.
Python joins the thread before the process ends: then a checkpoint that was on its way is complete, or has failed.
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
    """Saves directories of shards in the plugin's thread: see [Note: saving in the background].

    Args:
        timeout: how long the threads wait for each other in one collective.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None}

    def save(self, plugin: AsyncCheckpointIO, checkpoint: Mapping[str, Any], path: Path) -> None:
        """:func:`directory.save`, of which only the copy is made now; collective.

        Each save that is on its way holds a copy of this rank's shards on the CPU.

        Raises:
            IsADirectoryError: ``path`` is a directory that is no checkpoint.
            RuntimeError: a rank could not copy or pickle its part. What fails later, :func:`raise_pending` raises.
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
        run_in_thread(plugin, lambda: directory.write(copied, lambda f: f.write(content.getbuffer()), path, group))

    def finish(self) -> None:
        """Behind :func:`raise_pending`: ends what the threads have communicated by; all ranks must come to it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def abandon(self, plugin: AsyncCheckpointIO) -> None:
        """After a failure: waits for a moment only. What is on its way goes on, and warns if it fails.

        The process group stays until the process ends, as those of the training.
        """
        self._group = None
        if plugin._executor is not None:  # it stays: what the next run saves comes behind
            futures.wait([plugin._executor.submit(_warn, plugin)], min(_GRACE, self._timeout / 10).total_seconds())


def run_in_thread(plugin: AsyncCheckpointIO, action: Callable[[], object]) -> None:
    """Runs ``action`` in the plugin's thread behind what waits there; the first error is kept for "
    ":func:`raise_pending`."""

    def guarded() -> None:
        try:
            action()
        except Exception as error:
            if plugin._error is None:
                plugin._error = error

    plugin._ensure_setup()
    assert plugin._executor is not None
    plugin._executor.submit(guarded)


def raise_pending(plugin: AsyncCheckpointIO, wait: bool) -> None:
    """Raises what has failed in the background since the last call; collective.

    Args:
        plugin: this rank's.
        wait: for all that is still on its way.

    Raises:
        RuntimeError: or what was raised there, if that was the same on all ranks; on all ranks alike.
    """

    def look() -> bool:
        if wait:
            _drain(plugin)
        return plugin._error is not None

    def report() -> None:
        _drain(plugin)  # one rank's failure is the others' too, which may come to it a little later
        error, plugin._error = plugin._error, None
        if error is not None:
            raise error

    if any(on_all_ranks(_WHAT, look)):
        on_all_ranks(_WHAT, report)


def _drain(plugin: AsyncCheckpointIO) -> None:
    if plugin._executor is not None:
        plugin._executor.submit(int).result()  # the one thread comes to it last


def _warn(plugin: AsyncCheckpointIO) -> None:
    error, plugin._error = plugin._error, None
    if error is not None:
        warnings.warn(f"{_WHAT} has failed, too: {type(error).__name__}: {error}", stacklevel=1)


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """A copy on the CPU, of which nothing changes when the training writes to what it was made of."""
    copies: dict[int, Any] = {id(leaf): _on_cpu(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)}
    # torch's own stagers copy the storages whole of which these are parts, or leave what has no dimensions as it is
    return copy.deepcopy(state, copies)


def _on_cpu(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.detach().to("cpu", copy=True)
    local = value._local_tensor.detach().to("cpu", copy=True)
    return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
