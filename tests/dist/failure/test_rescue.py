"""What is left of the module after Ctrl-C, and after an exception on one rank alone."""

from __future__ import annotations

import os
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

from lightning_zerocompile.ranks.errors import CommunicationError
from tests.support import failing, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

SECONDS = 20  # the timeout; after a failure each rank waits a tenth of it for the others


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

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.at("on_train_batch_start")

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


def _is_whole(module: Ends, stage: int, options: dict[str, Any], ours: type[BaseException]) -> bool:
    """A fit ends; returns whether the module is whole. Then it is that of the step before, else it raises by name."""
    twin = models.Module()
    twin.load_state_dict(module.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fails(module, stage, options, ours)
    said = [str(one.message) for one in caught if "the module stays sharded" in str(one.message)]
    if all(type(p) is nn.Parameter for p in module.parameters()):
        models.reference(twin, 1)
        assert not said and models.deviation(module, twin) < 1e-6
        return True
    assert len(said) == (models.rank() == 0) and all("save_on_exception" in text for text in said), said
    for use in (lambda: module.loss(models.Batches(0)[0]), module.state_dict):
        with pytest.raises(RuntimeError, match=r"`model\..* is a shard .* ckpt_path"):
            use()
    return False


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
    """The other one hears of it in its next wait. It may have made an update; else both may be at one place."""
    module = Ends()
    module.where = where
    whole = _is_whole(module, stage, options, Boom)
    assert not (whole and where == "on_before_optimizer_step")


class Interrupts(Ends):
    """A signal as a terminal sends it to all ranks, while they sleep; ``where`` the others are in a collective."""

    ending = (0, 1)
    sleeping: tuple[int, ...] = (0, 1)

    def act(self) -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        if models.rank() in self.sleeping:
            time.sleep(5)


@pytest.mark.parametrize("where", ["training_step", pytest.param("on_train_batch_start", marks=pytest.mark.long)])
@pytest.mark.parametrize(("stage", "options"), [(3, EAGER), pytest.param(1, AOT, marks=pytest.mark.long)])
@on_ranks()
def test_ctrl_c(stage: int, options: dict[str, Any], where: str) -> None:
    """All ranks are at one place between two updates."""
    module = Interrupts()
    module.where = where
    assert _is_whole(module, stage, options, SystemExit)


@on_ranks()
def test_ctrl_c_while_a_rank_waits_for_another() -> None:
    """One sleeps before its forward, which the other has begun."""
    module = Interrupts()
    module.sleeping = (1,)
    _is_whole(module, 3, EAGER, SystemExit)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(1)
def test_ctrl_c_in_one_process(stage: int) -> None:
    module = Interrupts()
    module.ending = (0,)
    assert _is_whole(module, stage, EAGER, SystemExit)


class _Half(torch.optim.SGD):
    """Its second step raises when it has updated the first parameter."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 1:
            return super().step(closure)
        closure()
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        raise Boom("half")


class Halves(Ends):
    where, ending = "the update", (0, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _Half(self.parameters(), lr=0.1)


@on_ranks()
def test_an_update_that_raised() -> None:
    """Ranks may have updated different parts, which nobody can tell."""
    assert not _is_whole(Halves(), 3, EAGER, Boom)


@on_ranks(1)
def test_an_update_that_raised_in_one_process() -> None:
    """What is there is there, as without this strategy."""
    module = Halves()
    module.ending = (0,)
    _fails(module, 3, EAGER, Boom)
    assert all(type(p) is nn.Parameter for p in module.parameters())
