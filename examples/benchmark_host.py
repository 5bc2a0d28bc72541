"""What a step costs the host, where the tensors are so small that they cost nothing: many compiled blocks on the CPU.

    python examples/benchmark_host.py                                  # the plain model, stages 1 and 3
    python examples/benchmark_host.py --backend aot_eager --kinds 3 --profile   # the functions that take longest

Each kind is the same language model of 36 blocks, whose blocks are compiled, in one process with one thread: `plain`
without this package, otherwise a stage of it. The fastest step of many counts, since the machine's speed varies: turns
with another state of the code should follow each other.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WARM_UP = 8
PARTS = ("forward", "backward", "clipping", "optimizer", "all")


class Block(nn.Module):
    """As in Qwen3: 11 parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_norm, self.k_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, width]
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(2, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Model(nn.Module):
    def __init__(self, blocks: int, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, seq] -> [], the loss
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def make_step(kind: str, args: argparse.Namespace) -> Callable[[], list[float]]:
    """One training step; it returns when its parts were over, in seconds, after its beginning."""
    torch.manual_seed(0)
    model, tokens = Model(args.blocks), torch.randint(0, 32, (1, 9))
    if kind == "plain":
        for block in model.blocks:
            block.compile(dynamic=False, backend=args.backend)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def plain() -> list[float]:
            times = [time.perf_counter()]
            loss = model(tokens)
            times.append(time.perf_counter())
            loss.backward()
            times.append(time.perf_counter())
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            times.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            return [*times, time.perf_counter()]

        return plain

    from lightning_zerocompile.config import Config
    from lightning_zerocompile.engine import Engine
    from lightning_zerocompile.plugins.clipping import clip_norm

    engine = Engine(
        model, torch.device("cpu"), Config(stage=int(kind), compile_options={"backend": args.backend}), None, "gloo"
    )
    ours = torch.optim.AdamW(model.parameters(), fused=True)
    engine.attach_optimizers([ours])

    def sharded() -> list[float]:
        times = [time.perf_counter()]
        with engine.training_step():
            loss = model(tokens)
            times.append(time.perf_counter())
            with engine.backward(loss):
                loss.backward()
        times.append(time.perf_counter())
        if args.clip:  # as the strategy does it
            with engine.runtime.reads.alike():
                clip_norm(model.parameters(), 1.0)
        times.append(time.perf_counter())
        engine.step(ours, lambda: None)
        ours.zero_grad()
        return [*times, time.perf_counter()]

    return sharded


def measure(kind: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        step = make_step(kind, args)
        first = step()
        for _ in range(WARM_UP - 1):
            step()
        found = []
        for _ in range(args.steps):
            times = step()
            parts = [end - begin for begin, end in itertools.pairwise(times)]
            found.append([*parts, times[-1] - times[0]])
        best = {name: f"{min(part) * 1e3:.2f}" for name, part in zip(PARTS, zip(*found, strict=True), strict=True)}
        figures = " ".join(f"{name} {value}" for name, value in best.items())
        print(f"{kind} {args.backend} ms: {figures} first step s: {first[-1] - first[0]:.2f}", flush=True)
        if args.profile:
            with cProfile.Profile() as profile:
                for _ in range(args.steps):
                    step()
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("plain", "1", "2", "3"), default=["plain", "1", "3"])
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--blocks", type=int, default=36)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--clip", action="store_true", help="clip the gradients by their norm")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    if len(args.kinds) == 1:
        measure(args.kinds[0], args)
        return 0
    options = ["--backend", args.backend, "--blocks", str(args.blocks), "--steps", str(args.steps)]
    options += [f"--{name}" for name in ("clip", "profile") if getattr(args, name)]
    codes = [subprocess.run([sys.executable, __file__, *options, "--kinds", kind]).returncode for kind in args.kinds]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
