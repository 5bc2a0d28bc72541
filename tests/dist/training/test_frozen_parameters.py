"""Frozen parameters cost their own bytes, and become masters without losing a bit when they are unfrozen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models, twins
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, assert_trains_like_ddp


def _half() -> nn.Module:
    """Of bfloat16, whose blocks are frozen; widths that two ranks do not divide."""
    torch.manual_seed(3)
    model = models.ByteModel(width=9).to(torch.bfloat16)
    model.layers.requires_grad_(False)  # type: ignore[union-attr]
    return model


def _steps(engine: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        batch = models.Batches(models.rank())[number]
        engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(engine.model, batch))


def _dtypes(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """Of the shards, frozen and trained."""
    found: dict[str, set[torch.dtype]] = {"frozen": set(), "trained": set()}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.dtype == parameter._local_tensor.dtype
        found["trained" if parameter.requires_grad else "frozen"].add(parameter.dtype)
    return found


def _twin_wide(stage: int, options: dict[str, Any], unfreeze: bool) -> nn.Module:
    """The same training where every parameter is trained at set-up, and so a float32 master, and frozen only then."""
    model = _half().requires_grad_(True)
    with engines.engine(model, stage, **options) as engine:
        model.layers.requires_grad_(False)  # type: ignore[union-attr]
        assert _dtypes(model)["frozen"] == {torch.float32}
        _train(engine, unfreeze)
        assert _dtypes(model)["trained"] == {torch.float32}
    return model


def _train(engine: Any, unfreeze: bool) -> None:
    trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    engine.attach_optimizers([optimizer])
    _steps(engine, optimizer, range(2))
    if unfreeze:
        engine.model.layers.requires_grad_(True)
        optimizer.add_param_group({"params": list(engine.model.layers.parameters()), "lr": 0.003})
        _steps(engine, optimizer, range(2, 4))
        states = [optimizer.state[p]["exp_avg"].dtype for p in engine.model.layers.parameters()]
        assert set(states) == {torch.float32}


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("unfreeze", [pytest.param(False, marks=pytest.mark.long), True])
@on_ranks()
def test_own_dtype_until_unfrozen(stage: int, options: dict[str, Any], unfreeze: bool) -> None:
    model = _half()
    with engines.engine(model, stage, **options) as engine:
        assert _dtypes(model) == {"frozen": {torch.bfloat16}, "trained": {torch.float32}}
        objects = list(model.parameters())
        _train(engine, unfreeze)
        dtypes = _dtypes(model)
        assert dtypes["trained"] == {torch.float32}
        assert dtypes["frozen"] == (set() if unfreeze else {torch.bfloat16})
        assert all(now is before for now, before in zip(model.parameters(), objects, strict=True))
        model.layers.requires_grad_(False)  # again: nothing goes back, whatever was trained stays
        _steps(engine, torch.optim.SGD(model.head.parameters(), lr=0.0), range(1))  # type: ignore[union-attr]
        assert _dtypes(model)["frozen"] == ({torch.float32} if unfreeze else {torch.bfloat16})
    wide = _twin_wide(stage, options, unfreeze)
    assert models.deviation(model, wide) == 0.0
    assert models.deviation(model, _half()) > 1e-3


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_unfrozen_inside_a_step(stage: int) -> None:
    """Its gradient is there before the next step begins."""
    model = _half()
    with engines.engine(model, stage, compile=False) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine.attach_optimizers([optimizer])
        with engine.training_step():
            model.layers.requires_grad_(True)  # type: ignore[union-attr]
            engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[0]))
        assert _dtypes(model) == {"frozen": set(), "trained": {torch.float32}}
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}  # type: ignore[union-attr]
        optimizer.step()
        state = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
        assert {value.dtype for value in state.values()} == {torch.float32}


@on_ranks()
def test_what_is_loaded_keeps_its_bits() -> None:
    """A value that was trained and saved in float32 comes back as it was, into a shard that is frozen now."""
    for value, dtype in ((1.0, torch.bfloat16), (1.0 + 2**-20, torch.float32)):
        model = _half()
        with engines.engine(model, 3, compile=False):
            wide = {name: torch.full(p.shape, value) for name, p in model.layers.named_parameters()}  # type: ignore[union-attr]
            model.layers.load_state_dict(wide)  # type: ignore[union-attr]
            assert _dtypes(model)["frozen"] == {dtype}
            assert {p.to_local().unique().item() for p in model.layers.parameters()} == {value}  # type: ignore[union-attr]


class _Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.layers, train_bn=True)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.layers, optimizer, lr=0.1)


class _Trainable(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        (1, "full"),
        (3, "sharded"),
        pytest.param(1, "sharded", marks=pytest.mark.long),
        pytest.param(3, "full", marks=pytest.mark.long),
    ],
)
@on_ranks()
def test_finetuning_callback(tmp_path: Path, stage: int, kind: str) -> None:
    torch.manual_seed(1)
    module = _Trainable().to(torch.bfloat16)  # under "bf16-true" parameters that are float32 stay so
    strategy = ZeroCompileStrategy(stage=stage, compile=False, state_dict_type=kind)
    seen: list[set[torch.dtype]] = []

    class Notes(_Unfreezes):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append({parameter.dtype for parameter in pl_module.model.layers.parameters()})
            trainer.save_checkpoint(tmp_path / f"{kind}{len(seen)}")

    before = copy.deepcopy(module.model.layers).to(torch.bfloat16)
    models.fit_epochs(module, strategy, 2, precision="bf16-true", callbacks=[Notes()])
    assert seen == [{torch.bfloat16}, {torch.float32}]
    assert models.deviation(module.model.layers, before) > 1e-3
    if kind == "full":
        for number, dtype in ((1, torch.bfloat16), (2, torch.float32)):
            state = torch.load(tmp_path / f"full{number}", weights_only=True)["state_dict"]
            assert {value.dtype for name, value in state.items() if ".layers." in name} == {dtype}
            assert {value.dtype for name, value in state.items() if ".layers." not in name} == {torch.float32}


@on_ranks()
def test_a_quantised_parameter_is_refused() -> None:
    """Its numbers mean nothing without what the subclass holds beside them; nothing is sharded or sent before."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)))
    with pytest.raises(RuntimeError, match=r"`1\.weight` is a .*TwoTensor.*Load it unquantised"):
        engines.make_engine(model, 3, compile=False)
    assert type(model[0].weight) is nn.Parameter


