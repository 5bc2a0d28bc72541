"""Every precision of the Trainer: DDP's numbers and dtypes, or the stated deviation; loss scaling over shards."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.plugins.precision import MixedPrecision, ZeroCompileHalfPrecision, ZeroCompilePrecision
from tests.support import graph_breaks, models, precisions
from tests.support.graph_breaks import WIDTH
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, reference
from tests.support.precisions import BF16, FP16, FP32, FP64, Overflowing, Recorded

# ---- against DDP in the same process group ----

# precision: what the model sees; gradients = masters = optimizer states; the largest deviation of losses and parameters
# from DDP with Lightning's own plugin, after 6 accumulated, clipped steps of AdamW. Without autocast training ends
# more than 1e-4 away from bf16-mixed.
DDP = {
    "32-true": (FP32, FP32, 1e-6),
    "64-true": (FP64, FP64, 1e-14),
    "bf16-mixed": (FP32, FP32, 1e-6),
    "16-mixed": (FP32, FP32, 1e-6),
}
SCALING = {"init_scale": 2.0**19, "growth_interval": 2}  # the first steps overflow in float16, later ones do not
MORE: dict[str, Any] = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    "precision", [pytest.param(name, marks=() if name == "bf16-mixed" else pytest.mark.long) for name in DDP]
)
@on_ranks()
def test_precision_is_ddps(precision: str) -> None:
    """Losses, parameters, scales of the loss and every dtype are those of DDP, with accumulation and clipping."""
    weight, grad, limit = DDP[precision]
    start, ddp = precisions.pair()
    precisions.fit(ddp, "ddp", 6, **MORE, **precisions.arguments(precision, **SCALING))
    plain = precisions.pair()[0]
    precisions.fit(plain, "ddp", 6, **MORE)
    assert models.deviation(ddp, start) > 1e-2
    assert precision == "32-true" or models.deviation(ddp, plain) > limit  # or the test cannot tell the precision
    if precision == "16-mixed":
        assert set(ddp.scales) == {2.0**19, 2.0**18} and ddp.scales[4:8:3] == [2.0**18, 2.0**19]  # it grew again
    for stage, options in ((1, EAGER), (2, EAGER), (3, EAGER), (1, AOT), (3, AOT)):
        module = precisions.pair()[0]
        precisions.fit(
            module, ZeroCompileStrategy(stage=stage, **options), 6, **MORE, **precisions.arguments(precision, **SCALING)
        )
        assert module.losses == pytest.approx(ddp.losses, abs=limit, rel=0)
        deviation = models.deviation(module, ddp)
        assert deviation <= limit, (stage, options, deviation)
        assert module.scales == ddp.scales
        assert module.dtypes == ddp.dtypes
        assert module.dtypes["weight"] is weight and module.dtypes["master"] == {grad} == module.dtypes["grad"]


class Island(nn.Module):
    """A block with a part that autocast does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.exact = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, 10]
        x = x + torch.tanh(self.low(x))
        with torch.autocast(x.device.type, enabled=False):
            return x + self.exact(x.float())


@on_ranks()
def test_the_backward_of_a_float32_island_is_float32() -> None:
    """torch.compile traces the backward under the forward's autocast unless told otherwise; eager code does not."""
    start = models.Module(lambda: models.Stacked(Island), lr=0.5)
    ddp, plain = copy.deepcopy(start), copy.deepcopy(start)
    precisions.fit(ddp, "ddp", 4, precision="bf16-mixed")
    precisions.fit(plain, "ddp", 4)
    assert models.deviation(ddp, plain) > 1e-4
    for stage, options in ((1, AOT), (3, AOT), (3, EAGER)):
        module = copy.deepcopy(start)
        precisions.fit(module, ZeroCompileStrategy(stage=stage, **options), 4, precision="bf16-mixed")
        deviation = models.deviation(module, ddp)
        assert deviation <= 1e-6, (stage, options, deviation)


