"""Puts sharded masters in the place of module parameters, and full parameters back.

[Note: class swap] A sharded module keeps its masters in ``_parameters``, so ``parameters()``, ``state_dict`` keys and
optimizers see what they expect. Its class is replaced by a subclass, in which each parameter's name is a property that
returns the gathered value. Under a compiler the property calls the traced operator, otherwise the runtime. It is never
compiled as a frame of its own (``skip_code``): its gather would be in a graph that none of our passes sees.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from lightning_zerocompile.ranks.consistency import Reads
from lightning_zerocompile.sharding.checks import check_whole
from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.layout import sharded_if_full
from lightning_zerocompile.sharding.master import (
    CHANGED,
    Master,
    as_plain_tensors,
    keep_hooks,
    release_master,
    replace,
)
from lightning_zerocompile.sharding.moved import bring_back
from lightning_zerocompile.sharding.parameter import ATTRIBUTES, CLASSES, TRACED, Core, ShardedParameter, StepState
from lightning_zerocompile.sharding.sharded import refuse_left, sharded_as
from lightning_zerocompile.sharding.unsharded import sharded_of

REGION = "_zerocompile_region"


INPUTS = "_zerocompile_inputs"  # the handle of the hook that casts what the module is passed

ISLAND = "_zerocompile_island"  # the `forward` of a module that computes in float32, see [Note: float32 islands]
PARAMETERS = "_zerocompile_parameters"
CAST = TRACED + "cast:"  # + name: the source of the traced gather of the cast, an empty tensor of its dtype
BASE = "_zerocompile_base"


# ---- reading ----


def _property(name: str, marked: bool) -> property:
    """``marked``: whether the parameter has attributes, see [Note: attributes of parameters]."""
    traced, attributes = TRACED + name, ATTRIBUTES + name

    def get(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():
            with torch.enable_grad():  # as a parameter, it has gradients where it is used, not where it is read
                value = torch.ops.zerocompile.gather.default(*self.__dict__[traced])
            if marked:
                for attribute, given in self.__dict__[attributes].items():
                    setattr(value, attribute, given)
            return value
        try:
            current = self._parameters[name]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None
        return self.__dict__[PARAMETERS][name].read(current)

    def put(self: nn.Module, value: object) -> None:
        """Called if ``value`` is no parameter, see [Note: parameters under other names]."""
        if name in self._parameters:
            raise AttributeError(f"`{name}` of a sharded {type(self).__name__} is a parameter: it cannot be set so.")
        _forget_removed(self, _classes_of(self, name))
        object.__setattr__(self, name, value)

    skip_code(get.__code__)
    return property(get, put)


# ---- changes while the model is trained ----


def _register_parameter(self: nn.Module, name: str, param: Any) -> None:
    """``nn.Module.register_parameter``, which ``module.name = parameter`` calls, too.

    [Note: parameters under other names] ``torch.nn.utils.prune`` in the middle of a fit does three things. It registers
    the value that it has read from the module as a parameter under a second name, deletes the first name from
    ``_parameters``, and gives the module a plain tensor of the first name. Its ``remove`` does the reverse with the
    object from ``_parameters``. The value and the object both stand for the same master. So from here on the module
    reads the master through a property of the new name, and the old name's property is removed as soon as something
    else is put there. None of this communicates, and the parameter stays in its unit.

    Of a new parameter in the place of another one the master takes the values, see :func:`replace`. One under a name of
    its own is found when the next step begins, see :func:`refresh_all`.

    A parametrization that a forward registers and removes again (PEFT's LoRA on the weights of experts) deletes a name
    and brings it back. Meanwhile the module's class is one of torch's, derived from the one that is made here. Nothing
    is new then, so nothing changes but ``_parameters``.
    """
    sharded = sharded_of(param) if isinstance(param, Tensor) else None
    held = self.__dict__.get(PARAMETERS, {}).get(name) if self._parameters.get(name) is not None else None
    if sharded is None and held is not None and isinstance(param, nn.Parameter):
        replace(held, param)
        return
    new = sharded is not None and self.__dict__.get(PARAMETERS, {}).get(name) is not sharded  # under this name
    classes = _classes_of(self, name) if new else None
    base: Any = getattr(type(self), BASE)
    base.register_parameter(self, name, param if sharded is None else sharded.master)
    if sharded is not None and classes is not None:
        _forget_removed(self, classes)
        classes.add(self, name, sharded)


def _classes_of(module: nn.Module, name: str) -> ClassCache:
    """What has made the module's class, which changes with the names of its parameters.

    Raises:
        RuntimeError: somebody has derived another class from it, and given that to the module.
    """
    classes: ClassCache | None = type(module).__dict__.get(CLASSES)
    if classes is None:
        raise RuntimeError(
            f"Parameter `{name}` of a sharded {getattr(type(module), BASE).__qualname__} gets another name while the "
            f"module has another class, {type(module).__qualname__}, so the new name could not be read. First remove "
            "the parametrization: `torch.nn.utils.parametrize.remove_parametrizations(module, name)`."
        )
    return classes


def _forget_removed(module: nn.Module, classes: ClassCache) -> None:
    """Removes the module's properties for names under which it has no parameter any more."""
    members = module.__dict__
    held = members.get(PARAMETERS, {})
    for name in [name for name in held if name not in module._parameters]:
        for key in (TRACED + name, CAST + name, ATTRIBUTES + name):
            members.pop(key, None)
        del held[name]
    classes.swap(module, frozenset(held))


def _refuse_copy(self: nn.Module, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"A sharded {type(self).__name__} cannot be pickled or copied by `copy.copy`: this rank holds only its shard. "
        "`copy.deepcopy`, on all ranks, makes a whole copy; or take its full `state_dict` "
        "(`strategy.lightning_module_state_dict()`), or the module after `fit`, when it is whole again."
    )


def _copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy``: an ordinary module with full parameters, on every rank's device; collective.

    [Note: copies] ``memo`` is deepcopy's own table of what is copied already, by ``id``. Each master's copy is put
    there first, so that everything that refers to the master (a tied module, a list) gets the same full parameter. If
    an optimizer was copied before, the table has a copy of the rows, which the full parameter replaces.

    Raises:
        RuntimeError: another rank does not copy the module.
    """
    found = [sharded for module in modules_of(self) for sharded in module.__dict__.get(PARAMETERS, {}).values()]
    found = [sharded for sharded in found if isinstance(memo.get(id(sharded.master), sharded.master), DTensor)]
    if found:
        reads = found[0].reads
        reads.compare(f"a copy of a sharded {type(self).__name__} with {len(found)} parameters")
        found[0].core.write_back()
        with reads.alike(), torch.no_grad(), as_plain_tensors():
            for sharded in found:
                value = sharded.master.detach()
                whole = full_value(value) if isinstance(value, DTensor) else value
                whole = whole.to(sharded.dtype).clone()
                memo[id(sharded.master)] = nn.Parameter(whole, requires_grad=sharded.master.requires_grad)
    base = getattr(type(self), BASE)
    # What the class gives to a copy; that of a parametrized module refuses, and torch's own `deepcopy` of it takes all.
    state: Any = self.__dict__ if is_parametrized(self) else object.__reduce_ex__(self, 4)[2]
    state = {name: value for name, value in state.items() if not name.startswith("_zerocompile")}
    copied: nn.Module = base.__new__(base)
    memo[id(self)] = copied
    copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call, unused-ignore]
    if (inputs := self.__dict__.get(INPUTS)) is not None:
        del copied._forward_pre_hooks[inputs.id], copied._forward_pre_hooks_with_kwargs[inputs.id]
    if isinstance(copied, nn.RNNBase):
        copied._flat_weights = [getattr(copied, name, None) for name in copied._flat_weights_names]
    return copied


def _described(self: nn.Module) -> nn.Module:
    """The module with masters as its attributes, for code that describes it.

    torch's layers read their ``bias`` to print themselves. One rank may print alone, so that must not gather.
    """
    base: Any = getattr(type(self), BASE)
    seen: nn.Module = object.__new__(base)
    seen.__dict__.update(self.__dict__)
    return seen


def _repr(self: nn.Module) -> str:
    return repr(_described(self))


def _extra_repr(self: nn.Module) -> str:
    return _described(self).extra_repr()


def _get_parameter(self: nn.Module, target: str) -> nn.Parameter:
    """What ``named_parameters`` yields under this name. torch's own method would read the attribute, and so gather."""
    path, _, name = target.rpartition(".")
    module = self.get_submodule(path)
    if name in module.__dict__.get(PARAMETERS, ()) and (parameter := module._parameters.get(name)) is not None:
        return parameter
    base: Any = getattr(type(self), BASE)
    return base.get_parameter(self, target)  # type: ignore[no-any-return]


def _load_from_state_dict(self: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
    """Loads full tensors into the shards, at any time: each rank takes its rows.

    With ``assign=True`` torch makes parameters of them, whose values the masters take, see :func:`replace`.
    """
    assigns = bool(args) and args[0].get("assign_to_params_buffers", False)
    for name, sharded in self.__dict__[PARAMETERS].items():
        if prefix + name in state_dict and not assigns:
            sharded.widen_for(state_dict[prefix + name])
            value = sharded_if_full(state_dict[prefix + name], sharded.master)
            state_dict[prefix + name] = sharded_as(value, sharded.master)  # the module's own hooks get it
    base: Any = getattr(type(self), BASE)
    base._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)


_SYNCED = "synced_gpus"  # transformers' name of an argument of `generate`


def _is_generate(function: Any) -> bool:
    """Whether ``function`` is a `generate` as transformers writes it, which can wait for the other ranks."""
    return inspect.isfunction(function) and _SYNCED in inspect.signature(function).parameters


def _generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """transformers' ``generate``, which runs as many forwards on each rank as the longest text of all needs.

    [Note: generation] Each forward at stage 3 takes all ranks, and their texts differ in length. transformers syncs the
    ranks by itself for strategies that it knows (``synced_gpus=None``). It does not know this one, so the argument is
    set here. transformers' synchronisation blocks inside torch, so the ranks first compare that all of them generate.
    Where no forward gathers (stages 1 and 2, kept parameters, inside ``full_parameters``) ranks may generate alone, and
    nothing is synced. Inside ``strategy.unequal()`` nothing is synced either: there no rank runs forwards for others.

    Raises:
        RuntimeError: another rank does not generate.
    """
    base: Any = getattr(type(self), BASE)
    call = inspect.signature(base.generate).bind_partial(self, *args, **kwargs)
    if call.arguments.get(_SYNCED) is None and (reads := _gathering(self)) is not None:
        reads.compare(f"`generate` of a sharded {base.__name__}", patient=True)
        call.arguments[_SYNCED] = True
    return base.generate(*call.args, **call.kwargs)


def _gathering(model: nn.Module) -> Reads | None:
    """What compares the ranks, if a forward of ``model`` needs all of them; None: ranks may run it alone."""
    found: list[ShardedParameter] = [
        sharded for module in modules_of(model) for sharded in module.__dict__.get(PARAMETERS, {}).values()
    ]
    with as_plain_tensors():
        used = [sharded for sharded in found if sharded.lives_for_a_use and sharded.master.numel()]
        alone = not used or dist.get_world_size() == 1
    return None if alone or used[0].core.lent_unit() or used[0].core.unequal() else used[0].reads


def _flat_weights(self: nn.RNNBase) -> list[Tensor | None]:
    return [getattr(self, name) if hasattr(self, name) else None for name in self._flat_weights_names]


def _ignore_flat_weights(self: nn.RNNBase, value: object) -> None:
    """RNNs cache their weights in a list. A sharded one reads them anew, so the list is dropped."""


class _Unheard:
    """Keeps the classes that are made here from their base's ``__init_subclass__``, as of a registry of layers.

    It has no ``__slots__``: an object cannot be given a class of another layout.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class ClassCache:
    """Makes one subclass per class, parameter names and forward: equal modules keep equal types, and share code.

    The names of parameters with attributes count, too: a graph that was traced where a parameter has none tests nothing
    about them but the class, see [Note: attributes of parameters].
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[type, frozenset[str], frozenset[str], Callable[..., Any] | None], type] = {}

    def swap(self, module: nn.Module, names: frozenset[str], forward: Callable[..., Any] | None = None) -> None:
        """Replaces the module's class by a subclass.

        Args:
            module: the module.
            names: names to have properties, beside those that the module has already.
            forward: replaces the method (for a region, see compile/regions.py); None: it stays as it is.
        """
        base = getattr(type(module), BASE, type(module))
        names = names | frozenset(module.__dict__.get(PARAMETERS, ()))
        forward = forward or type(module).__dict__.get("_zerocompile_forward")
        marked = frozenset(name for name in names if ATTRIBUTES + name in module.__dict__)
        key = (base, names, marked, forward)
        if key not in self._classes:
            self._classes[key] = self._make(base, names, marked, forward)
        module.__class__ = self._classes[key]
        if isinstance(module, nn.RNNBase):
            module.__dict__.pop("_flat_weights", None)

    def add(self, module: nn.Module, name: str, sharded: ShardedParameter) -> None:
        """Lets the module read the parameter ``name``, which is in its ``_parameters``, through ``sharded``."""
        module.__dict__.setdefault(PARAMETERS, {})[name] = sharded
        module.__dict__[TRACED + name] = sharded.traced()
        sharded.step_state.changes += 1
        if not any(held() is module and known == name for held, known in sharded.places):
            sharded.places.append((weakref.ref(module), name))
        sharded.show_attributes()
        self.swap(module, frozenset(module.__dict__[PARAMETERS]))

    def _make(
        self, base: type, names: frozenset[str], marked: frozenset[str], forward: Callable[..., Any] | None
    ) -> type:
        namespace: dict[str, Any] = {name: _property(name, name in marked) for name in names}
        namespace |= {
            BASE: base,
            CLASSES: self,
            "register_parameter": _register_parameter,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__deepcopy__": _copy,
            "get_parameter": _get_parameter,
            "__reduce_ex__": _refuse_copy,
        }
        if _is_generate(getattr(base, "generate", None)):
            namespace["generate"] = _generate
        if names:
            namespace |= {"_load_from_state_dict": _load_from_state_dict, "__repr__": _repr, "extra_repr": _extra_repr}
        if forward is not None:
            namespace["forward"] = namespace["_zerocompile_forward"] = forward
        if issubclass(base, nn.RNNBase):
            namespace["_flat_weights"] = property(_flat_weights, _ignore_flat_weights)
        if issubclass(base, nn.ParameterList):
            namespace["__getitem__"] = _item
        owner = next(one for one in base.__mro__ if "__init_subclass__" in one.__dict__)
        if owner.__module__ in ("builtins", "typing"):
            return type(base.__name__, (base,), namespace)
        return type(base.__name__, (_Unheard, base), namespace)


