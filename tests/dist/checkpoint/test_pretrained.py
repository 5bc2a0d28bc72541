"""Pretrained weights go in by rows, and out by files, and no rank holds the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zerocompile
from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.checkpoint import export as exports
from lightning_zerocompile.sharding.pretrained import Source
from tests.support import engines, models
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import reference

hf: Any = pytest.importorskip("transformers")


def _llama(tied: bool = True) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=models.VOCABULARY, hidden_size=16, intermediate_size=25, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, use_cache=False, tie_word_embeddings=tied,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(7)
    return hf.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def _on_meta(folder: Path, tied: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = _llama(tied)
    lightning_zerocompile.load_pretrained(model, folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


@pytest.fixture(params=["tied", "untied"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    """A folder that Hugging Face has written, in several files; and whether its embeddings are tied."""
    tied = request.param == "tied"
    _llama(tied).save_pretrained(tmp_path, max_shard_size="8KB")  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").is_file()
    return tmp_path, tied


# ---- in ----


@on_ranks()
def test_a_sharded_module_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / str(models.rank())
    model = models.ByteModel()
    folder.mkdir()
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    refused = pytest.raises(RuntimeError, match=r"`scale` is sharded already.*configure_model.*load_state_dict")
    with engines.engine(model, 3, compile=False), refused:
        lightning_zerocompile.load_pretrained(model, folder)


def _trains_from(folder: Path, tied: bool, stage: int, compile: Any) -> tuple[int, int]:
    """The elements that this rank has read, and those of the model."""
    twin = hf.LlamaForCausalLM.from_pretrained(folder).to(models.device())
    whole = sum(parameter.numel() for parameter in twin.parameters())
    read: list[int] = []
    rows = Source.rows

    def counted(self: Source, rank: int, world: int) -> Tensor:
        read.append(rows(self, rank, world).numel())
        return rows(self, rank, world)

    model = _on_meta(folder, tied)
    sent = []
    with (
        mock.patch.object(Source, "rows", counted),
        mock.patch.object(dist, "broadcast", lambda *_, **__: sent.append(1)),
    ):
        engine = engines.make_engine(model, stage, compile=compile)
    with engines.closing(engine):
        optimizer = engines.sgd(engine, model)
        for number in range(3):
            batch = models.Batches(models.rank())[number]
            engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(_Logits(model), batch))
    reference(_Logits(twin), 3)
    assert not any("_zerocompile_pretrained" in vars(inner) for inner in model.modules())
    assert models.deviation(model, twin) <= 1e-6
    assert abs(sum(read) / whole - 1 / models.world()) < 0.1
    assert sent == []  # of parameters: no rank gives another its values
    return sum(read), whole


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(input_ids=tokens).logits


@pytest.mark.parametrize(
    ("stage", "compile"),
    [
        (1, False),
        (3, "blocks"),
        pytest.param(3, False, marks=pytest.mark.long),
        pytest.param(1, "blocks", marks=pytest.mark.long),
        pytest.param(2, False, marks=pytest.mark.long),
        pytest.param(2, "blocks", marks=pytest.mark.long),
    ],
)
def test_a_rank_reads_its_own_rows(ranks: Ranks, saved: tuple[Path, bool], stage: int, compile: Any) -> None:
    read, (whole, *_) = zip(*ranks.run(_trains_from, *saved, stage, compile), strict=True)
    assert sum(read) == whole


class _Pretrained(models.Module):
    """Built on the meta device in ``configure_model``, as users build it."""

    def __init__(self, folder: Path, out: Path | None = None) -> None:
        super().__init__(lambda: nn.Identity())
        self.folder, self.out = folder, out

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            self.model = _Logits(_on_meta(self.folder))

    def on_train_end(self) -> None:
        if self.out is not None:
            self.trainer.strategy.save_pretrained(self.out, self.model.model, max_file_bytes=8000)


def _fits(folder: Path, out: Path, stage: int, precision: str) -> list[str]:
    files: list[str] = []
    save = safetensors.torch.save_file

    def noted(tensors: Any, path: Path, *args: Any) -> None:
        files.append(path.name)
        save(tensors, path, *args)

    module = _Pretrained(folder, out)
    with mock.patch.object(safetensors.torch, "save_file", noted):
        models.train(module, ZeroCompileStrategy(stage=stage, compile=False), steps=2, precision=precision)
    assert models.deviation(module.model.model, hf.LlamaForCausalLM.from_pretrained(out, dtype="auto")) == 0.0
    return files


@pytest.mark.parametrize(("stage", "precision"), [(1, "32-true"), (3, "bf16-mixed")])
def test_out_as_from_pretrained_reads_it(ranks: Ranks, tmp_path: Path, stage: int, precision: str) -> None:
    _llama().save_pretrained(tmp_path / "in")  # type: ignore[operator]
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"of an older run")
    (out / "tokenizer.json").write_text("{}")
    written = [set(files) for files in ranks.run(_fits, tmp_path / "in", out, stage, precision)]
    files = set().union(*written)
    assert len(files) == sum(map(len, written)) > 1  # each rank wrote its own
    assert sum(map(bool, written)) == min(ranks.world, len(files))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = {path.name for path in out.glob("*")}
    others = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"}
    assert names == set(index["weight_map"].values()) | others
    assert "lm_head.weight" not in index["weight_map"]  # tied
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in _llama().parameters())


@on_ranks()
def test_buffers_in_files_are_rank_0s(tmp_path: Path) -> None:
    """Each rank writes files, and has statistics of its own data."""
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(4) for _ in range(4)]
    model = nn.Sequential(*layers).to(models.device())
    model(torch.randn(8, 4, device=models.device()) + models.rank())
    expected = torch.stack([layer.get_buffer("running_mean") for layer in layers])
    dist.broadcast(expected, 0)
    exports.export(model, tmp_path, None, 16)
    files = [safetensors.torch.load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    found = {name: value for file in files for name, value in file.items()}
    assert len(files) > models.world()
    assert torch.equal(torch.stack([found[f"{n}.running_mean"] for n in range(4)]), expected.cpu())


@on_ranks()
def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    if models.rank() == 0:
        (tmp_path / "model.safetensors").write_bytes(b"of an older run")
    writes = full if models.rank() == 1 else safetensors.torch.save_file
    with engines.engine(_llama(), 3, compile=False) as engine:
        with (
            mock.patch.object(safetensors.torch, "save_file", writes),
            pytest.raises(Exception, match="no space left on device"),
        ):
            exports.export(engine.model, tmp_path, torch.bfloat16, 8000)
        exports.export(engine.model, tmp_path / "again", torch.bfloat16, 8000)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]
    read = hf.LlamaForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert {parameter.dtype for parameter in read.parameters()} == {torch.bfloat16}
    assert models.deviation(read, _llama().to(torch.bfloat16)) == 0.0


def _differ(folder: Path) -> str:
    with torch.device("meta"):
        model = _llama()
    if models.rank() == 0:
        lightning_zerocompile.load_pretrained(model, folder)
    engines.make_engine(model, 3, compile=False)
    return ""


def test_one_rank_alone(ranks: Ranks, tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path)  # type: ignore[operator]
    assert "The ranks hold different models" in ranks.expect_error(_differ, tmp_path)
