"""The strategy of Lightning Fabric: its calls in the order of a plain loop, each delegating to the same engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import update_wrapper
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher
from lightning.fabric.strategies.strategy import Strategy, _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _PATH
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zerocompile.arguments import takes_options
from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.engine_owner import EngineOwner, check_device
from lightning_zerocompile.optim.in_backward import CLIPPING
from lightning_zerocompile.plugins.clipping import clip_norm, clip_value, refuse_scaling
from lightning_zerocompile.plugins.compiled_module import put_plain_methods, warn_if_compiled
from lightning_zerocompile.plugins.fabric_precision import (
    FabricHalfPrecision,
    autocast_dtype,
    compute_dtype,
    convert_plugin,
    scaled_step,
    unscale,
)
from lightning_zerocompile.plugins.grad_scaler import ShardedGradScaler
from lightning_zerocompile.plugins.launcher import FabricLauncher, forks
from lightning_zerocompile.ranks.abort import destroy_group_at_exit
from lightning_zerocompile.ranks.errors import TEARDOWN, in_phases, phase
from lightning_zerocompile.sharding.checks import check_has_parameters
from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.meta_init import place

# how an error of communication names the method in which it was raised
_PHASES = {
    "setup_module": "the set-up of the module",
    "setup_optimizer": "the set-up of an optimizer",
    "optimizer_step": "the optimizer's step",
    "clip_gradients_norm": "clipping",
    "clip_gradients_value": "clipping",
    "save_checkpoint": "a checkpoint: saving",
    "load_checkpoint": "a checkpoint: loading",
    "barrier": "a barrier",
    "broadcast": "a broadcast",
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "teardown": TEARDOWN,
}
_NAMES = "fabric_names"  # entry of a directory of shards: the keys of the module and the optimizers in the user's state


class _ShardedForward(nn.Module):
    """What Fabric calls: the user's module, in a step of the engine."""

    def __init__(self, module: nn.Module, strategy: ZeroCompileFabricStrategy) -> None:
        super().__init__()
        self.module = module
        self._strategy = weakref.ref(strategy)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore] # `fabric.setup(torch.compile(module))`
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy()
        engine = None if strategy is None else strategy._engine
        with nullcontext() if engine is None else engine.forward():  # None: the module was made whole
            return self.module(*args, **kwargs)


class _BackwardSync(_BackwardSyncControl):
    def __init__(self, strategy: ZeroCompileFabricStrategy) -> None:
        self._strategy = weakref.ref(strategy)

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        strategy = self._strategy()
        return strategy.engine.accumulation() if enabled and strategy is not None else nullcontext()


C = TypeVar("C", bound=Callable[..., Any])


def _wraps_lightnings(backward: C) -> C:
    """Tells Fabric that this method does what Lightning's own does.

    Else a model's output raises in every backward but ``fabric.backward``: in ``torch.autograd.grad`` (a gradient
    penalty), and in ``loss.backward()``. These need nothing of the method.
    """
    update_wrapper(backward, Strategy.backward)
    return backward


