"""What hundreds of ranks cost a rank: messages through the store, and a step's work on the host.

    python examples/many_ranks.py store --ranks 8 64 256   # real processes that only send messages, no tensors
    python examples/many_ranks.py step --ranks 8 64 512 1024   # one process; collectives that move nothing

`store` starts the ranks as processes on this machine, all with one TCPStore. Each makes the exchanges of a set-up and
of some steps, and counts its requests. `step` trains a model as rank 0 of so many ranks, whose other ranks are played:
gathers move nothing, and the store says that all other ranks have said the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"

from lightning_zerocompile.ranks.consistency import Consistency, first_difference
from lightning_zerocompile.ranks.messages import SERIES, Messages
from lightning_zerocompile.runtime import build

__all__ = ["fake_pg", "main"]
_TIMEOUT = timedelta(minutes=5)
_SETUP = {f"option {number}": str(number) for number in range(40)}


# ---- messages of real processes ----


class Counting(Messages):
    """Counts requests to the store, and the bytes of its answers."""

    requests: Counter[str]

    def _store(self) -> Any:
        store, requests = super()._store(), self.__dict__.setdefault("requests", Counter())

        class Watched:
            def __getattr__(self, name: str) -> Callable[..., Any]:
                method = getattr(store, name)

                def call(*args: Any) -> Any:
                    found = method(*args)
                    answers = found if isinstance(found, list) else [found]
                    requests["requests"] += name != "has_extended_api"
                    requests["bytes"] += sum(len(one) for one in answers if isinstance(one, bytes))
                    return found

                return call

        return Watched()


def _rank(rank: int, world: int, steps: int, started: Any, turn: Any, pipe: Any) -> None:
    port = pipe.recv()
    with turn:  # torch's store loses connections of hundreds of processes that begin at one moment on one machine
        store = dist.TCPStore("127.0.0.1", port, world, False, _TIMEOUT, wait_for_workers=False)
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    watch = build.load().Watch(world, rank, _TIMEOUT.total_seconds())
    messages = Counting("cpu", "many", _TIMEOUT, watch)
    messages.requests = Counter()
    comparisons = Consistency(messages, _TIMEOUT)
    late = partial(messages.silent, doing="has come")
    found: dict[str, dict[str, float]] = {}

    def measured(name: str, times: int, action: Callable[[int], object]) -> None:
        started.wait()  # all ranks begin together
        messages.requests.clear()
        start = time.perf_counter()
        for number in range(times):
            action(number)
        seconds = time.perf_counter() - start
        found[name] = {key: value / times for key, value in messages.requests.items()} | {"seconds": seconds / times}

    measured("set-up: connects", 1, lambda _: messages.watch())
    measured("set-up: compares", 1, lambda _: first_difference(messages, "set-up", _SETUP, "the set-up", late))
    measured("a mark", steps, lambda n: comparisons.mark(f"step {n}"))
    measured("a backward, all have gradients", steps, lambda n: comparisons.used_parameters(n, "1" * 400, asks=False))
    some = "1" * (400 - rank % 7) + "0" * (rank % 7)

    def asks(number: int) -> None:
        comparisons.used_parameters(number, some, asks=False)
        comparisons.used_parameters(number, some, asks=True)

    measured("a backward, some have not", steps, asks)
    measured("a gather that is new", steps, lambda n: comparisons.gather(n, "layers.0"))
    measured("a meeting", steps, lambda n: comparisons.meet("meeting", "a barrier"))
    measured("the end", 1, lambda _: messages.close())
    pipe.send(found)
    os._exit(0)  # torch's exit would take each of them half a second


def _store(world: int, steps: int) -> dict[str, dict[str, float]]:
    """By what is done: requests and bytes of the rank with the median and with the most, and seconds."""
    context = multiprocessing.get_context("fork")  # the ranks share the memory of the modules
    started, turn = context.Barrier(world), context.Lock()
    pipes = []
    for rank in range(world):
        mine, theirs = context.Pipe()
        context.Process(target=_rank, args=(rank, world, steps, started, turn, theirs), daemon=True).start()
        theirs.close()
        pipes.append(mine)
    # After all forks: a child inherits the locks that the server's thread holds, such as the resolver's, for ever.
    server = dist.TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False)
    for pipe in pipes:
        pipe.send(server.port)
    heard = [pipe.recv() for pipe in pipes]
    result: dict[str, dict[str, float]] = {}
    for name in heard[0]:
        figures: dict[str, float] = {}
        for key in ("requests", "bytes"):
            values = [ranks[name].get(key, 0.0) for ranks in heard]
            figures |= {key: statistics.median(values), f"most {key}": max(values), f"all {key}": sum(values)}
        figures["seconds"] = statistics.median(ranks[name]["seconds"] for ranks in heard)
        result[name] = figures
    return result


# ---- one step, with played ranks ----


class Alike(dist.Store):
    """A store in which every other rank has always said what this one says."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._world = world
        self.requests = 0

    def set(self, key: str, value: Any) -> None:
        self.requests += 1
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self._values.get(key, b"")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return [self._of_all(key) for key in keys]

    def add(self, key: str, number: int) -> int:
        self.requests += 1
        self._values[key] = str(self._world).encode()  # torch counts ranks in new groups by it
        return self._world

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return True

    def wait(self, *args: Any) -> None:
        self.requests += 1

    def delete_key(self, key: str) -> bool:
        self.requests += 1
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # the name by which torch calls it

    def has_extended_api(self) -> bool:
        return True

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.requests += 1
        expected, found = _bytes(expected), self._of_all(key)
        if found == expected or (not found and not expected):
            self._values[key] = _bytes(desired)
            return self._values[key]
        return found or expected

    def _of_all(self, key: str) -> bytes:
        if key in self._values or "zerocompile/" not in key or "/mark/" in key or key.endswith("joined"):
            return self._values.get(key, b"")
        topic, _, _ = key.rpartition("/")
        return self._values.get(f"{topic}/0", b"")


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class Model(nn.Module):
    """Blocks that compute little. 1024 ranks divide their rows, so more ranks have no more to pad or to copy."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 1024), nn.GELU()) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: [batch, 8]
        for block in self.blocks:
            x = x + block(x).unflatten(1, (128, 8)).mean(1)
        return x


def _step(world: int, steps: int, stage: int) -> dict[str, float]:
    """Seconds of a step's host, bytes that Python holds more after the steps than before, and requests of a step."""
    from lightning_zerocompile.config import Config
    from lightning_zerocompile.engine import Engine

    store = Alike(world)
    dist.init_process_group("fake", store=store, rank=0, world_size=world)
    kernels = _gathers_of_nothing()
    logging.getLogger().setLevel(logging.ERROR)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = Model()
    engine = Engine(model, torch.device("cpu"), Config(stage=stage, compile=False, timeout=_TIMEOUT), None, "fake")
    set_up = time.perf_counter() - start
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.attach_optimizers([optimizer])
    batch = torch.ones(1, 8)

    def step() -> float:
        begin = time.process_time()
        with engine.training_step():
            loss = model(batch).mean()
            with engine.backward(loss):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begin

    for _ in range(2 * SERIES):  # until the store keeps no more messages of a series
        step()
    requests, stats = store.requests, engine.runtime.stats()
    seconds = sorted(step() for _ in range(steps))
    requests, after_steps = store.requests - requests, engine.runtime.stats()
    collectives = after_steps.gathers + after_steps.reductions - stats.gathers - stats.reductions
    tracemalloc.start()
    step()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for _ in range(3):
        step()
    after, peak = tracemalloc.get_traced_memory()
    del kernels
    return {
        "set-up s": set_up,
        "ms a step": 1e3 * statistics.median(seconds),
        "fastest ms": 1e3 * seconds[0],
        "KiB at peak": peak / 1024,
        "KiB kept by a step": (after - held) / 3 / 1024,
        "requests a step": requests / steps,
        "collectives a step": collectives / steps,
    }


