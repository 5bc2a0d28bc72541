"""Which ranks are gone, and the end of process groups: two ranks of one process, without a process group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lightning_zerocompile.ranks import abort, liveness
from lightning_zerocompile.ranks.liveness import CLOSED, Liveness


def _within(seconds: float, what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def test_a_rank_looks_at_itself_after_the_first_rank_has_ended() -> None:
    """The first rank says why it ends, and is gone at once; the other may stand in a collective that never ends."""
    told: list[str] = []
    looks: list[float] = []
    first = Liveness([0, 1], 0, lambda text: told.append(text) or text)  # type: ignore[func-returns-value]
    other = Liveness([0, 1], 1, lambda _: told[0], lambda: looks.append(time.monotonic()))
    try:
        assert _within(10, lambda: bool(looks))
        first.leave("a reason")
        first.close()
        assert _within(10, lambda: other.gone(0) == CLOSED) and other.left() == {0: "a reason"}
        before = len(looks)
        assert _within(10, lambda: len(looks) >= before + 2)
    finally:
        first.close()
        other.close()
    after = len(looks)
    assert not _within(1.5, lambda: len(looks) > after)


def test_barriers_end_before_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a communicator waits for the device."""
    events: list[str] = []

    class Group:
        def abort(self) -> None:
            events.append("communicator")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: dist.HashStore())
    monkeypatch.setattr(abort, "groups_of_devices", lambda: [Group(), Group()])
    abort.end_groups("a reason", [lambda: events.append("barrier")])
    assert events == ["barrier", "communicator", "communicator"]


def test_many_ends_are_said_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one by one to each rank: what is said would grow with the square of their number."""
    many, said, told = 24, [], list[str]()
    send = liveness._send
    monkeypatch.setattr(liveness, "_send", lambda one, text: said.append(text) or send(one, text))  # type: ignore[func-returns-value]
    monkeypatch.setattr(liveness, "_TOGETHER", 400)  # the ends take longer than 50 ms beside other work
    ranks = list(range(many))
    all_of_them = [Liveness(ranks, 0, lambda text: told.append(text) or text)]  # type: ignore[func-returns-value]
    all_of_them += [Liveness(ranks, rank, lambda _: told[0]) for rank in ranks[1:]]
    first, second, *others = all_of_them
    try:
        assert _within(10, lambda: len(said) == many - 1)  # all have come
        for one in others:
            one.leave("a reason")
        for one in others:
            one.close()
        expected = dict.fromkeys(ranks[2:], "a reason")
        assert _within(10, lambda: first.left() == second.left() == expected)
        expected = dict.fromkeys(ranks[2:], CLOSED)
        assert _within(10, lambda: _gone(first, ranks[2:]) == _gone(second, ranks[2:]) == expected), _gone(first, ranks)
        assert second.gone(0) is None and first.gone(1) is None
        assert len(said) < many - 1 + many * many / 8
    finally:
        for one in all_of_them:
            one.close()


class _Held:
    """A rank's thread stands in its sample while ``free`` is not set."""

    def __init__(self) -> None:
        self.free, self.samples, self.stands = threading.Event(), 0, False
        self.free.set()

    def sample(self) -> None:
        self.samples += 1
        self.stands = not self.free.is_set()
        assert self.free.wait(30)

    def hold(self) -> None:
        self.free.clear()
        assert _within(10, lambda: self.stands)


@pytest.mark.parametrize("closes", [0, 1])
def test_an_end_waits_until_it_was_read(monkeypatch: pytest.MonkeyPatch, closes: int) -> None:
    """The reset of a connection that is closed too early would lose what still waits to be sent on it."""
    monkeypatch.setattr(liveness, "_LOOK", 20)
    told: list[str] = []
    held = [_Held(), _Held()]
    both = [
        Liveness([0, 1], 0, lambda text: told.append(text) or text, held[0].sample),  # type: ignore[func-returns-value]
        Liveness([0, 1], 1, lambda _: told[0], held[1].sample),
    ]
    ends, stays = both[closes], both[1 - closes]
    ending = threading.Thread(target=ends.close)
    try:
        assert _within(10, lambda: all(one.samples > 2 for one in held))
        held[1 - closes].hold()
        ending.start()
        ending.join(0.5)
        assert ending.is_alive()  # it waits until the other one has read that
        held[1 - closes].free.set()
        assert _within(10, lambda: stays.gone(closes) is not None)
        assert stays.gone(closes) == CLOSED
    finally:
        for one in held:
            one.free.set()
        for rank in both:
            rank.close()


def _gone(liveness: Liveness, ranks: list[int]) -> dict[int, str | None]:
    return {rank: liveness.gone(rank) for rank in ranks}
