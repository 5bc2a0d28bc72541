"""The backend of our torch.compile calls: Inductor or AOTAutograd alone, with our passes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch
from torch import Tensor, fx, nn
from torch._guards import CompileContext
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.graph import _BoxedCodeGen
from torch.utils._pytree import tree_leaves

from lightning_zerocompile.compile.passes.inline_regions import inline_regions
from lightning_zerocompile.compile.passes.place_communication import PlaceCommunication
from lightning_zerocompile.compile.passes.recompute import PrepareJointGraph, SaveRandom, save_random, saves_a_tuple
from lightning_zerocompile.compile.passes.reject_writes import Handed, handed_on, reject_writes, takes_weights
from lightning_zerocompile.compile.passes.unify_casts import unify_casts
from lightning_zerocompile.config import Config
from lightning_zerocompile.sharding.autocast import forward_is_inlined, forward_of
from lightning_zerocompile.sharding.module_swap import BASE
from lightning_zerocompile.sharding.plan import signature
from lightning_zerocompile.sharding.unsharded import plain_inputs


@dataclass
class CompileStats:
    """Graphs that were compiled since set-up, also those that came from a compile cache of torch's. Graphs that an
    earlier run in this process has left are not counted (see [Note: repeated runs]).

    Attributes:
        dynamo_graphs: all of Dynamo's graphs.
        forward: the graphs that read parameters, for training or for inference.
        backward: the graphs among these that have a backward.
        recompilations: of all graphs, those for code that had a graph already.
    """

    dynamo_graphs: int = 0
    forward: int = 0
    backward: int = 0
    recompilations: int = 0

    def add(self, module: fx.GraphModule) -> None:
        """Counts one of Dynamo's graphs. The passes cannot count: they do not run if a compile cache has the graph."""
        self.dynamo_graphs += 1
        number = CompileContext.current_compile_id()
        self.recompilations += number is not None and bool(number.frame_compile_id)
        nodes = [node for inner in module.modules() if isinstance(inner, fx.GraphModule) for node in inner.graph.nodes]
        if any("zerocompile.gather" in str(node.target) for node in nodes if node.op == "call_function"):
            self.forward += 1
            results = next(node for node in module.graph.nodes if node.op == "output").all_input_nodes
            values = tree_leaves([node.meta.get("example_value") for node in results])
            trains = any(isinstance(value, Tensor) and value.requires_grad for value in values)
            self.backward += trains and torch.is_grad_enabled()


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


def inductor_options(config: Config, lower: CustomGraphPass, regional: bool) -> dict[str, Any]:
    """Inductor's configuration: the mode's options, then the user's, then ours. The user's passes run before ours."""
    import torch._inductor.config as inductor

    options: dict[str, Any] = {}
    if config.mode is not None:
        options |= torch._inductor.list_mode_options(config.mode, config.dynamic)
    options |= {name.replace("-", "_"): value for name, value in config.options.items()}
    passes: dict[str, CustomGraphPass] = {
        "joint_custom_pre_pass": PrepareJointGraph(),
        "post_grad_custom_post_pass": lower,
    }
    if config.activation_budget is not None:
        passes["joint_custom_post_pass"] = SaveRandom()  # after Inductor has put its own random operators in
    for place, ours in passes.items():
        theirs = options.get(place) or getattr(inductor, place)
        options[place] = ours if theirs is None else Composed(theirs, ours)
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
        for name, value in compiled_once.items():  # else it tunes a backward's kernels by running our operators
            options.setdefault(f"triton.{name}", value)
    return options


# [Note: CUDA graphs] A replay would not run our operators. They are tagged `cudagraph_unsafe`, so Inductor cuts its
# graph at each of them and records only what is between two cuts. Inductor may not move our operators to have fewer
# cuts, since that would gather earlier and reduce later. A recorded part reads resident values where they are
# (`mark_static_address`). Stage 3 gathers equal blocks at fixed addresses ([Note: fixed places] in
# csrc/fixed_places.cpp). Other values that it gathers anew are first copied into the recorded part's own memory. It
# leaves gradients in memory that a later replay writes to: see [Note: gradients of CUDA graphs] in csrc/gradients.cpp.
# A step is one iteration (`cudagraph_mark_step_begin`). By default each graph that is called without autograd would
# begin another iteration, which makes the last one's results invalid.


