"""Which units stay gathered within a memory budget."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lightning_zerocompile.runtime.memory_budget import (
    Candidate,
    choose,
    free_memory,
    segments_of_graphs,
    smallest_share,
)

MIB = 2**20
BLOCKS = [Candidate(unit, 100 * MIB, 2.0) for unit in range(4)]


def test_as_many_as_fit() -> None:
    assert choose(BLOCKS, 399 * MIB) == [0, 1, 2]
    assert choose(BLOCKS, 400 * MIB) == [0, 1, 2, 3]
    assert choose(BLOCKS, 99 * MIB) == choose(BLOCKS, 0) == choose([], MIB) == []


def test_what_is_gathered_most_often_comes_first() -> None:
    shared = Candidate(9, 200 * MIB, 6.0)
    assert choose([*BLOCKS, shared], 250 * MIB) == [9]
    assert choose([*BLOCKS, shared], 300 * MIB) == [0, 9]


def test_what_saves_nothing_is_left() -> None:
    once = Candidate(9, MIB, 1.0)  # used in forward and backward without a gap
    assert choose([*BLOCKS, once], 2**40) == [0, 1, 2, 3]
    assert choose([Candidate(0, MIB, 0.0)], 2**40) == []


@pytest.mark.parametrize("budget", [2 * MIB, 101 * MIB])
def test_small_units_save_more_for_each_byte(budget: int) -> None:
    """The start of a collective costs the same whatever it moves."""
    assert 9 in choose([*BLOCKS, Candidate(9, MIB, 2.0)], budget)


def test_one_that_does_not_fit_does_not_stop_the_next() -> None:
    assert choose([Candidate(0, 100, 9.0), Candidate(1, 60, 2.0), Candidate(2, 30, 2.0)], 95) == [1, 2]


def test_ranks_of_a_host_share_its_memory() -> None:
    assert smallest_share([("left", 90), ("right", 40), ("left", 80)]) == 40
    assert smallest_share([("left", 90), ("right", 41), ("left", 80)]) == 40
    assert smallest_share([("", 90), ("", 80)]) == 80  # each its own device
    host, size = free_memory(torch.device("cpu"))
    assert host and size > 0


def test_segments_of_graphs_are_those_of_their_pools() -> None:
    segments = [{"device": d, "segment_pool_id": pool} for d in (0, 1) for pool in ((0, 0), (0, 3))]
    with mock.patch("torch.cuda.memory_snapshot", return_value=segments):
        assert segments_of_graphs(torch.device("cuda", 1)) == [segments[3]]
