"""One parameter of the model: its master, and how module code reads its full value."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.distributed.tensor import DTensor

from lightning_zerocompile.ranks.consistency import Reads
from lightning_zerocompile.sharding.layout import over_local, shard_like
from lightning_zerocompile.sharding.master import (
    as_plain_tensors,
    bind_gradient,
)
from lightning_zerocompile.sharding.sharded import as_sharded, when_zeroed
from lightning_zerocompile.sharding.unsharded import Unsharded, Watched, as_unsharded

FUNCTORCH = (
    "A torch.func transform (grad, vmap, jvp, ...) meets {} of a sharded module, which it cannot differentiate. Give "
    "it full values: `with strategy.full_parameters(module, writeback=False) as values:` and inside "
    "`torch.func.functional_call(module, values, ...)`."
)


@dataclass
class StepState:
    """Whether the user's step runs (the optimizer's is none), and how many regions have been entered."""

    in_step: bool = False
    depth: int = 0


@dataclass(eq=False)
class ShardedParameter:
    """One parameter of the model: its master, and how module code reads its full value.

    Tied parameters share one of these.
    """

    name: str  # fully qualified, the first of a tied group
    index: int  # in the C++ runtime
    size: tuple[int, ...]
    master: nn.Parameter
    source: Tensor  # of the traced gather: the resident full value, or an empty tensor of its dtype and device
    handle: Tensor  # [1] float64 on CPU, requires grad; its value is the identity
    frozen_handle: Tensor  # the same identity, requires no grad
    use_grad_dtype: torch.dtype | None  # what each use's gradient is cast to; None: it stays as it is produced
    core: Any  # the C++ runtime
    reads: Reads  # compares the ranks before a number of it is read
    step_state: StepState
    never_used: Callable[[Tensor], bool]  # whether autograd has recorded nothing on a value
    dtype: torch.dtype  # of the parameter before it was sharded, and again when it is whole
    grad_dtype: torch.dtype | None  # likewise; ``None``: of each gradient's own

    def read(self, current: nn.Parameter | None, cast: torch.dtype | None = None) -> Tensor | None:
        """The full value, ``size``, or ``current`` itself if somebody replaced the master (``functional_call``).

        ``cast``: in that dtype, for code that computes with nothing else and hands it to nobody.
        """
        if current is not self.master:
            return current
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(FUNCTORCH.format(f"parameter `{self.name}`"))
        with as_plain_tensors():
            requires_grad = self.master.requires_grad
        value: Tensor = self.core.read(self.index, self.handle, requires_grad, cast)
        if cast is not None:
            return value
        watched = requires_grad and self.step_state.depth == 0
        return as_unsharded(value, self, watched)

    def traced(self) -> tuple[Tensor, Tensor, tuple[int, ...], torch.dtype | None]:
        """What the compiler sees: a handle that requires grad exactly when the parameter does now."""
        handle = self.handle if self.master.requires_grad else self.frozen_handle
        return self.source, handle, self.size, self.use_grad_dtype

    def require_grad(self, value: bool) -> None:
        """Freezes or unfreezes the parameter, from the next forward on."""
        self.master.requires_grad_(value)

    def bind_gradient(self, local: Tensor) -> Tensor:
        """Makes ``local``, this rank's rows of the reduced gradient, the master's ``grad``.

        See [Note: unread gradients] in csrc/gradients.cpp.
        """
        grad = self._over(local)
        with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
            bind_gradient(self.master, grad)
        self.core.bound(self.index, grad, grad._local_tensor)
        return grad

    def own_gradient(self, value: Tensor, kind: str) -> Tensor:
        """What ``grad`` is of the master, which has none bound.

        Args:
            value: that the runtime has, and ``kind``, the name of its ``Unbound``: "REDUCED", this rank's rows, which
                become the master's ``grad``; "SUM", this rank's own full sum, [*size]; "EARLY", this rank's rows of
                what a window has reduced already.
        """
        if kind == "REDUCED":
            return self.bind_gradient(value)
        return value if kind == "SUM" else self._over(value)

    def _over(self, local: Tensor) -> DTensor:
        """A gradient of the master over the memory of ``local``, this rank's rows.

        [Note: zeroed gradients] Inside a window ``grad`` is what was there before. What waits to be added to it is not
        in its memory. So who makes the gradient zero in place (``zero_grad(set_to_none=False)``) drops that, too.
        """
        with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
            grad: DTensor = as_sharded(over_local(local, self.master), self.reads)
            when_zeroed(grad, weakref.WeakMethod(self._drop_waiting))
        return grad

    def _drop_waiting(self) -> None:
        self.core.drop_waiting(self.index)

    def like_master(self, value: Any) -> Any:
        """A full tensor of the parameter's size as this rank's shard of it; anything else as it is."""
        if (
            type(value) in (Tensor, nn.Parameter, Unsharded, Watched)
            and value.dim() > 0
            and value.shape == self.master.shape
        ):
            return shard_like(value, self.master, value.dtype)
        return value


skip_code(ShardedParameter.read.__code__)
