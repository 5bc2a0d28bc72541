"""Which ranks are gone, and the end of what waits for them: ranks of one process, without a process group."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zerocompile.ranks import liveness
from lightning_zerocompile.ranks.liveness import CLOSED, DIED, Liveness
from lightning_zerocompile.ranks.waits import Wait
from lightning_zerocompile.runtime import build

ENDED, ENTERED, PASSED, UNIT, OTHER = range(5)  # `BarrierWord` in csrc/kernel_arguments.h


def _watch(world: int, rank: int, timeout: float = 300.0) -> Any:
    return build.load().Watch(world, rank, timeout)


def _within(seconds: float, what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


class _Ranks:
    """All ranks of a conversation; ``samples`` are theirs."""

    def __init__(self, samples: Sequence[Callable[[], str | None]]) -> None:
        told: list[str] = []

        def first_says(text: str) -> str:
            told.append(text)
            return told[0]

        world = len(samples)
        self.watches = [_watch(world, rank) for rank in range(world)]
        self.all = [
            Liveness(watch, world, rank, first_says, 60.0, samples[rank]) for rank, watch in enumerate(self.watches)
        ]

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        closing = [threading.Thread(target=one.close) for one in self.all]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def gone(self, listener: int) -> dict[int, str | None]:
        return {rank: self.watches[listener].gone(rank) for rank in range(len(self.all))}


def _nothing() -> None:
    return None


def test_a_rank_looks_at_itself_after_the_first_rank_has_ended() -> None:
    """The first rank says why it ends, and is gone at once; the other may stand in a collective that never ends."""
    looks: list[float] = []
    with _Ranks([_nothing, lambda: looks.append(time.monotonic())]) as ranks:
        first, other = ranks.watches
        assert _within(10, lambda: bool(looks))
        first.leave("a reason")
        ranks.all[0].close()
        assert _within(10, lambda: other.gone(0) == CLOSED) and other.left() == {0: "a reason"}
        before = len(looks)
        assert _within(10, lambda: len(looks) >= before + 2)
    after = len(looks)
    assert not _within(1.5, lambda: len(looks) > after)


def test_all_ranks_hear_all_ends() -> None:
    many = 24
    with _Ranks([_nothing] * many) as ranks:
        first, second, *others = ranks.watches
        for watch in others:
            watch.leave("a reason")
        for one in ranks.all[2:]:
            one.close()
        expected = dict.fromkeys(range(2, many), "a reason")
        assert _within(10, lambda: first.left() == second.left() == expected)
        expected = {0: None, 1: None} | dict.fromkeys(range(2, many), CLOSED)
        assert _within(10, lambda: ranks.gone(0) == ranks.gone(1) == expected), ranks.gone(1)


@pytest.mark.parametrize("closes", [0, 1])
def test_an_end_is_heard_while_python_stands(closes: int) -> None:
    held, free = threading.Event(), threading.Event()

    def stand() -> None:
        held.set()
        assert free.wait(30)

    samples: list[Callable[[], None]] = [_nothing, _nothing]
    samples[1 - closes] = stand
    with _Ranks(samples) as ranks:
        try:
            assert held.wait(10)
            ranks.all[closes].close()
            assert _within(10, lambda: ranks.watches[1 - closes].gone(closes) is not None)
            assert ranks.watches[1 - closes].gone(closes) == CLOSED
        finally:
            free.set()


def test_a_long_reason_is_cut_and_what_follows_is_heard() -> None:
    wait = Wait("gather", 1, "somewhere", (), {"gather": 0}).line()
    with _Ranks([_nothing] * 2) as ranks:
        first, second = ranks.watches
        second.leave("é" * 1_000_000)
        for rank in (0, 1):
            assert _within(10, lambda rank=rank: 1 in ranks.watches[rank].left())  # type: ignore[misc]
            reason = ranks.watches[rank].left()[1]
            assert reason.startswith("ééé") and len(reason) < 5000
        found: list[str | None] = [None, None]
        for _ in range(20):  # both wait for each other, and repeat their reports
            found = [known or one.waits(wait) for known, one in zip(found, ranks.all, strict=True)]
            if all(found):
                break
            time.sleep(0.5)
        assert all(text is not None and "ranks wait for each other" in text for text in found)
        assert first.gone(1) is None


def test_a_bad_line_ends_one_connection_alone() -> None:
    with _Ranks([_nothing] * 3) as ranks:
        first, second, third = ranks.watches
        third.leave("why")
        assert _within(10, lambda: 2 in second.left())  # all are connected
        second.send(0, "{no report")
        assert _within(10, lambda: first.gone(1) is not None)
        assert "has sent what no rank sends" in first.gone(1)
        assert _within(10, lambda: third.gone(1) == first.gone(1)) and third.gone(2) is None
        ranks.all[2].close()
        assert _within(10, lambda: first.gone(2) == CLOSED)


def test_strangers_do_not_keep_ranks_out() -> None:
    """Connections without the token end after seconds, and nobody can connect once all ranks have."""
    listener = liveness._listen()
    assert listener is not None
    port = listener.getsockname()[1]
    first = _watch(3, 0)
    first.start(listener.detach(), "asks", "answers", 60.0)
    strangers = [socket.create_connection(("localhost", port)) for _ in range(5)]
    strangers[0].sendall(b"1 another\0")
    try:
        ours = [liveness._connect(["localhost"], port, f"{rank} asks\0", "answers\0") for rank in (1, 2)]
        assert all(ours)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("localhost", port))
        strangers[-1].settimeout(10)
        with pytest.raises(ConnectionResetError):  # it was still in the listener's queue
            assert strangers[-1].recv(1) == b""
            raise ConnectionResetError
        ours[1].close()  # type: ignore[union-attr]
        assert _within(10, lambda: first.gone(2) == DIED) and first.gone(1) is None
    finally:
        first.close()


def test_the_listener_closes_in_time() -> None:
    listener = liveness._listen()
    assert listener is not None
    port = listener.getsockname()[1]
    first = _watch(2, 0)
    first.start(listener.detach(), "asks", "answers", 0.5)
    time.sleep(1.5)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", port))
    first.close()


# ---- what waits on a device ----


class _Group(dist.ProcessGroup):
    """A process group that notes when it is aborted, and what a barrier's words say then."""

    def __init__(self, name: str, words: torch.Tensor) -> None:
        super().__init__(0, 1)
        self._words, self.aborted = words, list[list[int]]()
        torch._C._distributed_c10d._register_process_group(name, self)

    def abort(self) -> None:
        self.aborted.append(self._words.tolist())


