"""What ranks tell each other through the store: no collective, so it can say what is wrong before one starts.

[Note: blocked ranks] A rank that waits for another one, here or in a collective of ours, looks about once a second
whether the other can still come. It cannot if its process has died or has ended its part of the run (see
[Note: liveness]), if it has said why it ends, or if it waits in turn for this rank, in something else: a rank that
reads a weight alone, generates one more token or takes a state dict. So a rank that has waited for a second says in the
store what it waits for and how far it has come. A wait is over when its rank says so, and each has a number of its own:
if a circle of ranks that wait for each other is the same at two looks, all of them waited at the same moment, and none
can go on. A rank that computes has said nothing, and nobody concludes anything about it. A wait of less than a second
costs no request.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_zerocompile.liveness import CLOSED, Liveness

# How many messages of a series stay in the store. A rank is never that far ahead of another: a device queues about a
# thousand kernels, and what waits there for a slower rank's collective is behind the first of them.
SERIES = 256
HAS_LEFT = "which has ended:"  # in every error of a rank that waits for one that is gone
_NONE = "zerocompile/none"  # what the store answers if there is no message; it is never stored
_LEFT = "left"  # the topic under which a rank says why it has ended
_WAITS = "waits"  # the topic under which it says what it waits for; "": for nothing
_FEW = 3  # ranks up to which each is asked by itself: the answers of all together take three requests
_LOOK = 1.0  # seconds: how often a rank that waits looks whether the other has ended
_MANY = 64  # ranks: with more, what they wait for is read less often
_SPIN, _PAUSE = 2e-3, 5e-3  # seconds: how long a rank asks again at once, as a short sleep takes long; then its sleep


class CommunicationError(RuntimeError):
    """A collective or the store failed; names the phase, this rank, and those that are gone as far as that is known.

    Attributes:
        explained: whether the message says in which phase it was, and what the other ranks have said.
    """

    explained = False


class _Wait:
    """One wait of this rank.

    Args:
        what: it waits for, for messages.
        ranks: whose message it waits for, under ``topic`` (``number``: of a series).
        kind, number: alternatively those of the others that have counted less of this kind.
    """

    def __init__(
        self, what: str, ranks: Sequence[int] = (), topic: str = "", kind: str = "", number: int | None = None
    ) -> None:
        self.what, self.ranks, self.topic, self.kind, self.number = what, list(ranks), topic, kind, number
        self.name = 0  # 0: the others do not know of it yet
        self.looked = self.read = time.monotonic()
        self.circle: list[tuple[int, int]] = []  # that the last look found: ranks, and the names of their waits


class Agreement:
    """Messages between the ranks of a mesh.

    Args:
        mesh: the shard group, one dimension.
        name: of this conversation, alike on all ranks and used by no other.
        timeout: how long a message is waited for.

    Attributes:
        where: gives the hook that runs, for messages.
        progress: gives how much of each kind this rank has started, for those who wait for it.
        check: called at each look while this rank waits; it may raise.
    """

    def __init__(self, mesh: DeviceMesh, name: str, timeout: timedelta) -> None:
        self._ranks = dist.get_process_group_ranks(mesh.get_group())
        self._mine = dist.get_rank()
        self.others = [rank for rank in self._ranks if rank != self._mine]
        self._name, self._timeout, self._few = name, timeout, _FEW
        self._liveness: Liveness | None = None
        self._has_left = False
        self._waits, self._lines, self._turn = 0, 0, 0
        self._counts: Counter[str] = Counter()
        self._blocked: _Wait | None = None  # in a collective
        self.where: Callable[[], str] = lambda: ""
        self.progress: Callable[[], dict[str, int]] = dict
        self.check: Callable[[], None] = lambda: None

    # ---- who is there ----

    def watch(self) -> None:
        """From here on a rank whose process dies is noticed; collective."""
        if self.others and self._liveness is None:
            doing = "has set its model up"
            self.tell(_WAITS, "")
            self._liveness = Liveness(self._ranks, self._mine, lambda text: self.of_first("liveness", text, doing))

    def close(self) -> None:
        """This rank takes part no more; what :meth:`watch` took is given back."""
        if self._liveness is not None:
            self._liveness.close()

    def leave(self, reason: str) -> None:
        """Tells the others that this rank ends, and why (the first time); neither blocks on them nor raises."""
        if self._has_left:
            return
        with suppress(RuntimeError):  # of a store whose host has died
            self.tell(_LEFT, reason)
            self._has_left = True

    def reasons(self, within: timedelta) -> dict[int, str | None]:
        """Why the others have ended, by global rank; ``None``: nothing was heard of it in time."""
        deadline = time.monotonic() + within.total_seconds()
        return {rank: self._reason(rank, deadline) for rank in self.others}

    def _reason(self, rank: int, deadline: float) -> str | None:
        while (reason := self._look(self._key(_LEFT, rank))) == _NONE:
            gone = self._gone(rank)
            if gone is not None or time.monotonic() >= deadline:
                return gone
            time.sleep(_PAUSE)
        return reason

    def _gone(self, rank: int) -> str | None:
        return None if self._liveness is None else self._liveness.gone(rank)

    def _end_of(self, rank: int) -> str | None:
        """Why a rank that has not told what is waited for will not tell it; ``None``: it may."""
        reason = self._look(self._key(_LEFT, rank))
        return self._gone(rank) if reason == _NONE else reason

    def some(self, ranks: Sequence[int]) -> list[int]:
        """A few of them, by turns: what is asked of the store at a look must not grow with their number."""
        self._turn += 1
        return [ranks[(self._turn * _MANY + k) % len(ranks)] for k in range(_MANY)] if len(ranks) > _MANY else [*ranks]

    def _lost(self, rank: int, reason: str) -> CommunicationError:
        return CommunicationError(f"zerocompile: rank {self._mine} waits for rank {rank}, {HAS_LEFT} {reason}")

    # ---- waiting ----

    @contextmanager
    def _waiting(self, wait: _Wait) -> Iterator[_Wait]:
        try:
            yield wait
        finally:
            self._wait_is_over(wait)

    def _wait_is_over(self, wait: _Wait) -> None:
        if wait.name:
            with suppress(RuntimeError):  # of a store whose host has died
                self.tell(_WAITS, "")

    def blocked(self, kind: str, number: int, what: str) -> None:
        """Called about once a second while this rank waits in a collective; see [Note: blocked ranks].

        Args:
            kind: of what is counted ("gathers").
            number: how many of it the others must have started; 0: the wait is over.
            what: for messages.

        Raises:
            CommunicationError: another rank will not come to it.
        """
        wait = self._blocked
        if number == 0:
            self._unblocked()
            return
        if wait is None or (wait.kind, wait.number) != (kind, number):
            self._unblocked()
            wait = self._blocked = _Wait(what, kind=kind, number=number)
        for rank in self.some(self.others):
            reason = self._end_of(rank)
            if reason is not None and reason != CLOSED:  # one that ended in order has done its part of this collective
                raise self._lost(rank, reason)
        self._look_around(wait)

    def _unblocked(self) -> None:
        wait, self._blocked = self._blocked, None
        if wait is not None:
            self._wait_is_over(wait)

    def _look_around(self, wait: _Wait) -> None:
        """Says what this rank waits for, and raises if it waits for ever."""
        self.check()
        if not wait.name:
            self._waits += 1
            wait.name = self._waits
            mine = {"name": wait.name, "what": wait.what, "where": self.where(), "ranks": wait.ranks}
            mine |= {"topic": wait.topic, "kind": wait.kind, "number": wait.number, "progress": self._progress()}
            self.tell(_WAITS, json.dumps(mine))
            return
        now = time.monotonic()
        if now - wait.read < _LOOK * len(self._ranks) / _MANY:
            return
        wait.read = now
        waits = self._read_waits()
        circle = self._circle(waits)
        known = [(rank, waits[rank]["name"]) for rank in circle]
        if known and known == wait.circle:
            raise self._stuck(circle, waits)
        wait.circle = known

    def _progress(self) -> dict[str, int]:
        return {"lines": self._lines, **self.progress()}

    def _read_waits(self) -> dict[int, dict[str, Any]]:
        """What each rank waits for; those that do not are left out."""
        keys = [self._key(_WAITS, rank) for rank in self._ranks]
        found = zip(self._ranks, self._read(keys, each=len(keys) <= _MANY), strict=True)
        return {rank: json.loads(text) for rank, text in found if text not in ("", _NONE)}

    def _circle(self, waits: dict[int, dict[str, Any]]) -> list[int]:
        """Ranks that wait for each other, the smallest first, each for the next; empty: this one may still go on."""

        def missing(rank: int) -> list[int]:
            wait = waits[rank]
            if not wait["kind"]:
                return [r for r in wait["ranks"] if r in waits and not self._has_told(r, wait["topic"], wait["number"])]
            return [r for r in waits if r != rank and waits[r]["progress"].get(wait["kind"], 0) < wait["number"]]

        path: list[int] = []
        done: set[int] = set()

        def search(rank: int) -> list[int]:
            if rank in path:
                return path[path.index(rank) :]
            if rank in done or rank not in waits:
                return []
            path.append(rank)
            for other in missing(rank):
                if circle := search(other):
                    return circle
            path.pop()
            done.add(rank)
            return []

        circle = search(self._mine)
        start = circle.index(min(circle)) if circle else 0
        return circle[start:] + circle[:start]

    def _has_told(self, rank: int, topic: str, number: int | None) -> bool:
        message = self._look(self._key(topic, rank))
        return message != _NONE if number is None else message.partition(":")[0] == str(number)

    def _stuck(self, circle: list[int], waits: dict[int, dict[str, Any]]) -> CommunicationError:
        lines = []
        for rank, other in zip(circle, [*circle[1:], circle[0]], strict=True):
            where = f" in `{waits[rank]['where']}`" if waits[rank]["where"] else ""
            lines.append(f"rank {rank} waits{where} for {waits[rank]['what']}, to which rank {other} has not come")
        error = CommunicationError(
            f"zerocompile: ranks wait for each other, in different things: {'; '.join(lines)}. Every rank must do what "
            "communicates, in the same order. With parameters sharded (stage 3) that is every use of a weight: also in "
            "callbacks (no `@rank_zero_only` around it), in `generate` (pass `synced_gpus=True`), when a state dict is "
            "taken; let all ranks do it, and only one keep the result."
        )
        self.leave(str(error))
        return error

    def wait_for(self, work: dist.Work, what: str) -> None:
        """Waits for what all ranks join right away (a barrier of gloo's), and notices if one cannot come.

        Raises:
            CommunicationError: another rank will not come to it.
        """
        number = self._lines
        try:
            while True:
                start = time.monotonic()
                try:
                    work.wait(timedelta(seconds=_LOOK))
                    return
                except RuntimeError:
                    if work.is_completed() or time.monotonic() - start < _LOOK / 2:
                        raise
                self.blocked("lines", number, what)
        finally:
            self._unblocked()

    def line_up(self, what: str, group: dist.ProcessGroup | None = None) -> None:
        """On the CPU: all ranks come to ``what``, a collective whose own wait notices nothing. Elsewhere nothing.

        Raises:
            CommunicationError: another rank will not come to it.
        """
        if not self.others or dist.get_backend(group) != "gloo":
            return
        self._lines += 1
        self.wait_for(dist.barrier(group, async_op=True), what)

    def meet(self, what: str) -> None:
        """All ranks come to ``what``, which blocks them anyway.

        Raises:
            CommunicationError: another rank has come to something else, or will not come.
        """
        if not self.others:
            return
        said = f"{what} (in `{self.where()}`)"
        heard = self.exchange_numbered("meeting", self.next_number("meeting"), said, what)
        for rank, theirs in heard.items():
            if theirs is None:
                raise self.silent(rank, f"has come to {what}")
            if theirs.partition(" (in `")[0] != what:
                raise CommunicationError(
                    f"zerocompile: rank {self._mine} has come to {heard[self._mine]}, but rank {rank} to {theirs}. "
                    "Every rank must do what communicates, in the same order."
                )

    # ---- messages ----

    def tell(self, topic: str, message: str) -> None:
        """Leaves ``message`` for whoever asks; never blocks on another rank."""
        self._store().set(self._key(topic, self._mine), message)

    def forget(self, topic: str) -> None:
        """Removes this rank's message; all ranks must have read it."""
        self._store().delete_key(self._key(topic, self._mine))

    def ask(self, topic: str, rank: int, what: str = "") -> str | None:
        """The message of ``rank`` (a global one); ``None`` if none came in time. ``what``: it is about, for messages.

        Raises:
            CommunicationError: the rank has ended meanwhile or waits for ever; the message says why.
        """
        key, start = self._key(topic, rank), time.monotonic()
        with self._waiting(_Wait(what or f"its word on `{topic}`", [rank], topic)) as wait:
            while (message := self._look(key)) == _NONE:
                now = time.monotonic()
                if now - start >= self._timeout.total_seconds():
                    return None
                if now - wait.looked >= _LOOK:
                    wait.looked = now
                    reason = self._end_of(rank)
                    if reason is not None:
                        if (last := self._look(key)) != _NONE:  # it has told this before it ended
                            return last
                        raise self._lost(rank, reason)
                    self._look_around(wait)
                _rest(now - start)
        return message

    def _look(self, key: str) -> str:
        """What the store has for a key now, or ``_NONE``."""
        # One round trip, where `check` and `get` (which waits first) take three; and the store's own wait would write
        # a warning each time that it ends without a message.
        return str(self._store().compare_set(key, _NONE, _NONE).decode())

    def tell_numbered(self, topic: str, number: int, message: str) -> None:
        """:meth:`tell` for an endless series: message ``number`` takes the place of number ``number - SERIES``."""
        self.tell(f"{topic}/{number % SERIES}", f"{number}:{message}")

    def exchange_numbered(self, topic: str, number: int, message: str, what: str = "") -> dict[int, str | None]:
        """Every rank's message ``number`` by global rank; None where it did not come in time."""
        self.tell_numbered(topic, number, message)
        heard = self.ask_numbered(topic, number, what)
        return {rank: message if rank == self._mine else heard[rank] for rank in self._ranks}

    def heard_now(self, topic: str, number: int, rank: int) -> str | None:
        """A rank's message ``number`` if it is there; never blocks on it."""
        seen, _, message = self._look(self._key(f"{topic}/{number % SERIES}", rank)).partition(":")
        return message if seen == str(number) else None

    def ask_numbered(self, topic: str, number: int, what: str = "") -> dict[int, str | None]:
        """The others' messages ``number`` by global rank; ``None`` where it did not come in time.

        Raises:
            CommunicationError: one has ended meanwhile or waits for ever; the message says why.
        """
        heard: dict[int, str | None] = {}
        waiting = self.others
        start = time.monotonic()
        ended: dict[int, str] = {}
        about = what or f"its word on `{topic}` number {number}"
        with self._waiting(_Wait(about, topic=f"{topic}/{number % SERIES}", number=number)) as wait:
            while True:
                now = time.monotonic()
                late = now - start >= self._timeout.total_seconds()
                looks = late or bool(ended) or now - wait.looked >= _LOOK
                answers = self._read([self._key(f"{topic}/{number % SERIES}", rank) for rank in waiting], each=looks)
                for rank, answer in zip(waiting, answers, strict=True):
                    seen, _, message = answer.partition(":")
                    if seen == str(number):  # an older one: the rank has not come to this number
                        heard[rank] = message
                waiting = [rank for rank in waiting if rank not in heard]
                for rank in waiting:
                    if rank in ended:  # and had not told this before
                        raise self._lost(rank, ended[rank])
                if not waiting or late:
                    return {rank: heard.get(rank) for rank in self.others}
                if looks:
                    wait.looked, wait.ranks = now, waiting
                    ended = {rank: reason for rank in self.some(waiting) if (reason := self._end_of(rank)) is not None}
                    if not ended:
                        self._look_around(wait)
                _rest(now - start)

    def _read(self, keys: list[str], each: bool) -> list[str]:
        """What the store has for each key; of more than a few (in three requests) nothing before all have something,
        unless ``each`` is to be asked for by itself."""
        store = self._store()
        if each or len(keys) <= self._few or not store.has_extended_api():
            return [self._look(key) for key in keys]
        if not store.check(keys):
            return [_NONE] * len(keys)
        return [value.decode() for value in store.multi_get(keys)]

    def next_number(self, topic: str) -> int:
        """How often this rank has come to ``topic``, this time included."""
        self._counts[topic] += 1
        return self._counts[topic]

    def mark(self, topic: str, number: int, message: str) -> tuple[int, str]:
        """The rank that came to mark ``number`` first, and its message; never blocks on another rank."""
        store, key = self._store(), f"zerocompile/{self._name}/{topic}/"
        first = store.compare_set(f"{key}{number}", "", f"{self._mine}:{message}").decode()
        if self._mine == self._ranks[0] and number >= SERIES:
            store.delete_key(f"{key}{number - SERIES}")
        rank, _, theirs = first.partition(":")
        return int(rank), theirs

    def of_first(self, topic: str, message: str, doing: str) -> str:
        """The first rank's message, on all ranks.

        Raises:
            CommunicationError: it did not come in time; ``doing`` as in :meth:`silent`.
        """
        if self._mine == self._ranks[0]:
            self.tell(topic, message)
            return message
        theirs = self.ask(topic, self._ranks[0])
        if theirs is None:
            raise self.silent(self._ranks[0], doing)
        return theirs

    def exchange(self, topic: str, message: str, what: str = "") -> dict[int, str | None]:
        """Every rank's message by global rank; stops at the first that does not come in time, whose entry is None."""
        self.tell(topic, message)
        heard: dict[int, str | None] = {}
        for rank in self._ranks:
            heard[rank] = message if rank == self._mine else self.ask(topic, rank, what)
            if heard[rank] is None:
                break
        return heard

    def hear_all(self, topic: str, message: str, doing: str) -> dict[int, str]:
        """:meth:`exchange` where nobody's message may be missing.

        Raises:
            CommunicationError: one did not come in time; ``doing`` says what this rank has come to, as in
                :meth:`silent`.
        """
        heard: dict[int, str] = {}
        for rank, theirs in self.exchange(topic, message).items():
            if theirs is None:
                raise self.silent(rank, doing)
            heard[rank] = theirs
        return heard

    def silent(self, rank: int, doing: str) -> CommunicationError:
        """The error of this rank, which ``doing`` (a verb in the perfect), about one that has not told it in time."""
        return CommunicationError(
            f"zerocompile: rank {self._mine} {doing}, but rank {rank} has not within {self._timeout}: it died, hangs, "
            "or does not run the same step."
        )

    def _key(self, topic: str, rank: int) -> str:
        return f"zerocompile/{self._name}/{topic}/{rank}"

    @staticmethod
    def _store() -> Any:
        return dist.distributed_c10d._get_default_store()


def _rest(waited: float) -> None:
    if waited > _SPIN:
        time.sleep(min(_PAUSE, waited / 4))
