"""What a fit leaves: the dtypes that were there, statistics; and what `param_dtype` casts."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

CELLS = [pytest.param(stage, how, id=f"{stage}-{how['compile']}") for stage in (1, 2, 3) for how in (EAGER, AOT)]


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


@pytest.mark.parametrize(("stage", "options"), CELLS)
@on_ranks()
def test_parameters_have_their_dtypes_again(stage: int, options: dict[str, Any]) -> None:
    module = Half()
    before, start = _described(module), copy.deepcopy(module)
    models.train(module, ZeroCompileStrategy(stage, **options), steps=2)
    assert _described(module) == before and models.deviation(start, module) > 0
    models.assert_equal(start.model.layers[0], module.model.layers[0])  # type: ignore[index, union-attr]
    models.train(module, ZeroCompileStrategy(stage, **options), steps=1)  # such a module can be fitted again


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
        out = self(x, scale=x.new_ones(1)) + self.outlet(self.inlet(input=x))
        return F.mse_loss(out.to(y), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Widened(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Inside(Regression):
    """What a module makes inside of a child has the dtype that its code gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.outlet: Any = nn.Sequential(Widened(10, 1))


def _data() -> Any:
    generator = torch.Generator().manual_seed(models.rank())
    return torch.utils.data.DataLoader([torch.randn(4, 3, 6, generator=generator) for _ in range(2)], batch_size=None)  # type: ignore


@pytest.mark.parametrize(("stage", "options"), CELLS)
@on_ranks()
def test_param_dtype_casts_what_modules_are_passed(stage: int, options: dict[str, Any]) -> None:
    """As FSDP2 does: the module, its children and blocks; not the batch, whose targets the loss reads."""
    module, options = Regression(), options | {"param_dtype": "bfloat16"}
    models.make_trainer(ZeroCompileStrategy(stage, **options), max_epochs=1).fit(module, _data())
    assert module.seen == [torch.float32, (torch.bfloat16, torch.bfloat16)] * 2
    assert sum(len(inner._forward_pre_hooks) for inner in module.modules()) == 0
    with pytest.raises(RuntimeError, match=r"(?s)same dtype.*not further inside\. Cast what"):
        models.make_trainer(ZeroCompileStrategy(stage, **options), max_epochs=1).fit(Inside(), _data())


# ---- statistics ----


class AtTheEnd(L.Callback):
    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.stats = trainer.strategy.stats  # type: ignore[attr-defined]


class Fails(models.Module):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ValueError("on purpose")


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks(timeout=240)
def test_statistics_outlive_the_fit(stage: int) -> None:
    strategy, callback = ZeroCompileStrategy(stage, compile_options={"backend": "inductor"}), AtTheEnd()
    assert not any(hasattr(strategy, name) for name in ("stats", "compile_stats", "eager_reads"))
    for _ in range(2):  # the second time from a warm compile cache
        torch._dynamo.reset()
        strategy = ZeroCompileStrategy(stage, compile_options={"backend": "inductor"})
        record = models.train(models.Module(), strategy, steps=2, callbacks=[callback])
        assert (strategy.stats.backwards, strategy.compile_stats) == (2, record.compiled)
        assert callback.stats == strategy.stats and sum(r.reads for r in strategy.eager_reads.values()) > 0
        assert (record.compiled.dynamo_graphs, record.compiled.forward, record.compiled.backward) == (1, 1, 1)
    failing = ZeroCompileStrategy(stage, **AOT)
    with pytest.raises(ValueError, match="on purpose"):
        models.train(Fails(), failing)
    assert failing.stats.backwards == 1


# ---- noise for gradients ----


class Noisy(models.Module):
    def __init__(self, like: bool) -> None:
        super().__init__()
        self.like = like

    def on_after_backward(self) -> None:
        torch.manual_seed(self.global_step)
        for p in self.parameters():
            p.grad.add_(torch.randn_like(p.grad) if self.like else torch.randn(p.shape, device=p.device))  # type: ignore


@pytest.mark.parametrize(("stage", "options"), CELLS)
@on_ranks()
def test_noise_is_drawn_for_whole_gradients(stage: int, options: dict[str, Any]) -> None:
    """In the gradient's layout or as a full tensor, the numbers are those that one process draws."""
    torch.manual_seed(0)
    start = Noisy(like=True)
    full, quiet = Noisy(like=False), models.Module()
    for module in (full, quiet):
        module.load_state_dict(start.state_dict())
    for module in (start, full, quiet):
        models.train(module, ZeroCompileStrategy(stage, **options), steps=2)
    assert models.deviation(start, full) <= 1e-6 < 1e-2 < models.deviation(start, quiet)


@on_ranks()
def test_a_model_that_was_only_validated_is_freed() -> None:
    """Its trainer goes on with another one."""
    first, data = models.Module(), models.Batches(models.rank(), 2)
    trainer = models.make_trainer(ZeroCompileStrategy(1, **EAGER), max_steps=1)
    trainer.validate(first, data, verbose=False)
    held = [weakref.ref(parameter) for parameter in first.parameters()]
    del first
    trainer.validate(models.Module(), data, verbose=False)
    gc.collect()
    assert [reference() for reference in held if reference() is not None] == []
