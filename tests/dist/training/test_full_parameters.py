"""`full_parameters`: what is written inside counts from its end on, or never; an exception restores."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import on_ranks

CELLS: tuple[tuple[int, Any], ...] = ((1, "blocks"), (2, False), (3, False), (3, "blocks"), (3, "model"))


def _values(engine: Any, model: nn.Module) -> dict[str, Tensor]:
    with engine.full_parameters(model, writeback=False) as values:
        return {name: value.clone() for name, value in values.items()}


def _distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max((left[name] - right[name]).abs().max().item() for name in right)


def _masters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_value(p) for name, p in model.state_dict().items()}


def _write(values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        (value.data if "up" in name else value).mul_(0.5)  # `data` changes no version


def _inside(stage: int, scope: Any) -> list[str]:
    """Everything in one sharded model; what was wrong."""
    torch._dynamo.reset()
    model = models.Whole(models.ByteModel())
    batch, problems = models.Batches(models.rank())[0], []
    start = {name: p.detach().clone().to(models.device()) for name, p in model.named_parameters()}
    halved = {name: 0.5 * value for name, value in start.items()}
    twin = models.Whole(models.ByteModel()).to(models.device())
    twin.load_state_dict(halved)

    def check(what: str, expected: dict[str, Tensor]) -> None:
        if _distance(_masters(model), expected) or _distance(_values(engine, model), expected):
            problems.append(f"stage {stage} {scope}: {what}")

    with engines.engine(model, stage, compile=scope) as engine:
        optimizer = engines.sgd(engine, model)
        with engine.full_parameters(model, writeback=False) as values:
            _write(values)
            engine.apply_writes()  # as a checkpoint does
            if _distance(_masters(model), start):
                problems.append(f"stage {stage} {scope}: a checkpoint inside saw what is written")
            for _ in range(2):  # the evaluation with other weights, as an EMA does it
                with engine.evaluation_step(), torch.no_grad():
                    seen = model(batch)
                if (seen - twin(batch)).abs().max() > 1e-5:
                    problems.append(f"stage {stage} {scope}: the model does not compute with what was written")
            if _distance(dict(values), halved):
                problems.append(f"stage {stage} {scope}: a forward inside changed the values")
        check("writeback=False changed the model", start)
        with engine.evaluation_step(), torch.no_grad():
            before = model(batch)
        for writeback in (True, False):
            with pytest.raises(KeyError, match="on purpose"), engine.full_parameters(model, writeback) as values:
                _write(values)
                raise KeyError("on purpose")
            check(f"an exception with writeback={writeback} changed the model", start)
        with engine.training_step():  # reads between forward and backward are no modification
            loss = engines.token_loss(model, batch)
            _values(engine, model)
            engines.backward(engine, loss)
        with pytest.raises(RuntimeError, match=r"SGD.step\(\) inside `full_parameters`"):  # noqa: SIM117
            with engine.full_parameters(model, True):
                optimizer.step()
        optimizer.zero_grad()
        check("a refused step changed the model", start)
        with pytest.raises(RuntimeError, match="Enter once"), engine.full_parameters(model, True):  # noqa: SIM117
            with engine.full_parameters(model.model.layers[1], False):
                pass
        check("nesting changed the model", start)
        with engine.full_parameters(model.model.layers[0], True) as outer:
            with engine.full_parameters(model.model.layers[1], False) as inner:
                _write(inner)
            _write(outer)
        check("disjoint nesting", {n: 0.5 * v if ".0." in n else v for n, v in start.items()})
        with engine.full_parameters(model.model.layers[0], True) as values:
            for value in values.values():
                value.mul_(2.0)
        with engine.evaluation_step(), torch.no_grad():
            if (model(batch) - before).abs().max() > 1e-6:
                problems.append(f"stage {stage} {scope}: not what it was")
        if engine.runtime.core.resident_units():
            problems.append(f"stage {stage} {scope}: {engine.runtime.core.resident_units()} stay gathered")
    return problems


@on_ranks()
def test_what_is_written_inside() -> None:
    """Masters (so checkpoints) keep their values inside, the modules compute with what is written."""
    assert [problem for stage, scope in CELLS for problem in _inside(stage, scope)] == []


class SavesInside(L.Callback):
    """Other weights in, a checkpoint, the weights back: what an EMA's callback does."""

    def __init__(self, writeback: bool) -> None:
        self.writeback = writeback
        self.states: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        with trainer.strategy.full_parameters(writeback=self.writeback) as values:  # type: ignore[attr-defined]
            for value in values.values():
                value.zero_()
            self.states.append(trainer._checkpoint_connector.dump_checkpoint()["state_dict"])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("writeback", [True, False])
@on_ranks()
def test_a_checkpoint_saved_inside(stage: int, writeback: bool) -> None:
    """It holds what the parameters were when the context was entered."""
    module, twin = models.pair(models.Module)
    callback = SavesInside(writeback)
    models.train(
        module, ZeroCompileStrategy(stage=stage, compile_options={"backend": "aot_eager"}), 2, callbacks=[callback]
    )
    models.reference(twin, 1)
    expected = twin.state_dict()
    state = callback.states[0]
    inside = max(((state[n].cpu() - expected[n].cpu()).abs().max().item() for n in state), default=0.0)
    assert inside <= 1e-6
    assert (max(p.abs().max().item() for p in module.parameters()) == 0.0) is writeback
