"""Stage 3 where ranks use different modules: an error on every rank, or units that stay gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests import engines, models
from tests.harness import Ranks


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


class Routed(nn.Module):
    """Runs the layers that ``route`` names, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 10)
        self.layers = nn.ModuleList(models.Block(10) for _ in range(4))
        self.head = nn.Linear(10, models.VOCABULARY)
        self.route = [0]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in self.route:
            x = self.layers[index](x)
        return self.head(x)


def _known_routes() -> None:
    """All ranks have gone both ways together; then they part."""
    model, data = Routed(), models.Batches(models.rank())
    with engines.engine(model, 3, compile=False) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.attach_optimizers([optimizer])
        for route in ([0, 1], [0, 2], [0, 1], [0, 2], [0, 1 + models.rank()]):
            model.route = route
            engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))


def test_ranks_that_part_on_known_ways_raise(ranks: Ranks) -> None:
    """Each succession of units is known, so equal sizes would mix in silence: the ways are compared again."""
    text = ranks.expect_error(_known_routes, timeout=60)
    assert text.count("gather number") >= 2 and "`layers." in text


ROUTES = [[[0, 1, 2], [2, 0]], [[3], [1, 3]], [[], [0, 1, 2, 3]], [[3, 2, 1, 0], [0, 1, 2, 3]], [[1], []]]  # step, rank


def _layer_drop(stage: int, scope: str) -> tuple[float, int, list[str]]:
    model, twin = Routed(), Routed()
    twin.load_state_dict(model.state_dict())
    data = models.Batches(models.rank())
    keep = ("layers",) if stage == 3 else ()
    options = {"compile": scope if scope != "eager" else False, "keep_gathered": keep}
    with engines.engine(model, stage, **options) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine.attach_optimizers([optimizer])
        for number, routes in enumerate(ROUTES):
            model.route = routes[models.rank()]
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
        sharded = engine.runtime.core.resident_units()
        gathers = engine.runtime.stats().gathers
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=0.5)
    for number, routes in enumerate(ROUTES):
        optimizer.zero_grad()
        for rank in range(models.world()):
            twin.route = routes[rank]
            (engines.token_loss(twin, models.Batches(rank)[number]) / models.world()).backward()
        optimizer.step()
    return models.deviation(model, twin), gathers, sharded


@pytest.mark.parametrize("scope", ["eager", "blocks"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_may_drop_different_layers(ranks: Ranks, stage: int, scope: str) -> None:
    """Stages 1 and 2 as they are; stage 3 keeps the layers gathered and shards the rest."""
    for deviation, gathers, resident in ranks.run(_layer_drop, stage, scope):
        assert deviation <= 1e-6 and gathers > 0
        assert resident == []


def _unknown_name() -> str:
    try:
        engines.make_engine(Routed(), 3, compile=False, keep_gathered=("layers", "vision"))
    except ValueError as error:
        return str(error)
    return "no error"


def test_unknown_name(ranks: Ranks) -> None:
    for message in ranks.run(_unknown_name):
        assert "`vision`" in message and "embedding, layers, head" in message
