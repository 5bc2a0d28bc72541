"""Ranks that come apart where the host does not wait for collectives, as on devices. What decides that they are apart
is the same code on the CPU, so it runs here, on every machine."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zerocompile import CommunicationError, ZeroCompileStrategy
from lightning_zerocompile.ranks.groups import default_group_position
from lightning_zerocompile.ranks.liveness import DIED
from lightning_zerocompile.ranks.meetings import Meetings
from lightning_zerocompile.ranks.messages import Messages
from tests.support import models
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import AOT, EAGER

LONG = pytest.mark.long


class AsOnDevices(L.Callback):
    """From the first step on the ranks meet in the store, and before gathers outside of steps. One rank does something
    alone before the second step."""

    def __init__(self, alone: Callable[[L.Trainer, Any], object], rank: int, seconds: float = 0.0) -> None:
        self.alone, self.rank, self.seconds = alone, rank, seconds
        self.meetings = 0

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        runtime = trainer.strategy.engine.runtime  # type: ignore[attr-defined]
        runtime.core.set_outside(runtime.comparisons.outside)
        runtime.meetings = Meetings(runtime.messages, None, runtime.comparisons)
        runtime.messages._device, runtime.messages.position = "cuda", default_group_position

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1 and self.rank in (-1, models.rank()):
            self.alone(trainer, module)
        self.meetings = trainer.strategy.engine.runtime.meetings.count  # type: ignore[attr-defined]


ALONE: dict[str, Callable[[L.Trainer, Any], object]] = {
    "reads": lambda trainer, module: module.model.head.weight.sum().item(),
    "runs": lambda trainer, module: module.model(torch.ones(1, 4, dtype=torch.long, device=module.device)),
    "saves": lambda trainer, module: trainer.strategy.lightning_module_state_dict(),
    "reduces": lambda trainer, module: trainer.strategy.reduce(torch.ones(1, device=module.device)),
}
PLACES = {
    "reads": "is in the gather of unit `model.",
    "runs": "is in the gather of unit `model.",
    "saves": "is in a checkpoint",
    "reduces": "is in the reduction of a logged value or of a decision",
}


def _fit(what: str, rank: int, stage: int, options: dict[str, Any]) -> tuple[str, float]:
    strategy = ZeroCompileStrategy(stage=stage, timeout=timedelta(minutes=5), **options)
    callback = AsOnDevices(ALONE[what], rank)
    trainer = models.make_trainer(strategy, max_steps=4, callbacks=[callback], limit_val_batches=0)
    start = time.monotonic()
    try:
        trainer.fit(models.Module(), models.Batches(models.rank()))  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize(
    ("what", "rank", "stage", "options"),
    [
        ("reads", 0, 3, EAGER),
        ("saves", 1, 1, AOT),
        pytest.param("runs", 1, 3, AOT, marks=LONG),
        pytest.param("reduces", 0, 2, EAGER, marks=LONG),
        pytest.param("saves", 0, 3, EAGER, marks=LONG),
    ],
)
def test_one_rank_alone(ranks: Ranks, what: str, rank: int, stage: int, options: dict[str, Any]) -> None:
    try:
        found = ranks.run(_fit, what, rank, stage, options, timeout=60)
    finally:
        ranks.close(kill=True)
    others = "".join(str(other) for other in range(ranks.world) if other != rank)
    for text, seconds in found:
        assert f"rank {rank} {PLACES[what]}" in text and "in `on_train_batch_start`" in text, text
        goes_on = re.search(rf"rank [{others}] has come to a training step", text)
        assert goes_on or "has ended another backward" in text, text
        assert "Do it on all ranks" in text and ("strategy.full_parameters" in text) != (what == "saves"), text
        assert seconds < 30, text


def _elsewhere(asks: str) -> str:
    """The others start a collective of the default group, and stand there, as where they look at the result on a
    device; rank 0 asks for something else."""

    def act(trainer: L.Trainer, module: Any) -> None:
        if models.rank() == 0:
            ALONE[asks](trainer, module)
        else:
            dist.all_reduce(torch.ones(1, device=module.device), async_op=True)
            time.sleep(12)

    strategy = ZeroCompileStrategy(stage=3, timeout=timedelta(minutes=5), **EAGER)
    trainer = models.make_trainer(strategy, max_steps=4, callbacks=[AsOnDevices(act, -1)], limit_val_batches=0)
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(models.Module(), models.Batches(models.rank()))  # type: ignore[arg-type]
    return str(raised.value)


@pytest.mark.parametrize("asks", ["saves", pytest.param("reads", marks=LONG)])
def test_a_rank_that_stands_in_another_collective(ranks: Ranks, asks: str) -> None:
    if ranks.device == "cuda":
        pytest.skip("there Lightning's own collectives are the others: test_ranks_apart.py")
    try:
        found = ranks.run(_elsewhere, asks, timeout=60)
    finally:
        ranks.close(kill=True)
    for text in found:
        assert f"rank 0 {PLACES[asks]}" in text, text
        assert re.search(r"; rank [1-9] has gone on to another collective, and stands in ", text), text
        assert f"{__file__}:" in text, text


class Late(models.Module):
    """One rank is later than the others at a place where all of them do something together."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1 and models.rank() == 1:
            time.sleep(2)


