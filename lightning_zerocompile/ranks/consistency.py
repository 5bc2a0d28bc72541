"""What the ranks must do alike, compared through the store before a collective could go wrong by it.

The runtime in csrc/ calls these: see [Note: order of reductions], [Note: mismatched gathers], [Note: used flags].
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lightning_zerocompile.ranks.messages import Messages

_ON_ITS_WAY = timedelta(seconds=30)  # how much later another rank may come to where a number is read
_PAUSE = 0.01  # seconds
_LOOK = timedelta(seconds=0.5)  # how often a rank that waits there looks whether the other has gone elsewhere


class Consistency:
    """What one rank tells the others of its gathers and reductions, and hears of theirs.

    Args:
        messages: the conversation of these ranks.
        timeout: how long it waits, for the messages.
    """

    def __init__(self, messages: Messages, timeout: timedelta) -> None:
        self._messages, self._timeout = messages, timeout
        self._marks = 0  # that were passed
        self._window = 0
        self._used = ("used", 0)  # the last exchange of used flags: its series and its number there
        self._outside = 0  # of these exchanges
        self._compared = ""  # the last gather that was compared
        self._reads = 0  # that were compared

    def in_window(self, number: int) -> None:
        """What is exchanged from here on belongs to this window; 0: to none.

        A rank that has failed inside a window is in another one, or in none, while others still exchange in the first:
        their messages must not be taken for each other.
        """
        self._window = number
        self._used = ("used in a window", number * 2**20) if number else ("used", self._outside)

    def order(self, order: list[int]) -> list[int]:
        """Rank 0's order of units, on all ranks.

        Raises:
            RuntimeError: rank 0 has not told it in time.
        """
        agreed = self._messages.of_first("order", json.dumps(order), "has begun its first backward")
        result: list[int] = json.loads(agreed)
        return result

    def gather(self, sequence: int, unit: str) -> str:
        """What is wrong if the ranks' gathers of this number are not of one unit; "" if nothing is."""
        mine, topic = dist.get_rank(), f"gather/{sequence}"
        heard = self._messages.exchange(topic, unit, f"gather number {sequence}, of unit `{unit}`")
        if self._compared:  # who has come to this comparison has read the last one
            self._messages.forget(self._compared)
        self._compared = topic
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
                    "same order. Name the modules in which ranks differ in `keep_gathered=[...]`, or use stage 1 or 2."
                )
        return ""

    def mark(self, mine: str) -> None:
        """Passes a mark. At stage 3 a rank that runs one more batch, or generates one more token, would otherwise meet
        another gather of the other ranks.

        Args:
            mine: the mark, and the gathers behind it.

        Raises:
            RuntimeError: another rank came to another mark, or after other gathers.
        """
        rank, theirs = self._messages.mark("mark", self._marks, mine)
        self._marks += 1
        if theirs != mine:
            raise RuntimeError(
                f"zerocompile: rank {dist.get_rank()} is at {mine}, but rank {rank} came there at {theirs}. With "
                "parameters sharded (stage 3) every rank must run the same number of batches, and of forwards inside "
                "each. Give all ranks equally many batches (a distributed sampler, `drop_last`, `limit_val_batches`), "
                "generate on all ranks, with `synced_gpus` left as it is, save on all ranks, or use stage 1 or 2."
            )

    def used_parameters(self, exchange: int, used: str, asks: bool) -> str:
        """Which parameters have a gradient on some rank, a letter each: "0": none; the largest of all ranks counts.

        Args:
            exchange: of all, the number of this one.
            used: this rank's letters.
            asks: whether to wait for the others' letters; otherwise this rank's are told and returned.

        Raises:
            RuntimeError: a rank has not told its own in time.
        """
        series, number = self._used
        if not asks:
            number += 1
            self._outside += not self._window
            self._used = (series, number)
            self._messages.tell_numbered(series, number, used)
            return used
        heard = self._messages.ask_numbered(series, number, what=f"the end of backward number {exchange}")
        for rank, theirs in heard.items():
            if theirs is None:
                raise self._messages.silent(rank, f"has ended backward number {exchange}")
            used = "".join(map(max, used, theirs))
        return used

    def read(self, what: str, within: timedelta) -> None:
        """Passes the place where each rank asks for a number of a sharded tensor, before what is collective there.

        A rank is known to be elsewhere when it has ended a backward, or passed a mark, that this one has not come to.

        Args:
            what: is asked for.
            within: how long another rank is waited for that may still be on its way.

        Raises:
            RuntimeError: another rank asks for something else, or does not ask.
        """
        mine, number, start = dist.get_rank(), self._reads, time.monotonic()
        looked = start
        self._messages.tell_numbered("read", number, what)
        met = False
        try:
            while True:
                heard = self._messages.ask_numbered("read", number, within=_LOOK)
                missing = [rank for rank, theirs in heard.items() if not theirs]
                others = [(rank, f"asks for {theirs}") for rank, theirs in heard.items() if theirs and theirs != what]
                if others or not missing:
                    met = True
                    break
                now = time.monotonic()
                if (passed := self._passed(missing)) is not None:
                    others = [passed]
                elif now - start >= within.total_seconds():
                    others = [(missing[0], f"has not come there within {within}")]
                if others:
                    break
                if now - looked >= 1:
                    looked = now
                    self._messages.waits(f"the read of {what}", "message", number, missing)
                time.sleep(_PAUSE)  # another rank may have said and taken it back
        finally:
            if met:
                self._reads += 1  # on all ranks: each hears what the others ask for
            else:  # who comes later must not think that this one waits
                self._messages.tell_numbered("read", number, "")
        if others:
            raise RuntimeError(
                f"zerocompile: rank {mine} asks for {what}{self._messages.where()}, which takes all ranks, but rank "
                f"{others[0][0]} {others[0][1]}. Every rank must ask, also where rank 0 alone logs the number; or let "
                "all ranks take full values before: `with strategy.full_parameters(module) as values:`, "
                "`strategy.full_gradients(module)`, or, to save on rank 0, `with strategy.full_state_dict(module):`."
            )

    def _passed(self, ranks: list[int]) -> tuple[int, str] | None:
        """One of ``ranks`` that this one is behind of, and where that is."""
        series, number = self._used
        for rank in ranks:
            if self._messages.heard_now(series, number + 1, rank) is not None:
                return rank, "has ended another backward"
        first = self._messages.marked("mark", self._marks)
        return None if first is None else (first[0], f"has come to {first[1]}")


