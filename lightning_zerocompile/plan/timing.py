"""How fast a device runs a model: its repeated blocks, what is around them, and its memory, each timed.

[Note: timed block] The blocks do nearly all of a step's work, and they are alike. So one of each kind is timed with its
real shapes and the options of the run: kinds differ in parameters or in what they are called with. What is around the
blocks (embedding, head, loss, the model's own Python) is timed, too: one step of the whole model, in which each block
is replaced by something that returns at once. What a block is called with and returns is found in a fake step (see
[Note: fake step]). All numbers are random, those of the batch, or what is known (see [Note: known numbers]).

A device computes while the host already issues what comes next, so a step takes the time of the slower of the two, and
not the sum. Therefore work runs several times between two waits. The host's time ends when the last of these runs has
been issued. To find the device's time, the device is first kept busy until all runs have been issued, so that it never
waits for the host. On the CPU there is no such difference: all of the time is the device's. A device whose clock its
power limits is faster in the first tenths of a second than later. So work of which the device is the limit runs for
`SETTLES` seconds before its time is taken.

[Note: host of the strategy] A run of the strategy costs the host more than the plain model: a unit is entered and left,
gathered and reduced, and each parameter is an operator in the graphs. `STRATEGY` has these costs in numbers of small
operators, so that they follow the speed of the host. They were measured once, on the CPU, as the difference between
steps of the engine and of the plain model with compiled blocks of 2 and of 12 tiny layers.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_zerocompile.plan.trace import FakeStep, PlanError, Step, copy_with, said
from lightning_zerocompile.sharding.islands import NONE, Islands
from lightning_zerocompile.sharding.plan import signature

WARM_UP, ROUNDS, RUNS = 3, 5, 4
SETTLES = 1.0
_CALLS = 1000  # small operators that are timed together
_CYCLES = 2.5e9  # of a device in a second, at most
_SMALL = 64  # elements


@dataclass(frozen=True)
class Seconds:
    """How long one run of some work takes.

    Attributes:
        host: the time until it is issued; on the CPU 0.
        device: the time in which the device computes it.
    """

    host: float
    device: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.host + other.host, self.device + other.device)

    def __mul__(self, times: float) -> Seconds:
        return Seconds(times * self.host, times * self.device)


@dataclass(frozen=True)
class HostCalls:
    """What the strategy costs the host, in small operators, see [Note: host of the strategy].

    Attributes:
        unit, parameter: of one forward and backward.
        step, stepped: of the optimizer's step, and of each parameter in it.
    """

    unit: float
    parameter: float
    step: float = 100.0
    stepped: float = 2.0


STRATEGY = {1: HostCalls(25.0, 3.0), 2: HostCalls(25.0, 3.0), 3: HostCalls(42.0, 8.0)}  # by stage


class Timer:
    """Times work on a device, see [Note: timed block]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], Any]) -> Seconds:
        """Of one run: the median of several rounds of several runs."""
        for _ in range(WARM_UP):
            work()
        rounds = [self._round(work) for _ in range(ROUNDS)]
        issued, done = (statistics.median(times) for times in zip(*rounds, strict=True))
        if self._device.type == "cpu":
            return Seconds(0.0, done)
        busy = statistics.median([self._busy(work, RUNS * issued) for _ in range(ROUNDS)]) / RUNS
        return Seconds(issued, busy if busy <= issued else self._settled(work, busy))

    def _round(self, work: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of one run, among several between two waits: until it was issued, and until it was done."""
        self.wait()
        began = self.now()
        for _ in range(RUNS):
            work()
        issued = self.now() - began
        self.wait()
        return issued / RUNS, (self.now() - began) / RUNS

    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _busy(self, work: Callable[[], Any], issuing: float) -> float:
        """Seconds that the device computes in several runs, which it finds issued already."""
        self.wait()
        began = self.keep_busy(2 * issuing)
        for _ in range(RUNS):
            work()
        return self.passed(began)

    def _settled(self, work: Callable[[], Any], seconds: float) -> float:
        """Seconds that the device takes for a run after many others; ``seconds``: it takes about so long."""
        runs = max(RUNS, math.ceil(SETTLES / seconds))
        for _ in range(runs):
            work()
        began = self.keep_busy(0.0)
        for _ in range(runs):
            work()
        return self.passed(began) / runs

    def keep_busy(self, seconds: float) -> Any:
        """Gives the device something to do for at least so long; returns the moment when that ends."""
        with torch.cuda.device(self._device):
            torch.cuda._sleep(int(seconds * _CYCLES))  # type: ignore[no-untyped-call]
            return torch.cuda.current_stream().record_event(_event())

    def passed(self, began: Any) -> float:
        """Seconds of the device from that moment until it has done all that it was given."""
        with torch.cuda.device(self._device):
            ended = torch.cuda.current_stream().record_event(_event())
        self.wait()
        return float(began.elapsed_time(ended)) / 1e3

    def small(self) -> float:
        """Seconds in which the host issues one small operator."""
        value = torch.zeros(_SMALL, device=self._device)

        def calls() -> None:
            for _ in range(_CALLS // RUNS):
                value.add_(1)

        calls()
        issued = statistics.median([self._round(calls)[0] for _ in range(ROUNDS)])
        return issued / (_CALLS // RUNS)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass
class _Kind:
    """Equal blocks that are called alike.

    Attributes:
        name: of the first.
        inputs: what it is called with, without data.
        calls: of all of them in one step.
    """

    name: str
    inputs: tuple[Any, Any]
    calls: int = 0


def step_seconds(
    module: nn.Module,
    batch: Any,
    blocks: Sequence[str],
    device: torch.device,
    *,
    dtype: torch.dtype | None,
    autocast: torch.dtype | None,
    compiled: Callable[[nn.Module], Callable[..., Any]] | None,
    step: Step,
    checkpointed: bool = False,
    islands: Islands = NONE,
    timer: Timer | None = None,
) -> Seconds:
    """Forward and backward of one rank, without the strategy, see [Note: timed block].

    Args:
        module: as the user made it, possibly on meta; it is not changed.
        batch: of one rank, as the step gets it.
        blocks: names of the repeated blocks.
        device: where it runs; its memory must have room for one block with its gradients and activations, and then for
            all that is around the blocks.
        dtype, autocast, step, checkpointed: as in :func:`~lightning_zerocompile.plan.trace.trace_step`.
        compiled: compiles a block; ``None``: it runs as eager code.
        islands: what of the module computes in float32.
        timer: of the device; tests have their own.

    Raises:
        PlanError: the step calls no block, or a part of it fails on the device.
    """
    timer = timer or Timer(device)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if autocast is not None:
        around = lambda: torch.autocast(device.type, dtype=autocast)  # noqa: E731
    kinds, results = _calls(FakeStep.of(module, batch, dtype, autocast, islands), blocks, step)
    total = Seconds(0.0, 0.0)
    for kind in kinds:
        try:
            work = _block(module, kind, device, dtype, islands, around, compiled, checkpointed)
            total += _quietly(timer, work) * kind.calls
            del work
        except Exception as error:  # the user's code, the compiler's, or no memory
            raise PlanError(
                f"The block `{kind.name}` cannot be timed on {device}: {said(error)} Give `flops=`."
            ) from error
    try:
        work = _outside(module, batch, results, device, dtype, islands, around, step)
        return total + _quietly(timer, work)
    except Exception as error:  # the same
        raise PlanError(
            f"What {type(module).__name__} computes around its blocks cannot be timed on {device}: {said(error)} Give "
            "`flops=`."
        ) from error


def _quietly(timer: Timer, work: Callable[[], Any]) -> Seconds:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of `self.log` without a Trainer
        return timer.seconds(work)


def memory_rate(device: torch.device, size: int = 2**28) -> float:
    """Bytes a second that the device's memory reads and writes, in a copy of ``size`` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / Timer(device).seconds(lambda: target.copy_(source)).device


def link_rate(device: torch.device, size: int = 2**28) -> float:
    """Bytes a second between pinned host memory and the device, in both directions at once, together.

    Source and target are ``size`` bytes each, on either side.
    """
    down, up = (torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def both() -> None:
        here = torch.cuda.current_stream(device)
        for stream, (to, of) in zip(streams, ((down, source), (target, up)), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                to.copy_(of, non_blocking=True)
        for stream in streams:
            here.wait_stream(stream)

    return 2 * size / Timer(device).seconds(both).device


def _calls(fake: FakeStep, blocks: Sequence[str], step: Step) -> tuple[list[_Kind], dict[str, list[Any]]]:
    """The kinds of blocks of a step, and by name what each call of a block has returned: tensors without data."""
    kinds: dict[Any, _Kind] = {}
    results: dict[str, list[Any]] = {name: [] for name in blocks}

    def watch(name: str, block: nn.Module) -> None:
        like = signature(block)

        def called(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            leaves, spec = tree_flatten((args, kwargs))
            key = (like, str(spec), tuple(_described(leaf) for leaf in leaves))
            kinds.setdefault(key, _Kind(name, (args, kwargs))).calls += 1
            results[name].append(result)

        block.register_forward_hook(called, with_kwargs=True)

    for name in blocks:
        watch(name, fake.module.get_submodule(name))
    try:
        with fake.around():
            fake.forward(step)
    except Exception as error:  # the user's code
        raise PlanError(f"One step of {type(fake.module).__name__} on this batch failed: {said(error)}") from error
    if not kinds:
        raise PlanError(
            f"The step calls none of the blocks (`{blocks[0]}`, ...), so it cannot be timed. Give `flops=`."
        )
    return list(kinds.values()), results


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(int(size) for size in leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)


def _block(
    module: nn.Module,
    kind: _Kind,
    device: torch.device,
    dtype: torch.dtype | None,
    islands: Islands,
    around: Callable[[], AbstractContextManager[Any]],
    compiled: Callable[[nn.Module], Callable[..., Any]] | None,
    checkpointed: bool,
) -> Callable[[], None]:
    """Forward and backward of one block."""
    block = _on(module.get_submodule(kind.name), device, dtype, islands.inside(kind.name))
    args, kwargs = apply_to_collection(kind.inputs, Tensor, lambda tensor: _numbers(tensor, device))
    call: Callable[..., Any] = block if compiled is None else compiled(block)
    if checkpointed:
        call = partial(checkpoint, call, use_reentrant=False)
    leaves = [leaf for leaf in (*block.parameters(), *tree_leaves((args, kwargs))) if isinstance(leaf, Tensor)]
    grads: list[Tensor] = []

    def run() -> None:
        with around():
            result = call(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if len(grads) != len(outputs):
            grads[:] = [torch.ones_like(output) for output in outputs]
        torch.autograd.backward(outputs, grads)
        for leaf in leaves:
            leaf.grad = None

    return run


class _Passed(torch.autograd.Function):
    """Stands for a block: it returns at once what a block could have returned, and takes part in the backward."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Tensor], passed: Callable[[Tensor], Tensor], *inputs: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        ctx.gradients = [passed(value) if need else None for value, need in zip(inputs, needed, strict=True)]
        outputs = tuple(result.view_as(result) for result in results)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, None, *ctx.gradients)


def _outside(
    module: nn.Module,
    batch: Any,
    results: dict[str, list[Any]],
    device: torch.device,
    dtype: torch.dtype | None,
    islands: Islands,
    around: Callable[[], AbstractContextManager[Any]],
    step: Step,
) -> Callable[[], None]:
    """Forward and backward of all that is around the blocks, which are replaced."""
    made = _on(module, device, dtype, islands, tuple(f"{name}." for name in results))
    known: dict[Any, Tensor] = {}

    def passed(like: Tensor) -> Tensor:
        key = tuple(int(size) for size in like.shape), like.dtype
        if key not in known:
            known[key] = torch.zeros(key[0], dtype=like.dtype, device=device)
        return known[key]

    anchor = torch.zeros((), device=device, requires_grad=True)  # of blocks whose inputs need no gradient

    def replace(name: str, block: nn.Module) -> None:
        flat = [tree_flatten(result) for result in results[name]]
        turn = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal turn
            leaves, spec = flat[turn % len(flat)]
            turn += 1
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            new = iter(_Passed.apply([passed(leaf) for leaf in wanted], passed, *inputs, anchor))  # type: ignore[no-untyped-call]
            return tree_unflatten([next(new) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

        block.forward = forward

    for name in results:
        if results[name]:
            replace(name, made.get_submodule(name))

    def own(tensor: Tensor) -> Tensor:
        tensor = _numbers(tensor, device) if tensor.is_meta else tensor.to(device)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    batch = apply_to_collection(batch, Tensor, own)
    parameters = [parameter for parameter in made.parameters() if not parameter.is_meta]

    def run() -> None:
        with around():
            loss = step(made, batch)
        if loss.requires_grad:
            loss.backward()
        for parameter in parameters:
            parameter.grad = None

    return run


def _on(
    module: nn.Module, device: torch.device, dtype: torch.dtype | None, islands: Islands, without: tuple[str, ...] = ()
) -> nn.Module:
    """A copy with random parameters, in training mode.

    Args:
        without: prefixes of the names of parameters and buffers that are on meta in the copy.
    """

    def make(name: str, shape: torch.Size, kind: torch.dtype) -> Tensor:
        where = torch.device("meta") if name.startswith(without or ("\0",)) else device
        return torch.zeros(shape, dtype=kind, device=where)

    made = copy_with(module, dtype, make, islands)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.is_floating_point() and not parameter.is_meta:
                parameter.normal_(0.0, 0.02)
        for buffer, own in zip(made.buffers(), module.buffers(), strict=True):
            if not own.is_meta and not buffer.is_meta:
                buffer.copy_(own)
    return made.train()


def _numbers(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of that shape and dtype: known numbers stay, others are random; masks are all true, integers 0."""
    if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
        return tensor.to(device)
    sizes = [int(size) for size in tensor.shape]
    if tensor.is_floating_point():
        return torch.randn(sizes, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)
    make = torch.ones if tensor.dtype is torch.bool else torch.zeros
    return make(sizes, dtype=tensor.dtype, device=device)
