"""What an offload keeps in host memory: a slab for each unit of an optimizer, and a slot in it for each master."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zerocompile.sharding.parameter import ShardedParameter

_ALIGNED = 512  # bytes, as torch's allocators align
MASTER = ""  # the key of the master among the tensors of a slot; the others have the names of their states


@dataclass(eq=False)
class Slot:
    """What a slab holds of one master.

    Attributes:
        sharded: the parameter.
        offsets: of each tensor in the slab, in bytes, by the state's name. The master's is at :data:`MASTER`, if it is
            in the slab.
        dtypes: of each of these tensors, by the same names.
        states: the DTensor over each state's place in host memory, by name.
        read_apart: whether gathers read the rows at other times than once, right after the update: at each use, or
            after a backward that has updated them.
        shown: what gathers read then, [<=rows, ...] on the device, in the dtype in which the parameter is gathered.
            ``None``: gathers read the rows of the update itself, once, or the master is not in the slab.
        empty: stands for the rows on the device between steps, if ``shown`` is ``None``: it has their sizes, and one
            element in memory.
    """

    sharded: ShardedParameter
    offsets: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    read_apart: bool = False
    shown: Tensor | None = None
    empty: Tensor | None = None

    def places(self, slab: Tensor) -> dict[str, Tensor]:
        """The tensors in ``slab``, by name, each [<=rows, ...] over its memory.

        Each has a version of its own, as separate tensors have.

        ``slab``: [bytes] of uint8, on any device.
        """
        rows, start, found = self.sharded.local, slab.storage_offset(), {}
        for name, dtype in self.dtypes.items():
            place = torch.empty(0, dtype=dtype, device=slab.device)
            first = (start + self.offsets[name]) // dtype.itemsize
            found[name] = place.set_(slab.untyped_storage(), first, rows.shape, rows.stride())
        return found


@dataclass(eq=False)
class Slab:
    """One optimizer's part of one unit in host memory.

    Attributes:
        unit: its number.
        slots: by master.
        nbytes: the size of this rank's slab.
        most: the size that the slab has on the rank with the most rows, in bytes; equal on all ranks.
        memory: [nbytes] of uint8 in host memory; ``None`` until it is allocated.
    """

    unit: int
    slots: dict[Tensor, Slot] = field(default_factory=dict)
    nbytes: int = 0
    most: int = 0
    memory: Tensor | None = None

    def add(self, master: Tensor, slot: Slot, dtypes: Mapping[str, torch.dtype]) -> None:
        share = -(-master.shape[0] // ranks_of(master)) * math.prod(master.shape[1:])
        for name, dtype in dtypes.items():
            slot.dtypes[name], slot.offsets[name] = dtype, self.nbytes
            self.nbytes += aligned(slot.sharded.local.numel() * dtype.itemsize)
            self.most += aligned(share * dtype.itemsize)
        self.slots[master] = slot

    def versions(self) -> list[int]:
        """Numbers that change when somebody writes to what the slab holds, by a DTensor or by its rows."""
        found = []
        for master, slot in self.slots.items():
            for kept in (*slot.states.values(), *([master] if MASTER in slot.offsets else [])):
                found += [kept._version, local_of(kept)._version]
        return found


@dataclass
class Staged:
    """What an optimizer updates in the place of an offloaded master: its rows and its states, where the update runs.

    Attributes:
        value: the rows, [<=rows, ...].
        states: by name, [<=rows, ...].
        kept: the DTensors over host memory that stand for ``states`` in the optimizer, by name.
        slot: of the master.
        version: of ``value`` before the update.
        written: whether the update has a gradient for ``value``, and so writes to ``value``.
    """

    value: Tensor
    states: dict[str, Tensor]
    kept: dict[str, Tensor]
    slot: Slot
    version: int
    written: bool = False

    def has_changed(self) -> bool:
        """Whether the update has written ``value``. Fused kernels raise no version."""
        return self.written or self.value._version != self.version

    def states_of(self, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        """The states that the update uses in the place of those in host memory, by name.

        ``entry``: the optimizer's state of the master.
        """
        return {name: self.states[name] for name, kept in self.kept.items() if entry.get(name) is kept}

    def taken(self, new: Mapping[str, Any]) -> dict[str, Any]:
        """The states after an update, as the optimizer keeps them; those that it made anew are copied to their places.

        ``new``: the states as the update has left them.
        """
        result = dict(new)
        for name, place in self.states.items():
            value = new.get(name)
            if value is None or value.dtype != place.dtype or value.shape != place.shape:
                continue  # the trial (`state_dtypes`) did not show it so, and no place fits: it stays where it is
            if value is not place:
                place.copy_(value)
            result[name] = self.kept[name]
        return result


def ranks_of(master: Tensor) -> int:
    return master.device_mesh.size() if isinstance(master, DTensor) else 1


def aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def local_of(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value