def _gathers_of_nothing() -> torch.library.Library:
    """While the result lives gathers leave their output as it is.

    Those of torch's fake process group copy to each rank's place by itself, which takes longer than all else in a step
    and is no part of ours.
    """
    from torch._C._distributed_c10d import FakeWork

    def gather(output: Any, rows: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Any:
        return output, FakeWork().boxed()

    kernels = torch.library.Library("c10d", "IMPL")
    kernels.impl("_allgather_base_", gather, "CPU")
    return kernels


def _in_a_process(target: Callable[..., Any], *args: Any) -> Any:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()

    def run() -> None:
        theirs.send(target(*args))
        os._exit(0)

    process = context.Process(target=run)
    process.start()
    theirs.close()
    found = mine.recv()
    process.join()
    return found


def main(arguments: Sequence[str] | None = None) -> dict[int, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("store", "step"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[int, Any] = {}
    for world in options.ranks:
        if options.what == "store":
            found[world] = _in_a_process(_store, world, options.steps)  # a server that has threads is not forked
        else:
            found[world] = _in_a_process(_step, world, options.steps, options.stage)
        if not options.json:
            print(f"{world} ranks")
            lines = found[world] if options.what == "store" else {"": found[world]}
            for name, figures in lines.items():
                print(f"  {name:32}" + "  ".join(f"{key} {value:,.4g}" for key, value in figures.items()), flush=True)
    if options.json:
        json.dump(found, sys.stdout)
    return found


if __name__ == "__main__":
    main()
