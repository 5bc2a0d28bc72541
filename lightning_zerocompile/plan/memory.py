"""What one rank holds at each moment of a step, at one stage: the schedule of the run, over the events of a trace.

[Note: predicted memory] Activations are the trace's. Masters, optimizer states, gathered values, full gradients and
reduced ones follow from the units and from what README.md says of each stage. Two transports differ. On a device the
full gradients of two units are alive at most. Gloo's reductions end with the backward, and it copies what it sends: all
full gradients are there at the end of a backward, and once more as gloo's copies. Not counted: what is outside of
torch's allocator (NCCL's buffers, the CUDA context, the mapped buffers of copies between GPUs) and its fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_zerocompile.optim.residency import largest_that_streams
from lightning_zerocompile.plan.optimizers import OptimizerBytes, local_size
from lightning_zerocompile.plan.trace import Event, Trace
from lightning_zerocompile.sharding.islands import NONE, Islands, gathered_dtype
from lightning_zerocompile.sharding.layout import shard_dtype
from lightning_zerocompile.sharding.plan import UnitPlan, places_of_blocks, signature

_REDUCTIONS_IN_FLIGHT = 2  # on a device: `retire(2)` in csrc/reductions.cpp
_UPDATES_BESIDE = 1  # beside them, the unit that the optimizer updates, see [Note: optimizer in backward]
_OFFLOAD_BUFFERS = 3  # see [Note: offload] in optim/offload.py
_OFFLOAD_AHEAD = 2  # see [Note: copies in the backward] there; where the backward updates, it has all three buffers


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0, which has the most rows.

    Attributes:
        masters: shards on the device, in the dtype that the optimizer updates; with ``offload``, what stays of them and
            the copies that gathers read.
        states: of optimizers, on the device.
        host: masters, states and activations in host memory.
        copied: of masters and states, between host memory and device in one step, in both directions together.
        resident: full parameters that stay gathered from one step to the next, and memory in which blocks are gathered
            at fixed addresses.
        buffers, batch: of the module, and of the batch.
        activations: that the forward keeps for the backward.
        gathered: most full parameters at any time (with ``resident``).
        secondary: secondary shards, from the forward until the optimizer's step (``reshard_after_forward``).
        gradients: most full gradients at any time, with the transport's copies.
        reduced: gradients of the shards, from backward to step; or, where the backward updates, the most of them at any
            time.
        between_steps, after_forward, after_backward: all that is alive at these points.
        forward_peak, backward_peak, step_peak: the most in each phase.
    """

    masters: int
    states: int
    resident: int
    buffers: int
    batch: int
    activations: int
    gathered: int
    gradients: int
    reduced: int
    between_steps: int
    after_forward: int
    after_backward: int
    forward_peak: int
    backward_peak: int
    step_peak: int
    host: int = 0
    copied: int = 0
    secondary: int = 0

    @property
    def peak(self) -> int:
        """The most at any time."""
        return max(self.forward_peak, self.backward_peak, self.step_peak)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step on one rank, as ``strategy.stats`` counts them: results of gathers, inputs of reductions.

    Attributes:
        forward, backward: of gathers in the forward (or after the optimizer) and in the backward.
        reductions: of gradients.
        step_gathers, forward_gathers, backward_gathers: numbers of units, not bytes: of those that live for a step, and
            of the others in the forward and in the backward.
    """

    forward: int
    backward: int
    reductions: int
    step_gathers: int = 0
    forward_gathers: int = 0
    backward_gathers: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.reductions


@dataclass(frozen=True)
class UnitBytes:
    """One unit on one rank.

    Attributes:
        gathered: its full parameters, padded to whole rows for each rank.
        gradient: its full gradients, as they are communicated.
        masters, reduced: of rank 0's rows.
        trainable: its parameters that have gradients.
        wide, copies: rank 0's rows of the trainable parameters that are gathered in another dtype than they are kept
            in. ``wide`` counts them as they are kept, ``copies`` as they are gathered.
    """

    name: str
    gathered: int
    gradient: int
    masters: int
    reduced: int
    trainable: frozenset[str]
    wide: int = 0
    copies: int = 0

    @property
    def rows(self) -> int:
        """Rank 0's rows, as they are gathered."""
        return self.masters - self.wide + self.copies


