"""What the ranks must do alike: it is compared through the store before a difference could make a collective go wrong.

The runtime in csrc/ calls `order`, `gather`, `used_parameters` and `outside` of :class:`Consistency`, see
[Note: order of reductions], [Note: mismatched gathers], [Note: used flags] and [Note: gathers outside of steps].
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_zerocompile.ranks.messages import CommunicationError, Late, Messages
from lightning_zerocompile.ranks.waits import remedy

_ON_ITS_WAY = timedelta(seconds=30)  # how much later than this rank another one may come to the read of a number
_PAUSE = 0.01  # seconds
_LOOK = timedelta(seconds=0.5)  # how often a rank that waits looks whether the other has gone elsewhere
_ALIKE = "alike"
_EACH = 4  # the first gathers at one place outside of steps, which are all compared; later ones at powers of two


class Consistency:
    """What one rank tells the others of its gathers and reductions, and hears of theirs.

    Args:
        messages: the conversation of all ranks.
        timeout: how long ranks wait in a meeting; errors name it.
    """

    def __init__(self, messages: Messages, timeout: timedelta) -> None:
        self._messages, self._timeout = messages, timeout
        self._marks = 0  # how many marks this rank has passed
        self._used = 0  # how many exchanges of used flags there were
        self._begun = (-1, 0)  # an exchange of used flags, and how many units another rank reduces before it
        self._compared = ("", 0)  # the last gather that was compared, and the failures before it
        self._failures = 0  # how many collectives could not be started, on all ranks
        self._reads = 0  # how many reads were compared
        self._met: Counter[str] = Counter()  # how many meetings of each stream there were
        self._place = (-1, "")  # where the last gather outside of steps was: the marks before it, and the hook
        self._at_place = 0  # how many gathers there were at that place

    @property
    def next_exchange(self) -> int:
        """The number of the next exchange of used flags."""
        return self._used + 1

    def order(self, order: list[int]) -> list[int]:
        """Rank 0's order of units, on all ranks. ``order`` is this rank's, and counts on rank 0 only.

        Raises:
            CommunicationError: rank 0 has not told its order in time, or has ended.
        """
        agreed = self._messages.of_first("order", json.dumps(order), "has begun its first backward")
        result: list[int] = json.loads(agreed)
        return result

    def gather(self, sequence: int, unit: str) -> str:
        """Compares gather number ``sequence``, of ``unit`` on this rank, on all ranks.

        Returns:
            What is wrong, for the error: another unit, or a rank that did not come in time; "" if all is well.

        Raises:
            CommunicationError: a rank has ended, or ranks wait for each other.
        """
        mine, topic = dist.get_rank(), f"gather/{sequence}"
        number = self._failures  # a gather that has failed on all ranks does not count, and the next has its number
        heard = self._messages.exchange_numbered(topic, number, unit, f"gather number {sequence}, of unit `{unit}`")
        if self._compared[0]:  # every rank that has come to this comparison has read the last one
            self._messages.forget(*self._compared)
        self._compared = topic, number
        for rank, theirs in heard.items():
            if theirs is None:
                return (
                    f"zerocompile: rank {mine} gathers unit `{unit}` as gather number {sequence}, but rank {rank} "
                    f"has not come to that gather within {self._timeout}: it died, hangs, or does not use the "
                    "same modules."
                )
            if theirs != unit:
                return (
                    f"zerocompile: gather number {sequence} is of unit `{unit}` on rank {mine} but of unit `{theirs}` "
                    f"on rank {rank}. With parameters sharded (stage 3) every rank must use the same modules in the "
                    "same order. Let ranks that differ serve each other (`with strategy.unequal():` on all ranks), "
                    "name the modules in which they differ in `keep_gathered=[...]`, or use stage 1 or 2."
                )
        return ""

    def failed(self, what: str) -> None:
        """Called before the next collective after one that this rank could not start, for lack of memory perhaps.

        Args:
            what: the one that it could not start, and after which others.

        Raises:
            CommunicationError: another rank could start it, and waits in it for this one, or has gone on; or it is
                gone.
        """
        self.meet("failed", f"a meeting, since it could not start {what}", min(self._timeout, _ON_ITS_WAY))
        self._failures += 1

    def mark(self, mine: str) -> None:
        """Passes a mark, a place to which all ranks must come after the same gathers.

        Without marks, if a rank at stage 3 ran one batch more, or generated one token more, its gathers would meet
        different gathers of the other ranks. A mark never blocks on another rank.

        Args:
            mine: the mark, and the number of gathers that this rank has made before it, as the error shows them.

        Raises:
            RuntimeError: another rank came to another mark, or made other gathers before this one.
        """
        rank, theirs = self._messages.mark("mark", self._marks, mine)
        self._marks += 1
        if theirs != mine:
            raise RuntimeError(
                f"zerocompile: rank {dist.get_rank()} is at {mine}{self._messages.where()}, but rank {rank} came there "
                f"at {theirs}. With parameters sharded (stage 3) every rank must run the same number of batches, and "
                "of forwards inside each. Give all ranks equally many batches (a distributed sampler, `drop_last`, "
                "`limit_val_batches`), generate on all ranks, with `synced_gpus` left as it is, save on all ranks, let "
                "all ranks take full values (`strategy.full_parameters`) for work of one, let ranks that do unequal "
                "work serve each other (`with strategy.unequal():` on all of them; for evaluations "
                "`unequal_work='evaluation'`), or use stage 1 or 2."
            )

    def used_parameters(self, exchange: int, used: str, asks: bool) -> str:
        """Which parameters have a gradient on some rank, one letter for each parameter.

        The letters are those of `Reductions::agree_on_used` in csrc/reductions.cpp, with "0" for no gradient. For each
        parameter the largest letter of all ranks counts. In an exchange a rank first calls this with ``asks=False``,
        which sends its letters. If it needs the others' letters, it calls again with ``asks=True``.

        Args:
            exchange: the number of this exchange, for errors.
            used: this rank's letters.
            asks: whether to wait for the letters of all ranks.

        Returns:
            With ``asks`` the letters that count, else ``used``. Or "+" and a number of units, more than this has
            returned for this exchange so far, which another rank reduces in its backward: this rank must reduce
            them, too, and ask again. See [Note: begun reductions] in csrc/reductions.cpp.

        Raises:
            CommunicationError: a rank has not sent its letters in time, or has ended.
        """
        if not asks:
            self._used += 1
            self._messages.tell_numbered("used", self._used, used)
            return used
        what = f"the end of backward number {exchange}"

        def late(rank: int) -> CommunicationError:
            return self._messages.silent(rank, f"has ended backward number {exchange}")

        def begun(missing: Sequence[int]) -> str | None:
            latest = (self._used, self._messages.has_begun(self._used, missing))
            if latest <= self._begun or not latest[1]:
                return None
            self._begun = latest
            return f"+{latest[1]}"

        return self._messages.join_numbered("used", self._used, used, _largest_letters, what, late, begun)

    def read(self, what: str, within: timedelta) -> None:
        """Compares what the ranks read, where each reads a number of a sharded tensor, before the read communicates.

        Another rank is known to be elsewhere when it has ended a backward, passed a mark, or (on devices) started a
        collective of the default process group, to which this one has not come. On devices it may have come to a read
        by then, since there a host waits for no collective. So a message also says how many backwards its rank has
        ended, and how many marks it has passed.

        Args:
            what: what this rank reads.
            within: how long this rank waits for another that may still be on its way.

        Raises:
            RuntimeError: another rank asks for something else, asks at another place, or does not ask.
            CommunicationError: another rank has ended, or waits for this one in something else.
        """
        mine, number, start = dist.get_rank(), self._reads, time.monotonic()
        looked = start
        message = json.dumps([what, [self._used, self._marks]])
        self._messages.tell_numbered("read", number, message)
        met = False
        try:
            while True:
                heard = self._messages.ask_numbered("read", number, within=_LOOK)
                missing = [rank for rank, theirs in heard.items() if theirs is None]
                others = [(r, self._asks(theirs)) for r, theirs in heard.items() if theirs not in (None, message)]
                if others or not missing:
                    met = True
                    break
                now = time.monotonic()
                if (passed := self._passed("read", number, missing)) is not None:
                    others = [passed]
                elif now - start >= within.total_seconds():
                    others = [(missing[0], f"has not come there within {within}")]
                if others:
                    break
                if now - looked >= 1:
                    looked = now
                    self._messages.waits(f"the read of {what}", "message", number, missing)
                time.sleep(_PAUSE)  # another rank may have sent its message and taken it back
        finally:
            if met:
                self._reads += 1  # on all ranks: each hears what the others ask for
            else:  # a rank that comes later must not think that this one still waits
                self._messages.take_back("read", number)
        if others:
            raise RuntimeError(
                f"zerocompile: rank {mine} asks for {what}{self._messages.where()}, which needs all ranks, but rank "
                f"{others[0][0]} {others[0][1]}. Every rank must ask, also where rank 0 alone logs the number; or let "
                "all ranks take full values before: `with strategy.full_parameters(module) as values:`, "
                "`strategy.full_gradients(module)`, or, to save on rank 0, `with strategy.full_state_dict(module):`."
            )

    def _asks(self, read: str) -> str:
        """For an error: what another rank reads, by its message."""
        what, place = json.loads(read)
        elsewhere = place != [self._used, self._marks]
        return f"asks for {what}" + (", after other backwards or batches" if elsewhere else "")

    def meet(self, stream: str, what: str, within: timedelta | None = None) -> None:
        """Waits until all ranks have come to ``what``, or raises. Used on devices, where a collective blocks in torch.

        ``within``: how long; ``None``: the timeout.

        A rank that has ended a backward, passed a mark, or started a collective of the default process group to which
        this one has not come will not come to this meeting: it would have done so before. So no rank is mistaken for
        one that is elsewhere because it is slow.

        Raises:
            CommunicationError: another rank has come to something else, waits for this one in something else, is gone,
                or has not come within the timeout.
        """
        self._met[stream] += 1
        within = within or self._timeout
        number, start = self._met[stream], time.monotonic()
        looked, where = start, self._messages.where()
        self._messages.tell_numbered(stream, number, json.dumps([what, where]))
        while True:
            heard = self._messages.ask_numbered(stream, number, within=_LOOK)
            missing = [rank for rank, theirs in heard.items() if theirs is None]
            said = {rank: json.loads(theirs) for rank, theirs in heard.items() if theirs is not None}
            places = {rank: f"is in {theirs}{place}" for rank, (theirs, place) in said.items() if theirs != what}
            if missing and not places:
                places = dict(found for found in [self._passed(stream, number, missing)] if found is not None)
            if places:
                raise self._apart(places | {dist.get_rank(): f"is in {what}{where}"})
            if not missing:
                return
            now = time.monotonic()
            if now - start >= within.total_seconds():
                late = {missing[0]: f"has not come there within {within}"}
                raise self._apart(late | {dist.get_rank(): f"is in {what}{where}"})
            if now - looked >= 1:
                looked = now
                self._messages.look_for(missing, what)

    def outside(self, unit: str) -> None:
        """Called on devices before a gather of ``unit`` in user code outside of steps.

        [Note: gathers outside of steps] One rank alone may read a weight, print it or run the model in a hook. On a
        device the host does not wait for the gather, and so would not see that the others do not come. So the ranks
        meet before such a gather. Where many follow each other in one hook, as when text is generated, they are alike
        if the first ones are. So only the first few cost a meeting each, and after them every power of two.

        Raises:
            CommunicationError: as :meth:`meet`.
        """
        place = (self._marks, self._messages.where())
        self._at_place = self._at_place + 1 if place == self._place else 1
        self._place = place
        if self._at_place <= _EACH or not self._at_place & (self._at_place - 1):
            self.meet("outside", f"the gather of unit `{unit}`")

    def _apart(self, places: dict[int, str]) -> CommunicationError:
        where = "; ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()))
        text = f"zerocompile: the ranks have come to different things: {where}. {remedy(places.values())}"
        return CommunicationError(text, explained=True)  # nobody is gone

    def _passed(self, topic: str, message: int, ranks: Sequence[int]) -> tuple[int, str] | None:
        """One of ``ranks`` that has gone further than this one, and what it has done; None: there is none.

        Args:
            topic, message: the numbered message that this rank waits for. A rank that has sent it by now does not
                count: it may have heard this rank's message, and gone on rightly.
            ranks: the ranks of which this message was not heard.
        """
        found = None
        for rank in self._messages.some(ranks):
            if self._messages.heard_now("used", self._used + 1, rank) is not None:
                found = rank, "has ended another backward"
        first = self._messages.marked("mark", self._marks)
        if found is None and first is not None and first[0] in ranks:
            found = first[0], f"has come to {first[1]}"
        mine = self._messages.position()
        for rank in self._messages.some(ranks) if found is None and mine >= 0 else ():
            theirs, place = self._messages.stands(rank)
            if theirs > mine:  # both count the default process group, where all ranks start the same collectives
                found = rank, f"has gone on to another collective, and stands in {place}"
        if found is None or self._messages.heard_now(topic, message, found[0]):
            return None
        return found


def _largest_letters(used: Mapping[int, str]) -> str:
    return "".join(map(max, *used.values())) if len(used) > 1 else next(iter(used.values()))


@dataclass(frozen=True)
class Difference:
    """Two ranks that should be alike and are not.

    Attributes:
        first, other: the ranks; no rank before ``other`` differs from one before it.
        names: the names of the values that differ, in order.
        values: all values of the two ranks, by name.
    """

    first: int
    other: int
    names: tuple[str, ...]
    values: tuple[Mapping[str, object], Mapping[str, object]]

    def __str__(self) -> str:
        one, two = ({name: of.get(name, "not there") for name in self.names} for of in self.values)
        return "; ".join(
            f"{name} is {one[name]} on rank {self.first} but {two[name]} on rank {self.other}" for name in self.names
        )


def first_difference(
    messages: Messages, topic: str, mine: Mapping[str, object], what: str, late: Late, part: int = 0
) -> Difference | None:
    """Compares values on all ranks. The ranks exchange digests, and the values themselves if the digests differ.

    Args:
        messages: the conversation of all ranks.
        topic: a topic of this comparison alone; all ranks come to it equally often.
        mine: this rank's values, by name; of JSON's types.
        what: what is compared, for the messages of ranks that wait.
        late: makes the error about a rank that does not come in time.
        part: the part of the ranks that this rank is in; values need to be alike inside each part only.

    Returns:
        The first difference, the same on all ranks; None: there is none.

    Raises:
        CommunicationError: another rank does not come here.
    """
    number, text = messages.next_number(topic), json.dumps(mine)
    digest = json.dumps([part, hashlib.sha256(text.encode()).hexdigest()])
    messages.tell_numbered(topic, number, digest)
    if messages.join_numbered(topic, number, digest, _alike_in_parts, what, late) == _ALIKE:
        return None
    all_values: dict[int, str] = {}
    for rank, theirs in messages.exchange(f"{topic}/differ", json.dumps([part, mine]), what).items():
        if theirs is None:
            raise late(rank)
        all_values[rank] = theirs
    return _first_difference({rank: json.loads(theirs) for rank, theirs in all_values.items()})


def _alike_in_parts(digests: Mapping[int, str]) -> str:
    said = [json.loads(one) for one in digests.values()]
    return _ALIKE if len({part for part, _ in said}) == len({(part, one) for part, one in said}) else "different"


def _first_difference(everyone: Mapping[int, tuple[int, Mapping[str, object]]]) -> Difference | None:
    first_of: dict[int, int] = {}
    for rank, (part, values) in everyone.items():
        first = first_of.setdefault(part, rank)
        reference = everyone[first][1]
        missing = object()
        names = [n for n in dict.fromkeys([*reference, *values]) if reference.get(n, missing) != values.get(n, missing)]
        if names:
            return Difference(first, rank, tuple(names), (reference, values))
    return None


def differences_between(everyone: Sequence[Mapping[str, object]]) -> Difference | None:
    """The first difference between values that were exchanged before: all ranks' values by name, in order of ranks."""
    return _first_difference({rank: (0, values) for rank, values in enumerate(everyone)})


