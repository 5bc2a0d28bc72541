"""Optimizers that were made before the model was sharded: in `__init__`, or over `model.parameters()` before `fit`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

KINDS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.2, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, eps=1e-3),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05, eps=(1e-3, 1e-3)),
}


class Made(models.Module):
    """Its optimizer is made in `__init__`, in two groups; a scheduler is bound to it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        parameters = list(self.model.parameters())
        self.made = KINDS[kind]([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.01}])

    def configure_optimizers(self) -> Any:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.made, 0.5)
        return [self.made], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_start(self) -> None:
        masters = dict(self.named_parameters())
        held = [p for group in self.made.param_groups for p in group["params"]]
        self.taken = set(held) == set(masters.values()) and all(isinstance(p, DTensor) for p in held)
        self.states = [
            isinstance(kept, DTensor)
            for p, state in self.made.state.items()
            for kept in state.values()
            if isinstance(kept, torch.Tensor) and kept.shape == p.shape and kept.dim() > 0
        ]


def _plain(module: Made, steps: int) -> None:
    """What DDP computes, in one process."""
    _move(module, models.device())
    [optimizer], [schedule] = module.configure_optimizers()
    for number in range(steps):
        for r in range(models.world()):
            (module.loss(models.Batches(r)[number]) / models.world()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule["scheduler"].step()


def _move(module: Made, device: torch.device | str) -> None:
    """With the state of its optimizer."""
    module.to(device)
    module.made.load_state_dict(module.made.state_dict())


def _warm(module: Made) -> None:
    """A plain step: the optimizer has a state, the same on all ranks, before the model is sharded."""
    module.loss(torch.arange(models.LENGTH)[None] % models.VOCABULARY).backward()
    module.made.step()
    module.made.zero_grad()


def _fit(module: L.LightningModule, stage: int, steps: int, **options: Any) -> L.Trainer:
    trainer = models.make_trainer(ZeroCompileStrategy(stage, **options), max_steps=steps)
    trainer.fit(module, models.Batches(models.rank()))
    return trainer


def _is_back(module: Made, twin: Made) -> None:
    """The optimizer refers to the module's own parameters, with the whole state."""
    held = [p for group in module.made.param_groups for p in group["params"]]
    theirs = [p for group in twin.made.param_groups for p in group["params"]]
    assert set(held) == set(module.parameters()) and set(module.made.state) == set(held)
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in held)
    for p, other in zip(held, theirs, strict=True):
        for name, kept in module.made.state[p].items():
            expected = twin.made.state[other][name]
            if isinstance(kept, torch.Tensor):
                assert type(kept) is torch.Tensor and torch.allclose(kept, expected.cpu(), atol=1e-6), name
            else:
                assert kept == expected


class Loads(Made):
    """Loads a whole state into its optimizer when it is sharded already."""

    def __init__(self, kind: str, state: Any) -> None:
        super().__init__(kind)
        self.loaded = state

    def on_train_start(self) -> None:
        self.optimizers().optimizer.load_state_dict(self.loaded)  # type: ignore[union-attr]
        super().on_train_start()


CELLS = [
    (1, "eager", "sgd"),
    (3, "aot_eager", "adamw"),
    (3, "eager", "adafactor"),
    pytest.param(2, "aot_eager", "sgd", marks=pytest.mark.long),
    pytest.param(2, "eager", "adagrad", marks=pytest.mark.long),
    pytest.param(1, "aot_eager", "adamw", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("stage", "mode", "kind"), [*CELLS[:2], *CELLS[3:]])
@on_ranks()
def test_user_code_loads_a_whole_state(stage: int, mode: str, kind: str) -> None:
    before = Made(kind)
    _warm(before)
    state = copy.deepcopy(before.made.state_dict())
    module, twin = Loads(kind, copy.deepcopy(state)), Made(kind)  # torch does not copy counters that it loads
    twin.load_state_dict(module.state_dict())
    twin.made.load_state_dict(state)
    _fit(module, stage, 2, **(EAGER if mode == "eager" else AOT))
    _plain(twin, 2)
    assert module.taken and (kind == "adafactor" or (module.states and all(module.states)))
    assert models.deviation(module, twin) <= 2e-6
    _is_back(module, twin)


@pytest.mark.parametrize(("stage", "mode", "kind"), CELLS)
@on_ranks()
def test_an_optimizer_of_init_is_taken_over(stage: int, mode: str, kind: str) -> None:
    """With its groups and its state, for the run; after it the parameters are the module's, and training goes on."""
    module, twin = Made(kind), Made(kind)  # with CUDA a copy of Adafactor cannot step (torch 2.11)
    twin.load_state_dict(module.state_dict())
    for one in (module, twin):
        _warm(one)
    first = list(module.parameters())
    for _ in range(2):  # a second fit takes the same optimizer over again
        _fit(module, stage, 2, **(EAGER if mode == "eager" else AOT))
        _plain(twin, 2)
        assert module.taken and (kind == "adafactor" or (module.states and all(module.states)))
        assert models.deviation(module, twin) <= 2e-6
        _is_back(module, twin)
    assert all(now is then for now, then in zip(module.parameters(), first, strict=True))  # somebody held them
    _warm(module)
    _move(twin, "cpu")
    _warm(twin)
    assert models.deviation(module, twin) <= 2e-6


def _fit_epochs(module: L.LightningModule, stage: int, epochs: int, path: str | None = None) -> L.Trainer:
    """One batch an epoch, so a checkpoint at its end holds all that there is."""
    trainer = models.make_trainer(ZeroCompileStrategy(stage, **EAGER), max_epochs=epochs)
    trainer.fit(module, models.Batches(models.rank(), 1), ckpt_path=path, weights_only=False)
    return trainer


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.long)])
@on_ranks()
def test_resume_with_an_optimizer_of_init(stage: int, tmp_path: Path) -> None:
    whole = Made("adamw")
    half, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    _fit_epochs(whole, stage, 4)
    path = f"{tmp_path}/half.ckpt"
    _fit_epochs(half, stage, 2).save_checkpoint(path)
    _fit_epochs(resumed, stage, 4, path)
    assert models.deviation(half, whole) > 1e-3  # what the resumed one has to catch up
    assert models.deviation(resumed, whole) <= 1e-6
    _is_back(resumed, whole)


