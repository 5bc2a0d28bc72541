"""Every precision of the Trainer: DDP's numbers and dtypes, or the stated deviation; loss scaling over shards."""

from __future__ import annotations

import copy
import itertools
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
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.plugins.precision import MixedPrecision, ZeroCompileHalfPrecision, ZeroCompilePrecision
from tests import models
from tests.harness import Ranks

EAGER: dict[str, Any] = {"compile": False}
AOT: dict[str, Any] = {"compile": "blocks", "backend": "aot_eager"}
FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


class Recorded(models.Module):
    """Keeps the dtypes of what the model sees and makes, and the scale of the loss before each step."""

    fused = False

    def __init__(self) -> None:
        super().__init__(lr=1e-2)
        self.register_buffer("offset", torch.zeros(3))
        self.dtypes: dict[str, Any] = {}
        self.scales: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.scales.append(1.0 if scaler is None else scaler.get_scale())
        self.dtypes |= {"weight": self.model.head.weight.dtype, "buffer": self.offset.dtype}
        self.dtypes["activation"] = self.model(batch).dtype
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.dtypes["master"] = {p.dtype for p in self.parameters()}
        self.dtypes["grad"] = {p.grad.dtype for p in self.parameters()}

    def on_train_end(self) -> None:
        self.dtypes["state"] = {state["exp_avg"].dtype for state in self.trainer.optimizers[0].state.values()}

    def configure_optimizers(self) -> Any:
        # eps: one gradient (of the logits' common shift) is zero but for rounding, which Adam would blow up
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-3, fused=self.fused)


def _pair(kind: type[Recorded] = Recorded) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = kind()
    return module, copy.deepcopy(module)


def _arguments(precision: str, **scaling: Any) -> dict[str, Any]:
    """The Trainer's; the CPU's 16-mixed is a plugin, since Lightning makes bf16-mixed of the word."""
    if precision != "16-mixed":
        return {"precision": precision}
    where = models.device()
    return {"plugins": [LightningMixedPrecision("16-mixed", where, GradScaler(where, **scaling))]}


def _fit(module: L.LightningModule, strategy: Any, steps: int, **arguments: Any) -> L.Trainer:
    trainer = models.make_trainer(strategy, max_steps=steps, **arguments)
    trainer.fit(module, models.Batches(models.rank()), ckpt_path=arguments.pop("ckpt_path", None))
    return trainer


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


def _like_ddp(precision: str) -> None:
    weight, grad, limit = DDP[precision]
    start, ddp = _pair()
    _fit(ddp, "ddp", 6, **MORE, **_arguments(precision, **SCALING))
    plain = _pair()[0]
    _fit(plain, "ddp", 6, **MORE)
    assert models.deviation(ddp, start) > 1e-2
    assert precision == "32-true" or models.deviation(ddp, plain) > limit  # or the test cannot tell the precision
    if precision == "16-mixed":
        assert set(ddp.scales) == {2.0**19, 2.0**18} and ddp.scales[4:8:3] == [2.0**18, 2.0**19]  # it grew again
    for stage, options in ((1, EAGER), (2, EAGER), (3, EAGER), (1, AOT), (3, AOT)):
        module = _pair()[0]
        _fit(module, ZeroCompileStrategy(stage=stage, **options), 6, **MORE, **_arguments(precision, **SCALING))
        assert module.losses == pytest.approx(ddp.losses, abs=limit, rel=0)
        deviation = models.deviation(module, ddp)
        assert deviation <= limit, (stage, options, deviation)
        assert module.scales == ddp.scales
        assert module.dtypes == ddp.dtypes
        assert module.dtypes["weight"] is weight and module.dtypes["master"] == {grad} == module.dtypes["grad"]


@pytest.mark.parametrize(
    "precision", [pytest.param(name, marks=() if name == "bf16-mixed" else pytest.mark.long) for name in DDP]
)
def test_precision_is_ddps(ranks: Ranks, precision: str) -> None:
    """Losses, parameters, scales of the loss and every dtype are those of DDP, with accumulation and clipping."""
    ranks.run(_like_ddp, precision)


class Island(nn.Module):
    """A block with a part that autocast does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.exact = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, 10]
        x = x + torch.tanh(self.low(x))
        with torch.autocast(x.device.type, enabled=False):
            return x + self.exact(x.float())


def _island() -> None:
    start = models.Module(lambda: models.Stacked(Island), lr=0.5)
    ddp, plain = copy.deepcopy(start), copy.deepcopy(start)
    _fit(ddp, "ddp", 4, precision="bf16-mixed")
    _fit(plain, "ddp", 4)
    assert models.deviation(ddp, plain) > 1e-4
    for stage, options in ((1, AOT), (3, AOT), (3, EAGER)):
        module = copy.deepcopy(start)
        _fit(module, ZeroCompileStrategy(stage=stage, **options), 4, precision="bf16-mixed")
        deviation = models.deviation(module, ddp)
        assert deviation <= 1e-6, (stage, options, deviation)


def test_the_backward_of_a_float32_island_is_float32(ranks: Ranks) -> None:
    """torch.compile traces the backward under the forward's autocast unless told otherwise; eager code does not."""
    ranks.run(_island)


