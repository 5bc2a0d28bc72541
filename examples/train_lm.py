"""Trains a byte-level language model on Python's own source code with ZeRO-3, then uses it without this package.

    python examples/train_lm.py                               # CPU: two gloo processes, about three minutes
    python examples/train_lm.py --stage 1 --data ~/notes      # other stage, other text
    python examples/train_lm.py --strategy ddp --compile none # the same run without lightning_zerocompile

On GPUs it takes all of them, NCCL, bfloat16 and a larger model (see PRESETS). At the end rank 0 loads the checkpoint
in plain torch, reproduces the validation loss that the trainer reported, compares it with a bigram model and prints
a sample. It exits with an error when the loss is not reproduced, or when a full run does not beat the bigram model.
"""

import argparse
import math
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from byte_lm import (
    ByteLM,
    ModelConfig,
    Windows,
    adjacent_windows,
    bigram_entropy,
    evaluate,
    load_checkpoint,
    load_text,
    sample,
    spread_windows,
)
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.utils.data import DataLoader

PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        **{"devices": "2", "precision": "32-true", "dim": 128, "layers": 4, "heads": 4, "context": 128},
        **{"batch_size": 16, "lr": 3e-3, "max_steps": 300, "val_batches": 8},
    },
    "cuda": {
        **{"devices": "auto", "precision": "bf16-true", "dim": 512, "layers": 8, "heads": 8, "context": 512},
        **{"batch_size": 32, "lr": 1e-3, "max_steps": 2000, "val_batches": 8},
    },
}


class TrainByteLM(L.LightningModule):
    """What Lightning adds to the model: the loss of a step, and the optimizer."""

    def __init__(self, model: ModelConfig, lr: float, max_steps: int) -> None:
        super().__init__()
        self.save_hyperparameters({"model": asdict(model)})  # so that the checkpoint alone rebuilds the model
        self.model = ByteLM(model)
        self.lr, self.max_steps = lr, max_steps

    def training_step(self, windows: Tensor, index: int) -> Tensor:
        """`windows` is `[batch, context + 1]` uint8."""
        loss = self.model.loss(windows)
        self.log("train_bpb", loss, prog_bar=True)
        return loss

    def validation_step(self, windows: Tensor, index: int) -> None:
        """`windows` is `[batch, context + 1]` uint8. All batches are equally large, so their mean is the mean."""
        self.log("val_bpb", self.model.loss(windows), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_factor(self, step: int) -> float:
        """Linear warm-up over the first tenth of the steps, then a cosine down to 0."""
        warmup = max(1, self.max_steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, self.max_steps - warmup))


def parse_args() -> tuple[argparse.Namespace, bool]:
    """The options, and whether the run is at least as long as the default one."""
    first = argparse.ArgumentParser(add_help=False)  # the accelerator decides the other defaults
    first.add_argument("--accelerator", choices=PRESETS, default="cuda" if torch.cuda.is_available() else "cpu")
    preset = PRESETS[first.parse_known_args()[0].accelerator]

    formatter = argparse.ArgumentDefaultsHelpFormatter
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(parents=[first], description=summary, formatter_class=formatter)
    add = parser.add_argument
    add("--data", type=Path, help="a folder of text files; without it, Python's standard library")
    add("--out", type=Path, default=Path(tempfile.gettempdir(), "train_lm"), help="folder for checkpoint and metrics")
    add("--strategy", default="zerocompile", help="zerocompile, or a strategy of Lightning, to compare: ddp")
    add("--stage", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage (zerocompile only)")
    add("--compile", choices=("blocks", "model", "none"), default="blocks", help="what torch.compile is applied to")
    add("--backend", default="inductor", help="backend of torch.compile")
    add("--devices", help="number of processes")
    add("--precision", help="as in Trainer(precision=...)")
    add("--dim", type=int, help="width of the model")
    add("--layers", type=int, help="number of blocks")
    add("--heads", type=int, help="attention heads in a block")
    add("--context", type=int, help="bytes in a window")
    add("--batch-size", type=int, help="windows in a batch, per process")
    add("--lr", type=float, help="highest learning rate")
    add("--max-steps", type=int, help="optimizer steps")
    add("--val-batches", type=int, help="validation batches, per process")
    add("--num-workers", type=int, default=0, help="data loader processes, per process")
    add("--seed", type=int, default=1)
    parser.set_defaults(**preset)
    args = parser.parse_args()
    return args, args.max_steps >= preset["max_steps"]


def make_strategy(args: argparse.Namespace) -> Strategy | str:
    name: str = args.strategy
    if name != "zerocompile":
        return name
    from lightning_zerocompile import ZeroCompileStrategy

    scopes: dict[str, Literal["blocks", "model", False]] = {"blocks": "blocks", "model": "model", "none": False}
    return ZeroCompileStrategy(
        stage=args.stage, compile=scopes[args.compile], compile_options={"backend": args.backend}
    )


def make_trainer(args: argparse.Namespace, checkpoint: ModelCheckpoint) -> L.Trainer:
    validations = next(count for count in (4, 3, 2, 1) if args.max_steps % count == 0)  # the last step has one
    return L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=make_strategy(args),
        precision=args.precision,
        max_steps=args.max_steps,
        val_check_interval=args.max_steps // validations,
        check_val_every_n_epoch=None,  # the interval counts steps, not steps of an epoch
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=CSVLogger(args.out, name="metrics"),
        callbacks=[checkpoint, TQDMProgressBar(refresh_rate=10)],
    )


