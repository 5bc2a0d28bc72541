"""Ranks that wait for each other in different things, so that none of them can go on.

[Note: ranks that wait for each other] If one rank alone reads a weight at stage 3, saves or generates, it waits in a
gather for the others, and they wait for it in something else. So a rank that has waited for a second sends a report to
the first rank, over the connection of [Note: liveness]. The report says what the rank waits for, and how many
collectives of each stream it has started. The rank sends it again every second while the wait lasts. From the reports
the first rank knows which rank depends on which. A rank that reports nothing computes, compiles, loads or saves. It may
go on, and so may a rank that waits only for ranks that may go on. The ranks that remain are a knot. A knot counts when
every rank in it has repeated the same report often enough. Then all of them were waiting at one moment, so nothing that
is still to come could have ended a wait. Each of them then raises, and says where all of them stand. In a normal run,
where waits are short, no reports are sent.

[Note: meetings that were left] A rank of a knot that waited in a meeting has left it, and its all-reduce is still under
way. So all ranks are told the meeting's number. A rank that comes to it later raises, too. Otherwise its all-reduce
would be answered by the one that was left, and it would stand alone in what follows.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import CodeType, FrameType

import torch.distributed as dist

DIRECT = "direct"  # the stream of torch.distributed's collectives that others run; their order is not known here
MEETING = "meeting"  # the stream of meetings
_STALE = 5.0  # seconds after which a report that was not repeated no longer counts
_REPEATS = 2  # how often each report of a knot must be repeated
_REPEATS_DIRECT = 10  # the same if the knot has direct collectives in it, which may take long
_NAMED = 16  # groups of ranks that a message names at most

_ALL = "Do it on all ranks, not under `rank_zero_only` or `if trainer.is_global_zero`"
_SAVE = f"{_ALL}: `trainer.save_checkpoint(path)` takes what each rank holds, and rank 0 alone writes the file."
_REMEDY = (
    f"{_ALL}. For work of one rank let all take full values, `with strategy.full_parameters(module) as values:`, and "
    'one use them. Other ways: "Unequal work at stage 3" in the package\'s LIMITS.md.'
)


@dataclass(frozen=True)
class Wait:
    """What one rank waits for.

    Attributes:
        stream: a stream of collectives ("gather", "reduction", "meeting"), "gate" (see [Note: turns]), "message", or
            ``DIRECT``.
        number: the number of the collective or gate in its stream, from 1; of a message, any number.
        what: what the rank waits for, and where in the training, as the error shows it.
        on: where the rank waits for messages, the ranks that have not sent theirs; else ().
        started: how many collectives this rank has started, by stream.
        among: the ranks that take part in the collective; (): all.
    """

    stream: str
    number: int
    what: str
    on: Sequence[int]
    started: Mapping[str, int]
    among: Sequence[int] = ()

    def line(self) -> str:
        return json.dumps(asdict(self))


def knot(waits: Mapping[int, Wait], ranks: Sequence[int]) -> set[int]:
    """The ranks that cannot go on, whatever happens elsewhere.

    Args:
        waits: the reports of the ranks that wait, by rank; the other ranks may go on.
        ranks: all ranks.

    Returns:
        The ranks of the knot; empty if there is none.
    """
    direct = {rank for rank, wait in waits.items() if wait.stream == DIRECT}
    if direct and len(waits) == len(ranks):  # nobody knows for whom `direct` wait: they are stuck if all others are
        stuck = _stuck({rank: wait for rank, wait in waits.items() if rank not in direct}, waits, free=set())
        if stuck and stuck | direct == waits.keys():
            return stuck | direct
    ours = {rank: wait for rank, wait in waits.items() if rank not in direct}
    return _stuck(ours, ours, free=set(ranks) - ours.keys())


def _stuck(waits: Mapping[int, Wait], known: Mapping[int, Wait], free: set[int]) -> set[int]:
    """The ranks of ``waits`` that depend on a rank which cannot go on.

    Args:
        waits: the reports of ranks that wait, by rank; only these ranks are judged.
        known: the reports from which to read what ranks have started, by rank.
        free: the ranks that may go on.
    """
    blockers: dict[tuple[str, int, tuple[int, ...], tuple[int, ...]], set[int]] = {}
    key_of = {rank: (wait.stream, wait.number, tuple(wait.on), tuple(wait.among)) for rank, wait in waits.items()}
    for key in set(key_of.values()):
        stream, number, on, among = key
        late = {rank for rank, wait in known.items() if wait.started.get(stream, 0) < number}
        blockers[key] = set(on) or (late & set(among) if among else late)
    while True:
        held = {key for key, ranks in blockers.items() if ranks - free}
        stuck = {rank for rank, key in key_of.items() if key in held}
        if not key_of.keys() - stuck - free:
            return stuck
        free = free | (key_of.keys() - stuck)


class Jury:
    """Hears the reports and finds knots; the first rank has the only one.

    Args:
        ranks: all ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._waits: dict[int, tuple[Wait, str, float]] = {}  # each rank's last report, its text, when it was heard
        self._suspects: dict[int, str] = {}  # the knot that was found last: its ranks' reports
        self._repeats: Counter[int] = Counter()  # how often each of these ranks has repeated its report since

    def hear(self, rank: int, line: str) -> None:
        """Takes the report of a rank that waits; ``line`` is its :meth:`Wait.line`.

        Raises:
            ValueError, TypeError: it is no such line.
        """
        self._waits[rank] = Wait(**json.loads(line)), line, time.monotonic()
        suspected = self._suspects.get(rank)
        if suspected == line:
            self._repeats[rank] += 1
        elif suspected is not None:  # the rank has gone on
            self._suspects = {}

    def verdict(self) -> dict[int, str]:
        """The reports of ranks that wait for each other, by rank; empty while no ranks are known to do so.

        A knot is returned once: after that its ranks' reports count anew.
        """
        oldest = time.monotonic() - _STALE
        self._waits = {rank: said for rank, said in self._waits.items() if said[2] >= oldest}
        waits = {rank: wait for rank, (wait, _, _) in self._waits.items()}
        suspects = {rank: self._waits[rank][1] for rank in knot(waits, self._ranks)}
        if suspects != self._suspects:
            self._suspects = suspects
            self._repeats.clear()
        direct = any(waits[rank].stream == DIRECT for rank in suspects)
        needed = _REPEATS_DIRECT if direct else _REPEATS
        if not suspects or any(self._repeats[rank] < needed for rank in suspects):
            return {}
        self._waits, self._suspects = {}, {}
        return suspects


