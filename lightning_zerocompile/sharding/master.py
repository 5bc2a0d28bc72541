"""What `parameters()` yields instead of plain parameters: the masters.

[Note: masters] Under DDP one object is everything at once: what ``parameters()`` yields, what ``module.weight`` is, and
the leaf that autograd knows. Here there are two objects. What user code does to either must have the effect that it has
under DDP, or raise. It must not act on a shard or on a temporary and be lost. The two are:

* :class:`Master`, from ``parameters()``. In a step, an operation that reads it (an L2 term) takes the full value, with
  its gradient. An in-place operation changes the shard and takes full arguments. Hooks run on the reduced gradient.
  While gradients wait for their reduction, a ``grad`` that would be None is this rank's own full sum. Setting
  ``grad`` (``zero_grad``) drops what waits.
* an ``Unsharded`` (unsharded.py), from ``module.weight``. ``requires_grad``, ``grad`` and ``data`` are the parameter's.

Neither appears in traced code.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import unimplemented
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import unserializable_hook

from lightning_zerocompile.sharding import random_numbers
from lightning_zerocompile.sharding.full_values import ON_HOST, full_value
from lightning_zerocompile.sharding.moved import Moved, move_away
from lightning_zerocompile.sharding.sharded import Sharded, leave, watch

if TYPE_CHECKING:
    from lightning_zerocompile.sharding.parameter import ShardedParameter

PARAMETER = "_zerocompile_parameter"
_BINDS = "_zerocompile_binds"

as_plain_tensors = torch._C.DisableTorchFunctionSubclass  # context: masters are DTensors like any other, at no cost

_PROPERTIES = ("__get__", "__set__", "__delete__")
_GRAD: Any = Tensor.grad  # the property itself; torch's stub types it as the value
_GRAD_DTYPE: Any = Tensor.grad_dtype
_REQUIRES_GRAD: Any = Tensor.requires_grad
_COMPUTED = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_DESCRIBING = frozenset(  # answered by the shard's DTensor
    {
    "size", "stride", "dim", "ndimension", "numel", "nelement", "storage_offset", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "data_ptr", "type", "get_device", "is_inference", "is_pinned",
    "is_shared", "has_names", "untyped_storage", "storage", "__len__", "_typed_storage", "__repr__", "__format__",
    "__hash__", "__deepcopy__", "__reduce_ex__", "retain_grad", "is_same_size",
    "dim_order", "register_post_accumulate_grad_hook"
    }
)  # fmt: skip
_COPYING = frozenset({"__repr__", "__format__", "__deepcopy__", "__reduce_ex__"})  # of these, what reads the values
_IN_PLACE = frozenset(  # functions of the module ``operator``; their methods have two underscores on each side
    {
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
    "irshift", "setitem"
    }
)  # fmt: skip


class Master(Sharded):
    """The optimizer's shard of a parameter, see [Note: masters]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Moved in types:
            return NotImplemented  # its own method raises
        kwargs = kwargs or {}
        with as_plain_tensors():
            handler = _HANDLERS.get(func)
            if handler is not None:
                return handler(*args, **kwargs)
            name = getattr(func, "__name__", "")
            if random_numbers.are_drawn(func, name):
                _take_writes((args, kwargs))
                masters = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Master)]
                return random_numbers.draw(func, name, masters, _parameter_of(masters), _whole, args, kwargs)
            scheme = random_numbers.scheme(name, _caller())
            if scheme:
                random_numbers.refuse(scheme, _parameter_of(args[0]))
            if name in _COPYING:
                _take_writes(args)
            if name in _DESCRIBING or (name in _PROPERTIES and func not in _COMPUTED):
                return func(*args, **kwargs)
            written = _written(name, args, kwargs)
            sharded = _parameter_of(written)
            changes = sharded is not None  # a master is written; else it is read, perhaps into a tensor of the user's
            if sharded is None:
                sharded = _parameter_of((args, kwargs))
            directly = not changes and any(isinstance(one, DTensor) for one in tree_leaves(written))
            reads = not changes and sharded is not None and _gives_values(sharded)  # which have what was written
            if directly or not reads:
                _take_writes((args, kwargs))
            if sharded is None or directly:
                return func(*args, **kwargs)
            # beside a tensor of this rank's own the result is this rank's own, too: see [Note: full tensors]
            mixes = not changes and written is None and not sharded.reads.all_alike and _has_plain((args, kwargs))
            if reads or mixes:
                args, kwargs = tree_map(_whole, (args, kwargs))
            elif not changes and written is not None:  # a tensor of the user's (an EMA): a shard of it would be a copy
                args, kwargs = tree_map(_full, (args, kwargs))
            elif not _has_plain(written):  # else a list has tensors of the user's beside masters: both are written
                args, kwargs = tree_map(sharded.like_master, (args, kwargs))
            if changes and _is_made_anew(written, args, kwargs):
                value = sharded.like_master(_made(func, written, args, kwargs))
                func, args, kwargs = Tensor.copy_, (written, value), {}
            try:
                result = func(*args, **kwargs)
                if changes:  # a write through `data` changes no version, and one of a list only that of the first
                    torch.autograd.graph.increment_version(_masters_of(written))
                return result
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise RuntimeError(
                    f"`{name}` mixes parameter `{sharded.name}`, of which this rank holds a shard, with full tensors. "
                    "Do it inside `with strategy.full_parameters(module) as values:`, which gives full values by name."
                ) from error

    data = Tensor.data  # `_HANDLERS` have what reads and sets it

    # Optimizers ask every parameter for `grad` several times a step; `__torch_function__` would take five times as long
    @property  # type: ignore[override, misc, unused-ignore]
    def grad(self) -> Tensor | None:
        sharded = self.__dict__[PARAMETER]()
        updated = False
        if sharded is not None:
            sharded.step_state.looks += 1
            updated = sharded.step_state.updated
            if not updated and not sharded.core.may_have_gradient(sharded.index):
                return None
        with as_plain_tensors():
            found = gradient_of(self, waiting=True)
        if found is None and updated:
            _refuse_clipping(_caller().f_globals.get("__name__"))
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with as_plain_tensors():
            sharded = self.__dict__[PARAMETER]()
            if sharded is not None:
                sharded.step_state.looks += 1
                if _takes_sum(self, sharded, value):
                    return
                value = sharded.rows_of_gradient(value)
                sharded.core.drop_gradient(sharded.index)
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def apply_(self, callable: Callable[[Any], Any]) -> Tensor:
        _take_writes(self)
        super().apply_(callable)
        torch.autograd.graph.increment_version(_masters_of(self))
        return self

    def __tensor_flatten__(self) -> Any:
        if torch._guards.TracingContext.try_get() is not None:
            sharded = self.__dict__[PARAMETER]()
            unimplemented(  # the frame breaks there, and goes on in eager code, which may do this
                gb_type="zerocompile: a sharded parameter that is no attribute",
                context=f"parameter `{'?' if sharded is None else sharded.name}`",
                explanation="Code inside a compiled module takes it from `parameters()` or replaces it "
                "(`torch.func.functional_call`); compiled code can only read it as an attribute of its module.",
                hints=[
                    "Read it as an attribute of its module, or mark the function that does this with "
                    "`torch.compiler.disable`."
                ],
            )
        return super().__tensor_flatten__()  # type: ignore[no-untyped-call, unused-ignore]


