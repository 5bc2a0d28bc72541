"""Which ranks are gone, and which wait for each other. A thread of C++ holds the connections and hears of deaths, see
[Note: liveness] in csrc/watch.h. This module connects it, and judges the reports of ranks that wait (see waits.py).
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from lightning_zerocompile.ranks.waits import Jury, explain_knot, meetings_left

DIED = "its process has died"  # as in csrc/watch.cpp
CLOSED = "it has ended its part of this run"  # the same
_FOUND_WITHIN = 10.0  # seconds in which the first rank must be reached; only this module's thread waits for that
_LOOK = 1.0  # seconds: how often the thread looks when nobody says anything
_ENDS = "\0"  # ends what is said on a connection


class Watch(Protocol):
    """``Watch`` of the C++ extension; what its methods do is said in csrc/watch.h."""

    def start(self, file: int, asks: str, answers: str, listens: float, /) -> None: ...
    def close(self) -> None: ...
    def close_copies(self) -> None: ...
    def send(self, rank: int, text: str, /) -> None: ...
    def take(self) -> list[tuple[int, str]] | None: ...
    def file(self) -> int: ...
    def refuse(self, rank: int, /) -> None: ...
    def leave(self, reason: str, /) -> None: ...
    def gone(self, rank: int, /) -> str | None: ...
    def left(self) -> Mapping[int, str]: ...
    def add_barriers(self, barriers: Any, /) -> None: ...
    def set_groups(self, names: Sequence[str], /) -> None: ...
    def standing(self) -> str: ...
    def end(self, reason: str, /) -> bool: ...
    def ended(self) -> str | None: ...


class Liveness:
    """Connects the ranks, and notices that ranks wait for each other.

    Args:
        watch: of this rank.
        world: how many ranks there are; rank 0 listens.
        mine: this rank.
        first_says: called once, on all ranks; returns the first rank's argument on all of them.
        within: seconds in which another rank may come to this.
        sample: called about once a second by a thread; returns the report of a wait that this rank does not report by
            itself, if there is one.
    """

    def __init__(
        self,
        watch: Watch,
        world: int,
        mine: int,
        first_says: Callable[[str], str],
        within: float,
        sample: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._watch, self._mine, self._world, self._sample = watch, mine, world, sample
        self._knot: tuple[str, str] | None = None  # the report with which this rank was found in one; the message
        self._meetings: dict[int, str] = {}  # that ranks have left, by number: the message about their knot
        listener = _listen() if mine == 0 else None
        tokens = [secrets.token_hex(16), secrets.token_hex(16)]  # the two ends recognise each other by these
        port = 0 if listener is None else listener.getsockname()[1]
        hosts, port, tokens = json.loads(first_says(json.dumps([_addresses() if mine == 0 else [], port, tokens])))
        asks, answers = (str(token) for token in tokens)
        within += _FOUND_WITHIN * len(hosts)
        os.register_at_fork(after_in_child=partial(_close_copies, weakref.ref(self)))
        if mine == 0:
            watch.start(-1 if listener is None else listener.detach(), asks, answers, within)

        def run() -> None:
            if mine != 0:
                connection = _connect(hosts, port, f"{mine} {asks}{_ENDS}", f"{answers}{_ENDS}") if port else None
                watch.start(-1 if connection is None else connection.detach(), asks, answers, 0.0)
            self._listen()

        self._thread = threading.Thread(target=run, daemon=True, name="zerocompile-liveness")
        self._thread.start()

    def waits(self, line: str) -> str | None:
        """Reports that this rank waits; called again every second while it does.

        Args:
            line: a :meth:`Wait.line`.

        Returns:
            The message about this rank's knot, which says where all its ranks wait; None: it is in none that is known.
        """
        self._watch.send(0, line)
        if self._knot is None or self._knot[0] != line:
            return None
        message, self._knot = self._knot[1], None
        return message

    @property
    def last_knot(self) -> str | None:
        """The message about the knot in which this rank was found, if :meth:`waits` has not returned it; else None."""
        return None if self._knot is None else self._knot[1]

    def left_meeting(self, number: int) -> str | None:
        """Why another rank has left the meeting of this number, see [Note: meetings that were left]; else None."""
        return self._meetings.get(number)

    def close(self) -> None:
        """Tells the others that this rank has ended its part, and ends the threads and the connections."""
        self._watch.close()
        self._thread.join(5)  # it may be connecting, and ends after that

    def close_copies(self) -> None:
        """In a forked child: closes its copies of the connections."""
        self._watch.close_copies()

    def _listen(self) -> None:
        """The thread. It ends with this rank's part in the run."""
        jury, looked = Jury(range(self._world)), time.monotonic()
        comes = select.poll()
        comes.register(self._watch.file(), select.POLLIN)
        while (said := self._watch.take()) is not None:
            for rank, text in said:
                try:
                    if self._mine == 0:
                        jury.hear(rank, text)
                    else:
                        self._hear_knot(*json.loads(text))
                except (ValueError, TypeError):  # no rank sends that
                    self._watch.refuse(rank)
            comes.poll(1000 * _LOOK)
            if time.monotonic() - looked < _LOOK:
                continue
            looked, own = time.monotonic(), self._sample()
            if own is not None:
                self._watch.send(0, own)
            stuck = jury.verdict()
            if stuck:
                self._tell_knot(stuck)

    def _tell_knot(self, stuck: Mapping[int, str]) -> None:
        """Called on the first rank. ``stuck``: the reports of ranks that wait for each other."""
        text, meetings = explain_knot(stuck), meetings_left(stuck)
        self._hear_knot(stuck.get(0), text, meetings)
        for rank in range(1, self._world) if meetings else stuck.keys() - {0}:
            self._watch.send(rank, json.dumps([stuck.get(rank), text, meetings]))

    def _hear_knot(self, mine: str | None, text: str, meetings: Sequence[int]) -> None:
        """``mine``: this rank's report; None: it is not in the knot. ``meetings``: that ranks have left."""
        self._meetings |= dict.fromkeys(meetings, text)  # before this rank can raise
        if mine is not None:
            self._knot = mine, text


def _close_copies(owner: weakref.ref[Liveness]) -> None:
    liveness = owner()
    if liveness is not None:
        liveness.close_copies()


def _addresses() -> list[str]:
    """Names and addresses of this host. The name by which the launcher knows the first rank's host comes last."""
    name = socket.gethostname()
    found = [name]
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([*found, os.environ.get("MASTER_ADDR", "localhost")]))


def _listen() -> socket.socket | None:
    with suppress(OSError):
        return socket.create_server(("", 0), backlog=1024)
    return None


def _connect(hosts: Sequence[str], port: int, word: str, answer: str) -> socket.socket | None:
    for host in hosts:
        with suppress(OSError):
            connection = socket.create_connection((host, port), timeout=_FOUND_WITHIN)
            connection.sendall(word.encode())
            said = b""
            while len(said) < len(answer) and (more := connection.recv(len(answer) - len(said))):
                said += more
            if said.decode(errors="replace") == answer:
                return connection
            connection.close()  # something else listens on that port
    return None
