"""On GPUs, with replicas: what an accumulation or a bounded window reduces early is summed over replicas once, at its
end. See [Note: partial reductions] in csrc/reductions.cpp. On the CPU nothing is partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

pytestmark = pytest.mark.gpu
SUM, SCATTER = "nccl:all_reduce", "nccl:reduce_scatter_tensor_coalesced"
_NO_DIMENSIONS = sum(parameter.dim() == 0 for parameter in models.ByteModel().parameters())


class Uneven(nn.Module):
    """Has a branch that only some batches take, with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.ByteModel()
        self.extra, self.scale = nn.Linear(models.VOCABULARY, models.VOCABULARY), nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor, branch: bool = False) -> Tensor:
        out: Tensor = self.model(tokens)
        return self.extra(out) * self.scale + out if branch else out


@contextmanager
def _engine(model: nn.Module, stage: int, **options: Any) -> Iterator[Engine]:
    """Two hosts, a replica on each."""
    config = Config(stage, copy_engine=False, device_mesh=2, **options)
    with engines.closing(Engine(model, engines.place(), config, None, dist.get_backend(), nodes=2)) as engine:
        yield engine


def _backward(engine: Engine, loss: Callable[[], Tensor], last: bool) -> None:
    with ExitStack() as stack:
        stack.enter_context(engine.training_step())
        if not last:
            stack.enter_context(engine.accumulation())
        engines.backward(engine, loss())


def _counted(work: Callable[[], None]) -> tuple[int, int]:
    """Sums over replicas, and reduce-scatters, of some work."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    return names.count(SUM), sum(name in (SCATTER, "nccl:_reduce_scatter_base") for name in names)


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(4)
def test_an_accumulation(stage: int, options: dict[str, Any]) -> None:
    """Three micro-batches: stage 1 reduces once, stages 2 and 3 reduce three times and sum over replicas once."""
    torch.manual_seed(0)
    model, twin = models.pair(models.ByteModel)
    own = models.Batches(models.rank())
    with _engine(model, stage, **options) as engine:
        optimizer = engines.sgd(engine, model)

        def step(*numbers: int) -> None:
            for number in numbers:
                batch, last = own[number], number == numbers[-1]
                _backward(engine, lambda: engines.token_loss(model, batch) / len(numbers), last)  # noqa: B023
            optimizer.step()
            optimizer.zero_grad()

        step(0, 1, 2)
        sums, scatters = _counted(lambda: step(3))
        several = _counted(lambda: step(4, 5, 6))
        assert sums > 0 and scatters > 0
        whole = 0 if stage == 1 else 2 * _NO_DIMENSIONS  # these are summed over the ranks of a replica, too
        assert several == (sums + whole, scatters if stage == 1 else 3 * scatters)
    engines.window_reference(twin, [[0, 1, 2], [3], [4, 5, 6]])
    assert models.deviation(model, twin) <= 1e-6


@on_ranks(4)
def test_a_bounded_window() -> None:
    """Everything is reduced early, and summed over replicas where the window closes."""
    torch.manual_seed(0)
    model, twin = models.pair(models.ByteModel)
    own = models.Batches(models.rank())
    with _engine(model, 3, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)

        def step(*numbers: int) -> None:
            with engine.training_step(), engine.windows.open("use", 0, None):
                for number in numbers:
                    engines.backward(engine, engines.token_loss(model, own[number]) / len(numbers))
            optimizer.step()
            optimizer.zero_grad()

        step(0, 1)
        once, several = _counted(lambda: step(2)), _counted(lambda: step(3, 4, 5))
        assert several[0] == once[0] + 2 * _NO_DIMENSIONS and once[0] > 0 and several[1] > once[1]
    engines.window_reference(twin, [[0, 1], [2], [3, 4, 5]])
    assert models.deviation(model, twin) <= 1e-6


def _takes(rank: int, stage: int) -> bool:
    return rank == 3 or stage == 3


Program = Callable[[Engine, Any, torch.optim.Optimizer], None]


def _batch(number: int) -> Tensor:
    return models.Batches(models.rank())[number]


def _loss(model: nn.Module, number: int, branch: bool = False) -> Tensor:
    return engines.token_loss(lambda tokens: model(tokens, branch), _batch(number))  # type: ignore[arg-type]


def _only_the_first_backward(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The branch is taken in the first backward of two only; where values stay gathered, by one rank alone."""
    _backward(engine, lambda: _loss(model, 0, branch=_takes(models.rank(), engine.config.stage)), last=False)
    _backward(engine, lambda: _loss(model, 1), last=True)
    optimizer.step()


