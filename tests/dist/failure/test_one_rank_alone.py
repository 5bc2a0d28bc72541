"""`@rank_zero_only` code that takes all ranks: each says within seconds what was asked, in which hook; what takes no
other rank works, as under DDP."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import safetensors.torch
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import Worlds, on_ranks
from tests.support.parity import AOT, EAGER, STAGES

LONG = pytest.mark.long
PROMPT = torch.ones(1, 4, dtype=torch.long)


class OnRankZero(L.Callback):
    """Does something in a hook, once, on rank 0 alone. Hooks in which nothing of Lightning's own comes next that cannot
    be ended; for the others see test_ranks_apart.py."""

    def __init__(self, hook: str, act: Callable[[L.Trainer, Any], object]) -> None:
        self.done = False
        setattr(self, hook, self.call)
        self.act = act

    @rank_zero_only
    def call(self, trainer: L.Trainer, module: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step >= 1 and not self.done:
            self.done = True
            self.act(trainer, module)


@torch.no_grad()
def _sample(trainer: L.Trainer, module: Any) -> Tensor:
    return module.model(PROMPT.to(module.device)).argmax(-1)


def _save_file(trainer: L.Trainer, module: Any) -> None:
    safetensors.torch.save_file(dict(module.state_dict()), f"{trainer.default_root_dir}/model.safetensors")


def _full(trainer: L.Trainer, module: Any) -> None:
    with trainer.strategy.full_parameters(module):  # type: ignore[attr-defined]
        pass


TAKES_ALL: dict[str, Callable[[L.Trainer, Any], object]] = {
    "reads a weight": lambda trainer, module: module.model.head.weight.sum().item(),
    "prints a weight": lambda trainer, module: str(module.model.layers[1].up.weight),
    "samples": _sample,
    "reads a norm": lambda trainer, module: float(dict(module.named_parameters())["model.head.weight"].norm()),
    "takes full values": _full,
    "copies": lambda trainer, module: copy.deepcopy(module.model),
    "takes the state": lambda trainer, module: trainer.strategy.lightning_module_state_dict(),
    "saves": lambda trainer, module: trainer.save_checkpoint(f"{trainer.default_root_dir}/alone.ckpt"),
    "writes a file": _save_file,
    "pickles": lambda trainer, module: torch.save(module.state_dict(), f"{trainer.default_root_dir}/model.pt"),
}

# What rank 0 is in the middle of, in the error of rank 0 or of both.
NAMED = {
    "reads a weight": "of unit `model.",
    "prints a weight": "of unit `model.layers.1`",
    "samples": "of unit `model.",
    "reads a norm": "of a sharded tensor of shape (13, 10)|of a sharded tensor of shape ()",
    "takes full values": "of unit `model.",
    "copies": "a copy of a sharded ByteModel",
    "takes the state": "a checkpoint",
    "saves": "a checkpoint",
    "writes a file": "safetensors",
    "pickles": "was to be pickled",
}


def _fit(what: str, hook: str, folder: str, stage: int, options: dict[str, Any]) -> tuple[str, float]:
    """The error with which a fit ends, and after how many seconds. The model has a buffer, as most have: before each
    step rank 0's is broadcast, inside torch, where nothing could raise."""
    strategy = ZeroCompileStrategy(stage=stage, timeout=timedelta(minutes=5), **options)
    callback = OnRankZero(hook, TAKES_ALL[what])
    trainer = models.make_trainer(
        strategy, max_epochs=2, callbacks=[callback], default_root_dir=folder, num_sanity_val_steps=0
    )
    start, module = time.monotonic(), models.Module()
    module.model.register_buffer("table", torch.zeros(3))
    try:
        trainer.fit(module, models.Batches(models.rank(), 2), models.Batches(models.rank(), 1))  # type: ignore
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize(
    ("what", "hook", "stage", "options"),
    [
        ("reads a weight", "on_train_batch_start", 3, EAGER),
        ("samples", "on_validation_start", 3, EAGER),
        ("writes a file", "on_train_batch_start", 3, AOT),
        ("pickles", "on_before_optimizer_step", 1, EAGER),
        pytest.param("reads a weight", "on_train_batch_start", 3, AOT, marks=LONG),
        pytest.param("prints a weight", "on_before_optimizer_step", 3, EAGER, marks=LONG),
        pytest.param("samples", "on_train_batch_start", 3, AOT, marks=LONG),
        pytest.param("reads a norm", "on_validation_start", 3, EAGER, marks=LONG),
        pytest.param("reads a norm", "on_train_batch_start", 1, AOT, marks=LONG),
        pytest.param("takes full values", "on_train_batch_start", 3, EAGER, marks=LONG),
        pytest.param("copies", "on_train_batch_start", 2, EAGER, marks=LONG),
        pytest.param("takes the state", "on_validation_batch_start", 3, EAGER, marks=LONG),
        pytest.param("saves", "on_train_batch_start", 2, AOT, marks=LONG),
        pytest.param("writes a file", "on_train_batch_start", 2, EAGER, marks=LONG),
        pytest.param("pickles", "on_validation_start", 3, AOT, marks=LONG),
    ],
)
def test_what_takes_all_ranks_raises_on_all(
    all_worlds: Worlds, tmp_path: Path, what: str, hook: str, stage: int, options: dict[str, Any]
) -> None:
    ranks = all_worlds.fresh(2)  # a failed run leaves groups behind that the ranks need not have alike
    try:
        found = ranks.run(_fit, what, hook, str(tmp_path), stage, options, timeout=60)
    finally:
        ranks.close(kill=True)
    first = found[0][0]
    assert any(words in first for words in NAMED[what].split("|")), first
    for rank, (text, seconds) in enumerate(found):
        assert seconds < 60, (rank, text)  # on a busy machine; ranks wait for each other for five minutes
        if what in ("writes a file", "pickles"):  # rank 0 raises at once, with the lines that work
            assert "full_state_dict" in text and "full_parameters" in text, text
            assert rank == 0 or "rank 0, which has ended" in text or "Rank 0 has ended" in text, text
        else:
            alone = what in ("takes the state", "saves")  # then the remedy is that of a checkpoint
            assert f"`{hook}`" in text and ("strategy.full_parameters" in text) != alone, (rank, text)


