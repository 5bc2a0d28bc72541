"""Optimizers made before the model was sharded: they are given its masters, and after the run its whole parameters.

[Note: optimizers made elsewhere] An optimizer that was made in ``__init__``, or before ``fit``, holds the parameters
that the model had then, see [Note: moved parameters] in sharding/moved.py. The master of each takes its place in the
group. Its state becomes the master's, and each rank keeps its own rows of it. Under DDP such an optimizer goes on with
the same parameters after the run. So when the model is made whole, the optimizer is given the whole parameters, and its
whole state, on the CPU. An optimizer that ``configure_optimizers`` makes belongs to the run, and is given nothing back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile.optim.supported import masters_of
from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.layout import over_local, rows_like, shard_like
from lightning_zerocompile.sharding.moved import Moved
from lightning_zerocompile.sharding.sharded import STATES_ON_HOST, sharded_as
from lightning_zerocompile.sharding.unsharded import master_of


def take_masters(number: int, optimizer: Optimizer, whole: bool) -> bool:
    """Puts masters where the optimizer holds parameters from before the sharding, or gathered values, with their state.

    Args:
        number: of the optimizer, for messages.
        optimizer: what it holds beside the model's parameters stays as it is.
        whole: whether state of another shape than its parameter's is on every rank, see [Note: whole values].

    Returns:
        Whether it held parameters from before the sharding, see [Note: optimizers made elsewhere].

    Raises:
        RuntimeError: the optimizer holds a parameter twice.
        ValueError: see :func:`sharded_states`.
    """
    before = masters_of(optimizer)
    groups = [[master_of(p) for p in group["params"]] for group in optimizer.param_groups]
    after = [p for group in groups for p in group]
    if len(set(after)) < len(after):  # nothing is changed yet
        raise RuntimeError(
            f"Optimizer {number} ({type(optimizer).__name__}) holds a parameter more than once: from `parameters()` "
            "and as a module's attribute. Give it to the optimizer once."
        )
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old is not new and old in optimizer.state]
    states = sharded_states([(new, optimizer.state[old]) for old, new in moved], whole)
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = params
    on_device = {p for held in optimizer.param_groups if _counts_on_device(held) for p in held["params"]}
    for (old, new), state in zip(moved, states, strict=True):
        del optimizer.state[old]
        optimizer.state[new] = state
        if new in on_device and isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(new.device)
    return any(isinstance(p, Moved) for p in before)


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def give_back(optimizers: Iterable[Optimizer], parameters: Mapping[Tensor, Tensor]) -> None:
    """Puts the whole parameters where the optimizers hold masters, with their whole state, on the CPU; collective.

    Args:
        optimizers: the same, in the same order, on all ranks.
        parameters: the whole parameters, by their masters.
    """
    for optimizer in optimizers:
        for held in optimizer.param_groups:
            for position, master in enumerate(held["params"]):
                whole = parameters.get(master)
                if whole is None:
                    continue
                held["params"][position] = whole
                state = optimizer.state.pop(master, None)
                if state is not None:
                    optimizer.state[whole] = {name: _whole(kept) for name, kept in state.items()}


def _whole(kept: Any) -> Any:
    if not isinstance(kept, Tensor):
        return kept
    return (full_value(kept) if isinstance(kept, DTensor) else kept.detach()).cpu()


def sharded_states(states: Sequence[tuple[Tensor, Mapping[str, Any]]], whole: bool) -> list[dict[str, Any]]:
    """Makes the full states of parameters those of their masters; no communication.

    Args:
        states: masters, and the full state of each, the same on all ranks.
        whole: whether state of another shape than its parameter's is on every rank, see [Note: whole values].

    Returns:
        The state of each master, in the same order. A tensor of the parameter's shape is a DTensor over this rank's
        rows; counters, and what is on every rank, are plain.

    Raises:
        ValueError: a state tensor has neither its parameter's shape nor one element, and ``whole`` is false.
    """
    moments = {name for master, state in states for name, kept in state.items() if _is_moment(kept, master)}
    return [
        {name: _sharded_state(name, kept, master, name in moments, whole) for name, kept in state.items()}
        for master, state in states
    ]


def _is_moment(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and parameter.dim() > 0


def is_whole(value: Any, master: Tensor) -> bool:
    """Whether a state tensor has all rows of a sharded parameter."""
    return _is_moment(value, master) and isinstance(master, DTensor) and not isinstance(value, DTensor)


def _sharded_state(name: str, value: Any, parameter: Tensor, moment: bool, whole: bool) -> Any:
    """One entry of :func:`sharded_states`.

    Args:
        name: of the entry.
        value: of the entry, full.
        parameter: the master.
        moment: whether an entry of this name has its parameter's shape for any parameter with dimensions. If none has,
            the entry of a 0-dim parameter is a counter.
        whole: whether an entry of another shape than its parameter's is kept on every rank.
    """
    on_host = parameter.__dict__.get(STATES_ON_HOST)
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value if on_host else sharded_as(value, parameter)
    if value.shape == parameter.shape and (moment or parameter.dim() > 0):
        if on_host:
            return over_local(rows_like(value, parameter).cpu(), parameter)
        return sharded_as(shard_like(value, parameter, dtype=value.dtype), parameter)
    if value.numel() == 1 or whole:  # `step` may be a number of the host: see torch.optim.Optimizer.load_state_dict
        return value if name == "step" or on_host else value.to(parameter.device)
    raise ValueError(
        f"The optimizer state `{name}` has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}, so it "
        "cannot be sharded with its parameter. If the state was loaded, create the optimizer in `configure_optimizers` "
        "with the same parameters in the same order as when it was saved. If the optimizer is not elementwise but "
        "treats each parameter on its own, name its class in ZeroCompileStrategy(full_param_optimizers=[...])."
    )