def _item(parameters: Any, index: Any) -> Any:
    """``parameters[index]`` of a list of parameters. A slice is a plain list: torch would make new parameters of it."""
    if isinstance(index, slice):
        return [parameters[position] for position in range(len(parameters))[index]]
    return getattr(type(parameters), BASE).__getitem__(parameters, index)


KEPT = "_zerocompile_kept"


class Kept:
    """What is made once for a class of models, for all its runs, see [Note: repeated runs] in compile/backend.py.

    It belongs to the class of the whole model and dies with it. A copy of that class (one that is pickled by value)
    starts with an empty one.
    """

    def __init__(self) -> None:
        self.classes = ClassCache()
        self.forwards: dict[tuple[type, Callable[..., Any]], Callable[..., Any]] = {}  # the regions' forwards
        self.islands: dict[tuple[Callable[..., Any], torch.dtype | None], Callable[..., Any]] = {}  # the islands' ones
        self.graphs: list[tuple[Any, Any]] = []  # by configuration; the last one used comes last

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


def kept_with(model: nn.Module) -> Kept:
    """The :class:`Kept` of the class of ``model``. For a class of torch's or Lightning's it is new at each call."""
    owner: Any = getattr(type(model), BASE, type(model))
    if owner.__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning"):
        return Kept()
    if KEPT not in owner.__dict__:
        setattr(owner, KEPT, Kept())
    kept: Kept = owner.__dict__[KEPT]
    return kept