class Reads:
    """Compares the ranks before a number of a sharded tensor is read, see [Note: numbers] in sharded.py.

    Args:
        comparisons: of these ranks.
        timeout: of the strategy.
    """

    def __init__(self, comparisons: Consistency, timeout: timedelta) -> None:
        self._consistency, self._timeout, self._within = comparisons, timeout, min(timeout, _ON_ITS_WAY)
        self._alike = 0  # how many know that all ranks do what this one does
        self._closed = False

    @contextmanager
    def alike(self) -> Iterator[None]:
        """In here all ranks do what this one does, so nothing is compared: clipping, an optimizer's update."""
        self._alike += 1
        try:
            yield
        finally:
            self._alike -= 1

    @property
    def all_alike(self) -> bool:
        """Whether this is inside :meth:`alike`."""
        return self._alike > 0

    def close(self) -> None:
        """The ranks may be gone from now on."""
        self._closed = True

    def compare(self, what: str, patient: bool = False) -> None:
        """Before a collective that ``what`` (for the message) takes.

        Args:
            patient: another rank may come much later, so it is waited for as long as ranks wait for each other.

        Raises:
            RuntimeError: another rank does not come to it, or the strategy is gone.
        """
        if self._closed:
            raise RuntimeError(
                f"{what}: its strategy was torn down, and each rank holds a part. Read it while the fit runs, or the "
                "module's parameters after it."
            )
        if not self._alike:
            self._consistency.read(what, self._timeout if patient else self._within)
