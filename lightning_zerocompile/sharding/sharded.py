"""What users see of masters and of their gradients: DTensors whose numbers are those of the whole value.

[Note: numbers] Under DDP ``p.grad.norm().item()`` is right on every rank. torch's DTensor keeps a norm, a sum or a
maximum as this rank's part (a "partial" placement), and ``item()`` returns that part. So masters, gradients, what
optimizers keep for them, and what is computed from these are :class:`Sharded`: every conversion to a Python number or
an array takes the whole value. Such a conversion is a collective, and so is whatever is computed from a part, as well
as some of DTensor's own operations (a median). Before each of them the ranks tell each other through the store that
they come to it. A rank that comes alone raises, see :class:`Reads`.

[Note: sums in half precision] torch adds numbers of half precision in float32 and rounds the result once. DTensor
rounds each rank's part, and squares and adds the parts in half precision, where a float16 overflows from 256 on. So a
sum or a norm in half precision is computed in float32 on every rank, and the parts are joined and rounded at once: this
communicates when it is computed, where one in float32 waits until it is read. Products of matrices are left as DTensor
makes them, with a part that each rank rounds.

[Note: pieces] ``p.grad[:3] = 0`` and ``p.data[0].zero_()`` write to a view. A view of rows of other ranks is none here:
DTensor gathers the values, and what is written to these would be lost. So such a result knows what it is a piece of
(:class:`_Piece`). After an operation that writes to a piece, each rank copies the values to those rows of the origin
that it holds. What happens to the origin later is not seen in a piece.

[Note: views] A write to a view must count as one to its origin, by whose version everybody sees whether it has
changed. What autograd makes of an ordinary tensor shares its version. Here a view's rows are made below autograd, and
have a version of their own. So a view knows the rows of its origin, and a write to it raises the version of those.

[Note: full tensors] An operation on elements that writes to a shard takes full tensors beside it
(``p.grad.mul_(mask)``): each rank uses its rows of them, and nothing communicates. A shard has one value on all ranks,
so what is written to it must be equal on all ranks, too. An operation that writes to no shard gives no such promise:
the full tensor may be computed from this rank's batch (``x * shadow["weight"]``, where ``shadow`` is a moving average).
So it is done on the whole value, on all ranks, and its result is a full tensor. Only beside a number (a tensor without
dimensions), which must be equal on all ranks, the result is a shard. Other operations in place that DTensor cannot do
on rows, as to write by an index tensor, are done on the whole value, too, and each rank keeps its rows. All of these
raise where autograd would record a write to a shard. They raise, too, in what all ranks do alike (an optimizer's step):
there they might cost much in every step, and the error names the optimizer and a remedy.

[Note: shards in losses] A loss may combine a shard that was kept (``anchor = p.detach().clone()``, a mask, Fisher
information) with what the model computes. Rows would give a gradient of this rank's rows, computed from this rank's
batch alone. So wherever autograd records the operation for one of the other tensors, and in every backward, a shard
counts as its whole value.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.torch_version import TorchVersion
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from typing_extensions import override

from lightning_zerocompile.sharding.full_values import ON_HOST, full_value, in_own_dtypes
from lightning_zerocompile.sharding.random_numbers import DRAWN_IN_SHAPE

if TYPE_CHECKING:
    from lightning_zerocompile.ranks.consistency import Reads

# [Note: dispatch of subclasses] Before torch 2.13 an operator of a DTensor goes straight to DTensor's code in C++, even
# if its class overrides ``__torch_dispatch__``. But before that, torch asks its registry of rules, by operator and
# class. So each of torch's operators, and each collective, has a rule for our classes there. The rule calls the
# override, which hands DTensor's code plain DTensors of the same parts.
_BY_RULES = TorchVersion(torch.__version__) < "2.13"
_LIBRARY: Any = torch.library.Library  # untyped
# The libraries by namespace; the rules are removed when these objects are freed.
_RULES = {name: _LIBRARY(name, "FRAGMENT") for name in ("aten", "c10d")} if _BY_RULES else {}

_DATA: Any = Tensor.data  # the property itself; torch's stub types it as the value
_READS = "_zerocompile_reads"  # compares the ranks before a read; None: the strategy is gone
_ZEROED = "_zerocompile_zeroed"  # a weak reference to what is called when the tensor is made zero in place
_NAME = "_zerocompile_name"  # the name of a parameter that a failed run has left as a shard
_PIECE = "_zerocompile_piece"  # what a view of other ranks' rows is a piece of
_ROOT = "_zerocompile_root"  # the rows of what a view is a view of, see [Note: views]
STATES_ON_HOST = "_zerocompile_states_on_host"  # attribute of a master: its optimizer's states are kept in host memory

_KEEPS = frozenset({"detach", "alias", "clone", "_to_copy", "squeeze", "unsqueeze", "view", "lift_fresh"})
_HALF = (torch.bfloat16, torch.float16)
_ADDS = frozenset(  # see [Note: sums in half precision]
    {
    "norm", "linalg_vector_norm", "linalg__powsum", "_foreach_norm", "_foreach_powsum", "sum", "nansum", "mean", "dot",
    "vdot", "dist"
    }
)  # fmt: skip
_REDUCES = frozenset(  # these compute this rank's part of the result, without communication
    {"norm", "linalg_vector_norm", "sum", "max", "min", "amax", "amin", "prod", "any", "all", "count_nonzero"}
)
_OVER_ALL = _ADDS | _REDUCES | {"var", "std", "var_mean", "std_mean"}  # an empty list of dimensions means all of them
_ALONG = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "argmax", "argmin"})  # a dimension
_LOSSES = frozenset(  # DTensor takes the mean of the ranks' means, also of ranks with fewer rows
    {
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "soft_margin_loss"
    }
)  # fmt: skip
_BACKWARDS_OF_LOSSES = frozenset(f"{name}_backward" for name in _LOSSES)
_MEAN, _SUM = 1, 2  # values of a loss's `reduction`
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "convolution_backward"})  # DTensor takes rows beside rows
_PLACES = frozenset({"argmax", "argmin", "max.dim", "min.dim"})  # of the last two torch 2.11 gathers places, too
_RESHAPES = frozenset({"t_", "transpose_", "swapdims_", "swapaxes_", "squeeze_", "unsqueeze_"})  # the tensor itself
_MAKES = frozenset(
    {
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones",
    "new_empty", "new_full", "new_empty_strided", "copy_", "fill_", "zero_"
    }
)  # fmt: skip
_UNKNOWN = (  # DTensor has no rule for an operation
    "Sharding propagation failed", "does not have a sharding strategy", "in-place operations that require placement"
)  # fmt: skip
_BY_ELEMENT = frozenset({"copy_", "fill_", "masked_fill", "masked_fill_"})  # of these torch does not say so
_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "equal", "allclose", "isclose"})
_COPY = ("aten::to", "aten::contiguous")  # if they do not return the tensor itself
_LARGEST = frozenset({"max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "_foreach_max"})
_NORMS = frozenset({"norm", "linalg_vector_norm", "_foreach_norm", "dist"})

_LEFT = (
    "Parameter `{}` is a shard (a DTensor): a former run of this model raised, so it could not be made whole again "
    "(another rank may have been gone), or another library has sharded it. Build the model anew and go on from a "
    "checkpoint: `trainer.fit(model, ckpt_path=...)`."
)
_RECORDED = (
    "`{}` takes a shard that was computed from a parameter, and an ordinary tensor, and gradients are recorded. Do it "
    "under `torch.no_grad()`, or with `p.detach()`, which gives whole values; or inside "
    "`with strategy.full_parameters(module) as values:`. In a training step parameters are whole."
)
_SAVE = (
    "`with strategy.full_state_dict(module):` (entered on all ranks) lets rank 0 save what calls `state_dict()`: "
    "`if trainer.is_global_zero: module.save_pretrained(path)`; `with strategy.full_parameters(module) as values:` "
    "gives full values by name; `trainer.save_checkpoint(path)` (on all ranks) writes a checkpoint. After `fit` the "
    "module is whole again."
)


class Sharded(DTensor):
    """A DTensor whose numbers are those of the whole value, see [Note: numbers]."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _add_rules(cls)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        result = cls._run(func, args, kwargs, written)
        if written and func._schema.name.startswith("aten::_foreach"):  # of a list torch itself raises no version
            torch.autograd.graph.increment_version([leaf for leaf in written if not leaf.is_inference()])
        for leaf in written:
            if (root := leaf.__dict__.get(_ROOT)) is not None:
                _count_write(root)
        return result

    @classmethod
    def _run(cls, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """The result of an operator; ``written``: what it writes to."""
        tensors = _tensors_of(args, kwargs)
        ours = [tensor for tensor in tensors if isinstance(tensor, Sharded)]
        if not ours:  # the class only occurs in an output
            return _dispatch_plain(func, args, kwargs)
        on_host = any(map(_is_on_host, ours))
        if on_host and not func.is_view:
            return _on_the_device(func, args, kwargs)
        if func.namespace == "c10d":
            _refuse_collective(func, ours)
        reads, left = ours[0].__dict__.get(_READS), ours[0].__dict__.get(_NAME)
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            return func(_whole(args[0], "item"))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _draw(func, name, args, kwargs, ours[0])
        if name in _OVER_ALL and len(args) > 1 and args[1] == []:  # DTensor would leave out the other ranks
            args = (args[0], list(range(args[0].dim())), *args[2:])
        if name in _ALONG and len(args) > 1 and isinstance(args[1], int):  # DTensor does not count from the end
            args = (args[0], args[1] % max(args[0].dim(), 1), *args[2:])
        if (name in _LOSSES or name in _CONVOLUTIONS) and len(ours) == len(tensors):
            return _of_whole_values(func, name, args, kwargs, ours[0])
        if _has_two_gathers(func, args) and ours[0].device.type == "cpu":
            return _of_whole_values(func, name, args, kwargs, ours[0])
        if name in _RESHAPES and isinstance(args[0], Sharded):
            return _reshape(func, name, args, kwargs)
        if name == "masked_fill_" and isinstance(args[2], Tensor):  # DTensor may write to a copy
            return torch.ops.aten.copy_.default(args[0], torch.ops.aten.masked_fill.Tensor(*args))
        if "out" in kwargs and len(tensors) == len(written):  # `eye` and others, which know the shape alone
            return _on_whole_values(func, name, args, kwargs)
        if name in _BACKWARDS_OF_LOSSES and len(ours) == len(tensors):
            named = _by_name(func, args, kwargs)
            if named.get("reduction", _MEAN) == _MEAN:  # DTensor would divide by the number of this rank's elements
                return func(**named | {"reduction": _SUM}) / named["self"].numel()
        others = [tensor for tensor in tensors if not isinstance(tensor, Sharded)]
        numbers = all(tensor.dim() == 0 for tensor in ours) and not any(isinstance(other, DTensor) for other in others)
        if any(_PIECE in leaf.__dict__ for leaf in written) and torch.Tag.inplace_view not in func.tags:
            return _on_whole_values(func, name, args, kwargs)
        if others and numbers:  # our numbers among ordinary tensors
            return _on_whole_values(func, name, args, kwargs)
        if others and _is_differentiated(ours, others) and not any(isinstance(leaf, Sharded) for leaf in written):
            return _on_whole_values(func, name, args, kwargs)  # see [Note: shards in losses]
        alike = reads is None or reads.all_alike
        mixes = not alike and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        if others and mixes and (written or _is_by_element(func, name)):  # see [Note: full tensors]
            if not _is_by_element(func, name) or not _stays_in_rows(written, others):
                return _on_whole_values(func, name, args, kwargs)
            args, kwargs = _mapped(lambda leaf: _beside(leaf, ours[0]), args, kwargs)
        if name == "_foreach_copy_":  # DTensor knows `copy_` only
            for target, source in zip(args[0], args[1], strict=True):
                torch.ops.aten.copy_.default(target, source)
            return None
        if _needs_elements(func, name, args, kwargs) and any(map(_is_empty_somewhere, ours)):
            args, kwargs = _mapped(_replicated, args, kwargs)
        elif not func._schema.is_mutable and not _keeps_parts(name, kwargs) and any(map(_is_part, ours)):
            args, kwargs = _with_whole_parts(args, kwargs, name)
        elif _communicates(func, name, ours):
            _compare(ours[0], name)
        try:
            if name in _ADDS and (dtype := _half_of(func, args, kwargs, tensors)) is not None:
                return _rounded_once(func, args, kwargs, dtype, ours[0])
            result = _dispatch_plain(func, args, kwargs)
        except RuntimeError as error:
            mixed = "mixed torch.Tensor and DTensor" in str(error)
            if mixed and left is not None:
                raise RuntimeError(_LEFT.format(left)) from error
            if mixed and not mixes and not alike and not func._schema.is_mutable and name not in _COMPARES:
                raise RuntimeError(_RECORDED.format(name)) from error
            unknown = any(text in str(error) for text in _UNKNOWN) or (mixed and (mixes or name in _COMPARES))
            if not unknown or alike or (func._schema.is_mutable and not mixes):
                raise
            if func._schema.is_mutable:
                return _on_whole_values(func, name, args, kwargs)
            return _with_pieces(func, args, kwargs, _of_whole_values(func, name, args, kwargs, ours[0]))
        if name in ("zero_", "_foreach_zero_"):
            for leaf in written:
                call = leaf.__dict__.get(_ZEROED)
                if call is not None and (drop := call()) is not None:
                    drop()
        if name.endswith("_") and isinstance(args[0], DTensor):
            return args[0]
        if name in ("detach", "alias") and isinstance(result, DTensor):  # a write to its rows counts as one to these
            result._local_tensor = args[0]._local_tensor
        if isinstance(result, Tensor):
            result = as_sharded(result, reads, left)
        else:
            result = tree_map(lambda leaf: as_sharded(leaf, reads, left), result)
        result = _with_pieces(func, args, kwargs, result)
        return tree_map(mark_on_host, result) if on_host else result

    # ---- numbers ----

    @override
    def item(self) -> Any:
        return _whole(self, "item").item()

    @override
    def tolist(self) -> Any:
        return _whole(self, "tolist").tolist()

    @override
    def numpy(self, *, force: bool = False) -> Any:
        return _whole(self, "numpy").numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        value = _whole(self, "numpy")
        return value.__array__() if dtype is None else value.__array__(dtype)

    def __float__(self) -> float:
        return float(_whole(self, "float"))

    def __int__(self) -> int:
        return int(_whole(self, "int"))

    def __bool__(self) -> bool:
        return bool(_whole(self, "bool"))

    def __complex__(self) -> complex:
        return complex(_whole(self, "complex"))

    def __index__(self) -> int:
        return int(_whole(self, "index").__index__())

    def __format__(self, format_spec: str) -> str:
        if self.dim() == 0 and format_spec:
            return format(self.item(), format_spec)
        return repr(self)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override, unused-ignore]
        """The text of this rank's part, which it says: one rank may print alone, so this is no collective."""
        placement, mesh = self.placements[0], self.device_mesh
        if mesh.size() == 1 or isinstance(placement, Replicate):
            return repr(self._local_tensor.detach())
        what, rank = f"of shape {tuple(self.shape)}", f"rank {mesh.get_local_rank()} of {mesh.size()}"
        if isinstance(placement, Shard):
            first, count = _rows_of(self)
            rows = f"{first}:{first + count}"
            part = f"holds [{', '.join([':'] * placement.dim + [rows])}] of it"
        else:
            part = "holds this part of it, before the reduction"
        text = repr(self._local_tensor.detach())
        return f"<sharded {what}: {rank} {part}: {text}; `full_tensor()`, on all ranks, gives all>"

    @override
    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        if self.requires_grad and torch.is_grad_enabled():
            _compare(self, "full_tensor")
            return super().full_tensor(grad_placements=grad_placements)
        whole: Tensor = _whole(self, "full_tensor")
        return whole

    @property
    def data(self) -> Tensor:  # type: ignore[override, unused-ignore]
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copies ``value``, a full tensor or a DTensor of this shape and dtype, to the rows."""
        if isinstance(value, DTensor):
            local, own = value._local_tensor, self._local_tensor
            if (local.dtype, local.device) != (own.dtype, own.device):  # as `module.half()` and `module.cpu()` set it
                _DATA.__set__(self, value)
                return
        if value.shape != self.shape or value.dtype != self.dtype:
            raise RuntimeError(
                f"`data` of {_what(self)}, in {self.dtype}, was set to a tensor of shape {tuple(value.shape)} in "
                f"{value.dtype}: it takes only values of its own shape and dtype."
            )
        with torch.no_grad():
            self.copy_(value)

    def apply_(self, callable: Callable[[Any], Any]) -> Tensor:
        """On each rank for its rows; torch has no implementation for a DTensor, and would end the process."""
        if self.requires_grad:
            raise RuntimeError("Can't call apply_() on Variable that requires grad. Use var.detach().apply_() instead.")
        self._local_tensor.apply_(callable)
        torch.autograd.graph.increment_version(self._local_tensor)
        return self

    # ---- copies ----

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of this rank's rows, without communication; a deep copy of an optimizer or of a list makes it.

        The copy belongs to no parameter of the model. Copies of modules are whole, see [Note: copies].
        """
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call, unused-ignore]
        rows: Tensor = DTensor(self._local_tensor.detach().clone(), self._spec, requires_grad=False)  # type: ignore[no-untyped-call, call-arg, unused-ignore]
        if isinstance(self, nn.Parameter):
            rows = nn.Parameter(rows, requires_grad=self.requires_grad)
        elif self.requires_grad:
            rows.requires_grad_()
        copied = as_sharded(rows, self.__dict__.get(_READS), self.__dict__.get(_NAME))
        memo[id(self)] = mark_on_host(copied, bool(self.__dict__.get(ON_HOST)))
        return copied

    # ---- what has no address and cannot be written by one rank ----

    @override
    def untyped_storage(self) -> Any:
        _refuse_address(self)
        return super().untyped_storage()

    @override
    def storage(self) -> Any:
        _refuse_address(self)
        return super().storage()  # type: ignore[no-untyped-call, unused-ignore]

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.device_mesh.size() > 1:
            raise RuntimeError(
                f"{_what(self)} was to be pickled (`torch.save`): this rank holds only a part of it. {_SAVE}"
            )
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call, unused-ignore]


