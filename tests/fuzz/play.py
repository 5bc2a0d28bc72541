"""Plays a program; :mod:`reference` and :mod:`run` are the two sides on which each operation means something.

Both sides run the same control flow, so what one notes down can be compared with what the other does.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import nets
from tests.fuzz.nets import Boom, Net
from tests.fuzz.program import (
    Accumulate,
    Backward,
    Clip,
    Evaluate,
    Freeze,
    Load,
    Op,
    Options,
    Program,
    Read,
    Save,
    Scale,
    Snap,
    Step,
    Toggle,
    Window,
    Write,
    Zero,
)

Note = tuple[str, dict[str, Tensor | None]]  # what was read, and the values by name
LR = 0.1


class Side(ABC):
    """What one side does for each operation; :meth:`play` is the same for both."""

    def __init__(self, program: Program, net: Net) -> None:
        self.program, self.options, self.net = program, program.options, net
        self.notes: list[Note] = []
        self.number = 0  # of the next batch
        self.waiting = False  # gradients of an accumulation wait for the next backward
        self.where = ""  # for notes
        self.in_window = self.in_accumulation = self.saved = False

    # ---- what a side does ----

    @abstractmethod
    def forward(self, number: int, trip: tuple[str, int] | None, penalty: str) -> Any: ...
    @abstractmethod
    def sum(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def backward(self, loss: Any, retain: bool = False) -> bool: ...  # whether there was anything to differentiate
    @abstractmethod
    def evaluate(self, number: int, how: str) -> None: ...
    @abstractmethod
    def window(self, op: Window) -> AbstractContextManager[None]: ...
    @abstractmethod
    def fail_at_end(self, who: str) -> None: ...
    @abstractmethod
    def accumulation(self) -> AbstractContextManager[None]: ...
    @abstractmethod
    def step(self, op: Step, closure: Callable[[], None] | None) -> None: ...
    @abstractmethod
    def zero(self, of: str, none: bool) -> None: ...
    @abstractmethod
    def clip(self, op: Clip) -> None: ...
    @abstractmethod
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...
    @abstractmethod
    def gradients(self) -> dict[str, Tensor | None]: ...
    @abstractmethod
    def values(self, how: str) -> dict[str, Tensor | None]: ...
    @abstractmethod
    def write(self, name: str, how: str) -> None: ...
    @abstractmethod
    def scale(self) -> None: ...
    @abstractmethod
    def toggled(self, number: int) -> AbstractContextManager[None]: ...
    @abstractmethod
    def save(self) -> None: ...
    @abstractmethod
    def load(self) -> None: ...

    # ---- the program ----

    def batch(self, rank: int, number: int, device: torch.device | str) -> Tensor:
        """The numbers that a rank's forward takes.

        In eager code a reentrant checkpoint gives its parameters no gradients if its input needs none. In a graph of
        Dynamo's, of plain torch's too, it gives them all the same: so there the input always needs one.
        """
        model, mode = self.program.model, self.options.mode
        inside = "reentrant" in model.block and mode != "eager"
        around = model.around == "reentrant" and mode == "model"
        return nets.batch(model.width, rank, number, device).requires_grad_(inside or around)

    def play(self, step: int) -> None:
        for position, op in enumerate(self.program.steps[step]):
            self.where = f"step {step}, operation {position}: {type(op).__name__}"
            try:
                self.do(op)
            except Boom:  # a backward's gradients are incomplete, and so are those of an accumulation
                self.waiting = False
                self.zero("module", True)
        if step + 1 == len(self.program.steps):
            self.where = "in the end"
            self.do(Snap())

    def do(self, op: Op) -> None:
        getattr(self, f"do_{type(op).__name__.lower()}")(op)

    def note(self, what: str, values: dict[str, Tensor | None]) -> None:
        self.notes.append((f"{self.where}: {what}", values))

    def _next(self) -> int:
        self.number += 1
        return self.number

    def do_backward(self, op: Backward) -> None:
        trip = (op.fails, op_block(op, self.number)) if op.fails else None
        try:
            loss = self.forward(self._next(), trip if op.kind != "late" or op.fails == "forward" else None, op.penalty)
            other = self.forward(self._next(), trip, op.penalty) if op.kind in ("sum", "late") else None
        except Boom:
            return
        if op.kind == "late":
            self._backward(other)
            self._backward(loss)
        else:
            loss = self.sum(loss, other) if op.kind == "sum" else loss
            if op.kind == "twice":
                self._backward(loss, retain=True)
            self._backward(loss)

    def _backward(self, loss: Any, retain: bool = False) -> None:
        done = self.backward(loss, retain)
        if done and not (self.in_window or self.in_accumulation):
            self.waiting = False

    def do_evaluate(self, op: Evaluate) -> None:
        self.evaluate(self._next(), op.how)

    def do_zero(self, op: Zero) -> None:
        self.zero(op.of, op.none)

    def do_window(self, op: Window) -> None:
        try:
            with self.window(op):
                self.in_window = True
                for inner in op.body:
                    self.do(inner)
                if op.fails:
                    self.fail_at_end(op.fails)
        except Boom:
            pass  # what the window held is dropped, and what was reduced before it stays
        finally:
            self.in_window = self.waiting = False

    def do_accumulate(self, op: Accumulate) -> None:
        defers = self.options.stage == 1 or self.options.defer_grad_sync
        self.in_accumulation = True
        try:
            with self.accumulation():
                self.waiting = self.waiting or defers
                for inner in op.body:
                    self.do(inner)
                if op.fails:
                    raise Boom("in an accumulation")
        finally:
            self.in_accumulation = False

    def do_step(self, op: Step) -> None:
        closure = None
        if op.closure or op.fails.startswith("closure"):

            def closure() -> None:
                if op.fails == "closure":
                    raise Boom("in a closure")
                if op.closure == "zero":
                    self.zero(str(op.of), True)
                if op.closure == "window":
                    self.do(Window((Backward(), Backward())))
                elif op.closure:
                    self.do(Backward())
                if op.fails == "closure_end":
                    raise Boom("in a closure")

        with contextlib.suppress(Boom), self.failing(op):
            self.step(op, closure)
            self.waiting = False
        if op.fails == "post_hook":  # everything is updated: whether gradients stay is not promised
            self.waiting = False
            self.zero(str(op.of), True)

    @contextlib.contextmanager
    def failing(self, op: Step) -> Any:
        """A failure in the update, or in a hook of the user's."""
        optimizer = self.optimizers()[min(op.of, len(self.optimizers()) - 1)]
        if op.fails == "update":
            group = optimizer.param_groups[0]
            before, group["weight_decay"] = group["weight_decay"], "x"
            try:
                yield
            except (TypeError, RuntimeError) as error:
                if "str" not in str(error) and "alpha" not in str(error):
                    raise
                raise Boom("in an update") from error
            finally:
                group["weight_decay"] = before
        elif op.fails.endswith("hook"):
            register = getattr(optimizer, f"register_step_{op.fails}")

            def hook(*_: Any) -> None:
                raise Boom("in a hook")

            handle = register(hook)
            try:
                yield
            finally:
                handle.remove()
        else:
            yield

    def do_clip(self, op: Clip) -> None:
        if not (self.waiting and op.how == "torch"):
            self.clip(op)
            self.waiting = False

    def do_freeze(self, op: Freeze) -> None:
        if not self.waiting:
            parameters = list(self.net.parameters())
            parameters[op.which % len(parameters)].requires_grad_(not op.on)

    def do_scale(self, op: Scale) -> None:
        if not (self.waiting or self.in_window):
            self.scale()

    def do_toggle(self, op: Toggle) -> None:
        if self.waiting:
            return
        with self.toggled(min(op.of, len(self.optimizers()) - 1)):
            for inner in op.body:
                self.do(inner)

    def do_snap(self, op: Snap) -> None:
        if not (self.waiting or self.in_window):
            self.note("gradients", self.gradients())

    def do_read(self, op: Read) -> None:
        self.note(f"parameters by {op.how}", self.values(op.how))

    def do_write(self, op: Write) -> None:
        names = [name for name, p in self.net.named_parameters()]
        self.write(names[op.which % len(names)], op.how)

    def do_save(self, op: Save) -> None:
        self.save()
        self.saved = True

    def do_load(self, op: Load) -> None:
        if self.saved:
            self.load()


def attribute_of(net: Net, name: str) -> Tensor:
    """A parameter as the attribute of its module."""
    path, _, last = name.rpartition(".")
    value: Tensor = getattr(net.get_submodule(path), last)
    return value


def op_block(op: Backward, number: int) -> int:
    """Where a failing forward or backward fails."""
    return number % 2


def make_optimizers(net: Net, options: Options) -> list[torch.optim.Optimizer]:
    parameters = list(net.parameters())
    half = len(parameters) // 2
    parts = {
        "one": [parameters],
        "halves": [parameters[:half], parameters[half:]],
        "alternate": [parameters[::2], parameters[1::2]],
    }[options.optimizers]
    return [
        torch.optim.SGD(part, lr=LR, momentum=options.momentum, weight_decay=options.weight_decay) for part in parts
    ]
