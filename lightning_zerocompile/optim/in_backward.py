"""Units that are updated inside the backward, as soon as their gradient is reduced.

[Note: optimizer in backward] With ``optimizer_in_backward=True`` the update of a unit runs beside the backward of the
units before it. After the update the unit's gradient is gone. The runtime says when a unit is reduced (see
[Note: updates in backward] in csrc/reductions.cpp). The unit's shards are updated with the optimizer's own kernel on
the same gradient as without the option, so the numbers are the same to the bit. On a device the update has a stream of
its own, which is ordered after the reduction. When a backward (or a window) ends, the units that are reduced and not
updated yet are updated. Then all updated units are gathered or dropped, in one order on all ranks.

A backward opens a step of an optimizer, and ``optimizer.step()`` closes it. Inside ``optimizer.step(closure)``, where
Lightning's automatic optimization runs the backward, the step is that optimizer's. Outside of any ``step`` the trained
parameters must all belong to one optimizer, and the step is that one's. ``step()`` itself runs its hooks and counts. It
updates only what has a gradient by then: what user code has set. Its learning rate, and all other options of its
groups, must be those with which the backward has updated.

What ``offload`` keeps in host memory comes to the device for its update beside the backward, see
[Note: offload beside the backward] in offload.py.

A backward that raises after it has updated units leaves a model that is updated in part, and the part may differ from
rank to rank. No step can mend that, so each later backward and step raises until the optimizer's state is loaded from a
checkpoint.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_zerocompile.optim.by_unit import UnitStepper
from lightning_zerocompile.optim.offload import Offload
from lightning_zerocompile.optim.supported import is_elementwise, masters_of, shared_masters
from lightning_zerocompile.runtime.runtime import Runtime
from lightning_zerocompile.sharding.master import as_plain_tensors, bound_gradient, index_of

OPTION = "optimizer_in_backward=True"
CLIPPING = (
    "{} does not work with optimizer_in_backward=True: the backward uses each gradient before all are known. The "
    "Trainer's `gradient_clip_val` with gradient_clip_algorithm='value' clips inside the backward, in automatic "
    "optimization; for any other clipping drop the option."
)


@dataclass
class _OpenStep:
    """A step that backwards have begun.

    Attributes:
        options: of each of the optimizer's groups, by name: with these the units were updated.
        updated: the numbers of the updated units.
        gathered: those of them whose values have been gathered or dropped since.
    """

    options: list[dict[str, Any]]
    updated: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)


class InBackward:
    """Updates units inside the backward, see [Note: optimizer in backward].

    Args:
        runtime: holds the model's parameters.
        stepper: updates units.
        offload: what is kept in host memory.
        stepping: the optimizers whose ``step`` runs through Lightning now, the innermost last.

    Attributes:
        waits: whether gradients wait for a later backward now (an accumulation or a window is open).
        clip_value: gradients are clamped to [-clip_value, clip_value] before the update; ``None``: they are not.
    """

    def __init__(self, runtime: Runtime, stepper: UnitStepper, offload: Offload, stepping: Sequence[Optimizer]) -> None:
        self._runtime, self._stepper, self._offload, self._stepping = runtime, stepper, offload, stepping
        self._optimizers: list[Optimizer] = []
        self._open: dict[Optimizer, _OpenStep] = {}
        self._begun: dict[Optimizer, None] = {}  # optimizers with a backward that has not ended yet; in order
        self._handed: set[int] = set()  # units that the runtime has handed over in the backward that runs
        self._broken = ""  # why the model is updated in part
        self._to_load: set[Optimizer] = set()  # whose states are to be loaded then
        self._stream: torch.cuda.Stream | None = None
        self.waits: Callable[[], bool] = lambda: False
        self.clip_value: float | None = None
        reduced = weakref.WeakMethod(self._reduced)  # weak: gc does not see what the C++ object holds

        def update(units: list[int]) -> None:
            call = reduced()
            if call is not None:
                call(units)

        runtime.core.set_update(update)

    # ---- set-up ----

    def attach(self, optimizers: Sequence[Optimizer], shared: Collection[Tensor]) -> None:
        """Takes the optimizers whose units are updated from now on.

        Args:
            optimizers: all of the model.
            shared: masters in more than one of them.

        Raises:
            MisconfigurationException: an optimizer or a parameter cannot be updated in a backward; names it.
        """
        for optimizer in optimizers:
            if not is_elementwise(optimizer):
                raise MisconfigurationException(
                    f"{OPTION} does not work with the optimizer {type(optimizer).__name__}: only torch's elementwise "
                    "optimizers (AdamW, Adam, SGD, ...; no subclasses) are updated from a unit's own shards. Use one "
                    "of them, or drop the option."
                )
        self._check_owners(shared)
        for sharded in self._runtime.sharded_parameters if optimizers else ():
            with as_plain_tensors():
                grad_dtype = sharded.master.grad_dtype
            if grad_dtype != sharded.master.dtype and sharded.master.requires_grad:
                raise MisconfigurationException(
                    f"{OPTION}: parameter `{sharded.name}` is kept in {sharded.master.dtype} and has "
                    f"`grad_dtype={grad_dtype}`. Leave its `grad_dtype` at its default, or drop the option."
                )
        self._optimizers = list(optimizers)
        self.restored()
        self.pause(False)

    def _check_owners(self, shared: Collection[Tensor]) -> None:
        for sharded in self._runtime.sharded_parameters if shared else ():
            if sharded.master in shared:
                raise MisconfigurationException(
                    f"{OPTION}: parameter `{sharded.name}` is in several optimizers, and its gradient is gone after "
                    "the update of the first. Give it to one of them, or drop the option."
                )

    def pause(self, paused: bool) -> None:
        """Lets backwards only add to gradients from now on (``paused``), or update again.

        An accumulation pauses until its last backward.
        """
        self._runtime.core.set_updates(bool(self._optimizers) and not paused)

    def restored(self) -> None:
        """Called when the optimizers or their states are others now: forgets open steps and what a backward broke."""
        self._broken = ""
        self._to_load.clear()
        self._open.clear()
        self._begun.clear()
        self._say_updated()

    def loaded(self, optimizer: Optimizer) -> None:
        """Called when user code has loaded the optimizer's state: the last one repairs what a backward broke."""
        if self._broken:
            self._to_load.discard(optimizer)
            if not self._to_load:
                self.restored()

    # ---- a backward ----

    def begins(self) -> None:
        """Called before a backward.

        Raises:
            MisconfigurationException: a parameter was added to a second optimizer.
            RuntimeError: an earlier backward has updated units and its step has not been made, or it failed half-way;
                or it is not known which optimizer's step this is.
        """
        if not self._optimizers:
            return
        self._check_whole()
        if len(self._optimizers) > 1:
            self._check_owners(shared_masters(self._optimizers))
        for optimizer, step in self._open.items():
            if step.updated:
                raise RuntimeError(
                    f"A backward begins, and `step()` of {type(optimizer).__name__} was not called after the last one. "
                    f"With {OPTION} a backward updates the parameters, so each step has one backward. Call `step()` "
                    "first; or run several backwards of one step inside `with strategy.coalesce_grad_reduction():`, "
                    "which updates once, where it closes."
                )
        self._open.clear()
        self._handed.clear()
        self._begun |= dict.fromkeys(self._owners())

    def fetches(self) -> None:
        """Called when a backward that updates begins, after :meth:`begins`: what it updates first comes to the device.

        What user code has written to gathered values goes to host memory before. No version tells of a write through
        ``data``, so a unit that has come would miss it.
        """
        if not self._optimizers:
            return
        for optimizer in self._owners():
            if self._offload.holds(optimizer):
                self._runtime.core.write_back()
                self._offload.begins_beside(optimizer)

    def _owners(self) -> list[Optimizer]:
        """The optimizers whose step a backward makes now: one or none.

        Raises:
            RuntimeError: outside of any ``step``, several optimizers hold parameters that are trained.
        """
        if self._stepping:
            return [self._stepping[-1]] if self._stepping[-1] in self._optimizers else []
        if len(self._optimizers) < 2:
            return self._optimizers
        with as_plain_tensors():
            owners = [one for one in self._optimizers if any(p.requires_grad for p in masters_of(one))]
        if len(owners) > 1:
            names = " and ".join(type(one).__name__ for one in owners)
            raise RuntimeError(
                f"{OPTION}: a backward outside of `optimizer.step(closure)` reaches parameters of {len(owners)} "
                f"optimizers ({names}), so it is not known which of them are to be updated. Freeze the parameters of "
                "the others (`self.toggle_optimizer(optimizer)`), run the backward in a closure "
                "(`optimizer.step(closure=...)`), or drop the option."
            )
        return owners

    def _reduced(self, units: list[int]) -> None:
        """Updates units that are reduced. The runtime calls this, with its lock, in the thread that runs the backward.

        Raises:
            RuntimeError: an earlier backward failed half-way, or see :meth:`_owners`.
        """
        self._check_whole()
        self._handed.update(units)
        owners = self._owners()
        self._begun |= dict.fromkeys(owners)
        # those of a backward past the strategy wait for the step
        now = [one for one in owners if not self._offload.holds(one) or self._offload.streams_beside(one)]
        try:
            with self._beside():
                try:
                    for optimizer in now:
                        self._update(optimizer, lambda unit: unit in units)
                finally:
                    self._runtime.core.masters_written(units)
        except BaseException:
            self._drop(units)  # nobody else releases their gradients, and another backward would add to those
            raise
        self._runtime.updated_in_backward += len(units) if len(now) == len(owners) else 0

    def _update(self, optimizer: Optimizer, chosen: Callable[[int], bool]) -> None:
        step = self._open.get(optimizer)
        if step is None:
            step = self._open[optimizer] = _OpenStep(_options(optimizer))
        stream = self._offload.beside(optimizer)
        try:
            self._stepper.update_now(optimizer, chosen, self._prepare, step.updated, stream)
        finally:
            self._runtime.updated_in_one_pass = self._stepper.in_one_pass
            self._say_updated()

    def _prepare(self, values: Sequence[Tensor]) -> None:
        """Clips the gradients of ``values``, local parts of masters, [<=rows, ...], that are to be updated."""
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(values, self.clip_value)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Inside, a device works on a stream beside the backward's, after all that the backward has queued so far."""
        device = self._runtime.device
        if device.type == "cpu":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def _join(self) -> None:
        """Orders the current stream after the updates that run beside the backward."""
        if self._stream is not None:
            torch.cuda.current_stream(self._runtime.device).wait_stream(self._stream)

    def ends(self, stepping: Optimizer | None = None) -> None:
        """Called after a backward or a window: updates what is reduced, and gathers or drops all updated units.

        Afterwards nothing of an optimizer is on its way to host memory or from there.

        ``stepping``: the optimizer that is about to step, perhaps after a backward past the strategy
        (``loss.backward()``).

        Raises:
            RuntimeError: that backward has raised.
        """
        try:
            self._update_rest(stepping)
        except BaseException:
            self._offload.ends_beside(raised=True)
            raise
        self._offload.ends_beside()

    def _update_rest(self, stepping: Optimizer | None) -> None:
        if not self._optimizers or self._broken or self.waits() or self._runtime.core.deferred():
            return
        self._join()
        if stepping is not None:
            self._check_ended()
            self._begun[stepping] = None
        if not self._begun:
            return
        for optimizer in self._begun:
            done = self.done(optimizer)
            self._update(optimizer, lambda unit, done=done: unit not in done)  # type: ignore[misc]
            _order_states(optimizer)
        unseen = {unit for step in self._open.values() for unit in step.updated - step.gathered}
        self._begun.clear()
        if unseen:  # one call, since ranks may have updated different ones inside the backward
            self._runtime.core.masters_changed(sorted(unseen))
        for step in self._open.values():
            step.gathered |= step.updated

    def failed(self) -> bool:
        """Called after a backward that raised. Returns whether that backward has updated something.

        If so, backwards and steps raise until :meth:`restored` is called, or :meth:`loaded` for each optimizer that
        has updated something.
        """
        if not self._optimizers:
            return False
        self._join()
        self._offload.ends_beside(raised=True)
        updated = {unit for step in self._open.values() for unit in step.updated}
        self._drop(sorted(self._handed - updated))
        # Ranks may have updated different units by now, and must gather the same ones next: so all count as written.
        for sharded in self._runtime.sharded_parameters:
            torch.autograd.graph.increment_version(sharded.local)
        self._handed.clear()
        self._begun.clear()
        if not updated:
            self._open.clear()
            return False
        self._broken = (
            f"The last backward raised after it had updated {len(updated)} of {len(self._runtime.unit_of)} units "
            f"({OPTION}), so on rank {torch.distributed.get_rank()} the model is updated in part: some parameters have "
            "made a step more than others. Load a checkpoint (model and optimizer) before the next step, or start "
            "again from one (`ckpt_path=`). Without the option a backward that raises changes nothing."
        )
        self._to_load = {optimizer for optimizer, step in self._open.items() if step.updated}
        self._open.clear()
        self._say_updated()
        return True

    # ---- a step ----

    def check(self, optimizer: Optimizer) -> None:
        """Called before the optimizer steps.

        Raises:
            RuntimeError: the model is updated in part, or the options of the optimizer's groups are not those with
                which the backward has updated.
        """
        self._check_whole()
        step = self._open.get(optimizer)
        if step is None or not step.updated:
            return
        for number, (before, now) in enumerate(zip(step.options, _options(optimizer), strict=False)):
            changed = [name for name, value in now.items() if not _same(value, before.get(name))]
            if changed:
                raise RuntimeError(
                    f"{changed} of parameter group {number} of {type(optimizer).__name__} changed between the backward "
                    f"and the step. With {OPTION} the backward has updated with the former values "
                    f"({', '.join(f'{name}={before.get(name)!r}' for name in changed)}). Change them before the "
                    "backward or after the step, or drop the option."
                )

    def done(self, optimizer: Optimizer) -> Collection[int]:
        """The numbers of the units that the backward has updated for the step that the optimizer has still to make."""
        step = self._open.get(optimizer)
        return () if step is None else step.updated

    def stepped(self, optimizer: Optimizer) -> None:
        """Called when the optimizer has made its step."""
        self._open.pop(optimizer, None)
        self._say_updated()

    def clip(self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Called in the place of a clipping after the backward, which has clipped what it has updated with.

        Clips what user code has set since.

        Args:
            optimizer: that is about to step.
            clip_val: as Lightning's ``clip_gradients`` takes it; not positive: nothing is to be clipped.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``.

        Raises:
            RuntimeError: the backward has not clipped by this value.
        """
        if clip_val <= 0:
            return
        if gradient_clip_algorithm != "value" or clip_val != self.clip_value:
            raise RuntimeError(CLIPPING.format(f"Clipping (`clip_gradients`, clip_val={clip_val})"))
        with as_plain_tensors():
            for grad in map(bound_gradient, masters_of(optimizer)):
                if grad is not None:
                    grad.clamp_(-clip_val, clip_val)

    # ---- details ----

    def _say_updated(self) -> None:
        """Notes whether a backward has updated units: whoever then clips gradients that are gone gets an error."""
        self._runtime.step_state.updated = any(step.updated for step in self._open.values())

    def _check_whole(self) -> None:
        if self._broken:
            raise RuntimeError(self._broken)

    def _check_ended(self) -> None:
        """Raises RuntimeError if a backward past the strategy (``loss.backward()``) has raised unseen."""
        if not self._open:
            return
        try:
            self._runtime.core.check_backward_ended()
        except RuntimeError as error:
            if self.failed():
                raise RuntimeError(self._broken) from error
            raise

    def _drop(self, units: Sequence[int]) -> None:
        """Releases the gradients of these units, which do not count any more."""
        masters = dict(self._runtime.units_in_order())
        self._runtime.core.release_gradients([index_of(p) for unit in units for p in masters[unit]], [])


def _order_states(optimizer: Optimizer) -> None:
    """Puts the states in the order of the parameters.

    Ranks may have updated units in different orders. Whoever goes through the states and gathers each (a checkpoint)
    would pair those of different parameters: a hang, or, of equal sizes, wrong values without a word.
    """
    state = optimizer.state
    held = [p for p in masters_of(optimizer) if p in state]
    if any(one is not other for one, other in zip(state, held, strict=False)):
        for p in held:
            state[p] = state.pop(p)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each of the optimizer's groups, by name, without ``params``.

    A tensor stands there with its version: to compare its value would be to wait for the device.
    """
    return [
        {name: (value, value._version) if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    ]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, tuple) and left and isinstance(left[0], Tensor):
        return isinstance(right, tuple) and left[0] is right[0] and left[1] == right[1]
    return left is right or bool(left == right)
