"""What a module's attribute gives to eager code instead of a plain parameter: its gathered value, see [Note: masters].

Operations on such a value cost nothing extra: only its attributes are intercepted. A trained parameter that is read
outside of regions gives a :class:`Watched`, which also notices when user code differentiates with respect to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zerocompile.sharding.master import (
    PARAMETER,
    Master,
    as_plain_tensors,
    refuse_hook,
    refuse_input,
    set_data,
    set_memory,
)
from lightning_zerocompile.sharding.moved import Moved, record_of_moved

if TYPE_CHECKING:
    from lightning_zerocompile.sharding.parameter import ShardedParameter


class Unsharded(Tensor):
    """A full value that eager code read from a module, see [Note: masters]."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    # `isinstance(module.weight, nn.Parameter)` is true; what users compile takes a parameter, and no other subclass
    _is_param = True

    @property  # type: ignore[override, misc, unused-ignore]
    def requires_grad(self) -> bool:
        if torch._guards.TracingContext.try_get() is not None:  # Dynamo describes an input: this tensor itself
            return Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined, no-any-return]
        with as_plain_tensors():  # the parameter's `requires_grad`, also under `no_grad`
            return self.__dict__[PARAMETER].master.requires_grad  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.__dict__[PARAMETER].require_grad(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        self.requires_grad = requires_grad
        return self

    @property  # type: ignore[override, misc, unused-ignore]
    def grad(self) -> Tensor | None:
        if torch._guards.TracingContext.try_get() is not None:  # Dynamo describes an input: this tensor itself
            return Tensor.grad.__get__(self)  # type: ignore[union-attr, attr-defined, no-any-return, unused-ignore]
        return self.__dict__[PARAMETER].master.grad  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.__dict__[PARAMETER].master.grad = value

    @property  # type: ignore[override, misc, unused-ignore]
    def data(self) -> Tensor:
        return self._given(Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        set_data(self.__dict__[PARAMETER].master, value)

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:  # `torch.nn.utils.parametrize` does it for `layer.weight = x`
        set_memory(self.__dict__[PARAMETER].master, *args, **kwargs)
        return self

    @property  # type: ignore[override, misc, unused-ignore]
    def is_leaf(self) -> bool:  # type: ignore[override, unused-ignore]
        if torch._guards.TracingContext.try_get() is not None:
            return Tensor.is_leaf.__get__(self)  # type: ignore[attr-defined, no-any-return]
        return True  # so that an optimizer accepts it; `take_masters` then puts the master in its place

    @property  # type: ignore[override, misc, unused-ignore]
    def grad_fn(self) -> Any:  # type: ignore[override, unused-ignore]
        if torch._guards.TracingContext.try_get() is not None:
            return Tensor.grad_fn.__get__(self)  # type: ignore[attr-defined, union-attr, unused-ignore]
        return None  # as of a leaf, so that a parametrization may hold it as its parameter

    @property  # type: ignore[override, misc, unused-ignore]
    def grad_dtype(self) -> torch.dtype | None:
        return self.__dict__[PARAMETER].master.grad_dtype  # type: ignore[no-any-return]

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype | None) -> None:
        self.__dict__[PARAMETER].master.grad_dtype = value

    def __getattr__(self, name: str) -> Any:  # for what a tensor has not, see [Note: attributes of parameters]
        sharded = self.__dict__.get(PARAMETER)
        attributes = {} if sharded is None else sharded.master.__dict__
        if name not in attributes:
            raise AttributeError(f"Parameter `{'?' if sharded is None else sharded.name}` has no attribute '{name}'.")
        return attributes[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name) or name.startswith("_dynamo"):  # by `mark_dynamic`, of this tensor
            super().__setattr__(name, value)
        else:
            self.__dict__[PARAMETER].set_attribute(name, value)

    def __delattr__(self, name: str) -> None:
        if hasattr(type(self), name):
            super().__delattr__(name)
        else:
            self.__dict__[PARAMETER].delete_attribute(name)

    def detach(self) -> Tensor:
        return self._given(super().detach())

    def _given(self, value: Tensor) -> Tensor:
        """Notes that user code got ``value``, which shares this memory, if other values of the parameter come there."""
        sharded: ShardedParameter = self.__dict__[PARAMETER]
        if not sharded.lives_for_a_use:
            sharded.give_out(value)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call, unused-ignore]

    def register_hook(self, hook: Callable[..., Any]) -> NoReturn:
        refuse_hook(self.__dict__[PARAMETER].master)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        return self.__dict__[PARAMETER].master.register_post_accumulate_grad_hook(hook)


class Watched(Unsharded):
    """A gathered value that was read outside of regions, where user code may differentiate with respect to it.

    A read after the forward gives a new value, on which nothing depends. torch would silently give no gradient for it,
    so this raises.
    """

    @classmethod
    def __torch_function__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, (Master, Moved)) for kind in types):
            return NotImplemented
        with as_plain_tensors():
            if func is torch.autograd.grad:
                _refuse_unused(args[1])
            elif func is torch.autograd.backward and kwargs:
                _refuse_inputs(kwargs.get("inputs"))
            return func(*args, **(kwargs or {}))


skip_code(Watched.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]


def as_unsharded(value: Tensor, sharded: ShardedParameter, watched: bool = False) -> Tensor:
    """Makes ``value``, a new tensor from the runtime, what user code sees of the parameter, and returns it.

    ``watched``: whether to make it a :class:`Watched`.
    """
    value.__dict__[PARAMETER] = sharded
    value.__class__ = Watched if watched else Unsharded
    return value


skip_code(as_unsharded.__code__)  # as for the getter that calls it, Dynamo must not compile it as a frame of its own


def plain_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of compiled code with views that are ordinary tensors in the place of gathered values.

    Code that torch has traced takes no tensors of other classes; the interception of a :class:`Watched` would be traced
    in vain.
    """
    if all(type(value) is Tensor for value in args) and not kwargs:
        return args, kwargs
    if not any(isinstance(leaf, Unsharded) for leaf in tree_leaves((args, kwargs))):
        return args, kwargs
    plain: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(_plain, (args, kwargs))
    return plain


def _plain(value: Any) -> Any:
    if not isinstance(value, Unsharded):
        return value
    with as_plain_tensors():
        return value.view_as(value)


def master_of(value: Tensor) -> Tensor:
    """The master of a gathered value, or of a parameter from before the sharding; any other tensor as it is."""
    if (sharded := record_of_moved(value)) is not None:
        return sharded.master
    return value.__dict__[PARAMETER].master if isinstance(value, Unsharded) else value


def sharded_of(value: Tensor) -> ShardedParameter | None:
    """The parameter of a master or of a gathered value; None for any other tensor."""
    if isinstance(value, Master):
        return value.__dict__[PARAMETER]()  # type: ignore[no-any-return]
    return value.__dict__[PARAMETER] if isinstance(value, Unsharded) else None


def _refuse_inputs(inputs: Any) -> None:
    for value in tree_leaves(inputs):
        if isinstance(value, Unsharded):
            refuse_input(value.__dict__[PARAMETER])


def _refuse_unused(inputs: Any) -> None:
    for value in tree_leaves(inputs):
        if isinstance(value, Unsharded) and value.__dict__[PARAMETER].never_used(value):
            raise RuntimeError(
                f"`torch.autograd.grad` with respect to parameter `{value.__dict__[PARAMETER].name}`, which was read "
                "again from a sharded module: that is a new value each time, and nothing was computed from this one. "
                "Differentiate with respect to the value that you used, or call `backward` and read `grad`."
            )
