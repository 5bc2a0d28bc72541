"""`optimizer_in_backward`: the numbers of the ordinary step, each unit's gradient gone when it was used."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileFabricStrategy, ZeroCompileStrategy
from lightning_zerocompile.checkpoint.state import full_optimizer_state
from lightning_zerocompile.config import Config
from lightning_zerocompile.optim.slabs import local_of
from tests.support import architectures, engines, models, twins
from tests.support.harness import on_ranks
from tests.support.parity import AOT, CELLS, EAGER, assert_trains_like_ddp, reference
from tests.support.slow import Slow, SlowModel

COMPILED: dict[Any, dict[str, Any]] = {False: EAGER, "blocks": AOT}


@pytest.mark.parametrize(("stage", "scope"), CELLS)
@on_ranks()
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


class Looks(models.Module):
    """Notes in each hook which parameters are updated, and which have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Tensor] = []
        self.found: list[tuple[str, list[str], list[str]]] = []

    def _look(self, hook: str) -> None:
        pairs = list(zip(self.named_parameters(), self.before, strict=True))
        updated = [name for (name, p), old in pairs if not torch.equal(local_of(p), old)]
        self.found.append((hook, updated, [name for (name, p), _ in pairs if p.grad is not None]))

    def on_before_backward(self, loss: Tensor) -> None:
        self.before = [local_of(p).clone() for p in self.parameters()]

    def on_after_backward(self) -> None:
        self._look("after")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._look("step")


@pytest.mark.parametrize(("stage", "scope"), CELLS)
@on_ranks()
def test_hooks_after_the_backward_see_what_it_has_updated(stage: int, scope: Any) -> None:
    module = Looks()
    strategy = ZeroCompileStrategy(stage, optimizer_in_backward=True, **COMPILED[scope])
    models.make_trainer(strategy, max_steps=3).fit(module, models.Batches(models.rank()))
    assert [hook for hook, *_ in module.found] == ["after", "step"] * 3
    for _, updated, with_gradient in module.found:
        assert len(updated) >= 10 and updated == module.found[-1][1] and with_gradient == []


class _Apart(models.ByteModel):
    """The backward of rank 0 waits before each block: so rank 0 sees that reductions are done, and rank 1 does not."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad and models.rank() == 0:
                x.register_hook(lambda _: time.sleep(0.1))
        return self.head(x) * self.scale + self.shift


@pytest.mark.parametrize(
    ("stage", "scope"),
    [(1, False), (2, False), (3, False), *(pytest.param(n, "blocks", marks=pytest.mark.long) for n in (1, 2)),
     (3, "blocks")],
)  # fmt: skip
@on_ranks()
def test_states_are_in_one_order_on_all_ranks(stage: int, scope: Any) -> None:
    """Also if the ranks have updated units in different orders: whole states are gathered one after the other."""
    model, twin = models.pair(_Apart)
    data = models.Batches(models.rank())
    with engines.engine(model, stage, optimizer_in_backward=True, **COMPILED[scope]) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        engine.attach_optimizers([optimizer])
        with engine.accumulation():  # now the order of reductions is known
            engines.accumulate(engine, model, data[0])
        engines.accumulate(engine, model, data[1])
        updated: list[int] = [0] * models.world()
        torch.distributed.all_gather_object(updated, engine.runtime.updated_in_backward)
        if models.device() == "cpu":  # on a device a unit is updated once its reduction is launched
            assert updated[0] > updated[1]
        optimizer.step()
        held = optimizer.param_groups[0]["params"]
        assert all(one is other for one, other in zip(optimizer.state, held, strict=True))
        states = full_optimizer_state(optimizer, keep=True)["state"]
    for number in range(2):
        engines.mean_backward(twin, number)
    for number, p in enumerate(twin.parameters()):
        assert (states[number]["momentum_buffer"] - p.grad.cpu()).abs().max() <= 1e-6


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
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
    make: Callable[[], Any],
    steps: int,
    arguments: dict[str, Any],
    stage: int,
    beside: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Modules that were fitted without and with the option, there with the options ``beside``, too. Their numbers are
    equal to the bit."""
    fitted = []
    for in_backward, more in ((False, {}), (True, beside or {})):
        torch.manual_seed(0)
        strategy = ZeroCompileStrategy(stage, optimizer_in_backward=in_backward, **options, **more)
        fitted.append(make())
        trainer = models.fit(fitted[-1], strategy, steps, **arguments)
        assert trainer.global_step == steps
        fitted[-1].stats = strategy.stats
    plain, module = fitted
    models.assert_equal(plain, module)
    return plain, module


