"""Ranks that do unequal work decide gather by gather what all of them gather next.

[Note: turns] Inside ``strategy.unequal()`` no rank knows what another rank needs next. So every gather there has a
number, and the first rank that comes to a number decides what is gathered. That takes one request to the store
(`compare_set`), and ranks with equal work pay no more. A rank that wanted something else takes part all the same (it
*serves*), and tries the next number. Where all ranks have to come together there is a *gate*. The ranks that come to it
first ask the store again and again for the next number, and serve it. The last one to come decides that the next number
is the gate, which lets all of them through. Gates stand at the end of the context, at the end of each backward, and
before whatever else needs all ranks: Lightning's barriers and reductions, reads of numbers, optimizers, windows. So a
gate also finds ranks that have come to different things. A rank that leaves the context by an exception decides that
the next number is its failure, which the others raise. No rank has left out a number then, so all of them may go on.

A decision stays in the store until that of the number ``KEPT`` later takes its place. The two are never equal, since
each begins with its number. No rank is ``KEPT`` numbers after another one, since each takes part in every gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from lightning_zerocompile.ranks.messages import CommunicationError, Messages
from lightning_zerocompile.ranks.waits import remedy

STREAM = "gate"  # the stream that a rank names when it reports that it waits at a gate
KEPT = 1024  # decisions that stay in the store
END = "the end of `strategy.unequal()`"
_GATE, _FAILURE = "=", "!"  # a decision that begins with one of these is a gate, or a failure, and no unit
_EPOCH = 2**20  # more gates than there are between two failures


class Turns:
    """The order of gathers, of one shard group, inside ``strategy.unequal()``.

    The runtime calls its methods. They return what all ranks gather now, as text; ``Gathers::take_turn`` in
    csrc/unequal.cpp writes and reads it.

    Args:
        messages: the conversation of all ranks.
        ranks: the ranks of the shard group.
        mine: this rank.
        timeout: how long a rank waits for the next number.
    """

    def __init__(self, messages: Messages, ranks: Sequence[int], mine: int, timeout: timedelta) -> None:
        self._messages, self._ranks, self._mine, self._timeout = messages, tuple(ranks), mine, timeout
        self._topic = f"turn/{ranks[0]}"
        self._number = 0  # the number of the next gather
        self._said = [""] * KEPT  # the last decisions, by number modulo KEPT, as the store has them
        self._gates_said = [""] * KEPT  # the same for gates: what the first rank there has said
        self._failures = 0  # gates are counted anew after each, since only some ranks may have come to the last gate
        self._gates = 0  # how many gates this rank has come to since the last failure
        self._at: str | None = None  # the gate where this rank waits
        self._proposal: str | None = None  # what this rank decides there, if nobody has decided otherwise
        self._failed: str | None = None  # why the context has failed

    @property
    def gates(self) -> int:
        """How many gates this rank has come to; comparable between ranks."""
        return self._failures * _EPOCH + self._gates

    def begin(self) -> None:
        """Called when the context begins: forgets the gate and the failure of an earlier one."""
        self._failed = self._at = self._proposal = None

    def take(self, wanted: str) -> str:
        """What all ranks gather now: ``wanted``, unless another rank has come to this number first.

        Raises:
            CommunicationError: a rank has failed in the context.
        """
        self._raise_failure()
        return self._decide(wanted)

    def arrive(self, what: str) -> str:
        """Comes to the gate before ``what``; called again and again until all ranks are there.

        Returns:
            What all ranks gather now; "" when all ranks are at the gate.

        Raises:
            CommunicationError: a rank has failed in the context, is gone, or has come to another gate.
        """
        self._raise_failure()
        if self._at is None:
            self._come_to(what)
        decided = self._next(what) if self._proposal is None else self._decide(self._proposal)
        if not decided.startswith(_GATE):
            return decided
        self._at = self._proposal = None
        return ""

    def fail(self, why: str) -> str:
        """Tells the others that an exception takes this rank out of the context; called until it returns "".

        Args:
            why: the exception, for the other ranks' errors.

        Returns:
            What all ranks gather now, in which this rank still takes part; "" when all ranks hear of a failure, or have
            already left the context.
        """
        if self._failed is not None:
            return ""
        try:
            decided = self._decide(f"{_FAILURE}rank {self._mine} has raised {why}")
        except CommunicationError:  # all ranks hear of this failure, or of another one
            return ""
        left = decided == _GATE + END  # the others are out of the context: only this rank was interrupted at its end
        return "" if left else self.fail(why) if decided.startswith(_GATE) else decided

    # ---- inside ----

    def _come_to(self, what: str) -> None:
        self._at, self._proposal = what, None
        number, place = self._gates, self._gates % KEPT
        self._gates += 1
        topic, mine = f"{self._topic}/gate/{self._failures}/{place}", f"{number}:{self._mine}:{what}"
        said = self._gates_said[place] = self._messages.decide(topic, self._gates_said[place], mine)
        _, first, theirs = said.split(":", 2)
        if theirs != what:
            self._proposal = (
                f"{_FAILURE}the ranks have come to different things: rank {self._mine} is at {what}"
                f"{self._messages.where()}, rank {first} at {theirs}. {remedy([what, theirs])}"
            )
        elif self._messages.count(f"{self._topic}/arrived/{self._failures}") == len(self._ranks) * (number + 1):
            self._proposal = _GATE + what  # this rank is the last one

    def _decide(self, wanted: str) -> str:
        place = self._number % KEPT
        mine = f"{self._number}:{wanted}"
        return self._took(self._messages.decide(f"{self._topic}/{place}", self._said[place], mine))

    def _next(self, what: str) -> str:
        """What another rank has decided for the next number; waits for that decision.

        Raises:
            CommunicationError: the decision is a failure, did not come within the timeout, or a rank is gone.
        """
        others = [rank for rank in self._ranks if rank != self._mine]
        place, number = self._number % KEPT, self._number
        said = self._messages.await_decision(
            f"{self._topic}/{place}", f"{number}:", what, (STREAM, self.gates), others, self._timeout
        )
        if said is None:
            raise CommunicationError(
                f"zerocompile: rank {self._mine} is at {what}{self._messages.where()}, and within {self._timeout} no "
                f"other rank has gathered anything inside `strategy.unequal()` or come there, too: it died or hangs."
            )
        return self._took(said)

    def _took(self, said: str) -> str:
        number, _, decided = said.partition(":")
        if number != str(self._number):
            raise CommunicationError(
                f"zerocompile: rank {self._mine} is at gather number {self._number} inside `strategy.unequal()`, where "
                f"the store has {said!r} of another one. Start the run anew."
            )
        self._said[self._number % KEPT] = said
        self._number += 1
        if decided.startswith(_FAILURE):
            self._failed = decided.removeprefix(_FAILURE)
            self._failures += 1
            self._gates, self._gates_said = 0, [""] * KEPT
            self._at = self._proposal = None
        self._raise_failure()
        return decided

    def _raise_failure(self) -> None:
        if self._failed is None:
            return
        text = f"zerocompile: inside `strategy.unequal()` {self._failed}"
        raise CommunicationError(text, explained=True)  # that rank has not ended: all may catch theirs and go on
