"""The strategy of Lightning's Trainer: its hooks in the order in which the Trainer calls them, each delegating."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zerocompile.arguments import takes_options
from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.engine_owner import EngineOwner, check_device
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.plan import Plan, make_plan
from lightning_zerocompile.plugins.callbacks import before_optimizer_state, prepare_callbacks
from lightning_zerocompile.plugins.clipping import clip_value_in_backward
from lightning_zerocompile.plugins.compiled_module import put_plain_methods, warn_if_compiled
from lightning_zerocompile.plugins.evaluation import UnequalEvaluation
from lightning_zerocompile.plugins.launcher import ForkLauncher, KeepsWeightsOnly, Launcher, forks
from lightning_zerocompile.plugins.precision import StepsThroughEngine, autocast_dtype, compute_dtype, convert_plugin
from lightning_zerocompile.ranks.abort import START_ANEW, destroy_group_at_exit, refuse_ended_group
from lightning_zerocompile.ranks.errors import (
    TEARDOWN,
    CommunicationError,
    in_phases,
    is_communication,
    keep_first_error,
)
from lightning_zerocompile.sharding.checks import check_has_parameters, explain, trainer_settings
from lightning_zerocompile.sharding.meta_init import place

# how an error of communication names the hook in which it was raised
_PHASES = {
    "setup": "the set-up",
    "training_step": "`training_step`",
    "validation_step": "`validation_step`",
    "test_step": "`test_step`",
    "predict_step": "`predict_step`",
    "backward": "backward",
    "optimizer_step": "the optimizer's step",
    "lightning_module_state_dict": "a checkpoint: the model's state",
    "optimizer_state": "a checkpoint: an optimizer's state",
    "save_checkpoint": "a checkpoint: saving",
    "load_checkpoint": "a checkpoint: loading",
    "barrier": "a barrier",
    "broadcast": "a broadcast",
    "all_gather": "all_gather",
    "reduce": "the reduction of a logged value or of a decision",
    "save_pretrained": "an export",
    "teardown": TEARDOWN,
}


_DRAINS = 5.0  # seconds in which a device must be done with what was queued before an exception


@in_phases(_PHASES)
class ZeroCompileStrategy(EngineOwner, DDPStrategy):
    """Trains any LightningModule with ZeRO stage 1, 2 or 3; torch.compile places the communication.

    Its arguments are the options of :class:`~lightning_zerocompile.config.Config`, those that Lightning's strategies
    have in common, and ``plan_batch``: with ``stage="auto"``, a function that returns a batch of one rank (its tensors
    may be on meta), so that activations count. It inherits from DDPStrategy the processes, their group and their
    launcher. The module is not wrapped. Options of torch's DDP have no meaning here, so they raise a TypeError.
    """

    strategy_name = "zerocompile"

    @takes_options
    def __init__(
        self,
        config: Config,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        plan_batch: Callable[[], Any] | None = None,
    ) -> None:
        EngineOwner.__init__(self, config, checkpoint_io)
        DDPStrategy.__init__(
            self,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,  # the Trainer looks whether there is one
            precision_plugin=precision_plugin,
            process_group_backend=config.process_group_backend,
            timeout=config.timeout,
        )
        if plan_batch is not None and (config.stage != "auto" or not callable(plan_batch)):
            raise ValueError(
                f"`plan_batch={plan_batch!r}` must be a function that returns a batch as `training_step` gets it; it "
                "is what stage='auto' counts activations by, and has no meaning with another stage."
            )
        self._plan_batch = plan_batch
        self._failed = False
        self._evaluation = UnequalEvaluation(whole=config.unequal_work == "evaluation")
        self._revert_layers: Callable[[], object] | None = None  # while a fit's layers are synchronized
        self._revert_methods: Callable[[], object] | None = None  # while the module is not torch.compile's

    # ---- before anything runs ----

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError("The strategy has no devices yet; it gets them from the Trainer.")
        return super().root_device

    def _set_precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = convert_plugin(plugin)
        if isinstance(self._precision_plugin, StepsThroughEngine):
            self._precision_plugin.fp32_modules = self.config.fp32_modules

    precision_plugin: Precision = property(  # type: ignore[assignment, override]
        DDPStrategy.precision_plugin.fget,  # type: ignore[attr-defined]
        _set_precision_plugin,
    )

    def plan(
        self,
        module: pl.LightningModule,
        batch: Any = None,
        *,
        world_size: int,
        gpu_memory: int | None = None,
        bandwidth: float | None = None,
        flops: float | None = None,
        gloo: bool = False,
        ranks_per_node: int | None = None,
        node_bandwidth: float | None = None,
        latency: float | None = None,
        node_latency: float | None = None,
        **options: Any,
    ) -> Plan:
        """What a run of this strategy will need, by stage; nothing is allocated, and no other rank is needed.

        Args:
            module: an ordinary module, possibly on meta.
            batch: of one rank, as ``training_step`` gets it.
            world_size: number of ranks.
            gpu_memory, bandwidth, flops, gloo, ranks_per_node, node_bandwidth, latency, node_latency: see
                :class:`~lightning_zerocompile.plan.machine.Machine`.
            options: the others of :func:`~lightning_zerocompile.plan.plan.make_plan`.

        Raises:
            PlanError: the world size is no positive number, or the module cannot take the batch; the message says what
                to do.
        """
        plugin = convert_plugin(self.precision_plugin) or self.precision_plugin
        return make_plan(
            module,
            batch,
            world_size=world_size,
            config=self.config,
            machine=Machine(
                gpu_memory,
                bandwidth,
                flops,
                gloo,
                ranks_per_node=ranks_per_node,
                node_bandwidth=node_bandwidth,
                latency=latency,
                node_latency=node_latency,
            ),
            compute_dtype=compute_dtype(plugin, self.config.param_dtype),
            autocast_dtype=autocast_dtype(plugin),
            **options,
        )

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is None:
            return
        if not forks(self):
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        elif self.config.unshard_after_fit:
            self._launcher = ForkLauncher(self)
        else:
            raise ValueError(
                "`unshard_after_fit=False` leaves the module sharded over processes, and those of a notebook (or of "
                "start_method='fork') end with the fit; use unshard_after_fit=True."
            )

    @override
    def setup_environment(self) -> None:
        check_device(self.root_device)
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment; pass it to a Trainer before using it.")
        first = not dist.is_initialized()
        super().setup_environment()
        if first:
            destroy_group_at_exit()
        refuse_ended_group()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    # ---- set-up ----

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self._module
        self._failed = False
        if self.accelerator is None:
            raise RuntimeError("The strategy has no accelerator; pass it to a Trainer before using it.")
        self.accelerator.setup(trainer)
        if self._revert_methods is not None:  # the module has stayed sharded: what the user compiled is looked at anew
            self._revert_methods()
        warn_if_compiled(module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        dtype = compute_dtype(self.precision_plugin, self.config.param_dtype)
        config = self._chosen(trainer, dtype)
        layer_sync = self._layer_sync if fitting else None
        engine = self._engine
        to_synchronize = layer_sync is not None and self._revert_layers is None
        if engine is None or to_synchronize or engine.config != config or not engine.manages(module):
            self._close()
        self._revert_methods = put_plain_methods(module)
        self._checkpoints.check_plugin()
        clip_value = clip_value_in_backward(trainer, module, self.precision_plugin) if self._updates(fitting) else None
        if self._engine is None:
            if layer_sync is not None:  # before sharding: these layers' code is what a region compiles
                layer_sync.apply(module)
                self._revert_layers = partial(layer_sync.revert, module)
            self.model = self.precision_plugin.convert_module(module)
            autocast, settings = autocast_dtype(self.precision_plugin), trainer_settings(trainer)
            backend = self._get_process_group_backend()
            nodes = self.num_nodes
            self._use(Engine(module, self.root_device, config, dtype, backend, autocast, settings, nodes))
            self.model_to_device()
        if fitting:  # after the ranks were compared
            check_has_parameters(module)
        prepare_callbacks(trainer, module, self.engine)
        if self.engine.steps.in_backward is not None:
            self.engine.steps.in_backward.clip_value = clip_value
        if fitting:
            self.setup_optimizers(trainer)
            self._announce(self._raw_optimizers, trainer.accumulate_grad_batches)
        self.setup_precision_plugin()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with nullcontext() if self._engine is None else self._engine.giving_masters():
            super().setup_optimizers(trainer)

    def _updates(self, fitting: bool) -> bool:
        return fitting and self.config.optimizer_in_backward

    def _chosen(self, trainer: pl.Trainer, dtype: torch.dtype | None) -> Config:
        """The options with a stage in place of "auto", see [Note: stage auto]."""
        if self.config.stage != "auto":
            return self.config
        revert = put_plain_methods(self._module)
        try:
            return self._choose(
                self.config,
                self._module,
                self.root_device,
                compute_dtype=dtype,
                autocast_dtype=autocast_dtype(self.precision_plugin),
                batch=self._plan_batch,
                accumulate=trainer.accumulate_grad_batches,
                nodes=self.num_nodes,
            )
        finally:
            if revert is not None:
                revert()

    @override
    def model_to_device(self) -> None:
        place(self._module, self.root_device)  # sharding has moved each parameter and buffer when its turn came

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if getattr(self, "_engine", None) is None or self.lightning_module is None:  # also in a copy of the strategy
            return
        if self._module.trainer.state.fn == TrainerFn.FITTING:  # else they are those of a fit that has ended
            self.engine.attach_optimizers([_raw(optimizer) for optimizer in optimizers])
            self._checkpoints.attach(self._module)

    # ---- steps ----

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        step = self.engine.training_step(module.automatic_optimization)
        with self.precision_plugin.train_step_context(), step:
            return module.training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context(), self._evaluation_step("a validation"):
            return self._module.validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context(), self._evaluation_step("a test"):
            return self._module.test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context(), self._evaluation_step("a prediction"):
            return self._module.predict_step(*args, **kwargs)

    def _evaluation_step(self, what: str) -> AbstractContextManager[None]:
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        return self._evaluation.step(self.engine, what, fitting, lambda: self._evaluation_loop._data_fetcher.done)

    @property
    def _evaluation_loop(self) -> Any:
        trainer: Any = self._module.trainer
        return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Does what Lightning's does. `on_after_backward` runs after the end of the backward, which may still wait for
        reductions and updates of units, and so finds the same on all ranks."""
        module, plugin = self._module, self.precision_plugin
        with self.engine.backward(closure_loss):
            self.pre_backward(closure_loss)
            closure_loss = plugin.pre_backward(closure_loss, module)
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients of the backwards inside wait for the next backward outside (see ``defer_grad_sync``)."""
        with self.engine.accumulation():
            yield

    @override
    def on_train_end(self) -> None:
        self.engine.runtime.pass_mark("the end of training")

    @override
    def on_validation_start(self) -> None:
        self._evaluation.begin(self.engine, self._evaluation_loop)

    @override
    def on_test_start(self) -> None:
        self._evaluation.begin(self.engine, self._evaluation_loop)

    @override
    def on_predict_start(self) -> None:
        self._evaluation.begin(self.engine, self._evaluation_loop)

    @override
    def on_validation_end(self) -> None:
        self._evaluation.end()
        self.engine.runtime.pass_mark("the end of validation")

    @override
    def on_test_end(self) -> None:
        self._evaluation.end()
        self.engine.runtime.pass_mark("the end of the test")

    @override
    def on_predict_end(self) -> None:
        self._evaluation.end()
        self.engine.runtime.pass_mark("the end of prediction")

    # ---- state ----

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's shards, or its full values on the CPU of rank 0 and nothing on the other ranks; collective."""
        self._meet("a checkpoint")
        if self._engine is not None:
            self._engine.runtime.pass_mark("a checkpoint")
            self._engine.apply_writes()
        return self._checkpoints.model_state(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._meet("a checkpoint: an optimizer's state")
        return self._checkpoints.optimizer_state(_raw(optimizer))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        before_optimizer_state(self._module.trainer, self._module)
        self._checkpoints.load_optimizers(self._raw_optimizers, checkpoint["optimizer_states"])
        self.engine.steps.restored()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        self._meet("a checkpoint: saving")
        if self.choice is not None:
            checkpoint = {**checkpoint, "zerocompile": self.choice.as_dict()}
        self._checkpoints.save(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        if weights_only is None and isinstance(self._launcher, KeepsWeightsOnly):
            weights_only = self._launcher.weights_only  # see [Note: weights_only]
        return self._checkpoints.load(checkpoint_path, weights_only, self._module, fitting)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        self._checkpoints.remove(filepath)

    # ---- Lightning's own collectives, see meetings.py ----

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._meet("a barrier")
        super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        self._meet("a broadcast")
        return super().broadcast(obj, src)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if group is None:
            self._meet("`all_gather`")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if group is None and isinstance(tensor, Tensor):
            self._meet("the reduction of a logged value or of a decision")
        return super().reduce(tensor, group, reduce_op)

    # ---- the end ----

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True  # ranks may be out of step: no collective from here on
        with keep_first_error(True, "the end of the evaluation"):
            self._evaluation.end(exception)
        with keep_first_error(True, "telling the other ranks"):
            self._tell(exception)

    def _tell(self, exception: BaseException) -> None:
        """Says in the exception what is known of its cause, and tells the others that this rank ends."""
        explained = explain(str(exception)) if type(exception) is RuntimeError else None
        if explained is not None:  # a hook raised it, outside of steps
            exception.args = (explained,)
        knot = None if self.messages is None else self.messages.last_knot
        if knot is not None and isinstance(exception, RuntimeError) and is_communication(exception):
            exception.args = (f"{knot}\nThis rank's own error: {exception}",)
        if self.messages is not None:
            ended = self.messages.ended
            if ended is not None and ended not in str(exception) and isinstance(exception, RuntimeError):
                exception.args = (f"{ended}\nThis rank's own error: {exception}",)
            self.messages.leave(f"{type(exception).__name__}: {exception}")
            drained = self.engine.runtime.drained(_DRAINS)
            if not drained:  # the rest of the tear-down waits for the device
                self.messages.end(f"zerocompile: rank {self.global_rank} has ended its run: {exception}")
                if isinstance(exception, CommunicationError):
                    exception.args = (f"{exception}\n{START_ANEW}",)

    @override
    def teardown(self) -> None:
        failed = self._failed
        with keep_first_error(failed, "the end of the run"):
            if not failed:
                _optimizers_to_device(self.optimizers, torch.device("cpu"))
            if failed or self.config.unshard_after_fit:
                self._close(failed)
        with keep_first_error(failed, "taking back what was changed in the module"):
            if self._engine is None:
                self._restore_module()  # also if set-up has failed half-way
            if self._engine is None and self.lightning_module is not None and not failed:
                self.lightning_module.cpu()
        with keep_first_error(failed, "the teardown"):
            if self.cluster_environment is not None:
                self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            if self.accelerator is not None and not failed:  # on a device it waits for collectives of other ranks
                self.accelerator.teardown()
        if failed:
            self._checkpoints.abandon()
        else:
            self._checkpoints.finish()

    @override
    def _close(self, failed: bool = False) -> None:
        if self._engine is not None:
            super()._close(failed)
            self._checkpoints.note_whole(self._module)
            self._restore_module()

    @override
    def _use(self, engine: Engine | None) -> None:
        super()._use(engine)
        if engine is not None:
            this = weakref.WeakMethod(self._where)  # weak: the C++ core holds `messages`, where gc sees no cycles
            engine.runtime.messages.where = lambda: where() if (where := this()) is not None else ""
        if isinstance(self.precision_plugin, StepsThroughEngine):
            self.precision_plugin.engine = engine

    def _where(self) -> str:
        hook = None if self.lightning_module is None else self.lightning_module._current_fx_name
        return f", in `{hook}`" if hook else ""

    def _restore_module(self) -> None:
        """Takes back what set-up changed in the module beside its parameters."""
        if isinstance(self.precision_plugin, StepsThroughEngine):
            self.precision_plugin.restore_module()
        for revert in (self._revert_layers, self._revert_methods):
            if revert is not None:
                revert()
        self._revert_layers = self._revert_methods = None

    @property
    def _raw_optimizers(self) -> list[Optimizer]:
        return [_raw(optimizer) for optimizer in self.optimizers]

    @property
    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("The strategy has no LightningModule; it gets it from the Trainer.")
        return self.lightning_module

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_engine": None,
            "messages": None,
            "_evaluation": UnequalEvaluation(whole=self.config.unequal_work == "evaluation"),
            "_chosen_for": None,
            "_revert_layers": None,
            "_revert_methods": None,
        }

    def __repr__(self) -> str:
        # the Trainer of pytorch_lightning and Fabric refuse this strategy and print it
        return f"<{type(self).__name__}(stage={self.config.stage}) for lightning.Trainer (`import lightning as L`)>"


def _raw(optimizer: Optimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
