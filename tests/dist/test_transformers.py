"""Small models of the transformers library train as plain mean-gradient SGD trains them, at stage 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import engines, models
from tests.harness import Ranks

pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "use_cache": False,
    "vocab_size": models.VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER: dict[str, Any] = COMMON | {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


def _build(name: str) -> nn.Module:
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    if name in ("llama", "llama tied"):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=name == "llama tied"))
    if name == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=8))
    if name == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=3, num_experts_per_tok=2))
    if name == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**COMMON, **sizes, **dropout))
    if name == "bert":
        sizes = {
            n: DECODER[n] for n in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        }
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hf.BertForMaskedLM(hf.BertConfig(**COMMON, **sizes, **dropout))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**COMMON, **sizes, decoder_start_token_id=0))


class Whole(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = _build(name)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


NAMES = ["llama", "llama tied"]  # the other configurations above are not seen to pass yet


def _trained(name: str) -> dict[Any, float]:
    twin = Whole(name)
    state = {n: v.clone() for n, v in twin.state_dict().items()}
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        for rank in range(models.world()):
            (twin(models.Batches(rank)[number]) / models.world()).backward()
        optimizer.step()
    deviations = {}
    for scope in (False, "blocks"):
        torch._dynamo.reset()
        model, data = Whole(name), models.Batches(models.rank())
        model.load_state_dict(state)
        with engines.engine(model, 3, compile=scope) as engine:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine.attach_optimizers([optimizer])
            for number in range(3):
                engines.step(engine, optimizer, lambda number=number, model=model, data=data: model(data[number]))
        deviations[scope] = models.deviation(model, twin)
    return deviations


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_plain_torch(ranks: Ranks, name: str) -> None:
    for deviations in ranks.run(_trained, name, timeout=200):
        assert max(deviations.values()) <= 2e-6, deviations
