"""Rank 0 saves in the middle of a run, by whatever calls `state_dict()`: `full_state_dict`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import Worlds, on_ranks
from tests.support.parity import AOT, EAGER, reference

CELLS = [(1, EAGER), (2, AOT), (3, EAGER), (3, AOT)]


def _largest(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name].double() - right[name].cpu().double()).abs().max().item() for name in right)


@pytest.mark.parametrize(("stage", "options"), CELLS)
@on_ranks()
def test_inside_state_dict_has_full_values(stage: int, options: dict[str, Any]) -> None:
    """Of the whole and of its parts, tied ones in one piece, in the dtypes of after the fit; it trains on as DDP."""
    model = models.ByteModel()
    model.head.weight = model.embedding.weight
    model.shift.data = model.shift.data.double()
    twin = copy.deepcopy(model)
    with engines.engine(model, stage, **options) as engine:
        optimizer = engines.sgd(engine, model)
        own = models.Batches(models.rank())
        engines.step(engine, optimizer, lambda: engines.token_loss(model, own[0]))
        reference(twin, 1)
        with engine.full_state_dict(model) as state:
            if models.rank() == 0:
                assert _largest(state, twin.state_dict()) <= 1e-6
                assert {name: value.dtype for name, value in state.items() if value.dtype != torch.float32} == {
                    "shift": torch.float64
                }
                assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
                assert _largest(model.layers[1].state_dict(), twin.layers[1].state_dict()) <= 1e-6
            else:
                assert state == {}
                with pytest.raises(RuntimeError, match=rf"rank {models.rank()}: rank 0 alone.*is_global_zero"):
                    model.state_dict()
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        engines.step(engine, optimizer, lambda: engines.token_loss(model, own[1]))
    reference(twin, [1])
    assert models.deviation(model, twin) <= 1e-6


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_one_rank_alone_raises_in_seconds(stage: int) -> None:
    """Rank 0 enters alone, while the others go on to another backward; all can go on."""
    model = models.ByteModel()
    own = models.Batches(models.rank())
    with engines.engine(model, stage, timeout=timedelta(minutes=2), **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        engines.step(engine, optimizer, lambda: engines.token_loss(model, own[0]))
        if models.rank() == 0:
            start = time.monotonic()
            with (
                pytest.raises(
                    RuntimeError, match=r"rank 0 asks for `full_state_dict`.*rank [1-9] has.*Every rank must"
                ),
                engine.full_state_dict(model),
            ):
                pass
            assert time.monotonic() - start < 20
        engines.step(engine, optimizer, lambda: engines.token_loss(model, own[1]))


# ---- libraries ----


class Saves(L.Callback):
    """After the first batch, on rank 0."""

    def __init__(self, save: Callable[[Any], object]) -> None:
        self.save, self.saved = save, False

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        from transformers.modeling_utils import unwrap_model

        assert unwrap_model(module.model) is module.model
        assert getattr(trainer.model, "module", trainer.model) is module  # as code for DDP asks for it
        with trainer.strategy.full_state_dict(module.model):  # type: ignore[attr-defined]
            if trainer.is_global_zero and index == 0:
                self.save(module.model)
                self.saved = True


class Tokens(L.LightningModule):
    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def _fit_and_save(
    model: nn.Module, loss: Callable[[Any, Tensor], Tensor], stage: int, options: dict[str, Any], save: Any
) -> dict[str, Tensor]:
    """Saves after the first of two steps, which train as DDP. Returns what was to be saved."""
    twin, callback = copy.deepcopy(model), Saves(save)
    trained = [p for p in twin.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    start = [p.detach().clone() for p in trained]
    module = Tokens(model, loss)
    strategy = ZeroCompileStrategy(stage, **options)
    models.make_trainer(strategy, max_steps=2, callbacks=[callback]).fit(module, models.Batches(models.rank()))  # type: ignore
    assert callback.saved is (models.rank() == 0)
    reference(twin, 1, loss, optimizer=optimizer)
    expected = {name: value.clone() for name, value in twin.state_dict().items()}
    reference(twin, [1], loss, optimizer=optimizer)
    assert max((p.cpu() - q.cpu()).abs().max().item() for p, q in zip(trained, start, strict=True)) > 1e-4
    assert models.deviation(model, twin) <= 1e-6
    return expected


def _llama(tied: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=models.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _token_loss(model: Any, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


@pytest.mark.parametrize(("stage", "options"), [(3, AOT), pytest.param(1, EAGER, marks=pytest.mark.long)])
@on_ranks()
def test_transformers(stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    """With gradient checkpointing and tied weights."""
    pytest.importorskip("transformers")
    model: Any = _llama()
    model.gradient_checkpointing_enable()
    expected = _fit_and_save(model, _token_loss, stage, options, lambda model: model.save_pretrained(tmp_path))
    if models.rank() == 0:
        assert _largest(type(model).from_pretrained(tmp_path).state_dict(), expected) <= 1e-6


@pytest.mark.parametrize(("stage", "options"), [(3, AOT), pytest.param(1, EAGER, marks=pytest.mark.long)])
@on_ranks()
def test_peft(stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    """LoRA over a checkpointed base: only the adapter is saved, and the base is as it was."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    base: Any = _llama()
    base.gradient_checkpointing_enable()
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    )
    model.enable_input_require_grads()
    expected = _fit_and_save(model, _token_loss, stage, options, lambda model: model.save_pretrained(tmp_path))
    if models.rank() == 0:
        from accelerate.utils import extract_model_from_parallel

        assert extract_model_from_parallel(model) is model
        assert (tmp_path / "adapter_model.safetensors").stat().st_size < 10_000
        loaded = peft.PeftModel.from_pretrained(_llama(), tmp_path)
        assert _largest(loaded.state_dict(), expected) <= 1e-6


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_a_library_that_saves_on_rank_0_alone(stage: int, tmp_path: Path) -> None:
    """Outside of `full_state_dict` transformers and PEFT raise there, at once and with the lines that work, and write
    no part of a model; all can go on."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    for number, model in enumerate((_llama(tied=False), peft.get_peft_model(_llama(), adapter))):
        folder = tmp_path / str(number)
        with engines.engine(model, stage, timeout=timedelta(minutes=5), **EAGER) as engine:
            if models.rank() == 0:
                start = time.monotonic()
                with pytest.raises(RuntimeError, match=r"rank holds a part.*full_state_dict.*save_pretrained"):
                    model.save_pretrained(folder)
                assert time.monotonic() - start < 20
                assert not [file for file in folder.rglob("*.safetensors") if file.stat().st_size > 0]
            torch.distributed.barrier()
            with engine.full_state_dict(model):
                if models.rank() == 0:
                    model.save_pretrained(folder)
    if models.rank() == 0:
        assert len(list(tmp_path.rglob("*.safetensors"))) == 2


class SavesAlone(L.Callback):
    """A model with tied weights, of which transformers reads more."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == 1:
            module.model.save_pretrained(self.folder)


