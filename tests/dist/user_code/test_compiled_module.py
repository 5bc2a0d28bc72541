"""``trainer.fit(torch.compile(module))`` is the wish to compile: served as the strategy's own options, or refused."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.config import Config
from lightning_zerocompile.plugins.compiled_module import with_wish
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, MODEL


class SeenConfig(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.config = trainer.strategy.engine.config  # type: ignore[attr-defined]
        self.plain = "training_step" not in vars(module)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_it_trains_as_ddp_with_the_module_s_options(stage: int) -> None:
    """Twice: Lightning compiles the steps of the same module again for the second fit."""
    module, twin = models.pair(models.Module)
    compiled: Any = torch.compile(module, backend="aot_eager", dynamic=False)
    seen, graphs = SeenConfig(), 0
    for _ in range(2):
        strategy = ZeroCompileStrategy(stage)
        trainer = models.make_trainer(strategy, max_steps=2, callbacks=[seen])
        trainer.fit(compiled, models.Batches(models.rank()))
        models.reference(twin, steps=2)
        graphs += strategy.compile_stats.forward
    assert (seen.config.compile, seen.config.backend, seen.config.dynamic) == ("blocks", "aot_eager", False)
    assert seen.plain and graphs > 0
    assert models.deviation(module, twin) <= 1e-6
    assert strategy.config.backend == "inductor" and "training_step" in vars(module)  # as they were
    assert to_uncompiled(compiled) is module and module._compiler_ctx is None


SERVED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {"compile": "blocks", "backend": "inductor", "options": {}}),
    (
        {"mode": "max-autotune-no-cudagraphs"},
        {},
        {"options": {"max_autotune": True, "coordinate_descent_tuning": True}},
    ),
    (
        {"mode": "reduce-overhead"},
        {"compile_options": {"mode": "reduce-overhead"}},
        {"mode": "reduce-overhead", "options": {}},
    ),
    ({"options": {"max-autotune": True}, "dynamic": True}, {}, {"options": {"max_autotune": True}, "dynamic": True}),
    (
        {},
        {"compile": "model", "compile_options": {"backend": "aot_eager"}},
        {"compile": "model", "backend": "aot_eager"},
    ),
]


@pytest.mark.parametrize(("wish", "options", "expected"), SERVED, ids=str)
def test_what_is_served(wish: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]) -> None:
    config = with_wish(Config(**options), from_compiled(torch.compile(models.Module(), **wish)))  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in expected} == expected


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"fullgraph": True}, {}, "Leave out `fullgraph`"),
    ({"backend": "eager"}, {}, "backend='eager'.*ZeroCompileStrategy(compile=False)"),
    ({"backend": lambda graph, inputs: graph}, {}, "'<lambda>'.*'aot_eager'"),
    (
        {"dynamic": True},
        {"compile_options": {"dynamic": False}},
        "`dynamic=True`, and ZeroCompileStrategy `dynamic=False`",
    ),
]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("wish", "options", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_be_served_says_what_to_pass(wish: dict[str, Any], options: dict[str, Any], message: str) -> None:
    trainer = models.make_trainer(ZeroCompileStrategy(**options), max_steps=1)
    compiled: Any = torch.compile(models.Module(), **wish)
    try:
        with pytest.raises(MisconfigurationException, match=message.replace("(", r"\(").replace(")", r"\)")):
            trainer.fit(compiled, models.Batches(0))
    finally:
        torch.distributed.destroy_process_group()


def test_compile_false_is_overruled_with_a_warning() -> None:
    module = from_compiled(torch.compile(models.Module()))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=re.escape("pass the module uncompiled")):
        assert with_wish(Config(compile=False), module).compile == "blocks"


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
    """The strategy compiles it; names are those of DDP; afterwards it is the user's compiled one again."""
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
    assert record.compiled.forward >= (2 if how == "wrapped" and options != MODEL else 1)
    assert set(module.state_dict()) == module.wrapped and module.model.head is head
    if how == "in place":
        assert module.model.layers[0]._compiled_call_impl is not None
    elif how == "its forward":
        assert hasattr(vars(module.model.layers[1])["forward"], "_torchdynamo_orig_callable")
    else:
        part = head if how == "wrapped" else module.model.layers[0]
        assert isinstance(part, torch._dynamo.OptimizedModule) and part in parts.values()
        assert hasattr(vars(part)["forward"], "_torchdynamo_orig_callable")


def test_the_wish_of_a_part_is_served_or_refused() -> None:
    module: Any = models.Module()
    module.model.head = torch.compile(module.model.head, mode="reduce-overhead")
    assert with_wish(Config(), module).options == {"triton.cudagraphs": True}
    module.model.embedding.compile(options={"max_autotune": True})
    with pytest.raises(MisconfigurationException, match=r"torch.compile\(self.model.head\) .*another part"):
        with_wish(Config(), module)
    module = models.Module()
    module.model.head.forward = torch.compile(module.model.head.forward, fullgraph=True)
    with pytest.warns(UserWarning, match=r"torch.compile\(self.model.head, fullgraph=True\).*does not raise"):
        assert with_wish(Config(), module).backend == "inductor"
    with pytest.warns(UserWarning, match=r"module `model.head` was compiled"):
        assert with_wish(Config(compile=False), module).compile == "blocks"
