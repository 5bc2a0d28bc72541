"""The state of models and optimizers under the module's own names, for every stage and world size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.layout import shard_like


def _full(value: Any, keep: bool) -> Any:
    """A whole CPU copy of a sharded tensor where ``keep``, else an empty one; collective."""
    if not isinstance(value, DTensor):
        return value
    if value.device.type != value.device_mesh.device_type:  # behind a fit, when Lightning has moved states to the CPU
        value = value.to(value.device_mesh.device_type)
    local, whole = value.to_local(), full_value(value)
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
    masters = dict(module.named_parameters(remove_duplicate=False))
    tied: dict[Tensor, Tensor] = {}  # in one piece, as in DDP's file
    state: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        master = masters.get(name)
        if master is None or not _is_same(value, master):
            state[name] = _full(value, keep)
            continue
        if master not in tied:
            tied[master] = _full(value, keep)
        state[name] = tied[master]
    return state if keep else {}


def _is_same(value: Any, master: Tensor) -> bool:
    """Whether an entry of a state dict is the master itself, and not what a hook made of it."""
    if not isinstance(value, DTensor) or not isinstance(master, DTensor) or value.dtype != master.dtype:
        return False
    return value._local_tensor.data_ptr() == master._local_tensor.data_ptr()


def full_optimizer_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with full tensors; collective over the shard group. ``keep`` as above."""
    state = optimizer.state_dict()
    state["state"] = {
        index: {name: _full(value, keep) for name, value in entry.items()} for index, entry in state["state"].items()
    }
    return state if keep else {}


def named_optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with its shards, keyed by parameter names instead of positions."""
    state = optimizer.state_dict()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in state["param_groups"] for index in group["params"]]
    name_of = {index: names[p] for index, p in zip(order, held, strict=True)}
    return {
        "state": {name_of[index]: entry for index, entry in state["state"].items()},
        "param_groups": [{**g, "params": [name_of[index] for index in g["params"]]} for g in state["param_groups"]],
    }


def positional_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[Tensor, str]
) -> Mapping[str, Any]:
    """A state keyed by names as torch loads it, in the order of this optimizer's parameters; others as they are.

    Raises:
        ValueError: the groups hold other parameters than this optimizer's.
    """
    saved = [group.get("params", []) for group in state["param_groups"]]
    if not any(isinstance(name, str) for group in saved for name in group):
        return state
    ours = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if [set(group) for group in saved] != [set(group) for group in ours]:
        theirs, mine = {n for group in saved for n in group}, {n for group in ours for n in group}
        raise ValueError(
            f"The checkpoint's optimizer does not hold this optimizer's parameters: {len(saved)} groups against "
            f"{len(ours)}; only in the checkpoint: {sorted(theirs - mine)}; only here: {sorted(mine - theirs)}. Create "
            "the optimizer in `configure_optimizers` as it was when the checkpoint was saved."
        )
    position = {name: number for number, name in enumerate(name for group in ours for name in group)}
    return {
        "state": {position[name]: entry for name, entry in state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [position[name] for name in own]}
            for group, own in zip(state["param_groups"], ours, strict=True)
        ],
    }


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], whole: bool) -> None:
    """Loads a full optimizer state; every rank passes the same and takes its rows.

    Args:
        optimizer: over sharded parameters.
        state: full, by positions.
        whole: whether state of another shape than its parameter's is on every rank, see [Note: whole values].

    Raises:
        ValueError: a state tensor has neither its parameter's shape nor one element, and the optimizer is not one
            that keeps such state whole on every rank.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved_order = [index for group in state["param_groups"] for index in group["params"]]
    by_index = dict(zip(saved_order, parameters, strict=False))
    saved = {index: entry for index, entry in state["state"].items() if index in by_index}
    moments = {name for index, entry in saved.items() for name, v in entry.items() if _is_moment(v, by_index[index])}
    entries = {
        index: {
            name: _shard_entry(name, value, by_index[index], name in moments, whole) for name, value in entry.items()
        }
        for index, entry in saved.items()
    }
    optimizer.load_state_dict({**state, "state": entries})


def _is_moment(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and parameter.dim() > 0


def _shard_entry(name: str, value: Any, parameter: Tensor, moment: bool, whole: bool) -> Any:
    """``moment``: other parameters' entries of this name have their shape; a 0-dim value alone may be a counter.
    ``whole``: what has another shape than its parameter is on every rank."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if value.shape == parameter.shape and (moment or parameter.dim() > 0):
        return shard_like(value, parameter, dtype=value.dtype)
    if value.numel() == 1 or whole:
        return value
    raise ValueError(
        f"The optimizer state `{name}` has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}: it is "
        "not elementwise and cannot be sharded with its parameter. If the optimizer treats each parameter on its own, "
        "name its class in ZeroCompileStrategy(full_param_optimizers=[...])."
    )
