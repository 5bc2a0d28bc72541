"""Clipping, schedulers, manual optimization with several optimizers, kept gradients: as in one process."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.plugins.clipping import clip_norm
from lightning_zerocompile.sharding.master import as_plain_tensors, bound_gradient
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.models import Evaluated
from tests.support.parity import AOT, EAGER, ENDS, MODEL, STAGES


class Clipped(models.Module):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


@STAGES
@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.3), ("value", 0.01)])
@on_ranks()
def test_clipping_and_step_scheduler(stage: int, algorithm: str, limit: float) -> None:
    """The norm is of the whole gradient, not of a shard; the schedule moves the sharded optimizer."""
    module, twin = models.pair(Clipped)
    models.fit(
        module, ZeroCompileStrategy(stage=stage, **AOT), 5, gradient_clip_val=limit, gradient_clip_algorithm=algorithm
    )
    [optimizer], [scheduler] = twin.configure_optimizers()
    clipped = 0
    for step in range(5):
        optimizer.zero_grad()
        for r in range(models.world()):
            (twin.loss(models.Batches(r)[step]) / models.world()).backward()
        norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
        if algorithm == "norm":
            clipped += bool(norm > limit)
            nn.utils.clip_grad_norm_(twin.parameters(), limit)
        else:
            clipped += any(bool((p.grad.abs() > limit).any()) for p in twin.parameters())
            nn.utils.clip_grad_value_(twin.parameters(), limit)
        optimizer.step()
        scheduler["scheduler"].step()
    assert clipped == 5  # or the test shows nothing
    assert models.deviation(module, twin) < 1e-6


@pytest.mark.parametrize("foreach", [None, True])
@on_ranks()
def test_nothing_holds_a_gradient_after_it_was_clipped(foreach: bool | None) -> None:
    """It would stay in memory until Python collects garbage, beside what the optimizer needs."""
    model = models.ByteModel()
    with engines.engine(model, 3, compile=False) as engine:
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[0]))
        parameters = list(model.parameters())
        gc.collect()
        gc.disable()
        try:
            nn.utils.clip_grad_norm_(parameters, 0.1, foreach=foreach)
            held = [weakref.ref(p.grad) for p in parameters]
            for parameter in parameters:
                parameter.grad = None
            assert [one() for one in held if one() is not None] == []
        finally:
            gc.enable()


class Various(nn.Module):
    """Parameters of several dtypes; of most some rank has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3))
        self.row = nn.Parameter(torch.randn(1, 4, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, rank: int) -> torch.Tensor:
        total = torch.zeros((), device=models.device())
        for number, parameter in enumerate((self.weight, self.row, self.scale, self.wide)):
            total = total + (parameter * (number + rank - 1.5)).float().square().sum()
        return total


def _spoil(model: nn.Module, value: float) -> None:
    """Multiplies the last row of a gradient, which one rank has."""
    factors = torch.ones(7, 3, device=models.device())
    factors[-1] = value
    model.weight.grad.mul_(factors)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("wrong", [1.0, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("options", [EAGER, MODEL], ids=["eager", "model"])
@STAGES
@on_ranks()
def test_the_clipping_of_rows_is_torchs(stage: int, options: dict[str, Any], wrong: float) -> None:
    """Norms and gradients are those of whole ones, whatever the dtypes, and no gradient is bound for it."""
    torch.manual_seed(0)
    model, twin = models.pair(Various)
    with engines.engine(model, stage, master_dtype=None, **options) as engine:
        masters = list(model.parameters())

        def backward() -> None:
            for master in masters:
                master.grad = None
            with engine.training_step():
                engines.backward(engine, model(models.rank()))
            if wrong != 1.0:
                _spoil(model, wrong)

        for kind, read in itertools.product((1.0, 2.0, 3.5, math.inf), (False, True)):
            backward()
            for master, parameter in zip(masters, twin.parameters(), strict=True):
                parameter.grad = None if master.grad is None else master.grad.full_tensor().clone()
            assert not all(parameter.grad is None for parameter in twin.parameters())
            if not read:
                backward()  # the same gradients, and nobody has read them
            held = [master.grad for master in masters] if read else []
            versions = [None if grad is None else grad._version for grad in held]
            with engine.runtime.reads.alike():
                total = clip_norm(masters, 0.3, kind)
            with as_plain_tensors():
                bound = [master for master in masters if bound_gradient(master) is not None]
            assert read or wrong != 1.0 or bound == []
            expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.3, kind)
            if wrong != 1.0:
                with pytest.raises(RuntimeError, match="non-finite"), engine.runtime.reads.alike():
                    clip_norm(masters, 0.3, kind, error_if_nonfinite=True)
            assert total.dtype == expected.dtype
            torch.testing.assert_close(float(total), float(expected), rtol=1e-6, atol=0, equal_nan=True)
            assert all(grad is None or grad._version > v for grad, v in zip(held, versions, strict=True))
            for master, parameter in zip(masters, twin.parameters(), strict=True):
                whole = None if master.grad is None else master.grad.full_tensor()
                assert (whole is None) == (parameter.grad is None)
                if whole is not None:
                    torch.testing.assert_close(whole, parameter.grad, rtol=1e-6, atol=1e-7, equal_nan=True)


class Operators(TorchDispatchMode):
    """Counts the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Counted(models.Module):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        with Operators() as seen:
            self.clip_gradients(optimizer, *args, **kwargs)
        self.operators = seen.count


@ENDS
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@on_ranks()
def test_clipping_takes_one_operator_for_all_gradients(stage: int, algorithm: str) -> None:
    """One for each gradient would take the host longer than a step of a small model."""
    module = Counted()
    strategy = ZeroCompileStrategy(stage=stage, compile=False)
    models.fit(module, strategy, 1, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
    assert 0 < module.operators < len(list(module.parameters()))


class Plateau(Evaluated):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@on_ranks()
def test_plateau_scheduler() -> None:
    """A monitored metric of all ranks drives it."""
    module = Plateau()
    rates = []

    class Watch(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = group["lr"] or 0.1
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    data = models.Batches(models.rank(), 1)
    trainer = models.make_trainer(ZeroCompileStrategy(compile=False), max_epochs=3, callbacks=[Watch()])
    module.loss = lambda batch: 0 * models.Module.loss(module, batch) + 1  # type: ignore[method-assign]
    trainer.fit(module, data, data)
    assert rates == pytest.approx([0.1, 0.1, 0.01])


class Manual(models.Module):
    """Two optimizers, each with its own loss and parameters; backward twice before the first one's step."""

    automatic_optimization = False

    def __init__(self, toggle: bool = False) -> None:
        super().__init__()
        self.toggle = toggle
        self.other = nn.Linear(5, 3)

    def other_loss(self, batch: Tensor) -> Tensor:
        return self.other(batch[:, 1:].float()).square().mean() / 100

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, loss in ((first, self.loss), (second, self.other_loss)):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            self.manual_backward(loss(batch))
            self.manual_backward(loss(batch.flip(0, 1)))
            optimizer.step()
            assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
            optimizer.zero_grad()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.2), torch.optim.Adam(self.other.parameters(), lr=0.01)


@ENDS
@pytest.mark.parametrize("toggle", [False, True])
@pytest.mark.parametrize("options", [{"compile": False}, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_manual_optimization_with_two_optimizers(stage: int, toggle: bool, options: dict[str, Any]) -> None:
    """backward, backward, step equals DDP at every stage; gradients are None after the step."""
    module, twin = models.pair(Manual, toggle=toggle)
    trainer = models.fit(module, ZeroCompileStrategy(stage=stage, **options), 6)
    assert trainer.global_step == 6
    optimizers = twin.configure_optimizers()
    for step in range(3):
        for optimizer, loss in zip(optimizers, (twin.loss, twin.other_loss), strict=True):
            optimizer.zero_grad()
            for r in range(models.world()):
                batch = models.Batches(r)[step]
                ((loss(batch) + loss(batch.flip(0, 1))) / models.world()).backward()
            optimizer.step()
    assert models.deviation(module, twin) < 1e-6


class Kept(models.Module):
    """Never clears its gradients: each step adds to them, as in torch."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        assert all(p.grad is not None for p in self.model.parameters())


@STAGES
@on_ranks()
def test_keep_gradients(stage: int) -> None:
    """Gradients outlive the step and add up until ``zero_grad``."""
    module, twin = models.pair(Kept, lr=0.05)
    models.fit(module, ZeroCompileStrategy(stage=stage, keep_gradients=True, **AOT), 3)
    optimizer = twin.configure_optimizers()
    for step in range(3):
        for r in range(models.world()):
            (twin.loss(models.Batches(r)[step]) / models.world()).backward()
        optimizer.step()
    assert models.deviation(module, twin) < 1e-6
