"""Memory that all devices of one host have mapped: see [Note: copy engines] in csrc/peers.h."""

from __future__ import annotations

import json
import logging
import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_zerocompile.ranks.messages import Messages

_log = logging.getLogger(__name__)
BARRIER_GRACE = timedelta(minutes=1)  # a barrier's kernel gives up so long after the host should have ended it
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # CUDA's variable: how many hardware queues streams are spread over
_SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's variable: lets ranks share a device, for tests


def warn_of_one_queue(device: torch.device, world_size: int) -> None:
    """Warns if all streams of the device share one queue: gathers and reductions of two ranks may come in different
    orders, and each rank would then wait for what stands behind in the other's queue."""
    if device.type == "cuda" and world_size > 1 and _has_one_queue():
        warnings.warn(
            f"zerocompile: with {_CONNECTIONS}=1 ranks can wait for each other for ever, since gathers and reductions "
            f"share one queue of the device; start the processes without it (`unset {_CONNECTIONS}`).",
            stacklevel=2,
        )


def _has_one_queue() -> bool:
    return os.environ.get(_CONNECTIONS) == "1"


def has_kernels(messages: Messages, load: Callable[[], None], wanted: bool | Literal["auto"]) -> bool:
    """Whether all ranks' drivers take the kernels without which devices cannot meet; alike on all ranks.

    Raises:
        ValueError: ``wanted=True`` and one does not; the message says which, and why.
    """
    reason = first_failure(messages, "kernels", load)
    if reason and dist.get_rank() == 0:
        _log.warning("zerocompile: gathers and reductions go through NCCL, not by copies between devices: %s", reason)
    return not _refused(reason, wanted)


def has_copy_engines(
    mesh: DeviceMesh, device: torch.device, messages: Messages, wanted: bool | Literal["auto"]
) -> bool:
    """Whether the devices can gather and reduce by copies, and the user wants that; alike on all ranks.

    Raises:
        ValueError: ``wanted=True`` and the devices do not allow it; the message says why.
    """
    if mesh.size() == 1 or wanted is False:
        return False
    reason = "" if device.type == "cuda" else f"{device.type} devices have no copy engines"
    return not _refused(reason or _unreachable(mesh, device, messages), wanted)


def _refused(reason: str, wanted: bool | Literal["auto"]) -> bool:
    if reason and wanted is True:
        raise ValueError(
            f"`copy_engine=True` is not possible on rank {dist.get_rank()}: {reason}. Use 'auto' or False."
        )
    return bool(reason)


def map_buffer(
    mesh: DeviceMesh,
    device: torch.device,
    messages: Messages,
    wanted: bool | Literal["auto"],
    half: int,
    purpose: str,
) -> Tensor | None:
    """A buffer of two halves that all ranks have mapped; ``None`` if collectives must be used instead.

    Collective over the mesh, whose devices have copy engines: all ranks map their buffers, or none does.

    Args:
        mesh: the shard group, one dimension.
        device: of this rank.
        messages: the ranks' conversation.
        wanted: ``"auto"``: map it if that is possible; ``True``: raise if it is not.
        half: bytes of one half; 0: there is no buffer.
        purpose: a name that no other buffer has.

    Returns:
        [2 * half], uint8.

    Raises:
        ValueError: ``wanted=True`` and it cannot be mapped; the message says why.
    """
    if half == 0:
        return None
    buffers: list[Tensor] = []
    reason = first_failure(messages, f"allocated/{purpose}", lambda: buffers.append(_allocate(device, 2 * half)))
    if not reason:
        reason = first_failure(messages, f"mapped/{purpose}", lambda: _rendezvous(buffers[0], mesh.get_group()))
    return None if _refused(reason, wanted) else buffers[0]


def _unreachable(mesh: DeviceMesh, device: torch.device, messages: Messages) -> str:
    """Why some rank's device cannot read another's memory of its shard group; "" if all can, alike on all ranks."""
    mine = json.dumps([socket.gethostname(), device.index])
    near = dist.get_process_group_ranks(mesh.get_group())
    everywhere = messages.exchange("place", mine)
    places = {rank: json.loads(everywhere.get(rank) or "[null, null]") for rank in near}
    hosts, indices = {host for host, _ in places.values()}, [index for _, index in places.values()]
    reason = ""
    if len(hosts) > 1:
        reason = "the ranks are on several hosts"
    elif _has_one_queue():
        reason = f"`{_CONNECTIONS}=1`, with which a barrier on the device can wait for ever (unset it)"
    elif len(set(indices)) < len(indices) and os.environ.get(_SHARED) != "1":
        reason = "the ranks number their devices differently"
    elif not all(i == device.index or torch.cuda.can_device_access_peer(device.index, i) for i in indices):
        reason = f"device {device.index} cannot read the memory of all others"
    return next((text for text in messages.exchange("reachable", reason).values() if text), "")


def first_failure(messages: Messages, topic: str, action: Callable[[], Any]) -> str:
    """The error of the first rank on which ``action`` fails; "" if it succeeds on all. Alike on all ranks."""
    reason = ""
    try:
        action()
    except (RuntimeError, ImportError, AttributeError) as error:  # the last two: torch calls its module private
        reason = f"rank {dist.get_rank()}: {str(error).splitlines()[0]}"
    return next((text for text in messages.exchange(topic, reason).values() if text), "")


def _allocate(device: torch.device, size: int) -> Tensor:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)


def _rendezvous(buffer: Tensor, group: dist.ProcessGroup) -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(buffer, group)
