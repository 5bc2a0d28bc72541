"""The full value of a sharded tensor, and the operator that gathers it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zerocompile.sharding.full_values import full_value
from tests.support import models
from tests.support.harness import on_ranks

SHAPES = [((6, 4), 0), ((5, 3), 0), ((1, 3), 0), ((0, 3), 0), ((7,), 0), ((3, 5), 1), ((2, 1, 3), -1), ((), None)]


class _Operators(TorchDispatchMode):
    """The names of what runs inside, and the dtypes of what all-gathers move."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.moved: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        if "allgather_" in str(func):
            self.moved |= {tensor.dtype for tensor in args[1]}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@on_ranks()
def test_all_shards_as_one_tensor(device: str, dtype: torch.dtype) -> None:
    """Even, uneven and empty shards along every dimension; without padding, and on gloo not by torch's operator."""
    mesh, results = init_device_mesh(device, (models.world(),)), []
    for shape, dim in SHAPES:
        full = torch.arange(torch.Size(shape).numel(), device=device).reshape(shape).to(dtype)
        value = distribute_tensor(full, mesh, [Replicate() if dim is None else Shard(dim)])
        value.requires_grad_(dtype.is_floating_point)
        with _Operators() as operators:
            whole = full_value(value)
        exact = whole.untyped_storage().nbytes() == full.nbytes
        same = whole.dtype == dtype and whole.shape == full.shape and torch.equal(whole, full)
        results.append((same, exact, whole.requires_grad, operators.names))
    for shape, (same, exact, requires_grad, names) in zip(SHAPES, results, strict=True):
        assert same and not requires_grad, shape
        if device == "cpu":
            assert exact, shape
            assert not any("all_gather_into_tensor" in name or "all_gather_single" in name for name in names), names
            assert any("allgather_" in name for name in names) == (shape[1] is not None), names


@on_ranks()
def test_what_travels_has_the_dtype_of_the_result(device: str) -> None:
    mesh = init_device_mesh(device, (models.world(),))
    for shape, dim in SHAPES:
        full = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))
        value = distribute_tensor(full, mesh, [Replicate() if dim is None else Shard(dim)])
        with _Operators() as operators:
            whole = full_value(value, dtype=torch.bfloat16)
        assert whole.dtype == torch.bfloat16 and torch.equal(whole, full.bfloat16())
        assert operators.moved == (set() if dim is None else {torch.bfloat16})
