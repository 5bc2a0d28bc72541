"""Which rows of a parameter a rank holds, and the DTensors over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


def placements_of(size: tuple[int, ...]) -> tuple[Placement]:
    """The placements of a master of this size: rows are sharded, and a 0-dim parameter is replicated."""
    return (Shard(0),) if size else (Replicate(),)


def stride_of(value: Tensor) -> tuple[int, ...] | None:
    """The strides to keep of a full value, see [Note: memory formats] in csrc/registry.h; None: it is contiguous here.

    Only a value whose rows are contiguous in memory keeps another order of their dimensions.
    """
    if value.layout is not torch.strided or value.is_contiguous() or value.dim() < 3:
        return None
    stride = (math.prod(value.shape[1:]), *value.stride()[1:])
    order = [0, *sorted(range(1, value.dim()), key=lambda dim: -stride[dim])]
    ordered = torch.empty_strided(value.shape, stride, device="meta").permute(order)
    return stride if ordered.is_contiguous() and value.stride()[0] == stride[0] else None


def with_stride(value: Tensor, stride: Sequence[int] | None) -> Tensor:
    """``value`` in memory with these strides; None: as it is."""
    if stride is None or value.stride() == tuple(stride):
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def local_part(full: Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy of this rank's rows of ``full``, contiguous; the last ranks may have none. A 0-dim ``full`` is copied."""
    if full.dim() == 0:
        return full.detach().clone()
    return rows_of(full.detach(), mesh.size(), mesh.get_local_rank()).clone(memory_format=torch.contiguous_format)


def rows_of(full: Tensor, ranks: int, rank: int) -> Tensor:
    """A view of the rows of ``full`` that ``rank``, of so many ``ranks``, holds: ``[<=ceil(d0 / ranks), ...]``."""
    rows, first = Shard.local_shard_size_and_offset(full.shape[0], ranks, rank)
    return full.narrow(0, first, rows)


def as_dtensor(
    local: Tensor, size: torch.Size | tuple[int, ...], mesh: DeviceMesh, stride: tuple[int, ...] | None = None
) -> DTensor:
    """The DTensor of global shape ``size`` whose local part is ``local``; no communication.

    ``stride``: of both; None: they are contiguous.
    """
    shape = torch.Size(size)
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements_of(tuple(size)), run_check=False, shape=shape, stride=stride)


def over_local(local: Tensor, master: Tensor) -> DTensor:
    """A DTensor over the memory of ``local``, [<=rows, ...], in the layout of ``master`` and the dtype of ``local``.

    Raises:
        TypeError: ``master`` is no DTensor.
    """
    if not isinstance(master, DTensor):
        raise TypeError("over_local needs a sharded master")
    spec = master._spec
    if local.dtype != master.dtype:
        meta = TensorMeta(master.shape, master.stride(), local.dtype)
        spec = DTensorSpec(master.device_mesh, master.placements, meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def shard_like(full: Tensor, master: Tensor, dtype: torch.dtype | None = None) -> DTensor:
    """``full`` in the layout and on the device of ``master``, in ``dtype`` (default: the master's).

    No communication: every rank must hold the same ``full``.

    Raises:
        TypeError: ``master`` is no DTensor.
    """
    if not isinstance(master, DTensor):
        raise TypeError("shard_like needs a sharded master")
    local = master.to_local()
    part = rows_like(full, master).to(device=local.device, dtype=dtype or local.dtype)
    return as_dtensor(part, tuple(master.shape), master.device_mesh, master.stride())


def rows_like(full: Tensor, master: DTensor) -> Tensor:
    """A copy of this rank's rows of ``full``, with the strides of ``master``."""
    return with_stride(local_part(full, master.device_mesh), master.stride())


def sharded_if_full(value: Any, master: Tensor) -> Any:
    """A plain tensor of the master's full shape, in the layout and dtype of ``master``; anything else unchanged."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == master.shape:
        return shard_like(value, master)
    return value


def trained_dtype(dtype: torch.dtype, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter of ``dtype`` is kept for the optimizer."""
    wider = master_dtype is not None and dtype.is_floating_point and dtype.itemsize < master_dtype.itemsize
    return master_dtype if wider and master_dtype is not None else dtype


def shard_dtype(parameter: Tensor, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which the shard of a parameter is kept.

    It is :func:`trained_dtype`, but for a frozen parameter its own: see [Note: frozen parameters] in parameter.py.
    """
    return trained_dtype(parameter.dtype, master_dtype) if parameter.requires_grad else parameter.dtype


def on_the_wire(value: Tensor) -> Tensor:
    """The value as collectives move it: float8, which gloo does not know, as its bytes, in the same memory."""
    return value.view(torch.uint8) if value.is_floating_point() and value.itemsize == 1 else value


def make_master(
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    device: torch.device,
    master_dtype: torch.dtype | None,
    rows: Tensor | None = None,
) -> nn.Parameter:
    """The sharded master of a full parameter, in :func:`shard_dtype`, from rank 0's values (as DDP broadcasts them).

    Args:
        parameter: the full parameter; its ``requires_grad`` and its attributes go to the master.
        mesh: the shard group.
        device: the device of the master.
        master_dtype: the least precise dtype of a trained floating-point parameter; ``None``: its own dtype.
        rows: this rank's values, [<=rows, ...], if they are known. They are taken instead of the parameter's, and
            nothing is broadcast. Without them all ranks must call.

    Returns:
        A parameter over a DTensor. The caller makes it a ``Master``.
    """
    stride = stride_of(parameter)
    if rows is None:
        full = parameter.detach().to(device, copy=True).contiguous()
        if dist.get_world_size() > 1:
            dist.broadcast(on_the_wire(full), src=0)  # to all replicas, see [Note: replicas] in csrc/registry.h
        local = local_part(full, mesh)
    else:
        local = rows.to(device, parameter.dtype).contiguous()
    local = with_stride(local.to(shard_dtype(parameter, master_dtype)), stride)
    sharded = as_dtensor(local, tuple(parameter.shape), mesh, stride)
    master = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    # the class is not `Master` yet: nn.Parameter would insist that `detach` returns that class, too
    master.__dict__.update(parameter.__dict__)
    return master
