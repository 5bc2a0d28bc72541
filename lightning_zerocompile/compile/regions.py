"""Which modules are compiled, and what happens when one is entered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zerocompile.compile.backend import Code, CompileStats, Graphs, _base
from lightning_zerocompile.compile.progress import Progress
from lightning_zerocompile.config import Config, Lifetime
from lightning_zerocompile.runtime.activation_offload import ActivationOffload, run_again
from lightning_zerocompile.runtime.runtime import Runtime
from lightning_zerocompile.sharding.autocast import forward_of
from lightning_zerocompile.sharding.module_swap import PARAMETERS, REGION, Seen
from lightning_zerocompile.sharding.parameter import StepState
from lightning_zerocompile.sharding.unsharded import plain_inputs

if TYPE_CHECKING:
    from lightning_zerocompile.runtime.core import Runtime as Core
    from lightning_zerocompile.runtime.core import Saved

EAGER = (
    "`{}` ({}) is compiled, but a part of it runs eagerly: {}. Training is right, only slower. Equal modules are not "
    "reported again."
)

_SKIPPED = "torch.compile skipped or disabled code that reads parameters; TORCH_LOGS=graph_breaks says where"

OVER_LIMIT = (
    "`{}` ({}) is compiled, but in {} it runs eagerly where no graph fits: `{}` has {} graphs, torch.compile's limit "
    "(`torch._dynamo.config.recompile_limit`). One more was refused; what did not fit: {}. Results are right, only "
    "slower. Let inputs be more alike (or `dynamic` in `compile_options`), or raise the limit; TORCH_LOGS=recompiles "
    "shows each recompilation. Equal modules are not reported again."
)

HOOKED = (
    "`{}` ({}) runs eagerly as long as hooks are registered on a module that it calls or on all modules: one "
    "compilation serves all equal modules, and would call the hooks of none of them, or of all. Hooks on `{}` itself "
    "do not stop it from being compiled. Equal modules are not reported again."
)


_CONFIGURATIONS = 8  # the last so many configurations of a model's class keep their graphs for later runs


def _graphs_of(runtime: Runtime, config: Config) -> Graphs:
    """The graphs that an equal run in this process has left, or new ones for this and later runs."""
    if config.cuda_graphs:
        return Graphs(config)
    kept, key = runtime.kept.graphs, (config, str(runtime.device), runtime.mesh.size())
    found = next((entry for entry in kept if entry[0] == key), None)
    if found is None:
        found = (key, Graphs(config))
    else:
        kept.remove(found)
    kept.append(found)
    del kept[:-_CONFIGURATIONS]
    return found[1]


@dataclass(frozen=True)
class Fallback:
    """A compiled module of which a part ran eagerly, and why."""

    name: str
    reason: str


@dataclass(eq=False)
class Region:
    """One module that is compiled (or, without compilation, entered) as a whole."""

    name: str
    core: Core
    units: list[int]  # gathered while the module runs
    eager: Callable[..., Any]  # the class's forward
    run: Callable[..., Any]  # the same, compiled once for all equal regions
    seen: Seen = field(default_factory=lambda: Seen(()))  # of the modules inside that hold parameters
    inside: list[nn.Module] = field(default_factory=list)  # all modules that it may call, but not the region itself
    trusted: bool = False  # its code is torch's own: it reads parameters and never writes to them
    regathers: bool = False  # its units are gathered again for its backward, see [Note: entry of backward]
    compiled: bool = False
    ran_eagerly: Callable[[bool], None] = lambda hooked: None  # called if a compiled region ran eagerly, even in part
    step_state: StepState = field(default_factory=StepState)
    checkpointed: bool = False  # it saves its inputs only and runs again in the backward
    offload: ActivationOffload[Saved] | None = None  # of what it saves

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.offload is None:
            return self._saving(module, args, kwargs)
        with self.offload.block():
            return self._saving(module, args, kwargs)

    def _saving(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.checkpointed and torch.is_grad_enabled():
            return run_again(partial(self._run, module), True, *args, **kwargs)
        return self._run(module, *args, **kwargs)

    def _run(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not self.seen.refresh():
            return _base(module).forward(module, *args, **kwargs)  # graphs know the module's own parameters only
        hooked = self.compiled and (has_hooks(self.inside) or _is_given_hooks(args, kwargs))
        compiled = self.compiled and not hooked
        if compiled:
            args, kwargs = plain_inputs(args, kwargs)
        reads = self.core.enter(self.units, self.trusted)
        self.step_state.depth += 1
        try:
            results = (self.run if compiled else self.eager)(module, *args, **kwargs)
        finally:
            self.step_state.depth -= 1
            reads = self.core.leave(self.units) - reads
        if hooked or (compiled and reads > 0):
            self.ran_eagerly(hooked)
        if (self.regathers or compiled) and torch.is_grad_enabled():
            units, name = self.units if self.regathers else [], self.name if compiled else ""
            for result in (results,) if isinstance(results, Tensor) else tree_leaves(results):
                if isinstance(result, Tensor) and result.requires_grad and not result.is_leaf:
                    self.core.watch_backward(result, units, name)
        return results


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks_of = itemgetter(*_HOOKS)  # of a module's `__dict__`; many modules are asked in each forward


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether a call of one of the modules runs hooks of the user's.

    Dynamo traces hooks and does not check later whether they have changed. So a graph would run the hooks that it has
    seen, for all equal modules and for ever. torch's own hooks (``weight_norm``, ``prune``) are a part of what the
    module computes, so they may be traced.
    """
    everywhere = torch.nn.modules.module
    if (
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    ):
        return True
    for module in modules:
        members = module.__dict__
        try:
            kinds = _hooks_of(members)
        except KeyError:  # an older torch has pickled the module, or its `__init__` has called none
            kinds = tuple(members.get(kind) for kind in _HOOKS)
        for hooks in kinds:
            if hooks and any(_is_users(hook) for hook in hooks.values()):
                return True
    return False