class Narrow(nn.Module):
    """A block with a frozen weight in float8 and its scale, as checkpoints of large models have them."""

    def __init__(self, dtype: torch.dtype, width: int = 10) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        weight = torch.randn(width + 1, width).to(dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        weight = self.weight.to(x.dtype) * self.scale
        return x + torch.relu(self.inner(x) @ weight.T) @ weight  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("stage", "options"), [(1, AOT), (2, EAGER), (3, EAGER), (3, AOT)])
@on_ranks()
def test_float8_weights(stage: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    """They train what is around them as under DDP, keep their bits, and are written as they are."""
    torch.manual_seed(0)
    model = models.Stacked(lambda: Narrow(dtype))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype == dtype}
    assert_trains_like_ddp(model, stage, **options)
    after = dict(model.named_parameters())
    assert len(before) == 2
    for name, value in before.items():
        assert after[name].dtype == dtype
        assert torch.equal(after[name].view(torch.uint8).cpu(), value.view(torch.uint8))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_what_counts_is_the_forward(stage: int, options: dict[str, Any]) -> None:
    """A block's parameter has a gradient if it is trained when the block runs, whatever it was when the step began."""
    torch.manual_seed(0)
    model = models.ByteModel()
    batch = models.Batches(models.rank())[0]
    with engines.engine(model, stage, **options) as engine:
        optimizer = engines.sgd(engine, model, lr=0.1)
        weights = list(model.layers.parameters())  # type: ignore[union-attr]
        engines.step(engine, optimizer, lambda: engines.token_loss(model, batch))
        for at_first, later in [(False, True), (True, False), (False, True), (True, True), (False, False)]:
            weights[0].requires_grad_(at_first)
            with engine.training_step():
                weights[0].requires_grad_(later)
                engines.backward(engine, engines.token_loss(model, batch))
            assert (weights[0].grad is not None) is later, (at_first, later)
            assert weights[1].grad is not None
            optimizer.step()
            optimizer.zero_grad()


def _frozen_meanwhile(engine: Any, wait: str) -> None:
    """The weight of the first layer is frozen after a backward whose gradients wait for a later one."""
    weight = dict(engine.model.named_parameters())["0.weight"]
    waits = engine.accumulation() if wait == "accumulation" else engine.windows.open("auto", None, None)
    with waits, engine.training_step():
        engines.backward(engine, twins.loss(engine.model, twins.mine(0)))
        weight.requires_grad_(False)
        engines.backward(engine, twins.loss(engine.model, twins.mine(1)))
    if wait == "accumulation":
        with engine.training_step():
            engines.backward(engine, twins.loss(engine.model, twins.mine(2)))
    weight.requires_grad_(True)


@pytest.mark.parametrize("wait", ["accumulation", "window"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_frozen_after_a_backward(stage: int, wait: str) -> None:
    """See [Note: frozen in an accumulation] in csrc/gradients.cpp: its gradient is that of one process."""
    for options in (EAGER, AOT):
        torch._dynamo.reset()
        with twins.pair(stage, defer_grad_sync=True, **options) as (engine, twin, optimizer):
            _frozen_meanwhile(engine, wait)
            twins.gradients(twin, twins.on_all(0))
            twin.get_parameter("0.weight").requires_grad_(False)
            twins.gradients(twin, twins.on_all(*([1] if wait == "window" else [1, 2])))
            assert twins.grad_deviation(engine, twin) <= 1e-6
            twin.get_parameter("0.weight").requires_grad_(True)
            optimizer.step()
            torch.optim.SGD(twin.parameters(), lr=optimizer.param_groups[0]["lr"]).step()
            assert twins.deviation(engine, twin) <= 1e-6
            optimizer.zero_grad()
            twin.zero_grad()
            with engine.training_step():  # nothing has stayed
                engines.backward(engine, twins.loss(engine.model, twins.mine(3)))
            twins.gradients(twin, twins.on_all(3))
            assert twins.grad_deviation(engine, twin) <= 1e-6


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks()
def test_frozen_without_a_gradient_on_any_rank(stage: int) -> None:
    """A backward that gives it none does not reduce it: a rank that is early would do what the others do not."""
    with twins.pair(stage, defer_grad_sync=True, unit_bytes=1) as (engine, twin, optimizer):
        model = engine.model
        with engine.accumulation(), engine.training_step():
            engines.backward(engine, twins.loss(model, twins.mine(0)))
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        optimizer.zero_grad()
        with engine.training_step():  # others leave the last layer out, so their reductions wait for the backward's end
            used = model if models.rank() == 0 else model[:2]  # type: ignore[index]
            engines.backward(engine, twins.loss(used, twins.mine(1)))
        twin[0].weight.requires_grad_(False)  # type: ignore[index]
        for rank in range(models.world()):
            own = twin if rank == 0 else twin[:2]  # type: ignore[index]
            (twins.loss(own, twins.batch(rank, 1)) / models.world()).backward()
        assert twins.grad_deviation(engine, twin) <= 1e-6
