"""Integers and booleans that a step without data still knows.

[Note: known numbers] Models look at numbers: whether a mask is all true, how long a sequence is, where one text of a
packed row ends. Their answers change what is computed (a model of transformers that cannot see that its mask hides
nothing makes a full mask, and attention is then slower and keeps more). Such numbers follow from the batch and from
constants, not from parameters. So tensors of integers and booleans are computed in a fake step (see [Note: fake step])
as long as they come from others of this kind. Numbers that come from floating-point tensors are not known, nor random
ones, and none that are too large to compute on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGEST = 2**26  # elements


def is_knowable(tensor: Tensor) -> bool:
    """Whether numbers of this kind and size are computed, see [Note: known numbers]."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.numel() <= LARGEST


class KnownNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Computes what [Note: known numbers] says; to be entered inside a ``FakeTensorMode``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is computed."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or not _has_all(func, args, kwargs):
            return func(*args, **kwargs)
        if not any(tag in func.tags for tag in _ASK_FOR_DATA):  # without data that leaves symbols behind
            without_data = func(*args, **kwargs)
            if not all(is_knowable(leaf) for leaf in tree_leaves(without_data) if isinstance(leaf, Tensor)):
                return without_data
        with unset_fake_temporarily():
            return func(*args, **kwargs)


_ASK_FOR_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def _has_all(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator's result can be computed on the CPU from what it is called with."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return all(not isinstance(leaf, FakeTensor) and leaf.device.type == "cpu" for leaf in tensors)
