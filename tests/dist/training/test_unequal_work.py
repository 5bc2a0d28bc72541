"""Stage 3 where ranks do unequal work inside `strategy.unequal()`: they serve each other's gathers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, IterableDataset

from lightning_zerocompile import CommunicationError, ZeroCompileStrategy
from lightning_zerocompile.engine import Engine
from tests.support import engines, models
from tests.support.harness import Worlds, on_ranks
from tests.support.models import Routed
from tests.support.parity import AOT, EAGER, reference

LONG = pytest.mark.long
ROUTES = [  # by step and rank: layers, in order
    [[0, 1, 2], [2, 0], [3], [1]],
    [[3], [1, 3], [0], []],
    [[], [0, 1, 2, 3], [1, 1], [2]],
    [[3, 2, 1, 0], [0, 1, 2, 3], [], [3, 0]],
    [[1], [], [2, 3, 2, 3], [0, 1]],
]


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"compile": False}),
        (2, {}),
        pytest.param(3, {}, marks=LONG),
        pytest.param(4, {"device_mesh": 2, "compile": False}, marks=LONG),
        pytest.param(2, {"compile": "model"}, marks=LONG),
    ],
)
@on_ranks("world", timeout=240)
def test_ranks_use_different_layers(world: int, options: dict[str, Any]) -> None:
    """Forwards, backwards and evaluations, as DDP trains them; around them the ranks gather ahead again. The ranks have
    compared no gather with each other: each made others' gathers where it had none."""
    rank, data = models.rank(), models.Batches(models.rank())
    model, twin = models.pair(Routed)
    routed = models.routed_batches(ROUTES)
    reference(twin, len(ROUTES), engines.routed_loss, routed)  # what DDP with `find_unused_parameters` computes
    with engines.engine(model, 3, **options) as engine:
        optimizer = engines.sgd(engine, model)
        for part in routed(rank):
            with engine.training_step(), engine.runtime.unequal():
                engines.backward(engine, engines.routed_loss(model, part))
            optimizer.step()
            optimizer.zero_grad()
        results = []
        with engine.runtime.unequal(), torch.no_grad():
            for count in range(2 + 3 * rank):
                model.route = [count % 4, rank]
                with engine.evaluation_step():
                    results.append(model(data[count][:, :-1]))
        stats, resident = engine.runtime.stats(), engine.runtime.core.resident_units()
        model.route = [0, 1, 2, 3]
        for _ in range(3):
            with engine.evaluation_step(), torch.no_grad():
                model(data[0][:, :-1])
        assert engine.runtime.stats().prefetched > stats.prefetched == 0
    assert stats.served > 0 and resident == [], (stats, resident)
    assert models.deviation(model, twin) <= 1e-6
    with torch.no_grad():
        for count, result in enumerate(results):
            twin.route = [count % 4, rank]
            assert torch.allclose(twin(data[count][:, :-1].to(result.device)), result, atol=1e-5)


class Tower(models.Module):
    """In manual optimization: each rank runs its own layers, clips, and steps, all in one context."""

    def __init__(self) -> None:
        super().__init__(Routed)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.model.route = ROUTES[batch_idx][models.rank()]
        optimizer = self.optimizers()
        with self.trainer.strategy.unequal():
            with self.trainer.strategy.coalesce_grad_reduction(gather="use"):
                for half in batch.chunk(2):
                    self.manual_backward(self.loss(half) / 2)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.log("reduced", float(batch_idx), sync_dist=True)
            optimizer.zero_grad()


class Automatic(models.Module):
    """The loop calls the backward, so the forward and the backward have a context each."""

    def __init__(self) -> None:
        super().__init__(Routed)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.model.route = ROUTES[batch_idx][models.rank()]
        with self.trainer.strategy.unequal():
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *_: Any) -> None:
        with self.trainer.strategy.unequal():
            loss.backward()


