"""``stage="auto"``: the fastest stage that fits, by the plan, alike on all ranks.

[Note: stage auto] The choice is made when the model is set up, before anything is sharded: each rank plans its own run,
the ranks tell each other once what each stage needs and what they have, and all take the stage that moves the least of
those that fit everywhere. No batch exists at that time, and to ask the Trainer's data for one would start the user's
workers and use a batch up. So activations count only where ``plan_batch`` makes a batch; otherwise a larger share of
the memory is left for them. A plan does not count what is outside of torch's allocator: that is in what is left free,
too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.optimizers import OptimizerError
from lightning_zerocompile.plan.plan import SHARE, Plan, in_units, make_plan
from lightning_zerocompile.plan.trace import PlanError, said
from lightning_zerocompile.ranks.groups import replicas_of
from lightning_zerocompile.runtime.memory_budget import free_memory, smallest_share

SHARE_WITHOUT_BATCH = 0.6  # as SHARE, where activations are not in the plan


@dataclasses.dataclass(frozen=True)
class Choice:
    """What ``stage="auto"`` has taken.

    Attributes:
        stage: of ZeRO.
        keep_gathered: the option, as the stage runs with it.
        world_size: number of ranks.
        memory: bytes that each rank may use.
        peaks: what stages 1, 2 and 3 need, of the rank that needs most; without a batch: beside activations.
        reason: one line.
    """

    stage: Literal[1, 2, 3]
    keep_gathered: tuple[str, ...] | int | Literal["auto"]
    world_size: int
    memory: int
    peaks: tuple[int, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint or a logger."""
        return {**dataclasses.asdict(self), "peaks": list(self.peaks)}

    def applied(self, config: Config) -> Config:
        """The options that the run has."""
        return dataclasses.replace(config, stage=self.stage, keep_gathered=self.keep_gathered)


@dataclasses.dataclass(frozen=True)
class Needs:
    """What one rank tells the others.

    Attributes:
        error: why it has no plan; "": it has one.
        peaks, traffic: bytes of stages 1, 2 and 3.
        host: whose memory it is; "": the rank's own.
        memory: bytes.
        notes: what the figures leave out.
    """

    error: str
    peaks: tuple[int, ...] = ()
    traffic: tuple[int, ...] = ()
    host: str = ""
    memory: int = 0
    notes: tuple[str, ...] = ()


def choose_stage(
    module: nn.Module,
    config: Config,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None,
    autocast_dtype: torch.dtype | None,
    batch: Callable[[], Any] | None = None,
    accumulate: int = 1,
    optimizer: Callable[[Any], Any] | None = None,
    nodes: int = 1,
) -> Choice:
    """See [Note: stage auto]; collective over the default process group.

    Args:
        module: not sharded yet; it is not changed.
        config: the strategy's options.
        device: of this rank.
        compute_dtype, autocast_dtype: as in :func:`~lightning_zerocompile.plan.plan.make_plan`.
        batch: makes a batch of one rank, as ``training_step`` gets it.
        accumulate: backwards for each step of the optimizer.
        optimizer: makes the optimizer of parameters instead of ``configure_optimizers``.
        nodes: number of hosts.

    Raises:
        PlanError: no stage fits, or a rank cannot plan; on all ranks, before anything is allocated.
    """
    world = dist.get_world_size()

    def plan(optimizer: Callable[[Any], Any] | None) -> Plan:
        return make_plan(
            module,
            None if batch is None else _made(batch),
            world_size=world,
            config=dataclasses.replace(config, device_mesh=replicas_of(config, nodes, world)),
            machine=Machine(gloo=device.type == "cpu"),
            compute_dtype=compute_dtype,
            autocast_dtype=autocast_dtype,
            accumulate=accumulate,
            optimizer=optimizer,
        )

    try:
        notes: tuple[str, ...] = ()
        try:
            made = plan(optimizer)
        except OptimizerError as error:  # `configure_optimizers` asks the Trainer, as many do
            made, notes = plan(torch.optim.AdamW), (f"States are counted as AdamW's, since {error}",)
        host, memory = free_memory(device)
        stages = made.stages
        needs = Needs(
            "", tuple(s.memory.peak for s in stages), tuple(s.traffic.total for s in stages), host, memory, notes
        )
    except (PlanError, ValueError) as error:
        needs = Needs(f"rank {dist.get_rank()}: {error}")
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, needs)
    return decide(everyone, config, batch is not None)


def _made(batch: Callable[[], Any]) -> Any:
    try:
        return batch()
    except Exception as error:  # the user's code
        raise PlanError(f"`plan_batch` makes no batch: {said(error)}") from error


def decide(everyone: Sequence[Needs], config: Config, has_batch: bool) -> Choice:
    """What all ranks take, from what all have told.

    Raises:
        PlanError: a rank has no plan, or no stage fits.
    """
    errors = [needs.error for needs in everyone if needs.error]
    if errors:
        raise PlanError(f"stage='auto' cannot plan the run: {errors[0]} Or choose a stage: 1, 2 or 3.")
    memory = smallest_share([(needs.host, needs.memory) for needs in everyone])
    share = SHARE if has_batch else SHARE_WITHOUT_BATCH
    usable = int(share * memory)
    peaks = tuple(max(sizes) for sizes in zip(*(needs.peaks for needs in everyone), strict=True))
    beside = "with activations" if has_batch else "beside activations"
    of = f"{in_units(usable)} ({share:.0%} of what is free, {in_units(memory)} a rank)"
    listed = ", ".join(f"stage {stage} {in_units(peak)}" for stage, peak in enumerate(peaks, start=1))
    fitting = [stage for stage, peak in enumerate(peaks, start=1) if peak <= usable]
    if not fitting:
        raise PlanError(
            f"stage='auto': no stage fits in {of}. On {len(everyone)} ranks they need, {beside}: {listed}. Use more "
            "ranks, recompute='blocks' or a smaller batch; or choose a stage yourself."
        )
    traffic = everyone[0].traffic
    stage = min(fitting, key=lambda one: (traffic[one - 1], one))
    gathered = "auto" if stage == 3 and not config.keep_gathered else config.keep_gathered  # measured in the run
    kept = f" What stays gathered: keep_gathered={gathered!r}." if stage == 3 else ""
    reason = (
        f"stage='auto' takes stage {stage}: of those that fit it moves the least, {in_units(traffic[stage - 1])} a "
        f"step. There is room for {of}; they need, {beside}: {listed}.{kept}"
    )
    return Choice(_STAGES[stage], gathered, len(everyone), memory, peaks, " ".join([reason, *everyone[0].notes]))


_STAGES: dict[int, Literal[1, 2, 3]] = {1: 1, 2: 2, 3: 3}
