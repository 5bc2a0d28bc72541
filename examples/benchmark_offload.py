"""What `offload="optimizer"` costs and saves on one GPU: seconds of a step, memory, and what the link could do.

    python examples/benchmark_offload.py

A model of 24 blocks (1.89 B parameters), stage 3, bf16-true, fused AdamW, by Lightning's Trainer: without offload, with
it, and with updates inside the backward. Seconds are those of the fastest step; the
peak is that of torch's allocator over the fit. Blocks are compiled: what eager blocks have read is compared with the
masters after each use, and with offload these are in host memory. Then the bandwidth of copies between pinned host
memory and the device: in, out, both at once.

Without a GPU, tiny: python examples/benchmark_offload.py --tiny
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zerocompile import ZeroCompileStrategy

GIB = 2**30


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 6 * width), nn.Linear(6 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(L.LightningModule):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.begins: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.begins.append(time.perf_counter())
        return self.layers(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def train(sizes: tuple[int, int, int], device: str, steps: int, **options: Any) -> None:
    """Prints one row."""
    width, blocks, length = sizes
    torch.manual_seed(0)
    model = Model(width, blocks).to(device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    strategy = ZeroCompileStrategy(stage=3, **options)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=device,
        devices=1,
        precision="bf16-true",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = [torch.randn(1, length, width, dtype=torch.bfloat16) for _ in range(steps)]
    trainer.fit(model, DataLoader(data, batch_size=None))
    stats, count = strategy.stats, sum(p.numel() for p in model.parameters())
    seconds = min(after - before for before, after in pairwise(model.begins[2:]))
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
    moved = (stats.offload_in_bytes + stats.offload_out_bytes) / steps / GIB
    figures = f"{seconds:.3f} s a step, peak {peak:.1f} GiB, moved {moved:.1f} GiB a step"
    print(f"{options}: {count / 1e9:.2f} B, {figures}", flush=True)


def link() -> None:
    """Prints the bandwidth of copies in, out and both."""
    host, back = (torch.empty(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    into, out_of = host.cuda(), host.cuda()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for what in ("in", "out", "both"):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            if what != "out":
                with torch.cuda.stream(first):
                    into.copy_(host, non_blocking=True)
            if what != "in":
                with torch.cuda.stream(second):
                    back.copy_(out_of, non_blocking=True)
        torch.cuda.synchronize()
        print(f"{what}: {(20 if what == 'both' else 10) / (time.perf_counter() - begin):.1f} GiB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (64, 3, 16) if args.tiny else (2560, 24, 2048)
    train(sizes, device, args.steps)
    train(sizes, device, args.steps, offload="optimizer")
    train(sizes, device, args.steps, offload="optimizer", optimizer_in_backward=True)
    if device == "cuda":
        link()


if __name__ == "__main__":
    main()
