"""How fast a device runs a model: one of its repeated blocks timed, and its memory.

[Note: timed block] The blocks do nearly all of a step's work, and they are alike. So one of them, with its real shapes
and the options of the run, tells what FLOP rate the whole step reaches: matrix products, and what surrounds them. What
a block is called with is found in a fake step (see [Note: fake step]), which ends there. Its numbers are random.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zerocompile.plan.trace import FakeStep, Live, PlanError, Step, copy_with, said
from lightning_zerocompile.sharding.islands import NONE, Islands

WARM_UP, REPEATS = 3, 7


class _Reached(Exception):
    """The fake step has come to the block."""


def block_rate(
    module: nn.Module,
    batch: Any,
    name: str,
    device: torch.device,
    *,
    dtype: torch.dtype | None,
    autocast: torch.dtype | None,
    compiled: Callable[[nn.Module], Callable[..., Any]] | None,
    step: Step,
    islands: Islands = NONE,
) -> float:
    """FLOP a second that forward and backward of one block reach, see [Note: timed block].

    Args:
        module: as the user made it, possibly on meta; it is not changed.
        batch: of one rank, as the step gets it.
        name: of the block in the module.
        device: where it runs; its memory must have room for the block, its gradients and its activations.
        dtype, autocast, step: as in :func:`~lightning_zerocompile.plan.trace.trace_step`.
        compiled: compiles the block; ``None``: it runs as eager code.
        islands: what of the module computes in float32.

    Raises:
        PlanError: the step does not call the block, the block fails on the device, or it has no matrix product.
    """
    args, kwargs = _inputs(FakeStep.of(module, batch, dtype, autocast, islands), name, step)
    block = _on(module.get_submodule(name), device, dtype, islands.inside(name))
    args, kwargs = apply_to_collection((args, kwargs), Tensor, lambda tensor: _numbers(tensor, device))
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if autocast is not None:
        around = lambda: torch.autocast(device.type, dtype=autocast)  # noqa: E731

    def run(call: Callable[..., Any]) -> None:
        with around():
            result = call(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        block.zero_grad(set_to_none=True)

    try:
        with Live() as live:
            run(block)
        if live.flops == 0:
            raise PlanError(f"The block `{name}` has no matrix product or convolution, so its time tells no FLOP rate.")
        call = block if compiled is None else compiled(block)
        seconds = _seconds(lambda: run(call), device)
    except PlanError:
        raise
    except Exception as error:  # the user's code, the compiler's, or no memory
        raise PlanError(f"The block `{name}` cannot be timed on {device}: {said(error)} Give `flops=`.") from error
    rate: float = live.flops / seconds
    return rate


def memory_rate(device: torch.device, size: int = 2**28) -> float:
    """Bytes a second that the device's memory reads and writes, in a copy of ``size`` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _inputs(fake: FakeStep, name: str, step: Step) -> tuple[Any, Any]:
    """What the block is called with first: tensors without data."""
    found: list[tuple[Any, Any]] = []

    def reached(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((args, kwargs))
        raise _Reached

    fake.module.get_submodule(name).register_forward_pre_hook(reached, with_kwargs=True)
    try:
        with contextlib.suppress(_Reached), fake.around():
            fake.forward(step)
    except Exception as error:  # the user's code
        if not found:  # else torch has wrapped what ended the step
            raise PlanError(f"One step of {type(fake.module).__name__} on this batch failed: {said(error)}") from error
    if not found:
        raise PlanError(f"The step does not call the block `{name}`, so it cannot be timed. Give `flops=`.")
    return found[0]


def _on(block: nn.Module, device: torch.device, dtype: torch.dtype | None, islands: Islands) -> nn.Module:
    """A copy with random parameters, in training mode."""
    made = copy_with(block, dtype, lambda shape, kind: torch.zeros(shape, dtype=kind, device=device), islands)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0.0, 0.02)
        for buffer, own in zip(made.buffers(), block.buffers(), strict=True):
            if not own.is_meta:
                buffer.copy_(own)
    return made.train()


def _numbers(tensor: Tensor, device: torch.device) -> Tensor:
    """Random ones of that shape; of masks and numbers of things: ones and zeros."""
    sizes = [int(size) for size in tensor.shape]
    if tensor.is_floating_point():
        return torch.randn(sizes, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)
    make = torch.ones if tensor.dtype is torch.bool else torch.zeros
    return make(sizes, dtype=tensor.dtype, device=device)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The median of several runs, each until the device has done its work."""
    return statistics.median([_once(work, device) for _ in range(WARM_UP + REPEATS)][WARM_UP:])


def _once(work: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began
