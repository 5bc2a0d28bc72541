"""Which ranks are gone. Every process holds a connection to the first rank's process, and the kernel closes the
connection when either process dies.

[Note: liveness] A store keeps a process's messages after its death, so a wait in the store notices nothing. A
connection notices the death itself. A process that computes for minutes, holds the interpreter's lock or is stopped is
not mistaken for a dead one, and nothing has to be sent while all is well. Each rank holds one connection, to the first
rank. The first rank tells the others which ranks it has lost, and which ranks wait for each other (see waits.py).
Keep-alive packets, which the kernel answers, find a host that has vanished. Where the first rank cannot be reached, a
wait ends at ``timeout``.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from lightning_zerocompile.ranks.relay import by_message, by_rank
from lightning_zerocompile.ranks.waits import Jury, explain_knot, meetings_left

DIED = "its process has died"
CLOSED = "it has ended its part of this run"
_FOUND_WITHIN = 10.0  # seconds in which the first rank must be reached; only this module's thread waits for that
_LINE = 4096  # bytes that are read from a connection at a time
_SEND_WITHIN = 1.0  # seconds
_LEFT = "left "  # begins a line in which a rank says why it ends
_NEWS = "news "  # begins a line in which the first rank says which ranks are gone
_TOGETHER = 50  # milliseconds; see [Note: news]
_LOOK = 1000  # milliseconds: how often the threads look when nobody says anything
_HANG_UP_WITHIN = 2.0  # seconds in which the other end of a connection must have read all


@dataclass
class _Heard:
    """What the thread has heard; other threads read it.

    Attributes:
        gone: why a rank will say nothing more.
        left: why a rank has ended, in its own words.
        knot: the report of this rank with which it was found in a knot, and the message about that knot; None: it was
            found in none, or has raised since.
        meetings: what is known of meetings that ranks have left, by number: the message about their knot.
    """

    gone: dict[int, str] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    knot: tuple[str, str] | None = None
    meetings: dict[int, str] = field(default_factory=dict)


class Liveness:
    """Notices that another rank's process is gone, or that ranks wait for each other.

    Args:
        ranks: all ranks, in the same order everywhere; the first one listens.
        mine: this rank.
        first_says: called once, on all ranks; returns the first rank's argument on all of them.
        sample: called about once a second by a thread; returns the report of a wait that this rank does not report by
            itself, if there is one.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        mine: int,
        first_says: Callable[[str], str],
        sample: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._heard = _Heard()
        self._sockets: list[socket.socket] = []
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._closed = False
        first = mine == ranks[0]
        listener = _listen() if first and len(ranks) > 1 else None
        tokens = [secrets.token_hex(16), secrets.token_hex(16)]  # the two ends recognise each other by these
        port = 0 if listener is None else listener.getsockname()[1]
        hosts, port, tokens = json.loads(first_says(json.dumps([_addresses() if first else [], port, tokens])))
        os.register_at_fork(after_in_child=partial(_close_copies, weakref.ref(self)))
        serve: Callable[[], None] | None = None
        if first and listener is not None:
            self._sockets.append(listener)
            serve = partial(_serve, listener, tokens, ranks, self._heard, self._sockets, self._woken, sample)
        elif not first and port:
            connect = partial(_connect, hosts, port, f"{mine} {tokens[0]}\n", f"{tokens[1]}\n")
            serve = partial(_follow, connect, ranks[0], self._heard, self._sockets, self._woken, sample)
        self._thread = threading.Thread(target=serve, daemon=True, name="zerocompile-liveness") if serve else None
        if self._thread is not None:
            self._thread.start()

    def gone(self, rank: int) -> str | None:
        """Why a rank will say nothing more: ``DIED`` or ``CLOSED``; ``None``: as far as is known the rank is there."""
        return self._heard.gone.get(rank)

    def leave(self, reason: str) -> None:
        """Tells the others why this rank ends in the middle of its run. Does not wait for them, and does not raise."""
        with suppress(OSError):
            self._wake.send(f"{_LEFT}{json.dumps(reason)}\n".encode())

    def left(self) -> dict[int, str]:
        """Why ranks have ended in the middle of their run, or that they have died, by rank.

        This rank is there, too, when the first rank has passed on what it has said.
        """
        died = {rank: why for rank, why in list(self._heard.gone.items()) if why == DIED}
        return died | dict(list(self._heard.left.items()))

    def waits(self, line: str) -> str | None:
        """Reports that this rank waits; called again every second while it does.

        Args:
            line: a :meth:`Wait.line`.

        Returns:
            The message about this rank's knot, which says where all its ranks wait; None: it is in none that is known.
        """
        with suppress(OSError):
            self._wake.send(f"{line}\n".encode())
        knot = self._heard.knot
        if knot is None or knot[0] != line:
            return None
        self._heard.knot = None
        return knot[1]

    @property
    def last_knot(self) -> str | None:
        """The message about the knot in which this rank was found, if :meth:`waits` has not returned it; else None."""
        return None if self._heard.knot is None else self._heard.knot[1]

    def left_meeting(self, number: int) -> str | None:
        """Why another rank has left the meeting of this number, see [Note: meetings that were left]; else None."""
        return self._heard.meetings.get(number)

    def close(self) -> None:
        """Tells the others that this rank has ended its part, and ends the thread and the connections."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            self._wake.send(b"closed\n")
        if self._thread is not None:
            self._thread.join(5)
        if self._thread is None or not self._thread.is_alive():  # else it is still connecting, and ends after that
            self.close_sockets()

    def close_sockets(self) -> None:
        """Closes this process's sockets.

        A forked child must close its copies. Otherwise they would keep the connection of its dead parent open.
        """
        for one in [*self._sockets, self._wake, self._woken]:
            one.close()


def _close_copies(owner: weakref.ref[Liveness]) -> None:
    liveness = owner()
    if liveness is not None:
        liveness.close_sockets()


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


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read(connection: socket.socket) -> str | None:
    """What has arrived on a connection that does not block; "": nothing has; None: the connection is closed."""
    try:
        said = connection.recv(_LINE)
    except BlockingIOError:
        return ""
    except OSError:
        return None
    return said.decode(errors="replace") if said else None


class _Lines:
    """What arrives on connections, cut into lines. A connection is named by its file number."""

    def __init__(self) -> None:
        self._rests: dict[int, str] = {}

    def of(self, number: int, said: str) -> list[str]:
        *lines, self._rests[number] = (self._rests.get(number, "") + said).split("\n")
        return lines

    def forget(self, number: int) -> None:
        self._rests.pop(number, None)


@dataclass
class _News:
    """What the first rank has to say to all others.

    [Note: news] At the end of a run all ranks say that they end. If the first rank passed on each of these lines by
    itself, it would send as many lines as the square of the number of ranks. So it sends together what comes within a
    moment, and names ranks of which it says the same by ranges.

    Attributes:
        gone, left: as in :class:`_Heard`.
    """

    gone: dict[int, str] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.gone or self.left)

    def add(self, news: _News) -> None:
        self.gone |= news.gone
        self.left |= news.left

    def line(self) -> str:
        return f"{_NEWS}{json.dumps([by_message(dict(sorted(said.items()))) for said in (self.gone, self.left)])}\n"

    @classmethod
    def of(cls, line: str) -> _News:
        """The news from which :meth:`line` has made ``line``."""
        return cls(*(by_rank(said) for said in json.loads(line.removeprefix(_NEWS))))


class _Connections:
    """What a thread polls: connections to other ranks, and the other sockets that it reads."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets, self._poller = sockets, select.poll()
        self._by_number: dict[int, socket.socket] = {}
        self.rank_of: dict[socket.socket, int | None] = {}  # by connection; None: it has not said whose it is

    def watch(self, one: socket.socket) -> None:
        self._by_number[one.fileno()] = one
        self._poller.register(one.fileno(), select.POLLIN)

    def follow(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        _keep_alive(connection)
        self.rank_of[connection] = None
        self._sockets.append(connection)
        self.watch(connection)

    def unwatch(self, one: socket.socket) -> None:
        """Stops polling ``one``, and closes it if :meth:`follow` has added it; others are closed by their owners."""
        self._poller.unregister(one.fileno())
        del self._by_number[one.fileno()]
        if self.rank_of.pop(one, -1) != -1:
            self._sockets.remove(one)
            one.close()

    def ready(self, within: float) -> list[socket.socket]:
        """The sockets that can be read; waits for one ``within`` so many milliseconds."""
        return [self._by_number[number] for number, _ in self._poller.poll(within)]

    def tell(self, line: str) -> None:
        """Sends a line to all ranks that are connected."""
        for connection, rank in self.rank_of.items():
            if rank is not None:
                _send(connection, line)


def _serve(
    listener: socket.socket,
    tokens: Sequence[str],
    ranks: Sequence[int],
    heard: _Heard,
    sockets: list[socket.socket],
    woken: socket.socket,
    sample: Callable[[], str | None],
) -> None:
    """The first rank's thread. A process that connects with the token is another rank, which is gone if it disconnects.

    The thread ends with this rank's part in the run, see :meth:`Liveness.close`. It writes what it hears to ``heard``,
    and reads this rank's own lines from ``woken``.
    """
    first, expected, gone = ranks[0], set(ranks[1:]), heard.gone
    jury, lines, judged = Jury(ranks), _Lines(), time.monotonic()
    connections = _Connections(sockets)
    for one in (listener, woken):
        connections.watch(one)
    so_far, news, told = _News(), _News(), 0.0  # what all ranks were told; what they are still to be told; when last
    while True:
        ready = connections.ready(_TOGETHER if news else _LOOK)
        if time.monotonic() - judged >= _LOOK / 1000:
            judged = time.monotonic()
            own = sample()
            if own is not None:
                jury.hear(first, own)
            stuck = jury.verdict()
            if stuck:
                text, meetings = explain_knot(stuck), meetings_left(stuck)
                _hear_knot(heard, stuck.get(first), text, meetings)
                for connection, theirs in connections.rank_of.items():
                    if theirs is not None and (theirs in stuck or meetings):
                        _send(connection, f"knot {json.dumps([stuck.get(theirs), text, meetings])}\n")
        closed = False
        for one in ready:
            if one is woken:
                for line in lines.of(one.fileno(), _read(one) or ""):
                    closed = closed or line == "closed"
                    if line.startswith(_LEFT):
                        news.left[first] = json.loads(line.removeprefix(_LEFT))
                    elif not closed:
                        jury.hear(first, line)
                continue
            if one is listener:
                try:
                    connections.follow(listener.accept()[0])
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):  # no more files: further ranks are not watched
                        connections.unwatch(listener)
                continue
            said, rank, number = _read(one), connections.rank_of[one], one.fileno()
            if said is not None and rank is None:
                name, _, given = said.strip().partition(" ")
                if given == tokens[0] and name.isdigit() and int(name) in expected:
                    connections.rank_of[one] = int(name)
                    expected.discard(int(name))
                    _send(one, f"{tokens[1]}\n{so_far.line()}")
                    if not expected:  # all ranks are connected
                        connections.unwatch(listener)
                        listener.close()
                    continue
                said = None
            if said is not None and rank is not None:
                ended = False
                for line in lines.of(number, said):
                    ended = ended or line == "closed"
                    if line.startswith("{"):
                        jury.hear(rank, line)
                    if line.startswith(_LEFT):
                        news.left[rank] = heard.left[rank] = json.loads(line.removeprefix(_LEFT))
                if not ended:
                    continue
            lines.forget(number)
            connections.unwatch(one)
            if rank is not None:
                news.gone[rank] = gone[rank] = CLOSED if said is not None else DIED
        if news and (closed or time.monotonic() - told >= _TOGETHER / 1000):
            connections.tell(news.line())
            so_far.add(news)
            news, told = _News(), time.monotonic()
        if closed:
            connections.tell("closed\n")
            _hang_up(list(connections.rank_of))
            return


