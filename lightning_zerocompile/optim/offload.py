"""Optimizer states and masters in host memory, which stream through the device around the update of each unit.

[Note: offload] With ``offload="optimizer"`` the states and the masters of a unit lie in one slab of host memory, which
is pinned where there is CUDA. A step copies the slabs of the next two units to the device while this unit is updated
and the slab of the unit before goes back. The copies in and the copies out have a stream each, of different priority.
Streams of one priority may share a queue of the device, where a copy would wait for others that it does not need. With
two queues a link that works in both directions does so. Three slabs of the largest unit's size are on the device during
a step, and none between steps. The update itself is the one without offload, on tensors of the device, so the numbers
are the same to the bit. The smallest unit is updated last, since nothing runs beside its way out.

[Note: copies in the backward] The first two units come in while the last backward before a step runs, if one optimizer
alone is offloaded and has made a step before. If the device has room for one unit only, one comes; on the CPU there is
always room. A step that follows in the same order finds them there. Whoever writes to host memory in between raises a
version, and then that slab is copied again. What user code has written to gathered values goes to host memory before
the step. A write through ``data`` has no version, so the runtime counts these (``host_writes``), and after one all that
came early is copied again. In a window or an accumulation nothing comes early: no step follows the backward, or user
code may step in it at any time. With ``optimizer_in_backward`` the stream of the next note takes their place.

[Note: offload beside the backward] With ``optimizer_in_backward`` the units stream beside the backward, which updates
them ([Note: optimizer in backward] in in_backward.py). A stream lives from the backward's begin until the last update
at its end. It brings the units in the order in which the last backward has updated them, and before there was one in
the reverse of the forward's order. That order is a guess. A unit that comes out of turn is fetched when its gradient is
there, and what has come in vain is dropped. A unit without a gradient is not fetched. The stream that updates a unit is
ordered after its copy in, and the copy out after the update. The host waits only where the backward ends, after the
gathers of the updated units were started, until all copies are done. A wait inside a backward could be one for a rank
that waits for this one. A backward past the strategy (``loss.backward()``) leaves offloaded units to the step. Nobody
would say when it ends, so host memory could be read while it is written.

There gathers do not read an update's own rows, since these have left when the units are gathered, in one order on all
ranks, after the backward. So at every stage a copy of the rows stays on the device, in the dtype in which they are
gathered.

What gathers read stays on the device, see [Note: masters in host memory] in csrc/registry.cpp. Where the device
updates, a master of stage 3 (of any stage, with ``optimizer_in_backward``) whose dtype is also the dtype in which it is
gathered stays on the device, since gathers read it at each use. Then only its states are in host memory. With
``optimizer_in_backward`` large units stay whole, see [Note: units that stay] in residency.py. So do parameters
without dimensions, those that are frozen when the optimizers are set up, and those that several optimizers hold.

A step that raises loses nothing. A unit goes back to host memory only after its update has
succeeded, so the unit whose update raised keeps in host memory what it had before the step.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile.optim.residency import largest_that_streams
from lightning_zerocompile.optim.slabs import MASTER, Slab, Slot, Staged, local_of
from lightning_zerocompile.optim.supported import is_elementwise, state_dtypes
from lightning_zerocompile.runtime.memory_budget import host_memory
from lightning_zerocompile.runtime.runtime import Runtime
from lightning_zerocompile.sharding.layout import over_local
from lightning_zerocompile.sharding.master import as_plain_tensors, record_of
from lightning_zerocompile.sharding.parameter import ShardedParameter
from lightning_zerocompile.sharding.sharded import STATES_ON_HOST, as_sharded, mark_on_host

_BUFFERS = 3  # one unit comes in, one is updated, one goes out
_AHEAD = 2  # units that come in before the one that is updated
_PATIENCE, _PAUSE = 5.0, 1e-3  # seconds: to wait for copies of a step that does not come, and between two looks
_SPARE = 0.1  # the share of the device's memory that stays free beside the units that come early
_GIB = 2**30
_Pin: TypeAlias = "weakref.finalize[..., Tensor]"  # unpins memory when it is called, or when the memory is freed
_Members = tuple[int, Sequence[Tensor]]  # a unit's number and its masters


class Offload:
    """Keeps optimizers' states and masters in host memory, see [Note: offload].

    Args:
        runtime: holds the model's parameters.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._slabs: dict[Optimizer, dict[int, Slab]] = {}
        self._pins: list[_Pin] = []
        self._attached = 0
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._orders: dict[Optimizer, list[list[Slab]]] = {}  # the slabs of each round of the last step
        self._early: tuple[Optimizer, Stream] | None = None  # see [Note: copies in the backward]
        self._ahead: int | None = None  # units that come early; None: not decided yet
        self._beside: tuple[Optimizer, Stream] | None = None  # see [Note: offload beside the backward]
        self._updated: dict[Optimizer, list[int]] = {}  # the units that the last backward has updated, in order

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether something of the optimizer is in host memory."""
        return optimizer in self._slabs

    # ---- set-up and end ----

    def attach(self, optimizers: Sequence[Optimizer], shared: set[Tensor]) -> None:
        """Moves masters and states to host memory; the ranks tell each other what they need.

        Args:
            optimizers: all of the model, on its masters; none: the model is about to be made whole. Then everything
                stays in host memory.
            shared: masters in more than one of them.

        Raises:
            MisconfigurationException: an optimizer cannot be offloaded. Nothing has been moved.
            RuntimeError: a host has no room, or refuses to pin memory; names the bytes. Nothing has been moved.
        """
        config = self._runtime.config
        if not config.offload or not optimizers:
            self._forget()
            return
        wanted = {optimizer: self._planned(optimizer, shared) for optimizer in optimizers}
        candidates = [(optimizer, slab) for optimizer, planned in wanted.items() for slab in planned.values()]
        sizes = [slab.most for _, slab in candidates]
        largest = largest_that_streams(sizes, _BUFFERS) if config.optimizer_in_backward else max(sizes, default=0)
        slabs: dict[Optimizer, dict[int, Slab]] = {}
        away: list[Slab] = []  # all of them
        for optimizer, slab in candidates:
            if slab.slots and slab.most <= largest:
                slabs.setdefault(optimizer, {})[slab.unit] = slab
                away.append(slab)
        pins = self._allocate(away)
        before = {master for units in self._slabs.values() for slab in units.values() for master in slab.slots}
        back = before.difference(*(slab.slots for slab in away))
        self.let_go(back)
        self._forget()
        self._pins = pins
        with torch.inference_mode(False), torch.no_grad():
            for slab in away:
                self._fill(slab)
            for master in back:
                self._bring_back(record_of(master))
        if away and self._runtime.device.type == "cuda":
            torch.cuda.empty_cache()  # of what was moved: a step needs memory in other sizes
        self._slabs = slabs
        shown = [slot.shown for slab in away for slot in slab.slots.values() if slot.shown is not None]
        self._runtime.host_traffic.held = sum(slab.nbytes for slab in away)
        self._runtime.host_traffic.copies = sum(copy.nbytes for copy in shown)
        for optimizer in slabs:
            self.adopt(optimizer)

    def _forget(self) -> None:
        self.drop_early()
        self.ends_beside(raised=True)
        if not self._copied(_PATIENCE):
            for pin in self._pins:  # a device that hangs may still read this memory: it stays pinned, and nothing waits
                pin.detach()
            self._pins = []
        self._orders, self._updated, self._ahead = {}, {}, None
        for units in self._slabs.values():
            for slab in units.values():
                for master in slab.slots:
                    master.__dict__.pop(STATES_ON_HOST, None)
        self._slabs = {}
        for unpin in self._pins:
            unpin()
        self._pins = []
        self._runtime.host_traffic.held = self._runtime.host_traffic.copies = 0

    def _planned(self, optimizer: Optimizer, shared: set[Tensor]) -> dict[int, Slab]:
        name = type(optimizer).__name__
        if not is_elementwise(optimizer):
            raise MisconfigurationException(
                f"offload='optimizer' does not work with the optimizer {name}: only torch's elementwise optimizers "
                "(AdamW, Adam, SGD, ...; no subclasses) are updated from a unit's own shards. Use one of them, or drop "
                "`offload`."
            )
        group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        slabs: dict[int, Slab] = {}
        known: dict[Any, dict[str, torch.dtype]] = {}
        for unit, masters in self._runtime.units_in_order():
            slab = slabs[unit] = Slab(unit)
            for master in masters:
                if master not in group_of or master in shared or not isinstance(master, DTensor) or master.dim() == 0:
                    continue
                sharded = record_of(master)
                if not master.requires_grad or sharded.local.dtype != sharded.trained_dtype:
                    continue
                group = group_of[master]
                number = next(n for n, one in enumerate(optimizer.param_groups) if one is group)
                with as_plain_tensors():
                    grad_dtype = master.grad_dtype or master.dtype
                key = (number, master.dim(), master.dtype, grad_dtype)
                if key not in known:
                    known[key] = state_dtypes(optimizer, group, master, grad_dtype)
                beside = self._runtime.config.optimizer_in_backward
                slot = Slot(sharded, read_apart=beside or self._runtime.lives_for_a_use(unit))
                dtypes = dict(known[key])
                if not slot.read_apart or sharded.source.dtype != master.dtype:
                    dtypes[MASTER] = master.dtype
                if dtypes:
                    slab.add(master, slot, dtypes)
        return slabs

    def _allocate(self, slabs: Sequence[Slab]) -> list[_Pin]:
        """Gives each slab its memory, on all ranks or on none; the ranks tell each other what they need and have.

        Returns:
            What unpins the memory: one for each slab that is pinned.

        Raises:
            RuntimeError: names the rank, the bytes and the remedy, alike on all ranks.
        """
        self._attached += 1
        topic = f"offload/{self._attached}"
        host, free = host_memory()
        need = sum(slab.nbytes for slab in slabs)
        heard = self._runtime.messages.hear_all(topic, json.dumps([host, free, need]), "has offloaded the optimizers")
        told = {rank: json.loads(message) for rank, message in heard.items()}
        for rank, (host, free, _) in told.items():
            together = sum(needed for other, _, needed in told.values() if other == host)
            if together > free:
                raise RuntimeError(_NO_ROOM.format(rank, host, together, together / _GIB, free, free / _GIB))
        failure = ""
        pins: list[_Pin] = []
        pinned = self._runtime.device.type == "cuda"
        try:
            for slab in slabs:
                slab.memory = torch.empty(slab.nbytes, dtype=torch.uint8)
                if pinned and slab.nbytes:
                    pins.append(_pin(slab.memory))
        except RuntimeError as error:
            failure = str(error).splitlines()[0]
        doing = "has pinned memory for the optimizers"
        heard = self._runtime.messages.hear_all(f"{topic}/pinned", failure, doing)
        for rank, failure in heard.items():
            if failure:
                for unpin in pins:
                    unpin()
                raise RuntimeError(_NOT_PINNED.format(told[rank][2], told[rank][2] / _GIB, rank, failure))
        return pins

    def _fill(self, slab: Slab) -> None:
        """Moves the masters of a slab into it, and makes the places of their states there."""
        assert slab.memory is not None
        for master, slot in slab.slots.items():
            master.__dict__[STATES_ON_HOST] = True
            places = slot.places(slab.memory)
            for name, place in places.items():
                if name != MASTER:
                    slot.states[name] = mark_on_host(as_sharded(over_local(place, master), self._runtime.reads))
            if MASTER in places:
                self._move(slot, places[MASTER])

    def _move(self, slot: Slot, place: Tensor) -> None:
        """Copies the master's rows to ``place``, in host memory, which has them from now on."""
        sharded = slot.sharded
        before = sharded.local
        place.copy_(before)
        _raise_version(place, before)
        device = self._runtime.device
        slot.empty = torch.empty(1, dtype=before.dtype, device=device).expand(before.shape)
        if slot.read_apart:
            slot.shown = before.to(device, sharded.source.dtype)
        sharded.keep_rows(place, on_host=True)
        self._show(slot)

    def _show(self, slot: Slot, rows: Tensor | None = None) -> None:
        """Tells the runtime what gathers of a master read.

        ``rows``: [<=rows, ...] on the device. ``None``: what stands for the rows between steps (``shown`` or ``empty``
        of the slot).
        """
        sharded = slot.sharded
        local = rows if rows is not None else slot.shown if slot.shown is not None else slot.empty
        assert local is not None
        self._runtime.core.set_rows(sharded.index, local, sharded.local, local is not slot.empty)

    def _bring_back(self, sharded: ShardedParameter) -> None:
        """Moves the rows of a master that no offloaded optimizer holds any more back to the device."""
        if sharded.on_host:
            rows = sharded.local.to(self._runtime.device, copy=True)
            _raise_version(rows, sharded.local)
            sharded.keep_rows(rows, on_host=False)
            self._runtime.core.set_rows(sharded.index, rows, None, False)

    # ---- states that were made elsewhere ----

    def adopt(self, optimizer: Optimizer) -> None:
        """Moves an optimizer's states that are not in its slabs (loaded ones, or a constructor's) there."""
        for slab in self._slabs.get(optimizer, {}).values():
            for master, slot in slab.slots.items():
                entry = optimizer.state.get(master)
                if not entry:
                    continue
                for name, place in slot.states.items():
                    value = entry.get(name)
                    if value is not None and value is not place:
                        with torch.no_grad():
                            local_of(place).copy_(local_of(value))
                        entry[name] = place

    def let_go(self, masters: Iterable[Tensor]) -> None:
        """Gives the states of these masters memory of their own on the device, where they are updated from now on."""
        self.drop_early()
        self.ends_beside(raised=True)
        for master in masters:
            for optimizer, units in self._slabs.items():
                for slab in units.values():
                    slot, entry = slab.slots.get(master), optimizer.state.get(master)
                    if slot is not None and entry:
                        for name, place in slot.states.items():
                            if entry.get(name) is place:
                                rows = local_of(place).to(self._runtime.device, copy=True)
                                entry[name] = as_sharded(over_local(rows, master), self._runtime.reads)

    # ---- a step ----

    @contextmanager
    def stream(self, optimizer: Optimizer, rounds: Sequence[Sequence[int]]) -> Iterator[Stream | None]:
        """Around the updates of an optimizer. Yields what brings its units and takes them away; ``None``: it has none.

        When the context ends all copies are done, so that host memory can be read.

        ``rounds``: the numbers of the units of each update.
        """
        if optimizer not in self._slabs:
            yield None
            return
        self.adopt(optimizer)
        units = self._slabs[optimizer]
        order = [[units[unit] for unit in one if unit in units] for one in rounds]
        stream = self._begun(optimizer, order)
        try:
            stream.begin(_AHEAD)
            yield stream
            self._orders[optimizer] = order
        finally:
            stream.close()

    def ordered(self, optimizer: Optimizer, units: Sequence[_Members]) -> Sequence[_Members]:
        """``units`` in the order of their updates: the one with the smallest slab of the optimizer comes last."""
        slabs = self._slabs.get(optimizer, {})
        sizes = [slabs[unit].most if unit in slabs else 0 for unit, _ in units]
        if not any(sizes):
            return units
        least = min((size, -position) for position, size in enumerate(sizes) if size)
        last = -least[1]
        return [*units[:last], *units[last + 1 :], units[last]]

    def backward_begins(self) -> None:
        """Called when the last backward before a step begins, see [Note: copies in the backward]."""
        if self._early is not None or len(self._slabs) != 1 or len(self._orders) != 1:
            return
        ((optimizer, order),) = self._orders.items()
        largest = max(sum(slab.nbytes for slab in slabs) for slabs in order)
        if self._ahead is None:
            self._ahead = _room(self._runtime.device, largest)
        if self._ahead and largest:
            self._early = optimizer, self._in_order(order)
            self._early[1].begin(self._ahead)

    def drop_early(self) -> None:
        """Drops what came early: no step follows the backward, or the step updates something else."""
        early, self._early = self._early, None
        if early is not None:
            early[1].drop()

    # ---- a backward that updates, see [Note: offload beside the backward] ----

    def begins_beside(self, optimizer: Optimizer) -> None:
        """Called when a backward begins that updates units of the optimizer: the first ones come in."""
        self.ends_beside(raised=True)  # there is one only where a backward could not even begin
        stream = self.beside(optimizer)
        if stream is not None and optimizer in self._updated:  # before, the order is known once a unit is reduced
            stream.begin(_AHEAD)

    def beside(self, optimizer: Optimizer) -> Stream | None:
        """What brings the units of an optimizer that a backward, or its end, updates; ``None``: it has none.

        Its rounds have the numbers of the units. There is one for each backward, until :meth:`ends_beside` is called.
        """
        if optimizer not in self._slabs:
            return None
        if not self.streams_beside(optimizer):
            self.ends_beside()
            self.adopt(optimizer)
            order = {unit: [slab] for unit, slab in self._slabs[optimizer].items()}
            self._beside = optimizer, self._new(order, lambda: self._order_beside(optimizer))
        return None if self._beside is None else self._beside[1]

    def streams_beside(self, optimizer: Optimizer) -> bool:
        """Whether :meth:`beside` was called for the optimizer, and what it has returned has not ended."""
        return self._beside is not None and self._beside[0] is optimizer

    def _order_beside(self, optimizer: Optimizer) -> Sequence[int]:
        if optimizer in self._updated:
            return self._updated[optimizer]
        return [unit for unit, _ in reversed(self._runtime.units_in_order())]

    def ends_beside(self, raised: bool = False) -> None:
        """Called when a backward has ended and all of its units are updated: waits for all copies, frees the buffers.

        ``raised``: the backward, or an update in it, has raised. Then this waits for some seconds only, since the
        device may wait for a rank that does not come. Units that were updated are in host memory afterwards, and the
        others are there as they were.
        """
        beside, self._beside = self._beside, None
        if beside is None:
            return
        optimizer, stream = beside
        if stream.entered:
            self._updated[optimizer] = list(stream.entered)
        if raised:
            self._copied(_PATIENCE)
            stream.drop()
        else:
            stream.close()

    def _copied(self, within: float) -> bool:
        """Whether all copies are done; waits for them, but no longer than ``within`` seconds."""
        deadline = time.monotonic() + within
        with contextlib.suppress(RuntimeError):  # the device has failed
            for stream in self._streams or ():
                while not stream.query():
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(_PAUSE)
            return True
        return False

    def _begun(self, optimizer: Optimizer, order: Sequence[Sequence[Slab]]) -> Stream:
        early, self._early = self._early, None
        if early is not None:
            if early[0] is optimizer and early[1].serves(dict(enumerate(order))):
                return early[1]
            early[1].drop()
        return self._in_order(order)

    def _in_order(self, order: Sequence[Sequence[Slab]]) -> Stream:
        return self._new(dict(enumerate(order)), lambda: range(len(order)))

    def _new(self, order: Mapping[int, Sequence[Slab]], expected: Callable[[], Sequence[int]]) -> Stream:
        if self._runtime.device.type != "cpu" and self._streams is None:
            self._streams = (_stream(self._runtime.device, -1), _stream(self._runtime.device, -2))
        return Stream(self._runtime, order, self._streams, self._show, expected)


