"""What a random program may consist of: data that prints as Python, and Hypothesis's strategies for it.

A program is a model, the strategy's options and a list of training steps, each a list of operations. Its ``repr`` is
code that makes it again: with ``from tests.fuzz.program import *`` it can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Literal

from hypothesis import strategies as st

__all__ = [
    "Accumulate", "Backward", "Clip", "Evaluate", "Freeze", "Load", "Model", "Op", "Options", "Program", "Read", "Save",
    "Scale", "Snap", "Step", "Toggle", "Window", "Write", "Zero", "brief", "programs",
]  # fmt: skip


@dataclass(frozen=True)
class Model:
    """``count`` equal blocks of the layers ``block`` (names in nets.KINDS) between a front and a head."""

    width: int = 4
    block: tuple[str, ...] = ("plain",)
    count: int = 2
    tied: Literal["", "ends", "blocks"] = ""
    around: Literal["ordinary", "reentrant"] | None = None  # a checkpoint round each block


@dataclass(frozen=True)
class Options:
    """Of the strategy, and of the optimizers."""

    stage: int = 1
    mode: Literal["eager", "blocks", "model"] = "eager"
    prefetch: int = 1
    unit_bytes: int = 2**26
    keep_gathered: tuple[str, ...] | int = ()
    defer_grad_sync: bool = False
    keep_gradients: bool = False
    optimizers: Literal["one", "halves", "alternate"] = "one"
    momentum: float = 0.0
    weight_decay: float = 0.0
    offload: bool = False
    activations: Literal["", "again", "host", "again_host"] = ""  # blocks run again; what they save is on the host
    recompute: float | None = None
    inner: bool = False  # of four ranks two gather in the backward, from secondary shards
    unequal: bool = False  # ranks may do other things, which no program does
    in_backward: bool = False  # each backward updates, and the step after it only counts


@dataclass(frozen=True)
class Op:
    """One line of a training step."""


@dataclass(frozen=True)
class Backward(Op):
    """A forward and a backward.

    ``kind``: "twice": two backwards through one graph; "sum": of the sum of two forwards; "late": two forwards, then
    two backwards, the later forward's first. ``penalty``: what the loss adds that is computed from parameters outside
    the model's forward, from ``parameters()`` or from a module's attribute. ``fails``: an exception in the forward,
    caught at once, or in the backward: it ends the window or accumulation round it, and is caught outside.
    """

    kind: Literal["plain", "twice", "sum", "late"] = "plain"
    penalty: Literal["", "masters", "attribute"] = ""
    fails: Literal["", "forward", "backward"] = ""


@dataclass(frozen=True)
class Evaluate(Op):
    """A forward without a backward: under ``no_grad``, in inference mode, or one whose backward never comes."""

    how: Literal["no_grad", "inference", "grad"] = "no_grad"


@dataclass(frozen=True)
class Zero(Op):
    """``zero_grad``; of optimizer 0 or 1, of the module, or by ``p.grad = None`` (``none`` only)."""

    of: Literal["0", "1", "module", "each"] = "0"
    none: bool = True


@dataclass(frozen=True)
class Window(Op):
    """``coalesce_grad_reduction``. ``fails``: all ranks raise at its end, or one of them; caught outside."""

    body: tuple[Op, ...] = ()
    gather: Literal["auto", "window", "use"] = "auto"
    max_bytes: int | None = None
    fp32: bool = False
    fails: Literal["", "all", "0", "1"] = ""


@dataclass(frozen=True)
class Accumulate(Op):
    """``block_backward_sync``."""

    body: tuple[Op, ...] = ()
    fails: bool = False


@dataclass(frozen=True)
class Step(Op):
    """``step`` of optimizer 0 or 1.

    ``closure``: runs a forward and a backward; without gradients from before; in a window. ``fails``: where an
    exception is raised: at the closure's begin or end, in the update before anything is written, in a hook of the
    user's before or after the step; it is caught at once.
    """

    of: Literal[0, 1] = 0
    raw: bool = False
    closure: Literal["", "backward", "zero", "window"] = ""
    fails: Literal["", "closure", "closure_end", "update", "pre_hook", "post_hook"] = ""


@dataclass(frozen=True)
class Clip(Op):
    of: Literal[0, 1] = 0
    value: float = 0.05
    how: Literal["norm", "value", "torch"] = "norm"


@dataclass(frozen=True)
class Freeze(Op):
    """Parameter ``which`` (modulo their number) is trained from here on, or not."""

    which: int = 0
    on: bool = True


@dataclass(frozen=True)
class Scale(Op):
    """Halves all gradients in place."""


@dataclass(frozen=True)
class Toggle(Op):
    """``toggle_optimizer`` and, at the end, ``untoggle_optimizer``."""

    of: Literal[0, 1] = 0
    body: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Snap(Op):
    """Reads all gradients, to be compared."""


@dataclass(frozen=True)
class Read(Op):
    """Reads parameters, to be compared: by ``full_parameters``, from ``parameters()``, or as modules' attributes."""

    how: Literal["full", "masters", "attribute"] = "full"


