"""Step time and memory of this strategy beside its peers, measured in one way.

    python examples/benchmark.py --gpus 4 --systems limit stage_1 stage_3 fsdp2 fsdp2_keep --seq 512 4096

Every system trains the same Hugging Face Qwen3 shape (random weights) with bf16 compute, bf16 gradient reduction and
fp32 AdamW states, one sequence per GPU, in a process group of its own. One JSON line per row:

    seconds     median over the timed steps (device events around the whole step)
    x_limit     that, over the compute limit of the same run
    allocated, reserved   peak GiB over the timed steps, of torch's allocator
    device                GiB of the whole GPU in use behind them: with NCCL's and mapped buffers and CUDA's own
    first       seconds from building the model to the end of the first step (compilation included)

systems: limit        forward, backward and a fused AdamW over 1/W of the parameters, no communication
         stage_1|2|3  this strategy, by a bare loop; with `_model`: the whole model as one graph
         fsdp2        fully_shard per layer, reshard after forward, layers compiled (ZeRO-3); fsdp2_prefetch: + explicit
                      prefetch of two layers; fsdp2_keep: no reshard after forward (ZeRO-2)
         ddp          where it fits
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SHAPES = {  # hidden, layers, heads, intermediate, tied
    "qwen3-0.6b": (1024, 28, 16, 3072, True),
    "qwen3-4b": (2560, 36, 32, 9728, True),
    "qwen3-8b": (4096, 36, 32, 12288, False),
}
LEARNING_RATE = 1e-5
WARM_UP = 6


@dataclass
class Run:
    """One system's training step and what it needs to be measured."""

    model: nn.Module
    step: Callable[[list[Tensor]], Tensor]  # micro-batches, each [1, seq] -> loss
    numel: int


