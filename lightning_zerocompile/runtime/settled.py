"""What the masters on a device hold after a failure: what optimizer steps have left in them, or perhaps garbage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class MastersState(NamedTuple):
    """What differs after any change of a master that the host has asked for.

    Attributes:
        steps: how many steps optimizers have made; half a step is one that has not ended.
        updated: whether a backward has updated some, and its step is still to come.
        versions: how often each master was written.
    """

    steps: float
    updated: bool
    versions: list[int]


@dataclass(eq=False)
class _Step:
    """A step that the host has begun.

    Attributes:
        state: of the masters where it begins.
        begun: the device has passed its beginning when this event has come.
        updating: the same of its first update; None: no update is queued.
        give_back_on_host: gives optimizers back what they kept on the host before that update.
    """

    state: MastersState
    begun: torch.cuda.Event
    updating: torch.cuda.Event | None = None
    give_back_on_host: Callable[[], None] = lambda: None


@dataclass(eq=False)
class _Copied:
    """What was right when the groups ended.

    Attributes:
        tensors: each on the device, and its value on the host.
        state: of the masters where the step began that the device was in.
        masters: whether they are among the tensors.
        updated: whether an update of that step had begun.
        give_back_on_host: gives optimizers back what they kept on the host before the first update that had not.
    """

    tensors: list[tuple[Tensor, Tensor]]
    state: MastersState
    masters: bool
    updated: bool
    give_back_on_host: Callable[[], None] = lambda: None


class SettledMasters:
    """Knows whether the masters hold what optimizer steps have left in them, and sees to it that they do.

    [Note: settled masters] After a failure on one rank, another rank's device may be in a collective that never ends.
    If its groups are ended, see [Note: ended groups], the device goes on with garbage in the place of what the
    collective would have brought. An update that is queued after that collective then writes garbage into masters, and
    a layer may write garbage into its buffers. So each rank records an event where a step begins, on the stream that
    optimizers update on. When the groups end, the last step of which the device has passed the event is the one that it
    is in, and its memory still is right: whatever waits for the collective has not run. So what may be overwritten is
    copied to the host first, on a stream of its own, and a rescue copies it back when the device has done the rest.
    Masters are copied only if an update is queued. A second event tells whether that update had begun, since then some
    masters may be of one step more than others.

    Args:
        device: of this rank.
        state: returns the state of the masters now.
        masters: takes the state where a step began, and returns what has been written since, or is written by updates:
            local parts of masters, and of optimizers' states.
        buffers: returns what forwards write.
        keep_on_host: called where an update begins. Returns a function that gives optimizers back what they keep on the
            host now.
        within: seconds that the copies may take. Host memory takes 3 to 10 GB a second. The other ranks wait meanwhile.
    """

    def __init__(
        self,
        device: torch.device,
        state: Callable[[], MastersState],
        masters: Callable[[MastersState], Iterable[Tensor]],
        buffers: Callable[[], Iterable[Tensor]],
        keep_on_host: Callable[[], Callable[[], None]],
        within: float,
    ) -> None:
        self._device, self._read, self._masters, self._buffers = device, state, masters, buffers
        self._keep_on_host, self._within = keep_on_host, within
        self._steps: list[_Step] = []  # that in which the device was last seen, and later ones
        self._are_whole = self._have_ended = False
        self._copied: _Copied | None = None
        self._looked = threading.Event()  # what was to be copied when the groups ended is copied, or cannot be

    def step_begins(self) -> None:
        """Records the event on the current stream. It costs no wait."""
        if not self._have_ended:
            self._steps = [*self._from_now(), _Step(self._read(), self._record())]

    def update_begins(self) -> None:
        """Called when the current stream waits for the gradients of an update that comes next."""
        if self._steps and not self._have_ended and (step := self._steps[-1]).updating is None:
            step.give_back_on_host = self._keep_on_host()
            step.updating = self._record()

    def are_whole(self) -> None:
        """Called when the device has done all that it was asked for; it counts if its groups are alive."""
        self._are_whole = not self._have_ended

    def groups_end(self) -> None:
        """Called before the groups are ended, by any thread: what the device passes from now on counts no more."""
        if self._have_ended or self._are_whole:
            return
        self._have_ended = True
        with suppress(Exception):  # without copies the masters are not settled, but the groups must end all the same
            self._copy()
        self._looked.set()

    def _copy(self) -> None:
        steps = self._from_now()
        if not steps or not _has_passed(steps[0].begun):
            return
        step, updates = steps[0], [one for one in steps if one.updating is not None]
        copied = bool(updates) or step.state != self._read()
        waiting = [*(self._masters(step.state) if copied else ()), *self._buffers()]
        copies: list[tuple[Tensor, Tensor]] = []
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call, unused-ignore]

        def copy() -> None:
            with suppress(RuntimeError), torch.cuda.stream(stream):
                for tensor in waiting:
                    copies.append((tensor, tensor.detach().to("cpu", copy=True)))

        thread = threading.Thread(target=copy, daemon=True, name="zerocompile-copy")
        thread.start()
        thread.join(self._within)
        if len(copies) == len(waiting):
            # an update that has not begun by now has changed none of what was copied
            waiting_updates = [one for one in updates if one.updating is None or not _has_passed(one.updating)]
            begun = copied and (not updates or updates[0] not in waiting_updates)
            self._copied = _Copied(copies, step.state, masters=copied, updated=begun)
            if waiting_updates:
                self._copied.give_back_on_host = waiting_updates[0].give_back_on_host

    def hold(self) -> bool:
        """Whether the masters are settled, or :meth:`restore` makes them so."""
        if self._are_whole:
            return True
        if not self._have_ended:
            return bool(self._steps) and _has_passed(self._steps[-1].begun) and self._steps[-1].state == self._read()
        self._looked.wait(self._within)  # another thread may be copying
        return self._copied is not None and (self._copied.masters or self._copied.state == self._read())

    @torch.no_grad()
    def restore(self) -> float:
        """Writes back what was copied before the groups ended; the device must have done the rest of its work.

        Returns:
            How many steps optimizers have made of what the masters hold now.
        """
        if self._are_whole or self._copied is None:
            return self._read().steps
        for tensor, kept in self._copied.tensors:
            tensor.copy_(kept)
        self._copied.give_back_on_host()
        return self._copied.state.steps + (0.5 if self._copied.updated else 0.0)

    def _record(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _from_now(self) -> list[_Step]:
        """The step that the device is in now, and those after it that the host has begun."""
        return self._steps[max((i for i, step in enumerate(self._steps) if _has_passed(step.begun)), default=0) :]


def _has_passed(event: torch.cuda.Event) -> bool:
    with suppress(RuntimeError):  # the device has failed, so its memory cannot be read
        return bool(event.query())  # type: ignore[no-untyped-call, unused-ignore]
    return False
