"""Several backwards a step: what coalescing their reductions costs and saves, beside FSDP2's own switches.

    python examples/benchmark_window.py --gpus 2

The model is that of the discussion of DeepSpeed PR 7992: an MLP of 8 layers of 4096 x 4096 in bf16 (256 MiB), AdamW
in bf16, N forwards and backwards of 64 rows before one optimizer step. One JSON line per row:

    ms           median over the timed steps, of the slowest rank: N forwards and backwards, reductions, optimizer
    bound_ms     N forwards and backwards of the plain module, gradients added up, one reduce-scatter of all of them and
                 the optimizer on one rank's share, each measured alone, in turns with the step, and added
    by_hand_ms   the same three one after the other, as a step: the time that ranks wait for each other is in it
    own_ms       as bound_ms, with the forwards and backwards of our graphs, in a window that stays open
    peak, window, after    MiB above what is allocated between steps: highest in the step before the optimizer, when the
                 last backward has ended, and when all gradients are reduced
    pool         with --mode: MiB that CUDA graphs hold besides, for good
    reductions, reduced_mib, gathers, gathered_mib    collectives of a step and the bytes of the full values in them

scopes: blocks (each layer is one compiled graph, in the bound too), model (the whole model is one), eager (no graph).

modes: plain (each backward reduces as the stage does) and coalesced (`coalesce_grad_reduction`); for FSDP2 the same by
`set_requires_gradient_sync` and, for its coalesced row, `set_reshard_after_backward(False)` until the last backward.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, LAYERS, ROWS = 4096, 8, 64
WARM_UP, STEPS, TURNS = 3, 10, 3
MIB = 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        return torch.relu(self.linear(x))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        for layer in self.layers:
            x = layer(x)
        return x


class Whole(nn.Module):
    """As a LightningModule holds a model: what `compile="model"` compiles is a child."""

    def __init__(self, model: MLP) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        return self.model(x)


class Memory:
    """MiB above a base, at points of a step. Not ``on`` where steps are timed: torch takes 0.1 ms to answer."""

    def __init__(self, on: bool) -> None:
        self.on, self.base, self.seen = on, 0, {"peak": 0.0, "window": 0.0, "after": 0.0}

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.base = torch.cuda.memory_allocated()

    def note(self, point: str) -> None:
        if self.on:
            self.seen[point] = (torch.cuda.memory_allocated() - self.base) / MIB

    def reduced(self) -> None:
        self.note("after")
        if self.on:
            self.seen["peak"] = (torch.cuda.max_memory_allocated() - self.base) / MIB


def pool_bytes(device: torch.device) -> int:
    """Of the pools that CUDA graphs own, which torch does not count as allocated."""
    from lightning_zerocompile.runtime.memory_budget import segments_of_graphs

    return sum(segment["total_size"] for segment in segments_of_graphs(device))


Step = Callable[[list[Tensor], Memory], None]
Counts = Callable[[], dict[str, Any]]
Action = contextlib.AbstractContextManager[Callable[[], None]]
Backwards = Callable[[list[Tensor]], Action]  # forwards and backwards, without communication


def build(device: torch.device) -> MLP:
    torch.manual_seed(0)
    return MLP().to(device, torch.bfloat16)


def compile_in_place(model: MLP, scope: str) -> None:
    for module in {"blocks": model.layers, "model": [model], "eager": []}[scope]:
        module.compile(dynamic=False)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def ours(
    stage: int, scope: str, coalesced: bool, device: torch.device, args: argparse.Namespace
) -> tuple[Step, Counts, Backwards]:
    from lightning_zerocompile.config import Config
    from lightning_zerocompile.engine import Engine

    compiled: Any = False if scope == "eager" else scope
    unit_bytes = args.unit_mib * MIB
    config = Config(
        stage=stage,
        compile=compiled,
        compile_options={"mode": args.mode, "dynamic": False},
        master_dtype=None,
        unit_bytes=unit_bytes,
    )
    engine = Engine(Whole(build(device)), device, config, None, "nccl")
    optimizer = adamw(engine.model.parameters())
    engine.attach_optimizers([optimizer])

    def compute(batches: list[Tensor]) -> None:
        for x in batches:
            loss = loss_of(engine.model, x)
            with engine.backward(loss):
                loss.backward()

    def step(batches: list[Tensor], memory: Memory) -> None:
        with engine.training_step():
            window = engine.windows.open(args.gather, None, None) if coalesced else contextlib.nullcontext()
            with window:
                compute(batches)
                memory.note("window")
        memory.reduced()
        engine.step(optimizer, lambda: None)

    def counts() -> dict[str, Any]:
        stats = engine.runtime.stats()
        return {
            "reductions": stats.reductions, "reduced_mib": stats.reduce_bytes / MIB,
            "gathers": stats.gathers, "gathered_mib": stats.gather_bytes / MIB,
        }  # fmt: skip

    @contextlib.contextmanager
    def backwards(batches: list[Tensor]) -> Iterator[Callable[[], None]]:
        def run() -> None:
            compute(batches)
            optimizer.zero_grad()  # inside a window: what waits is dropped

        with engine.training_step(), engine.windows.open("window", None, None):
            yield run

    return step, counts, backwards


def fsdp2(
    stage: int, scope: str, coalesced: bool, device: torch.device, args: argparse.Namespace
) -> tuple[Step, Counts, None]:
    from torch.distributed.fsdp import fully_shard

    model = build(device)
    compile_in_place(model, scope)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=stage == 3)
    fully_shard(model, reshard_after_forward=stage == 3)
    optimizer = adamw(model.parameters())

    def step(batches: list[Tensor], memory: Memory) -> None:
        for k, x in enumerate(batches):
            last = k == len(batches) - 1
            model.set_requires_gradient_sync(last or not coalesced)  # type: ignore[operator]
            model.set_reshard_after_backward(last or not coalesced)  # type: ignore[operator]
            loss_of(model, x).backward()
        memory.note("window")
        memory.reduced()
        optimizer.step()
        optimizer.zero_grad()

    return step, dict, None


def milliseconds(actions: Sequence[Callable[[], Action]]) -> list[float]:
    """Median device time of each action, of the slowest rank. They take turns, as the host's speed drifts."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(TURNS):
        for number, make in enumerate(actions):
            with make() as action:
                times[number] += device_times(action)
    medians = torch.tensor([statistics.median(each) for each in times], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return medians.tolist()


def device_times(action: Callable[[], None]) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    for _ in range(WARM_UP):
        action()
    for mark in marks[:-1]:
        mark.record()
        action()
    marks[-1].record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]


