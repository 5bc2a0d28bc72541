"""Memory that all devices of one host have mapped: see [Note: copy engines] in csrc/peers.h."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_zerocompile.ranks.messages import Messages

_SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's variable: lets ranks share a device, for tests


class BarrierRelease:
    """Lets what waits in barriers of mapped memory on this rank's device go on without the other ranks.

    Such a barrier is a kernel of torch, of which no process group knows. Each rank has a pad of one word a rank, which
    all have mapped. Rank r waits until word r of each other rank's pad is 0, sets it to 1, then waits until the words
    of its own pad are 1, and sets them to 0. (torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemory.cu; ours are on
    channel 0.)

    Args:
        buffer: from :func:`map_buffer`.
        mesh: of its ranks.
    """

    def __init__(self, buffer: Tensor, mesh: DeviceMesh) -> None:
        memory = _rendezvous(buffer, mesh.get_group())
        self._memory, self._rank, world = memory, memory.rank, memory.world_size  # the pads do not hold the memory
        self._pads = [memory.get_signal_pad(rank, [world], torch.uint32) for rank in range(world)]
        # Both are made here: later a device that waits could hold up whatever makes them. A stream of another priority
        # shares no queue of the device with the streams that wait.
        self._stream = torch.cuda.Stream(buffer.device, priority=-1)  # type: ignore[no-untyped-call, unused-ignore]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        self._done.record(self._stream)  # type: ignore[no-untyped-call, unused-ignore]

    def __call__(self) -> None:
        """Releases one barrier, if the device is in one. What it was to protect is not valid.

        The words are written by the stream itself. A kernel would need the device, and a copy would stand in the queue
        of a copy engine after copies that wait for the barrier.
        """
        if not self._done.query():  # type: ignore[no-untyped-call, unused-ignore]
            return  # a full queue would hold this thread up
        write = self._memory.stream_write_value32
        with torch.cuda.stream(self._stream):
            for rank, pad in enumerate(self._pads):
                if rank != self._rank:
                    write(pad, self._rank, 0)  # as if that rank had taken this rank's last signal
                    write(self._pads[self._rank], rank, 1)  # as if that rank had signalled
        self._done.record(self._stream)  # type: ignore[no-untyped-call, unused-ignore]


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
