"""What user code does to parameters beyond test_masters.py: gradients of attributes, optimizers of attributes,
parameters inside compiled regions, modules that change, `torch.func`."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import CELLS


def _sgd(engine: Any, parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    engine.attach_optimizers([optimizer])
    return optimizer


# ---- gradients with respect to attributes ----


def _grad_unused(model: nn.Module, loss: Tensor) -> None:
    torch.autograd.grad(loss, [model.head.weight], allow_unused=True)


def _grad_materialized(model: nn.Module, loss: Tensor) -> None:
    torch.autograd.grad(loss, model.scale, allow_unused=True, materialize_grads=True)


def _backward_inputs(model: nn.Module, loss: Tensor) -> None:
    loss.backward(inputs=[model.head.weight])


def _backward_block(model: nn.Module, loss: Tensor) -> None:
    torch.autograd.backward([loss], inputs=model.layers[1].up.weight)


GRADIENTS = {
    "unused": (_grad_unused, ("`head.weight`", "read again", "`backward`")),
    "materialized": (_grad_materialized, ("`scale`", "read again", "`backward`")),
    "inputs": (_backward_inputs, ("`head.weight`", "requires_grad_")),
    "inputs of a block": (_backward_block, ("`layers.1.up.weight`", "requires_grad_")),
}


def _refused(stage: int, scope: Any) -> dict[str, str]:
    messages = {}
    model = models.ByteModel()
    batch = models.Batches(models.rank())[0]
    with engines.engine(model, stage, compile=scope) as engine:
        for name, (act, _) in GRADIENTS.items():
            messages[name] = "nothing was raised"
            with engine.training_step():
                loss = engines.token_loss(model, batch)
                try:
                    act(model, loss)
                except RuntimeError as error:
                    messages[name] = str(error)
    return messages


@on_ranks()
def test_gradients_of_values_read_again_raise() -> None:
    """Torch would return None, zeros or nothing at all: the value is not the one that the forward used."""
    found = {}
    for stage, scope in CELLS:
        torch._dynamo.reset()
        found[stage, scope] = _refused(stage, scope)
    for cell, messages in found.items():
        for name, (_, texts) in GRADIENTS.items():
            assert all(text in messages[name] for text in texts), f"{cell} {name}: {messages[name]}"


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_gradient_of_the_value_that_was_used(stage: int) -> None:
    """A gradient with respect to the very value that was used is the local one, as under DDP."""
    model, twin = models.pair(models.ByteModel)
    x = torch.ones(2, 10, device=models.device())

    def gradient(model: nn.Module) -> Tensor:
        weight = model.head.weight
        other = model.embedding.weight
        kept = other.sum()  # read and used, but not for what is differentiated
        inner, unused = torch.autograd.grad(F.linear(x, weight).square().sum(), [weight, other], allow_unused=True)
        assert unused is None and kept.requires_grad
        return inner  # type: ignore[no-any-return]

    expected = gradient(twin)
    with engines.engine(model, stage, compile=False) as engine, engine.training_step():
        seen = gradient(model)
    assert torch.equal(seen, expected)


# ---- a gradient that the forward alone decides ----


class Ignoring(torch.autograd.Function):
    """Adds the weight's sum; the weight's gradient is what the forward saved, whatever gradient comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # [batch, width], [width]
        ctx.save_for_backward(x)
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], ctx.saved_tensors[0].sum(0)


class IgnoringBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 4]
        return Ignoring.apply(self.linear(x).tanh(), self.weight)  # type: ignore[no-any-return, no-untyped-call]


