"""Fabric's precisions for sharded modules: gathered values are cast, the masters stay as they are.

`32-true`, `64-true`, `bf16-mixed` and `16-mixed` are Fabric's; `bf16-true` and `16-true` compute in half precision on
float32 masters, and `16-true` scales no loss, as under Fabric's other strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zerocompile.engine import Engine
from lightning_zerocompile.plugins.grad_scaler import ShardedGradScaler
from lightning_zerocompile.plugins.precision import agreed_dtype, cast_buffers
from lightning_zerocompile.sharding.islands import find_islands

_BACKWARDS = "zerocompile_backwards"  # entry of the scaler's state of an optimizer: those before it was unscaled


class FabricHalfPrecision(HalfPrecision):
    """``bf16-true`` and ``16-true``: buffers, inputs and gathered values are cast; the masters are not."""

    fp32_modules: Sequence[str | type[nn.Module]] = ()  # the strategy's option

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        islands = find_islands(module, self.fp32_modules, self._desired_input_dtype)
        cast_buffers(module, self._desired_input_dtype, islands)
        return module

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


def convert_plugin(plugin: Precision | None) -> Precision | None:
    """Our plugin for one of Fabric's. Others are returned as they are; :func:`compute_dtype` may refuse them."""
    if type(plugin) is HalfPrecision:
        return FabricHalfPrecision(plugin.precision)
    if type(plugin) is MixedPrecision and plugin.scaler is not None:
        plugin.scaler = ShardedGradScaler.like(plugin.scaler)
    return plugin


def compute_dtype(plugin: Precision, param_dtype: torch.dtype | None) -> torch.dtype | None:
    """What floating-point parameters are gathered in; ``None``: their own dtype.

    Raises:
        MisconfigurationException: the precision is not supported, or contradicts ``param_dtype``.
    """
    if type(plugin) not in (Precision, DoublePrecision, MixedPrecision) and not isinstance(plugin, FabricHalfPrecision):
        raise MisconfigurationException(
            f"`strategy='zerocompile'` does not support the precision plugin {type(plugin).__name__}: it does not know "
            "that parameters and gradients are sharded. Use Fabric's precision '32-true', '64-true', 'bf16-true', "
            "'16-true', 'bf16-mixed' or '16-mixed'."
        )
    fixed = plugin._desired_input_dtype if isinstance(plugin, FabricHalfPrecision) else None
    return agreed_dtype(str(plugin.precision), fixed, param_dtype)


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """What autocast computes in during a step; ``None``: there is no autocast."""
    return plugin._desired_input_dtype if isinstance(plugin, MixedPrecision) else None


def unscale(engine: Engine, scaler: GradScaler, optimizer: Optimizer, backwards: int) -> None:
    """Makes the gradients ready and unscales them, once for each step: clipping needs that before the step.

    Args:
        backwards: how many backwards there were until now.

    Raises:
        RuntimeError: there was a backward after the gradients were unscaled, and no step, so its part is still scaled.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        engine.steps.before(optimizer)
        scaler.unscale_(optimizer)
        state[_BACKWARDS] = backwards
    elif state.get(_BACKWARDS) != backwards:
        raise RuntimeError(
            f"The gradients of this {type(optimizer).__name__} were clipped, and a further backward came before the "
            "optimizer's step: its gradients are scaled by the loss scale, and the loss scaler unscales once a step. "
            "Clip after the last backward, and call `optimizer.step()` after each clipping. It skips the update where "
            "gradients are not finite."
        )


def scaled_step(
    engine: Engine, scaler: ShardedGradScaler, optimizer: Optimizer, closure: Callable[[], Any], backwards: int
) -> Any:
    """A step that all ranks skip if the gradients of one have overflowed. Returns what ``closure`` returns.

    Raises:
        RuntimeError: see :func:`unscale`.
    """
    result = closure()
    unscale(engine, scaler, optimizer, backwards)
    if scaler.skips(optimizer):
        engine.steps.skip(optimizer)
    else:
        engine.step(optimizer, lambda: None)
    scaler.update()
    return result
