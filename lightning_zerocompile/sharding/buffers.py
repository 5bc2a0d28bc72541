"""Module buffers: on this rank's device, and rank 0's on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

_TOGETHER = 250 * 2**20  # bytes that share a broadcast, as in DDP


def move(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Moves the buffers that are on another device to ``device``."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def broadcast(modules: Iterable[nn.Module], group: dist.ProcessGroup, meet: Callable[[str], None]) -> None:
    """Writes rank 0's values of the buffers on every rank of ``group``, as DDP does before each forward.

    Args:
        modules: the modules that hold the buffers.
        group: a group of all ranks.
        meet: called with what follows, before the broadcast, if there are buffers. It raises if a rank does not come
            to it; without it the broadcast would hang then.
    """
    found = dict.fromkeys(buffer for module in modules if module._buffers for buffer in module._buffers.values())
    buffers = [b.detach() for b in found if b is not None and b.numel() > 0]
    if buffers and dist.get_world_size(group) > 1:
        meet("the broadcast of the model's buffers")
        dist._broadcast_coalesced(group, buffers, _TOGETHER, 0)  # type: ignore[attr-defined]
