"""Counts once how often each unit is gathered in a step: every further gather of a unit moves its bytes again."""

from __future__ import annotations

from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]

from lightning_zerocompile.config import Lifetime
from lightning_zerocompile.runtime.runtime import Runtime

MANY = 4  # gathers of a unit for each backward: two are usual, and an activation checkpoint needs one more
_STEP = 2  # the step that is counted: the first one compiles, and learns the order

OFTEN = (
    "{} gathered up to {:.0f} times for each backward: code uses these modules again and again, with others between. "
    "Training is right, only slower. `keep_gathered={}` gathers them once a step and keeps them ({:.1f} MiB), "
    "`keep_gathered='auto'` does so for all that fit."
)
_NAMED = 4  # units that a message names at most


class GatherWatch:
    """Counts gathers in the second training step of a run, at stage 3, and warns once on rank 0.

    Args:
        runtime: the model's.

    Attributes:
        gathers: collectives for each backward of that step, by unit; empty until it has ended.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.gathers: dict[str, float] = {}
        self._runtime = runtime
        self._step = 0 if runtime.policy.lifetime is Lifetime.USE else _STEP + 2
        self._before: dict[str, int] = {}
        self._backwards = 0

    def step_begins(self) -> None:
        """Called at the beginning of each training step."""
        self.step_ends()
        if self._step > _STEP:
            return
        self._step += 1
        if self._step == _STEP:
            self._before, self._backwards = self._counts(), self._runtime.core.stats().backwards

    def step_ends(self) -> None:
        """Called before anything that may gather and belongs to the next training step or to none."""
        if self._step != _STEP:
            return
        self._step += 1
        backwards = max(1, self._runtime.core.stats().backwards - self._backwards)
        self.gathers = {name: (now - self._before[name]) / backwards for name, now in self._counts().items()}
        self._warn()

    def _counts(self) -> dict[str, int]:
        """The gathers of each unit so far. A gather of a unit is one collective for each of its dtypes."""
        core, dtypes = self._runtime.core, self._runtime.dtypes_of_units()
        return {name: core.gathers_of(unit)[0] // dtypes[unit] for name, unit in self._runtime.unit_of.items()}

    def often(self) -> dict[str, float]:
        """The units that were gathered more often than :data:`MANY` times for each backward."""
        return {name: times for name, times in self.gathers.items() if times > MANY}

    def text(self) -> str:
        """The warning about the units of :meth:`often`; "": there are none."""
        often, sizes = self.often(), self._runtime.used_units()
        if not often:
            return ""
        names = sorted(often, key=lambda name: -often[name])
        more = f" and {len(names) - _NAMED} more are" if len(names) > _NAMED else " are" if len(names) > 1 else " is"
        listed = ", ".join(f"`{name}`" for name in names[:_NAMED]) + more
        size = sum(sizes.get(self._runtime.unit_of[name], 0) for name in names) / 2**20
        return OFTEN.format(listed, often[names[0]], names, size)

    def _warn(self) -> None:
        if text := self.text():
            rank_zero_warn(text)
