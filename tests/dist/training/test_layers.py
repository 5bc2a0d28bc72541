"""What set-up changes in the module beside its parameters: dtypes and batch normalisation, until the fit ends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, assert_trains_like_ddp

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


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-true", torch.bfloat16),
        pytest.param("16-true", torch.float16, marks=pytest.mark.long),
        pytest.param("64-true", torch.float64, marks=pytest.mark.long),
    ],
)
@on_ranks()
def test_module_says_its_dtype(precision: str, dtype: torch.dtype) -> None:
    """``self.dtype`` and buffers are what the parameters are gathered in; after the fit, what the masters are."""
    start, ddp = models.pair(Casts)
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


@on_ranks()
def test_layers_are_synchronized_in_a_fit(device: str) -> None:
    """``sync_batchnorm=True`` converts the layers for a fit, and reverts them after it, as under DDP."""
    if device != "cpu":
        pytest.skip("for the CPU, where torch cannot synchronise statistics")
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


@pytest.mark.gpu
@on_ranks(timeout=300)
def test_synchronized_statistics_are_ddps() -> None:
    """Values of SyncBatchNorm, which torch has for CUDA only; with ``--device cuda``."""
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


# ---- what compile="model" compiles ----


@on_ranks()
def test_elements_of_a_list_are_graphs() -> None:
    """A list has no forward that could be one."""
    trained = assert_trains_like_ddp(models.ByteModel(), 3, steps=2, **MODEL)
    assert trained.compiled.forward >= 3  # the embedding, the blocks, the head
    assert not any("layers" in name for name in trained.eager_reads)
