"""Parameters that user code chooses by what they are and not by their names, and memory that several share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, STAGES


class ByKind(models.Module):
    """Weights decay, biases and what belongs to norms do not, as in YOLOv5."""

    def configure_optimizers(self) -> Optimizer:
        norms, weights, biases = [], [], []
        for layer in self.modules():
            if hasattr(layer, "bias") and isinstance(layer.bias, nn.Parameter):
                biases.append(layer.bias)
            if isinstance(layer, nn.LayerNorm):
                norms.append(layer.weight)
            elif hasattr(layer, "weight") and isinstance(layer.weight, nn.Parameter):
                weights.append(layer.weight)
        optimizer = torch.optim.SGD(norms, lr=0.1, momentum=0.9)
        optimizer.add_param_group({"params": weights, "weight_decay": 0.1})
        optimizer.add_param_group({"params": biases, "lr": 0.2})
        return optimizer


class ByIdentity(models.Module):
    def configure_optimizers(self) -> Optimizer:
        special = {self.model.head.weight, self.model.layers[0].norm.bias}
        numbers = {id(layer.up.weight) for layer in self.model.layers}
        groups: list[dict[str, Any]] = [{"params": [self.model.shift], "lr": 0.01}]
        for parameter in self.parameters():
            if parameter is not self.model.shift:
                decay = 0.5 if parameter in special else 0.2 if id(parameter) in numbers else 0.0
                groups.append({"params": [parameter], "weight_decay": decay})
        assert self.model.head.weight is self.model.head.weight
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class Added(models.Module):
    """A group that is added later, by an attribute."""

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(list(self.model.layers.parameters()), lr=0.1, momentum=0.9)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.optimizers().add_param_group({"params": [self.model.head.weight], "lr": 0.3})


class AddedToTwo(models.Module):
    """The group of one of two optimizers that step with the same gradient; the other one steps first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[Optimizer]:  # type: ignore[override]
        first = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [first, torch.optim.SGD([self.model.shift], lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        if self.global_step == 2:
            optimizers[1].add_param_group({"params": self.model.head.weight, "lr": 0.3})
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def _fitted_alike(kind: type[Any], *strategies: Any) -> list[Any]:
    """A module for each strategy; they are trained to the same parameters."""
    fitted = []
    for strategy in strategies:
        torch.manual_seed(0)
        module = kind()
        models.fit(module, strategy, 4)
        fitted.append(module)
    assert models.deviation(*fitted) < 1e-6
    return fitted


@pytest.mark.parametrize("kind", [ByKind, ByIdentity, Added, AddedToTwo])
@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, AOT), (3, EAGER), (3, AOT)])
@on_ranks()
def test_optimizers_have_the_parameters_that_were_chosen(
    kind: type[models.Module], stage: int, options: dict[str, Any]
) -> None:
    _fitted_alike(kind, "ddp_find_unused_parameters_true", ZeroCompileStrategy(stage=stage, **options))


class Marked(nn.Module):
    """A layer whose code reads what was put on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 12), nn.Linear(12, 10)
        self.up.weight.scale = 2.0  # type: ignore[assignment, unused-ignore]
        self.down.weight.kind = "wide"  # type: ignore[assignment, unused-ignore]

    def forward(self, x: Tensor) -> Tensor:
        scale = getattr(self.up.weight, "scale", 1.0) + getattr(self.up.bias, "extra", 0.0)
        x = x + self.down(torch.tanh(self.up(x)) * scale)
        return x * 0.5 if self.down.weight.kind == "wide" else x  # type: ignore[comparison-overlap, unused-ignore]


class ByAttribute(models.Module):
    """Reads and changes what is on parameters, through modules and through `parameters()`."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers = nn.ModuleList([Marked(), Marked()])
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Optimizer:
        for name, parameter in self.named_parameters():
            parameter.rate = 3.0 if "head" in name else 1.0  # type: ignore[attr-defined]
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        bias: Any = self.model.layers[0].up.bias
        bias.extra = getattr(bias, "extra", 0.0) + 0.25
        if batch_idx == 2:
            del bias.extra

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.grad.mul_(layer.weight.rate)  # type: ignore[union-attr, operator]
        first = next(self.model.layers.parameters())
        self.seen.append((first.scale, hasattr(self.model.head.weight, "scale"), self.model.head.weight.rate))  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [EAGER, AOT, MODEL], ids=["eager", "aot_eager", "model"])
