"""Clipping: how torch's is called, and what of it goes with an optimizer that updates inside the backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zerocompile.optim.in_backward import CLIPPING, OPTION


def clip_value_in_backward(trainer: pl.Trainer, module: pl.LightningModule, plugin: Precision) -> float | None:
    """What gradients are clamped to before their update; ``None``: nothing.

    Raises:
        MisconfigurationException: the run scales its loss, or clips in a way that needs all gradients at once.
    """
    refuse_scaling(getattr(plugin, "scaler", None), str(plugin.precision))
    if module.automatic_optimization and is_overridden("configure_gradient_clipping", module):
        raise MisconfigurationException(CLIPPING.format(f"`{type(module).__name__}.configure_gradient_clipping`"))
    value = trainer.gradient_clip_val
    if not value or value <= 0:
        return None
    if trainer.gradient_clip_algorithm != "value":
        raise MisconfigurationException(CLIPPING.format(f"Clipping by norm (`gradient_clip_val={value}`)"))
    return float(value)


def clip_norm(parameters: Iterable[Tensor], max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` with one operation for all gradients, where each takes the host its time.

    By itself torch does that for plain tensors alone.
    """
    listed = list(parameters)
    return torch.nn.utils.clip_grad_norm_(listed, max_norm, *args, **{"foreach": _foreach(listed), **kwargs})


def clip_value(parameters: Iterable[Tensor], value: float) -> None:
    """``torch.nn.utils.clip_grad_value_`` in the same way."""
    listed = list(parameters)
    torch.nn.utils.clip_grad_value_(listed, value, foreach=_foreach(listed))


def _foreach(parameters: list[Tensor]) -> bool | None:
    """torch's ``foreach``; ``None``: torch decides."""
    return True if all(isinstance(parameter, DTensor) for parameter in parameters) else None


def refuse_scaling(scaler: object, precision: str) -> None:
    """Raises MisconfigurationException for a loss scaler that is on."""
    if scaler is not None and scaler.is_enabled():  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"{OPTION} does not work with precision={precision!r}, which scales the loss: whether a step is skipped is "
            "known only when all gradients are there. Use bfloat16 ('bf16-true', 'bf16-mixed'), or drop the option."
        )
