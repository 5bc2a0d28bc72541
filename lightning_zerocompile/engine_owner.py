"""What the strategies of the Trainer and of Fabric share: the engine of a run, from its set-up to its end."""

from __future__ import annotations

import atexit
import os
import pickle
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.rank_zero import (  # type: ignore[attr-defined, unused-ignore]
    rank_zero_info,
    rank_zero_warn,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zerocompile.checkpoint.checkpoints import Checkpoints, dist_broadcast, is_first_rank
from lightning_zerocompile.checkpoint.export import export
from lightning_zerocompile.compile.backend import CompileStats
from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.plan.auto import Choice, choose_stage
from lightning_zerocompile.plan.trace import said
from lightning_zerocompile.ranks.messages import Messages
from lightning_zerocompile.report.report import HostTimes, Report, report_of
from lightning_zerocompile.report.start import start_line, what_is_compiled
from lightning_zerocompile.runtime.runtime import EagerReads, Stats
from lightning_zerocompile.runtime.window import Gathers


@dataclass(frozen=True)
class Statistics:
    """What a run has done since its set-up."""

    stats: Stats
    compile_stats: CompileStats
    eager_reads: dict[str, EagerReads]


def check_device(device: torch.device) -> None:
    """Raises RuntimeError for an accelerator that has no transport here."""
    if device.type not in ("cpu", "cuda"):
        raise RuntimeError(
            f"`strategy='zerocompile'` runs on CPU (gloo) and CUDA (NCCL), not on {device.type!r}. Use "
            "accelerator='cpu' or accelerator='cuda'."
        )


class EngineOwner:
    """A strategy's sharded model, what users call on it, and what stays of a run that has ended.

    Args:
        config: the strategy's options.
        checkpoint_io: the user's plugin for files, or None.
    """

    def __init__(self, config: Config, checkpoint_io: CheckpointIO | None) -> None:
        self.config = config
        self._checkpoints = Checkpoints(
            config.state_dict_type == "sharded", config.full_param_optimizers, config.timeout, checkpoint_io
        )
        self._engine: Engine | None = None
        self.messages: Messages | None = None  # what this rank tells the others through the store while it is sharded
        self._last: Statistics | None = None  # of the last run that has ended
        self._last_report: Report | None = None
        self.host_times: HostTimes | None = None  # set by the monitor
        self.choice: Choice | None = None  # of stage="auto"; it stays for later runs of the same module
        self._chosen_for: weakref.ref[nn.Module] | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the names. Called again, after a reload, it registers the newest class."""
        for name, stage in (("zerocompile", 3), *((f"zerocompile_stage_{stage}", stage) for stage in (1, 2, 3))):
            description = f"ZeRO stage {stage} by torch.compile"
            strategy_registry.register(name, cls, description=description, override=True, stage=stage)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoint files."""
        return self._checkpoints.io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoints.io = io

    @property
    def engine(self) -> Engine:
        """The sharded model. Raises RuntimeError before ``setup`` and after the model was made whole again."""
        if self._engine is None:
            raise RuntimeError(self._not_sharded)
        return self._engine

    _not_sharded = "The model is not sharded: this works between the Trainer's `setup` and its `teardown`."

    def _meet(self, what: str) -> None:
        """Called before ``what``, a collective that blocks in torch: all ranks come here, or this one raises."""
        if self._engine is not None:
            self._engine.runtime.meetings.meet(what)

    def _use(self, engine: Engine | None) -> None:
        """Takes a new engine, or lets go of the one that has ended."""
        self._engine, self.messages = engine, None
        if engine is not None:
            self.messages = engine.runtime.messages
            atexit.register(_leave, weakref.ref(engine))  # so before the process group is destroyed, see rule 9

    def _choose(self, config: Config, module: nn.Module, device: torch.device, **arguments: Any) -> Config:
        """The options with a stage in place of "auto"; collective if the stage is not chosen yet.

        Args:
            arguments: of :func:`~lightning_zerocompile.plan.auto.choose_stage`.

        Raises:
            PlanError: no stage fits, or the run cannot be planned.
        """
        if config.stage != "auto":
            return config
        if self.choice is None or self._chosen_for is None or self._chosen_for() is not module:
            self.choice, self._chosen_for = choose_stage(module, config, device, **arguments), weakref.ref(module)
            rank_zero_info(f"zerocompile: {self.choice.reason}")
        return self.choice.applied(config)

    def _announce(self, optimizers: Sequence[Optimizer], accumulate: int = 1) -> None:
        """Logs on rank 0 what has been set up."""
        if not is_first_rank():
            return
        try:
            line = start_line(self.engine, optimizers, accumulate)
        except Exception as error:  # what is only said must not end a run
            stage, compiled = self.engine.config.chosen_stage, what_is_compiled(self.engine)
            line = f"zerocompile: stage {stage}, {compiled}; what a step costs cannot be said: {said(error)}"
        rank_zero_info(line)

    def _keep_report(self) -> None:
        """For after the run."""
        self._last_report = None
        try:
            self._last_report = self.report()
        except Exception as error:  # the module must be made whole all the same
            rank_zero_warn(f"zerocompile: there is no report of this run: {said(error)}")

    def _close(self, failed: bool = False) -> None:
        """Makes the module an ordinary one again; collective.

        Args:
            failed: whether a rank has failed, so that ranks may be out of step. Then the module is made whole only if
                the ranks can still do that, see [Note: after a failure]; otherwise it stays in shards.
        """
        if self._engine is None:
            return
        engine, self._last = self._engine, self.statistics
        self._last_report = None
        if not failed:
            self._keep_report()
        whole = False
        try:
            if not failed:
                self._meet("the end of the run: making the module whole")
                engine.unshard()
                whole = True
            elif self.config.unshard_after_fit:
                whole = engine.unshard_after_failure()
        finally:
            try:
                if not whole:
                    engine.abandon()
            finally:
                self._use(None)

    def tell_last_run(self) -> bytes:
        """What the run that has ended in this process did, for the process that has started it: as bytes, since
        Lightning takes the dataclasses that it sends apart."""
        return pickle.dumps((self._last, self._last_report, self.choice))

    def hear_last_run(self, told: bytes) -> None:
        """Takes what :meth:`tell_last_run` has said in a process that this one has started."""
        self._last, self._last_report, self.choice = pickle.loads(told)

    @contextmanager
    def coalesce_grad_reduction(
        self,
        gather: Gathers = "auto",
        max_bytes: int | None = None,
        accumulate_dtype: torch.dtype | None = None,
    ) -> Iterator[None]:
        """Opens a window: any number of backwards inside, and one reduction of every unit when it closes.

        Gradients from before the window are kept and added to. While it is open this rank holds up to one full gradient
        of the model. Every rank must open the window in the same step. At stages 1 and 2, and at stage 3 with
        ``gather="window"``, ranks may run different numbers of backwards inside, if ``max_bytes`` is None. An exception
        drops the window's gradients without communication (with those of an unfinished accumulation to which they were
        added) and is raised again. Inside, ``zero_grad()`` drops the gradients that wait. ``p.grad`` is what it was
        before the window or, if that was None, this rank's own full sum, ``[*p.shape]``. Source: DeepSpeed PR 7992.

        Args:
            gather: at stage 3, ``"window"`` gathers every parameter once for all forwards and backwards inside (and
                holds the whole model meanwhile), and ``"use"`` gathers each parameter at each use, as outside.
                ``"auto"`` (default) is ``"window"`` if parameters, gradients and an optimizer's moments fit in half of
                what is free on every rank; that is decided in the first window.
            max_bytes: how many bytes of full gradients may wait. If those of all parameters that were trained since the
                window opened take more, each backward reduces all that waits, and the shards wait for the window's end.
                ``None``: any number.
            accumulate_dtype: ``None``: gradients are summed in their own dtype; ``torch.float32``: in fp32. They are
                communicated in ``reduce_dtype``, or else in their own dtype.

        Raises:
            RuntimeError: windows are nested, an accumulation is open, an optimizer steps or clips inside one, a
                parameter with a waiting gradient was frozen, or (where it closes) a rank did not open it, failed
                inside it, or would have met other collectives.
            ValueError: an argument is outside what it allows.
        """
        with self.engine.windows.open(gather, max_bytes, accumulate_dtype):
            yield
        self.engine.end_backward()

    @contextmanager
    def unequal(self) -> Iterator[None]:
        """Inside, ranks may do unequal work at stage 3: other modules, in another order, any number of times.

        Examples are ``generate()`` for texts of different lengths, evaluations of different numbers of batches, and
        towers that only some ranks use, in forwards and backwards. All ranks must enter and leave, at the same points
        of their programs. A rank that leaves, or comes to anything that takes all ranks (a backward's end, an
        optimizer's step, a barrier or a logged value that is reduced), takes part in the others' gathers until all have
        come there. Each gather costs a message to the store, and nothing is gathered ahead. Collectives of your own
        (and those of torchmetrics) inside must come after equal work. Where nothing is gathered (stages 1 and 2) it
        does nothing. See [Note: unequal work] in csrc/unequal.cpp.

        Raises:
            RuntimeError: the ranks enter after different work.
            CommunicationError: a rank has raised inside (that rank's own exception comes out as it is), has come to
                another thing that takes all ranks, or is gone.
        """
        with self.engine.runtime.unequal():
            yield

    @contextmanager
    def full_parameters(self, module: nn.Module | None = None, writeback: bool = True) -> Iterator[dict[str, Tensor]]:
        """The full values of the module's parameters, by name; all ranks must enter.

        Inside, the modules compute with what is written to the values, while ``parameters()``, optimizers and
        checkpoints keep the values from before. If an exception leaves the context, everything that was written is
        dropped.

        Args:
            module: a part of the model; default: all of it.
            writeback: whether what is written to the values, in place, becomes the parameters' value on exit. Every
                rank must write the same.

        Raises:
            RuntimeError: another ``full_parameters``, which is still open, has some of these parameters (or others that
                are gathered with them); or an optimizer steps inside.
        """
        with self.engine.full_parameters(module or self.engine.model, writeback) as values:
            yield values

    @contextmanager
    def full_state_dict(self, module: nn.Module | None = None) -> Iterator[dict[str, Any]]:
        """Lets rank 0 save the model in the middle of a run, by any code that calls ``state_dict()``; all ranks enter.

        Inside, ``state_dict()`` of the module and of its parts gives full values on rank 0: on the CPU, of the moment
        of entry, in the dtypes that the module has after the fit. So ``save_pretrained`` and ``push_to_hub``
        (transformers, PEFT, sentence-transformers), ``torch.save`` and safetensors work there. Parameters are gathered
        one at a time, and the model trains on as it was. Yields the module's state dict on rank 0, ``{}`` on others.

        Args:
            module: a part of the model; default: all of it.

        Raises:
            RuntimeError: another rank does not enter; or, inside, ``state_dict()`` is called on another rank than 0.
        """
        with self.engine.full_state_dict(module or self.engine.model) as state:
            yield state

    def full_gradients(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """The full gradients of the module's parameters, by name, as copies; all ranks must ask.

        They are reduced: the mean over all ranks, as under DDP. Parameters without a gradient are left out.

        Args:
            module: a part of the model; default: all of it.

        Raises:
            RuntimeError: inside ``coalesce_grad_reduction``, where they are not reduced yet; another rank does not ask.
        """
        return self.engine.full_gradients(module or self.engine.model)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        module: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = 5 * 10**9,
    ) -> None:
        """Writes a folder that Hugging Face's ``from_pretrained`` and :func:`load_pretrained` read; all ranks call it.

        No rank holds the whole model: each writes files of its own. Model files that are in the folder are replaced
        when the new ones are complete. After ``fit`` the module is an ordinary one: use its own ``save_pretrained``.

        Args:
            folder: on a filesystem that all ranks see; rank 0's counts.
            module: a part of the model, usually the Hugging Face model, whose ``config`` is written, too; default: all.
            dtype: of floating-point tensors in the files; ``None``: the dtype that each had before it was sharded.
            max_file_bytes: files are no larger, unless a single tensor is; a rank holds up to two files in memory.

        Raises:
            RuntimeError: a rank could not write, or the model is not sharded now.
            ValueError: ``dtype`` or ``max_file_bytes`` is outside what it allows.
        """
        if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes <= 0:
            raise ValueError(f"`max_file_bytes={max_file_bytes!r}` must be a positive number of bytes.")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"`dtype={dtype!r}` must be a floating-point torch.dtype or None.")
        self._meet("an export")
        self.engine.runtime.pass_mark("an export")
        self.engine.apply_writes()
        export(module or self.engine.model, Path(dist_broadcast(os.fspath(folder))), dtype, max_file_bytes)

    def report(self) -> Report:
        """What this rank has done in the present run, or in the last one that has ended well; no communication.

        Print it, or take :meth:`Report.as_json`; ``advice`` says what can be done.

        Raises:
            AttributeError: there was no run.
        """
        if self._engine is not None:
            now = self.statistics
            return report_of(self._engine, now.stats, now.compile_stats, self.host_times)
        if self._last_report is None:
            raise AttributeError("There is no report yet: a strategy reports from the Trainer's `setup` on.")
        return self._last_report

    # ---- statistics ----

    @property
    def stats(self) -> Stats:
        """What the runtime has done since set-up, or did in the run that has ended; a snapshot."""
        return self.statistics.stats

    @property
    def compile_stats(self) -> CompileStats:
        """Graphs compiled since set-up, or in the run that has ended; a snapshot."""
        return self.statistics.compile_stats

    @property
    def eager_reads(self) -> dict[str, EagerReads]:
        """What code outside compiled graphs has read, by unit (a block, or the first parameter of a group): how often,
        and how many gathers and bytes the unit took in all. After a run these are the numbers at its end."""
        return self.statistics.eager_reads

    @property
    def statistics(self) -> Statistics:
        """The statistics of the present run, or of the last one.

        Raises:
            AttributeError: there was no run. It is this error so that ``hasattr`` works.
        """
        if self._engine is not None:
            runtime, compiled = self._engine.runtime, replace(self._engine.regions.stats)
            return Statistics(runtime.stats(), compiled, runtime.eager_reads())
        if self._last is None:
            raise AttributeError("There are no statistics yet: the strategy counts from the Trainer's `setup` on.")
        return self._last


def _leave(engine: weakref.ref[Engine]) -> None:
    """Called at the end of the process: abandons the engine if the module is still sharded."""
    left = engine()
    if left is not None and left.manages(left.model):
        left.abandon()
        left.leave_groups()
