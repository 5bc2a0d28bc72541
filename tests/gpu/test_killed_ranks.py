"""A rank's process is killed: the other rank ends soon, and says which one has died."""

from __future__ import annotations

import pytest

from tests.support.killed import CASES, LIMIT, Case, kill

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_other_rank_ends_by_name(case: Case) -> None:
    """Also if its host has filled the device's queue, and so stands in a launch with the interpreter lock."""
    ending = kill(case)
    assert ending.code is not None and ending.seconds < LIMIT and ending.named, ending.said
