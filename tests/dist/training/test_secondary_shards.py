"""`reshard_after_forward`: the backward gathers inside a part of the shard group, from what the forward has kept."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.plan.plan import make_plan
from lightning_zerocompile.plan.trace import PlanError
from lightning_zerocompile.ranks.groups import inner_size
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, assert_trains_like_ddp, reference

LONG = pytest.mark.long
WAYS = [pytest.param(AOT, id="aot_eager"), pytest.param(EAGER, id="eager")]
BOTH = pytest.mark.parametrize("options", WAYS)
# ranks, and options: 2 x 2, 2 x 3 and 3 x 2 hosts x ranks, two replicas of two hosts
MESHES = [
    (4, {"reshard_after_forward": 2}),
    pytest.param(6, {"reshard_after_forward": 3}, marks=LONG),
    pytest.param(6, {"reshard_after_forward": 2}, marks=LONG),
    pytest.param(8, {"reshard_after_forward": 2, "device_mesh": 2}, marks=LONG),
    pytest.param(4, {"reshard_after_forward": 2, "optimizer_in_backward": True}, marks=LONG),
    pytest.param(4, {"reshard_after_forward": 2, "offload": "optimizer"}, marks=LONG),
]


def _batch(number: int) -> Tensor:
    return models.Batches(models.rank())[number]


@pytest.mark.parametrize("options", [*WAYS, pytest.param(MODEL, marks=LONG, id="model")])
@pytest.mark.parametrize(("world", "more"), MESHES)
@on_ranks("world")
def test_it_trains_as_ddp(world: int, more: dict[str, Any], options: dict[str, Any]) -> None:
    trained = assert_trains_like_ddp(models.ByteModel(), 3, steps=5, **more, **options)
    assert trained.stats.gathers > trained.stats.inner_gathers > 0
    assert bool(trained.compiled.backward) is (options != EAGER)


def _collectives(engine: Engine) -> tuple[int, int]:
    """How many the groups of gathers have counted: over all shards, and inside a host."""
    groups: list[Any] = [engine._groups.gathers, engine._groups.inner]
    if models.device() == "cuda":  # NCCL does not number the gathers of a group call
        stats = engine.runtime.stats()
        return stats.gathers - stats.inner_gathers, stats.inner_gathers
    outer, inner = (group._get_sequence_number_for_group() for group in groups)
    return outer, inner


def _since(engine: Engine, before: tuple[int, int]) -> tuple[int, int]:
    outer, inner = _collectives(engine)
    return outer - before[0], inner - before[1]


@BOTH
@on_ranks(4)
def test_gathers_of_the_backward_are_inside_a_host(options: dict[str, Any]) -> None:
    """Of five units the forward gathers one twice (`embedding.weight` and `scale` are in it), and the backward does not
    need that one."""
    model = models.ByteModel()
    config = Config(3, reshard_after_forward="nodes", **options)
    with engines.closing(Engine(model, engines.place(), config, None, dist.get_backend(), nodes=2)) as engine:
        inner: Any = engine._groups.inner
        first = models.rank() // 2 * 2
        assert dist.get_process_group_ranks(inner) == [first, first + 1]
        optimizer = engines.sgd(engine, model)
        for number in range(3):
            before, stats = _collectives(engine), engine.runtime.stats()
            engines.step(engine, optimizer, lambda: engines.token_loss(model, _batch(number)))  # noqa: B023
            outer, inside = _since(engine, before)
            now = engine.runtime.stats()
            assert (now.gathers - stats.gathers, now.inner_gathers - stats.inner_gathers) == (outer + inside, inside)
            assert (outer, inside) == (6, 4), (number, outer, inside)
            assert now.secondary_bytes == 0  # the optimizer has written all


@on_ranks(4)
def test_what_they_take_is_what_the_plan_says() -> None:
    """From the forward to the optimizer's step, and not in a validation."""
    model = models.ByteModel()
    with engines.engine(model, 3, reshard_after_forward=2, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        seen = []
        with engine.evaluation_step(), torch.no_grad():
            engines.token_loss(model, _batch(0))
        seen.append(engine.runtime.stats().secondary_bytes)
        with engine.training_step():
            loss = engines.token_loss(model, _batch(0))
            seen.append(engine.runtime.stats().secondary_bytes)
            engines.backward(engine, loss)
        seen.append(engine.runtime.stats().secondary_bytes)
        optimizer.step()
        seen.append(engine.runtime.stats().secondary_bytes)
    config = Config(3, reshard_after_forward=2)
    (stage,) = make_plan(models.Module(), world_size=4, config=config, stages=(3,)).stages
    zero_dim = 4 // 2  # counted by the plan, and not sharded
    held = stage.memory.secondary - zero_dim
    assert seen == [0, held, held, 0] and held > 0
    (plain,) = make_plan(models.Module(), world_size=4, stages=(3,)).stages
    assert plain.memory.secondary == 0
    assert stage.memory.backward_peak == plain.memory.backward_peak + stage.memory.secondary
    assert stage.memory.after_forward == plain.memory.after_forward + stage.memory.secondary


@BOTH
@on_ranks(4)
def test_windows_accumulations_and_frozen_blocks(options: dict[str, Any]) -> None:
    """All forwards of a window before its backwards; an accumulation; a block that is frozen, and then trained again;
    a validation in between."""
    model = models.ByteModel()
    twin = copy.deepcopy(model)

    def losses(*numbers: int) -> list[Tensor]:
        return [engines.token_loss(model, _batch(number)) / len(numbers) for number in numbers]

    with engines.engine(model, 3, reshard_after_forward=2, **options) as engine:
        optimizer = engines.sgd(engine, model)
        with engine.training_step(), engine.windows.open("use", None, None):
            before = _collectives(engine)
            both = losses(0, 1)
            assert _since(engine, before) == (12, 0)
            for loss in both:
                engines.backward(engine, loss)
            assert _since(engine, before) == (
                12,
                10,
            )  # the second backward also gathers what is around the blocks, twice
        optimizer.step()
        optimizer.zero_grad()
        with engine.evaluation_step(), torch.no_grad():
            engines.token_loss(model, _batch(9))
        with engine.training_step(), engine.accumulation():
            engines.backward(engine, losses(2, 3)[0])
        with engine.training_step():
            engines.backward(engine, losses(2, 3)[1])
        optimizer.step()
        optimizer.zero_grad()
        for trains, number in ((False, 4), (False, 5), (True, 6)):
            model.layers[1].requires_grad_(trains)
            engines.step(engine, optimizer, lambda: losses(number)[0])  # noqa: B023
    engines.window_reference(twin, [[0, 1], [2, 3]])
    for trains, number in ((False, 4), (False, 5), (True, 6)):
        twin.layers[1].requires_grad_(trains)
        reference(twin, [number])
    assert models.deviation(model, twin) <= 1e-6


class Clamps(nn.Module):
    """Its forward writes to its weight, through `data`, so no version tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data.clamp_(-0.1, 0.1)
        return x + self.second(torch.tanh(self.first(x)))


@on_ranks(4)
def test_what_the_forward_writes_is_in_them() -> None:
    trained = assert_trains_like_ddp(models.Stacked(Clamps), 3, reshard_after_forward=2, **EAGER)
    assert trained.stats.inner_gathers > 0


class ClampsLate(models.Stacked):
    """Its forward writes, through `data`, to weights of blocks that have run. So the backward has others than it."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        super().__init__(lambda: nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10)))

    def forward(self, tokens: Tensor) -> Tensor:
        x, held = self.embedding(tokens), []
        for layer in self.layers:
            held.append(layer[0].weight.data)
            x = x + layer(x)
        logits = self.head(x)
        for weight in held:
            weight.clamp_(-self.bound, self.bound)
        return logits  # type: ignore[no-any-return]


@on_ranks(4)
def test_what_is_written_after_them_is_in_them() -> None:
    """As at stage 1, where the backward reads the memory that is written to."""
    source, trained, inner = ClampsLate(0.1), [], 0
    for stage, bound, more in ((1, 0.1, {}), (1, 10.0, {}), (3, 0.1, {"reshard_after_forward": 2})):
        model = copy.deepcopy(source)
        model.bound = bound
        with engines.engine(model, stage, **EAGER, **more) as engine:
            optimizer = engines.sgd(engine, model)
            for number in range(3):
                engines.step(engine, optimizer, lambda: engines.token_loss(model, _batch(number)))  # noqa: B023
            inner = engine.runtime.stats().inner_gathers
        trained.append(model)
    assert inner > 0
    assert models.deviation(trained[0], trained[2]) <= 1e-6 < 1e-3 < models.deviation(trained[0], trained[1])


class Sometimes(nn.Module):
    """A layer that not every forward uses, while every backward reads its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.extra = models.ByteModel(), nn.Linear(models.VOCABULARY, models.VOCABULARY)
        self.uses, self.seen = True, list[Tensor]()

    def forward(self, tokens: Tensor) -> Tensor:
        before = self.extra(nn.functional.one_hot(tokens, models.VOCABULARY).float()) if self.uses else 0.0
        out: Tensor = self.model(tokens) + before
        out.register_hook(self._read)
        return out

    def _read(self, grad: Tensor) -> None:
        self.seen.append(self.extra.weight.detach().clone())


@on_ranks(4)
def test_no_backward_reads_what_an_optimizer_has_written_since() -> None:
    model = Sometimes()
    with engines.engine(model, 3, reshard_after_forward=2, unit_bytes=1, prefetch=0, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        engines.step(engine, optimizer, lambda: engines.token_loss(model, _batch(0)))
        model.uses = False
        engines.step(engine, optimizer, lambda: engines.token_loss(model, _batch(1)))
        with engine.evaluation_step(), torch.no_grad():
            now = model.extra.weight.detach().clone()
        before, after = model.seen
        assert torch.equal(after, now) and not torch.equal(before, after)
        assert engine.runtime.stats().inner_gathers > 0


@on_ranks(4)
def test_a_rank_that_fails_alone_leaves_none() -> None:
    """All ranks fail, at different points; then they train on as DDP."""
    model = models.ByteModel()
    twin = copy.deepcopy(model)
    with engines.engine(model, 3, reshard_after_forward=2, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        with pytest.raises(ValueError, match="on purpose"), engine.training_step():
            loss = engines.FailsInBackward.apply(engines.token_loss(model, _batch(0)))
            engines.backward(engine, loss)
        assert engine.runtime.stats().secondary_bytes == 0
        optimizer.zero_grad()
        for number in range(2):
            engines.step(engine, optimizer, lambda: engines.token_loss(model, _batch(number)))  # noqa: B023
    reference(twin, 2)
    assert models.deviation(model, twin) <= 1e-6


def test_sizes() -> None:
    assert inner_size(True, 2, [[0, 1, 2, 3]]) is None and inner_size(2, 1, [[0, 1, 2, 3]]) == 2
    for wrong, ranks in ((3, 4), (4, 4), (8, 4), (2, 1)):
        with pytest.raises(ValueError, match=rf"`reshard_after_forward={wrong}`: .* over {ranks} rank.*divisor"):
            inner_size(wrong, 1, [list(range(ranks))])


@on_ranks(4)
def test_sizes_of_hosts() -> None:
    assert inner_size("nodes", 2, [[0, 1, 2, 3]]) == 2
    assert inner_size("nodes", 1, [[0, 1, 2, 3]]) is None  # one host
    assert inner_size("nodes", 2, [[0, 1], [2, 3]]) is None  # replicas inside hosts
    assert inner_size("nodes", 2, [[0, 2], [1, 3]]) is None  # one rank on each host
    with pytest.raises(ValueError, match="hosts hold parts of 1 to 2 ranks"):
        inner_size("nodes", 2, [[0, 1, 2], [3]])


def test_what_does_not_go_together() -> None:
    for wrong in (False, 0, 1, -2, "node", 2.0, None):
        with pytest.raises(ValueError, match=r"`reshard_after_forward=.*is not understood.*stage=2"):
            Config(3, reshard_after_forward=wrong)  # type: ignore[arg-type]
    stages: list[Any] = [1, 2, "auto"]
    for stage in stages:
        with pytest.raises(ValueError, match=rf"`reshard_after_forward=2` is for stage=3.*got stage={stage!r}"):
            ZeroCompileStrategy(stage, reshard_after_forward=2)
    for value, text in (("nodes", "knows no hosts"), (3, "Choose a divisor of 4")):
        with pytest.raises(PlanError, match=re.escape(text)):
            make_plan(models.Module(), world_size=4, config=Config(3, reshard_after_forward=value))  # type: ignore[arg-type]
