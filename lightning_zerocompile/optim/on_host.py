"""Updates on the CPU of what an offload keeps in host memory.

[Note: updates on the CPU] With ``offload_update="cpu"`` masters and states never leave host memory. A step copies the
gradients of a unit down (to the host), in their own dtype, while the CPU updates the unit before. The updated rows go
up (to the device) in the dtype in which gathers read them. So much less goes over the link than where slabs go to the
device and back: with AdamW, float32 masters and a model in bfloat16, 6 bytes for each element and not 24. No unit's
states are on the device.

The update is torch's own. For Adam and AdamW it is the fused kernel of CPUs, whatever the optimizer's option ``fused``
says, since the other kernels take several passes over memory. The CPU updates in place, so a unit whose update raises
may have been updated in part, as in torch. Beside a GPU a step uses the cores of the host divided by its ranks, if
these are more than torch's threads, and leaves the number of threads as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile.optim.slabs import Slab, Slot, Staged, aligned, local_of
from lightning_zerocompile.runtime.runtime import Runtime
from lightning_zerocompile.sharding.master import gradient_of

_BUFFERS = 2  # gradients of one unit come down while those of another are read
_FUSED = (optim.Adam, optim.AdamW)


class HostUpdates:
    """One step that the CPU makes, see [Note: updates on the CPU].

    Args:
        runtime: its core has the gradients, and its ``host_traffic`` counts what is copied.
        order: the slabs of each round.
        show: ``Offload._show``, which tells the runtime what gathers of a master read.
        stream: for copies of gradients; ``None``: the CPU is the device, and copies are done at once.
        staging: pinned memory that is kept from step to step, by name: the buffers of gradients that come down, and of
            rows that go up. This class fills it.
        ranks: how many ranks this host has.
    """

    def __init__(
        self,
        runtime: Runtime,
        order: Sequence[Sequence[Slab]],
        show: Callable[..., None],
        stream: torch.cuda.Stream | None,
        staging: dict[str, Tensor],
        ranks: int,
    ) -> None:
        self._runtime, self._order, self._show, self._stream = runtime, order, show, stream
        self._staging = staging
        self._threads = torch.get_num_threads()
        self._came: dict[int, tuple[torch.cuda.Event | None, dict[Slot, Tensor]]] = {}
        self._turn = 0  # the buffer of the rows that go up next
        self._sent: dict[int, torch.cuda.Event] = {}  # by buffer: when the rows in it are on the device
        # Units, and their rows on the device. Gathers read the rows on another stream, so until then the rows are held
        # here, and their memory is not used again.
        self._read: list[tuple[Sequence[int], list[Tensor]]] = []
        self._rows: list[Tensor] = []  # rows on the device of the round whose gathers start next
        if stream is not None:
            torch.set_num_threads(max(self._threads, len(os.sched_getaffinity(0)) // ranks))

    def begin(self, ahead: int) -> None:
        """Starts to copy the gradients of the first round down. ``ahead`` does not count: more need not come early."""
        self._fetch(0)

    def _fetch(self, number: int) -> None:
        if number >= len(self._order) or number in self._came:
            return
        slots = [slot for slab in self._order[number] for slot in slab.slots.values()]
        found: dict[Slot, Tensor] = {}
        for slot, gradient in zip(slots, self._gradients(slots), strict=True):
            if gradient is not None:
                found[slot] = gradient
        if self._stream is None:
            self._came[number] = None, found
            self._count_in(found)
            return
        memory = self._memory(f"down {number % _BUFFERS}", sum(aligned(value.nbytes) for value in found.values()))
        self._stream.wait_stream(torch.cuda.current_stream(self._runtime.device))
        start, down = 0, {}
        with torch.cuda.stream(self._stream):
            for slot, value in found.items():
                down[slot] = _part(memory, start, value)
                down[slot].copy_(value, non_blocking=True)
                start += aligned(value.nbytes)
            came = self._stream.record_event()
        self._came[number] = came, down
        self._count_in(found)

    def _count_in(self, found: Mapping[Slot, Tensor]) -> None:
        self._runtime.host_traffic.copied_out += sum(value.nbytes for value in found.values())

    def _gradients(self, slots: Sequence[Slot]) -> list[Tensor | None]:
        """This rank's rows of the reduced gradients of these slots, on the device; ``None`` where there is none."""
        core = self._runtime.core
        places = [torch.empty(0) for _ in slots]
        others = core.lend_gradients([slot.sharded.index for slot in slots], places)
        found = [place.grad for place in places]
        core.release_gradients([], places)
        for position in others:
            gradient = gradient_of(slots[position].sharded.master)
            found[position] = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        return found

    def _memory(self, name: str, size: int) -> Tensor:
        if name not in self._staging or self._staging[name].nbytes < size:
            self._staging[name] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._staging[name]

    def enter(self, number: int) -> dict[Tensor, Staged]:
        """Returns what the round updates in the place of its offloaded masters, by master.

        Waits until the round's gradients have come down, and starts to copy those of the next round.
        """
        self._fetch(number)
        came, gradients = self._came.pop(number)
        self._fetch(number + 1)
        if came is not None:
            came.synchronize()
        staged = {}
        for slab in self._order[number]:
            for master, slot in slab.slots.items():
                value = slot.sharded.local
                states = {name: local_of(kept) for name, kept in slot.states.items()}
                staged[master] = Staged(value, states, slot.states, slot, value._version, gradients.get(slot), True)
        return staged

    @contextmanager
    def options(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer updates by the fused kernel of CPUs, if it has one; that takes no complex numbers.

        A learning rate on the device is read here. The kernel's own copy of it would not wait until it has come.
        """
        if type(optimizer) not in _FUSED:
            yield
            return
        names = ("fused", "foreach", "lr")
        before = [{name: group.get(name) for name in names} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            rate, takes = group["lr"], not any(value.is_complex() for value in group["params"])
            group.update(fused=takes, foreach=False, lr=rate.cpu() if isinstance(rate, Tensor) else rate)
        try:
            yield
        finally:
            for group, own in zip(optimizer.param_groups, before, strict=True):
                group.update(own)

    def updated(self, staged: Mapping[Tensor, Staged]) -> None:
        """Called when the round's update has succeeded: the new rows go up, and from now on gathers read them."""
        wanted = [one for one in staged.values() if one.slot.shown is None or one.has_changed()]
        sizes = [aligned(one.value.numel() * one.slot.sharded.source.element_size()) for one in wanted]
        memory, start = None, 0
        number, self._turn = self._turn, (self._turn + 1) % _BUFFERS
        if self._stream is not None:
            if number in self._sent:
                self._sent.pop(number).synchronize()
            memory = self._memory(f"up {number}", sum(sizes))
        for one in staged.values():
            if one.has_changed():
                torch.autograd.graph.increment_version(one.value)
        for one, size in zip(wanted, sizes, strict=True):
            slot, dtype = one.slot, one.slot.sharded.source.dtype
            rows = slot.shown
            if rows is None:
                rows = torch.empty_like(one.value, dtype=dtype, device=self._runtime.device)
                self._rows.append(rows)
            if memory is None:
                rows.copy_(one.value)
            else:
                up = _part(memory, start, rows)
                up.copy_(one.value)
                rows.copy_(up, non_blocking=True)
            start += size
            self._runtime.host_traffic.copied_in += rows.nbytes
            self._show(slot, None if slot.shown is not None else rows)
        if self._stream is not None:
            self._sent[number] = torch.cuda.current_stream(self._runtime.device).record_event()

    def leave(self, number: int, staged: Mapping[Tensor, Staged], units: Sequence[int]) -> None:
        """Called when those of the round's units that live for a step have been gathered.

        ``staged``: what :meth:`enter` has returned. ``units``: the numbers of the round's units.
        """
        for one in staged.values():
            if one.slot.shown is None:
                self._show(one.slot)
        self._read.append((units, self._rows))
        self._rows = []
        self._free(_BUFFERS)

    def _free(self, keep: int) -> None:
        """Orders the current stream after the gathers that read rows on the device, and frees those rows.

        The rows of the last ``keep`` rounds stay, so that the stream does not wait for gathers that have just begun.
        """
        while len(self._read) > keep:
            self._runtime.core.follow_gathers(self._read[0][0])
            del self._read[0]

    def close(self) -> None:
        """Waits for all copies, and sets the number of torch's threads to what it was."""
        self._free(0)
        for came, _ in self._came.values():
            if came is not None:
                came.synchronize()
        for sent in self._sent.values():
            sent.synchronize()
        self._came, self._sent = {}, {}
        if self._stream is not None:
            torch.set_num_threads(self._threads)


def _part(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A tensor of the dtype and shape of ``like`` over ``memory``, [bytes] of uint8, from the byte ``start`` on."""
    part: Any = memory.narrow(0, start, like.nbytes).view(like.dtype)
    return part.view(like.shape)  # type: ignore[no-any-return]
