"""Module parameters -> sharded masters, and back.

[Note: class swap] A sharded module keeps its masters in ``_parameters``, so ``parameters()``, ``state_dict`` keys and
optimizers see what they expect; its class is replaced by a subclass in which each parameter's name is a property that
returns the gathered value. The property calls the traced operator under a compiler and the runtime otherwise; it is
never compiled as a frame of its own (``skip_code``), or its gather would hide in a graph nobody looks into.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.distributed.tensor import DTensor

from lightning_zerocompile import gathered, leaves
from lightning_zerocompile.comparisons import Reads
from lightning_zerocompile.full_values import full_value
from lightning_zerocompile.rows import over_local, shard_like, sharded_if_full
from lightning_zerocompile.sharded import as_sharded, refuse_left, when_zeroed

SLOTS = "_zerocompile_slots"
TRACED = "_zerocompile_traced_"  # + name: what a compiler reads, the arguments of the operator `gather`
BASE = "_zerocompile_base"

FUNCTORCH = (
    "A torch.func transform (grad, vmap, jvp, ...) meets {} of a sharded module, which it cannot differentiate. Give "
    "it full values: `with strategy.full_parameters(module, writeback=False) as values:` and inside "
    "`torch.func.functional_call(module, values, ...)`."
)


@dataclass
class Moment:
    """Whether the user's step runs (the optimizer's is none), and how many regions have been entered."""

    in_step: bool = False
    depth: int = 0


@dataclass(eq=False)
class Slot:
    """One parameter of the model: its master, and how module code reads its full value.

    Tied parameters share one slot.
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
    moment: Moment
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
        with leaves.plain():
            requires_grad = self.master.requires_grad
        value: Tensor = self.core.read(self.index, self.handle, requires_grad, cast)
        if cast is not None:
            return value
        watched = requires_grad and self.moment.depth == 0
        return gathered.as_gathered(value, self, watched)

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
        with torch.inference_mode(False), torch.no_grad(), leaves.plain():
            leaves.bind_gradient(self.master, grad)
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
        with torch.inference_mode(False), torch.no_grad(), leaves.plain():
            grad: DTensor = as_sharded(over_local(local, self.master), self.reads)
            when_zeroed(grad, weakref.WeakMethod(self._drop_waiting))
        return grad

    def _drop_waiting(self) -> None:
        self.core.drop_waiting(self.index)

    def like_master(self, value: Any) -> Any:
        """A full tensor of the parameter's size as this rank's shard of it; anything else as it is."""
        if (
            type(value) in (Tensor, nn.Parameter, gathered.Gathered, gathered.Watched)
            and value.dim() > 0
            and value.shape == self.master.shape
        ):
            return shard_like(value, self.master, value.dtype)
        return value


skip_code(Slot.read.__code__)


# ---- reading ----


