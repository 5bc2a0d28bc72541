"""Ranks that wait for each other in different things: each says within seconds where all of them stand."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_zerocompile import CommunicationError, ZeroCompileStrategy
from tests.support import models
from tests.support.harness import Ranks, on_ranks, two_scripts

AOT: dict[str, Any] = {"compile": "blocks", "compile_options": {"backend": "aot_eager"}}
EAGER: dict[str, Any] = {"compile": False}
RARE = pytest.mark.long


class Alone(L.Callback):
    """Rank 1 does something alone before the second step, after Lightning's broadcast, in which nothing can raise."""

    def __init__(self, what: str, folder: str) -> None:
        self.what, self.folder = what, folder

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx != 1 or models.rank() != 1:
            return
        alone: dict[str, Callable[[], object]] = {
            "saves": lambda: trainer.save_checkpoint(f"{self.folder}/alone.ckpt"),
            "state": lambda: trainer.strategy.lightning_module_state_dict(),
            "reduces": lambda: trainer.strategy.reduce(torch.ones(1, device=module.device)),
        }
        alone[self.what]()


def _alone(what: str, folder: str, stage: int, options: dict[str, Any]) -> tuple[str, float]:
    strategy = ZeroCompileStrategy(stage=stage, timeout=timedelta(minutes=5), **options)
    trainer = models.make_trainer(strategy, max_steps=4, callbacks=[Alone(what, folder)], limit_val_batches=0)
    start = time.monotonic()
    try:
        trainer.fit(models.Module(), models.Batches(models.rank()))
    except CommunicationError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize(
    ("what", "stage", "options", "place"),
    [
        pytest.param("saves", 1, EAGER, "a checkpoint, in `on_train_batch_start`", marks=RARE),
        ("saves", 3, AOT, "a checkpoint, in `on_train_batch_start`"),
        pytest.param("state", 2, AOT, "a checkpoint, in `on_train_batch_start`", marks=RARE),
        pytest.param("reduces", 2, EAGER, "the reduction of a logged value or of a decision", marks=RARE),
    ],
)
def test_work_of_one_rank_alone(
    ranks: Ranks, tmp_path: Any, what: str, stage: int, options: dict[str, Any], place: str
) -> None:
    for text, seconds in ranks.run(_alone, what, str(tmp_path), stage, options, timeout=60):
        if ranks.device == "cpu":
            assert re.search(r"ranks wait for each other: ranks? 0[\d, ]* waits? in ", text), text
            assert "rank 1 waits in " in text, text
            assert place in text[text.index("rank 1 waits in ") :], text
        else:  # there the host of rank 0 does not wait, so that it is seen to go on
            assert f"rank 1 is in {place}" in text and re.search(
                r"different things: (rank 0|.*rank [2-9]) has ", text
            ), text
        assert "Do it on all ranks" in text, text
        assert ("strategy.full_parameters" in text) != ("checkpoint" in place), text
        assert seconds < 30


class Different(models.Module):
    """In the second step one rank logs a reduced value where the other comes to a barrier."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1 and models.rank() == 0:
            self.trainer.strategy.barrier()
        elif batch_idx == 1:
            self.trainer.strategy.reduce(torch.ones(1, device=self.device))
        return super().training_step(batch, batch_idx)


def _different() -> str:
    strategy = ZeroCompileStrategy(stage=2, timeout=timedelta(minutes=5), **EAGER)
    with pytest.raises(CommunicationError) as raised:
        models.make_trainer(strategy, max_steps=3).fit(Different(), models.Batches(models.rank()))
    return str(raised.value)


def test_different_collectives_of_lightning(ranks: Ranks) -> None:
    for text in ranks.run(_different, timeout=60):
        assert "rank 0 is in a barrier, in `training_step`; rank 1 is in the reduction" in text, text


class Patient(models.Module):
    """One rank is late; the others wait for it in a gather, a reduction, a message or a barrier: no false alarm."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1 and models.rank() == 1:
            time.sleep(6)
        if batch_idx == 2:
            if models.rank() == 0:
                time.sleep(6)
            self.trainer.strategy.barrier()
        return super().training_step(batch, batch_idx)


@pytest.mark.long
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=RARE)])
@on_ranks()
def test_a_late_rank_is_waited_for(stage: int) -> None:
    strategy = ZeroCompileStrategy(stage=stage, timeout=timedelta(minutes=5), **EAGER)
    module, twin = Patient(), models.Module()
    twin.load_state_dict(module.state_dict())
    models.make_trainer(strategy, max_steps=3).fit(module, models.Batches(models.rank()))
    models.reference(twin, steps=3)
    assert models.deviation(module, twin) < 1e-6


SCRIPT = """
import sys, torch, lightning as L
from datetime import timedelta
from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.ranks import waits
from tests.support import models

hook, what, stage = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Alone(L.Callback):
    def __init__(self):
        setattr(self, hook, self.call)

    def call(self, trainer, module, *_):
        if trainer.global_step == 2 and trainer.is_global_zero:
            if what == "runs":
                module.loss(models.Batches(0)[0])
            else:
                trainer.save_checkpoint("never.ckpt")

torch.set_num_threads(1)
waits._REPEATS_DIRECT = 3  # seven seconds less
strategy = ZeroCompileStrategy(stage=stage, compile=False, timeout=timedelta(minutes=5))
trainer = models.make_trainer(strategy, max_epochs=2, callbacks=[Alone()], num_sanity_val_steps=0)
trainer.fit(models.Module(), models.Batches(models.rank(), 2 if "epoch" in hook else 4))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "what", "stage", "place"),
    [
        ("on_train_batch_end", "runs", 3, "unit `"),
        pytest.param("on_train_epoch_end", "runs", 3, "unit `", marks=RARE),
        pytest.param("on_train_epoch_end", "saves", 1, "a checkpoint", marks=RARE),
    ],
)
def test_a_rank_in_a_collective_of_torch_itself(hook: str, what: str, stage: int, place: str) -> None:
    """Rank 0 does something alone, while rank 1 stands in Lightning's own broadcast, which nothing can end but the end
    of rank 0."""
    with two_scripts(SCRIPT, hook, what, str(stage)) as ranks:
        said = [process.communicate(timeout=150)[1] for process in ranks]
    for rank, text in enumerate(said):
        assert ranks[rank].returncode == 1, text
        assert "rank 1 waits in torch.distributed.broadcast, called by " in text and "training_epoch_loop" in text, text
        assert "rank 0 waits in " in text and place in text and f"in `{hook}`" in text, text
