"""What parity alone cannot show: mixed groups, counted traffic, exact memory, mutations."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.sharding.unsharded import Unsharded
from tests.support import engines, models
from tests.support.harness import Worlds, on_ranks
from tests.support.memory import gathered_bytes

# ---- rule 7: rank 0 compiled, rank 1 eager ----


class Branches(nn.Module):
    """Residual block of which each rank trains another branch; `bias` is never needed by a backward graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return x + torch.tanh(self.left(x) if left else self.right(x)) + self.bias


class Frozen(nn.Module):
    """A block whose compiled backward reads weights (it recomputes) and whose eager backward reads none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.ParameterList([torch.zeros(width)])

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return x + torch.softmax(self.gate[0], 0).exp()


class Mixed(nn.Module):
    """Embedding, blocks of one kind, head; `left` is set by the caller."""

    def __init__(self, block: type[nn.Module], width: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, width)
        self.layers = nn.ModuleList(block(width) for _ in range(depth))
        self.head = nn.Linear(width, models.VOCABULARY)
        self.left = models.rank() == 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.left)
        return self.head(x)


def _branches() -> nn.Module:
    return Mixed(Branches)


def _deep() -> nn.Module:
    """More blocks than reductions may be in flight: none may wait on the device for what another rank does later."""
    return Mixed(Branches, depth=12)


def _frozen() -> nn.Module:
    return Mixed(Frozen)


class FrozenFront(Mixed):
    """The first blocks, and what leads to them, learn nothing: compiled, they are graphs for inference."""

    def __init__(self) -> None:
        super().__init__(Branches)
        for module in (self.embedding, *self.layers[:2]):
            module.requires_grad_(False)


class Repeated(Mixed):
    """Rank 0 runs its block once, rank 1 twice, in reentrant checkpoints: how often it contributes is not known before
    the end of the backward."""

    def __init__(self) -> None:
        super().__init__(models.Block, depth=2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in (self.layers[0],) * (1 if self.left else 2):
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(self.layers[1](x))


MODELS = {
    "plain": models.ByteModel,
    "branches": _branches,
    "deep": _deep,
    "recompute": _frozen,
    "frozen front": FrozenFront,
    "repeated": Repeated,
}


def _uneven_reference(module: models.Module, counts: list[int], accumulate: int) -> None:
    """DDP in one process with ``counts[step]`` micro-batches in each step, every loss divided by ``accumulate``."""
    data, world = [models.Batches(r) for r in range(models.world())], models.world()
    optimizer = module.to(models.device()).configure_optimizers()
    batch = 0
    for count in counts:
        optimizer.zero_grad()
        for micro in range(batch, batch + count):
            for r in range(world):
                module.model.left = r == 0
                (module.loss(data[r][micro]) / world / accumulate).backward()
        optimizer.step()
        batch += count


def _mixed(kind: str, stage: int) -> dict[str, Any]:
    module, twin = models.pair(lambda: models.Module(MODELS[kind], lr=0.2))
    strategy = ZeroCompileStrategy(stage=stage, compile_options={"backend": "aot_eager"})
    # 5 batches, 2 accumulated: the last step of the epoch has one micro-batch only
    with engines.compiled_here(models.rank() == 0):
        record = models.train(module, strategy, steps=6, max_epochs=2, limit_train_batches=5, accumulate_grad_batches=2)
    for _ in range(2):
        _uneven_reference(twin, [2, 2, 1], 2)
    return {"deviation": models.deviation(module, twin), "stats": record.stats, "compiled": record.compiled}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, 3])
@pytest.mark.parametrize("kind", list(MODELS))
def test_compiled_and_eager_rank_in_one_group(worlds: Worlds, kind: str, stage: int) -> None:
    """Rank 0 compiled and rank 1 eager train to parity: no collective's content or order comes from a graph."""
    compiled, eager = worlds(2).run(_mixed, kind, stage, timeout=60)
    assert compiled["compiled"].forward > 0 and compiled["compiled"].backward > 0
    assert compiled["stats"].graph_uses > 0 and compiled["stats"].graph_reductions > 0
    assert eager["compiled"].forward == 0 and eager["stats"].graph_uses == 0
    assert max(compiled["deviation"], eager["deviation"]) <= 1e-6
    for field in ("gathers", "gather_bytes", "reductions", "reduce_bytes", "prefetched"):
        assert getattr(compiled["stats"], field) == getattr(eager["stats"], field), field


