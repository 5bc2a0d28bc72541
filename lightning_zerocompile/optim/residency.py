"""Which units an offload beside the backward leaves on the device.

[Note: units that stay] Each of the buffers through which units stream has the size of the largest that streams, and the
backward holds all of them. So where an embedding and a head are several times as large as a block, they take no more of
the device than they free if they stay, and the link need not carry them. With Qwen3-8B on two GPUs a step takes 1.289
in place of 1.757 s, and 1 GiB more (examples/BENCHMARKS.md).
"""

from __future__ import annotations

from collections.abc import Sequence


def largest_that_streams(sizes: Sequence[int], buffers: int) -> int:
    """The bytes of the largest unit that streams: all that are larger stay on the device, see [Note: units that stay].

    Args:
        sizes: bytes of each unit.
        buffers: through which units stream, at most; each has the size of the largest one that does.
    """

    def on_the_device(limit: int) -> int:
        streams = sum(0 < size <= limit for size in sizes)
        return sum(size for size in sizes if size > limit) + limit * min(buffers, streams)

    largest = max(sizes, default=0)
    return min(
        (size for size in {*sizes} if size and on_the_device(size) <= on_the_device(largest)),
        default=0,
    )
