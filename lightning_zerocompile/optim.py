"""Elementwise optimizers step unit by unit on local tensors, so that a unit is gathered while the next is updated.

[Note: step by unit] Lightning, schedulers and hooks see one ``optimizer.step(closure)``. The closure we hand to it runs
the user's, then updates every unit's local shards with the optimizer's own ``step`` (its parameter lists narrowed to
that unit), and takes the gradients away, so that the step which the closure returns to finds nothing to do.
DTensors would give the same numbers, at 20 to 30 us of dispatch per parameter and without the overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile import leaves
from lightning_zerocompile.shard import spec_like

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
    }
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether updating a shard on its own is updating the parameter (exact types: a subclass may do anything)."""
    return type(optimizer) in ELEMENTWISE


class UnitStepper:
    """Updates an optimizer's parameters unit by unit.

    Args:
        units: masters of each unit, in the order in which the next forward needs them.
        updated: called with a unit's number when its masters are written.
        keep_gradients: whether ``master.grad`` stays.
    """

    def __init__(
        self,
        units: Callable[[], Sequence[tuple[int, Sequence[Tensor]]]],
        updated: Callable[[int], None],
        keep_gradients: bool,
    ) -> None:
        self._units, self._updated, self._keep_gradients = units, updated, keep_gradients

    @contextmanager
    def around(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """The closure to pass to ``optimizer.step`` inside this context."""
        kept: dict[Tensor, Tensor | None] = {}

        def run() -> Any:
            result = closure()
            lists = [group["params"] for group in optimizer.param_groups]
            masters = [master for parameters in lists for master in parameters]
            with leaves.plain():
                if self._keep_gradients:
                    kept.update({master: master.grad for master in masters})
                try:
                    self._step(optimizer, lists)
                finally:
                    for group, parameters in zip(optimizer.param_groups, lists, strict=True):
                        group["params"] = parameters
                    for master in masters:
                        master.grad = None
            return result

        yield run
        for master, grad in kept.items():
            master.grad = grad

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, lists: list[list[Tensor]]) -> None:
        group_of = {master: number for number, parameters in enumerate(lists) for master in parameters}
        update = _plain_step(optimizer)
        for unit, masters in self._units():
            mine = [(master, _local(master)) for master in masters if master in group_of]
            if not mine:
                continue
            for group in optimizer.param_groups:
                group["params"] = []
            for master, local in mine:
                optimizer.param_groups[group_of[master]]["params"].append(local)
            self._update(optimizer, mine, update)
            self._updated(unit)

    def _update(self, optimizer: Optimizer, mine: list[tuple[Tensor, Tensor]], update: Callable[[], Any]) -> None:
        """One unit: the optimizer sees local tensors, local gradients and local state."""
        state = optimizer.state
        optimizer.state = defaultdict(dict)
        for master, local in mine:
            local.grad = None if master.grad is None else _local(master.grad)
            if master in state:
                optimizer.state[local] = {name: _local(value) for name, value in state[master].items()}
        try:
            update()
        finally:
            new_state, optimizer.state = optimizer.state, state
            for master, local in mine:
                local.grad = None
                if local in new_state:
                    _store(state[master], new_state[local], master, local)
                if not self._keep_gradients:
                    master.grad = None


def _plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The class's ``step`` without the hooks that Optimizer wraps round it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return lambda: step(optimizer)


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _store(entry: dict[str, Any], new: dict[str, Any], master: Tensor, local: Tensor) -> None:
    """Keeps what the update made of a local tensor as state of the master: the same memory, as DTensors."""
    for name, value in new.items():
        if name in entry and _local(entry[name]) is value:
            continue
        elementwise = isinstance(value, Tensor) and value.shape == local.shape and local.dim() > 0
        if elementwise and isinstance(master, DTensor):
            value = DTensor(value, spec_like(master, value.dtype), requires_grad=False)  # type: ignore[no-untyped-call]
        entry[name] = value