@on_ranks()
def test_gradient_that_ignores_the_incoming_one() -> None:
    """A compiler could compute it in the forward graph; it is handed over in the backward all the same."""
    problems = []
    for stage, scope in CELLS:
        torch._dynamo.reset()
        model = nn.Sequential(nn.ModuleList(IgnoringBlock() for _ in range(2)))
        model.forward = lambda x, blocks=model[0]: blocks[1](blocks[0](x)).square().mean()  # type: ignore[assignment]
        twin = nn.ModuleList(IgnoringBlock() for _ in range(2)).to(models.device())
        twin.load_state_dict(model[0].state_dict())
        world, seeded = models.world(), torch.Generator().manual_seed
        data = [torch.randn(3, 4, generator=seeded(n)).to(models.device()) for n in range(3 * world)]
        plain = torch.optim.SGD(twin.parameters(), lr=0.01)
        for number in range(3):
            for rank in range(models.world()):
                loss = twin[1](twin[0](data[world * number + rank])).square().mean()
                (loss / models.world()).backward()
            # the loss's divisor does not reach these
            for block in twin:
                block.weight.grad /= models.world()
            plain.step()
            plain.zero_grad()
        with engines.engine(model, stage, compile=scope) as engine:
            optimizer = engines.sgd(engine, model, lr=0.01)
            for number in range(3):
                with engine.training_step():
                    engines.backward(engine, model(data[world * number + models.rank()]))
                optimizer.step()
            if bool(scope) != (engine.runtime.stats().graph_reductions > 0):
                problems.append(f"stage {stage} {scope}: {engine.runtime.stats()}")
        if models.deviation(model[0], twin) > 1e-6:
            problems.append(f"stage {stage} {scope}: {models.deviation(model[0], twin)}")
    assert problems == [], "\n".join(problems)


# ---- an optimizer of attributes ----


class OfAttributes(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        block = self.model.layers[1]
        groups = [{"params": [self.model.head.weight, block.up.weight]}, {"params": [self.model.scale], "lr": 0.1}]
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


class Twice(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [self.model.head.weight]}, {"params": self.model.parameters()}], lr=0.5)


