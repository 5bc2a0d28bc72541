"""One training step on tensors without data: when parameters are used, when gradients come, what lives meanwhile.

[Note: fake step] The module is copied with parameters that have no data (``FakeTensorMode``), so a model of any size is
traced on any machine, without a device. The step's forward and backward are run on the copy. A dispatch mode below
them counts the bytes of every storage that an operator makes until it is freed; parameters and their gradients are left
out, since how long these live is the stage's choice and not the model's. A compiled block is partitioned as
torch.compile does it (the min-cut partitioner), and what follows from parameters alone (a cast to float8) is computed
again in the backward as in a run, so what it saves for its backward is what the run saves. Its temporaries are those of
a graph that runs operator by operator, which Inductor's fused kernels partly avoid. Integers and booleans of the batch
keep their data, see [Note: known numbers]; for attention see [Note: attention of devices].
"""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch._functorch.config as functorch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zerocompile.compile.backend import boxed
from lightning_zerocompile.compile.passes.recompute import tag_what_follows
from lightning_zerocompile.plan.attention import AttentionOfDevices, to_count
from lightning_zerocompile.plan.known_numbers import KnownNumbers, Pausable, is_knowable
from lightning_zerocompile.runtime.activation_offload import ActivationOffload, run_again, without_hooks
from lightning_zerocompile.sharding.islands import NONE, Islands, gathered_dtype, put_islands
from lightning_zerocompile.sharding.plan import signature

Step = Callable[[Any, Any], Any]  # (module, batch) -> loss


class PlanError(RuntimeError):
    """A plan cannot be made; the message says of what, why, and what to do."""


@dataclass(frozen=True)
class Event:
    """Something that a stage reacts to.

    Attributes:
        kind: ``"use"``: a module that holds parameters begins (in forward, or in backward: ``back``); ``"grad"``: the
            gradient of a parameter is there; ``"loss"``: forward has ended; ``"end"``: backward has.
        name: of the block, or of the parameters' module; of the parameter.
        live: most bytes of activations at any time since the event before.
        now: bytes of activations at the event.
    """

    kind: Literal["use", "grad", "loss", "end"]
    name: str
    back: bool
    live: int
    now: int


@dataclass(frozen=True)
class Trace:
    """What one step of the module does, on one rank, in the order in which it does it.

    Attributes:
        events: of the step.
        forward_flops, backward_flops: matrix products and convolutions, a multiplication and an addition each counted;
            recomputed ones belong to the backward.
        batch_bytes: of the batch's tensors.
        eager: compiled blocks that were traced as eager code, with the reason.
        offloaded: bytes of activations that go to host memory, and come back.
        on_host: bytes of host memory that these take.
    """

    events: tuple[Event, ...]
    forward_flops: int
    backward_flops: int
    batch_bytes: int
    eager: dict[str, str]
    offloaded: int = 0
    on_host: int = 0

    @property
    def saved(self) -> int:
        """Bytes that the forward keeps for the backward."""
        return next(event.now for event in self.events if event.kind == "loss")


_ATEN = torch.ops.aten
_TENSOR = object()  # stands for a tensor among the arguments of a block
_SAME_FLOPS = {  # attention of CPUs, which torch's registry of FLOPs does not have
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}


class Live(Pausable):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the bytes of storages that operators make while it is active, until they are freed, and the FLOPs.

    What is made while it is paused does not count.

    Args:
        known: tensors whose storages do not count.
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = self.flops = 0
        self._known: Any = WeakIdKeyDictionary()
        for tensor in known:
            self._known[tensor.untyped_storage()] = True

    def take_most(self) -> int:
        """The most since it was asked for last."""
        most, self.most = self.most, self.now
        return most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = _SAME_FLOPS.get(func._overloadpacket, func._overloadpacket)
        count = flop_registry.get(packet)
        if count is not None and not self._paused:
            self.flops += int(count(*to_count(packet, args), **(kwargs or {}), out_val=result))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known[storage] = True
        if self._paused:
            return
        size = int(storage.nbytes())
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


