"""On GPUs: streams that wait for each other do not wait in a circle, and errors of the device come out."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import engines, models
from tests.support.harness import Ranks, Worlds

pytestmark = pytest.mark.gpu
WIDTH, TIMEOUT, LR = 256, timedelta(seconds=60), 0.01


class Wide(nn.Module):
    """A residual layer; the last one has a gate that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gated = True

    def forward(self, x: Tensor) -> Tensor:  # [batch, WIDTH]
        y = x + 0.1 * torch.tanh(self.linear(x))
        return y * torch.sigmoid(self.gate(x)) if self.gated else y


class Deep(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:  # [batch, WIDTH]
        for layer in self.layers:
            x = layer(x)
        return x


def _x(rank: int, step: int) -> Tensor:  # [16, WIDTH]
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(models.device())


def _skipping(stage: int, blocks: int, scope: Any) -> float:
    """Rank 0 skips the gate of the last block, whose reduction so waits for the end of its backward."""
    torch.manual_seed(0)
    model, twin = Deep(blocks), Deep(blocks)
    twin.load_state_dict(model.state_dict())
    start = models.deviation(model, twin)
    twin.to(models.device())
    last = model.layers[-1]
    with engines.engine(model, stage, compile=scope, timeout=TIMEOUT) as engine:
        optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        engine.attach_optimizers([optimizer])
        for step in range(4):
            last.gated = models.rank() > 0 or step == 0
            engines.step(engine, optimizer, lambda n=step: model(_x(models.rank(), n)).square().mean())
            for rank in range(models.world()):
                twin.layers[-1].gated = rank > 0 or step == 0
                (twin(_x(rank, step)).square().mean() / models.world()).backward()
            theirs.step()
            theirs.zero_grad()
        assert start == 0 and engine.runtime.stats().gathers > 0
    return models.deviation(model, twin)


@pytest.mark.parametrize("scope", [False, "blocks"])
@pytest.mark.parametrize("blocks", [8, 40])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_missing_gradient_of_the_last_block(ranks: Ranks, stage: int, blocks: int, scope: Any) -> None:
    """The reduction that waits for it has more blocks behind it than buffers: no stream waits in a circle."""
    for deviation in ranks.run(_skipping, stage, blocks, scope, timeout=150):
        assert deviation <= 1e-6


class Heads(nn.Module):
    """Statistics over all ranks in front of the trunk, and a head that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.SyncBatchNorm(WIDTH) for _ in range(4))
        self.head, self.other = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.both = True

    def forward(self, x: Tensor) -> Tensor:  # [batch, WIDTH] -> [batch, 8]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return self.head(x) + self.other(x) if self.both else self.head(x)


def _synchronized(stage: int, scope: Any) -> tuple[float, float]:
    torch.manual_seed(0)
    model, twin = models.pair(Heads)
    start = Heads()
    start.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(
        twin.to(engines.place()), device_ids=[engines.place()], find_unused_parameters=True, broadcast_buffers=False
    )
    with engines.engine(model, stage, compile=scope, timeout=TIMEOUT) as engine:
        optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        engine.attach_optimizers([optimizer])
        for step in range(4):
            model.both = twin.both = models.rank() == 0 or step == 0
            x, target = _x(models.rank(), step), torch.arange(16, device=models.device()) % 8
            engines.step(engine, optimizer, lambda x=x, target=target: F.cross_entropy(model(x), target))
            F.cross_entropy(ddp(x), target).backward()
            theirs.step()
            theirs.zero_grad()
    return models.deviation(model, twin), models.deviation(start, twin)


@pytest.mark.parametrize("scope", [False, "blocks"])
@pytest.mark.parametrize("stage", [1, 2])
def test_synchronized_statistics_and_an_unused_head(ranks: Ranks, stage: int, scope: Any) -> None:
    """The backward of SyncBatchNorm waits for all ranks, while the head's reduction waits for its end."""
    for deviation, moved in ranks.run(_synchronized, stage, scope, timeout=150):
        assert deviation <= 1e-5 and moved > 1e-3


class Headed(nn.Module):
    """The unit that is used first, and reduced last, is large: its reduction outlives the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 512 * WIDTH, bias=False)
        self.rest = Deep(6)
        for layer in self.rest.layers:
            layer.gated = False

    def forward(self, x: Tensor) -> Tensor:  # [batch, WIDTH]
        return self.rest(x + self.first(x).unflatten(1, (512, WIDTH)).sum(1) / 16)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum() / 4


def _norms(grads: Iterable[Tensor]) -> Tensor:
    return torch.stack([grad.double().square().sum() for grad in grads])


def _trained(twin: nn.Module, steps: int) -> list[Tensor]:
    """DDP's training; the squared norms of each step's gradients."""
    trained = [p for name, p in twin.named_parameters() if "gate" not in name]
    optimizer, norms = torch.optim.SGD(trained, lr=LR), []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(models.world()):
            (_loss(twin, _x(rank, step)) / models.world()).backward()
        norms.append(_norms(p.grad for p in trained if p.grad is not None))
        optimizer.step()
    return norms


def _streams(stage: int, reads: str, forward: str) -> tuple[float, float, float]:
    """Who reads gradients, and where the forward ran: on "home", the stream of the backward, or on another ("side").

    Returns:
        How far the parameters are from DDP's, how far these moved at least, and the largest relative error of a norm.
    """
    torch.manual_seed(0)
    model, twin, start = Headed(), Headed(), Headed()
    for other in (twin, start):
        other.load_state_dict(model.state_dict())
    expected = _trained(twin.to(models.device()), 4)
    worst = torch.zeros((), dtype=torch.float64, device=models.device())
    inputs = [_x(models.rank(), step) for step in range(4)]
    home, side = torch.cuda.current_stream(), torch.cuda.Stream()
    places = {"home": home, "side": side}
    with engines.engine(model, stage, compile=False, timeout=TIMEOUT) as engine:
        trained = [p for name, p in model.named_parameters() if "gate" not in name]
        optimizer = torch.optim.SGD(trained, lr=LR)
        engine.attach_optimizers([optimizer])
        for step in range(4):
            side.wait_stream(home)
            with engine.training_step():
                with torch.cuda.stream(places[forward]):
                    loss = _loss(model, inputs[step])
                home.wait_stream(side)
                if models.rank() == 1:
                    torch.cuda._sleep(10**8)  # cycles: the other rank's reductions wait for that
                engines.backward(engine, loss)
            if reads:
                side.wait_stream(home)
                with torch.cuda.stream(places[reads]):
                    norms = _norms(p.grad.to_local() for p in trained)
                    torch.distributed.all_reduce(norms)
                home.wait_stream(side)
                worst = torch.maximum(worst, ((norms - expected[step]) / expected[step]).abs().max())
            engine.step(optimizer, lambda: None)
    pairs = zip(twin.named_parameters(), start.parameters(), strict=True)
    moved = min(float((p.cpu() - q).abs().max()) for (name, p), q in pairs if "gate" not in name)
    return models.deviation(model, twin), moved, float(worst)


@pytest.mark.parametrize("forward", ["home", "side"])
@pytest.mark.parametrize("reads", ["", "home", "side"])
def test_reductions_that_outlive_the_backward(ranks: Ranks, reads: str, forward: str) -> None:
    """Whoever reads gradients waits for them, on any stream, and so does who comes after."""
    for stage in (1, 3):
        for deviation, moved, worst in ranks.run(_streams, stage, reads, forward, timeout=150):
            assert moved > 1e-3 and deviation <= 1e-5 and worst <= 1e-4, stage


def _asserting(copy_engine: bool) -> None:
    model = nn.Sequential(nn.Embedding(8, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    with engines.engine(model, 3, compile=False, copy_engine=copy_engine, timeout=TIMEOUT) as engine:
        optimizer = engines.sgd(engine, model, lr=0.1)
        for step in range(3):
            tokens = torch.randint(0, 8, (4, 16), device=models.device()) + 8 * (step == 2)
            engines.step(engine, optimizer, lambda tokens=tokens: model(tokens).square().mean())


@pytest.mark.parametrize("copy_engine", [False, True])
def test_an_assertion_of_the_device_ends_the_ranks(all_worlds: Worlds, copy_engine: bool) -> None:
    """A token outside of the table, on all ranks: CUDA's error, or torch's watchdog of NCCL ends the process first."""
    ranks = all_worlds.fresh(2)
    try:
        text = ranks.expect_error(_asserting, copy_engine, timeout=90)
    finally:
        ranks.close(kill=True)
    assert "device-side assert" in text or all(f"rank {r} died with exit code -6" in text for r in range(2)), text
    assert "hangs" not in text, text
