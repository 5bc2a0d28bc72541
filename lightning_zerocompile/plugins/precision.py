"""Precision plugins that leave the masters alone: the strategy gathers in the compute dtype instead.

| precision    | gathered (the model sees) | autocast | masters, optimizer states | loss scaling |
|--------------|---------------------------|----------|---------------------------|--------------|
| `32-true`    | own dtype                 |          | own dtype                 |              |
| `64-true`    | float64                   |          | float64                   |              |
| `bf16-true`  | bfloat16                  |          | `master_dtype` (float32)  |              |
| `16-true`    | float16                   |          | `master_dtype` (float32)  | dynamic      |
| `bf16-mixed` | own dtype (float32)       | bfloat16 | own dtype (float32)       |              |
| `16-mixed`   | own dtype (float32)       | float16  | own dtype (float32)       | dynamic      |

The mixed precisions are DDP's: the same casts of the same float32 parameters, and float32 gradients that are reduced in
float32. At stage 3 some gathers move the cast value: half the bytes, and the same bits as autocast's cast. These are
the gathers of each weight and bias of a ``torch.nn.Linear`` or ``torch.nn.Conv1d|2d|3d`` (of exactly that class, and
not tied) that until the third training step was only used under autocast, in the layer itself. Everything else moves as
float32, and so does everything inside ``full_parameters`` and inside a window that holds what it has gathered. If code
reads such a weight in another way later, its unit is gathered again, in float32. At stages 1 and 2 the one gathered
value serves any read, so it is float32. ``param_dtype`` and ``reduce_dtype`` ask for fewer bytes, with FSDP2's
numerics. Code outside compiled regions keeps the casts of the weights until the backward. The true half precisions
differ from DDP's. DDP keeps the optimizer's values in half precision, too, and scales no loss. (With
``master_dtype=None`` so does this strategy keep them, for a model whose own parameters are of that dtype.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import precision as lightning_precision
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zerocompile.plugins.clipping import clip_norm, clip_value
from lightning_zerocompile.plugins.grad_scaler import ShardedGradScaler
from lightning_zerocompile.sharding.islands import Islands, find_islands

if TYPE_CHECKING:
    from lightning_zerocompile.engine import Engine


class StepsThroughEngine(Precision):
    """Lets the sharded model take the optimizer's step: unit by unit where the optimizer allows it.

    With a scaler the loss is scaled, and a step whose gradients overflowed on any rank is skipped on all of them:
    parameters and optimizer states stay as they are, to the bit. Gradients are unscaled right after the closure, before
    ``on_before_optimizer_step`` and clipping. The scaler's state is in the checkpoint, under DDP's key.
    """

    engine: Engine | None = None  # set by the strategy while the model is sharded
    fp32_modules: Sequence[str | type[nn.Module]] = ()  # the strategy's option
    scaler: GradScaler | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "engine": None}  # as the strategy's: a copy of the Trainer has no sharded model

    def restore_module(self) -> None:
        """Takes back what ``convert_module`` has changed beside the parameters; called when nothing is sharded."""

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        scaled = tensor if self.scaler is None else self.scaler.scale(tensor)
        return Precision.pre_backward(self, scaled, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is not None and self.scaler.is_enabled():
            return self._scaled_step(self.scaler, optimizer, model, closure, **kwargs)
        wrapped = partial(self._wrap_closure, model, optimizer, closure)
        return self._step(optimizer, wrapped, model.automatic_optimization, **kwargs)

    def _step(
        self, optimizer: Optimizer, closure: Callable[[], Any], runs_backward: bool = False, **kwargs: Any
    ) -> Any:
        if self.engine is None:
            return optimizer.step(closure=closure, **kwargs)
        return self.engine.steps.step(optimizer, closure, runs_backward, **kwargs)

    def _scaled_step(
        self,
        scaler: GradScaler,
        optimizer: Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if not isinstance(scaler, ShardedGradScaler):
            raise MisconfigurationException(
                f"The precision plugin's scaler was replaced by a {type(scaler).__name__}, which knows nothing of "
                "shards. Use lightning_zerocompile.plugins.grad_scaler.ShardedGradScaler.like(scaler)."
            )
        result = closure()
        if result is None and model.automatic_optimization:  # training_step returned None: there was no backward
            return result
        if self.engine is not None:
            self.engine.steps.before(optimizer)
        scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        output = None
        if not scaler.skips(optimizer):
            output = self._step(optimizer, lambda: None, **kwargs)
        elif self.engine is not None:
            self.engine.steps.skip(optimizer)
        scaler.update()
        return output

    @override
    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if self.engine is not None:
            self.engine.reduce_pending("Clipping")
            if self.engine.steps.in_backward is not None:
                self.engine.steps.in_backward.clip(optimizer, *args, **kwargs)
                return
        alike = nullcontext() if self.engine is None else self.engine.runtime.reads.alike()
        with alike:
            Precision.clip_gradients(self, optimizer, *args, **kwargs)  # a fused optimizer sees unscaled ones, too

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_norm(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_value(self.main_params(optimizer), clip_val)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


class ZeroCompilePrecision(StepsThroughEngine):
    """``32-true``."""


class ZeroCompileDoublePrecision(StepsThroughEngine, DoublePrecision):
    """``64-true``: parameters, buffers, optimizer states and communication are float64."""


class ZeroCompileHalfPrecision(StepsThroughEngine, HalfPrecision):
    """``bf16-true`` and ``16-true``: the model computes in half precision, the optimizer in ``master_dtype``.

    Parameters are neither initialised nor kept in half precision: gathered values are cast. Floating-point buffers
    become half precision, as with Lightning's own plugin, and ``LightningModule.dtype`` says so. When the module is
    made whole again its parameters are the masters, and buffers and ``dtype`` have their old dtypes.

    Args:
        precision: ``"bf16-true"`` or ``"16-true"``.
        scaler: of the loss, for ``"16-true"`` only; default: torch's GradScaler. ``GradScaler(enabled=False)``: the
            loss is not scaled.

    Raises:
        MisconfigurationException: a scaler was passed for bfloat16, or the scaler is not torch's.
    """

    def __init__(
        self, precision: Literal["bf16-true", "16-true"] = "16-true", scaler: GradScaler | None = None
    ) -> None:
        super().__init__(precision)
        self._restore: list[Callable[[], None]] = []
        if precision == "16-true":
            self.scaler = ShardedGradScaler.like(scaler or GradScaler(device=_scaler_device()))
        elif scaler is not None:
            raise MisconfigurationException("precision='bf16-true' needs no loss scaling; drop the scaler.")

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        islands = find_islands(module, self.fp32_modules, self._desired_input_dtype)
        for submodule in module.modules():
            if isinstance(submodule, _DeviceDtypeModuleMixin):
                self._restore.append(partial(setattr, submodule, "_dtype", submodule._dtype))
                submodule._dtype = self._desired_input_dtype
        self._restore += cast_buffers(module, self._desired_input_dtype, islands)
        return module

    @override
    def restore_module(self) -> None:
        for restore in self._restore:
            restore()
        self._restore = []

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


class MixedPrecision(StepsThroughEngine, lightning_precision.MixedPrecision):  # type: ignore[misc]
    """``bf16-mixed`` and ``16-mixed``, which are DDP's: see the table above.

    The class has the name of Lightning's, since that is the key of the scaler's state in a checkpoint.
    """

    def __init__(
        self, precision: Literal["16-mixed", "bf16-mixed"], device: str, scaler: GradScaler | None = None
    ) -> None:
        super().__init__(precision, device, scaler)
        if self.scaler is not None:
            self.scaler = ShardedGradScaler.like(self.scaler)


def cast_buffers(module: nn.Module, dtype: torch.dtype, islands: Islands) -> list[Callable[[], None]]:
    """Casts floating-point buffers, but for those of islands; returns functions that take that back."""
    restore: list[Callable[[], None]] = []
    for path, submodule in module.named_modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and buffer.is_floating_point() and not islands.has(path):
                restore.append(partial(_cast_buffer, submodule, name, buffer.dtype))
                _cast_buffer(submodule, name, dtype)
    return restore


def _cast_buffer(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    buffer = module._buffers.get(name)
    if buffer is not None:
        module._buffers[name] = buffer.to(dtype)


def _scaler_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"  # GradScaler only checks it: the scale lives with the loss


def convert_plugin(plugin: Precision | None) -> Precision | None:
    """Our plugin for one of Lightning's. Others are returned as they are; :func:`compute_dtype` may refuse them."""
    if type(plugin) is HalfPrecision:
        return ZeroCompileHalfPrecision(plugin.precision)
    if type(plugin) is DoublePrecision:
        return ZeroCompileDoublePrecision()
    if type(plugin) is lightning_precision.MixedPrecision:
        return MixedPrecision(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[arg-type]
    if type(plugin) is Precision:
        return ZeroCompilePrecision()
    return plugin


def compute_dtype(plugin: Precision, param_dtype: torch.dtype | None) -> torch.dtype | None:
    """What floating-point parameters are gathered in; ``None``: their own dtype.

    Raises:
        MisconfigurationException: the precision is not supported, or contradicts ``param_dtype``.
    """
    fixed: torch.dtype | None = None
    if isinstance(plugin, ZeroCompileHalfPrecision):
        fixed = plugin._desired_input_dtype
    elif isinstance(plugin, ZeroCompileDoublePrecision):
        fixed = torch.float64
    elif not isinstance(plugin, StepsThroughEngine):
        raise MisconfigurationException(
            f"`strategy='zerocompile'` does not support precision={plugin.precision!r} of the plugin "
            f"{type(plugin).__name__}: it does not know that parameters and gradients are sharded. Use the Trainer's "
            "precision '32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed', or derive the plugin "
            "from the class of that precision in `lightning_zerocompile.plugins.precision` instead of Lightning's."
        )
    return agreed_dtype(str(plugin.precision), fixed, param_dtype)


def agreed_dtype(precision: str, fixed: torch.dtype | None, param_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype that a precision computes in, or, where it leaves that open (``None``), the option's.

    Raises:
        MisconfigurationException: both are given and differ.
    """
    if fixed is not None and param_dtype not in (None, fixed):
        raise MisconfigurationException(
            f"precision={precision!r} computes in {fixed} but `param_dtype={param_dtype}` asks for another "
            "dtype; leave one of the two at its default."
        )
    return param_dtype if fixed is None else fixed


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """What autocast computes in during a step; ``None``: there is no autocast."""
    if not isinstance(plugin, MixedPrecision):
        return None
    return torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
