"""Random models and step programs, sharded on two ranks against plain torch, gradient by gradient.

Hypothesis generates the programs and shortens one that fails. ``Program(...)`` as printed is code, to be replayed by::

    python -m tests.fuzz.replay 'Program(steps=((Backward(), Snap()),))'

Defects that are known are in tests/fuzz/known.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, seed, settings

from tests.fuzz import known, run
from tests.fuzz.program import Program, brief, programs
from tests.harness import RankError, Ranks

TIMEOUT = 60.0  # of one program; a hang shows where the ranks stand


def check(ranks: Ranks, program: Program, folder: Path) -> None:
    """Fails with what differs from plain torch, or with what a rank raised."""
    try:
        wrong = ranks.run(run.body, program, str(folder), timeout=TIMEOUT)
    except RankError as error:
        ranks.close(kill=True)  # the others may be in the middle of anything
        raise AssertionError(f"{brief(program)}\n{error}") from None
    lines = [f"rank {rank}: {line}" for rank, own in enumerate(wrong) for line in own]
    assert not lines, "\n".join([brief(program), *lines[:20]])


def fuzz(ranks: Ranks, folder: Path, modes: tuple[str, ...], count: int, number: int | None = None) -> None:
    """``count`` programs; always the same ones, unless another seed ``number`` is given."""

    @settings(
        max_examples=count, derandomize=number is None, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs(*modes))
    def one(program: Program) -> None:
        assume(not known.excluded(program))
        check(ranks, program, folder)

    (one if number is None else seed(number)(one))()


@pytest.mark.slow
def test_random_programs_run_eagerly(ranks: Ranks, tmp_path: Path) -> None:
    fuzz(ranks, tmp_path, ("eager",), 70)


@pytest.mark.slow
def test_random_programs_run_compiled(ranks: Ranks, tmp_path: Path) -> None:
    fuzz(ranks, tmp_path, ("blocks", "model"), 15)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_more_random_programs(ranks: Ranks, tmp_path: Path, number: int) -> None:
    fuzz(ranks, tmp_path, ("eager",), 400, number)
    fuzz(ranks, tmp_path, ("blocks", "model"), 100, number)


@pytest.mark.parametrize("found", [one for one in known.FOUND if one.excluded is None], ids=lambda one: one.what)
def test_what_was_found(ranks: Ranks, tmp_path: Path, found: known.Found) -> None:
    check(ranks, found.program, tmp_path)