# ---- traffic, counted outside the package ----

# ByteModel on 2 ranks, fp32. Rows are padded to a multiple of 2. Units (named_parameters order, blocks apart):
#   first: scale () 4 B whole on every rank, shift [1->2] 8 B, embedding [13->14, 10] 560 B  -> 568 B gathered
#   block: norm 40 + 40, up [21->22, 10] 880, its bias [22] 88, down [10, 21] 840              -> 1888 B, three of them
#   head:  [13->14, 10] 560 B
FIRST, BLOCK, HEAD = 568, 1888, 560
MODEL = FIRST + 3 * BLOCK + HEAD
PARAMETERS = 19
EXPECTED = {  # (stage, accumulation) -> collectives and bytes of the full values in one step
    # Stages 1 and 2: after the optimizer all units are gathered, these small ones at once, whatever the accumulation.
    # A reduction is one reduce-scatter per unit and one all-reduce for the 0-dim scale.
    (1, 1): {"gathers": 1, "gathered": 6792, "scatters": 5, "reduced": 6792, "allreduces": 1, "allreduced": 4},
    (1, 4): {"gathers": 1, "gathered": 6792, "scatters": 5, "reduced": 6792, "allreduces": 1, "allreduced": 4},
    (2, 1): {"gathers": 1, "gathered": 6792, "scatters": 5, "reduced": 6792, "allreduces": 1, "allreduced": 4},
    (2, 4): {"gathers": 1, "gathered": 6792, "scatters": 20, "reduced": 27168, "allreduces": 4, "allreduced": 16},
    # Stage 3: forward: the five units, and `first` again for scale and shift, which are read after the head;
    # backward: head and the three blocks (`first` is still there from the forward's end). Ten gathers a micro-batch.
    (3, 1): {"gathers": 10, "gathered": 13584, "scatters": 5, "reduced": 6792, "allreduces": 1, "allreduced": 4},
    (3, 4): {"gathers": 40, "gathered": 54336, "scatters": 20, "reduced": 27168, "allreduces": 4, "allreduced": 16},
}


def _nbytes(shapes: list[list[int]], itemsize: int) -> int:
    return sum(itemsize * torch.Size(shape).numel() for shape in shapes)


def _traffic(stage: int, accumulate: int, compile: Any) -> dict[str, int]:
    """One steady step's collectives as the profiler saw them below the package."""
    model = models.ByteModel()
    data = models.Batches(models.rank())
    with engines.engine(model, stage, compile=compile, copy_engine=False) as engine:
        optimizer = engines.sgd(engine, model, lr=0.1)

        def step(number: int) -> None:
            for micro in range(accumulate):
                last = micro == accumulate - 1
                with engine.training_step(), nullcontext() if last else engine.accumulation():
                    loss = engines.token_loss(model, data[number * accumulate + micro]) / accumulate
                    engines.backward(engine, loss)
            optimizer.step()
            engine.apply_writes()  # what was started after the optimizer has arrived

        for number in range(3):
            step(number)
        torch.distributed.barrier()
        activities = [torch.profiler.ProfilerActivity.CPU]
        before = engine.runtime.stats().reductions
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            step(3)
        reductions = engine.runtime.stats().reductions - before
    events = Counter(event.name for event in profile.events())
    gathers = events["c10d::_allgather_base_"] + events["c10d::allgather_into_tensor_coalesced_"]  # gloo's, NCCL's
    reduced = [e.input_shapes for e in profile.events() if e.name == "gloo:all_reduce"]
    gathered = [e.input_shapes for e in profile.events() if e.name == "gloo:all_gather"]
    scales = sum(shapes == [[1]] for shapes in reduced)
    # on gloo a unit is reduced by an all-reduce of each full gradient, see [Note: gloo reduce-scatters]
    each = len(reduced) - scales
    scatters = events["c10d::reduce_scatter_tensor_coalesced_"]
    return {
        "gathers": gathers,
        "gathered": models.world() * sum(_nbytes(shapes, 4) for shapes in gathered),
        "scatters": reductions - scales if models.device() == "cpu" else scatters,
        "reduced": sum(_nbytes(s, 4) for s in reduced) - 4 * scales,
        "allreduces": events["c10d::allreduce_"] - each,
        "allreduced": 4 * scales,
        "other": sum(count for name, count in events.items() if name.startswith("c10d::"))
        - gathers
        - scatters
        - events["c10d::allreduce_"],
    }  # fmt: skip