@pytest.mark.long
@on_ranks()
def test_bf16_mixed_with_inductor() -> None:
    """Inductor may fuse casts away, so numbers are near DDP's (here 1e-7); dtypes are the same."""
    module, ddp = precisions.pair()
    precisions.fit(ddp, "ddp", 4, precision="bf16-mixed")
    precisions.fit(module, ZeroCompileStrategy(stage=3), 4, precision="bf16-mixed")
    assert module.losses == pytest.approx(ddp.losses, abs=1e-3)
    assert models.deviation(module, ddp) < 1e-3  # it moved by 4e-2
    assert module.dtypes == ddp.dtypes


class NoFloat(Recorded):
    """Its loss is of the model's own dtype."""

    def loss(self, batch: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _half_reference(twin: Recorded, dtype: torch.dtype, scaler: GradScaler, steps: int) -> list[float]:
    """Casts of fp32 masters, gradients averaged in ``dtype``, torch's own scaler on whole gradients."""
    optimizer = twin.configure_optimizers()
    scales = []
    for step in range(steps):
        low = copy.deepcopy(twin).to(dtype)
        total: dict[str, Tensor] = {}
        scales.append(scaler.get_scale() if scaler.is_enabled() else 1.0)
        for r in range(models.world()):
            low.zero_grad()
            scaler.scale(low.loss(models.Batches(r)[step])).backward()
            for name, p in low.named_parameters():
                total[name] = p.grad + total[name] if r else p.grad.clone()
        for name, p in twin.named_parameters():
            p.grad = (total[name] / models.world()).to(p.dtype)
        scaler.step(optimizer)
        scaler.update()
    return scales


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@on_ranks(2)  # a sum of halves over more ranks depends on their order
def test_true_half_precision(precision: str) -> None:
    """Compute in half precision on casts of fp32 masters; float16 scales its loss (both unlike DDP's plugin)."""
    dtype = FP16 if precision == "16-true" else BF16
    where, enabled = models.device(), precision == "16-true"
    start, twin = precisions.pair(NoFloat)
    twin.to(where)
    scales = _half_reference(twin, dtype, GradScaler(where, enabled=enabled), 6)
    assert models.deviation(twin, start) > 1e-2
    for stage in (1, 3):
        module = precisions.pair(NoFloat)[0]
        # copies between GPUs sum bfloat16 in float32: tests/gpu/test_kernels.py
        precisions.fit(module, ZeroCompileStrategy(stage=stage, copy_engine=False, **AOT), 6, precision=precision)
        assert module.scales == scales
        assert models.deviation(module, twin) < 1e-6
        low = {"weight": dtype, "buffer": dtype, "activation": dtype}
        assert module.dtypes == low | {"master": {FP32}, "grad": {FP32}, "state": {FP32}}
    if enabled:
        assert scales[1] == scales[0] / 2  # the gradient 1 of a float16 loss overflows at torch's first scale
        plain = precisions.pair(NoFloat)[0]
        plugin = ZeroCompileHalfPrecision("16-true", GradScaler(where, enabled=False))
        precisions.fit(plain, ZeroCompileStrategy(stage=3, compile=False), 1, plugins=[plugin])
        assert models.deviation(plain, start) > 1e-3  # without a scale the first step is taken


# ---- loss scaling ----


class OverflowingFused(Overflowing):
    fused = True


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [Overflowing, OverflowingFused])
@on_ranks()
def test_skipped_step_changes_nothing(kind: type[Overflowing], accumulate: int) -> None:
    """An overflow in one rank's rows: all ranks skip, parameters and states stay to the bit, training goes on as DDP's.

    The first of the optimizer's gradients is replicated, the one that overflows is sharded.
    """
    arguments = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.0 if kind.fused else 0.3}
    ddp = precisions.pair(kind)[0]
    precisions.fit(ddp, "ddp", 5, **arguments, **precisions.arguments("16-mixed", init_scale=64.0))
    for stage in (1, 3):
        module = precisions.pair(kind)[0]
        trainer = precisions.fit(
            module, ZeroCompileStrategy(stage=stage, compile=False), 5, **arguments,
            **precisions.arguments("16-mixed", init_scale=64.0),
        )  # fmt: skip
        states = module.states
        assert [precisions.same(a, b) for a, b in itertools.pairwise(states)] == [False, True, False, False]
        assert module.cleared and trainer.global_step == 5
        assert module.scales == ddp.scales == [64.0] * 3 * accumulate + [32.0] * 2 * accumulate
        assert models.deviation(module, ddp) < 1e-6


