"""The one torch.compile call: which modules are regions, with which options and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config as functorch
from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._pytree import tree_leaves

from lightning_zerocompile import gathered
from lightning_zerocompile.casts import forward_is_inlined, forward_of
from lightning_zerocompile.config import Config
from lightning_zerocompile.passes.casts import widen
from lightning_zerocompile.passes.lower import Lower
from lightning_zerocompile.passes.tag import Tag, tag
from lightning_zerocompile.passes.writes import reject_writes
from lightning_zerocompile.policy import Lifetime
from lightning_zerocompile.runtime import Runtime
from lightning_zerocompile.shard import BASE, SLOTS, Moment, refresh

REGION = "_zerocompile_region"

EAGER = (
    "`{}` ({}) is compiled, but a part of it runs eagerly: torch.compile skipped or disabled code that reads "
    "parameters. Training is right, only slower; TORCH_LOGS=graph_breaks says where. Equal modules are not "
    "reported again."
)


@dataclass
class CompileStats:
    """Graphs that our backend compiled. ``forward`` counts inference graphs too."""

    dynamo_graphs: int = 0
    forward: int = 0
    backward: int = 0


class Composed(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """The user's pass, then ours."""

    def __init__(self, first: Callable[[fx.Graph], None], second: CustomGraphPass) -> None:
        self.first, self.second = first, second

    def __call__(self, graph: fx.Graph) -> None:
        self.first(graph)
        self.second(graph)

    def uuid(self) -> Any:
        first = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if first is None else (first, self.second.uuid())


