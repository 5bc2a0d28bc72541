"""Trains a LoRA adapter (PEFT) on Python's own source code over a frozen bfloat16 Llama, with ZeRO-3.

    pip install peft transformers
    python examples/lora.py                     # CPU: two gloo processes and a small random base, about a minute
    python examples/lora.py --base FOLDER       # a folder with a Llama of yours, for bytes (a vocabulary of 256)

The base is built on the meta device, and each rank reads its own rows of it from the folder. It is frozen, so a rank
keeps two bytes of each of its parameters and no optimizer state. What is written in the end is the adapter alone. Rank
0 then loads it into the base with PEFT, without this package, and reproduces the loss.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import lightning as L
import peft
import torch
import torch.nn.functional as F
import transformers
from byte_lm import Windows, adjacent_windows, load_text, spread_windows
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zerocompile import ZeroCompileStrategy, load_pretrained

ADAPTER = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])


def make_base(folder: Path) -> None:
    """A random base in bfloat16 that reads bytes; one of your own has learned something."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """`windows` is `[batch, context + 1]` uint8; the result is a mean, in nats."""
    tokens = windows.long()
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Lora(L.LightningModule):
    def __init__(self, base: Path, out: Path) -> None:
        super().__init__()
        self.base, self.out = base, out
        self.model: nn.Module | None = None

    def prepare_data(self) -> None:
        """On rank 0, while the others wait."""
        if not (self.base / "config.json").is_file():
            make_base(self.base)

    def configure_model(self) -> None:
        if self.model is not None:
            return
        config = transformers.AutoConfig.from_pretrained(self.base)
        with torch.device("meta"):
            base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        load_pretrained(base, self.base)
        self.model = peft.get_peft_model(base, ADAPTER)  # freezes the base

    def training_step(self, windows: Tensor, index: int) -> Tensor:
        loss = next_byte_loss(self.model, windows)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, windows: Tensor, index: int) -> None:
        self.log("val_loss", next_byte_loss(self.model, windows), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def on_train_end(self) -> None:
        """The adapter's values are few: every rank gathers them, and nothing of the base."""
        assert self.model is not None
        adapter = {n: p.full_tensor().cpu() for n, p in self.model.named_parameters() if p.requires_grad}
        if self.trainer.is_global_zero:
            self.model.save_pretrained(self.out, state_dict=adapter, save_embedding_layers=False)


@torch.no_grad()
def reproduce(base: Path, out: Path, batches: DataLoader[Tensor]) -> float:
    """The validation loss of the base with the adapter, by PEFT alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model = peft.PeftModel.from_pretrained(model, out).to(torch.bfloat16)
    return torch.stack([next_byte_loss(model, windows) for windows in batches]).mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, help="a folder as `save_pretrained` writes it")
    parser.add_argument("--data", type=Path, help="a folder of text files; without it, Python's standard library")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), "lora"))
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--compile", choices=("blocks", "none"), default="blocks")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--devices", default="auto" if torch.cuda.is_available() else "2")
    args = parser.parse_args()
    strategy = ZeroCompileStrategy(stage=args.stage, compile=args.compile if args.compile != "none" else False)
    trainer = L.Trainer(
        strategy=strategy, devices=args.devices, precision="bf16-true", max_steps=args.max_steps, logger=False,
        check_val_every_n_epoch=None, val_check_interval=args.max_steps, enable_checkpointing=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    base = args.base or args.out / "base"
    text, held_out = load_text(args.data)
    training: Windows = adjacent_windows(text, 128)
    validation = spread_windows(held_out, 128, 8 * trainer.world_size)
    L.seed_everything(1, verbose=False)
    module = Lora(base, args.out / "adapter")
    trainer.fit(module, DataLoader(training, 8, shuffle=True), DataLoader(validation, 4))
    if not trainer.is_global_zero:
        return 0
    reported = float(trainer.callback_metrics["val_loss"])
    measured = reproduce(base, args.out / "adapter", DataLoader(validation, 4))
    reproduced = abs(measured - reported) <= 0.02  # bfloat16 rounds in other places
    print(f"trainer's loss  {reported:.4f}")
    print(f"peft alone      {measured:.4f}: {'reproduced' if reproduced else 'NOT REPRODUCED'}")
    return 0 if reproduced else 1


if __name__ == "__main__":
    sys.exit(main())