class Reads:
    """Compares the ranks before a number of a sharded tensor is read, see [Note: numbers] in sharded.py.

    Args:
        comparisons: compares what the ranks read.
        timeout: the strategy's timeout.

    Attributes:
        before: while ranks do unequal work: called with what comes next, before a read or a context of :meth:`alike`.
            The ranks come together in it at a gate, see [Note: turns] in turns.py. It returns whether the gate has
            compared what they do.
    """

    def __init__(self, comparisons: Consistency, timeout: timedelta) -> None:
        self._consistency, self._timeout, self._within = comparisons, timeout, min(timeout, _ON_ITS_WAY)
        self.before: Callable[[str], bool] | None = None
        self._alike = 0  # how many contexts of `alike` this rank is inside of
        self._closed = False

    @contextmanager
    def alike(self) -> Iterator[None]:
        """A context, such as clipping or an optimizer's update, in which all ranks do the same: nothing is compared."""
        if not self._alike and self.before is not None:
            self.before("what all ranks do alike")
        self._alike += 1
        try:
            yield
        finally:
            self._alike -= 1

    @property
    def all_alike(self) -> bool:
        """Whether this rank is inside a context of :meth:`alike`."""
        return self._alike > 0

    def close(self) -> None:
        """Makes every later read raise, since the other ranks may be gone by then."""
        self._closed = True

    def compare(self, what: str, patient: bool = False) -> None:
        """Called before the read of a number that takes a collective.

        Args:
            what: what is read, for the error.
            patient: whether another rank may come much later: then this one waits for it until the timeout, else for
                half a minute at most.

        Raises:
            RuntimeError: another rank does not come to ``what``, or the strategy is gone.
        """
        if self._closed:
            raise RuntimeError(
                f"{what}: its strategy was torn down, and each rank holds a part. Read it while the fit runs, or the "
                "module's parameters after it."
            )
        compared = self._alike or (self.before is not None and self.before(f"the read of {what}"))
        if not compared:
            self._consistency.read(what, self._timeout if patient else self._within)
