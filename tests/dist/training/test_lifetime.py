"""How long gradients live: the partition is made by a backward and gone with the step, in every order of calls.

Source of the cases: DeepSpeed PR 8036.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.support import engines, models
from tests.support.alive import Partitions
from tests.support.harness import on_ranks
from tests.support.parity import CELLS, reference

LR = 0.5
LONG: list[tuple[int, Any]] = [(1, False), (2, "blocks"), (3, "model"), (3, "inductor")]


def _options(scope: Any) -> dict[str, Any]:
    return (
        {"compile": "blocks", "compile_options": {"backend": "inductor"}} if scope == "inductor" else {"compile": scope}
    )


def _check_route(engine: Any, scope: Any) -> list[str]:
    """Gradients came out of graphs if, and only if, something is compiled."""
    compiled = engine.runtime.stats().graph_reductions > 0
    return [] if compiled is bool(scope) else [f"{scope}: {engine.runtime.stats()}"]


def _raise_in_backward(engine: Any, model: Any, optimizer: Any, batch: Tensor) -> None:
    """A backward that fails half-way adds nothing to what is bound, and keeps nothing of its own."""
    with pytest.raises(ValueError, match="on purpose"), engine.training_step():
        inner = model.model
        x = engines.FailsInBackward.apply(inner.layers[0](inner.embedding(batch[:, :-1])))
        engines.backward(engine, inner.head(inner.layers[2](inner.layers[1](x))).sum())
    optimizer.zero_grad(set_to_none=True)
    with engine.training_step(), torch.no_grad():  # where a failed backward is noticed
        model(batch)
    engine.runtime.core.end_forward()


def _raise_in_window(engine: Any, model: Any, optimizer: Any, batch: Tensor) -> None:
    with pytest.raises(ValueError, match="boom"), engine.windows.open("auto", None, None):
        engines.accumulate(engine, model, batch)
        raise ValueError("boom")
    optimizer.zero_grad(set_to_none=True)


HOW: dict[str, Callable[..., Any]] = {
    "step": lambda engine, model, optimizer, batch: optimizer.step(),
    "unit by unit": lambda engine, model, optimizer, batch: engine.step(optimizer, lambda: None),
    "zero_grad": lambda engine, model, optimizer, batch: optimizer.zero_grad(set_to_none=True),
    "raise in backward": _raise_in_backward,
    "raise in window": _raise_in_window,
}


@on_ranks(timeout=400)
def test_partition_is_gone(long: bool) -> None:
    """One exact partition after the backward, nothing of it after the step, `zero_grad` or an exception."""
    # The gradient partition and every full gradient are gone, however a step ends: one after the other.
    cells = CELLS + LONG * long
    problems = []
    for stage, scope in cells:
        torch._dynamo.reset()
        model, data = models.Whole(models.ByteModel()), models.Batches(models.rank())
        parameters = list(model.parameters())
        with engines.engine(model, stage, **_options(scope)) as engine:
            parameters = list(model.parameters())
            optimizer = torch.optim.AdamW(parameters, lr=1e-2)
            engine.attach_optimizers([optimizer])
            for number, how in enumerate(how for how in HOW for _ in range(2)):
                partitions = Partitions(parameters)
                before = engine.runtime.core.deferred_bytes()
                if partitions.note() or before:
                    problems.append(f"{stage} {scope}: {before} bytes before the backward of step {number}, {how}")
                engines.accumulate(engine, model, data[number])
                size = partitions.note()
                exact = sum(
                    4 * -(-p.shape[0] // models.world()) * p.shape[1:].numel() if p.dim() else 4 for p in parameters
                )
                if size != exact or engine.runtime.core.deferred_bytes():
                    problems.append(f"{stage} {scope}: partition of {size} bytes, shards have {exact}")
                HOW[how](engine, model, optimizer, data[number])
                if partitions.alive() or any(p.grad is not None for p in parameters):
                    problems.append(f"{stage} {scope}: {partitions.alive()} gradients alive after {how}")
                if engine.runtime.core.deferred_bytes() or engine.runtime.core.resident_units():
                    problems.append(f"{stage} {scope}: full values or gradients alive after {how}")
            problems += _check_route(engine, scope)
    assert problems == [], "\n".join(problems)


# ---- several backwards ----


def _plain(twin: nn.Module) -> None:
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR, momentum=0.9)
    for number in range(4):
        for micro in range(2):
            for rank in range(models.world()):
                loss = engines.token_loss(twin, models.Batches(rank)[2 * number + micro])
                (loss / models.world()).backward()
        if number != 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 0)


@on_ranks(timeout=400)
def test_backward_backward_step(long: bool) -> None:
    """Gradients add until zero_grad, in one partition that does not grow; parameters equal DDP's."""
    # backward, backward, step; `zero_grad(set_to_none=False)`; a step that is skipped.
    cells = CELLS + LONG * long
    twin, problems = models.Whole(models.ByteModel()), []
    state = {name: value.clone() for name, value in twin.state_dict().items()}
    _plain(twin.to(models.device()))
    for stage, scope in cells:
        torch._dynamo.reset()
        model, data = models.Whole(models.ByteModel()), models.Batches(models.rank())
        model.load_state_dict(state)
        with engines.engine(model, stage, **_options(scope), keep_gradients=True) as engine:
            parameters = list(model.parameters())
            optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9)
            engine.attach_optimizers([optimizer])
            sizes = set()
            for number in range(4):
                for micro in range(2):
                    engines.accumulate(engine, model, data[2 * number + micro])
                    sizes.add(Partitions(parameters).note())
                if number != 2:  # that step is skipped and its gradients are kept
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=number == 0)
            problems += _check_route(engine, scope)
        if len(sizes) != 1:
            problems.append(f"{stage} {scope}: partitions of {sizes} bytes")
        if models.deviation(model, twin) > 1e-6:
            problems.append(f"{stage} {scope}: {models.deviation(model, twin)}")
    assert problems == [], "\n".join(problems)