def unit_bytes(
    module: nn.Module,
    units: Sequence[UnitPlan],
    world: int,
    dtype: torch.dtype | None,
    master_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None = None,
    islands: Islands = NONE,
) -> list[UnitBytes]:
    """The units' bytes for ``world`` ranks.

    Args:
        module: whose parameters the units name.
        dtype: what floating-point parameters are gathered in; ``None``: their own.
        master_dtype, reduce_dtype: the strategy's.
        islands: what is gathered in float32.
    """
    facts = {}
    for name, parameter in module.named_parameters():
        floating = parameter.is_floating_point()
        kept = gathered_dtype(name, parameter, dtype, islands)
        gradient = reduce_dtype if reduce_dtype is not None and floating else kept
        own = shard_dtype(parameter, master_dtype)
        facts[name] = Facts(tuple(parameter.shape), kept, gradient, own, parameter.requires_grad)
    return bytes_of_units(units, facts, world)


@dataclass(frozen=True)
class Facts:
    """What decides the bytes of one parameter.

    Attributes:
        size: of the full parameter.
        gathered, reduced, master: the dtypes that it is gathered in, its gradient reduced in, and its shard kept in.
        trained: whether it has a gradient.
    """

    size: tuple[int, ...]
    gathered: torch.dtype
    reduced: torch.dtype
    master: torch.dtype
    trained: bool


def bytes_of_units(units: Sequence[UnitPlan], facts: Mapping[str, Facts], world: int) -> list[UnitBytes]:
    """The units' bytes for ``world`` ranks; ``facts``: of each parameter, by name."""
    result = []
    for unit in units:
        gathered = gradient = masters = reduced = wide = copies = 0
        for fact in (facts[name] for name in unit.parameters):
            rows = math.prod(local_size(fact.size, world))
            padded = rows * world if fact.size else 1
            gathered += padded * fact.gathered.itemsize
            masters += rows * fact.master.itemsize
            gradient += padded * fact.reduced.itemsize * fact.trained
            reduced += rows * fact.master.itemsize * fact.trained
            if fact.trained and fact.size and fact.gathered != fact.master:
                wide, copies = wide + rows * fact.master.itemsize, copies + rows * fact.gathered.itemsize
        trained = frozenset(name for name in unit.parameters if facts[name].trained)
        result.append(UnitBytes(unit.name, gathered, gradient, masters, reduced, trained, wide, copies))
    return result


@dataclass(frozen=True)
class Schedule:
    """How one stage runs.

    Attributes:
        stage: of ZeRO.
        kept: units that stay gathered between steps at stage 3 (at stages 1 and 2 all do).
        prefetch: the strategy's.
        gloo: whether the ranks talk through gloo, see [Note: predicted memory].
        accumulates: whether full gradients of earlier backwards wait for the last one.
        adds: whether reduced gradients of earlier backwards are there, to which those of a later one are added.
        offload: whether masters and states are in host memory.
        in_backward: whether a unit is updated when it is reduced (``optimizer_in_backward``), in the one backward that
            reduces anything. On a device reduced gradients live for the units in flight only. With gloo, when a
            reduction is done is not known before the backward ends.
        early: whether there is room for the units that come from host memory in the backward.
        beside: whether what is in host memory streams beside the backward, which updates it
            (``optimizer_in_backward``). It does so in the last of several backwards, too, where ``in_backward`` is
            False.
        inner: how many ranks gather in the backward among themselves, from secondary shards; None: there are none.
        flat: whether what is gathered and reduced is packed on its way, see [Note: flat collectives] in
            csrc/collectives.h.
        places: whether blocks are gathered at fixed addresses, see [Note: fixed places] in csrc/fixed_places.cpp.
    """

    stage: int
    kept: frozenset[str] = frozenset()
    prefetch: int = 1
    gloo: bool = False
    accumulates: bool = False
    adds: bool = False
    offload: bool = False
    in_backward: bool = False
    early: bool = True
    beside: bool = False
    inner: int | None = None
    flat: bool = False
    places: bool = False


@dataclass(frozen=True)
class _Offloaded:
    """Bytes on one rank: masters and states that are in host memory, copies on the device that gathers read in the
    place of such masters, the largest unit in host memory, and what a step copies."""

    masters: int = 0
    states: int = 0
    copies: int = 0
    largest: int = 0
    copied: int = 0