def bound(scope: str, device: torch.device) -> Callable[[list[Tensor]], list[Callable[[], None]]]:
    """The parts of what a step must cost, for its batches: see the module's text."""
    model = Whole(build(device))
    compile_in_place(model.model, scope)
    numel = LAYERS * WIDTH * WIDTH
    full = torch.randn(numel, device=device, dtype=torch.bfloat16)
    part = nn.Parameter(torch.randn(numel // dist.get_world_size(), device=device, dtype=torch.bfloat16))
    part.grad = torch.empty_like(part)
    optimizer = adamw([part])

    def compute(batches: list[Tensor]) -> None:
        for x in batches:
            loss_of(model, x).backward()
        for parameter in model.parameters():
            parameter.grad = None

    def reduce() -> None:
        dist.reduce_scatter_tensor(part.grad, full)  # type: ignore[arg-type]

    def update() -> None:
        optimizer.step()

    def by_hand(batches: list[Tensor]) -> None:
        compute(batches)
        reduce()
        update()

    return lambda batches: [functools.partial(compute, batches), reduce, update, functools.partial(by_hand, batches)]


def inputs(count: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(ROWS, WIDTH, generator=generator).to(device, torch.bfloat16) for _ in range(count)]


def rows(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    runs = [("zerocompile", ours, stage, scope) for scope in args.compile for stage in args.stages]
    runs += [("fsdp2", fsdp2, stage, "blocks") for stage in args.stages if stage > 1 and "blocks" in args.compile]
    for (system, make, stage, scope), coalesced in itertools.product(runs, (False, True)):
        torch._dynamo.reset()
        step, counts, own = make(stage, scope, coalesced, device, args)
        parts_of = bound(scope, device)
        for backwards in args.backwards:
            memory, batches = Memory(on=False), inputs(backwards, device)
            actions: list[Callable[[], Action]] = [
                functools.partial(contextlib.nullcontext, one)
                for one in (functools.partial(step, batches, memory), *parts_of(batches))
            ]
            if own is not None:
                actions.append(functools.partial(own, batches))
            took, pairs, reduce, update, by_hand, *own_pairs = milliseconds(actions)
            bounds = {"bound_ms": pairs + reduce + update, "by_hand_ms": by_hand}
            if own_pairs:
                bounds["own_ms"] = own_pairs[0] + reduce + update
            memory, before = Memory(on=True), counts()
            memory.start()
            step(batches, memory)
            pool = {"pool": round(pool_bytes(device) / MIB)} if args.mode else {}
            yield {
                "system": system, "stage": stage, "compile": scope, "mode": "coalesced" if coalesced else "plain",
                "backwards": backwards, "ms": round(took, 2),
                **{name: round(value, 2) for name, value in bounds.items()},
                **{f"x_{name[:-3]}": round(took / value, 3) for name, value in bounds.items()},
                **{name: round(value) for name, value in memory.seen.items()}, **pool,
                **{name: round(value - before[name]) for name, value in counts().items()},
            }  # fmt: skip
        del step, counts, own, parts_of
        torch.cuda.empty_cache()


def worker(args: argparse.Namespace) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for row in rows(args, device):
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--backwards", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--compile", nargs="+", choices=["blocks", "model", "eager"], default=["blocks", "model"])
    parser.add_argument("--stages", type=int, nargs="+", choices=[1, 2, 3], default=[1, 2, 3])
    parser.add_argument("--gather", choices=["auto", "window", "use"], default="auto", help="of the window")
    parser.add_argument("--unit-mib", type=int, default=64, help="the strategy's unit_bytes")
    parser.add_argument("--mode", choices=["reduce-overhead"], help="of our graphs: CUDA graphs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
    raise SystemExit(subprocess.call([*launcher, __file__, *sys.argv[1:], "--worker"]))


if __name__ == "__main__":
    main()
