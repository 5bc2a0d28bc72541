"""Bad input: a clear error on every rank, in seconds, and the processes can go on afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.sharding.checks import check_devices, check_not_scripted
from lightning_zerocompile.sharding.master import record_of
from tests.support import engines, failing, harness, models
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import AOT, EAGER


def _fit(module: L.LightningModule, **arguments: Any) -> None:
    strategy = arguments.pop("strategy", None) or ZeroCompileStrategy(compile=False)
    models.make_trainer(strategy, **({"max_steps": 2} | arguments)).fit(module, models.Batches(models.rank()))


# ---- what is refused in setup: arguments of the Trainer, and what the message must say ----


class ForeignPrecision(Precision):
    precision = "32-true"


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "plugin": (lambda: {"plugins": [ForeignPrecision()]}, ("ForeignPrecision", "'bf16-true'")),
    "contradiction": (
        lambda: {
            "precision": "bf16-true", "strategy": ZeroCompileStrategy(compile=False, param_dtype=torch.float16)
        },
        ("param_dtype=torch.float16", "default"),
    ),
}  # fmt: skip


# ---- bad models and optimizers ----


class Empty(models.Module):
    def __init__(self) -> None:
        super().__init__(model=nn.Identity)


class Stepper(models.Module):
    """Its optimizer cannot work on shards."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters())


class Foreign(models.Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(2, 5))], lr=0.1)


