"""The tests' own ranks: what a test sees in them, and what a failure says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import models
from tests.support.harness import RankError, Ranks, on_ranks


@pytest.mark.parametrize("world", [1, 3])
@on_ranks("world")
@pytest.mark.parametrize("word", ["a parameter"])
def test_a_test_runs_on_every_rank(world: int, word: str, tmp_path: Path, device: str, long: bool) -> None:
    """Each writes a file; with parameters, fixtures and the options of the run."""
    assert models.world() == world and word == "a parameter" and device in ("cpu", "cuda") and long in (True, False)
    (tmp_path / str(models.rank())).touch()
    assert tmp_path.is_dir()


def _compares() -> None:
    seen = [models.rank(), 2]
    assert seen == [0, 2]


def test_an_assert_on_one_rank_says_what_it_compared(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 raised AssertionError: assert \[1, 2\] == \[0, 2\]"):
        ranks.run(_compares)


def _skips() -> None:
    pytest.importorskip("there_is_no_such_module")


def test_a_skip_on_all_ranks_skips(ranks: Ranks) -> None:
    with pytest.raises(pytest.skip.Exception, match="there_is_no_such_module"):
        ranks.run(_skips)


def _skips_on_one() -> None:
    if models.rank() == 1:
        pytest.skip("not here")


def test_a_skip_on_one_rank_fails(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"only some skipped the test: .*1: 'not here'"):
        ranks.run(_skips_on_one)
