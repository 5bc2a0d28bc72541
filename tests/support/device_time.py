"""What a profiler says of the times at which kernels and copies ran on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Span = tuple[float, float]  # begin and end, in microseconds


def spans(events: Any, *words: str) -> list[Span]:
    """Of what ran on devices under a name with one of the words in it, in order."""
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted((e.time_range.start, e.time_range.end) for e in kernels if any(word in e.name for word in words))


def total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def beside(spans: Iterable[Span], others: list[Span]) -> float:
    """The time in which one of the spans and one of the others run; two others at once count twice."""
    return sum(max(0.0, min(end, e) - max(start, s)) for start, end in spans for s, e in others)
