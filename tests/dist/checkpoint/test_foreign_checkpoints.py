"""Directories that Lightning's own commands and strategies read and write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_zerocompile.sharding.full_values import full_value
from tests.support import checkpoints, models
from tests.support.checkpoints import Look, Saved
from tests.support.harness import Worlds, on_ranks

COMMANDS = {
    "lightning.fabric.utilities.consolidate_checkpoint": ["--output_file"],
    "lightning.pytorch.utilities.consolidate_checkpoint": ["--output_file"],
    "lightning_zerocompile.consolidate": [],
}


def _save(folder: str) -> None:
    look = Look("end")
    checkpoints.fit(Saved(), checkpoints.strategy("sharded", 3), callbacks=[look]).save_checkpoint(
        f"{folder}/ours.ckpt"
    )
    if models.rank() == 0:
        torch.save(look.state, f"{folder}/expected")


def _resume(folder: str) -> list[list[str]]:
    found = []
    for name in COMMANDS:
        look = Look("start")
        checkpoints.fit(
            checkpoints.another(), checkpoints.strategy("sharded", 2), 2, f"{folder}/{name}", callbacks=[look]
        )
        expected = torch.load(f"{folder}/expected", weights_only=False)
        found.append(checkpoints.differences(look.state, expected))
    return found


@pytest.mark.long
def test_consolidation_commands(worlds: Worlds, tmp_path: Path) -> None:
    """Both of Lightning's commands and ours make a file of a directory, and it resumes to the bit."""
    worlds(2).run(_save, str(tmp_path))
    runs = [
        subprocess.Popen([sys.executable, "-m", name, str(tmp_path / "ours.ckpt"), *option, str(tmp_path / name)])
        for name, option in COMMANDS.items()
    ]
    assert [run.wait(120) for run in runs] == [0, 0, 0]
    for name in list(COMMANDS)[1:]:
        assert torch.load(tmp_path / name)["state_dict"].keys() == Saved().state_dict().keys()
    assert worlds(2).run(_resume, str(tmp_path)) == [[[], [], []]] * 2


# ---- Lightning's sharded strategies ----


class Perceptron(L.LightningModule):
    """Can be sharded by FSDP2, too: no 0-dim parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 1))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch.float()).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Full(L.Callback):
    """Weights and moments at the start or at the end, by name."""

    def _look(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.state = {
            name: [full_value(v.detach()).clone() for v in (p, state["exp_avg"], state["exp_avg_sq"])]
            for name, p in module.named_parameters()
            if (state := trainer.optimizers[0].state.get(p))
        }

    on_train_end = on_train_start = _look


class Start(Full):
    """Only at the start."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        pass


@on_ranks()
def test_from_model_parallel(tmp_path: Path) -> None:
    """A directory of Lightning's ModelParallelStrategy (FSDP2) goes on here, weights and moments to the bit."""
    folder = str(tmp_path)
    path, theirs, ours = f"{folder}/theirs.ckpt", Full(), Start()
    strategy = ModelParallelStrategy(data_parallel_size=models.world(), tensor_parallel_size=1)
    checkpoints.fit(Perceptron(), strategy, callbacks=[theirs]).save_checkpoint(path)
    assert len(theirs.state) == 4
    module = Perceptron()
    trainer = checkpoints.fit(module, checkpoints.strategy("sharded", 3), 2, path, callbacks=[ours])
    assert (
        checkpoints.differences(ours.state, theirs.state) == [] and len(module.losses) == 4 and trainer.global_step == 8
    )