@STAGES
@on_ranks()
def test_what_user_code_puts_on_parameters(stage: int, options: dict[str, Any]) -> None:
    fitted = _fitted_alike(ByAttribute, "ddp", ZeroCompileStrategy(stage=stage, **options))
    assert fitted[0].seen == fitted[1].seen == [(2.0, False, 3.0)] * 4
    weight: Any = fitted[1].model.head.weight
    assert weight.rate == 3.0 and fitted[1].model.layers[0].up.weight.scale == 2.0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@STAGES
@on_ranks()
def test_functions_that_users_compile_take_weights(stage: int, options: dict[str, Any], backend: str) -> None:
    """Inside blocks and outside of them. torch asks there whether a tensor is a parameter, as user code may."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight) * 2

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(10, 10) / 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + calls[-1](x, self.weight)

    class Model(models.ByteModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])
            self.outer = nn.Parameter(torch.randn(10, 10) / 3)

        def forward(self, tokens: Tensor) -> Tensor:
            x = calls[-1](self.embedding(tokens), self.outer)
            for layer in self.layers:
                x = layer(x)
            if not torch.compiler.is_compiling() and not isinstance(self.outer, nn.Parameter):
                raise AssertionError(type(self.outer))
            return self.head(x)  # type: ignore[no-any-return]

    calls: list[Callable[..., Tensor]] = [product]
    fitted = []
    for strategy in ("ddp_find_unused_parameters_true", ZeroCompileStrategy(stage=stage, **options)):
        torch.manual_seed(0)
        module = models.Module(Model, lr=0.1)
        models.fit(module, strategy, 3)  # type: ignore[arg-type]
        fitted.append(module)
        calls.append(torch.compile(product, backend=backend))
    assert models.deviation(*fitted) < (1e-6 if backend == "aot_eager" else 1e-5)


@on_ranks()
def test_an_attribute_that_is_not_there() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False)).to(models.device())
    with engines.engine(model, 3, compile=False):
        with pytest.raises(AttributeError, match=r"Parameter `0\.weight` has no attribute 'scale'"):
            _ = model[0].weight.scale
        with pytest.raises(AttributeError, match=r"Parameter `0\.weight` has no attribute 'scale'"):
            del model[0].weight.scale


def _transposed(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[0].weight.t())


def _by_data(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.data


def _in_a_buffer(model: nn.Sequential) -> None:
    model.register_buffer("shadow", model[0].weight.data[2:])


def _tied(model: nn.Sequential) -> None:
    model[1].weight = model[0].weight


def _parts_of_one(model: nn.Sequential) -> None:
    whole = torch.randn(12, 6, device=model[0].weight.device)
    model[0].weight, model[1].weight = nn.Parameter(whole[:6]), nn.Parameter(whole[6:])


@pytest.mark.parametrize(
    ("share", "warns"), [(_transposed, 1), (_by_data, 1), (_in_a_buffer, 1), (_tied, 0), (_parts_of_one, 0)]
)
@on_ranks()
def test_memory_that_is_shared(share: Callable[[nn.Sequential], None], warns: int) -> None:
    """DDP would train it as one; a shard has memory of its own, and a warning says so."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)).to(models.device())
    share(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with engines.engine(model, 3, compile=False):
            pass
    found = [str(one.message) for one in seen if "share memory without being one object" in str(one.message)]
    assert len(found) == (warns if models.rank() == 0 else 0)
    assert all("`0.weight` and" in text for text in found)
