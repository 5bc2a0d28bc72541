"""The Trainer's ways to use the strategy: every entry point, loop, precision and what is left behind."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.models import Evaluated
from tests.support.parity import AOT, ENDS, STAGES


def _ordinary(module: nn.Module, kind: type[nn.Module]) -> None:
    """Nothing of the strategy is left in the module."""
    assert type(module) is kind
    for inner in module.modules():
        assert "lightning_zerocompile" not in type(inner).__module__
        assert not [key for key in inner.__dict__ if "zerocompile" in key]
        assert not hasattr(type(inner), "_zerocompile_base")
    for tensor in [*module.parameters(), *module.buffers()]:
        assert not isinstance(tensor, DTensor)
    assert all(type(p) is nn.Parameter and p.is_leaf for p in module.parameters())


# ---- entry points ----


class Constant(L.LightningModule):
    """It has nothing to train, so it can be evaluated only, as under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("answer", torch.tensor(42.0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.answer.requires_grad_()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.answer + models.rank(), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.answer + batch.sum()

    def configure_optimizers(self) -> None:
        return None


@STAGES
@pytest.mark.parametrize(
    "options", [{"compile": False}, {"compile": "model", "compile_options": {"backend": "aot_eager"}}]
)
@on_ranks()
def test_a_module_without_parameters_is_evaluated(stage: int, options: dict[str, Any]) -> None:
    module, data = Constant(), models.Batches(models.rank(), 2)
    trainer = models.make_trainer(ZeroCompileStrategy(stage=stage, **options))
    [seen] = trainer.validate(module, data, verbose=False)  # type: ignore[arg-type]
    assert seen == pytest.approx({"value": 42 + (models.world() - 1) / 2})
    predicted = trainer.predict(module, data)  # type: ignore[arg-type]
    assert predicted is not None
    assert [float(value) for value in predicted] == [42.0 + float(batch.sum()) for batch in data]
    with pytest.raises(RuntimeError, match=r"Constant has no parameters.*configure_model"):
        models.make_trainer(ZeroCompileStrategy(stage=stage, **options), max_steps=1).fit(module, data)  # type: ignore[arg-type]
    _ordinary(module, Constant)


def _mean_loss(module: models.Module, count: int) -> float:
    """Over the first batches of every rank."""
    with torch.no_grad():
        data = [models.Batches(r)[i] for r in range(models.world()) for i in range(count)]
        losses = [module.loss(batch.to(models.device())) for batch in data]
    return float(torch.stack(losses).mean())


@STAGES
@pytest.mark.parametrize("options", [{"compile": False}, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_validate_test_and_predict_without_fit(stage: int, options: dict[str, Any]) -> None:
    """They compute what a plain module computes, metrics are of all ranks, and weights stay what they were."""
    module, twin = models.pair(Evaluated)
    trainer = models.make_trainer(ZeroCompileStrategy(stage=stage, **options), limit_predict_batches=2)
    data = models.Batches(models.rank(), 2)
    [metrics] = trainer.validate(module, data, verbose=False)
    assert metrics["val_loss"] == pytest.approx(_mean_loss(twin, 2), abs=1e-6)
    assert metrics["val_rank"] == 2 * sum(range(models.world()))  # of both batches
    _ordinary(module, Evaluated)
    [metrics] = trainer.test(module, data, verbose=False)
    assert metrics["test_loss"] == pytest.approx(_mean_loss(twin, 2), abs=1e-6)
    predictions = trainer.predict(module, data)
    for batch, prediction in zip(data, predictions, strict=True):  # type: ignore[arg-type]
        expected = twin.predict_step(batch.to(models.device()), 0)
        assert torch.allclose(prediction.cpu(), expected.cpu(), atol=1e-6)  # type: ignore[arg-type]
    _ordinary(module, Evaluated)
    assert models.deviation(module, twin) == 0


@STAGES
@pytest.mark.parametrize("options", [{"compile": False}, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_validation_after_each_step_sees_the_new_weights(stage: int, options: dict[str, Any]) -> None:
    """Sanity check and a validation after every step: each sees the weights of exactly that many steps."""
    module, twin = models.pair(Evaluated)
    trainer = models.make_trainer(
        ZeroCompileStrategy(stage=stage, **options), max_steps=4, val_check_interval=1, num_sanity_val_steps=1,
        limit_val_batches=1,
    )  # fmt: skip
    trainer.fit(module, models.Batches(models.rank()), models.Batches(models.rank(), 1))
    expected = []
    probe = copy.deepcopy(twin).to(models.device())
    for steps in range(5):
        probe.load_state_dict(twin.state_dict())
        models.reference(probe, steps)
        with torch.no_grad():
            expected.append(probe.loss(models.Batches(models.rank())[0].to(models.device())).item())
    assert module.seen == pytest.approx(expected, abs=1e-5)  # the sanity check first
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(_mean_loss(probe, 1), abs=1e-5)


@ENDS
@pytest.mark.parametrize("same_trainer", [True, False])
@on_ranks()
def test_fit_validate_fit(stage: int, same_trainer: bool) -> None:
    """A second fit goes on from the first one's weights, in the same Trainer and in another one."""
    module, twin = models.pair(Evaluated)
    trainer = models.fit(module, ZeroCompileStrategy(stage=stage, **AOT), 2)
    _ordinary(module, Evaluated)
    models.reference(twin, 2)
    assert models.deviation(module, twin) < 1e-6
    data = models.Batches(models.rank(), 1)
    [metrics] = trainer.validate(module, data, verbose=False)
    assert metrics["val_loss"] == pytest.approx(_mean_loss(twin, 1), abs=1e-5)
    if same_trainer:
        trainer.fit_loop.epoch_loop.max_steps = 5
        trainer.fit(module, models.Batches(models.rank()))
    else:
        models.fit(module, ZeroCompileStrategy(stage=stage, **AOT), 3)
    models.reference(twin, 3)
    assert models.deviation(module, twin) < 1e-6
    _ordinary(module, Evaluated)


class Step(L.Callback):
    """Trains another module, with its own Trainer and strategy, inside the first one's training."""

    def __init__(self, stage: int) -> None:
        self.stage, self.module = stage, models.Module()
        self.twin = copy.deepcopy(self.module)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        models.fit(self.module, ZeroCompileStrategy(stage=self.stage, **AOT), 1)
        models.reference(self.twin, 1)


@pytest.mark.parametrize(
    ("outer", "inner"), [(1, 3), *(pytest.param(3, inner, marks=pytest.mark.long) for inner in (3, 2))]
)
@on_ranks()
def test_two_strategies_alternate_in_one_process(outer: int, inner: int) -> None:
    """Whole fits with another strategy between the steps of one: neither sees the other."""
    module, twin = models.pair()
    step = Step(inner)
    models.fit(module, ZeroCompileStrategy(stage=outer, **AOT), 3, callbacks=[step])
    models.reference(twin, 3)
    assert models.deviation(module, twin) < 1e-6
    assert models.deviation(step.module, step.twin) < 1e-6


@on_ranks()
def test_detect_anomaly_overfit_batches_and_fast_dev_run() -> None:
    module, twin = models.pair()
    models.fit(module, ZeroCompileStrategy(compile=False), 2, detect_anomaly=True)
    models.reference(twin, 2)
    assert models.deviation(module, twin) < 1e-6
    trainer = models.make_trainer(ZeroCompileStrategy(**AOT), max_epochs=8, overfit_batches=1, limit_val_batches=0)
    module.losses.clear()
    trainer.fit(module, torch.utils.data.DataLoader(models.Batches(0, 4)._batches, batch_size=None))
    assert trainer.global_step == 8 and module.losses[-1] < 0.8 * module.losses[0]
    models.fit(module, ZeroCompileStrategy(**AOT), 10, fast_dev_run=1)


# ---- what comes right after the optimizer's step ----


class Next(models.Module):
    """Uses the weights right after a step in one of the ways that must wait for the gather."""

    automatic_optimization = False

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.read: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
        if self.how == "read":
            self.read.append(self.model.head.weight.detach().clone())
        elif self.how == "full_parameters":
            with self.trainer.strategy.full_parameters(self.model.head) as values:
                self.read.append(values["weight"].detach().clone())
        elif self.how == "state_dict":
            state = self.trainer.strategy.lightning_module_state_dict()
            self.read.append(state["model.head.weight"] if models.rank() == 0 else torch.empty(0))

    def configure_optimizers(self) -> Any:
        if self.how != "optimizer":
            return torch.optim.SGD(self.parameters(), lr=0.5)
        rest = [p for name, p in self.named_parameters() if "head" not in name]
        return torch.optim.SGD(self.model.head.parameters(), lr=0.5), torch.optim.SGD(rest, lr=0.5)


@ENDS
@pytest.mark.parametrize("how", ["read", "full_parameters", "state_dict", "optimizer"])
@on_ranks()
def test_weights_right_after_the_step(stage: int, how: str) -> None:
    """A user's read, a checkpoint and another optimizer see the step's weights, at stages that gather ahead too."""
    module, twin = models.pair(Next, how=how)
    models.fit(module, ZeroCompileStrategy(stage=stage, **AOT), 6 if how == "optimizer" else 3)
    plain = models.Module()
    plain.load_state_dict(twin.state_dict())
    for step, read in enumerate(module.read or [torch.empty(0)] * 3):
        probe = copy.deepcopy(plain)
        models.reference(probe, step + 1)
        if read.numel():
            assert torch.allclose(read.cpu(), probe.model.head.weight.cpu(), atol=1e-6)
    assert models.deviation(module.model, probe.model) < 1e-6
    assert len(module.read) == (0 if how == "optimizer" else 3)


# ---- what is left behind ----


@ENDS
@on_ranks()
def test_module_is_ordinary_after_fit(stage: int) -> None:
    """Original class, plain parameters with their attributes, copies, pickles, plain training."""
    module, twin = models.pair()
    module.model.head.weight.mark = "kept"  # type: ignore[attr-defined]
    module.model.embedding.weight.requires_grad_(False)
    twin.model.embedding.weight.requires_grad_(False)
    models.fit(module, ZeroCompileStrategy(stage=stage, **AOT), 2)
    _ordinary(module, models.Module)
    assert module.model.head.weight.mark == "kept" and not module.model.embedding.weight.requires_grad
    models.reference(twin, 2)
    for clone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert models.deviation(clone, module) == 0
    models.reference(module, 2)  # plain training goes on
    models.reference(twin, 2)
    assert models.deviation(module, twin) < 1e-6


@ENDS
@on_ranks()
def test_module_stays_sharded_on_request(stage: int) -> None:
    """``unshard_after_fit=False``: validate, state_dict and a further fit work on the shards."""
    module, twin = models.pair(Evaluated)
    strategy = ZeroCompileStrategy(stage=stage, unshard_after_fit=False, **AOT)
    trainer = models.fit(module, strategy, 2)
    models.reference(twin, 2)
    assert all(isinstance(p, DTensor) for p in module.parameters())
    [metrics] = trainer.validate(module, models.Batches(models.rank(), 1), verbose=False)
    assert metrics["val_loss"] == pytest.approx(_mean_loss(twin, 1), abs=1e-5)
    state = strategy.lightning_module_state_dict()
    assert list(state) == (list(twin.state_dict()) if models.rank() == 0 else [])
    for name, value in state.items():
        assert torch.allclose(value, twin.state_dict()[name].cpu(), atol=1e-6)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(module)
    assert models.deviation(copy.deepcopy(module), twin) < 1e-6  # a copy is whole
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, models.Batches(models.rank()))
    models.reference(twin, 2)
    with strategy.full_parameters(writeback=False) as values:
        assert all(torch.allclose(values[n].cpu(), p.cpu(), atol=1e-6) for n, p in twin.named_parameters())


# ---- full parameters ----


class Writer(models.Module):
    """Doubles and then restores the head through ``full_parameters``."""

    def __init__(self, writeback: bool) -> None:
        super().__init__()
        self.writeback = writeback

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        with self.trainer.strategy.full_parameters(self.model, writeback=self.writeback) as values:
            assert set(values) == set(dict(self.model.named_parameters()))
            assert values["head.weight"].shape == (models.VOCABULARY, 10)
            values["head.weight"].mul_(0.5)
            values["scale"].add_(0.25)


@STAGES
@pytest.mark.parametrize("writeback", [True, False])
@on_ranks()
def test_full_parameters(stage: int, writeback: bool) -> None:
    """What is written inside is taken over by every later use, or by none."""
    module, twin = models.pair(Writer, writeback=writeback)
    models.fit(module, ZeroCompileStrategy(stage=stage, **AOT), 3)
    optimizer = twin.configure_optimizers()
    for step in range(3):
        optimizer.zero_grad()
        if writeback:
            with torch.no_grad():
                twin.model.head.weight.mul_(0.5)
                twin.model.scale.add_(0.25)
        for r in range(models.world()):
            (twin.loss(models.Batches(r)[step]) / models.world()).backward()
        optimizer.step()
    assert models.deviation(module, twin) < 1e-6


@STAGES
@on_ranks()
def test_checkpoint_right_after_each_step(stage: int) -> None:
    """A checkpoint between two steps holds the weights of exactly that many steps."""
    module, twin = models.pair()
    saved: list[dict[str, Any]] = []

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            state = trainer._checkpoint_connector.dump_checkpoint()
            buffer = io.BytesIO()
            torch.save(state, buffer)
            saved.append(state)

    models.fit(module, ZeroCompileStrategy(stage=stage, **AOT), 3, callbacks=[Save()])
    for state in saved:
        for name, value in state["state_dict"].items():
            assert type(value) is Tensor and value.device.type == "cpu", name
    assert len(saved) == 3
    if models.rank() == 0:
        for step, state in enumerate(saved):
            probe = copy.deepcopy(twin)
            models.reference(probe, step + 1)
            probe_state = probe.state_dict()
            assert all(torch.allclose(v, probe_state[n].cpu(), atol=1e-6) for n, v in state["state_dict"].items())
