"""Two nodes of two ranks each, started by torchrun, played on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import free_port

NODES, EACH, STEPS = 2, 2, 3


def run(folder: str) -> None:
    """What each of torchrun's processes does."""
    torch.manual_seed(0)
    module = models.Module()
    strategy = ZeroCompileStrategy(3, device_mesh="nodes", compile=False)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=EACH, num_nodes=NODES, max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    held: list[int] = []

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            held.append(strategy.engine.runtime.mesh.size())

    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    trainer.fit(module, models.Batches(trainer.global_rank, STEPS))
    report = {"losses": module.losses, "shards": held, "node": trainer.node_rank}
    (Path(folder) / f"{trainer.global_rank}.json").write_text(json.dumps(report))


@pytest.mark.long
@pytest.mark.slow
def test_a_replica_on_each_node(tmp_path: Path) -> None:
    """The losses of all four ranks are those of DDP over four; each node's two ranks hold the model."""
    port, root = free_port(), Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"}
    code = f"from tests.dist.user_code.test_several_nodes import run; run({str(tmp_path)!r})"
    script = tmp_path / "script.py"
    script.write_text(code)
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={EACH}",
                f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", str(script),
            ],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for node in range(NODES)
    ]  # fmt: skip
    try:
        words = [node.communicate(timeout=200)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(words)[-4000:]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NODES * EACH)]
    assert [report["node"] for report in reports] == [0, 0, 1, 1]
    assert all(report["shards"] == [EACH] for report in reports)
    torch.manual_seed(0)
    twin = models.Module()
    optimizer = twin.configure_optimizers()
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, report in enumerate(reports):
            loss = twin.loss(models.Batches(rank)[step])
            assert loss.item() == pytest.approx(report["losses"][step], abs=1e-5)
            (loss / len(reports)).backward()
        optimizer.step()