def _saves_alone(stage: int, options: dict[str, Any], folder: str) -> tuple[str, float]:
    strategy = ZeroCompileStrategy(stage, timeout=timedelta(minutes=5), **options)
    trainer = models.make_trainer(strategy, max_steps=3, callbacks=[SavesAlone(folder)])
    start = time.monotonic()
    try:
        trainer.fit(Tokens(_llama(), _token_loss), models.Batches(models.rank()))  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize(
    ("stage", "options"), [pytest.param(*cell, marks=pytest.mark.long) for cell in CELLS if cell != (3, EAGER)]
)
def test_a_fit_in_which_rank_0_alone_saves(
    all_worlds: Worlds, stage: int, options: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    ranks = all_worlds.fresh(2)
    try:
        found = ranks.run(_saves_alone, stage, options, str(tmp_path))
    finally:
        ranks.close(kill=True)
    for text, seconds in found:
        assert "with strategy.full_state_dict(" in text and seconds < 60, found
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(("stage", "options"), [(3, EAGER), pytest.param(3, AOT, marks=pytest.mark.long)])
@on_ranks()
def test_sentence_transformers(stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Its `save_pretrained` takes no state dict."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer, losses
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer
    from tokenizers import models as tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    start = str(tmp_path / "start")
    config = BertConfig(
        vocab_size=models.VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    words = Tokenizer(tokenizers.WordLevel({f"w{i}": i for i in range(models.VOCABULARY)}, unk_token="w0"))
    if models.rank() == 0:  # with the pooling layer, which is not used: it would be made anew on each rank
        BertModel(config).save_pretrained(start)
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0").save_pretrained(start)
    torch.distributed.barrier()
    encoder = SentenceTransformer(modules=[Transformer(start), Pooling(16)], device="cpu")

    def loss(model: Any, batch: Tensor) -> Tensor:
        features = [{"input_ids": half, "attention_mask": torch.ones_like(half)} for half in batch.chunk(2, 1)]
        return losses.MultipleNegativesRankingLoss(model)(features, torch.zeros(len(batch)))

    saved = str(tmp_path / "saved")
    expected = _fit_and_save(
        encoder, loss, stage, options, lambda model: model.save_pretrained(saved, create_model_card=False)
    )
    if models.rank() == 0:
        assert _largest(SentenceTransformer(saved, device="cpu").state_dict(), expected) <= 1e-6
