"""``state_dict_type="sharded"``: directories of shards; and both kinds across stages, world sizes and other "
"strategies."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.checkpoint.state import full_optimizer_state, full_state_dict
from tests import models
from tests.dist.test_checkpoint import AOT, Saved, _data, _tensors
from tests.harness import Ranks

EAGER: dict[str, Any] = {"compile": False}


def _strategy(kind: str, stage: int, **options: Any) -> ZeroCompileStrategy:
    return ZeroCompileStrategy(stage=stage, state_dict_type=kind, **({"compile": False} | options))  # type: ignore[arg-type]


def _fit(module: L.LightningModule, strategy: Any, epochs: int = 1, path: str | None = None, **more: Any) -> L.Trainer:
    trainer = models.make_trainer(strategy, max_epochs=epochs, limit_val_batches=0, **more)
    trainer.fit(module, _data(), ckpt_path=path)
    return trainer


class Look(L.Callback):
    """All of the training's state on rank 0, before the first step or after the last."""

    def __init__(self, when: str) -> None:
        self.when, self.state = when, {}

    def _look(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        state = {
            "weights": full_state_dict(module, keep=True),
            "optimizers": [full_optimizer_state(o, keep=True)["state"] for o in trainer.optimizers],
            "rates": [group["lr"] for o in trainer.optimizers for group in o.param_groups],
            "schedules": [c.scheduler.last_epoch for c in trainer.lr_scheduler_configs],
            "layout": [
                {name: getattr(value, "placements", None) for name, value in o.state[p].items()}
                for o in trainer.optimizers
                for group in o.param_groups
                for p in group["params"]
                if isinstance(p, DTensor) and p.dim() > 0
            ],
            "loops": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_progress.total.completed),
        }
        self.state = copy.deepcopy(state)  # counters and 0-dim moments are the live ones

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.when == "start":
            self._look(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.when == "end":
            self._look(trainer, module)


def _differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Where two states are not equal to the bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.cpu(), right.cpu())
        return [] if same else [where]
    if isinstance(left, dict) and isinstance(right, dict):
        missing = [f"{where}[{key!r}]" for key in left.keys() ^ right.keys()]
        return missing + [
            d for k in left.keys() & right.keys() for d in _differences(left[k], right[k], f"{where}.{k}")
        ]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        return [d for i, (a, b) in enumerate(zip(left, right, strict=True)) for d in _differences(a, b, f"{where}.{i}")]
    return [] if left == right else [f"{where}: {left!r} {right!r}"]


def _another() -> Saved:
    """The same module with other values: all of it must come from the checkpoint."""
    other = Saved()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    return other


# ---- resume ----


def _resume(folder: str, cases: list[tuple[int, dict[str, Any]]]) -> None:
    for stage, options in cases:
        torch.manual_seed(0)
        module, path = Saved(), f"{folder}/{stage}.ckpt"
        half = copy.deepcopy(module)
        whole, resumed = Look("end"), Look("end")
        _fit(module, _strategy("sharded", stage, **options), 4, callbacks=[whole])
        _fit(half, _strategy("sharded", stage, **options), 2).save_checkpoint(path)
        other = _another()
        _fit(other, _strategy("sharded", stage, **options), 4, path, callbacks=[resumed])
        assert other.losses == module.losses[8:]
        assert models.deviation(other, module) == 0 and other.seen == module.seen == 16
        assert _differences(resumed.state, whole.state) == [], _differences(resumed.state, whole.state)
        assert all(entry["exp_avg"] is not None and entry["step"] is None for entry in whole.state["layout"])
        assert len(_tensors(whole.state["optimizers"])) > 0


def test_resume_equals_an_uninterrupted_run(ranks: Ranks, tmp_path: Path) -> None:
    """Losses, weights, moments, loops, schedule and buffers are equal to the bit."""
    ranks.run(_resume, str(tmp_path), [(1, EAGER), (2, EAGER), (3, AOT)])


# ---- what a directory holds ----


class OwnAdamW(torch.optim.AdamW):
    """Not one of torch's own classes: it steps once, on DTensors, and so must find its moments to be such."""