def _no_last_backward(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    for number in (0, 1):
        _backward(engine, lambda: _loss(model, number, branch=True), last=False)  # noqa: B023
    optimizer.step()


def _reads_and_writes(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """What user code writes to a waiting gradient counts, and what it keeps of one is added to later."""
    _backward(engine, lambda: _loss(model, 0, branch=True), last=False)
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    for grad in kept.values():
        grad.mul_(0.5)
    _backward(engine, lambda: _loss(model, 1, branch=True), last=False)
    assert all(torch.isfinite(grad.sum()) for grad in kept.values())
    _backward(engine, lambda: _loss(model, 2, branch=True), last=True)
    optimizer.step()


def _drops(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    _backward(engine, lambda: _loss(model, 0, branch=True), last=False)
    optimizer.zero_grad()
    _backward(engine, lambda: _loss(model, 1), last=False)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    _backward(engine, lambda: _loss(model, 2), last=True)
    optimizer.step()


def _frozen_meanwhile(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The gradient of what is frozen now is reduced with the others."""
    _backward(engine, lambda: _loss(model, 0, branch=True), last=False)
    model.extra.weight.requires_grad_(False)
    master = dict(model.named_parameters())["extra.weight"]
    before = master.to_local().clone()
    _backward(engine, lambda: _loss(model, 1, branch=True), last=True)
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(master.to_local(), before)
    model.extra.weight.requires_grad_(True)
    _backward(engine, lambda: _loss(model, 2, branch=True), last=True)
    optimizer.step()


def _fails(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A backward that raises leaves nothing of its accumulation."""
    _backward(engine, lambda: _loss(model, 0, branch=True), last=False)
    with pytest.raises(ValueError, match="on purpose"):
        _backward(engine, lambda: engines.FailsInBackward.apply(_loss(model, 1)), last=False)
    _backward(engine, lambda: _loss(model, 2), last=True)
    optimizer.step()


PROGRAMS = [_only_the_first_backward, _no_last_backward, _reads_and_writes, _drops, _frozen_meanwhile, _fails]


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(4)
def test_it_is_the_accumulation_that_defers_all(stage: int) -> None:
    """Each program gives what it gives where full gradients wait for the last backward; two give DDP's numbers."""
    for program in PROGRAMS:
        results = []
        for defer_grad_sync in (False, True):
            torch.manual_seed(0)
            model, twin = models.pair(Uneven)
            with _engine(model, stage, defer_grad_sync=defer_grad_sync, **EAGER) as engine:
                program(engine, model, engines.sgd(engine, model))
            results.append(model)
        assert models.deviation(*results) <= 1e-6, program.__name__
        assert models.deviation(results[0], twin) > 1e-4, program.__name__
        if program in PROGRAMS[:2]:
            _reference(twin, stage, program is PROGRAMS[0])
            assert models.deviation(results[0], twin) <= 1e-6, program.__name__


def _reference(twin: nn.Module, stage: int, first: bool) -> None:
    """One process's step of the first or the second program."""
    twin.to(models.device())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for rank in range(models.world()):
        for number in (0, 1):
            branch = _takes(rank, stage) and number == 0 if first else True
            tokens = models.Batches(rank)[number]
            loss = engines.token_loss(lambda tokens: twin(tokens, branch), tokens)  # type: ignore[arg-type]  # noqa: B023
            (loss / models.world()).backward()
    optimizer.step()
