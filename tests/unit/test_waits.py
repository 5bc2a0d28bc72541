"""Which ranks wait for each other, from what each says that it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_zerocompile.ranks.waits import DIRECT, Jury, Wait, explain_knot, knot, meetings_left, remedy


def _wait(stream: str, number: int = 1, on: Any = (), **started: int) -> Wait:
    return Wait(stream, number, f"{stream} {number}", on, started)


def _found(waits: Mapping[int, Wait], world: int) -> set[int]:
    return knot(waits, range(world))


def test_who_waits_for_each_other() -> None:
    gather = _wait("gather", 5, gather=5)
    message = _wait("message", 0, [0], gather=4)
    assert _found({0: gather, 1: message}, 2) == {0, 1}
    assert _found({0: gather}, 2) == set()  # the other computes
    assert _found({0: gather, 1: _wait("message", 0, [0], gather=5)}, 2) == set()  # the gather is on its way
    assert _found({0: gather, 1: message}, 3) == {0, 1}  # whatever the third one does
    assert _found({0: gather, 1: gather}, 3) == set()  # both wait for the third one, which computes
    chain = {0: _wait("message", 0, [1]), 1: _wait("message", 0, [2]), 2: _wait("meeting", 1, meeting=1)}
    assert _found(chain, 3) == {0, 1, 2}
    assert _found({0: chain[0], 1: chain[1]}, 3) == set()


def test_collectives_of_some_ranks() -> None:
    """Ranks 0 and 1, 2 and 3 gather on their own, so those of one pair do not wait for the other pair's gathers."""
    gate = Wait("gate", 2, "a gate", (), {"gather": 3, "gate": 2}, among=(0, 1))
    gather = Wait("gather", 9, "a gather", (), {"gather": 9, "gate": 1}, among=(2, 3))
    assert _found({0: gate, 2: gather}, 4) == set()  # ranks 1 and 3 compute
    late = Wait("gather", 4, "a gather", (), {"gather": 4, "gate": 1}, among=(0, 1))
    assert _found({0: Wait("message", 0, "a message", [1], {"gather": 3}), 1: late}, 4) == {0, 1}


def test_collectives_of_others() -> None:
    """What they wait for is not known: they count where nobody may go on, and somebody stands in ours."""
    direct, gather = _wait(DIRECT, 1, gather=4), _wait("gather", 5, gather=5)
    assert _found({0: gather, 1: direct}, 2) == {0, 1}
    assert _found({0: gather, 1: direct}, 3) == set()
    assert _found({0: direct, 1: direct}, 2) == set()
    assert _found({0: gather, 1: direct, 2: direct}, 3) == {0, 1, 2}
    assert _found({0: gather, 1: _wait(DIRECT, 1, gather=5)}, 2) == set()


def test_a_verdict_takes_repeated_reports() -> None:
    jury, lines = Jury([0, 1]), [_wait("gather", 5, gather=5).line(), _wait("message", 0, [0], gather=4).line()]
    assert jury.verdict() == {}
    for rank, line in enumerate(lines):
        jury.hear(rank, line)
    assert jury.verdict() == {}  # suspects, from here on
    jury.hear(0, lines[0])
    jury.hear(0, lines[0])
    assert jury.verdict() == {}  # the other may have gone on
    jury.hear(1, _wait("message", 1, [0], gather=4).line())  # it has, and waits again
    jury.hear(1, lines[1])
    assert jury.verdict() == {}
    for _ in range(2):
        for rank, line in enumerate(lines):
            jury.hear(rank, line)
        verdict = jury.verdict()
    assert verdict == dict(enumerate(lines))
    assert jury.verdict() == {}  # said once


def test_the_message() -> None:
    said = {rank: _wait("gather", 5).line() for rank in range(1, 9)} | {0: _wait("message", 2, [1]).line()}
    text = explain_knot(said)
    assert "rank 0 waits in message 2; ranks 1, 2, 3, 4, 5, 6, 7, 8 wait in gather 5." in text
    assert "strategy.full_parameters" in text and '"Unequal work at stage 3"' in text


def test_a_rank_that_saves_alone_is_told_about_checkpoints_alone() -> None:
    saves, runs = "a checkpoint, in `on_train_batch_start`", "the gather of unit `layers.0`, in `training_step`"
    assert "`trainer.save_checkpoint(path)`" in remedy([runs, saves]) and "full_parameters" not in remedy([runs, saves])
    failed = "a checkpoint, in `on_exception`"  # which another rank's error is the cause of
    assert "save_checkpoint" not in remedy([runs, failed]) and "full_parameters" in remedy([runs])


def test_meetings_that_were_left() -> None:
    said = {0: _wait("meeting", 4), 1: _wait("gather", 5), 2: _wait("meeting", 4), 3: _wait("meeting", 3)}
    assert meetings_left({rank: wait.line() for rank, wait in said.items()}) == [3, 4]
    assert meetings_left({1: said[1].line()}) == []