@pytest.mark.parametrize("compile", [False, "blocks"])
@pytest.mark.parametrize(("stage", "accumulate"), list(EXPECTED))
def test_collectives_and_bytes_of_a_step(worlds: Worlds, stage: int, accumulate: int, compile: Any) -> None:
    """A steady step moves exactly what the stage says, as torch's profiler counts it; eager and compiled alike."""
    assert MODEL == 6792
    expected = EXPECTED[stage, accumulate] | {"other": 0}
    if worlds.device == "cuda":  # the profiler shows the sizes of gloo's transfers only
        expected |= dict.fromkeys(("gathered", "reduced", "allreduced"), 0)
    for seen in worlds(2).run(_traffic, stage, accumulate, compile):
        assert seen == expected


# ---- memory after the optimizer's step ----


def _allocated(profile: Any) -> dict[int, int]:
    """Address -> bytes of what was allocated under the profiler and is still there, C++ owners included."""

    def walk(nodes: list[Any]) -> list[Any]:
        return [found for node in nodes for found in (node, *walk(node.children))]

    live: dict[int, int] = {}
    events = walk(profile.profiler.kineto_results.experimental_event_tree())
    for event in sorted((e for e in events if e.tag.name == "Allocation"), key=lambda e: e.start_time_ns):
        fields = event.extra_fields
        if fields.alloc_size > 0:
            live[fields.ptr] = fields.alloc_size
        else:
            live.pop(fields.ptr, None)
    return live


