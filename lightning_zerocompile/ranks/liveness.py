"""Which ranks are gone: a connection of every process to that of the first rank, which the kernel closes when one dies.

[Note: liveness] A store keeps what a process has said after its death, so a wait in it notices nothing. A connection
notices the death itself: a process that computes for minutes, holds the interpreter's lock or is stopped is not
mistaken for a dead one, and nothing has to be sent while all is well. Each rank holds one connection, to the first
rank, which passes on whom it has lost. Keep-alive packets, which the kernel answers, find a host that has vanished.
Where the first rank cannot be reached, a wait ends at ``timeout``.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

DIED = "its process has died"
CLOSED = "it has ended its part of this run"
_FOUND_WITHIN = 10.0  # seconds, for the first rank to be reached; nobody waits for it
_LINE = 4096  # bytes of what a connection may say at a time


class Liveness:
    """Notices that another rank's process is gone.

    Args:
        ranks: all of them, in the same order everywhere; the first one listens.
        mine: this one.
        first_says: gives the first rank's message (its argument there) to all ranks; collective.
    """

    def __init__(self, ranks: Sequence[int], mine: int, first_says: Callable[[str], str]) -> None:
        self._gone: dict[int, str] = {}  # written by the thread, read by others
        self._sockets: list[socket.socket] = []
        self._wake, self._woken = socket.socketpair()
        self._closed = False
        first = mine == ranks[0]
        listener = _listen() if first and len(ranks) > 1 else None
        tokens = [secrets.token_hex(16), secrets.token_hex(16)]  # by which the two ends know each other
        port = 0 if listener is None else listener.getsockname()[1]
        hosts, port, tokens = json.loads(first_says(json.dumps([_addresses() if first else [], port, tokens])))
        os.register_at_fork(after_in_child=partial(_close_copies, weakref.ref(self)))
        serve: Callable[[], None] | None = None
        if first and listener is not None:
            self._sockets.append(listener)
            serve = partial(_serve, listener, tokens, set(ranks[1:]), self._gone, self._sockets, self._woken)
        elif not first and port:
            connect = partial(_connect, hosts, port, f"{mine} {tokens[0]}\n", f"{tokens[1]}\n")
            serve = partial(_follow, connect, ranks[0], self._gone, self._sockets, self._woken)
        self._thread = threading.Thread(target=serve, daemon=True, name="zerocompile-liveness") if serve else None
        if self._thread is not None:
            self._thread.start()

    def gone(self, rank: int) -> str | None:
        """Why a rank will say nothing more; ``None``: it is there, as far as is known."""
        return self._gone.get(rank)

    def close(self) -> None:
        """Tells the others that this rank has ended its part, and gives back the connection and the thread."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not None:
            self._thread.join(5)
        if self._thread is None or not self._thread.is_alive():  # else it is connecting still, and ends after that
            self.close_sockets()

    def close_sockets(self) -> None:
        """Closes this process's copies: those of a forked child would keep a dead rank's connection open."""
        for one in [*self._sockets, self._wake, self._woken]:
            one.close()


def _close_copies(owner: weakref.ref[Liveness]) -> None:
    liveness = owner()
    if liveness is not None:
        liveness.close_sockets()


def _addresses() -> list[str]:
    """Where this host may be reached, the name that the launcher gave the first rank's host last."""
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
    """What a connection says; None: it is closed."""
    try:
        said = connection.recv(_LINE)
    except BlockingIOError:
        return ""
    except OSError:
        return None
    return said.decode(errors="replace") if said else None


def _serve(
    listener: socket.socket,
    tokens: Sequence[str],
    expected: set[int],
    gone: dict[int, str],
    sockets: list[socket.socket],
    woken: socket.socket,
) -> None:
    """The first rank's thread: who connects with the token is one of the others; whose connection ends is gone."""
    rank_of: dict[socket.socket, int | None] = {}
    poller = select.poll()
    by_number = {one.fileno(): one for one in (listener, woken)}
    for number in by_number:
        poller.register(number, select.POLLIN)
    told: list[str] = []
    while True:
        for number, _ in poller.poll():
            one = by_number[number]
            if one is woken:
                for connection in rank_of:
                    with suppress(OSError):
                        connection.send(b"closed\n")
                return
            if one is listener:
                with suppress(OSError):  # of too many open files: that rank's end is not noticed
                    connection, _address = listener.accept()
                    connection.setblocking(False)
                    _keep_alive(connection)
                    by_number[connection.fileno()] = connection
                    rank_of[connection] = None
                    sockets.append(connection)
                    poller.register(connection.fileno(), select.POLLIN)
                continue
            said, rank = _read(one), rank_of[one]
            if said is not None and rank is None:
                name, _, given = said.strip().partition(" ")
                if given == tokens[0] and name.isdigit() and int(name) in expected:
                    rank_of[one] = int(name)
                    expected.discard(int(name))
                    for line in [f"{tokens[1]}\n", *told]:
                        with suppress(OSError):
                            one.send(line.encode())
                    if not expected:  # nobody else has business here
                        poller.unregister(listener.fileno())
                        del by_number[listener.fileno()]
                        listener.close()
                    continue
                said = None
            if said == "":
                continue
            poller.unregister(number)
            del by_number[number], rank_of[one]
            sockets.remove(one)
            one.close()
            if rank is None:
                continue
            gone[rank] = CLOSED if said is not None else DIED
            told.append(f"{rank} {gone[rank]}\n")
            for connection in rank_of:
                with suppress(OSError):
                    connection.send(told[-1].encode())


def _follow(
    connect: Callable[[], socket.socket | None],
    first: int,
    gone: dict[int, str],
    sockets: list[socket.socket],
    woken: socket.socket,
) -> None:
    """Any other rank's thread: the first one says who is gone, and is gone itself when its connection ends."""
    connection = connect()
    if connection is None:
        return
    sockets.append(connection)
    rest = ""
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    poller.register(woken.fileno(), select.POLLIN)
    while True:
        ready = [number for number, _ in poller.poll()]
        if woken.fileno() in ready:
            with suppress(OSError):
                connection.send(b"closed\n")
            return
        said = _read(connection)
        if said is None:
            gone.setdefault(first, DIED)
            return
        *lines, rest = (rest + said).split("\n")
        for line in lines:
            if line == "closed":
                gone[first] = CLOSED
                return
            rank, _, why = line.partition(" ")
            gone[int(rank)] = why


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
            connection.close()  # what listens there is something else
    return None
