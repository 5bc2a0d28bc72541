"""Small models of the transformers library train as plain mean-gradient SGD trains them, at stage 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import engines, models
from tests.harness import Ranks

pytest.importorskip("transformers")

DECODER: dict[str, Any] = {
    "use_cache": False, "vocab_size": models.VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


def _build(name: str) -> nn.Module:
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=name == "llama tied"))


class Whole(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = _build(name)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


NAMES = ["llama", "llama tied"]


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
