"""A device that waits for another rank's, in a barrier of mapped memory, goes on when this rank's host says so."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from lightning_zerocompile import CommunicationError, ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import Worlds

pytestmark = pytest.mark.gpu


def _wait_alone() -> tuple[list[str], float]:
    """What the device of rank 1 stands in, and for how many seconds it stands there after it was to go on."""
    model, data = models.ByteModel(), models.Batches(models.rank())
    engine = engines.make_engine(model, 1, compile=False, copy_engine=True, unit_bytes=1)
    optimizer = engines.sgd(engine, model, lr=0.1)
    for number in range(3):
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, data[number]))
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    messages = engine.runtime.messages
    watch = messages._watch
    stood = [watch.standing()]
    ended = time.monotonic()
    if models.rank() == 1:

        def end() -> None:
            nonlocal ended
            time.sleep(2.0)  # this rank's main thread is in a copy to pageable memory now
            stood.append(watch.standing())
            ended = time.monotonic()
            watch.end("the test ends it")

        thread = threading.Thread(target=end)
        thread.start()
        engine.runtime.masters_changed(list(model.parameters()))
        with torch.no_grad(), engine.training_step():
            engines.token_loss(model, data[3]).cpu()
        thread.join()
        stood.append(watch.standing())
    seconds = time.monotonic() - ended
    messages.exchange("done", "")
    engine.abandon()
    return stood, seconds


def test_the_host_ends_a_barrier_while_the_driver_is_busy(worlds: Worlds) -> None:
    (first, _), (stood, seconds) = worlds.fresh(2).run(_wait_alone, timeout=60)
    assert first == [""]
    before, within, after = stood
    assert before == after == ""
    assert within.startswith("the gather of unit `")
    assert seconds < 5.0


def _one_barrier_more() -> str:
    """Rank 1 launches one barrier more than rank 0, and both train on."""
    model, data = models.ByteModel(), models.Batches(models.rank())
    engine = engines.make_engine(model, 3, compile=False, copy_engine=True, param_dtype=torch.bfloat16, unit_bytes=1)
    assert engine.runtime.keep_casts(1 << 30) > 0
    optimizer = engines.sgd(engine, model, lr=0.1)

    def step(number: int) -> None:
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, data[number]))
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        step(number)
    if models.rank() == 1:
        engine.runtime.core.meet_readers()
    with pytest.raises(RuntimeError) as error:
        for number in range(3, 40):
            step(number)
            time.sleep(0.2)
    return str(error.value)


def test_ranks_in_different_barriers_raise(worlds: Worlds) -> None:
    ranks = worlds.fresh(2)
    try:
        for text in ranks.run(_one_barrier_more, timeout=60):
            assert "ranks are in different barriers" in text
            assert text.count(" of unit `") == 2
    finally:
        ranks.close(kill=True)


class Sleeps(models.Module):
    """Rank 0 sleeps in a step whose gathers the ranks no longer compare; rank 1 waits for it on the device."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 4 and models.rank() == 0:
            time.sleep(25.0)
        loss = self.loss(batch)
        loss.item()
        return loss


def _fit() -> str:
    strategy = ZeroCompileStrategy(3, compile=False, copy_engine=True, timeout=timedelta(seconds=8))
    trainer = models.make_trainer(strategy, max_steps=6, limit_val_batches=0)
    with pytest.raises(CommunicationError) as error:
        trainer.fit(Sleeps(), models.Batches(models.rank()))  # type: ignore[arg-type]
    return str(error.value)


def test_a_wait_on_the_device_ends_with_its_unit(all_worlds: Worlds) -> None:
    ranks = all_worlds.fresh(2)
    try:
        _, waited = ranks.run(_fit, timeout=90)
    finally:
        ranks.close(kill=True)
    assert "rank 1's device has waited for 0:00:08 in the gather of unit `" in waited, waited