# ---- installing ----


def install(classes: ClassCache, module: nn.Module, name: str, sharded: ShardedParameter) -> None:
    """Puts the master of ``sharded`` where the parameter was, and lets the module read it through ``sharded``."""
    module._parameters[name] = sharded.master
    classes.add(module, name, sharded)


def swap_others(classes: ClassCache, model: nn.Module) -> None:
    """Swaps the classes of modules that hold sharded modules, too: for example, their ``deepcopy`` must be whole."""
    for module in modules_of(model):
        compiled = isinstance(module, torch._dynamo.OptimizedModule)  # such a module asks the one inside for everything
        if (
            not compiled
            and not hasattr(type(module), BASE)
            and any(PARAMETERS in inner.__dict__ for inner in modules_of(module))
        ):
            classes.swap(module, frozenset())


def refresh(modules: Iterable[nn.Module]) -> bool:
    """Lets the compiler see the parameters as they are now.

    A parameter that was frozen or unfrozen has another handle, and one that stays gathered from now on has another
    source.

    Returns:
        Whether the modules hold their own parameters: ``functional_call`` puts others in their place for a while.
    """
    own = True
    with as_plain_tensors():
        for module in modules:
            members = module.__dict__
            sharded_parameters = members.get(PARAMETERS)
            if sharded_parameters is None:
                continue
            parameters = members["_parameters"]
            for name, sharded in sharded_parameters.items():
                seen, master = members[TRACED + name], sharded.master
                if seen[1].requires_grad is not master.requires_grad or seen[0] is not sharded.source:
                    members[TRACED + name] = sharded.traced()
                    sharded.step_state.changes += 1
                own = own and parameters.get(name) is master
    return own


