"""One sharded, compiled model, without Lightning: the strategies' hooks call its methods."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile.checkpoint.state import serving_full_values
from lightning_zerocompile.compile.regions import Regions, top_level_modules
from lightning_zerocompile.config import Config
from lightning_zerocompile.engine.ending import Ending
from lightning_zerocompile.optim.hooks import OptimizerSteps
from lightning_zerocompile.ranks.abort import refuse_ended_group
from lightning_zerocompile.ranks.errors import keep_first_error
from lightning_zerocompile.ranks.groups import Groups, inner_size, shard_groups
from lightning_zerocompile.runtime.gather_watch import GatherWatch
from lightning_zerocompile.runtime.memory_budget import MemoryBudget
from lightning_zerocompile.runtime.runtime import Runtime
from lightning_zerocompile.runtime.window import Windows
from lightning_zerocompile.sharding.autocast import cast_inputs
from lightning_zerocompile.sharding.buffers import Buffers, move_buffers
from lightning_zerocompile.sharding.checks import (
    check_equal_on_all_ranks,
    check_equal_optimizers,
    explain,
    settings_of,
    warn_of_shared_memory,
)
from lightning_zerocompile.sharding.float8 import plain_weights
from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.islands import Islands, find_islands
from lightning_zerocompile.sharding.master import as_plain_tensors, gradient_of
from lightning_zerocompile.sharding.module_swap import (
    BASE,
    PARAMETERS,
    modules_of,
    refresh_all,
    swap_others,
    take_over,
)
from lightning_zerocompile.sharding.parameter import ShardedParameter
from lightning_zerocompile.sharding.plan import UnitPlan, check_names, plan_units


class Engine(Ending):
    """Shards and compiles ``model``; collective over the default process group.

    Args:
        model: holds full parameters on any device, possibly on meta; rank 0's values count, as in DDP.
        device: of this rank.
        config: the strategy's options.
        compute_dtype: what floating-point parameters are gathered in; ``None``: their own dtype.
        backend: of the process groups.
        autocast_dtype: of the autocast that every step runs under; ``None``: there is none.
        settings: other settings that all ranks must have alike, by name.
        nodes: number of hosts.

    Raises:
        ValueError: `device_mesh` or `reshard_after_forward` does not fit the ranks, or an option names what
            is not in the model.
        RuntimeError: the ranks hold different models, options or versions; a parameter is a shard that a failed run has
            left, is on a foreign device or cannot be initialised.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        config: Config,
        compute_dtype: torch.dtype | None,
        backend: str,
        autocast_dtype: torch.dtype | None = None,
        settings: Mapping[str, str] | None = None,
        nodes: int = 1,
    ) -> None:
        self.model, self.device, self.config = model, device, config
        refuse_ended_group()
        plain_weights(model)
        take_over(model)
        # before the comparison: a part of a mesh raises for what it is, not as ranks with other options
        rows = shard_groups(config, nodes, device.type)
        check_equal_on_all_ranks(model, settings_of(config) | dict(settings or {}))
        warn_of_shared_memory(model, device)
        inner = inner_size(config.reshard_after_forward, nodes, rows)
        check_names(model, config.kept_names)
        islands = find_islands(model, config.fp32_modules, compute_dtype, autocast_dtype)
        one_graph = config.compile == "model"
        units = plan_units(model, config.unit_bytes, compute_dtype, config.kept_names, one_graph, islands)
        has_blocks = any(unit.block is not None for unit in units)
        if config.checkpointed and not has_blocks:
            raise RuntimeError(
                f"recompute='blocks': {type(model).__name__} has no repeated blocks "
                "(siblings of one class with equal parameters). Call `torch.utils.checkpoint.checkpoint` in its "
                "`forward` instead, or use a number, which needs none."
            )
        if config.activation_offload and not has_blocks:
            raise RuntimeError(
                f"activation_offload: {type(model).__name__} has no repeated blocks (siblings of one class with equal "
                "parameters), and what other modules save stays on the device. Drop the option, or use "
                "`torch.autograd.graph.save_on_cpu` in its `forward`."
            )
        self._groups = Groups.make(device, backend, config.timeout, rows, inner, nodes)
        self._groups.connect(device)
        self.units = tuple(units)
        self._watched = None
        self.runtime = Runtime(self._groups, device, config)
        # in the reductions' group: in the gathers' group it would wait for all gathers that the optimizer has started
        self.buffers = Buffers(model, self._groups.everyone, self.runtime.meetings.meet_in_step)
        self.budget, self.gather_watch = MemoryBudget(self.runtime), GatherWatch(self.runtime)
        self.steps = OptimizerSteps(
            self.runtime, self.reduce_pending, self.check_reducible, self.budget.optimizer_stepped
        )
        try:
            self.runtime.shard(model, units, compute_dtype, autocast_dtype, islands)
            move_buffers(model.modules(), device)
            self.buffers.broadcast()
            self.regions = Regions(self.runtime, config)
            self._add_regions(units, islands)
            swap_others(self.runtime.classes, model)
            if self.regions.compiled:
                self._watched = weakref.finalize(self, self.regions.progress.watch())
        except BaseException:
            with keep_first_error(True, "the end of the set-up"):
                self.abandon()
            raise
        self.windows = Windows(self.runtime)
        in_backward, windows = self.steps.in_backward, self.windows
        if in_backward is not None:
            in_backward.waits = lambda: windows.is_open or windows.in_accumulation
        self._has_cuda_graphs = config.cuda_graphs
        self._accumulates_locally = self.runtime.policy.accumulates_locally or config.defer_grad_sync

    def _add_regions(self, units: Sequence[UnitPlan], islands: Islands) -> None:
        blocks = [(plan.name, plan.block) for plan in units if plan.block is not None]
        for name, block in blocks:
            if self.config.compile != "model":
                self.regions.add(name, block, [self.runtime.unit_of[name]])
        if self.config.compile == "model" or (self.config.compile == "blocks" and not blocks):
            for name, module in top_level_modules(self.model):
                self.regions.add(name, module, [])
        if self.config.compile == "blocks" and blocks:
            inside = {inner for _, block in blocks for inner in block.modules()}
            self._add_leaves(inside)
        if self.config.param_dtype is not None:
            children = [child for _, child in top_level_modules(self.model)]
            in_islands = {inner for name in islands.modules for inner in self.model.get_submodule(name).modules()}
            modules = [self.model, *children, *(block for _, block in blocks)]
            cast_inputs([module for module in modules if module not in in_islands], self.config.param_dtype)

    def _add_leaves(self, inside: set[nn.Module]) -> None:
        """Layers of torch's that are not ``inside`` of another region."""
        for name, module in self.model.named_modules():
            sharded_parameters = module.__dict__.get(PARAMETERS, {})
            units = {self.runtime.unit_of_parameter(sharded) for sharded in sharded_parameters.values()}
            plain = getattr(type(module), BASE, type(module)).__module__.startswith("torch.nn.modules.")
            plain = plain and getattr(module, "max_norm", None) is None  # such an embedding writes to its weight
            if module not in inside and plain and len(units) == 1 and next(module.children(), None) is None:
                self.regions.add_leaf(name, module, units.pop())

    # ---- steps ----

    @contextlib.contextmanager
    def training_step(self, automatic: bool = True) -> Iterator[None]:
        """Around the user's training step, and around the backwards inside it.

        ``automatic``: see :meth:`begin_training_step`.
        """
        self.begin_training_step(automatic)
        self.runtime.step_state.has_loss = True
        with self.runtime.forward(), self._user_code():
            yield

    def begin_training_step(self, automatic: bool = True) -> None:
        """What all ranks do before a training step; collective.

        ``automatic``: not a step of manual optimization, see [Note: buffers].
        """
        if self.runtime.core.unequal():
            self.runtime.core.meet_others("a training step")
        self._begin("a training step")
        if self.runtime.core.resident_units():  # a forward outside of steps, without backward
            self.runtime.core.end_forward()
        if not (self.windows.is_open or self.windows.in_accumulation):
            self.budget.spend()
        self.gather_watch.step_begins()
        self.runtime.casts.begin_step()
        modules = modules_of(self.model)
        refresh_all(self.model, modules, self.runtime.step_state)
        self.buffers.before_forward(automatic and not self.windows.in_accumulation, modules)

    @contextlib.contextmanager
    def evaluation_step(self, what: str = "an evaluation", fitting: bool = False) -> Iterator[None]:
        """Around a step without backward: after it nothing stays gathered. In a fit all ranks get rank 0's buffers, see
        [Note: buffers]."""
        self.gather_watch.step_ends()
        self._begin(f"{what} step")
        if fitting and not self.runtime.core.unequal():
            self.buffers.before_forward()
        raised = True
        self.runtime.core.set_evaluates(True)
        try:
            with self.runtime.forward(), self._user_code():
                yield
            raised = False
        finally:
            self.runtime.core.set_evaluates(False)
            self.runtime.core.end_forward(raised)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward of a loop that does not say where its steps begin; several may belong to one backward."""
        if not torch.is_grad_enabled():
            with self.evaluation_step(fitting=True):
                yield
            return
        if self.windows.is_open or self.runtime.core.unequal():  # there their numbers may differ between ranks
            with self.runtime.forward(), self._user_code():
                yield
        else:
            with self.training_step():
                yield
        moment = self.runtime.step_state
        moment.awaits_backward = moment.has_loss = True

    def check_unchanged(self) -> None:
        """Lets the compiler see the parameters as they are now; raises as :func:`refresh_all`."""
        refresh_all(self.model, modules_of(self.model), self.runtime.step_state)

    def _begin(self, what: str) -> None:
        self.windows.meet_again()
        self.runtime.pass_mark(what)
        if self._has_cuda_graphs:  # see [Note: CUDA graphs]
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _user_code(self) -> Iterator[None]:
        """In this context a parameter with which user code computes is its full value, see [Note: masters]."""
        moment = self.runtime.step_state
        before, moment.in_step = moment.in_step, True
        self.runtime.core.set_in_step(True)
        try:
            yield
        except RuntimeError as error:
            explained = explain(str(error), self.config.param_dtype)
            if explained is None:
                raise
            raise RuntimeError(explained) from error
        finally:
            moment.in_step = before
            self.runtime.core.set_in_step(before)

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Tells the runtime when the outermost backward starts, that is when the gradient of the loss is computed, and
        how it ends: it may raise, and the engine's callback may have come in a nested backward. User code that runs in
        the backward of a step's loss is part of the step.
        """
        moment = self.runtime.step_state
        moment.awaits_backward = False
        if self.steps.in_backward is not None:
            self.steps.in_backward.begins()
        if loss.requires_grad and loss.grad_fn is not None:
            loss.register_hook(self._arm)  # type: ignore[no-untyped-call]
        if not (self.windows.is_open or self.windows.in_accumulation):
            self.steps.backward_begins()
        before, outside = moment.in_step, isinstance(loss, DTensor)  # a shard: computed outside of steps
        moment.in_step = not outside and (before or moment.has_loss)
        if not outside and not self.windows.is_open:  # which may have several losses, and then their backwards
            moment.has_loss = False
        try:
            yield
        except BaseException:
            self.runtime.core.backward_raised()
            self.steps.backward_failed()
            raise
        finally:
            moment.in_step = before
        self.runtime.core.finish_backward()
        if self.runtime.activations is not None:
            self.runtime.activations.settle()
        self.end_backward()

    def end_backward(self) -> None:
        """After a backward or a window: see [Note: optimizer in backward]."""
        if self.steps.in_backward is not None:
            self.steps.in_backward.ends()

    def _arm(self, grad: Tensor) -> None:
        self.runtime.core.arm()

    @contextlib.contextmanager
    def accumulation(self) -> Iterator[None]:
        """Backwards that are not the last of an accumulation."""
        if self.windows.is_open:
            raise RuntimeError(
                "An accumulation cannot start inside `coalesce_grad_reduction`; the window defers already."
            )
        before, self.windows.in_accumulation = self.windows.in_accumulation, True
        try:
            self._defer(True)
            if self.steps.in_backward is not None:
                self.steps.in_backward.pause(True)
            yield
            self.runtime.core.finish_backward()  # a raw `backward` may have left this to the next one
        except BaseException:
            self.runtime.core.drop_failed_backward()
            raise
        finally:
            self.windows.in_accumulation = before
            if not before:
                self._defer(False)
                if self.steps.in_backward is not None:
                    self.steps.in_backward.pause(False)

    def _defer(self, deferred: bool) -> None:
        """The reductions of backwards that come now, or their second part, see [Note: partial reductions] in csrc."""
        if self._accumulates_locally:
            self.runtime.core.set_deferred(deferred)
        else:
            self.runtime.core.set_partial(deferred)

    def reduce_pending(self, action: str) -> None:
        """Reduces gradients that an accumulation has left for a backward that did not come; ``action`` needs them.

        Raises:
            RuntimeError: a window or ``full_parameters`` is open, or the last backward raised.
        """
        self.check_reducible(action)
        if self.runtime.core.unequal():
            self.runtime.core.meet_others(action)
        if self.runtime.core.pending():
            self.runtime.core.flush()

    def check_reducible(self, action: str) -> None:
        """Raises RuntimeError if a window or ``full_parameters`` is open."""
        if self.windows.is_open:
            raise RuntimeError(
                f"{action} inside `coalesce_grad_reduction`: the gradients are not reduced yet. Do it after the "
                "window has closed."
            )
        lent = self.runtime.core.lent_unit()
        if lent:
            raise RuntimeError(
                f"{action} inside `full_parameters`, which holds `{lent}`: what it updates would not be what the "
                "values show. Do it after it has been left."
            )

    # ---- optimizers ----

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """See :meth:`OptimizerSteps.attach`.

        Raises:
            RuntimeError: as there; or the ranks have different optimizers.
        """
        if optimizers:
            self.check_unchanged()
        self.steps.attach(optimizers)
        if optimizers:
            names: dict[Tensor, str] = {sharded.master: sharded.name for sharded in self.runtime.sharded_parameters}
            check_equal_optimizers(optimizers, names, self.runtime.messages)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], runs_backward: bool = False, **kwargs: Any) -> Any:
        """See :meth:`OptimizerSteps.step`."""
        return self.steps.step(optimizer, closure, runs_backward, **kwargs)

    # ---- values ----

    def apply_writes(self) -> None:
        """Takes over what user code wrote to gathered values; collective."""
        self.check_unchanged()
        self.runtime.core.write_back()

    @contextlib.contextmanager
    def giving_masters(self) -> Iterator[None]:
        """Optimizers are made in this context, see [Note: parameters by identity]."""
        state = self.runtime.step_state
        before, state.gives_masters = state.gives_masters, True
        try:
            yield
        finally:
            state.gives_masters = before

    @contextlib.contextmanager
    def full_parameters(self, module: nn.Module, writeback: bool) -> Iterator[dict[str, Tensor]]:
        """See :meth:`ZeroCompileStrategy.full_parameters`."""
        if not self.runtime.step_state.in_step:  # in a step `functional_call` may have replaced some for a while
            self.check_unchanged()
        sharded_parameters = _slots_of(module)
        units = sorted({self.runtime.unit_of_parameter(sharded) for sharded in sharded_parameters.values()})
        core = self.runtime.core
        core.lend(units)
        try:
            with torch.no_grad(), self.runtime.ordinary_saving():
                yield {name: core.lent_value(sharded.index) for name, sharded in sharded_parameters.items()}
        except BaseException:
            core.take_back(units, False, False)
            raise
        core.take_back(units, writeback, True)

    @contextlib.contextmanager
    def full_state_dict(self, module: nn.Module) -> Iterator[dict[str, Any]]:
        """See :meth:`ZeroCompileStrategy.full_state_dict`."""
        self.runtime.reads.compare(f"`full_state_dict` of {len(_slots_of(module))} parameters")
        self.apply_writes()
        first = dist.get_rank() == 0
        with serving_full_values(module, first):
            yield dict(module.state_dict()) if first else {}

    def full_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        """See :meth:`ZeroCompileStrategy.full_gradients`."""
        self.reduce_pending("`full_gradients`")
        if self.runtime.step_state.updated:
            raise RuntimeError(
                "`full_gradients` between a backward and its step: with optimizer_in_backward=True the backward has "
                "used the gradients. Drop the option, or take them in a `register_post_accumulate_grad_hook`."
            )
        with torch.no_grad(), as_plain_tensors():
            found = {name: gradient_of(sharded.master) for name, sharded in _slots_of(module).items()}
            grads = {name: grad for name, grad in found.items() if isinstance(grad, DTensor)}
            self.runtime.reads.compare(f"`full_gradients` of {len(grads)} parameters")
            return {name: full_value(grad).clone() for name, grad in grads.items()}


def _slots_of(module: nn.Module) -> dict[str, ShardedParameter]:
    """The records of the module's parameters, by their names in ``module``."""
    return {
        f"{prefix}.{name}" if prefix else name: sharded
        for prefix, inner in module.named_modules()
        for name, sharded in inner.__dict__.get(PARAMETERS, {}).items()
    }