def _offloaded(units: Sequence[UnitBytes], states: int, schedule: Schedule) -> _Offloaded:
    """See [Note: offload] and [Note: offload beside the backward] in optim/offload.py.

    A unit is taken to have its share of all states.
    """
    if not schedule.offload:
        return _Offloaded()
    trained = max(1, sum(unit.reduced for unit in units))
    read_apart_of = [schedule.beside or (schedule.stage == 3 and unit.name not in schedule.kept) for unit in units]
    parts = [  # masters and states
        (unit.wide if apart else unit.reduced, states * unit.reduced // trained)
        for unit, apart in zip(units, read_apart_of, strict=True)
    ]
    sizes = [masters + kept for masters, kept in parts]
    largest = largest_that_streams(sizes, _OFFLOAD_BUFFERS) if schedule.beside else max(sizes, default=0)
    away = [
        (u, apart, *part) for u, apart, part in zip(units, read_apart_of, parts, strict=True) if sum(part) <= largest
    ]
    return _Offloaded(
        masters=sum(masters for _, _, masters, _ in away),
        states=sum(kept for *_, kept in away),
        copies=sum(unit.copies for unit, read_apart, *_ in away if read_apart),
        largest=largest,
        copied=sum(2 * (masters + kept) for *_, masters, kept in away),
    )


def units_of_modules(units: Sequence[UnitPlan], modules: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """For each module that a trace names, the units of its parameters."""
    found = {}
    for module in modules:
        inside = f"{module}." if module else ""
        blocks = [unit for unit in units if unit.block is not None and unit.name == module]
        own = [u for u in units if any(_is_direct(name, inside) for name in u.parameters)]
        found[module] = tuple(unit.name for unit in blocks or own)
    return found


def _placed(plans: Sequence[UnitPlan]) -> dict[str, object]:
    """The units that are gathered at fixed addresses, and what those have in common that share them."""
    return {plan.name: signature(plan.block)[1] for plan in plans if plan.block is not None}


def _is_direct(parameter: str, prefix: str) -> bool:
    return parameter.startswith(prefix) and "." not in parameter[len(prefix) :]


def simulate(
    plans: Sequence[UnitPlan],
    units: Sequence[UnitBytes],
    optimizer: OptimizerBytes,
    trace: Trace | None,
    schedule: Schedule,
    buffers: int = 0,
) -> tuple[Memory, Traffic]:
    """Memory and traffic of a step that is not the first.

    Args:
        plans, units: of the module, in the same order.
        optimizer: what its states need.
        trace: of the step; ``None``: activations are not known and not counted, and each unit is used once in forward
            and once in backward.
        schedule: how the stage runs.
        buffers: bytes of the module's buffers.
    """
    events = trace.events if trace is not None else _plain_events(units)
    of_module = units_of_modules(plans, [e.name for e in events if e.kind == "use"]) if trace is not None else {}
    placed = _placed(plans) if schedule.places else {}
    names = {name: of_module.get(name, (name,)) for name in {e.name for e in events}}
    run = _Run(units, schedule, events, names, placed)
    run.go()
    resident = run.resident + run.places
    away = _offloaded(units, optimizer.states, schedule)
    masters = sum(u.masters for u in units) - away.masters + away.copies
    states, reduced = optimizer.states - away.states, sum(u.reduced for u in units)
    to_step = 0 if schedule.in_backward else reduced
    beside = optimizer.temporary if schedule.in_backward or schedule.beside else 0
    backward_peak = run.backward_peak + beside + (_OFFLOAD_AHEAD * away.largest if schedule.early else 0)
    if schedule.beside:  # the last buffer is made when the first unit is updated
        before = run.peak_before_updates + _OFFLOAD_AHEAD * away.largest
        backward_peak = max(before, run.peak_of_updates + beside + _OFFLOAD_BUFFERS * away.largest)
    batch = trace.batch_bytes if trace is not None else 0
    between = masters + states + resident + buffers
    base = masters + states + buffers + batch
    staging = run.staging_after_step() if schedule.gloo else 0
    memory = Memory(
        masters=masters,
        states=states,
        resident=resident,
        buffers=buffers,
        batch=batch,
        activations=trace.saved if trace is not None else 0,
        gathered=run.most_gathered,
        gradients=run.most_gradients,
        reduced=run.most_reduced if schedule.in_backward else reduced,
        between_steps=between,
        after_forward=base + run.after_forward,
        after_backward=between + batch + to_step + run.secondary,
        forward_peak=base + run.forward_peak,
        backward_peak=base + backward_peak,
        step_peak=between
        + run.secondary
        + max(to_step, staging)
        + optimizer.temporary
        + _OFFLOAD_BUFFERS * away.largest,
        host=away.masters + away.states + (trace.on_host if trace is not None else 0),
        copied=away.copied,
        secondary=run.secondary,
    )
    return memory, run.traffic()


def _plain_events(units: Sequence[UnitBytes]) -> tuple[Event, ...]:
    forward = [Event("use", unit.name, False, 0, 0) for unit in units]
    backward = []
    for unit in reversed(units):
        backward.append(Event("use", unit.name, True, 0, 0))
        backward += [Event("grad", name, True, 0, 0) for name in sorted(unit.trainable)]
    return (*forward, Event("loss", "", False, 0, 0), *backward, Event("end", "", True, 0, 0))


class _Run:
    """One step at one stage: what is gathered and which gradients are alive, from event to event."""

    def __init__(
        self,
        units: Sequence[UnitBytes],
        schedule: Schedule,
        events: Sequence[Event],
        of_module: Mapping[str, tuple[str, ...]],
        placed: Mapping[str, object],
    ) -> None:
        self._units = {unit.name: unit for unit in units}
        self._schedule, self._events = schedule, events
        self._uses = [
            (position, name)
            for position, event in enumerate(events)
            if event.kind == "use"
            for name in of_module[event.name]
        ]
        self._back_from = next(n for n, event in enumerate(events) if event.kind == "loss")
        stays = schedule.stage < 3
        self._resident = {name for name in self._units if stays or name in schedule.kept}
        self.resident = sum(self._units[name].gathered for name in self._resident)
        self._placed = {name: kind for name, kind in placed.items() if name not in self._resident}
        self.places = self._bytes_of_places()
        self._staged = set(self._resident) if schedule.gloo else set()  # gathered since the step, not used yet
        self._gathered: list[str] = []  # of those that live for one use
        self._kept_part: set[str] = set()  # those with secondary shards
        self.secondary = 0
        self._waiting = {unit.name: set(unit.trainable) for unit in units}
        self._owner = {name: unit.name for unit in units for name in unit.trainable}
        self._full: dict[str, int] = {}  # full gradients by unit, with the transport's copies
        self._order: list[str] = []
        self._reduced = sum(unit.reduced for unit in units) if schedule.adds else 0
        self._passing = 0  # copies on their way, beside what is gathered
        self._forth = self._back = 0
        self._gathers = {False: 0, True: 0}  # by whether it is the backward
        self.most_gathered, self.most_gradients, self.most_reduced = self.resident + self.places, 0, 0
        self.after_forward = self.forward_peak = 0
        self.peak_before_updates = self.peak_of_updates = 0  # of the backward, until its first unit is reduced and then

    @property
    def backward_peak(self) -> int:
        return max(self.peak_before_updates, self.peak_of_updates)

    def go(self) -> None:
        accumulated = sum(u.gradient for u in self._units.values()) if self._schedule.accumulates else 0
        back = False
        for position, event in enumerate(self._events):
            held = self._held(accumulated) + self._passing + self._copies_of(self._staged)
            updates = self._schedule.gloo or bool(self._order)
            if self._schedule.flat:  # it is packed and unpacked within one event
                self._passing = 0
            if event.kind == "use":
                for name in [name for at, name in self._uses if at == position]:
                    self._use(name, event.back, position)
            elif event.kind == "grad" and event.name in self._owner:
                self._grad(event.name)
            # what was made between the last event and this one was there beside what the stage held at either
            most = max(held, self._held(accumulated) + self._passing) + event.live
            if back and updates:
                self.peak_of_updates = max(self.peak_of_updates, most)
            elif back:
                self.peak_before_updates = max(self.peak_before_updates, most)
            else:
                self.forward_peak = max(self.forward_peak, most)
            if event.kind == "loss":
                back = True
                self._staged.clear()
                self.after_forward = self._held(accumulated) + event.now
        for unit in self._units.values():  # zeros, or another rank's gradients
            if self._waiting[unit.name] and self._schedule.gloo:
                self._reduce(unit)
        last = self._events[-1].now
        self.peak_of_updates = max(self.peak_of_updates, self._held(accumulated) + last)

    def _bytes_of_places(self) -> int:
        kinds: dict[object, list[int]] = {}
        for name, kind in self._placed.items():
            kinds.setdefault(kind, []).append(self._units[name].gathered)
        return sum(sum(sizes[: places_of_blocks(self._schedule.prefetch)]) for sizes in kinds.values())

    def _held(self, accumulated: int) -> int:
        beside = [name for name in self._gathered if name not in self._placed]
        gathered = self.resident + self.places + sum(self._units[name].gathered for name in beside)
        gradients = max(sum(self._full.values()), accumulated)
        self.most_gathered = max(self.most_gathered, gathered)
        self.most_gradients = max(self.most_gradients, gradients)
        self.most_reduced = max(self.most_reduced, self._reduced)
        return gathered + gradients + self._reduced + self.secondary

    def _use(self, name: str, back: bool, position: int) -> None:
        self._staged.discard(name)
        if name in self._resident:
            return
        later = [(at, other) for at, other in self._uses if at > position and other != name]
        following = [other for at, other in later if (at > self._back_from) is (position > self._back_from)]
        ahead = list(dict.fromkeys(o for o in following if o not in self._resident))[: self._schedule.prefetch]
        new = [other for other in (name, *ahead) if other not in self._gathered]
        size = sum(self._units[other].gathered for other in new)
        self._forth, self._back = self._forth + size * (not back), self._back + size * back
        self._gathers[back] += len(new)
        if self._schedule.inner is not None and not back:
            self._kept_part.update(new)
            self.secondary = sum(self._units[other].gathered for other in self._kept_part) // self._schedule.inner
        left = [other for other in self._gathered if other not in (name, *ahead)]
        if self._schedule.gloo:  # what it has copied, and what it has not let go of yet
            copies = size + sum(self._units[other].masters for other in new)
            self._passing = copies + sum(self._units[other].gathered for other in left)
        elif self._schedule.flat and not (back and self._schedule.inner is not None):
            self._passing = max((u.gathered + u.rows for u in map(self._units.__getitem__, new)), default=0)
        self._gathered = [name, *ahead]

    def _grad(self, parameter: str) -> None:
        unit = self._units[self._owner[parameter]]
        waiting = self._waiting[unit.name]
        waiting.discard(parameter)
        share = unit.gradient * (len(unit.trainable) - len(waiting)) // len(unit.trainable)
        self._full[unit.name] = max(share, self._full.get(unit.name, 0))
        if not waiting:
            self._reduce(unit)

    def _reduce(self, unit: UnitBytes) -> None:
        self._waiting[unit.name] = set()
        if not self._schedule.adds:
            self._reduced += unit.reduced
        if self._schedule.gloo:
            self._full[unit.name] = 2 * unit.gradient
            return
        self._full[unit.name] = unit.gradient
        if self._schedule.flat:
            self._passing = unit.gradient + unit.gradient * unit.rows // unit.gathered
        self._order.append(unit.name)
        if self._schedule.in_backward:
            alive = self._order[-_REDUCTIONS_IN_FLIGHT - _UPDATES_BESIDE :]
            self._reduced = sum(self._units[name].reduced for name in alive)
        for done in self._order[:-_REDUCTIONS_IN_FLIGHT]:
            self._full.pop(done, None)

    def staging_after_step(self) -> int:
        """Gloo's copies of what is gathered while the optimizer steps (results, and this rank's part of them), and the
        gradients of the unit that is updated."""
        largest = max((self._units[name].gradient for name in self._resident), default=0)
        return largest + self._copies_of(self._resident)

    def _copies_of(self, names: Collection[str]) -> int:
        """What gloo holds of these units until somebody waits for their gathers."""
        return sum(self._units[name].gathered + self._units[name].masters for name in names)

    def traffic(self) -> Traffic:
        reductions = sum(unit.gradient for unit in self._units.values())
        counts = (len(self._resident), self._gathers[False], self._gathers[True])
        return Traffic(self.resident + self._forth, self._back, reductions, *counts)
