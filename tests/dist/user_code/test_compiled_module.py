"""``trainer.fit(torch.compile(module))``: the plain module is taken, and one line says so."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.compile import to_uncompiled

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.plugins.compiled_module import warn_if_compiled
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, MODEL


class SeenConfig(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.config = trainer.strategy.engine.config  # type: ignore[attr-defined]
        self.plain = "training_step" not in vars(module)


_SAYS = r"was compiled by torch\.compile, and is taken as the plain module.*ZeroCompileStrategy\(compile="


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_it_trains_as_ddp_with_the_strategy_s_options(stage: int) -> None:
    """Twice: Lightning compiles the steps of the same module again for the second fit."""
    module, twin = models.pair(models.Module)
    compiled: Any = torch.compile(module, fullgraph=True, dynamic=False)
    seen, graphs = SeenConfig(), 0
    for _ in range(2):
        strategy = ZeroCompileStrategy(stage, **AOT)
        trainer = models.make_trainer(strategy, max_steps=2, callbacks=[seen])
        with pytest.warns(UserWarning, match="The module " + _SAYS) if models.rank() == 0 else nullcontext():
            trainer.fit(compiled, models.Batches(models.rank()))
        models.reference(twin, steps=2)
        graphs += strategy.compile_stats.forward
    assert seen.config == strategy.config and seen.plain and graphs > 0
    assert models.deviation(module, twin) <= 1e-6
    assert "training_step" in vars(module)  # as it was
    assert to_uncompiled(compiled) is module and module._compiler_ctx is None


@on_ranks()
def test_nothing_is_compiled_where_the_strategy_is_told_so() -> None:
    module, twin = models.pair(models.Module)
    compiled: Any = torch.compile(module)
    strategy = ZeroCompileStrategy(3, compile=False)
    models.make_trainer(strategy, max_steps=2).fit(compiled, models.Batches(models.rank()))
    models.reference(twin, steps=2)
    assert models.deviation(module, twin) <= 1e-6 and strategy.compile_stats.forward == 0


# ---- a part of the module ----


def _wrapped(model: Any) -> None:
    model.head = torch.compile(model.head, backend="aot_eager")


def _each_block(model: Any) -> None:
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="aot_eager")


def _in_place(model: Any) -> None:
    model.layers[0].compile(backend="aot_eager")
    model.embedding.compile(backend="aot_eager", dynamic=False)


def _its_forward(model: Any) -> None:
    model.layers[1].forward = torch.compile(model.layers[1].forward, backend="aot_eager")


PARTS = {"wrapped": _wrapped, "each block": _each_block, "in place": _in_place, "its forward": _its_forward}


class Parts(models.Module):
    """Parts of the model are compiled, and its state is looked at in the middle."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.names = set(self.state_dict())
        PARTS[how](self.model)
        self.wrapped = set(self.state_dict())

    def on_train_epoch_end(self) -> None:
        assert set(self.state_dict()) == self.wrapped


@pytest.mark.parametrize("how", list(PARTS))
@pytest.mark.parametrize(
    ("stage", "options"),
    [(3, AOT), pytest.param(1, AOT, marks=pytest.mark.long), pytest.param(2, AOT, marks=pytest.mark.long),
     pytest.param(3, {}, marks=pytest.mark.long), pytest.param(3, MODEL, marks=pytest.mark.long)],
    ids=["3-aot_eager", "1-aot_eager", "2-aot_eager", "3-its own", "3-model"],
)  # fmt: skip
@on_ranks()
def test_a_compiled_part_trains_as_ddp(stage: int, options: dict[str, Any], how: str) -> None:
    """It is taken as the plain one; names are those of DDP; afterwards it is the user's compiled one again."""
    plain = models.Module()
    module: Any = Parts(how)
    for parameter, value in zip(module.parameters(), plain.parameters(), strict=True):
        parameter.data.copy_(value.data)
    parts, head = dict(module.model.named_modules()), module.model.head
    strategy = ZeroCompileStrategy(stage, **options)
    record = models.train(module, strategy, steps=3)
    models.reference(plain, steps=3)
    assert max(
        float((a.detach() - b.detach().cpu()).abs().max())
        for a, b in zip(module.parameters(), plain.parameters(), strict=True)
    ) <= 1e-6  # fmt: skip
    assert record.compiled.forward >= 1
    assert set(module.state_dict()) == module.wrapped and module.model.head is head
    if how == "in place":
        assert module.model.layers[0]._compiled_call_impl is not None
    elif how == "its forward":
        assert hasattr(vars(module.model.layers[1])["forward"], "_torchdynamo_orig_callable")
    else:
        part = head if how == "wrapped" else module.model.layers[0]
        assert isinstance(part, torch._dynamo.OptimizedModule) and part in parts.values()
        assert hasattr(vars(part)["forward"], "_torchdynamo_orig_callable")


@pytest.mark.parametrize(
    ("how", "name"), [("wrapped", "head"), ("in place", "embedding"), ("its forward", r"layers\.1")]
)
def test_the_first_part_is_named(how: str, name: str) -> None:
    with pytest.warns(UserWarning, match=rf"The module `model\.{name}` " + _SAYS):
        warn_if_compiled(Parts(how))


def test_a_plain_module_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_compiled(models.Module())