skip_code(Master.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]


def _caller() -> FrameType:
    """The frame of user code or torch that called a method of :class:`Master`."""
    return sys._getframe(2)


skip_code(_caller.__code__)


def index_of(master: Tensor) -> int:
    """The runtime's number of a master; raises as :func:`record_of`."""
    return record_of(master).index


def record_of(master: Tensor) -> ShardedParameter:
    """The parameter of a master.

    Raises:
        RuntimeError: the tensor is no master, or its strategy was torn down.
    """
    sharded = master.__dict__[PARAMETER]() if isinstance(master, Master) else None
    if sharded is None:
        raise RuntimeError(
            f"An optimizer holds a parameter of shape {tuple(master.shape)} that is not one of the sharded model. Add "
            "only what `parameters()` of the model yields now."
        )
    return sharded  # type: ignore[no-any-return]


def adopt_master(master: Tensor, sharded: ShardedParameter) -> None:
    """Makes a DTensor the master of ``sharded``. The master does not keep ``sharded`` alive."""
    master.__class__ = Master  # type: ignore[assignment, unused-ignore]
    master.__dict__[PARAMETER] = weakref.ref(sharded)
    watch(master, sharded.reads)


skip_code(adopt_master.__code__)  # as `as_sharded`


def bind_before_accumulation(master: Tensor) -> None:
    """Lets a backward through the master itself add to the reduced gradient.

    [Note: backwards through masters] Outside of a step user code may compute with masters, and run a backward: an L2
    term in ``on_after_backward``. Autograd then adds to the ``grad`` of the master, below Python. It must find the
    reduced gradient there, which is bound only when somebody asks for it. If that is still to come, it is added to
    what autograd has set (``Runtime._bind``). What autograd brings may have another layout than the master.

    In a step user code computes with full values, and autograd does not come to a master. It does where user code hands
    a master to what autograd does not look into, or adds a term from outside of the step to the step's loss. Then each
    rank's rows might get a gradient of its own batch, so this raises.
    """
    this = weakref.ref(master)

    @unserializable_hook  # type: ignore[untyped-decorator, unused-ignore]
    def bind(grad: Tensor) -> Tensor | None:
        found = this()
        with torch.no_grad(), as_plain_tensors():
            if not isinstance(found, Master):
                return None
            sharded = record_of(found)
            if sharded.step_state.in_step or sharded.step_state.awaits_backward:
                raise RuntimeError(_PASSED.format(sharded.name))
            if not isinstance(grad, DTensor):
                raise RuntimeError(_OWN.format(sharded.name))
            gradient_of(found)
            return None if grad.placements == found.placements else grad.redistribute(placements=found.placements)

    with as_plain_tensors():
        trains = master.requires_grad
        master.requires_grad_()
        register: Any = master.register_hook
        master.__dict__[_BINDS] = register(bind)
        master.requires_grad_(trains)