def _block(tensor: Tensor) -> int:
    """What the allocator takes for a tensor: on CUDA multiples of 512 bytes."""
    return -(-tensor.nbytes // 512) * 512 if tensor.is_cuda else tensor.nbytes


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _live_after_step(stage: int) -> dict[str, Any]:
    data = models.Batches(models.rank())
    gc.collect()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    profile.start()
    model = models.ByteModel()
    with pytest.MonkeyPatch.context() as patch:  # its pickles are freed in gloo's threads, unseen by the profiler
        patch.setattr("lightning_zerocompile.engine.engine.check_equal_on_all_ranks", lambda *_: None)
        made = engines.make_engine(model, stage, compile=False)
    with engines.closing(made) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine.attach_optimizers([optimizer])
        for number in range(3):
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
        gc.collect()
        profile.stop()
        live = _allocated(profile)
        masters = [_local(p) for p in model.parameters()]
        states = [_local(t) for state in optimizer.state.values() for t in state.values()]
        named = {
            "masters": sum(live.pop(t.data_ptr()) for t in masters),
            "states": sum(live.pop(t.data_ptr()) for t in states),
            "expected": sum(_block(t) for t in masters + states),
            "resident": engine.runtime.stats().resident_bytes,
            "deferred": engine.runtime.core.deferred_bytes(),
            "grads": sum(p.grad is not None for p in model.parameters()),
        }
    return named | {"rest": sum(live.values())}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_live_memory_after_the_optimizer_step(worlds: Worlds, stage: int) -> None:
    """Every byte allocated since before the model was built, in C++ and Python: masters, states, handles, residents.

    One process, since gloo frees its buffers in threads that the profiler does not follow.
    """
    (seen,) = worlds(1).run(_live_after_step, stage)
    handles = 8 * PARAMETERS  # float64; the runtime's, the trainable and the frozen one share it
    mesh = 4  # the DeviceMesh's own tensor of ranks
    full = 2 * 4 + 2 * 520 + 3 * (40 + 40 + 840 + 84 + 840)  # unpadded: one rank
    assert seen["masters"] + seen["states"] == seen["expected"]
    assert seen["grads"] == 0 and seen["deferred"] == 0
    if worlds.device == "cuda":  # cuBLAS and NCCL allocate too
        return
    assert seen["masters"] == full
    assert seen["states"] == 2 * full + 4 * PARAMETERS  # two moments, one step counter each
    assert seen["resident"] == (0 if stage == 3 else full)
    assert seen["rest"] == seen["resident"] + handles + mesh


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_a_compiled_step_leaves_no_tensor(stage: int) -> None:
    """Compiled: a step allocates nothing that outlives it, and only stages 1 and 2 keep full values."""
    # Shapes of the tensors that a step left behind (compiled), and the runtime's own account.
    compile = "blocks"
    model = models.ByteModel()
    data = models.Batches(models.rank())
    with engines.engine(model, stage, compile=compile) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine.attach_optimizers([optimizer])

        def pointers() -> dict[int, tuple[int, ...]]:
            gc.collect()
            found = {}
            for thing in gc.get_objects():
                if (
                    type(thing) in (Tensor, nn.Parameter, Unsharded)
                    and thing.device.type == models.device()
                    and thing.numel()
                ):
                    found[thing.untyped_storage().data_ptr()] = tuple(thing.shape)
            return found

        for number in range(3):
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
        before = pointers()
        engines.step(engine, optimizer, lambda: engines.token_loss(model, data[3]))
        after = pointers()
        stats = engine.runtime.stats()
        left = [shape for pointer, shape in after.items() if pointer not in before]
        resident = stats.resident_bytes
        deferred = engine.runtime.core.deferred_bytes()
        graph_reductions = stats.graph_reductions
        full = sum(gathered_bytes(p) for p in model.parameters())  # with the 0-dim scale, which no collective moves
    assert graph_reductions > 0
    assert left == []
    assert resident == (0 if stage == 3 else full) and (models.world() != 2 or full == MODEL + 4)
    assert deferred == 0


# ---- mutations: the parity check must notice ----


class Mutation(L.Callback):
    """Breaks the training in one way, once it is set up."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.hits = 0
        self.dropped: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        runtime = trainer.strategy.engine.runtime  # type: ignore[attr-defined]
        if self.kind == "unit":
            self.dropped = [
                sharded for sharded in runtime.sharded_parameters if sharded.name.startswith("model.layers.1.")
            ]

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for sharded in self.dropped:
            self.hits += sharded.master.grad is not None
            sharded.master.grad = None

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
        if self.kind == "rank" and models.rank() == 1:
            loss.register_hook(torch.zeros_like)
        elif self.kind == "divisor":
            loss.register_hook(lambda grad: models.world() * grad)  # the sum, and not the mean
        self.hits += self.kind in ("rank", "divisor")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["none", "divisor", "rank", "unit"])
@on_ranks()
def test_parity_notices_a_mutation(kind: str, stage: int) -> None:
    """A wrong divisor, a rank or a unit that does not contribute: the parity check fails on every rank."""
    module, twin = models.pair(models.Module)
    mutation = Mutation(kind)
    strategy = ZeroCompileStrategy(stage=stage, compile_options={"backend": "aot_eager"})
    models.train(module, strategy, steps=3, callbacks=[mutation])
    models.reference(twin, 3)
    deviation = models.deviation(module, twin)
    if kind == "none":
        assert deviation <= 1e-6
    else:
        assert mutation.hits > 0 and deviation > 1e-4


# ---- AdamW ----


class Anchored(models.Module):
    def loss(self, batch: Tensor) -> Tensor:  # [batch, length]
        return engines.anchored_loss(self.model, batch)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_adamw_equals_ddp(stage: int) -> None:
    """Twenty steps of AdamW, whose moments make a wrong gradient scale visible only late."""
    module, twin = models.pair(Anchored, optimizer="adamw", lr=1e-2)
    record = models.train(module, ZeroCompileStrategy(stage=stage, compile_options={"backend": "aot_eager"}), steps=20)
    models.reference(twin, 20)
    assert record.compiled.backward == 1
    assert models.deviation(module, twin) <= 1e-5
