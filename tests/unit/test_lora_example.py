"""The adapter that examples/lora.py trains, as others read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.parametrize("options", [["--compile=none", "--stage=1"], ["--compile=blocks", "--stage=3"]])
def test_peft_reads_the_adapter(tmp_path: Path, options: list[str]) -> None:
    """A LoRA adapter over a base that no rank reads whole is written alone, and `peft` alone reproduces the loss."""
    pytest.importorskip("peft")
    options = [*options, "--max-steps=5", "--devices=2", f"--out={tmp_path}"]
    options.append(f"--data={ROOT / 'lightning_zerocompile'}")
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/lora.py"), *options],
        capture_output=True, text=True, timeout=400, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    assert "peft alone" in done.stdout and "NOT" not in done.stdout
    assert {path.name for path in (tmp_path / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}
