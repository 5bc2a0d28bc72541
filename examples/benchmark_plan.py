"""What a plan says of a run, beside the run: memory by phase, and the time of a step.

    torchrun --nproc-per-node 2 examples/benchmark_plan.py --models qwen3-8b byte-lm vit t5 --seq 512 4096

Each row is one model, length and stage, with bf16 compute and AdamW, by a bare loop. Measured: the most that torch's
allocator held in each phase of a step, above what it held before the model was made, the most that the whole device
held (`device`), and the median time of a step. Predicted: by `make_plan`, which saw the module on meta; its rates are
of the blocks, of what is around them and of the memory, timed on the device, and of an all-gather. One JSON line a
row, in GiB and seconds; `off` is predicted over measured, less 1; `parts` are the rates that the plan has measured: the
seconds of the host for the model and for one small operator, and FLOP a second. `given_seconds` is what a plan says
from `--given-flops` and the rates beside it alone.

After each model and length with all three stages, a line says for two amounts of memory which stage `stage="auto"`
takes, and which was the fastest of those that fit: all of the device, and half way between what stages 1 and 3 held. A
stage whose run held more runs once more with that much. Stages 1 and 2 do the same work, so the faster of their two
runs counts for both, and stages whose times are within 3 % count as equally fast.

Without a GPU: python examples/benchmark_plan.py --models tiny --seq 64 --stages 3
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from benchmark_measures import bandwidth, synchronize
from benchmark_systems import BYTE_LM, SHAPES, build_model, byte_lm, loss_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.plan.auto import Needs, decide
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.plan import Plan, StagePlan, make_plan
from lightning_zerocompile.plan.trace import PlanError

GIB = 2**30
PHASES = ("between_steps", "forward_peak", "backward_peak", "step_peak")
Loss = Callable[[Any, Any], Tensor]


def vit(device: torch.device) -> nn.Module:
    """ViT-L/16 of transformers, with random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    with device:
        return ViTForImageClassification(config).train()


