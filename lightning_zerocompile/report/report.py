"""What a run has done, for people and for programs, with advice where something can be done."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zerocompile.compile.backend import CompileStats
from lightning_zerocompile.compile.regions import Fallback
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.optim.one_pass import KINDS
from lightning_zerocompile.plan.plan import in_units
from lightning_zerocompile.report.start import what_is_compiled
from lightning_zerocompile.runtime.memory_budget import free_memory
from lightning_zerocompile.runtime.runtime import EagerReads, Stats
from lightning_zerocompile.sharding.full_values import ON_HOST

_WORTH_KEEPING = 2**26  # bytes gathered for each backward, from which on to keep some of them saves time
_SPARE = 0.75  # of free memory that may be filled, as `keep_gathered="auto"` does
_RECOMPILATIONS = 4  # from which on there is advice: a few follow from the first sizes, and from a budget
_DRAINED = 0.8  # share of steps in which the device had nothing to do when the backward began
_STEPS = 10  # from which on the host's figures count


@dataclass(frozen=True)
class HostTimes:
    """What :class:`ZeroCompileMonitor` has measured on the host.

    Attributes:
        steps: training steps.
        seconds: of the host in them, without those that torch.compile took.
        drained: those in which the device had finished the whole forward when the backward began; ``None``: the ranks
            run on the CPU.
    """

    steps: int
    seconds: float
    drained: int | None


@dataclass(frozen=True)
class Advice:
    """Something that can be done.

    Attributes:
        about: ``"eager"``, ``"gathers"``, ``"host"``, ``"memory"``, ``"optimizer"`` or ``"recompilations"``.
        text: a sentence or two.
    """

    about: str
    text: str


@dataclass(frozen=True)
class Report:
    """A run on this rank, since its set-up; sizes are in bytes.

    Attributes:
        stage, world_size, replicas, device: of the run.
        compiled: how many modules, and by what; for people.
        modes: options that advice looks at: ``mode`` and ``keep_gathered``.
        units: how many.
        stats, compile_stats, eager_reads: as the strategy's.
        compile_seconds: that torch.compile took.
        gathers: of each unit in the second training step, for each backward; empty at stages 1 and 2.
        often: what to do about units that are gathered more than four times for each backward; "": there are none.
        fallbacks: compiled modules of which a part ran eagerly, with the reason.
        memory: by kind: ``masters``, ``optimizer_states``, ``host`` (those of both that are in host memory),
            ``gathered``, ``gathered_peak``, and on a device ``allocated`` and ``allocated_peak``.
        free: bytes that nothing has needed at the peak; ``None``: not known.
        largest: of the units that live for one use, the largest one's gathered values; 0: there is none.
        unfused: class names of optimizers that torch has fused kernels for, and that do not say whether to use them.
        host: of the monitor; ``None``: there was none.
    """

    stage: int
    world_size: int
    replicas: int
    device: str
    compiled: str
    modes: Mapping[str, Any]
    units: int
    stats: Stats
    compile_stats: CompileStats
    eager_reads: Mapping[str, EagerReads]
    compile_seconds: float
    gathers: Mapping[str, float]
    often: str
    fallbacks: tuple[Fallback, ...]
    memory: Mapping[str, int]
    free: int | None
    largest: int
    unfused: tuple[str, ...] = ()
    host: HostTimes | None = None

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What can be done, the most useful first."""
        return tuple(_advice(self))

    def as_dict(self) -> dict[str, object]:
        """All figures and the advice as plain values."""
        return {**asdict(self), "advice": [asdict(one) for one in self.advice]}

    def as_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        stats, backwards = self.stats, max(1, self.stats.backwards)
        lines = [
            f"zerocompile, stage {self.stage} on {self.world_size} rank{'s' * (self.world_size > 1)}"
            f"{f' in {self.replicas} replicas' if self.replicas > 1 else ''}, "
            f"{self.units} unit{'s' * (self.units > 1)}, {self.compiled}",
            f"backwards          {stats.backwards}",
            f"for each backward  {stats.gathers / backwards:.1f} gathers of {in_units(stats.gather_bytes / backwards)} "
            f"({stats.prefetched / backwards:.1f} of them ahead), {stats.reductions / backwards:.1f} reductions of "
            f"{in_units(stats.reduce_bytes / backwards)}",
            f"graphs             {self.compile_stats.dynamo_graphs}, {self.compile_stats.recompilations} of them "
            f"recompilations, in {self.compile_seconds:.0f} s",
            f"eager reads        {stats.eager_reads} outside of compiled code; {stats.eager_gathers} of them had to "
            "start a gather first",
            "memory             " + ", ".join(f"{kind} {in_units(size)}" for kind, size in self.memory.items()),
        ]
        if self.host is not None and self.host.steps:
            lines.append(f"host               {self.host.seconds / self.host.steps:.4f} s a step")
        return "\n".join([*lines, *(f"-> {one.text}" for one in self.advice)])