class TwiceLater(models.Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().add_param_group({"params": [self.model.head.weight]})  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_optimizer_of_attributes(stage: int) -> None:
    """`SGD([self.head.weight])` trains the parameter; one that is given twice is refused, as torch does."""
    module, twin = models.pair(OfAttributes)
    models.train(module, ZeroCompileStrategy(stage=stage, compile_options={"backend": "aot_eager"}), 3)
    models.reference(twin, 3)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        models.train(Twice(), ZeroCompileStrategy(stage=stage, compile=False), 1)
    with pytest.raises(RuntimeError, match=r"\(SGD\) holds a parameter more than once"):
        models.train(TwiceLater(), ZeroCompileStrategy(stage=stage, compile=False), 1)
    assert models.deviation(module, twin) <= 1e-6


# ---- parameters inside compiled regions ----


class Inside(nn.Module):
    """A block that does something with its own parameters in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)


class Penalty(Inside):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class Clamp(Inside):
    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return x + self.linear(x)  # type: ignore[no-any-return]


class Functional(Inside):
    def forward(self, x: Tensor) -> Tensor:
        values = {"weight": 0.5 * self.linear.weight, "bias": self.linear.bias}
        return x + torch.func.functional_call(self.linear, values, (x,))  # type: ignore[no-any-return]


class Dtype(Inside):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.to(next(p.dtype for p in self.parameters() if p.is_floating_point())))


class Names(Inside):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * len([name for name, p in self.named_parameters() if p.ndim == 1])


class State(Inside):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * len(self.state_dict())


class InsideModel(nn.Module):
    def __init__(self, kind: type[Inside]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(10, models.VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Penalty, Clamp, Functional, Dtype, Names, State])
@on_ranks()
def test_own_parameters_inside_a_region(kind: type[Inside]) -> None:
    """An L2 term over `self.parameters()`, a clamp of them, `functional_call` with other values, and what asks for
    their dtype, names or number: as under DDP. Compiled code breaks there, and goes on eagerly."""
    problems = []
    source = models.Whole(InsideModel(kind))
    x = torch.randn(models.world(), 4, 10, generator=torch.Generator().manual_seed(1)).to(models.device())
    twin = models.Whole(InsideModel(kind)).to(models.device())
    twin.load_state_dict(source.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for mine in x:
            (twin(mine).square().mean() / models.world()).backward()
        optimizer.step()
    for stage, scope in [*CELLS, (3, "model")]:
        torch._dynamo.reset()
        counters.clear()
        model = models.Whole(InsideModel(kind))
        model.load_state_dict(source.state_dict())
        try:
            with engines.engine(model, stage, compile=scope) as engine:
                optimizer = _sgd(engine, model.parameters())
                for _ in range(2):
                    engines.step(engine, optimizer, lambda model=model: model(x[models.rank()]).square().mean())
            if models.deviation(model, twin) > 1e-6:
                problems.append(f"stage {stage} {scope}: {models.deviation(model, twin)}")
            broke = any("no attribute" in reason for reason in counters["graph_break"])
            if bool(scope) != (broke or bool(engine.regions.fallbacks)):  # Dynamo does not count frames that it skips
                problems.append(f"stage {stage} {scope}: {dict(counters['graph_break'])}")
        except Exception:
            problems.append(f"stage {stage} {scope}: {traceback.format_exc()[-1200:]}")
    assert problems == [], "\n".join(problems)


# ---- modules that change ----


def _deleted(model: nn.Module) -> None:
    del model.head.weight


def _none(model: nn.Module) -> None:
    model.layers[0].up.bias = None


def _module_added(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2)


CHANGES = {
    "deleted": (_deleted, ("`head.weight`", "removed")),
    "none": (_none, ("`layers.0.up.bias`", "removed")),
    "module added": (_module_added, ("`extra.weight` was added",)),
}


@pytest.mark.parametrize("name", list(CHANGES))
@on_ranks()
def test_a_changed_model_raises_in_the_next_step(name: str) -> None:
    messages = []
    for stage, scope in CELLS:
        torch._dynamo.reset()
        model = models.ByteModel()
        engine = engines.make_engine(model, stage, compile=scope)
        try:
            optimizer = _sgd(engine, model.parameters())
            batch = models.Batches(models.rank())[0]
            engines.step(engine, optimizer, lambda model=model, batch=batch: engines.token_loss(model, batch))
            CHANGES[name][0](model)
            engines.step(engine, optimizer, lambda model=model, batch=batch: engines.token_loss(model, batch))
            messages.append("nothing was raised")
        except RuntimeError as error:
            messages.append(str(error))
        finally:
            engine.abandon()
    assert all(text in message for message in messages for text in CHANGES[name][1]), messages


# ---- torch.func with respect to parameters() ----


def _grad_of_masters(model: nn.Module, x: Tensor) -> None:
    loss = lambda values: torch.func.functional_call(model, values, (x,)).sum()  # noqa: E731
    torch.func.grad(loss)(dict(model.named_parameters()))


def _jacrev_of_masters(model: nn.Module, x: Tensor) -> None:
    torch.func.jacrev(lambda values: torch.func.functional_call(model, values, (x,)))(dict(model.named_parameters()))


@on_ranks()
def test_transforms_of_sharded_parameters_raise() -> None:
    found = []
    x = torch.randint(0, models.VOCABULARY, (1, 2), device=models.device())
    for stage, scope in CELLS:
        for act in (_grad_of_masters, _jacrev_of_masters):
            torch._dynamo.reset()
            model = models.ByteModel()
            engine = engines.make_engine(model, stage, compile=scope)
            try:
                with engine.training_step():
                    act(model, x)
                found.append(f"stage {stage} {scope} {act.__name__}: nothing was raised")
            except RuntimeError as error:
                if "strategy.full_parameters" not in str(error):
                    found.append(f"stage {stage} {scope} {act.__name__}: {error}")
            finally:
                engine.abandon()
    assert found == []


# ---- forwards outside of steps ----


@pytest.mark.parametrize("scope", [False, "blocks"])
@on_ranks()
def test_a_bare_forward_between_steps(scope: Any) -> None:
    """Under `torch.no_grad()` outside of any step: at most its last units stay gathered, and none in the next step."""
    model, twin = models.pair(models.ByteModel)
    data = models.Batches(0)
    with engines.engine(model, 3, compile=scope) as engine:
        optimizer = _sgd(engine, model.parameters())
        between, resident = 0, []
        for number in range(2):
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
            with torch.no_grad():
                model(data[number][:, :-1])
            between = max(between, len(engine.runtime.core.resident_units()))
            with engine.training_step():
                resident += engine.runtime.core.resident_units()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for number in range(2):
        optimizer.zero_grad()
        engines.token_loss(twin, data[number]).backward()
        optimizer.step()
    assert between <= 2 and resident == []
    assert models.deviation(model, twin) <= 1e-6