class TwoOptimizers(models.Module):
    """Manual optimization: SGD with momentum for the head, AdamW with two groups for the rest, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        for number in range(3):
            self.register_buffer(f"local{number}", torch.zeros(500))
        self.model.embedding.weight.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        for buffer in self.buffers():
            buffer.fill_(models.rank() + 1)
        self.manual_backward(loss)
        for optimizer in optimizers:  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        [head] = self.model.head.parameters()
        rest = [p for p in self.parameters() if p is not head]
        groups = [{"params": rest[:3], "lr": 0.01}, {"params": rest[3:], "lr": 0.02, "weight_decay": 0.1}]
        return torch.optim.SGD([head], lr=0.1, momentum=0.9), OwnAdamW(groups)


def _contents(folder: str) -> dict[str, Any]:
    path = Path(folder, "a.ckpt")
    module, look, again = TwoOptimizers(), Look("end"), Look("start")
    _fit(module, _strategy("sharded", 3, **AOT), callbacks=[look]).save_checkpoint(path)
    _fit(TwoOptimizers(), _strategy("full", 2), 2, str(path), callbacks=[again])
    differences = _differences(again.state, look.state)
    expected = [f".weights.local{number}" for number in range(3)] if models.rank() > 0 else []  # rank 0's are saved
    assert sorted(differences) == expected, differences
    _fit(Saved(), _strategy("sharded", 1)).save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    if models.rank() > 0:
        return {}
    return {
        "files": sorted(file.name for file in path.iterdir()),
        "beside": sorted(os.listdir(folder)),
        "checkpoint": _load_distributed_checkpoint(path),
        "weights": _load_distributed_checkpoint(Path(folder, "weights.ckpt")),
    }


def test_contents_of_a_directory(ranks: Ranks, tmp_path: Path) -> None:
    """One file a rank, the rest and the checksums; the model's own keys; two optimizers by parameter names."""
    found = ranks.run(_contents, str(tmp_path))[0]
    assert found["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "meta.pt"]
    assert found["beside"] == ["a.ckpt", "weights.ckpt"]
    names = list(TwoOptimizers().state_dict())
    assert sorted(found["checkpoint"]["model"]) == sorted(names)
    first, second = found["checkpoint"]["optimizer_0"], found["checkpoint"]["optimizer_1"]
    assert first["state"].keys() == {"model.head.weight"} and first["param_groups"][0]["momentum"] == 0.9
    assert {n for group in second["param_groups"] for n in group["params"]} == {
        name for name in names if not name.startswith("local") and name != "model.head.weight"
    }
    assert all((found["checkpoint"]["model"][f"local{number}"] == 1).all() for number in range(3))  # rank 0's
    assert "model.embedding.weight" not in second["state"]  # frozen: it is held, and has no state
    entry = second["state"]["model.layers.0.up.weight"]
    assert entry["exp_avg"].shape == (21, 10) and entry["step"].shape == () and entry["step"] == 4
    assert not any(key.startswith("optimizer") or key == "lr_schedulers" for key in found["weights"])
    assert found["weights"]["hyper_parameters"] == {"lr": 1e-2}


# ---- ModelCheckpoint ----


def _callbacks(kind: str, plugins: list[Any], folder: str) -> None:
    module = Saved()
    best = ModelCheckpoint(folder, "best-{step}", monitor="val_loss", save_top_k=1, save_last=True)
    every = ModelCheckpoint(folder, "all-{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max")
    saving: dict[str, Any] = {"enable_checkpointing": True, "plugins": plugins}
    arguments = saving | {"callbacks": [best, every], "val_check_interval": 2}
    trainer = models.make_trainer(_strategy(kind, 3), max_epochs=2, **arguments)
    trainer.fit(module, _data(), _data())
    assert {p.name for p in Path(folder).iterdir()} == {
        Path(best.best_model_path).name, "last.ckpt", "all-step=6.ckpt", "all-step=8.ckpt"
    }  # fmt: skip
    assert all(p.is_dir() == (kind == "sharded") for p in Path(folder).iterdir())
    [after] = trainer.validate(Saved(), _data(), ckpt_path="best", verbose=False)
    assert after["val_loss"] == pytest.approx(best.best_model_score.item(), abs=1e-6)
    resumed = Saved()
    callback = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    models.make_trainer(_strategy(kind, 1), max_epochs=3, callbacks=[callback], **saving).fit(
        resumed, _data(), _data(), ckpt_path="last"
    )
    assert len(resumed.losses) == 4 and resumed.seen == 12  # the third epoch only
    link = ModelCheckpoint(f"{folder}/link", "{step}", monitor="step", mode="max", save_last="link")
    _fit(Saved(), _strategy(kind, 2), callbacks=[link], **saving)
    _fit(Saved(), _strategy(kind, 2), 2, f"{folder}/link/last.ckpt")


@pytest.mark.parametrize(
    ("kind", "plugins"), [("full", []), ("sharded", []), ("sharded", [AsyncCheckpointIO()])],
    ids=["full", "sharded", "background"],
)  # fmt: skip
def test_model_checkpoint(ranks: Ranks, kind: str, plugins: list[Any], tmp_path: Path) -> None:
    """The best, the last and every second step; old ones go; "best" and "last" are found again; links work."""
    ranks.run(_callbacks, kind, plugins, str(tmp_path))


# ---- hooks ----


class Hooks(models.Module):
    """Drops a frozen weight from checkpoints, adds something of its own, and edits what is loaded."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.strict_loading = False
        self.model.embedding.weight.requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("model.embedding.weight", None)
        checkpoint["mine"] = {"mean": torch.ones(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]
        checkpoint["state_dict"]["model.scale"] = checkpoint["state_dict"]["model.scale"] + 7
        checkpoint["state_dict"]["unknown"] = torch.zeros(())


def _hooks(kind: str, folder: str) -> None:
    module, path = Hooks(), f"{folder}/a.ckpt"
    _fit(module, _strategy(kind, 3)).save_checkpoint(path)
    other = Hooks()
    with torch.no_grad():
        other.model.embedding.weight.fill_(0.5)
        other.model.head.weight.zero_()
    look = Look("start")
    _fit(other, _strategy(kind, 2), 2, path, callbacks=[look])
    assert torch.equal(other.mine["mean"], torch.ones(3))
    weights = look.state["weights"]
    assert (weights["model.embedding.weight"] == 0.5).all()  # not in the checkpoint, and strict is off
    assert torch.equal(weights["model.head.weight"], module.model.head.weight.detach().cpu())
    assert torch.equal(weights["model.scale"], module.model.scale.detach().cpu() + 7)
    strict = Hooks()
    strict.strict_loading = True
    with pytest.raises(RuntimeError, match=r"Missing key.*model.embedding.weight"):
        _fit(strict, _strategy(kind, 2), 2, path)


def _wrong_shape(folder: str) -> None:
    path = f"{folder}/a.ckpt"
    _fit(models.Module(optimizer="adamw"), _strategy("sharded", 3)).save_checkpoint(path)
    narrow = models.Module(lambda: models.ByteModel(width=8), optimizer="adamw")
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.up\.weight"):
        _fit(narrow, _strategy("sharded", 3), 2, path)
    fewer = models.Module(optimizer="adamw")
    fewer.configure_optimizers = lambda: torch.optim.AdamW(fewer.model.layers.parameters())  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"only in the checkpoint: \['model.embedding.weight', 'model.head.weight'"):
        _fit(fewer, _strategy("full", 3), 2, path)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_hooks_edit_the_checkpoint(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """What ``on_save_checkpoint`` and ``on_load_checkpoint`` do counts; missing keys are allowed or named."""
    ranks.run(_hooks, kind, str(tmp_path))


def test_directory_of_another_model(ranks: Ranks, tmp_path: Path) -> None:
    """A wrong shape is torch's own message; an optimizer over other parameters is named."""
    ranks.run(_wrong_shape, str(tmp_path))
