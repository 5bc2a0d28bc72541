"""Which optimizers can step on sharded parameters, and whether an optimizer can take the dtypes of the gradients.

How they step is in by_unit.py and on_dtensors.py.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_zerocompile.sharding.master import PARAMETER, as_plain_tensors, gradient_of

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
_RAW_POINTERS = ("apex", "bitsandbytes")  # packages whose kernels take addresses; a DTensor has none


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an update of each shard on its own is an update of the parameter.

    Exact types only: a subclass may do anything, and so may what a test has put in the place of their ``step``.
    """
    return type(optimizer) in ELEMENTWISE and inspect.isfunction(type(optimizer).step)


def sees_whole_values(optimizer: Optimizer, named: Sequence[str]) -> bool:
    """Whether the optimizer's kind needs whole parameters, see [Note: whole values].

    ``named``: the user's ``full_param_optimizers``.
    """
    return type(optimizer) in PER_PARAMETER or type(optimizer).__name__ in named


def steps_by_unit(optimizer: Optimizer, named: Sequence[str]) -> bool:
    """Whether the optimizer's parameters are updated unit by unit; any other optimizer sees DTensors.

    ``named``: as for :func:`sees_whole_values`.
    """
    return is_elementwise(optimizer) or sees_whole_values(optimizer, named)


def check_optimizers(optimizers: Sequence[Optimizer], named: Sequence[str]) -> None:
    """Raises if an optimizer cannot work on sharded parameters.

    Args:
        optimizers: all of the model.
        named: the user's ``full_param_optimizers``.

    Raises:
        MisconfigurationException: names the optimizer, the reason and the remedy; or names the entries of ``named``
            that are the class of no optimizer.
    """
    names = [type(optimizer).__name__ for optimizer in optimizers]
    if optimizers and (unknown := [name for name in named if name not in names]):
        raise MisconfigurationException(
            f"`full_param_optimizers` names {unknown}, but the optimizers are {names}; it takes the names of their "
            "classes."
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
            f"do not have. {remedy(optimizer)}"
        )


def remedy(optimizer: Optimizer) -> str:
    return (
        "If it updates each parameter from that parameter's own gradient and state only, let it see whole parameters: "
        f"ZeroCompileStrategy(full_param_optimizers=[{type(optimizer).__name__!r}]). If it mixes parameters (a norm "
        "over all of them), use another optimizer, or strategy='ddp'."
    )


def masters_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def shared_masters(optimizers: Iterable[Optimizer]) -> set[Tensor]:
    """Those that more than one of the optimizers holds now."""
    owners = Counter(master for optimizer in optimizers for master in set(masters_of(optimizer)))
    return {master for master, count in owners.items() if count > 1}


def check_gradients(optimizer: Optimizer, taken: set[tuple[Any, ...]]) -> None:
    """Raises before anything is updated if the optimizer cannot take a gradient of another dtype than its parameter's.

    [Note: trial step] No optimizer declares whether it can take such gradients. So a copy of the optimizer updates one
    element on trial, twice. It begins with a state of zeros if the optimizer is elementwise and has a state. An
    optimizer whose trial fails also with a gradient of the parameter's own dtype cannot be tried out (it depends on its
    real parameters). It is given the gradients as they are.

    Args:
        optimizer: its parameters are masters with their gradients.
        taken: the combinations of optimizer, group and dtypes that need no further trial; this call adds its own.

    Raises:
        RuntimeError: names the optimizer, the first parameter and the remedy.
    """
    with as_plain_tensors():
        for number, group in enumerate(optimizer.param_groups):
            for master in group["params"]:
                grad = gradient_of(master)
                if grad is None or grad.dtype == master.dtype:
                    continue
                combination = (optimizer, number, master.dim(), master.dtype, grad.dtype)
                if combination in taken:
                    continue
                error = _trial(optimizer, group, master, grad.dtype)
                if error is not None and _trial(optimizer, group, master, master.dtype) is None:
                    sharded = getattr(master, PARAMETER, lambda: None)()
                    raise RuntimeError(
                        f"{type(optimizer).__name__} cannot update parameter `{sharded.name if sharded else '?'}`, "
                        f"which is kept in {master.dtype}, from a gradient in {grad.dtype} (torch: {error}). Nothing "
                        "was updated. Leave the parameter's `grad_dtype` at its default, or set it (or the strategy's "
                        "`master_dtype`) so that both are the same; or use an optimizer that takes both, such as SGD."
                    ) from error
                taken.add(combination)


@torch.no_grad()
def _trial(optimizer: Optimizer, group: dict[str, Any], master: Tensor, grad_dtype: torch.dtype) -> Exception | None:
    """What the optimizer raises when it updates one element of the master's dtype twice; ``None``: nothing."""
    value = _one_element(master)
    value.grad_dtype = grad_dtype
    value.grad = torch.zeros_like(value, dtype=grad_dtype)
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer), param_groups=[group | {"params": [value]}], state=defaultdict(dict))
    if is_elementwise(optimizer) and master in optimizer.state:  # Adagrad's constructor makes it
        trial.state[value] = {name: _one_element(kept, value.device) for name, kept in optimizer.state[master].items()}
    step = plain_step(trial)
    try:
        step()
        step()
    except Exception as error:  # whatever it is, the real step would raise it half-way
        return error
    return None


@torch.no_grad()
def state_dtypes(
    optimizer: Optimizer, group: dict[str, Any], master: Tensor, grad_dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """The dtypes of those states of a master that have its shape, by name: found by an update of one element on trial.

    Args:
        optimizer: an elementwise one.
        group: that of its groups which holds the master.
        master: nothing is written to it.
        grad_dtype: of the gradients with which it will be updated.

    Raises:
        MisconfigurationException: the trial fails; names the optimizer.
    """
    value = _one_element(master)
    value.grad_dtype = grad_dtype
    value.grad = torch.zeros_like(value, dtype=grad_dtype)
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer), param_groups=[group | {"params": [value]}], state=defaultdict(dict))
    if master in optimizer.state:  # Adagrad's constructor makes it
        trial.state[value] = {name: _one_element(kept, value.device) for name, kept in optimizer.state[master].items()}
    try:
        plain_step(trial)()
    except Exception as error:
        raise MisconfigurationException(
            f"{type(optimizer).__name__} cannot update one element on trial (torch: {error}), so it is not known what "
            "it keeps, and offload='optimizer' cannot make room for it. Drop `offload`."
        ) from error
    return {
        name: kept.dtype
        for name, kept in trial.state[value].items()
        if isinstance(kept, Tensor) and kept.shape == value.shape
    }


def _one_element(kept: Any, device: torch.device | None = None) -> Any:
    """Zeros in place of a parameter or of an entry of its state: one element, with the same number of dimensions.

    ``device``: where an update needs a state, which may be in host memory; counters stay where they are.
    """
    if not isinstance(kept, Tensor):
        return kept
    return torch.zeros((1,) * kept.dim(), dtype=kept.dtype, device=device if device and kept.dim() else kept.device)


def plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The class's ``step`` for this optimizer, without the hooks that ``torch.optim.Optimizer`` wraps round it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return lambda: step(optimizer)