def remedy(places: Iterable[str]) -> str:
    """What users can do about ranks that have come to different ``places``.

    A rank that alone has come to a checkpoint is told about that. In `on_exception` a checkpoint is not at fault.
    """
    saves = any("a checkpoint" in place and "`on_exception`" not in place for place in places)
    return _SAVE if saves else _REMEDY


def explain_knot(lines: Mapping[int, str]) -> str:
    """The message for all ranks of a knot, from their reports (:meth:`Wait.line`) by rank."""
    ranks_at: dict[str, list[int]] = {}
    for rank in sorted(lines):
        ranks_at.setdefault(json.loads(lines[rank])["what"], []).append(rank)
    places = [f"{_names(ranks)} in {what}" for what, ranks in ranks_at.items()]
    more = ["..."] if len(places) > _NAMED else []
    return f"zerocompile: ranks wait for each other: {'; '.join(places[:_NAMED] + more)}. {remedy(ranks_at)}"


def meetings_left(lines: Mapping[int, str]) -> list[int]:
    """The numbers of the meetings in which ranks of a knot have waited, from their reports (:meth:`Wait.line`)."""
    waits = [Wait(**json.loads(line)) for line in lines.values()]
    return sorted({wait.number for wait in waits if wait.stream == MEETING})


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    shown = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
    return f"ranks {shown} wait"


class StandingThread:
    """How long the main thread seems to stand in one instruction of its Python code.

    A thread that waits for a device stands like this. A thread that sleeps, reads or computes outside of Python does,
    too. A thread that comes to the same place again and again may seem to stand: looks compare places, not frames,
    since a frame that is kept would keep its tensors.

    Attributes:
        looks: how many looks in a row have found the thread where the look before had found it.
        where: the innermost place outside of torch where the thread stands, as "file:line"; "" if it moves.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[CodeType, int]] = []
        self.looks, self.where = 0, ""

    def look(self) -> None:
        """Looks at the main thread and updates the attributes; called about once a second, by another thread."""
        ident = threading.main_thread().ident
        frame = None if ident is None else sys._current_frames().get(ident)
        stack, where = [], ""
        while frame is not None:
            stack.append((frame.f_code, frame.f_lasti))
            if not where and "/torch/" not in frame.f_code.co_filename:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        self.looks = self.looks + 1 if stack == self._stack else 0
        self._stack, self.where = stack, where if self.looks else ""


class DirectCollectives:
    """Whether the main thread stands in a blocking collective that Lightning or the user runs by torch.distributed.

    On the CPU such a collective blocks inside one call. So if two looks find the same frame object, they have found the
    same call.
    """

    def __init__(self) -> None:
        self._file = dist.distributed_c10d.__file__
        self._frame: FrameType | None = None
        self._number = 0

    def look(self) -> tuple[int, str] | None:
        """The call in which the main thread stands now and stood at the last look; called about once a second.

        Returns:
            The call's number (calls that a look has found are counted from 1), and its name and caller; None if the
            thread is in no such call, or if this look is the first to find it.
        """
        ident = threading.main_thread().ident
        frame = None if ident is None else sys._current_frames().get(ident)
        if frame is None or frame.f_code.co_filename != self._file:
            self._frame = None
            return None
        if frame is not self._frame:
            self._frame = frame
            self._number += 1
            return None
        outer: FrameType | None = frame
        while outer is not None and "torch/distributed" in outer.f_code.co_filename:
            outer = outer.f_back
        place = "" if outer is None else f", called by {outer.f_code.co_filename}:{outer.f_lineno}"
        return self._number, f"torch.distributed.{frame.f_code.co_name}{place}"
