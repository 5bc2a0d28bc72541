"""Random models and step programs, sharded over the ranks, against plain torch, gradient by gradient.

Hypothesis generates the programs and shortens one that fails. ``Program(...)`` as printed is code, to be replayed by::

    python -m tests.fuzz.replay 'Program(steps=((Backward(), Snap()),))'

Defects that are known are in tests/fuzz/known.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from tests.fuzz import known
from tests.fuzz.check import HANGS, Bounded, wrong
from tests.fuzz.program import Program, brief, programs, without_halves
from tests.support.harness import RankError, Ranks


def fuzz(ranks: Ranks, folder: Path, modes: tuple[str, ...], count: int, number: int | None = None) -> None:
    """``count`` programs; always the same ones, unless another seed ``number`` is given."""
    check = Bounded(ranks, folder)

    @settings(
        max_examples=count, derandomize=number is None, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(programs(*modes))
    def one(program: Program) -> None:
        assume(not known.excluded(program))
        check(program if ranks.world == 2 else without_halves(program))

    check.search(one if number is None else seed(number)(one))


@pytest.mark.slow
def test_random_programs_run_eagerly(ranks: Ranks, tmp_path: Path) -> None:
    fuzz(ranks, tmp_path, ("eager",), 50)


@pytest.mark.slow
def test_random_programs_run_compiled(ranks: Ranks, tmp_path: Path) -> None:
    fuzz(ranks, tmp_path, ("blocks", "model"), 10)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_more_random_programs(ranks: Ranks, tmp_path: Path, number: int) -> None:
    fuzz(ranks, tmp_path, ("eager",), 400, number)
    fuzz(ranks, tmp_path, ("blocks", "model"), 100, number)


@pytest.mark.parametrize("found", [one for one in known.FOUND if one.excluded is None], ids=lambda one: one.what)
def test_what_was_found(ranks: Ranks, tmp_path: Path, found: known.Found) -> None:
    text = wrong(ranks, found.program, tmp_path)
    assert not text, f"{brief(found.program)}\n{text}"


class Wrong:
    """Ranks on which every program of more than two steps fails, or hangs; each takes a second of their clock."""

    def __init__(self, text: str) -> None:
        self.text, self.runs, self.now = text, 0, 0.0

    def run(self, body: object, program: Program, folder: str, timeout: float) -> list[list[str]]:
        self.runs, self.now = self.runs + 1, self.now + 1.0
        if len(program.steps) < 3:
            return [[], []]
        if self.text == HANGS:
            raise RankError(f"rank 0 {HANGS} {timeout} s")
        return [[self.text], []]

    def close(self, kill: bool) -> None: ...


@pytest.mark.parametrize(("text", "most"), [(HANGS, 0), ("is off", 4)])
def test_a_program_that_is_wrong_is_reported_in_time(tmp_path: Path, text: str, most: int) -> None:
    """With its text; a shorter one is searched for in the time that is given, and none after one that hangs."""
    ranks, before = Wrong(text), 0

    @settings(max_examples=50, derandomize=True, deadline=None, database=None, phases=(Phase.generate, Phase.shrink))
    @given(programs("eager"))
    def one(program: Program) -> None:
        nonlocal before
        if len(program.steps) < 3 and ranks.now == before:
            before += 1
        check(program)

    check = Bounded(ranks, tmp_path, most, lambda: ranks.now)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=rf"(?s)Program\(.*{text}"):
        check.search(one)
    assert ranks.runs <= before + 1 + most
