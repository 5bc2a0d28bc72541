"""The line that rank 0 says when a fit begins: what is sharded and compiled, and what a step will cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_zerocompile.engine import Engine
from lightning_zerocompile.optim.supported import steps_by_unit
from lightning_zerocompile.plan.memory import Facts, Memory, Traffic, UnitBytes, bytes_of_units, simulate
from lightning_zerocompile.plan.optimizers import OptimizerBytes, bytes_of
from lightning_zerocompile.plan.plan import accumulated, in_units, schedule_of
from lightning_zerocompile.plan.trace import PlanError, fake_mode


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one rank will need, by the formula of a plan without a batch: activations are not known.

    Attributes:
        units: gathered and reduced together, in order.
        memory, traffic: of a step.
        unknown: classes of optimizers whose states are not counted.
    """

    units: tuple[UnitBytes, ...]
    memory: Memory
    traffic: Traffic
    unknown: tuple[str, ...]


def costs_of(engine: Engine, optimizers: Sequence[Optimizer], accumulate: int = 1) -> Costs:
    """Of a model that is sharded already; nothing is sent, and no optimizer steps.

    Args:
        engine: of the model.
        optimizers: of the masters; only torch's own are tried out on tensors without data.
        accumulate: backwards for each of their steps.
    """
    runtime, config, world = engine.runtime, engine.config, engine.runtime.mesh.size()
    facts, unit_of = {}, dict[Tensor, str]()
    names = {name: unit.name for unit in engine.units for name in unit.parameters}
    for sharded in runtime.sharded_parameters:
        gathered = sharded.source.dtype
        reduced = sharded.use_grad_dtype or gathered
        if config.reduce_dtype is not None and gathered.is_floating_point:
            reduced = config.reduce_dtype
        trained = sharded.master.requires_grad
        kept = sharded.trained_dtype if trained else sharded.local.dtype
        facts[sharded.name] = Facts(sharded.size, gathered, reduced, kept, trained)
        unit_of[sharded.master] = names[sharded.name]
    units = bytes_of_units(engine.units, facts, world)
    states, unknown = OptimizerBytes(0, 0, (), 0), []
    for optimizer in optimizers:
        try:
            if not steps_by_unit(optimizer, ()):
                raise PlanError("it is not torch's own, so its code is not run on trial")
            states += bytes_of([optimizer], unit_of, world, config.master_dtype, (), fake_mode())
        except PlanError:
            unknown.append(type(optimizer).__name__)
    schedule = schedule_of(
        config,
        config.chosen_stage,
        frozenset(unit.name for unit in engine.units if unit.kept),
        accumulate,
        gloo=runtime.device.type == "cpu",
        inner=runtime.inner,
        flat=runtime.packs,
    )
    memory, traffic = simulate(engine.units, units, states, None, schedule, _buffers(engine))
    traffic = accumulated(traffic, memory.resident, accumulate, schedule.accumulates)
    return Costs(tuple(units), memory, traffic, tuple(unknown))


def _buffers(engine: Engine) -> int:
    return sum(buffer.nbytes for buffer in engine.model.buffers())


def what_is_compiled(engine: Engine) -> str:
    """For people, such as "12 modules compiled by inductor"."""
    count = engine.regions.compiled
    if not count:
        return "nothing compiled"
    mode = f", mode {engine.config.mode!r}" if engine.config.mode else ""
    return f"{count} module{'s' * (count > 1)} compiled by {engine.config.backend}{mode}"


def start_line(engine: Engine, optimizers: Sequence[Optimizer], accumulate: int = 1) -> str:
    """One line: stage, units, what is compiled, bytes of a step, and memory as far as it is known."""
    costs, world = costs_of(engine, optimizers, accumulate), engine.runtime.world_size
    replicas = world // engine.runtime.mesh.size()
    memory, traffic = costs.memory, costs.traffic
    largest = max(costs.units, key=lambda unit: unit.gathered)
    known = [type(one).__name__ for one in optimizers if type(one).__name__ not in costs.unknown]
    names = ", ".join(dict.fromkeys(known))
    parts = [f"masters {in_units(memory.masters)}"]
    if names:
        parts.append(f"states of {names} {in_units(memory.states)}")
    if memory.host:
        parts.append(f"in host memory {in_units(memory.host)}")
    if memory.secondary:
        parts.append(f"secondary shards {in_units(memory.secondary)}")
    parts += [f"gathered {in_units(memory.gathered)}", f"gradients {in_units(memory.gradients + memory.reduced)}"]
    left_out = ["activations", *(f"states of {name}" for name in costs.unknown)]
    return (
        f"zerocompile: stage {engine.config.stage} on {world} rank{'s' * (world > 1)}"
        f"{f' in {replicas} replicas' if replicas > 1 else ''}, {len(costs.units)} "
        f"unit{'s' * (len(costs.units) > 1)} (the largest, `{largest.name}`: {in_units(largest.gathered)}), "
        f"{what_is_compiled(engine)}; a step gathers {in_units(traffic.forward + traffic.backward)} and reduces "
        f"{in_units(traffic.reductions)} on each rank; its peak is {in_units(memory.peak)} ({', '.join(parts)}) and "
        f"{' and '.join(left_out)}"
    )