def _hear_knot(heard: _Heard, mine: str | None, text: str, meetings: Sequence[int]) -> None:
    """``mine``: this rank's report; None: it is not in the knot. ``text``: about it. ``meetings``: that were left."""
    heard.meetings |= dict.fromkeys(meetings, text)  # before this rank can raise
    if mine is not None:
        heard.knot = mine, text


def _send(connection: socket.socket, text: str) -> None:
    """Sends a text, which may be longer than what the connection takes at once.

    Gives up after ``_SEND_WITHIN`` seconds, and does not raise if the connection has failed.
    """
    with suppress(OSError):
        connection.settimeout(_SEND_WITHIN)
        connection.sendall(text.encode())
    with suppress(OSError):
        connection.setblocking(False)


def _hang_up(connections: Sequence[socket.socket]) -> None:
    """Ends what this rank sends on connections, and waits a moment until the other ends have read all of it.

    A connection is reset if it is closed while something that has arrived on it is unread. What still waits to be sent
    on it is lost then, and a short line waits until the line before it is confirmed. So "closed" could be lost if it
    followed another line, and this rank would be taken for a dead one. To prevent this, the function reads until the
    other end hangs up, too, for at most ``_HANG_UP_WITHIN`` seconds.
    """
    poller, by_number = select.poll(), {one.fileno(): one for one in connections}
    for one in connections:
        one.setblocking(False)
        with suppress(OSError):
            one.shutdown(socket.SHUT_WR)
        poller.register(one.fileno(), select.POLLIN)
    deadline = time.monotonic() + _HANG_UP_WITHIN
    while by_number and (left := deadline - time.monotonic()) > 0:
        for number, _ in poller.poll(1000 * left):
            if _read(by_number[number]) is None:
                poller.unregister(number)
                del by_number[number]