@pytest.mark.parametrize(
    ("what", "hook", "stage", "options"),
    [
        ("reads a weight", "on_train_batch_end", 3, AOT),
        ("saves", "on_train_epoch_end", 1, EAGER),
        pytest.param("samples", "on_train_epoch_end", 3, EAGER, marks=LONG),
    ],
)
def test_hooks_after_which_lightning_communicates(
    all_worlds: Worlds, tmp_path: Path, what: str, hook: str, stage: int, options: dict[str, Any]
) -> None:
    """On devices Lightning's own collectives can be ended, too; for the CPU see test_ranks_apart.py."""
    if all_worlds.device == "cpu":
        pytest.skip("gloo's collectives cannot be ended")
    test_what_takes_all_ranks_raises_on_all(all_worlds, tmp_path, what, hook, stage, options)


ALONE_AT_1_AND_2 = ("reads a weight", "prints a weight", "samples")
PRINTS: dict[str, Callable[[L.Trainer, Any], object]] = {
    "prints the model": lambda trainer, module: str(module),
    "prints a master": lambda trainer, module: str(next(module.parameters())),
    "prints the state": lambda trainer, module: str(module.state_dict()),
    "describes": lambda trainer, module: [(p.shape, p.dtype, p.numel()) for p in module.parameters()],
}


@STAGES
@on_ranks()
def test_what_takes_no_other_rank_works(stage: int) -> None:
    """Printing at every stage; what reads or runs the model at stages 1 and 2. Training is not disturbed."""
    acts = dict(PRINTS)
    if stage < 3:
        acts |= {what: TAKES_ALL[what] for what in ALONE_AT_1_AND_2}
    for options in (EAGER, AOT):
        module = models.Module()
        twin = copy.deepcopy(module)
        hooks = ("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step")
        callbacks = [OnRankZero(hook, act) for act in acts.values() for hook in hooks]
        strategy = ZeroCompileStrategy(stage, timeout=timedelta(minutes=2), **options)
        trainer = models.make_trainer(strategy, max_steps=3, callbacks=callbacks)
        trainer.fit(module, models.Batches(models.rank()))  # type: ignore[arg-type]
        assert all(callback.done is (models.rank() == 0) for callback in callbacks)
        models.reference(twin, steps=3)
        assert models.deviation(module, twin) <= 1e-6