@dataclass(frozen=True)
class Write(Op):
    """Halves a parameter's values, by what :class:`Read` names, or by ``data``."""

    which: int = 0
    how: Literal["full", "masters", "data", "attribute", "attribute_data"] = "full"


@dataclass(frozen=True)
class Save(Op):
    """``Trainer.save_checkpoint``."""


@dataclass(frozen=True)
class Load(Op):
    """``load_state_dict`` of what was last saved, if anything was."""


@dataclass(frozen=True)
class Program:
    model: Model = Model()
    options: Options = Options()
    steps: tuple[tuple[Op, ...], ...] = ()


def operations(ops: Iterable[Op], around: Op | None = None) -> Iterator[tuple[Op, Op | None]]:
    """Every operation, with the one that it is in the body of."""
    for op in ops:
        yield op, around
        yield from operations(getattr(op, "body", ()), op)


def sums_early(program: Program) -> bool:
    """Whether a window sums over the ranks before all of its backwards have run."""
    ops = operations(chain.from_iterable(program.steps))
    return any(isinstance(op, Window) and op.max_bytes is not None for op, _ in ops)


# ---- strategies; what is simplest comes first, as Hypothesis shrinks towards it ----

_LAYERS = (
    "plain", "transposed", "sliced", "unbound", "indexed", "flat", "complex", "two_reads", "one_read",
    "equal_gradients", "no_grad_read", "checkpointed", "reentrant", "broken", "disabled", "skipped", "scalar",
    "normed", "squared", "detached", "in_place", "empty", "frozen", "unused", "by_rank", "raw_same", "raw_mixed",
    "raw_two_reads", "raw_none",
)  # fmt: skip

_models = st.builds(
    Model,
    width=st.sampled_from((4, 5, 3)),
    block=st.lists(st.sampled_from(_LAYERS), min_size=1, max_size=3, unique=True).map(tuple),
    count=st.sampled_from((2, 3)),
    tied=st.sampled_from(("", "", "ends", "blocks")),
    around=st.sampled_from((None, None, None, "ordinary", "reentrant")),
)


def _some(ops: st.SearchStrategy[Op], most: int) -> st.SearchStrategy[tuple[Op, ...]]:
    """As likely many as few, where Hypothesis's own lists are short."""
    sizes = st.integers(0, most)
    return sizes.flatmap(lambda size: st.lists(ops, min_size=size, max_size=size).map(tuple))


def _weighted(**weights: int) -> st.SearchStrategy[Op]:
    """Operations by the names below, as often as their weights say."""
    names = [name for name, weight in weights.items() for _ in range(weight)]
    return st.sampled_from(names).flatmap(lambda name: _OPS[name])


