"""What of the Trainer's settings goes with an optimizer that updates inside the backward."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

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


def refuse_scaling(scaler: object, precision: str) -> None:
    """Raises MisconfigurationException for a loss scaler that is on."""
    if scaler is not None and scaler.is_enabled():  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"{OPTION} does not work with precision={precision!r}, which scales the loss: whether a step is skipped is "
            "known only when all gradients are there. Use bfloat16 ('bf16-true', 'bf16-mixed'), or drop the option."
        )