def release_master(master: Tensor) -> None:
    """Makes a master an ordinary DTensor parameter, which no strategy manages."""
    if isinstance(master, Master):
        if (binds := master.__dict__.pop(_BINDS, None)) is not None:
            binds.remove()
        sharded = master.__dict__.pop(PARAMETER)()
        leave(master, "?" if sharded is None else sharded.name)


def refuse_hooks(name: str, parameter: Tensor) -> None:
    """Refuses a user's parameter with hooks (``register_hook``) that would run on the gradient of one rank alone.

    Raises:
        RuntimeError: the parameter ``name`` has such hooks; the message says what to use.
    """
    if parameter._backward_hooks:
        raise RuntimeError(_HOOK.format(name))


def keep_hooks(source: Tensor, target: Tensor) -> None:
    """Lets ``target`` share the post-accumulate hooks of ``source``; handles that users hold remove them there, too."""
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


# ---- what happens to a master ----

_OWN = (
    "Outside of a step a loss gives parameter `{}` from `parameters()` a gradient that is an ordinary tensor. Either "
    "the loss mixes what this rank computes with the parameter, so the gradient would be this rank's own: run the "
    "backward of such a term by itself (`fabric.backward(penalty)`). Or it has an operation whose gradient is computed "
    "from whole values (clamp, where, prod, a mask). In both cases it works to read the parameter as an attribute of "
    "its module, or to compute the term inside the module's forward."
)
_PASSED = (
    "In the backward of a step parameter `{}` itself has got a gradient. It may be this rank's own, and no reduction "
    "would average it. Either the parameter was an argument of a `torch.autograd.Function` or of a reentrant "
    "checkpoint: give them what the module has as an attribute (`module.weight`). Or the loss has a term that was "
    "computed from `parameters()` outside of the step: compute it in the step, or run its backward by itself "
    "(`self.manual_backward(term)`, `fabric.backward(term)`)."
)
CHANGED = (
    "Parameter `{}` was {} after the model was sharded. Change the module in `configure_model` or `setup`, or between "
    "two fits; new values of the same shape and dtype: `with torch.no_grad(): p.copy_(value)`."
)
_HOOK = (
    "`register_hook` on parameter `{}`: a sharded parameter has no gradient of its own until all ranks' are reduced. "
    "Use `register_post_accumulate_grad_hook`, which is called with the parameter when `grad` is the reduced gradient, "
    "or a hook on an activation. (`wandb.watch` registers such hooks: give it log='parameters', on all ranks, and log "
    "`strategy.full_gradients(module)` in `on_before_optimizer_step`, which all ranks call.)"
)


