"""What ranks tell each other through the store. Messages are no collective, so ranks can learn from them what is wrong
before a collective starts.

A rank that waits for another one, here or in a collective, looks about once a second whether the other can still come.
The other cannot come if its process has died or has ended its part of the run (see [Note: liveness]), if it has said
why it ends, or if it waits for this rank in something else (see [Note: ranks that wait for each other]). A wait of less
than a second costs no request.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_zerocompile.ranks.abort import START_ANEW, groups_of_devices, note_end
from lightning_zerocompile.ranks.liveness import CLOSED, DIED, Liveness, Watch
from lightning_zerocompile.ranks.relay import Join, Relay, by_message, by_rank, firsts
from lightning_zerocompile.ranks.waits import DIRECT, DirectCollectives, StandingThread, Wait

# How many messages of a series stay in the store. A rank is never that far ahead of another: a device queues about a
# thousand kernels at most, and a collective that waits for a slower rank holds up all kernels that are queued after it.
SERIES = 256
Late = Callable[[int], "CommunicationError"]
Instead = Callable[[Sequence[int]], str | None]
HAS_LEFT = "which has ended:"  # is in every error of a rank that waits for a rank that is gone
_NONE = "zerocompile/none"  # the store's answer if there is no message; no message is equal to it
_STANDS = "stands"  # the topic under which a rank says where it stands, on devices
_BEGUN = "begun"  # the topic under which a rank says what it reduces in a backward in which it stands
_JOINED = "joined"  # in a key, in the place of a rank: the answer that one rank has made of all messages
_LEFT = "left"  # the topic under which a rank says why it has ended
_CLEARED = "cleared"  # under which ranks count that they have removed what they had written
_FEW = 3  # where there are no more other ranks than this, each rank asks all of them; else see [Note: relay]
_LOOK = 1.0  # seconds: how often a rank that waits looks whether the other has ended
_MANY = 16  # how many ranks are asked at one look at most
_STILL = 3  # looks that must find the main thread in one place before this rank's groups are ended from outside
# Seconds: at first a rank asks again at once, since even a short sleep takes long; after that it sleeps in between, the
# longer the more ranks there are, so that the store is not asked more often by more ranks.
_SPIN, _PAUSE, _PAUSE_OF_RANK = 2e-3, 5e-3, 1e-4


@dataclass
class _Asked:
    """What was heard of one numbered message.

    Attributes:
        heard: the messages that this rank has read by itself, by rank.
        missing: ranks whose message was not there when this rank asked for it.
        joined: the answer that another rank has left; ``None``: there was none.
    """

    heard: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    joined: str | None = None


class CommunicationError(RuntimeError):
    """Communication has failed, or cannot succeed: another rank is gone, or ranks have come to different things.

    Args:
        text: its message.
        explained: whether the message is complete, so that :func:`~lightning_zerocompile.ranks.errors.phase` raises it
            as it is. Otherwise that function adds the phase, and what the other ranks have said.
    """

    def __init__(self, text: str, explained: bool = False) -> None:
        super().__init__(text)
        self.explained = explained


class Messages:
    """Messages between all ranks.

    Args:
        device: the kind of device of the ranks, ``"cpu"`` or ``"cuda"``.
        name: this conversation's name: the same on all ranks, and that of no other conversation.
        timeout: how long a rank waits for a message.
        watch: of this rank: hears of dead ranks, and ends what waits on this rank's device.

    Attributes:
        others: all global ranks but this one, in rising order.
        check: called at each look while this rank waits; it may raise.
        where: returns the place in the training where this rank is, for errors; "" if it is not known.
        started: returns how many collectives of each stream this rank has started; see :class:`Wait`.
        begun: returns the number of the next exchange of used flags, and how many units the backward that runs has
            begun to reduce before it; see [Note: begun reductions] in csrc/reductions.cpp.
        position: returns how many collectives of the default process group this rank has started; -1: it is not known.
        among: the ranks that take part in a stream's collectives, by stream; streams of all ranks are left out.
    """

    def __init__(self, device: str, name: str, timeout: timedelta, watch: Watch) -> None:
        self._ranks, self._device = list(range(dist.get_world_size())), device
        self._mine = dist.get_rank()
        self.others = [rank for rank in self._ranks if rank != self._mine]
        self._name, self._timeout, self._few = name, timeout, _FEW
        self._pause = max(_PAUSE, _PAUSE_OF_RANK * len(self._ranks))
        self._watch = watch
        self._liveness: Liveness | None = None
        self._direct = DirectCollectives()
        self._still = StandingThread()
        self._looks_without = 0  # how many looks in a row have found another rank gone
        self._told = (-1, "")  # what this rank has told last of the place where its main thread stands
        self._noted_end = False
        self._has_left = False
        self._written: set[str] = set()  # keys in the store; see `clear`
        self._last = ""  # where this rank's last numbered message stands
        self._turn = 0
        self._counts: Counter[str] = Counter()
        self.check: Callable[[], None] = lambda: None
        self.where: Callable[[], str] = lambda: ""
        self.started: Callable[[], Mapping[str, int]] = dict
        self.begun: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._begun = self._told_begun = (0, 0)  # what it was at the last look; what was told last
        self.position: Callable[[], int] = lambda: -1
        self.among: Mapping[str, Sequence[int]] = {}

    def __deepcopy__(self, memo: object) -> Messages:
        return self  # a copied parameter refers to it, and the ranks have one conversation only

    # ---- who is there ----

    def watch(self) -> None:
        """Begins to notice a rank whose process dies. All ranks must call.

        Raises:
            CommunicationError: the first rank does not call in time.
        """
        if self.others and self._liveness is None:
            doing = "has set its model up"
            first_says = partial(self.of_first, "liveness", doing=doing)
            within = self._timeout.total_seconds()
            self._liveness = Liveness(self._watch, len(self._ranks), self._mine, first_says, within, self._standing)

    def watch_barriers(self, barriers: Any) -> None:
        """Sees to it that no barrier on this rank's device waits for a rank that is gone, or longer than the timeout.

        ``barriers``: ``DeviceBarriers`` of the C++ extension.
        """
        self._watch.add_barriers(barriers)

    def clear(self) -> None:
        """Removes what this conversation has left in the store; called on all ranks after they have met for the last
        time, if none of them has failed."""
        # A rank may still ask for these:
        last = {self._key(self._last, who) for who in (*map(str, self._ranks), _JOINED)}
        with suppress(RuntimeError):  # a store whose host has ended raises it
            for key in self._written - last:
                self._store().delete_key(key)
            if self.count(_CLEARED) == len(self._ranks):  # no rank asks any more
                for key in (*last, f"zerocompile/{self._name}/{_CLEARED}"):
                    self._store().delete_key(key)

    def close(self) -> None:
        """Ends this rank's part in the conversation; frees what :meth:`watch` has opened."""
        if self._liveness is not None:
            self._liveness.close()
        else:
            self._watch.close()

    def leave(self, reason: str) -> None:
        """Tells the others that this rank ends, and why. Only the first call counts. It neither blocks nor raises."""
        if self._has_left:
            return
        self._has_left = True
        self._watch.leave(reason)
        with suppress(RuntimeError):  # a store whose host has died raises it
            self.tell(_LEFT, reason)

    def reasons(self, within: timedelta) -> dict[int, str | None]:
        """Why the others have ended, by global rank; ``None``: nothing was heard of that rank ``within`` that time."""
        deadline = time.monotonic() + within.total_seconds()
        known = self._watch.left()
        return {rank: self._reason(rank, deadline, known.get(rank)) for rank in self.others}

    def _reason(self, rank: int, deadline: float, known: str | None) -> str | None:
        if known is not None and len(self.others) > _MANY:  # that many ranks would ask the store too much
            return known
        while True:
            late = time.monotonic() >= deadline
            try:
                reason = self._look(self._key(_LEFT, rank))
            except RuntimeError:  # the store's host has died; the watch may still be about to hear of it
                reason = _NONE
                if late and not self._watch.left().keys() - {self._mine}:
                    raise
            if reason != _NONE:
                return reason
            gone = self._watch.left().get(rank) or self._watch.gone(rank)
            if gone is not None or late:
                return gone
            time.sleep(self._pause)

    def _end_of(self, rank: int) -> str | None:
        """Why a rank will not send the message that this one waits for; ``None``: it may still send it."""
        reason = self._look(self._key(_LEFT, rank))
        return self._watch.gone(rank) if reason == _NONE else reason

    def some(self, ranks: Sequence[int]) -> list[int]:
        """At most ``_MANY`` of ``ranks``, by turns: the requests of one look must not grow with the number of ranks."""
        self._turn += 1
        return [ranks[(self._turn * _MANY + k) % len(ranks)] for k in range(_MANY)] if len(ranks) > _MANY else [*ranks]

    def _lost(self, rank: int, reason: str) -> CommunicationError:
        return CommunicationError(f"zerocompile: rank {self._mine} waits for rank {rank}, {HAS_LEFT} {reason}")

    def look(self, what: str, stream: str, number: int) -> None:
        """Called about once a second while this rank waits for a collective.

        Args:
            what: the collective, for errors.
            stream: the stream of the collective; all ranks run the collectives of a stream in the same order.
            number: the collective's number in the stream, from 1.

        Raises:
            CommunicationError: another rank will not come to this collective.
        """
        self.check()
        self.waits(what, stream, number)
        self._look_at(self.others)

    def look_for(self, ranks: Sequence[int], what: str) -> None:
        """Does the same as :meth:`look`, while this rank waits for messages of ``ranks`` before ``what``.

        Raises:
            CommunicationError: one of ``ranks`` will not send its message.
        """
        self.check()
        self.waits(what, "message", 0, ranks)
        self._look_at(ranks)

    def _look_at(self, ranks: Sequence[int]) -> None:
        for rank in self.some(ranks):
            reason = self._end_of(rank)
            if reason is not None and reason != CLOSED:  # a rank that has ended in order has done its part before
                raise self._lost(rank, reason)

    def waits(self, what: str, stream: str, number: int, on: Sequence[int] = ()) -> None:
        """Reports that this rank waits; called again every second. The arguments are those of :class:`Wait`.

        Raises:
            CommunicationError: this rank waits for ranks that wait for it, or its process groups have ended.
        """
        self.raise_if_ended()
        if self._liveness is None:
            return
        among = self.among.get(stream, ())
        knot = self._liveness.waits(Wait(stream, number, what + self.where(), on, self.started(), among).line())
        if knot is not None:
            raise CommunicationError(knot, explained=True)

    def raise_if_left(self, meeting: int) -> None:
        """Called in a meeting of this number, when the ranks seem to be there.

        Raises:
            CommunicationError: another rank has left it, see [Note: meetings that were left] in waits.py.
        """
        reason = None if self._liveness is None else self._liveness.left_meeting(meeting)
        if reason is not None:
            raise CommunicationError(reason, explained=True)

    def _standing(self) -> str | None:
        """Called about once a second by the thread that watches, since torch's own collectives do not :meth:`look`.

        Returns:
            On the CPU, the report (:meth:`Wait.line`) that the main thread stands in a collective of
            ``torch.distributed``; None: it stands in none. On devices always None, see :meth:`_look_from_outside`.
        """
        self._tell_begun()
        if self._device != "cpu":  # on devices torch's collectives return before they are done
            self._look_from_outside()
            return None
        found = self._direct.look()
        if found is None:
            return None
        number, what = found
        return Wait(DIRECT, number, what + self.where(), (), self.started()).line()

    def _tell_begun(self) -> None:
        """Called about once a second by a thread: tells what this rank has begun if it has begun nothing more since."""
        before, self._begun = self._begun, self.begun()
        if before == self._begun != self._told_begun and self._begun[1]:
            self._told_begun = self._begun
            self._in_a_thread(lambda: self.tell(_BEGUN, json.dumps(self._told_begun)))

    def has_begun(self, number: int, ranks: Sequence[int]) -> int:
        """How many units one of ``ranks`` is known to have begun to reduce before exchange ``number`` of used flags."""
        said = [self._look(self._key(_BEGUN, rank)) for rank in self.some(ranks)]
        known = [json.loads(one) for one in said if one != _NONE]
        return max((units for exchange, units in known if exchange == number), default=0)

    def _look_from_outside(self) -> None:
        """Called by a thread, on devices: tells where the main thread stands, and ends the groups if it stands in vain.

        The main thread stands in vain if it has not moved for some looks, and another rank has been gone for as long:
        what the two have started together is done by then. See [Note: ended groups] in csrc/watch.h.
        """
        self._still.look()
        ended = self._watch.ended()
        if ended is not None:
            if not self._noted_end:
                self._noted_end = True
                self._in_a_thread(lambda: note_end(ended))
            return
        self._watch.set_groups([group.group_name for group in groups_of_devices()])
        left = {rank: reason for rank, reason in self._watch.left().items() if rank != self._mine}
        self._looks_without = self._looks_without + 1 if left else 0
        device = self._watch.standing()
        if self._still.looks < _STILL:
            return
        stands = self.position(), self._still.where + self.where() + (f", its device in {device}" if device else "")
        if stands != self._told:
            self._told = stands
            self._in_a_thread(lambda: self.tell(_STANDS, json.dumps(stands)))
        if self._looks_without > _STILL:
            rank = min(left)
            reason = f"zerocompile: rank {self._mine} waits for rank {rank}, {HAS_LEFT} {left[rank]}"
            self._in_a_thread(lambda: self.end(reason))

    @staticmethod
    def _in_a_thread(action: Callable[[], None]) -> None:
        """Runs ``action`` in a thread of its own, so that the thread that watches can go on to hear and tell.

        An action may wait: the store's client does one thing at a time.
        """

        def act() -> None:
            with suppress(RuntimeError):  # a store whose host has died raises it
                action()

        threading.Thread(target=act, daemon=True, name="zerocompile-end").start()

    def stands(self, rank: int) -> tuple[int, str]:
        """The ``position`` of a rank when its main thread last stood in one place for seconds, and that place.

        (-1, ""): it never has.
        """
        said = self._look(self._key(_STANDS, rank))
        if said == _NONE:
            return -1, ""
        position, place = json.loads(said)
        return int(position), str(place)

    def end(self, reason: str) -> None:
        """Ends this rank's process groups, see [Note: ended groups] in csrc/watch.h. Only the first call counts."""
        self._noted_end = True
        self._watch.set_groups([group.group_name for group in groups_of_devices()])
        if self._watch.end(reason):
            note_end(reason)

    @property
    def ended(self) -> str | None:
        """Why this rank's process groups have ended, see [Note: ended groups] in csrc/watch.h; None: they have not."""
        reason = self._watch.ended()
        return None if reason is None else f"{reason}\n{START_ANEW}"

    def raise_if_ended(self) -> None:
        """Called before and after what communicates.

        Raises:
            CommunicationError: this rank's process groups have ended; what the last collectives gave is not valid.
        """
        ended = self.ended
        if ended is not None:
            raise CommunicationError(ended, explained=True)

    @property
    def last_knot(self) -> str | None:
        """The message about the knot that this rank is in, if this rank has not raised it; else None."""
        return None if self._liveness is None else self._liveness.last_knot

    # ---- messages ----

    def tell(self, topic: str, message: str) -> None:
        """Leaves ``message`` in the store for all ranks that ask; never waits for another rank."""
        key = self._key(topic, self._mine)
        self._written.add(key)
        self._store().set(key, message)

    def forget(self, topic: str, number: int) -> None:
        """Removes this rank's message ``number`` from the store; all ranks must have read it."""
        slot = f"{topic}/{number % SERIES}"
        self._store().delete_key(self._key(slot, self._mine))
        if self._mine == self._ranks[0] and len(self.others) > self._few:
            self._store().delete_key(self._key(slot, _JOINED))

    def take_back(self, topic: str, number: int) -> None:
        """Makes this rank's message ``number`` count as not sent from now on."""
        self.tell(f"{topic}/{number % SERIES}", "")

    def ask(self, topic: str, rank: int, what: str = "") -> str | None:
        """The message of the global ``rank``; ``None`` if none came within the timeout.

        ``what`` says what is asked, for errors.

        Raises:
            CommunicationError: the rank has ended meanwhile, and the error says why; or ranks wait for each other.
        """
        waits = partial(self.waits, what or f"an exchange of `{topic}`", "message", 0, [rank])
        return self._await(self._key(topic, rank), lambda said: said != _NONE, waits, [rank], self._timeout)

    def _await(
        self,
        key: str,
        is_there: Callable[[str], bool],
        waits: Callable[[], object],
        ranks: Sequence[int],
        within: timedelta,
    ) -> str | None:
        """What the store has for a key, once ``is_there`` is true of it; None: it was not true ``within`` that time.

        Args:
            waits: reports that this rank waits, see :meth:`waits`.
            ranks: the ranks that may write it.

        Raises:
            CommunicationError: one of ``ranks`` has ended meanwhile, or ranks wait for each other.
        """
        start = looked = time.monotonic()
        ended: tuple[int, str] | None = None
        while not is_there(said := self._look(key)):
            if ended is not None:
                raise self._lost(*ended)
            now = time.monotonic()
            if now - start >= within.total_seconds():
                return None
            if now - looked >= _LOOK:
                looked = now
                self.check()
                waits()
                gone = ((rank, self._end_of(rank)) for rank in self.some(ranks))
                ended = next(((rank, reason) for rank, reason in gone if reason is not None), None)
                if ended is not None:
                    continue  # that rank may have written to the store before it ended
            self._rest(now - start)
        return said

    def _look(self, key: str) -> str:
        """What the store has for a key now, or ``_NONE``."""
        # One round trip. `check` and `get` (which waits first) take three, and the store's own wait would write a
        # warning each time that it ends without a message.
        return str(self._store().compare_set(key, _NONE, _NONE).decode())

    def tell_numbered(self, topic: str, number: int, message: str) -> None:
        """Does :meth:`tell` for an endless series: message ``number`` takes the place of number ``number - SERIES``."""
        self._last = f"{topic}/{number % SERIES}"
        self._written.add(self._key(self._last, _JOINED))
        self.tell(self._last, f"{number}:{message}")

    def exchange_numbered(self, topic: str, number: int, message: str, what: str = "") -> dict[int, str | None]:
        """Sends message ``number``; returns every rank's by global rank: :meth:`ask_numbered`'s answer and this rank's.

        Raises:
            CommunicationError: as :meth:`ask_numbered`.
        """
        self.tell_numbered(topic, number, message)
        heard: dict[int, str | None] = {self._mine: message}
        heard |= self.ask_numbered(topic, number, what=what)
        return {rank: heard[rank] for rank in self._ranks if rank in heard}

    def join_numbered(
        self,
        topic: str,
        number: int,
        message: str,
        join: Join,
        what: str,
        late: Late,
        instead: Instead | None = None,
    ) -> str:
        """What ``join`` makes of all ranks' messages ``number``. This rank must have sent its own before.

        But for the one rank that joins, a rank's requests do not grow with the number of ranks: see [Note: relay].

        Args:
            topic, number: the message's topic and number.
            message: this rank's message.
            join: makes the answer. It may run on any of the ranks, and must give the same on all.
            what: what is asked, for errors.
            late: makes the error about a rank whose message did not come in time.
            instead: called about once a second with ranks whose message has not come. What it returns, unless that is
                None, is returned at once, instead of the answer.

        Raises:
            CommunicationError: a rank has ended, or did not send its message in time.
        """
        asked = self._ask(topic, number, self._timeout, what, join, instead)
        if asked.missing:
            raise late(asked.missing[0])
        if asked.joined is not None:
            return asked.joined
        heard = asked.heard | {self._mine: message}
        return join({rank: heard[rank] for rank in self._ranks})

    def different(self, topic: str, number: int, message: str, what: str, late: Late) -> dict[str, int]:
        """Sends message ``number``; returns all ranks' different messages, each with the first rank that has sent it.

        The arguments are those of :meth:`join_numbered`.

        Raises:
            CommunicationError: as :meth:`join_numbered`.
        """
        self.tell_numbered(topic, number, message)
        answer: dict[str, int] = json.loads(self.join_numbered(topic, number, message, firsts, what, late))
        return answer

    def heard_now(self, topic: str, number: int, rank: int) -> str | None:
        """A rank's message ``number`` if it is there already, else None; never waits for that rank."""
        seen, _, message = self._look(self._key(f"{topic}/{number % SERIES}", rank)).partition(":")
        return message if seen == str(number) else None

    def ask_numbered(
        self, topic: str, number: int, within: timedelta | None = None, what: str = ""
    ) -> dict[int, str | None]:
        """The others' messages ``number`` by global rank; ``None`` where one did not come ``within`` that time.

        Where there are many ranks, and some message has not come, this rank does not ask for all of them. Ranks that it
        has not asked are left out of the result then, and at least one rank is there with ``None``.

        Args:
            topic, number: the message's topic and number.
            within: how long to wait; ``None``: the conversation's timeout.
            what: what is asked, for errors.

        Raises:
            CommunicationError: a rank has ended meanwhile, and the error says why; or ranks wait for each other.
        """
        asked = self._ask(topic, number, within or self._timeout, what, by_message)
        if asked.joined is not None:
            return {rank: theirs for rank, theirs in by_rank(asked.joined).items() if rank != self._mine}
        known = {*asked.heard, *asked.missing}
        return {rank: asked.heard.get(rank) for rank in self.others if rank in known}

    def _ask(
        self,
        topic: str,
        number: int,
        within: timedelta,
        what: str,
        join: Join,
        instead: Instead | None = None,
    ) -> _Asked:
        slot = f"{topic}/{number % SERIES}"
        relay = None
        if len(self.others) > self._few:
            relay = Relay(self._store(), self._key(slot, _JOINED), number, self._mine)
        joins = relay is None or relay.joins  # this rank reads all messages
        asked, waiting = _Asked(), self.others
        start = looked = time.monotonic()
        limit = within.total_seconds()
        ended: dict[int, str] = {}
        together = 1  # how many messages are asked for at once: twice as many after each time that all were there
        while True:
            if relay is not None and not joins and (answer := relay.look()) is not None:
                asked.joined, asked.missing = answer, []
                return asked
            now = time.monotonic()
            late = now - start >= limit
            looks = late or bool(ended) or now - looked >= _LOOK
            if looks:
                first = [*ended, *(relay.missing if relay is not None and not joins else ())]
                order = [rank for rank in dict.fromkeys([*first, *waiting]) if rank in waiting]
                asked.missing = self._hear_each(slot, number, order, asked.heard, all_of_them=joins)
                going_on = False
            elif joins:
                wanted = waiting[:together]
                answers = self._read([self._key(slot, rank) for rank in wanted])
                asked.heard |= _sent(number, dict(zip(wanted, answers, strict=True)))
                going_on = all(rank in asked.heard for rank in wanted)
                together = 2 * together if going_on else 1
            waiting = [rank for rank in waiting if rank not in asked.heard]
            for rank in asked.missing if looks else ():
                if rank in ended:  # the rank had ended before this look, so its message will not come
                    raise self._lost(rank, ended[rank])
            if not waiting:
                asked.missing = []
                if relay is not None and joins:
                    own = _sent(number, {self._mine: self._look(self._key(slot, self._mine))})
                    told = asked.heard | own
                    if own:
                        relay.leave(join({rank: told[rank] for rank in self._ranks}))
                return asked
            if late:
                return asked
            if looks:
                looked = now
                self.check()
                self.waits(what or f"an exchange of `{topic}`", "message", number, asked.missing[:_MANY])
                if relay is not None and joins:
                    relay.misses(asked.missing)
                if instead is not None and (answer := instead(asked.missing)) is not None:
                    asked.joined, asked.missing = answer, []
                    return asked
                ended = {r: reason for r in self.some(asked.missing) if (reason := self._end_of(r)) is not None}
            if not (joins and going_on):
                self._rest(now - start)

    def _hear_each(
        self, slot: str, number: int, ranks: Sequence[int], heard: dict[int, str], all_of_them: bool
    ) -> list[int]:
        """Asks for messages one by one, and adds to ``heard`` those that are there.

        Unless it is to ask for ``all_of_them``, it stops after ``_MANY`` that are not there.

        Returns:
            The ranks whose message is not there.
        """
        missing: list[int] = []
        for rank in ranks:
            sent = _sent(number, {rank: self._look(self._key(slot, rank))})
            heard |= sent
            if not sent:
                missing.append(rank)
            if len(missing) >= _MANY and not all_of_them:
                break
        return missing

    def _read(self, keys: list[str]) -> list[str]:
        """The store's messages for the keys, ``_NONE`` where there is none.

        Keys are asked for together if there are more than a few. That takes three requests, and all of them count as
        missing until all have a message.
        """
        store = self._store()
        if len(keys) <= self._few or not store.has_extended_api():
            return [self._look(key) for key in keys]
        if not store.check(keys):
            return [_NONE] * len(keys)
        return [value.decode() for value in store.multi_get(keys)]

    def _rest(self, waited: float) -> None:
        if waited > _SPIN:
            time.sleep(min(self._pause, waited / 4))

    def next_number(self, topic: str) -> int:
        """Counts that this rank comes to ``topic``; returns how often it has, this time included."""
        self._counts[topic] += 1
        return self._counts[topic]

    def mark(self, topic: str, number: int, message: str) -> tuple[int, str]:
        """Passes mark ``number``, leaving ``message`` if this rank is the first there; never waits for a rank.

        Returns:
            The global rank that came there first, and its message.
        """
        store, key = self._store(), f"zerocompile/{self._name}/{topic}/"
        self._written -= {f"{key}{number - SERIES}"}
        self._written.add(f"{key}{number}")
        first = store.compare_set(f"{key}{number}", "", f"{self._mine}:{message}").decode()
        if self._mine == self._ranks[0] and number >= SERIES:
            store.delete_key(f"{key}{number - SERIES}")
        rank, _, theirs = first.partition(":")
        return int(rank), theirs

    def marked(self, topic: str, number: int) -> tuple[int, str] | None:
        """The rank that came to mark ``number`` first, and its message; None: no rank has come there."""
        found = self._look(f"zerocompile/{self._name}/{topic}/{number}")
        if found == _NONE:
            return None
        rank, _, message = found.partition(":")
        return int(rank), message

    def decide(self, topic: str, former: str, message: str) -> str:
        """Puts ``message`` under ``topic`` if ``former`` stands there ("": nothing). Never waits for a rank.

        Returns:
            What stands there after this.
        """
        key = f"zerocompile/{self._name}/{topic}"
        self._written.add(key)
        return str(self._store().compare_set(key, former, message).decode())

    def count(self, topic: str) -> int:
        """Counts that this rank comes to ``topic``; returns how often all ranks have. Never waits for a rank."""
        key = f"zerocompile/{self._name}/{topic}"
        self._written.add(key)
        return int(self._store().add(key, 1))

    def await_decision(
        self, topic: str, begins: str, what: str, place: tuple[str, int], ranks: Sequence[int], within: timedelta
    ) -> str | None:
        """What stands under ``topic``, once that begins with ``begins``; None: it did not come ``within`` that time.

        Args:
            topic: as in :meth:`decide`.
            begins: the first characters of the decision that is waited for.
            what: what this rank waits for, for errors.
            place: the stream that this rank waits in, and its number there; see :class:`Wait`.
            ranks: the ranks that may decide.
            within: how long to wait.

        Raises:
            CommunicationError: one of ``ranks`` has ended meanwhile, or ranks wait for each other.
        """
        key, waits = f"zerocompile/{self._name}/{topic}", partial(self.waits, what, *place)
        return self._await(key, lambda said: said.startswith(begins), waits, ranks, within)

    def all_count(self, topic: str, within: timedelta, given_up: Callable[[], bool]) -> bool:
        """Counts that this rank comes to ``topic``; returns whether all ranks have ``within`` that time.

        It asks for one number, however many ranks there are, and raises nothing for ranks that have ended.

        Args:
            topic: what is counted.
            within: how long to wait.
            given_up: asked at each look; if it is true, this rank waits no longer.
        """
        deadline = time.monotonic() + within.total_seconds()
        key = f"zerocompile/{self._name}/{topic}"
        here = int(self._store().add(key, 1))
        while here < len(self._ranks) and time.monotonic() < deadline and not given_up():
            if DIED in self._watch.left().values():
                return False
            time.sleep(self._pause)
            here = int(self._store().add(key, 0))
        return here >= len(self._ranks)

    def of_first(self, topic: str, message: str, doing: str) -> str:
        """The first rank's ``message``, on all ranks. The other ranks' own are not sent.

        Raises:
            CommunicationError: the message did not come in time, or the first rank has ended. ``doing`` says what this
                rank has done, as in :meth:`silent`.
        """
        if self._mine == self._ranks[0]:
            self.tell(topic, message)
            return message
        theirs = self.ask(topic, self._ranks[0], f"a message of rank {self._ranks[0]} that it {doing}")
        if theirs is None:
            raise self.silent(self._ranks[0], doing)
        return theirs

    def exchange(self, topic: str, message: str, what: str = "") -> dict[int, str | None]:
        """Does :meth:`exchange_numbered` with :meth:`next_number`: all ranks must come to ``topic`` equally often."""
        return self.exchange_numbered(topic, self.next_number(topic), message, what)

    def hear_all(self, topic: str, message: str, doing: str) -> dict[int, str]:
        """Does :meth:`exchange` where no message may be missing; returns all of them by global rank, in rising order.

        Raises:
            CommunicationError: a message did not come in time; ``doing`` says what this rank has done, as in
                :meth:`silent`.
        """
        heard: dict[int, str] = {}
        for rank, theirs in self.exchange(topic, message).items():
            if theirs is None:
                raise self.silent(rank, doing)
            heard[rank] = theirs
        return heard

    def silent(self, rank: int, doing: str) -> CommunicationError:
        """The error about ``rank``, which has not done in time what this rank has done.

        ``doing``: what this rank has done, a verb in the perfect ("has begun its first backward").
        """
        return CommunicationError(
            f"zerocompile: rank {self._mine} {doing}, but rank {rank} has not within {self._timeout}: it died, hangs, "
            "or does not run the same step."
        )

    def _key(self, topic: str, rank: int | str) -> str:
        return f"zerocompile/{self._name}/{topic}/{rank}"

    @staticmethod
    def _store() -> Any:
        return dist.distributed_c10d._get_default_store()


def _sent(number: int, answers: Mapping[int, str]) -> dict[int, str]:
    """Those of the store's answers, by rank, that are messages ``number``; the others are older ones, or none."""
    parts = {rank: answer.partition(":") for rank, answer in answers.items()}
    return {rank: message for rank, (seen, _, message) in parts.items() if seen == str(number)}
