"""Defects that this machine has found: each with its shortest program, which is replayed.

While a defect is there, ``excluded`` says which programs would meet it; they are not run. Whoever mends it deletes that
argument: then the program is replayed as a test, and random programs like it run again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from tests.fuzz.program import (
    Accumulate,
    Backward,
    Clip,
    Model,
    Op,
    Options,
    Program,
    Read,
    Snap,
    Step,
    Window,
    Write,
    Zero,
    operations,
)


@dataclass(frozen=True)
class Found:
    """A defect. ``excluded``: whether a program meets it; ``None``: it is mended."""

    what: str
    program: Program
    excluded: Callable[[Program], bool] | None = None


def _has(program: Program, wanted: Callable[[Op, Op | None], bool]) -> bool:
    return any(wanted(op, around) for op, around in operations(chain.from_iterable(program.steps)))


_DEFER = (Window, Accumulate)


def _uses(program: Program, *kinds: str) -> bool:
    return any(kind in program.model.block for kind in kinds)


FOUND = (
    Found(
        "view_as_complex of a weight in an eager frame: what autograd saved is restored as a real tensor",
        Program(Model(block=("complex",)), Options(stage=3), ((Backward(), Snap()),)),
    ),
    Found(
        "zero_grad(set_to_none=False) while gradients wait keeps what waits if there are gradients from before",
        Program(steps=((Backward(), Window((Backward(), Zero(none=False))), Snap()),)),
    ),
    Found(
        "zero_grad(set_to_none=False) in a window with max_bytes keeps what was reduced early",
        Program(steps=((Window((Backward(), Zero(none=False)), max_bytes=0), Snap()),)),
    ),
    Found(
        "one rank fails in a window that gathers once, before it has used all: ranks hold other units after it",
        Program(options=Options(stage=3), steps=((Window(gather="window", fails="1"), Backward()),)),
    ),
    Found(
        "an exception in a raw optimizer's step: later steps do not release gradients",
        Program(steps=((Step(raw=True, fails="closure"), Backward(), Step(raw=True), Snap()),)),
    ),
    Found(
        "an exception in a step: user code that computes with parameters() in the same training step sees shards",
        Program(steps=((Step(fails="pre_hook"), Read("masters")),)),
    ),
    Found(
        "a step that raised before it updated anything drops the gradients",
        Program(steps=((Backward(), Step(fails="update"), Snap()),)),
    ),
    Found(
        "several gradients of one parameter in other dtypes are summed before they are cast",
        Program(Model(block=("raw_same",)), steps=((Backward(), Snap()),)),
    ),
    Found(
        "grad_dtype=None: the first backward's dtype stays",
        Program(Model(block=("raw_none",)), steps=((Backward(), Zero(), Backward(), Snap()),)),
    ),
    Found(
        "a backward that raised, and was caught, before a window or accumulation: the next backward in it raises",
        Program(steps=((Backward(fails="backward"), Window((Backward(),))),)),
    ),
    Found(
        "clipping by norm: the norm of a bfloat16 gradient is rounded on each rank, so the factor is an ulp of it off",
        Program(Model(block=("raw_same",)), steps=((Backward(), Clip()),)),
    ),
    Found(
        "a backward that raised, and was caught, after an accumulation of which nothing waits: the next step raises",
        Program(steps=((Accumulate((Backward(),)), Zero(), Backward(fails="backward"), Step(), Backward(), Snap()),)),
    ),
    Found(
        "a compiled graph that reads a parameter without elements before any other",
        Program(Model(block=("empty",)), Options(mode="model"), ((Backward(fails="backward"), Backward(), Snap()),)),
    ),
    Found(
        "a write to a compiled block that stays gathered, in a reentrant checkpoint: the next backward raises as stale",
        Program(
            Model(around="reentrant"),
            Options(stage=3, mode="blocks", keep_gathered=("net.layers",)),
            ((Backward(), Write(which=5), Backward(), Snap()),),
        ),
    ),
    Found(
        "a write after a backward that raised, in a reentrant checkpoint: the next backward raises as stale",
        Program(
            Model(block=("indexed",), around="reentrant"),
            Options(stage=3, mode="blocks"),
            ((Backward(fails="backward"), Write(which=4), Backward(), Snap()),),
        ),
    ),
)


def excluded(program: Program) -> str:
    """The defect that the program would meet; "": none that is known."""
    return next((found.what for found in FOUND if found.excluded is not None and found.excluded(program)), "")
