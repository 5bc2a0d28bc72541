"""The end of a run: the model becomes an ordinary module again, or stays in shards that raise by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]
from torch import nn

from lightning_zerocompile.config import Config
from lightning_zerocompile.optim.hooks import OptimizerSteps
from lightning_zerocompile.ranks.groups import Groups, default_group_position
from lightning_zerocompile.runtime.runtime import Runtime
from lightning_zerocompile.sharding.buffers import Buffers
from lightning_zerocompile.sharding.module_swap import (
    make_whole,
    owner_of,
    refuse_shards,
    remove_regions,
    restore_classes,
    unshard_parameters,
)

_PATIENCE, _PART = timedelta(seconds=5), 10  # how long failed ranks wait for each other; at most a part of `timeout`
_END = "the end of a run that failed"  # the mark of what they decide


class Ending:
    """What an engine does at the end of its run, with what it has made at the start.

    Attributes:
        model: the module.
        config: the strategy's options.
        runtime: holds the model's parameters.
        steps: watches its optimizers.
        buffers: its buffers.
    """

    model: nn.Module
    config: Config
    runtime: Runtime
    steps: OptimizerSteps
    buffers: Buffers
    _groups: Groups
    _watched: Callable[[], object] | None  # ends the messages about long compilations

    def manages(self, model: nn.Module) -> bool:
        """Whether this is the sharded ``model``, and no other engine has taken it over."""
        return self.model is model and owner_of(model) is self.runtime.core

    def unshard(self) -> None:
        """Makes the model an ordinary module with full parameters, on the CPU; collective."""
        self._silence()
        self.steps.attach([])
        if self.manages(self.model):
            self.steps.give_back(make_whole(self.model))
        self.runtime.shutdown()
        self._groups.destroy()
        self.leave_groups()

    def unshard_after_failure(self) -> bool:
        """After an exception: makes the model an ordinary module again where that is sure to end, and to be right.

        [Note: after a failure] One rank has all rows, and needs nobody. Several ranks must gather, and a rank that
        gathers alone waits in vain. So each rank says in the store how many steps it has made, and how many
        collectives it has started. If all ranks say the same within a few seconds, and none was in an update, the
        masters of all ranks are of the same step, and every collective that was started ends. Only then the model is
        made whole. The first rank that knows this, or waits no longer, decides for all by one write. Several ranks lose
        what was written to gathered values and has not reached a master.

        Returns:
            Whether the model is whole. If it is not, it is as it was before, and :meth:`abandon` must be called.
        """
        if not self.manages(self.model):
            return False
        try:
            if dist.get_world_size() == 1:
                with contextlib.suppress(RuntimeError):  # what was written there may be of the step that has failed
                    self.runtime.core.write_back()
            elif why := self._why_not_whole():
                return _stays_sharded(why)
            self.steps.give_back(unshard_parameters(self.model))
        except RuntimeError as error:  # a rank or the store is gone meanwhile, or the device has failed
            return _stays_sharded(str(error))
        remove_regions(self.model)
        self._silence()
        self.steps.attach([])
        self.model.cpu()
        self.runtime.abandon()
        return True

    def _why_not_whole(self) -> str:
        """After a failure: why the ranks cannot make the model whole, alike on all of them; "": they can."""
        messages, rank = self.runtime.messages, dist.get_rank()
        messages.close()  # its thread would take the waits that come for a hang, and end this rank's groups
        why = ""
        if messages.ended is not None:
            why = f"rank {rank} was waiting for another one, so its process group has ended"
        elif self.steps.updates or self.runtime.step_state.updated:
            why = f"rank {rank} ended in the middle of an update"
        else:
            patience = min(_PATIENCE, self.config.timeout / _PART)
            place = f"{self.steps.count} {messages.started()} {default_group_position()}"
            if not messages.all_count(f"{_END}/{place}", patience, lambda: messages.marked(_END, 0) is not None):
                why = f"not all ranks ended at one place of the training within {patience.total_seconds():g} s"
        return messages.mark(_END, 0, why)[1]

    def abandon(self) -> None:
        """After a failure: neither communicates nor waits, see [Note: abandoned communication] in csrc/runtime.cpp.

        The model keeps its shards (as DTensors) under its own classes. Process groups stay until the process ends. If
        this rank destroyed one, what another rank still does with it would fail, and that would hide the exception
        which the other rank is about to raise.
        """
        self._silence()
        self.steps.attach([])
        with contextlib.suppress(RuntimeError):  # a device that has failed raises it
            self.runtime.bind_gradients()
        if self.manages(self.model):
            remove_regions(self.model)
            restore_classes(self.model)
            refuse_shards(self.model)
        self.runtime.abandon()

    def leave_groups(self) -> None:
        """At the end of a run: holds no process group.

        Python may collect the engine much later (see [Note: forks] in ranks/groups.py), and what is held until then
        keeps its threads and sockets. At the end of the process see [Note: gloo's end].
        """
        self.buffers.leave_group()
        self.runtime.meetings.leave_group()
        del self._groups

    def _silence(self) -> None:
        if self._watched is not None:
            self._watched()


def _stays_sharded(why: str) -> bool:
    rank_zero_warn(
        f"zerocompile: the module stays sharded, since {why}. Build it anew and go on from a checkpoint "
        "(`trainer.fit(model, ckpt_path=...)`); `ModelCheckpoint(save_on_exception=True)` writes one if all raise."
    )
    return False