def fake_mode() -> FakeTensorMode:
    """Where a plan's tensors live; numbers that are read off them are unknown ones, as for torch.compile."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake_copy(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None, islands: Islands = NONE) -> nn.Module:
    """The module with parameters and buffers that have no data.

    Args:
        module: on any device, possibly on meta; it is not changed.
        mode: of the copy's tensors.
        dtype: of floating-point parameters; ``None``: their own.
        islands: what computes in float32.

    Raises:
        PlanError: the module cannot be copied.
    """

    def make(name: str, shape: torch.Size, kind: torch.dtype) -> Tensor:
        with mode:
            return torch.empty(shape, dtype=kind, device="cpu")

    return copy_with(module, dtype, make, islands)


def copy_with(
    module: nn.Module,
    dtype: torch.dtype | None,
    make: Callable[[str, torch.Size, torch.dtype], Tensor],
    islands: Islands = NONE,
) -> nn.Module:
    """The module with parameters and buffers that ``make`` makes.

    Args:
        module: on any device, possibly on meta; it is not changed.
        dtype: of floating-point parameters; ``None``: their own.
        make: a tensor of this name, shape and dtype.
        islands: what computes in float32.

    Raises:
        PlanError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}  # deepcopy's own protocol: what stands for an object, by its id
    for name, parameter in module.named_parameters():
        kept = gathered_dtype(name, parameter, dtype, islands)
        memo[id(parameter)] = nn.Parameter(make(name, parameter.shape, kept), requires_grad=parameter.requires_grad)
    for name, buffer in module.named_buffers():
        memo[id(buffer)] = make(name, buffer.shape, buffer.dtype)
    trainer = module.__dict__.get("_trainer")
    if trainer is not None:  # also a submodule's
        memo[id(trainer)] = None
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # whatever a member of the user's raises
        raise PlanError(
            f"{type(module).__name__} cannot be planned, since it cannot be copied: {said(error)} Keep what cannot be "
            "copied (open files, locks, generators) outside of the module, or make it in `setup`."
        ) from error
    put_islands(copied, islands)
    return copied


@dataclass(frozen=True)
class FakeStep:
    """A copy of a module and of its batch, without data, see [Note: fake step].

    Attributes:
        module: in training mode.
        batch: as ``fake_batch`` makes it.
        mode: of their tensors.
        autocast: of the step; ``None``: there is none.
        known: computes what can be known.
        attention: how it is computed, see [Note: attention of devices]; ``None``: as on the CPU.
    """

    module: nn.Module
    batch: Any
    mode: FakeTensorMode
    autocast: torch.dtype | None
    known: KnownNumbers
    attention: AttentionOfDevices | None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        batch: Any,
        dtype: torch.dtype | None,
        autocast: torch.dtype | None,
        islands: Islands = NONE,
        attention: AttentionOfDevices | None = None,
    ) -> FakeStep:
        """Arguments as in :func:`trace_step`, or of the step itself."""
        mode = fake_mode()
        copied, known = fake_copy(module, mode, dtype, islands).train(), KnownNumbers(mode)
        return cls(copied, fake_batch(batch, mode, dtype, known), mode, autocast, known, attention)

    def inputs(self) -> list[Tensor]:
        """The tensors of the batch."""
        return [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor)]

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inside, forward and backward may run."""
        attention = self.attention or nullcontext()
        with warnings.catch_warnings(), torch.enable_grad(), self.mode, self.known, attention:
            warnings.simplefilter("ignore")  # of `self.log` without a Trainer
            yield

    def forward(self, step: Step) -> Any:
        """What the step returns."""
        with nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast):
            return step(self.module, self.batch)


def training_step(module: Any, batch: Any) -> Any:
    """The loss of ``training_step``, as Lightning finds it.

    Raises:
        PlanError: the module makes its backwards itself.
    """
    if not getattr(module, "automatic_optimization", True):
        raise PlanError(
            f"{type(module).__name__} runs its backwards itself (`automatic_optimization = False`), which needs a "
            "Trainer. Pass `step=`, a function of (module, batch) that returns the loss of one backward."
        )
    result = module.training_step(*([batch, 0] if _takes_index(module.training_step) else [batch]))
    return result["loss"] if isinstance(result, dict) else result


def _takes_index(method: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(method).parameters.values())
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def trace_step(
    module: nn.Module,
    batch: Any,
    blocks: Sequence[str],
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    compiled: str | bool = "inductor",
    step: Step = training_step,
    checkpointed: bool = False,
    offloaded: bool = False,
    activation_budget: float | None = None,
    islands: Islands = NONE,
    on_cpu: bool = False,
) -> Trace:
    """Runs one step without data, see [Note: fake step].

    Args:
        module: a LightningModule, or what ``step`` takes.
        batch: as the step gets it, of any device; tensors of it may be on meta.
        blocks: names of the repeated blocks.
        dtype: what floating-point parameters are gathered in; ``None``: their own.
        autocast: of the step; ``None``: there is none.
        compiled: the backend that compiles the blocks, or False.
        step: ``(module, batch) -> loss``.
        checkpointed: whether each block runs again in the backward (``recompute="blocks"``).
        offloaded: whether what blocks save goes to host memory (``activation_offload``).
        activation_budget: torch's, of compiled blocks.
        islands: what computes in float32.
        on_cpu: whether the run is on the CPU.

    Raises:
        PlanError: the step does not take the batch, needs a Trainer, or asks for numbers that only data has.
    """
    attention = None if on_cpu else AttentionOfDevices(compiled=bool(compiled))
    fake = FakeStep.of(module, batch, dtype, autocast, islands, attention)
    recorder = _Recorder(fake, blocks, compiled, checkpointed, offloaded, activation_budget)
    try:
        with fake.around(), recorder.live:
            loss = fake.forward(step)
            if not isinstance(loss, Tensor):
                raise PlanError(
                    f"The step of {type(module).__name__} returned {type(loss).__name__} for this batch, not a loss."
                )
            recorder.note("loss", "", back=False)
            forward_flops = recorder.live.flops
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            del loss
            recorder.note("end", "", back=True)
    except PlanError:
        raise
    except Exception as error:  # the user's code, or torch's of it
        raise PlanError(_explain(module, batch, error)) from error
    finally:
        recorder.close()
    return Trace(
        tuple(recorder.events),
        forward_flops,
        recorder.live.flops - forward_flops,
        sum(tensor.nbytes for tensor in fake.inputs()),
        recorder.eager,
        recorder.offload.bytes_out,
        recorder.offload.bytes_out if on_cpu else recorder.offload.pinned,
    )


def said(error: BaseException) -> str:
    """An exception's type and first line as a sentence, so that a remedy can follow it."""
    text = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _explain(module: nn.Module, batch: Any, error: Exception) -> str:
    shapes = apply_to_collection(batch, Tensor, lambda t: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}")
    what = f"One step of {type(module).__name__} on a batch of {shapes} failed: {said(error)}"
    if "not attached to a `Trainer`" in str(error):
        return f"{what} Pass `step=`, a function of (module, batch) that returns the loss without the Trainer."
    if any(word in type(error).__name__ for word in ("DataDependent", "UserError", "UnknownNumbers")):
        return (
            f"{what} The step looks at numbers in a tensor (`.item()`, `if tensor:`), which a plan does not have. Pass "
            "`step=`, a function of (module, batch) that returns the loss without them."
        )
    return f"{what} Is it a batch as `training_step` gets it? Another loss can be passed as `step=`."


