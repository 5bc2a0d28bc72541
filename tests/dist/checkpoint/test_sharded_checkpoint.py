"""``state_dict_type="sharded"``: directories of shards; and both kinds across stages, world sizes and other "
"strategies."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from tests.support import checkpoints, models
from tests.support.checkpoints import Look, Saved
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

# ---- resume ----


@on_ranks()
def test_resume_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    """Losses, weights, moments, loops, schedule and buffers are equal to the bit."""
    folder = str(tmp_path)
    cases = [(1, EAGER), (2, EAGER), (3, AOT)]
    for stage, options in cases:
        torch.manual_seed(0)
        module, path = Saved(), f"{folder}/{stage}.ckpt"
        half = copy.deepcopy(module)
        whole, resumed = Look("end"), Look("end")
        checkpoints.fit(module, checkpoints.strategy("sharded", stage, **options), 4, callbacks=[whole])
        checkpoints.fit(half, checkpoints.strategy("sharded", stage, **options), 2).save_checkpoint(path)
        other = checkpoints.another()
        checkpoints.fit(other, checkpoints.strategy("sharded", stage, **options), 4, path, callbacks=[resumed])
        assert other.losses == module.losses[8:]
        assert models.deviation(other, module) == 0 and other.seen == module.seen == 16
        assert checkpoints.differences(resumed.state, whole.state) == [], checkpoints.differences(
            resumed.state, whole.state
        )
        assert all(entry["exp_avg"] is not None and entry["step"] is None for entry in whole.state["layout"])
        assert len(checkpoints.tensors(whole.state["optimizers"])) > 0


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


@on_ranks()
def test_contents_of_a_directory(tmp_path: Path) -> None:
    """One file a rank, the rest and the checksums; the model's own keys; two optimizers by parameter names."""
    path = tmp_path / "a.ckpt"
    module, look, again = TwoOptimizers(), Look("end"), Look("start")
    checkpoints.fit(module, checkpoints.strategy("sharded", 3, **AOT), callbacks=[look]).save_checkpoint(path)
    checkpoints.fit(TwoOptimizers(), checkpoints.strategy("full", 2), 2, str(path), callbacks=[again])
    differences = checkpoints.differences(again.state, look.state)
    expected = [f".weights.local{number}" for number in range(3)] if models.rank() > 0 else []  # rank 0's are saved
    assert sorted(differences) == expected, differences
    checkpoints.fit(Saved(), checkpoints.strategy("sharded", 1)).save_checkpoint(
        tmp_path / "weights.ckpt", weights_only=True
    )
    if models.rank() > 0:
        return
    own = [f"__{rank}_0.distcp" for rank in range(models.world())]
    files = [".metadata", *own, "checksums.json", "meta.pt"]
    assert sorted(os.listdir(path)) == files and sorted(os.listdir(tmp_path)) == ["a.ckpt", "weights.ckpt"]
    saved, weights = (_load_distributed_checkpoint(one) for one in (path, tmp_path / "weights.ckpt"))
    names = list(TwoOptimizers().state_dict())
    assert sorted(saved["model"]) == sorted(names)
    first, second = saved["optimizer_0"], saved["optimizer_1"]
    assert first["state"].keys() == {"model.head.weight"} and first["param_groups"][0]["momentum"] == 0.9
    assert {n for group in second["param_groups"] for n in group["params"]} == {
        name for name in names if not name.startswith("local") and name != "model.head.weight"
    }
    assert all((saved["model"][f"local{number}"] == 1).all() for number in range(3))  # rank 0's
    assert "model.embedding.weight" not in second["state"]  # frozen: it is held, and has no state
    entry = second["state"]["model.layers.0.up.weight"]
    assert entry["exp_avg"].shape == (21, 10) and entry["step"].shape == () and entry["step"] == 4
    assert not any(key.startswith("optimizer") or key == "lr_schedulers" for key in weights)
    assert weights["hyper_parameters"] == {"lr": 1e-2}


# ---- ModelCheckpoint ----


