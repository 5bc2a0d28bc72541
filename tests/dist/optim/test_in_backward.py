"""`optimizer_in_backward`: the numbers of the ordinary step, each unit's gradient gone when it was used."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileFabricStrategy, ZeroCompileStrategy
from lightning_zerocompile.config import Config
from tests.support import architectures, engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, CELLS, EAGER, assert_trains_like_ddp

COMPILED: dict[Any, dict[str, Any]] = {False: EAGER, "blocks": AOT}


class _Slow(torch.autograd.Function):
    """Its backward takes so long that what was reduced before it is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if grads[0].device.type == "cpu":
            torch.distributed.barrier()  # the other rank has started its reductions, too, so they need no rank any more
        time.sleep(0.2)
        return grads[0]


class SlowModel(models.ByteModel):
    """The backward of the first block begins late. `seen` is what `look` says when it comes to the embedding."""

    look: Any = staticmethod(lambda: None)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if x.requires_grad:
            x.register_hook(self.at_embedding)
        for number, layer in enumerate(self.layers):
            x = _Slow.apply(layer(x)) if number == 0 else layer(x)
        return self.head(x) * self.scale + self.shift

    def at_embedding(self, grad: Tensor) -> None:
        self.seen = self.look()


@pytest.mark.parametrize(("stage", "scope"), CELLS)
@on_ranks(2)
def test_units_are_updated_beside_the_backward(stage: int, scope: Any) -> None:
    """When the backward comes to the embedding, the last blocks are updated, and their gradients are gone."""
    model, twin = models.pair(SlowModel)
    data = models.Batches(models.rank())
    with engines.engine(model, stage, optimizer_in_backward=True, **COMPILED[scope]) as engine:
        core, masters = engine.runtime.core, {s.name: s for s in engine.runtime.sharded_parameters}
        model.look = lambda: (engine.runtime.updated_in_backward, masters["layers.2.up.weight"].local.sum().item())
        optimizer = engines.sgd(engine, model)
        for number in range(3):
            before = masters["layers.2.up.weight"].local.sum().item()
            counted = engine.runtime.updated_in_backward
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, data[number]))
            assert [p.grad for p in model.parameters() if p.grad is not None] == []
            assert model.seen[0] > counted
            if number:  # before, the order of reductions was not known
                assert model.seen[1] != before
            optimizer.step()
            assert core.stats().backwards == number + 1
        stats = engine.runtime.stats()
        assert stats.updated_in_backward >= 3
    engines.window_reference(twin, [[0], [1], [2]])
    assert models.deviation(model, twin) <= 1e-6


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks(2)
def test_it_trains_as_ddp(stage: int, options: dict[str, Any]) -> None:
    trained = assert_trains_like_ddp(models.ByteModel(), stage, steps=3, optimizer_in_backward=True, **options)
    assert trained.stats.reductions > 0