class Counted(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """Counts the graphs that a pass sees, without being part of what the compile cache knows of it."""

    def __init__(self, inner: CustomGraphPass, stats: CompileStats) -> None:
        self.inner, self.stats = inner, stats

    def __call__(self, graph: fx.Graph) -> None:
        reduces = any(n.target is torch.ops.zerocompile.reduce_grad.default for n in graph.nodes)
        self.stats.backward += reduces
        self.stats.forward += not reduces
        self.inner(graph)

    def uuid(self) -> Any:
        return self.inner.uuid()


def inductor_options(config: Config, lower: CustomGraphPass, regional: bool) -> dict[str, Any]:
    """Inductor's configuration: the mode's, the user's on top, ours last; passes of the user run before ours."""
    import torch._inductor.config as inductor

    options: dict[str, Any] = {}
    if config.mode is not None:
        options |= torch._inductor.list_mode_options(config.mode, config.dynamic)
    options |= {name.replace("-", "_"): value for name, value in config.options.items()}
    for slot, ours in (("joint_custom_pre_pass", Tag()), ("post_grad_custom_post_pass", lower)):
        theirs = options.get(slot) or getattr(inductor, slot)
        options[slot] = ours if theirs is None else Composed(theirs, ours)
    options["reorder_for_peak_memory"] = False  # it would move the starts that the passes placed
    if not regional:
        options["allow_buffer_reuse"] = False  # see [Note: memory of shared buffers]
    options["triton.cudagraphs"] = config.cuda_graphs  # whatever the environment asks for
    if hasattr(inductor, "cudagraph_policy"):
        options["cudagraph_policy"] = None
    if config.cuda_graphs:  # see [Note: CUDA graphs]
        options |= {"graph_partition": True, "triton.cudagraph_trees": True}
        options.setdefault("triton.reorder_for_reducing_graph_partitions", False)
    if options.get("cpp_wrapper") and torch.__version__ < "2.12":  # torch sets these for forward graphs only
        compiled_once = {"autotune_at_compile_time": True, "autotune_cublasLt": False, "store_cubin": True}
        for name, value in compiled_once.items():  # without, it tunes a backward's kernels by running our operators
            options.setdefault(f"triton.{name}", value)
    return options


# [Note: CUDA graphs] A replay would pass our operators by. They are tagged `cudagraph_unsafe`, so Inductor cuts its
# graph at each of them, and only what is between two is recorded; it may not move them to have fewer cuts, since that
# would gather earlier and reduce later. What is recorded reads resident values where they are
# (`mark_static_address`); values that stage 3 gathers anew, it copies into its own memory first. It leaves gradients in
# memory that a later replay writes to: what is handed over is copied (`set_copies_gradients`). A step is one
# iteration (`cudagraph_mark_step_begin`): by default each graph called without autograd begins another, which makes
# the last one's results invalid.


def make_backend(config: Config, stats: CompileStats, regional: bool) -> Callable[..., Any]:
    """The backend that torch.compile calls with each of Dynamo's graphs; ``regional`` as in :class:`Lower`."""
    lower = Counted(Lower(regional, config.unit_bytes), stats)
    run = _inductor(config, lower, regional) if config.backend == "inductor" else _aot_eager(lower)

    def zerocompile(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        reject_writes(module)
        widen(module)
        stats.dynamo_graphs += 1
        # as in eager code, where backward runs behind autocast; torch's default traces it inside, which on devices
        # sums bias gradients in float32 and runs the backward of float32 islands in half precision
        with functorch.patch(backward_pass_autocast="off"):  # type: ignore[no-untyped-call, unused-ignore]
            return run(module, inputs)

    return zerocompile


def _inductor(
    config: Config, lower: CustomGraphPass, regional: bool
) -> Callable[[fx.GraphModule, Sequence[Tensor]], Any]:
    from torch._inductor.compile_fx import compile_fx

    options = inductor_options(config, lower, regional)
    return lambda module, inputs: compile_fx(module, inputs, config_patches=options)


def _aot_eager(lower: CustomGraphPass) -> Callable[[fx.GraphModule, Sequence[Tensor]], Any]:
    """The same passes on AOTAutograd's graphs, which then run node by node."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.fx.graph import _BoxedCodeGen

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        tag(joint.graph)
        pair: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
        return pair

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        lower(module.graph)
        module.graph.set_codegen(_BoxedCodeGen())  # an fx.Interpreter would keep what the last run returned
        module.recompile()
        run = module.forward

        def boxed(args: list[Any]) -> Any:
            return run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_graph, partition_fn=partition, keep_inference_input_mutations=True
    )
    return backend


@dataclass(eq=False)
class Region:
    """One module that is compiled (or, without compilation, entered) as a whole."""

    name: str
    core: Any
    units: list[int]  # gathered while the module runs
    run: Callable[..., Any]  # the class's forward, compiled once for all equal regions
    sharded: list[nn.Module] = field(default_factory=list)  # modules inside that hold parameters
    trusted: bool = False  # its code is torch's own: it reads parameters and never writes to them
    regathers: bool = False  # its units are gathered again for its backward, see [Note: entry of backward]
    compiled: bool = False
    ran_eagerly: Callable[[str], None] = lambda name: None  # told when code inside read parameters outside of graphs
    moment: Moment = field(default_factory=Moment)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not refresh(self.sharded):
            return _base(module).forward(module, *args, **kwargs)  # graphs know the module's own parameters only
        if self.compiled:
            for value in (*args, *kwargs.values()):
                gathered.unwatch(value)
        reads = self.core.enter(self.units, self.trusted)
        self.moment.depth += 1
        try:
            results = self.run(module, *args, **kwargs)
        finally:
            self.moment.depth -= 1
            reads = self.core.leave(self.units) - reads
        if self.compiled and reads > 0:
            self.ran_eagerly(self.name)
        if (self.regathers or self.compiled) and torch.is_grad_enabled():
            units, compiled = self.units if self.regathers else [], self.name if self.compiled else ""
            for result in (results,) if isinstance(results, Tensor) else tree_leaves(results):
                if isinstance(result, Tensor) and result.requires_grad and not result.is_leaf:
                    self.core.watch_backward(result, units, compiled)
        return results


class Regions:
    """Turns modules into regions.

    Args:
        runtime: shards the model's parameters.
        config: the strategy's options.
    """

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self.stats = CompileStats()
        self._runtime, self._config = runtime, config
        self._backends = {regional: make_backend(config, self.stats, regional) for regional in (True, False)}
        self._forwards: dict[tuple[type, Callable[..., Any]], Callable[..., Any]] = {}
        self._warned: set[type] = set()
        self._runs: dict[tuple[type, Callable[..., Any], bool], Callable[..., Any]] = {}

    def add(self, name: str, module: nn.Module, units: list[int]) -> None:
        """Makes ``module`` a region. The units in ``units`` stay gathered while it runs; without any, its graph gathers
        each parameter where it is used."""
        sharded = [inner for inner in module.modules() if SLOTS in inner.__dict__]
        regathers = bool(units) and self._runtime.policy.lifetime is Lifetime.USE
        run = self._run(module, regional=bool(units))
        compiled, base = bool(self._config.compile), _base(module)

        def ran_eagerly(name: str) -> None:
            if base not in self._warned:
                self._warned.add(base)
                rank_zero_warn(EAGER.format(name, base.__name__))

        self._install(
            module, Region(name, self._runtime.core, units, run, sharded, False, regathers, compiled, ran_eagerly)
        )

    def add_leaf(self, name: str, module: nn.Module, unit: int) -> None:
        """Makes one of torch's own layers outside blocks a region that runs eagerly, see [Note: write back]."""
        run = forward_of(module)
        self._install(module, Region(name, self._runtime.core, [unit], run, [module], trusted=True))

    def _install(self, module: nn.Module, region: Region) -> None:
        region.moment = self._runtime.moment
        module.__dict__[REGION] = region
        inner = forward_of(module)
        forward = self._forwards.setdefault((_base(module), inner), _entering(inner))
        self._runtime.classes.swap(module, frozenset(module.__dict__.get(SLOTS, ())), forward)

    def _run(self, module: nn.Module, regional: bool) -> Callable[..., Any]:
        """The class's ``forward``, compiled once: all equal regions share its graphs."""
        forward = forward_of(module)
        if not self._config.compile:
            return forward
        key = (_base(module), forward, regional)
        if key not in self._runs:
            backend = self._backends[regional]
            self._runs[key] = torch.compile(_inlining(forward), backend=backend, dynamic=self._config.dynamic)
        return self._runs[key]


def _base(module: nn.Module) -> Any:
    """The user's class of a module whose class may have been swapped."""
    return getattr(type(module), BASE, type(module))


def _inlining(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What to compile for ``forward``; one that is no frame of Dynamo's own needs another round it."""
    if not forward_is_inlined(forward):
        return forward

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return run


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


def whole_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children that have parameters, by name; of those that only hold others (ModuleList), theirs."""
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if type(child).forward is nn.Module.forward:
            yield from whole_modules(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def remove_regions(model: nn.Module) -> None:
    """Forgets the regions of every module; classes are restored by ``shard.remove``."""
    for module in model.modules():
        module.__dict__.pop(REGION, None)


def is_compiled(module: nn.Module) -> bool:
    """Whether the user compiled this module itself, in any of torch's ways."""
    compiled_forward = getattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable", None)
    return (
        isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        or module._compiled_call_impl is not None
        or compiled_forward is not None
        or getattr(module, "_compiler_ctx", None) is not None
    )
