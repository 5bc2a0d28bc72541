"""Stage 3 with memory to spare: casts that are kept, and units that stay gathered between steps of the optimizer.

[Note: memory budget] A unit that stays gathered is gathered once for each step of the optimizer, while other units are
written, instead of once or twice for each backward. Which units stay is decided once, after the second step of an
optimizer. By then every rank has been at its peak, and has counted how often each unit is gathered. The ranks take the
smallest budget and rank 0's counts. For compiled code the shape of one argument changes, which costs one recompilation.
Kept casts ([Note: kept casts] in csrc/peers.h) are bought first where they fit: they gain 2 % of a step at 4096 tokens
(examples/BENCHMARKS.md), for the bytes of the model in half precision divided by the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_zerocompile.config import Lifetime
from lightning_zerocompile.runtime.runtime import Runtime

_SHARE_OF_FREE_MEMORY = 0.75  # the share that "auto" may fill; the rest is for larger batches than those so far
_LATENCY_BYTES = 2**20  # what a link moves in the time that starting a collective takes: about 20 µs at 50 GB/s
_DOING = "has shared out the bytes of `keep_gathered`"
_STEPS = 2  # steps of optimizers before the decision


@dataclass(frozen=True)
class Candidate:
    """A unit that lives for one use: ``size`` bytes, gathered ``gathers`` times for each step of the optimizer."""

    unit: int
    size: int
    gathers: float

    @property
    def benefit(self) -> float:
        """Communication time saved for each byte of memory, in the time that one byte takes."""
        return (self.gathers - 1) * (1 + _LATENCY_BYTES / max(self.size, 1))


def choose(candidates: Sequence[Candidate], budget: int) -> list[int]:
    """The units to keep: by falling benefit, as many as fit.

    Args:
        candidates: of one model.
        budget: bytes of gathered values that may stay.
    """
    kept, left = [], budget
    for candidate in sorted(candidates, key=lambda c: (-c.benefit, c.unit)):
        if candidate.benefit > 0 and candidate.size <= left:
            kept.append(candidate.unit)
            left -= candidate.size
    return sorted(kept)


def free_memory(device: torch.device) -> tuple[str, int]:
    """The host of the memory ("": a device of this rank's own), and the bytes that were free at the peak so far."""
    if device.type == "cuda":
        unused = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        idle = sum(segment["total_size"] - segment["active_size"] for segment in segments_of_graphs(device))
        return "", unused - torch.cuda.max_memory_allocated(device) - idle
    return socket.gethostname(), os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_memory() -> tuple[str, int]:
    """This host's name, and the bytes that its processes may still take: what a container's limit leaves, too."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return socket.gethostname(), free


def segments_of_graphs(device: torch.device) -> list[Any]:
    """The segments in pools that CUDA graphs own: nothing else may use them, even while the graphs do not."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call, unused-ignore]
    return [s for s in segments if s["device"] == device.index and tuple(s["segment_pool_id"]) != (0, 0)]


def smallest_share(free: Collection[tuple[str, int]]) -> int:
    """What each rank may count on, in bytes: the ranks of a host share its memory.

    Args:
        free: of all ranks, as :func:`free_memory` gives it.
    """
    ranks = Counter(host for host, _ in free if host)
    return min(size // max(1, ranks[host]) for host, size in free)


def _smallest_share(heard: Mapping[int, str]) -> str:
    return str(smallest_share([json.loads(message) for message in heard.values()]))


class MemoryBudget:
    """Decides once what stays gathered, see [Note: memory budget].

    Args:
        runtime: holds the model's parameters; its configuration says how much memory there is.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        open_to_choice = runtime.config.memory_budget is not None and runtime.policy.lifetime is Lifetime.USE
        self._steps_left = _STEPS if open_to_choice else -1

    def optimizer_stepped(self) -> None:
        """Called after each step of an optimizer."""
        if self._steps_left > 0:
            self._steps_left -= 1

    def spend(self) -> None:
        """Between two training steps, on all ranks.

        Raises:
            RuntimeError: another rank has not come to it within ``timeout``.
        """
        if self._steps_left != 0:
            return
        self._steps_left = -1
        share = self._share()
        share -= self._runtime.keep_casts(share)
        chosen = json.dumps(choose(self._candidates(), share))
        self._runtime.keep(json.loads(self._runtime.messages.of_first("kept", chosen, _DOING)))

    def _share(self) -> int:
        """What each rank may fill, alike on all of them."""
        runtime = self._runtime
        budget = runtime.config.memory_budget
        free = ("", budget) if isinstance(budget, int) else free_memory(runtime.device)
        late = partial(runtime.messages.silent, doing=_DOING)
        message, what = json.dumps(free), "what is free for units that stay gathered"
        runtime.messages.tell_numbered("budget", 0, message)
        share = int(runtime.messages.join_numbered("budget", 0, message, _smallest_share, what, late))
        return share if isinstance(budget, int) else int(_SHARE_OF_FREE_MEMORY * share)

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(unit, size, self._runtime.core.gathers_of(unit)[0] / _STEPS)
            for unit, size in self._runtime.used_units().items()
        ]
