"""Right in every frame: compiled, broken, skipped, shared, repeated, abandoned, recomputed.

Every case trains a few SGD steps at each stage, eagerly, by blocks and as a whole model, in one task of the ranks.
Source of the cases: DeepSpeed PR 8059 and what it left open.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_zerocompile.runtime.runtime import EagerReads
from tests.support import architectures, engines, graph_breaks, models
from tests.support.harness import on_ranks
from tests.support.memory import gathered_bytes
from tests.support.parity import CELLS, reference

STEPS, LR = 3, 0.5
BOTH = ("blocks", "model")
# stages 1 and 2 differ in when an accumulation reduces, not in how a frame is run
LONG: list[tuple[int, Any]] = [(2, "model"), (3, "model")]
Backward = Callable[[Tensor], None]


def _once(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    backward(engines.token_loss(model, batch))


def _two_forwards(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    backward(engines.token_loss(model, batch) + engines.token_loss(model, batch.flip(0, 1)))


def _two_backwards(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    first, second = engines.token_loss(model, batch), engines.token_loss(model, batch.flip(0, 1))
    backward(first)
    backward(second)


def _abandoned(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    kept = engines.token_loss(model, batch.flip(1))
    engines.token_loss(model, batch.flip(0))
    backward(engines.token_loss(model, batch))
    del kept


def _teacher(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    with torch.no_grad():
        target = model(batch[:, :-1])
    with torch.inference_mode():
        model(batch[:, 1:])
    backward(engines.token_loss(model, batch) + (model(batch[:, :-1]) - 0.9 * target).square().mean())


@dataclass(frozen=True)
class Case:
    """One model, how it is trained, and what proves that its frame was what the name says.

    Attributes:
        eager: scopes of compilation in which eager code reads blocks.
        breaks: scopes of compilation in which Dynamo must have counted a graph break (it does not count skipped loops).
        graphs: at least that many graphs for the equal blocks.
        evaluate: a forward in inference mode stands between the steps.
        held: gathered values that the model itself needs longer than one block, in blocks.
    """

    build: Callable[[], nn.Module]
    train: Callable[[nn.Module, Tensor, Backward], None] = _once
    eager: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    graphs: int = 1
    evaluate: bool = False
    stages: tuple[int, ...] = (1, 2, 3)
    held: int = 0


def _net(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: graph_breaks.Net(block)


CASES = {
    "plain": Case(_net(graph_breaks.Block)),
    "loop with a break": Case(_net(graph_breaks.Loop), eager=BOTH, graphs=0),
    "experts": Case(_net(graph_breaks.Experts), eager=BOTH, breaks=BOTH),
    "disabled": Case(_net(graph_breaks.Disabled), eager=BOTH, breaks=BOTH, graphs=2),
    "handed to a compiled frame": Case(_net(graph_breaks.Handed), eager=BOTH, breaks=BOTH, graphs=2),
    "graph break": Case(_net(graph_breaks.Break), breaks=BOTH, graphs=2),
    "two graphs": Case(_net(graph_breaks.TwoGraphs), breaks=BOTH, graphs=2),
    "tied, compiled and eager": Case(_net(graph_breaks.TiedFrames), eager=BOTH, breaks=BOTH),
    "tied head, disabled": Case(graph_breaks.UncompiledTiedHead, breaks=("model",)),
    "read outside": Case(lambda: graph_breaks.ReadsOthers(graph_breaks.Block), eager=("blocks",), held=2),
    "skipped front": Case(lambda: graph_breaks.Net(graph_breaks.Block, front=graph_breaks.Front), breaks=("model",)),
    "used by one rank": Case(graph_breaks.UsedByOneRank, stages=(1, 2)),
    "two forwards": Case(_net(graph_breaks.Block), _two_forwards),
    "two backwards": Case(_net(graph_breaks.Block), _two_backwards),
    "two forwards, skipped": Case(_net(graph_breaks.Loop), _two_forwards, eager=BOTH, graphs=0),
    "two backwards, broken": Case(_net(graph_breaks.Disabled), _two_backwards, eager=BOTH, breaks=BOTH, graphs=2),
    "abandoned forwards": Case(_net(graph_breaks.Block), _abandoned),
    "abandoned forwards, broken": Case(_net(graph_breaks.Disabled), _abandoned, eager=BOTH, breaks=BOTH, graphs=2),
    "checkpoint inside": Case(_net(lambda: graph_breaks.Checkpointed(False))),
    "reentrant checkpoint inside": Case(_net(lambda: graph_breaks.Checkpointed(True)), graphs=0),
    "checkpoint round": Case(lambda: graph_breaks.rounded(False)),
    "reentrant checkpoint round": Case(lambda: graph_breaks.rounded(True)),
    "blocks used by nobody": Case(lambda: graph_breaks.dropped(0, 2)),
    "parameters of one rank": Case(_net(graph_breaks.OneRank)),
    "more parameters on one rank": Case(_net(graph_breaks.MoreOnOneRank)),
    "inference between": Case(_net(graph_breaks.Block), evaluate=True),
    "inference between, broken": Case(_net(graph_breaks.Disabled), evaluate=True, eager=BOTH, breaks=BOTH, graphs=2),
    "inference inside": Case(_net(graph_breaks.Block), _teacher),
}


def _reference(case: Case, twin: nn.Module) -> list[architectures.Gradients]:
    """SGD on the mean of the ranks' gradients; the gradients of every step."""
    twin.to(models.device())
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    data = [models.Batches(r) for r in range(models.world())]
    gradients = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank, batches in enumerate(data):
            for module in twin.modules():
                if hasattr(module, "rank"):
                    module.rank = rank
            case.train(twin, batches[number], lambda loss: (loss / models.world()).backward())
        gradients.append(architectures.gradients_of(twin))
        optimizer.step()
    return gradients


