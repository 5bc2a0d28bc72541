"""More of the Trainer: as with DDP in the same process group, or as the docstring says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

# ---- summaries ----


class Example(models.Module):
    """Says what its input looks like, so that a summary runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 3, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


class Summaries(L.Callback):
    """Lightning's summary when the fit starts, and in the middle."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def _look(self, module: L.LightningModule) -> None:
        summary = summarize(module, max_depth=3)
        columns = {name: values for name, values in summary._get_summary_data()}  # noqa: C416 - for the names
        self.seen.append(columns | {"total": [summary.total_parameters, summary.trainable_parameters]})

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._look(module)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self._look(module)


@pytest.mark.parametrize("rich", [False, True])
@on_ranks()
def test_summaries_run_the_example(rich: bool) -> None:
    """Layers, sizes of what goes in and out, and true counts, on sharded and compiled modules."""
    if rich:
        pytest.importorskip("rich")
    start = Example()
    start.model.embedding.requires_grad_(False)  # type: ignore[union-attr]
    seen, losses = [], []
    kind = callbacks.RichModelSummary if rich else callbacks.ModelSummary
    for strategy in (
        "ddp",
        ZeroCompileStrategy(1, **AOT),
        ZeroCompileStrategy(3, **EAGER),
        ZeroCompileStrategy(3, **AOT),
    ):
        module, summaries = copy.deepcopy(start), Summaries()
        models.make_trainer(
            strategy, max_steps=2, callbacks=[summaries, kind(max_depth=2)], enable_model_summary=True
        ).fit(module, models.Batches(models.rank()))
        assert len(summaries.seen) == 3
        seen.append(summaries.seen)
        losses.append(module.losses)
    assert seen[0][0]["total"][0] == sum(p.numel() for p in start.parameters())
    assert "[2, 3, 13]" in [str(size) for size in seen[0][0]["Out sizes"]]
    assert all(columns == seen[0] for columns in seen[1:]), seen
    assert all(loss == pytest.approx(losses[0], abs=1e-5) for loss in losses[1:])


# ---- debugging aids ----


class Cube(torch.autograd.Function):
    """Its backward makes a NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.nan


