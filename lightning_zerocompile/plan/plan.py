"""The plan of a run: its units, and for each stage memory, communication and time, before anything is allocated.

Memory is predicted as [Note: predicted memory] says, and FLOPs are those of the traced step. Seconds come from rates
that are given or measured ([Note: timed block]), by [Note: predicted seconds].
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_zerocompile.config import Config, Policy
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.memory import Memory, Schedule, Traffic, UnitBytes, simulate, unit_bytes
from lightning_zerocompile.plan.optimizers import optimizer_bytes
from lightning_zerocompile.plan.step_time import Ranks, step_time
from lightning_zerocompile.plan.timing import Timer, link_rate, memory_rate, step_seconds
from lightning_zerocompile.plan.trace import PlanError, Step, Trace, trace_step, training_step
from lightning_zerocompile.ranks.groups import inner_size, replicas_of
from lightning_zerocompile.sharding.islands import Islands, find_islands
from lightning_zerocompile.sharding.plan import check_names, plan_units

STAGES = (1, 2, 3)
SHARE = 0.9  # of the memory that a plan may fill: it does not count all that a run needs, see its notes
_GIB = 2**30


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        stage: of ZeRO.
        memory, traffic: of a rank in one step.
        seconds: of one step; ``None``: a rate or the batch is not known.
        exposed: seconds of them in which only communication runs.
        fits: whether the peak fits in nine tenths of the machine's memory; ``None``: one of the two is not known.
    """

    stage: int
    memory: Memory
    traffic: Traffic
    seconds: float | None
    exposed: float | None
    fits: bool | None


@dataclass(frozen=True)
class Plan:
    """What a run will need, by stage.

    Attributes:
        module: the name of its class.
        world_size: number of ranks.
        replicas: that they hold, each sharded over its part of the ranks.
        parameters: elements of all parameters.
        units: gathered and reduced together, in order.
        optimizers: names of their classes.
        flops: of one step on one rank; ``None``: there was no batch.
        stages: in order.
        machine: that it was made for.
        notes: what the figures leave out, a sentence each.
    """

    module: str
    world_size: int
    replicas: int
    parameters: int
    units: tuple[UnitBytes, ...]
    optimizers: tuple[str, ...]
    flops: int | None
    stages: tuple[StagePlan, ...]
    machine: Machine
    notes: tuple[str, ...]

    def as_json(self) -> str:
        """All figures, in bytes, seconds and FLOP; each stage's ``memory`` has its ``peak``, too."""
        plain = dataclasses.asdict(self)
        for unit in plain["units"]:
            unit["trainable"] = sorted(unit["trainable"])
        for made, stage in zip(plain["stages"], self.stages, strict=True):
            made["memory"]["peak"] = stage.memory.peak
            made["traffic"]["total"] = stage.traffic.total
        return json.dumps(plain, indent=2)

    def __str__(self) -> str:
        return table(self)

    def fastest(self) -> StagePlan | None:
        """The stage to take: of those that fit (where that is not known: of all) the one that takes the least time, if
        that is known; among equal ones that which moves least, then that with the lowest peak. ``None``: none fits."""
        fitting = [stage for stage in self.stages if stage.fits is not False]
        known = all(stage.seconds is not None for stage in fitting)

        def cost(stage: StagePlan) -> tuple[float, int, int, int]:
            seconds = stage.seconds if known and stage.seconds is not None else 0.0
            return seconds, stage.traffic.total, stage.memory.peak, stage.stage

        return min(fitting, key=cost, default=None)


