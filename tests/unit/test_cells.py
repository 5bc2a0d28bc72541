"""Two runs of the whole suite have every cell, and each has every stage, compiled and eager, see [Note: halves]."""

from __future__ import annotations

import itertools

import pytest

from tests.cells import Cell, half, is_halved


def _matrix(**values: list[str]) -> list[Cell]:
    return [dict(zip(values, cell, strict=True)) for cell in itertools.product(*values.values())]


STAGES, SCOPES = ["1", "2", "3"], ["False", "'blocks'"]
MATRICES = {
    "two by two": _matrix(stage=["1", "3"], scope=SCOPES),
    "stages and scopes": _matrix(stage=STAGES, scope=SCOPES),
    "three dimensions": _matrix(stage=STAGES, scope=SCOPES, how=["a", "b", "c"]),
    "with holes": [cell for cell in _matrix(stage=STAGES, scope=SCOPES) if cell != {"stage": "2", "scope": "False"}],
    "cases": _matrix(case=[str(number) for number in range(9)]),
    "cases and stages": [{"case": str(number), "stage": STAGES[number % 2]} for number in range(8)],
    "a diagonal": [{"stage": stage, "scope": SCOPES[number % 2]} for number, stage in enumerate("13131")],
}


@pytest.mark.parametrize("name", MATRICES)
def test_two_halves_have_all(name: str) -> None:
    cells = MATRICES[name]
    halves = [half(cells, which) for which in (0, 1)]
    assert set(halves[0]) | set(halves[1]) == set(range(len(cells)))
    for chosen in halves:
        assert len(chosen) <= len(cells) // 2 + 2
        for parameter in cells[0]:
            values = {cell[parameter] for cell in cells}
            if len(values) <= 3:
                assert {cells[number][parameter] for number in chosen} == values


def test_three_dimensions_have_every_pair() -> None:
    cells = MATRICES["three dimensions"]
    for which in (0, 1):
        chosen = [cells[number] for number in half(cells, which)]
        for one, other in itertools.combinations(cells[0], 2):
            pairs = {(cell[one], cell[other]) for cell in cells}
            assert {(cell[one], cell[other]) for cell in chosen} == pairs


def test_short_lists_and_rules_are_whole() -> None:
    assert half(_matrix(stage=STAGES), 0) == half(_matrix(stage=STAGES), 1) == [0, 1, 2]
    assert is_halved("tests/dist/training/test_parity.py::test_sgd_equals_ddp[eager-1-2-1]")
    assert not is_halved("tests/dist/training/test_rules_backward.py::test_rule_08[1]")
    assert not is_halved("tests/unit/test_config.py::test_defaults")