def _add_rules(cls: type[Sharded]) -> None:
    """Lets torch call the class's ``__torch_dispatch__``, see [Note: dispatch of subclasses]."""

    def rule(kind: type[Sharded], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return kind.__torch_dispatch__(func, types, args, kwargs)

    for name in torch._C._dispatch_get_all_op_names() if _RULES else ():
        if (library := _RULES.get(name.partition("::")[0])) is not None:
            torch.library.register_torch_dispatch(name, cls, rule, lib=library)


_add_rules(Sharded)


def _tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors in an operator's arguments, which are values and lists of values.

    Clipping calls an operator for each gradient, and to walk a tree would take longer than all the rest of a call.
    """
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [leaf for leaf in value if isinstance(leaf, Tensor)]
    return found


def _mapped(call: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's arguments with ``call(tensor)`` in the place of each tensor in them."""
    return tuple(_with(call, value) for value in args), {name: _with(call, value) for name, value in kwargs.items()}


def _with(call: Callable[[Any], Any], value: Any) -> Any:
    # no closure: one that calls itself refers to itself, and would hold the tensors until Python collects garbage
    if isinstance(value, Tensor):
        return call(value)
    return [_with(call, leaf) for leaf in value] if isinstance(value, (list, tuple)) else value


def _reshape(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Gives a tensor another shape in place, without communication.

    Raises:
        RuntimeError: the new shape would need another rank's rows.
    """
    leaf = args[0]
    view = getattr(torch, name.removesuffix("_"))(*args, **kwargs)
    if view._local_tensor.untyped_storage()._cdata != leaf._local_tensor.untyped_storage()._cdata:
        raise RuntimeError(
            f"`{name}` of {_what(leaf)}: the new shape has other rows, which other ranks hold, so the tensor cannot "
            f"take it in place. Use `{name.removesuffix('_')}`."
        )
    with no_dispatch():
        func(*args, **kwargs)  # the shape that the tensor itself has
    leaf._local_tensor, leaf._spec = view._local_tensor, view._spec
    return leaf


def _dispatch_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """What DTensor's own code makes of an operator; ours are plain DTensors in it, which that code takes in C++."""
    made: list[tuple[Any, Any]] = []

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, Sharded):
            return leaf
        made.append((leaf, _plain(leaf)))
        return made[-1][1]

    there = _mapped(plain, args, kwargs)
    result = func(*there[0], **there[1])
    if not func._schema.is_mutable:
        return result
    for leaf, other in made:
        leaf._spec = other._spec  # an operation with `out=` changes it
    return next((leaf for leaf, other in made if other is result), result)  # what it has written to


def _plain(value: Sharded) -> DTensor:
    return DTensor(value._local_tensor, value._spec, requires_grad=False)  # type: ignore[no-untyped-call, call-arg, unused-ignore]


def as_sharded(value: Any, reads: Reads | None, left: str | None = None) -> Any:
    """Makes a plain DTensor a :class:`Sharded`, and returns it; returns anything else as it is.

    Args:
        value: the DTensor, which is changed itself.
        reads: compares the ranks before a number is read from it; None: its strategy is gone.
        left: the name of the parameter that it is computed from, if a failed run has left that as a shard.
    """
    if type(value) is DTensor:
        value.__class__ = Sharded  # type: ignore[assignment, unused-ignore]
        value.__dict__.update({_READS: reads} if left is None else {_READS: reads, _NAME: left})
    return value


skip_code(as_sharded.__code__)  # a DTensor becomes another class, which Dynamo does not follow


def mark_on_host(value: Any, on_host: bool = True) -> Any:
    """Notes whether the rows of a DTensor are kept in host memory, see [Note: rows in host memory]; returns it."""
    if isinstance(value, DTensor):
        value.__dict__[ON_HOST] = on_host
    return value


def _is_on_host(value: DTensor) -> bool:
    return bool(value.__dict__.get(ON_HOST)) and value._local_tensor.device.type != value.device_mesh.device_type


def _on_the_device(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on tensors whose rows are kept in host memory.

    [Note: rows in host memory] Masters and optimizer states may be kept in host memory, while gradients and everything
    that users compute are on the device. So an operation gets copies on the device, and what it writes to them goes
    back to host memory. Its result is on the device. Only a view (``detach``) shares the memory, so it is in host
    memory, too.
    """

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Sharded) or not _is_on_host(leaf):
            return leaf
        local = leaf._local_tensor.to(leaf.device_mesh.device_type)
        plain: Any = DTensor(local, leaf._spec, requires_grad=False)  # type: ignore[no-untyped-call, call-arg, unused-ignore]
        return as_sharded(plain, leaf.__dict__.get(_READS), leaf.__dict__.get(_NAME))

    def written(original: Sharded, copy: Any) -> None:
        original._local_tensor.copy_(copy._local_tensor)

    return _on_others(func, args, kwargs, moved, written)


def _on_others(
    func: Any, args: Any, kwargs: Any, other: Callable[[Any], Any], written: Callable[[Sharded, Any], None]
) -> Any:
    """The result of an operation on other tensors in the place of its arguments.

    Args:
        func, args, kwargs: the operation.
        other: gives what takes the place of a tensor, or that tensor itself; called once for each.
        written: called with each of ours that the operation has written to, and what took its place.
    """
    others: list[tuple[Any, Any]] = []

    def replaced(leaf: Any) -> Any:
        for original, copy in others:
            if original is leaf:
                return copy
        others.append((leaf, other(leaf)))
        return others[-1][1]

    there = _mapped(replaced, args, kwargs)
    result = func(*there[0], **there[1])
    for leaf in _written(func, args, kwargs):
        if isinstance(leaf, Sharded) and (copy := replaced(leaf)) is not leaf:
            written(leaf, copy)
    return tree_map(lambda leaf: next((original for original, copy in others if copy is leaf), leaf), result)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors_of((args[number] if number < len(args) else kwargs.get(argument.name),), {})
    return found


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments that an operation was given, by their names in its schema."""
    return {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}


def _count_write(rows: Tensor) -> None:
    """Raises the version of ``rows``, if it has one."""
    if not rows.is_inference():
        torch.autograd.graph.increment_version(rows)


def sharded_as(value: Any, master: Tensor) -> Any:
    """Calls :func:`as_sharded` for what an optimizer keeps for ``master``, with what compares the ranks for it."""
    return as_sharded(value, master.__dict__.get(_READS))


def when_zeroed(value: Tensor, call: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Sets what is called after user code has made ``value`` zero in place, see [Note: zeroed gradients]."""
    value.__dict__[_ZEROED] = call


def watch(value: Tensor, reads: Reads | None) -> None:
    """Sets what compares the ranks before ``value``, a :class:`Sharded`, is read."""
    value.__dict__[_READS] = reads


def leave(value: DTensor, name: str) -> None:
    """Marks ``value``, the parameter ``name``, as a shard that a strategy has left, which is gone."""
    value.__class__ = Sharded  # type: ignore[assignment, unused-ignore]
    value.__dict__[_READS], value.__dict__[_NAME] = None, name


def refuse_left(name: str) -> NoReturn:
    """Raises for a parameter that is a shard and has no strategy.

    Raises:
        RuntimeError: names the parameter and the remedy.
    """
    raise RuntimeError(_LEFT.format(name))


def _whole(value: Any, what: str) -> Any:
    """The detached full value of a :class:`Sharded`; anything else as it is. Compares the ranks if it communicates."""
    if not isinstance(value, Sharded):
        return value
    if all(isinstance(placement, Replicate) for placement in value.placements):
        return value._local_tensor.detach()
    _compare(value, what)
    with torch.no_grad(), _dispatched():
        return full_value(value)


def _has_two_gathers(func: Any, args: Any) -> bool:
    """Whether DTensor has two gathers in flight for this operation, see [Note: gloo gathers] in csrc."""
    name, overload = func._schema.name.removeprefix("aten::"), func._schema.overload_name
    if name not in _PLACES and f"{name}.{overload}" not in _PLACES:
        return False
    (placement,), dim = args[0].placements, args[1] if len(args) > 1 else None
    return isinstance(placement, Shard) and dim in (None, placement.dim, placement.dim - args[0].dim())


def _of_whole_values(func: Any, name: str, args: Any, kwargs: Any, first: Sharded) -> Any:
    """The result of an operation that DTensor does not know, computed from whole values on every rank.

    The result is a :class:`Sharded`, which mixes with others, if all arguments are DTensors; else an ordinary tensor.
    """
    leaves = _tensors_of(args, kwargs)
    args, kwargs = _mapped(partial(_whole_of_any, what=name), args, kwargs)
    result = func(*args, **kwargs)
    if not all(isinstance(leaf, DTensor) for leaf in leaves):
        return result
    return tree_map(lambda value: _everywhere(value, first) if isinstance(value, Tensor) else value, result)


def _on_whole_values(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The result of an operation that is done on whole values. Of what it writes to each rank keeps its part."""
    return _on_others(func, args, kwargs, partial(_whole_of_any, what=name), _keep_part)


def _whole_of_any(leaf: Any, what: str) -> Any:
    """The detached full value of any DTensor; anything else as it is."""
    if isinstance(leaf, Sharded) or not isinstance(leaf, DTensor):
        return _whole(leaf, what)
    with torch.no_grad(), _dispatched():
        return full_value(leaf)


def _keep_part(original: Sharded, value: Tensor) -> None:
    """Takes over what was written to ``value``, the full value of ``original``."""
    placement = original.placements[0]
    if isinstance(placement, Shard):
        original._local_tensor.copy_(value.narrow(placement.dim, *_rows_of(original)))
    elif isinstance(placement, Partial):
        original._local_tensor, original._spec = value, _everywhere(value, original)._spec
    elif value.data_ptr() != original._local_tensor.data_ptr():
        original._local_tensor.copy_(value)
    if (piece := original.__dict__.get(_PIECE)) is not None:
        piece.write()


def _draw(func: Any, name: str, args: Any, kwargs: Any, first: Sharded) -> Any:
    """The result of an operation that draws random numbers, see [Note: random numbers] in random_numbers.py."""

    def whole(leaf: Any) -> Any:
        if leaf is args[0] and name in DRAWN_IN_SHAPE:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf._local_tensor.device)
        return _whole_of_any(leaf, name)

    result = _on_others(func, args, kwargs, whole, _keep_part)
    if func._schema.is_mutable:
        return result
    return tree_map(lambda value: _rows_like(value, first) if isinstance(value, Tensor) else value, result)


def _rows_like(value: Tensor, like: Sharded) -> Any:
    """This rank's rows of a full tensor as a :class:`Sharded`; one of another shape than ``like`` is on every rank."""
    if value.shape != like.shape or not isinstance(like.placements[0], Shard):
        return _everywhere(value, like)
    local = value.narrow(like.placements[0].dim, *_rows_of(like)).clone()
    rows = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return as_sharded(rows, like.__dict__.get(_READS))


def _rows_of(value: DTensor) -> tuple[int, int]:
    """Of a tensor with sharded rows, the first of this rank's rows and how many they are."""
    placement: Any = value.placements[0]
    mesh = value.device_mesh
    rows, first = Shard.local_shard_size_and_offset(value.shape[placement.dim], mesh.size(), mesh.get_local_rank())
    return first, rows


class _Piece:
    """What a view of other ranks' rows is a view of, see [Note: pieces].

    Args:
        origin: the tensor that the view is one of.
        view: the same view, on meta, of a contiguous tensor of the origin's shape.
        value: the view's values, on every rank the whole of them; code that writes to the view writes to this.
    """

    def __init__(self, origin: Sharded, view: Tensor, value: Tensor) -> None:
        self._origin, self._view = origin, view
        self._value = value.detach()  # code may give the view itself another shape in place

    def write(self) -> None:
        """Copies the values to the rows of the origin that this rank holds."""
        places = torch.zeros(self._view.shape, dtype=torch.int64, device=self._value.device)
        places += int(self._view.storage_offset())
        for dim, (size, stride) in enumerate(zip(self._view.shape, self._view.stride(), strict=True)):
            steps = torch.arange(size, device=places.device) * stride
            places += steps.view([size if d == dim else 1 for d in range(places.dim())])
        origin, values = self._origin, self._value.reshape(-1)
        index = list(torch.unravel_index(places.view(-1), origin.shape))
        placement = origin.placements[0]
        if isinstance(placement, Shard):
            dim, (first, rows) = placement.dim, _rows_of(origin)
            ours = (index[dim] >= first) & (index[dim] < first + rows)
            index, values = [one[ours] for one in index], values[ours]
            index[dim] -= first
        local = origin._local_tensor
        local[tuple(index)] = values.to(local.device)
        _count_write(origin.__dict__.get(_ROOT, local))
        if (piece := origin.__dict__.get(_PIECE)) is not None:
            piece.write()


def _with_pieces(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The result of an operation; where it is a view that shares no memory with its origin, it knows its piece."""
    if not func.is_view or func._schema.name in _COPY or not isinstance(origin := args[0], Sharded):
        return result
    storage, piece = origin._local_tensor.untyped_storage()._cdata, origin.__dict__.get(_PIECE)
    views: list[Tensor] | None = None
    for number, leaf in enumerate(tree_leaves(result)):
        if not isinstance(leaf, Sharded):
            continue
        if leaf._local_tensor.untyped_storage()._cdata == storage:
            root = origin.__dict__.get(_ROOT, origin._local_tensor)
            if root is not leaf._local_tensor:
                leaf.__dict__[_ROOT] = root
            if piece is not None:
                leaf.__dict__[_PIECE] = piece
            continue
        if views is None:
            views = tree_leaves(func(torch.empty(origin.shape, dtype=origin.dtype, device="meta"), *args[1:], **kwargs))
        leaf.__dict__[_PIECE] = _Piece(origin, views[number], leaf._local_tensor)
    return result


def _is_by_element(func: Any, name: str) -> bool:
    """Whether the operation computes each element from those at the same place, except for comparisons."""
    if name in _COMPARES:
        return False
    return torch.Tag.pointwise in func.tags or name in _BY_ELEMENT or name.startswith("_foreach")


def _stays_in_rows(written: list[Tensor], others: list[Tensor]) -> bool:
    """Whether an operation on elements of shards and of ``others`` is done on rows alone.

    ``written``: what it writes to. See [Note: full tensors].
    """
    if written:
        return not any(leaf is other for leaf in written for other in others)
    return all(other.dim() == 0 or isinstance(other, DTensor) for other in others)


def _is_differentiated(ours: list[Sharded], others: list[Tensor]) -> bool:
    """Whether an operation on shards and other tensors is recorded for those, or is part of a backward."""
    if torch._C._current_graph_task_id() != -1:
        return True
    if not torch.is_grad_enabled() or any(shard.requires_grad for shard in ours):
        return False
    return any(other.requires_grad for other in others)


def _beside(leaf: Any, like: Sharded) -> Any:
    """A full tensor as one that is computed with beside ``like``; anything else as it is. A number stays a number."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or leaf.dim() == 0:
        return leaf
    return _everywhere(leaf, like)


def _is_part(value: DTensor) -> bool:
    """Whether each rank has a part of every element, which is still to be reduced."""
    return any(isinstance(placement, Partial) for placement in value.placements)


def _keeps_parts(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether an operation on a part may be done on each rank's part alone, and gives a part.

    A copy may not: it may be kept (Lightning's ``log`` makes one) and read when ranks have parted. Neither may a cast:
    it would round the parts, and what comes of ``any`` is a sum of booleans, which is 2 if two ranks say yes.
    """
    return name in _KEEPS and name != "clone" and kwargs.get("dtype") is None


def _with_whole_parts(args: Any, kwargs: Any, what: str) -> tuple[Any, Any]:
    """The arguments of an operation with every part reduced."""
    leaves, shape = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Sharded) and _is_part(leaf)]
    parts: list[Sharded] = [leaves[place] for place in places]
    _compare(parts[0], what)
    for place, value in zip(places, _everywhere_alike(_joined(parts), parts), strict=True):
        leaves[place] = value
    whole: tuple[Any, Any] = tree_unflatten(leaves, shape)
    return whole


def _joined(parts: list[Sharded]) -> list[Tensor]:
    """The full values of parts. Numbers of one kind travel together, since clipping has one for each parameter."""
    found: dict[int, Tensor] = {}  # by place in `parts`
    alike: dict[Any, list[int]] = {}
    for place, part in enumerate(parts):
        kind = (part.device_mesh, part.placements, part.dtype) if part.dim() == 0 else place
        alike.setdefault(kind, []).append(place)
    with torch.no_grad(), _dispatched():
        for places in alike.values():
            first = parts[places[0]]
            if len(places) == 1:
                found[places[0]] = full_value(first)
                continue
            with in_own_dtypes(first):
                numbers = torch.stack([parts[place]._local_tensor.detach() for place in places])
            joined = full_value(DTensor.from_local(numbers, first.device_mesh, first.placements, run_check=False))
            for place, value in zip(places, joined.unbind(), strict=True):
                found[place] = value
    return [found[place] for place in range(len(parts))]


def _half_of(func: Any, args: Any, kwargs: Any, leaves: list[Tensor]) -> torch.dtype | None:
    """The half precision that the result of a reduction has; None: it has another dtype, or needs no communication.

    ``leaves``: the tensors in the arguments.
    """
    wide = all(leaf.dtype not in _HALF for leaf in leaves)
    if wide and not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return None
    if func._schema.is_mutable or all(_is_everywhere(leaf) for leaf in leaves):
        return None
    given = _by_name(func, args, kwargs).get("dtype")
    dtypes = {leaf.dtype for leaf in leaves} if given is None else {given}
    dtype: torch.dtype = dtypes.pop()
    return dtype if dtype in _HALF and not dtypes else None  # of several the result has the widest


def _is_everywhere(value: Tensor) -> bool:
    """Whether each rank has the whole value, so that nothing that is computed from it needs another rank."""
    if not isinstance(value, DTensor) or value.device_mesh.size() == 1:
        return True
    return all(isinstance(placement, Replicate) for placement in value.placements)


def _rounded_once(func: Any, args: Any, kwargs: Any, dtype: torch.dtype, first: Sharded) -> Any:
    """The result, in ``dtype``, of a reduction; see [Note: sums in half precision]."""
    names = [argument.name for argument in func._schema.arguments]
    wanted = torch.float32
    if "dtype" in names:  # no copy in float32 is needed; if another dtype was asked for torch casts to it first, too
        args, kwargs, wanted = args[: names.index("dtype")], {**kwargs, "dtype": torch.float32}, dtype

    def cast(leaf: Any) -> Any:
        return torch.ops.aten._to_copy.default(leaf, dtype=wanted) if leaf.dtype != wanted else leaf

    reads, left = first.__dict__.get(_READS), first.__dict__.get(_NAME)
    result = _dispatch_plain(func, *_mapped(cast, args, kwargs))
    result = tree_map(lambda leaf: as_sharded(leaf, reads, left), result)
    if any(map(_is_part, tree_leaves(result))):
        (result,), _ = _with_whole_parts((result,), {}, func._schema.name.removeprefix("aten::"))
    return tree_map(lambda leaf: torch.ops.aten._to_copy.default(leaf, dtype=dtype), result)


def _needs_elements(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation raises for a tensor without elements: a maximum, a norm that is one, pooling, and an FFT."""
    if name not in _NORMS:
        return name in _LARGEST or "_pool" in name or name.startswith("_fft_")
    named = _by_name(func, args, kwargs)
    order = named.get("ord", named.get("p", 2))
    return order is not None and not 0 <= order < math.inf


def _replicated(value: Any) -> Any:
    if not isinstance(value, Sharded) or not _is_empty_somewhere(value):
        return value
    return _everywhere(_whole(value, "a reduction"), value)


def _everywhere(value: Tensor, like: Sharded) -> Any:
    """A value that every rank has, as a :class:`Sharded` of the same ranks as ``like``."""
    replicated = DTensor.from_local(value, like.device_mesh, [Replicate()], run_check=False)
    return as_sharded(replicated, like.__dict__.get(_READS))


def _everywhere_alike(values: list[Tensor], like: list[Sharded]) -> list[Any]:
    """:func:`_everywhere` of many values; those that are alike share what describes them."""
    specs: dict[Any, Any] = {}
    found = []
    for value, part in zip(values, like, strict=True):
        kind = (part.device_mesh, value.shape, value.stride(), value.dtype)
        if kind not in specs:
            specs[kind] = _everywhere(value, part)._spec
        whole = DTensor(value, specs[kind], requires_grad=False)  # type: ignore[no-untyped-call, call-arg, unused-ignore]
        found.append(as_sharded(whole, part.__dict__.get(_READS)))
    return found


@contextmanager
def _dispatched() -> Iterator[None]:
    """Enables dispatch to subclasses, which torch disables while ``torch.tensor([number, ...])`` reads the numbers."""
    with torch._C._PreserveDispatchKeyGuard():  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def _is_empty_somewhere(value: DTensor) -> bool:
    """Whether some rank has no rows: torch's maximum raises on such a rank, and on that rank alone."""
    placement, world = value.placements[0], value.device_mesh.size()
    if not isinstance(placement, Shard) or value.numel() == 0:
        return False
    length = value.shape[placement.dim]
    return -(-length // world) * (world - 1) >= length


def _communicates(func: Any, name: str, tensors: list[Sharded]) -> bool:
    if name in _KEEPS:
        return False
    if any(map(_is_part, tensors)):
        return True
    local = name in _REDUCES or name in _MAKES or name.startswith("_foreach") or torch.Tag.pointwise in func.tags
    return not local


def _compare(value: DTensor, what: str) -> None:
    if value.device_mesh.size() == 1:
        return
    reads = value.__dict__.get(_READS)
    if reads is None:
        if (left := value.__dict__.get(_NAME)) is not None:
            refuse_left(left)
        raise RuntimeError(
            f"`{what}` of {_what(value)}: its strategy was torn down, and each rank holds a part. Read it while the "
            "fit runs, or the module's parameters after it."
        )
    reads.compare(f"`{what}` of {_what(value)}")


def _what(value: DTensor) -> str:
    """What messages call ``value``."""
    name = value.__dict__.get(_NAME)
    return f"parameter `{name}`" if name else f"a sharded tensor of shape {tuple(value.shape)}"


def _refuse_collective(func: Any, values: list[Sharded]) -> None:
    """Refuses ``torch.distributed.all_reduce(p.grad)`` and the like, which would mix different rows of the ranks.

    Raises:
        RuntimeError: one of ``values`` is sharded over several ranks.
    """
    for value in values:
        if not _is_everywhere(value):
            raise RuntimeError(
                f"`{func._schema.name}` of {_what(value)}: each rank holds other rows of it, and a collective of one's "
                "own would mix them. A gradient is the mean over all ranks already: leave the collective out. "
                "`full_tensor()`, on all ranks, gives the whole value, an ordinary tensor."
            )


def _refuse_address(value: DTensor) -> None:
    """Refuses code outside torch that asks for the memory of the whole tensor, which a shard does not have.

    Raises:
        RuntimeError: the code that asks is neither torch's nor this package's.
    """
    caller = str(sys._getframe(2).f_globals.get("__name__", ""))
    if caller.partition(".")[0] not in ("torch", __name__.partition(".")[0]):
        raise RuntimeError(
            f"`{caller}` asks for the memory of {_what(value)} (to write a file?): this rank holds a part of it, a "
            f"DTensor. {_SAVE} safetensors' `save_file(values, path)` takes such full values."
        )
