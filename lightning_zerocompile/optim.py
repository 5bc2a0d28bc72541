"""Optimizers of known kind step unit by unit on plain tensors, so that a unit is gathered while the next is updated.

[Note: step by unit] Lightning, schedulers and hooks see one ``optimizer.step(closure)``. The closure we hand to it runs
the user's, then updates every unit's local shards with the optimizer's own ``step`` (its parameter lists narrowed to
that unit), and takes the gradients away, so that the step which the closure returns to finds nothing to do.
DTensors would give the same numbers, at 20 to 30 us of dispatch per parameter and without the overlap.

[Note: whole values] Adafactor and Muon update a parameter from all of its rows. Such an optimizer sees whole
parameters, gradients and states, one unit at a time, on every rank; afterwards each rank keeps its rows. So it computes
what it computes under DDP, and memory is that of the shards plus one unit. State of another shape than its parameter's
(Adafactor's factors) is on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile import leaves
from lightning_zerocompile.shard import local_part, shard_like, spec_like

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
        optim.Rprop,
        optim.ASGD,
    }
)
PER_PARAMETER: frozenset[type[Optimizer]] = frozenset({optim.Adafactor, optim.Muon})  # see [Note: whole values]

_REFUSED: dict[type[Optimizer], str] = {
    optim.LBFGS: "it flattens all parameters into one vector and runs the model several times inside one step",
    optim.SparseAdam: "it needs sparse gradients, which cannot be sharded",
}


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether updating a shard on its own is updating the parameter (exact types: a subclass may do anything)."""
    return type(optimizer) in ELEMENTWISE


def steps_by_unit(optimizer: Optimizer) -> bool:
    """Whether its parameters may be updated unit by unit; any other optimizer sees DTensors."""
    return is_elementwise(optimizer) or type(optimizer) in PER_PARAMETER


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises if the optimizer cannot work on sharded parameters.

    Raises:
        MisconfigurationException: names the optimizer, the reason and the remedy.
    """
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise MisconfigurationException(
                f"The optimizer {type(optimizer).__name__} does not work with `strategy='zerocompile'`: {reason}. Use "
                "another optimizer (torch.optim.AdamW, SGD, Muon, ...), or strategy='ddp'."
            )


def check_gradients(optimizer: Optimizer, taken: set[tuple[Any, ...]]) -> None:
    """Raises before anything moves if the optimizer cannot take a gradient of another dtype than its parameter's.

    [Note: trial step] Which optimizers can is nowhere declared, so one element is updated on trial, by a copy of the
    optimizer without its state. One that fails also on a gradient of the parameter's dtype cannot be tried out (it
    knows its parameters): it is given what there is.

    Args:
        optimizer: its parameters are masters with their gradients.
        taken: the combinations that were found to work; added to.

    Raises:
        RuntimeError: names the optimizer, the first parameter and the remedy.
    """
    with leaves.plain():
        for number, group in enumerate(optimizer.param_groups):
            for master in group["params"]:
                if master.grad is None or master.grad.dtype == master.dtype:
                    continue
                combination = (optimizer, number, master.dim(), master.dtype, master.grad.dtype)
                if combination in taken:
                    continue
                error = _trial(optimizer, group, master, master.grad.dtype)
                if error is not None and _trial(optimizer, group, master, master.dtype) is None:
                    slot = getattr(master, leaves.SLOT, lambda: None)()
                    raise RuntimeError(
                        f"{type(optimizer).__name__} cannot update parameter `{slot.name if slot else '?'}`, which is "
                        f"kept in {master.dtype}, from a gradient in {master.grad.dtype} (torch: {error}). Nothing was "
                        "updated. Leave the parameter's `grad_dtype` at its default, or set it (or the strategy's "
                        "`master_dtype`) so that both are the same; or use an optimizer that takes both, such as SGD."
                    ) from error
                taken.add(combination)


@torch.no_grad()
def _trial(optimizer: Optimizer, group: dict[str, Any], master: Tensor, grad_dtype: torch.dtype) -> Exception | None:
    """What the optimizer raises when it updates one element of the master's dtype twice; None: nothing."""
    value = torch.zeros((1,) * master.dim(), dtype=master.dtype, device=master.device)
    value.grad_dtype = grad_dtype
    value.grad = torch.zeros_like(value, dtype=grad_dtype)
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer), param_groups=[group | {"params": [value]}], state=defaultdict(dict))
    step = _plain_step(trial)
    try:
        step()
        step()
    except Exception as error:  # whatever it is, the real step would raise it half-way
        return error
    return None


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
        update, whole = _plain_step(optimizer), type(optimizer) in PER_PARAMETER
        # whole values are communicated: in one order on all ranks, whose forwards may differ
        units = sorted(self._units(), key=lambda unit: unit[0]) if whole else self._units()
        for unit, masters in units:
            mine = [(master, _value(master, whole)) for master in masters if master in group_of]
            if not mine:
                continue
            for group in optimizer.param_groups:
                group["params"] = []
            for master, value in mine:
                optimizer.param_groups[group_of[master]]["params"].append(value)
            self._update(optimizer, mine, update, whole)
            self._updated(unit)

    def _update(
        self, optimizer: Optimizer, mine: list[tuple[Tensor, Tensor]], update: Callable[[], Any], whole: bool
    ) -> None:
        """One unit: the optimizer sees plain tensors, gradients and state; local ones, or the whole ones."""
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
                if not self._keep_gradients:
                    master.grad = None


def _plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The class's ``step`` without the hooks that Optimizer wraps round it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return lambda: step(optimizer)


def _value(value: Any, whole: bool) -> Any:
    if not isinstance(value, DTensor):
        return value
    return value.full_tensor().detach() if whole else value._local_tensor


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
