"""State that does not depend on the stage or on the world size: full tensors under the module's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile.shard import shard_like


def _full(value: Any, keep: bool) -> Any:
    """A whole CPU copy of a sharded tensor where ``keep``, else an empty one; collective."""
    if not isinstance(value, DTensor):
        return value
    local, whole = value.to_local(), value.full_tensor().detach()
    if not keep:
        return torch.empty(0, dtype=whole.dtype)
    shared = whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return whole.to("cpu", copy=shared)  # a 0-dim value is no copy yet, and would change with the next step


def full_state_dict(module: nn.Module, keep: bool) -> dict[str, Any]:
    """The module's ``state_dict`` with full tensors, one after the other; collective over the shard group.

    Args:
        module: sharded or not.
        keep: whether this rank keeps the values (on the CPU); the others only take part.
    """
    state = {name: _full(value, keep) for name, value in module.state_dict().items()}
    return state if keep else {}


def full_optimizer_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with full tensors; collective over the shard group. ``keep`` as above."""
    state = optimizer.state_dict()
    state["state"] = {
        index: {name: _full(value, keep) for name, value in entry.items()} for index, entry in state["state"].items()
    }
    return state if keep else {}


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a full optimizer state; every rank passes the same and takes its rows.

    Raises:
        ValueError: a state tensor has neither its parameter's shape nor one element.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved_order = [index for group in state["param_groups"] for index in group["params"]]
    by_index = dict(zip(saved_order, parameters, strict=False))
    entries = {
        index: {name: _shard_entry(name, value, by_index[index]) for name, value in entry.items()}
        for index, entry in state["state"].items()
        if index in by_index
    }
    optimizer.load_state_dict({**state, "state": entries})


def _shard_entry(name: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if value.shape == parameter.shape and parameter.dim() > 0:
        return shard_like(value, parameter, dtype=value.dtype)
    if value.numel() == 1:
        return value
    raise ValueError(
        f"The optimizer state `{name}` has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}: it is "
        "not elementwise and cannot be sharded with its parameter."
    )
