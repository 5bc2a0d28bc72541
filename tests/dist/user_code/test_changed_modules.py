"""What users change in a module while it is trained: parameters that are replaced, pruned, or have another name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from torch import nn
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


def _replaced(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer is not told: the new parameters are used, and not trained."""
    model.head.weight = _new(model.head.weight)
    model.layers[1].up.weight = _new(model.layers[1].up.weight)
    model.scale = _new(model.scale)


def _replaced_and_told(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight = _new(model.head.weight)
    model.layers[1].up.bias = _new(model.layers[1].up.bias)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def _another_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.layers[0].down.weight = _new(model.layers[0].down.weight)
    optimizer.add_param_group({"params": [model.layers[0].down.weight], "lr": 0.1})


def _frozen(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight = nn.Parameter(_new(model.head.weight).detach(), requires_grad=False)


def _assigned(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(5)
    model.load_state_dict(models.ByteModel().to(models.device()).state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())


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


def _another_shape(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer is not told, and goes on with the old one; a bias that was none."""
    values = torch.randn(models.VOCABULARY + 3, 10, generator=torch.Generator().manual_seed(7)) * 0.3
    model.head.weight = nn.Parameter(values.to(models.device()))


def _another_layer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A head, and a block, with parameters of other names and sizes; the optimizer is told."""
    torch.manual_seed(9)
    model.head = nn.Linear(10, models.VOCABULARY + 5).to(models.device())
    model.layers[1] = models.Block(10).to(models.device())
    optimizer.param_groups[0]["params"] = list(model.parameters())


def _another_dtype(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64, device=models.device()))
    optimizer.add_param_group({"params": [model.scale], "lr": 0.1})


def _resized(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As transformers resizes an embedding: the object stays, so the optimizer trains it on, with no state of it."""
    optimizer.state.pop(model.embedding.weight, None)
    more = torch.randn(4, 10, generator=torch.Generator().manual_seed(6)).to(models.device())
    model.embedding.weight.data = torch.cat([model.embedding.weight.data, more])
    model.embedding.num_embeddings += 4


def _made_permanent(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for module in model.modules():
        for name in [name.removesuffix("_mask") for name, _ in module.named_buffers(recurse=False)]:
            prune.remove(module, name)


CHANGES: dict[str, tuple[Change, ...]] = {
    "replaced": (_replaced,),
    "replaced and told": (_replaced_and_told, _replaced_and_told),
    "another group": (_another_group,),
    "frozen": (_frozen,),
    "assigned": (_assigned,),
    "pruned": (_pruned,),
    "pruned in one": (_pruned_in_one, _made_permanent),
    "made permanent": (_pruned, _made_permanent, _pruned),
    "another shape": (_another_shape, _another_shape),
    "another layer": (_another_layer, _pruned),
    "another dtype": (_another_dtype, _replaced),
    "resized": (_resized, _another_shape),
}


MODES = {"eager": EAGER, "aot_eager": AOT}
COMPILED = {
    (1, "another layer"),
    (3, "another layer"),
    (1, "replaced and told"),
    (1, "pruned in one"),
    (3, "replaced"),
    (3, "made permanent"),
}  # that always run
CELLS = [
    pytest.param(
        name, stage, MODES[mode], id=f"{name}-{stage}-{mode}",
        marks=() if (stage, mode) == (3, "eager") or (mode == "aot_eager" and (stage, name) in COMPILED)
        else pytest.mark.long,
    )
    for name in CHANGES for stage in (1, 2, 3) for mode in MODES
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*no optimizer has the new one")
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


@on_ranks()
def test_what_a_rank_replaces_is_rank_0_s_and_its_user_s_object_again() -> None:
    model = models.ByteModel()
    with engines.engine(model, 3, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        new = nn.Parameter(torch.full((models.VOCABULARY, 10), float(models.rank() + 1), device=models.device()))
        model.head.weight = new
        with torch.no_grad():
            assert torch.equal(model.head.weight, new)  # before the next step: the user's own
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            engines.step(engine, optimizer, lambda: engines.token_loss(model, models.Batches(models.rank())[0]))
        said = "`head.weight` was replaced, and no optimizer has the new one"
        assert models.rank() > 0 or any(said in str(warning.message) for warning in warned)
        last = nn.Parameter(torch.zeros(1))
        model.shift = last  # and no step after it
    assert model.head.weight is new and torch.equal(new, torch.ones_like(new))
    assert model.shift is last


def _other_shapes(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(models.VOCABULARY + models.rank(), 10, device=models.device()))


def _added(model: Any) -> None:
    model.layers.append(models.Block(10).to(models.device()))


def _on_one_rank(model: Any) -> None:
    if models.rank() == 1:
        model.head.weight = nn.Parameter(torch.zeros(models.VOCABULARY, 10, device=models.device()))


def _another_on_each(model: Any) -> None:
    model.layers[models.rank() % 3].norm.weight = nn.Parameter(torch.zeros(10, device=models.device()))


def _differentiated(model: Any) -> None:
    model.head.weight = _new(model.head.weight)
    model.head.weight.square().sum().backward()


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "other shapes": (_other_shapes, r"`head.weight` was replaced .*rank [01] has replaced .*shape \(14, 10\)"),
    "added": (_added, r"`layers.3.* was added after the model was sharded"),
    "on one rank": (_on_one_rank, r"rank 1, and another rank.*|ranks wait.* rank 1 waits in the replacement of"),
    "another on each": (_another_on_each, r"`layers.[012].norm.weight` was replaced .*rank [01] has replaced"),
    "differentiated": (_differentiated, r"`head.weight` was replaced .*gradient is of one rank only"),
}


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks(timeout=60)
def test_what_cannot_be_replaced_raises_on_every_rank(stage: int, name: str) -> None:
    change, message = REFUSED[name]
    model = models.ByteModel()
    engine = engines.make_engine(model, stage, **EAGER)
    optimizer = engines.sgd(engine, model)
    with torch.no_grad():
        change(model) if name != "differentiated" else None
    if name == "differentiated":
        change(model)
    try:
        with pytest.raises(RuntimeError, match=message):
            for number in range(2):
                batch = models.Batches(models.rank())[number]
                engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(model, batch))  # type: ignore[misc]
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
    """Prunes and replaces at the end of the second epoch, and says so to its optimizer, which has momentum."""

    changes = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1 and self.changes:
            prune.l1_unstructured(self.model.layers[1].up, "weight", 0.4)
            self.model.head.weight = _new(self.model.head.weight)
            self.trainer.optimizers[0].param_groups[0]["params"] = list(self.parameters())


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
            whole.model.head.weight = _new(whole.model.head.weight)  # type: ignore[union-attr, arg-type]
            optimizer.param_groups[0]["params"] = list(whole.parameters())
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


# ---- other layouts ----


class Resizes(L.LightningModule):
    """A language model of transformers with tied embeddings, whose vocabulary grows before the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(
            vocab_size=models.VOCABULARY, num_hidden_layers=2, tie_word_embeddings=True, **sizes
        )
        self.model = transformers.LlamaForCausalLM(config)
        self.resizes = True

    def resize(self) -> None:
        torch.manual_seed(4)
        self.model.resize_token_embeddings(models.VOCABULARY + 6, mean_resizing=False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.resizes:
            self.resize()

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch + self.model.config.vocab_size - models.VOCABULARY
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


@pytest.mark.filterwarnings("ignore:.*begins anew")
@pytest.mark.parametrize(
    ("stage", "mode", "kind"),
    [
        (3, "eager", "sharded"),
        pytest.param(1, "aot_eager", "full", marks=pytest.mark.long),
        pytest.param(2, "eager", "full", marks=pytest.mark.long),
        pytest.param(3, "aot_eager", "full", marks=pytest.mark.long),
    ],
)
@on_ranks()
def test_a_vocabulary_that_grows_in_the_middle_of_a_fit(stage: int, mode: str, kind: str, tmp_path: Path) -> None:
    """It trains on as a plain model does whose optimizer forgets the embedding's state; it is saved and resumed."""
    torch.manual_seed(0)
    ours = Resizes()
    whole, again = copy.deepcopy(ours), copy.deepcopy(ours)
    options: dict[str, Any] = {"stage": stage, "state_dict_type": kind, **MODES[mode]}
    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    _epochs(ours, ZeroCompileStrategy(**options), 3, callbacks=[saves], enable_checkpointing=True)
    optimizer = whole.to(models.device()).configure_optimizers()
    for epoch in range(3):
        if epoch == 1:
            optimizer.state.pop(whole.model.get_input_embeddings().weight)
            whole.resize()
        reference(whole, 2, loss=lambda module, batch: module.loss(batch), optimizer=optimizer)
    assert ours.model.get_output_embeddings().weight is ours.model.get_input_embeddings().weight
    assert models.deviation(ours, whole) <= 2e-6
    again.resizes = False
    again.resize()
    path = next(path for path in tmp_path.iterdir() if path.name.startswith("epoch=1"))
    assert _epochs(again, ZeroCompileStrategy(**options), 3, path).global_step == 6
    assert models.deviation(ours, again) < 1e-6


class Keeps(models.Module):
    """Its head is replaced where masters hold more bits than the model's dtype, and gradients wait for a step."""

    automatic_optimization = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def rows(self) -> dict[str, list[torch.Tensor]]:
        optimizer = self.trainer.optimizers[0]
        found = {}
        for name, p in self.named_parameters():
            if "head" not in name:
                held = [p, p.grad, *(value for key, value in optimizer.state[p].items() if key != "step")]
                found[name] = [value.to_local().clone() if hasattr(value, "to_local") else value for value in held]
        return found

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        if batch_idx == 3:
            self.after = self.rows()
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 3:
            self.before = self.rows()
            self.model.head = nn.Linear(10, models.VOCABULARY + 2).to(models.device(), torch.bfloat16)
            self.trainer.strategy.optimizers[0].add_param_group({"params": self.model.head.parameters()})  # type: ignore[union-attr]


@on_ranks()
def test_another_layout_keeps_every_bit_of_the_rest() -> None:
    module = Keeps()
    models.train(module, ZeroCompileStrategy(3, **EAGER), steps=2, precision="bf16-true")
    assert module.model.head.bias.shape == (models.VOCABULARY + 2,)
    assert module.before.keys() == module.after.keys()
    for name, values in module.before.items():
        assert len(values) == 4 and values[0].dtype == torch.float32
        assert values[0].numel() == 0 or not torch.equal(values[0], values[0].bfloat16().float()) or "shift" in name
        assert all(torch.equal(a, b) for a, b in zip(values, module.after[name], strict=True)), name


@on_ranks()
def test_another_layout_is_refused_with_the_way_out_where_it_cannot_be_taken() -> None:
    model = models.ByteModel()
    engine = engines.make_engine(model, 3, offload="optimizer", **EAGER)
    model.head = nn.Linear(10, 3)
    with pytest.raises(RuntimeError, match=r"`head.weight` .*another layer.*offload='optimizer'.*`configure_model`"):
        engine.begin_training_step()
    engine.abandon()
    model = models.ByteModel()
    engine = engines.make_engine(model, 3, **EAGER)
    message = r"`head.weight` .*another layer.*inside a step.*`on_train_batch_start`"
    with pytest.raises(RuntimeError, match=message), engine.training_step():
        model.head = nn.Linear(10, 3).to(models.device())
        engine.apply_writes()  # a checkpoint, say
    engine.abandon()