@dataclass
class Watched:
    """What one rank saw in one cell."""

    gradients: list[architectures.Gradients]
    graphs: list[int]
    compiled: list[int]
    reads: int
    breaks: dict[str, int]
    after_forward: int
    after_backward: list[str]
    peak: int
    units: list[int]
    deviation: float


def _train(case: Case, model: nn.Module, stage: int, scope: Any) -> Watched:
    data = models.Batches(models.rank())
    seen = Watched([], [], [], 0, {}, 0, [], 0, [], 0.0)
    torch._dynamo.reset()
    counters.clear()
    with engines.engine(model, stage, compile=scope) as engine:
        core = engine.runtime.core
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine.attach_optimizers([optimizer])

        def backward(loss: Tensor) -> None:
            seen.after_forward = max(seen.after_forward, len(core.resident_units()))
            engines.backward(engine, loss)
            seen.after_backward += core.resident_units()

        for number in range(STEPS):
            with engine.training_step():
                case.train(model, data[number], backward)
            seen.gradients.append(architectures.gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
            if case.evaluate:
                with engine.evaluation_step(), torch.inference_mode():
                    model(data[number + STEPS][:, :-1])
                seen.after_backward += core.resident_units()
            seen.graphs.append(engine.regions.stats.dynamo_graphs)
            seen.compiled.append(counters["frames"]["total"])
        seen.reads = sum(core.eager_reads_of(unit) for name, unit in engine.runtime.unit_of.items() if "layers" in name)
        seen.breaks = dict(counters["graph_break"])
        seen.peak = engine.runtime.stats().peak_resident_bytes
        seen.units = sorted(sum(gathered_bytes(p) for p in masters) for _, masters in engine.runtime.units_in_order())
    return seen


def _distance(left: architectures.Gradients, right: architectures.Gradients) -> float:
    """Largest difference; infinite if one side has a gradient and the other None."""
    if left.keys() != right.keys():
        return float("inf")
    worst = 0.0
    for name, a in left.items():
        b = right[name]
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None:
            worst = max(worst, (a - b).abs().max().item())
    return worst


def _problems(case: Case, seen: Watched, expected: list[architectures.Gradients], stage: int, scope: Any) -> list[str]:
    found = []
    distances = [_distance(a, b) for a, b in zip(seen.gradients, expected, strict=True)]
    if max(distances) > 1e-6 or seen.deviation > 1e-6:
        found.append(f"gradients {distances} parameters {seen.deviation}")
    if seen.graphs[-1] != seen.graphs[1] or seen.compiled[-1] != seen.compiled[1]:
        found.append(f"compiled after step 2: {seen.graphs} {seen.compiled}")
    if seen.after_backward or seen.after_forward > 2:
        found.append(f"gathered after backward {seen.after_backward}, after forward {seen.after_forward} units")
    if stage == 3 and seen.peak > sum(seen.units[-2 - case.held :]):  # one in use, one ahead
        found.append(f"peak {seen.peak}, units {seen.units}")
    eager, whole = scope in case.eager, scope not in case.breaks
    if scope and (eager != (seen.reads > 0) or not (whole or seen.breaks) or seen.graphs[-1] < case.graphs):
        found.append(f"path: eager reads {seen.reads} breaks {seen.breaks} graphs {seen.graphs}")
    if not scope and (seen.graphs[-1] or not seen.reads):
        found.append(f"not eager: {seen.graphs} {seen.reads}")
    return found


def _trained(before: nn.Module, after: nn.Module, gradients: list[architectures.Gradients]) -> list[str]:
    """What the reference did not learn: the loss falls, and all that has a gradient changes."""
    losses = []
    for model in (before.to(models.device()), after):
        for module in model.modules():
            if hasattr(module, "rank"):
                module.rank = 0
        with torch.no_grad():
            losses.append(engines.token_loss(model, models.Batches(0)[0]).item())
    start = dict(before.named_parameters())
    used = {name for step in gradients for name, gradient in step.items() if gradient is not None}
    same = [name for name, p in after.named_parameters() if name in used and torch.equal(p, start[name])]
    return [f"not trained: losses {losses}, unchanged {same}"] * (losses[1] >= losses[0] or bool(same))


RARE = (
    "inference between, broken", "abandoned forwards, broken", "two backwards, broken", "two forwards, skipped",
    "tied head, disabled", "checkpoint round",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in RARE else []) for n in CASES])
