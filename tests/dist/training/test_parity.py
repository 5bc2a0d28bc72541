"""Training equals DDP: SGD, at every stage, world size, backend and accumulation."""

from __future__ import annotations

import itertools
from typing import Any

import lightning as L
import pytest
import torch
from torch._dynamo.utils import counters

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.memory import gathered_bytes

MODES: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "aot_eager": {"compile": "blocks", "compile_options": {"backend": "aot_eager"}},
    "aot_eager_model": {
        "compile": "model",
        "compile_options": {"backend": "aot_eager"},
        "unit_bytes": 1000,
    },  # less than a block
    "aot_eager_joined": {"compile": "model", "compile_options": {"backend": "aot_eager"}},
    "inductor": {"compile": "blocks"},
}


class NoLateCompilation(L.Callback):
    """From the third step on, a recompilation raises."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        torch._dynamo.config.error_on_recompile = trainer.global_step >= 2


def _check_whole(record: Any, frames: dict[str, dict[str, int]], mode: str) -> None:
    """One forward and one backward graph for all three blocks, no skipped frame, no eager read of a block."""
    compiled = record.compiled
    if mode == "inductor":  # a warm compile cache, also one that the other rank fills meanwhile, skips our passes
        assert compiled.forward in (0, 1) and compiled.backward in (0, 1) and compiled.dynamo_graphs == 1
    else:
        assert (compiled.dynamo_graphs, compiled.forward, compiled.backward) == (1, 1, 1)
    assert frames["frames"] == {"total": 1, "ok": 1}
    assert not frames["graph_break"] and not frames["unimplemented"]
    blocks = [count for name, count in record.reads.items() if ".layers." in name]
    assert (len(record.reads), len(blocks)) == ((1, 0) if mode == "aot_eager_joined" else (5, 3))
    assert sum(blocks if mode in ("aot_eager", "inductor") else record.reads.values()) == 0
    assert record.stats.graph_uses > 0 and record.stats.graph_reductions > 0


# stages 1 and 2 differ in when an accumulation reduces
SHORT = [(1, 2, 1), (1, 2, 4), (2, 2, 1), (2, 2, 4), (3, 1, 1), (3, 2, 1), (3, 3, 1), (3, 2, 4)]
FEW = [(1, 2, 1), (3, 2, 1), (3, 2, 4)]
SHORTER = {"inductor": FEW, "aot_eager_joined": FEW}
CELLS = [
    pytest.param(mode, *cell, marks=() if cell in SHORTER.get(mode, SHORT) else pytest.mark.long)
    for mode in MODES
    for cell in itertools.product((1, 2, 3), (1, 2, 3), (1, 4))
]


@pytest.mark.parametrize(("mode", "stage", "world", "accumulate"), CELLS)
@on_ranks("world", timeout=400)
def test_sgd_equals_ddp(mode: str, stage: int, world: int, accumulate: int) -> None:
    """Five steps: parameters and losses, and that the path which the cell names is the one that ran."""
    tolerance = 5e-6 if mode == "inductor" else 1e-6  # Inductor reorders sums
    module, twin = models.pair(models.Module)
    strategy = ZeroCompileStrategy(stage=stage, **MODES[mode])
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, error_on_recompile=False):
        record = models.train(module, strategy, accumulate_grad_batches=accumulate, callbacks=[NoLateCompilation()])
    frames = {name: dict(counters[name]) for name in ("frames", "graph_break", "unimplemented")}
    losses = models.reference(twin, accumulate=accumulate)
    assert models.deviation(module, twin) <= tolerance
    assert max(abs(a - b) for a, b in zip(module.losses, losses, strict=True)) <= 10 * tolerance
    assert record.stats.gathers > 0 and record.stats.reductions > 0
    passes = 5 if stage == 1 else 5 * accumulate  # an accumulation is reduced once at stage 1
    assert record.stats.reduce_bytes == passes * sum(map(gathered_bytes, module.parameters()))
    assert world == 1 or record.local_numel < record.full_numel
    if mode == "eager":
        assert record.compiled.forward == 0 and record.stats.graph_uses == 0
        assert all(count > 0 for count in record.reads.values())  # the counter does count
    else:
        _check_whole(record, frames, mode)
