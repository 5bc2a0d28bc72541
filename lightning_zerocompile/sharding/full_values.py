"""The full value of a sharded tensor."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Shard

from lightning_zerocompile.sharding.layout import on_the_wire, stride_of, with_stride

ON_HOST = "_zerocompile_on_host"  # attribute of a DTensor of a device's mesh whose rows are kept in host memory


def full_value(value: DTensor, dtype: torch.dtype | None = None) -> Tensor:
    """All shards of ``value`` as one detached tensor on its device, of ``value.shape``; collective over its mesh.

    If the rows are kept in host memory, the result is on the mesh's device.

    ``dtype``: the result has this dtype, and so has what travels; ``None``: that of ``value``.

    [Note: full values on gloo] ``DTensor.full_tensor`` gathers by an operator that gloo runs as "ALLGATHER_COALESCED".
    Two of these operations may free one std::string twice, see [Note: gloo gathers]. With four in flight at a time a
    process crashes within 20,000 gathers (torch 2.11 and 2.13). If they run one after the other, it crashes very
    rarely: the first may still write its name when the second does. So here the shards travel by ``all_gather``.
    """
    local, placements = value._local_tensor.detach(), value.placements
    place = torch.device(value.device_mesh.device_type) if value.__dict__.get(ON_HOST) else local.device
    if value.device_mesh.size() == 1 and not placements[0].is_partial():
        return local.to(place, dtype, copy=True)  # also where the process group has ended
    # `cpu()` may have moved the shard to a device for which the mesh's group has no backend
    local = local.to(value.device_mesh.device_type)
    if len(placements) == 1 and isinstance(placements[0], Partial):
        return _reduced(local, placements[0], value).to(place, dtype)
    if len(placements) != 1 or type(placements[0]) is not Shard:
        return DTensor.full_tensor(value).detach().to(dtype=dtype)
    local = local.to(dtype=dtype)
    dim, group = placements[0].dim % value.ndim, value.device_mesh.get_group()
    size, world = value.shape[dim], dist.get_world_size(group)
    most = -(-size // world)
    padded = local.new_zeros([most if d == dim else n for d, n in enumerate(value.shape)])
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    sent = on_the_wire(padded)
    parts = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(parts, sent, group=group)
    starts = [min(rank * most, size) for rank in range(world + 1)]
    with in_own_dtypes(local):
        whole = torch.cat(
            [part.narrow(dim, 0, b - a) for part, (a, b) in zip(parts, pairwise(starts), strict=True)], dim
        )
    stride = stride_of(torch.empty_strided(value.shape, value.stride(), device="meta"))
    return with_stride(whole.view(local.dtype).to(place), stride)


def in_own_dtypes(like: Tensor) -> torch.autocast:
    """Inside, what joins tensors does so in their dtype: autocast to one half precision refuses the other."""
    return torch.autocast(like.device.type, enabled=False)


def _reduced(local: Tensor, placement: Partial, value: DTensor) -> Tensor:
    """All ranks' parts, reduced. Booleans are reduced as int64, since torch would add them as bytes, modulo 256.

    [Note: NaN in a maximum] A reduction by maximum or minimum may lose a NaN, with gloo and with NCCL, and torch's own
    operations keep it. So parts of this kind are gathered, and every rank takes their maximum.
    """
    if placement.reduce_op in ("max", "min") and local.is_floating_point():
        sent = on_the_wire(local.contiguous())
        gathered = [torch.empty_like(sent) for _ in range(value.device_mesh.size())]
        dist.all_gather(gathered, sent, group=value.device_mesh.get_group())
        with in_own_dtypes(local):
            stacked = torch.stack([one.view(local.dtype) for one in gathered])
        return stacked.amax(0) if placement.reduce_op == "max" else stacked.amin(0)
    parts = local.to(torch.int64) if local.dtype is torch.bool else local
    whole = placement._reduce_value(parts, value.device_mesh, 0)
    if isinstance(whole, AsyncCollectiveTensor):
        whole = whole.wait()
    return whole != 0 if local.dtype is torch.bool else whole
