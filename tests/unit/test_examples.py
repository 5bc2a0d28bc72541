"""The examples that CI does not run as they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(example: str, options: list[str]) -> str:
    """What the example prints, on the CPU."""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *options],
        capture_output=True, text=True, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_gradcache_equals_one_backward(stage: int) -> None:
    """Cached chunks give the parameters of one large backward, with no more reductions."""
    options = ["--compile=none", "--steps=3", "--batch=12", "--chunk=5", "--dim=16", "--devices=2", f"--stage={stage}"]
    options.append(f"--data={ROOT / 'lightning_zerocompile'}")
    printed = _run("gradcache.py", options)
    rows = {line[:14].strip(): line[31:].split() for line in printed.splitlines() if "->" in line}
    chunks, whole = rows["chunks of 5"], rows["one backward"]
    assert 0 < float(chunks[1]) <= float(whole[1])  # reductions
    assert stage == 1 or float(chunks[2]) <= float(whole[2])  # gathers
    assert float(printed.rsplit(":", 1)[1]) <= 1e-6


@pytest.mark.long
def test_a_plan_stands_beside_its_run() -> None:
    """One block was timed; on the CPU there is no memory to compare."""
    rows = _run("benchmark_plan.py", ["--models=tiny", "--seq=32", "--stages=1", "--steps=2"]).splitlines()
    [row] = [json.loads(line) for line in rows if line.startswith("{")]
    assert row["stage"] == 1 and row["predicted"][2] > 0 and row["peak_off"] is None
    assert row["predicted_seconds"] > 0 and row["seconds"] > 0


def test_meshes_are_compared_on_paper() -> None:
    """One row for a host and stage, and one more for each mesh where there are several hosts."""
    lines = _run(
        "plan_hosts.py", ["--models=tiny", "--seq=32", "--gpus", "8", "16", "--latency=1", "--node-latency=1e-2"]
    ).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| tiny")]
    cells = {(gpus, mesh, stage): float(seconds) for _, gpus, mesh, stage, seconds, _, _ in rows}
    assert len(cells) == 2 + 5 and cells["16", "full", "3"] > cells["8", "full", "3"] > 0


@pytest.mark.long
def test_what_offload_moves_is_printed() -> None:
    """One row without it, one with it, and one where the backward updates."""
    lines = _run("benchmark_offload.py", ["--tiny", "--steps=4"]).splitlines()
    assert [line.split("}")[0] for line in lines if line.startswith("{")] == [
        "{", "{'offload': 'optimizer'", "{'offload': 'optimizer', 'optimizer_in_backward': True",
    ]  # fmt: skip


def test_a_plain_loop_has_the_losses_of_ddp() -> None:
    """examples/fabric_loop.py, with Fabric's DDP and with stage 3."""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    losses = []
    for option in ("--strategy=ddp", "--eager"):
        command = [sys.executable, str(ROOT / "examples/fabric_loop.py"), "--steps=2", option]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        # gloo may abort a process that ends with DDP's groups (https://github.com/pytorch/pytorch/pull/179291)
        ended = done.returncode == 0 or (option == "--strategy=ddp" and done.returncode == -signal.SIGABRT)
        assert ended, done.stderr[-3000:]
        losses.append([float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.long
@pytest.mark.slow
def test_an_adapter_that_is_saved_midway(tmp_path: Path) -> None:
    """LoRA with gradient checkpointing: what rank 0 saved at the last step has the trained model's loss."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    printed = _run("huggingface.py", ["--steps=4", "--every=2", f"--folder={tmp_path}"])
    assert "with the adapter that rank 0 saved" in printed and (tmp_path / "adapter_config.json").exists()