@pytest.mark.parametrize(
    ("kind", "options"), [(Tower, AOT), (Automatic, EAGER), pytest.param(Tower, EAGER, marks=LONG),
                          pytest.param(Automatic, AOT, marks=LONG)],
)  # fmt: skip
@on_ranks()
def test_training_steps_of_the_trainer(kind: type[models.Module], options: dict[str, Any]) -> None:
    """A whole step with a window, clipping, an optimizer and a logged value in `unequal()`; automatic optimization."""
    module, twin = models.pair(kind)
    record = models.train(module, ZeroCompileStrategy(3, **options), steps=len(ROUTES))
    optimizer = twin.configure_optimizers()

    def clip(*_: Any) -> None:
        clip_grad_norm_(twin.parameters(), 0.1)

    if kind is Tower:
        optimizer.register_step_pre_hook(clip)
    reference(twin.model, len(ROUTES), engines.routed_loss, models.routed_batches(ROUTES), optimizer)
    assert models.deviation(module, twin) <= 1e-6
    assert record.stats.served > 0 == record.stats.prefetched


# ---- what goes wrong ----


def _raises(match: str, act: Callable[[Engine, int], object]) -> None:
    """All ranks raise in the context, within seconds, and the next step is right. ``act``: called after each step."""
    (model, twin), data = models.pair(Routed), models.Batches(models.rank())
    with engines.engine(model, 3, compile=False, timeout=timedelta(minutes=5)) as engine, torch.no_grad():
        start = time.monotonic()
        with pytest.raises((ValueError, CommunicationError), match=match), engine.runtime.unequal():
            for count in range(3 + 3 * models.rank()):
                model.route = [count % 4]
                with engine.evaluation_step():
                    model(data[count][:, :-1])
                act(engine, count)
        assert time.monotonic() - start < 10
        model.route = twin.route = [0, 1, 2, 3]
        with engine.evaluation_step():
            assert torch.allclose(model(data[0][:, :-1]), twin(data[0][:, :-1]), atol=1e-5)


@on_ranks()
def test_a_rank_that_raises() -> None:
    """The others raise, and say which rank has raised what; all can go on."""

    def act(_: Engine, count: int) -> None:
        if count == 4:
            raise ValueError("on purpose")

    _raises("^on purpose" if models.rank() else "rank [1-9] has raised ValueError: on purpose", act)


@on_ranks()
def test_ranks_at_different_gates() -> None:
    def act(engine: Engine, count: int) -> None:
        if count == 5:
            engine.runtime.meetings.meet("a barrier")

    said = ["rank [1-9] is at a barrier", r"rank 0 at the end of `strategy.unequal\(\)`", "Do it on all ranks"]
    _raises("(?s)" + "".join(f"(?=.*{text})" for text in said), act)


def _dies() -> None:
    model, data = Routed(), models.Batches(models.rank())
    made = engines.engine(model, 3, compile=False, timeout=timedelta(minutes=5))
    with made as engine, torch.no_grad(), engine.runtime.unequal():
        for _ in range(2 + 3 * models.rank()):
            with engine.evaluation_step():
                model(data[0][:, :-1])
        if models.rank() == 1:
            os._exit(3)


def test_a_rank_that_dies(all_worlds: Worlds) -> None:
    ranks = all_worlds.fresh(2)
    try:
        text = ranks.expect_error(_dies, timeout=60)
    finally:
        ranks.close(kill=True)
    assert "waits for rank 1" in text and "its process has died" in text, text


# ---- evaluations of the Trainer ----


class Uneven(models.Evaluated):
    """Ranks have other numbers of batches, of each dataloader; further ranks take those of ``sizes`` in turn. Hooks use
    weights, too."""

    def __init__(self, sizes: list[list[int]]) -> None:
        super().__init__()
        self.sizes, self.hooked = sizes, 0.0

    def val_dataloader(self) -> Any:
        return [models.Batches(models.rank(), sizes[models.rank() % 2]) for sizes in self.sizes]

    test_dataloader = predict_dataloader = val_dataloader

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, batch_idx)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.hooked += float(self.model.head.weight.sum())

    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            self.hooked += float(self.loss(models.Batches(models.rank())[0]))


