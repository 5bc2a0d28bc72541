"""torch.optim's optimizers: what they compute on whole parameters, or an error by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models, twins
from tests.support.harness import on_ranks
from tests.support.parity import reference

# Adam's eps: the gradient of the logits' common shift is zero but for rounding
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "groups": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9, "nesterov": True, "foreach": False}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "fused": True}),
    "adamw foreach amsgrad": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "foreach": True, "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-3}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01, "eps": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-3}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0, "eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05, "eps": (1e-3, 1e-3)}),
    "muon": (torch.optim.Muon, {"lr": 0.05}),
}


class Stepped(models.Module):
    """Trained by one of the optimizers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.model.shift.requires_grad_(name != "rprop")  # it looks at a gradient's sign only

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind, arguments = OPTIMIZERS[self.name]
        parameters = [p for p in self.parameters() if p.requires_grad and (p.dim() == 2 or self.name != "muon")]
        if self.name == "groups":
            return kind([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.05}], **arguments)
        return kind(parameters, **arguments)

    def on_train_end(self) -> None:
        """Nothing of a parameter's shape is kept whole."""
        for parameter, state in self.trainer.optimizers[0].state.items():
            assert isinstance(parameter, DTensor)
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
                    assert isinstance(value, DTensor) and value.placements == parameter.placements


def _fit(
    module: L.LightningModule, stage: int, steps: int, path: str | None = None, checkpoint: str = "full"
) -> L.Trainer:
    strategy = ZeroCompileStrategy(stage=stage, compile=False, state_dict_type=checkpoint)
    trainer = models.make_trainer(strategy, max_epochs=steps)
    trainer.fit(module, models.Batches(models.rank(), 1), ckpt_path=path, weights_only=False)
    return trainer


@on_ranks()
def test_optimizers_compute_what_they_compute_on_whole_parameters() -> None:
    """Elementwise ones on shards; Adafactor and Muon, which need all rows of a parameter, too."""
    names = list(OPTIMIZERS)
    wrong = []
    for name in names:
        torch.manual_seed(0)
        start = Stepped(name)
        twin = copy.deepcopy(start)
        optimizer = twin.to(models.device()).configure_optimizers()
        reference(twin, [0] * 4, lambda module, batch: module.loss(batch), optimizer=optimizer)
        assert models.deviation(twin, start) > 5e-3, name
        for stage in (1, 3) if name in ("groups", "muon", "adafactor") else (3,):
            module = copy.deepcopy(start)
            _fit(module, stage, 4)
            deviation = models.deviation(module, twin)
            if not deviation < 2e-6:
                wrong.append((name, stage, deviation))
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("muon", "full"), ("rprop", "full"), ("asgd", "full"), ("adafactor", "full"), ("adafactor", "sharded")],
)
@on_ranks()
def test_resume(name: str, kind: str, tmp_path: Path) -> None:
    """Their states are saved and loaded into shards, at another stage; Adafactor's factors are on every rank."""
    folder = str(tmp_path)
    torch.manual_seed(0)
    start = Stepped(name)
    whole, half, resumed = copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(start)
    _fit(whole, 3, 4)
    path = f"{folder}/{name}.ckpt"
    _fit(half, 1, 2, checkpoint=kind).save_checkpoint(path)
    trainer = _fit(resumed, 3, 4, path)
    assert trainer.global_step == 4
    assert models.deviation(half, whole) > 1e-3  # what the resumed one has to catch up
    assert models.deviation(resumed, whole) < 1e-7


def _updated_in_rounds(together: int, fused: bool = True) -> tuple[list[Tensor], list[int]]:
    """The masters' shards after some steps, and how many parameters each update of the last one had."""
    torch.manual_seed(0)
    model, data, sizes = models.ByteModel(), models.Batches(models.rank()), []

    with engines.engine(model, 1, compile=False, unit_bytes=1) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, fused=fused)
        engine.attach_optimizers([optimizer])
        engine.steps._stepper.together = together
        update = engine.steps._stepper._update

        def watched(optimizer: Any, one: Any, *rest: Any, **named: Any) -> None:
            sizes.append(len(one.masters))
            update(optimizer, one, *rest, **named)

        engine.steps._stepper._update = watched  # type: ignore[method-assign]
        for number in range(3):
            sizes.clear()
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, data[number]))
            engine.step(optimizer, lambda: None)
        shards = [p.to_local().detach().clone() for p in model.parameters()]
    return shards, list(sizes)


@on_ranks()
def test_nobody_places_what_nothing_was_offered_for() -> None:
    """See [Note: one pass]. On the CPU there is no kernel that could: nothing is offered, and torch updates."""
    model = models.ByteModel()
    with engines.engine(model, 1, compile=False) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine.attach_optimizers([optimizer])
        engines.step(engine, optimizer, lambda: engines.token_loss(model, models.Batches(0)[0]))
        core, units = engine.runtime.core, list(engine.runtime.unit_of.values())
        if models.device() == "cpu":
            assert engine.runtime.stats().updated_in_one_pass == 0 and core.place(units) == []
        with pytest.raises(RuntimeError, match="nothing was offered"):
            core.masters_changed(units, [10**6])