def _parameter_of(arguments: Any) -> ShardedParameter | None:
    """The parameter of the first master in the arguments; None: there is no master, or its strategy is torn down."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Master):
            sharded: ShardedParameter | None = leaf.__dict__[PARAMETER]()
            return sharded
    return None


def _masters_of(arguments: Any) -> list[Tensor]:
    """The masters in the arguments; of what is the ``data`` of one, that master."""
    records = [leaf.__dict__[PARAMETER]() for leaf in tree_leaves(arguments) if isinstance(leaf, Master)]
    return [record.master for record in records if record is not None]


def _gives_values(sharded: ShardedParameter) -> bool:
    """Whether who reads a master gets its full value, with its gradient."""
    state = sharded.step_state
    return state.in_step or (state.awaits_backward and torch.is_grad_enabled())


def _has_plain(arguments: Any) -> bool:
    """Whether a tensor with dimensions that is no DTensor is among the arguments."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.dim() > 0:
            return True
    return False


skip_code(_gives_values.__code__)
skip_code(_has_plain.__code__)  # Dynamo, which skips its caller, must not compile it as a frame of its own


def _take_writes(arguments: Any) -> None:
    """Gives the masters in the arguments what user code has written to their gathered values, before they are used."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Master):
            sharded: ShardedParameter | None = leaf.__dict__[PARAMETER]()
            if sharded is not None:
                sharded.core.write_back_parameter(sharded.index)


def is_in_place(name: str) -> bool:
    """Whether a function or method of this name writes to its first argument, by torch's convention or Python's."""
    return name.strip("_") in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operation writes to in place; None: nothing."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return args[0] if is_in_place(name) and args else None


def _is_made_anew(written: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function such as ``torch.eye`` writes to one master (``out=``) what depends on no tensor."""
    one = isinstance(written, Master) and written is kwargs.get("out")
    return one and sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))) == 1