class Sparse(models.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model.embedding = nn.Embedding(models.VOCABULARY, 10, sparse=True)


class StepInside(models.Module):
    """The optimizer steps between a forward and its backward."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        first, second = self.loss(batch), self.loss(batch)
        self.manual_backward(first)
        optimizer.step()
        self.manual_backward(second)


BAD: dict[str, tuple[Callable[[], L.LightningModule], dict[str, Any], tuple[str, ...]]] = {
    "lbfgs": (partial(Stepper, torch.optim.LBFGS), {}, ("LBFGS", "strategy='ddp'")),
    "adam for sparse": (partial(Stepper, torch.optim.SparseAdam), {}, ("SparseAdam", "strategy='ddp'")),
    "empty": (Empty, {}, ("has no parameters", "configure_model")),
    "foreign tensor": (Foreign, {}, ("holds 1 parameters", "(2, 5)")),
} | {
    f"sparse {stage}": (Sparse, {"stage": stage}, ("model.embedding.weight", "sparse=False")) for stage in (1, 3)
} | {
    f"step inside {stage} {options['compile']}": (StepInside, {"stage": stage, **options}, ("modified",))
    for stage in (1, 3) for options in (EAGER, AOT)
}  # fmt: skip


# ---- ranks that differ ----


def _renamed(module: models.Module) -> None:
    module.model.tail = module.model.head
    del module.model.head


# what is done to rank 1's module, and what is said
DIFFERENT: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "shape": (
        lambda module: setattr(module.model, "head", nn.Linear(10, models.VOCABULARY + 1, bias=False)),
        ("model.head.weight", "rank 1"),
    ),
    "dtype": (lambda module: module.model.head.to(torch.float64), ("torch.float64", "rank 1")),
    "requires_grad": (lambda module: module.model.head.requires_grad_(False), ("model.head.weight", "rank 1")),
    "name": (_renamed, ("model.tail.weight", "rank 1")),
    "more": (lambda module: setattr(module, "extra", nn.Linear(2, 2)), ("extra", "rank 1")),
    "buffer": (
        lambda module: module.register_buffer("extra", torch.zeros(1)),
        ("rank 1 has", "The ranks hold different models"),
    ),
    "none": (lambda module: setattr(module, "model", nn.Identity()), ("rank 1", "The ranks hold different models")),
}


def _raises(module: L.LightningModule, texts: tuple[str, ...], **arguments: Any) -> None:
    """The fit raises at once, and says what is wrong and the remedy; a new fit in the same processes is right."""
    start = time.monotonic()
    with pytest.raises(Exception) as raised:
        _fit(module, **arguments)
    assert time.monotonic() - start < 20 and raised.type is not AssertionError
    failing.works()
    assert all(text in str(raised.value) for text in texts), raised.value


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(timeout=60)
def test_arguments_are_refused_on_every_rank(what: str) -> None:
    make, texts = REFUSED[what]
    _raises(models.Module(), texts, **make())


@pytest.mark.parametrize("what", BAD)
@on_ranks(timeout=60)
def test_modules_are_refused_on_every_rank(what: str) -> None:
    make, options, texts = BAD[what]
    _raises(make(), texts, strategy=ZeroCompileStrategy(**({"compile": False} | options)) if options else None)


@pytest.mark.parametrize("what", DIFFERENT)
@on_ranks(timeout=60)
def test_ranks_that_differ_raise(what: str) -> None:
    (change, texts), module = DIFFERENT[what], models.Module()
    if models.rank() == 1:
        change(module)
    _raises(module, texts)


# ---- exceptions in a step ----


class Boom(models.Module):
    """Raises in its second step, on one rank or on all."""

    def __init__(self, where: int | None, when: str) -> None:
        super().__init__()
        self.where, self.when = where, when

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.when == "before":
            self.raise_in(batch_idx)
        loss = super().training_step(batch, batch_idx)
        if self.when == "backward":
            loss.register_hook(lambda _: self.raise_in(batch_idx))
        if self.when == "after":
            self.raise_in(batch_idx)
        return loss

    def raise_in(self, batch_idx: int) -> None:
        if batch_idx == 1 and self.where in (None, models.rank()):
            raise ValueError("boom")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after", "backward"])
@on_ranks()
def test_exception_on_all_ranks(stage: int, when: str) -> None:
    """The user's exception comes out as it is; a new fit of a fresh module in the same processes is right."""
    module = Boom(None, when)
    with pytest.raises(ValueError, match="boom"):
        _fit(module, strategy=ZeroCompileStrategy(stage=stage, **AOT))
    assert type(module) is Boom
    failing.works()
    assert len(module.losses) == (1 if when == "before" else 2)


def _boom_somewhere() -> None:
    import torch.distributed as dist

    module = Boom(1, "before")
    calls: list[str] = []

    def watch(*_: Any) -> None:
        for name in ("all_gather_into_tensor", "all_gather_object", "barrier", "broadcast", "all_reduce", "new_group"):
            setattr(dist, name, lambda *_, name=name, **__: calls.append(name))

    module.on_exception = watch  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(ValueError, match="boom") as raised:
        _fit(module, strategy=ZeroCompileStrategy(stage=3, compile=False))
    assert calls == [] and time.monotonic() - start < 20
    raise raised.value


def test_exception_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """That rank leaves at once with the user's exception: no collective in its teardown waits for the other."""
    monkeypatch.setattr(harness, "GRACE", 3.0)
    group = Ranks(2)
    try:
        text = group.expect_error(_boom_somewhere)
    finally:
        group.close(kill=True)
    assert "rank 1:\n" in text and "ValueError: boom" in text.split("rank 1:\n")[1]
    assert "AssertionError" not in text and "rank 1 hangs" not in text


def _no_copy_engine() -> str:
    try:
        _fit(models.Module(), strategy=ZeroCompileStrategy(compile=False, copy_engine=True))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@on_ranks()
def test_copy_engine_that_is_not_there() -> None:
    if models.device() == "cuda":
        pytest.skip("GPUs have copy engines")
    message = _no_copy_engine()
    assert "`copy_engine=True`" in message and "cpu devices have no copy engines" in message
    assert "Use 'auto' or False" in message


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(timeout=60)
def test_a_gather_that_failed_is_made_again(stage: int) -> None:
    """A forward whose gather fails before it is started, then the same forward again."""
    model, twin = models.pair(lambda: nn.Sequential(nn.Linear(6, 12)))  # 2, 3 or 4 ranks have equally many rows of it
    x = torch.ones(2, 6, device=models.device())
    with engines.engine(model, stage, compile=False, copy_engine=False), torch.no_grad():
        model(x)
        master: Any = model[0]._parameters["weight"]
        master.add_(1)  # what is resident is not current any more
        twin.to(x.device)[0].weight.add_(1)
        rows, message = record_of(master).local, "nothing was raised"
        kept = rows.data
        rows.data = kept[:, :5].contiguous()  # they do not fit their place, so a gather cannot copy them there
        try:
            model(x)
        except RuntimeError as error:
            message = str(error)
        rows.data = kept
        deviation = (model(x) - twin(x)).abs().max().item()
    assert "must match" in message and deviation < 1e-6, message


class _On:
    """Holds one parameter that is on ``device``; such a tensor cannot be made here."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def named_parameters(self) -> list[tuple[str, Any]]:
        return [("head.weight", self)]

    def named_buffers(self) -> list[tuple[str, Any]]:
        return []


def test_parameter_on_another_device() -> None:
    """A parameter that is neither on the CPU nor on CUDA is named."""
    with pytest.raises(RuntimeError, match=r"`head\.weight` is on mps"):
        check_devices(_On("mps"))  # type: ignore[arg-type]


class Doubled(nn.Parameter):
    def t(self) -> torch.Tensor:
        return torch.Tensor.t(self) * 2


@on_ranks()
def test_parameters_of_other_classes() -> None:
    """A gathered value has none of such a class's methods: a model would compute something else."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(models.device())
    model[1].weight = Doubled(model[1].weight.data)
    with pytest.raises(TypeError, match=r"`1\.weight` is a tests.*\.Doubled, which is derived from nn\.Parameter"):
        engines.make_engine(model, 3, compile=False)
    model[1].weight = nn.Parameter(model[1].weight.data)
    with engines.engine(model, 3, compile=False):
        pass


@on_ranks()
def test_lazy_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with pytest.raises(RuntimeError, match=r"`1\.weight` has no shape yet.*configure_model"):
        engines.make_engine(model, 3, compile=False)
    model(torch.ones(1, 4))
    with engines.engine(model, 3, compile=False):
        pass


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@on_ranks()
def test_scripted_modules() -> None:
    """TorchScript's parameters cannot be sharded; a function has none."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Tanh()), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(TypeError, match=r"`2` was compiled by `torch.jit`.*in a list"):
        engines.make_engine(model, 3, compile=False)
    check_not_scripted(model[:2])
    model = nn.Sequential(model[0], torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)))
    with pytest.raises(TypeError, match=r"`1` was compiled by `torch.jit`"):
        check_not_scripted(model)
