"""What a fit leaves: the dtypes that were there, statistics; and what `param_dtype` casts."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import Ranks

MODES: dict[str, dict[str, Any]] = {"eager": {"compile": False}, "compiled": {"backend": "aot_eager"}}
CELLS = [(stage, mode) for stage in (1, 2, 3) for mode in MODES]


# ---- dtypes ----


def _half(model: nn.Module) -> None:
    """Most of it is bfloat16, one block frozen; the head stays float32, with gradients of another dtype."""
    model.to(torch.bfloat16)
    model.layers[0].requires_grad_(False)  # type: ignore[index, union-attr]
    model.head.float()  # type: ignore[operator, union-attr]
    model.scale.grad_dtype = torch.float32  # type: ignore[union-attr]


class Half(models.Module):
    def __init__(self) -> None:
        super().__init__()
        _half(self.model)

    def loss(self, batch: Tensor) -> Tensor:
        model: Any = self.model
        x = model.embedding(batch[:, :-1])
        for layer in model.layers:
            x = layer(x)
        logits = model.head(x.float()) * model.scale + model.shift
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def _described(module: nn.Module) -> dict[str, Any]:
    return {name: (p.dtype, p.grad_dtype, p.requires_grad) for name, p in module.named_parameters()}


def _dtypes(stage: int, mode: str) -> tuple[dict[str, Any], dict[str, Any], bool, float]:
    module = Half()
    before = _described(module)
    start = copy.deepcopy(module)
    models.train(module, ZeroCompileStrategy(stage, **MODES[mode]), steps=2)
    frozen = all(
        torch.equal(a, b)
        for a, b in zip(start.model.layers[0].parameters(), module.model.layers[0].parameters(), strict=True)  # type: ignore
    )
    after = _described(module)
    models.train(module, ZeroCompileStrategy(stage, **MODES[mode]), steps=1)  # such a module can be fitted again
    return before, after, frozen, models.deviation(start, module)


@pytest.mark.parametrize(("stage", "mode"), CELLS)
def test_parameters_have_their_dtypes_again(ranks: Ranks, stage: int, mode: str) -> None:
    for before, after, frozen, moved in ranks.run(_dtypes, stage, mode):
        assert after == before and frozen and moved > 0


# ---- inputs ----


class Regression(L.LightningModule):
    """Floating-point inputs, blocks, a call with keywords, and targets that must stay what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 10)
        self.layers = nn.ModuleList(models.Block(10) for _ in range(2))
        self.outlet = nn.Linear(10, 1)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.seen.append((x.dtype, scale.dtype))
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x.float())  # a block is cast to as well
        return self.outlet(x) * scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.dtype)
        x, y = batch[..., :5], batch[..., 5:]
        return F.mse_loss(self(x, scale=x.new_ones(1)) + self.outlet(self.inlet(input=x)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _data() -> Any:
    generator = torch.Generator().manual_seed(models.rank())
    return torch.utils.data.DataLoader([torch.randn(4, 3, 6, generator=generator) for _ in range(2)], batch_size=None)  # type: ignore


def _casts(stage: int, mode: str) -> tuple[list[Any], int, str]:
    module = Regression()
    options = MODES[mode] | {"param_dtype": "bfloat16"}
    models.make_trainer(ZeroCompileStrategy(stage, **options), max_epochs=1).fit(module, _data())  # type: ignore
    left = sum(len(inner._forward_pre_hooks) for inner in module.modules())
    try:
        strategy = ZeroCompileStrategy(stage, cast_forward_inputs=False, **options)
        models.make_trainer(strategy, max_epochs=1).fit(Regression(), _data())  # type: ignore
    except RuntimeError as error:
        return module.seen, left, str(error)
    return module.seen, left, ""


@pytest.mark.parametrize(("stage", "mode"), CELLS)
def test_param_dtype_casts_what_modules_are_passed(ranks: Ranks, stage: int, mode: str) -> None:
    """As FSDP2 does: the module, its children and blocks; not the batch, whose targets the loss reads."""
    low = (torch.bfloat16, torch.bfloat16)
    for seen, left, error in ranks.run(_casts, stage, mode):
        assert seen == [torch.float32, low] * 2 and left == 0
        assert "same dtype" in error and "`cast_forward_inputs=False`" in error


# ---- statistics ----


class AtTheEnd(L.Callback):
    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.stats = trainer.strategy.stats  # type: ignore[attr-defined]


class Fails(models.Module):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ValueError("on purpose")


def _statistics(stage: int) -> list[Any]:
    strategy, callback = ZeroCompileStrategy(stage, backend="inductor"), AtTheEnd()
    none_yet = [hasattr(strategy, name) for name in ("stats", "compile_stats", "eager_reads")]
    found = []
    for _ in range(2):  # the second time from a warm compile cache
        torch._dynamo.reset()
        strategy = ZeroCompileStrategy(stage, backend="inductor")
        record = models.train(models.Module(), strategy, steps=2, callbacks=[callback])
        assert (strategy.stats.backwards, strategy.compile_stats) == (2, record.compiled)
        assert callback.stats == strategy.stats and sum(r.reads for r in strategy.eager_reads.values()) > 0
        found.append((record.compiled.dynamo_graphs, record.compiled.forward, record.compiled.backward))
    failing = ZeroCompileStrategy(stage, **MODES["compiled"])
    with pytest.raises(ValueError, match="on purpose"):
        models.train(Fails(), failing)
    return [none_yet, *found, failing.stats.backwards]


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_statistics_outlive_the_fit(ranks: Ranks, stage: int) -> None:
    for none_yet, cold, warm, failed in ranks.run(_statistics, stage, timeout=240):
        assert none_yet == [False, False, False] and cold == warm == (1, 1, 1) and failed == 1


# ---- what is refused by name ----


class Noisy(models.Module):
    def __init__(self, right: bool) -> None:
        super().__init__()
        self.right = right

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.add_(torch.randn_like(p.grad) if self.right else torch.randn(p.shape))  # type: ignore


def _refused(stage: int, mode: str) -> None:
    strategy = ZeroCompileStrategy(stage, **MODES[mode])
    with pytest.raises(RuntimeError, match=r"(?s)DTensor.*randn_like\(p.grad\)"):
        models.train(Noisy(right=False), strategy)
    models.train(Noisy(right=True), ZeroCompileStrategy(stage, **MODES[mode]))


def test_what_does_not_work_is_refused_with_the_remedy(ranks: Ranks) -> None:
    for stage, mode in CELLS:
        ranks.run(_refused, stage, mode)
