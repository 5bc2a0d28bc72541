"""Which cells of a matrix a run of the whole suite has: one half, or the other one.

[Note: halves] A matrix is a test function with at least four cells. Two runs, ``--half 0`` and ``--half 1``, have all
of its cells, and each has about half of them. The fields of a chessboard say which: the places of a cell's values in
their lists (stage 3 has place 2 among stages 1, 2 and 3) have an even sum, or an odd one. So each half has every stage,
compiled and eager, and in three dimensions every pair of values. Where a chessboard does not do that (a list of cases,
a matrix with holes) a half is every other cell, and those that a short list of values would miss.
"""

from __future__ import annotations

from collections.abc import Sequence

SMALL = 3
"""A list of at most so many values, such as the stages, is whole in each half."""

Cell = dict[str, str]
"""The values of a cell by the names of its parameters, as text."""


def is_halved(node: str) -> bool:
    """Whether a matrix with this test in it is halved. Those of one process are quick, and rules are always whole."""
    folder, _, name = node.partition("::")[0].rpartition("/")
    return folder.startswith("tests/dist") and not name.startswith("test_rules")


def half(cells: Sequence[Cell], which: int) -> list[int]:
    """Which of a function's cells half ``which`` (0 or 1) has, see [Note: halves]."""
    if len(cells) < 4:
        return list(range(len(cells)))
    values = {name: list(dict.fromkeys(cell[name] for cell in cells)) for name in cells[0]}
    small = {(name, value) for name, listed in values.items() if len(listed) <= SMALL for value in listed}
    colors = [sum(values[name].index(value) for name, value in cell.items()) % 2 for cell in cells]
    sides = [[number for number, color in enumerate(colors) if color == side] for side in (0, 1)]
    chosen = sides[which]
    if any(small - _pairs(cells, side) for side in sides) or abs(len(sides[0]) - len(sides[1])) > 2:
        chosen = list(range(which, len(cells), 2))
    for pair in sorted(small - _pairs(cells, chosen)):
        if pair not in _pairs(cells, chosen):
            chosen.append(next(number for number, cell in enumerate(cells) if pair in cell.items()))
    return sorted(chosen)


def _pairs(cells: Sequence[Cell], chosen: Sequence[int]) -> set[tuple[str, str]]:
    return {pair for number in chosen for pair in cells[number].items()}
