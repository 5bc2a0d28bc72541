"""Bad input: a clear error on every rank, in seconds, and the processes can go on afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.sharding.checks import check_devices
from tests.support import engines, failing, harness, models
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import AOT


def _fit(module: L.LightningModule, **arguments: Any) -> None:
    strategy = arguments.pop("strategy", None) or ZeroCompileStrategy(compile=False)
    models.make_trainer(strategy, **({"max_steps": 2} | arguments)).fit(module, models.Batches(models.rank()))


# ---- what is refused in setup: (what, arguments of the Trainer, what the message must say) ----


class ForeignPrecision(Precision):
    precision = "32-true"


def _arguments(what: str) -> dict[str, Any]:
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "plugin": lambda: {"plugins": [ForeignPrecision()]},
        "contradiction": lambda: {
            "precision": "bf16-true", "strategy": ZeroCompileStrategy(compile=False, param_dtype=torch.float16)
        },
    }  # fmt: skip
    return made[what]()


REFUSED = {
    "plugin": ("ForeignPrecision", "'bf16-true'"),
    "contradiction": ("param_dtype=torch.float16", "default"),
}


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


class Replaced(models.Module):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.model.head.weight = nn.Parameter(torch.zeros(models.VOCABULARY, 11))


class Compiled(models.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "submodule":
            self.model.head = torch.compile(self.model.head, backend="eager")  # type: ignore[assignment]
        elif how == "submodule in place":
            self.model.head.compile(backend="eager")
        elif how == "in place":
            self.compile(backend="eager")


def _bad_module(what: str) -> tuple[L.LightningModule, dict[str, Any]]:
    if what.startswith("step inside"):
        stage, compiled = int(what.split()[2]), what.endswith("compiled")
        options = AOT if compiled else {"compile": False}
        return StepInside(), {"strategy": ZeroCompileStrategy(stage=stage, **options)}
    if what.startswith("sparse"):
        return Sparse(), {"strategy": ZeroCompileStrategy(stage=int(what.split()[1]), compile=False)}
    if what.startswith("compiled"):
        return Compiled(what.removeprefix("compiled ")), {}
    made: dict[str, Callable[[], models.Module]] = {
        "lbfgs": lambda: Stepper(torch.optim.LBFGS), "adam for sparse": lambda: Stepper(torch.optim.SparseAdam),
        "empty": Empty, "foreign tensor": Foreign, "replaced": Replaced,
    }  # fmt: skip
    return made[what](), {}


BAD = {
    "lbfgs": ("LBFGS", "strategy='ddp'"),
    "adam for sparse": ("SparseAdam", "strategy='ddp'"),
    "empty": ("has no parameters", "configure_model"),
    "foreign tensor": ("holds 1 parameters", "(2, 5)"),
    "sparse 1": ("model.embedding.weight", "sparse=False"),
    "sparse 3": ("model.embedding.weight", "sparse=False"),
    "replaced": ("`model.head.weight` was replaced", "load_state_dict"),
    "step inside 1 eager": ("modified", ""),
    "step inside 3 eager": ("modified", ""),
    "step inside 1 compiled": ("modified", ""),
    "step inside 3 compiled": ("modified", ""),
    "compiled submodule": ("torch.compile(self.model.head, backend='eager')", "ZeroCompileStrategy(compile="),
    "compiled submodule in place": ("torch.compile(self.model.head, backend='eager')", "ZeroCompileStrategy(compile="),
    "compiled in place": ("torch.compile(self, backend='eager')", "ZeroCompileStrategy(compile="),
}


# ---- ranks that differ ----


class Different(models.Module):
    """Rank 1 holds something else."""

    def __init__(self, what: str) -> None:
        super().__init__()
        if models.rank() != 1:
            return
        if what == "shape":
            self.model.head = nn.Linear(10, models.VOCABULARY + 1, bias=False)
        elif what == "dtype":
            self.model.head.to(torch.float64)
        elif what == "requires_grad":
            self.model.head.weight.requires_grad_(False)
        elif what == "name":
            self.model.tail = self.model.head
            del self.model.head
        elif what == "more":
            self.extra = nn.Linear(2, 2)
        elif what == "buffer":
            self.register_buffer("extra", torch.zeros(1))
        elif what == "none":
            self.model = nn.Identity()


DIFFERENT = {
    "shape": ("model.head.weight", "rank 1"),
    "dtype": ("torch.float64", "rank 1"),
    "requires_grad": ("model.head.weight", "rank 1"),
    "name": ("model.tail.weight", "rank 1"),
    "more": ("extra", "rank 1"),
    "buffer": ("rank 1 has", "The ranks hold different models"),
    "none": ("rank 1", "The ranks hold different models"),
}


CASES = [(g, w, t) for g, c in (("refused", REFUSED), ("bad", BAD), ("different", DIFFERENT)) for w, t in c.items()]


@pytest.mark.parametrize(("group", "what", "texts"), CASES, ids=[f"{g}-{w}" for g, w, _ in CASES])
@on_ranks(2, timeout=60)
def test_clear_error_on_every_rank(group: str, what: str, texts: tuple[str, ...]) -> None:
    """Every rank raises, names what is wrong and the remedy, at once; a new fit in the same processes is right."""
    # What this rank raised and after how many seconds; afterwards the same processes train.
    module: L.LightningModule = models.Module()
    arguments: dict[str, Any] = {}
    if group == "refused":
        arguments = _arguments(what)
        arguments.setdefault("strategy", ZeroCompileStrategy(compile=False))
    elif group == "bad":
        module, arguments = _bad_module(what)
    else:
        module = Different(what)
    start = time.monotonic()
    try:
        _fit(module, **arguments)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"{what}: nothing was raised")
    seconds = time.monotonic() - start
    failing.works()
    assert all(text in message for text in texts), message
    assert "AssertionError" not in message and seconds < 20


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
@on_ranks(2)
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


@on_ranks(2)
def test_copy_engine_that_is_not_there() -> None:
    if models.device() == "cuda":
        pytest.skip("GPUs have copy engines")
    message = _no_copy_engine()
    assert "`copy_engine=True`" in message and "cpu devices have no copy engines" in message
    assert "Use 'auto' or False" in message


class _NoMemory(TorchDispatchMode):
    """The rows of a gather cannot be copied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            raise MemoryError("on purpose")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, timeout=60)
def test_a_gather_that_failed_is_made_again(stage: int) -> None:
    """A forward whose gather fails before it is started, then the same forward again."""
    model, twin = nn.Sequential(nn.Linear(6, 5)), nn.Sequential(nn.Linear(6, 5))
    twin.load_state_dict(model.state_dict())
    x = torch.ones(2, 6, device=models.device())
    with engines.engine(model, stage, compile=False, copy_engine=False), torch.no_grad():
        model(x)
        model[0]._parameters["weight"].add_(1)  # what is resident is not current any more
        twin.to(x.device)[0].weight.add_(1)
        message = "nothing was raised"
        try:
            with _NoMemory():
                model(x)
        except MemoryError as error:
            message = str(error)
        deviation = (model(x) - twin(x)).abs().max().item()
    assert message == "on purpose" and deviation < 1e-6


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
