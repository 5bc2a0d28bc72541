"""The side that is right by construction: one plain model, all ranks' gradients, and their mean by hand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import nets
from tests.fuzz.nets import Boom
from tests.fuzz.play import Note, Side, make_optimizers
from tests.fuzz.program import Clip, Program, Step, Window

_WIDTH_OF = {torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


class Reference(Side):
    """``mean``: what ``p.grad`` is; ``local``: of each rank, what is not reduced yet."""

    def __init__(self, program: Program, device: str, world: int) -> None:
        super().__init__(program, nets.build(program.model).to(device))
        self.device, self.world = device, world
        self._optimizers = make_optimizers(self.net, program.options)
        self.names = {parameter: name for name, parameter in self.net.named_parameters()}
        self.mean: dict[Tensor, Tensor] = {}
        self.local: list[dict[Tensor, Tensor]] = [{} for _ in range(self.world)]
        self.defers = False
        self.in_fp32 = False  # a window sums in float32
        # dtypes of what is summed in float32
        self.raw: list[dict[Tensor, torch.dtype]] = [{} for _ in range(self.world)]

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def forward(self, number: int, trip: tuple[str, int] | None, penalty: str) -> Any:
        losses = []
        for rank in range(self.world):
            nets.set_rank(self.net, rank)
            nets.set_calls(self.net, number)
            self.net.trip = trip
            try:
                loss = self.net(self.batch(rank, number, self.device)).square().mean()
            finally:
                self.net.trip = None
            losses.append(loss + penalty_of(self.net, penalty))
        return losses

    def sum(self, left: Any, right: Any) -> Any:
        return [a + b for a, b in zip(left, right, strict=True)]

    def backward(self, loss: Any, retain: bool = False) -> bool:
        for rank, one in enumerate(loss):
            if not one.requires_grad:
                continue
            for parameter in self.names:
                parameter.grad = None if self.in_fp32 else self.local[rank].get(parameter)
            nets.set_rank(self.net, rank)  # a checkpoint computes again
            try:
                one.backward(retain_graph=retain)
                found = {p: p.grad for p in self.names if p.grad is not None}
                self.local[rank] = self._in_fp32(rank, found) if self.in_fp32 else found
            finally:
                for parameter in self.names:
                    parameter.grad = None
        if not self.defers:
            self.reduce()
        return any(one.requires_grad for one in loss)

    def _in_fp32(self, rank: int, found: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """What waits on a rank with the gradients of one more backward, summed in float32."""
        own = self.local[rank]
        for parameter, grad in found.items():
            if parameter not in own or parameter not in self.raw[rank]:
                self.raw[rank][parameter] = own.get(parameter, grad).dtype
        return own | {p: own[p].float() + grad.float() if p in own else grad.float() for p, grad in found.items()}

    def reduce(self) -> None:
        for parameter in self.names:
            parts = [own.get(parameter) for own in self.local]
            there = [part for part in parts if part is not None]
            if not there:
                continue
            dtype = parameter.grad_dtype or max((part.dtype for part in there), key=lambda d: _WIDTH_OF[d])
            total = sum((part.to(dtype) for part in there[1:]), there[0].to(dtype)) / self.world
            if parameter in self.mean:  # as torch does: in place, in the dtype that is there
                self.mean[parameter] = (self.mean[parameter] + total).to(self.mean[parameter].dtype)
            else:
                self.mean[parameter] = total
        self.local = [{} for _ in range(self.world)]

    def evaluate(self, number: int, how: str) -> None:
        pass

    @contextlib.contextmanager
    def window(self, op: Window) -> Iterator[None]:
        self.defers, self.in_fp32 = True, op.fp32
        try:
            yield
            for own, raw in zip(self.local, self.raw, strict=True):  # reduced in their own dtypes
                own.update({p: grad.to(raw[p]) for p, grad in own.items() if p in raw})
            self.reduce()
        except Boom:
            self.local = [{} for _ in range(self.world)]
            raise
        finally:
            self.defers, self.in_fp32 = False, False
            self.raw = [{} for _ in range(self.world)]

    def fail_at_end(self, who: str) -> None:
        raise Boom("in a window")

    @contextlib.contextmanager
    def accumulation(self) -> Iterator[None]:
        self.defers = self.options.stage == 1 or self.options.defer_grad_sync
        try:
            yield
        finally:
            self.defers = False

    def step(self, op: Step, closure: Callable[[], None] | None) -> None:
        optimizer = self._optimizers[min(op.of, len(self._optimizers) - 1)]

        def before() -> None:
            if closure is not None:
                closure()
            self.reduce()
            self._lend()

        self.reduce()  # what waits is reduced before users' hooks and closures run
        if op.fails == "pre_hook":
            raise Boom("in a hook")
        try:
            optimizer.step(before)  # type: ignore[arg-type]
        except Boom:
            if op.fails == "post_hook":  # everything is updated
                self._release(optimizer)
            raise
        finally:
            for parameter in self.names:
                parameter.grad = None
        self._release(optimizer)

    def _lend(self) -> None:
        for parameter in self.names:
            parameter.grad = self.mean.get(parameter)

    def _release(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.options.keep_gradients:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.mean.pop(parameter, None)

    def zero(self, of: str, none: bool) -> None:
        chosen = list(self.names)
        if of in ("0", "1"):
            optimizer = self._optimizers[min(int(of), len(self._optimizers) - 1)]
            chosen = [p for group in optimizer.param_groups for p in group["params"]]
        for grads in (self.mean, *self.local):
            for parameter in chosen:
                if none or of == "each":
                    grads.pop(parameter, None)
                elif parameter in grads:
                    grads[parameter] = torch.zeros_like(grads[parameter])

    def clip(self, op: Clip) -> None:
        self.reduce()
        optimizer = self._optimizers[min(op.of, len(self._optimizers) - 1)]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._lend()
        if op.how == "value" and any(p.grad is not None for p in parameters):  # torch raises if there is none
            torch.nn.utils.clip_grad_value_(parameters, op.value)
        elif op.how != "value":
            torch.nn.utils.clip_grad_norm_(parameters, op.value)
        for parameter in self.names:
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p not in self.mean else self.mean[p].clone() for p, name in self.names.items()}

    def values(self, how: str) -> dict[str, Tensor | None]:
        return {name: p.detach().clone() for p, name in self.names.items()}

    def write(self, name: str, how: str) -> None:
        with torch.no_grad():
            dict(self.net.named_parameters())[name].mul_(0.5)

    def scale(self) -> None:
        for grad in self.mean.values():
            grad.mul_(0.5)

    @contextlib.contextmanager
    def toggled(self, number: int) -> Iterator[None]:
        chosen = {p for group in self._optimizers[number].param_groups for p in group["params"]}
        before = {p: p.requires_grad for p in self.names if p not in chosen}
        for parameter in before:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter, requires_grad in before.items():
                parameter.requires_grad_(requires_grad)

    def save(self) -> None:
        self._state = copy.deepcopy(self.net.state_dict())

    def load(self) -> None:
        self.net.load_state_dict(self._state)


def penalty_of(net: Any, penalty: str) -> Tensor | float:
    if penalty == "masters":
        return sum(p.float().square().sum() for p in net.parameters() if p.dtype != torch.bfloat16) * 0.01  # type: ignore[no-any-return]
    if penalty == "attribute":
        return (net.head.weight * net.head.weight.t()).sum() * 0.02  # type: ignore[no-any-return]
    return 0.0


def play(program: Program, device: str = "cpu", world: int = 2, nudge: int | None = None) -> list[Note]:
    """What is right on ``world`` ranks. ``nudge``: a seed; float32 parameters start an ulp apart, or as they are."""
    side = Reference(program, device, world)
    if nudge is not None:
        random = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for parameter in side.names:
                if parameter.dtype == torch.float32:
                    parameter.mul_(1 + 2**-23 * torch.randint(-1, 2, parameter.shape, generator=random).to(device))
    for step in range(len(program.steps)):
        side.play(step)
    side.where = "in the end"
    side.note("the state", {name: value.clone() for name, value in side.net.state_dict().items()})
    return side.notes
