"""What tests of checkpoints share: a module with all kinds of state, its data, and comparisons to the bit."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.checkpoint.files import AtomicCheckpointIO
from lightning_zerocompile.checkpoint.state import full_optimizer_state, full_state_dict
from tests.support import models


class Saved(models.Module):
    """AdamW with a schedule, hyperparameters, a buffer, tied weights and something of the user's in the checkpoint."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__(optimizer="adamw", lr=lr)
        self.save_hyperparameters()
        self.model.head.weight = self.model.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.restored: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        # eps: one gradient (of the logits' common shift) is zero but for rounding, which Adam would blow up
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = "user"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored.append(checkpoint["mine"])


def data() -> models.Batches:
    return models.Batches(models.rank(), 4)


def load(path: str) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return checkpoint


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def strategy(kind: str, stage: int, **options: Any) -> ZeroCompileStrategy:
    return ZeroCompileStrategy(stage=stage, state_dict_type=kind, **({"compile": False} | options))  # type: ignore[arg-type]


def fit(module: L.LightningModule, strategy: Any, epochs: int = 1, path: str | None = None, **more: Any) -> L.Trainer:
    trainer = models.make_trainer(strategy, max_epochs=epochs, limit_val_batches=0, **more)
    trainer.fit(module, data(), ckpt_path=path)
    return trainer


class Look(L.Callback):
    """All of the training's state on rank 0, before the first step or after the last."""

    def __init__(self, when: str) -> None:
        self.when, self.state = when, {}

    def _look(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        state = {
            "weights": full_state_dict(module, keep=True),
            "optimizers": [full_optimizer_state(o, keep=True)["state"] for o in trainer.optimizers],
            "rates": [group["lr"] for o in trainer.optimizers for group in o.param_groups],
            "schedules": [c.scheduler.last_epoch for c in trainer.lr_scheduler_configs],
            "layout": [
                {name: getattr(value, "placements", None) for name, value in o.state[p].items()}
                for o in trainer.optimizers
                for group in o.param_groups
                for p in group["params"]
                if isinstance(p, DTensor) and p.dim() > 0
            ],
            "loops": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_progress.total.completed),
        }
        self.state = copy.deepcopy(state)  # counters and 0-dim moments are the live ones

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.when == "start":
            self._look(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.when == "end":
            self._look(trainer, module)


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Where two states are not equal to the bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.cpu(), right.cpu())
        return [] if same else [where]
    if isinstance(left, dict) and isinstance(right, dict):
        missing = [f"{where}[{key!r}]" for key in left.keys() ^ right.keys()]
        return missing + [d for k in left.keys() & right.keys() for d in differences(left[k], right[k], f"{where}.{k}")]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        return [d for i, (a, b) in enumerate(zip(left, right, strict=True)) for d in differences(a, b, f"{where}.{i}")]
    return [] if left == right else [f"{where}: {left!r} {right!r}"]


def another() -> Saved:
    """The same module with other values: all of it must come from the checkpoint."""
    other = Saved()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    return other


class FullDisk(AtomicCheckpointIO):
    """A plugin of the user's that cannot write."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")
