"""What set-up changes in the module beside its parameters: dtypes and batch normalisation, until the fit ends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests import engines, models
from tests.harness import Ranks

EAGER: dict[str, Any] = {"compile": False}
AOT: dict[str, Any] = {"compile": "blocks", "backend": "aot_eager"}


# ---- the dtype of a LightningModule ----


class Casts(models.Module):
    """Makes its inputs of its own dtype, as user code does; has a LightningModule inside."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.inner = models.Module()
        self.inner.model = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.seen: list[tuple[torch.dtype, ...]] = []

    def loss(self, batch: Tensor) -> Tensor:
        x = batch[:, :4].to(self.dtype)
        out = self.norm(self.inner.model(x))
        self.seen.append((self.dtype, self.inner.dtype, out.dtype, self.norm.running_mean.dtype))
        return out.float().square().mean() + super().loss(batch)


class Fails(Casts):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ValueError("on purpose")


def _dtypes(precision: str, dtype: torch.dtype) -> None:
    start = Casts()
    ddp = copy.deepcopy(start)
    models.make_trainer("ddp", precision=precision, max_steps=1).fit(ddp, models.Batches(models.rank()))
    assert set(ddp.seen) == {(dtype,) * 4}
    for stage, options in ((1, EAGER), (3, AOT)):
        module = copy.deepcopy(start)
        trainer = models.make_trainer(
            ZeroCompileStrategy(stage, **options), precision=precision, max_steps=3, limit_val_batches=1
        )
        trainer.fit(module, models.Batches(models.rank()), models.Batches(models.rank()))
        assert set(module.seen) == set(ddp.seen) and len(module.seen) >= 4  # validation, too
        module.seen.clear()
        after = torch.float64 if dtype is torch.float64 else torch.float32
        assert {p.dtype for p in module.parameters()} == {after} == {module.dtype, module.inner.dtype}
        module.eval().loss(models.Batches(models.rank())[0].cpu())  # an ordinary module again, of one dtype
        assert set(module.seen) == {(after,) * 4}
    failing = Fails()
    with pytest.raises(ValueError, match="on purpose"):
        models.make_trainer(ZeroCompileStrategy(3, **EAGER), precision=precision, max_steps=1).fit(
            failing, models.Batches(models.rank())
        )
    assert failing.dtype is failing.norm.running_mean.dtype is after


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-true", torch.bfloat16),
        pytest.param("16-true", torch.float16, marks=pytest.mark.long),
        pytest.param("64-true", torch.float64, marks=pytest.mark.long),
    ],
)
def test_module_says_its_dtype(ranks: Ranks, precision: str, dtype: torch.dtype) -> None:
    """``self.dtype`` and buffers are what the parameters are gathered in; after the fit, what the masters are."""
    ranks.run(_dtypes, precision, dtype)


# ---- synchronised batch normalisation ----


class Normalized(models.Module):
    """Batch statistics of data that differs between the ranks; keeps the kind of layer that each hook sees."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.norm = nn.BatchNorm1d(models.LENGTH - 1)
        self.kinds: list[str] = []

    def loss(self, batch: Tensor) -> Tensor:
        self.kinds.append(type(self.norm).__name__)
        return super().loss(batch) + self.norm(batch[:, 1:].float()).pow(3).mean()


class Frozen(Normalized):
    """Its layer never trains, so torch's synchronisation, which the CPU lacks, is not needed."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.norm.eval()


def _cpu() -> None:
    for kind in (Normalized, Frozen):
        module = kind()
        before = copy.deepcopy(module.state_dict())
        trainer = models.make_trainer(ZeroCompileStrategy(3, **AOT), sync_batchnorm=True, max_steps=2)
        if kind is Normalized:
            with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
                trainer.fit(module, models.Batches(models.rank()))
        else:
            trainer.fit(module, models.Batches(models.rank()))
            assert module.state_dict().keys() == before.keys()
            assert not torch.equal(module.norm.weight, before["norm.weight"])  # the converted layer's was trained
        assert set(module.kinds) == {"SyncBatchNorm"}
        assert not isinstance(module.norm, nn.SyncBatchNorm) and isinstance(module.norm, nn.modules.batchnorm._NormBase)


def test_layers_are_synchronized_in_a_fit(ranks: Ranks) -> None:
    """``sync_batchnorm=True`` converts the layers for a fit, and reverts them behind it, as under DDP."""
    if ranks.device != "cpu":
        pytest.skip("for the CPU, where torch cannot synchronise statistics")
    ranks.run(_cpu)


class Block(nn.Module):
    """A repeated block with batch statistics inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Deep(models.Module):
    def __init__(self) -> None:
        super().__init__(model=lambda: nn.Sequential(*(Block() for _ in range(3))), lr=0.1)

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(batch.float().flatten()[:24].view(3, 8)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def _cuda() -> None:
    start = Deep()
    ddp, apart = copy.deepcopy(start), copy.deepcopy(start)
    models.make_trainer("ddp", sync_batchnorm=True, max_steps=5).fit(ddp, models.Batches(models.rank()))
    models.make_trainer("ddp", max_steps=5).fit(apart, models.Batches(models.rank()))
    assert models.deviation(ddp, apart) > 1e-3
    for stage, options in ((1, EAGER), (3, EAGER), (3, AOT), (3, {})):
        module = copy.deepcopy(start)
        trainer = models.make_trainer(
            ZeroCompileStrategy(stage, **options), sync_batchnorm=True, max_steps=5, limit_val_batches=1
        )
        trainer.fit(module, models.Batches(models.rank()), models.Batches(models.rank()))
        assert models.deviation(module, ddp) < 1e-5, (stage, options)
        for name, buffer in ddp.named_buffers():
            assert torch.allclose(dict(module.named_buffers())[name].cpu(), buffer.cpu(), atol=1e-5), name


@pytest.mark.gpu
def test_synchronized_statistics_are_ddps(ranks: Ranks) -> None:
    """Values of SyncBatchNorm, which torch has for CUDA only; with ``--device cuda``."""
    ranks.run(_cuda, timeout=300)


# ---- what compile="model" compiles ----


def _lists() -> tuple[int, set[str], float]:
    model, twin, data = models.ByteModel(), models.ByteModel(), models.Batches(models.rank())
    twin.load_state_dict(model.state_dict())
    twin.to(engines.place())
    with engines.engine(model, 3, compile="model") as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine.attach_optimizers([optimizer])
        for number in range(2):
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))  # type: ignore[misc]
        graphs, eager = engine.regions.stats.forward, set(engine.runtime.eager_reads())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for number in range(2):
        engines.mean_backward(twin, number)
        optimizer.step()
        optimizer.zero_grad()
    return graphs, eager, models.deviation(model, twin.cpu())


def test_elements_of_a_list_are_graphs(ranks: Ranks) -> None:
    """A list has no forward that could be one."""
    for graphs, eager, deviation in ranks.run(_lists):
        assert graphs >= 3  # the embedding, the blocks, the head
        assert not any("layers" in name for name in eager)
        assert deviation <= 1e-6
