"""The state of models and optimizers under the module's own names, for every stage and world size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from lightning_zerocompile.optim.taken_over import sharded_states
from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.layout import over_local
from lightning_zerocompile.sharding.module_swap import PARAMETERS
from lightning_zerocompile.sharding.parameter import ShardedParameter
from lightning_zerocompile.sharding.sharded import STATES_ON_HOST


def _full(value: Any, keep: bool) -> Any:
    """A whole CPU copy of a sharded tensor where ``keep``, else an empty one; collective."""
    if not isinstance(value, DTensor):
        return value
    if value.device.type != value.device_mesh.device_type:  # after a fit, when Lightning has moved states to the CPU
        value = value.to(value.device_mesh.device_type)
    local, whole = value.to_local(), full_value(value)
    if not keep:
        return torch.empty(0, dtype=whole.dtype)
    shared = whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return whole.to("cpu", copy=shared)  # a 0-dim value shares its memory, and would change with the next step


_NOTHING = object()


class NamesOnly(dict[str, Any]):
    """A model's state on a rank that does not keep its values.

    [Note: states of other ranks] Under DDP ``on_save_checkpoint`` finds the model's state on all ranks. Here rank 0
    alone has it. What goes over the state finds nothing on the other ranks. What names an entry (``del``, ``pop``,
    ``in``, ``[...]``) finds it there as on rank 0: a tensor on the meta device. That has a size and a dtype, and raises
    where its values are read.

    Args:
        state: the state whose names, sizes and dtypes are known.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        self._known = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
            for name, value in state.items()
        }

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._known

    def __missing__(self, name: str) -> Any:
        return self._known[name]

    def __delitem__(self, name: str) -> None:
        self.pop(name)

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self._known.get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        known = self._known.pop(name, _NOTHING)
        if super().__contains__(name) or known is _NOTHING:
            return super().pop(name, *default)
        return known


def full_state_dict(module: nn.Module, keep: bool) -> dict[str, Any]:
    """The module's ``state_dict`` with full tensors, one after the other; collective over the shard group.

    Args:
        module: sharded or not.
        keep: whether this rank keeps the values (on the CPU); the others only take part, and get a :class:`NamesOnly`.
    """
    masters = dict(module.named_parameters(remove_duplicate=False))
    tied: dict[Tensor, Tensor] = {}  # tied parameters share one tensor, as in DDP's file
    state: dict[str, Any] = {}
    shown = module.state_dict()
    for name, value in shown.items():
        master = masters.get(name)
        if master is None or not _is_same(value, master):
            state[name] = _full(value, keep)
            continue
        if master not in tied:
            tied[master] = _full(value, keep)
        state[name] = tied[master]
    return state if keep else NamesOnly(shown)


@contextmanager
def serving_full_values(module: nn.Module, keep: bool) -> Iterator[None]:
    """Inside, ``state_dict()`` of the module and of each part of it has full values; entering is collective.

    The values are the parameters' of this moment, on the CPU, in the dtypes that the module has after the fit.

    Args:
        module: sharded, or a part of a sharded one.
        keep: whether this rank has the values; on the others ``state_dict()`` raises.
    """
    full: dict[ShardedParameter, Tensor] = {}  # tied parameters share one tensor
    handles: list[RemovableHandle] = []

    def serve(inner: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, sharded in inner.__dict__[PARAMETERS].items():
            if not keep:
                raise RuntimeError(
                    f"`state_dict()` inside `full_state_dict` on rank {dist.get_rank()}: rank 0 alone has the full "
                    f"values (of `{sharded.name}`, say). Save in `if trainer.is_global_zero:`."
                )
            if prefix + name in state:
                state[prefix + name] = full[sharded]

    for inner in module.modules():
        for sharded in inner.__dict__.get(PARAMETERS, {}).values():
            if sharded not in full:
                value = _full(sharded.master.detach(), keep)
                full[sharded] = value.to(sharded.dtype)
    try:
        handles.extend(
            inner.register_state_dict_post_hook(serve)  # type: ignore[no-untyped-call, unused-ignore]
            for inner in module.modules()
            if PARAMETERS in inner.__dict__
        )
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_same(value: Any, master: Tensor) -> bool:
    """Whether an entry of a state dict is the master itself, and not a value that a hook has made of it."""
    if not isinstance(value, DTensor) or not isinstance(master, DTensor) or value.dtype != master.dtype:
        return False
    one, other = value._local_tensor, master._local_tensor  # the storage itself: without rows all addresses are 0
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset() and value.shape == master.shape


def full_optimizer_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with full tensors; collective over the shard group. ``keep`` as above."""
    found = optimizer.state_dict()
    if _is_torchs(found):  # all ranks gather in the order of the groups: that of the states is when each was made
        order = [index for group in found["param_groups"] for index in group["params"]]
        states = found["state"]
        found["state"] = {index: states[index] for index in order if index in states} | states
    state = tree_map(lambda value: _full(value, keep), found)
    return state if keep else {}


def _is_torchs(state: Mapping[str, Any]) -> bool:
    """Whether this is a state dict of a torch optimizer: that of Lightning's stand-in for no optimizer is empty."""
    return "param_groups" in state  # not `state`: a directory drops an empty one


def named_optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with its shards, keyed by parameter names instead of positions."""
    state = optimizer.state_dict()
    if not _is_torchs(state):
        return state
    held = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in state["param_groups"] for index in group["params"]]
    name_of = {index: names[p] for index, p in zip(order, held, strict=True)}
    return {
        "state": {name_of[index]: entry for index, entry in state.get("state", {}).items()},
        "param_groups": [{**g, "params": [name_of[index] for index in g["params"]]} for g in state["param_groups"]],
    }


def positional_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[Tensor, str]
) -> Mapping[str, Any]:
    """A state keyed by names in torch's form, in the order of this optimizer's parameters; any other as it is.

    Raises:
        ValueError: the groups hold other parameters than this optimizer's.
    """
    if not _is_torchs(state):
        return state
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
        ValueError: a state tensor has neither its parameter's shape nor one element, and ``whole`` is false.
    """
    if not _is_torchs(state):
        optimizer.load_state_dict(dict(state))
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved_order = [index for group in state["param_groups"] for index in group["params"]]
    by_index = dict(zip(saved_order, parameters, strict=False))
    saved = {index: entry for index, entry in state.get("state", {}).items() if index in by_index}
    entries = sharded_states([(by_index[index], entry) for index, entry in saved.items()], whole)
    on_host: list[tuple[Tensor, dict[str, Any]]] = []
    for position, index in enumerate(saved):
        master, entry = by_index[index], entries[position]
        if master.__dict__.get(STATES_ON_HOST):  # torch would load them to the device
            rows = {name: value for name, value in entry.items() if isinstance(value, DTensor)}
            on_host.append((master, rows))
            entries[position] = {name: value for name, value in entry.items() if name not in rows}
    optimizer.load_state_dict({**state, "state": dict(zip(saved, entries, strict=True))})
    for master, rows in on_host:
        for name, value in rows.items():
            local = value._local_tensor.to(master.dtype if master.is_floating_point() else value.dtype)  # as torch does
            optimizer.state[master][name] = over_local(local, master)
