"""Hooks of modules run as under DDP, also where equal blocks share compiled code."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks

STEPS = 3
KINDS = ("forward", "pre", "kwargs", "backward", "backward_pre")


class Hooked(models.Module):
    """Counts and scales: a hook changes what flows, so that one that is lost, or runs for another block, shows."""

    def __init__(self, where: str, late: bool) -> None:
        super().__init__()
        self.where, self.late = where, late
        self.calls: list[str] = []

    def on_fit_start(self) -> None:
        if not self.late:
            self.add_hooks()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.late and batch_idx == 1:
            self.add_hooks()

    def add_hooks(self) -> None:
        """On the second block, or inside it, one of each kind."""
        module = self.model.get_submodule(self.where)  # type: ignore[union-attr]

        def said(kind: str) -> None:
            self.calls.append(kind)

        def forward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            said("forward")
            return output * 1.5

        def pre(module: nn.Module, args: Any) -> Any:
            said("pre")
            return (args[0] * 0.5,)

        def kwargs(module: nn.Module, args: Any, kwargs: Any) -> Any:
            said("kwargs")
            return (args[0] + 0.25, *args[1:]), kwargs

        def backward(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            said("backward")
            return (inputs[0] * 2, *inputs[1:])

        def backward_pre(module: nn.Module, outputs: Any) -> Any:
            said("backward_pre")
            return (outputs[0] * 0.75,)

        module.register_forward_hook(forward)
        module.register_forward_pre_hook(pre)
        module.register_forward_pre_hook(kwargs, with_kwargs=True)
        module.register_full_backward_hook(backward)
        module.register_full_backward_pre_hook(backward_pre)


def _cell(stage: int, options: dict[str, Any], where: str, late: bool) -> str:
    torch._dynamo.reset()
    module, record = Hooked(where, late), models.Record()
    twin = copy.deepcopy(module)
    if not late:
        twin.add_hooks()
    strategy = ZeroCompileStrategy(stage, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = models.Batches(models.rank(), STEPS)
        models.make_trainer(strategy, max_epochs=1, callbacks=[record]).fit(module, data)
    if late:  # the reference has no hooks in its first step
        first = models.Batches.__getitem__
        optimizer = twin.to(models.device()).configure_optimizers()
        for number in range(STEPS):
            if number == 1:
                twin.add_hooks()
            optimizer.zero_grad()
            for rank in range(models.world()):
                (twin.loss(first(models.Batches(rank), number)) / models.world()).backward()
            optimizer.step()
    else:
        models.reference(twin, STEPS)
    expected = STEPS - late
    counts = {kind: module.calls.count(kind) for kind in KINDS}
    said = [str(w.message) for w in caught if "has hooks" in str(w.message) or "hooks are registered" in str(w.message)]
    inside = where.count(".") > 1 and options.get("compile") is not False
    problem = ""
    if counts != dict.fromkeys(KINDS, expected):
        problem += f" calls {counts};"
    if models.deviation(module, twin) > 1e-6:
        problem += f" off by {models.deviation(module, twin)};"
    if models.rank() == 0 and len(said) != inside:
        problem += f" said {said};"
    if inside and f"{where.rpartition('.')[0]}" not in "".join(said) and models.rank() == 0:
        problem += f" said {said};"
    if options.get("compile") is not False and record.compiled.backward == 0:
        problem += " nothing was compiled;"
    return problem and f"stage {stage} {options} {where} late={late}:{problem}"


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_hooks_on_and_inside_one_of_several_equal_blocks(stage: int) -> None:
    """Every kind of hook, from before the first step or registered in the middle: called once a step, and what it
    returns counts. Set-up's compilation gives way to it, and says so by the block's name."""
    cells = [
        ({"compile_options": {"backend": "aot_eager"}}, "layers.1.up", False),
        ({"compile_options": {"backend": "aot_eager"}}, "layers.1.up", True),
        ({"compile_options": {"backend": "aot_eager"}}, "layers.1", False),
        ({"compile": False}, "layers.1.up", True),
    ]
    problems = [problem for options, where, late in cells if (problem := _cell(stage, options, where, late))]
    assert problems == [], "\n".join(problems)


class Everywhere(L.Callback):
    """A hook of torch's that is registered for all modules."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.handle = nn.modules.module.register_module_forward_hook(self.hook)  # type: ignore[arg-type]

    def hook(self, module: nn.Module, args: Any, output: Any) -> None:
        self.seen.append(type(module).__name__)

    def on_train_batch_end(self, *_: Any) -> None:
        self.handle.remove()


@pytest.mark.parametrize("stage", (1, 3))
@on_ranks()
def test_hooks_of_all_modules(stage: int) -> None:
    module, hook = models.Module(), Everywhere()
    strategy = ZeroCompileStrategy(stage, compile_options={"backend": "aot_eager"})
    models.make_trainer(strategy, max_steps=1, callbacks=[hook]).fit(module, models.Batches(models.rank()))
    seen = {name: hook.seen.count(name) for name in ("Block", "LayerNorm", "Linear", "Embedding")}
    assert seen == {"Block": 3, "LayerNorm": 3, "Linear": 7, "Embedding": 1}


class Normed(models.Block):
    """With a hook of torch's, which is a part of what the block is."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        nn.utils.weight_norm(self.up)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_blocks_with_hooks_of_torchs_own_are_compiled(stage: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = models.Module(lambda: models.Stacked(lambda: Normed(10)))
        twin = models.Module(lambda: models.Stacked(lambda: Normed(10)))
        twin.load_state_dict(module.state_dict())
        record = models.train(module, ZeroCompileStrategy(stage, compile_options={"backend": "aot_eager"}), steps=2)
        models.reference(twin, steps=2)
    assert (
        models.deviation(module, twin) <= 1e-6
        and record.compiled.backward == 1
        and not any("hooks" in str(w.message) for w in caught)
    )
