"""All ranks meet before a collective that blocks: at the meeting a rank that comes alone can still raise.

Lightning's collectives (a barrier, a broadcast, the reduction of a logged value) and those of checkpoints block inside
torch, and gloo has no way to end them before `timeout`. So on the CPU a small all-reduce comes before each of them. Our
own code waits for this all-reduce, and meanwhile looks at the other ranks: see [Note: ranks that wait for each other].
On devices the all-reduce would wait for the work that is queued there, so the ranks meet in the store: see
`Consistency.meet`.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_zerocompile.ranks.consistency import Consistency
from lightning_zerocompile.ranks.messages import CommunicationError, Messages
from lightning_zerocompile.ranks.waits import MEETING, remedy

_LOOK = 1.0  # seconds between two looks at the other ranks
_PAUSE = 2e-3  # seconds that a rank first waits without sleep, and then sleeps between two questions


class Meetings:
    """Meetings of all ranks.

    Args:
        messages: the conversation of all ranks.
        group: a process group of all ranks, used by nothing else; None: the ranks meet in the store.
        comparisons: holds the meetings in the store.

    Attributes:
        count: how many meetings this rank has begun.
        before: while ranks do unequal work: called before each meeting, with what the meeting is for.
    """

    def __init__(self, messages: Messages, group: dist.ProcessGroup | None, comparisons: Consistency) -> None:
        self._messages, self._group, self._comparisons = messages, group, comparisons
        self.count = 0
        self.before: Callable[[str], object] | None = None
        self._open: dist.Work | None = None  # the meeting in which this rank waits, or which an exception has ended

    def meet(self, what: str) -> None:
        """Called before ``what``, to which all ranks must come; blocks until they are there.

        Raises:
            CommunicationError: another rank has come to something else, waits for this one in something else, or is
                gone.
        """
        if not self._messages.others:
            return
        if self.before is not None:
            self.before(what)
        self.count += 1
        if self._group is None:
            return self._comparisons.meet(MEETING, what)
        number = self.count
        kind = zlib.crc32(what.encode())
        largest = torch.tensor([kind, -kind])
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._open = work
        start = looked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now - looked >= _LOOK:
                looked = now
                self._messages.look(what, MEETING, number)
            if now - start > _PAUSE:
                time.sleep(_PAUSE)
        work.wait()
        self._messages.raise_if_left(number)
        self._open = None
        if largest.tolist() != [kind, -kind]:
            raise self._apart(number, what)

    def meet_in_step(self, what: str) -> None:
        """Calls :meth:`meet` before a part of every step. On devices it does nothing: there steps wait for nobody."""
        if self._group is not None:
            self.meet(what)

    def abandon(self) -> None:
        """After a failure: keeps the group from being destroyed if other ranks have not come to the last meeting.

        At the end of the process gloo's destructor would wait for that meeting until ``timeout``, while the other ranks
        may wait for the process to end. See [Note: abandoned communication] in csrc/runtime.cpp.
        """
        if self._open is not None and not self._open.is_completed():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._open = None

    def leave_group(self) -> None:
        """At the end of a run: no meeting follows."""
        del self._group

    def _apart(self, number: int, what: str) -> CommunicationError:
        heard = self._messages.exchange_numbered(MEETING, number, what + self._messages.where())
        places = "; ".join(f"rank {rank} is in {theirs or 'something else'}" for rank, theirs in heard.items())
        text = f"zerocompile: the ranks have come to different things: {places}. {remedy([places])}"
        return CommunicationError(text, explained=True)  # nobody is gone
