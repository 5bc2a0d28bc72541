"""Lightning's callbacks that keep a copy of the model, or change it, while it is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.layout import over_local, shard_like, sharded_if_full
from lightning_zerocompile.sharding.sharded import sharded_as

if TYPE_CHECKING:
    from lightning_zerocompile.engine import Engine


def prepare_callbacks(trainer: pl.Trainer, module: pl.LightningModule, engine: Engine) -> None:
    """Shards the copies that callbacks made of the whole module, see [Note: sharded average]; ModelPruning saves full
    values."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            shard_copy(callback._average_model.module, module, as_shards=engine.config.state_dict_type == "sharded")
            callback._average_model.__class__ = ShardedAverage
        elif isinstance(callback, StochasticWeightAveraging) and callback._average_model is not None:
            shard_copy(callback._average_model, module, as_shards=False)
            callback._device = engine.device
        elif isinstance(callback, ModelPruning):
            own = type(callback)._make_pruning_permanent_on_state_dict
            if own is ModelPruning._make_pruning_permanent_on_state_dict:
                callback._make_pruning_permanent_on_state_dict = _without_masks  # type: ignore[method-assign, assignment]


def before_optimizer_state(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Does what callbacks do in a resumed fit's ``on_fit_start``: there a sharded model's checkpoint is not loaded."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning) and callback._restarting:
            callback.on_fit_start(trainer, module)  # adds the parameter groups to which the optimizer's state belongs
        elif isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None:
            callback._clear_schedulers(trainer)
        elif isinstance(callback, Timer) and callback._duration is not None:
            callback._check_time_remaining(trainer)  # a run whose time is up ends before its first step


def _without_masks(module: pl.LightningModule) -> dict[str, Any]:
    """The model's state in a checkpoint of ModelPruning: pruned parameters under their first names, with the masks
    applied. It replaces the callback's own method, which would ask the module for its state. Collective while
    sharded."""
    state = module.trainer.strategy.lightning_module_state_dict()
    for name in [key.removesuffix("_mask") for key in state if key.endswith("_mask")]:
        if name + "_orig" not in state:
            continue
        value, mask = state.pop(name + "_orig"), state.pop(name + "_mask")
        if isinstance(value, DTensor):
            state[name] = over_local(value._local_tensor * shard_like(mask, value, value.dtype)._local_tensor, value)
        else:
            state[name] = value * mask.to(value)
    return state


# ---- averages of the weights ----


def shard_copy(copy: nn.Module, model: nn.Module, as_shards: bool) -> None:
    """Gives a copy of the whole module, taken before it was sharded, the sharded module's values and layout.

    [Note: sharded average] Callbacks copy the module in their ``setup``. Each rank keeps the average of its rows only,
    on the device of the rows (a ``device`` that the callback was given counts for buffers only). The copy starts from
    the masters, so all ranks start from rank 0's values. Full tensors and shards can be loaded into the copy.

    Args:
        copy: of ``model``, with full parameters.
        model: the sharded module.
        as_shards: whether the copy's state dict holds shards; else it holds full tensors on rank 0. The average of
            WeightAveraging takes the model's place in a checkpoint, so it has the form of the model's state. SWA's is a
            part of the callback's own state, of which only rank 0's is saved.
    """
    masters = dict(model.named_parameters(remove_duplicate=False))
    made: dict[Tensor, nn.Parameter] = {}
    sharded = False
    for prefix, module in copy.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            master = masters[f"{prefix}.{name}" if prefix else name]
            if master not in made:
                made[master] = nn.Parameter(master.detach().clone(), requires_grad=parameter.requires_grad)
            module._parameters[name] = made[master]
            sharded = True
    if sharded:
        if not as_shards:
            copy.register_state_dict_post_hook(_full_values)  # type: ignore[no-untyped-call]
        copy.register_load_state_dict_pre_hook(_sharded_values)  # type: ignore[no-untyped-call]


def _full_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    rank_zero = torch.distributed.get_rank() == 0
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, DTensor):
            whole = full_value(value)
            state_dict[name] = whole.to("cpu", copy=True) if rank_zero else torch.empty(0, dtype=whole.dtype)


def _sharded_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state_dict:
            state_dict[prefix + name] = sharded_as(sharded_if_full(state_dict[prefix + name], parameter), parameter)


class _Rows:
    """Shows a module as this rank's rows of its parameters, and its buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self) -> Iterator[Tensor]:
        for parameter in self._module.parameters():
            if isinstance(parameter, DTensor):  # rows may be in host memory; the average's are not
                rows: Any = parameter.detach()  # with what user code has written to the gathered value
                yield rows._local_tensor.to(parameter.device_mesh.device_type)
            else:
                yield parameter.detach()

    def buffers(self) -> Iterator[Tensor]:
        yield from self._module.buffers()


class ShardedAverage(AveragedModel):
    """An average of sharded parameters. A rank updates its rows, so the averaging function must be elementwise."""

    def update_parameters(self, model: nn.Module) -> None:
        rows = _Rows(self.module)
        average: Any = SimpleNamespace(
            module=rows,
            parameters=rows.parameters,
            n_averaged=self.n_averaged,
            avg_fn=self.avg_fn,
            multi_avg_fn=self.multi_avg_fn,
            use_buffers=self.use_buffers,
        )
        with torch.no_grad():
            AveragedModel.update_parameters(average, _Rows(model))  # type: ignore[arg-type]