def _hold_the_interpreter_lock(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _dead_first_rank(words: torch.Tensor) -> Any:
    """The watch of rank 1; rank 0 has died."""
    theirs, ours = socket.socketpair()
    watch = _watch(2, 1)
    watch.add_barriers(build.load().DeviceBarriers(words, "gather", ["layers.0", "layers.1"]))
    watch.start(ours.detach(), "", "", 0.0)
    theirs.close()
    return watch


def test_a_barrier_ends_while_python_stands() -> None:
    words = torch.tensor([0, 7, 6, 1, 0])
    watch = _dead_first_rank(words)
    _hold_the_interpreter_lock(6.0)
    assert words[ENDED] == 1
    assert watch.ended() == (
        f"zerocompile: rank 1 waits for rank 0, which has ended: {DIED}, its device in the gather of unit `layers.1`"
    )
    assert watch.standing() == ""
    watch.close()


def test_groups_end_if_python_has_stood_for_long() -> None:
    """Where collectives are NCCL's there is no barrier to look at. Barriers end before communicators, which wait for
    the device."""
    words = torch.tensor([0, 7, 7, 1, 0])
    group = _Group("test_groups_end", words)
    watch = _dead_first_rank(words)
    watch.set_groups(["test_groups_end", "unknown"])
    watch.take()  # Python was there
    _hold_the_interpreter_lock(7.0)
    assert watch.ended() == f"zerocompile: rank 1 waits for rank 0, which has ended: {DIED}"
    assert _within(10, lambda: group.aborted == [[1, 7, 7, 1, 0]])
    watch.close()


def test_nothing_ends_while_a_rank_waits_for_nobody() -> None:
    words = torch.tensor([0, 7, 7, 1, 0])
    _Group("test_nothing_ends", words)
    watch = _dead_first_rank(words)
    watch.set_groups(["test_nothing_ends"])
    for number in range(8, 15):  # its device goes from barrier to barrier, and its Python is there
        words[ENTERED] = number
        watch.take()
        time.sleep(1.0)
        words[PASSED] = number
    assert watch.gone(0) == DIED and watch.ended() is None and words[ENDED] == 0
    watch.close()


def test_a_barrier_in_which_a_device_stands_is_ended_and_named() -> None:
    """After `timeout`, counted from when it came to this barrier and not to the one before."""
    words = torch.tensor([0, 7, 6, 0, 0])
    watch = _watch(1, 0, timedelta(seconds=2).total_seconds())
    watch.add_barriers(build.load().DeviceBarriers(words, "gather", ["layers.0"]))
    watch.start(-1, "", "", 0.0)
    assert watch.standing() == "the gather of unit `layers.0`"
    time.sleep(1.4)
    words[ENTERED], words[PASSED] = 8, 7
    time.sleep(1.2)
    assert watch.ended() is None and words[ENDED] == 0
    assert _within(10, lambda: bool(words[ENDED] == 1))
    assert "device has waited for 0:00:02 in the gather of unit `layers.0`" in watch.ended()
    assert not watch.end("another reason") and "0:00:02" in watch.ended()
    watch.close()


def test_ranks_in_different_barriers_are_named() -> None:
    words = torch.tensor([0, 7, 6, 0, 0])
    watch = _watch(1, 0)
    watch.add_barriers(build.load().DeviceBarriers(words, "reduction", ["layers.0", "layers.1"]))
    watch.start(-1, "", "", 0.0)
    time.sleep(1.0)
    assert watch.ended() is None
    words[OTHER] = (2**32 - 1 << 32 | 1) - 2**64  # the largest number, as int64
    assert _within(10, lambda: bool(words[ENDED] == 1))
    text = watch.ended()
    assert "was in the reduction of unit `layers.0` (barrier 7)" in text
    assert "another rank's in the reduction of unit `layers.1` (barrier 4294967295)" in text
    watch.close()


def test_words_of_another_kind_are_refused() -> None:
    with pytest.raises(RuntimeError, match="the words of barriers are 5 of int64"):
        build.load().DeviceBarriers(torch.zeros(5), "gather", [])
    with pytest.raises(RuntimeError, match="rank 2 of 2 ranks"):
        _watch(2, 2)