@pytest.mark.parametrize("name", list(CASES))
@on_ranks()
def test_numbers_are_those_of_the_ordinary_step(name: str) -> None:
    """To the bit: parameters and states; hooks of the step run once for each step."""
    stage, scope, arguments = CASES[name]
    _, module = _fits_equal(partial(Groups, fused=name == "bf16"), 3, arguments, stage=stage, **COMPILED[scope])
    assert module.hooks == ["before", "0 gradients", "after"] * 3


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
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
        x = (batch[:, :4].float() / models.VOCABULARY).to(self.first.weight.dtype)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.second(self.first(x)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


@on_ranks()
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


@on_ranks()
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


class _ClipsWhatIsSet(models.Module):
    """A gradient that is set after the backward; the backward has updated all that it has reduced."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.extra, self.late = nn.Parameter(torch.ones(4)), late

    def on_after_backward(self) -> None:
        if not self.late:
            self._set()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.late:
            self._set()

    def _set(self) -> None:
        extra = next(p for name, p in self.named_parameters() if name == "extra")
        extra.grad = torch.full_like(extra, 5.0)


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks()
def test_what_is_set_after_the_backward_is_clipped_by_value(stage: int, late: bool) -> None:
    found = {}
    for beside in (False, True):
        torch.manual_seed(0)
        module = _ClipsWhatIsSet(late)
        strategy = ZeroCompileStrategy(stage=stage, compile=False, optimizer_in_backward=beside)
        clipping = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
        models.make_trainer(strategy, max_steps=1, **clipping).fit(module, models.Batches(models.rank()))
        found[beside] = module.extra.detach().cpu()
    assert torch.equal(found[True], found[False]) and 0 < (1 - found[True][0]) < 0.1


@on_ranks()
def test_a_parameter_that_a_second_optimizer_gets_later() -> None:
    model = twins.small()
    with engines.engine(model, 1, compile=False, optimizer_in_backward=True) as engine:
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:3], parameters[3:])]
        engine.attach_optimizers(optimizers)
        optimizers[1].add_param_group({"params": [parameters[2]], "lr": 0.3})
        with (
            pytest.raises(MisconfigurationException, match=r"`2\.weight` is in several optimizers"),
            engine.training_step(),
        ):
            engines.backward(engine, twins.loss(model, twins.mine(0)))


REFUSED: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "norm": (models.Module, {"gradient_clip_val": 1.0}, MisconfigurationException, "Clipping by norm"),
    "hook": (_Clips, {}, MisconfigurationException, "_Clips.configure_gradient_clipping"),
    "float16": (models.Module, {"precision": "16-true"}, MisconfigurationException, "scales the loss"),
    "whole": (_Muon, {}, MisconfigurationException, "does not work with the optimizer Muon"),
    "unclear": (_Untoggled, {}, RuntimeError, "2 optimizers \\(SGD and SGD\\)"),
    "late clipping": (_ClipsLate, {}, RuntimeError, "Gradients cannot be clipped here"),
    "late rate": (_ChangesLate, {}, RuntimeError, "'lr'\\] of parameter group 0 of SGD changed .* \\(lr=0.5\\)"),
}


@on_ranks()
def test_what_does_not_go_together() -> None:
    for name, (kind, arguments, error, text) in REFUSED.items():
        strategy = ZeroCompileStrategy(stage=3, compile=False, optimizer_in_backward=True)
        trainer = models.make_trainer(strategy, max_steps=1, **arguments)
        with pytest.raises(error, match=text):
            trainer.fit(kind(), models.Batches(models.rank()))
        assert name


@pytest.mark.parametrize(
    "other",
    [
        {"keep_gradients": True},
        {"full_param_optimizers": ["Shampoo"]},
    ],
)
def test_options_that_contradict_it(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(other))}.*` .*optimizer_in_backward=True"):
        Config(optimizer_in_backward=True, **other)


@on_ranks()
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
                x = engines.FailsInBackward.apply(Slow.apply(x))
                x.register_hook(lambda grad: (self.first(), grad)[1])
            x = layer(x)
            x = Slow.apply(x) if number == 1 else x
        return self.head(x) * self.scale + self.shift


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
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
        assert (engine.steps.count, engine.steps.updates) == (1, True)
        with torch.no_grad():
            for sharded in engine.runtime.sharded_parameters:
                sharded.local.copy_(kept[sharded.name])
        engine.steps.restored()
        model.fails = False
        engines.step(engine, optimizer, lambda: engines.token_loss(model, data[1]))
        assert (engine.steps.count, engine.steps.updates) == (2, False)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_what_user_code_loads_after_such_a_backward(stage: int) -> None:
    """`load_state_dict` of the module and of the optimizer, from memory."""
    (model, twin), data = models.pair(FailsLate), models.Batches(models.rank())
    model.fails = twin.fails = False
    with engines.engine(model, stage, optimizer_in_backward=True, **EAGER) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        engine.attach_optimizers([optimizer])

        def step(number: int) -> None:
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, data[number]))
            engine.step(optimizer, lambda: None)

        step(0)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        state = copy.deepcopy(optimizer.state_dict())
        model.fails = True
        with pytest.raises(ValueError, match="on purpose"):
            step(1)
        model.fails = False
        model.load_state_dict(kept)
        with pytest.raises(RuntimeError, match="Load a checkpoint"):
            step(1)
        optimizer.load_state_dict(state)
        step(1)
    reference(twin, 2, optimizer=torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9))
    assert models.deviation(model, twin) <= 1e-6


@on_ranks()
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


@on_ranks()
def test_fabric() -> None:
    """Every second step accumulates over two backwards; the numbers are those of the loop without the option."""
    trained = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        strategy = ZeroCompileFabricStrategy(3, compile=False, optimizer_in_backward=in_backward)
        fabric = models.make_fabric(strategy)
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
@on_ranks()
def test_what_people_write(name: str, stage: int) -> None:
    """Tied, shared, unused and frozen parameters, complex ones, recurrence: to the bit as without the option."""
    plain, _ = _architecture(name, stage)
    model, updated = _architecture(name, stage, optimizer_in_backward=True)
    assert updated > 0 or name in ("buffers", "unused")  # one unit; a unit that has to wait for the end
    models.assert_equal(plain, model)


def _with_blocks_again(stage: int, in_backward: bool) -> nn.Module:
    torch.manual_seed(0)
    model, data = SlowModel(), models.Batches(models.rank())
    options = {"optimizer_in_backward": in_backward, "recompute": "blocks", **AOT}
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
@on_ranks()
def test_blocks_that_run_again_in_the_backward(stage: int) -> None:
    plain, model = (_with_blocks_again(stage, in_backward) for in_backward in (False, True))
    models.assert_equal(plain, model)


# ---- what is in host memory, see [Note: offload beside the backward] ----

OFFLOAD: dict[str, Any] = {"offload": "optimizer"}
BF16: dict[str, Any] = {"precision": "bf16-true"}  # so masters are in host memory, and not states alone


def _offloaded(
    make: Callable[[], nn.Module],
    stage: int,
    steps: int,
    before: Callable[[Any, int], object] = lambda *_: None,
    **options: Any,
) -> dict[str, Any]:
    """Trains in bfloat16 by AdamW. `before` is called with the model and the number of each step.

    Returns the parameters and states on the CPU; bytes copied in, out and held, by step; and what the model has seen.
    """
    torch.manual_seed(0)
    model, data = make().to(torch.bfloat16), models.Batches(models.rank())
    found: dict[str, Any] = {"in": [], "out": [], "held": 0, "beside": []}
    with engines.engine(model, stage, **options) as engine:
        traffic = engine.runtime.host_traffic
        if isinstance(model, SlowModel):
            model.look = lambda: traffic.copied_out
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine.attach_optimizers([optimizer])
        for number in range(steps):
            before(model, number)
            copied_in, copied_out = traffic.copied_in, traffic.copied_out
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, data[number]))
            if "optimizer_in_backward" in options:
                _assert_nothing_is_on_its_way(engine)
            engine.step(optimizer, lambda: None)
            found["in"].append(traffic.copied_in - copied_in)
            found["out"].append(traffic.copied_out - copied_out)
            found["beside"].append(getattr(model, "seen", copied_out) - copied_out)
        found["held"], found["updated"] = traffic.held, engine.runtime.updated_in_backward
        for sharded in engine.runtime.sharded_parameters:
            for name, kept in optimizer.state[sharded.master].items():
                full = kept.full_tensor() if isinstance(kept, DTensor) else kept
                found[sharded.name, name] = full.cpu().clone()
    return found | {name: value.cpu() for name, value in model.state_dict().items()}


def _assert_nothing_is_on_its_way(engine: Any) -> None:
    """No buffer is on the device, and what gathers read there are the rows that are in host memory."""
    offload = engine.steps._offload
    assert offload._beside is None
    for units in offload._slabs.values():
        for slot in (slot for slab in units.values() for slot in slab.slots.values() if slot.sharded.on_host):
            assert slot.shown is not None
            assert torch.equal(slot.shown.cpu(), slot.sharded.local.to(slot.shown.dtype))


def _assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    numbers = {name for name, value in left.items() if isinstance(value, Tensor)}
    assert len(numbers) > 10 and [name for name in numbers if not torch.equal(left[name], right[name])] == []


_LONG_CELLS: list[Any] = [pytest.param(*cell, marks=pytest.mark.long) for cell in [(1, AOT), (2, EAGER), (3, EAGER)]]


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, AOT), (3, AOT), *_LONG_CELLS])
@on_ranks()
def test_units_in_host_memory_stream_beside_the_backward(stage: int, options: dict[str, Any]) -> None:
    """To the bit; the bytes are those of a step that streams after its backward, and some go out inside it."""
    plain = _offloaded(SlowModel, stage, 3, **options)
    after = _offloaded(SlowModel, stage, 3, **options, **OFFLOAD)
    ours = _offloaded(SlowModel, stage, 3, optimizer_in_backward=True, **options, **OFFLOAD)
    _assert_same(plain, ours)
    assert ours["held"] == after["held"] > 0 and plain["in"] == [0] * 3
    assert ours["in"] == ours["out"] == after["in"] == after["out"] == [ours["held"]] * 3
    assert after["beside"] == [0] * 3 and all(0 < bytes < ours["held"] for bytes in ours["beside"][1:])
    assert ours["updated"] > 0


class _Branches(SlowModel):
    """Uses the layers that `route` names."""

    route: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number in self.route:
            x = self.layers[number](x)
            x = Slow.apply(x) if number == 0 else x
        return self.head(x) * self.scale + self.shift


def _routes(apart: bool, model: Any, number: int) -> None:
    """Another order each time; `apart`: and on each rank."""
    routes = ((0, 1, 2), (2, 1, 0), (0,), (0, 2), (2, 1, 0))
    model.route = routes[(number + 2 * apart * models.rank()) % len(routes)]


@pytest.mark.parametrize(("stage", "apart"), [(3, False), (1, True), pytest.param(1, False, marks=pytest.mark.long)])
@on_ranks()
def test_an_order_that_changes(stage: int, apart: bool) -> None:
    """Units that come out of turn, or not at all, are fetched when they are needed, and nothing is lost."""
    before = partial(_routes, apart)
    plain = _offloaded(_Branches, stage, 5, before, **EAGER)
    ours = _offloaded(_Branches, stage, 5, before, optimizer_in_backward=True, **EAGER, **OFFLOAD)
    _assert_same(plain, ours)
    assert ours["out"] == [ours["held"]] * 5  # units without a gradient go out, too, when the optimizer steps
    assert sum(ours["in"]) >= sum(ours["out"])


@on_ranks()
def test_units_without_a_gradient_are_fetched_once() -> None:
    """By the step, as without the option; the backward and its end fetch what they update. In the first backward it is
    not known yet which units that are."""

    def before(model: Any, number: int) -> None:
        model.route = (0,)

    ours = _offloaded(_Branches, 3, 3, before, optimizer_in_backward=True, **EAGER, **OFFLOAD)
    assert ours["out"] == [ours["held"]] * 3 and ours["in"][1:] == ours["out"][1:]


@on_ranks()
def test_any_order_is_served() -> None:
    """The expected order is a guess: whatever comes, three buffers are enough, and each unit has its own bytes."""
    model = models.ByteModel(width=16, blocks=6).to(torch.bfloat16)
    with engines.engine(model, 3, compile=False, unit_bytes=1, optimizer_in_backward=True, **OFFLOAD) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine.attach_optimizers([optimizer])
        offload, generator = engine.steps._offload, torch.Generator().manual_seed(0)
        slabs = offload._slabs[optimizer]
        expected = {unit: slab.memory.random_(generator=generator).clone() for unit, slab in slabs.items()}
        units = [unit for unit, slab in slabs.items() if slab.nbytes]
        assert len(units) > 6
        order: list[int] = []
        for turn in range(6):
            offload.begins_beside(optimizer)
            stream: Any = offload.beside(optimizer)
            assert list(stream._came) == order[:2]  # before, no order was known
            again = turn % 2 == 1
            if not again:
                order = [units[n] for n in torch.randperm(len(units), generator=generator).tolist()][: 5 + turn]
            for unit in order:
                assert unit in stream._came or not again  # what comes as the last time is never waited for
                staged = stream.enter(unit)
                came, guess = stream._came[unit], list(stream._expected)
                rest = guess[guess.index(unit) + 1 :] if unit in guess else []
                follow = [n for n in rest if n in units and n not in stream.entered][:2]
                assert all(n in stream._came for n in follow)  # in the place of what has come in vain
                assert torch.equal(torch.cat(came.parts).cpu(), expected[unit])
                for part in came.parts:
                    part.add_(1)
                expected[unit] += 1
                stream.leave(unit, staged, [unit])
                assert len(stream._buffers) <= 3 and len(stream._came) <= 2
            offload.ends_beside()
            assert all(torch.equal(slab.memory, expected[unit]) for unit, slab in slabs.items())
            assert not stream._buffers


BESIDE: dict[str, tuple[Any, int, Any, dict[str, Any]]] = {
    "clipped by value": (Groups, 3, False, {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}),
    "accumulated, reduced once": (Groups, 1, False, {"accumulate_grad_batches": 2}),
    "accumulated, reduced each time": (Groups, 3, "blocks", {"accumulate_grad_batches": 2}),
    "fused": (partial(Groups, fused=True), 2, False, {}),
    "a window": (_Windows, 3, False, {}),
    "two optimizers": (_Toggled, 1, False, {}),
}


@pytest.mark.parametrize("name", list(BESIDE))
@on_ranks()
def test_what_goes_together_with_an_offload(name: str) -> None:
    make, stage, scope, arguments = BESIDE[name]
    _, module = _fits_equal(make, 4, arguments | BF16, stage, OFFLOAD, **COMPILED[scope])
    stats = module.stats
    steps = 2 if make is _Toggled else 4  # of each optimizer
    assert steps * stats.offload_bytes == stats.offload_out_bytes
    assert stats.offload_bytes > 0 or (make is _Toggled and models.rank() > 1)  # few rows: these ranks have none


class _Wide(models.ByteModel):
    """Its embedding is larger than a block, and the blocks together are larger than what it frees."""

    def __init__(self) -> None:
        super().__init__(blocks=12)
        self.embedding = nn.Embedding(400, 10)


@on_ranks()
def test_large_units_stay_where_they_take_no_more_than_the_buffers() -> None:
    plain = _offloaded(_Wide, 3, 3, unit_bytes=1, **EAGER)
    after = _offloaded(_Wide, 3, 3, unit_bytes=1, **EAGER, **OFFLOAD)
    ours = _offloaded(_Wide, 3, 3, unit_bytes=1, optimizer_in_backward=True, **EAGER, **OFFLOAD)
    _assert_same(plain, ours)
    large = 12 * plain["embedding.weight"].numel() // models.world()  # the master and two states
    assert large <= after["held"] - ours["held"] <= large + 3 * 512 and ours["held"] > 0


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_in_float32_states_alone_are_in_host_memory(stage: int) -> None:
    """Gathers read the masters when the units have left, at every stage."""
    _, module = _fits_equal(Groups, 3, {}, stage, OFFLOAD, **EAGER)
    trained = [p for p in module.parameters() if p.requires_grad and p.dim()]
    assert 0 < module.stats.offload_bytes <= sum(2 * (4 * p.numel() // 2 + 512) for p in trained)  # two states, aligned


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks()
def test_a_backward_that_raises_with_units_in_host_memory(stage: int) -> None:
    """What was updated is whole there, the rest is as it was, and nothing is on its way; then it trains on."""
    torch.manual_seed(0)
    model, data = FailsLate().to(torch.bfloat16), models.Batches(models.rank())
    twin = copy.deepcopy(model)
    trained = []
    for one, options in ((twin, {}), (model, {"optimizer_in_backward": True, **OFFLOAD})):
        one.fails = False
        with engines.engine(one, stage, **options, **EAGER) as engine:
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
            engine.attach_optimizers([optimizer])
            for number in range(4):
                if options and number == 2:
                    _fail(one, engine, optimizer, data[9])
                with engine.training_step():
                    engines.backward(engine, engines.token_loss(one, data[number]))
                engine.step(optimizer, lambda: None)
        trained.append(one)
    models.assert_equal(*trained)


def _fail(model: Any, engine: Any, optimizer: Any, batch: Tensor) -> None:
    """Raises half-way, and puts back what was there before."""

    def rows() -> dict[str, tuple[Tensor, Tensor]]:
        states = ((s, optimizer.state[s.master]["momentum_buffer"]) for s in engine.runtime.sharded_parameters)
        return {s.name: (s.local.clone(), local_of(kept).clone()) for s, kept in states}

    before, model.fails = rows(), True
    with engine.training_step():
        loss = engines.token_loss(model, batch)
        with pytest.raises(ValueError, match="on purpose"):
            engines.backward(engine, loss)
    model.fails = False
    assert engine.steps._offload._beside is None
    with pytest.raises(RuntimeError, match=r"raised after it had updated . of . units .* Load a checkpoint"):
        engine.step(optimizer, lambda: None)
    moved = {}
    for name, both in rows().items():
        same = [torch.equal(*pair) for pair in zip(before[name], both, strict=True)]
        assert both[0].numel() == 0 or same in ([True] * 2, [False] * 2), (name, same)
        moved[name] = not all(same)
    assert moved["layers.2.up.weight"] and not moved["embedding.weight"]
    with torch.no_grad():
        for sharded in engine.runtime.sharded_parameters:
            local, state = before[sharded.name]
            sharded.local.copy_(local)
            local_of(optimizer.state[sharded.master]["momentum_buffer"]).copy_(state)
    engine.steps.restored()


@on_ranks()
def test_a_backward_past_the_strategy_leaves_units_to_the_step() -> None:
    """Nobody says when it ends, so nothing may be on its way to host memory after it."""
    torch.manual_seed(0)
    plain, model = (SlowModel().to(torch.bfloat16) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    data = models.Batches(models.rank())
    for one, options in ((plain, {}), (model, {"optimizer_in_backward": True, **OFFLOAD})):
        with engines.engine(one, 3, **options, **EAGER) as engine:
            optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
            engine.attach_optimizers([optimizer])
            for number in range(2):
                with engine.training_step():
                    engines.token_loss(one, data[number]).backward()
                copied = engine.runtime.host_traffic.copied_in
                assert copied == number * engine.runtime.host_traffic.held
                engine.step(optimizer, lambda: None)
                _assert_nothing_is_on_its_way(engine)
            assert engine.runtime.updated_in_backward == 0
    models.assert_equal(plain, model)


class _WritesData(SlowModel):
    """Its forward writes to a weight in a way that changes no version."""

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            layer.up.weight.data.mul_(0.5)
        return super().forward(tokens)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
@on_ranks()
def test_writes_without_a_version_reach_units_that_come_early(stage: int) -> None:
    plain = _offloaded(_WritesData, stage, 3, **EAGER)
    ours = _offloaded(_WritesData, stage, 3, optimizer_in_backward=True, **EAGER, **OFFLOAD)
    _assert_same(plain, ours)


class _SaveAtEnd(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("kind", "stage"), [("full", 1), ("sharded", 3)])
@on_ranks()
def test_checkpoints_with_an_offload(kind: str, stage: int, tmp_path: Path) -> None:
    """Saved with both options and read without, and the other way round."""
    beside = {"optimizer_in_backward": True, **OFFLOAD}
    torch.manual_seed(0)
    start = models.Module(optimizer="adamw", lr=0.01)
    whole = copy.deepcopy(start)
    models.fit_epochs(whole, ZeroCompileStrategy(stage=stage, **EAGER), 2, **BF16)
    for number, (first, second) in enumerate([(beside, {}), (OFFLOAD, beside)]):
        half, resumed, path = copy.deepcopy(start), copy.deepcopy(start), str(tmp_path / f"{number}.ckpt")
        strategy = ZeroCompileStrategy(stage=stage, state_dict_type=kind, **EAGER, **first)
        models.fit_epochs(half, strategy, 1, callbacks=[_SaveAtEnd(path)], **BF16)
        strategy = ZeroCompileStrategy(stage=stage, state_dict_type=kind, **EAGER, **second)
        models.fit_epochs(resumed, strategy, 2, path, **BF16)
        models.assert_equal(whole, resumed)
        assert (strategy.stats.offload_in_bytes > 0) == bool(second)
