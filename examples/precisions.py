"""How far each precision ends from DDP's: the same model, data and steps of SGD, in two processes.

    torchrun --nproc-per-node 2 examples/precisions.py             # CPU, three to ten minutes: Inductor compiles
    torchrun --nproc-per-node 2 examples/precisions.py --compile=none

Prints the largest difference of a parameter after training, and how far DDP's parameters moved from their start.
"""

import argparse
import copy
import logging
import os
import warnings
from typing import Any

import lightning as L
import torch
from byte_lm import VOCABULARY, Block, ModelConfig, rotary_tables
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from lightning_zerocompile import ZeroCompileStrategy

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
LENGTH = 32


class Model(L.LightningModule):
    """A small language model on random bytes, other ones on each rank."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.embed = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # [batch, length]
        x = self.embed(batch)
        cos, sin = rotary_tables(batch.shape[1], self.head_dim, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(start: Model, strategy: Any, precision: str, steps: int) -> Model:
    """A trained copy of ``start``, on the CPU."""
    module, arguments = copy.deepcopy(start), {"precision": precision}
    if precision == "16-mixed" and not torch.cuda.is_available():  # Lightning makes bf16-mixed of the word there
        arguments = {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))]}
    trainer = L.Trainer(
        strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), max_steps=steps, logger=False, barebones=True,
        use_distributed_sampler=False, **arguments,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(trainer.global_rank)
    data = [torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator) for _ in range(steps)]
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return module.cpu()


def deviation(left: nn.Module, right: nn.Module) -> float:
    """The largest difference of two parameters of the same name."""
    theirs = dict(right.named_parameters())
    return max(
        (p.detach().double() - theirs[n].detach().double()).abs().max().item() for n, p in left.named_parameters()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", choices=["both", "none"], default="both", help="none: eager only")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    start = Model(ModelConfig(dim=32, layers=3, heads=2))
    columns = [(stage, False) for stage in (1, 3)] + [(3, "blocks")] * (arguments.compile == "both")
    leads = int(os.environ["RANK"]) == 0
    rows = ["| precision | DDP moved | " + " | ".join(f"stage {s}, {c or 'eager'}" for s, c in columns) + " |"]
    rows.append("|---" * (2 + len(columns)) + "|")
    for precision in PRECISIONS:
        ddp = train(start, "ddp", precision, arguments.steps)
        cells = [f"{deviation(ddp, start):.0e}"]
        for stage, scope in columns:
            ours = train(start, ZeroCompileStrategy(stage=stage, compile=scope), precision, arguments.steps)
            cells.append(f"{deviation(ours, ddp):.0e}")
        rows.append(f"| `{precision}` | " + " | ".join(cells) + " |")
        if leads:
            print(*rows, sep="\n", flush=True)
        rows = []


if __name__ == "__main__":
    main()