def _made(func: Any, master: Master, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What such a function makes in the whole size."""
    result: Tensor = func(
        *args, **{**kwargs, "out": torch.empty(master.shape, dtype=master.dtype, device=master.device)}
    )
    return result


def _whole(value: Any) -> Any:
    """The full value of a master (with its gradient, if grad mode is enabled) or of another DTensor."""
    if isinstance(value, Master):
        sharded = value.__dict__[PARAMETER]()
        return value if sharded is None else sharded.read(value)
    if isinstance(value, DTensor):
        return value.full_tensor() if value.requires_grad else full_value(value)
    return value


def _full(value: Any) -> Any:
    """The full value of a DTensor, without its gradient; as any read it raises on a rank that comes to it alone."""
    if not isinstance(value, DTensor):
        return value
    detached: Any = value.detach()
    return detached.full_tensor()


def refuse_hook(master: Tensor, *_: Any, **__: Any) -> NoReturn:
    sharded = _parameter_of(master)
    raise RuntimeError(_HOOK.format("?" if sharded is None else sharded.name))


def _get_data(master: Tensor) -> Tensor:
    _take_writes(master)
    data: Tensor = Tensor.data.__get__(master)  # type: ignore[attr-defined]
    sharded: ShardedParameter | None = master.__dict__[PARAMETER]()
    if sharded is not None:
        adopt_master(data, sharded)
        sharded.give_out(data)
    return data


def _detach(master: Tensor) -> Tensor:
    _take_writes(master)
    detached = Tensor.detach(master)
    if (sharded := _parameter_of(master)) is not None:
        sharded.give_out(detached)
    return detached


def gradient_of(master: Tensor, waiting: bool = False) -> Tensor | None:
    """The reduced gradient of a master, bound first if it is not yet; for use inside :data:`as_plain_tensors`.

    Args:
        master: a master, or any other parameter.
        waiting: if there is no reduced gradient, return what waits for the end of a window or an accumulation.

    Returns:
        The reduced gradient, a DTensor. With ``waiting``, if there is none, this rank's own full sum, [*size], or the
        reduced rows of a gradient that was reduced early, a DTensor. None: there is none of these.
    """
    grad: Tensor | None = _GRAD.__get__(master)
    if grad is not None or not isinstance(master, Master):
        return grad
    sharded = master.__dict__[PARAMETER]()  # no search: an optimizer asks each parameter, several times a step
    if sharded is None:
        return None
    found = sharded.core.unbound_gradient(sharded.index, waiting)
    if found is None:
        return None
    value, kind = found
    return sharded.own_gradient(value, kind.name)  # type: ignore[no-any-return]


def rows_of_gradients(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
    """This rank's rows of the reduced gradients of masters; binds none, which would cost the host more than all else.

    Whoever writes to them says so by ``increment_version`` of the gradients that are bound (:func:`bound_gradient`).

    Returns:
        The masters that have a gradient, and its rows, [<=rows, ...] on the device. None: one of the parameters is no
        master, or its gradient has another layout, is in host memory or waits to be reduced.
    """
    records: list[ShardedParameter] = []
    for one in parameters:
        sharded: ShardedParameter | None = one.__dict__[PARAMETER]() if isinstance(one, Master) else None
        if sharded is None or (records and sharded.core is not records[0].core):
            return None
        records.append(sharded)
    if not records or records[0].core.pending():
        return None
    core = records[0].core
    places = torch.empty(len(records), 0).unbind()
    others = core.lend_gradients([one.index for one in records], places)
    found = [place.grad for place in places]
    core.release_gradients([], places)
    with as_plain_tensors():
        for position in others:  # user code has set them
            master: Any = parameters[position]
            grad: Any = _GRAD.__get__(master)
            if not isinstance(grad, DTensor) or grad.placements != master.placements or ON_HOST in grad.__dict__:
                return None
            found[position] = grad._local_tensor
    having = [(master, rows) for master, rows in zip(parameters, found, strict=True) if rows is not None]
    return [master for master, _ in having], [rows for _, rows in having]


def _takes_sum(master: Tensor, sharded: ShardedParameter, value: Tensor | None) -> bool:
    """Whether ``value`` becomes this rank's own sum, which waits for its reduction and is what ``grad`` has given."""
    if value is None or isinstance(value, DTensor) or _GRAD.__get__(master) is not None:
        return False
    found = sharded.core.unbound_gradient(sharded.index, True)
    if found is None or found[1].name != "SUM" or found[0].shape != value.shape:
        return False
    if found[0].data_ptr() != value.data_ptr():
        with torch.no_grad():
            found[0].copy_(value)
    return True


def bound_gradient(master: Tensor) -> Tensor | None:
    """The ``grad`` that is bound to a master, or None; binds nothing. For use inside :data:`as_plain_tensors`."""
    return _GRAD.__get__(master)  # type: ignore[no-any-return]


def bind_gradient(master: Tensor, grad: Tensor | None) -> None:
    """Binds ``grad`` to a master, and drops no unbound gradient. For use inside :data:`as_plain_tensors`."""
    _GRAD.__set__(master, grad)


def set_data(master: Tensor, value: Tensor) -> None:
    """What ``p.data = value`` does: it copies the value, since the memory stays the strategy's.

    Raises:
        RuntimeError: ``value`` has another shape or dtype than the parameter.
    """
    sharded = _parameter_of(master)
    if sharded is None:  # an ordinary parameter again
        Tensor.data.__set__(master, value)  # type: ignore[attr-defined]
        return
    if tuple(value.shape) != tuple(master.shape) or value.dtype != master.dtype:
        _refuse_layout(sharded, value)
    _take_writes(master)
    for given in sharded.given_out():
        if given is value:
            sharded.give_out(given)
        elif given is not master:
            _part(given)
    sharded.core.disown_values(sharded.index)
    with torch.no_grad():
        master.copy_(sharded.like_master(value))


def replace(sharded: ShardedParameter, parameter: nn.Parameter) -> None:
    """What ``module.weight = parameter`` does: the master stays, and takes its values and its ``requires_grad``.

    The object is not the model's, so from now on it is as one from before the sharding: see [Note: moved parameters].

    Raises:
        RuntimeError: ``parameter`` has another shape or dtype.
    """
    if tuple(parameter.shape) != sharded.size or parameter.dtype not in (sharded.dtype, sharded.master.dtype):
        _refuse_layout(sharded, parameter)
    if parameter.requires_grad:
        sharded.widen()
    sharded.require_grad(parameter.requires_grad)
    set_data(sharded.master, parameter.detach().to(sharded.master.dtype))
    move_away(parameter, sharded)


def _refuse_layout(sharded: ShardedParameter, value: Tensor) -> NoReturn:
    ours, theirs = (f"shape {tuple(one.shape)} in {one.dtype}" for one in (sharded.master, value))
    raise RuntimeError(CHANGED.format(sharded.name, f"given other memory ({theirs}, where {ours} was)"))


def set_memory(master: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What ``p.set_(value)`` does: as ``p.data = value``.

    Raises:
        RuntimeError: it is given a storage, sizes or an offset, or see :func:`set_data`.
    """
    given = [*args, *kwargs.values()]
    value = given[0] if len(given) == 1 else None
    if not isinstance(value, Tensor) or value.shape != master.shape:
        sharded = _parameter_of(master)
        raise RuntimeError(
            f"`set_` of parameter `{'?' if sharded is None else sharded.name}`: its memory stays the strategy's. "
            "`p.data = value` or `p.data.copy_(value)` gives it another value."
        )
    set_data(master, value)
    return master


def _part(given: Any) -> None:
    """Gives what user code has of a parameter's ``data`` memory of its own: in torch it keeps its values."""
    if not isinstance(given, DTensor):  # of a gathered value
        given.data = given.detach().clone()
        return
    given._local_tensor = given._local_tensor.detach().clone()
    given.__dict__.pop(PARAMETER, None)
    given.__class__ = Sharded


def _set_grad_dtype(master: Tensor, value: torch.dtype | None) -> None:
    """Refuses a ``grad_dtype`` other than that at set-up, of which the runtime was told then."""
    sharded, current = _parameter_of(master), _GRAD_DTYPE.__get__(master)
    if sharded is not None and value != current:
        raise RuntimeError(
            f"The `grad_dtype` of parameter `{sharded.name}` was set to {value} after the model was sharded, when it "
            f"was {current}. Set it in `__init__`, `configure_model` or `setup`, before `fit` shards the model."
        )
    _GRAD_DTYPE.__set__(master, value)


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    sharded = _parameter_of(inputs)
    if sharded is None:
        return torch.autograd.grad(outputs, inputs, *args, **kwargs)
    raise RuntimeError(
        f"`torch.autograd.grad` with respect to parameter `{sharded.name}`: the model reads full values that are "
        "gathered from it, so it is in no graph. Call `backward` and read `grad` (the mean over ranks), or "
        "differentiate with respect to full values: `with strategy.full_parameters(module) as values:` and "
        "`torch.func.functional_call`."
    )


def _backward(*args: Any, **kwargs: Any) -> Any:
    sharded = _parameter_of(kwargs.get("inputs"))
    if sharded is not None:
        refuse_input(sharded)
    return torch.autograd.backward(*args, **kwargs)


def _refuse_clipping(module: str | None) -> None:
    """Raises if ``module``, the name of the module that asks for a gradient, is that of torch's clipping.

    Called when the backward has updated the parameters already.
    """
    if module == torch.nn.utils.clip_grad.__name__:
        raise RuntimeError(
            "Gradients cannot be clipped here: with optimizer_in_backward=True the backward has used them already. The "
            "Trainer's `gradient_clip_val` with gradient_clip_algorithm='value' clips in the backward; a norm over all "
            "parameters needs the option off."
        )


def refuse_input(sharded: ShardedParameter) -> NoReturn:
    """Raises for the parameter of ``sharded`` among the inputs of a backward."""
    raise RuntimeError(
        f"`backward(inputs=...)` with parameter `{sharded.name}`: choose what is trained by `requires_grad_` instead."
    )


def _set_requires_grad(master: Tensor, value: bool) -> None:
    _REQUIRES_GRAD.__set__(master, value)
    if (sharded := _parameter_of(master)) is not None:
        sharded.show_to_compilers()


def _requires_grad(master: Tensor, requires_grad: bool = True) -> Tensor:
    _set_requires_grad(master, requires_grad)
    return master


def _iterate(master: Tensor) -> Iterable[Tensor]:
    sharded = _parameter_of(master)
    value = sharded.read(master) if sharded is not None and _gives_values(sharded) else None
    return iter((master if value is None else value).unbind(0))


_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.register_hook: refuse_hook,
    Tensor.detach: _detach,
    Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    Tensor.set_: set_memory,
    _GRAD_DTYPE.__set__: _set_grad_dtype,
    _REQUIRES_GRAD.__set__: _set_requires_grad,
    Tensor.requires_grad_: _requires_grad,
    Tensor.__iter__: _iterate,
    torch.autograd.grad: _grad,
    torch.autograd.backward: _backward,
}