@on_ranks()
def test_frame(name: str, long: bool) -> None:
    """Gradients of all parameters equal DDP's in every step, nothing stays gathered, nothing compiles twice."""
    # Trains the case at these stages and scopes; what was wrong.
    cells = CELLS + LONG * long
    case = CASES[name]
    source, twin = models.pair(lambda: models.Whole(case.build()))
    expected = _reference(case, twin)
    problems = _trained(source, twin, expected)
    for stage, scope in cells:
        if stage not in case.stages:
            continue
        model = models.Whole(case.build())
        model.load_state_dict(source.state_dict())
        try:
            seen = _train(case, model, stage, scope)
            seen.deviation = models.deviation(model, twin)
            found = _problems(case, seen, expected, stage, scope)
        except Exception:
            found = [traceback.format_exc()[-1500:]]
        problems += [f"stage {stage} {scope}: {text}" for text in found]
    assert problems == [], "\n".join(problems)


# ---- lengths that differ by rank and step ----

# Of each step, by rank; further ranks take them in turn.
LENGTHS = ((5, 3), (2, 5), (4, 4), (3, 1), (5, 2), (1, 5), (2, 2), (4, 3))


def _train_lengths(engine: Any, model: nn.Module) -> list[int]:
    data, graphs = models.Batches(models.rank()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine.attach_optimizers([optimizer])
    for number, lengths in enumerate(LENGTHS):
        batch = data[number][:, : lengths[models.rank() % 2] + 1]
        engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(model, batch))
        graphs.append(engine.regions.stats.dynamo_graphs)
    return graphs