def _inductor() -> None:
    module, ddp = _pair()
    _fit(ddp, "ddp", 4, precision="bf16-mixed")
    _fit(module, ZeroCompileStrategy(stage=3), 4, precision="bf16-mixed")
    assert module.losses == pytest.approx(ddp.losses, abs=1e-3)
    assert models.deviation(module, ddp) < 1e-3  # it moved by 4e-2
    assert module.dtypes == ddp.dtypes


@pytest.mark.long
def test_bf16_mixed_with_inductor(ranks: Ranks) -> None:
    """Inductor may fuse casts away, so numbers are near DDP's (here 1e-7); dtypes are the same."""
    ranks.run(_inductor)


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


def _half_true(precision: str) -> None:
    dtype = FP16 if precision == "16-true" else BF16
    where, enabled = models.device(), precision == "16-true"
    start, twin = _pair(NoFloat)
    twin.to(where)
    scales = _half_reference(twin, dtype, GradScaler(where, enabled=enabled), 6)
    assert models.deviation(twin, start) > 1e-2
    for stage in (1, 3):
        module = _pair(NoFloat)[0]
        # copies between GPUs sum bfloat16 in float32: tests/gpu/test_kernels.py
        _fit(module, ZeroCompileStrategy(stage=stage, copy_engine=False, **AOT), 6, precision=precision)
        assert module.scales == scales
        assert models.deviation(module, twin) < 1e-6
        low = {"weight": dtype, "buffer": dtype, "activation": dtype}
        assert module.dtypes == low | {"master": {FP32}, "grad": {FP32}, "state": {FP32}}
    if enabled:
        assert scales[1] == scales[0] / 2  # the gradient 1 of a float16 loss overflows at torch's first scale
        plain = _pair(NoFloat)[0]
        plugin = ZeroCompileHalfPrecision("16-true", GradScaler(where, enabled=False))
        _fit(plain, ZeroCompileStrategy(stage=3, compile=False), 1, plugins=[plugin])
        assert models.deviation(plain, start) > 1e-3  # without a scale the first step is taken


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_true_half_precision(ranks: Ranks, precision: str) -> None:
    """Compute in half precision on casts of fp32 masters; float16 scales its loss (both unlike DDP's plugin)."""
    ranks.run(_half_true, precision)


# ---- loss scaling ----


def _head(module: nn.Module) -> Any:
    """The optimizer's value of a weight (the module's attribute is the gathered one)."""
    return dict(module.named_parameters())["model.head.weight"]


