"""What is wrong in a window raises on every rank, before any collective, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zerocompile.engine import Engine
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import STAGES


def _engine(stage: int, seconds: float = 60) -> Engine:
    return engines.make_engine(models.ByteModel(), stage, compile=False, timeout=timedelta(seconds=seconds))


def _fail(grad: Tensor) -> None:
    raise ArithmeticError("in backward")


@STAGES
@on_ranks(2)
def test_misuse_raises_and_leaves_nothing(stage: int) -> None:
    """What each misuse says; after each the next step is right."""
    expected = {
        "step": "inside `coalesce_grad_reduction`", "nest": "do not nest", "accumulate": "window defers already",
        "inside accumulation": "cannot open inside an accumulation", "gather": "choose 'auto', 'window' or 'use'",
        "old gather": "now `gather=\'window\'`",
        "bytes": "must be a number of bytes", "dtype": "choose None or torch.float32", "backward": "are incomplete",
        "raise": "inside the window",
    }  # fmt: skip
    engine = _engine(stage)
    twin = models.ByteModel()
    twin.load_state_dict({n: full_value(p) for n, p in engine.model.named_parameters()})
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.5)
    engine.attach_optimizers([optimizer])
    data, messages = models.Batches(models.rank()), {}

    def backward(number: int) -> None:
        engines.backward(engine, engines.token_loss(engine.model, data[number]))

    def misuse(what: str) -> None:
        around = engine.accumulation() if what == "inside accumulation" else contextlib.nullcontext()
        with engine.training_step(), around:
            options = {"gather": "never", "bytes": -1, "dtype": torch.float16}
            with engine.windows.open(
                {"gather": "never", "old gather": "step"}.get(what, "auto"),  # type: ignore[arg-type]
                -1 if what == "bytes" else None,
                options["dtype"] if what == "dtype" else None,  # type: ignore[arg-type]
            ):
                backward(9)
                if what == "step":
                    optimizer.step()
                if what == "nest":
                    with engine.windows.open("auto", None, None):
                        pass
                if what == "accumulate":
                    with engine.accumulation():
                        pass
                if what == "backward":
                    with contextlib.suppress(ArithmeticError):
                        loss = engines.token_loss(engine.model, data[8])
                        loss.register_hook(_fail)
                        (loss * engine.model(data[8]).sum()).backward()
                    backward(7)
                if what == "raise":
                    raise ArithmeticError("inside the window")

    whats = [
        "step",
        "nest",
        "accumulate",
        "inside accumulation",
        "gather",
        "old gather",
        "bytes",
        "dtype",
        "backward",
        "raise",
    ]
    steps = 0
    for what in whats:
        try:
            misuse(what)
            messages[what] = "no error"
        except (RuntimeError, ValueError, ArithmeticError) as error:
            messages[what] = str(error)
        assert engine.runtime.core.deferred_bytes() == 0, what
        optimizer.zero_grad()
        with engine.training_step():
            backward(steps)
        optimizer.step()
        steps += 1
    engine.unshard()
    engines.window_reference(twin, [[number] for number in range(steps)])
    messages["deviation"] = str(models.deviation(engine.model, twin))
    assert float(messages.pop("deviation")) <= 1e-6
    assert messages.keys() == expected.keys()
    for what, text in expected.items():
        assert text in messages[what], (what, messages[what])


def _one_sided(what: str, stage: int) -> None:
    engine = _engine(stage, seconds=60 if "counts" in what or what == "not opened" else 6)
    model, data = engine.model, models.Batches(models.rank())
    first = models.rank() == 0

    def backward(number: int) -> None:
        engines.backward(engine, engines.token_loss(model, data[number]))

    with engine.training_step():
        if what.startswith("not opened") and not first:
            for number in range(3):
                backward(number)
            return
        gather: Any = "window" if what.endswith("held") else "use"
        if what == "later counts":  # the order of the units is known, and what follows each
            for _ in range(2):
                with engine.windows.open(gather, None, None):
                    backward(0)
        with engine.windows.open(gather, None, None):
            for number in range(3 if "counts" not in what or first else 1):
                backward(number)
            if what.startswith("raises") and first:
                raise ArithmeticError("on rank 0 only")


@pytest.mark.parametrize(
    ("what", "stage", "text"),
    [
        ("not opened", 1, "ranks wait for each other"),
        pytest.param("not opened", 2, "ranks wait for each other", marks=pytest.mark.long),
        pytest.param("not opened", 3, "zerocompile: ", marks=pytest.mark.long),
        pytest.param("not opened held", 3, "zerocompile: ", marks=pytest.mark.long),
        ("raises", 1, "failed inside window 1 of `coalesce_grad_reduction` with ArithmeticError: on rank 0 only"),
        ("raises", 3, "failed inside window 1"),
        pytest.param("raises", 2, "failed inside window 1", marks=pytest.mark.long),
        pytest.param("raises held", 3, "failed inside window 1", marks=pytest.mark.long),
        ("counts", 3, "ranks wait for each other: rank 0 waits in gather number"),
        pytest.param("later counts", 3, "each other: rank 0 waits in the gather", marks=pytest.mark.long),
    ],
)
def test_what_only_some_ranks_do_is_an_error_on_all(ranks: Ranks, what: str, stage: int, text: str) -> None:
    """A window that a rank does not open, or fails in: no rank hangs, each says what happened."""
    found = ranks.expect_error(_one_sided, what, stage, timeout=60)
    assert text in found
    if ranks.device == "cpu" or what != "not opened":  # there NCCL's watchdog ends the rank that waits, later than this
        assert found.count("Traceback") >= 2 and "hangs after" not in found


def _goes_on(stage: int, gather: Any, max_bytes: int | None, compiled: bool) -> dict[str, Any]:
    """Rank 0 fails early in a window, the others run two more backwards in it; all catch that and train on."""
    model, twin = models.ByteModel(), models.ByteModel()
    twin.load_state_dict(model.state_dict())
    data, said, start = models.Batches(models.rank()), "", time.monotonic()
    with engines.engine(model, stage, compile="blocks" if compiled else False, timeout=timedelta(seconds=60)) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine.attach_optimizers([optimizer])

        def backward(number: int) -> None:
            engines.backward(engine, engines.token_loss(model, data[number]))

        for first in (0, 10):
            try:
                with engine.training_step(), engine.windows.open(gather, max_bytes, None):
                    for number in range(3):
                        backward(number)
                        if models.rank() == 0:
                            raise ArithmeticError("early")
            except (ArithmeticError, RuntimeError) as error:
                said += str(error)
            with engine.training_step(), engine.windows.open(gather, max_bytes, None):
                backward(first + 4)
                backward(first + 5)
            optimizer.step()
            optimizer.zero_grad()
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=0.5)
    for first in (0, 10):
        for rank in range(models.world()):
            for number in (first + 4, first + 5):
                (engines.token_loss(twin, models.Batches(rank)[number]) / models.world()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"said": said, "seconds": time.monotonic() - start, "deviation": models.deviation(model, twin)}


@pytest.mark.parametrize(
    ("stage", "gather", "max_bytes", "compiled"),
    [
        (3, "window", 0, True),
        (1, "window", 0, False),
        pytest.param(2, "window", 0, True, marks=pytest.mark.long),
        pytest.param(3, "window", None, False, marks=pytest.mark.long),
    ],
)
def test_ranks_train_on_after_one_failed_early_in_a_window(
    ranks: Ranks, stage: int, gather: str, max_bytes: int | None, compiled: bool
) -> None:
    for rank, found in enumerate(ranks.run(_goes_on, stage, gather, max_bytes, compiled)):
        assert rank == 0 or found["said"].count("failed inside window") == 2, found
        assert found["deviation"] < 1e-6, found
        assert found["seconds"] < 45, found


def _goes_on_apart(max_bytes: int | None, compiled: bool, failing: tuple[int, ...]) -> dict[str, Any]:
    """Parameters are gathered at each use; some ranks fail after one backward, the others after three, if they can."""
    model, twin = models.ByteModel(), models.ByteModel()
    twin.load_state_dict(model.state_dict())
    data, said, start = models.Batches(models.rank()), [], time.monotonic()
    engine = engines.make_engine(model, 3, compile="blocks" if compiled else False, timeout=timedelta(minutes=5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine.attach_optimizers([optimizer])

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
    seconds = time.monotonic() - start
    if len(failing) < models.world():
        engine.abandon()
        return {"said": said, "seconds": seconds}
    engine.unshard()
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=0.5)
    for numbers in ([0, 1], [5, 6], [7, 8]):
        for number in numbers:
            engines.mean_backward(twin, number)
        optimizer.step()
        optimizer.zero_grad()
    return {"said": said, "seconds": seconds, "deviation": models.deviation(model, twin)}


@pytest.mark.parametrize(
    ("max_bytes", "compiled"), [(None, True), (0, False), pytest.param(None, False, marks=pytest.mark.long)]
)
def test_ranks_that_have_gathered_different_units_in_a_window(
    ranks: Ranks, max_bytes: int | None, compiled: bool
) -> None:
    """One fails early and all catch that: their gathers would not match any more, so all raise, now and later."""
    for rank, found in enumerate(ranks.run(_goes_on_apart, max_bytes, compiled, (0,))):
        first, second, third = found["said"]
        assert ("early" if rank == 0 else "failed inside window 2") in first, found
        for text in (second, third):
            assert "has left window 2 of `coalesce_grad_reduction` by an exception" in text, found
            assert "gather='window'" in text and "ckpt_path" in text, found
        assert found["seconds"] < 30, found


def test_ranks_that_all_fail_at_the_same_place_in_a_window(ranks: Ranks) -> None:
    for found in ranks.run(_goes_on_apart, None, True, (0, 1)):
        assert len(found["said"]) == 1 and found["deviation"] < 1e-6, found
