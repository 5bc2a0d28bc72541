"""Parameter objects from before the model was sharded: each use of one raises, and says where the parameter is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, reference

SAID = (
    r"Parameter `{}head\.weight`: this object was made before the model was sharded.*Take it from the module again.*"
    r"`dict\(module\.named_parameters\(\)\)\['{}head\.weight'\]`"
)


USES: dict[str, Callable[[Any, Any], object]] = {
    "grad": lambda p, model: p.grad,
    "set grad": lambda p, model: setattr(p, "grad", None),
    "data": lambda p, model: p.data,
    "set data": lambda p, model: setattr(p, "data", torch.zeros(3)),
    "shape": lambda p, model: p.shape,
    "freeze": lambda p, model: p.requires_grad_(False),
    "clamp": lambda p, model: p.clamp_(-1, 1),
    "item": lambda p, model: p.sum().item(),
    "list": lambda p, model: p.tolist(),
    "apply": lambda p, model: p.apply_(lambda value: value),
    "clip": lambda p, model: nn.utils.clip_grad_norm_([p], 1.0),
    "foreach": lambda p, model: torch._foreach_mul_([p], 2.0),
    "vector": lambda p, model: nn.utils.parameters_to_vector([p]),
    "beside a master": lambda p, model: next(model.head.parameters()).add_(p),
    "into a master": lambda p, model: next(model.head.parameters()).data.copy_(p),
    "beside an attribute": lambda p, model: model.head.weight + p,
    "beside a tensor": lambda p, model: torch.zeros(models.VOCABULARY, 10, device=models.device()).lerp_(p, 0.5),
    "layer": lambda p, model: nn.functional.linear(torch.ones(2, 10, device=models.device()), p),
    "hook": lambda p, model: p.register_hook(lambda grad: grad),
    "copy": lambda p, model: copy.deepcopy(p),
    "in a list": lambda p, model: next(model.parameters()) in [p],
    "optimizer": lambda p, model: torch.optim.SGD([p], lr=0.1),
    "attribute": lambda p, model: setattr(model.head, "weight", p),
    "another attribute": lambda p, model: setattr(model.layers[0], "extra", p),
}


@pytest.mark.parametrize("use", list(USES))
@on_ranks()
def test_every_use_raises(use: str) -> None:
    """Nothing is changed by it, and after the run the object is the model's again."""
    model, twin = models.pair(models.ByteModel)
    held = list(model.parameters())
    old = model.head.weight
    with engines.engine(model, 3, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        with torch.no_grad(), pytest.raises(RuntimeError, match=SAID.format("", "")):
            USES[use](old, model)
        assert repr(old) == "<parameter `head.weight`, moved>" and isinstance(old, nn.Parameter)
        engines.step(engine, optimizer, lambda: engines.token_loss(model, models.Batches(models.rank())[0]))
    assert all(type(p) is nn.Parameter and p is q for p, q in zip(held, model.parameters(), strict=True))
    reference(twin, 1)
    assert models.deviation(model, twin) <= 1e-6


class Lending(nn.Module):
    """A block that uses a weight of another layer, from a list of its own."""

    def __init__(self, lent: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.lent = [lent]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + nn.functional.linear(x, self.lent[0])


class Borrowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 10)
        self.head = nn.Linear(10, 10)
        self.layers = nn.ModuleList(Lending(self.head.weight) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.head(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("options", [EAGER, AOT, MODEL], ids=["eager", "blocks", "model"])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_a_block_that_uses_a_list_raises(stage: int, options: dict[str, Any]) -> None:
    model = Borrowed().to(models.device())
    engine = engines.make_engine(model, stage, **options)
    with pytest.raises(RuntimeError, match=SAID.format("", "")), engine.training_step():
        model(models.Batches(models.rank())[0])
    engine.abandon()


class Stepping(models.Module):
    """Manual optimization with an optimizer of `__init__`, which `configure_optimizers` returns or does not."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.returned = False, returned
        self.own = torch.optim.AdamW(self.model.head.parameters(), lr=0.01)

    def configure_optimizers(self) -> Any:
        return self.own if self.returned else None

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        self.own.step()


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_an_optimizer_that_is_not_returned_raises_at_its_step(stage: int, returned: bool) -> None:
    module = Stepping(returned)
    trainer = models.make_trainer(ZeroCompileStrategy(stage, **EAGER), max_epochs=1, limit_train_batches=2)
    if returned:
        trainer.fit(module, models.Batches(models.rank()))
        return
    with pytest.raises(RuntimeError, match=SAID.format(r"model\.", r"model\.") + ".*`configure_optimizers` returns it"):
        trainer.fit(module, models.Batches(models.rank()))


@on_ranks()
def test_a_parameter_that_was_put_there_raises_too() -> None:
    """The one that is in its place has taken its values."""
    model = models.ByteModel()
    with engines.engine(model, 3, **EAGER) as engine:
        engines.sgd(engine, model)
        new = nn.Parameter(torch.ones(models.VOCABULARY, 10, device=models.device()))
        model.head.weight = new
        with pytest.raises(RuntimeError, match=r"`head\.weight`: this object"):
            new.square().sum()
    assert torch.equal(model.head.weight.cpu(), torch.ones(models.VOCABULARY, 10))
