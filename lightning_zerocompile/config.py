"""What the user chose: each option once, with its type, its default, its help and the message for a wrong value."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_zerocompile.option_types import (
    DTYPE,
    FLAG,
    Check,
    as_bytes,
    as_compile_options,
    as_modules,
    as_names_or_bytes,
    as_time,
    fits,
    names_of,
)


class Lifetime(Enum):
    """How long a gathered value lives."""

    USE = "use"  # gathered for each forward and each backward use
    STEP = "step"  # gathered once, after the optimizer wrote


@dataclass(frozen=True)
class Policy:
    """What one stage does with every parameter: two independent policies.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2019).
    """

    lifetime: Lifetime
    accumulates_locally: bool  # gradients of an accumulation wait, unreduced, for its last backward

    @classmethod
    def of_stage(cls, stage: int) -> "Policy":
        return cls(
            lifetime=Lifetime.USE if stage == 3 else Lifetime.STEP,
            accumulates_locally=stage == 1,
        )


_MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")

# Of each key of `compile_options`: what its value may be, and the rest of the message for another one.
_COMPILE_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "backend": (lambda name: name in ("inductor", "aot_eager"), "choose 'inductor' or 'aot_eager', or compile=False"),
    "mode": (lambda mode: mode in _MODES, f"choose one of {_MODES}"),
    "dynamic": (lambda dynamic: dynamic in (True, False, None), "choose True, False or None"),
    "options": (lambda options: isinstance(options, Mapping), "it must be a dictionary of Inductor's options"),
}


# The dimensions of a device mesh: `REPLICATE` need not be there.
REPLICATE, SHARD = "replicate", "shard"


def _is_mesh(mesh: Any) -> bool:
    if not isinstance(mesh, DeviceMesh):
        return mesh == "nodes" or all(size > 0 for size in (mesh if isinstance(mesh, tuple) else (mesh,)))
    names = mesh.mesh_dim_names or ()
    return SHARD in names and len(set(names)) == len(names) and set(names) <= {REPLICATE, SHARD}


@dataclass(frozen=True)
class Config:
    """How a model is sharded, compiled and trained.

    Args:
        stage: 1 shards optimizer states, 2 gradients too, 3 parameters too. ``"auto"``: the fastest of them that fits,
            by the plan, in what is free at the first set-up.
        compile: ``"blocks"`` (or ``True``): each repeated block of the model is compiled, all equal ones with one
            compilation (a model without any as with ``"model"``); ``"model"``: each top-level child as one graph (of
            one that only holds others, such as a ``ModuleList``, each of these); ``False``: everything runs eagerly.
        compile_options: torch.compile's own arguments, by name: ``backend``, ``"inductor"`` (default) or
            ``"aot_eager"`` (the same graphs and passes without code generation); ``mode``, of which
            ``"reduce-overhead"`` and ``"max-autotune"`` replay CUDA graphs; ``dynamic``; ``options``, Inductor's:
            passes of the user in the slots we need run before ours.
        recompute: a number from 0 to 1: how much of its activations a compiled module computes again in its backward
            instead of saving it: 0 as torch.compile does, 1 all that it can; torch chooses what is cheapest. Gathered
            values are never saved, and random numbers are not drawn again. ``None``: torch's own setting.
            ``"blocks"``: each repeated block saves its inputs only and runs again in the backward
            (``torch.utils.checkpoint``), which gathers its parameters no more often than without.
        activation_offload: what each repeated block saves for its backward goes to host memory (pinned, with CUDA)
            while the next one runs, and comes back before its backward; at most two blocks' activations stay on the
            device. With ``recompute`` it is little enough for the link to keep up. Tensors of less than 1 MiB stay.
        param_dtype: what floating-point parameters are gathered and computed in; ``None``: their own dtype (or the
            Trainer's precision). Floating-point tensors that are passed to the module itself, to a child of it or to a
            repeated block are cast to it, as FSDP2 does. With ``reduce_dtype`` these are FSDP2's numerics.
        fp32_modules: what computes in float32 where the model computes in half precision: ``"norms"`` (torch's, and
            modules without children whose class is called so), classes, names of classes, names of modules (``*``
            stands for any text). Their parameters are gathered in float32, their inputs are cast to it, and their
            results back.
        reduce_dtype: dtype of gradient communication; ``None``: that of the gradient.
        master_dtype: what parameters of lower precision are kept in for the optimizer; ``None``: their own dtype.
        unit_bytes: parameters outside repeated blocks are gathered in groups of up to this many bytes, and with
            ``compile="model"`` so are small blocks; where units are gathered or reduced at once (a window opens or
            closes, an optimizer has written them), smaller ones share collectives up to that.
        prefetch: how many units are gathered ahead of their use (stage 3).
        keep_gathered: at stage 3, what stays gathered from one optimizer step to the next, as at stage 2. Names of
            modules (or parameters): those that only some ranks use in a step, and small ones that are used often. Or
            memory for fewer bytes moved: a number of bytes on each device, or ``"auto"``, three quarters of what is
            free at the peak of the first two steps. After these it buys, once: where gathers are copies between GPUs,
            each rank's rows in half precision, which are then cast once in a step (2 bytes for each parameter, divided
            by the number of ranks); and with what is left units, those that save most, with one recompilation.
        unequal_work: at stage 3, whether ranks serve each other's gathers in all evaluations: ``"evaluation"``, so that
            they may use different modules, generate texts of different lengths, or take batches from datasets without
            a length. ``False``: only where their numbers of batches differ. In training (and with Fabric) write
            ``with strategy.unequal():`` around unequal work, on all ranks.
        copy_engine: whether parameters are gathered, and bfloat16 gradients exchanged and then summed in float32, by
            copies between the GPUs of one host instead of NCCL's kernels, which take multiprocessors from the compute
            beside them; ``"auto"``: where all ranks are on one host and their GPUs reach each other's memory;
            ``True``: or raise (gathers only).
        defer_grad_sync: at every stage the full gradients of an accumulation (Lightning's
            ``accumulate_grad_batches``, ``block_backward_sync``) wait, unreduced, for its last backward; otherwise only
            at stage 1, while stages 2 and 3 reduce after each backward and hold no full gradient. (With replicas on
            GPUs they do so inside each replica; the sum over the replicas waits for the last backward.)
        keep_gradients: leave ``p.grad`` after ``optimizer.step()``; by default its memory is released there.
        unshard_after_fit: make the module an ordinary one with full parameters, on the CPU, when ``fit`` has succeeded;
            one parameter at a time, so that a device never holds more than one whole. ``False``: it stays sharded, and
            the next run takes it over. After an exception the module is made whole, too, if there is one rank, or if
            all ranks say within five seconds (at most a tenth of ``timeout``) that they have ended at one place of the
            training. Otherwise it stays sharded: it then raises when it is called, when its ``state_dict`` is asked for
            and in a further fit.
        state_dict_type: ``"full"``: one file with full tensors, as DDP's. ``"sharded"``: a directory to which all ranks
            write their shards. Either loads at any stage, world size and with either setting, and is written in the
            background with Lightning's ``AsyncCheckpointIO()``.
        offload: ``"optimizer"``: optimizer states and masters are kept in host memory (pinned, with CUDA) and stream
            through the device unit by unit while the optimizer updates, with the numbers of a run without it. For
            torch's elementwise optimizers. At stage 3, and with ``optimizer_in_backward``, masters stay on the device
            that are gathered in their own dtype.
        optimizer_in_backward: a unit is updated inside the backward as soon as its gradient is reduced, and the
            gradient's memory is gone then; the numbers are those of the ordinary step. Hooks between backward and step
            see no gradients. For torch's elementwise optimizers, without clipping by norm and without loss scaling;
            several backwards of one step need ``coalesce_grad_reduction()``. With ``offload``
            units stream through the device beside the backward, and a copy of the masters in the dtype in which they
            are gathered stays on the device at every stage.
        full_param_optimizers: class names of your optimizers that need whole parameters (Shampoo-like ones, kernels
            that take addresses): they see whole parameters, gradients and states, one unit at a time, on every rank.
            Only for those that update each parameter from its own gradient and state. Torch's own need no mention.
        process_group_backend: default: NCCL on CUDA, gloo on the CPU.
        start_method: how the processes of further ranks of this host start, unless torchrun or SLURM starts them.
            ``"popen"``: the script is started again. ``"fork"``: the running process is forked, and must not have used
            CUDA. The run is in children then: the module gets its weights, the Trainer its metrics and the strategy its
            statistics, and what else the run has changed stays there. ``"auto"``: ``"fork"`` in notebooks.
        timeout: how long ranks wait for each other in a collective or for a message. When it ends, or a peer closes its
            connection (gloo), the error names the phase and the rank.
        device_mesh: how many times the model is held (hybrid sharding, FSDP's HYBRID_SHARD): a number of replicas;
            ``"nodes"``, one on each host; ``(R, W)``, R replicas that are each sharded over W ranks; or a
            ``DeviceMesh`` of all ranks with dimensions ``"replicate"`` and ``"shard"``, in either order, or with
            ``"shard"`` alone. The ranks of a replica are consecutive, unless a ``DeviceMesh`` says otherwise; the
            process groups are the strategy's own. A rank needs the memory that it would need if its replica were all.
        reshard_after_forward: at stage 3, what a rank keeps of a value when the forward has used it (FSDP2's option of
            that name, ZeRO++'s hpZ). ``True``: its shard only, and the backward gathers over all ranks again. A number
            of ranks: each such part of the shard group (consecutive ranks, those of a host) keeps one more copy of the
            model together, a secondary shard each, and the backward's gathers are inside it. ``"nodes"``: the ranks of
            each host. It takes the bytes of all gathered parameters, divided by that number, on each rank.

    Dtypes may be names (``"bf16"``), bytes texts (``"80GiB"``), and ``timeout`` a number of seconds.

    Raises:
        ValueError: an argument is outside what it allows; the message names it, what is allowed and the remedy.
    """

    stage: Annotated[
        Literal[1, 2, 3, "auto"],
        Check(
            "is not a ZeRO stage; choose 1 (optimizer states sharded), 2 (and gradients), 3 (and parameters) or 'auto'."
        ),
    ] = 3
    compile: Annotated[
        Literal["blocks", "model", False],
        Check(
            "is not understood; choose 'blocks' (each repeated block), 'model' (each top-level child as one graph) or "
            "False (no compilation).",
            accepts=Literal["blocks", "model", True, False],
            convert=lambda value: "blocks" if value is True else value,
        ),
    ] = "blocks"
    compile_options: Annotated[
        dict[str, Any],
        Check(
            "must be a dictionary of torch.compile's `backend`, `mode`, `dynamic` and `options`, for example "
            "{'mode': 'reduce-overhead'}.",
            accepts=dict[str, Any] | None,
            convert=as_compile_options,
            holds=lambda options: set(options) <= set(_COMPILE_OPTIONS),
        ),
    ] = field(default_factory=dict)
    recompute: Annotated[
        float | Literal["blocks"] | None,
        Check(
            "is not understood; choose a number from 0 (nothing is computed again) to 1 (all that can be), 'blocks' "
            "(each repeated block runs again in the backward) or None (torch's own setting).",
            accepts=float | int | Literal["blocks"] | None,
            convert=lambda value: float(value) if type(value) is int else value,
            holds=lambda share: not isinstance(share, float) or 0 <= share <= 1,
        ),
    ] = None
    activation_offload: Annotated[bool, FLAG] = False
    param_dtype: Annotated[torch.dtype | None, DTYPE] = None
    fp32_modules: Annotated[
        tuple[str | type[nn.Module], ...],
        Check(
            "must be 'norms', classes of modules, names of classes, or names of modules, for example ['norms', "
            "'*.router'] (and '*norm' for a module of that name).",
            accepts=Sequence[str | type[nn.Module]],
            convert=as_modules,
            holds=lambda modules: {"", "norm", "Norm", "Norms"}.isdisjoint(modules),
        ),
    ] = ()
    reduce_dtype: Annotated[torch.dtype | None, DTYPE] = None
    master_dtype: Annotated[torch.dtype | None, DTYPE] = torch.float32
    unit_bytes: Annotated[
        int,
        Check(
            "must be a positive number of bytes, for example 2**26 or '64MiB'.",
            accepts=int | str,
            convert=as_bytes,
            holds=lambda size: size > 0,
        ),
    ] = 64 * 2**20
    prefetch: Annotated[int, Check("must be a number of units, 0 or more.", holds=lambda units: units >= 0)] = 1
    keep_gathered: Annotated[
        tuple[str, ...] | int | Literal["auto"],
        Check(
            "must be names of modules, for example ['vision'], or a number of bytes on each device, '20GiB', or 'auto' "
            "(three quarters of what is free at the peak of the first two steps).",
            accepts=Sequence[str] | int | str,
            convert=as_names_or_bytes,
            holds=lambda kept: kept == "auto" or (kept >= 0 if isinstance(kept, int) else "" not in kept),
        ),
    ] = ()
    unequal_work: Annotated[
        Literal["evaluation", False],
        Check(
            "is not understood; choose 'evaluation' (all of it may be unequal) or False (ranks may have different "
            "numbers of batches there). In training write `with strategy.unequal():` around unequal work."
        ),
    ] = False
    copy_engine: Annotated[
        bool | Literal["auto"],
        Check("is not understood; choose 'auto' (where GPUs reach each other's memory), True (or raise) or False."),
    ] = "auto"
    defer_grad_sync: Annotated[bool, FLAG] = False
    keep_gradients: Annotated[bool, FLAG] = False
    unshard_after_fit: Annotated[bool, FLAG] = True
    state_dict_type: Annotated[
        Literal["full", "sharded"],
        Check("is not understood; choose 'full' (one file) or 'sharded' (a directory to which every rank writes)."),
    ] = "full"
    offload: Annotated[
        Literal["optimizer", False],
        Check("is not understood; choose 'optimizer' (its states and masters are kept in host memory) or False."),
    ] = False
    optimizer_in_backward: Annotated[bool, FLAG] = False
    full_param_optimizers: Annotated[tuple[str, ...], names_of("optimizer classes, for example ['Shampoo'].")] = ()
    process_group_backend: Annotated[str | None, Check("must be the name of a backend of torch.distributed.")] = None
    start_method: Annotated[
        Literal["auto", "popen", "fork"],
        Check("is not understood; choose 'auto' (in notebooks 'fork'), 'popen' (the script starts again) or 'fork'."),
    ] = "auto"
    timeout: Annotated[
        timedelta,
        Check(
            "must be a positive number of seconds, or a positive datetime.timedelta.",
            accepts=timedelta | int | float,
            convert=as_time,
            holds=lambda time: time > timedelta(0),
        ),
    ] = timedelta(minutes=30)
    device_mesh: Annotated[
        int | Literal["nodes"] | tuple[int, int] | DeviceMesh,
        Check(
            "is not understood; choose a number of replicas, 'nodes' (one on each host), (replicas, ranks of each), or "
            "a DeviceMesh whose dimensions are named 'replicate' and 'shard', or 'shard' alone: init_device_mesh("
            "device_type, (replicas, ranks of each), mesh_dim_names=('replicate', 'shard')).",
            convert=lambda mesh: tuple(mesh) if isinstance(mesh, list) else mesh,
            holds=_is_mesh,
        ),
    ] = 1
    reshard_after_forward: Annotated[
        bool | int | Literal["nodes"],
        Check(
            "is not understood; choose True (the backward gathers over all ranks), a number of ranks, 2 or more (it "
            "gathers inside parts of so many), or 'nodes' (inside each host). What FSDP2 does with False is stage=2.",
            holds=lambda after: after is True or after == "nodes" or (type(after) is int and after > 1),
        ),
    ] = True

    def __post_init__(self) -> None:
        for name, (hint, check) in checks().items():
            given = getattr(self, name)
            value = check.convert(given)
            if not (fits(value, hint) and check.holds(value)):
                raise ValueError(f"`{name}={given!r}` {check.otherwise}")
            object.__setattr__(self, name, value)  # a frozen dataclass has no other way
        self._check_compile_options()
        for excluded, message in self._conflicts():
            if excluded:
                raise ValueError(message)

    def _conflicts(self) -> Iterator[tuple[object, str]]:
        """Options that exclude each other: whether two were given, and what to do then."""
        yield (
            self.reshard_after_forward is not True and self.stage != 3,
            f"`reshard_after_forward={self.reshard_after_forward!r}` is for stage=3, which alone gathers in the "
            f"backward; got stage={self.stage!r}.",
        )
        yield (
            self.full_param_optimizers and (self.offload or self.optimizer_in_backward),
            "`full_param_optimizers` need whole parameters, and offload='optimizer' and optimizer_in_backward=True "
            "update a unit's own shards; drop it, or them.",
        )
        yield (
            self.optimizer_in_backward and self.keep_gradients,
            "`keep_gradients` keeps what optimizer_in_backward=True frees; drop one of them.",
        )
        yield (
            self.activation_budget is not None and self.compile is False,
            f"`recompute={self.recompute}` is for what is compiled; with compile=False use recompute='blocks'.",
        )
        yield (
            self.checkpointed and self.compile == "model",
            "recompute='blocks' needs blocks that run on their own; with compile='model' use a number, recompute=1.",
        )
        yield (
            self.activation_offload and (self.compile == "model" or self.cuda_graphs),
            "`activation_offload` takes what a block saves to host memory while the next one runs. With "
            "compile='model' one graph saves all at its end, and CUDA graphs "
            f"(compile_options={self.compile_options!r}) keep it where it is; drop one of the two.",
        )

    def _check_compile_options(self) -> None:
        """What torch.compile's arguments may be, and what CUDA graphs need of them."""
        for name, value in self.compile_options.items():
            allowed, otherwise = _COMPILE_OPTIONS[name]
            if not allowed(value):
                raise ValueError(f"`compile_options={{{name!r}: {value!r}}}` is not understood; {otherwise}.")
        if self.backend != "inductor" and (self.mode is not None or self.options):
            raise ValueError(
                f"`compile_options`: 'mode' and 'options' belong to Inductor; drop them with 'backend': "
                f"{self.backend!r}."
            )
        if "cudagraph_policy" in self.options:
            raise ValueError("`cudagraph_policy` records whole graphs, with the communication in them; drop it.")
        if self.cuda_graphs and self.options.get("triton.cudagraph_trees") is False:
            raise ValueError(
                "CUDA graphs without `triton.cudagraph_trees` overwrite what other blocks still need; drop the option."
            )
        if self.cuda_graphs and self.options.get("cpp_wrapper"):
            raise ValueError("Inductor records no CUDA graphs with `cpp_wrapper`; drop it, or choose another 'mode'.")
        if self.compile is False and (self.mode is not None or self.options):
            warnings.warn("`compile_options` have no effect with compile=False.", stacklevel=5)

    @property
    def backend(self) -> str:
        """torch.compile's, from ``compile_options``; so are the next three."""
        return str(self.compile_options.get("backend", "inductor"))

    @property
    def mode(self) -> str | None:
        return cast("str | None", self.compile_options.get("mode"))

    @property
    def dynamic(self) -> bool | None:
        return cast("bool | None", self.compile_options.get("dynamic"))

    @property
    def options(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.compile_options.get("options", {}))

    @property
    def kept_names(self) -> tuple[str, ...]:
        """The modules that stay gathered by name."""
        return self.keep_gathered if isinstance(self.keep_gathered, tuple) else ()

    @property
    def memory_budget(self) -> int | Literal["auto"] | None:
        """The bytes on each device that what stays gathered may fill; ``None``: only what has been named stays."""
        return None if isinstance(self.keep_gathered, tuple) else self.keep_gathered

    @property
    def checkpointed(self) -> bool:
        """Whether repeated blocks run again in the backward."""
        return self.recompute == "blocks"

    @property
    def activation_budget(self) -> float | None:
        """torch's ``activation_memory_budget``: the share of its activations that a compiled module saves."""
        return 1 - self.recompute if isinstance(self.recompute, float) else None

    @property
    def chosen_stage(self) -> Literal[1, 2, 3]:
        """The stage.

        Raises:
            ValueError: the option is ``"auto"``, and no stage has been chosen yet.
        """
        if self.stage == "auto":
            raise ValueError("stage='auto' is chosen when a strategy sets the model up; here choose 1, 2 or 3.")
        return self.stage

    @property
    def cuda_graphs(self) -> bool:
        """Whether what a graph computes between our operators is replayed as CUDA graphs, see [Note: CUDA graphs]."""
        chosen = self.options.get("triton.cudagraphs", self.mode in _CUDA_GRAPH_MODES)
        return self.compile is not False and bool(chosen)

    @property
    def has_places(self) -> bool:
        """Whether graphs of blocks read what stage 3 gathers at fixed addresses, see [Note: fixed places] in
        csrc/fixed_places.cpp."""
        return self.cuda_graphs and self.compile == "blocks"


@cache
def checks() -> dict[str, tuple[Any, Check]]:
    """By option: its type, and what the type does not say."""
    hints = get_type_hints(Config, include_extras=True)
    return {option.name: get_args(hints[option.name]) for option in fields(Config)}
