"""Mixed precision at stage 3: what needs full values of parameters that gathers move in half precision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zerocompile.engine import Engine
from lightning_zerocompile.sharding.autocast import STEPS
from tests.support import engines, mixed, models
from tests.support.harness import on_ranks
from tests.support.mixed import MIXED
from tests.support.precisions import BF16, FP32


def _two_backwards(engine: Engine, tokens: Tensor) -> None:
    for _ in range(2):
        with mixed.autocast():
            loss = engines.token_loss(engine.model, tokens)
        engines.backward(engine, loss)


@pytest.mark.parametrize("cell", [False, "blocks", MIXED])
@on_ranks()
def test_full_values_after_the_agreement(cell: Any, tmp_path: Path) -> None:
    """Reads, writes, `full_parameters`, evaluation without autocast, checkpoints and windows see exact float32."""
    # Every kind of code that needs float32 of what is gathered low; what was wrong.
    path = str(tmp_path)
    problems: list[str] = []
    tokens = models.Batches(models.rank())[0]
    with mixed.engine(models.ByteModel(), compile=cell) as engine:
        model: Any = engine.model
        mixed.train(engine, STEPS + 1)

        def check(what: str, wrong: Any) -> None:
            if wrong:
                problems.append(f"{what}: {wrong}")

        masters, weight = mixed.masters(engine), "layers.1.up.weight"
        check("the master is no bf16 number", torch.equal(masters[weight], masters[weight].to(BF16).float()))
        with engine.training_step():
            for layer in model.layers:
                loss = layer.up.weight.square().sum() + layer.norm.weight.sum()
                check("a read", not torch.equal(loss, layer.up.weight.square().sum() + layer.norm.weight.sum()))
            seen = {n: dict(m.named_parameters(recurse=False)) and m for n, m in model.named_modules()}
            read = {n: getattr(seen[n.rpartition(".")[0]], n.rpartition(".")[2]).detach().clone() for n in masters}
            check("reads", mixed.differ(read, masters))
            with mixed.autocast():
                loss = engines.token_loss(model, tokens) + sum(x.up.weight.square().sum() for x in model.layers)
            engines.backward(engine, loss)
            grad = model.layers[1].up.weight.grad
        check("no gradient", grad is None or grad.dtype != FP32)
        engine.optimizer.zero_grad()  # type: ignore[attr-defined]

        with engine.full_parameters(model, writeback=False) as values:
            check("full_parameters", mixed.differ(values, masters))
            for value in values.values():
                value.mul_(2)
            with engine.evaluation_step(), torch.no_grad(), mixed.autocast():
                doubled = model(tokens)
        check("full_parameters changed the model", mixed.differ(mixed.masters(engine), masters))
        with engine.full_parameters(model, writeback=True) as values:
            for value in values.values():
                value.mul_(2)
        twice = {name: 2 * value for name, value in masters.items()}
        check("full_parameters lost a write", mixed.differ(mixed.masters(engine), twice))
        with engine.evaluation_step(), torch.no_grad(), mixed.autocast():
            check("what full_parameters showed", not torch.equal(model(tokens), doubled))

        with engine.evaluation_step(), torch.no_grad(), mixed.autocast():
            model(tokens)  # the unit is gathered low when the write comes
            model.layers[1].up.weight.data.mul_(0.5)
            model.layers[2].down.weight.mul_(0.5)
        engine.apply_writes()
        halved = twice | {n: masters[n] for n in (weight, "layers.2.down.weight")}
        check("a write was lost", mixed.differ(mixed.masters(engine), halved))
        twin = models.ByteModel().to(engines.place())
        twin.load_state_dict(mixed.masters(engine))
        with engine.evaluation_step(), torch.no_grad():
            check("without autocast", not torch.allclose(model(tokens), twin(tokens), atol=1e-5, rtol=1e-5))
        model.load_state_dict(masters)
        check("a checkpoint", mixed.differ(mixed.masters(engine), masters))

        mixed.train(engine, 1, first=STEPS + 1)  # after all this the next unit is foreseen wrongly once
        plain = mixed.gathered(engine, lambda: mixed.train(engine, 1, first=STEPS + 2), path)
        check("bytes of a step", plain != mixed.bytes_of_a_step(low=True) and plain)
        with engine.training_step(), engine.windows.open("window", None, None):
            moved = mixed.gathered(engine, lambda: _two_backwards(engine, tokens), path)
            check("a held window gathers inside", moved)
            full = mixed.gathered(engine, lambda: model.layers[0].up.weight.sum().item(), path)
            check("a read in a held window gathers", full)
    assert problems == []


@on_ranks()
def test_windows_after_the_agreement() -> None:
    """Windows train to the bit as at stage 1, whether units stay gathered or not."""
    # Windows of both kinds after the agreement, against stage 1.
    start, results = models.ByteModel(), []
    for stage, gather in ((1, "auto"), (3, "use"), (3, "window")):
        torch._dynamo.reset()
        data = models.Batches(models.rank())
        with mixed.engine(copy.deepcopy(start), stage, compile="blocks") as engine:
            mixed.train(engine, STEPS + 1)
            for first in (20, 22):
                with engine.training_step(), engine.windows.open(gather, None, None):
                    for number in (first, first + 1):
                        with mixed.autocast():
                            loss = engines.token_loss(engine.model, data[number])
                        engines.backward(engine, loss)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            results.append(mixed.masters(engine))
    problems = mixed.differ(results[1], results[0]) + mixed.differ(results[2], results[0])
    assert problems == []
