"""What is gathered next follows from the order of what was asked for, and nothing else (csrc/gather_order.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_zerocompile.runtime import build

if TYPE_CHECKING:
    from lightning_zerocompile.runtime.core import GatherOrder, GatherSequence

UNITS = 4


@pytest.fixture
def order() -> GatherOrder:
    return build.load().GatherOrder()


@pytest.fixture
def sequence() -> GatherSequence:
    return build.load().GatherSequence()


def _ask(order: GatherOrder, program: str) -> None:
    """Demands: "01 1'0'" asks for units 0 and 1 in forward, and 1 and 0 in backward."""
    way = build.load().Way
    for position, letter in enumerate(program):
        if letter.isdigit():
            order.demand(way.BACK if program[position + 1 : position + 2] == "'" else way.FORTH, int(letter))


def _next(order: GatherOrder, count: int = 1, hides_nothing: str = "") -> list[int]:
    return order.next(count, UNITS, lambda unit: str(unit) in hides_nothing)


def test_nothing_is_predicted_in_the_first_step(order: GatherOrder) -> None:
    for unit in "0123":
        _ask(order, unit)
        assert _next(order) == []


def test_the_last_step_is_the_prediction(order: GatherOrder) -> None:
    _ask(order, "0123 3'2'1'0'")
    order.restart()
    seen = []
    for demand in ("0", "1", "2", "3", "3'", "2'", "1'", "0'"):
        _ask(order, demand)
        seen.append(_next(order))
    assert seen == [[1], [2], [3], [3], [2], [1], [0], []]


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_as_many_as_are_wanted(order: GatherOrder, count: int, expected: list[int]) -> None:
    _ask(order, "0123")
    order.restart()
    _ask(order, "0")
    assert _next(order, count) == expected


def test_a_unit_too_short_to_hide_a_gather_does_not_count(order: GatherOrder) -> None:
    _ask(order, "0123")
    order.restart()
    _ask(order, "0")
    assert _next(order, 1, hides_nothing="12") == [1, 2, 3]


def test_a_circle_of_short_units_ends(order: GatherOrder) -> None:
    _ask(order, "0101010")
    assert len(_next(order, 1, hides_nothing="01")) == UNITS


def test_nothing_is_predicted_over_the_end_of_a_backward(order: GatherOrder) -> None:
    """The optimizer may run there, after which the values would be stale."""
    _ask(order, "01 1'0' 01 1'0'")
    assert _next(order, 4) == []
    order.restart()
    _ask(order, "01 1'")
    assert _next(order, 4) == [0]


def test_the_last_two_demands_decide(order: GatherOrder) -> None:
    """A shared unit has two successors: which one comes follows from what came before it."""
    _ask(order, "0 1 0 2 0 1 0 2 0")
    assert _next(order) == [1]
    _ask(order, "1 0")
    assert _next(order) == [2]


def test_a_changed_program_is_learned(order: GatherOrder) -> None:
    for program, expected in (("012", [1]), ("021", [1]), ("021", [2])):
        order.restart()
        _ask(order, "0")
        assert program == "012" or _next(order) == expected
        _ask(order, program[1:])


def test_asking_for_the_same_unit_again_is_nothing_new(order: GatherOrder) -> None:
    way = build.load().Way
    answers = [order.demand(way.FORTH, 0), order.demand(way.FORTH, 0), order.demand(way.BACK, 0)]
    assert answers == [True, False, True]
    order.restart()
    assert order.demand(way.BACK, 0)


def test_what_is_forgotten_predicts_nothing(order: GatherOrder) -> None:
    _ask(order, "012")
    order.use_in_forward(2)
    order.forget()
    _ask(order, "0")
    assert _next(order) == []
    assert order.first_uses(3) == [2, 0, 1]  # which unit came first is no prediction


def test_first_uses(order: GatherOrder) -> None:
    assert order.first_uses(3) == [0, 1, 2]
    for unit in (2, 0, 2, 0):
        order.use_in_forward(unit)
    assert order.first_uses(4) == [2, 0, 1, 3]


# ---- numbers of gathers ----


def _gather(sequence: GatherSequence, *units: int, agreed: bool = True, runs: tuple[int, ...] = ()) -> tuple[int, bool]:
    """In collectives of so many units each; by default in one."""
    step = sequence.begin(units, build.load().Way.FORTH, UNITS)
    if agreed:
        sequence.agreed()
    for run in runs or (len(units),):
        sequence.started_one()
        sequence.started(run)
    return step


def test_ranks_compare_until_the_way_is_known(sequence: GatherSequence) -> None:
    first = [_gather(sequence, unit) for unit in (0, 1, 0, 1, 0, 1)]
    assert first == [(0, False), (1, False), (2, False), (3, True), (4, True), (5, True)]


def test_a_step_that_nobody_has_agreed_to_stays_unknown(sequence: GatherSequence) -> None:
    for _ in range(3):
        assert not _gather(sequence, 0, agreed=False)[1]


def test_a_branch_is_compared_for_ever(sequence: GatherSequence) -> None:
    program = [0, 1, 0, 2] * 3
    known = [_gather(sequence, unit)[1] for unit in program]
    assert known[-4:] == [True, False, True, False]  # what follows 0 is not known; what follows 1 and 2 is


def test_another_way_is_another_follower(sequence: GatherSequence) -> None:
    way = build.load().Way
    for _ in range(2):
        _gather(sequence, 0)
    assert sequence.begin([0], way.FORTH, UNITS)[1]
    assert not sequence.begin([0], way.BACK, UNITS)[1]


def test_units_that_are_gathered_together_are_one_step(sequence: GatherSequence) -> None:
    steps = [_gather(sequence, *units) for units in ([0, 1], [2], [0, 1], [2])]
    assert steps == [(0, False), (2, False), (3, False), (5, True)]
    assert sequence.gathered() == 6


def test_the_course_tells_programs_apart() -> None:
    """Ranks that have gathered the same have equal digests; others do not, whatever the difference is."""
    courses = []
    for program in ([[0], [1]], [[0], [1]], [[1], [0]], [[0], [1 + UNITS]], [[0], [1], [1]]):
        sequence = build.load().GatherSequence()
        for units in program:
            _gather(sequence, *units)
        courses.append((sequence.gathered(), sequence.course()))
    assert courses[0] == courses[1]
    assert len(set(courses)) == 4


def test_one_collective_or_two_are_two_courses() -> None:
    courses = set()
    for runs in ((2,), (1, 1)):
        sequence = build.load().GatherSequence()
        _gather(sequence, 0, 1, runs=runs)
        courses.add(sequence.course())
    assert len(courses) == 2


def test_what_was_not_started_does_not_count(sequence: GatherSequence) -> None:
    """A gather that failed is none; one of which a part was started is neither none nor a whole one."""
    way = build.load().Way
    for _ in range(2):
        _gather(sequence, 0)
        _gather(sequence, 1)
    before = sequence.gathered(), sequence.course()
    assert sequence.begin([0], way.FORTH, UNITS) == (4, True)
    sequence.agreed()
    assert (sequence.gathered(), sequence.course()) == before
    assert sequence.begin([1], way.FORTH, UNITS) == (4, False)  # what follows 1 is 0
    sequence.started_one()
    partly = sequence.course()
    assert sequence.gathered() == 4 and partly != before[1]
    sequence.started(1)
    assert sequence.gathered() == 5 and sequence.course() not in (partly, before[1])


def test_a_forgotten_way_is_compared_again(sequence: GatherSequence) -> None:
    for _ in range(3):
        _gather(sequence, 0)
    gathered = sequence.gathered()
    sequence.forget()
    assert _gather(sequence, 0) == (gathered, False)