@on_ranks()
def test_a_validation_before_the_fit_leaves_the_optimizer_its_parameters() -> None:
    module = Made("sgd")
    twin = copy.deepcopy(module)
    trainer = models.make_trainer(ZeroCompileStrategy(3, **EAGER), max_steps=2)
    trainer.validate(module, models.Batches(models.rank(), 1), verbose=False)
    assert {p for group in module.made.param_groups for p in group["params"]} == set(module.parameters())
    trainer.fit(module, models.Batches(models.rank()))
    _plain(twin, 2)
    assert models.deviation(module, twin) <= 1e-6


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_several_optimizers_of_parts_and_what_is_not_the_models(stage: int) -> None:
    model = models.ByteModel()
    head = torch.optim.SGD(model.head.parameters(), lr=0.5)
    rest = torch.optim.SGD([*model.layers.parameters(), model.scale], lr=0.25)
    foreign = torch.optim.SGD([*model.head.parameters(), nn.Parameter(torch.zeros(3))], lr=0.5)
    twin = copy.deepcopy(model)
    plain = [
        torch.optim.SGD(twin.head.parameters(), lr=0.5),
        torch.optim.SGD([*twin.layers.parameters(), twin.scale], lr=0.25),
    ]
    with engines.engine(model, stage, **EAGER) as engine:
        with pytest.raises(RuntimeError, match=r"Optimizer 1 \(SGD\) holds 1 parameters that are not the model's"):
            engine.attach_optimizers([head, foreign])
        engine.attach_optimizers([head, rest])
        for number in range(2):
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[number]))
            for optimizer in (head, rest):
                engine.step(optimizer, lambda: None)
            model.zero_grad()
    twin.to(models.device())
    for number in range(2):
        for r in range(models.world()):
            (engines.token_loss(twin, models.Batches(r)[number]) / models.world()).backward()
        for optimizer in plain:
            optimizer.step()
        twin.zero_grad()
    assert models.deviation(model, twin) <= 1e-6
    assert [p for group in rest.param_groups for p in group["params"]] == [*model.layers.parameters(), model.scale]


class Raises(Made):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ValueError("on purpose")


@on_ranks()
def test_after_an_exception_the_optimizer_has_the_whole_parameters() -> None:
    module = Raises("sgd")
    twin = copy.deepcopy(module)
    with pytest.raises(ValueError, match="on purpose"):
        _fit(module, 3, 4, **EAGER)
    _plain(twin, 2)
    assert models.deviation(module, twin) <= 1e-6
    _is_back(module, twin)


@on_ranks()
def test_an_optimizer_that_has_states_is_taken_over_again() -> None:
    """What a fit says at its start counts them, too; counters are tensors without a shape."""
    module = Made("adamw")
    twin = copy.deepcopy(module)
    for _ in range(2):
        _fit(module, 3, 2, **EAGER)
        _plain(twin, 2)
    assert models.deviation(module, twin) <= 1e-6


@on_ranks()
def test_an_optimizer_that_is_refused_is_as_it_was() -> None:
    model = models.ByteModel()
    first, second = model.head.weight, model.scale
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], momentum=0.9)
    first.grad = torch.ones_like(first)
    optimizer.step()
    with engines.engine(model, 3, **EAGER) as engine:
        optimizer.add_param_group({"params": [model.head.weight]})
        with pytest.raises(RuntimeError, match=r"Optimizer 0 \(SGD\) holds a parameter more than once"):
            engine.attach_optimizers([optimizer])
        held = [group["params"] for group in optimizer.param_groups]
        assert held[0][0] is first and held[1][0] is second
        assert set(optimizer.state) == {first}


class MadeInTheRun(models.Module):
    """Its optimizer, with a state, is made in `configure_optimizers`."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, EAGER), (3, EAGER), (3, AOT)])
@on_ranks()
def test_an_optimizer_of_the_run_stays_with_it(stage: int, options: dict[str, Any]) -> None:
    """Also where one rank alone holds the parameters from before the sharding."""
    module = MadeInTheRun()
    twin = copy.deepcopy(module)
    noted = list(module.parameters()) if models.rank() == 0 else []
    trainer = _fit(module, stage, 2, **options)
    models.reference(twin, 2)
    assert models.deviation(module, twin) <= 1e-6
    assert set(noted) <= set(module.parameters())
    momenta = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    assert {isinstance(kept, DTensor) for kept in momenta if kept is not None and kept.dim() > 0} == {True}