def _is_given_hooks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether hooks of the user's are on a module that a region is given as an argument."""
    values = (*args, *kwargs.values()) if kwargs else args
    return any(isinstance(value, nn.Module) and has_hooks(value.modules()) for value in values)


def _called_by(module: nn.Module) -> list[nn.Module]:
    """The modules inside, and those that they hold in lists, tuples or dicts, which torch does not register."""
    inside = dict.fromkeys(module.modules())
    for inner in list(inside):
        for held in vars(inner).values():
            values = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else ()
            for value in values:
                if isinstance(value, nn.Module) and module not in (others := set(value.modules())):  # not its parent
                    inside |= dict.fromkeys(others)
    del inside[module]
    return list(inside)


def _is_users(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or "").partition(".")[0] not in ("torch", "lightning_zerocompile")


class Regions:
    """Turns modules into regions.

    Args:
        runtime: shards the model's parameters.
        config: the strategy's options.
    """

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self.stats, self.progress = CompileStats(), Progress()
        self.compiled = 0  # number of compiled modules
        self.fallbacks: list[Fallback] = []  # one for each kind of equal modules
        self._runtime, self._config = runtime, config
        self._graphs = _graphs_of(runtime, config)
        if config.compile:  # after a compilation Python shows again, at each loader, how Lightning uses torch
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", append=True)
        self._warned: set[tuple[Any, ...]] = set()

    def add(self, name: str, module: nn.Module, units: list[int]) -> None:
        """Makes ``module`` a region. The units in ``units`` stay gathered while it runs; if there are none, its graph
        gathers each parameter where it is used."""
        core, compiled, eager = self._runtime.core, bool(self._config.compile), forward_of(module)
        region = Region(name, core, units, eager, eager, compiled=compiled)
        region.inside = _called_by(module)
        region.seen = Seen([inner for inner in module.modules() if PARAMETERS in inner.__dict__])
        region.checkpointed = bool(units) and self._config.checkpointed
        region.offload = self._runtime.activations if units else None
        region.regathers = bool(units) and self._runtime.policy.lifetime is Lifetime.USE
        if compiled:
            self.compiled += 1
            code = self._graphs.code_of(module, regional=bool(units))
            region.run = partial(_run, self._graphs, self.stats, self.progress, f"`{name}`", code)
            region.ran_eagerly = partial(self._ran_eagerly, name, _base(module), code)
        self._install(module, region)

    def add_leaf(self, name: str, module: nn.Module, unit: int) -> None:
        """Makes one of torch's own layers outside blocks a region that runs eagerly, see [Note: write back]."""
        run = forward_of(module)
        self._install(module, Region(name, self._runtime.core, [unit], run, run, Seen([module]), trusted=True))

    def _install(self, module: nn.Module, region: Region) -> None:
        region.step_state = self._runtime.step_state
        module.__dict__[REGION] = region
        inner = forward_of(module)
        forward = self._runtime.kept.forwards.setdefault((_base(module), inner), _entering(inner))
        self._runtime.classes.swap(module, frozenset(module.__dict__.get(PARAMETERS, ())), forward)

    def _ran_eagerly(self, name: str, base: type, code: Code, hooked: bool) -> None:
        where = "training" if torch.is_grad_enabled() else "inference"
        refused = None if hooked else code.refused()
        kind = (base, hooked, where if refused else "")
        if kind in self._warned:
            return
        self._warned.add(kind)
        if hooked:
            text, reason = HOOKED.format(name, base.__name__, name), "hooks are registered on a module that it calls."
        elif refused is None:
            broken = f"torch.compile broke its graph ({code.broken})" if code.broken else _SKIPPED
            text, reason = EAGER.format(name, base.__name__, broken), f"{broken}."
        else:
            text = OVER_LIMIT.format(name, base.__name__, where, refused.name, refused.graphs, refused.reason)
            reason = (
                f"`{refused.name}` has {refused.graphs} graphs, torch.compile's limit; what did not fit: "
                f"{refused.reason}. Let inputs be more alike, pass "
                "compile_options={'dynamic': True}, or raise the limit."
            )
        self.fallbacks.append(Fallback(name, reason))
        rank_zero_warn(text)


def _run(
    graphs: Graphs, stats: CompileStats, progress: Progress, what: str, code: Code, *args: Any, **kwargs: Any
) -> Any:
    graphs.stats, graphs.running, progress.what = stats, code, what
    before = len(graphs.handed)
    try:
        results = code(*args, **kwargs)
        for handed in graphs.handed[before:]:
            handed.check()
        return results
    finally:
        progress.what = ""
        del graphs.handed[before:]


def _entering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``forward`` that runs through the module's region, or is inlined as it is by an outer compiled graph."""

    def enter(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        region = self.__dict__.get(REGION)
        if region is None or torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        return region(self, args, kwargs)

    enter.__doc__ = forward.__doc__
    enter.__wrapped__ = forward  # type: ignore[attr-defined]
    return enter


def top_level_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children that have parameters, by name. A child that only holds others (ModuleList) is replaced by these."""
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if type(child).forward is nn.Module.forward:
            yield from top_level_modules(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
