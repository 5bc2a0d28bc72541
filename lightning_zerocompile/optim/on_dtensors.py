"""Optimizers that step once, on DTensors.

[Note: other optimizers] An optimizer that is not of torch's own classes (a subclass is not), and that the user has not
named, steps once, on DTensors. With them it computes what it would compute with whole values, also sums over
parameters. If DTensor does not know an operation it raises, and our error names the optimizer. DTensor gets one thing
wrong: ``item()`` (and so ``float()``) of a value that is spread over ranks, such as a norm, is that of the rank's own
part. :class:`ExactScalars` makes it that of the whole value. Such an optimizer is not given whole values unasked: it
would see them unit by unit, and what it computes over all parameters would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_zerocompile.optim.supported import remedy
from lightning_zerocompile.sharding.full_values import full_value


class ExactScalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this mode ``item()`` of a DTensor is that of the whole value, and collective; see [Note: other optimizers]."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor):
            args = (full_value(args[0]),)
        return func(*args, **(kwargs or {}))


@contextmanager
def on_dtensors(
    optimizer: Optimizer, closure: Callable[[], Any], alike: Callable[[], AbstractContextManager[None]]
) -> Iterator[Callable[[], Any]]:
    """Yields the closure to pass to the step of an optimizer that sees DTensors, see [Note: other optimizers].

    Args:
        optimizer: for the message of the error.
        closure: the user's; ours returns its result.
        alike: makes a context that is entered after ``closure``: from there on all ranks do the same.

    Raises:
        RuntimeError: the step used an operation that DTensor does not know; names the optimizer and the remedy.
    """
    stepping = ExitStack()
    inside = False

    def run() -> Any:
        nonlocal inside
        stepping.close()  # an optimizer may run the closure again
        inside = False
        result = closure()
        stepping.enter_context(alike())
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