class Overflowing(Recorded):
    """In its third step one row of one rank overflows; keeps what every step made of this rank's state."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step != 2 or self.trainer.fit_loop._should_accumulate():
            return
        grad = _head(self).grad
        if not isinstance(grad, DTensor):
            grad[-1] = torch.inf
        elif models.rank() == models.world() - 1:
            grad.to_local()[-1] = torch.nan

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.cleared = getattr(self, "cleared", True) and all(p.grad is None for p in self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        tensors = [*self.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        if not self.trainer.fit_loop._should_accumulate():
            self.states = [*getattr(self, "states", []), [t.detach().clone() for t in local]]


class OverflowingFused(Overflowing):
    fused = True


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _skip(kind: type[Overflowing], accumulate: int) -> None:
    arguments = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.0 if kind.fused else 0.3}
    ddp = _pair(kind)[0]
    _fit(ddp, "ddp", 5, **arguments, **_arguments("16-mixed", init_scale=64.0))
    for stage in (1, 3):
        module = _pair(kind)[0]
        trainer = _fit(
            module, ZeroCompileStrategy(stage=stage, compile=False), 5, **arguments,
            **_arguments("16-mixed", init_scale=64.0),
        )  # fmt: skip
        states = module.states
        assert [_same(a, b) for a, b in itertools.pairwise(states)] == [False, True, False, False]
        assert module.cleared and trainer.global_step == 5
        assert module.scales == ddp.scales == [64.0] * 3 * accumulate + [32.0] * 2 * accumulate
        assert models.deviation(module, ddp) < 1e-6


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [Overflowing, OverflowingFused])
def test_skipped_step_changes_nothing(ranks: Ranks, kind: type[Overflowing], accumulate: int) -> None:
    """An overflow in one rank's rows: all ranks skip, parameters and states stay to the bit, training goes on as DDP's.

    The first of the optimizer's gradients is replicated, the one that overflows is sharded.
    """
    ranks.run(_skip, kind, accumulate)


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
                _head(self).grad.to_local()[0] = torch.inf
            before = [p.detach().to_local().clone() for p in self.parameters()]
            optimizer.step()
            after = [p.detach().to_local() for p in self.parameters()]
            skipped = batch_idx == 1 and number == 0
            assert _same(before, after) is skipped

    def configure_optimizers(self) -> Any:
        head = [p for name, p in self.named_parameters() if "head" in name]
        rest = [p for name, p in self.named_parameters() if "head" not in name]
        return torch.optim.SGD(head, lr=self.lr), torch.optim.AdamW(rest, lr=self.lr)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def on_train_end(self) -> None: ...


def _manual() -> None:
    for stage in (1, 3):
        module = _pair(Manual)[0]
        strategy = ZeroCompileStrategy(stage=stage, compile=False)
        _fit(module, strategy, 6, **_arguments("16-mixed", init_scale=64.0))
        assert module.scales == [64.0, 64.0, 64.0, 32.0, 32.0, 32.0]


def test_manual_optimization_under_one_scaler(ranks: Ranks) -> None:
    """Each optimizer takes or skips its own step; gradients of a window are unscaled once."""
    ranks.run(_manual)


def _resume(folder: str) -> None:
    scaling = {"init_scale": 2.0**19, "growth_interval": 3}
    torch.manual_seed(0)

    def fit(module: Recorded, strategy: Any, epochs: int, path: str | None = None) -> L.Trainer:
        trainer = models.make_trainer(strategy, max_epochs=epochs, **_arguments("16-mixed", **scaling))
        trainer.fit(module, models.Batches(models.rank(), 4), ckpt_path=path, weights_only=False)
        return trainer

    def ours() -> ZeroCompileStrategy:
        return ZeroCompileStrategy(stage=3, compile=False)

    whole, half = _pair()[0], _pair()[0]
    fit(whole, ours(), 2)
    fit(half, ours(), 1).save_checkpoint(f"{folder}/ours.ckpt")
    resumed = _pair()[0]
    fit(resumed, ours(), 2, f"{folder}/ours.ckpt")
    assert half.scales + resumed.scales == whole.scales and len(set(whole.scales)) > 2
    assert models.deviation(resumed, whole) == 0
    fit(_pair()[0], "ddp", 1).save_checkpoint(f"{folder}/ddp.ckpt")
    states = [torch.load(f"{folder}/{name}.ckpt", weights_only=False) for name in ("ours", "ddp")]
    assert states[0].keys() == states[1].keys() and states[0]["MixedPrecision"] == states[1]["MixedPrecision"]
    from_ddp = _pair()[0]
    fit(from_ddp, ours(), 2, f"{folder}/ddp.ckpt")
    assert from_ddp.scales == resumed.scales and models.deviation(from_ddp, whole) < 1e-6


def test_scaler_in_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """Scale and growth go on after a resume, to the bit; DDP's checkpoint has them under the same key."""
    ranks.run(_resume, str(tmp_path))


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


def _plugins() -> None:
    where = models.device()
    for plugin, words in (
        (Foreign("bf16-mixed", where), ("Foreign", "lightning_zerocompile.plugins.precision")),
        (type("Own", (Precision,), {})(), ("Own", "'bf16-true'")),
    ):
        with pytest.raises(MisconfigurationException) as error:
            _fit(Recorded(), ZeroCompileStrategy(compile=False), 1, plugins=[plugin])
        assert all(word in str(error.value) for word in words), error.value
    with pytest.raises(MisconfigurationException, match=r"`Scaler`.*ShardedGradScaler"):
        models.make_trainer(ZeroCompileStrategy(), plugins=[LightningMixedPrecision("16-mixed", where, Scaler(where))])
    for precision in ("16-true", "64-true"):
        strategy = ZeroCompileStrategy(compile=False, param_dtype=BF16)
        with pytest.raises(MisconfigurationException, match=f"{precision}.*param_dtype=torch.bfloat16"):
            _fit(Recorded(), strategy, 1, precision=precision)
    mine, module = Mine(), Recorded()
    trainer = _fit(module, ZeroCompileStrategy(compile=False), 2, plugins=[mine])
    assert trainer.precision_plugin is mine and mine.converted == 2
    given = GradScaler(where, init_scale=8.0, growth_interval=1)
    strategy = ZeroCompileStrategy(compile=False, precision_plugin=MixedPrecision("16-mixed", where, given))
    _fit(module, strategy, 2)
    assert module.scales == [1.0, 1.0, 8.0, 16.0]


def test_plugins_of_the_user(ranks: Ranks) -> None:
    """They work, or raise by name with the remedy."""
    ranks.run(_plugins)
