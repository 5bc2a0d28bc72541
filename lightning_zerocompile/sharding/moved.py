"""Parameter objects that are not the model's any more: using one raises, and the error says where the parameter is.

[Note: moved parameters] ``params = list(model.parameters())`` in ``__init__``, or before ``fabric.setup``, has the
parameters that the model had before it was sharded. Masters have taken their places. Whatever is done with an old
object would be lost, and what is read from it would soon be wrong. So its memory is freed, and every use raises. What
does not use its value goes on: it may be compared by identity, and an optimizer may hold it until it is given the
masters, see [Note: optimizers made elsewhere] in optim/taken_over.py. When the model is whole again, the object is an
ordinary parameter, and the model's.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from lightning_zerocompile.sharding.parameter import ShardedParameter

_NAME = "_zerocompile_moved_name"
_RECORD = "_zerocompile_moved_record"  # a weak reference to the parameter's record

_MOVED = (
    "Parameter `{0}`: this object was made before the model was sharded, and the model has another one in its place. "
    "Take it from the module again, in `configure_optimizers`, in a hook or after `fabric.setup`: "
    "`dict(module.named_parameters())['{0}']`. An optimizer that was made before is taken over if "
    "`configure_optimizers` returns it, or `fabric.setup` is given it."
)


class Moved(nn.Parameter):
    """A parameter object that is not the model's, see [Note: moved parameters]."""

    @classmethod
    def __torch_function__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Moved))
        raise RuntimeError(_MOVED.format(found.__dict__[_NAME]))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override, unused-ignore]
        return f"<parameter `{self.__dict__[_NAME]}`, moved>"


skip_code(Moved.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]


def move_away(parameter: nn.Parameter, sharded: ShardedParameter) -> None:
    """Frees the memory of a parameter whose values the master of ``sharded`` has, and lets every use of it raise."""
    parameter.grad = None
    if not parameter.is_meta:
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    parameter.__dict__.update({_NAME: sharded.name, _RECORD: weakref.ref(sharded)})
    parameter.__class__ = Moved


def bring_back(parameter: nn.Parameter, value: Tensor, requires_grad: bool) -> nn.Parameter:
    """Makes what :func:`move_away` has changed an ordinary parameter again, with this value, and returns it."""
    parameter.__class__ = nn.Parameter
    for name in (_NAME, _RECORD):
        del parameter.__dict__[name]
    parameter.data, parameter.requires_grad = value, requires_grad
    return parameter


def record_of_moved(value: Tensor) -> ShardedParameter | None:
    """The record of the parameter in whose place a :class:`Moved` was; None for any other tensor."""
    return value.__dict__[_RECORD]() if isinstance(value, Moved) else None
