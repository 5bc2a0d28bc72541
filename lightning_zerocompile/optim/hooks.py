"""The steps of the model's optimizers: what must be ready before one, and what is released after it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from operator import is_
from types import MethodType
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_zerocompile.optim.by_unit import UnitStepper
from lightning_zerocompile.optim.in_backward import InBackward
from lightning_zerocompile.optim.offload import Offload
from lightning_zerocompile.optim.on_dtensors import on_dtensors
from lightning_zerocompile.optim.one_pass import OnePass
from lightning_zerocompile.optim.supported import (
    check_gradients,
    check_optimizers,
    is_elementwise,
    masters_of,
    sees_whole_values,
    shared_masters,
    steps_by_unit,
)
from lightning_zerocompile.optim.taken_over import (
    give_back,
    is_whole,
    sharded_states,
    take_masters,
)
from lightning_zerocompile.runtime.runtime import Runtime
from lightning_zerocompile.sharding.master import as_plain_tensors, bound_gradient, index_of
from lightning_zerocompile.sharding.unsharded import Unsharded


class OptimizerSteps:
    """Watches the steps of one model's optimizers.

    [Note: watched steps] torch calls no hook when ``step()`` raises. So ``step`` of each watched optimizer is wrapped,
    as torch's learning rate schedulers wrap it: by an attribute of the object. What a step has begun ends on every way
    out of it. Only a step that has succeeded releases gradients. After a step that raised they are what they were, as
    in torch. (An optimizer that updates unit by unit, or torch's own multi-tensor kernels, may have updated some of its
    parameters when it raises. Those that step unit by unit have released the gradients of the units that are updated,
    so that a retry updates the others.) A subclass's ``step`` may call its parent's: one step is the outermost call.
    ``type(optimizer).step(optimizer)`` bypasses the wrapper, so a pre-hook raises there.

    Args:
        runtime: holds the model's parameters.
        reduce_pending: reduces the gradients that wait for it. Its argument names the action that needs them. It raises
            RuntimeError where they cannot be reduced now.
        check_reducible: raises RuntimeError where a window or ``full_parameters`` is open, and reduces nothing; takes
            the same argument.
        stepped: called after each step that has succeeded.

    Attributes:
        last: the optimizers that were attached last; it stays as it is when none are attached (``attach([])``).
        count: how many steps have succeeded.
        updates: whether a step, or a backward, has begun to update parameters, and no step has succeeded since. So it
            stays true after a step that raised half-way.
        in_backward: updates units inside the backward; ``None`` without ``optimizer_in_backward``.
    """

    def __init__(
        self,
        runtime: Runtime,
        reduce_pending: Callable[[str], None],
        check_reducible: Callable[[str], None],
        stepped: Callable[[], None],
    ) -> None:
        self._runtime, self._config = runtime, runtime.config
        self._reduce_pending, self._check_reducible, self._stepped = reduce_pending, check_reducible, stepped
        self._backward_to_come: list[Optimizer] = []  # those whose `step` runs one in its closure
        self._offload = Offload(runtime)
        self._stepper = UnitStepper(
            runtime.units_in_order,
            self._units_written,
            self._kept,
            runtime.core,
            self._config.full_param_optimizers,
            self._offload,
            one_by_one=self._config.optimizer_in_backward,
            ranks=runtime.mesh.size(),
            one_pass=OnePass(runtime.core, runtime.device),
            begins=self._update_begins,
        )
        self._restore: dict[Optimizer, Callable[[], None]] = {}  # ends the watch over each
        self._taken: set[tuple[Any, ...]] = set()  # see check_gradients
        self._offloaded: list[list[Tensor]] = []  # what each optimizer had when it was offloaded
        self._taken_over: dict[Optimizer, None] = {}  # see [Note: optimizers made elsewhere]; in order
        self._running: list[Optimizer] = []  # their steps, the outermost first
        self._through_lightning: list[Optimizer] = []  # optimizers whose `step` runs through Lightning now
        self._released: dict[Optimizer, int] = {}  # `StepState.looks` at the end of each one's last step
        self._not_zeroed: set[Optimizer] = set()  # of these, when the last backward began
        self.in_backward: InBackward | None = None  # with `optimizer_in_backward`
        if self._config.optimizer_in_backward:
            self.in_backward = InBackward(runtime, self._stepper, self._offload, self._through_lightning)
        self._has_warned = False  # of gradients that are not zeroed
        self.count, self.updates = 0, False
        self.last: list[Optimizer] = []
        self._by_unit = False  # whether the running step has updated units

    # ---- which are watched ----

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Watches the optimizers' steps, and those of a former call no longer.

        Args:
            optimizers: all of the model. Those that were made before it was sharded are given its masters.

        Raises:
            RuntimeError: an optimizer holds parameters that are not the model's, or one of them twice; or a host has
                no room for what is offloaded.
            ValueError: see :func:`~lightning_zerocompile.optim.taken_over.sharded_states`.
            MisconfigurationException: an optimizer cannot work on sharded parameters, cannot be offloaded, or cannot
                update in a backward.
        """
        if optimizers:
            self.last = list(optimizers)
        for restore in self._restore.values():
            restore()
        self._stepper.forget()
        self._restore, self._taken = {}, set()
        self._released, self._not_zeroed = {}, set()
        known = {sharded.master for sharded in self._runtime.sharded_parameters}
        for number, optimizer in enumerate(optimizers):
            whole = sees_whole_values(optimizer, self._config.full_param_optimizers)
            if take_masters(number, optimizer, whole):
                self._taken_over[optimizer] = None
        check_optimizers(optimizers, self._config.full_param_optimizers)
        shared = shared_masters(optimizers)
        for number, optimizer in enumerate(optimizers):
            foreign = [p for p in masters_of(optimizer) if p not in known]
            if foreign:
                raise RuntimeError(
                    f"Optimizer {number} ({type(optimizer).__name__}) holds {len(foreign)} parameters that are not "
                    f"the model's (the first has shape {tuple(foreign[0].shape)}). Create it from the parameters of "
                    "the LightningModule, best in `configure_optimizers` from `self.parameters()`."
                )
            self._restore[optimizer] = self._watch(optimizer)
        self._offload.attach(optimizers, shared)
        self._offloaded = self._held() if self._config.offload else []
        if self.in_backward is not None:
            self.in_backward.attach(optimizers, shared)

    def _held(self) -> list[list[Tensor]]:
        """What each watched optimizer updates."""
        return [masters_of(optimizer) for optimizer in self._restore]

    def _offload_again(self) -> None:
        """Where user code has given a parameter to another optimizer, or taken it from one, since it was offloaded.

        All ranks do so alike, and tell each other what they need.
        """
        if not self._config.offload:
            return
        held = self._held()
        pairs = zip(held, self._offloaded, strict=True)
        if any(len(now) != len(before) or not all(map(is_, now, before)) for now, before in pairs):
            self._offload.attach(list(self._restore), shared_masters(self._restore))
            self._offloaded = held
            self._stepper.forget()

    @property
    def runs(self) -> bool:
        """Whether a step of an optimizer has begun and has not ended."""
        return bool(self._running or self._through_lightning)

    def states(self) -> Iterator[Tensor]:
        """Yields all tensors that the watched optimizers keep, counters too."""
        for optimizer in self._restore:
            for state in optimizer.state.values():
                yield from (kept for kept in state.values() if isinstance(kept, Tensor))

    def number_of_states(self) -> int:
        """Of parameters for which the watched optimizers keep something."""
        return sum(len(optimizer.state) for optimizer in self._restore)

    def give_back(self, parameters: Mapping[Tensor, Tensor]) -> None:
        """Gives optimizers that were made elsewhere the whole parameters in the place of their masters; collective.

        ``parameters``: the whole parameters, by their masters.
        """
        give_back(self._taken_over, parameters)
        self._taken_over = {}

    def _watch(self, optimizer: Optimizer) -> Callable[[], None]:
        """Wraps the optimizer's ``step``; returns a function that undoes this."""
        mine = vars(optimizer).get("step")  # a learning rate scheduler's
        inner, this = optimizer.step, weakref.ref(self)

        @wraps(inner)
        def step(stepping: Optimizer, *args: Any, **kwargs: Any) -> Any:
            steps = this()
            if steps is None or stepping not in steps._restore or stepping in steps._running:
                return inner(*args, **kwargs)
            with steps._around(stepping):
                return inner(*args, **kwargs)

        watched = MethodType(step, optimizer)
        optimizer.step = watched  # type: ignore[method-assign]
        for table in ("_optimizer_step_pre_hooks", "_optimizer_load_state_dict_post_hooks"):
            made = vars(optimizer).get(table)  # by `Optimizer.__init__`, which wrappers such as timm's Lookahead skip
            if not isinstance(made, OrderedDict):
                setattr(optimizer, table, OrderedDict(made or {}))
        hooks = [
            optimizer.register_step_pre_hook(self._refuse_unwatched),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

        def restore() -> None:
            for hook in hooks:
                hook.remove()
            if vars(optimizer).get("step") is not watched:
                return  # somebody else has wrapped our wrapper: it stays, and lets every step pass from now on
            if mine is None:
                del optimizer.step
            else:
                optimizer.step = mine  # type: ignore[method-assign]

        return restore

    def _loaded(self, optimizer: Optimizer) -> None:
        """After the user's own ``load_state_dict``: of a whole state each rank keeps its rows."""
        if self.in_backward is not None:
            self.in_backward.loaded(optimizer)
        states = [(p, optimizer.state[p]) for p in masters_of(optimizer) if p in optimizer.state]
        if not any(is_whole(kept, master) for master, state in states for kept in state.values()):
            return
        whole = sees_whole_values(optimizer, self._config.full_param_optimizers)
        for (master, _), state in zip(states, sharded_states(states, whole), strict=True):
            optimizer.state[master] = state

    def _take_attributes(self) -> None:
        """Puts masters where ``add_param_group`` was given gathered values.

        In all optimizers, since the gradient of a parameter stays while one that has not stepped yet holds it.
        """
        for number, optimizer in enumerate(self._restore):
            if any(isinstance(p, Unsharded) for group in optimizer.param_groups for p in group["params"]):
                whole = sees_whole_values(optimizer, self._config.full_param_optimizers)
                take_masters(number, optimizer, whole)
                self._stepper.forget()

    def _refuse_unwatched(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._running:
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name}.step was called as a function of the class (`{name}.step(optimizer)`), so the strategy "
                "could not prepare the step. Call the method of the optimizer: `optimizer.step()`."
            )

    # ---- a step ----

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], runs_backward: bool = False, **kwargs: Any) -> Any:
        """Calls ``optimizer.step(closure)``; optimizers of known kind update unit by unit, see [Note: step by unit].

        Args:
            closure: the user's; it may run the backward.
            runs_backward: whether the closure is sure to run the step's last backward, with which an accumulation is
                reduced.
            kwargs: further arguments of ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns.

        Raises:
            RuntimeError: see :meth:`before`, :func:`~lightning_zerocompile.optim.on_dtensors.on_dtensors` and
                :meth:`InBackward.check`.
        """

        step_state = self._runtime.step_state
        in_step = step_state.in_step  # of the code that calls: the closure is a part of that

        def settled() -> Any:
            before, step_state.in_step = step_state.in_step, in_step
            try:
                result = closure()
            finally:
                step_state.in_step = before
            self._reduce_pending(f"{type(optimizer).__name__}.step()")
            self._end_backward(optimizer)
            self._check_gradients(optimizer)
            self._runtime.core.write_back()  # a hook between backward and step may have written to weights
            if not by_unit:
                self._update_begins()
            return result

        def done() -> Collection[int]:
            return () if self.in_backward is None else self.in_backward.done(optimizer)

        self._take_attributes()
        self._offload_again()
        by_unit = steps_by_unit(optimizer, self._config.full_param_optimizers)
        self._through_lightning.append(optimizer)
        to_come = self._backward_to_come
        self._backward_to_come = [*to_come, optimizer] if runs_backward else to_come
        try:
            with (
                self._stepper.around(optimizer, settled, done)
                if by_unit
                else on_dtensors(optimizer, settled, self._runtime.reads.alike) as run
            ):
                return optimizer.step(closure=run, **kwargs)
        finally:
            self._through_lightning.pop()
            self._backward_to_come = to_come

    def backward_begins(self) -> None:
        """Called when the last backward before a step begins."""
        looks = self._runtime.step_state.looks
        self._not_zeroed = {optimizer for optimizer, before in self._released.items() if before == looks}
        self._offload_again()
        if self.in_backward is None:
            self._offload.backward_begins()
        else:
            self.in_backward.fetches()

    def before(self, optimizer: Optimizer) -> None:
        """Makes gradients and values ready for the optimizer.

        Raises:
            RuntimeError: a window or ``full_parameters`` is open, the last backward raised, or the optimizer cannot
                take the dtype of a gradient.
        """
        self._runtime.core.finish_backward()
        self._reduce_pending(f"{type(optimizer).__name__}.step()")
        self._check_gradients(optimizer)
        self._runtime.core.write_back()

    def _end_backward(self, optimizer: Optimizer) -> None:
        """Updates what a backward has reduced and not updated, see [Note: optimizer in backward].

        Raises:
            RuntimeError: see :meth:`InBackward.ends` and :meth:`InBackward.check`.
        """
        if self.in_backward is None:
            return
        self.in_backward.ends(optimizer)
        self.in_backward.check(optimizer)
        if self.in_backward.done(optimizer):
            self._by_unit = True

    def restored(self) -> None:
        """Called when the optimizers' states were loaded."""
        if self.in_backward is not None:
            self.in_backward.restored()

    def backward_failed(self) -> None:
        """Called after a backward that raised, which may have updated a part of the model."""
        if self.in_backward is not None and self.in_backward.failed():
            self.updates = True

    def skip(self, optimizer: Optimizer) -> None:
        """Releases what a step releases, and updates nothing: called in the place of a step that loss scaling skips."""
        self._take_attributes()
        self._offload.drop_early()
        self._runtime.core.forget_outstanding()
        self._release_gradients(masters_of(optimizer))

    @contextmanager
    def _around(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the outermost call of the optimizer's ``step``, see [Note: watched steps].

        Raises:
            RuntimeError: the step was called past Lightning and needs what Lightning's call prepares, or see
                :meth:`before`, :meth:`_end_backward` and :func:`~lightning_zerocompile.sharding.master.index_of`.
        """
        through_lightning = optimizer in self._through_lightning
        if not through_lightning:
            self._take_attributes()
        if not through_lightning and not is_elementwise(optimizer):
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name}.step() was called past Lightning, so {name} would see row shards without what it needs to "
                "compute with them. Step the optimizer that `self.optimizers()` returns."
            )
        if not through_lightning and self._offload.holds(optimizer):
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name}.step() was called past Lightning, and offload='optimizer' keeps what it updates in host "
                "memory. Step the optimizer that `self.optimizers()` returns, or drop `offload`."
            )
        # a step by unit makes this check when it plans its rounds
        if not (through_lightning and steps_by_unit(optimizer, self._config.full_param_optimizers)):
            for parameter in masters_of(optimizer):
                index_of(parameter)  # raises if the parameter is not the model's
        if optimizer in self._backward_to_come:
            self._runtime.core.finish_backward()
            self._check_reducible(f"{type(optimizer).__name__}.step()")
        else:
            self.before(optimizer)
        if not through_lightning:
            self._update_begins()
        self._warn_if_not_zeroed(optimizer)
        step_state = self._runtime.step_state
        before = step_state.in_step, self._by_unit, step_state.looks  # the optimizer's own looks do not count
        step_state.in_step, step_state.has_loss, self._by_unit = False, False, False
        try:
            if self.in_backward is not None and through_lightning:
                self.in_backward.check(optimizer)
            elif self.in_backward is not None:
                self._end_backward(optimizer)
                with as_plain_tensors():  # where user code has set a gradient, this step itself updates with it
                    self._by_unit &= all(bound_gradient(parameter) is None for parameter in masters_of(optimizer))
            by_unit = yield from self._running_step(optimizer)
        finally:
            step_state.in_step, self._by_unit, step_state.looks = before
        self.count, self.updates = self.count + 1, False
        if self.in_backward is not None:
            self.in_backward.stepped(optimizer)
        self._stepped()
        if by_unit:
            self._runtime.core.forget_outstanding()
        else:
            masters = masters_of(optimizer)
            self._runtime.masters_changed(masters)
            self._release_gradients(masters)
        if not self._config.keep_gradients:
            self._released[optimizer] = step_state.looks

    def _warn_if_not_zeroed(self, optimizer: Optimizer) -> None:
        """Says once where nobody has zeroed the gradients that the optimizer's last step has released."""
        if optimizer not in self._not_zeroed or self._has_warned:
            return
        self._has_warned, name = True, type(optimizer).__name__
        rank_zero_warn(
            f"`{name}.step()` was called twice, and nobody has zeroed its gradients between. The first step has freed "
            "them, so the second one uses the new gradients alone, where DDP would add these to the old ones. Call "
            "`optimizer.zero_grad()` after each step, or set `keep_gradients=True` if they are to be added."
        )

    def _running_step(self, optimizer: Optimizer) -> Generator[None, None, bool]:
        """Yields once, while the step runs. Returns whether it has updated units."""
        self._running.append(optimizer)
        try:
            yield
        finally:
            self._running.pop()
            if not self._by_unit:
                increment_version(masters_of(optimizer))  # see [Note: versions of updates] in by_unit.py
        return self._by_unit

    def _update_begins(self) -> None:
        self.updates = True

    def _check_gradients(self, optimizer: Optimizer) -> None:
        if self._runtime.core.any_other_dtype():
            check_gradients(optimizer, self._taken)

    def _units_written(self, units: list[int], placed: list[int]) -> None:
        self._by_unit = True
        self._runtime.updated_in_one_pass = self._stepper.in_one_pass
        self._runtime.core.masters_changed(units, placed)

    # ---- gradients ----

    def _kept(self, masters: Sequence[Tensor]) -> Sequence[Tensor]:
        """The masters whose gradient must survive this step: all with ``keep_gradients``.

        Else those that another optimizer holds, too, since that one may step with the same gradient.
        """
        if self._config.keep_gradients:
            return masters
        # anew in each step, since a group may have been added
        shared = shared_masters(self._restore) if len(self._restore) > 1 else ()
        return [master for master in masters if master in shared] if shared else []

    def _release_gradients(self, masters: Sequence[Tensor]) -> None:
        kept = set(self._kept(masters))
        released = [index_of(master) for master in masters if master not in kept]
        self._runtime.core.release_gradients(released, [])
