"""Random numbers drawn into parameters.

[Note: random numbers] If each rank drew only its own rows, equal seeds would give all ranks the same rows. So each rank
draws all rows, as under DDP, and keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from lightning_zerocompile.sharding.parameter import ShardedParameter

_IN_PLACE = frozenset(
    {"normal_", "uniform_", "random_", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"}
)
_LIKE = frozenset({"randn_like", "rand_like", "randint_like"})
DRAWN_IN_SHAPE = _IN_PLACE | _LIKE  # in the shape of their first argument, which they do not read
_OF = frozenset({"bernoulli", "normal", "poisson", "multinomial", "dropout", "dropout_", "alpha_dropout"})
_SCRATCH = frozenset({"empty_like", "new_empty"})  # where those schemes of torch.nn.init draw that need several draws


def are_drawn(func: Any, name: str) -> bool:
    """Whether the function called ``name`` draws random numbers."""
    return getattr(func, "__module__", None) == "torch.nn.init" or name in _IN_PLACE or name in _LIKE or name in _OF


def scheme(name: str, caller: FrameType) -> str:
    """The scheme of torch.nn.init that is about to draw into scratch memory in a master's shape; "": there is none."""
    if name not in _SCRATCH or caller.f_globals.get("__name__") != "torch.nn.init":
        return ""
    return caller.f_code.co_name.removeprefix("_no_grad_")


def refuse(name: str, sharded: ShardedParameter | None) -> None:
    """Refuses to let a function ``name`` draw random numbers for a shard alone.

    Raises:
        RuntimeError: names the parameter and the remedy. If ``sharded`` is None nothing is raised.
    """
    if sharded is not None:
        raise RuntimeError(
            f"`{name}` draws random numbers for parameter `{sharded.name}`, of which this rank holds a shard. Give it "
            "the module's attribute, or do it inside `with strategy.full_parameters(module) as values:`: both are full."
        )


def draw(
    func: Any,
    name: str,
    masters: Sequence[Tensor],
    sharded: ShardedParameter | None,
    whole: Callable[[Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls ``func``, which draws random numbers, see [Note: random numbers].

    Args:
        func: the function.
        name: its name, see :func:`are_drawn`.
        masters: the masters among the arguments.
        sharded: the parameter of the first master; ``None``: its strategy is torn down.
        whole: returns the full value of a master, and anything else as it is.
        args, kwargs: the arguments of ``func``.

    Returns:
        The function's result; where it writes to a master, that master.

    Raises:
        RuntimeError: the numbers depend on a master's values, and outside a step there are no full values.
    """
    if sharded is None:
        return func(*args, **kwargs)
    if name in _OF or len(masters) > 1:
        if sharded.step_state.in_step:
            return func(*tree_map(whole, args), **tree_map(whole, kwargs))
        refuse(name, sharded)
    (master,) = masters
    full = torch.empty(master.shape, dtype=master.dtype, device=master.device)
    args, kwargs = tree_map(lambda leaf: full if leaf is master else leaf, (args, kwargs))
    drawn = func(*args, **kwargs)
    if name in _LIKE:
        return drawn if sharded.step_state.in_step else sharded.like_master(drawn)
    with torch.no_grad():
        master.copy_(sharded.like_master(full))
    torch.autograd.graph.increment_version(sharded.master)  # `master` may be its `data`
    return master
