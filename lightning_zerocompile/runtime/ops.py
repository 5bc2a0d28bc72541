"""Shapes of the operators' results, for the compiler; csrc/ops.cpp says what the operators do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def flatten(sizes: Iterable[Sequence[int]]) -> list[int]:
    """Sizes of several tensors in one list: the number of dimensions, then the dimensions, of each."""
    return [number for size in sizes for number in (len(size), *size)]


def unflatten(numbers: Sequence[int]) -> list[list[int]]:
    """The inverse of :func:`flatten`."""
    sizes, at = [], 0
    while at < len(numbers):
        end = at + 1 + numbers[at]
        sizes.append(list(numbers[at + 1 : end]))
        at = end
    return sizes


def empty_value(source: Tensor, size: Sequence[int]) -> Tensor:
    """A value of this size with the dtype and device of ``source``; and with its strides, if it has them for one.

    See [Note: memory formats] in csrc/registry.h.
    """
    if source.dim() == len(size) > 2:
        return source.new_empty_strided(size, source.stride())
    return source.new_empty(size)


def register() -> None:
    """Registers the fake kernels with the loaded extension; once per process, a second call does nothing."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("zerocompile::gather", "Meta"):
        return

    def gather(source: Tensor, handle: Tensor, size: Sequence[int], grad_dtype: torch.dtype | None = None) -> Tensor:
        return empty_value(source, size)

    def gather_cast(
        source: Tensor, handle: Tensor, size: Sequence[int], grad_dtype: torch.dtype | None = None
    ) -> Tensor:
        return empty_value(source, size)

    def float8_scale(full: Tensor, handle: Tensor) -> Tensor:
        return torch.empty((), dtype=torch.float32, device=full.device)

    def reduce_grad(grad: Tensor, handle: Tensor) -> Tensor:
        return torch.empty_like(handle)

    def gather_unit(
        sources: Sequence[Tensor], handles: Sequence[Tensor], sizes: Sequence[int], expects_grad: bool
    ) -> list[Tensor]:
        return [empty_value(s, size) for s, size in zip(sources, unflatten(sizes), strict=True)]

    def gather_one(source: Tensor, handle: Tensor, size: Sequence[int], expects_grad: bool) -> Tensor:
        return empty_value(source, size)

    for fake in (gather, gather_cast, float8_scale, reduce_grad, gather_unit):
        torch.library.register_fake(f"zerocompile::{fake.__name__}", fake)
    torch.library.register_fake("zerocompile::gather_unit.one", gather_one)
    for name in (
        *(f"{op}_{one}" for op in ("wait", "release", "reduce_unit") for one in ("", ".one")),
        "reduce_fence_",
    ):
        torch.library.register_fake(f"zerocompile::{name}", lambda *_: None)