@dataclass
class _Came:
    """A round's slabs on the device, or on their way there.

    Attributes:
        buffer: the number of the buffer that they are in.
        parts: the place of each slab there, [bytes] of uint8.
        versions: of what was copied.
        host_writes: how many values that user code has written to had gone to host memory by then.
        there: the event after which they are there; ``None`` on the CPU, where they are there at once.
    """

    buffer: int
    parts: list[Tensor]
    versions: list[list[int]]
    host_writes: int
    there: torch.cuda.Event | None


class Stream:
    """The units of one step: which are on the device, on their way in, and on their way out.

    Rounds come in while others are updated, in an order that is expected. A round that comes in another order is
    fetched when it is entered.

    Args:
        runtime: its core gathers, and its ``host_traffic`` counts what is copied.
        order: the slabs of each round, by its number.
        streams: for copies in and for copies out; ``None``: the CPU, where copies are done at once.
        show: ``Offload._show``, which tells the runtime what gathers of a master read.
        expected: returns the numbers of the rounds in the order in which they are likely to be entered. It is called
            once, when the first round is fetched.

    Attributes:
        entered: the numbers of the rounds that were entered, in order.
    """

    def __init__(
        self,
        runtime: Runtime,
        order: Mapping[int, Sequence[Slab]],
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None,
        show: Callable[..., None],
        expected: Callable[[], Sequence[int]],
    ) -> None:
        self._runtime, self._order, self._streams, self._show = runtime, order, streams, show
        self._sizes = {number: sum(slab.nbytes for slab in slabs) for number, slabs in order.items()}
        self._count = min(_BUFFERS, sum(size > 0 for size in self._sizes.values()))
        self._size = max(self._sizes.values(), default=0)
        self._buffers: list[Tensor] = []  # at most `_count`, each of `_size` bytes
        self._home = None if streams is None else torch.cuda.current_stream(runtime.device)  # of the buffers' memory
        self._users: dict[torch.cuda.Stream, None] = {}  # streams on which rounds were entered
        self._idle: deque[tuple[int, torch.cuda.Event | None]] = deque()  # empty buffers: when what was there has gone
        self._came: dict[int, _Came] = {}  # by round
        self.entered: dict[int, None] = {}
        self._guess = expected
        self._expected: Sequence[int] | None = None  # what `_guess` has returned
        self._places: dict[int, int] = {}  # where each round is there
        self._next = 0  # the position in `_expected` after the round that was entered last

    def serves(self, order: Mapping[int, Sequence[Slab]]) -> bool:
        """Whether a step with this order can use what was copied.

        It has the same slabs in each round, and runs on the stream after which the copies were ordered.
        """
        here = None if self._streams is None else torch.cuda.current_stream(self._runtime.device)
        return here == self._home and {n: [*self._order[n]] for n in self._order} == {n: [*order[n]] for n in order}

    def begin(self, ahead: int) -> None:
        """Starts to copy in the slabs of the rounds that are expected next, until ``ahead`` of them were started."""
        rest = islice(self._in_turn(), self._next, None)
        coming = (number for number in rest if self._sizes.get(number) and number not in self.entered)
        wanted = list(islice(coming, ahead))
        for number in wanted:
            if number in self._came:
                continue
            found = self._empty(wanted)
            if found is None:
                return
            self._copy_in(number, *found)

    def _in_turn(self) -> Sequence[int]:
        """The rounds in the order in which they are expected."""
        if self._expected is None:
            self._expected = list(self._guess())
            self._places = {number: position for position, number in enumerate(self._expected)}
        return self._expected

    def _empty(self, wanted: Collection[int]) -> tuple[int, torch.cuda.Event | None] | None:
        """An empty buffer, and the event after which it is empty; ``None``: all are in use.

        ``wanted``: rounds that keep their buffers. Others that nobody has entered lose theirs.
        """
        if self._idle:
            return self._idle.popleft()
        if len(self._buffers) < self._count:
            with contextlib.nullcontext() if self._home is None else torch.cuda.stream(self._home):
                self._buffers.append(torch.empty(self._size, dtype=torch.uint8, device=self._runtime.device))
            if self._streams is not None and self._home is not None:
                self._streams[0].wait_stream(self._home)  # the buffer's memory may be in use until here
            return len(self._buffers) - 1, None
        for number, came in self._came.items():
            if number not in wanted and number not in self.entered:
                del self._came[number]
                return came.buffer, None  # it was used by copies in alone, which are in order
        return None

    def _copy_in(self, number: int, buffer: int, after: torch.cuda.Event | None) -> _Came:
        """Copies the slabs of a round to a buffer, after the event ``after``."""
        slabs, parts, start = self._order[number], [], 0
        versions, host_writes = [slab.versions() for slab in slabs], self._runtime.core.stats().host_writes
        with self._on(0, after) as stream:
            for slab in slabs:
                assert slab.memory is not None
                parts.append(self._buffers[buffer].narrow(0, start, slab.nbytes))
                parts[-1].copy_(slab.memory, non_blocking=True)
                start += slab.nbytes
            there = None if stream is None else stream.record_event()
        self._runtime.host_traffic.copied_in += start
        came = self._came[number] = _Came(buffer, parts, versions, host_writes, there)
        return came

    @contextmanager
    def _on(self, which: int, after: torch.cuda.Event | None) -> Iterator[torch.cuda.Stream | None]:
        """Inside, copies run on a stream of their own, after an event. Yields the stream; ``None`` on the CPU.

        ``which``: 0 for copies in, 1 for copies out.
        """
        if self._streams is None:
            yield None
            return
        stream = self._streams[which]
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield stream

    def enter(self, number: int) -> dict[Tensor, Staged]:
        """Returns what the round updates in the place of its offloaded masters, by master; fetches further rounds.

        The current stream is the one that updates the round.
        """
        slabs = self._order.get(number, ())
        if not self._sizes.get(number):  # this rank has no rows of it, and yet an update of them is one on the device
            nothing = torch.empty(0, dtype=torch.uint8, device=self._runtime.device)
            return _staged((slab, nothing) for slab in slabs)
        self._in_turn()
        came = self._came.get(number)
        if came is None:
            found = self._empty(())
            assert found is not None  # each round leaves before the next is entered
            came = self._copy_in(number, *found)
        elif came.host_writes != self._runtime.core.stats().host_writes or came.versions != [
            slab.versions() for slab in slabs
        ]:
            came = self._copy_in(number, came.buffer, None)  # somebody has written since it came
        self.entered[number] = None
        if came.there is not None:
            here = torch.cuda.current_stream(self._runtime.device)
            here.wait_event(came.there)
            self._users[here] = None
        self._next = self._places.get(number, self._next - 1) + 1
        self.begin(_AHEAD)
        return _staged(zip(slabs, came.parts, strict=True))

    def updated(self, staged: Mapping[Tensor, Staged]) -> None:
        """Called when the round's update has succeeded: from now on gathers read the new rows."""
        for one in staged.values():
            slot = one.slot
            if MASTER not in slot.offsets:
                continue
            changed = one.has_changed()
            if changed:
                torch.autograd.graph.increment_version(slot.sharded.local)
            if slot.shown is None:
                self._show(slot, one.value)
            elif changed:
                slot.shown.copy_(one.value)
                self._show(slot)

    def leave(self, number: int, staged: Mapping[Tensor, Staged], units: Sequence[int]) -> None:
        """Called when those of the round's units that live for a step have been gathered: the round's slabs go out.

        Args:
            number: of the round.
            staged: what :meth:`enter` has returned.
            units: the numbers of the round's units.
        """
        for one in staged.values():
            if MASTER in one.slot.offsets and one.slot.shown is None:
                self._show(one.slot)
        came = self._came.pop(number, None)
        if came is None:
            return
        done = None if self._streams is None else torch.cuda.current_stream(self._runtime.device).record_event()
        with self._on(1, done) as stream:
            if stream is not None:
                self._runtime.core.follow_gathers(units)
            for slab, part in zip(self._order[number], came.parts, strict=True):
                assert slab.memory is not None
                slab.memory.copy_(part, non_blocking=True)
                self._runtime.host_traffic.copied_out += slab.nbytes
            gone = None if stream is None else stream.record_event()
        self._idle.append((came.buffer, gone))

    def drop(self) -> None:
        """Frees the buffers. Nothing waits: their memory is used again when all that uses it is done."""
        for stream in (*(self._streams or ()), *self._users):
            for buffer in self._buffers:
                buffer.record_stream(stream)
        self._came, self._buffers = {}, []

    def close(self) -> None:
        """Waits for all copies in and out, and frees the buffers."""
        if self._streams is not None:
            for stream in self._streams:
                stream.synchronize()
        if any(number in self.entered for number in self._came):
            self.drop()  # its update has raised, and what was queued of it may still run
        self._came, self._buffers = {}, []


