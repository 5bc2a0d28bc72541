"""Which units an offload beside the backward leaves on the device."""

from __future__ import annotations

import pytest

from lightning_zerocompile.optim.residency import largest_that_streams


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        ([], 0),
        ([0, 0], 0),
        ([10] * 8, 10),  # equal ones stream
        ([40, *[10] * 8, 40], 10),  # an embedding and a head: 80 stay, and the buffers shrink by 90
        ([40, *[20] * 8, 40], 40),  # 80 for 60
        ([40, *[20] * 8, 0, 1], 20),  # one of them: 40 for 60
        ([40, *[10] * 8, *[9] * 100, 40], 10),  # the eight would take 80 for 3
        ([100, 10], 10),  # two buffers are enough for two
    ],
)
def test_what_costs_no_more_than_it_frees_stays(sizes: list[int], largest: int) -> None:
    assert largest_that_streams(sizes, 3) == largest
