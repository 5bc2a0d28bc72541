"""A Hugging Face model generates text in the validation of a fit, on its sharded weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT

pytest.importorskip("transformers")


def _llama() -> nn.Module:
    import transformers as hf

    hf.logging.set_verbosity_error()
    config = hf.LlamaConfig(
        vocab_size=models.VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=None, hidden_size=16,
        intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


class Writer(models.Module):
    """Trains on tokens, and writes some more after each step, with a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__(model=_llama, lr=0.5)
        self.written: list[list[int]] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def write(self, batch: Tensor) -> list[int]:
        mask = torch.ones_like(batch)
        tokens = self.model.generate(batch, attention_mask=mask, max_new_tokens=3, do_sample=False)  # type: ignore[operator]
        return tokens[:, batch.shape[1] :].flatten().tolist()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.written.append(self.write(batch))


STEPS = 2


CASES = [(1, {"compile": False}), (3, {"compile": False}), (3, AOT), (1, AOT), (3, {"compile": "blocks"})]


@pytest.mark.parametrize(
    ("stage", "options"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.long) for case in CASES[2:])]
)
@on_ranks(2, timeout=300)
def test_generates_in_validation(stage: int, options: dict[str, Any]) -> None:
    """The plain module's tokens before and between training steps, whose losses stay those of plain torch."""
    torch.manual_seed(0)
    module = Writer()
    twin = copy.deepcopy(module).to(models.device())
    prompts = models.Batches(models.rank(), 1)
    expected = [twin.eval().write(prompts[0])]  # the validation before training
    data = [models.Batches(r) for r in range(models.world())]
    optimizer, losses = twin.configure_optimizers(), []
    for step in range(STEPS):
        twin.train().zero_grad()
        for r in range(models.world()):
            loss = twin.loss(data[r][step])
            (loss / models.world()).backward()
            losses += [loss.item()] if r == models.rank() else []
        optimizer.step()
        expected.append(twin.eval().write(prompts[0]))
    assert len({tuple(tokens) for tokens in expected}) > 1  # training changes what is written
    trainer = models.make_trainer(
        ZeroCompileStrategy(stage, **options), max_steps=STEPS, val_check_interval=1, num_sanity_val_steps=1
    )
    trainer.fit(module, data[models.rank()], prompts)
    assert module.written == expected
    assert module.losses == pytest.approx(losses, abs=1e-5) and models.deviation(module, twin) < 1e-6
