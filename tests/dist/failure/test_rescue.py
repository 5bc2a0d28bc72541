"""After an exception on one rank alone, and after Ctrl-C, the module is whole again where the ranks come to it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.ranks.abort import ended_group
from lightning_zerocompile.ranks.errors import CommunicationError
from tests.support import failing, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

SECONDS = 20  # the timeout; after a failure each rank waits a tenth of it for the others, and half of it on devices


class Boom(Exception):
    """The user's."""


class Ends(models.Module):
    """Its second step ends early on the ranks ``ending``: in ``where``, by ``act``."""

    where, ending = "training_step", (1,)

    def act(self) -> None:
        raise Boom("on purpose")

    def at(self, where: str) -> None:
        if where == self.where and models.rank() in self.ending and self.trainer.global_step == 1:
            self.act()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.at("training_step")
        loss = super().training_step(batch, batch_idx)
        if self.where == "backward":
            loss.register_hook(lambda _: self.at("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.at("on_before_optimizer_step")


@contextmanager
def _handlers() -> Iterator[None]:
    """Lightning ignores further interrupts."""
    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _fails(module: Ends, stage: int, options: dict[str, Any], ours: type[BaseException]) -> None:
    """A fit ends in time. ``ours``: what comes out of it on the ranks that end by themselves."""
    start = time.monotonic()
    with _handlers(), pytest.raises(ours if models.rank() in module.ending else CommunicationError):
        failing.fit(module, failing.strategy(stage, SECONDS, **options), steps=4)
    assert time.monotonic() - start < (SECONDS / 2 if models.device() == "cpu" else 2 * SECONDS)


def _is_whole(module: nn.Module, twin: nn.Module) -> None:
    assert all(type(p) is nn.Parameter for p in module.parameters())
    models.reference(twin, 1)  # the step before
    assert models.deviation(module, twin) < 1e-6


def _alone(stage: int, options: dict[str, Any], where: str) -> None:
    module, twin = Ends(), models.Module()
    twin.load_state_dict(module.state_dict())
    module.where = where
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _fails(module, stage, options, Boom)
    apart = [str(warning.message) for warning in said if "parts of different steps" in str(warning.message)]
    if where == "on_before_optimizer_step":  # the other rank has updated its rows meanwhile, or some of them
        assert len(apart) == 1 and re.search(r"rank 1 had made 1 optimizer steps, and rank 0 (1.5|2) ", apart[0]), apart
        assert all(type(p) is nn.Parameter for p in module.parameters())
        return
    assert not apart
    _is_whole(module, twin)
    if ended_group() is not None:  # a rank's device was in a collective that never came
        return
    module.ending = ()
    failing.fit(module, failing.strategy(stage, SECONDS, **options), steps=1)
    models.reference(twin, 1)
    assert models.deviation(module, twin) < 1e-6


CELLS = [
    pytest.param(
        stage, options, where, id=f"{stage}-{name}-{where}",
        marks=() if (stage, name, where) in ((1, "eager", "on_before_optimizer_step"), (3, "eager", "training_step"))
        else pytest.mark.long,
    )
    for stage in (1, 2, 3) for name, options in (("eager", EAGER), ("aot_eager", AOT))
    for where in ("training_step", "backward", "on_before_optimizer_step")
    if (stage, where) != (3, "on_before_optimizer_step")  # the next wait is Lightning's broadcast, see LIMITS.md
]  # fmt: skip


@pytest.mark.parametrize(("stage", "options", "where"), CELLS)
@on_ranks()
def test_one_rank_raises_alone(stage: int, options: dict[str, Any], where: str) -> None:
    """The other one hears of it in its next wait, comes in time, and both have the module again: never a hang."""
    _alone(stage, options, where)


class Interrupts(Ends):
    """A signal as a terminal sends it, while the rank sleeps or waits for the others in a collective."""

    ending = (0, 1)
    sleeping: tuple[int, ...] = (1,)

    def act(self) -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        if models.rank() in self.sleeping:
            time.sleep(5)


def _interrupted(stage: int, options: dict[str, Any], where: str, ending: tuple[int, ...]) -> None:
    module, twin = Interrupts(), models.Module()
    twin.load_state_dict(module.state_dict())
    module.where, module.ending = where, ending
    module.sleeping = (ending[-1],)
    _fails(module, stage, options, SystemExit)
    if models.device() == "cuda" and where == "backward":  # the interrupt comes out when torch's own thread is done
        assert all(type(p) is nn.Parameter for p in module.parameters())
        return
    _is_whole(module, twin)


@pytest.mark.parametrize("ending", [(0, 1), pytest.param((1,), marks=pytest.mark.long)], ids=["all", "one"])
@pytest.mark.parametrize(
    ("stage", "options", "where"),
    [
        (3, EAGER, "training_step"),
        pytest.param(3, AOT, "training_step", marks=pytest.mark.long),
        pytest.param(1, AOT, "backward", marks=pytest.mark.long),
        pytest.param(2, EAGER, "backward", marks=pytest.mark.long),
    ],
)
@on_ranks()
def test_ctrl_c(stage: int, options: dict[str, Any], where: str, ending: tuple[int, ...]) -> None:
    """A rank that is in a collective when the signal comes is waited for, as far as a tenth of the timeout."""
    _interrupted(stage, options, where, ending)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(1)
def test_ctrl_c_in_one_process(stage: int) -> None:
    _interrupted(stage, EAGER, "training_step", (0,))
