"""A rank that dies: the others end with a message that names rank and phase."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from torch import Tensor

from tests.support import failing, models
from tests.support.harness import two_scripts


class Dies(models.Module):
    """One rank ends without a word, in its fourth step: by then ranks compare nothing before a gather."""

    def __init__(self, victim: int, where: str) -> None:
        super().__init__()
        self.victim, self.where, self.batch_idx = victim, where, 0

    def die(self, where: str) -> None:
        if (models.rank(), where, self.batch_idx) == (self.victim, self.where, 3):
            os._exit(7)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batch_idx = batch_idx
        self.die("forward")
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: self.die("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.die("step")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.die("validation")
        super().validation_step(batch, batch_idx)


def _dies(victim: int, where: str, stage: int) -> None:
    start = time.monotonic()
    try:
        failing.fit(Dies(victim, where), failing.strategy(stage, seconds=10), steps=5, val_check_interval=4)
    except Exception as error:
        raise type(error)(f"after {time.monotonic() - start:.0f} s: {error}") from None


RARE = pytest.mark.long
# at stage 1 the last update's gathers may have ended on the rank that dies, and not on the survivor
EARLY = (("in backward", "in `training_step`"), ("the reduction of unit `model.", "the gather of unit `model."))
# at stage 2 no value is gathered in a validation, so the survivor may have come to the mean of what it logs
LATE_PHASES = ("in `validation_step`", "in the reduction of a logged value or of a decision")
DEATHS = [
    (1, "backward", 1, ("in backward", "the reduction of unit `model.", "in backward number 4 failed on rank 0")),
    pytest.param(1, "backward", 3, ("in backward", "the gather of unit `model.", "in backward failed"), marks=RARE),
    pytest.param(1, "forward", 3, ("in `training_step`", " unit `model."), marks=RARE),
    pytest.param(1, "step", 1, ("in `validation_step`", "the gather of unit `model."), marks=RARE),
    pytest.param(1, "validation", 3, ("in `validation_step`", " unit `model."), marks=RARE),
    pytest.param(0, "forward", 1, EARLY, marks=RARE),
    pytest.param(0, "validation", 2, (LATE_PHASES, "rank 0, or torchrun's agent"), marks=RARE),
]


@pytest.mark.parametrize(("victim", "where", "stage", "texts"), DEATHS)
def test_a_killed_rank(victim: int, where: str, stage: int, texts: tuple[str | tuple[str, ...], ...]) -> None:
    """The survivor says who it is, in which phase it was, and who is gone; within `timeout` (10 s) and a little.

    ``texts``: what it says; of several in one place, one.
    """
    text = failing.expect_error(_dies, victim, where, stage)
    assert f"rank {victim} died with exit code 7" in text
    message = text[text.index("CommunicationError: after") :]
    assert f"rank {1 - victim} lost another rank in" in message and "ckpt_path" in message, text
    gone = ("Rank 1 says nothing", "Rank 1 has ended") if victim == 1 else ("The store does not answer",)
    said = [any(one in message for one in ((part,) if isinstance(part, str) else part)) for part in texts]
    assert any(one in message for one in gone) and all(said), text
    assert int(message.split("after ")[1].split(" s:")[0]) < 20


SCRIPT = """
import time, torch
from datetime import timedelta
from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models

class Late(models.Module):
    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 3 and models.rank() == 1:
            time.sleep(100)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 3:  # what the optimizer has written is being gathered
            raise ValueError("boom")

torch.set_num_threads(1)
strategy = ZeroCompileStrategy(stage=1, compile=False, timeout=timedelta(seconds=100))
models.make_trainer(strategy, max_steps=5).fit(Late(), models.Batches(models.rank()))
"""


@pytest.mark.long
def test_the_process_ends_at_once() -> None:
    """A rank that raises while its gathers wait for another leaves Python: no destructor waits for them."""
    with two_scripts(SCRIPT) as ranks:
        _, errors = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 1 and "ValueError: boom" in errors, errors
        assert ranks[1].poll() is None
