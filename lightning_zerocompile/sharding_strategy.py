"""What Lightning calls around the steps, each delegating: set-up, the state in checkpoints, and the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zerocompile.checkpoint.checkpoints import Checkpoints
from lightning_zerocompile.compile.backend import CompileStats
from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.plugins.callbacks import before_optimizer_state, prepare_callbacks, refuse_callbacks
from lightning_zerocompile.plugins.launcher import Launcher
from lightning_zerocompile.plugins.precision import StepsThroughEngine, autocast_dtype, compute_dtype, convert_plugin
from lightning_zerocompile.processes import ProcessStrategy
from lightning_zerocompile.ranks.errors import phase
from lightning_zerocompile.ranks.messages import Messages
from lightning_zerocompile.runtime.runtime import EagerReads, Stats
from lightning_zerocompile.sharding.checks import check_module, check_not_compiled, explain, trainer_settings
from lightning_zerocompile.sharding.meta_init import place


@dataclass(frozen=True)
class Statistics:
    """What a run has done since its set-up."""

    stats: Stats
    compile_stats: CompileStats
    eager_reads: dict[str, EagerReads]


class ShardingStrategy(ProcessStrategy):
    """Shards the module when it is set up, and makes it an ordinary one again at the end.

    Args:
        config: the strategy's options.
        sharded_checkpoints: whether a checkpoint is a directory of shards instead of one file.
        process_group_backend: as :class:`ProcessStrategy` takes it.
        kwargs: those of Lightning's strategies.
    """

    def __init__(
        self, config: Config, sharded_checkpoints: bool, process_group_backend: str | None, **kwargs: Any
    ) -> None:
        self._checkpoints = Checkpoints(sharded_checkpoints, config.full_param_optimizers, config.timeout)
        super().__init__(config, process_group_backend, **kwargs)
        self._engine: Engine | None = None
        self._last: Statistics | None = None  # of the run that has ended
        self._failed = False
        self._revert_layers: Callable[[], object] | None = None  # while a fit's layers are synchronized

    # ---- set-up ----

    @property
    def _lightning_module(self) -> pl.LightningModule | None:  # type: ignore[override, unused-ignore]
        return self.__dict__.get("_lightning_module")

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        if module is not None:  # before Lightning, which would name other strategies as the remedy
            check_not_compiled("", module)
        self.__dict__["_lightning_module"] = module

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = convert_plugin(plugin)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    @phase("the set-up")
    def setup(self, trainer: pl.Trainer) -> None:
        module = self._module
        self._failed = False
        if self.accelerator is None:
            raise RuntimeError("The strategy has no accelerator; pass it to a Trainer before using it.")
        self.accelerator.setup(trainer)
        check_module(module)
        refuse_callbacks(trainer)
        self._checkpoints.check_plugin(self.checkpoint_io)
        dtype = compute_dtype(self.precision_plugin, self.config.param_dtype)
        fitting = trainer.state.fn == TrainerFn.FITTING
        layer_sync = self._layer_sync if fitting else None
        to_synchronize = layer_sync is not None and self._revert_layers is None
        if self._engine is None or to_synchronize or not self._engine.manages(module):
            self._close()
            if layer_sync is not None:  # before sharding: these layers' code is what a region compiles
                layer_sync.apply(module)
                self._revert_layers = partial(layer_sync.revert, module)
            self.model = self.precision_plugin.convert_module(module)
            backend = self._process_group_backend or "gloo"
            autocast, settings = autocast_dtype(self.precision_plugin), trainer_settings(trainer)
            self._use(Engine(module, self.root_device, self.config, dtype, backend, autocast, settings))
            self.model_to_device()
        prepare_callbacks(trainer, module, self.engine)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        place(self._module, self.root_device)  # sharding has moved each parameter and buffer when its turn came

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        ParallelStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        fitting = self.lightning_module is not None and self._module.trainer.state.fn == TrainerFn.FITTING
        if getattr(self, "_engine", None) is not None and fitting:  # else: those of a fit that has ended
            self.engine.attach_optimizers([_raw(optimizer) for optimizer in optimizers])
            self._checkpoints.attach(self._module)

    # ---- state ----

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = self._checkpoints.plugin(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    @phase("a checkpoint: the model's state")
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Shards, or full values on the CPU of rank 0 and nothing on the others; collective."""
        if self._engine is not None:
            self._engine.runtime.pass_mark("a checkpoint")
            self._engine.apply_writes()
        return self._checkpoints.model_state(self._module)

    @override
    @phase("a checkpoint: an optimizer's state")
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(_raw(optimizer))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        before_optimizer_state(self._module.trainer, self._module)
        self._checkpoints.load_optimizers(self._raw_optimizers, checkpoint["optimizer_states"])

    @override
    @phase("a checkpoint: saving")
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        self._checkpoints.save(self.checkpoint_io, checkpoint, filepath, storage_options)

    @override
    @phase("a checkpoint: loading")
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        if weights_only is None and isinstance(self._launcher, Launcher):
            weights_only = self._launcher.weights_only  # see [Note: weights_only]
        return self._checkpoints.load(self.checkpoint_io, checkpoint_path, weights_only, self._module, fitting)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        self._checkpoints.remove(self.checkpoint_io, filepath)

    # ---- the end ----

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True  # ranks may be out of step: no collective from here on
        explained = explain(str(exception)) if type(exception) is RuntimeError else None
        if explained is not None:  # a hook raised it, outside of steps
            exception.args = (explained,)
        if self.messages is not None:
            self.messages.leave(f"{type(exception).__name__}: {exception}")

    @override
    @phase("the teardown")
    def teardown(self) -> None:
        if self._failed:
            self._rescue()
        else:
            _optimizers_to_device(self.optimizers, torch.device("cpu"))
            if self.config.unshard_after_fit:
                self._close()
        if self._engine is None:
            self._restore_layers()  # also when set-up failed on the way
        if self._engine is None and self.lightning_module is not None and not self._failed:
            self.lightning_module.cpu()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None and not self._failed:  # on a device it waits for what other ranks owe
            self.accelerator.teardown()
        if self._failed:
            self._checkpoints.abandon(self.checkpoint_io)
        else:
            self._checkpoints.finish(self.checkpoint_io)

    def _close(self) -> None:
        """Makes the module an ordinary one again; collective."""
        if self._engine is not None:
            self._last = self.statistics
            try:
                self._engine.unshard()
            except BaseException:
                self._abandon()
                raise
            self._use(None)
            self._restore_layers()

    def _rescue(self) -> None:
        """After an exception: makes the module whole where the ranks can, and otherwise leaves it in shards."""
        if self._engine is not None and self.config.unshard_after_fit:
            self._last = self.statistics
            if self._engine.rescue():
                self._use(None)
        self._abandon()

    def _abandon(self) -> None:
        if self._engine is not None:
            self._last = self.statistics
            try:
                self._engine.abandon()
            finally:
                self._use(None)

    def _use(self, engine: Engine | None) -> None:
        self._engine = engine
        if isinstance(self.precision_plugin, StepsThroughEngine):
            self.precision_plugin.engine = engine

    def _restore_layers(self) -> None:
        """Takes back what set-up changed in the module beside its parameters."""
        if isinstance(self.precision_plugin, StepsThroughEngine):
            self.precision_plugin.restore_module()
        if self._revert_layers is not None:
            self._revert_layers()
            self._revert_layers = None

    @property
    @override
    def messages(self) -> Messages | None:
        return None if self._engine is None else self._engine.runtime.messages

    @property
    def engine(self) -> Engine:
        """The sharded model. Raises RuntimeError before ``setup`` and after the model was made whole again."""
        if self._engine is None:
            raise RuntimeError("The model is not sharded: this works between the Trainer's `setup` and its `teardown`.")
        return self._engine

    @property
    def statistics(self) -> Statistics:
        """Of the run that goes on, or of the last one.

        Raises:
            AttributeError: there was none, so that ``hasattr`` works.
        """
        if self._engine is not None:
            runtime, compiled = self._engine.runtime, replace(self._engine.regions.stats)
            return Statistics(runtime.stats(), compiled, runtime.eager_reads())
        if self._last is None:
            raise AttributeError("There are no statistics yet: the strategy counts from the Trainer's `setup` on.")
        return self._last

    @property
    def _raw_optimizers(self) -> list[Optimizer]:
        return [_raw(optimizer) for optimizer in self.optimizers]

    @property
    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("The strategy has no LightningModule; it gets it from the Trainer.")
        return self.lightning_module

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None, "_revert_layers": None}


def _raw(optimizer: Optimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
