"""Optimizers of known kind step unit by unit on plain tensors, so that a unit is gathered while the next is updated.

[Note: step by unit] Lightning, schedulers and hooks see one ``optimizer.step(closure)``. We pass a closure of our own.
It runs the user's closure. Then it updates every unit's local shards with the optimizer's own ``step``, whose parameter
lists are narrowed to that unit, or to a few small ones. Finally it takes the gradients away, so the step to which the
closure returns finds nothing to do. DTensors would give the same numbers, at 20 to 30 us of dispatch per parameter and
without the overlap.

On a device the reductions that end last are those of the units that the forward uses first, and the next forward waits
for their gathers first. So the last quarter of the units is updated first, and its units are gathered while the others
are updated. The others follow in the order of the forward (see [Note: reductions after a backward] in
csrc/reductions.cpp). With a fused Adam or AdamW a small model is updated in one round, since there the time of the host
counts. Offloaded units, updates inside a backward and optimizers that communicate have orders of their own.

[Note: versions of updates] By the version of a master the runtime knows that what is gathered of it is old, and that a
backward comes too late. Fused optimizers, and the kernels of one_pass.py, write and raise no version. So the version is
raised for them, after each update and each step of an optimizer, also after one that raises half-way.

[Note: whole values] Adafactor updates a parameter from all of its rows. Such an optimizer sees whole parameters,
gradients and states, one unit at a time, on every rank. Afterwards each rank keeps its rows. So the optimizer computes
what it computes under DDP, and memory is that of the shards plus one unit. State of another shape than its parameter's
(Adafactor's factors) is on every rank. Users name their own optimizers of this kind in ``full_param_optimizers``. If
one of them counts steps in its parameter groups, it finds the same count for every unit. Muon needs whole matrices,
too, but one rank alone orthogonalises each of them: see [Note: Muon] in matrices.py.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, optim
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile.optim.matrices import shares_matrices
from lightning_zerocompile.optim.matrices import step as step_on_rows
from lightning_zerocompile.optim.offload import Offload, Stream
from lightning_zerocompile.optim.one_pass import OnePass
from lightning_zerocompile.optim.slabs import Staged
from lightning_zerocompile.optim.supported import plain_step, sees_whole_values
from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.layout import local_part, over_local, shard_like
from lightning_zerocompile.sharding.master import (
    as_plain_tensors,
    bind_gradient,
    bound_gradient,
    gradient_of,
    index_of,
)
from lightning_zerocompile.sharding.sharded import sharded_as

_TAKES_ANY_STATE = (optim.Adam, optim.AdamW)  # if fused; fused SGD needs a momentum of all its parameters, or of none
_TOGETHER = 2**25  # elements: a device updates so many in about the time that the host needs to call the optimizer


class Gradients(Protocol):
    """The reduced gradients of the runtime, by the numbers of their parameters; and who reads what they update."""

    def lend_gradients(self, parameters: Sequence[int], values: Sequence[Tensor]) -> list[int]: ...

    def release_gradients(self, parameters: Sequence[int], values: Sequence[Tensor]) -> None: ...

    def come_apart(self, meet: Callable[[], None], /) -> None: ...

    def meet_readers(self) -> None: ...


class _Kind(Enum):
    """How an optimizer computes the update of a parameter."""

    LOCAL = "from this rank's rows"
    WHOLE = "from whole values on every rank, see [Note: whole values]"
    SHARED = "from this rank's rows, by :func:`step_on_rows`, see [Note: Muon]"


@dataclass(eq=False)
class _Round:
    """Units that are updated together.

    Attributes:
        units: their numbers.
        masters: the optimizer's parameters in these units.
        numbers: the runtime's number of each master.
        groups: the optimizer's group of each master.
        values: the local part of each master, [<=rows, ...].
        states: what the last update has seen of the masters' states.
    """

    units: list[int] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    states: _PlainStates | None = None


class _PlainStates:
    """The masters' states of a round as the update sees them: of plain tensors.

    [Note: cheap states] To make a dictionary for each parameter, and to look through all of them after the update,
    takes the host longer than to launch the update. But most optimizers change their states in place, so the same
    dictionaries serve the next step, as long as the masters' states are the same objects. A state that nobody else
    holds any more (an optimizer's states were loaded) must not stay in memory for that: then the dictionaries go, too
    (``dropped``).

    Args:
        round: whose they are.
        state: of the optimizer.
        values: the plain tensors of the round.

    Attributes:
        plain: the states of ``values``.
    """

    def __init__(self, round: _Round, state: Mapping[Tensor, Any], values: Sequence[Tensor]) -> None:
        entries = [state.get(master) for master in round.masters]
        self.plain: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for entry, value in zip(entries, values, strict=True):
            if entry is not None:
                self.plain[value] = {name: _value(kept, whole=False) for name, kept in entry.items()}
        self._kept, self._plain = _ids(entries), _ids(self.plain.values())
        this = weakref.ref(round)

        def dropped(_: object) -> None:
            if (owner := this()) is not None:
                owner.states = None

        self._watched = [
            (weakref.ref(kept, dropped), weakref.ref(kept._local_tensor))
            for entry in entries
            for kept in (entry or {}).values()
            if isinstance(kept, DTensor)
        ]

    def are_of(self, round: _Round, state: Mapping[Tensor, Any]) -> bool:
        """Whether the masters' states are those of which these were made."""
        if self._kept != _ids(map(state.get, round.masters)):
            return False
        # a number counts as long as its object is alive
        return all((held := kept()) is not None and held._local_tensor is local() for kept, local in self._watched)

    def unchanged(self, state: object) -> bool:
        """Whether ``state``, the optimizer's after an update, is still :attr:`plain`, with the same tensors."""
        return state is self.plain and self._plain == _ids(self.plain.values())


def _ids(entries: Iterable[Mapping[str, Any] | None]) -> list[Any]:
    """The names and the identities of what is in the entries."""
    found = [entry or {} for entry in entries]
    values = chain.from_iterable(entry.values() for entry in found)
    return [*map(len, found), *chain.from_iterable(found), *map(id, values)]


class _Plan:
    """The rounds of an optimizer, made from its groups' parameters and used until these or the units change.

    Args:
        lists: the parameters of each group.
        units: the number and the masters of each unit, in the order in which the next forward needs them. If
            ``together`` is 0, this is also the order of the updates. Else the last quarter is updated first.
        together: units are added to a round until their shards have so many elements. If it is more than 1 and all
            units have at most twice as many, there is one round. 0: each ``count`` units are a round, even if their
            shards have no elements.
        kind: how the updates are computed.
        count: units of a round; it counts only if ``together`` is 0.
    """

    def __init__(
        self,
        lists: list[list[Tensor]],
        units: Sequence[tuple[int, Sequence[Tensor]]],
        together: int,
        kind: _Kind,
        count: int = 1,
    ) -> None:
        self.kind, self._count = kind, count
        self.together, self._order, self._sizes = together, [unit for unit, _ in units], [len(one) for one in lists]
        self.masters = list(chain.from_iterable(lists))
        self.numbers = [index_of(master) for master in self.masters]
        self._values = [_value(master, whole=False) for master in self.masters]
        group_of = {master: group for group, parameters in enumerate(lists) for master in parameters}
        mine = [(unit, [master for master in members if master in group_of]) for unit, members in units]
        mine = [(unit, members) for unit, members in mine if members]
        total = sum(map(_share, self.masters))
        at_once = together > 1 and total <= 2 * together
        first = len(mine) - (len(mine) // 4 if together and not at_once else 0)
        size = total if at_once else together
        self.rounds = [*self._rounds(mine[first:], size, group_of), *self._rounds(mine[:first], size, group_of)]

    def _rounds(
        self, units: Sequence[tuple[int, list[Tensor]]], size: int, group_of: Mapping[Tensor, int]
    ) -> Iterator[_Round]:
        """Yields rounds of at least ``size`` elements, or of ``count`` units if ``size`` is 0; the last may be smaller.

        Elements are counted as :func:`_share` does, so all ranks put the same units in a round.
        """
        started, numel = _Round(), 0
        for unit, members in units:
            values = [_value(master, whole=False) for master in members]
            numel += sum(map(_share, members))
            started.units.append(unit)
            started.masters += members
            started.numbers += [index_of(master) for master in members]
            started.groups += [group_of[master] for master in members]
            started.values += values
            if numel >= size and (size or len(started.units) == self._count):
                yield started
                started, numel = _Round(), 0
        if started.units:
            yield started

    def fits(
        self, lists: list[list[Tensor]], units: Sequence[tuple[int, Sequence[Tensor]]], together: int, kind: _Kind
    ) -> bool:
        return (
            (together, kind) == (self.together, self.kind)
            and [unit for unit, _ in units] == self._order
            and [len(one) for one in lists] == self._sizes
            and all(map(is_, chain.from_iterable(lists), self.masters))
            and all(map(is_, map(attrgetter("_local_tensor"), self.masters), self._values))
        )


class UnitStepper:
    """Updates an optimizer's parameters unit by unit.

    Args:
        units: returns the number and the masters of each unit, in the order in which the next forward needs them.
        updated: called after the masters of some units were written, with the numbers of these units, and with the
            numbers of those of their masters whose casts are placed (see [Note: updates in one pass]).
        kept: returns the masters of a list whose ``grad`` survives the step.
        gradients: where the reduced gradients are.
        full_param_optimizers: names of the user's optimizers that see whole values.
        offload: what is kept in host memory; its units are updated one by one.
        together: a fused Adam or AdamW updates units together until their shards have so many elements. Optimizers that
            are not fused would make temporary values of all that they update at once.
        one_by_one: every unit is updated on its own, see [Note: optimizer in backward].
        ranks: how many the shard group has.
        one_pass: updates the units of some optimizers; ``None``: torch updates all.
        begins: called before each update in a step.

    Attributes:
        in_one_pass: how many updates of units ``one_pass`` has made.
    """

    def __init__(
        self,
        units: Callable[[], Sequence[tuple[int, Sequence[Tensor]]]],
        updated: Callable[[list[int], list[int]], None],
        kept: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        gradients: Gradients,
        full_param_optimizers: Sequence[str],
        offload: Offload,
        together: int = _TOGETHER,
        one_by_one: bool = False,
        ranks: int = 1,
        one_pass: OnePass | None = None,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self._one_pass, self.in_one_pass = one_pass, 0
        self._begins = begins
        self._ranks, self._apart = ranks, False
        self._offload, self._one_by_one = offload, one_by_one
        self._units, self._updated, self._kept, self._gradients = units, updated, kept, gradients
        self._full_param_optimizers, self.together = full_param_optimizers, together
        self._plans = WeakKeyDictionary[Optimizer, _Plan]()

    def forget(self) -> None:
        """Lets go of all parameters."""
        self._plans.clear()

    @contextmanager
    def around(
        self, optimizer: Optimizer, closure: Callable[[], Any], done: Callable[[], Collection[int]] = tuple
    ) -> Iterator[Callable[[], Any]]:
        """Yields the closure to pass to ``optimizer.step`` inside this context.

        Args:
            closure: the user's; ours returns its result.
            done: called after ``closure``, returns the units that a backward has updated. Such a unit is updated here
                only if user code has set a gradient of it since.

        Raises:
            RuntimeError: from our closure, see :meth:`_Options.note`.
        """
        kept: dict[Tensor, Tensor | None] = {}
        options: list[dict[str, Any]] = []

        def run() -> Any:
            result = closure()
            lists = [group["params"] for group in optimizer.param_groups]
            plan = self._plan(optimizer, lists)
            with as_plain_tensors():
                kept.update({master: gradient_of(master) for master in self._kept(plan.masters)})
                try:
                    options[:] = self._step(optimizer, plan, done())
                finally:
                    for group, parameters in zip(optimizer.param_groups, lists, strict=True):
                        group["params"] = parameters
                self._gradients.release_gradients(plan.numbers, [])  # also those that no round has used
            return result

        def settle(*_: object) -> None:
            """Runs before the user's hooks after the step: what they change stays."""
            with as_plain_tensors():
                for master, grad in kept.items():
                    bind_gradient(master, grad)
            kept.clear()
            for group, new in zip(optimizer.param_groups, options, strict=False):
                group.update(new)  # the step that found nothing to do may have counted itself in the groups, too
            options.clear()

        hook, hooks = optimizer.register_step_post_hook(settle), cast(Any, optimizer._optimizer_step_post_hooks)
        hooks.move_to_end(hook.id, last=False)
        try:
            yield run
        except BaseException:
            options.clear()
            raise
        finally:
            hook.remove()
            settle()

    @torch.no_grad()
    def update_now(
        self,
        optimizer: Optimizer,
        chosen: Callable[[int], bool],
        prepare: Callable[[Sequence[Tensor]], object],
        updated: set[int],
        stream: Stream | None = None,
    ) -> None:
        """Updates units outside of ``optimizer.step``, see [Note: optimizer in backward].

        Args:
            chosen: whether to update the unit of this number.
            prepare: called before the update, with the local parts, [<=rows, ...], of those of a unit's masters that
                have a gradient.
            updated: gets the numbers of the updated units, each when it is updated: those that had a gradient. It is
                for the caller to tell the runtime.
            stream: brings what is in host memory, by the numbers of the units. Several units are then updated in the
                order of a backward, which is the reverse of the forward's.
        """
        lists = [group["params"] for group in optimizer.param_groups]
        plan = self._plan(optimizer, lists)
        update = plain_step(optimizer)
        with as_plain_tensors():
            try:
                for one in plan.rounds if stream is None else reversed(plan.rounds):
                    if not all(map(chosen, one.units)):
                        continue
                    if stream is not None and not self._has_gradient(one):
                        continue  # nothing is fetched for it
                    (unit,) = one.units
                    staged = {} if stream is None else stream.enter(unit)
                    values = _where_updated(one, one.values, staged)
                    _narrow(optimizer, one, values)
                    if not self._update(optimizer, one, values, update, False, staged, prepare):
                        continue
                    updated.add(unit)
                    if stream is not None:
                        stream.updated(staged)
                        stream.leave(unit, staged, one.units)
            finally:
                for group, parameters in zip(optimizer.param_groups, lists, strict=True):
                    group["params"] = parameters

    def _has_gradient(self, one: _Round) -> bool:
        """Whether a master of the round has a reduced gradient."""
        places = [torch.empty(0) for _ in one.numbers]
        others = self._gradients.lend_gradients(one.numbers, places)
        found = bool(others) or any(place.grad is not None for place in places)
        self._gradients.release_gradients([], places)
        return found

    def _plan(self, optimizer: Optimizer, lists: list[list[Tensor]]) -> _Plan:
        fused = type(optimizer) in _TAKES_ANY_STATE and all(group.get("fused") for group in optimizer.param_groups)
        together, units, count = self.together if fused else 1, self._units(), 1
        kind = _Kind.LOCAL
        if shares_matrices(optimizer):
            kind, count = _Kind.SHARED, self._ranks
        elif sees_whole_values(optimizer, self._full_param_optimizers):
            kind = _Kind.WHOLE
        if kind is not _Kind.LOCAL:  # updates communicate, so all ranks need one order, also if their forwards differ
            together, units = 0, sorted(units, key=itemgetter(0))
        elif self._one_by_one:
            together = 0
        elif self._offload.holds(optimizer):
            together, units = 0, self._offload.ordered(optimizer, units)
        plan = self._plans.get(optimizer)
        if plan is None or not plan.fits(lists, units, together, kind):
            plan = self._plans[optimizer] = _Plan(lists, units, together, kind, count)
        return plan

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, plan: _Plan, done: Collection[int]) -> list[dict[str, Any]]:
        """Updates the rounds of ``plan``, and returns the groups' options after that. ``done``: see :meth:`around`."""
        options = _Options(optimizer)
        try:
            rounds = [one for one in plan.rounds if not (done and _is_done(one, done))]
            self._update_all(optimizer, rounds, options, plan.kind)
        except BaseException:
            options.restore()
            raise
        return options.after

    def _update_all(self, optimizer: Optimizer, rounds: Sequence[_Round], options: _Options, kind: _Kind) -> None:
        update, whole = plain_step(optimizer), kind is _Kind.WHOLE
        self._gradients.meet_readers()  # see [Note: kept casts] in csrc/peers.h
        with self._offload.stream(optimizer, [one.units for one in rounds]) as stream:
            for position, one in enumerate(rounds):
                staged = {} if stream is None else stream.enter(position)
                values = [_value(master, whole) for master in one.masters] if whole else one.values
                values = _where_updated(one, values, staged)
                options.restore()
                _narrow(optimizer, one, values)
                if kind is _Kind.SHARED:
                    self._check_together()
                    masters = dict(zip(values, one.masters, strict=True))
                    update = partial(self._step_together, optimizer, masters)
                placed: list[int] = []
                self._update(optimizer, one, values, update, whole, staged, placed=placed)
                if stream is None:
                    options.note(set(one.groups))
                    self._updated(one.units, placed)
                    continue
                stream.updated(staged)
                try:
                    options.note(set(one.groups))
                    self._updated(one.units, placed)
                finally:
                    stream.leave(position, staged, one.units)

    def _step_together(self, optimizer: Optimizer, masters: Mapping[Tensor, Tensor]) -> None:
        """A step of Muon. If it raises while rows travel, all further gathers and steps of Muon on this rank raise."""
        try:
            step_on_rows(optimizer, masters, begins=self._rows_travel)
        except BaseException:
            if self._apart:
                self._gradients.come_apart(self._check_together)
            raise
        self._apart = False

    def _rows_travel(self) -> None:
        self._apart = True  # until the step has succeeded

    def _check_together(self) -> None:
        if self._apart:
            raise RuntimeError(
                "An earlier step of Muon raised on this rank after the ranks had begun to exchange rows of its "
                "matrices. So the model may be updated in part, and what the ranks exchange next may not match. Start "
                "again from a checkpoint."
            )

    def _update(
        self,
        optimizer: Optimizer,
        one: _Round,
        values: list[Tensor],
        update: Callable[[], Any],
        whole: bool,
        staged: Mapping[Tensor, Staged],
        prepare: Callable[[Sequence[Tensor]], object] | None = None,
        placed: list[int] | None = None,
    ) -> bool:
        """Updates one round. The optimizer sees plain tensors as its parameters, gradients and states.

        Args:
            values: of the round's masters: their local parts, or whole values.
            update: makes the update; one pass over memory may take its place.
            whole: whether ``values`` are whole values.
            staged: the offloaded masters of the round; ``values`` has their rows where the update runs.
            prepare: called with the values that have a gradient. If none has, nothing is updated.
            placed: gets the numbers of the masters whose casts are placed; ``None``: no cast may be placed.

        Returns:
            False if ``prepare`` is given and no value has a gradient, else True.
        """
        pairs = list(zip(one.masters, values, strict=True))
        state, states = optimizer.state, None
        succeeded = False
        try:
            if whole or staged:
                optimizer.state = defaultdict(dict)
                for master, value in pairs:
                    entry = state.get(master)
                    if entry is not None:
                        optimizer.state[value] = {name: _value(kept, whole) for name, kept in entry.items()}
                        if master in staged:
                            optimizer.state[value].update(staged[master].states_of(entry))
            else:
                states, one.states = one.states, None  # a step inside this one makes its own
                if states is None or not states.are_of(one, state):
                    states = _PlainStates(one, state, values)
                optimizer.state = states.plain
            others = range(len(pairs)) if whole else self._gradients.lend_gradients(one.numbers, values)
            for position in others:
                master, value = pairs[position]
                grad = gradient_of(master)
                if grad is not None:
                    value.grad_dtype = grad.dtype
                    value.grad = _value(grad, whole)
            for one_staged in staged.values():
                one_staged.written = one_staged.value.grad is not None
            if prepare is not None:
                ready = [value for value in values if value.grad is not None]
                if not ready:
                    return False
                prepare(ready)
            else:
                self._begins()
            if whole or staged or not self._made_in_one_pass(optimizer, one, values, placed):
                update()
            succeeded = True
        finally:
            if not whole and not staged:  # see [Note: versions of updates]
                increment_version([value for value in values if value.grad is not None])
            new_state, optimizer.state = optimizer.state, state
            changed = states is None or not states.unchanged(new_state)
            if not changed:
                one.states = states
            for master, value in pairs if changed else ():
                if whole and isinstance(master, DTensor):
                    master._local_tensor.copy_(local_part(value, master.device_mesh))
                new = new_state.get(value)
                if master in staged:
                    if not succeeded:
                        continue  # no state is taken: host memory has what it had before
                    new = None if new is None else staged[master].taken(new)
                if new is not None:
                    _store(state[master], new, master, value, whole)
            # a retry must find the gradients that no update has used
            self._gradients.release_gradients(one.numbers if succeeded else [], values)
        return True

    def _made_in_one_pass(
        self, optimizer: Optimizer, one: _Round, values: list[Tensor], placed: list[int] | None
    ) -> bool:
        """Updates the round in one pass over memory, if that can be, see [Note: updates in one pass].

        ``placed``: see :meth:`_update`. Returns whether the update was made.
        """
        if self._one_pass is None or not self._one_pass.takes(optimizer):
            return False
        casts = self._one_pass.update(optimizer, one.numbers, values, () if placed is None else one.units)
        if casts is None:
            return False
        if placed is not None:
            placed += casts
        self.in_one_pass += len(one.units)
        return True


class _Options:
    """The options of an optimizer's groups. Each unit's update starts from the same ones and must end with equal
    ones."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._now()
        self.after = self._now()
        self._stepped: set[int] = set()

    def _now(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]

    def restore(self) -> None:
        for group, options in zip(self._optimizer.param_groups, self._before, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]  # the update of another unit has added this option
            group.update(options)

    def note(self, groups: set[int]) -> None:
        """Keeps the options of ``groups``, given by number, as the update of a unit has left them.

        Raises:
            RuntimeError: another unit's update has left other options.
        """
        now = self._now()
        for number in groups:
            changed = [k for k, v in now[number].items() if not _same(v, self.after[number].get(k))]
            if changed and number in self._stepped:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} computes {changed} of its parameter groups from several "
                    "parameters, and so differently in each unit. It cannot be in `full_param_optimizers`, which are "
                    "for optimizers that treat each parameter on its own: drop it there, or use strategy='ddp'."
                )
            self.after[number] = now[number]
        self._stepped |= groups


def _narrow(optimizer: Optimizer, one: _Round, values: Sequence[Tensor]) -> None:
    """Puts ``values``, those of a round, in the optimizer's groups, in the place of all their parameters."""
    for group in optimizer.param_groups:
        group["params"] = []
    for number, value in zip(one.groups, values, strict=True):
        optimizer.param_groups[number]["params"].append(value)


def _where_updated(one: _Round, values: list[Tensor], staged: Mapping[Tensor, Staged]) -> list[Tensor]:
    """``values``, those of a round, with the staged rows in the place of those that are in host memory."""
    if not staged:
        return values
    pairs = zip(one.masters, values, strict=True)
    return [staged[master].value if master in staged else value for master, value in pairs]


def _is_done(one: _Round, done: Collection[int]) -> bool:
    """Whether a backward has updated all of the round, and user code has set no gradient since."""
    return all(unit in done for unit in one.units) and all(bound_gradient(master) is None for master in one.masters)


def _share(master: Tensor) -> int:
    """The elements that a rank holds of ``master``, rounded up: the same number on all ranks."""
    return -(-master.numel() // master.device_mesh.size()) if isinstance(master, DTensor) else master.numel()


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left is right or torch.equal(left, right)
    return left is right or bool(left == right)


def _value(value: Any, whole: bool) -> Any:
    if not isinstance(value, DTensor):
        return value
    return full_value(value) if whole else value._local_tensor


def _store(entry: dict[str, Any], new: dict[str, Any], master: Tensor, value: Tensor, whole: bool) -> None:
    """Keeps the state of a plain tensor after an update as its master's.

    State of the tensor's shape becomes a DTensor: over the same memory, or, if ``whole``, of this rank's rows alone.

    Args:
        entry: the master's state, which is changed.
        new: the state of ``value``.
        master: the master.
        value: what the optimizer has updated in its place: the local part, or the whole value.
        whole: whether it is the whole value.
    """
    for name, kept in new.items():
        if not whole and name in entry and _value(entry[name], whole) is kept:
            continue
        if isinstance(kept, DTensor):  # it is in host memory
            entry[name] = kept
            continue
        shaped = isinstance(kept, Tensor) and kept.shape == value.shape and value.dim() > 0
        if shaped and isinstance(master, DTensor) and whole:
            kept = shard_like(kept, master, dtype=kept.dtype)
        elif shaped and isinstance(master, DTensor):
            kept = over_local(kept, master)
        kept = sharded_as(kept, master)
        entry[name] = kept