class Manual(Recorded):
    """Two optimizers under one scaler; the first one's gradients overflow in the second step, on one rank."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
            optimizer.zero_grad()
            with self.trainer.strategy.coalesce_grad_reduction():
                self.manual_backward(self.loss(batch))
                self.manual_backward(self.loss(batch.flip(0)))
            if batch_idx == 1 and number == 0 and models.rank() == 0:
                precisions.head(self).grad.to_local()[0] = torch.inf
            before = [p.detach().to_local().clone() for p in self.parameters()]
            optimizer.step()
            after = [p.detach().to_local() for p in self.parameters()]
            skipped = batch_idx == 1 and number == 0
            assert precisions.same(before, after) is skipped

    def configure_optimizers(self) -> Any:
        head = [p for name, p in self.named_parameters() if "head" in name]
        rest = [p for name, p in self.named_parameters() if "head" not in name]
        return torch.optim.SGD(head, lr=self.lr), torch.optim.AdamW(rest, lr=self.lr)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def on_train_end(self) -> None: ...


@on_ranks()
def test_manual_optimization_under_one_scaler() -> None:
    """Each optimizer takes or skips its own step; gradients of a window are unscaled once."""
    for stage in (1, 3):
        module = precisions.pair(Manual)[0]
        strategy = ZeroCompileStrategy(stage=stage, compile=False)
        precisions.fit(module, strategy, 6, **precisions.arguments("16-mixed", init_scale=64.0))
        assert module.scales == [64.0, 64.0, 64.0, 32.0, 32.0, 32.0]


@on_ranks()
def test_scaler_in_checkpoints(tmp_path: Path) -> None:
    """Scale and growth go on after a resume, to the bit; DDP's checkpoint has them under the same key."""
    folder = str(tmp_path)
    scaling = {"init_scale": 2.0**19, "growth_interval": 3}
    torch.manual_seed(0)

    def fit(module: Recorded, strategy: Any, epochs: int, path: str | None = None) -> L.Trainer:
        trainer = models.make_trainer(strategy, max_epochs=epochs, **precisions.arguments("16-mixed", **scaling))
        trainer.fit(module, models.Batches(models.rank(), 4), ckpt_path=path, weights_only=False)
        return trainer

    def ours() -> ZeroCompileStrategy:
        return ZeroCompileStrategy(stage=3, compile=False)

    whole, half = precisions.pair()[0], precisions.pair()[0]
    fit(whole, ours(), 2)
    fit(half, ours(), 1).save_checkpoint(f"{folder}/ours.ckpt")
    resumed = precisions.pair()[0]
    fit(resumed, ours(), 2, f"{folder}/ours.ckpt")
    assert half.scales + resumed.scales == whole.scales and len(set(whole.scales)) > 2
    assert models.deviation(resumed, whole) == 0
    fit(precisions.pair()[0], "ddp", 1).save_checkpoint(f"{folder}/ddp.ckpt")
    states = [torch.load(f"{folder}/{name}.ckpt", weights_only=False) for name in ("ours", "ddp")]
    assert states[0].keys() == states[1].keys() and states[0]["MixedPrecision"] == states[1]["MixedPrecision"]
    from_ddp = precisions.pair()[0]
    fit(from_ddp, ours(), 2, f"{folder}/ddp.ckpt")
    # DDP divides before it sums: that is the same for halves and fourths, and for thirds but for the last bit
    tolerance = 1e-5 if models.world() == 3 else 1e-6
    assert from_ddp.scales == resumed.scales and models.deviation(from_ddp, whole) < tolerance