@pytest.mark.parametrize(
    ("kind", "plugins"), [("full", []), ("sharded", []), ("sharded", [AsyncCheckpointIO()])],
    ids=["full", "sharded", "background"],
)  # fmt: skip
@on_ranks()
def test_model_checkpoint(kind: str, plugins: list[Any], tmp_path: Path) -> None:
    """The best, the last and every second step; old ones go; "best" and "last" are found again; links work."""
    folder = str(tmp_path)
    module = Saved()
    best = ModelCheckpoint(folder, "best-{step}", monitor="val_loss", save_top_k=1, save_last=True)
    every = ModelCheckpoint(folder, "all-{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max")
    saving: dict[str, Any] = {"enable_checkpointing": True, "plugins": plugins}
    arguments = saving | {"callbacks": [best, every], "val_check_interval": 2}
    trainer = models.make_trainer(checkpoints.strategy(kind, 3), max_epochs=2, **arguments)
    trainer.fit(module, checkpoints.data(), checkpoints.data())
    assert {p.name for p in Path(folder).iterdir()} == {
        Path(best.best_model_path).name, "last.ckpt", "all-step=6.ckpt", "all-step=8.ckpt"
    }  # fmt: skip
    assert all(p.is_dir() == (kind == "sharded") for p in Path(folder).iterdir())
    [after] = trainer.validate(Saved(), checkpoints.data(), ckpt_path="best", verbose=False)
    assert after["val_loss"] == pytest.approx(best.best_model_score.item(), abs=1e-6)
    resumed = Saved()
    callback = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    models.make_trainer(checkpoints.strategy(kind, 1), max_epochs=3, callbacks=[callback], **saving).fit(
        resumed, checkpoints.data(), checkpoints.data(), ckpt_path="last"
    )
    assert len(resumed.losses) == 4 and resumed.seen == 12  # the third epoch only
    link = ModelCheckpoint(f"{folder}/link", "{step}", monitor="step", mode="max", save_last="link")
    checkpoints.fit(Saved(), checkpoints.strategy(kind, 2), callbacks=[link], **saving)
    checkpoints.fit(Saved(), checkpoints.strategy(kind, 2), 2, f"{folder}/link/last.ckpt")


# ---- hooks ----


class Hooks(models.Module):
    """Drops a frozen weight from checkpoints, adds something of its own, and edits what is loaded."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.strict_loading = False
        self.model.embedding.weight.requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        size = tuple(state["model.embedding.weight"].shape)  # on all ranks, as under DDP
        assert "model.embedding.weight" in state and "else" not in state and state.get("else", 3) == 3
        del state["model.embedding.weight"]
        assert "model.embedding.weight" not in state and size == (models.VOCABULARY, 10)
        with pytest.raises(KeyError):
            del state["model.embedding.weight"]
        state["model.layers.0.other"] = state.pop("model.layers.0.norm.bias")
        state["model.layers.0.norm.bias"] = state.pop("model.layers.0.other")
        checkpoint["mine"] = {"mean": torch.ones(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]
        checkpoint["state_dict"]["model.scale"] = checkpoint["state_dict"]["model.scale"] + 7
        checkpoint["state_dict"]["unknown"] = torch.zeros(())


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks()
def test_hooks_edit_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """What ``on_save_checkpoint`` and ``on_load_checkpoint`` do counts; missing keys are allowed or named."""
    folder = str(tmp_path)
    module, path = Hooks(), f"{folder}/a.ckpt"
    checkpoints.fit(module, checkpoints.strategy(kind, 3)).save_checkpoint(path)
    other = Hooks()
    with torch.no_grad():
        other.model.embedding.weight.fill_(0.5)
        other.model.head.weight.zero_()
    look = Look("start")
    checkpoints.fit(other, checkpoints.strategy(kind, 2), 2, path, callbacks=[look])
    assert torch.equal(other.mine["mean"], torch.ones(3))
    weights = look.state["weights"]
    assert (weights["model.embedding.weight"] == 0.5).all()  # not in the checkpoint, and strict is off
    assert torch.equal(weights["model.head.weight"], module.model.head.weight.detach().cpu())
    assert torch.equal(weights["model.scale"], module.model.scale.detach().cpu() + 7)
    strict = Hooks()
    strict.strict_loading = True
    with pytest.raises(RuntimeError, match=r"Missing key.*model.embedding.weight"):
        checkpoints.fit(strict, checkpoints.strategy(kind, 2), 2, path)


@on_ranks()
def test_directory_of_another_model(tmp_path: Path) -> None:
    """A wrong shape is torch's own message; an optimizer over other parameters is named."""
    folder = str(tmp_path)
    path = f"{folder}/a.ckpt"
    checkpoints.fit(models.Module(optimizer="adamw"), checkpoints.strategy("sharded", 3)).save_checkpoint(path)
    narrow = models.Module(lambda: models.ByteModel(width=8), optimizer="adamw")
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.up\.weight"):
        checkpoints.fit(narrow, checkpoints.strategy("sharded", 3), 2, path)
    fewer = models.Module(optimizer="adamw")
    fewer.configure_optimizers = lambda: torch.optim.AdamW(fewer.model.layers.parameters())  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"only in the checkpoint: \['model.embedding.weight', 'model.head.weight'"):
        checkpoints.fit(fewer, checkpoints.strategy("full", 3), 2, path)
