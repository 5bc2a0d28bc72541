"""torch.optim.Muon: each matrix is orthogonalised by one rank, and the numbers are Muon's on whole matrices."""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import _muon as torch_muon

from lightning_zerocompile.engine import Engine
from lightning_zerocompile.optim import by_unit, matrices
from tests.support import engines, models, twins
from tests.support.harness import Ranks, Worlds, on_ranks
from tests.support.parity import AOT, EAGER

STEPS = 3


def _matrices(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.dim() == 2]


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = _matrices(model)
    groups: Any = [{"params": [first], "nesterov": False}, {"params": others, "lr": 0.05}]
    return torch.optim.Muon(groups, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


def _train(
    model: nn.Module, stage: int, ranks_share: bool = True, sent: list[int] | None = None, **options: Any
) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """The sizes of the matrices that this rank has orthogonalised in the last step, and its rows of the momenta.

    Args:
        sent: gets, for each exchange of the last step, how many matrices were orthogonalised before it.
    """
    seen: list[tuple[int, ...]] = []
    original, exchange = torch_muon._zeropower_via_newtonschulz, dist.all_to_all_single

    def noted(*args: Any, **options: Any) -> Any:
        if sent is not None:
            sent.append(len(seen))
        return exchange(*args, **options)

    def counted(grad: Tensor, *args: Any) -> Tensor:
        seen.append(tuple(grad.shape))
        return original(grad, *args)

    data = models.Batches(models.rank())
    with (
        engines.engine(model, stage, **options) as engine,
        mock.patch.object(torch_muon, "_zeropower_via_newtonschulz", counted),
        mock.patch.object(dist, "all_to_all_single", noted),
        mock.patch.object(by_unit, "shares_matrices", matrices.shares_matrices if ranks_share else lambda _: False),
    ):
        optimizer = _muon(model)
        engine.attach_optimizers([optimizer])
        for number in range(STEPS):
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, data[number]))
            assert matrices.can_share_matrices()
            seen.clear()
            if sent is not None:
                sent.clear()
            engine.step(optimizer, lambda: None)
            for parameter in model.parameters():
                parameter.grad = None
        momenta = []
        for state in optimizer.state.values():
            momentum = state["momentum_buffer"]
            assert isinstance(momentum, DTensor) and momentum.placements[0].is_shard(0)
            momenta.append(momentum.to_local().cpu().clone())
    return seen, momenta


def _trained(stage: int, options: dict[str, Any]) -> list[tuple[int, ...]]:
    """Trains as plain Muon does. The matrices that this rank has orthogonalised."""
    torch.manual_seed(0)
    model = models.ByteModel()
    twin, start = copy.deepcopy(model).to(models.device()), copy.deepcopy(model)
    seen, _ = _train(model, stage, **options)
    optimizer = _muon(twin)
    for number in range(STEPS):
        twin.zero_grad()
        engines.mean_backward(twin, number)
        optimizer.step()
    assert models.deviation(model, twin) <= 1e-6 and models.deviation(twin, start) > 1e-2
    return seen


CELLS = [(1, AOT), pytest.param(2, EAGER, marks=pytest.mark.long), (3, EAGER), (3, AOT)]


@pytest.mark.parametrize(("stage", "options"), CELLS)
def test_each_matrix_is_one_rank_s_work(ranks: Ranks, stage: int, options: dict[str, Any]) -> None:
    shares = ranks.run(_trained, stage, options)
    assert all(shares)
    assert sorted(shape for share in shares for shape in share) == sorted(
        tuple(p.shape) for p in _matrices(models.ByteModel())
    )


@on_ranks(2)
def test_rows_travel_while_a_rank_orthogonalises() -> None:
    """The rows of all turns leave before the first matrix is orthogonalised, and each result before the next one is."""
    sent: list[int] = []
    seen, _ = _train(models.ByteModel(), 3, sent=sent, **EAGER)
    assert sent.count(0) > 1 and set(sent) == set(range(len(seen) + 1))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks(3)
def test_numbers_are_those_of_whole_matrices_on_every_rank(stage: int) -> None:
    """To the bit, also where rows are padded and the last rank has none: parameters, and momenta in their rows."""
    torch.manual_seed(0)
    model = models.Stacked(lambda: models.Block(10))
    model.few = nn.Linear(10, 2, bias=False)  # type: ignore[assignment]
    model.head = nn.Sequential(model.few, nn.Linear(2, models.VOCABULARY))  # type: ignore[assignment]
    other = copy.deepcopy(model)
    seen, momenta = _train(model, stage, **EAGER)
    whole, expected = _train(other, stage, ranks_share=False, **EAGER)
    assert len(seen) < len(whole) == len(_matrices(model))
    assert all(torch.equal(one, two) for one, two in zip(momenta, expected, strict=True))
    models.assert_equal(model, other)


