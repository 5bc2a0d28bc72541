"""What is still alive: in a process, and of gradients that were dropped."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_zerocompile.sharding.master import as_plain_tensors, gradient_of


def held_by_process() -> dict[str, int]:
    """What this process holds: threads of Python and of the system, open files, tensors, resident memory in KiB."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "python threads": threading.active_count(),
        "threads": int(status["Threads"]),
        "files": len(os.listdir("/proc/self/fd")),
        # torch keeps a FakeTensor of each compiled frame whose input requires a gradient, also without this package
        "tensors": sum(isinstance(o, torch.Tensor) and not isinstance(o, FakeTensor) for o in gc.get_objects()),
        "resident": int(status["VmRSS"].split()[0]),
    }


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Partitions:
    """Storages of gradients: how many are alive, and how many bytes they have."""

    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters
        self._seen: list[weakref.ref[Any]] = []

    def note(self) -> int:
        """Remembers what is bound now; the bytes of its storages."""
        with as_plain_tensors():  # without what waits for the end of an accumulation
            bound = [gradient_of(parameter) for parameter in self._parameters]
            gradients = [local(gradient) for gradient in bound if gradient is not None]
        storages = {gradient.untyped_storage().data_ptr(): gradient.untyped_storage() for gradient in gradients}
        self._seen += [weakref.ref(gradient) for gradient in gradients]
        return sum(s.nbytes() for s in storages.values())

    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self._seen)