def make_module(args: argparse.Namespace) -> TrainByteLM:
    """The module to train; zerocompile compiles it itself, for another strategy it is done here."""
    module = TrainByteLM(ModelConfig(args.dim, args.layers, args.heads), args.lr, args.max_steps)
    if args.strategy != "zerocompile" and args.compile != "none":
        for part in module.model.blocks if args.compile == "blocks" else [module.model]:
            part.compile(backend=args.backend)
    return module


def train(args: argparse.Namespace, trainer: L.Trainer, training: Windows, validation: Windows) -> float:
    """Runs the training; the result is its duration in seconds. Lightning gives each rank its part of the windows."""
    L.seed_everything(args.seed, verbose=False)
    module = make_module(args)
    started = time.perf_counter()
    options: dict[str, Any] = {"batch_size": args.batch_size, "num_workers": args.num_workers}
    training_batches = DataLoader(training, shuffle=True, drop_last=True, **options)
    trainer.fit(module, training_batches, DataLoader(validation, **options))
    return time.perf_counter() - started


def report(
    args: argparse.Namespace, full_run: bool, path: str, reported: float, text: Tensor, validation: Windows
) -> bool:
    """Plain torch from here on: no Trainer, no strategy. `text` is the training text, `[bytes]` uint8.

    The result says whether the checkpoint reproduces `reported` (bits per byte) and, after a full run, beats a bigram.
    """
    model = load_checkpoint(path, torch.device(args.accelerator))
    measured = evaluate(model, validation, args.batch_size)
    # In half precision a compiled block rounds at fewer places than the same block run eagerly.
    tolerance = 1e-5 if args.precision.startswith("32") else 1e-2
    reproduced = abs(measured - reported) <= tolerance
    bigram = bigram_entropy(text, validation)

    print(f"\ncheckpoint          {path}")
    print(f"sample              {'-' * 60}")
    print(sample(model, b"def ", 300, args.context).decode(errors="replace"))
    print("-" * 80)
    print(f"trainer's loss      {reported:.6f} bits per byte")
    verdict = "reproduced" if reproduced else "NOT REPRODUCED"
    print(f"plain torch         {measured:.6f} bits per byte: {verdict} (tolerance {tolerance:g})")
    verdict = "beaten" if measured < bigram else "not beaten" if full_run else "not beaten (short run)"
    print(f"bigram model        {bigram:.6f} bits per byte: {verdict}", flush=True)
    return reproduced and (measured < bigram or not full_run)


def main() -> int:
    args, full_run = parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    if args.accelerator == "cpu":
        torch.set_num_threads(1)  # the processes share the cores

    checkpoint = ModelCheckpoint(
        args.out, filename="best", monitor="val_bpb", save_weights_only=False, enable_version_counter=False
    )
    trainer = make_trainer(args, checkpoint)
    text, held_out = load_text(args.data)
    training = adjacent_windows(text, args.context)
    validation = spread_windows(held_out, args.context, args.val_batches * args.batch_size * trainer.world_size)
    seconds = train(args, trainer, training, validation)
    if not trainer.is_global_zero:
        return 0

    print(f"trained on {len(text) / 1e6:.1f} MB: {trainer.global_step} steps, {seconds:.0f} s (with compilation)")
    assert checkpoint.best_model_score is not None
    reported = checkpoint.best_model_score.item()
    return 0 if report(args, full_run, checkpoint.best_model_path, reported, text, validation) else 1


if __name__ == "__main__":
    sys.exit(main())
