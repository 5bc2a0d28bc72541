"""Integers and booleans that a step without data still knows.

[Note: known numbers] Models look at numbers: whether a mask is all true, how long a sequence is, where one text of a
packed row ends. Their answers change what is computed (a model of transformers that cannot see that its mask hides
nothing makes a full mask, and attention is then slower and keeps more). Such numbers follow from the batch and from
constants, not from parameters. So tensors of integers and booleans are computed in a fake step (see [Note: fake step])
as long as they come from others of this kind. Numbers that come from floating-point tensors are not known, nor random
ones, and none that are too large to compute on the way.

A tensor that something unknown was written to is not known any more. What the step has not made itself, such as a
counter that a member of the module holds, is read and never written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

LARGEST = 2**26  # elements
_ASK_FOR_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def is_knowable(tensor: Tensor) -> bool:
    """Whether numbers of this kind and size are computed, see [Note: known numbers]."""
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return whole and tensor.layout is torch.strided and tensor.numel() <= LARGEST


class UnknownNumbers(RuntimeError):
    """A step reads numbers that only data has."""


class Pausable(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """A dispatch mode that can be told to do nothing of its own for a while."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, it does nothing of its own."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


class KnownNumbers(Pausable):
    """Computes what [Note: known numbers] says; to be entered inside ``mode``."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._reads = _Reads(self)
        self._own: Any = WeakIdKeyDictionary()  # storages that may be written to
        self._unknown: Any = WeakIdKeyDictionary()  # storages with data that does not count any more

    def __enter__(self) -> KnownNumbers:
        super().__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        self._reads.__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def __exit__(self, *error: Any) -> None:
        self._reads.__exit__(*error)  # type: ignore[no-untyped-call, unused-ignore]
        super().__exit__(*error)  # type: ignore[no-untyped-call, unused-ignore]

    def take(self, tensor: Tensor) -> Tensor:
        """Lets the step write to this tensor; returns it."""
        self._own[tensor.untyped_storage()] = True
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = _runs_here(func, kwargs, tensors) and not any(map(self.is_unknown, tensors))
        written = [tensor for tensor in _written(func, args, kwargs) if _has_data(tensor)]
        if written:
            if known and all(tensor.untyped_storage() in self._own for tensor in written):
                with unset_fake_temporarily():
                    result = func(*args, **kwargs)
                for tensor in written:
                    self.take(tensor)  # it may have another storage now
                return result
            for tensor in written:
                self._unknown[tensor.untyped_storage()] = True
            return self._without_data(func, args, kwargs)
        if not known:
            unknown = any(map(self.is_unknown, tensors))
            return self._without_data(func, args, kwargs) if unknown else func(*args, **kwargs)
        asks = any(tag in func.tags for tag in _ASK_FOR_DATA)  # without data that leaves symbols behind
        if not asks:
            result = self._without_data(func, args, kwargs)
            if not all(is_knowable(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
                return result
        try:
            with unset_fake_temporarily():
                computed = func(*args, **kwargs)
        except Exception:  # a batch may have the right sizes alone: its zeros are in no table
            return self._without_data(func, args, kwargs)
        made = func is torch.ops.aten.lift_fresh.default  # of a constant that has just been made
        given = [] if made else [tensor.untyped_storage() for tensor in tensors]
        for leaf in tree_leaves(computed):
            if isinstance(leaf, Tensor) and not any(leaf.untyped_storage() is storage for storage in given):
                self.take(leaf)
        return computed

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether its data does not count any more."""
        return _has_data(tensor) and tensor.untyped_storage() in self._unknown

    def _without_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Of operators on numbers FakeTensorMode itself runs some with data, so it is given none."""

        def fake(tensor: Tensor) -> Tensor:
            return self._mode.from_tensor(tensor, static_shapes=True) if _has_data(tensor) else tensor

        args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
        return func(*args, **kwargs)


class _Reads(TorchFunctionMode):
    """What reads a tensor's memory without an operator gets no data that does not count any more."""

    def __init__(self, known: KnownNumbers) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and self._known.is_unknown(args[0]):
            raise UnknownNumbers(f"`{func.__name__}` reads numbers that are not known.")
        return func(*args, **(kwargs or {}))


def _has_data(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def _runs_here(func: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    """Whether an operator's result can be computed on the CPU from what it is called with."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    return all(map(_has_data, tensors))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
