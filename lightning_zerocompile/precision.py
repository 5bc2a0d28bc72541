"""Precision plugins that leave the masters alone: the strategy gathers in the compute dtype instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning_zerocompile.engine import Engine


class StepsThroughEngine:
    """Lets the sharded model take the optimizer's step: unit by unit where the optimizer allows it."""

    engine: Engine | None = None  # set by the strategy while the model is sharded

    def optimizer_step(
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        wrapped = partial(self._wrap_closure, model, optimizer, closure)  # type: ignore[attr-defined]
        if self.engine is None:
            return optimizer.step(closure=wrapped, **kwargs)
        return self.engine.step(optimizer, wrapped, **kwargs)


class ZeroCompilePrecision(StepsThroughEngine, Precision):  # type: ignore[misc]
    """``32-true``."""


class ZeroCompileHalfPrecision(StepsThroughEngine, HalfPrecision):  # type: ignore[misc]
    """``bf16-true``: the model computes in bfloat16, masters and optimizer states stay in ``master_dtype``.

    Parameters are neither initialised nor kept in bfloat16: what is gathered is cast. Floating-point buffers become
    bfloat16, as with Lightning's own plugin.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        for submodule in module.modules():
            for name, buffer in submodule._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    submodule._buffers[name] = buffer.to(self._desired_input_dtype)
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


def convert_plugin(plugin: Precision | None) -> Precision | None:
    """Our plugin for one of Lightning's; others are returned as they are and judged in :func:`compute_dtype`."""
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        return ZeroCompileHalfPrecision("bf16-true")
    if type(plugin) is Precision:
        return ZeroCompilePrecision()
    return plugin


def compute_dtype(plugin: Precision, param_dtype: torch.dtype | None) -> torch.dtype | None:
    """What floating-point parameters are gathered in; ``None``: their own dtype.

    Raises:
        MisconfigurationException: the precision is not supported, or contradicts ``param_dtype``.
    """
    if isinstance(plugin, ZeroCompileHalfPrecision):
        if param_dtype not in (None, torch.bfloat16):
            raise MisconfigurationException(
                f"precision='bf16-true' computes in bfloat16 but `param_dtype={param_dtype}` asks for another dtype; "
                "leave one of the two at its default."
            )
        return torch.bfloat16
    if isinstance(plugin, ZeroCompilePrecision):
        return param_dtype
    raise MisconfigurationException(
        f"`strategy='zerocompile'` does not support precision={plugin.precision!r} ({type(plugin).__name__}) yet. Use "
        "'32-true' or 'bf16-true', or '32-true' with ZeroCompileStrategy(param_dtype=torch.bfloat16) for bfloat16 "
        "compute on inputs that you cast yourself."
    )
