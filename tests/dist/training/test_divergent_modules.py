"""Stage 3 where ranks use different modules: an error on every rank, or units that stay gathered."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import Ranks, Worlds, on_ranks
from tests.support.models import Routed
from tests.support.parity import AOT, EAGER, MODEL, assert_trains_like_ddp, reference


def _other_units() -> None:
    class Reordered(models.Module):
        def loss(self, batch: Tensor) -> Tensor:
            layers = list(self.model.layers)
            x = self.model.embedding(batch[:, :-1])
            for layer in layers if models.rank() == 0 else layers[::-1]:
                x = layer(x)
            return self.model.head(x).square().mean()

    models.train(Reordered(), ZeroCompileStrategy(stage=3, compile=False), steps=1)


def test_ranks_that_gather_different_units_raise(ranks: Ranks) -> None:
    """No hang: every rank names the unit, the number of the gather and the remedy."""
    text = ranks.expect_error(_other_units, timeout=60)
    assert text.count("gather number") >= 2 and "layers.0" in text
    assert "keep_gathered" in text and "stage 1 or 2" in text


def _known_routes() -> None:
    """All ranks have gone both ways together; then they part."""
    model, data = Routed(), models.Batches(models.rank())
    with engines.engine(model, 3, compile=False) as engine:
        optimizer = engines.sgd(engine, model, lr=0.1)
        for route in ([0, 1], [0, 2], [0, 1], [0, 2], [0, 1 + models.rank() % 2]):
            model.route = route
            engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))


def test_ranks_that_part_on_known_ways_raise(ranks: Ranks) -> None:
    """Each succession of units is known, so equal sizes would mix in silence: the ways are compared again."""
    text = ranks.expect_error(_known_routes, timeout=60)
    assert text.count("gather number") >= 2 and "`layers." in text


class Twice(nn.Module):
    """Behind a graph break rank 0 reads a parameter again that rank 1 does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        torch._dynamo.graph_break()
        return x + (y if models.rank() else self.first(torch.tanh(y)))


def _other_graphs(unit_bytes: int) -> tuple[str, float]:
    module = models.Module(lambda: models.Whole(models.Stacked(Twice)))
    strategy = ZeroCompileStrategy(stage=3, timeout=timedelta(minutes=5), unit_bytes=unit_bytes, **MODEL)
    start = time.monotonic()
    try:
        models.train(module, strategy, steps=2)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("unit_bytes", [64 * 2**20, pytest.param(1, marks=pytest.mark.long)])
def test_graphs_that_read_parameters_differently_raise(all_worlds: Worlds, unit_bytes: int) -> None:
    """`compile="model"`, in units of the default size, too: there the ranks part only in their waits."""
    ranks = all_worlds.fresh(2)
    try:
        found = ranks.run(_other_graphs, unit_bytes)
    finally:
        ranks.close(kill=True)
    for rank, (text, seconds) in enumerate(found):
        assert "gather" in text and "unit `" in text and "Unequal work at stage 3" in text, (rank, found)
        assert seconds < 60, (rank, found)


def _compared() -> list[int]:
    """How often the ranks have compared their gathers, after each of some steps with evaluations between them."""
    model, data = Routed(), models.Batches(models.rank())
    model.route = [0, 1, 2, 3]
    counts = []
    with engines.compiled_here(models.rank() == 0), engines.engine(model, 3) as engine:
        optimizer = engines.sgd(engine, model, lr=0.1)
        exchange, calls = engine.runtime.messages.exchange_numbered, []

        def counted(topic: str, *message: Any) -> Any:
            calls.extend([topic] if topic.startswith("gather/") else [])
            return exchange(topic, *message)

        engine.runtime.messages.exchange_numbered = counted  # type: ignore[method-assign]
        for _ in range(4):
            engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))
            for _ in range(2):
                with engine.evaluation_step(), torch.no_grad():
                    model(data[1][:, :-1])
            counts.append(len(calls))
    return counts


def test_nothing_is_compared_in_a_steady_state(ranks: Ranks) -> None:
    """Also with one rank compiled and one eager, and with evaluations between the steps."""
    first, *others = ranks.run(_compared)
    assert others == [first] * (ranks.world - 1)
    assert first[0] > 0 and first[-1] == first[1]


class WithoutLength:
    """So the ranks cannot compare how many batches they have."""

    def __init__(self, batches: models.Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)


def _more_forwards(where: str, folder: str) -> None:
    class Uneven(models.Module):
        def train_dataloader(self) -> Any:
            return models.Batches(models.rank(), 2)

        def val_dataloader(self) -> Any:
            batches = models.Batches(models.rank(), 2 + (where == "validation" and models.rank() == 1))
            return batches if where == "generation" else WithoutLength(batches)

        def validation_step(self, batch: Tensor) -> None:
            for _ in range(1 + (where == "generation" and models.rank() == 1)):
                self.loss(batch)

    strategy = ZeroCompileStrategy(stage=3, compile=False, timeout=timedelta(seconds=10))
    try:
        models.make_trainer(strategy, max_epochs=2, num_sanity_val_steps=0, limit_val_batches=1.0).fit(Uneven())
    except RuntimeError as error:
        Path(folder, str(models.rank())).write_text(str(error))
        os._exit(1)  # as a job ends: Lightning's own collectives would wait for this rank


