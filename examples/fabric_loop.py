"""A plain training loop on Lightning Fabric: what `fabric.setup` gets is sharded, the loop is as with any strategy.

python examples/fabric_loop.py                                     # CPU: two gloo processes, half a minute
python examples/fabric_loop.py --strategy zerocompile_stage_1      # or `ddp`: the same losses
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from byte_lm import ByteLM, ModelConfig
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zerocompile import ZeroCompileFabricStrategy  # the import registers the names


def batches(rank: int, steps: int, size: int = 8, length: int = 64) -> list[Tensor]:
    """``[size, length]`` bytes of this rank: counting, from a random start."""
    starts = torch.randint(0, 256, (steps, size, 1), generator=torch.Generator().manual_seed(rank))
    return list((starts + torch.arange(length)) % 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zerocompile")
    parser.add_argument("--eager", action="store_true", help="stage 3 without compilation")
    parser.add_argument("--devices", default="auto" if torch.cuda.is_available() else "2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    strategy = ZeroCompileFabricStrategy(compile=False) if args.eager else args.strategy
    fabric = L.Fabric(strategy=strategy, devices=args.devices)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model: nn.Module = ByteLM(ModelConfig(dim=32, layers=2, heads=2))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step, batch in enumerate(batches(fabric.global_rank, args.steps * args.accumulate)):
        batch, last = fabric.to_device(batch), (step + 1) % args.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            fabric.backward(loss / args.accumulate)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = fabric.all_reduce(loss.detach())
            fabric.print(f"step {(step + 1) // args.accumulate}: loss {mean:.6f}")


if __name__ == "__main__":
    main()
