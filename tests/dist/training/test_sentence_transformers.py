"""The cached losses of sentence-transformers: they run a backward per chunk inside one backward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import mean_backward

pytest.importorskip("sentence_transformers", reason="pip install -e '.[test]'")

TEXTS, TOKENS, WIDTH, VOCABULARY = 6, 7, 16, 40
LOSSES = {
    "MultipleNegativesRankingLoss": "CachedMultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss": "CachedMultipleNegativesSymmetricRankingLoss",
    "GISTEmbedLoss": "CachedGISTEmbedLoss",
}


class Bert(nn.Module):
    """A small random BERT with mean pooling, and the attributes that the losses ask for."""

    max_seq_length = TOKENS

    def __init__(self) -> None:
        super().__init__()
        from tokenizers import Tokenizer
        from tokenizers import models as tokenizers
        from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=TOKENS, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = BertModel(config, add_pooling_layer=False)
        words = Tokenizer(tokenizers.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return {**features, "sentence_embedding": hidden.last_hidden_state.mean(1)}


def _encoder() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(modules=[Bert()], device=models.device())


def _features(rank: int) -> list[dict[str, Tensor]]:
    """An anchor and its positive, `[texts, tokens]` each."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(1, VOCABULARY, (2, TEXTS, TOKENS), generator=generator).to(models.device())
    return [{"input_ids": t, "attention_mask": torch.ones_like(t)} for t in tokens]


def _loss(name: str, encoder: Any, guide: Any) -> nn.Module:
    from sentence_transformers import losses

    arguments = {"guide": guide} if "GIST" in name else {}
    chunks = {"mini_batch_size": 2} if name.startswith("Cached") else {}
    loss: nn.Module = getattr(losses, name)(encoder, **arguments, **chunks)
    return loss


def _check(stage: int, name: str, window: bool, compile: Any) -> None:
    encoder, twin, guide = _encoder(), _encoder(), _encoder()
    twin.load_state_dict(encoder.state_dict())
    engine = engines.make_engine(encoder, stage, compile=compile, keep_gradients=True)
    labels = torch.zeros(TEXTS, device=models.device())
    try:
        cached = _loss(LOSSES[name], encoder, guide)
        with engine.training_step(), engine.windows.open("auto", None, None) if window else contextlib.nullcontext():
            value = cached(_features(models.rank()), labels)
            engines.backward(engine, value)
        stats = engine.runtime.stats()
        ours = {n: full_value(p.grad) for n, p in encoder.named_parameters() if p.grad is not None}
    finally:
        engine.abandon()
    plain = _loss(name, twin, guide)
    mean_backward(lambda rank: plain(_features(rank), labels))
    theirs = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    largest = max(g.abs().max().item() for g in theirs.values())
    assert ours.keys() == theirs.keys() and largest > 1e-3
    worst = max((ours[n] - theirs[n]).abs().max().item() for n in ours)
    assert worst <= 1e-5 * largest
    assert stats.backwards == 1 and stats.reductions <= 6


LONG = [pytest.param(*cell, marks=pytest.mark.long) for cell in ((1, "blocks"), (2, "blocks"), (2, False))]


@pytest.mark.parametrize(("stage", "compile"), [(1, False), (3, False), (3, "blocks"), *LONG])
@pytest.mark.parametrize("window", [False, True])
@on_ranks(timeout=240)
def test_cached_losses_equal_the_plain_ones(stage: int, compile: Any, window: bool, long: bool) -> None:
    """Every gradient equals the uncached loss's, and the chunks' backwards cost one reduction."""
    for name in LOSSES if long or not compile else [*LOSSES][:1]:  # the same encoder is compiled
        torch._dynamo.reset()
        _check(stage, name, window, compile)
