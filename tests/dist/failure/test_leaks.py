"""Many steps and many fits in one process leave nothing behind."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import alive, models
from tests.support.harness import on_ranks

FITS, STEPS, WARM = 20, 50, 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "options"), [(1, {"compile_options": {"backend": "aot_eager"}}), (3, {"compile": False})]
)
@on_ranks(timeout=400)
def test_a_thousand_steps_in_twenty_fits(stage: int, options: dict[str, Any]) -> None:
    """Threads, files and tensors are the same after the fifth fit and the last; memory grows by less than 16 MiB."""
    seen = []
    for _ in range(FITS):
        torch._dynamo.reset()
        module = models.Module(optimizer="adamw", lr=1e-3)
        strategy = ZeroCompileStrategy(stage=stage, **options)
        data = models.Batches(models.rank(), STEPS)
        models.make_trainer(strategy, max_epochs=1).fit(module, data)
        assert len(module.losses) == STEPS
        del module, strategy, data
        seen.append(alive.held_by_process())
    for name in ("python threads", "threads", "files", "tensors"):
        assert seen[-1][name] == seen[WARM][name], (name, [one[name] for one in seen])
    assert seen[-1]["resident"] - seen[WARM]["resident"] < 16 * 1024, [one["resident"] for one in seen]


@pytest.mark.parametrize(
    ("stage", "options"), [(1, {"compile_options": {"backend": "aot_eager"}}), (3, {"compile": False})]
)
@on_ranks()
def test_a_run_that_has_ended_keeps_no_group(stage: int, options: dict[str, Any]) -> None:
    """Its sockets and threads end with it, also where Python collects no garbage in the meantime."""
    seen = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            models.fit(models.Module(), ZeroCompileStrategy(stage=stage, **options), 2)
            seen.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    finally:
        gc.enable()
    assert seen[-1] == seen[1], seen
