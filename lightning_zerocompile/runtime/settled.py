"""What the masters on a device hold after a failure: the values of whole optimizer steps, or perhaps garbage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

State = tuple[object, ...]


class SettledMasters:
    """Knows whether the masters hold what whole optimizer steps have left in them, whatever the device still does.

    [Note: settled masters] After a failure on one rank, another rank's device may be in a collective that never ends.
    If its groups are ended, see [Note: ended groups], the device goes on with garbage in the place of what the
    collective would have brought. An update that is queued after that collective then writes garbage into masters. So
    each rank records an event where a step begins, on the stream that optimizers update on. The masters are settled if
    the device has passed that event while its groups still were alive, and nothing has changed a master since: no
    optimizer has stepped, no unit was updated in a backward, and no user has written to one.

    Args:
        device: of this rank.
        state: returns what differs after any change of a master that the host has asked for.
    """

    def __init__(self, device: torch.device, state: Callable[[], State]) -> None:
        self._device, self._read = device, state
        self._event: torch.cuda.Event | None = None
        self._state: State = ()
        self._passed: bool | None = None  # whether the event had come when the groups ended; None: they have not

    def step_begins(self) -> None:
        """Records the event on the current stream. It costs no wait."""
        if self._passed is None:
            self._state = self._read()
            self._event = torch.cuda.current_stream(self._device).record_event(self._event)

    def groups_end(self) -> None:
        """Called before the groups are ended, by any thread: what the device passes from now on counts no more."""
        if self._passed is None:
            self._passed = self._has_passed()

    def hold(self) -> bool:
        """Whether the masters are settled."""
        passed = self._has_passed() if self._passed is None else self._passed
        return passed and self._state == self._read()

    def _has_passed(self) -> bool:
        with suppress(RuntimeError):  # the device has failed, so its memory cannot be read
            return self._event is not None and bool(self._event.query())  # type: ignore[no-untyped-call, unused-ignore]
        return False
