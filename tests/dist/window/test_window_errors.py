"""What is wrong in a window raises on every rank, before any collective, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.engine import Engine
from tests.support import engines, models, parity
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import STAGES


def _engine(stage: int, seconds: float = 60, model: nn.Module | None = None) -> Engine:
    return engines.make_engine(model or models.ByteModel(), stage, compile=False, timeout=timedelta(seconds=seconds))


def _fail(grad: Tensor) -> None:
    raise ArithmeticError("in backward")


Misuse = Callable[[Engine, torch.optim.Optimizer, Callable[[int], None]], object]


def _swallows(engine: Engine, _: Any, backward: Callable[[int], None]) -> None:
    with contextlib.suppress(ArithmeticError):
        batch = models.Batches(models.rank())[8]
        loss = engines.token_loss(engine.model, batch)
        loss.register_hook(_fail)
        (loss * engine.model(batch).sum()).backward()
    backward(7)


def _enter(context: Any) -> None:
    with context:
        pass


# what happens in a window, how it was opened, and what is said
MISUSES: dict[str, tuple[Misuse, dict[str, Any], str]] = {
    "step": (lambda _, optimizer, __: optimizer.step(), {}, "inside `coalesce_grad_reduction`"),
    "nest": (lambda engine, *_: _enter(engine.windows.open("auto", None, None)), {}, "do not nest"),
    "accumulate": (lambda engine, *_: _enter(engine.accumulation()), {}, "window defers already"),
    "backward": (_swallows, {}, "are incomplete"),
    "raise": (lambda *_: _fail(torch.ones(())), {}, "in backward"),
    "gather": (lambda *_: None, {"gather": "never"}, "choose 'auto', 'window' or 'use'"),
    "old gather": (lambda *_: None, {"gather": "step"}, "now `gather='window'`"),
    "bytes": (lambda *_: None, {"max_bytes": -1}, "must be a number of bytes"),
    "dtype": (lambda *_: None, {"accumulate_dtype": torch.float16}, "choose None or torch.float32"),
    "inside accumulation": (lambda *_: None, {}, "cannot open inside an accumulation"),
}


@STAGES
@on_ranks()
def test_misuse_raises_and_leaves_nothing(stage: int) -> None:
    """After each misuse the next step is right."""
    model, twin = models.pair(models.ByteModel)
    data = models.Batches(models.rank())
    with engines.closing(_engine(stage, model=model)) as engine:
        optimizer = engines.sgd(engine, model)

        def backward(number: int) -> None:
            engines.backward(engine, engines.token_loss(model, data[number]))

        for number, (name, (misuse, options, text)) in enumerate(MISUSES.items()):
            arguments = {"gather": "auto", "max_bytes": None, "accumulate_dtype": None} | options
            around = engine.accumulation() if name == "inside accumulation" else contextlib.nullcontext()
            with (
                pytest.raises((RuntimeError, ValueError, ArithmeticError), match=re.escape(text)),
                engine.training_step(),
                around,
                engine.windows.open(*arguments.values()),
            ):
                backward(9)
                misuse(engine, optimizer, backward)
            assert engine.runtime.core.deferred_bytes() == 0, name
            optimizer.zero_grad()
            with engine.training_step():
                backward(number)
            optimizer.step()
    engines.window_reference(twin, [[number] for number in range(len(MISUSES))])
    assert models.deviation(model, twin) <= 1e-6


# ---- what only some ranks do ----


def _opens_alone(stage: int, gather: Any) -> None:
    """Rank 0 opens a window, the others do not."""
    engine, data = _engine(stage, seconds=20), models.Batches(models.rank())
    opened = engine.windows.open(gather, None, None) if models.rank() == 0 else contextlib.nullcontext()
    with engine.training_step(), opened:
        for number in range(3):
            engines.backward(engine, engines.token_loss(engine.model, data[number]))


def _raises_alone(stage: int, gather: Any) -> None:
    """Rank 0 raises in a window."""
    engine, data = _engine(stage, seconds=6), models.Batches(models.rank())
    with engine.training_step(), engine.windows.open(gather, None, None):
        for number in range(3):
            engines.backward(engine, engines.token_loss(engine.model, data[number]))
        if models.rank() == 0:
            raise ArithmeticError("on rank 0 only")


def _runs_more(known: bool) -> None:
    """Rank 0 runs three backwards in a window, the others one. ``known``: after windows that were alike, so that the
    order of the units is known, and what follows each."""
    engine, data = _engine(3), models.Batches(models.rank())
    with engine.training_step():
        for count in [1, 1, 3 if models.rank() == 0 else 1] if known else [3 if models.rank() == 0 else 1]:
            with engine.windows.open("use", None, None):
                for number in range(count):
                    engines.backward(engine, engines.token_loss(engine.model, data[number]))


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("body", "arguments", "text"),
    [
        (_opens_alone, (1, "use"), "ranks wait for each other"),
        pytest.param(_opens_alone, (2, "use"), "ranks wait for each other", marks=LONG),
        pytest.param(_opens_alone, (3, "use"), "zerocompile: ", marks=LONG),
        pytest.param(_opens_alone, (3, "window"), "zerocompile: ", marks=LONG),
        (_raises_alone, (1, "use"), "window 1 of `coalesce_grad_reduction` with ArithmeticError: on rank 0 only"),
        (_raises_alone, (3, "use"), "failed inside window 1"),
        pytest.param(_raises_alone, (2, "use"), "failed inside window 1", marks=LONG),
        pytest.param(_raises_alone, (3, "window"), "failed inside window 1", marks=LONG),
        (_runs_more, (False,), "ranks wait for each other: rank 0 waits in gather number"),
        pytest.param(_runs_more, (True,), "each other: rank 0 waits in the gather", marks=LONG),
    ],
)  # fmt: skip
def test_what_only_some_ranks_do_is_an_error_on_all(ranks: Ranks, body: Any, arguments: Any, text: str) -> None:
    """A window that a rank does not open, or fails in: no rank hangs, each says what happened."""
    found = ranks.expect_error(body, *arguments, timeout=60)
    if ranks.device == "cuda" and body is _opens_alone:
        text = "zerocompile: "  # the other rank's host waits nowhere: its reduction stands on the device
    assert text in found, found
    if (
        ranks.device == "cpu" or body is not _opens_alone
    ):  # there NCCL's watchdog ends the rank that waits, later than this
        assert found.count("Traceback") >= 2 and "hangs after" not in found


@pytest.mark.parametrize(
    ("stage", "gather", "max_bytes", "compiled"),
    [
        (3, "window", 0, True),
        (1, "window", 0, False),
        pytest.param(2, "window", 0, True, marks=LONG),
        pytest.param(3, "window", None, False, marks=LONG),
    ],
)
@on_ranks()
def test_ranks_train_on_after_one_failed_early_in_a_window(
    stage: int, gather: Any, max_bytes: int | None, compiled: bool
) -> None:
    """Rank 0 fails early in a window, the others run two more backwards in it; all catch that and train on."""
    model, twin = models.pair(models.ByteModel)
    data, start = models.Batches(models.rank()), time.monotonic()
    with engines.engine(model, stage, compile="blocks" if compiled else False, timeout=timedelta(seconds=60)) as engine:
        optimizer = engines.sgd(engine, model)

        def window(*numbers: int, fails: bool = False) -> None:
            with engine.training_step(), engine.windows.open(gather, max_bytes, None):
                for number in numbers:
                    engines.backward(engine, engines.token_loss(model, data[number]))
                    if fails:
                        raise ArithmeticError("early")

        first = models.rank() == 0
        for number in (4, 14):
            with pytest.raises((ArithmeticError, RuntimeError), match="early" if first else "failed inside window"):
                window(0, 1, 2, fails=first)
            window(number, number + 1)
            optimizer.step()
            optimizer.zero_grad()
    parity.reference(twin, 2, _sum_of_losses, _pairs(4, 14))
    assert models.deviation(model, twin) < 1e-6 and time.monotonic() - start < 45


def _sum_of_losses(model: nn.Module, batches: Sequence[Tensor]) -> Any:
    return sum(engines.token_loss(model, batch) for batch in batches)


def _pairs(*numbers: int) -> Callable[[int], Any]:
    """By rank, for each number its batch and the next one."""
    return lambda rank: [[models.Batches(rank)[number], models.Batches(rank)[number + 1]] for number in numbers]


def _goes_on_apart(
    max_bytes: int | None, compiled: bool, failing: tuple[int, ...]
) -> tuple[list[str], Engine, nn.Module]:
    """Parameters are gathered at each use; some ranks fail after one backward, the others after three, if they can.
    What is said, within half a minute; the engine; and a twin of the model as it was."""
    model, twin = models.pair(models.ByteModel)
    data, said, start = models.Batches(models.rank()), [], time.monotonic()
    engine = engines.make_engine(model, 3, compile="blocks" if compiled else False, timeout=timedelta(minutes=5))
    optimizer = engines.sgd(engine, model)

    def window(numbers: list[int], fails: bool) -> None:
        with engine.training_step(), engine.windows.open("use", max_bytes, None):
            for number in numbers:
                engines.backward(engine, engines.token_loss(model, data[number]))
                if fails:
                    raise ArithmeticError("early")

    for fails, numbers in ((False, [0, 1]), (True, [2, 3, 4]), (False, [5, 6]), (False, [7, 8])):
        try:
            window(numbers, fails and models.rank() in failing)
            optimizer.step()
        except (ArithmeticError, RuntimeError) as error:
            said.append(str(error))
        optimizer.zero_grad()
    assert time.monotonic() - start < 30
    return said, engine, twin


@pytest.mark.parametrize(("max_bytes", "compiled"), [(None, True), (0, False), pytest.param(None, False, marks=LONG)])
@on_ranks()
def test_ranks_that_have_gathered_different_units_in_a_window(max_bytes: int | None, compiled: bool) -> None:
    """One fails early and all catch that: their gathers would not match any more, so all raise, now and later."""
    said, engine, _ = _goes_on_apart(max_bytes, compiled, (0,))
    engine.abandon()
    if models.device() == "cuda":  # some ranks wait in gathers to which rank 0 does not come
        engine.runtime.messages.end(said[-1])
    first, second, third = said
    assert ("early" if models.rank() == 0 else "failed inside window 2") in first, said
    for text in (second, third):
        assert "has left window 2 of `coalesce_grad_reduction` by an exception" in text, said
        assert "gather='window'" in text and "ckpt_path" in text, said


@on_ranks()
def test_ranks_that_all_fail_at_the_same_place_in_a_window() -> None:
    said, engine, twin = _goes_on_apart(None, True, tuple(range(models.world())))
    engine.unshard()
    parity.reference(twin, 3, _sum_of_losses, _pairs(0, 5, 7))
    assert said == ["early"] and models.deviation(engine.model, twin) < 1e-6
