"""What users change in a module while it is trained: parameters that are replaced, pruned, or have another name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, reference

Change = Callable[[nn.Module, torch.optim.Optimizer], None]


def _new(parameter: torch.Tensor) -> nn.Parameter:
    """Other values of the same shape, the same on all ranks and in the twin."""
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
    return nn.Parameter(values.to(parameter.device) * 0.3)


def _is_sharded(model: nn.Module) -> bool:
    return isinstance(next(model.parameters()), DTensor)


def _replaced(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The old parameters take the values, and go on to be trained, with the momentum that they had."""
    for module, name in ((model.head, "weight"), (model.layers[1].up, "bias"), (model, "scale")):
        if _is_sharded(model):
            setattr(module, name, _new(getattr(module, name)))
        else:
            getattr(module, name).data.copy_(_new(getattr(module, name)).detach())


def _frozen(model: Any, optimizer: torch.optim.Optimizer) -> None:
    _replaced(model, optimizer)
    if _is_sharded(model):
        model.head.weight = nn.Parameter(_new(model.head.weight).detach(), requires_grad=False)
    model.head.weight.requires_grad = False
    model.head.weight.grad = None


def _assigned(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(5)
    model.load_state_dict(models.ByteModel().to(models.device()).state_dict(), assign=_is_sharded(model))


def _pruned(model: Any, optimizer: torch.optim.Optimizer) -> None:
    prune.l1_unstructured(model.head, "weight", 0.5)
    for layer in model.layers:
        prune.l1_unstructured(layer.up, "weight", 0.3)
        prune.ln_structured(layer.down, "weight", 0.2, n=2, dim=0)
    prune.l1_unstructured(model.layers[0].up, "weight", 0.5)  # again: a container of masks
    prune.custom_from_mask(model, "shift", torch.ones(1, device=models.device()))


def _pruned_in_one(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(3)
    prune.random_unstructured(model.layers[1].up, "bias", 0.4)
    prune.global_unstructured([(model.layers[0].up, "weight"), (model.head, "weight")], prune.L1Unstructured, amount=9)


def _made_permanent(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for module in model.modules():
        for name in [name.removesuffix("_mask") for name, _ in module.named_buffers(recurse=False)]:
            prune.remove(module, name)


CHANGES: dict[str, tuple[Change, ...]] = {
    "replaced": (_replaced, _replaced),
    "frozen": (_frozen,),
    "assigned": (_assigned,),
    "pruned": (_pruned,),
    "pruned in one": (_pruned_in_one, _made_permanent),
    "made permanent": (_pruned, _made_permanent, _pruned),
}


MODES = {"eager": EAGER, "aot_eager": AOT}
COMPILED = {(1, "pruned in one"), (3, "replaced"), (3, "made permanent")}  # that always run
CELLS = [
    pytest.param(
        name, stage, MODES[mode], id=f"{name}-{stage}-{mode}",
        marks=() if (stage, mode) == (3, "eager") or (mode == "aot_eager" and (stage, name) in COMPILED)
        else pytest.mark.long,
    )
    for name in CHANGES for stage in (1, 2, 3) for mode in MODES
]  # fmt: skip


@pytest.mark.parametrize(("name", "stage", "options"), CELLS)
@on_ranks()
def test_a_changed_module_trains_on(name: str, stage: int, options: dict[str, Any]) -> None:
    """After each change the numbers, with momentum, are those of a plain module with DDP's gradients."""
    model, twin = models.pair(models.ByteModel)
    of_twin = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9)
    batches, number = models.Batches(models.rank()), 0
    with engines.engine(model, stage, **options) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        engine.attach_optimizers([optimizer])
        for change in (None, *CHANGES[name]):
            if change is not None:
                change(model, optimizer)
                change(twin, of_twin)
            for _ in range(2):
                batch = batches[number]
                engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(model, batch))  # type: ignore[misc]
                reference(twin, [number], optimizer=of_twin)
                number += 1
    assert type(model.head) is nn.Linear
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in twin.named_parameters()}
    assert models.deviation(model, twin) <= 2e-6
    buffers = dict(twin.named_buffers())
    assert {n: torch.equal(b, buffers[n].cpu()) for n, b in model.named_buffers()} == dict.fromkeys(buffers, True)