@in_phases(_PHASES)
class ZeroCompileFabricStrategy(EngineOwner, DDPStrategy):
    """Trains one module in a plain loop with ZeRO stage 1, 2 or 3; torch.compile places the communication.

    Its arguments are the options of :class:`~lightning_zerocompile.config.Config`, and those that Fabric's strategies
    have in common. ``fabric.setup`` shards the module; :meth:`unshard` makes it an ordinary one again.
    """

    _not_sharded = "The model is not sharded: this works after `fabric.setup` or `fabric.setup_module`."

    @takes_options
    def __init__(
        self,
        config: Config,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        EngineOwner.__init__(self, config, checkpoint_io)
        DDPStrategy.__init__(
            self,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,  # Fabric looks whether there is one
            precision=precision,
            process_group_backend=config.process_group_backend,
            timeout=config.timeout,
        )
        if config.unequal_work:
            raise ValueError(
                f"`unequal_work={config.unequal_work!r}` is for the Trainer, which knows where evaluations begin; "
                "in a plain loop write `with fabric.strategy.unequal():` around unequal work, on all ranks."
            )
        self._revert_methods: Callable[[], object] | None = None  # while the module is not torch.compile's
        self._backward_sync_control = _BackwardSync(self)
        self._optimizers: list[Optimizer] = []
        self._backwards = 0

    # ---- before anything is set up ----

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._precision = convert_plugin(precision)
        if isinstance(self._precision, FabricHalfPrecision):
            self._precision.fp32_modules = self.config.fp32_modules

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is None:
            return
        if forks(self):
            self._launcher = _MultiProcessingLauncher(self, start_method="fork")
        else:
            self._launcher = FabricLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        check_device(self.root_device)
        first = not dist.is_initialized()
        super().setup_environment()
        if first:
            destroy_group_at_exit()

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Parameters are made on the CPU, so that no device holds the whole model, or with ``empty_init`` on the meta
        device, from which ``setup`` initialises them unit by unit."""
        stack = ExitStack()
        stack.enter_context(self.precision.module_init_context())
        if empty_init:
            stack.enter_context(torch.device("meta"))
        return stack

    # ---- set-up ----

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing: ``setup_module`` moves each parameter when it is sharded."""

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Shards the module.

        Raises:
            RuntimeError: a module is sharded already, or the ranks hold different ones.
            MisconfigurationException: a precision, a plugin or a compiled part is not supported.
        """
        if self._engine is not None:
            raise RuntimeError(
                "`strategy='zerocompile'` shards one module, and one is set up already. Put the modules into one "
                "(`torch.nn.ModuleDict`) and set that up, or call `fabric.strategy.unshard()` first."
            )
        warn_if_compiled(module)
        self._checkpoints.check_plugin()
        if self.config.optimizer_in_backward:
            refuse_scaling(self._scaler, str(self.precision.precision))
        dtype = compute_dtype(self.precision, self.config.param_dtype)
        settings = {"`Fabric(precision=)`": repr(self.precision.precision)}
        autocast, backend = autocast_dtype(self.precision), self._get_process_group_backend()
        self._revert_methods = put_plain_methods(module)
        try:
            nodes = self.num_nodes
            config = self._choose(
                self.config,
                module,
                self.root_device,
                compute_dtype=dtype,
                autocast_dtype=autocast,
                optimizer=torch.optim.AdamW,  # assumed: the loop's own optimizers are set up later
                nodes=nodes,
            )
            self._use(Engine(module, self.root_device, config, dtype, backend, autocast, settings, nodes))
        except BaseException:
            self._restore_methods()
            raise
        try:  # after the ranks were compared
            check_has_parameters(module)
        except RuntimeError:
            self._close()
            raise
        place(module, self.root_device)
        self._checkpoints.attach(module)
        return _ShardedForward(module, self)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Lets the engine step the optimizer.

        Raises:
            RuntimeError: no module is set up, or the optimizer holds parameters that are not the module's.
        """
        return self._attach([optimizer])[0]

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        made = self.setup_module(module), self._attach(optimizers), scheduler
        self._announce(self._optimizers)
        return made

    def _attach(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        self.engine.attach_optimizers([*self._optimizers, *optimizers])
        self._optimizers += optimizers
        return optimizers

    # ---- a step ----

    @override
    @contextmanager
    def unequal(self) -> Iterator[None]:
        runtime = self.engine.runtime
        if torch.is_grad_enabled() and runtime.gathers_at_use and not runtime.core.unequal():
            self.engine.begin_training_step()  # inside, a rank may run any number of forwards
        with super().unequal():
            yield

    @_wraps_lightnings
    @phase("backward")
    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._backwards += 1
        with self.engine.backward(tensor):
            super().backward(tensor, module, *args, **kwargs)

    @override
    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        self._prepare_clipping(optimizer)
        with self.engine.runtime.reads.alike():
            norm = clip_norm(self.precision.main_params(optimizer), *args, **kwargs)
        return full_value(norm) if isinstance(norm, DTensor) else norm

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        self._prepare_clipping(optimizer)
        with self.engine.runtime.reads.alike():
            clip_value(self.precision.main_params(optimizer), clip_val)

    def _prepare_clipping(self, optimizer: Optimizer) -> None:
        if self.config.optimizer_in_backward:
            raise RuntimeError(CLIPPING.format("`fabric.clip_gradients`"))
        self.engine.reduce_pending("Clipping")
        if self._scaler is not None:
            unscale(self.engine, self._scaler, optimizer, self._backwards)

    @property
    def _scaler(self) -> ShardedGradScaler | None:
        scaler = getattr(self.precision, "scaler", None)
        return scaler if isinstance(scaler, ShardedGradScaler) and scaler.is_enabled() else None

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] = lambda: None, **kwargs: Any) -> Any:
        if self._scaler is not None:
            return scaled_step(self.engine, self._scaler, optimizer, closure, self._backwards)
        return self.engine.step(optimizer, closure, **kwargs)

    # ---- state ----

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The sharded module's shards, or its full values on the CPU of rank 0 and nothing on the other ranks."""
        inner = _inner(module)
        if self._engine is None or inner is not self._engine.model:
            return super().get_module_state_dict(inner)
        self._engine.runtime.pass_mark("a checkpoint")
        self._engine.apply_writes()
        return self._checkpoints.model_state(inner)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer of the sharded module, in the same form as :meth:`get_module_state_dict`.

        Fabric's optimizer returns it as its ``state_dict()``, and loads what it is given by torch's own
        ``load_state_dict``. So ranks without full tensors return their rows.
        """
        if self._engine is None or not self._has(optimizer):
            return super().get_optimizer_state(optimizer)
        return self._checkpoints.optimizer_state(optimizer) or optimizer.state_dict()

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        _inner(module).load_state_dict(state_dict, strict=strict)

    @override
    def save_checkpoint(
        self, path: _PATH, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """One file as DDP's, or a directory to which all ranks write (``state_dict_type="sharded"``).

        Raises:
            ValueError: a directory was asked for, and the state does not hold the module.
        """
        converted = self._convert_stateful_objects_in_state(state, filter or {})
        if self.config.state_dict_type == "sharded":
            converted = self._for_directory(state, converted)
        self._checkpoints.save(converted, path, storage_options)

    def _for_directory(self, state: dict[str, Any], converted: dict[str, Any]) -> dict[str, Any]:
        """The dictionary that :mod:`checkpoint.directory` writes, with the user's keys beside it."""
        modules = [key for key, value in state.items() if _inner(value) is self.engine.model]
        if len(modules) != 1:
            raise ValueError(
                f"state_dict_type='sharded' saves the module that was set up: the state must hold it once, and holds "
                f"it {len(modules)} times. Use state_dict_type='full' for anything else."
            )
        optimizers = [key for key, value in state.items() if self._has(value)]
        rest = {key: value for key, value in converted.items() if key not in (modules[0], *optimizers)}
        return {
            "state_dict": converted[modules[0]],
            "optimizer_states": [converted[key] for key in optimizers],
            _NAMES: {"module": modules[0], "optimizers": optimizers, "rest": rest},
        }

    @override
    def load_checkpoint(
        self, path: _PATH, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        module = nn.Module() if self._engine is None else self._engine.model
        loaded = self._checkpoints.read(path, weights_only, module, with_optimizers=True)
        if isinstance(names := loaded.get(_NAMES), dict):
            states = dict(zip(names["optimizers"], loaded.get("optimizer_states", []), strict=True))
            loaded = {names["module"]: loaded["state_dict"], **states, **names["rest"]}
        if not state:
            return loaded
        if not isinstance(state, dict):
            self._restore(state, loaded, strict)
            return {}
        _validate_keys_for_strict_loading(state.keys(), loaded.keys(), strict=strict)
        for key in [key for key in state if key in loaded]:
            value = loaded.pop(key)
            if not self._restore(state[key], value, strict):
                state[key] = value
        return loaded

    def _has(self, thing: Any) -> bool:
        """Whether this is an optimizer of the sharded module."""
        return any(optimizer is thing for optimizer in self._optimizers)

    def _restore(self, thing: Any, value: Any, strict: bool) -> bool:
        """Loads ``value`` into ``thing`` if that has a state; returns whether it has one."""
        if isinstance(thing, nn.Module):
            self.load_module_state_dict(thing, value, strict)
        elif self._has(thing):
            self._checkpoints.load_optimizers([thing], [value])
            self.engine.steps.restored()
        elif hasattr(thing, "load_state_dict"):
            thing.load_state_dict(value)
        else:
            return False
        return True

    # ---- the end ----

    def unshard(self) -> None:
        """Makes the module an ordinary one with full parameters, on the CPU; collective."""
        self._close()
        self._optimizers = []

    @override
    def _close(self, failed: bool = False) -> None:
        super()._close(failed)
        self._restore_methods()

    def _restore_methods(self) -> None:
        if self._revert_methods is not None:
            self._revert_methods()
        self._revert_methods = None

    @override
    def teardown(self) -> None:
        self._close()
        self._checkpoints.finish()
        super().teardown()


def _inner(module: Any) -> Any:
    return module.module if isinstance(module, _ShardedForward) else module
