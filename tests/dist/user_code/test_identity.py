"""Parameters that user code chooses by what they are and not by their names, and memory that several share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER


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


@pytest.mark.parametrize("kind", [ByKind, ByIdentity, Added, AddedToTwo])
@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, AOT), (3, EAGER), (3, AOT)])
@on_ranks()
def test_optimizers_have_the_parameters_that_were_chosen(
    kind: type[models.Module], stage: int, options: dict[str, Any]
) -> None:
    fitted = []
    for strategy in ("ddp_find_unused_parameters_true", ZeroCompileStrategy(stage=stage, **options)):
        torch.manual_seed(0)
        module = kind()
        models.fit(module, strategy, 4)  # type: ignore[arg-type]
        fitted.append(module)
    assert models.deviation(*fitted) < 1e-6


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
