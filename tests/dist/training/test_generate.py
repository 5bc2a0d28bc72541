"""A Hugging Face model generates text in the validation of a fit, on its sharded weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import Worlds, on_ranks
from tests.support.parity import AOT, EAGER

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
        self.length = 3

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def write(self, batch: Tensor) -> list[int]:
        batch = batch.to(self.device)
        mask = torch.ones_like(batch)
        tokens = self.model.generate(batch, attention_mask=mask, max_new_tokens=self.length, do_sample=False)  # type: ignore[operator]
        return tokens[:, batch.shape[1] :].flatten().tolist()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.written.append(self.write(batch))


STEPS = 2


CASES = [(1, EAGER), (3, EAGER), (3, AOT), (1, AOT), (2, EAGER), (2, AOT), (3, {"compile": "blocks"})]


@pytest.mark.parametrize(
    ("stage", "options"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.long) for case in CASES[2:])]
)
@on_ranks(timeout=300)
def test_generates_in_validation(stage: int, options: dict[str, Any]) -> None:
    """The plain module's tokens before and between training steps, whose losses stay those of plain torch. Rank 1
    writes twice as many: at stage 3 `generate` is told that the ranks wait for each other."""
    torch.manual_seed(0)
    module = Writer()
    module.length = 3 + 3 * models.rank()
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


@pytest.mark.parametrize("options", [AOT, pytest.param(EAGER, marks=pytest.mark.long)])
@on_ranks(timeout=300)
def test_ranks_generate_on_their_own(options: dict[str, Any]) -> None:
    """Inside `unequal()` no rank runs a forward for another one: each runs as many as its own text needs."""
    torch.manual_seed(0)
    module = Writer()
    module.length = 3 + 5 * models.rank()
    prompts = models.Batches(models.rank(), 1)
    expected = copy.deepcopy(module).to(models.device()).eval().write(prompts[0])
    forwards: list[object] = []
    module.model.register_forward_hook(lambda *_: forwards.append(None))
    strategy = ZeroCompileStrategy(3, unequal_work="evaluation", timeout=timedelta(seconds=60), **options)
    models.make_trainer(strategy).validate(module, prompts, verbose=False)  # type: ignore[arg-type]
    assert module.written == [expected]
    assert len(forwards) == module.length and (strategy.stats.served > 0 or models.rank() == models.world() - 1)


# ---- one rank alone ----


class Samples(L.Callback):
    """On rank 0 alone."""

    def __init__(self, write: Callable[[L.Trainer, Any], list[int]]) -> None:
        self.write = write
        self.written: list[int] = []

    @rank_zero_only
    def on_validation_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.written = self.write(trainer, module)


PROMPT = torch.tensor([[3, 1, 4, 1]])


def _alone(stage: int, options: dict[str, Any]) -> tuple[str, float, bool]:
    """What a fit says in which rank 0 alone generates; after how long; and whether that gave plain torch's tokens."""
    torch.manual_seed(0)
    module, callback = Writer(), Samples(lambda trainer, module: module.write(PROMPT))
    expected = copy.deepcopy(module).eval().write(PROMPT)
    strategy = ZeroCompileStrategy(stage, timeout=timedelta(minutes=5), **options)
    trainer = models.make_trainer(strategy, max_steps=1, callbacks=[callback], num_sanity_val_steps=1)
    start = time.monotonic()
    try:
        trainer.validate(module, models.Batches(models.rank(), 1), verbose=False)  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error), time.monotonic() - start, False
    return "", 0.0, callback.written == expected


@pytest.mark.parametrize("options", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
def test_one_rank_alone_generates(all_worlds: Worlds, options: dict[str, Any]) -> None:
    """At stages 1 and 2 as under DDP; at stage 3 all ranks say within seconds who generates, and where."""
    ranks = all_worlds.fresh(2)
    try:
        for stage in (1, 2):
            first, second = ranks.run(_alone, stage, options)
            assert first == ("", 0.0, True) and second[0] == "", (first, second)
        found = ranks.run(_alone, 3, options)
    finally:
        ranks.close(kill=True)
    for text, seconds, _ in found:
        assert "rank 0 asks for `generate` of a sharded LlamaForCausalLM, in `on_validation_epoch_end`" in text, found
        assert "strategy.full_parameters" in text and seconds < 60, found


class InFull(Writer):
    """All ranks take full values, and rank 0 generates; then all do."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with self.trainer.strategy.full_parameters(self.model, writeback=False):  # type: ignore[attr-defined]
            if models.rank() == 0:
                self.written.append(self.write(PROMPT))
        self.written.append(self.write(PROMPT))


@pytest.mark.parametrize(("stage", "options"), [(3, EAGER), pytest.param(3, AOT, marks=pytest.mark.long)])
@on_ranks()
def test_one_rank_generates_with_full_values(stage: int, options: dict[str, Any]) -> None:
    """The remedy that the errors name."""
    torch.manual_seed(0)
    module = InFull()
    expected = copy.deepcopy(module).eval().write(PROMPT)
    strategy = ZeroCompileStrategy(stage, timeout=timedelta(seconds=60), **options)
    models.make_trainer(strategy).validate(module, models.Batches(models.rank(), 1), verbose=False)  # type: ignore
    assert module.written == [expected] * (2 if models.rank() == 0 else 1)