def make_backend(
    config: Config, count: Callable[[fx.GraphModule], None], hand_on: Callable[[Handed], None], regional: bool
) -> Callable[..., Any]:
    """The backend that torch.compile calls with each of Dynamo's graphs.

    Args:
        count: called with each graph.
        hand_on: called with each parameter that a graph has handed to eager code, whenever it has run.
        regional: as in :class:`PlaceCommunication`.
    """
    releases = regional and config.has_places and config.stage == 3
    lower = PlaceCommunication(regional, config.unit_bytes, releases)
    run = _inductor(config, lower, regional) if config.backend == "inductor" else _aot_eager(config, lower)
    settings: dict[str, Any] = {"backward_pass_autocast": "off"}
    if config.activation_budget is not None:  # at 0 torch's partitioner does not ask what must be saved
        settings["activation_memory_budget"] = max(float(config.activation_budget), 1e-6)

    def zerocompile(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        inline_regions(module)
        reject_writes(module)
        unify_casts(module)
        count(module)
        takes, hands = takes_weights(module), handed_on(module)  # Inductor's passes may change the graph
        # The backward is traced without autocast, since in eager code it runs after autocast has ended. torch's default
        # traces it inside autocast. On devices that sums bias gradients in float32, and it runs the backward of code
        # that had switched autocast off in half precision.
        with functorch.patch(settings):  # type: ignore[no-untyped-call, unused-ignore]
            compiled = run(module, inputs)
        if takes:
            compiled = _with_plain_inputs(compiled)
        return _handing_on(compiled, hands, hand_on) if hands else compiled

    return zerocompile


def _with_plain_inputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return compiled(*plain_inputs(args, {})[0])

    return call


def _handing_on(
    compiled: Callable[..., Any], lines: dict[int, str], hand_on: Callable[[Handed], None]
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        results = compiled(*args)
        for place, line in lines.items():
            hand_on(Handed.of(results[place], line))
        return results

    return call


def _inductor(
    config: Config, lower: CustomGraphPass, regional: bool
) -> Callable[[fx.GraphModule, Sequence[Tensor]], Any]:
    from torch._inductor.compile_fx import compile_fx

    options = inductor_options(config, lower, regional)
    return lambda module, inputs: compile_fx(module, inputs, config_patches=options)


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as AOTAutograd calls it: node by node, with a list of inputs that it frees as it uses them.

    (An ``fx.Interpreter`` would keep what the last run returned.)
    """
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    run = module.forward

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _aot_eager(config: Config, lower: CustomGraphPass) -> Callable[[fx.GraphModule, Sequence[Tensor]], Any]:
    """The same passes on AOTAutograd's graphs, which then run node by node."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    prepare = PrepareJointGraph()

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        prepare(joint.graph)
        if config.activation_budget is not None:
            save_random(joint.graph)
        pair: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
        if config.activation_budget is not None and saves_a_tuple(pair[0].graph):
            with functorch.patch(activation_memory_budget=1.0):  # type: ignore[no-untyped-call, unused-ignore]
                pair = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
        return pair

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        lower(module.graph)
        return boxed(module)

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_graph, partition_fn=partition, keep_inference_input_mutations=True
    )
    return backend


# [Note: repeated runs] Dynamo keeps graphs with a function's code object, at most eight for each, and runs the function
# eagerly beyond that. A class's ``forward`` has one code object. So all runs in a process (k folds, a sweep),
# validation, `generate` with its lengths, and layers of any size would use up the same eight. Therefore Dynamo compiles
# copies of the function: one for training and one for inference, for each kind of equal modules. The copies are kept
# with the class of the whole model. So are the classes that its modules are given, and the backend, since Dynamo's
# guards check these. A later run with the same options finds its graphs there. Nothing of a model itself is kept: what
# differs between runs (handles, sources) is an input of the graphs. CUDA graphs record addresses and are made anew.


class Refused(NamedTuple):
    """A code object that is over Dynamo's limit."""

    name: str
    graphs: int
    reason: str  # the guard that failed


class Code:
    """A class's ``forward``, compiled for training and for inference, see [Note: repeated runs].

    Args:
        forward: the class's.
        number: how many copies of it were made before.
        compile: compiles its first argument, a function, and calls its second with each guard that fails.
    """

    def __init__(self, forward: Callable[..., Any], number: int, compile: Callable[..., Any]) -> None:
        self._failed: dict[CodeType, deque[str]] = {}
        self.broken = ""  # why, and where, Dynamo ended a graph before the code did; the first time
        suffix = f"_{number}" if number else ""
        self._training = compile(_copy_of(forward, f"_in_training{suffix}"), self._guard_failed)
        self._inference = compile(_copy_of(forward, f"_in_inference{suffix}"), self._guard_failed)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self._training if torch.is_grad_enabled() else self._inference
        return run(module, *args, **kwargs)

    def refused(self) -> Refused | None:
        """The code that has reached Dynamo's limit: the ``forward`` or a part of it after a graph break; else None."""
        for code, reasons in self._failed.items():
            graphs = len(torch._dynamo.eval_frame._debug_get_cache_entry_list(code))
            if graphs >= torch._dynamo.config.recompile_limit:
                return Refused(code.co_name, graphs, reasons[-min(graphs, len(reasons))])  # the first of the last call
        return None

    def note(self, module: fx.GraphModule) -> None:
        """Looks why one of Dynamo's graphs ends where it does."""
        reason = getattr(module, "compile_subgraph_reason", None)
        if self.broken or reason is None or not reason.graph_break:
            return
        text = str(reason.reason).strip().partition("\n")[0].rstrip(".")
        frame = reason.user_stack[-1] if reason.user_stack else None
        where = "" if frame is None else f", at {frame.filename}:{frame.lineno} in `{frame.name}`: `{frame.line}`"
        self.broken = f"{text}{where}"

    def _guard_failed(self, failure: Any) -> None:
        reasons = self._failed.setdefault(failure.orig_code, deque(maxlen=64))
        reasons.append(" ".join(failure.reason.strip().partition("\n")[0].split()))


class Graphs:
    """What is compiled with one configuration, in one run or in several."""

    def __init__(self, config: Config) -> None:
        self.stats = CompileStats()  # of the run that calls now
        self.running: Code | None = None  # the code that this run calls now
        self.handed: list[Handed] = []  # to eager code, by the graphs of the regions that run now
        self._config = config
        self._backends: dict[bool, Callable[..., Any]] = {}  # made only when something is compiled: it imports Inductor
        self._codes: dict[tuple[Any, ...], Code] = {}

    def code_of(self, module: nn.Module, regional: bool) -> Code:
        """The compiled ``forward`` that ``module`` shares with all modules that are equal to the compiler."""
        base, forward = _base(module), forward_of(module)
        key = (base, forward, regional, signature(module, base))
        if key not in self._codes:
            if regional not in self._backends:
                self._backends[regional] = make_backend(self._config, self._count, self.handed.append, regional)
            number = sum(other[:3] == key[:3] for other in self._codes)
            self._codes[key] = Code(forward, number, functools.partial(self._compile, self._backends[regional]))
        return self._codes[key]

    def _compile(self, backend: Callable[..., Any], function: Any, guard_failed: Callable[[Any], None]) -> Any:
        """As ``torch.compile``, which has no argument for ``guard_failed``."""
        return torch._dynamo.optimize(backend, dynamic=self._config.dynamic, guard_fail_fn=guard_failed)(function)

    def _count(self, module: fx.GraphModule) -> None:
        self.stats.add(module)
        if self.running is not None:
            self.running.note(module)


def _copy_of(forward: Callable[..., Any], suffix: str) -> Callable[..., Any]:
    """The function with a code object of its own; ``suffix``: what its name ends with in traces and messages.

    If ``forward`` is not a plain function, or one that Dynamo inlines only, the copy is a function that calls it. Those
    of torch's own layers are inlined only: Dynamo would start with a wrapper of its own. All such functions of the
    process would share that wrapper's code object, and so its limit of graphs.
    """
    plain = isinstance(forward, FunctionType) and "_torchdynamo_orig_callable" not in vars(forward)
    if not plain or forward_is_inlined(forward) or torch._dynamo.trace_rules.check(forward):

        def forward_(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        function: Any = forward_
    else:
        function = forward
    code = function.__code__.replace(co_name=function.__code__.co_name + suffix)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"):
        if name != "__type_params__":
            setattr(copy, name, getattr(function, name))
    copy.__dict__.update(function.__dict__)
    return copy


def _base(module: nn.Module) -> Any:
    """The user's class of a module whose class may have been swapped."""
    return getattr(type(module), BASE, type(module))