def _follow(
    connect: Callable[[], socket.socket | None],
    first: int,
    heard: _Heard,
    sockets: list[socket.socket],
    woken: socket.socket,
    sample: Callable[[], str | None],
) -> None:
    """Any other rank's thread: the first rank says which ranks are gone, and is gone itself if it disconnects.

    The thread ends with this rank's part in the run, see :meth:`Liveness.close`. It ends at once if the first rank
    cannot be reached.
    """
    connection = connect()
    if connection is None:
        return
    sockets.append(connection)
    lines, gone, looked = _Lines(), heard.gone, time.monotonic()
    watched = _Connections(sockets)
    for one in (connection, woken):
        watched.watch(one)
    while True:
        ready = watched.ready(_LOOK)
        to_say = []
        if time.monotonic() - looked >= _LOOK / 1000:
            looked, own = time.monotonic(), sample()
            to_say = [] if own is None else [own]
        if woken in ready:
            to_say += lines.of(woken.fileno(), _read(woken) or "")
        for line in to_say:
            with suppress(OSError):
                connection.sendall(f"{line}\n".encode())
            if line == "closed":
                _hang_up([connection])
                return
        if connection not in ready:  # always so after the first rank is gone: then this only samples its own rank
            continue
        said = _read(connection)
        for line in [] if said is None else lines.of(connection.fileno(), said):
            if line == "closed":
                gone[first], said = CLOSED, None
                break
            if line.startswith(_NEWS):
                news = _News.of(line)
                heard.left |= news.left
                gone |= news.gone
            if line.startswith("knot "):
                _hear_knot(heard, *json.loads(line.removeprefix("knot ")))
        if said is None:
            gone.setdefault(first, DIED)
            watched.unwatch(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)  # the first rank may wait for that


def _connect(hosts: Sequence[str], port: int, word: str, answer: str) -> socket.socket | None:
    for host in hosts:
        with suppress(OSError):
            connection = socket.create_connection((host, port), timeout=_FOUND_WITHIN)
            _keep_alive(connection)
            connection.sendall(word.encode())
            said = b""
            while len(said) < len(answer) and (more := connection.recv(len(answer) - len(said))):
                said += more
            if said.decode(errors="replace") == answer:
                connection.settimeout(None)
                return connection
            connection.close()  # something else listens on that port
    return None