_inner = _some(_weighted(backward=5, zero=2, evaluate=1, scale=1), 5)
_OPS: dict[str, st.SearchStrategy[Op]] = {
    "backward": st.builds(
        Backward,
        kind=st.sampled_from(("plain",) * 5 + ("twice", "sum", "late")),
        penalty=st.sampled_from(("",) * 4 + ("masters", "attribute")),
        fails=st.sampled_from(("",) * 10 + ("forward", "backward")),
    ),
    "zero": st.builds(
        Zero, of=st.sampled_from(("0", "1", "module", "each")), none=st.booleans().map(lambda kept: not kept)
    ),
    "evaluate": st.builds(Evaluate, how=st.sampled_from(("no_grad", "grad", "inference"))),
    "window": st.builds(
        Window,
        body=_inner,
        gather=st.sampled_from(("auto", "window", "use")),
        max_bytes=st.sampled_from((None, None, 0, 200)),
        fp32=st.booleans(),
        fails=st.sampled_from(("",) * 8 + ("all", "0", "1")),
    ),
    "accumulate": st.builds(Accumulate, body=_inner, fails=st.sampled_from((False,) * 6 + (True,))),
    "step": st.builds(
        Step,
        of=st.sampled_from((0, 0, 1)),
        raw=st.booleans(),
        closure=st.sampled_from(("",) * 6 + ("backward", "zero", "window")),
        fails=st.sampled_from(("",) * 8 + ("closure", "closure_end", "update", "pre_hook", "post_hook")),
    ),
    "clip": st.builds(
        Clip, of=st.sampled_from((0, 1)), value=st.just(0.05), how=st.sampled_from(("norm", "value", "torch"))
    ),
    "freeze": st.builds(Freeze, which=st.integers(0, 9), on=st.booleans()),
    "snap": st.just(Snap()),
    "read": st.builds(Read, how=st.sampled_from(("full", "masters", "attribute"))),
    "write": st.builds(
        Write,
        which=st.integers(0, 9),
        how=st.sampled_from(("full", "masters", "data", "attribute", "attribute_data")),
    ),
    "save": st.sampled_from((Save(), Load())),
    "scale": st.just(Scale()),
    "toggle": st.builds(
        Toggle,
        of=st.sampled_from((0, 1)),
        body=_some(_weighted(backward=4, window=1, step=2, zero=1), 4),
    ),
}  # fmt: skip
_step = _some(
    _weighted(
        backward=8, window=4, accumulate=3, step=5, zero=2, toggle=1, clip=1, freeze=1, evaluate=1, snap=1, read=1,
        write=1, save=1, scale=1,
    ),
    10,
)  # fmt: skip
_steps = st.integers(1, 3).flatmap(lambda size: st.lists(_step, min_size=size, max_size=size).map(tuple))


def _options(modes: tuple[str, ...]) -> st.SearchStrategy[Options]:
    return st.builds(
        Options,
        stage=st.sampled_from((1, 2, 3)),
        mode=st.sampled_from(modes),
        prefetch=st.sampled_from((1, 0, 2)),
        unit_bytes=st.sampled_from((2**26, 1, 100)),
        keep_gathered=st.sampled_from(((), (), (), ("net.layers",), ("net.head", "net.layers.0"), 0, 300, 10**9)),
        defer_grad_sync=st.sampled_from((False, False, True)),
        keep_gradients=st.sampled_from((False, False, False, True)),
        optimizers=st.sampled_from(("one", "one", "halves", "alternate")),
        momentum=st.sampled_from((0.0, 0.0, 0.9)),
        weight_decay=st.sampled_from((0.0, 0.0, 0.1)),
        offload=st.booleans(),
        activations=st.sampled_from(("", "", "again", "host", "again_host")),
        recompute=st.sampled_from((None, None, 1.0, 0.5)),
        inner=st.sampled_from((False, False, True)),
        unequal=st.sampled_from((False, False, True)),
        in_backward=st.sampled_from((False, False, False, True)),
    )


def _allowed(program: Program) -> Program:
    """Without what README forbids: at stage 3 only modules that stay gathered may depend on the rank.

    And without what rounds gradients of half precision elsewhere than the reference does.
    """
    model, options, steps = program.model, program.options, program.steps
    if options.in_backward:
        options = replace(options, keep_gradients=False, optimizers="one")
        model = without_halves(program).model
        steps = tuple(tuple(made for op in ops for made in _updated_at_once(op)) for ops in steps)
    if any(kind.startswith("raw") for kind in model.block):
        # gradients of one backward may wait for those of another
        waits = any(isinstance(op, (Accumulate, Window)) for op, _ in operations(chain.from_iterable(steps)))
        steps = tuple(tuple(_rounded_alike(op, waits) for op in ops) for ops in steps)
        if waits:
            model = replace(model, block=tuple("raw_same" if k == "raw_two_reads" else k for k in model.block))
    if options.stage < 3:
        options = replace(options, keep_gathered=(), inner=False, unequal=False)
    elif "by_rank" in model.block:
        options = replace(options, keep_gathered=("net.layers",))
    if options.mode == "eager":
        options = replace(options, recompute=None)
    elif options.mode == "model":
        options = replace(options, activations="")
    if options.unequal:
        options = replace(options, inner=False)
    return Program(model, options, tuple(tuple(_allowed_op(op, model, options) for op in ops) for ops in steps))