class Seen:
    """What compilers see of the parameters of some modules, brought up to date whenever these are entered.

    [Note: cheap refresh] Mostly nothing has changed since the last time. To go through the records, handles and masters
    of a block in Python takes the host longer than to enter the block. So what was seen is kept, and compared: which
    names the modules have, whether they hold the masters under them, which of these require grad, and whether anything
    else has changed what a compiler reads (``StepState.changes``).

    Args:
        modules: those that may have parameters.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._held: list[tuple[nn.Module, list[tuple[str, nn.Parameter]]]] = []  # the masters that each module holds
        self._numbers: list[int] = []  # of the masters in the runtime
        self._trainable: list[bool] = []
        self._changes = 0
        self._first: ShardedParameter | None = None  # all have the same runtime; None: nothing is known

    def refresh(self) -> bool:
        """See the function :func:`refresh`."""
        if self._is_current():
            return True
        own = refresh(self._modules)
        self._first = None
        if own:
            self._note()
        return own

    def _is_current(self) -> bool:
        first = self._first
        if first is None or first.step_state.changes != self._changes:
            return False
        for module, held in self._held:
            members = module.__dict__
            if len(members.get(PARAMETERS, ())) != len(held):
                return False
            parameters = members["_parameters"]
            for name, master in held:
                if parameters.get(name) is not master:
                    return False
        return first.core.trainable(self._numbers) == self._trainable

    def _note(self) -> None:
        self._held, self._numbers = [], []
        for module in self._modules:
            sharded_parameters = module.__dict__.get(PARAMETERS)
            if sharded_parameters is None:
                continue
            self._held.append((module, [(name, one.master) for name, one in sharded_parameters.items()]))
            for sharded in sharded_parameters.values():
                self._first = sharded
                self._numbers.append(sharded.index)
        if self._first is not None:
            self._changes = self._first.step_state.changes
            self._trainable = self._first.core.trainable(self._numbers)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model``, each once. Called in every step, so it is four times as fast as ``modules()``."""
    found, seen = [model], {model}
    for module in found:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def refresh_all(model: nn.Module, modules: Sequence[nn.Module], step_state: StepState) -> None:
    """Calls :func:`refresh` for every module of ``model``, and looks whether it has the same parameters.

    Args:
        model: the model, for names.
        modules: the modules of ``model``.
        step_state: of its parameters.

    Raises:
        RuntimeError: a parameter was replaced, removed or added (it names the parameter and the way to do it), or
            another strategy has taken over the model.
    """
    if step_state.taken:
        raise RuntimeError(
            "Another Trainer or Fabric has been run with this module, or with a part of it, inside this run, and has "
            "made it whole. Run it with `copy.deepcopy(module)`, which all ranks make, or after this run."
        )
    if not refresh(modules):
        _refuse_replaced(model, modules)
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, Master):
                raise RuntimeError(CHANGED.format(path_of(model, module, name), "added"))


