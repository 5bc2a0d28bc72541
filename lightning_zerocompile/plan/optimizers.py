"""What optimizers keep and need on one rank, found by steps on tensors without data."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.tensor import Shard
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.optim import Optimizer

from lightning_zerocompile.optim.matrices import flops as matrix_flops
from lightning_zerocompile.optim.matrices import flops_of_a_step, shares_matrices
from lightning_zerocompile.optim.supported import plain_step, sees_whole_values
from lightning_zerocompile.plan.trace import Live, PlanError, fake_copy, fake_mode, said
from lightning_zerocompile.sharding.layout import shard_dtype
from lightning_zerocompile.sharding.plan import UnitPlan


class OptimizerError(PlanError):
    """A plan cannot be made, since the optimizers cannot."""


@dataclass(frozen=True)
class OptimizerBytes:
    """On rank 0, which has the most rows.

    Attributes:
        states: that stay from step to step. Counters (0-dim) are left out: they are on the CPU.
        temporary: the most that the update of one unit makes and frees again.
        names: of the optimizers' classes.
        flops: of the matrix products of all updates of a step, as a trace counts them. Only optimizers that see whole
            values have some, such as Muon; see :func:`~lightning_zerocompile.optim.matrices.flops_of_a_step`.
    """

    states: int
    temporary: int
    names: tuple[str, ...]
    flops: int

    def __add__(self, other: OptimizerBytes) -> OptimizerBytes:
        """Of both optimizers, which update one after the other."""
        temporary = max(self.temporary, other.temporary)
        return OptimizerBytes(self.states + other.states, temporary, self.names + other.names, self.flops + other.flops)


def local_size(size: Sequence[int], world: int) -> tuple[int, ...]:
    """Of a parameter of this size, what rank 0 has: its rows, or all of a 0-dim one."""
    return (Shard.local_shard_size_and_offset(size[0], world, 0)[0], *size[1:]) if len(size) else ()


def optimizer_bytes(
    module: nn.Module,
    units: Sequence[UnitPlan],
    world: int,
    master_dtype: torch.dtype | None,
    full_param_optimizers: Sequence[str] = (),
    optimizer: Callable[[Any], Any] | None = None,
) -> OptimizerBytes:
    """Steps twice, unit by unit, on rank 0's rows of parameters without data.

    Args:
        module: whose ``configure_optimizers`` counts.
        units: of the module.
        world: number of ranks.
        master_dtype, full_param_optimizers: the strategy's.
        optimizer: makes the optimizer, or a sequence of them, of parameters instead of ``configure_optimizers``.

    Raises:
        PlanError: the optimizers cannot be made or cannot step.
    """
    mode = fake_mode()
    made = fake_copy(module, mode, None)
    with mode, torch.no_grad():
        optimizers = _optimizers_of(made, optimizer)
    names = {name: unit.name for unit in units for name in unit.parameters}
    unit_of: dict[Tensor, str] = {parameter: names[name] for name, parameter in made.named_parameters()}
    return bytes_of(optimizers, unit_of, world, master_dtype, full_param_optimizers, mode)


def bytes_of(
    optimizers: Sequence[Optimizer],
    unit_of: Mapping[Tensor, str],
    world: int,
    master_dtype: torch.dtype | None,
    full_param_optimizers: Sequence[str],
    mode: FakeTensorMode,
) -> OptimizerBytes:
    """The same of optimizers that are there; copies of them step, and nothing of their own is changed.

    Args:
        optimizers: of full parameters, or of masters.
        unit_of: the name of each parameter's unit.
        world: number of ranks.
        master_dtype, full_param_optimizers: the strategy's.
        mode: of the tensors that they step on.

    Raises:
        PlanError: one cannot step.
    """
    states = temporary = flops = 0
    seen: dict[Any, _Update] = {}
    share = [world > 1 and shares_matrices(one) for one in optimizers]  # which needs data, so outside of the mode
    with mode, torch.no_grad():
        for one, shares in zip(optimizers, share, strict=True):
            whole = sees_whole_values(one, full_param_optimizers)
            matrices: dict[str, list[int]] = defaultdict(list)  # FLOPs, by unit
            for number, group in enumerate(one.param_groups):
                by_unit: dict[str, list[Tensor]] = defaultdict(list)
                for parameter in group["params"]:
                    if parameter in unit_of and parameter.requires_grad:
                        by_unit[unit_of[parameter]].append(parameter)
                for name, parameters in by_unit.items():
                    key = (one, number, tuple((tuple(p.shape), p.dtype) for p in parameters))
                    if key not in seen:
                        seen[key] = _step(one, group, parameters, world, master_dtype, whole, shares)
                    states += seen[key].states
                    temporary = max(temporary, seen[key].temporary)
                    if shares:
                        matrices[name] += [matrix_flops(p.shape, group["ns_steps"]) for p in parameters]
                    else:
                        flops += seen[key].flops
            flops += flops_of_a_step(list(matrices.values()), world)
    return OptimizerBytes(states, temporary, tuple(type(one).__name__ for one in optimizers), flops)


def _optimizers_of(module: nn.Module, optimizer: Callable[[Any], Any] | None) -> list[Optimizer]:
    try:
        if optimizer is not None:
            made = optimizer([p for p in module.parameters() if p.requires_grad])
            return list(made) if isinstance(made, Sequence) else [made]
        configured: Any = module.configure_optimizers()  # type: ignore[operator]
        return [] if configured is None else list(_configure_optimizers(configured)[0])
    except Exception as error:  # the user's code
        raise OptimizerError(
            f"The optimizers of {type(module).__name__} cannot be made for a plan: {said(error)} "
            "Pass `optimizer=`, a function that makes one of parameters, such as torch.optim.AdamW."
        ) from error


def _without_data(kept: Any, parameter: Tensor, value: Tensor) -> Any:
    """What stands for ``kept``, a state of ``parameter``, where ``value`` stands for the parameter. A fake mode takes
    only tensors without data."""
    if not isinstance(kept, Tensor):
        return copy.copy(kept)
    if kept.shape == parameter.shape and kept.dim() > 0:
        return torch.empty_like(value, dtype=kept.dtype)
    if kept.dim() == 0:  # a counter, whose number is looked at
        return torch.tensor(1, dtype=kept.dtype)
    return torch.empty(tuple(kept.shape), dtype=kept.dtype)


@dataclass(frozen=True)
class _Update:
    """Of one unit's parameters.

    Attributes:
        states: bytes that stay on rank 0.
        temporary: bytes that it makes and frees again there.
        flops: of its matrix products, if one rank does all of them.
    """

    states: int
    temporary: int
    flops: int


def _step(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    world: int,
    master_dtype: torch.dtype | None,
    whole: bool,
    shares: bool,
) -> _Update:
    """Steps on one unit's parameters.

    Args:
        whole: the optimizer sees whole values.
        shares: it is a Muon whose matrices the ranks share.
    """
    values = []
    for parameter in parameters:
        size = tuple(parameter.shape) if whole else local_size(parameter.shape, world)
        values.append(nn.Parameter(torch.empty(size, dtype=shard_dtype(parameter, master_dtype))))
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer), param_groups=[{**group, "params": values}], state=defaultdict(dict))
    for parameter, value in zip(parameters, values, strict=True):
        for name, kept in optimizer.state.get(parameter, {}).items():  # of a constructor that makes it
            trial.state[value][name] = _without_data(kept, parameter, value)
        value.grad = torch.empty_like(value)
    live = Live([*values, *(value.grad for value in values if value.grad is not None)])
    step = plain_step(trial)
    temporary = flops = 0
    try:
        with live:
            for _ in range(2):  # the first makes the states
                before, counted = live.now, live.flops
                live.take_most()
                step()
                temporary, flops = live.take_most() - before, live.flops - counted
    except (DataDependentOutputException, GuardOnDataDependentSymNode):
        temporary = 2 * max(value.nbytes for value in values)  # its update looks at numbers; the states are there
    except Exception as error:  # the optimizer's own
        raise OptimizerError(
            f"{type(optimizer).__name__} does not step on parameters without data, so its memory is not known: "
            f"{said(error)} Pass `optimizer=`, a function that makes one with the same states."
        ) from error
    states = 0
    for value in values:
        for kept in trial.state.get(value, {}).values():
            if isinstance(kept, Tensor) and kept.dim() > 0:
                split = whole and kept.shape == value.shape
                size = local_size(kept.shape, world) if split else tuple(kept.shape)
                states += torch.Size(size).numel() * kept.dtype.itemsize
    if shares:  # a unit's worth of rows of other units is sent, and as much arrives, in bfloat16
        temporary += sum(2 * 2 * value.numel() for value in values)
    elif whole:  # gathered and freed again, one unit at a time
        temporary += sum(2 * value.nbytes for value in values)
    return _Update(states, temporary, flops)