def t5(device: torch.device) -> nn.Module:
    """The shape of T5-large, with random weights."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_heads=16,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    with device:
        return T5ForConditionalGeneration(config).train()


def cell(name: str, seq: int, args: argparse.Namespace) -> tuple[Callable[[torch.device], nn.Module], Any, Loss]:
    """What makes the model, a batch of it, and its loss."""
    torch.manual_seed(dist.get_rank())
    if name == "vit":
        pixels, labels = torch.randn(args.batch * 32, 3, 224, 224), torch.randint(1000, (args.batch * 32,))
        return vit, (pixels, labels), lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss
    if name == "t5":
        tokens = torch.randint(32000, (args.batch * 4, seq))
        return t5, tokens, lambda model, batch: model(input_ids=batch, labels=batch[:, : seq // 4].contiguous()).loss
    if name == BYTE_LM:
        tokens = torch.randint(256, (args.batch * 8, seq + 1), dtype=torch.uint8)
        return lambda device: byte_lm(device, args.device.type), tokens, loss_of
    made = argparse.Namespace(model=name, checkpointing=False)
    tokens = torch.randint(SHAPES[name].vocabulary, (args.batch, seq))
    return lambda device: build_model(made, torch.float32, device), tokens, loss_of


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def planned(
    name: str, seq: int, checkpointed: bool, rates: Machine, measure: torch.device | None, args: argparse.Namespace
) -> Plan:
    """Of all stages that are run."""
    make, batch, loss = cell(name, seq, args)
    return make_plan(
        make(torch.device("meta")),
        batch,
        world_size=dist.get_world_size(),
        config=options(1, checkpointed),
        machine=rates,
        compute_dtype=torch.bfloat16,
        stages=args.stages,
        step=loss,
        optimizer=adamw,
        measure=measure,
    )


def options(stage: int, checkpointed: bool) -> Config:
    return Config(stage=stage, compile_options={"dynamic": False}, recompute="blocks" if checkpointed else None)


def measured(
    name: str, seq: int, stage: int, checkpointed: bool, args: argparse.Namespace
) -> tuple[dict[str, float], float]:
    """Bytes in each phase, that the allocator held and that the whole device held; and seconds of a step."""
    make, batch, loss_fn = cell(name, seq, args)
    batch = tree_map_only(
        Tensor, lambda t: t.to(args.device, torch.bfloat16 if t.is_floating_point() else t.dtype), batch
    )
    own = sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, Tensor))
    cuda = args.device.type == "cuda"
    before = torch.cuda.memory_allocated() - own if cuda else 0
    model = make(torch.device("cpu") if name in ("vit", "t5") else args.device)
    engine = Engine(model, args.device, options(stage, checkpointed), torch.bfloat16, dist.get_backend())
    optimizer = adamw(engine.model.parameters())
    engine.attach_optimizers([optimizer])
    phases: dict[str, float] = dict.fromkeys((*PHASES, "reserved", "device"), 0.0)
    times: list[float] = []

    def mark(phase: str) -> None:
        if cuda:
            torch.cuda.synchronize()
            phases[phase] = torch.cuda.max_memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()

    for number in range(args.steps + 3):
        exact = number == args.steps + 2  # only here the host waits between the phases
        if exact:
            gc.collect()
            synchronize(args.device)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                phases["between_steps"] = torch.cuda.memory_allocated() - before
        start = clock(args.device)
        with engine.training_step():
            loss = loss_fn(engine.model, batch)
            if exact:
                mark("forward_peak")
            with engine.backward(loss):
                loss.backward()
            if exact:
                mark("backward_peak")
        del loss
        engine.step(optimizer, lambda: None)
        if exact:
            mark("step_peak")
        elif number >= 2:
            times.append(clock(args.device) - start)
    if cuda:
        free, total = torch.cuda.mem_get_info()
        phases["reserved"], phases["device"] = torch.cuda.memory_reserved(), total - free
    engine.abandon()
    del engine, optimizer, model, batch
    gc.collect()
    torch._dynamo.reset()
    if cuda:
        torch.cuda.empty_cache()
    return phases, statistics.median(times)


def clock(device: torch.device) -> float:
    """Seconds, when the device has done its work."""
    synchronize(device)
    return time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Ran:
    """One row: what the plan said of a stage, bytes that the allocator and the whole device held, seconds of a step."""

    plan: StagePlan
    reserved: float
    device: float
    seconds: float


def row(name: str, seq: int, checkpointed: bool, made: Plan, given: Plan, index: int, args: argparse.Namespace) -> Ran:
    """Runs the stage that the two plans have there."""
    plan = made.stages[index]
    phases, seconds = measured(name, seq, plan.stage, checkpointed, args)
    most = torch.tensor([*phases.values(), seconds], dtype=torch.float64)
    if dist.get_world_size() > 1:
        most = most.to(args.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
    *held, reserved, device, seconds = most.tolist()
    said = [float(getattr(plan.memory, phase)) for phase in PHASES]
    peak = max(held[1:])
    guessed = given.stages[index].seconds
    result = {
        "model": name, "seq": seq, "world": dist.get_world_size(), "stage": plan.stage, "checkpointing": checkpointed,
        "predicted": [round(value / GIB, 3) for value in said], "measured": [round(value / GIB, 3) for value in held],
        "device": round(device / GIB, 2),
        "peak_off": round(plan.memory.peak / peak - 1, 4) if peak else None,
        "within": abs(plan.memory.peak - peak) <= 0.05 * peak + 64 * 2**20 if peak else None,
        "parts": {"host": made.machine.host, "call": made.machine.call, "flops": made.machine.flops},
        "predicted_seconds": plan.seconds and round(plan.seconds, 4), "seconds": round(seconds, 4),
        "seconds_off": plan.seconds and round(plan.seconds / seconds - 1, 3),
        "given_seconds": guessed and round(guessed, 4), "given_off": guessed and round(guessed / seconds - 1, 3),
    }  # fmt: skip
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    return Ran(plan, reserved, device, seconds)


def fits(name: str, seq: int, checkpointed: bool, ran: Ran, limit: int, args: argparse.Namespace) -> bool:
    """Whether it runs in so many bytes. The allocator keeps more than it needs, so a run with less decides."""
    if ran.device <= limit:
        return True
    share = (limit - (ran.device - ran.reserved)) / torch.cuda.mem_get_info()[1]
    if share <= 0:
        return False
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        measured(name, seq, ran.plan.stage, checkpointed, args)
        there = 1
    except torch.cuda.OutOfMemoryError:
        there = 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    everywhere = torch.tensor(there, device=args.device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere.item())


def auto(name: str, seq: int, checkpointed: bool, rows: list[Ran], args: argparse.Namespace) -> None:
    """Says what `stage="auto"` takes of these rows, and which of them was the fastest."""
    same = min(rows[0].seconds, rows[1].seconds)  # stages 1 and 2 do the same work
    rows = [dataclasses.replace(ran, seconds=same) for ran in rows[:2]] + rows[2:]
    whole = torch.cuda.mem_get_info()[1]
    for limit in dict.fromkeys((whole, int(rows[0].device + rows[-1].device) // 2)):
        needs = Needs(
            "", tuple(ran.plan.memory.peak for ran in rows), tuple(ran.plan.traffic.total for ran in rows), "", limit
        )
        fitting = [ran for ran in rows if fits(name, seq, checkpointed, ran, limit, args)]
        best = min((ran.seconds for ran in fitting), default=None)
        try:
            taken = decide([needs] * dist.get_world_size(), Config(stage="auto"), True).stage
        except PlanError:
            taken = None
        right = taken is None and best is None
        if taken is not None and best is not None:
            ran = rows[taken - 1]
            right = ran in fitting and ran.seconds <= 1.03 * best
        result = {
            "auto": taken, "model": name, "seq": seq, "checkpointing": checkpointed, "memory": round(limit / GIB, 2),
            "fit": [ran.plan.stage for ran in fitting], "seconds": [round(ran.seconds, 4) for ran in rows],
            "right": right,
        }  # fmt: skip
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[BYTE_LM], choices=[*SHAPES, BYTE_LM, "vit", "t5"])
    parser.add_argument("--seq", nargs="+", type=int, default=[512])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--given-flops", type=float, default=612e12, help="of Qwen3-8B on an H200, see plan_hosts.py")
    parser.add_argument("--given-bandwidth", type=float, default=265e9, help="bytes a second, of two H200s")
    parser.add_argument("--given-memory-bandwidth", type=float, default=4.3e12, help="bytes a second of an H200")
    parser.add_argument("--no-time", action="store_true", help="no block is timed")
    args = parser.parse_args()
    for variable, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(variable, value)
    args.device = torch.device("cpu")
    if torch.cuda.is_available():
        args.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    world = dist.get_world_size()
    rates = Machine(
        bandwidth=bandwidth(args.device) if world > 1 and not args.no_time else None,
        gloo=args.device.type == "cpu",
    )
    given = Machine(
        bandwidth=args.given_bandwidth,
        flops=args.given_flops,
        memory_bandwidth=args.given_memory_bandwidth,
        gloo=args.device.type == "cpu",
    )
    for name in args.models:
        for seq in args.seq if name != "vit" else args.seq[:1]:
            made = planned(name, seq, args.checkpointing, rates, None if args.no_time else args.device, args)
            alone = planned(name, seq, args.checkpointing, given, None, args)
            rows = [row(name, seq, args.checkpointing, made, alone, i, args) for i in range(len(args.stages))]
            if args.stages == [1, 2, 3] and args.device.type == "cuda":
                auto(name, seq, args.checkpointing, rows, args)
    dist.barrier()
    dist.destroy_process_group()
    if args.device.type == "cpu":  # threads of gloo and of compilers sometimes abort the end of the interpreter
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
