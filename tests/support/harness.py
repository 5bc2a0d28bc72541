"""Process groups that stay alive for many tests, with a timeout that shows where every rank stands.

A test with ``@on_ranks()`` runs, as it stands, on every rank of a group. Where ranks are compared with each other, a
test calls ``ranks.run(body, *args)`` instead; ``body`` is a module-level function whose results come back in rank
order. A rank that raises fails the test with its traceback; ranks that hang are made to dump the stacks of all their
threads and are killed.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

FAILED = ("error", "died", "hangs")  # and a rank's other answers: "ok", "skipped"
GRACE = 15.0  # seconds that the other ranks get after one has failed
IMPORTED = [
    "tests.support.rewriting",  # before anything that is rewritten
    "tests.support.architectures",
    "tests.support.engines",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
]


class RankError(AssertionError):
    """A rank raised, died or hung."""


def on_ranks(
    world: int | str | None = None, timeout: float = 120.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs on every rank of a group; it fails if it fails on one, and is skipped if all ranks skip it.

    What it gets from parameters and fixtures (``tmp_path``, ``device``, ``long``, ...) is pickled, so a fixture that
    belongs to this process, such as ``monkeypatch``, is of no use to it.

    Args:
        world: number of ranks, or the name of the test's parameter that has it; `None`: what pytest's ``--ranks`` says.
        timeout: seconds until a rank that has not finished hangs.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(worlds: Worlds, **values: Any) -> None:
            __tracebackhide__ = True
            group = worlds(values[world] if isinstance(world, str) else world)
            group.run(_test_itself, test.__module__, test.__name__, values, timeout=timeout)

        parameters = inspect.signature(test).parameters.values()
        own = inspect.Parameter("worlds", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([*parameters, own])  # type: ignore[attr-defined] # what pytest reads
        return run

    return decorate


def _test_itself(module: str, name: str, values: dict[str, Any]) -> None:
    """In a rank: what :func:`on_ranks` decorates."""
    inspect.unwrap(getattr(importlib.import_module(module), name))(**values)


def _report(failures: dict[int, tuple[str, str]]) -> str:
    """Each rank's last words, the first to fail first, and then all that they said; of each rank its kind and text."""
    lines = []
    for rank, (kind, text) in failures.items():
        words = f"raised {_last_words(text)}" if kind == "error" else text
        lines.append(f"rank {rank} {words[:4000]}")
    return "\n".join(lines + [f"all of rank {rank}:\n{text}" for rank, (_, text) in failures.items()])


