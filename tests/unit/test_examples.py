"""The examples that CI does not run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_gradcache_equals_one_backward(stage: int) -> None:
    """Cached chunks give the parameters of one large backward, with no more reductions."""
    options = ["--compile=none", "--steps=3", "--batch=12", "--chunk=5", "--dim=16", "--devices=2", f"--stage={stage}"]
    options.append(f"--data={ROOT / 'lightning_zerocompile'}")
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/gradcache.py"), *options],
        capture_output=True, text=True, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {line[:14].strip(): line[31:].split() for line in done.stdout.splitlines() if "->" in line}
    chunks, whole = rows["chunks of 5"], rows["one backward"]
    assert 0 < float(chunks[1]) <= float(whole[1])  # reductions
    assert stage == 1 or float(chunks[2]) <= float(whole[2])  # gathers
    assert float(done.stdout.rsplit(":", 1)[1]) <= 1e-6