def report_of(engine: Engine, stats: Stats, compiled: CompileStats, host: HostTimes | None) -> Report:
    """Of the run so far; no communication."""
    runtime, config, watch = engine.runtime, engine.config, engine.gather_watch
    try:
        free: int | None = free_memory(runtime.device)[1]
        if runtime.device.type == "cpu":
            free = (free or 0) // runtime.world_size  # at most as many ranks are on this host
    except (RuntimeError, ValueError, OSError):
        free = None
    return Report(
        stage=config.chosen_stage,
        world_size=runtime.world_size,
        replicas=runtime.world_size // runtime.mesh.size(),
        device=str(runtime.device),
        compiled=what_is_compiled(engine),
        modes={"mode": config.mode, "keep_gathered": config.keep_gathered},
        units=len(engine.units),
        stats=stats,
        compile_stats=compiled,
        eager_reads=runtime.eager_reads(),
        compile_seconds=engine.regions.progress.seconds,
        gathers=dict(watch.gathers),
        often=watch.text(),
        fallbacks=tuple(engine.regions.fallbacks),
        memory=memory_by_kind(engine, stats),
        free=free,
        largest=max(runtime.used_units().values(), default=0),
        unfused=_unfused(engine),
        host=host,
    )


def _unfused(engine: Engine) -> tuple[str, ...]:
    """See :class:`Report`. Who writes ``foreach=True`` or ``fused=False`` has chosen."""
    found = [one for one in engine.steps.last if type(one) in KINDS]
    open_to = [one for one in found if any(g.get("fused") is None and not g.get("foreach") for g in one.param_groups)]
    return tuple(sorted({type(one).__name__ for one in open_to}))


@dataclass(frozen=True)
class Kept:
    """Bytes of this rank that stay from step to step, on the device."""

    masters: int
    states: int


def kept_bytes(engine: Engine) -> Kept:
    """Counts them, a tensor at a time."""
    masters = sum(sharded.local.nbytes for sharded in engine.runtime.sharded_parameters if not sharded.on_host)
    on_device = (value for value in engine.steps.states() if not getattr(value, ON_HOST, False))
    return Kept(masters, sum(_local_bytes(value) for value in on_device))


def memory_by_kind(engine: Engine, stats: Stats, kept: Kept | None = None) -> dict[str, int]:
    """Bytes on this rank, see :class:`Report`; ``kept``: what :func:`kept_bytes` has counted, if that is known."""
    runtime, kept = engine.runtime, kept or kept_bytes(engine)
    kinds = {
        "masters": kept.masters + runtime.host_traffic.copies,
        "optimizer_states": kept.states,
        "host": stats.offload_bytes,
        "gathered": stats.resident_bytes,
        "gathered_peak": stats.peak_resident_bytes,
    }
    if runtime.device.type == "cuda":
        kinds["allocated"] = torch.cuda.memory_allocated(runtime.device)
        kinds["allocated_peak"] = torch.cuda.max_memory_allocated(runtime.device)
    return kinds


def _local_bytes(value: Tensor) -> int:
    local = getattr(value, "_local_tensor", value)
    return local.numel() * local.element_size()


def _advice(report: Report) -> Iterator[Advice]:
    for fallback in report.fallbacks:
        yield Advice("eager", f"`{fallback.name}` ran eagerly, at least in part: {fallback.reason}")
    if report.compile_stats.recompilations >= _RECOMPILATIONS:
        yield Advice(
            "recompilations",
            f"{report.compile_stats.recompilations} of {report.compile_stats.dynamo_graphs} graphs are recompilations "
            "of code that was compiled before: its inputs change. Pad batches to a few sizes, or pass "
            "compile_options={'dynamic': True}; TORCH_LOGS=recompiles says what changed.",
        )
    if report.often:
        yield Advice("gathers", report.often)
    if report.unfused and report.device.startswith("cuda"):
        yield Advice(
            "optimizer",
            f"{' and '.join(report.unfused)} makes several passes over memory: with `fused=True` each unit is updated, "
            "cast and put where gathers read it by one kernel.",
        )
    host = report.host
    if (
        host is not None
        and host.drained is not None
        and host.steps >= _STEPS
        and host.drained >= _DRAINED * host.steps
        and report.modes["mode"] is None
    ):
        yield Advice(
            "host",
            f"The host is the limit: in {host.drained} of {host.steps} steps the device had nothing to do when the "
            "backward began. compile_options={'mode': 'reduce-overhead'} replays CUDA graphs, and larger "
            "batches give each kernel more to do.",
        )
    spare = int(_SPARE * report.free) if report.free is not None else 0
    alone = report.world_size == report.replicas  # gathers nothing from others
    moves = not alone and report.stats.gather_bytes >= _WORTH_KEEPING * max(1, report.stats.backwards)
    if report.stage == 3 and moves and report.modes["keep_gathered"] == () and 0 < report.largest <= spare:
        yield Advice(
            "memory",
            f"{in_units(report.free)} are free at the peak: `keep_gathered='auto'` keeps units gathered that fit, and "
            "saves their gathers in the backward.",
        )
