"""Parameters from before the sharding that user code still holds: each stands for its master.

[Note: held parameters] ``self.weights = list(self.parameters())`` in ``__init__``, or ``params = list(
model.parameters())`` before ``fabric.setup``, has the parameters that the model had before it was sharded. Under DDP
they are the parameters all the time, so one may clip, freeze, clamp or average them, and use them in a loss. Here the
masters have taken their place. So each object that somebody still holds becomes a :class:`Held`: what is done with it
is done with its master. It has no memory of its own, or the whole model would stay on every rank. Lists and sets of
``id``s know the object, so ``configure_optimizers`` gets it from ``parameters()`` and from attributes, and hooks on
parameters are called with it. Where user code has a weak reference to a parameter, the object is kept alive. When the
model is whole again it is an ordinary parameter, and the model's. After a run that has failed it is nobody's, and using
it raises.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import unserializable_hook

from lightning_zerocompile.sharding.master import PARAMETER, PASSED, as_plain_tensors

if TYPE_CHECKING:
    from lightning_zerocompile.sharding.parameter import ShardedParameter

_REFUSES = "_zerocompile_refuses"  # what removes the hook of :func:`_refusal`


class Held(nn.Parameter):
    """A parameter from before the sharding, see [Note: held parameters]."""

    @classmethod
    def __torch_function__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._guards.TracingContext.try_get() is not None:  # Dynamo describes an input: this tensor itself
            with as_plain_tensors():
                return func(*args, **kwargs)
        held = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Held)]
        args, kwargs = tree_map(master_of_held, (args, kwargs))
        result = func(*args, **kwargs)
        return next((one for one in held if master_of_held(one) is result), result)  # an operation in place returns it

    # what torch does not hand to `__torch_function__`, or not as the master has it

    @property  # type: ignore[override, misc, unused-ignore]
    def grad(self) -> Tensor | None:
        if torch._guards.TracingContext.try_get() is not None:
            return Tensor.grad.__get__(self)  # type: ignore[union-attr, attr-defined, no-any-return, unused-ignore]
        return master_of_held(self).grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        master_of_held(self).grad = value

    @grad.deleter
    def grad(self) -> None:
        master_of_held(self).grad = None

    def tolist(self) -> Any:
        return master_of_held(self).tolist()

    def apply_(self, callable: Callable[[Any], Any]) -> Tensor:
        master_of_held(self).apply_(callable)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override, unused-ignore]
        return repr(master_of_held(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(master_of_held(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return master_of_held(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call, unused-ignore]


skip_code(Held.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]


def hold(sharded: ShardedParameter) -> None:
    """Lets the parameter from before the sharding stand for its master, if somebody holds it."""
    original = sharded.original()
    if type(original) is not nn.Parameter:
        return
    if not original.is_meta:  # optimizers group by device and dtype below Python
        one = torch.zeros((), dtype=sharded.master.dtype, device=sharded.master.device)
        original.data = one.expand(original.shape)
    if original.is_floating_point() or original.is_complex():
        original.requires_grad = True  # user code may train later what it has frozen now
        original.__dict__[_REFUSES] = original.register_hook(_refusal(weakref.ref(original)))  # type: ignore[no-untyped-call]
    original.__dict__[PARAMETER] = weakref.ref(sharded)
    original.__class__ = Held


def _refusal(held: weakref.ref[nn.Parameter]) -> Callable[[Tensor], None]:
    """A hook for a gradient that autograd computes for the object itself. Its master would not get it."""

    @unserializable_hook  # type: ignore[untyped-decorator, unused-ignore]
    def refuse(grad: Tensor) -> None:
        found = held()
        if found is not None and master_of_held(found).requires_grad:
            raise RuntimeError(PASSED.format(found.__dict__[PARAMETER]().name))

    return refuse  # type: ignore[no-any-return, unused-ignore]


def user_object(sharded: ShardedParameter) -> nn.Parameter:
    """What user code takes for the parameter: the object that it holds from before the sharding, or the master."""
    original = sharded.original()
    return original if isinstance(original, Held) else sharded.master


def let_go(held: Held, value: Tensor, requires_grad: bool) -> nn.Parameter:
    """Makes what :func:`hold` has changed an ordinary parameter again.

    Args:
        held: the object, which is also what this returns.
        value: its values from now on, [*size], in its dtype.
        requires_grad: whether it is trained.
    """
    parameter: nn.Parameter = held
    parameter.__class__ = nn.Parameter
    del parameter.__dict__[PARAMETER]
    if (refuses := parameter.__dict__.pop(_REFUSES, None)) is not None:
        refuses.remove()
    parameter.data, parameter.grad, parameter.requires_grad = value, None, requires_grad
    return parameter


def part(sharded: ShardedParameter) -> None:
    """The parameter is replaced, or the run has failed: what :func:`hold` has changed stands for no master any more."""
    original = sharded.original()
    if isinstance(original, Held):
        original.__dict__[PARAMETER] = _nobody


def _nobody() -> None:
    """In the place of a reference to a parameter's record."""


def master_of_held(value: Tensor) -> Tensor:
    """The master that a :class:`Held` stands for; anything else as it is.

    Raises:
        RuntimeError: it stands for none any more.
    """
    if not isinstance(value, Held):
        return value
    sharded: ShardedParameter | None = value.__dict__[PARAMETER]()
    if sharded is None:
        with as_plain_tensors():
            shape = tuple(value.shape)
        raise RuntimeError(
            f"A parameter of shape {shape} from before the model was sharded is used, and it is no parameter of the "
            "model any more: another one was put in its place, or the run has failed. Take `parameters()` of the "
            "module; after a failure build the model anew."
        )
    return sharded.master
