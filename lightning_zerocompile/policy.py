"""A ZeRO stage as two independent policies: how long a gathered value lives, when a gradient is reduced.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Lifetime(Enum):
    """How long a gathered value lives."""

    USE = "use"  # gathered for each forward and each backward use
    STEP = "step"  # gathered once, after the optimizer wrote


@dataclass(frozen=True)
class Policy:
    """What one stage does with every parameter."""

    lifetime: Lifetime
    accumulates_locally: bool  # gradients of an accumulation wait, unreduced, for its last backward

    @classmethod
    def of_stage(cls, stage: int) -> Policy:
        return cls(
            lifetime=Lifetime.USE if stage == 3 else Lifetime.STEP,
            accumulates_locally=stage == 1,
        )
