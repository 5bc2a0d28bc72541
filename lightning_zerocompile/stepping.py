"""Optimizers of known kind step unit by unit on plain tensors, so that a unit is gathered while the next is updated.

[Note: step by unit] Lightning, schedulers and hooks see one ``optimizer.step(closure)``. The closure we hand to it runs
the user's, then updates every unit's local shards with the optimizer's own ``step`` (its parameter lists narrowed to
that unit, or to a few small ones), and takes the gradients away, so that the step which the closure returns to finds
nothing to do.
DTensors would give the same numbers, at 20 to 30 us of dispatch per parameter and without the overlap.

[Note: whole values] Adafactor and Muon update a parameter from all of its rows. Such an optimizer sees whole
parameters, gradients and states, one unit at a time, on every rank; afterwards each rank keeps its rows. So it computes
what it computes under DDP, and memory is that of the shards plus one unit. State of another shape than its parameter's
(Adafactor's factors) is on every rank. Users name their own optimizers of this kind in ``whole_values``; one that also
counts in its parameter groups finds the same count for every unit.

[Note: other optimizers] An optimizer that is neither of torch's own nor named steps once, on DTensors. What it computes
with them is what it would compute with whole values, also sums over parameters; where DTensor does not know an
operation it raises, and so do we, by name. One thing DTensor gets wrong: ``item()`` (and so ``float()``) of a value
that is spread over ranks, such as a norm, is that of the rank's own part. :class:`ExactScalars` gives the whole. Such
an optimizer is not given whole values unasked: unit by unit, what it computes over all parameters would be wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_zerocompile import leaves
from lightning_zerocompile.full_values import full_value
from lightning_zerocompile.optim import plain_step, remedy, sees_whole_values
from lightning_zerocompile.shard import local_part, shard_like, spec_like

_TAKES_ANY_STATE = (optim.Adam, optim.AdamW)  # fused; SGD's takes only parameters that all have a momentum, or none
_TOGETHER = 2**25  # elements: a device updates fewer in less time than the host needs for a call of the optimizer


class ExactScalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In here ``item()`` of a DTensor is that of the whole value, see [Note: other optimizers]; then collective."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor):
            args = (full_value(args[0]),)
        return func(*args, **(kwargs or {}))


@contextmanager
def on_shards(optimizer: Optimizer, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """The closure to pass to the step of an optimizer that sees DTensors, see [Note: other optimizers].

    Raises:
        RuntimeError: the step used what DTensor does not know; it names the optimizer and the remedy.
    """
    stepping = ExitStack()
    inside = False

    def run() -> Any:
        nonlocal inside
        stepping.close()  # an optimizer may run the closure again
        inside = False
        result = closure()
        stepping.enter_context(ExactScalars())  # type: ignore[no-untyped-call]
        inside = True
        return result

    try:
        with stepping:
            yield run
    except RuntimeError as error:
        if not inside or not any(word in str(error) for word in ("DTensor", "shard", "placement")):
            raise
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() failed on row shards (DTensors): {error} {remedy(optimizer)}"
        ) from error


class UnitStepper:
    """Updates an optimizer's parameters unit by unit.

    Args:
        units: masters of each unit, in the order in which the next forward needs them.
        updated: called with a unit's number when its masters are written.
        keeps_gradient: whether a master's ``grad`` stays.
        whole_values: names of the user's optimizers that see whole values.
        together: units are updated together until their shards have so many elements, by a fused Adam or AdamW: those
            that are not fused make temporary values of all that they update.
    """

    def __init__(
        self,
        units: Callable[[], Sequence[tuple[int, Sequence[Tensor]]]],
        updated: Callable[[int], None],
        keeps_gradient: Callable[[Tensor], bool],
        whole_values: Sequence[str],
        together: int = _TOGETHER,
    ) -> None:
        self._units, self._updated, self._keeps_gradient = units, updated, keeps_gradient
        self._whole_values, self.together = whole_values, together

    @contextmanager
    def around(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """The closure to pass to ``optimizer.step`` inside this context."""
        kept: dict[Tensor, Tensor | None] = {}
        options: list[dict[str, Any]] = []

        def run() -> Any:
            result = closure()
            lists = [group["params"] for group in optimizer.param_groups]
            masters = [master for parameters in lists for master in parameters]
            with leaves.plain():
                kept.update({master: master.grad for master in masters if self._keeps_gradient(master)})
                try:
                    options[:] = self._step(optimizer, lists)
                finally:
                    for group, parameters in zip(optimizer.param_groups, lists, strict=True):
                        group["params"] = parameters
                    for master in masters:
                        master.grad = None
            return result

        try:
            yield run
        finally:
            with leaves.plain():
                for master, grad in kept.items():
                    master.grad = grad
        for group, new in zip(optimizer.param_groups, options, strict=False):
            group.update(new)  # the step that found nothing to do has counted, too

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, lists: list[list[Tensor]]) -> list[dict[str, Any]]:
        """Returns the groups' options after the step."""
        group_of = {master: number for number, parameters in enumerate(lists) for master in parameters}
        update, whole = plain_step(optimizer), sees_whole_values(optimizer, self._whole_values)
        options = _Options(optimizer)
        fused = type(optimizer) in _TAKES_ANY_STATE and all(group.get("fused") for group in optimizer.param_groups)
        for units, masters in self._rounds(group_of, whole, self.together if fused else 1):
            mine = [(master, _value(master, whole)) for master in masters]
            options.restore()
            for group in optimizer.param_groups:
                group["params"] = []
            for master, value in mine:
                optimizer.param_groups[group_of[master]]["params"].append(value)
            self._update(optimizer, mine, update, whole)
            options.note({group_of[master] for master in masters})
            for unit in units:
                self._updated(unit)
        return options.after

    def _rounds(
        self, chosen: Container[Tensor], whole: bool, together: int
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Units that are updated together, and their masters among the ``chosen``. Whole values are communicated: in
        one order on all ranks, whose forwards may differ."""
        units, masters, numel = list[int](), list[Tensor](), 0
        for unit, members in sorted(self._units(), key=lambda unit: unit[0]) if whole else self._units():
            mine = [master for master in members if master in chosen]
            if not mine:
                continue
            units.append(unit)
            masters += mine
            numel += sum(_value(master, whole=False).numel() for master in mine)
            if whole or numel >= together:  # how many there are here says nothing of other ranks
                yield units, masters
                units, masters, numel = [], [], 0
        if units:
            yield units, masters

    def _update(
        self, optimizer: Optimizer, mine: list[tuple[Tensor, Tensor]], update: Callable[[], Any], whole: bool
    ) -> None:
        """Of some units: the optimizer sees plain tensors, gradients and state; local ones, or the whole ones."""
        state = optimizer.state
        optimizer.state = defaultdict(dict)
        for master, value in mine:
            if master.grad is not None:
                value.grad_dtype = master.grad.dtype
                value.grad = _value(master.grad, whole)
            if master in state:
                optimizer.state[value] = {name: _value(kept, whole) for name, kept in state[master].items()}
        try:
            update()
        finally:
            new_state, optimizer.state = optimizer.state, state
            for master, value in mine:
                value.grad = None
                if whole and isinstance(master, DTensor):
                    master._local_tensor.copy_(local_part(value, master.device_mesh))
                if value in new_state:
                    _store(state[master], new_state[value], master, value, whole)
                if not self._keeps_gradient(master):
                    master.grad = None


class _Options:
    """The options of an optimizer's groups, which are the same before each unit's update and after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._now()
        self.after = self._now()
        self._stepped: set[int] = set()

    def _now(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]

    def restore(self) -> None:
        for group, options in zip(self._optimizer.param_groups, self._before, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]  # the update of another unit has added it
            group.update(options)

    def note(self, groups: set[int]) -> None:
        """Keeps what the update of a unit made of the options of ``groups``.

        Raises:
            RuntimeError: another unit's update made something else of them.
        """
        now = self._now()
        for number in groups:
            changed = [k for k, v in now[number].items() if not _same(v, self.after[number].get(k))]
            if changed and number in self._stepped:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} computes {changed} of its parameter groups from several "
                    "parameters, and so differently in each unit. It cannot be in `whole_values`, which are for "
                    "optimizers that treat each parameter on its own: drop it there, or use strategy='ddp'."
                )
            self.after[number] = now[number]
        self._stepped |= groups


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left is right or torch.equal(left, right)
    return left is right or bool(left == right)


def _value(value: Any, whole: bool) -> Any:
    if not isinstance(value, DTensor):
        return value
    return full_value(value) if whole else value._local_tensor


def _store(entry: dict[str, Any], new: dict[str, Any], master: Tensor, value: Tensor, whole: bool) -> None:
    """Keeps what the update made of a plain tensor as state of the master: DTensors, over the same memory if local."""
    for name, kept in new.items():
        if not whole and name in entry and _value(entry[name], whole) is kept:
            continue
        shaped = isinstance(kept, Tensor) and kept.shape == value.shape and value.dim() > 0
        if shaped and isinstance(master, DTensor) and whole:
            kept = shard_like(kept, master, dtype=kept.dtype)
        elif shaped and isinstance(master, DTensor):
            kept = DTensor(kept, spec_like(master, kept.dtype), requires_grad=False)  # type: ignore[no-untyped-call]
        entry[name] = kept
