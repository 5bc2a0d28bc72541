"""Small models of the transformers library train as plain mean-gradient SGD trains them.

At stage 3; with --long at every stage.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import engines, models
from tests.support.harness import on_ranks

pytest.importorskip("transformers")

DECODER: dict[str, Any] = {
    "use_cache": False, "vocab_size": models.VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 24, "num_experts_per_tok": 1,
}  # fmt: skip
BERT = {
    "vocab_size": models.VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
VIT = {**BERT, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
T5 = {
    "vocab_size": models.VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
WHISPER = {
    "vocab_size": models.VOCABULARY, "num_mel_bins": 4, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_source_positions": 6, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "use_cache": False, "dropout": 0.0,
}  # fmt: skip
GPT2 = {
    "vocab_size": models.VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA = {
    "vocab_size": models.VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# name -> (configuration's class, model's class, configuration)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "llama tied": ("LlamaConfig", "LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**DECODER, **EXPERTS}),
    "qwen2-moe eager": (
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**DECODER, **EXPERTS, "experts_implementation": "eager"},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**DECODER, "num_local_experts": 24, "num_experts_per_tok": 1}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "bert": ("BertConfig", "BertForMaskedLM", BERT),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "vit": ("ViTConfig", "ViTForImageClassification", VIT),
    "mamba": ("MambaConfig", "MambaForCausalLM", MAMBA),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER),
}  # fmt: skip


def _build(name: str) -> nn.Module:
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    config, model, options = ARCHITECTURES[name]
    return getattr(hf, model)(getattr(hf, config)(**options))


class Whole(nn.Module):
    """The library's model; inputs of other kinds are made of the tokens."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.model = name, _build(name)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> []
        if self.name == "vit":
            pixels = tokens.float().repeat(1, 11)[:, :64].view(-1, 1, 8, 8) / models.VOCABULARY
            return self.model(pixel_values=pixels, labels=tokens[:, 0] % 3).loss
        if self.name == "whisper":
            mels = tokens.float().repeat(1, 8)[:, :48].view(-1, 4, 12) / models.VOCABULARY
            return self.model(input_features=mels, labels=tokens).loss
        return self.model(input_ids=tokens, labels=tokens).loss


STEPS = 5


SPARSE = ("qwen2-moe", "qwen2-moe eager", "mixtral")  # some expert gets no token on any rank
ALWAYS = ("llama", "llama tied", "qwen2-moe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.long) for name in ARCHITECTURES]
)
@on_ranks(timeout=600)
def test_trains_as_plain_torch(name: str, long: bool) -> None:
    """For each stage and scope the deviation from plain torch; parameters used and gradients produced in graphs."""
    stages = (1, 2, 3) if long else (3,)
    twin = Whole(name)
    state = {n: v.clone() for n, v in twin.state_dict().items()}
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(models.world()):
            (twin(models.Batches(rank)[number]) / models.world()).backward()
        if name in SPARSE and number == 0:
            stacked = [p.grad for n, p in twin.named_parameters() if "experts." in n and p.dim() == 3]
            assert any((grad.flatten(1).abs().sum(1) == 0).any() for grad in stacked if grad is not None)
        optimizer.step()
    moved = max((value.cpu() - state[n]).abs().max().item() for n, value in twin.state_dict().items())
    assert moved > 1e-3
    results = {}
    for stage, scope in itertools.product(stages, (False, "blocks")):
        torch._dynamo.reset()
        model, data = Whole(name), models.Batches(models.rank())
        model.load_state_dict(state)
        with engines.engine(model, stage, compile=scope) as engine:
            optimizer = engines.sgd(engine, model, lr=0.1)
            for number in range(STEPS):
                engines.step(engine, optimizer, lambda number=number, model=model, data=data: model(data[number]))
            stats = engine.runtime.stats()
        results[stage, scope] = models.deviation(model, twin), stats.graph_uses + stats.graph_reductions
    for (stage, scope), (deviation, graphs) in results.items():
        assert deviation <= 2e-6 and (graphs > 0) is (scope == "blocks"), (stage, scope, results)