@pytest.mark.long
@on_ranks(4)
def test_replicas() -> None:
    torch.manual_seed(0)
    model, other = models.pair(models.ByteModel)
    seen, _ = _train(model, 3, device_mesh=2, **EAGER)
    whole, _ = _train(other, 3, ranks_share=False, device_mesh=2, **EAGER)
    assert 0 < len(seen) < len(whole)
    models.assert_equal(model, other)


def test_owners_share_the_work() -> None:
    """The largest first, to whom has least; alike for equal input."""
    costs = [8, 3, 3, 2, 9, 1]
    chosen = matrices.owners(costs, 3)
    loads = [sum(cost for cost, rank in zip(costs, chosen, strict=True) if rank == one) for one in range(3)]
    assert sorted(loads) == [8, 9, 9]
    assert chosen == matrices.owners(costs, 3)
    assert set(matrices.owners([5, 5], 4)) == {0, 1} and matrices.owners([], 2) == []


def test_another_muon_is_not_taken() -> None:
    """If torch's functions change, the trial sees it; a subclass, and what torch's own way would write to, are left."""
    parameters = [nn.Parameter(torch.zeros(2, 3))]
    half = [nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))]

    class Own(torch.optim.Muon):
        pass

    assert matrices.shares_matrices(torch.optim.Muon(parameters))
    assert not matrices.shares_matrices(Own(parameters))
    assert matrices.shares_matrices(torch.optim.Muon(half))
    assert not matrices.shares_matrices(torch.optim.Muon(half, nesterov=False))
    tried = matrices.can_share_matrices.__wrapped__
    assert tried()
    with mock.patch.object(torch_muon, "_adjust_lr", lambda lr, *_: 2 * lr):
        assert tried()  # both call it
    with mock.patch.object(matrices, "_orthogonal", lambda whole, group: whole):
        assert not tried()
    with mock.patch.object(torch_muon, "_adjust_lr", None), pytest.raises(TypeError):
        tried()  # torch's own does not work either


def _step(engine: Engine, optimizer: torch.optim.Optimizer, loss: Any, model: nn.Module, batch: Tensor) -> None:
    with engine.training_step():
        engines.backward(engine, loss(model, batch))
    engine.step(optimizer, lambda: None)
    optimizer.zero_grad()


@on_ranks(2)
def test_gradients_in_bfloat16() -> None:
    """Without Nesterov's step torch orthogonalises the momentum itself, which has the gradient's dtype."""
    for nesterov in (True, False):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
        twin = copy.deepcopy(model).to(models.device())
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.grad_dtype = torch.bfloat16
        with engines.engine(model, 1, compile=False) as engine:
            ours, plain = (torch.optim.Muon(m.parameters(), lr=0.05, nesterov=nesterov) for m in (model, twin))
            engine.attach_optimizers([ours])
            for number in range(STEPS):
                _step(engine, ours, twins.loss, model, twins.batch(0, number))
                plain.zero_grad()
                twins.loss(twin, twins.batch(0, number)).backward()
                plain.step()
        assert models.deviation(model, twin) <= 1e-6


@on_ranks(2)
def test_options_that_newton_schulz_does_not_take() -> None:
    """On both ranks, of which one alone has a matrix to orthogonalise; nothing was sent, so the next step is right."""
    model, twin = models.pair(lambda: nn.Sequential(nn.Linear(4, 4, bias=False)))
    with engines.engine(model, 1, compile=False) as engine:
        ours, plain = (torch.optim.Muon(m.parameters(), lr=0.05) for m in (model, twin))
        engine.attach_optimizers([ours])
        (group,) = ours.param_groups
        for steps in (100, 5):
            group["ns_steps"] = steps
            with pytest.raises(ValueError, match="Number of steps") if steps == 100 else contextlib.nullcontext():
                _step(engine, ours, twins.loss, model, twins.batch(0, 0))
            ours.zero_grad()
        twins.loss(twin.to(models.device()), twins.batch(0, 0)).backward()
        plain.step()
    assert models.deviation(model, twin) <= 1e-6


def _fails_apart(stage: int) -> None:
    """Rank 0 fails at its first matrix and rank 1 at its second, so they have exchanged different rows."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    original, done = torch_muon._zeropower_via_newtonschulz, []

    def failing(*args: Any) -> Tensor:
        if len(done) == models.rank():
            raise torch.OutOfMemoryError("on purpose")
        done.append(True)
        return original(*args)

    made = engines.make_engine(model, stage, compile=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.05)
    made.attach_optimizers([optimizer])
    assert matrices.can_share_matrices()
    with (
        mock.patch.object(torch_muon, "_zeropower_via_newtonschulz", failing),
        pytest.raises(torch.OutOfMemoryError),
    ):
        _step(made, optimizer, twins.loss, model, twins.mine(0))
    optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="An earlier step of Muon raised"):
            _step(made, optimizer, twins.loss, model, twins.mine(1))
    made.abandon()


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_that_fail_at_different_matrices_do_not_go_on(all_worlds: Worlds, stage: int) -> None:
    ranks = all_worlds.fresh(2)  # what was sent and not received stays in its groups
    try:
        ranks.run(_fails_apart, stage)
    finally:
        ranks.close(kill=True)
