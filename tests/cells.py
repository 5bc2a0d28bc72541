"""Which cells of a matrix run by default: those that can differ.

[Note: cells] A matrix is a test with several lists of values, and each cell of their product is a test.
What goes wrong depends on one value as a rule, and now and then on two of them together. So with two lists each value
runs at least once (stages 1, 2, 3 in eager and in compiled code by turns), and with three or more each pair of values.
``--long`` runs all cells. A list of cells that somebody has chosen is no matrix, and runs whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Cell = dict[str, str]
"""The values of a cell by the names of its parameters, as text."""


def is_covered(node: str) -> bool:
    """Whether a test's matrix is thinned out. Those of one process are quick, and rules are always whole."""
    folder, _, name = node.partition("::")[0].rpartition("/")
    return folder.startswith("tests/dist") and not name.startswith("test_rules")


def covering(cells: Sequence[Cell]) -> list[int]:
    """Which of a function's cells run by default, see [Note: cells]."""
    lists = {name: {cell[name] for cell in cells} for name in cells[0]}
    if len(lists) < 2 or len(cells) < 4 or len(cells) != math.prod(map(len, lists.values())):
        return list(range(len(cells)))
    together = 1 if len(lists) == 2 else 2
    left = {number: set(itertools.combinations(sorted(cell.items()), together)) for number, cell in enumerate(cells)}
    missing, chosen = set().union(*left.values()), []
    while missing:
        chosen.append(max(left, key=lambda number: (len(left[number] & missing), number)))
        missing -= left.pop(chosen[-1])
    return sorted(chosen)