def fake_batch(batch: Any, mode: FakeTensorMode, dtype: torch.dtype | None, known: KnownNumbers) -> Any:
    """The batch with tensors that have no data, but for what [Note: known numbers] keeps; floating-point ones are of
    ``dtype``, unless that is ``None``."""

    def fake(tensor: Tensor) -> Tensor:
        if is_knowable(tensor) and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            return known.take(tensor.detach().to("cpu", copy=True))
        floating = dtype is not None and tensor.is_floating_point()
        with mode:
            return torch.empty(tensor.shape, dtype=dtype if floating else tensor.dtype, device="cpu")

    return apply_to_collection(batch, Tensor, fake)


class _Recorder:
    """Notes the events of a step by hooks on the copy's modules and parameters."""

    def __init__(
        self,
        fake: FakeStep,
        blocks: Sequence[str],
        compiled: str | bool,
        checkpointed: bool,
        offloaded: bool,
        budget: float | None,
    ) -> None:
        module = fake.module
        self.live = Live([*module.parameters(), *module.buffers(), *fake.inputs()])
        self.events: list[Event] = []
        self.eager: dict[str, str] = {}
        self._known = fake.known
        self.offload = _OffloadInTrace(module, self._paused)
        self._settings = {} if budget is None else {"activation_memory_budget": max(budget, 1e-6)}  # as make_backend
        self._decompositions = select_decomp_table() if compiled == "inductor" else None
        self._graphs: dict[Any, Callable[..., Any]] = {}
        self._removers: list[Any] = []
        inside = tuple(f"{name}." for name in blocks)
        for name, child in module.named_modules():
            if name in blocks or (not name.startswith(inside or ("\0",)) and child._parameters):
                self._watch(name, child)
            own = bool(compiled) and name in blocks and _take_checkpoint(child)
            if name in blocks and compiled:
                self._compile(name, child)
            if name in blocks and (checkpointed or own):
                # Without random states, which checkpoints do not let the partitioner look at a device for.
                child.forward = partial(run_again, child.forward, False)
            if name in blocks and offloaded:
                child.forward = partial(self._offloaded, child.forward)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                hook = self._gradient_hook(name)
                self._removers.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call, unused-ignore]

    def note(self, kind: Literal["use", "grad", "loss", "end"], name: str, back: bool) -> None:
        gc.collect(1)  # tensors without data are in cycles, real ones are not
        self.events.append(Event(kind, name, back, self.live.take_most(), self.live.now))

    def close(self) -> None:
        for remover in self._removers:
            remover.remove()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Inside, nothing counts."""
        with self.live.paused(), self._known.paused():
            yield

    def _offloaded(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.offload.block():
            return forward(*args, **kwargs)

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            parameter.grad = None  # its memory is the stage's
            self.note("grad", name, back=True)

        return hook

    def _watch(self, name: str, module: nn.Module) -> None:
        def before(*_: Any) -> None:
            self.note("use", name, back=torch._C._current_graph_task_id() != -1)

        def backward(_: Tensor) -> None:
            self.note("use", name, back=True)

        def after(_: nn.Module, args: Any, result: Any) -> None:
            for value in tree_leaves(result):
                if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                    value.register_hook(backward)  # type: ignore[no-untyped-call]
                    break

        self._removers.append(module.register_forward_pre_hook(before))
        if not isinstance(module, nn.Embedding):  # its backward does not read its weight
            self._removers.append(module.register_forward_hook(after))

    def _compile(self, name: str, block: nn.Module) -> None:
        """Partitions the block's graph as torch.compile would; equal blocks with equal inputs share it."""
        forward: Callable[..., Any] = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or name in self.eager:
                return forward(*args, **kwargs)
            parameters = dict(block.named_parameters())
            held = parameters | dict(block.named_buffers())  # in this order, see _partitioned
            leaves, spec = tree_flatten((args, kwargs))
            shapes = tuple(_shape(leaf) for leaf in leaves)
            key = (signature(block), spec, shapes, torch.is_autocast_enabled("cpu"))
            given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if key not in self._graphs:
                others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

                def called(held: dict[str, Tensor], given: list[Tensor]) -> Any:
                    new = iter(given)
                    args, kwargs = tree_unflatten([next(new) if leaf is _TENSOR else leaf for leaf in others], spec)
                    named = {f"block.{name}": tensor for name, tensor in held.items()}
                    return torch.func.functional_call(_Forward(block, forward), named, args, kwargs)

                try:
                    self._graphs[key] = self._partitioned(called, held, given, len(parameters))
                except Exception as error:  # torch's, of code that it cannot trace: the run would break the graph there
                    self.eager[name] = said(error)
                    return forward(*args, **kwargs)
            return self._graphs[key](held, given)

        block.forward = run

    def _partitioned(
        self, function: Callable[..., Any], held: dict[str, Tensor], given: list[Tensor], parameters: int
    ) -> Callable[..., Any]:
        """All that ``function`` takes are tensors: the partitioner asks each input of a graph for its size.

        A graph keeps what it was traced with, so it is traced with tensors that stand for ``given``. The first ones of
        ``held``, as many as ``parameters`` says, are what a run gathers.
        """

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            tag_what_follows(joint.graph, joint.graph.find_nodes(op="placeholder")[:parameters])
            pair: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(joint, inputs, **options)
            return pair

        graph: Callable[..., Any] = aot_function(
            function,
            lambda graph, _: boxed(graph),
            partition_fn=partition,
            decompositions=self._decompositions,
        )
        # its first call makes it
        with (
            self._paused(),
            without_hooks(),  # a checkpoint's would take what is traced for a part of its frame
            functorch.patch(self._settings),  # type: ignore[no-untyped-call, unused-ignore]
        ):
            graph(held, [_stand_in(tensor) for tensor in given])
        return graph