def _last_words(text: str) -> str:
    """The exception of a formatted traceback: what follows its last frame."""
    lines = text.strip().splitlines()
    frame = max((number for number, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    after = (number for number, line in enumerate(lines) if number > frame and not line.startswith(" "))
    return "\n".join(lines[next(after, 0) :]) or text


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _environment(rank: int, world: int, port: int, gpus: int | None = None) -> dict[str, str]:
    """What a launcher tells a rank: of one node, or, where ranks share ``gpus``, of a node of its own."""
    environment = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
    }  # fmt: skip
    if gpus is None:
        return environment
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = visible if len(visible) >= gpus and all(visible) else [str(number) for number in range(gpus)]
    return environment | {
        "LOCAL_RANK": "0", "GROUP_RANK": str(rank), "LOCAL_WORLD_SIZE": "1",
        "CUDA_VISIBLE_DEVICES": visible[rank % gpus],
        "NCCL_HOSTID": f"tests-{rank}", "NCCL_SOCKET_IFNAME": "lo",  # NCCL refuses two ranks of one host on one GPU
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }  # fmt: skip


@contextmanager
def two_scripts(script: str, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that run Python code in processes of their own; killed at the end."""
    port, processes = free_port(), []
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    for rank in range(2):
        environment = os.environ | _environment(rank, 2, port) | {"PYTHONPATH": path}
        command = [sys.executable, "-c", script, *arguments]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _serve(
    rank: int, environment: dict[str, str], device: str, paths: list[str], stacks: str, pipe: Connection
) -> None:
    """The life of one rank: join the group, then run what comes through the pipe."""
    sys.path[:] = paths
    importlib.import_module("tests.support.rewriting")  # where the process is no fork of one that has imported it
    handle = open(stacks, "w")  # noqa: SIM115 - stays open for the handler
    faulthandler.register(signal.SIGUSR1, file=handle, all_threads=True)
    faulthandler.enable(file=handle)  # a rank that a signal kills says where it was
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # else a difference of one bit of a weight may grow to 1e-4 of a gradient
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}
    import torch.distributed as dist
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    try:
        if device == "cuda":
            place = torch.device("cuda", int(environment["LOCAL_RANK"]))
            torch.cuda.set_device(place)
            dist.init_process_group("nccl", device_id=place)
        else:
            dist.init_process_group("gloo")
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise
    pipe.send(("ok", None))
    frozen = False
    while True:
        task = pipe.recv()
        if task is None:
            break
        body, args, kwargs = task
        if not frozen:  # what the imports made stays: no collection needs to look at it again
            gc.collect()
            gc.freeze()
            frozen = True
        torch._dynamo.reset()
        rank_zero_only.rank = int(environment["RANK"])  # an earlier test's Trainer may have left another
        random.seed(0)
        torch.manual_seed(0)
        try:
            answer = ("ok", body(*args, **kwargs))
        except pytest.skip.Exception as skipped:
            answer = ("skipped", str(skipped))
        except BaseException:
            answer = ("error", traceback.format_exc())
        gc.collect()
        if torch.get_float32_matmul_precision() != "highest":  # later tests would not be exact to 1e-6
            torch.set_float32_matmul_precision("highest")
            answer = ("error", f"the test leaves another float32 matmul precision behind, and said: {answer}")
        if answer[0] == "ok" and device == "cuda":
            torch.cuda.empty_cache()  # ranks of other tests share the GPU
        pipe.send((*answer, _has_ended_group()))
    dist.destroy_process_group()
    os._exit(0)


def _has_ended_group() -> bool:
    """In a rank: whether the test has ended the process group, so that no later one can use it."""
    from lightning_zerocompile.ranks.abort import ended_group

    return ended_group() is not None


class Ranks:
    """One group of ``world`` processes on ``device`` ("cpu": gloo, "cuda": NCCL); they share ``gpus``, if given."""

    def __init__(self, world: int, device: str = "cpu", gpus: int | None = None) -> None:
        self.world, self.device, self.gpus = world, device, gpus
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stacks: list[Path] = []

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Every rank's result of ``body(*args, **kwargs)``.

        Raises:
            RankError: with the traceback of the first rank that failed, or the stacks of all that hang.
        """
        __tracebackhide__ = True
        self._start()
        for pipe in self._pipes:
            pipe.send((body, args, kwargs))
        return self._collect(timeout)

    def expect_error(self, body: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> str:
        """The text with which ``body`` fails; it must fail on some rank. The group is started anew afterwards."""
        try:
            self.run(body, *args, timeout=timeout, **kwargs)
        except RankError as error:
            self.close(kill=True)
            return str(error)
        raise RankError("no rank raised")

    def _start(self) -> None:
        if self._processes and all(p.is_alive() for p in self._processes):
            return
        for attempt in range(3):
            try:
                return self._start_on(free_port())
            except RankError as error:
                if attempt == 2 or "EADDRINUSE" not in str(error):  # another process may take the port first
                    raise

    def _start_on(self, port: int) -> None:
        self.close(kill=True)
        # ranks on CPUs are forks of a process that has imported once; CUDA forbids forks
        context = multiprocessing.get_context("forkserver" if self.device == "cpu" else "spawn")
        context.set_forkserver_preload(IMPORTED)
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            stacks = Path(tempfile.mkstemp(prefix=f"stacks-{rank}-")[1])
            environment = _environment(rank, self.world, port, self.gpus)
            process = context.Process(
                target=_serve, args=(rank, environment, self.device, sys.path, str(stacks), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
            self._stacks.append(stacks)
        self._collect(timeout=120.0)

    def _collect(self, timeout: float) -> list[Any]:
        __tracebackhide__ = True  # what the ranks say counts, not this code
        answers: dict[int, Any] = {}  # in the order in which the ranks answered
        deadline = time.monotonic() + timeout
        while len(answers) < self.world:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = ("died", self._obituary(rank))
                if answers[rank][0] in FAILED:
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in range(self.world):
            if rank not in answers:
                answers[rank] = ("hangs", f"hangs after {timeout:.0f} s:\n{self._dump(rank)}")
        failed = {rank: answer for rank, answer in answers.items() if answer[0] in FAILED}
        ended = any(bool(more[0]) for _, _, *more in answers.values() if more)
        if ended or failed:  # a rank that failed alone has left collectives that would meet those of the next test
            self.close(kill=True)
        if failed:
            raise RankError(_report({rank: (answer[0], answer[1]) for rank, answer in failed.items()}))
        skips = {rank: answer[1] for rank, answer in answers.items() if answer[0] == "skipped"}
        if len(skips) == self.world:
            pytest.skip(skips[0])
        if skips:
            raise RankError(f"of {self.world} ranks only some skipped the test: {skips}")
        return [answers[rank][1] for rank in range(self.world)]

    def _obituary(self, rank: int) -> str:
        """How a dead rank ended, and where it was if a signal killed it."""
        process = self._processes[rank]
        process.join(GRACE)  # a dump of its memory takes time
        return f"died with exit code {process.exitcode}\n{self._written(rank)}"

    def _dump(self, rank: int) -> str:
        pid = self._processes[rank].pid
        os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE  # on a busy machine it takes a while
        while "(most recent call first)" not in self._stacks[rank].read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        return self._written(rank)

    def _written(self, rank: int) -> str:
        """The rank's stacks, without the long list of extension modules that ends them after a signal."""
        lines = self._stacks[rank].read_text().splitlines()
        return "\n".join(line for line in lines if not line.startswith("Extension modules:"))[-6000:]

    def close(self, kill: bool = False) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        for stacks in self._stacks:
            stacks.unlink(missing_ok=True)
        self._processes, self._pipes, self._stacks = [], [], []


class Worlds:
    """Groups by world size; each is started at its first use and kept. ``ranks``: the size of who asks for none."""

    def __init__(self, device: str, share: bool = False, ranks: int = 2) -> None:
        self.device, self.share, self.ranks = device, share, ranks
        self._groups: dict[int, Ranks] = {}

    def __call__(self, world: int | None = None) -> Ranks:
        world = self.ranks if world is None else world
        if world not in self._groups:
            self._groups[world] = self.fresh(world)
        return self._groups[world]

    def fresh(self, world: int) -> Ranks:
        """A group that nobody else uses, and that its user closes."""
        gpus = torch.cuda.device_count() if self.device == "cuda" else world
        if world > gpus and not (self.share and gpus):
            pytest.skip(f"needs {world} GPUs, or --share-gpus")
        return Ranks(world, self.device, gpus if world > gpus else None)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


@contextmanager
def worlds(device: str, share: bool, ranks: int) -> Iterator[Worlds]:
    groups = Worlds(device, share, ranks)
    try:
        yield groups
    finally:
        groups.close()
