"""Activations in host memory, from a block's forward to its backward.

[Note: activation offload] What a repeated block saves for its backward is copied to pinned host memory while the next
block runs, and comes back while the backward of the block after it runs. It is what autograd would keep: all that an
eager block saves, what torch's partitioner has chosen for a compiled one, the inputs of one that runs again. It passes
through torch's hooks for saved tensors. Gathered values never do: their identity is saved (see [Note: saved tensors] in
csrc/saved.cpp). Copies out and copies in have a stream each. At the end of a block's forward the compute waits for the
copies of the block before it. So the device holds what two blocks have saved, however slow the link is. In the backward
the first tensor of a block that is asked for brings in all that this block has saved, and starts the copies of the
block before it.

A tensor stays on the device if it is small (``least``), if its memory is a part of something larger, or if a third
block saves it while somebody else still holds it (a mask, a table of positions). Of two blocks that follow each other,
the output of one and the input of the next, there is one copy.

torch checks that a saved tensor was not written to in place, and with hooks it does not. Here a write while the copy is
on its way raises in the backward, as without the offload. After that the copy is a value of its own.

A torch.func transform allows no hooks. So a block inside one is not offloaded, and a block that uses one itself cannot
be: at stages 1 and 2, too, it raises, as a block of stage 3 does without the offload.

torch's own offload (``torch._functorch._activation_offloading``) works inside one graph. It has no copy on its way when
a block's graph ends, and it leaves inputs on the device, which with recomputed blocks are all that there is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

LEAST = 2**20  # bytes: copying less costs the host more than it saves
_hooks = torch._C._autograd
_Other = TypeVar("_Other")  # what stands for a saved tensor that stays
_View: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # how a tensor sees its storage

_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of sizes "
    "{} that a block had saved was written to while `activation_offload` copied it to host memory. Write to a copy "
    "(`x = x + 1` instead of `x += 1`)."
)
_NO_ROOM = (
    "`activation_offload` got no host memory for {} bytes ({:.2f} GiB) of activations: {}. Save less "
    "(recompute='blocks' or recompute=1, shorter sequences), or drop the option."
)


def run_again(forward: Callable[..., Any], restores: bool, /, *args: Any, **kwargs: Any) -> Any:
    """``forward``, which keeps its inputs only and runs again in the backward. torch's checkpoint has autograd save
    positional tensors, and would hold the others itself, where no hook for saved tensors sees them.

    ``restores``: whether the random state of the first run is restored for the second one.
    """
    names = tuple(kwargs)

    def named(*values: Any) -> Any:
        count = len(values) - len(names)
        return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return checkpoint(named, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=restores)


@contextmanager
def without_hooks(some: Callable[[object], bool] = lambda pack: True) -> Iterator[None]:
    """Inside, the innermost hooks for saved tensors do not run: those for whose pack hooks ``some`` is true."""
    taken = []
    while (top := _hooks._top_saved_tensors_default_hooks(False)) is not None and some(top[0]):
        taken.append(top)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(taken):
            _hooks._push_saved_tensors_default_hooks(*pair)


class _Kept:
    """A saved tensor that goes to host memory.

    Args:
        value: the tensor, [*size].
        host: its copy, once ``gone`` has happened.
        gone: when the copy is there; ``None``: it is there now.
        home: the stream that ``value`` was used on when it was saved; ``None`` on the CPU.

    Attributes:
        value: on the device; ``None``: it is in host memory only.
        came: when ``value`` is there; ``None``: now.
        home: as above; of a value that came back, the stream that it was allocated on.
        packed: what autograd holds of it.
        version: of the tensor when it was saved.
        written: whether somebody has written to it before the copy was there.
        shape: of the tensor, for messages.
    """

    def __init__(
        self, value: Tensor, host: Tensor, gone: torch.cuda.Event | None, home: torch.cuda.Stream | None
    ) -> None:
        self.value: Tensor | None = value
        self.host, self.gone, self.home = host, gone, home
        self.came: torch.cuda.Event | None = None
        self.packed: list[weakref.ref[_Packed]] = []
        self.version, self.written, self.shape = value._version, False, tuple(value.shape)

    def is_wanted(self) -> bool:
        """Whether autograd may still ask for it."""
        return any(packed() is not None for packed in self.packed)

    def check(self, value: Tensor) -> None:
        self.written = self.written or value._version != self.version


class _Group:
    """What one run of a block has saved.

    Attributes:
        kept: its tensors, as long as the backward still needs them.
        brought: the number of the backward in which they were brought back to the device; 0: none.
        before: the group of the block that ran before.
    """

    def __init__(self, before: _Group | None) -> None:
        self.kept: list[weakref.ref[_Kept]] = []
        self.brought = 0
        self.before: weakref.ref[_Group] | None = None if before is None else weakref.ref(before)

    def wanted(self) -> list[_Kept]:
        return [kept for one in self.kept if (kept := one()) is not None and kept.is_wanted()]


class _Packed:
    """What autograd holds in the place of a saved tensor."""

    def __init__(self, kept: _Kept, group: _Group) -> None:
        self.kept, self.group = kept, group


class Pack:
    """The pack hook of one run of a block. Its class tells it from hooks of others."""

    def __init__(self, pack: Callable[[Tensor, _Group], object], group: _Group) -> None:
        self._pack, self._group = pack, group

    def __call__(self, tensor: Tensor) -> object:
        return self._pack(tensor, self._group)


class ActivationOffload(Generic[_Other]):
    """Takes what blocks save to host memory and back, see [Note: activation offload].

    Args:
        device: where the model computes.
        is_kept: whether a tensor stays on the device in any case.
        pack, unpack: hooks for what stays; they are also those of others around a block that do not stop an offload.
        least: tensors of fewer bytes stay on the device.

    Attributes:
        least: as above.
        bytes_out, bytes_in: how much was copied to host memory, and back.
    """

    def __init__(
        self,
        device: torch.device,
        is_kept: Callable[[Tensor], bool],
        pack: Callable[[Tensor], _Other],
        unpack: Callable[[_Other], Tensor],
        least: int = LEAST,
    ) -> None:
        self._device, self._is_kept, self.least = device, is_kept, least
        self._others = pack, unpack
        self._known: Any = WeakIdKeyDictionary()  # by storage: {_View: a weak reference to the _Kept}
        self._leaving: list[list[_Kept]] = []  # by run of a block, the last two at most: what may be on its way out
        self._coming: dict[_Kept, _Group] = {}  # what comes back and was not asked for yet, and for which group
        self._last: weakref.ref[_Group] | None = None
        self._backward = 1  # the number of the one that runs, or comes next
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self.bytes_out = self.bytes_in = 0

    # ---- forward ----

    @contextmanager
    def block(self) -> Iterator[None]:
        """Around one run of a block. Inside another block, inside hooks of the user's, and inside a torch.func
        transform, which allows no hooks, it does nothing."""
        top = _hooks._top_saved_tensors_default_hooks(False)
        others = top is not None and top[0] != self._others[0]
        allowed = _hooks._saved_tensors_hooks_get_disabled_error_message() is None
        if not torch.is_grad_enabled() or others or not allowed:
            yield
            return
        self._send_back()
        before = None if self._last is None else self._last()
        group, leaving = _Group(before), list[_Kept]()
        self._leaving.append(leaving)
        with torch.autograd.graph.saved_tensors_hooks(Pack(self._pack, group), self._unpack):
            yield
        self._last = weakref.ref(group)
        self._retire(1)

    def settle(self) -> None:
        """Called after a backward: what is on its way out of other graphs frees the device's memory, and so does what
        came of them. If a graph was retained, its next backward brings all of it again."""
        self.close()
        self._backward += 1

    def close(self) -> None:
        """Frees all memory of the device that nobody has asked back."""
        self._retire(0)
        self._send_back()

    def _pack(self, tensor: Tensor, group: _Group) -> _Packed | _Other:
        if not self._goes(tensor) or self._is_kept(tensor):
            return self._others[0](tensor)
        storage, view = tensor.untyped_storage(), (tensor.dtype, tensor.shape, tensor.stride())
        views: dict[_View, weakref.ref[_Kept]] = self._known.setdefault(storage, {})
        reference = views.get(view)
        kept = None if reference is None else reference()
        if kept is not None and kept.version == tensor._version:
            if kept.value is None or kept in self._coming:  # its copy was made, and somebody holds the tensor
                return self._others[0](tensor)
        else:
            kept = self._copy_out(tensor.detach())  # it shares the version, and has no graph
            views[view] = weakref.ref(kept)
        packed = _Packed(kept, group)
        kept.packed.append(weakref.ref(packed))
        group.kept.append(weakref.ref(kept))
        return packed

    def _goes(self, tensor: Tensor) -> bool:
        """Whether it is worth while, and the copy is all that its storage holds."""
        if not self._is_plain(tensor) or tensor.device.type != self._device.type:
            return False
        if tensor.layout != torch.strided or tensor.is_inference():
            return False
        size = tensor.numel() * tensor.element_size()
        if size < self.least or (tensor.is_leaf and tensor.requires_grad) or tensor.is_conj() or tensor.is_neg():
            return False
        whole: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        return whole and tensor.untyped_storage().nbytes() == size

    def _is_plain(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor

    def _copy_out(self, value: Tensor) -> _Kept:
        host, here, gone = self._to_host(value), self._here(), None
        if here is not None:
            out, _ = self._own_streams()
            out.wait_stream(here)
            with torch.cuda.stream(out):
                host.copy_(value, non_blocking=True)
                gone = out.record_event()
        kept = _Kept(value, host, gone, here)
        self._leaving[-1].append(kept)
        self.bytes_out += host.nbytes
        return kept

    def _to_host(self, value: Tensor) -> Tensor:
        """Memory for the copy; on the CPU the copy itself. The user may have chosen another default device."""
        if self._device.type == "cpu":
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").copy_(value)
        try:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            size = value.nbytes
            raise RuntimeError(_NO_ROOM.format(size, size / 2**30, str(error).partition("\n")[0])) from error

    def _retire(self, runs: int) -> None:
        """Frees the device's memory of what went out, but for the last so many runs of a block."""
        while len(self._leaving) > runs:
            run = self._leaving.pop(0)
            if run:
                # One stream has copied all of them, in this order. Their memory goes back to their homes.
                self._wait(run[-1].gone, *(kept.home for kept in run))
            for kept in run:
                if kept.value is not None and kept not in self._coming:
                    kept.check(kept.value)
                    kept.value = None
                kept.gone = None

    # ---- backward ----

    def _unpack(self, packed: _Packed | _Other) -> Tensor:
        if not isinstance(packed, _Packed):
            return self._others[1](packed)
        kept = packed.kept
        self._bring(packed.group)
        before = None if packed.group.before is None else packed.group.before()
        if before is not None:
            self._bring(before)
        if kept.value is None:  # somebody has taken what came
            self._copy_in(kept, packed.group)
        value = kept.value
        assert value is not None
        if kept not in self._coming:  # it is still on its way out
            kept.check(value)
            self._wait(kept.gone)  # the backward may use its memory for something else
        self._wait(kept.came)
        here = self._here()
        if here is not None and kept.home != here:
            value.record_stream(here)  # it is freed after what this stream does with it
        if kept.written:
            raise RuntimeError(_WRITTEN.format(kept.shape))
        self._coming.pop(kept, None)
        kept.value = kept.came = None
        return value

    def _bring(self, group: _Group) -> None:
        """Starts to copy in what the group has saved; once in a backward, since who has taken its tensors may still be
        alive."""
        if group.brought == self._backward:
            return
        group.brought = self._backward
        self._send_back([kept for kept in self._coming if not kept.is_wanted()])
        for kept in reversed(group.wanted()):
            if kept.value is None:
                self._copy_in(kept, group)

    def _copy_in(self, kept: _Kept, group: _Group) -> None:
        host = kept.host
        kept.value = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
        kept.home = here = self._here()
        if here is not None:
            _, comes = self._own_streams()
            comes.wait_stream(here)  # the memory may be in use until here
            with torch.cuda.stream(comes):
                kept.value.copy_(host, non_blocking=True)
                kept.came = comes.record_event()
        else:
            kept.value.copy_(host)
        self._coming[kept] = group
        self.bytes_in += host.nbytes

    def _send_back(self, some: Sequence[_Kept] | None = None) -> None:
        """Frees what came (or some of it) and nobody has asked for: its graph is gone, its node has not looked at it,
        or another graph runs first."""
        for kept in list(self._coming) if some is None else some:
            group = self._coming.pop(kept)
            self._wait(kept.came, kept.home)
            kept.value, kept.came = None, None
            if kept.is_wanted():
                group.brought = 0

    # ---- streams ----

    def _here(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _wait(self, event: torch.cuda.Event | None, *others: torch.cuda.Stream | None) -> None:
        """Orders the current stream, and others, after the event."""
        for stream in {self._here(), *others}:
            if event is not None and stream is not None:
                stream.wait_event(event)

    def _own_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """For copies out and for copies in, of different priority: see [Note: offload] in optim/offload.py."""
        if self._streams is None:
            make = torch.cuda.Stream
            self._streams = make(self._device, priority=-1), make(self._device, priority=-2)  # type: ignore[no-untyped-call]
        return self._streams