@on_ranks()
def test_small_units_are_updated_together() -> None:
    results = [_updated_in_rounds(together) for together in (1, 100, 10**9)]
    shards = [result[0] for result in results]
    same = [all(map(torch.equal, shards[0], other)) for other in shards[1:]]
    assert len(_updated_in_rounds(10**9, fused=False)[1]) == len(results[0][1])  # its temporary values stay small
    each, some, all_at_once = (result[1] for result in results)
    assert same == [True, True]
    assert len(each) > len(some) > len(all_at_once) == 1
    assert sum(each) == sum(some) == sum(all_at_once)


@on_ranks()
def test_what_is_reduced_last_is_updated_last() -> None:
    """The forward's last quarter first; each unit is gathered as soon as it is updated."""
    # What happens to each unit in a step: "update" or "gather", in the order of the forward (unit 0 is first).
    stage = 1
    model, seen = models.ByteModel(), list[tuple[str, int]]()
    with engines.engine(model, stage, compile=False, unit_bytes=1) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine.attach_optimizers([optimizer])
        data = models.Batches(models.rank())
        engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))
        stepper, places = engine.steps._stepper, [unit for unit, _ in engine.runtime.units_in_order()]
        update, written = stepper._update, stepper._updated

        def watched(optimizer: Any, one: Any, *rest: Any, **named: Any) -> None:
            seen.extend(("update", places.index(unit)) for unit in one.units)
            update(optimizer, one, *rest, **named)

        def gathered(units: list[int], placed: list[int]) -> None:
            seen.extend(("gather", places.index(unit)) for unit in units)
            written(units, placed)

        stepper._update, stepper._updated = watched, gathered  # type: ignore[method-assign]
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, data[1]))
        engine.step(optimizer, lambda: None)
    count = len(seen) // 2
    first = count - count // 4
    assert 0 < first < count
    assert seen == [(what, unit) for unit in [*range(first, count), *range(first)] for what in ("update", "gather")]


@pytest.mark.parametrize("late", ["head", "scale"])  # the latter has fewer elements than there are ranks
@pytest.mark.parametrize("name", ["sgd fused", "adamw fused"])
@on_ranks()
def test_a_unit_that_is_trained_later(name: str, late: str) -> None:
    """One unit is trained from the second step on, so it has a state when the other units have another one."""
    (kind, arguments), (model, twin) = OPTIMIZERS[name], models.pair(models.ByteModel)
    with engines.engine(model, 2, compile=False, unit_bytes=1) as engine:
        optimizer = kind(model.parameters(), **arguments)
        plain = kind(twin.parameters(), **(arguments | {"fused": False}))  # torch's fused SGD raises here
        engine.attach_optimizers([optimizer])
        for number in range(3):
            for name, p in (*model.named_parameters(), *twin.named_parameters()):
                if name.startswith(late):
                    p.requires_grad_(number > 0)
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[number]))
            engine.step(optimizer, lambda: None)
            engines.mean_backward(twin, number)
            plain.step()
            plain.zero_grad()
    assert models.deviation(model, twin) <= 1e-6


@pytest.mark.parametrize(
    ("stage", "past"),
    [
        (1, True),
        (3, False),
        *(pytest.param(stage, past, marks=pytest.mark.long) for stage, past in ((1, False), (3, True))),
    ],
)
@on_ranks()
def test_a_parameter_that_a_second_optimizer_gets_later(stage: int, past: bool) -> None:
    """The first one's step must not take its gradient away. ``past``: the steps go past Lightning."""
    model, twin = models.pair(twins.small)

    def both(module: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(module.parameters())
        return [torch.optim.SGD(part, lr=0.1) for part in (parameters, parameters[:1])]

    with engines.engine(model, stage, compile=False) as engine:
        ours, plain = both(model), both(twin)
        engine.attach_optimizers(ours)
        for number in range(3):
            if number == 1:
                for module, (_, second) in ((model, ours), (twin, plain)):
                    second.add_param_group({"params": [list(module.parameters())[2]], "lr": 0.3})
            with engine.training_step():
                engines.backward(engine, twins.loss(model, twins.mine(number)))
            for optimizer in ours:
                if past:
                    optimizer.step()
                else:
                    engine.step(optimizer, lambda: None)
            for parameter in (*model.parameters(), *twin.parameters()):
                parameter.grad = None
            twins.gradients(twin, twins.on_all(number))
            for optimizer in plain:
                optimizer.step()
    assert models.deviation(model, twin) <= 1e-6