def _property(name: str) -> property:
    traced = TRACED + name

    def get(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():
            return torch.ops.zerocompile.gather.default(*self.__dict__[traced])
        return self.__dict__[SLOTS][name].read(self._parameters[name])

    skip_code(get.__code__)
    return property(get)


def _refuse_copy(self: nn.Module, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"A sharded {type(self).__name__} cannot be copied or pickled: this rank holds only its shard. Copy its full "
        "`state_dict` (`strategy.lightning_module_state_dict()`), or the module after `fit`, when it is whole again."
    )


def _load_from_state_dict(self: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
    """Full tensors load into the shards at any time: each rank takes its rows."""
    for name, slot in self.__dict__[SLOTS].items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = sharded_if_full(state_dict[prefix + name], slot.master)
    base: Any = getattr(type(self), BASE)
    base._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)


def _flat_weights(self: nn.RNNBase) -> list[Tensor | None]:
    return [getattr(self, name) if hasattr(self, name) else None for name in self._flat_weights_names]


def _ignore_flat_weights(self: nn.RNNBase, value: object) -> None:
    """RNNs cache their weights in a list; a sharded one reads them anew."""


class ClassCache:
    """One subclass per (class, parameter names), so equal modules keep equal types and share compiled code."""

    def __init__(self) -> None:
        self._classes: dict[tuple[type, frozenset[str], Callable[..., Any] | None], type] = {}

    def swap(self, module: nn.Module, names: frozenset[str], forward: Callable[..., Any] | None = None) -> None:
        """Replaces the module's class; ``forward`` replaces its method (a region: see compile.py)."""
        base = getattr(type(module), BASE, type(module))
        names = names | frozenset(module.__dict__.get(SLOTS, ()))
        forward = forward or type(module).__dict__.get("_zerocompile_forward")
        key = (base, names, forward)
        if key not in self._classes:
            self._classes[key] = self._make(base, names, forward)
        module.__class__ = self._classes[key]
        if isinstance(module, nn.RNNBase):
            module.__dict__.pop("_flat_weights", None)

    @staticmethod
    def _make(base: type, names: frozenset[str], forward: Callable[..., Any] | None) -> type:
        namespace: dict[str, Any] = {name: _property(name) for name in names}
        namespace |= {
            BASE: base,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__deepcopy__": _refuse_copy,
            "__reduce_ex__": _refuse_copy,
        }
        if names:
            namespace["_load_from_state_dict"] = _load_from_state_dict
        if forward is not None:
            namespace["forward"] = namespace["_zerocompile_forward"] = forward
        if issubclass(base, nn.RNNBase):
            namespace["_flat_weights"] = property(_flat_weights, _ignore_flat_weights)
        return type(base.__name__, (base,), namespace)


KEPT = "_zerocompile_kept"


class Kept:
    """What is made once for a class of models and serves every run of it, see [Note: repeated runs] in compile.py.

    It belongs to the class of the whole model and dies with it. A copy of that class (one that is pickled by value)
    starts without.
    """

    def __init__(self) -> None:
        self.classes = ClassCache()
        self.forwards: dict[tuple[type, Callable[..., Any]], Callable[..., Any]] = {}  # of regions
        self.graphs: list[tuple[Any, Any]] = []  # by configuration; the last one used comes last

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


def kept_with(model: nn.Module) -> Kept:
    """What earlier runs have left with the class of ``model``; nothing stays with a class of torch's or Lightning's."""
    owner: Any = getattr(type(model), BASE, type(model))
    if owner.__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning"):
        return Kept()
    if KEPT not in owner.__dict__:
        setattr(owner, KEPT, Kept())
    kept: Kept = owner.__dict__[KEPT]
    return kept


# ---- installing ----


def install(classes: ClassCache, module: nn.Module, name: str, slot: Slot) -> None:
    """Puts the master where the parameter was and lets the module read through the slot."""
    module._parameters[name] = slot.master
    module.__dict__.setdefault(SLOTS, {})[name] = slot
    module.__dict__[TRACED + name] = slot.traced()
    classes.swap(module, frozenset(module.__dict__[SLOTS]))


def refresh(modules: Iterable[nn.Module]) -> bool:
    """Lets the compiler see the slots as they are now: a frozen parameter has another handle, one that stays gathered
    another source.

    Returns:
        Whether the modules hold their own parameters: ``functional_call`` puts others in their place for a while.
    """
    own = True
    with leaves.plain():
        for module in modules:
            members = module.__dict__
            slots = members.get(SLOTS)
            if slots is None:
                continue
            parameters = members["_parameters"]
            for name, slot in slots.items():
                seen, master = members[TRACED + name], slot.master
                if seen[1].requires_grad is not master.requires_grad or seen[0] is not slot.source:
                    members[TRACED + name] = slot.traced()
                own = own and parameters.get(name) is master
    return own


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model``, each once; asked for in every step, and four times as fast as ``modules()``."""
    found, seen = [model], {model}
    for module in found:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def refresh_all(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """:func:`refresh` of every module of ``model``, unless somebody has changed them behind the strategy's back.

    Args:
        model: for the names in messages.
        modules: of ``model``.

    Raises:
        RuntimeError: a parameter was replaced, removed or added; it names the parameter and the way to do it.
    """
    if not refresh(modules):
        _refuse_replaced(model, modules)
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, leaves.Master):
                raise RuntimeError(
                    f"Parameter `{_path(model, module, name)}` was added after the model was sharded, so no other rank "
                    "would see its gradient. Create it in `__init__`, `configure_model` or `setup`."
                )


def _refuse_replaced(model: nn.Module, modules: Sequence[nn.Module]) -> NoReturn:
    names = (
        _path(model, module, name)
        for module in modules
        for name, slot in module.__dict__.get(SLOTS, {}).items()
        if module._parameters.get(name) is not slot.master
    )
    raise RuntimeError(
        f"Parameter `{next(names)}` was replaced or removed after the model was sharded, so it would not be trained. "
        "Change the module in `configure_model` or `setup`, or copy new values into it with `load_state_dict`."
    )


def _path(model: nn.Module, module: nn.Module, name: str) -> str:
    """The fully qualified name of a module's parameter."""
    path = next(path for path, other in model.named_modules() if other is module)
    return f"{path}.{name}" if path else name


def owner(model: nn.Module) -> Any:
    """The C++ runtime that the model is sharded by; None: by none."""
    slots = (slot for module in model.modules() for slot in module.__dict__.get(SLOTS, {}).values())
    return next((slot.core for slot in slots), None)


def check_whole(model: nn.Module) -> None:
    """Raises if a parameter is a shard that no strategy manages.

    Raises:
        RuntimeError: names the parameter and the remedy.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            refuse_left(name)


def refuse_shards(model: nn.Module) -> None:
    """From now on a module of ``model`` that holds a shard says so when it is called or its state is asked for.

    A forward would mix the shard with full tensors, and a ``state_dict`` would hold this rank's rows without a word.
    """
    for path, module in model.named_modules():
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            check = partial(_check_own, path)
            module.register_forward_pre_hook(check)
            module.register_state_dict_pre_hook(check)  # type: ignore[no-untyped-call, unused-ignore]


def _check_own(path: str, module: nn.Module, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            refuse_left(f"{path}.{name}" if path else name)


def unshard(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Makes the model an ordinary module with full parameters on the CPU; collective over the shard group.

    Each parameter gets the dtype back that it had, whatever the optimizer kept it in. On a device no more than one
    parameter is whole at a time. If it raises the model is as it was before.

    Args:
        model: a sharded one.
        group: of the same ranks, on the CPU; it communicates instead of the shard group.
    """
    full: dict[Slot, nn.Parameter] = {}
    for module in model.modules():
        for slot in module.__dict__.get(SLOTS, {}).values():
            if slot not in full:
                value = slot.master.detach()
                whole = full_value(value, group) if isinstance(value, DTensor) else value
                full[slot] = nn.Parameter(whole.to(slot.dtype).to("cpu"), requires_grad=slot.master.requires_grad)
                attributes = {n: v for n, v in vars(slot.master).items() if n not in ("_is_param", leaves.SLOT)}
                full[slot].__dict__.update(attributes)
                if slot.grad_dtype != slot.dtype:
                    full[slot].grad_dtype = slot.grad_dtype
                leaves.keep_hooks(slot.master, full[slot])
    for module in model.modules():
        for name, slot in module.__dict__.get(SLOTS, {}).items():
            module._parameters[name] = full[slot]
    remove(model)


def remove(model: nn.Module) -> None:
    """Gives every module its own class back; parameters stay what they are."""
    for module in model.modules():
        for slot in module.__dict__.get(SLOTS, {}).values():
            leaves.release(slot.master)
        for key in [k for k in module.__dict__ if k.startswith(TRACED) or k == SLOTS]:
            del module.__dict__[key]
        base = getattr(type(module), BASE, None)
        if base is None:
            continue
        module.__class__ = base
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]
