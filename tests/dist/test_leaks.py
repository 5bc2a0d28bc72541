"""Many steps and many fits in one process leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests import models
from tests.harness import Ranks

FITS, STEPS, WARM = 20, 50, 5


def _held() -> dict[str, int]:
    """What this process holds: threads of Python and of the system, open files, tensors, resident memory in KiB."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "python threads": threading.active_count(),
        "threads": int(status["Threads"]),
        "files": len(os.listdir("/proc/self/fd")),
        # torch keeps a FakeTensor of each compiled frame whose input requires a gradient, also without this package
        "tensors": sum(isinstance(o, torch.Tensor) and not isinstance(o, FakeTensor) for o in gc.get_objects()),
        "resident": int(status["VmRSS"].split()[0]),
    }


def _many_fits(stage: int, options: dict[str, Any]) -> list[dict[str, int]]:
    seen = []
    for _ in range(FITS):
        torch._dynamo.reset()
        module = models.Module(optimizer="adamw", lr=1e-3)
        strategy = ZeroCompileStrategy(stage=stage, **options)
        data = models.Batches(models.rank(), STEPS)
        models.make_trainer(strategy, max_epochs=1).fit(module, data)
        assert len(module.losses) == STEPS
        del module, strategy, data
        seen.append(_held())
    return seen


@pytest.mark.long
@pytest.mark.parametrize(("stage", "options"), [(1, {"backend": "aot_eager"}), (3, {"compile": False})])
def test_a_thousand_steps_in_twenty_fits(ranks: Ranks, stage: int, options: dict[str, Any]) -> None:
    """Threads, files and tensors are the same after the fifth fit and the last; memory grows by less than 16 MiB."""
    for seen in ranks.run(_many_fits, stage, options, timeout=400):
        for name in ("python threads", "threads", "files", "tensors"):
            assert seen[-1][name] == seen[WARM][name], (name, [one[name] for one in seen])
        assert seen[-1]["resident"] - seen[WARM]["resident"] < 16 * 1024, [one["resident"] for one in seen]
