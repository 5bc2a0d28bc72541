"""The cells that run by default have every value, or every pair of values, see [Note: cells]."""

from __future__ import annotations

import itertools

import pytest

from tests.cells import Cell, covering, is_covered


def _matrix(**values: list[str]) -> list[Cell]:
    return [dict(zip(values, cell, strict=True)) for cell in itertools.product(*values.values())]


STAGES, SCOPES = ["1", "2", "3"], ["False", "'blocks'"]


@pytest.mark.parametrize("values", [STAGES, [str(number) for number in range(9)]])
def test_two_lists_have_every_value(values: list[str]) -> None:
    cells = _matrix(scope=SCOPES, stage=values)
    chosen = [cells[number] for number in covering(cells)]
    assert len(chosen) == len(values) < len(cells)
    assert {cell["stage"] for cell in chosen} == set(values) and {cell["scope"] for cell in chosen} == set(SCOPES)


def test_three_lists_have_every_pair() -> None:
    cells = _matrix(stage=STAGES, scope=SCOPES, how=["a", "b", "c"])
    chosen = [cells[number] for number in covering(cells)]
    assert len(chosen) < len(cells)
    for one, other in itertools.combinations(cells[0], 2):
        assert {(c[one], c[other]) for c in chosen} == {(c[one], c[other]) for c in cells}


def test_what_was_chosen_is_whole() -> None:
    """A list of cases, a matrix with holes, a short one, rules, and tests of one process."""
    holes = [cell for cell in _matrix(stage=STAGES, scope=SCOPES) if cell != {"stage": "2", "scope": "False"}]
    for cells in (_matrix(case=[str(number) for number in range(9)]), holes, _matrix(stage=STAGES)):
        assert covering(cells) == list(range(len(cells)))
    assert is_covered("tests/dist/training/test_parity.py::test_sgd_equals_ddp[eager-1-2-1]")
    assert not is_covered("tests/dist/training/test_rules_backward.py::test_rule_08[1]")
    assert not is_covered("tests/unit/test_config.py::test_defaults")
