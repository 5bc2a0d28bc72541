"""``trainer.fit(torch.compile(module))`` is the wish to compile: served as the strategy's own options, or refused."""

from __future__ import annotations

import copy
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


class SeenConfig(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.config = trainer.strategy.engine.config  # type: ignore[attr-defined]
        self.plain = "training_step" not in vars(module)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_it_trains_as_ddp_with_the_module_s_options(stage: int) -> None:
    """Twice: Lightning compiles the steps of the same module again for the second fit."""
    module = models.Module()
    twin = copy.deepcopy(module)
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
    ({"mode": "reduce-overhead"}, {"mode": "reduce-overhead"}, {"mode": "reduce-overhead", "options": {}}),
    ({"options": {"max-autotune": True}, "dynamic": True}, {}, {"options": {"max_autotune": True}, "dynamic": True}),
    ({}, {"compile": "model", "backend": "aot_eager"}, {"compile": "model", "backend": "aot_eager"}),
]


@pytest.mark.parametrize(("wish", "options", "expected"), SERVED, ids=str)
def test_what_is_served(wish: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]) -> None:
    config = with_wish(Config(**options), from_compiled(torch.compile(models.Module(), **wish)))  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in expected} == expected


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"fullgraph": True}, {}, "Leave out `fullgraph`"),
    ({"backend": "eager"}, {}, "backend='eager'.*ZeroCompileStrategy(compile=False)"),
    ({"backend": lambda graph, inputs: graph}, {}, "'<lambda>'.*'aot_eager'"),
    ({"dynamic": True}, {"dynamic": False}, "`dynamic=True`, and ZeroCompileStrategy `dynamic=False`"),
]


@pytest.mark.parametrize(("wish", "options", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_be_served_says_what_to_pass(wish: dict[str, Any], options: dict[str, Any], message: str) -> None:
    trainer = models.make_trainer(ZeroCompileStrategy(**options), max_steps=1)
    compiled: Any = torch.compile(models.Module(), **wish)
    with pytest.raises(MisconfigurationException, match=message.replace("(", r"\(").replace(")", r"\)")):
        trainer.fit(compiled, models.Batches(0))


def test_compile_false_is_overruled_with_a_warning() -> None:
    module = from_compiled(torch.compile(models.Module()))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=re.escape("pass the module as it is")):
        assert with_wish(Config(compile=False), module).compile == "blocks"