class Anomalous(models.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        return loss if self.global_step < self.steps else Cube.apply(loss)


@on_ranks()
def test_anomalies_are_detected() -> None:
    """A NaN in a backward raises on all ranks, which can train again; without one nothing is raised."""
    for stage, options in ((1, EAGER), (3, EAGER), (3, AOT)):
        module = Anomalous(2)
        trainer = models.make_trainer(ZeroCompileStrategy(stage, **options), detect_anomaly=True, max_steps=4)
        with pytest.raises(RuntimeError, match=r"CubeBackward.*nan values"):
            trainer.fit(module, models.Batches(models.rank()))
        assert trainer.global_step == 2
        again = Anomalous(5)
        models.make_trainer(ZeroCompileStrategy(stage, **options), detect_anomaly=True, max_steps=3).fit(
            again, models.Batches(models.rank())
        )
        assert len(again.losses) == 3


class Sampled(models.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []
        self.validations = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches.append(batch.cpu())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validations += 1


@on_ranks()
def test_shortened_runs(tmp_path: Path) -> None:
    """``overfit_batches`` with the distributed sampler and ``fast_dev_run``: DDP's batches and losses, no files."""
    folder = str(tmp_path)
    data = torch.cat(models.Batches(0, 8)._batches).cpu()
    start = Sampled()
    for arguments, steps in (
        ({"overfit_batches": 2, "max_epochs": 3, "use_distributed_sampler": True, "num_sanity_val_steps": 0}, 6),
        ({"fast_dev_run": True, "callbacks": [callbacks.ModelCheckpoint(folder)], "enable_checkpointing": True}, 1),
    ):
        results = []
        for strategy in ("ddp", ZeroCompileStrategy(1, **EAGER), ZeroCompileStrategy(3, **AOT)):
            loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=False)
            module = copy.deepcopy(start)
            trainer = models.make_trainer(strategy, **arguments)  # type: ignore[arg-type]
            trainer.fit(module, loader, loader)
            assert trainer.global_step == steps and not list(Path(folder).iterdir())
            results.append(module)
        assert results[0].validations == (1 if "fast_dev_run" in arguments else 6)
        for module in results[1:]:
            assert module.validations == results[0].validations
            assert all(torch.equal(a, b) for a, b in zip(module.batches, results[0].batches, strict=True))
            assert module.losses == pytest.approx(results[0].losses, abs=1e-5)
            assert models.deviation(module, results[0]) < 1e-6


@on_ranks()
def test_device_stats(tmp_path: Path) -> None:
    """DeviceStatsMonitor logs the host's load."""
    pytest.importorskip("psutil")
    folder = str(tmp_path)
    logger = L.pytorch.loggers.CSVLogger(folder, version=0)
    models.make_trainer(
        ZeroCompileStrategy(3, **EAGER), max_steps=2, logger=logger, log_every_n_steps=1,
        callbacks=[callbacks.DeviceStatsMonitor(cpu_stats=True)],
    ).fit(models.Module(), models.Batches(models.rank()))  # fmt: skip
    if models.rank() == 0:
        header, *rows = (Path(folder) / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
        columns = [i for i, name in enumerate(header.split(",")) if "cpu_vm_percent" in name]
        assert columns and any(row.split(",")[i] for row in rows for i in columns), header


# ---- communication of the user's that has a gradient ----


class Contrastive(models.Module):
    """Each rank's examples against those of all ranks."""

    def loss(self, batch: Tensor) -> Tensor:
        features = F.normalize(self.model(batch).mean(1), dim=-1)
        everyone = self.all_gather(features, sync_grads=True).flatten(0, 1)
        labels = torch.arange(len(batch), device=batch.device) + models.rank() * len(batch)
        return F.cross_entropy(features @ everyone.T / 0.2, labels)


@on_ranks()
def test_gathered_features_have_gradients() -> None:
    """``all_gather(sync_grads=True)`` in a contrastive loss: DDP's gradients."""
    start = Contrastive(lr=0.1)
    modules = []
    for strategy in ("ddp", *(ZeroCompileStrategy(stage, **o) for stage, o in ((1, EAGER), (3, EAGER), (3, AOT)))):
        module = copy.deepcopy(start)
        models.make_trainer(strategy, max_steps=4).fit(module, models.Batches(models.rank()))
        modules.append(module)
    assert models.deviation(modules[0], start) > 1e-3
    for module in modules[1:]:
        assert module.losses == pytest.approx(modules[0].losses, abs=1e-5)
        assert models.deviation(module, modules[0]) < 1e-6


# ---- models that were never whole ----


class Lazy(models.Module):
    """Is made on the meta device; keeps its predictions and how much of the model a rank held."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = nn.Sequential(*(models.Block(10) for _ in range(3)))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        parameters = list(self.parameters())
        self.held = sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)
        assert all(isinstance(p, DTensor) for p in parameters)
        return self.model(F.one_hot(batch % 10, 10).float())


@on_ranks()
def test_predicts_with_a_model_made_on_meta(tmp_path: Path) -> None:
    """``trainer.predict`` from a checkpoint, at stage 3: no rank ever holds the whole model."""
    folder = str(tmp_path)
    weights = nn.Sequential(*(models.Block(10) for _ in range(3)))
    path = f"{folder}/weights.ckpt"
    if models.rank() == 0:
        state = {f"model.{name}": value for name, value in weights.state_dict().items()}
        torch.save({"state_dict": state, "pytorch-lightning_version": L.__version__}, path)
    torch.distributed.barrier()
    batches = models.Batches(models.rank(), 2)
    expected = [weights(F.one_hot(batch.cpu() % 10, 10).float()).detach() for batch in batches]
    for options in (EAGER, AOT):
        module = Lazy()
        trainer = models.make_trainer(ZeroCompileStrategy(3, **options, unshard_after_fit=False))
        answers = trainer.predict(module, batches, ckpt_path=path, weights_only=False)
        assert len(answers) == 2 and module.held < 0.6
        for answer, one in zip(answers, expected, strict=True):
            assert torch.allclose(answer.cpu(), one, atol=1e-5)