def build_model(shape: str, dtype: torch.dtype, device: torch.device | str, checkpointing: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, intermediate, tied = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        tie_word_embeddings=tied, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:  # [1, seq] -> []
    return model(input_ids=tokens, labels=tokens).loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def limit(args: argparse.Namespace, device: torch.device) -> Run:
    model = build_model(args.model, torch.bfloat16, device, args.checkpointing)
    numel = sum(p.numel() for p in model.parameters())
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    share = nn.Parameter(torch.randn(-(-numel // dist.get_world_size()), device=device))
    share.grad = torch.randn_like(share)
    optimizer = adamw([share])

    def step(batches: list[Tensor]) -> Tensor:
        for tokens in batches:
            loss = loss_of(model, tokens)
            loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return Run(model, step, numel)


def ddp(args: argparse.Namespace, device: torch.device) -> Run:
    model = build_model(args.model, torch.float32, device, args.checkpointing)
    numel = sum(p.numel() for p in model.parameters())
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())

    def step(batches: list[Tensor]) -> Tensor:
        for k, tokens in enumerate(batches):
            last = k == len(batches) - 1
            with torch.autocast("cuda", torch.bfloat16), contextlib.nullcontext() if last else wrapped.no_sync():
                loss = loss_of(wrapped, tokens)
            loss.backward()
        return finish(optimizer, model, loss, args)

    return Run(model, step, numel)


def finish(optimizer: torch.optim.Optimizer, model: nn.Module, loss: Tensor, args: argparse.Namespace) -> Tensor:
    if args.clip:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def fsdp2(args: argparse.Namespace, device: torch.device) -> Run:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build_model(args.model, torch.float32, device, args.checkpointing)
    numel = sum(p.numel() for p in model.parameters())
    reduce_dtype = torch.float32 if args.reduce_fp32 else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    reshard = "keep" not in args.system
    layers = list(model.model.layers)
    for layer in layers:
        layer.compile(dynamic=False)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    if "prefetch" in args.system:
        for k, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[k + 1 : k + 3])
            layer.set_modules_to_backward_prefetch(layers[max(0, k - 2) : k][::-1])
    optimizer = adamw(model.parameters())

    def step(batches: list[Tensor]) -> Tensor:
        for tokens in batches:
            loss = loss_of(model, tokens)
            loss.backward()
        return finish(optimizer, model, loss, args)

    return Run(model, step, numel)


def ours(args: argparse.Namespace, device: torch.device) -> Run:
    from lightning_zerocompile.config import Config
    from lightning_zerocompile.engine import Engine

    model = build_model(args.model, torch.float32, device, args.checkpointing)  # the same start as fsdp2's
    numel = sum(p.numel() for p in model.parameters())
    config = Config(
        stage=int(args.system.split("_")[1]),
        compile="model" if args.system.endswith("_model") else "blocks",
        dynamic=False,
        reduce_dtype=torch.float32 if args.reduce_fp32 else None,
        **args.options,
    )
    engine = Engine(model, device, config, torch.bfloat16, "nccl")
    optimizer = adamw(model.parameters())
    engine.attach_optimizers([optimizer])

    def step(batches: list[Tensor]) -> Tensor:
        def closure() -> Tensor:
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            return loss

        for k, tokens in enumerate(batches):
            deferred = contextlib.nullcontext() if k == len(batches) - 1 else engine.accumulation()
            with engine.training_step(), deferred:
                loss = loss_of(model, tokens)
                loss.backward()
                engine.after_backward()
        engine.step(optimizer, closure)
        return loss.detach()

    return Run(model, step, numel)


def systems(name: str) -> Callable[[argparse.Namespace, torch.device], Run]:
    families = {"limit": limit, "ddp": ddp, "fsdp2": fsdp2, "stage": ours}
    return families[name.split("_")[0]]


def micro_batches(args: argparse.Namespace, seq: int, device: torch.device) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    fixed = [torch.randint(0, 32000, (1, seq), generator=generator).to(device) for _ in range(4)]
    turn = itertools.count()
    while True:
        yield [fixed[next(turn) % 4] for _ in range(args.accumulate)]


def measure(run: Run, args: argparse.Namespace, seq: int, device: torch.device, started: float) -> dict[str, Any]:
    batches, times, losses = micro_batches(args, seq, device), [], []
    first = 0.0
    for number in range(WARM_UP + args.steps):
        if number == WARM_UP:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = run.step(next(batches))
        end.record()
        if number < WARM_UP:
            losses.append(float(loss))  # equal starts and data: the systems' losses can be compared
            first = first or time.time() - started
        times.append((begin, end))
    torch.cuda.synchronize()
    losses.append(float(loss))
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in times[WARM_UP:]]
    free, total = torch.cuda.mem_get_info()
    if args.trace:
        trace(run, batches, Path(args.trace) / f"{args.system}-{seq}.json")
    return {
        "system": args.system, "model": args.model, "world": dist.get_world_size(), "seq": seq,
        "accumulate": args.accumulate, "checkpointing": args.checkpointing, "clip": args.clip,
        "seconds": round(statistics.median(seconds), 4), "min": round(min(seconds), 4), "max": round(max(seconds), 4),
        "allocated": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "device": round((total - free) / 2**30, 2), "first": round(first, 1), "losses": [round(x, 3) for x in losses],
    }  # fmt: skip


def trace(run: Run, batches: Iterator[list[Tensor]], path: Path) -> None:
    """A profiler trace of one step, and on rank 0 how long communication ran with nothing computing beside it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run.step(next(batches))
        torch.cuda.synchronize()
    if dist.get_rank() != 0:
        return
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = {
        communication: merge(
            (e.time_range.start, e.time_range.end) for e in kernels if ("nccl" in e.name) is communication
        )
        for communication in (True, False)
    }
    print(json.dumps({"trace": path.stem, **exposed(spans[True], spans[False])}), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def merge(spans: Iterator[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans that cover the same time."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def exposed(communication: list[tuple[float, float]], compute: list[tuple[float, float]]) -> dict[str, Any]:
    """Milliseconds: communication, compute, communication beside no compute, nothing at all; the longest exposures."""
    begin = min(s for s, _ in communication + compute)
    gaps, covered = [], 0.0
    both = merge(iter(communication + compute))
    for start, end in communication:
        overlap = sum(max(0.0, min(end, e) - max(start, s)) for s, e in compute if s < end and e > start)
        covered += overlap
        gaps.append((end - start - overlap, start - begin))
    total = sum(e - s for s, e in communication)
    span = both[-1][1] - both[0][0]
    return {
        "communication_ms": round(total / 1e3, 1),
        "compute_ms": round(sum(e - s for s, e in compute) / 1e3, 1),
        "exposed_ms": round((total - covered) / 1e3, 1),
        "idle_ms": round((span - sum(e - s for s, e in both)) / 1e3, 1),
        "span_ms": round(span / 1e3, 1),
        "longest_exposed_ms_at_ms": [
            (round(g / 1e3, 1), round(at / 1e3, 1)) for g, at in sorted(gaps, reverse=True)[:6]
        ],
    }


def worker(args: argparse.Namespace) -> None:
    """One rank of one system."""
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    started = time.time()
    run = systems(args.system)(args, device)
    for seq in args.seq:
        row = measure(run, args, seq, device, started)
        if dist.get_rank() == 0:
            with Path(args.out).open("a") as out:
                out.write(json.dumps(row) + "\n")
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--systems", nargs="+", default=["limit", "stage_1", "stage_2", "stage_3", "fsdp2", "fsdp2_keep"]
    )
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--seq", type=int, nargs="+", default=[4096, 512])
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0, help="clip the gradients to this norm; 0: not")
    parser.add_argument("--reduce-fp32", action="store_true", help="reduce gradients in fp32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: further options of our Config")
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / "benchmark.jsonl"))
    parser.add_argument("--trace", default="", help="folder for profiler traces")
    parser.add_argument("--limit-seconds", type=int, default=240, help="time that one system gets")
    parser.add_argument("--system", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.system:
        worker(args)
        return
    Path(args.out).unlink(missing_ok=True)
    for system in args.systems:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
        began = time.time()
        with tempfile.NamedTemporaryFile("w+", suffix=f"-{system}.log") as log:
            command = [*launcher, __file__, *sys.argv[1:], "--system", system, "--out", args.out]
            try:
                code = subprocess.run(command, stdout=log, stderr=log, timeout=args.limit_seconds).returncode
            except subprocess.TimeoutExpired:
                code = -1
            log.seek(0)
            output = log.read()
        traces = [line for line in output.splitlines() if line.startswith('{"trace"')]
        print(
            f"# {system}: {'ok' if code == 0 else f'failed ({code})'} in {time.time() - began:.0f} s", *traces, sep="\n"
        )
        if code != 0:
            print("\n".join(output.splitlines()[-40:]))
    report(Path(args.out))


def report(path: Path) -> None:
    """Prints the rows with their ratio to the compute limit of the same sequence length."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    limits = {row["seq"]: row["seconds"] for row in rows if row["system"] == "limit"}
    for row in sorted(rows, key=lambda row: row["seq"]):
        if row["seq"] in limits:
            row["x_limit"] = round(row["seconds"] / limits[row["seq"]], 3)
        print(json.dumps(row))


if __name__ == "__main__":
    main()