@pytest.mark.parametrize(("stage", "options"), [(3, EAGER), (3, AOT), pytest.param(1, EAGER, marks=LONG)])
@on_ranks()
def test_different_numbers_of_batches(stage: int, options: dict[str, Any]) -> None:
    """A fit with validations, a test and a prediction, as plain torch computes them; the logged means are those of all
    ranks."""
    sizes = [[2, 5], [3, 1], [2, 2]]
    module, twin = models.pair(Uneven, sizes=sizes)
    mine = [size[models.rank() % 2] for size in sizes]
    strategy = ZeroCompileStrategy(stage, timeout=timedelta(seconds=60), unshard_after_fit=True, **options)
    trainer = models.make_trainer(strategy, max_steps=2, val_check_interval=1, num_sanity_val_steps=2)
    trainer.fit(module, models.Batches(models.rank(), 2))
    served = strategy.stats.served
    losses = models.reference(twin, steps=2)
    assert models.deviation(module, twin) <= 1e-6 and module.losses == pytest.approx(losses, abs=1e-5)
    assert len(module.seen) == sum(min(size, 2) for size in mine) + 2 * sum(mine)
    assert (served > 0) == (stage == 3)
    predicted = trainer.predict(module)
    trainer.test(module, verbose=False)
    last = [twin.loss(batch).item() for size in mine for batch in models.Batches(models.rank(), size)]
    assert module.seen[-len(last) :] == pytest.approx(last, abs=1e-5)
    assert [len(part) for part in predicted] == mine and (strategy.stats.served > 0) == (stage == 3)


class Stream(IterableDataset[Tensor]):
    """Without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(models.Batches(models.rank(), self.count))


class Anything(models.Evaluated):
    """Each rank uses its own layers in each step."""

    def __init__(self) -> None:
        super().__init__(model=Routed)

    def val_dataloader(self) -> Any:
        return DataLoader(Stream(2 + 3 * models.rank()), batch_size=None)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.model.route = [batch_idx % 4, models.rank()]  # type: ignore[assignment]
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("options", [EAGER, pytest.param(AOT, marks=LONG)])
@on_ranks()
def test_unequal_evaluations(options: dict[str, Any]) -> None:
    """`unequal_work="evaluation"`: other layers on each rank, and datasets whose lengths nobody knows before."""
    module, twin = models.pair(Anything)
    strategy = ZeroCompileStrategy(3, unequal_work="evaluation", timeout=timedelta(seconds=60), **options)
    trainer = models.make_trainer(strategy)
    logged = trainer.validate(module, verbose=False)
    assert strategy.stats.served > 0
    expected: list[list[float]] = []
    for rank in range(models.world()):
        expected.append([])
        for number, batch in enumerate(models.Batches(rank, 2 + 3 * rank)):
            twin.model.route = [number % 4, rank]
            expected[rank].append(twin.loss(batch).item())
    assert module.seen == pytest.approx(expected[models.rank()], abs=1e-5)
    every = [loss for losses in expected for loss in losses]
    assert logged[0]["val_loss"] == pytest.approx(sum(every) / len(every), abs=1e-5)


@on_ranks()
def test_a_rank_without_batches() -> None:
    strategy = ZeroCompileStrategy(3, timeout=timedelta(seconds=60), **EAGER)
    module = Uneven([[2, 2], [0, 2]])
    module.allow_zero_length_dataloader_with_multiple_devices = True
    said = r"(?s)Rank 0 has no batches of evaluation dataloader 1, and rank 1 has 2.*stage 1 or 2"
    with pytest.raises(RuntimeError, match=said):
        models.make_trainer(strategy).validate(module, verbose=False)