# ---- several optimizers ----


@on_ranks(timeout=400)
def test_some_optimizers_step(long: bool) -> None:
    """Three optimizers, of which one or two step: the others' gradients stay and add up, as in torch."""
    cells = CELLS + LONG * long
    twin, problems = models.Whole(models.ByteModel()), []
    state = {name: value.clone() for name, value in twin.state_dict().items()}
    plans = [(0,), (1, 2), (0, 2), (1,), (0, 1, 2)]

    def groups(model: Any) -> list[torch.optim.Optimizer]:
        head = [*model.model.head.parameters(), *model.model.embedding.parameters()]
        rest = [p for p in model.parameters() if not any(p is q for q in head)]
        return [
            torch.optim.SGD(head, lr=LR),
            torch.optim.SGD(rest[::2], lr=LR),
            torch.optim.SGD(rest[1::2], lr=LR, momentum=0.9),
        ]

    twin.to(models.device())
    optimizers = groups(twin)
    for number, plan in enumerate(plans):
        engines.mean_backward(twin, number)
        for index in plan:
            optimizers[index].step()
            optimizers[index].zero_grad()
    for stage, scope in cells:
        torch._dynamo.reset()
        model, data = models.Whole(models.ByteModel()), models.Batches(models.rank())
        model.load_state_dict(state)
        with engines.engine(model, stage, **_options(scope)) as engine:
            optimizers = groups(model)
            engine.attach_optimizers(optimizers)
            for number, plan in enumerate(plans):
                engines.accumulate(engine, model, data[number])
                for index in plan:
                    optimizers[index].step()
                kept = [all(p.grad is not None for p in o.param_groups[0]["params"]) for o in optimizers]
                if kept != [index not in plan for index in range(3)]:
                    problems.append(f"{stage} {scope}: gradients kept {kept} after the steps of {plan}")
            problems += _check_route(engine, scope)
        if models.deviation(model, twin) > 2e-6:
            problems.append(f"{stage} {scope}: {models.deviation(model, twin)}")
    assert problems == [], "\n".join(problems)


# ---- recompilation ----


@on_ranks(timeout=400)
def test_recompilation_in_mid_training(long: bool) -> None:
    """New graphs in mid-training (other lengths, evaluation, thrown-away code): gradients right, memory gone."""
    cells = CELLS + LONG * long
    twin, problems = models.Whole(models.ByteModel()), []
    state = {name: value.clone() for name, value in twin.state_dict().items()}
    lengths = [5, 5, 3, 4, 5, 2, 5]

    def data(rank: int) -> list[Tensor]:
        return [models.Batches(rank)[number][:, : length + 1] for number, length in enumerate(lengths)]

    reference(twin, len(lengths), data=data, lr=LR)
    for stage, scope in [cell for cell in cells if cell[1]]:
        torch._dynamo.reset()
        counters.clear()
        model, data = models.Whole(models.ByteModel()), models.Batches(models.rank())
        model.load_state_dict(state)
        with engines.engine(model, stage, **_options(scope)) as engine:
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            engine.attach_optimizers([optimizer])
            for number, length in enumerate(lengths):
                if number == 4:
                    torch._dynamo.reset()  # every graph is made anew
                    with engine.evaluation_step(), torch.inference_mode():
                        model(data[0][:, :4])
                partitions = Partitions(list(model.parameters()))
                engines.accumulate(engine, model, data[number][:, : length + 1])
                partitions.note()
                optimizer.step()
                if partitions.alive() or engine.runtime.core.deferred_bytes() or engine.runtime.core.resident_units():
                    problems.append(f"{stage} {scope}: alive after step {number}")
            graphs = engine.regions.stats.dynamo_graphs
            problems += _check_route(engine, scope)
        if models.deviation(model, twin) > 1e-6 or graphs < 3:
            problems.append(f"{stage} {scope}: {models.deviation(model, twin)} with {graphs} graphs")
    assert problems == [], "\n".join(problems)
