"""Contrastive training with a large batch in small memory: GradCache in a `coalesce_grad_reduction` window.

    python examples/gradcache.py                     # CPU: two gloo processes, about a minute
    python examples/gradcache.py --stage 1 --batch 128 --chunk 8

The encoder learns which piece of source code follows which. All pairs of a batch are each other's negatives, so the
loss needs the whole batch at once; its activations need not be there at once (Gao et al., "Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup", 2021): embed every chunk without gradients, differentiate the loss
with respect to the embeddings, then embed chunk by chunk again with these gradients. That is a backward per chunk;
the window makes it one reduction, and at stage 3 one gather, of each parameter.

The script trains twice from the same weights, with one large backward and with cached chunks, and prints memory,
collectives and the difference of the resulting parameters. It exits with an error if that is not rounding.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from byte_lm import VOCABULARY, Block, ModelConfig, load_text, rotary_tables
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_zerocompile import ZeroCompileStrategy

TEMPERATURE = 0.1


class Pairs(Dataset[Tensor]):
    """Item `i` is `[2, context]` uint8: a piece of text and the piece that follows it."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context  # [bytes] uint8

    def __len__(self) -> int:
        return len(self.text) // (2 * self.context)

    def __getitem__(self, index: int) -> Tensor:
        start = index * 2 * self.context
        return self.text[start : start + 2 * self.context].view(2, self.context)


class Encoder(nn.Module):
    """Bytes to unit vectors: the blocks of the language model and the mean over positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.embed = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)

    def forward(self, text: Tensor) -> Tensor:  # [batch, context] uint8 -> [batch, dim]
        x = self.embed(text.int())
        cos, sin = rotary_tables(text.shape[1], self.head_dim, like=x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.normalize(self.norm(x).mean(1), dim=-1)


def contrastive_loss(vectors: Tensor) -> Tensor:  # [batch, 2, dim]
    """InfoNCE in both directions: each piece finds the one that follows it among those of the batch."""
    similarity = vectors[:, 0] @ vectors[:, 1].T / TEMPERATURE  # [batch, batch]
    target = torch.arange(len(vectors), device=vectors.device)
    return (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2


class TrainEncoder(L.LightningModule):
    """`chunk` pairs at a time, or the whole batch at once when it is None."""

    def __init__(self, config: ModelConfig, lr: float, chunk: int | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.lr, self.chunk = Encoder(config), lr, chunk
        self.losses: list[float] = []

    def encode(self, pairs: Tensor) -> Tensor:  # [batch, 2, context] -> [batch, 2, dim]
        return self.encoder(pairs.flatten(0, 1)).unflatten(0, (-1, 2))

    def training_step(self, pairs: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        if self.chunk is None:
            loss = contrastive_loss(self.encode(pairs))
            self.manual_backward(loss)
        else:
            loss = self.cached_backward(pairs.split(self.chunk))
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())

    def cached_backward(self, chunks: tuple[Tensor, ...]) -> Tensor:
        strategy: Any = self.trainer.strategy
        with strategy.coalesce_grad_reduction():
            with torch.no_grad():
                vectors = torch.cat([self.encode(chunk) for chunk in chunks])
            vectors.requires_grad_()
            loss = contrastive_loss(vectors)
            (gradient,) = torch.autograd.grad(loss, vectors)
            for chunk, part in zip(chunks, gradient.split([len(c) for c in chunks]), strict=True):
                self.manual_backward((self.encode(chunk) * part).sum())
        return loss.detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)  # Adam would hide differences


class Meter(L.Callback):
    """Peak memory above what was there before the steps, collectives and time; of the steps after the first two."""

    def __init__(self) -> None:
        self.peak, self.running = 0, False

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != 2:  # compiled by then
            return
        self.before, self.start, self.first = trainer.strategy.stats, time.perf_counter(), trainer.global_step  # type: ignore[attr-defined]
        self.base = allocated()
        self.running = True
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.running:
            self.peak = max(self.peak, allocated())
            time.sleep(0.001)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.running = False
        steps, now = trainer.global_step - self.first, trainer.strategy.stats  # type: ignore[attr-defined]
        self.peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self.peak
        self.mebibytes = (self.peak - self.base) / 2**20
        self.reductions = (now.reductions - self.before.reductions) / steps
        self.gathers = (now.gathers - self.before.gathers) / steps
        self.seconds = (time.perf_counter() - self.start) / steps


def allocated() -> int:
    """Bytes: on a GPU those of tensors, otherwise those of the process."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train(args: argparse.Namespace, chunk: int | None) -> tuple[TrainEncoder, Meter]:
    L.seed_everything(args.seed, verbose=False)
    module = TrainEncoder(ModelConfig(args.dim, args.layers, args.heads), args.lr, chunk)
    text, _ = load_text(args.data)
    loader = DataLoader(Pairs(text, args.context), batch_size=args.batch, shuffle=True, drop_last=True)
    meter = Meter()
    L.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy=ZeroCompileStrategy(stage=args.stage, compile="blocks" if args.compile == "blocks" else False),
        max_steps=args.steps,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    ).fit(module, loader)
    return module, meter


def parse_args() -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=formatter)
    add = parser.add_argument
    add("--data", type=Path, help="a folder of text files; without it, Python's standard library")
    add("--stage", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage")
    add("--compile", choices=("blocks", "none"), default="blocks", help="what torch.compile is applied to")
    add("--devices", default="auto" if torch.cuda.is_available() else "2", help="number of processes")
    add("--batch", type=int, default=64, help="pairs in a batch, per process; all are each other's negatives")
    add("--chunk", type=int, default=8, help="pairs that are embedded at a time")
    add("--steps", type=int, default=40, help="optimizer steps; at least 3")
    add("--context", type=int, default=64, help="bytes in a piece")
    add("--dim", type=int, default=64, help="width of the encoder")
    add("--layers", type=int, default=2, help="number of blocks")
    add("--heads", type=int, default=4, help="attention heads in a block")
    add("--lr", type=float, default=0.2, help="learning rate of SGD with momentum")
    add("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps must be at least 3: the first two compile")
    return args


def main() -> None:
    args = parse_args()
    # the small one first: a process keeps the memory that it has used
    runs = {f"chunks of {args.chunk}": train(args, args.chunk), "one backward": train(args, None)}
    first, second = (dict(module.named_parameters()) for module, _ in runs.values())
    difference = max((first[name] - second[name]).abs().max().item() for name in first)
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        print(f"\n{'':<14}{'loss':>17}{'MiB':>9}{'reductions':>12}{'gathers':>9}{'s/step':>9}")
        for name, (module, meter) in runs.items():
            first_losses, last_losses = module.losses[:5], module.losses[-5:]
            losses = f"{sum(first_losses) / len(first_losses):.4f} -> {sum(last_losses) / len(last_losses):.4f}"
            counts = f"{meter.reductions:>12.1f}{meter.gathers:>9.1f}"
            print(f"{name:<14}{losses:>17}{meter.mebibytes:>9.1f}{counts}{meter.seconds:>9.3f}")
        print(f"largest difference of a parameter after {args.steps} steps: {difference:.1e}")
    if difference > 1e-4:
        sys.exit("cached chunks and one backward do not agree")


if __name__ == "__main__":
    main()
