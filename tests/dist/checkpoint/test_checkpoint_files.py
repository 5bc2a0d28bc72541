"""How checkpoint files are written and read: in the background, by safetensors, and each rank its rows."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_zerocompile.checkpoint import directory
from lightning_zerocompile.checkpoint.files import AtomicCheckpointIO
from lightning_zerocompile.checkpoint.state import full_optimizer_state, full_state_dict
from tests.support import checkpoints, engines, models
from tests.support.checkpoints import Saved
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

# ---- in the background ----


class Slow(AtomicCheckpointIO):
    """Writes when later steps are over."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.2)
        super().save_checkpoint(*args, **kwargs)


class Watch(L.Callback):
    """The weights and moments after each step, whole."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.moments: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        self.weights[step] = copy.deepcopy(full_state_dict(module, keep=True))
        self.moments[step] = copy.deepcopy(full_optimizer_state(trainer.optimizers[0], keep=True)["state"])


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_states_are_gathered_in_the_order_of_groups(stage: int) -> None:
    """Ranks may have made them in another order; then the gathers must still meet."""
    model = models.ByteModel()
    with engines.engine(model, stage, **EAGER) as engine:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        engine.attach_optimizers([optimizer])
        engines.step(engine, optimizer, lambda: engines.token_loss(model, models.Batches(models.rank())[0]))
        whole = full_optimizer_state(optimizer, keep=True)["state"]
        if models.rank() == 1:
            made = list(optimizer.state.items())
            optimizer.state.clear()
            optimizer.state.update(reversed(made))
        again = full_optimizer_state(optimizer, keep=True)["state"]
        assert list(again) == list(whole) and len(whole) == len(list(model.parameters()))
        assert checkpoints.differences(again, whole) == []


@on_ranks()
def test_asynchronous_saving(tmp_path: Path) -> None:
    """AsyncCheckpointIO writes the values of the step that asked, also late; older files go after newer ones came."""
    folder = str(tmp_path)
    every = ModelCheckpoint(f"{folder}/all", "{step}", every_n_train_steps=1, save_top_k=-1)
    watch = Watch()
    strategy = checkpoints.strategy("full", 3)
    options: dict[str, Any] = {"enable_checkpointing": True, "plugins": [AsyncCheckpointIO(Slow())]}
    checkpoints.fit(Saved(), strategy, callbacks=[watch, every], **options)
    strategy.barrier()  # the files are rank 0's
    for step in range(1, 5):
        checkpoint = checkpoints.load(f"{folder}/all/step={step}.ckpt")
        assert checkpoints.differences(checkpoint["state_dict"], watch.weights[step]) == []
        assert checkpoints.differences(checkpoint["optimizer_states"][0]["state"], watch.moments[step]) == []
        assert checkpoint["global_step"] == checkpoint["state_dict"]["seen"] == step
    assert checkpoints.differences(watch.weights[1], watch.weights[4]) and checkpoints.differences(
        watch.moments[1], watch.moments[4]
    )
    one = ModelCheckpoint(f"{folder}/one", "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    options["plugins"] = [AsyncCheckpointIO()]
    module = Saved()
    checkpoints.fit(module, strategy := checkpoints.strategy("full", 3), callbacks=[one], **options)
    strategy.barrier()
    assert os.listdir(f"{folder}/one") == ["step=4.ckpt"]
    assert models.deviation(Saved.load_from_checkpoint(f"{folder}/one/step=4.ckpt"), module) == 0


# ---- safetensors ----


@on_ranks()
def test_safetensors(tmp_path: Path) -> None:
    """A file's state goes to safetensors as it is, by the module's own keys; tied weights are one, as in DDP's file."""
    pytest.importorskip("safetensors")
    folder = str(tmp_path)
    from safetensors.torch import load_file, save_file

    module = models.Module(optimizer="adamw", lr=1e-2)
    checkpoints.fit(module, checkpoints.strategy("full", 3, **AOT)).save_checkpoint(f"{folder}/a.ckpt")
    tied = {}
    for name, strategy in (("ours", checkpoints.strategy("full", 3)), ("ddp", "ddp")):
        path = f"{folder}/{name}.ckpt"
        saving = ModelCheckpoint(folder, name, every_n_epochs=1)
        checkpoints.fit(Saved(), strategy, callbacks=[saving], enable_checkpointing=True).strategy.barrier()
        state = checkpoints.load(path)["state_dict"]
        tied[name] = state["model.head.weight"].data_ptr() == state["model.embedding.weight"].data_ptr()
        if models.rank() == 0:
            with pytest.raises(RuntimeError, match="share memory"):
                save_file(state, f"{folder}/{name}.safetensors")
    assert tied == {"ours": True, "ddp": True}
    if models.rank() == 0:
        save_file(checkpoints.load(f"{folder}/a.ckpt")["state_dict"], f"{folder}/a.safetensors")
        state = load_file(f"{folder}/a.safetensors")
        assert state.keys() == module.state_dict().keys() and not any("_orig_mod" in name for name in state)
        assert all(torch.equal(value, module.state_dict()[name].cpu()) for name, value in state.items())


# ---- reading in parallel ----


class Counting(directory._Reader):
    """Notes how many elements of each value are read, and from which files."""

    read: dict[str, int]
    files: dict[str, set[str]]

    def read_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            name = item.dest_index.fqn
            self.read[name] = self.read.get(name, 0) + item.lengths.numel()
            self.files.setdefault(name, set()).add(self.storage_data[item.storage_index].relative_path)
        return super().read_data(plan, planner)


class Expect(L.Callback):
    """This rank's elements of each parameter and of its first moment."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        masters = {n: p for n, p in module.named_parameters() if p.dim() > 0}
        assert all(isinstance(p, DTensor) for p in masters.values())
        local = {n: p.to_local().numel() for n, p in masters.items()}  # type: ignore[attr-defined]
        self.elements = {f"model.{n}": count for n, count in local.items()}
        self.elements |= {f"optimizer_0.state.{n}.exp_avg": count for n, count in local.items()}


@on_ranks()
def test_a_rank_reads_its_rows(tmp_path: Path) -> None:
    """Of weights and moments, from the file that has them."""
    folder = str(tmp_path)
    path = f"{folder}/a.ckpt"
    saving = ModelCheckpoint(folder, "a", every_n_epochs=1)  # in training: afterwards the model is whole
    checkpoints.fit(Saved(), checkpoints.strategy("sharded", 3), callbacks=[saving], enable_checkpointing=True)
    Counting.read, Counting.files = {}, {}
    original, directory._Reader = directory._Reader, Counting  # type: ignore[misc]
    expect = Expect()
    try:
        checkpoints.fit(Saved(), checkpoints.strategy("full", 1), 2, path, callbacks=[expect])
    finally:
        directory._Reader = original  # type: ignore[misc]
    assert {name: Counting.read.get(name, 0) for name in expect.elements} == expect.elements
    own = f"__{models.rank()}_0.distcp"
    others = {name: read for name, read in Counting.files.items() if name in expect.elements and read != {own}}
    assert not others, others
    metadata = original(path, None).read_metadata()
    sizes = {n: m.size.numel() for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    large = sum(sizes[name] for name in expect.elements)
    assert abs(sum(expect.elements.values()) / large - 1 / models.world()) < 0.2  # its share
