"""Programs on the ranks of a test: what is wrong with one, and a search for a short wrong one, bounded in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import run
from tests.fuzz.program import Program, brief
from tests.support.harness import RankError, Ranks

TIMEOUT = 60.0  # seconds of one program; a hang shows where the ranks stand
SHRINKING = 60.0  # seconds after the first program that is wrong, in which shorter ones are tried
HANGS = "hangs after"


def wrong(ranks: Ranks, program: Program, folder: Path | str, timeout: float = TIMEOUT) -> str:
    """What differs from plain torch, or what a rank raised; empty if the program is right."""
    try:
        found = ranks.run(run.body, program, str(folder), timeout=timeout)
    except RankError as error:
        ranks.close(kill=True)  # the others may be in the middle of anything
        return str(error)
    return "\n".join([f"rank {rank}: {line}" for rank, own in enumerate(found) for line in own][:20])


class Enough(BaseException):
    """Ends Hypothesis's search; it takes every other exception for one more defect."""


class Bounded:
    """Checks programs as Hypothesis makes them; raises for those that are wrong.

    After the first of them shorter ones are tried for ``shrinking`` seconds. A program that is known to be wrong is
    not run again, and after one that hangs none is.
    """

    def __init__(
        self, ranks: Ranks, folder: Path, shrinking: float = SHRINKING, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ranks, self._folder, self._shrinking, self._clock = ranks, folder, shrinking, clock
        self._end = math.inf
        self._wrong: dict[str, str] = {}

    def search(self, test: Callable[[], None]) -> None:
        """Runs Hypothesis's test, which calls this object; raises the shortest program that is wrong."""
        try:
            test()
        except Enough:
            raise AssertionError(self._wrong[min(self._wrong, key=len)]) from None

    def __call__(self, program: Program) -> None:
        text = brief(program)
        if text not in self._wrong:
            left = self._end - self._clock()
            if left <= 0:
                raise Enough
            said = wrong(self._ranks, program, self._folder, min(TIMEOUT, left))
            hangs = HANGS in said
            if said and not (hangs and self._wrong):  # a later one may only have been slow: an earlier one is reported
                self._wrong[text] = f"{text}\n{said}"
                self._end = min(self._end, self._clock() + self._shrinking)
            if hangs:
                raise Enough
        if text in self._wrong:  # one place: Hypothesis takes errors of several places for several defects
            raise AssertionError(self._wrong[text])
