"""LoRA fine-tuning of a transformers model, whose adapter rank 0 saves in the middle of the run.

    pip install peft transformers
    python examples/huggingface.py            # CPU: two gloo processes, about half a minute; or all GPUs

A small random Llama stands for a pretrained one, so nothing is downloaded. Its base is frozen, its activations are
recomputed in the backward (`gradient_checkpointing_enable`). Every `--every` steps rank 0 saves the adapter as it
would without a strategy, by `save_pretrained`: inside `strategy.full_state_dict`, which all ranks enter, `state_dict()`
has full values there. `push_to_hub`, sentence-transformers' `save_pretrained` and safetensors work in the same place.
Afterwards the last adapter is loaded into a fresh base and must give the trained model's loss; then it is merged.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import peft
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_zerocompile  # noqa: F401  (registers the strategy's names)

VOCABULARY, LENGTH = 256, 32


def make_base() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class FineTune(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        base: Any = make_base()
        base.gradient_checkpointing_enable()
        self.model: Any = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        self.model.enable_input_require_grads()  # the base is frozen: its checkpoints need an input with a gradient

    def training_step(self, tokens: Tensor, index: int) -> Tensor:  # [batch, length] int64
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


class SaveAdapter(L.Callback):
    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every = folder, every

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            with trainer.strategy.full_state_dict(module.model):  # type: ignore[attr-defined]  # all ranks enter
                if trainer.is_global_zero:
                    module.model.save_pretrained(self.folder)


@rank_zero_only
def check(trained: Any, folder: str, tokens: Tensor) -> None:
    """Exits with an error if what was saved is not what was trained."""
    saved = peft.PeftModel.from_pretrained(make_base(), folder)
    merged = trained.eval().merge_and_unload()  # after the fit the module is an ordinary one
    with torch.no_grad():
        ours, theirs = (model(input_ids=tokens, labels=tokens).loss.item() for model in (merged, saved.eval()))
    size = (Path(folder) / "adapter_model.safetensors").stat().st_size
    print(f"loss {ours:.6f}; with the adapter that rank 0 saved ({size} bytes): {theirs:.6f}")
    if abs(ours - theirs) > 1e-5:
        sys.exit("They differ.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "zerocompile-adapter"))
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(VOCABULARY, (64 * max(gpus, 2), 1), generator=generator)
    data = (starts + torch.arange(LENGTH)) % VOCABULARY  # something to learn: each token is the last one plus one
    module = FineTune()
    L.Trainer(
        strategy=f"zerocompile_stage_{arguments.stage}", accelerator="cuda" if gpus else "cpu", devices=gpus or 2,
        max_steps=arguments.steps, max_epochs=-1, callbacks=[SaveAdapter(arguments.folder, arguments.every)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, DataLoader(data, batch_size=8, shuffle=True))  # fmt: skip
    check(module.model, arguments.folder, data[:8])


if __name__ == "__main__":
    main()