def _other_shape(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(models.VOCABULARY + 1, 10, device=models.device()))


def _other_dtype(model: Any) -> None:
    model.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64, device=models.device()))


def _resized(model: Any) -> None:
    """As transformers resizes an embedding."""
    model.embedding.weight.data = torch.zeros(models.VOCABULARY + 1, 10, device=models.device())


def _other_layer(model: Any) -> None:
    model.head = nn.Linear(10, models.VOCABULARY, bias=False).to(models.device())


def _added(model: Any) -> None:
    model.layers.append(models.Block(10).to(models.device()))


def _by_the_dictionary(model: Any) -> None:
    model.head._parameters["weight"] = _new(model.head.weight)


def _removed(model: Any) -> None:
    del model.layers[1].up.bias


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "shape": (_other_shape, r"`head.weight` was given other memory \(shape \(14, 10\) in torch.float32, where .*13, "),
    "dtype": (_other_dtype, r"`scale` was given other memory \(shape \(\) in torch.float64, where"),
    "data": (_resized, r"`embedding.weight` was given other memory"),
    "layer": (_other_layer, r"`head.weight` was added"),
    "added": (_added, r"`layers.3.* was added"),
    "dictionary": (_by_the_dictionary, r"`head.weight` was replaced"),
    "removed": (_removed, r"`layers.1.up.bias` was removed"),
}


@pytest.mark.parametrize("name", list(REFUSED))
@on_ranks()
def test_another_layout_is_refused_with_the_way_out(name: str) -> None:
    change, message = REFUSED[name]
    model = models.ByteModel()
    engine = engines.make_engine(model, 3, **EAGER)
    optimizer = engines.sgd(engine, model)
    try:
        with pytest.raises(RuntimeError, match=f"{message}.*`configure_model` .*between two fits.*`with torch.no_grad"):
            change(model)  # raises itself where torch tells the module
            engines.step(engine, optimizer, lambda: engines.token_loss(model, models.Batches(models.rank())[0]))
    finally:
        engine.abandon()


# ---- Lightning's ModelPruning ----


class Pruning(ModelPruning):
    """Keeps what is saved."""

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, module, checkpoint)
        self.saved = checkpoint["state_dict"]


def _fitted(module: models.Module, strategy: Any, lottery: bool, path: Path) -> dict[str, Any]:
    parts = [(module.model.head, "weight"), (module.model.layers[1].up, "weight"), (module.model.layers[1].up, "bias")]
    pruning = Pruning(
        "l1_unstructured",
        parameters_to_prune=parts,
        amount=0.3,
        use_global_unstructured=False,
        use_lottery_ticket_hypothesis=lambda epoch: lottery and epoch == 0,
    )  # fmt: skip; from the second reset on the values to reset to are the trained ones, which Lightning shares
    trainer = models.make_trainer(strategy, max_epochs=3, callbacks=[pruning])
    trainer.fit(module, models.Batches(models.rank(), 2))
    trainer.save_checkpoint(path)
    saved = trainer.strategy.broadcast(pruning.saved)
    return {name: value.cpu() for name, value in saved.items()}