def make_plan(
    module: nn.Module,
    batch: Any = None,
    *,
    world_size: int,
    config: Config | None = None,
    machine: Machine | None = None,
    compute_dtype: torch.dtype | None = None,
    autocast_dtype: torch.dtype | None = None,
    stages: Sequence[int] = STAGES,
    accumulate: int = 1,
    step: Step | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    measure: torch.device | None = None,
) -> Plan:
    """Plans a run. Nothing is allocated, sent or changed; the module may be on meta, and no other rank is needed.

    Args:
        module: as the user made it, not sharded.
        batch: of one rank, as ``training_step`` gets it. ``None``: activations and FLOPs are not known.
        world_size: number of ranks.
        config: the strategy's options; its stage does not count.
        machine: what each rank has.
        compute_dtype: what floating-point parameters are gathered in; ``None``: their own dtype.
        autocast_dtype: of the autocast of the steps; ``None``: there is none.
        stages: to plan.
        accumulate: backwards for each step of the optimizer.
        step: ``(module, batch) -> loss`` instead of ``training_step``.
        optimizer: makes the optimizer, or a sequence of them, of parameters instead of ``configure_optimizers``.
        measure: times the blocks, what is around them, and the memory there, for the rates that ``machine`` does not
            have; see [Note: timed block].

    Raises:
        PlanError: the world size is none, the model has no parameters, the step does not take the batch, or the
            optimizers cannot be made; the message says what to do.
        ValueError: a name in ``keep_gathered`` is of nothing in the model.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise PlanError(f"`world_size={world_size!r}` must be a number of ranks, 1 or more.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise PlanError(f"`accumulate={accumulate!r}` must be a number of backwards, 1 or more.")
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or not stages:
        raise PlanError(f"`stages={tuple(stages)!r}` must be some of {STAGES}.")
    if next(module.parameters(), None) is None:
        raise PlanError(
            f"{type(module).__name__} has no parameters. Make its layers in `__init__`, or call `configure_model` "
            "first."
        )
    config, machine = config or Config(), machine or Machine()
    ranks = _ranks(config, world_size, machine)
    flat = not machine.gloo and machine.ranks_per_node is not None and ranks.shards > machine.ranks_per_node
    shards = ranks.shards
    check_names(module, config.kept_names)
    islands = find_islands(module, config.fp32_modules, compute_dtype, autocast_dtype)
    one_graph = config.compile == "model"
    units = plan_units(module, config.unit_bytes, compute_dtype, config.kept_names, one_graph, islands)
    sizes = unit_bytes(module, units, shards, compute_dtype, config.master_dtype, config.reduce_dtype, islands)
    blocks = [unit.name for unit in units if unit.block is not None]
    if measure is not None and (batch is None or not blocks):
        missing = "a batch" if batch is None else "a model with repeated blocks"
        raise PlanError(f"`measure={str(measure)!r}` times the blocks of a step, which needs {missing}. Give `flops=`.")
    optimizers = optimizer_bytes(module, units, shards, config.master_dtype, config.full_param_optimizers, optimizer)
    notes, trace = [], None
    if batch is None:
        notes.append("There was no batch: activations are not in these figures.")
    else:
        compiled = config.backend if config.compile == "blocks" else False
        trace = trace_step(
            module,
            batch,
            blocks,
            compute_dtype,
            autocast_dtype,
            compiled,
            step or training_step,
            config.checkpointed,
            config.activation_offload,
            config.activation_budget,
            islands,
            machine.gloo,
        )
        notes += [f"`{name}` was traced as eager code, since {reason}" for name, reason in trace.eager.items()]
        if one_graph:
            notes.append("With compile='model' activations are those of eager code, which keeps more.")
    if measure is not None and trace is not None:
        dtypes = (compute_dtype, autocast_dtype, islands)
        machine = _measured(machine, module, batch, blocks, trace, config, dtypes, step or training_step, measure)
    if autocast_dtype is not None:
        notes.append(
            "At stage 3 the run gathers the weights of linear layers as autocast's cast; here they count whole."
        )
    if config.offload and machine.link is None:
        notes.append("The time in which offloaded masters and states are copied is not in the seconds of a step.")
    if config.activation_offload and machine.link is None:
        notes.append(
            "The time in which activations are copied to host memory and back is not in the seconds of a step."
        )
    if machine.flops is not None and machine.host is None and not machine.gloo and trace is not None:
        notes.append(
            "What the host needs to issue a step is not known (`measure=` times it), so short steps may take longer."
        )
    if config.memory_budget is not None:
        notes.append(
            "What `keep_gathered` buys with bytes is not in the figures of stage 3: it fills what is free at the peak."
        )
    if ranks.replicas > 1:
        notes.append(
            "Bytes are those inside one replica. What it has reduced is summed over the replicas, 2 (R - 1)/R of a "
            "rank's share of its gradients, which counts in the seconds."
        )
    if not machine.gloo:
        notes.append(
            "Not counted: the CUDA context, NCCL's buffers, the allocator's fragmentation; allow some GiB. With "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True fewer fragments are left."
        )
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    kept = frozenset(unit.name for unit in units if unit.kept)
    made = []
    for stage in stages:
        schedule = schedule_of(
            config,
            stage,
            kept,
            accumulate,
            gloo=machine.gloo,
            inner=ranks.inner,
            flat=flat,
        )
        defers = schedule.accumulates
        memory, traffic = simulate(units, sizes, optimizers, trace, schedule, buffers)
        if schedule.offload and machine.memory is not None and memory.peak > machine.memory:
            schedule = dataclasses.replace(schedule, early=False)
            memory, traffic = simulate(units, sizes, optimizers, trace, schedule, buffers)
        traffic = accumulated(traffic, memory.resident, accumulate, defers)
        beside = config.optimizer_in_backward
        time = step_time(
            stage,
            trace,
            traffic,
            memory,
            sizes,
            ranks if memory.secondary else dataclasses.replace(ranks, inner=None),
            accumulate=accumulate,
            defers=defers,
            machine=machine,
            in_backward=beside,
            update_flops=optimizers.flops,
        )
        seconds, exposed = (None, None) if time is None else (time.total, time.exposed)
        fits = None if machine.memory is None else memory.peak <= SHARE * machine.memory
        fits = None if batch is None and fits else fits  # activations may not
        made.append(StagePlan(stage, memory, traffic, seconds, exposed, fits))
    return Plan(
        type(module).__name__,
        world_size,
        ranks.replicas,
        sum(parameter.numel() for parameter in module.parameters()),
        tuple(sizes),
        optimizers.names,
        None if trace is None else accumulate * (trace.forward_flops + trace.backward_flops),
        tuple(made),
        machine,
        tuple(notes),
    )


def schedule_of(
    config: Config,
    stage: int,
    kept: frozenset[str],
    accumulate: int,
    *,
    gloo: bool,
    inner: int | None,
    flat: bool,
) -> Schedule:
    """How a stage runs with these options.

    Args:
        config: the strategy's options; its stage does not count.
        accumulate: backwards for each step of the optimizer.
        stage, kept, gloo, inner, flat: as in :class:`~lightning_zerocompile.plan.memory.Schedule`.
    """
    defers = accumulate > 1 and (Policy.of_stage(stage).accumulates_locally or config.defer_grad_sync)
    return Schedule(
        stage,
        kept,
        config.prefetch,
        gloo,
        accumulates=defers,
        adds=accumulate > 1 and not defers,
        offload=bool(config.offload),
        in_backward=config.optimizer_in_backward and (accumulate == 1 or defers),
        beside=bool(config.offload) and config.optimizer_in_backward,
        inner=inner,
        flat=flat,
        places=stage == 3 and config.has_places,
    )


def _ranks(config: Config, world_size: int, machine: Machine) -> Ranks:
    """Who communicates.

    Raises:
        PlanError: the ranks cannot be divided so, or hosts are asked for and not known.
    """
    ranks_per_node = machine.ranks_per_node
    if ranks_per_node is None and "nodes" in (config.device_mesh, config.reshard_after_forward):
        option = "device_mesh" if config.device_mesh == "nodes" else "reshard_after_forward"
        raise PlanError(f"`{option}='nodes'`: a plan knows no hosts. Give it `ranks_per_node`, or a number.")
    if ranks_per_node is not None and world_size > ranks_per_node and world_size % ranks_per_node:
        raise PlanError(
            f"{world_size} ranks are not on hosts of {ranks_per_node} each. Choose a multiple of `ranks_per_node`."
        )
    nodes = max(1, world_size // ranks_per_node) if ranks_per_node is not None else 1
    try:
        replicas = replicas_of(config, nodes, world_size)
        shards = world_size // replicas
        wanted = config.reshard_after_forward
        if wanted == "nodes" and ranks_per_node is not None:
            wanted = ranks_per_node if shards > ranks_per_node else True  # else there is nothing to gain
        return Ranks(shards, replicas, inner_size(wanted, nodes, [list(range(shards))]))
    except ValueError as error:
        raise PlanError(str(error)) from error


def accumulated(traffic: Traffic, resident: int, backwards: int, defers: bool) -> Traffic:
    """Of several backwards: values that live for a step are gathered once, and what is deferred is reduced once."""
    used = traffic.forward - resident
    reductions = traffic.reductions * (1 if defers else backwards)
    return dataclasses.replace(
        traffic,
        forward=resident + used * backwards,
        backward=traffic.backward * backwards,
        reductions=reductions,
        forward_gathers=traffic.forward_gathers * backwards,
        backward_gathers=traffic.backward_gathers * backwards,
    )


def _measured(
    machine: Machine,
    module: nn.Module,
    batch: Any,
    blocks: Sequence[str],
    trace: Trace,
    config: Config,
    dtypes: tuple[torch.dtype | None, torch.dtype | None, Islands],
    step: Step,
    device: torch.device,
) -> Machine:
    """With the rates that were not given."""
    flops, host, call = machine.flops, machine.host, machine.call
    dtype, autocast, islands = dtypes
    if flops is None:
        work = trace.forward_flops + trace.backward_flops
        if work == 0:
            raise PlanError(
                f"{type(module).__name__} has no matrix product or convolution, so its time tells no FLOP rate."
            )
        seconds = step_seconds(
            module,
            batch,
            blocks,
            device,
            dtype=dtype,
            autocast=autocast,
            compiled=partial(torch.compile, backend=config.backend, dynamic=False) if config.compile else None,
            step=step,
            checkpointed=config.checkpointed,
            islands=islands,
        )
        flops = work / seconds.device
        if seconds.host:
            host, call = host or seconds.host, call or Timer(device).small()
    to_host = bool(config.offload) or config.activation_offload
    return dataclasses.replace(
        machine,
        flops=flops,
        memory_bandwidth=machine.memory_bandwidth or memory_rate(device),
        host=host,
        call=call,
        link=machine.link or (link_rate(device) if to_host and device.type == "cuda" else None),
    )


def in_units(count: float | None) -> str:
    """A number of bytes for people; of ``None``: a question mark."""
    if count is None:
        return "?"
    for unit, size in (("GiB", _GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


_ROWS: tuple[tuple[str, Callable[[StagePlan], str]], ...] = (
    ("masters", lambda s: in_units(s.memory.masters)),
    ("optimizer states", lambda s: in_units(s.memory.states)),
    ("in host memory", lambda s: in_units(s.memory.host)),
    ("gathered parameters, at most", lambda s: in_units(s.memory.gathered)),
    ("secondary shards", lambda s: in_units(s.memory.secondary)),
    ("activations for the backward", lambda s: in_units(s.memory.activations)),
    ("full gradients, at most", lambda s: in_units(s.memory.gradients)),
    ("reduced gradients", lambda s: in_units(s.memory.reduced)),
    ("between steps", lambda s: in_units(s.memory.between_steps)),
    ("peak of the forward", lambda s: in_units(s.memory.forward_peak)),
    ("peak of the backward", lambda s: in_units(s.memory.backward_peak)),
    ("peak of the optimizer's step", lambda s: in_units(s.memory.step_peak)),
    ("peak", lambda s: in_units(s.memory.peak)),
    ("gathered in a step", lambda s: in_units(s.traffic.forward + s.traffic.backward)),
    ("reduced in a step", lambda s: in_units(s.traffic.reductions)),
    ("seconds a step", lambda s: "?" if s.seconds is None else f"{s.seconds:.3f}"),
    ("of them communication alone", lambda s: "?" if s.exposed is None else f"{s.exposed:.3f}"),
    ("fits", lambda s: {None: "?", True: "yes", False: "no"}[s.fits]),
)


def table(plan: Plan) -> str:
    """The plan for people."""
    cells = [["of one rank", *(f"stage {stage.stage}" for stage in plan.stages)]]
    cells += [[name, *(show(stage) for stage in plan.stages)] for name, show in _ROWS]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(c.rjust(w) if n else c.ljust(w) for n, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in cells
    ]
    largest = max(plan.units, key=lambda unit: unit.gathered)
    head = [
        f"{plan.module}: {plan.parameters:,} parameters in {len(plan.units)} units (the largest, `{largest.name}`: "
        f"{in_units(largest.gathered)}), {', '.join(plan.optimizers) or 'no optimizer'}, {plan.world_size} ranks"
        + (f" in {plan.replicas} replicas" if plan.replicas > 1 else ""),
        f"memory of a rank: {in_units(plan.machine.memory)}; FLOP a step: "
        + ("?" if plan.flops is None else f"{plan.flops:.3g}"),
    ]
    fastest = plan.fastest()
    foot = [choice(plan, fastest), *plan.notes]
    return "\n".join([*head, "", lines[0], "-" * len(lines[0]), *lines[1:], "", *foot])


def choice(plan: Plan, chosen: StagePlan | None) -> str:
    """One line that says which stage to take, and why."""
    if chosen is None:
        least = min(plan.stages, key=lambda s: s.memory.peak)
        return (
            f"No stage fits: stage {least.stage} needs {in_units(least.memory.peak)}, and {SHARE:.0%} of "
            f"{in_units(plan.machine.memory)} may be used. Plan it with recompute='blocks' (the backward "
            "computes blocks again), with offload='optimizer', with more ranks or with a smaller batch."
        )
    why = f"it moves {in_units(chosen.traffic.total)} a step and its peak is {in_units(chosen.memory.peak)}"
    if plan.machine.memory is not None:
        why += f" of {in_units(plan.machine.memory)}"
    misfits = [str(stage.stage) for stage in plan.stages if stage.fits is False]
    without = f"; stages that do not fit: {', '.join(misfits)}" if misfits else ""
    return f"Stage {chosen.stage} is the one to take: {why}{without}."
