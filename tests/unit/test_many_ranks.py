"""What hundreds of ranks cost a rank: see examples/many_ranks.py, whose figures are in examples/BENCHMARKS.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "many_ranks.py"


def _figures(*arguments: str) -> dict[str, Any]:
    run = [sys.executable, str(SCRIPT), *arguments, "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(run, check=True, capture_output=True, timeout=500).stdout)
    return found


@pytest.mark.parametrize(
    "ranks", [("6", "24"), pytest.param(("16", "256"), marks=[pytest.mark.long, pytest.mark.slow])]
)
def test_messages_do_not_grow_with_the_square_of_the_ranks(ranks: tuple[str, str]) -> None:
    """A rank asks as often with many others as with few (but the one that joins), and all bytes grow as the ranks."""
    found = _figures("store", "--steps", "5", "--ranks", *ranks)
    few, many = (found[number] for number in ranks)
    factor = int(ranks[1]) / int(ranks[0])
    for name, figures in many.items():
        seconds = max(0.05, figures["seconds"])  # while it waits a rank asks about every 5 ms
        assert figures["requests"] <= 12 + 250 * seconds, name
        assert figures["all bytes"] <= 3 * factor * few[name]["all bytes"] + 1000, name
    assert many["a mark"]["requests"] == many["a backward, all have gradients"]["requests"] == 1


@pytest.mark.long
@pytest.mark.slow
def test_a_step_asks_as_little_of_the_host() -> None:
    found = _figures("step", "--ranks", "8", "1024", "--steps", "100")
    few, many = found["8"], found["1024"]
    assert few["requests a step"] == many["requests a step"] == 3
    assert many["KiB at peak"] <= 1.1 * few["KiB at peak"] + 16
    assert many["fastest ms"] <= 1.1 * few["fastest ms"] + 1