class SavesInTheMiddle(models.Module):
    """At the end of each epoch, after what callbacks have pruned."""

    path = ""

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("stage", "mode", "lottery"),
    [
        (1, "aot_eager", False),
        (3, "eager", True),
        pytest.param(3, "aot_eager", True, marks=pytest.mark.long),
        pytest.param(2, "eager", False, marks=pytest.mark.long),
    ],
)
@on_ranks()
def test_model_pruning_prunes_as_under_ddp(stage: int, mode: str, lottery: bool, tmp_path: Path) -> None:
    """The model, and the checkpoint in the middle, whose masks are applied and whose names are the first ones."""
    ours, theirs = models.pair(SavesInTheMiddle)
    ours.path, theirs.path = str(tmp_path / "ours.ckpt"), str(tmp_path / "theirs.ckpt")
    names = set(ours.state_dict())
    _fitted(theirs, "ddp", lottery, tmp_path / "last.ckpt")
    _fitted(ours, ZeroCompileStrategy(stage, **MODES[mode]), lottery, tmp_path / "last.ckpt")
    assert models.deviation(ours, theirs) <= 1e-6
    assert (ours.model.head.weight == 0).sum() == (theirs.model.head.weight == 0).sum() > 0
    if models.rank() == 0:
        saved, expected = (torch.load(m.path, weights_only=False)["state_dict"] for m in (ours, theirs))
        assert set(saved) == set(expected) == names
        for name in names:
            assert torch.allclose(saved[name], expected[name], atol=1e-6), name


# ---- with the Trainer ----


class Changes(models.Module):
    """Prunes and takes new values at the end of the second epoch; its optimizer has momentum."""

    changes = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1 and self.changes:
            prune.l1_unstructured(self.model.layers[1].up, "weight", 0.4)
            self.model.head.weight = _new(self.model.head.weight)
            self.trainer.optimizers[0].param_groups[0]["params"] = list(self.parameters())  # in the order of the names


def _epochs(module: Any, strategy: Any, epochs: int, path: Any = None, **arguments: Any) -> L.Trainer:
    trainer = models.make_trainer(strategy, max_epochs=epochs, num_sanity_val_steps=0, **arguments)
    trainer.fit(
        module, models.Batches(models.rank(), 2), models.Batches(models.rank(), 1), ckpt_path=path, weights_only=False
    )
    return trainer


@pytest.mark.parametrize(
    ("stage", "mode"), [(3, "aot_eager"), *(pytest.param(s, m, marks=pytest.mark.long) for s, m in
                                            ((1, "eager"), (2, "aot_eager"), (3, "eager")))],
)  # fmt: skip
@on_ranks()
def test_changes_where_gathers_move_bfloat16(stage: int, mode: str) -> None:
    """After two epochs the ranks have agreed which parameters are gathered as their casts."""
    source, ours = models.pair(Changes)
    whole = copy.deepcopy(source)
    _epochs(ours, ZeroCompileStrategy(stage, **MODES[mode]), 4, precision="bf16-mixed")
    optimizer = whole.configure_optimizers()
    for epoch in range(4):
        for number in range(2):
            optimizer.zero_grad()
            for rank in range(models.world()):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = whole.loss(models.Batches(rank)[number].cpu()) / models.world()
                loss.backward()
            optimizer.step()
        if epoch == 1:
            prune.l1_unstructured(whole.model.layers[1].up, "weight", 0.4)  # type: ignore[union-attr]
            whole.model.head.weight.data.copy_(_new(whole.model.head.weight))  # type: ignore[union-attr, arg-type]
    assert models.deviation(ours, whole) < 2e-3


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks()
def test_a_changed_module_is_saved_and_resumed(kind: str, tmp_path: Path) -> None:
    """With the state of its optimizer, under the names that the module has then."""
    module, again = Changes(), Changes()
    options: dict[str, Any] = {"stage": 3, "state_dict_type": kind, **EAGER}
    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    arguments: dict[str, Any] = {"callbacks": [saves], "enable_checkpointing": True}
    _epochs(module, ZeroCompileStrategy(**options), 4, **arguments)
    again.changes = False
    prune.identity(again.model.layers[1].up, "weight")
    path = next(path for path in tmp_path.iterdir() if path.name.startswith("epoch=2"))
    assert _epochs(again, ZeroCompileStrategy(**options), 4, path).global_step == 8
    assert models.deviation(module, again) < 1e-6