def _updated_at_once(op: Op) -> tuple[Op, ...]:
    """What backwards that update allow: a step follows each, and nothing is done to gradients between the two."""
    if isinstance(op, Backward):
        return Backward("sum" if op.kind == "sum" else "plain"), Step()
    if isinstance(op, (Accumulate, Window)):
        kept = (inner for inner in op.body if isinstance(inner, (Backward, Evaluate)))
        body = tuple(Backward() if isinstance(inner, Backward) else inner for inner in kept)
        if isinstance(op, Window):
            return replace(op, body=body, fails=""), Step()
        return replace(op, body=body, fails=False), Backward(), Step()
    return (op,) if isinstance(op, (Evaluate, Freeze, Load, Read, Save, Write, Zero)) else ()


def _rounded_alike(op: Op, waits: bool) -> Op:
    """Without what rounds gradients of half precision elsewhere than torch does.

    With ``max_bytes`` the mean of some backwards is rounded before the end. Where gradients wait (``waits``), each use
    adds its own to them, while torch adds those of one backward first. In a second backward through a graph a unit may
    be reduced before all of its uses have given theirs, and again after it.
    """
    if isinstance(op, Backward) and (op.kind == "twice" or (op.kind == "sum" and waits)):
        return replace(op, kind="plain")
    if isinstance(op, (Accumulate, Toggle, Window)):
        op = replace(op, body=tuple(_rounded_alike(inner, waits) for inner in op.body))
    return replace(op, max_bytes=None) if isinstance(op, Window) else op


def _allowed_op(op: Op, model: Model, options: Options) -> Op:
    """Without what is not defined.

    What is offloaded cannot be updated past Lightning. A rank that fails alone in a window must not leave the others in
    communication, and where ranks serve each other its exception must not be caught inside. Torch's donated buffers
    forbid two backwards through a compiled graph. And a layer of "raw_none" reads from its module which dtype a
    gradient has: in eager code a reentrant checkpoint reads it again in the backward, after a later forward has changed
    it, while the graph of a whole model, of plain torch's too, keeps what its own forward has read.
    """
    if isinstance(op, (Accumulate, Toggle, Window)):
        op = replace(op, body=tuple(_allowed_op(inner, model, options) for inner in op.body))
    if isinstance(op, Step) and options.offload:
        return replace(op, raw=False)
    if isinstance(op, Window) and op.fails in ("0", "1"):
        if options.unequal:
            return replace(op, fails="all")
        return replace(op, max_bytes=None, gather="window" if options.stage == 3 else op.gather)
    if isinstance(op, Backward) and op.kind == "twice" and options.mode != "eager":
        return replace(op, kind="plain")
    reads_again = "raw_none" in model.block and model.around == "reentrant" and options.mode == "model"
    if isinstance(op, Backward) and op.kind in ("sum", "late") and reads_again:
        return replace(op, kind="plain")
    return op


def without_halves(program: Program) -> Program:
    """Without parameters and gradients of half precision.

    For more than two ranks: a sum of three depends on the order there, which the backend chooses. And for backwards
    that update, which take no gradient of another dtype than its parameter's.
    """
    block = tuple("plain" if kind.startswith("raw") else kind for kind in program.model.block)
    return replace(program, model=replace(program.model, block=block))


def programs(*modes: str) -> st.SearchStrategy[Program]:
    """Programs that README allows, in one of ``modes``."""
    return st.builds(Program, model=_models, options=_options(modes), steps=_steps).map(_allowed)


def brief(value: object) -> str:
    """``value`` as code, without what is the default."""
    if isinstance(value, tuple):
        return f"({', '.join(map(brief, value))}{',' if len(value) == 1 else ''})"
    if not is_dataclass(value):
        return repr(value)
    chosen = [(f.name, getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{name}={brief(one)}' for name, one in chosen)})"