class Groups(models.Module):
    """Two groups with weight decay, a frozen and an unused parameter, a schedule that changes with each step."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused, self.unused = fused, nn.Linear(3, 3)
        self.model.layers[1].norm.weight.requires_grad_(False)
        self.hooks: list[str] = []

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups: Any = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.05, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, fused=self.fused)
        optimizer.register_step_pre_hook(lambda *_: self.hooks.append("before"))
        optimizer.register_step_post_hook(lambda *_: self.hooks.append("after"))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.hooks.append(f"{sum(p.grad is not None for p in self.parameters())} gradients")


CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "clipped by value": (3, "blocks", {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}),
    "accumulated, reduced once": (1, False, {"accumulate_grad_batches": 2}),
    "accumulated, reduced each time": (3, False, {"accumulate_grad_batches": 2}),
    "bf16": (2, "blocks", {"precision": "bf16-true"}),
}


def _fits_equal(
    make: Callable[[], Any], steps: int, arguments: dict[str, Any], stage: int, **options: Any
) -> tuple[Any, Any]:
    """Modules that were fitted without and with the option. Their numbers are equal to the bit."""
    fitted = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        strategy = ZeroCompileStrategy(stage, optimizer_in_backward=in_backward, unshard_after_fit=True, **options)
        fitted.append(make())
        trainer = models.fit(fitted[-1], strategy, steps, **arguments)
        assert trainer.global_step == steps
    plain, module = fitted
    models.assert_equal(plain, module)
    return plain, module


@pytest.mark.parametrize("name", list(CASES))
@on_ranks(2)
def test_numbers_are_those_of_the_ordinary_step(name: str) -> None:
    """To the bit: parameters and states; hooks of the step run once for each step."""
    stage, scope, arguments = CASES[name]
    _, module = _fits_equal(partial(Groups, fused=name == "bf16"), 3, arguments, stage=stage, **COMPILED[scope])
    assert module.hooks == ["before", "0 gradients", "after"] * 3


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_window_updates_where_it_closes(stage: int) -> None:
    model, plain = models.pair(models.ByteModel)
    data = models.Batches(models.rank())
    for one, in_backward in ((model, True), (plain, False)):
        strategy_options = {"optimizer_in_backward": in_backward, **EAGER}
        with engines.engine(one, stage, **strategy_options) as engine:
            optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
            engine.attach_optimizers([optimizer])
            for number in range(2):
                with engine.training_step(), engine.windows.open("auto", None, None):
                    for micro in range(2):
                        engines.backward(engine, engines.token_loss(one, data[2 * number + micro]))
                    waiting = [s.local.clone() for s in engine.runtime.sharded_parameters]
                engine.end_backward()  # as the strategy's context does
                moved = [
                    not torch.equal(a, s.local) for a, s in zip(waiting, engine.runtime.sharded_parameters, strict=True)
                ]
                assert any(moved) is in_backward
                engine.step(optimizer, lambda: None)
    models.assert_equal(plain, model)


class _Manual(models.Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in (self.first, self.second)]


class _Toggled(_Manual):
    """Each optimizer has a backward of its own, which reaches the other's parameters, too."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        x = batch[:, :4].float() / models.VOCABULARY
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.second(self.first(x)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


@on_ranks(2)
def test_several_optimizers_in_manual_optimization() -> None:
    _fits_equal(_Toggled, 6, {}, stage=3, **EAGER)


class _Windows(models.Module):
    """Two backwards in a window, then the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[tuple[int, bool]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        masters = list(self.parameters())
        before = [p.detach().clone() for p in masters]
        with self.trainer.strategy.coalesce_grad_reduction():  # type: ignore[attr-defined]
            for chunk in batch.chunk(2):
                self.manual_backward(self.loss(chunk))
        left = sum(p.grad is not None for p in masters)
        self.seen.append((left, any(not torch.equal(a, p.detach()) for a, p in zip(before, masters, strict=True))))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_a_window_of_the_strategy() -> None:
    """Where it closes all gradients are gone, and the parameters are written; without the option nothing has moved."""
    plain, module = _fits_equal(_Windows, 3, {}, stage=3, **EAGER)
    assert all(left > 0 and not moved for left, moved in plain.seen)
    assert module.seen == [(0, True)] * 3


class _Untoggled(_Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        x = batch[:, :4].float() / models.VOCABULARY
        self.manual_backward(self.second(self.first(x)).square().mean())


class _ClipsLate(models.Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class _ChangesLate(models.Module):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1


class _Clips(models.Module):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError


class _Muon(models.Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.dim() == 2], lr=0.1)


REFUSED: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "norm": (models.Module, {"gradient_clip_val": 1.0}, MisconfigurationException, "Clipping by norm"),
    "hook": (_Clips, {}, MisconfigurationException, "_Clips.configure_gradient_clipping"),
    "float16": (models.Module, {"precision": "16-true"}, MisconfigurationException, "scales the loss"),
    "whole": (_Muon, {}, MisconfigurationException, "does not work with the optimizer Muon"),
    "unclear": (_Untoggled, {}, RuntimeError, "2 optimizers \\(SGD and SGD\\)"),
    "late clipping": (_ClipsLate, {}, RuntimeError, "Gradients cannot be clipped here"),
    "late rate": (_ChangesLate, {}, RuntimeError, "'lr'\\] of parameter group 0 of SGD changed .* \\(lr=0.5\\)"),
}


@on_ranks(2)
def test_what_does_not_go_together() -> None:
    for name, (kind, arguments, error, text) in REFUSED.items():
        strategy = ZeroCompileStrategy(stage=3, compile=False, optimizer_in_backward=True)
        trainer = models.make_trainer(strategy, max_steps=1, **arguments)
        with pytest.raises(error, match=text):
            trainer.fit(kind(), models.Batches(models.rank()))
        assert name


@pytest.mark.parametrize(
    "other", [{"keep_gradients": True}, {"offload": "optimizer"}, {"full_param_optimizers": ["Shampoo"]}]
)
def test_options_that_contradict_it(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(other))}` .*optimizer_in_backward=True"):
        Config(optimizer_in_backward=True, **other)


@on_ranks(2)
def test_a_second_backward_raises() -> None:
    model, data = models.ByteModel(), models.Batches(models.rank())
    twin = copy.deepcopy(model)
    with engines.engine(model, 3, optimizer_in_backward=True, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, data[0]))
            with pytest.raises(RuntimeError, match="the backward has used the gradients"):
                engine.full_gradients(model)
            loss = engines.token_loss(model, data[1])
            with pytest.raises(RuntimeError, match="`step\\(\\)` of SGD was not called after the last one"):
                engines.backward(engine, loss)
        engine.step(optimizer, lambda: None)
        engines.step(engine, optimizer, lambda: engines.token_loss(model, data[1]))  # right again
    engines.window_reference(twin, [[0], [1]])
    assert models.deviation(model, twin) <= 1e-6


class FailsLate(SlowModel):
    """Its backward raises before the first block, when `fails` says so; `first` is called just before."""

    fails = True
    first: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number == 1 and self.fails:
                x = engines.FailsInBackward.apply(_Slow.apply(x))
                x.register_hook(lambda grad: (self.first(), grad)[1])
            x = layer(x)
            x = _Slow.apply(x) if number == 1 else x
        return self.head(x) * self.scale + self.shift


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_backward_that_raises_half_way(stage: int) -> None:
    """The model is updated in part: every further step says so, until the optimizer's state is loaded.

    Ranks may have updated different units by then.
    """
    model, data = FailsLate(), models.Batches(models.rank())
    with engines.engine(model, stage, optimizer_in_backward=True, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        model.fails = False
        engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))
        kept = {s.name: s.local.clone() for s in engine.runtime.sharded_parameters}
        model.fails = True
        if models.rank() == 0:  # a unit that was updated on this rank alone

            def first() -> None:
                for sharded in engine.runtime.sharded_parameters:
                    if sharded.name.startswith("layers.0."):
                        torch.autograd.graph.increment_version(sharded.local)

            model.first = first  # type: ignore[method-assign]
        with engine.training_step():
            loss = engines.token_loss(model, data[1])
            with pytest.raises(ValueError, match="on purpose"):
                engines.backward(engine, loss)
        assert any(not torch.equal(kept[s.name], s.local) for s in engine.runtime.sharded_parameters)
        for attempt in (lambda: engine.step(optimizer, lambda: None), optimizer.step):
            with pytest.raises(RuntimeError, match=r"raised after it had updated . of . units .* Load a checkpoint"):
                attempt()
        with engine.training_step():
            loss = engines.token_loss(model, data[1])
            with pytest.raises(RuntimeError, match="Load a checkpoint"):
                engines.backward(engine, loss)
        assert engine.steps.count == 1.5
        with torch.no_grad():
            for sharded in engine.runtime.sharded_parameters:
                sharded.local.copy_(kept[sharded.name])
        engine.steps.restored()
        model.fails = False
        engines.step(engine, optimizer, lambda: engines.token_loss(model, data[1]))
        assert engine.steps.count == 2.5


@on_ranks(2)
def test_a_backward_that_raises_before_any_update_changes_nothing() -> None:
    model, data = models.ByteModel(), models.Batches(models.rank())
    twin = copy.deepcopy(model)
    with engines.engine(model, 3, optimizer_in_backward=True, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        with engine.training_step():
            loss = engines.FailsInBackward.apply(engines.token_loss(model, data[0]))
            with pytest.raises(ValueError, match="on purpose"):
                engines.backward(engine, loss)
        engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))
    engines.window_reference(twin, [[0]])
    assert models.deviation(model, twin) <= 1e-6


@on_ranks(2)
def test_fabric() -> None:
    """Every second step accumulates over two backwards; the numbers are those of the loop without the option."""
    trained = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        strategy = ZeroCompileFabricStrategy(3, compile=False, optimizer_in_backward=in_backward)
        here = models.ranks_here()
        fabric = L.Fabric(
            accelerator=models.device(), devices=here, num_nodes=models.world() // here, strategy=strategy
        )
        fabric.launch()
        inner = models.ByteModel()
        model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.5, momentum=0.9))
        data = models.Batches(models.rank())
        for number in range(4):
            for micro in range(1 + number % 2):
                with fabric.no_backward_sync(model, enabled=micro < number % 2):
                    fabric.backward(engines.token_loss(model, data[2 * number + micro]))
            assert all(p.grad is None for p in inner.parameters()) is in_backward
            optimizer.step()
            optimizer.zero_grad()
        if in_backward:
            fabric.backward(engines.token_loss(model, data[9]))
            with pytest.raises(RuntimeError, match=r"`fabric.clip_gradients` does not work"):
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        else:
            fabric.backward(engines.token_loss(model, data[9]))
            optimizer.step()
        strategy.unshard()
        trained.append(inner)
    models.assert_equal(*trained)


def _slow_backward(model: nn.Module) -> None:
    """The backward of each layer waits a little, so that what is reduced before it is done."""

    def wait(grad: Tensor) -> None:
        time.sleep(0.01)

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        for one in out if isinstance(out, tuple) else (out,):
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(wait)

    for module in model.modules():
        module.register_forward_hook(hook)


def _architecture(name: str, stage: int, **options: Any) -> tuple[nn.Module, int]:
    torch.manual_seed(0)
    model = architectures.ARCHITECTURES[name]()
    _slow_backward(model)
    generator = torch.Generator().manual_seed(models.rank())
    with engines.engine(model, stage, compile=False, unit_bytes=1, **options) as engine:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        engine.attach_optimizers([optimizer])
        for _ in range(3):
            x = torch.randn(4, 5, 6, generator=generator).to(models.device())
            with engine.training_step():
                engines.backward(engine, architectures.objective(model, x))
            engine.step(optimizer, lambda: None)
        return model, engine.runtime.updated_in_backward


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
@on_ranks(2)
def test_what_people_write(name: str, stage: int) -> None:
    """Tied, shared, unused and frozen parameters, complex ones, recurrence: to the bit as without the option."""
    plain, _ = _architecture(name, stage)
    model, updated = _architecture(name, stage, optimizer_in_backward=True)
    assert updated > 0 or name in ("buffers", "unused")  # one unit; a unit that has to wait for the end
    models.assert_equal(plain, model)


def _with_blocks_again(stage: int, in_backward: bool) -> nn.Module:
    torch.manual_seed(0)
    model, data = SlowModel(), models.Batches(models.rank())
    options = {"optimizer_in_backward": in_backward, "activation_checkpointing": "blocks", **AOT}
    with engines.engine(model, stage, **options) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine.attach_optimizers([optimizer])
        for number in range(3):
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, data[number]))
            engine.step(optimizer, lambda: None)
        assert (engine.runtime.updated_in_backward > 0) is in_backward
    return model


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks(2)
def test_blocks_that_run_again_in_the_backward(stage: int) -> None:
    plain, model = (_with_blocks_again(stage, in_backward) for in_backward in (False, True))
    models.assert_equal(plain, model)