def _refuse_replaced(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for name, sharded in module.__dict__.get(PARAMETERS, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not sharded.master:
                how = "removed" if parameter is None else "replaced"
                raise RuntimeError(CHANGED.format(path_of(model, module, name), how))


def path_of(model: nn.Module, module: nn.Module, name: str) -> str:
    """The fully qualified name, in ``model``, of the parameter ``name`` of ``module``."""
    path = next(path for path, other in model.named_modules() if other is module)
    return f"{path}.{name}" if path else name


def owner_of(model: nn.Module) -> Core | None:
    """The C++ runtime that the model is sharded by; None: the model is not sharded."""
    return next((sharded.core for sharded in _sharded_in(model)), None)


def _sharded_in(model: nn.Module) -> Iterator[ShardedParameter]:
    """What the model's modules hold; tied parameters come again."""
    for module in model.modules():
        yield from module.__dict__.get(PARAMETERS, {}).values()


def refuse_shards(model: nn.Module) -> None:
    """Lets each module of ``model`` that holds a shard raise when it is called, or when its state is asked for.

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


def unshard_parameters(model: nn.Module) -> dict[Tensor, Tensor]:
    """Makes the model an ordinary module with full parameters on the CPU; collective over the shard group.

    Each parameter gets the dtype back that it had, whatever the optimizer kept it in. On a device no more than one
    parameter is whole at a time. If this raises, the model is as it was before.

    Args:
        model: a sharded model.

    Returns:
        The whole parameters, by their masters.
    """
    full: dict[ShardedParameter, nn.Parameter] = {}
    for module in model.modules():
        for sharded in module.__dict__.get(PARAMETERS, {}).values():
            if sharded not in full:
                value = _whole_value(sharded)
                with as_plain_tensors():
                    full[sharded] = whole = _whole_parameter(sharded, value)
                    whole.__dict__.update(sharded.attributes())
                    if sharded.grad_dtype != sharded.dtype:
                        whole.grad_dtype = sharded.grad_dtype
                    keep_hooks(sharded.master, whole)
    for module in model.modules():
        for name, sharded in module.__dict__.get(PARAMETERS, {}).items():
            if module._parameters.get(name) is sharded.master:  # else somebody has put another one there
                module._parameters[name] = full[sharded]
    restore_classes(model)
    return {sharded.master: parameter for sharded, parameter in full.items()}


def _whole_value(sharded: ShardedParameter) -> Tensor:
    value = sharded.master.detach()
    whole = full_value(value) if isinstance(value, DTensor) else value
    return whole.to(sharded.dtype).to("cpu")


def _whole_parameter(sharded: ShardedParameter, value: Tensor) -> nn.Parameter:
    """``value`` as a parameter: the same object as before the sharding, unless that was on the meta device."""
    original, requires_grad = sharded.original, sharded.master.requires_grad
    if not original.is_meta:
        return bring_back(original, value, requires_grad)
    return nn.Parameter(value, requires_grad=requires_grad)


def restore_classes(model: nn.Module) -> None:
    """Gives every module its own class back. Parameters stay what they are, but masters are no longer managed."""
    for module in model.modules():
        for sharded in module.__dict__.get(PARAMETERS, {}).values():
            release_master(sharded.master)
        for key in [k for k in module.__dict__ if k.startswith(TRACED) or k == PARAMETERS]:
            del module.__dict__[key]
        base = getattr(type(module), BASE, None)
        if base is None:
            continue
        module.__class__ = base
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]


def remove_regions(model: nn.Module) -> None:
    """Removes every module's region, island and cast of inputs; :func:`restore_classes` restores the classes."""
    for module in model.modules():
        module.__dict__.pop(ISLAND, None)
        module.__dict__.pop(REGION, None)
        inputs = module.__dict__.pop(INPUTS, None)
        if inputs is not None:
            inputs.remove()


def make_whole(model: nn.Module) -> dict[Tensor, Tensor]:
    """Makes the model whole, on the CPU, whichever engine has sharded it; collective.

    Returns:
        The whole parameters, by their masters.
    """
    owner = owner_of(model)
    if owner is not None:
        owner.write_back()
    remove_regions(model)
    parameters = unshard_parameters(model)
    model.cpu()
    return parameters


def take_over(model: nn.Module) -> None:
    """Makes a model whole that another strategy has left sharded (``unshard_after_fit=False``); collective if it has.

    Raises:
        RuntimeError: the model has a parameter that cannot be sharded, see :func:`check_whole`.
    """
    if owner_of(model) is not None:
        for sharded in _sharded_in(model):
            sharded.step_state.taken = True
        make_whole(model)
    check_whole(model)
