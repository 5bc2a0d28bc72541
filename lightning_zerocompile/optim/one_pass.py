"""AdamW, Adam and SGD in one pass over memory: the update, the cast of its result, and the write to where gathers read.

[Note: updates in one pass] A unit that stays gathered from step to step is gathered anew right after its update (see
[Note: one pass] in csrc/gather.cpp). torch's fused optimizer reads and writes the masters. Without this module another
kernel reads them again, casts them, and writes the casts to this rank's rows of the gathered values and to the memory
from which the other ranks read. Here one kernel does both. Where casts are kept ([Note: kept casts] in csrc/peers.h) it
places those of units of stage 3, too. For other units (of stage 3, of a backward) the same kernel makes the update,
faster than torch's, and places nothing.

The kernel's arithmetic is that of torch's fused kernels, bit by bit. This holds for a version of torch and its
compiler, and may not for another. So before a kind of update is made for the first time in a run, some values are
updated on trial by torch and by the kernel. If no form of the kernel gives torch's bits, torch updates. It also updates
for all other optimizers, on other devices, and where there is no Triton. Ranks need not decide alike.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_zerocompile.optim.supported import is_elementwise, plain_step

KINDS = (optim.AdamW, optim.Adam, optim.SGD)  # which have a kernel here, and a fused one in torch

_log = logging.getLogger(__name__)
_CASTS = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK, _WARPS = 1024, 4  # elements that a program updates, and its warps
_ENTRIES = 16  # arrays in a table: their number is rounded up to a power of two, at least to this one
_TABLES = 4096  # as many tables are kept at most
_ALIGNED = 16  # bytes, for vectors of four elements
_TRIED = (2**18, 2**17 + 1)  # elements of the arrays that are updated on trial: torch has two loops
_TRIED_LR, _TRIED_SCALE = 0.3, 1000.0
_TRIED_OPTIONS = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.2}
_LAST = 2**62  # larger than the number of any program


class Places(Protocol):
    """The runtime, which says where it reads casts, see [Note: one pass] in csrc/gather.cpp.

    ``place`` returns, for each parameter of ``units`` whose cast can be placed: its number; this rank's rows of its
    gathered value, [<=rows, ...]; and as many in the memory from which other ranks read. Either may be ``None``.
    """

    def place(self, units: Sequence[int], /) -> list[tuple[int, Tensor | None, Tensor | None]]: ...


@dataclass
class _Array:
    """One parameter's update.

    Attributes:
        tensors: [<=rows, ...] float32, contiguous: the parameter, its gradient, and its states.
        targets: rows of the gathered value, and rows from which other ranks read, which get the cast of the parameter:
            at most two, of one dtype.
        step: Adam's counter, 0-dim float32 on the device; ``None`` for SGD.
    """

    tensors: list[Tensor]
    targets: Sequence[Tensor] = ()
    step: Tensor | None = None

    def column(self) -> list[int]:
        """What a table says of the array: the addresses of all these tensors, 0 for what there is not; its length."""
        found = [tensor.data_ptr() for tensor in self.tensors]
        found += [0] * (5 - len(found))
        copies = [target.data_ptr() for target in self.targets]
        return [*found, *copies, *[0] * (2 - len(copies)), self.tensors[0].numel()]


@dataclass
class _Group:
    """The update of one parameter group.

    Attributes:
        options: of the group, by name.
        arrays: the updates of parameters that have elements.
        steps: all counters of Adam, those of parameters without elements, too.
        first: whether no parameter has a momentum of SGD yet.
        new_states: parameters and their momentum, if SGD makes that in this update.
    """

    options: Mapping[str, Any]
    arrays: list[_Array] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    first: bool = False
    new_states: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class OnePass:
    """Updates units in one pass, see [Note: updates in one pass].

    Args:
        core: says where casts go.
        device: of this rank.
    """

    def __init__(self, core: Places, device: torch.device) -> None:
        self._core, self._device = core, device
        self._off = "" if device.type == "cuda" and torch.version.hip is None else "this is not a CUDA device"
        self._kernels: Any = None
        self._told = WeakSet[Optimizer]()
        self._forms: dict[tuple[Any, ...], int | None] = {}  # by kind of update: the one that gives torch's bits
        self._tables: dict[tuple[int, ...], tuple[Tensor, int]] = {}
        self._betas: dict[tuple[float, float], Tensor] = {}

    # ---- whether ----

    def takes(self, optimizer: Optimizer) -> bool:
        """Whether units of the optimizer can be updated in one pass, as far as its options say."""
        reason = self._off or _unsuited(optimizer) or self._load()
        if reason:
            self._tell(optimizer, reason)
        return not reason

    def _tell(self, optimizer: Optimizer, reason: str) -> None:
        if optimizer in self._told or self._device.type != "cuda":
            return
        self._told.add(optimizer)
        name = type(optimizer).__name__
        _log.info("zerocompile: what %s updates is cast and placed in further passes over memory: %s", name, reason)

    def _load(self) -> str:
        if self._kernels is None:
            try:
                from lightning_zerocompile.optim import one_pass_kernels
            except Exception as error:  # Triton is there, and may be of another version, or not work here
                self._off = f"there is no Triton ({error})"
                return self._off
            self._kernels = one_pass_kernels
        return ""

    # ---- updates ----

    def update(
        self,
        optimizer: Optimizer,
        numbers: Sequence[int],
        values: Sequence[Tensor],
        units: Sequence[int] = (),
    ) -> list[int] | None:
        """Updates what the optimizer's groups hold now, as its ``step`` would.

        Args:
            optimizer: one for which :meth:`takes` returns true. Its groups hold ``values``, and its states are those
                of ``values``.
            numbers: the runtime's number of each value.
            values: local parts of masters, [<=rows, ...], with their gradients.
            units: the units of these masters, if their casts may be placed. Empty: none is.

        Returns:
            The numbers of the values whose casts are where :meth:`Places.place` has said. ``None``: nothing was
            updated, and torch is to do it.
        """
        groups = list(self._groups(optimizer))
        if not all(map(self._fits, groups)):
            self._tell(optimizer, "a parameter, gradient or state is not float32, or not in one piece")
            return None
        forms = [self._form(optimizer, group) for group in groups]
        if None in forms:
            self._tell(optimizer, self._off or "no form of the kernel gives the bits of torch's, with these options")
            return None
        placed = self._place(groups, dict(zip(values, numbers, strict=True)), units) if units else []
        for group, form in zip(groups, forms, strict=True):
            self._run(optimizer, group, form or 0)
        return placed

    def _place(self, groups: Sequence[_Group], numbers: Mapping[Tensor, int], units: Sequence[int]) -> list[int]:
        """Tells the arrays of ``groups`` where their casts go; returns the numbers of those whose casts are placed."""
        places = {number: (own, staged) for number, own, staged in self._core.place(units)}
        placed = []
        for array in (array for group in groups for array in group.arrays) if places else ():
            number = numbers[array.tensors[0]]
            found = [rows for rows in places.get(number, ()) if rows is not None]
            if found and all(rows.dtype in _CASTS and rows.is_contiguous() for rows in found):
                array.targets = found
                placed.append(number)
        return placed

    def _groups(self, optimizer: Any) -> Iterator[_Group]:
        """Yields what the optimizer's ``step`` would find in each group. States that are missing are made, as by torch.

        Only the first momentum of SGD is not in the optimizer's state before :meth:`_run` has updated.
        """
        for options in optimizer.param_groups:
            group = _Group(options)
            values: list[Tensor] = []
            grads: list[Tensor] = []
            if isinstance(optimizer, optim.Adam):
                states: list[list[Tensor]] = [[], [], []]
                init: Any = optimizer._init_group
                init(options, values, grads, *states, group.steps)
                columns = [values, grads, *(states if options["amsgrad"] else states[:2])]
                rows = zip(zip(*columns, strict=True), group.steps, strict=True)
                group.arrays = [_Array(list(row), step=step) for row, step in rows if row[0].numel() > 0]
            else:
                buffers: list[Tensor | None] = []
                optimizer._init_group(options, values, grads, buffers)
                columns = [values, grads]
                if options["momentum"] != 0:
                    group.first = all(buffer is None for buffer in buffers)
                    new = [torch.empty_like(g) if b is None else b for g, b in zip(grads, buffers, strict=True)]
                    group.new_states = list(zip(values, new, strict=True)) if group.first else []
                    if not group.first and any(buffer is None for buffer in buffers):
                        new = [value.new_empty(0) for value in values]  # torch's kernel refuses it, so `_fits` does
                    columns.append(new)
                group.arrays = [_Array(list(row)) for row in zip(*columns, strict=True) if row[0].numel() > 0]
            if values:
                yield group

    def _fits(self, group: _Group) -> bool:
        lr = group.options["lr"]
        if (
            isinstance(lr, Tensor)
            and lr.device.type != "cpu"
            and (lr.dtype, lr.device) != (torch.float32, self._device)
        ):
            return False
        if any(step.dtype != torch.float32 or step.device != self._device for step in group.steps):
            return False
        for array in group.arrays:  # a loop, since this runs for each unit of each step
            shape = array.tensors[0].shape
            for tensor in array.tensors:
                if tensor.dtype != torch.float32 or tensor.device != self._device or not tensor.is_contiguous():
                    return False
                if tensor.shape != shape:
                    return False
        return True

    def _run(self, optimizer: Any, group: _Group, form: int) -> None:
        """Updates one group, and its states."""
        options = group.options
        scale, found_inf = _scaling(optimizer)
        if group.steps:
            torch._foreach_add_(group.steps, 1)
        buckets = defaultdict[tuple[Any, ...], list[tuple[_Array, list[int]]]](list)
        for array in group.arrays:
            dtype, column = array.targets[0].dtype if array.targets else None, array.column()
            *addresses, _ = column
            buckets[dtype, len(array.targets), reduce(or_, addresses) % _ALIGNED == 0].append((array, column))
        for (dtype, copies, aligned), arrays in buckets.items():
            table, blocks, entries = self._table([column for _, column in arrays])
            lr = options["lr"]
            by_pointer = isinstance(lr, Tensor) and lr.device.type != "cpu"
            common = {
                "lr_tensor": lr if by_pointer else table,
                "scale_tensor": table if scale is None else scale,
                "found_inf": table if found_inf is None else found_inf,
                "lr_number": 0.0 if by_pointer else float(lr),
                "decay": float(options["weight_decay"]),
                "ENTRIES": entries,
                "BLOCK": _BLOCK,
                "DTYPE": self._kernels.dtype_of(dtype),
                "ALIGNED": aligned,
                "LR_TENSOR": by_pointer,
                "DECAYS": options["weight_decay"] != 0,
                "MAXIMIZE": bool(options["maximize"]),
                "SCALED": scale is not None,
                "MAY_SKIP": found_inf is not None,
                "COPIES": copies,
                "FORM": form,
                "num_warps": _WARPS,
                "enable_fp_fusion": False,  # what is one operation in torch's kernel is one explicitly
            }
            if isinstance(optimizer, optim.Adam):
                steps = [array.step for array, _ in arrays if array.step is not None]
                betas = options["betas"]
                self._kernels.adam[(blocks,)](
                    table,
                    torch.pow(self._betas_on_device(*betas), torch.stack(steps + steps[-1:] * (entries - len(steps)))),
                    beta1=float(betas[0]),
                    beta2=float(betas[1]),
                    eps=float(options["eps"]),
                    DECOUPLED=_is_decoupled(optimizer, options),
                    AMSGRAD=bool(options["amsgrad"]),
                    **common,
                )
            else:
                self._kernels.sgd[(blocks,)](
                    table,
                    momentum=float(options["momentum"]),
                    dampening=float(options["dampening"]),
                    MOMENTUM=options["momentum"] != 0,
                    FIRST_STEP=group.first,
                    NESTEROV=bool(options["nesterov"]),
                    **common,
                )
        for value, buffer in group.new_states:
            optimizer.state[value]["momentum_buffer"] = buffer
        if group.steps and found_inf is not None:
            torch._foreach_sub_(group.steps, [found_inf] * len(group.steps))

    def _table(self, columns: Sequence[list[int]]) -> tuple[Tensor, int, int]:
        """The table of these arrays, as one_pass_kernels.py describes it.

        The same addresses come back in most steps, so tables are kept. What is in a table depends on the addresses and
        sizes alone.

        Args:
            columns: :meth:`_Array.column` of each array.

        Returns:
            The table, int64 of [9 * entries] on the device; the number of programs that work on it; entries, a power
            of two.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        entries = max(_ENTRIES, 1 << (len(columns) - 1).bit_length())
        key = (stream, *chain.from_iterable(columns))
        known = self._tables.get(key)
        if known is None:
            blocks, starts = 0, []
            for column in columns:
                starts.append(blocks)
                blocks += -(-column[-1] // _BLOCK)
            rows = [*map(list, zip(*columns, strict=True)), starts]
            padded = [row + [_LAST if row is starts else 0] * (entries - len(row)) for row in rows]
            on_host = torch.tensor(padded, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            if len(self._tables) >= _TABLES:
                self._tables.clear()
            known = self._tables[key] = on_host.to(self._device, non_blocking=True).flatten(), blocks
        return *known, entries

    def _betas_on_device(self, first: float, second: float) -> Tensor:  # [2, 1]
        found = self._betas.get((first, second))
        if found is None:
            if len(self._betas) >= _TABLES:  # a scheduler changes them
                self._betas.clear()
            found = self._betas[first, second] = torch.tensor([[first], [second]], device=self._device)
        return found

    # ---- on trial ----

    def _form(self, optimizer: Optimizer, group: _Group) -> int | None:
        """The form of the kernel that gives torch's bits for this kind of update; ``None``: none does."""
        options = group.options
        scale, found_inf = _scaling(optimizer)
        names = ("amsgrad", "maximize", "nesterov")
        key = (
            *(type(optimizer), scale is None, found_inf is None, isinstance(options["lr"], Tensor)),
            *(bool(options.get(name)) for name in names),
            *(options.get(name, 0) != 0 for name in ("weight_decay", "momentum")),
            _is_decoupled(optimizer, options),
        )
        if key not in self._forms:
            try:
                self._forms[key] = self._try(optimizer, options)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # Triton needs a C compiler, and a place for what it has compiled
                self._off = f"Triton does not work here ({error})"
                return None
        return self._forms[key]

    def _try(self, optimizer: Optimizer, options: Mapping[str, Any]) -> int | None:
        expected = self._trained(optimizer, options, None)
        for form in self._kernels.FORMS:
            pairs = zip(expected, self._trained(optimizer, options, form), strict=True)
            if all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs):
                return int(form)
        return None

    @torch.no_grad()
    def _trained(self, optimizer: Optimizer, options: Mapping[str, Any], form: int | None) -> list[Tensor]:
        """Parameters, states and casts, float32 on the device, after two steps on trial.

        ``form``: that of the kernel; ``None``: torch updates.
        """
        generator = torch.Generator(self._device).manual_seed(0)

        def random(size: int) -> Tensor:
            return torch.randn(size, device=self._device, generator=generator)

        values, casts = [random(size) for size in _TRIED], []
        trial = object.__new__(type(optimizer))
        groups = [{**options, **_on_trial(options), "params": values}]
        trial.__dict__.update(vars(optimizer), param_groups=groups, state=defaultdict(dict))
        scale, found_inf = _scaling(optimizer)
        if scale is not None:
            trial.__dict__["grad_scale"] = torch.full_like(scale, _TRIED_SCALE)
        if found_inf is not None:
            trial.__dict__["found_inf"] = torch.zeros_like(found_inf)
        for _ in range(2):
            for value in values:
                value.grad = (1.0 if scale is None else _TRIED_SCALE) * random(value.numel())
            if form is None:
                plain_step(trial)()
                casts += [value.to(torch.bfloat16).float() for value in values for _ in range(2)]
                continue
            for group in self._groups(trial):
                for array in group.arrays:
                    array.targets = [torch.empty_like(array.tensors[0], dtype=torch.bfloat16) for _ in "12"]
                self._run(trial, group, form)
                casts += [cast.float() for array in group.arrays for cast in array.targets]
        states = [kept for value in values for kept in trial.state[value].values() if isinstance(kept, Tensor)]
        return [*values, *states, *casts]


def _on_trial(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the same kind, with which each operation of an update changes the bits of its result.

    With the user's own options, such as a learning rate of 0 in a warm-up, a wrong form could give the right bits.
    """
    lr = options["lr"]
    changed: dict[str, Any] = {"lr": torch.full_like(lr, _TRIED_LR) if isinstance(lr, Tensor) else _TRIED_LR}
    if "betas" in options:
        changed |= {"betas": (0.9, 0.99), "eps": 1e-3}
    changed |= {name: value for name, value in _TRIED_OPTIONS.items() if options.get(name, 0) != 0}
    return changed


def _unsuited(optimizer: Optimizer) -> str:
    """Why the optimizer's units cannot be updated in one pass; "": they can."""
    if type(optimizer) not in KINDS or not is_elementwise(optimizer):
        return "only torch's AdamW, Adam and SGD are updated in one pass, and no subclass"
    for group in optimizer.param_groups:
        if not group.get("fused"):
            return "it is not fused (pass fused=True to it)"
        if group.get("differentiable") or any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            return "it is differentiable, or has tensors as betas"
    return ""


def _scaling(optimizer: Any) -> tuple[Tensor | None, Tensor | None]:
    """The scale by which the step divides gradients, and whether the step is to be skipped (1.0 if so).

    Both are as torch's scaler sets them on the optimizer; ``None`` where it has not.
    """
    return getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)


def _is_decoupled(optimizer: Optimizer, options: Mapping[str, Any]) -> bool:
    return bool(options.get("decoupled_weight_decay", isinstance(optimizer, optim.AdamW)))
