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
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

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
_TAKES_ANY_STATE = (optim.Adam, optim.AdamW)  # fused; SGD's takes only parameters that all have a momentum, or none
_TOGETHER = 2**25  # elements: a device updates fewer in less time than the host needs for a call of the optimizer
_RAW_POINTERS = ("apex", "bitsandbytes")  # packages whose kernels take addresses, and of a DTensor would get none


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether updating a shard on its own is updating the parameter (exact types: a subclass may do anything)."""
    return type(optimizer) in ELEMENTWISE


def sees_whole_values(optimizer: Optimizer, named: Sequence[str]) -> bool:
    """Whether it steps on whole parameters, see [Note: whole values]; ``named``: the user's ``whole_values``."""
    return type(optimizer) in PER_PARAMETER or type(optimizer).__name__ in named


def steps_by_unit(optimizer: Optimizer, named: Sequence[str]) -> bool:
    """Whether its parameters are updated unit by unit; any other optimizer sees DTensors."""
    return is_elementwise(optimizer) or sees_whole_values(optimizer, named)


def check_optimizers(optimizers: Sequence[Optimizer], named: Sequence[str]) -> None:
    """Raises if an optimizer cannot work on sharded parameters.

    Raises:
        MisconfigurationException: names the optimizer, the reason and the remedy; or a name in ``whole_values`` that is
            no optimizer's.
    """
    names = [type(optimizer).__name__ for optimizer in optimizers]
    if optimizers and (unknown := [name for name in named if name not in names]):
        raise MisconfigurationException(
            f"`whole_values` names {unknown}, but the optimizers are {names}; it takes the names of their classes."
        )
    for optimizer in optimizers:
        _check_optimizer(optimizer, named)


def _check_optimizer(optimizer: Optimizer, named: Sequence[str]) -> None:
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise MisconfigurationException(
                f"The optimizer {type(optimizer).__name__} does not work with `strategy='zerocompile'`: {reason}. Use "
                "another optimizer (torch.optim.AdamW, SGD, Muon, ...), or strategy='ddp'."
            )
    packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if not steps_by_unit(optimizer, named) and not packages.isdisjoint(_RAW_POINTERS):
        raise MisconfigurationException(
            f"The optimizer {type(optimizer).__name__} takes the addresses of its tensors, which row shards (DTensors) "
            f"do not have. {_remedy(optimizer)}"
        )


def _remedy(optimizer: Optimizer) -> str:
    return (
        "If it updates each parameter from that parameter's own gradient and state only, let it see whole parameters: "
        f"ZeroCompileStrategy(whole_values=[{type(optimizer).__name__!r}]). If it mixes parameters (a norm over all of "
        "them), use another optimizer, or strategy='ddp'."
    )


def masters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def take_masters(number: int, optimizer: Optimizer) -> None:
    """An optimizer of `module.weight` holds a gathered value: its master takes the place."""
    for group in optimizer.param_groups:
        group["params"] = [leaves.master_of(p) for p in group["params"]]
    masters = masters_of(optimizer)
    if len(set(masters)) < len(masters):
        raise RuntimeError(
            f"Optimizer {number} ({type(optimizer).__name__}) holds a parameter more than once: from `parameters()` "
            "and as a module's attribute. Give it to the optimizer once."
        )


class ExactScalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In here ``item()`` of a DTensor is that of the whole value, see [Note: other optimizers]; then collective."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor):
            args = (args[0].full_tensor(),)
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
            f"{type(optimizer).__name__}.step() failed on row shards (DTensors): {error} {_remedy(optimizer)}"
        ) from error


def check_gradients(optimizer: Optimizer, taken: set[tuple[Any, ...]]) -> None:
    """Raises before anything moves if the optimizer cannot take a gradient of another dtype than its parameter's.

    [Note: trial step] Which optimizers can is nowhere declared, so one element is updated on trial, by a copy of the
    optimizer, with a state of zeros where it is torch's own and has one. One that fails also on a gradient of the
    parameter's dtype cannot be tried out (it knows its parameters): it is given what there is.

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
    value = _one_element(master)
    value.grad_dtype = grad_dtype
    value.grad = torch.zeros_like(value, dtype=grad_dtype)
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer), param_groups=[group | {"params": [value]}], state=defaultdict(dict))
    if is_elementwise(optimizer) and master in optimizer.state:  # Adagrad's constructor makes it
        trial.state[value] = {name: _one_element(kept) for name, kept in optimizer.state[master].items()}
    step = _plain_step(trial)
    try:
        step()
        step()
    except Exception as error:  # whatever it is, the real step would raise it half-way
        return error
    return None


def _one_element(kept: Any) -> Any:
    """Zeros for a parameter, or for what is kept of it: one element with as many dimensions."""
    if not isinstance(kept, Tensor):
        return kept
    return torch.zeros((1,) * kept.dim(), dtype=kept.dtype, device=kept.device)


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
        update, whole = _plain_step(optimizer), sees_whole_values(optimizer, self._whole_values)
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
