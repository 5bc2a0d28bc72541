"""Which ranks communicate with which."""

from __future__ import annotations

import pytest

from lightning_zerocompile.ranks import groups


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    monkeypatch.setattr(groups.dist, "get_world_size", lambda: request.param)
    return int(request.param)


@pytest.mark.parametrize("world", [6], indirect=True)
def test_ranks_at_one_place_of_their_hosts_and_those_of_one_host(world: int) -> None:
    two = groups.two_levels([list(range(world))], nodes=2)
    assert two == groups.TwoLevels([[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("world", [8], indirect=True)
def test_each_replica_has_levels_of_its_own(world: int) -> None:
    two = groups.two_levels([[0, 1, 2, 3], [4, 5, 6, 7]], nodes=4)
    assert two == groups.TwoLevels([[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]])


@pytest.mark.parametrize(
    ("world", "rows", "nodes"),
    [
        (4, [[0, 1, 2, 3]], 1),  # one host
        (4, [[0, 1, 2, 3]], 4),  # one rank on each
        (4, [[0, 1], [2, 3]], 2),  # a replica on each
        (8, [[0, 1, 2, 4]], 2),  # three on one, one on the other
    ],
    indirect=["world"],
)
def test_there_is_one_level(world: int, rows: list[list[int]], nodes: int) -> None:
    assert groups.two_levels(rows, nodes) is None
