"""What this strategy does not take raises by name, before anything starts; torch's own messages are explained."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_zerocompile import shard
from lightning_zerocompile.compile import is_compiled, remove_regions


def check_module(module: pl.LightningModule) -> None:
    """Raises if the module was compiled already.

    Raises:
        MisconfigurationException: names the module and the remedy.
    """
    for name, inner in module.named_modules():
        check_not_compiled(name, inner)


def check_not_compiled(name: str, module: nn.Module) -> None:
    """:func:`check_module` of one module; ``name``: "" for the LightningModule."""
    if is_compiled(module):
        what = f"The module `{name}`" if name else "The LightningModule"
        raise MisconfigurationException(
            f"{what} was compiled by torch.compile. `strategy='zerocompile'` compiles the model itself: pass the "
            "module as it is, and options through ZeroCompileStrategy(compile=..., mode=..., options=...)."
        )


def check_equal_on_all_ranks(model: nn.Module) -> None:
    """Raises on every rank if the ranks hold different models.

    Raises:
        RuntimeError: the model has no parameters, or names the first parameter or buffer that differs and the rank.
    """
    mine = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    buffers = [(n, tuple(b.shape), str(b.dtype), False) for n, b in model.named_buffers()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine + buffers)
    if not mine and all(theirs == everyone[0] for theirs in everyone):
        raise RuntimeError(
            f"{type(model).__name__} has no parameters, so there is nothing to shard or to train. Create its layers "
            "in `__init__` or `configure_model`."
        )
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        first, other = next(
            pair for pair in zip_longest(everyone[0], theirs, fillvalue="no more") if pair[0] != pair[1]
        )
        raise RuntimeError(
            f"The ranks hold different models: rank 0 has {first}, rank {rank} has {other}. Build the same "
            "model on every rank (same code path, same configuration; do not depend on the rank)."
        )
    check_devices(model)


def check_devices(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            raise RuntimeError(f"`{name}` is on {tensor.device}; only cpu, cuda and meta tensors can be sharded.")


SHARD = (
    "Of a parameter this rank holds a shard, a DTensor, and its `grad` is one, too. `with "
    "strategy.full_parameters(module) as values:` gives full values by name. What is added to a gradient (noise, a "
    "penalty) has its layout, as `torch.randn_like(p.grad)` has, or is given it by "
    "`torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements)`."
)


def explain(message: str, param_dtype: torch.dtype | None = None) -> str | None:
    """What an error of torch's means for a sharded module; None: nothing else than it says."""
    if param_dtype is not None and "same dtype" in message:
        return (
            f"{message} (Parameters are read as {param_dtype}, since `param_dtype` asks for it. Inputs of modules are "
            "cast where the LightningModule, a child of it or a repeated block is called, unless "
            "`cast_forward_inputs=False`. Cast what this operation takes, or use the Trainer's precision='bf16-mixed', "
            "which casts in each operation.)"
        )
    if "don't yet support saved tensor hooks" in message or "storage of TensorWrapper" in message:
        return shard.FUNCTORCH.format("parameters")
    mixed = "got mixed torch.Tensor and DTensor" in message or "require placement changes" in message
    if mixed and SHARD not in message:
        return f"{message} {SHARD}"
    if "appears to not have been used in the graph" in message and "sharded module" not in message:
        return (
            f"{message} (A parameter that was read again from a sharded module is a new value each time: differentiate "
            "with respect to the value that you used, or call `backward` and read `grad`.)"
        )
    return None


def make_whole(model: nn.Module) -> None:
    """Unshards the model by whichever engine it is sharded; collective."""
    shard.owner(model).write_back()
    remove_regions(model)
    shard.unshard(model)
    model.cpu()


def take_over(model: nn.Module) -> None:
    """Makes a model whole that another strategy has left sharded (``unshard_after_fit=False``)."""
    if shard.owner(model) is not None:
        make_whole(model)
    shard.check_whole(model)