# ---- plugins of the user ----


class Scaler(GradScaler):
    """Rules of its own."""


class Foreign(LightningMixedPrecision):
    """Derived from Lightning's."""


class Mine(ZeroCompilePrecision):
    """Derived from ours: works."""

    precision = "32-true"
    converted = 0

    def convert_input(self, data: Any) -> Any:
        self.converted += 1
        return data


@on_ranks()
def test_plugins_of_the_user() -> None:
    """They work, or raise by name with the remedy."""
    where = models.device()
    for plugin, words in (
        (Foreign("bf16-mixed", where), ("Foreign", "lightning_zerocompile.plugins.precision")),
        (type("Own", (Precision,), {})(), ("Own", "'bf16-true'")),
    ):
        with pytest.raises(MisconfigurationException) as error:
            precisions.fit(Recorded(), ZeroCompileStrategy(compile=False), 1, plugins=[plugin])
        assert all(word in str(error.value) for word in words), error.value
    with pytest.raises(MisconfigurationException, match=r"`Scaler`.*ShardedGradScaler"):
        models.make_trainer(ZeroCompileStrategy(), plugins=[LightningMixedPrecision("16-mixed", where, Scaler(where))])
    for precision in ("16-true", "64-true"):
        strategy = ZeroCompileStrategy(compile=False, param_dtype=BF16)
        with pytest.raises(MisconfigurationException, match=f"{precision}.*param_dtype=torch.bfloat16"):
            precisions.fit(Recorded(), strategy, 1, precision=precision)
    mine, module = Mine(), Recorded()
    trainer = precisions.fit(module, ZeroCompileStrategy(compile=False), 2, plugins=[mine])
    assert trainer.precision_plugin is mine and mine.converted == 2
    given = GradScaler(where, init_scale=8.0, growth_interval=1)
    strategy = ZeroCompileStrategy(compile=False, precision_plugin=MixedPrecision("16-mixed", where, given))
    precisions.fit(module, strategy, 2)
    assert module.scales == [1.0, 1.0, 8.0, 16.0]


# ---- beside autocast ----


class _OtherHalf(nn.Module):
    """A frozen base in the half precision that autocast does not compute in, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).half().requires_grad_(False)
        self.added = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [..., WIDTH]
        return x + torch.tanh(self.base(x)) + self.added(x)


def _loss(twin: Any, batch: Tensor) -> Tensor:
    with torch.autocast(models.device(), dtype=torch.bfloat16):
        return twin.loss(batch)  # type: ignore[no-any-return]


class _Reading(models.Module):
    """Its step reads numbers of parameters in float16, too."""

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        norms = [float(p.norm()) for name, p in self.named_parameters() if "base.weight" in name]
        assert len(norms) == 3 and min(norms) > 0.1
        return super().training_step(batch, number)


@pytest.mark.parametrize("options", [EAGER, AOT, MODEL], ids=["eager", "blocks", "model"])
@pytest.mark.parametrize("kind", [models.Module, _Reading])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_the_other_half_precision_beside_autocast(stage: int, kind: Any, options: dict[str, Any]) -> None:
    """Autocast joins no tensors of the half precision that it does not compute in; communication has to."""
    module, twin = models.pair(kind, model=partial(graph_breaks.Net, _OtherHalf))
    models.fit(module, ZeroCompileStrategy(stage=stage, **options), 3, precision="bf16-mixed")
    reference(twin, 3, _loss)
    assert len(module.losses) == 3
    assert models.deviation(module, twin) <= 1e-6
