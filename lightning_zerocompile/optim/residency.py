"""Which units an offload leaves on the device.

[Note: units that stay] The largest ones stay first. Each of the buffers through which the others stream has the size of
the largest that streams. So where an embedding is several times as large as a block, it frees more of the device than
it takes. Of units of one size those that stay are spread evenly over the model. While the backward works on a unit that
stays, the link copies for those before and after it, so neither waits for the other. The first of them stays, since the
backward updates it last and nothing would run beside its way out.
"""

from __future__ import annotations

from collections.abc import Sequence


def which_stay(sizes: Sequence[int], budget: int) -> list[bool]:
    """Whether each unit stays on the device, see [Note: units that stay].

    Args:
        sizes: bytes of each unit, in the order of the forward.
        budget: bytes for all that stay.
    """
    stay = [False] * len(sizes)
    for size in sorted({*sizes} - {0}, reverse=True):
        places = [place for place, other in enumerate(sizes) if other == size]
        count = min(len(places), budget // size)
        for number in range(count):
            stay[places[number * len(places) // count]] = True
        budget -= count * size
    return stay
