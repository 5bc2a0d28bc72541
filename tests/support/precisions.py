"""What tests of precision share: modules that record dtypes and scales, and fits with Lightning's plugins."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from tests.support import models

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


def pair(kind: type[Recorded] = Recorded) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = kind()
    return module, copy.deepcopy(module)


def arguments(precision: str, **scaling: Any) -> dict[str, Any]:
    """The Trainer's; the CPU's 16-mixed is a plugin, since Lightning makes bf16-mixed of the word."""
    if precision != "16-mixed":
        return {"precision": precision}
    where = models.device()
    return {"plugins": [LightningMixedPrecision("16-mixed", where, GradScaler(where, **scaling))]}


def fit(module: L.LightningModule, strategy: Any, steps: int, **arguments: Any) -> L.Trainer:
    trainer = models.make_trainer(strategy, max_steps=steps, **arguments)
    trainer.fit(module, models.Batches(models.rank()), ckpt_path=arguments.pop("ckpt_path", None))
    return trainer


def head(module: nn.Module) -> Any:
    """The optimizer's value of a weight (the module's attribute is the gathered one)."""
    return dict(module.named_parameters())["model.head.weight"]


class Overflowing(Recorded):
    """In its third step one row of one rank overflows; keeps what every step made of this rank's state."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step != 2 or self.trainer.fit_loop._should_accumulate():
            return
        grad = head(self).grad
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


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# 257 and 261 on the two ranks need nine bits. Their mean is 259 in float32. Cast to bfloat16 first they are 256 and
# 260, whose mean is 258; the mean cast to bfloat16 is 260.
RAW = 257.0


class RawGradient(torch.autograd.Function):
    """`weight` in float32; its gradient is produced in float32 whatever the weight's own dtype is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.shape = weight.shape
        return x * weight.float().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0], (grads[0] * x).sum().expand(ctx.shape).clone()


class RawBlock(nn.Module):
    """One weight with a raw float32 gradient, one with an ordinary one, in given dtypes."""

    def __init__(self, dtype: torch.dtype, grad_dtype: Any) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
        self.scalar = nn.Parameter(torch.zeros((), dtype=dtype))
        self.inner = nn.Linear(2, 3, bias=False)  # float32 beside it
        self.inner.weight.data.zero_()
        if grad_dtype != "absent":
            self.raw.grad_dtype = grad_dtype
            self.scalar.grad_dtype = grad_dtype

    def forward(self, x: Tensor) -> Tensor:  # [1]
        y = RawGradient.apply(x, self.raw) + RawGradient.apply(x, self.scalar)
        return y + self.inner(x.expand(2)).sum()


class RawNet(nn.Module):
    def __init__(self, dtype: torch.dtype, grad_dtype: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RawBlock(dtype, grad_dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)


class RawWhole(nn.Module):
    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.model = RawNet(*arguments)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)
