"""How many bytes a step keeps on each rank: the formula, and a stack of equal blocks that it is exact for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import models


class Wide(nn.Module):
    """A residual block of two square matrices; ``hold`` keeps the gradients of its weights, in the order they come."""

    def __init__(self, width: int, hold: list[Tensor] | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)
        self.hold = hold

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        if self.hold is None:
            return x + self.down(torch.relu(self.up(x)))
        up, down = Held.apply(self.up.weight, self.hold), Held.apply(self.down.weight, self.hold)
        return x + torch.relu(x @ up.t()) @ down.t()


class Held(torch.autograd.Function):
    """A weight as it is; its gradient is kept in a list."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, hold: list[Tensor]) -> Tensor:
        ctx.hold = hold
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.hold.append(grads[0])
        return grads[0], None


class Stack(nn.Module):
    """Equal blocks; those whose numbers are in ``held`` keep their weights' gradients in ``self.hold``."""

    def __init__(self, width: int, blocks: int, held: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.hold: list[Tensor] = []
        self.layers = nn.ModuleList(Wide(width, self.hold if n in held else None) for n in range(blocks))

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        for layer in self.layers:
            x = layer(x)
        return x


def padded(rows: int) -> int:
    """To a multiple of the number of ranks."""
    return -(-rows // models.world()) * models.world()


def gathered_bytes(parameter: Tensor) -> int:
    """Of a parameter's full value with padded rows."""
    if parameter.dim() == 0:
        return parameter.nbytes
    return parameter.element_size() * padded(parameter.shape[0]) * parameter.shape[1:].numel()


@dataclass(frozen=True)
class Formula:
    """Bytes on one rank of a :class:`Stack` in bfloat16 with float32 masters and AdamW.

    Args:
        stage: of ZeRO.
        world: number of ranks; divides ``width``.
        width, blocks: of the stack. A block is a unit.
        activations: that forward keeps for backward, bytes.
    """

    stage: int
    world: int
    width: int
    blocks: int
    activations: int = 0

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return self.blocks * 2 * self.width**2

    @property
    def unit(self) -> int:
        """A gathered unit, and a unit's full gradients, in bfloat16."""
        return 2 * self.parameters // self.blocks

    @property
    def masters(self) -> int:
        return 4 * self.parameters // self.world

    @property
    def states(self) -> int:
        """AdamW's two averages; its step counters are on the CPU."""
        return 2 * self.masters

    @property
    def partition(self) -> int:
        """Reduced gradients in the masters' dtype."""
        return 4 * self.parameters // self.world

    @property
    def resident(self) -> int:
        """Values that stay gathered between steps."""
        return 2 * self.parameters if self.stage < 3 else 0

    @property
    def between_steps(self) -> int:
        return self.masters + self.states + self.resident

    @property
    def after_forward(self) -> int:
        return self.between_steps + self.activations

    @property
    def after_backward(self) -> int:
        return self.between_steps + self.partition

    @property
    def peak(self) -> int:
        """Where all but the last unit's gradients are reduced: two units' are full, at stage 3 two units gathered.

        It is the highest if a block's activations are small beside its parameters.
        """
        return self.after_backward + 2 * self.unit + (2 * self.unit if self.stage == 3 else 0)


class LiveBytes:
    """Bytes of the CPU allocator that are alive, as torch's profiler is told of them, also those of C++.

    Counted from ``with``; ``marks`` are put by :meth:`mark`. Afterwards ``seen`` has for each mark what was alive there
    and the most since the mark before.
    """

    def __enter__(self) -> LiveBytes:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        self.seen: dict[str, tuple[int, int]] = {}
        return self

    def mark(self, name: str) -> None:
        with torch.profiler.record_function(f"mark: {name}"):
            pass

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        recorded: Any = self._profile.profiler
        events = [(e.start_ns(), e.name(), e.nbytes()) for e in recorded.kineto_results.events()]
        now = most = 0
        for _, name, size in sorted(e for e in events if e[1] == "[memory]" or e[1].startswith("mark: ")):
            if name == "[memory]":
                now += size
                most = max(most, now)
            else:
                self.seen[name.removeprefix("mark: ")] = (now, most)
                most = now
