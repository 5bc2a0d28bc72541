"""Processes that are forked after a fit, such as a DataLoader's workers. See [Note: forks] in ranks/groups.py."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import EAGER


def _status_of_a_fork_that_collects() -> int:
    """As ``os.waitpid`` says it."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        gc.collect()  # as Python does by itself now and then
        os._exit(0)
    return os.waitpid(child, 0)[1]


class Fails(models.Module):
    def on_train_batch_end(self, *_: object) -> None:
        raise ValueError("on purpose")


@contextmanager
def _nothing_is_collected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_a_forked_child_collects_garbage_after_fits(stage: int) -> None:
    """Groups that a fit has left are not destroyed in it. After the fork the child collects its own garbage."""
    with _nothing_is_collected():
        models.train(models.Module(), ZeroCompileStrategy(stage, **EAGER))
        with pytest.raises(ValueError, match="on purpose"):
            models.train(Fails(), ZeroCompileStrategy(stage, **EAGER))
        status = _status_of_a_fork_that_collects()
    assert status == 0, f"the child was ended by signal {os.WTERMSIG(status)}"
