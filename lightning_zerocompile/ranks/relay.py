"""One answer for all ranks that ask the same.

[Note: relay] Where every rank read every other rank's message, an exchange would take as many requests as the square of
their number. So of the ranks that ask for a message, the first one joins: it claims this task in the store, reads all
messages, and leaves one joined answer. Every other rank asks for that answer alone. The claim is one atomic write. Any
rank may be the first, and ranks that only tell take no part. If an exception takes the rank that joins elsewhere, no
answer comes. So a rank that has waited for a second reads messages by itself, too. While messages are missing, the rank
that joins says whose they are, and the others look for these first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Join = Callable[[Mapping[int, str]], str]  # makes one answer of all ranks' messages, by global rank in rising order

_NONE = "zerocompile/none"
_CLAIM, _ANSWER = "?", "="


class Relay:
    """The joined answer to one numbered message, or this rank's claim to make that answer.

    Args:
        store: the ranks' store.
        key: the answer's key in the store, which may still hold the answer to an older number.
        number: the message's number.
        mine: this rank.

    Attributes:
        joins: whether this rank has the claim, so that it has to call :meth:`leave`.
        missing: ranks of which the rank that joins has lately heard nothing.
        answer: the joined answer; None while it is not known.
    """

    def __init__(self, store: Any, key: str, number: int, mine: int) -> None:
        self._store, self._key = store, key
        self._number, self._own = f"{number}:", f"{number}:{mine}{_CLAIM}"
        self.missing: list[int] = []
        self.answer: str | None = None
        found = self._exchange("", self._own)
        if not found.startswith(self._number):  # it is of an older number
            found = self._exchange(found, self._own)
        self.joins = found.startswith(self._own)
        self._take(found)

    def _exchange(self, expected: str, desired: str) -> str:
        return str(self._store.compare_set(self._key, expected, desired).decode())

    def _take(self, found: str) -> None:
        if not found.startswith(self._number):
            return
        body = found.removeprefix(self._number)
        if body.startswith(_ANSWER):
            self.answer = body.removeprefix(_ANSWER)
        else:
            self.missing = ranks_of(body.partition(_CLAIM)[2])

    def look(self) -> str | None:
        """The joined answer, or None if it is not there yet. Costs one request at most."""
        if self.answer is None:
            self._take(self._exchange(_NONE, _NONE))
        return self.answer

    def misses(self, ranks: list[int]) -> None:
        """Tells the other ranks of which ``ranks`` this one, which joins, has heard nothing yet."""
        if ranks != self.missing:
            self.missing = ranks
            self._store.set(self._key, self._own + ranges_of(ranks))

    def leave(self, answer: str) -> None:
        """Gives the answer to all ranks that ask. Only the rank that joins may call this."""
        self.answer = answer
        self._store.set(self._key, f"{self._number}{_ANSWER}{answer}")


def ranges_of(ranks: Iterable[int]) -> str:
    """Ranks in rising order as text, such as ``"0-3,7"``; the text of neighbours does not grow with their number."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def ranks_of(ranges: str) -> list[int]:
    """The ranks from which :func:`ranges_of` has made the text ``ranges``, in rising order."""
    found: list[int] = []
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def by_message(messages: Mapping[int, str]) -> str:
    """Joins messages into JSON in which each different message stands once, with its ranks: most ranks say the same."""
    ranks: dict[str, list[int]] = {}
    for rank, message in messages.items():
        ranks.setdefault(message, []).append(rank)
    return json.dumps([[message, ranges_of(who)] for message, who in ranks.items()])


def by_rank(joined: str) -> dict[int, str]:
    """The messages that :func:`by_message` has joined, by rank."""
    return {rank: message for message, ranges in json.loads(joined) for rank in ranks_of(ranges)}


def firsts(messages: Mapping[int, str]) -> str:
    """Joins messages into a JSON object: each different message, with the first rank that has sent it."""
    first: dict[str, int] = {}
    for rank, message in messages.items():
        first.setdefault(message, rank)
    return json.dumps(first)
