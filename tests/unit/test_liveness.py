"""Which ranks are gone, and the end of process groups: two ranks of one process, without a process group."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lightning_zerocompile.ranks import abort
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