def _late(stage: int) -> tuple[float, int]:
    """All ranks read, run and save together, one of them late. How far the training is from DDP's, and the meetings."""

    def all_of_it(trainer: L.Trainer, module: Any) -> None:
        if models.rank() == 0:
            time.sleep(2)
        for act in ALONE.values():
            for _ in range(6):
                act(trainer, module)

    strategy = ZeroCompileStrategy(stage=stage, timeout=timedelta(minutes=5), **EAGER)
    module, twin = Late(), models.Module()
    twin.load_state_dict(module.state_dict())
    callback = AsOnDevices(all_of_it, -1)
    models.make_trainer(strategy, max_steps=3, callbacks=[callback]).fit(module, models.Batches(models.rank()))  # type: ignore
    models.reference(twin, steps=3)
    return models.deviation(module, twin), callback.meetings


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=LONG)])
def test_what_all_ranks_do_is_no_difference(ranks: Ranks, stage: int) -> None:
    for deviation, meetings in ranks.run(_late, stage):
        assert deviation <= 1e-6 and meetings >= 12  # of the states and the reductions; gathers meet besides


class _Fake:
    """A watch: what a rank has heard of the others."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self.silence = 0  # looks at which nothing has been heard yet
        self.reason: str | None = None

    def ended(self) -> str | None:
        return self.reason

    def end(self, reason: str) -> None:
        self.reason = reason

    def set_groups(self, names: list[str]) -> None:
        assert names == []

    def standing(self) -> str:
        return ""

    def gone(self, rank: int) -> None:
        return None

    def left(self) -> dict[int, str]:
        self.silence -= 1
        return {} if self.silence >= 0 else self.reasons


def _watched(messages: Messages, looks: int) -> str | None:
    """What ends the groups while the main thread stands here and the watching thread looks."""
    watcher = threading.Thread(target=lambda: [messages._look_from_outside() for _ in range(looks)])
    watcher.start()
    watcher.join()
    for thread in threading.enumerate():
        if thread.name == "zerocompile-end":
            thread.join()
    return messages.ended


@on_ranks(1)
def test_when_groups_are_ended_from_outside() -> None:
    def heard(reasons: dict[int, str], silence: int = 0) -> Messages:
        fake = _Fake()
        fake.reasons, fake.silence = reasons, silence
        return Messages("cuda", "test", timedelta(minutes=5), fake)  # type: ignore[arg-type]

    assert _watched(heard({}), 20) is None  # it stands still, and nobody is gone
    assert _watched(heard({0: "itself"}), 20) is None
    why = {1: "RuntimeError: why"}
    assert _watched(heard(why), 3) is None
    assert _watched(heard(why, silence=10), 13) is None  # what is on its way may still end
    text = _watched(heard(why), 4)
    assert text is not None and "rank 0 waits for rank 1, which has ended: RuntimeError: why" in text
    assert "start the processes anew" in text
    ended = heard({1: DIED})
    assert DIED in (_watched(ended, 4) or "")
    with pytest.raises(CommunicationError, match=DIED):
        ended.raise_if_ended()
    with pytest.raises(CommunicationError, match=DIED):
        ended.waits("a message", "message", 0, [1])


class _WithoutStore(Messages):
    """Its store's host has died."""

    def _store(self) -> Any:  # type: ignore[override]
        raise RuntimeError("Connection reset by peer")


@on_ranks(1)
def test_who_has_died_is_known_without_the_store() -> None:
    fake = _Fake()
    messages = _WithoutStore("cuda", "test", timedelta(minutes=5), fake)  # type: ignore[arg-type]
    messages.others = [1]
    fake.reasons, fake.silence = {1: DIED}, 3  # it is heard a moment later
    assert messages.reasons(timedelta(seconds=5)) == {1: DIED}
    fake.reasons = {}
    with pytest.raises(RuntimeError, match="Connection reset by peer"):
        messages.reasons(timedelta(seconds=0.1))


def test_what_comes_after_the_end_raises(one_process: None) -> None:
    """A blocked call returns without an error when its group has ended, so the strategy's hook around it raises."""

    class Ends(models.Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                self.trainer.strategy.messages.end("rank 1 has ended: why")  # type: ignore[attr-defined]
            return super().training_step(batch, batch_idx)

    trainer = models.make_trainer(ZeroCompileStrategy(stage=3, **EAGER), max_steps=3)
    with pytest.raises(CommunicationError, match=r"rank 1 has ended: why\n.*start the processes anew"):
        trainer.fit(Ends(), models.Batches(0))  # type: ignore[arg-type]
    assert trainer.global_step == 1


def test_a_moving_thread_is_not_standing() -> None:
    from lightning_zerocompile.ranks.waits import StandingThread

    still = StandingThread()
    most, done = [0], threading.Event()

    def look() -> None:
        for _ in range(200):
            still.look()
            most[0] = max(most[0], still.looks)
            time.sleep(1e-3)
        done.set()

    threading.Thread(target=look).start()
    done.wait()
    assert most[0] > 5
    most[0], moved = 0, 0
    done.clear()
    threading.Thread(target=look).start()
    while not done.is_set():
        moved += 1
    assert most[0] < 50 and moved > 0