def _stand_in(tensor: Tensor) -> Tensor:
    if type(tensor) is not FakeTensor or tensor.layout != torch.strided:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_() if tensor.requires_grad else made


class _OffloadInTrace(ActivationOffload[Tensor]):
    """The same without data; see [Note: activation offload]. What is in host memory does not count.

    torch's allocator of pinned memory rounds each size up to a power of two.

    Args:
        module: its parameters stay.
        paused: inside, nothing counts.
    """

    def __init__(self, module: nn.Module, paused: Callable[[], AbstractContextManager[None]]) -> None:
        parameters = WeakIdKeyDictionary({p.untyped_storage(): True for p in module.parameters()})
        super().__init__(
            torch.device("cpu"),
            lambda tensor: tensor.untyped_storage() in parameters,
            lambda tensor: tensor,
            lambda tensor: tensor,
        )
        self._paused, self.pinned = paused, 0

    def _is_plain(self, tensor: Tensor) -> bool:
        return type(tensor) is FakeTensor

    def _to_host(self, value: Tensor) -> Tensor:
        self.pinned += 1 << (value.nbytes - 1).bit_length()
        with self._paused():
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


class _Forward(nn.Module):
    def __init__(self, block: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.run = block, run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _take_checkpoint(block: nn.Module) -> bool:
    """Whether a layer of transformers runs its own ``forward`` again in the backward; from here on it does not.

    torch.compile sees a checkpoint inside of what it compiles, and a trace without it does not.
    """
    own = getattr(block, "gradient_checkpointing", False) is True and hasattr(block, "_gradient_checkpointing_func")
    if own:
        block.__dict__["gradient_checkpointing"] = False
    return own


def _shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else value
