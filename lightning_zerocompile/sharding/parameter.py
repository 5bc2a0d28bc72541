"""One parameter of the model: its master, and how module code reads its full value.

[Note: frozen parameters] A parameter that is frozen when the model is sharded is updated by no optimizer, so its shard
stays in the parameter's own dtype. The shard gets the dtype of a trained parameter where the parameter is first read as
one that requires grad: in the next step, before it can have a gradient. The shard is widened in place. That changes no
value, so gathered values stay the same, and optimizers, states and the C++ runtime know the same objects as before. The
shard stays wide when the parameter is frozen again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.distributed.tensor import DTensor

from lightning_zerocompile.ranks.consistency import Reads
from lightning_zerocompile.sharding.layout import over_local, rows_like, shard_like
from lightning_zerocompile.sharding.master import (
    as_plain_tensors,
    bind_gradient,
)
from lightning_zerocompile.sharding.sharded import as_sharded, mark_on_host, when_zeroed
from lightning_zerocompile.sharding.unsharded import Unsharded, Watched, as_unsharded

FUNCTORCH = (
    "A torch.func transform (grad, vmap, jvp, ...) meets {} of a sharded module, which it cannot differentiate. Give "
    "it full values: `with strategy.full_parameters(module, writeback=False) as values:` and inside "
    "`torch.func.functional_call(module, values, ...)`."
)


TRACED = "_zerocompile_traced_"  # + name: what a compiler reads, the arguments of the operator `gather`
ATTRIBUTES = TRACED + "attributes:"  # + name: what user code has put on the parameter
CLASSES = "_zerocompile_classes"  # of a sharded module's class: what has made it, and makes the next one
_OWN = "_zerocompile"  # names of what this package puts on parameters begin so
_TRACEABLE = (bool, int, float, str, type(None))  # kinds of attributes that compilers take


class Unbound(Protocol):
    """The kind of a gradient that is not bound to its master: its name is "REDUCED", "SUM" or "EARLY".

    See :meth:`ShardedParameter.own_gradient`.
    """

    @property
    def name(self) -> str: ...


class Core(Protocol):
    """What this room asks of the C++ runtime, see ``runtime/core.pyi``. A ``parameter`` is the ``index`` of one."""

    def read(self, parameter: int, handle: Tensor, requires_grad: bool, cast: torch.dtype | None = None) -> Tensor: ...

    def pending(self) -> bool: ...

    def lend_gradients(self, parameters: Sequence[int], values: Sequence[Tensor], /) -> list[int]: ...

    def release_gradients(self, parameters: Sequence[int], values: Sequence[Tensor], /) -> None: ...

    def unbound_gradient(self, parameter: int, waiting: bool, /) -> tuple[Tensor, Unbound] | None: ...

    def may_have_gradient(self, parameter: int, /) -> bool: ...

    def trainable(self, parameters: Sequence[int], /) -> list[bool]: ...

    def bound(self, parameter: int, outer: Tensor, local: Tensor, /) -> None: ...

    def drop_gradient(self, parameter: int, /) -> None: ...

    def drop_waiting(self, parameter: int, /) -> None: ...

    def write_back(self) -> None: ...

    def write_back_parameter(self, parameter: int, /) -> None: ...

    def disown_values(self, parameter: int, /) -> None: ...

    def asked(self) -> str: ...

    def lent_unit(self) -> str: ...

    def unequal(self) -> bool: ...

    def gather_low(self, parameters: Sequence[int], dtype: torch.dtype, /) -> None: ...

    def read_as_float8(self, parameter: int, power_of_two: bool, /) -> None: ...


@dataclass
class StepState:
    """Where in a step this rank is.

    Attributes:
        in_step: whether the user's step runs, or the backward of its loss, which may run user code, too (a function
            that is computed anew, the backward of a `torch.autograd.Function`); an optimizer's step does not count.
        has_loss: whether a step has begun, and no backward of its loss since; in a window, whether it has begun.
        awaits_backward: whether a loop that does not say where its steps begin has run a forward, and its backward is
            still to come: a loss that is computed now is part of a step.
        depth: how many regions are entered now.
        updated: whether a backward has updated parameters, and their optimizer's step is still to come.
        changes: how often since set-up a parameter got another source, or a module something else for a compiler to
            read in the place of one.
        gives_masters: whether an attribute of a module gives the master, see [Note: parameters by identity].
        taken: whether another strategy has taken over the model, or a part of it.
        looks: how often the `grad` of a parameter was read or set; a `zero_grad` does this for each of its parameters.
    """

    in_step: bool = False
    has_loss: bool = False
    awaits_backward: bool = False
    depth: int = 0
    updated: bool = False
    changes: int = 0
    gives_masters: bool = False
    taken: bool = False
    looks: int = 0


@dataclass(eq=False)
class ShardedParameter:
    """One parameter of the model: its master, and how module code reads its full value.

    Tied parameters share one object of this class.
    """

    name: str  # fully qualified, the first of a tied group
    index: int  # the parameter's number in the C++ runtime
    size: tuple[int, ...]
    master: nn.Parameter
    source: Tensor  # of the traced gather: memory that has the full value, or an empty tensor of its dtype and device
    handle: Tensor  # [1] float64 on CPU, requires grad; its value is the identity
    frozen_handle: Tensor  # the same identity, requires no grad
    use_grad_dtype: torch.dtype | None  # what each use's gradient is cast to; None: it stays as it is produced
    core: Core  # the C++ runtime
    reads: Reads  # compares the ranks before a number is read from the parameter or its gradient
    step_state: StepState
    never_used: Callable[[Tensor], bool]  # whether autograd has recorded nothing on a value
    local: Tensor  # the master's rows, [<=rows, ...]: unless ``on_host``, the object that the runtime gathers from
    trained_dtype: torch.dtype  # the master's dtype while it is trained
    dtype: torch.dtype  # the parameter's dtype before it was sharded, and again when it is whole
    original: nn.Parameter  # from before the sharding, see [Note: moved parameters]
    grad_dtype: torch.dtype | None  # the parameter's, before it was sharded; ``None``: each gradient keeps its own
    places: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)  # modules that have it, and its name
    shares_source: bool = False  # whether ``source`` has this value during a use only, see [Note: fixed places]
    given: list[weakref.ref[Tensor]] = field(default_factory=list)  # what user code got of the parameter's memory
    on_host: bool = False  # whether ``local`` is in host memory, see [Note: masters in host memory]

    @property
    def lives_for_a_use(self) -> bool:
        """Whether the value is gathered for each use."""
        return self.shares_source or not self.source.numel()

    def read(self, current: Tensor | None, cast: torch.dtype | None = None) -> Tensor | None:
        """The full value, ``[*size]``, or ``current`` itself if somebody has replaced the master (``functional_call``).

        [Note: parameters by identity] ``configure_optimizers`` may choose parameters by what they are (``isinstance(
        layer.weight, nn.Parameter)``, ``p is self.position``, ``p not in {layer.bias}``). A gathered value is another
        object at each read, so these would choose others, and some parameters would not be trained. So while it runs
        an attribute gives what ``parameters()`` yields: the master. In a forward it gives the value as ever.

        Args:
            current: what the module that is read holds in the parameter's place.
            cast: the dtype of the result, for code that computes in no other dtype and gives the value to nobody; None:
                the dtype that the parameter is gathered in, and the result is what user code may have.

        Raises:
            RuntimeError: a torch.func transform is active.
        """
        if current is not self.master or (self.step_state.gives_masters and not self.step_state.depth):
            return current
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(FUNCTORCH.format(f"parameter `{self.name}`"))
        with as_plain_tensors():
            requires_grad = self.master.requires_grad
        if requires_grad:
            self.widen()
        value = self.core.read(self.index, self.handle, requires_grad, cast)
        if cast is not None:
            return value
        watched = requires_grad and self.step_state.depth == 0 and torch.is_grad_enabled()
        return as_unsharded(value, self, watched)

    def traced(self) -> tuple[Tensor, Tensor, tuple[int, ...], torch.dtype | None]:
        """The arguments of the traced gather: source, handle, size, and the dtype of this use's gradient.

        The handle requires grad exactly when the parameter does now.
        """
        if self.master.requires_grad:
            self.widen()
        handle = self.handle if self.master.requires_grad else self.frozen_handle
        return self.source, handle, self.size, self.use_grad_dtype

    def widen(self) -> None:
        """Gives the shard of a parameter that was frozen ``trained_dtype``, see [Note: frozen parameters]."""
        if self.local.dtype == self.trained_dtype:
            return
        with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
            if self.local.is_cuda:  # a gather in flight may still read the memory that is freed here
                torch.cuda.synchronize(self.local.device)
            self.local.data = self.local.to(self.trained_dtype)
            wide = over_local(self.local.detach(), self.master)  # a write to `wide` counts as a write to `local`
            master: Any = self.master
            master.data = wide  # sets the wrapper's dtype only; the next line sets what is inside
            master._local_tensor, master._spec = wide._local_tensor, wide._spec

    def keep_rows(self, rows: Tensor, on_host: bool) -> None:
        """Makes ``rows``, which have the values of ``local``, the master's memory.

        Gathers still read the memory that they have read before: see [Note: masters in host memory] in
        csrc/registry.cpp.

        Args:
            rows: this rank's rows, [<=rows, ...].
            on_host: whether they are in host memory, while the master's mesh is one of devices.
        """
        master: Any = self.master
        master._local_tensor = self.local = rows
        self.on_host = on_host
        mark_on_host(master, on_host)

    def widen_for(self, value: Any) -> None:
        """Calls :meth:`widen` if the shard cannot hold the loaded ``value`` to the bit. All ranks decide alike."""
        narrow = self.local.dtype
        if narrow == self.trained_dtype or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        if value.dtype.itemsize > narrow.itemsize:
            # a DTensor is not compared: each rank has other rows, so the ranks might decide differently
            exact = not isinstance(value, DTensor) and torch.equal(value.to(narrow).to(value.dtype), value)
            if not exact:
                self.widen()

    def show_to_compilers(self) -> None:
        """After the parameter was frozen or unfrozen inside a step: what is compiled and runs next sees it.

        Between steps the next one does this, see ``refresh_all`` in module_swap.py. In a step a block sees what is in
        it, see :class:`~lightning_zerocompile.sharding.module_swap.Seen`, but not a layer that it only uses; and users
        may have compiled something themselves.
        """
        if not self.step_state.in_step:
            return
        for held, name in self.places:
            module = held()
            if module is not None and TRACED + name in module.__dict__:
                module.__dict__[TRACED + name] = self.traced()
        self.step_state.changes += 1

    def require_grad(self, value: bool) -> None:
        """Freezes or unfreezes the parameter, from the next forward on."""
        self.master.requires_grad_(value)

    def attributes(self) -> dict[str, Any]:
        """What user code has put on the parameter (``weight.lr_scale = 2.0``).

        [Note: attributes of parameters] The master has them: ``parameters()`` yields it, and it keeps them from before
        the sharding. What an attribute of a module gives eager code asks the master. In compiled code it is the result
        of an operator, on which the module's property sets them while it is traced. The compiler takes numbers and
        texts only, and tests these before each call. What is set through ``parameters()`` in the middle of a fit is
        not seen by compiled code.
        """
        with as_plain_tensors():
            return {n: v for n, v in vars(self.master).items() if n != "_is_param" and not n.startswith(_OWN)}

    def set_attribute(self, name: str, value: object) -> None:
        """What ``module.weight.name = value`` does."""
        with as_plain_tensors():
            vars(self.master)[name] = value
        self.show_attributes()

    def delete_attribute(self, name: str) -> None:
        """What ``del module.weight.name`` does.

        Raises:
            AttributeError: the parameter has no such attribute.
        """
        with as_plain_tensors():
            if vars(self.master).pop(name, _OWN) is _OWN:
                raise AttributeError(f"Parameter `{self.name}` has no attribute '{name}'.")
        self.show_attributes()

    def show_attributes(self) -> None:
        """Lets compilers see the parameter's attributes as they are now."""
        attributes = {n: v for n, v in self.attributes().items() if isinstance(v, _TRACEABLE)}
        for held, name in self.places:
            module = held()
            if module is None or TRACED + name not in module.__dict__:
                continue
            before = module.__dict__.pop(ATTRIBUTES + name, None)
            if attributes:
                module.__dict__[ATTRIBUTES + name] = attributes
            if (before is None) is bool(attributes) and CLASSES in type(module).__dict__:
                type(module).__dict__[CLASSES].swap(module, frozenset())

    def give_out(self, value: Tensor) -> None:
        """Notes that user code got ``value``, the parameter's ``data`` or what ``detach`` gives."""
        self.given = [one for one in self.given if one() is not None]
        self.given.append(weakref.ref(value))

    def given_out(self) -> list[Tensor]:
        """What is left of what was given out. It is forgotten here: the master gets other values now."""
        given, self.given = [one() for one in self.given], []
        return [value for value in given if value is not None]

    def bind_gradient(self, local: Tensor) -> Tensor:
        """Makes ``local``, this rank's rows of the reduced gradient, the master's ``grad``, and returns that DTensor.

        See [Note: unread gradients] in csrc/gradients.cpp.
        """
        grad = self._over(local)
        with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
            bind_gradient(self.master, grad)
        self.core.bound(self.index, grad, grad._local_tensor)
        return grad

    def own_gradient(self, value: Tensor, kind: str) -> Tensor:
        """What ``grad`` of a master is that has no gradient bound.

        Args:
            value: the gradient that the runtime has.
            kind: the name of its ``Unbound``. "REDUCED": ``value`` is this rank's rows, which become the master's
                ``grad``. "SUM": ``value`` is this rank's own full sum, [*size]. "EARLY": ``value`` is this rank's rows
                of the part that a window has reduced already.
        """
        if kind == "REDUCED":
            return self.bind_gradient(value)
        return value if kind == "SUM" else self._over(value)

    def rows_of_gradient(self, value: Tensor | None) -> Tensor | None:
        """What ``grad`` of the master becomes that is set to ``value``: a copy of this rank's rows.

        A gradient in the master's layout stays what it is. One in another layout (a sum of gradients is a part on each
        rank) is made whole first, on all ranks. All ranks must set the same full tensor, as they have to under DDP.
        """
        if value is None or value.shape != self.master.shape:
            return value
        master: Any = self.master
        full: Any = value
        if isinstance(value, DTensor):
            if value.placements == master.placements:
                return value
            full = full.detach().full_tensor()
        return self._over(rows_like(full, master))

    def _over(self, local: Tensor) -> DTensor:
        """A gradient of the master over the memory of ``local``, this rank's rows.

        [Note: zeroed gradients] Inside a window ``grad`` is what was there before the window. What waits to be added to
        it is in other memory. So code that makes the gradient zero in place (``zero_grad(set_to_none=False)``) drops
        what waits, too.
        """
        with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
            grad: DTensor = as_sharded(over_local(local, self.master), self.reads)
            when_zeroed(grad, weakref.WeakMethod(self._drop_waiting))
        return grad

    def _drop_waiting(self) -> None:
        self.core.drop_waiting(self.index)

    def like_master(self, value: Any) -> Any:
        """This rank's shard of a full tensor of the parameter's size, as a DTensor; anything else unchanged."""
        if (
            type(value) in (Tensor, nn.Parameter, Unsharded, Watched)
            and value.dim() > 0
            and value.shape == self.master.shape
        ):
            return shard_like(value, self.master, value.dtype)
        return value


skip_code(ShardedParameter.read.__code__)
