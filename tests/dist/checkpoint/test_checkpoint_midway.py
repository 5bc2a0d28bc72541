"""Resuming in the middle of an epoch: the loops, the callbacks' states and the losses go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.checkpoints import Saved
from tests.support.harness import on_ranks


class Watch(L.Callback):
    """What the callbacks know when the training starts, and after the ninth step."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def _look(self, trainer: L.Trainer) -> Any:
        stopping, saving = trainer.early_stopping_callback, trainer.checkpoint_callback
        assert isinstance(stopping, EarlyStopping) and isinstance(saving, ModelCheckpoint)
        score = None if saving.best_model_score is None else saving.best_model_score.item()
        best = (saving.best_model_path, score, sorted(saving.best_k_models), saving.kth_best_model_path)
        return stopping.wait_count, stopping.best_score.item(), best

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.known["start"] = self._look(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.known[str(trainer.global_step)] = self._look(trainer)


def _run(module: L.LightningModule, strategy: Any, folder: str, path: str | None = None) -> tuple[Watch, L.Trainer]:
    """Four equal batches an epoch, saved every three steps; stops as nothing improves enough."""
    watch = Watch()
    stopping = EarlyStopping("val_loss", min_delta=10, patience=2)
    saving = ModelCheckpoint(
        folder,
        "{step}",
        monitor="loss",
        mode="min",
        save_top_k=-1,
        every_n_train_steps=3,
        save_on_train_epoch_end=False,
    )
    trainer = models.make_trainer(
        strategy, max_epochs=9, num_sanity_val_steps=0, callbacks=[watch, stopping, saving], enable_checkpointing=True
    )
    batches = models.Batches(models.rank(), 4)
    batches._batches[1:] = batches._batches[:1] * 3  # Lightning starts such data anew when it resumes
    trainer.fit(module, batches, models.Batches(models.rank(), 1), ckpt_path=path)
    return watch, trainer


@pytest.mark.parametrize(("kind", "stage"), [("full", 1), ("sharded", 3)])
@on_ranks()
def test_resume_in_the_middle_of_an_epoch(kind: str, stage: int, tmp_path: Path) -> None:
    """The rest of the epoch's steps, to the bit; ModelCheckpoint's best and EarlyStopping's patience are kept."""
    folder = str(tmp_path)
    start = Saved()
    whole, resumed = copy.deepcopy(start), copy.deepcopy(start)
    strategy = ZeroCompileStrategy(stage, compile=False, state_dict_type=kind)  # type: ignore[arg-type]
    first, trainer = _run(whole, strategy, folder)
    assert trainer.global_step == 12 and first.known["9"][0] == 1  # stopped after the third epoch
    path = f"{folder}/step=9.ckpt"
    second, again = _run(resumed, ZeroCompileStrategy(stage, compile=False), folder, path)
    saved = [first.known["9"]]
    dist.broadcast_object_list(saved, 0)  # the training loss is each rank's own, and rank 0's is saved
    assert second.known["start"] == saved[0]
    assert resumed.losses == whole.losses[9:] and len(resumed.losses) == 3
    assert again.global_step == 12 and again.current_epoch == trainer.current_epoch
    assert resumed.seen == whole.seen == 12 and models.deviation(resumed, whole) == 0