def _staged(slabs: Iterable[tuple[Slab, Tensor]]) -> dict[Tensor, Staged]:
    """What is updated in the place of the masters of these slabs, by master.

    ``slabs``: each with its place on the device, [bytes] of uint8.
    """
    staged = {}
    for slab, part in slabs:
        for master, slot in slab.slots.items():
            places = slot.places(part)
            value = places.pop(MASTER, slot.sharded.local)
            staged[master] = Staged(value, places, slot.states, slot, value._version)
    return staged


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


def _room(device: torch.device, size: int) -> int:
    """How many units of ``size`` bytes may come to the device before the backward has ended."""
    if device.type == "cpu" or size == 0:
        return _AHEAD
    free, total = torch.cuda.mem_get_info(device)  # without what torch has reserved, as a whole step needs
    return min(_AHEAD, max(0, int(free - _SPARE * total) // size))


def _raise_version(value: Tensor, other: Tensor) -> None:
    """Gives ``value`` the version of ``other``, so that what was gathered of either is known to be the same."""
    for _ in range(other._version - value._version):
        torch.autograd.graph.increment_version(value)


def _pin(memory: Tensor) -> _Pin:
    """Pins memory where it lies, since torch's own allocator of pinned memory takes up to twice as much.

    Returns:
        What unpins the memory when it is called, or when the tensor is freed.

    Raises:
        RuntimeError: CUDA refuses.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes: error {int(code)}")
    return weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())


_REMEDY = "Use an optimizer with fewer states, more hosts, or drop `offload`."
_NO_ROOM = (
    "offload='optimizer': rank {} cannot offload, since the ranks of host {} need {} bytes ({:.1f} GiB) of host memory "
    f"and {{}} bytes ({{:.1f}} GiB) are free there. Nothing was moved. {_REMEDY}"
)
_NOT_PINNED = (
    "offload='optimizer' needs {} bytes ({:.1f} GiB) of pinned host memory on rank {}, which the system refuses ({}). "
    f"Nothing was moved. Look at `ulimit -l` and the limits of the container. {_REMEDY}"
)
