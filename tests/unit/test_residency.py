"""Which units an offload leaves on the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zerocompile.optim.residency import which_stay


def _chosen(sizes: list[int], budget: int) -> list[int]:
    return [place for place, stays in enumerate(which_stay(sizes, budget)) if stays]


def test_large_ones_first() -> None:
    model = [40, *[10] * 8, 1, 40]  # an embedding, blocks, a norm and a head
    assert _chosen(model, 0) == []
    assert _chosen(model, 80) == [0, 10]
    assert _chosen(model, 45) == [0, 9]  # one of the two, and what else fits
    assert _chosen(model, 81 + 80) == list(range(11))


@pytest.mark.parametrize(("budget", "stay"), [(10, [1]), (20, [1, 5]), (40, [1, 3, 5, 7]), (60, [1, 2, 3, 5, 6, 7])])
def test_those_of_one_size_are_spread(budget: int, stay: list[int]) -> None:
    assert _chosen([0, *[10] * 8, 0], budget) == stay


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 60))
def test_the_budget_holds_and_nothing_more_fits(sizes: list[int], budget: int) -> None:
    stay = which_stay(sizes, budget)
    left = budget - sum(size for size, stays in zip(sizes, stay, strict=True) if stays)
    assert left >= 0
    assert all(stays or size == 0 or size > left for size, stays in zip(sizes, stay, strict=True))