FOUND = {
    "validation": ("came there at",),
    "generation": ("ranks wait for each other", "came there at"),
}


@pytest.mark.parametrize("where", ["validation", pytest.param("generation", marks=pytest.mark.long)])
def test_ranks_with_more_forwards_raise(all_worlds: Worlds, where: str, tmp_path: Path) -> None:
    """One batch or one forward more on one rank: no gather meets another one, and some rank says what is wrong, and
    what to do.
    (With unequal numbers of training batches Lightning's own broadcast in each step waits, as under DDP.)"""
    ranks = all_worlds.fresh(2)
    try:
        ranks.expect_error(_more_forwards, where, str(tmp_path), timeout=60)
    finally:
        ranks.close(kill=True)
    texts = [file.read_text() for file in tmp_path.iterdir()]
    found = [text for text in texts if any(words in text for words in FOUND[where])]
    assert any("rank 1" in text and "rank 0" in text for text in found), texts
    assert all("strategy.unequal()" in text for text in found), found


ROUTES = [  # by step and rank
    [[0, 1, 2], [2, 0], [3]],
    [[3], [1, 3], []],
    [[], [0, 1, 2, 3], [1, 1]],
    [[3, 2, 1, 0], [0, 1, 2, 3], [2]],
    [[1], [], [0, 3]],
]


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "blocks"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_ranks_may_drop_different_layers(stage: int, options: dict[str, Any]) -> None:
    """Stages 1 and 2 as they are; stage 3 keeps the layers gathered and shards the rest."""
    how = {"loss": engines.routed_loss, "data": models.routed_batches(ROUTES), "steps": len(ROUTES)}
    keep = ("layers",) if stage == 3 else ()
    trained = assert_trains_like_ddp(Routed(), stage, **how, **options, keep_gathered=keep)
    assert trained.stats.gathers > 0 and trained.resident == []


class _Stands(torch.autograd.Function):
    """Its backward goes on only when a rank has joined a reduction, as a device does for which CUDA loads a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait: Callable[[], None]) -> Tensor:
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.wait()
        return grads[0], None


class Standing(Routed):
    wait: Callable[[], None] | None = None  # in the backward, before that of the embedding

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x if self.wait is None else _Stands.apply(x, self.wait)
        for index in self.route:
            x = self.layers[index](x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        pytest.param(1, EAGER, id="1-eager"),
        pytest.param(2, AOT, id="2-blocks"),
        pytest.param(3, EAGER, id="3-eager"),
        pytest.param(1, AOT, id="1-blocks", marks=pytest.mark.long),
        pytest.param(2, EAGER, id="2-eager", marks=pytest.mark.long),
        pytest.param(3, AOT, id="3-blocks", marks=pytest.mark.long),
    ],
)
@on_ranks(2)
def test_a_rank_that_stands_in_its_backward(stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Rank 1 has begun to reduce a layer that rank 0 did not use, and stands until rank 0 has joined."""
    steps, joined = 3, tmp_path / "joined"
    model, twin = Standing(), Standing()
    twin.load_state_dict(model.state_dict())
    data = models.routed_batches([[[0], [3, 0]], [[0, 1], [3, 2]], [[2], [0]]])
    own = data(models.rank())
    with engines.engine(model, stage, **options, keep_gathered=("layers",) if stage == 3 else ()) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine.attach_optimizers([optimizer])
        core, stood = engine.runtime.core, []

        def tell() -> None:
            while not core.started()[1]:
                time.sleep(0.01)
            joined.touch()

        def wait() -> None:
            stood.append(core.begun())
            assert core.started()[1] >= 1, "rank 1 has begun nothing"
            deadline = time.monotonic() + 30
            while not joined.exists():
                assert time.monotonic() < deadline, "rank 0 does not join what rank 1 has begun"
                time.sleep(0.01)

        if models.rank() == 0:
            threading.Thread(target=tell, daemon=True).start()
        else:
            model.wait = wait
        for number in range(steps):
            engines.step(engine, optimizer, lambda number=number: engines.routed_loss(model, own[number]))  # type: ignore[misc]
        assert len(stood) == steps * models.rank() and (not stood or stood[0] > 0)
    reference(twin, steps, engines.routed_loss, data)
    assert models.deviation(model, twin) <= 1e-6


@on_ranks()
def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"`vision`.*embedding, layers, head"):
        engines.make_engine(Routed(), 3, compile=False, keep_gathered=("layers", "vision"))
