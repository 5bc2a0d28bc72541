"""Module buffers: on this rank's device, and rank 0's on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from lightning_zerocompile.sharding.module_swap import modules_of

_TOGETHER = 250 * 2**20  # bytes that share a broadcast, as in DDP


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Moves the buffers that are on another device to ``device``."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


class Buffers:
    """Writes rank 0's values of a model's buffers on every rank, when DDP does.

    [Note: buffers] DDP broadcasts the buffers before the first forward, and then before each whose last forward was
    one after which gradients are reduced. A forward of manual optimization, of an accumulation that goes on, and of
    an evaluation is none. So a buffer that the training reads (a center, a codebook) differs between the ranks
    where it does under DDP.

    Args:
        model: the module that holds them, in its modules.
        group: a group of all ranks.
        meet: called with what follows, before a broadcast, if there are buffers. It raises if a rank does not come to
            it; without it the broadcast would hang then.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, meet: Callable[[str], None]) -> None:
        self._model = model
        self._group = group
        self._meet = meet
        self._alone = dist.get_world_size(group) == 1
        self._follow = True  # whether the next forward begins with a broadcast

    def leave_group(self) -> None:
        """At the end of a run: no forward follows."""
        del self._group

    def before_forward(self, reduces: bool = False, modules: Iterable[nn.Module] | None = None) -> None:
        """Before a forward in a fit, see [Note: buffers]; collective.

        Args:
            reduces: whether gradients are reduced after this forward.
            modules: all of the model's; ``None``: they are looked up.
        """
        if self._follow:
            self.broadcast(modules)
        self._follow = reduces

    def broadcast(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Writes rank 0's values on every rank; collective. ``modules``: see :meth:`before_forward`."""
        if self._alone:
            return
        modules = modules_of(self._model) if modules is None else modules
        found = dict.fromkeys(buffer for module in modules if module._buffers for buffer in module._buffers.values())
        buffers = [b.detach() for b in found if b is not None and b.numel() > 0]
        if buffers:
            self._meet("the broadcast of the model's buffers")
            dist._broadcast_coalesced(self._group, buffers, _TOGETHER, 0)  # type: ignore[attr-defined]