@pytest.mark.parametrize("limit", [pytest.param(8, marks=pytest.mark.long), 1])
@on_ranks()
def test_lengths_by_rank_and_step(limit: int, long: bool) -> None:
    """Parity, no hang, few compilations; also when one rank is over its recompile limit and the other is not."""
    # ``limit``: how often rank 1 may compile a frame; after it the rank runs eagerly.
    cells = CELLS + LONG * long
    source, twin = (
        models.Whole(graph_breaks.Net(graph_breaks.Block)),
        models.Whole(graph_breaks.Net(graph_breaks.Block)),
    )
    twin.load_state_dict(source.state_dict())

    def data(rank: int) -> list[Tensor]:
        return [models.Batches(rank)[number][:, : lengths[rank % 2] + 1] for number, lengths in enumerate(LENGTHS)]

    reference(twin, len(LENGTHS), data=data, lr=LR)
    problems = []
    for stage, scope in cells:
        if limit == 1 and (stage, scope) == (3, "model"):
            continue  # a graph of the whole model gathers in its own order: ranks that differ raise
        torch._dynamo.reset()
        counters.clear()
        model = models.Whole(graph_breaks.Net(graph_breaks.Block))
        model.load_state_dict(source.state_dict())
        mine = limit if models.rank() == 1 else 8
        with torch._dynamo.config.patch(recompile_limit=mine), engines.engine(model, stage, compile=scope) as engine:
            graphs = _train_lengths(engine, model)
            reads = sum(
                engine.runtime.core.eager_reads_of(u) for n, u in engine.runtime.unit_of.items() if "layers" in n
            )
        cell = f"stage {stage} {scope}"
        if models.deviation(model, twin) > 1e-6:
            problems.append(f"{cell}: {models.deviation(model, twin)}")
        # one static graph, one with dynamic lengths, and one for length 1, which torch never makes dynamic
        if scope and (graphs[-1] > 3 or graphs[-1] < min(mine, 2)):
            problems.append(f"{cell}: graphs {graphs}")
        if scope and (reads > 0) != (mine == 1):
            problems.append(f"{cell}: {reads} eager reads with a limit of {mine}")
    assert problems == [], "\n".join(problems)


# ---- what ran eagerly is said ----


def _said(name: str) -> tuple[list[str], dict[str, EagerReads]]:
    model, data = models.Whole(CASES[name].build()), models.Batches(models.rank())
    with warnings.catch_warnings(record=True) as caught, engines.engine(model, 3, compile="blocks") as engine:
        warnings.simplefilter("always")
        optimizer = engines.sgd(engine, model, lr=LR)
        for number in range(3):
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
        reads = engine.runtime.eager_reads()
    return [str(w.message) for w in caught if "runs eagerly" in str(w.message)], reads


@on_ranks()
def test_what_runs_eagerly_is_said_once() -> None:
    """One warning for a class of module (rank 0's: Lightning keeps the others quiet once a Trainer has told it their
    ranks), and a count by unit on each rank; none where all blocks are whole graphs."""
    warned, reads = _said("disabled")
    assert len(warned) == 1 or (models.rank() > 0 and not warned)
    assert all("`model" in text and "broke its graph (" in text and "disable" in text for text in warned)
    assert any("layers" in unit for unit in reads) and min(seen.reads for seen in reads.values()) >= 3
    blocks = [seen for unit, seen in reads.items() if "layers" in unit]
    block = sum(gathered_bytes(p) for p in graph_breaks.Disabled().parameters())
    # 3 steps, forward and backward; what the last block had gathered is still there for its backward
    assert all(3 <= seen.gathers <= 6 and seen.gather_bytes == seen.gathers * block for seen in blocks)
    torch._dynamo.reset()
    warned, reads = _said("plain")
    assert warned == [] and not any("layers" in unit for unit in reads)
