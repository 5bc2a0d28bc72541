"""Numbers that users read from masters and their gradients are those of the whole values, or raise."""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.engine import Engine
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import ENDS, mean_backward

NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda x: x.norm().item(),
    "float": lambda x: float(x.norm(1)),
    "inf": lambda x: x.norm(float("inf")).item(),
    "sum": lambda x: x.sum().item(),
    "mean": lambda x: x.mean().item(),
    "max": lambda x: x.max().item(),
    "amin": lambda x: x.amin().item(),
    "std": lambda x: x.std(correction=0).item(),
    "median": lambda x: x.abs().median().item(),
    "square": lambda x: (x.norm() ** 2).sqrt().item(),
    "format": lambda x: float(f"{x.abs().sum():.7f}"),
    "tensor": lambda x: torch.tensor([x.norm(), x.max()]),
    "stack": lambda x: torch.stack([x.norm(), x.detach().norm()]).norm().item(),
    "kinds": lambda x: torch.stack([x.norm(), x.max(), x.sum(), x.norm(1), x.min()]),
    "cast": lambda x: torch.stack([x.sum().double(), x.norm().double()]),
    "some": lambda x: (x.abs() >= 0).any().float().item(),
    "among others": lambda x: float(torch.zeros((), device=x.device).add_(x.norm()) + x.sum()),
    "any": lambda x: float(bool((x > 0).any()) + 2 * bool(torch.isnan(x).any())),
    "all": lambda x: float(bool((x.abs() >= 0).all())),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "data": lambda x: x.data.norm().item(),
    "square loss": lambda x: F.mse_loss(x.detach(), x.detach() * 0.5 + 1).item(),
    "other losses": lambda x: (
        F.huber_loss(x.detach(), x.detach() * 3) + F.soft_margin_loss(x.detach(), x.sign())
    ).item(),
    "running sum": lambda x: x.detach().flatten().cumsum(-1).abs().max().item(),
    "place": lambda x: float(x.detach().flatten().argmax(-1)),
}
if not torch.cuda.is_available():
    NUMBERS["numpy"] = lambda x: torch.from_numpy(x.detach().numpy())


def _differences(ours: nn.Module, twin: nn.Module) -> list[str]:
    """What is not the same for each parameter and its gradient, and for all gradients."""
    found = []
    for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
        for what, number in NUMBERS.items():
            for kind, mine, theirs in (("value", p.detach(), q.detach()), ("grad", p.grad, q.grad)):
                got, want = torch.as_tensor(number(mine)), torch.as_tensor(number(theirs))
                if not torch.allclose(got.cpu(), want.cpu(), rtol=1e-5, atol=1e-6):
                    found.append(f"{what} of {kind} of {name}: {got} instead of {want}")
    for kind in (1, 2, "inf"):
        norms, wanted = grad_norm(ours, kind), grad_norm(twin, kind)
        found += [f"{n} {norms[n]} {wanted[n]}" for n in wanted if abs(float(norms[n]) - float(wanted[n])) > 1e-5]
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_numbers_are_whole(stage: int) -> None:
    found = []
    for compiled in (False, "blocks"):
        torch.manual_seed(0)
        model, twin = models.pair(models.ByteModel)
        with engines.engine(model, stage, compile=compiled) as engine:
            with engine.training_step():
                engines.backward(engine, engines.anchored_loss(model, models.Batches(models.rank())[0]))
            mean_backward(lambda rank, twin=twin: engines.anchored_loss(twin, models.Batches(rank)[0]))  # type: ignore[misc]
            found += _differences(model, twin)
            full, wanted = engine.full_gradients(model), {n: p.grad for n, p in twin.named_parameters()}
            assert full.keys() == wanted.keys()
            found += [n for n in full if not torch.allclose(full[n], wanted[n], atol=1e-6)]  # type: ignore[arg-type]
            for kind in (2.0, float("inf")):
                total = nn.utils.clip_grad_norm_(model.parameters(), 0.01, kind)
                expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.01, kind)
                assert abs(float(total) - float(expected)) < 1e-5
            found += _differences(model, twin)
            copied = copy.deepcopy(model.state_dict())
            assert abs(float(copied["head.weight"].norm()) - float(twin.head.weight.norm())) < 1e-5
    assert found == []


@pytest.mark.parametrize("at", [0, -1])
@ENDS
@on_ranks()
def test_no_rank_loses_a_nan(stage: int, at: int) -> None:
    """A maximum over ranks, one of which has a NaN, is NaN, as in one process."""
    model = models.ByteModel()
    with engines.engine(model, stage, compile=False) as engine:
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[0]))
        grad: Any = model.head.weight.grad
        spoilt = torch.zeros(grad.shape, device=models.device())
        spoilt[at] = math.nan
        grad.add_(spoilt)
        numbers = [grad.max(), grad.min(), grad.abs().amax(), grad.amin(), grad.norm(math.inf), grad.norm(-math.inf)]
        numbers += [grad.norm(), grad.sum(), grad.amax(0).sum()]
        assert [math.isnan(number.item()) for number in numbers] == [True] * len(numbers)
        assert torch.isnan(torch.stack(numbers[:4]).full_tensor()).all()  # type: ignore[attr-defined]


class Logs(models.Module):
    """Logs the norms of its gradients, as Lightning's documentation shows it, and a weight's."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.model, norm_type=2))
        self.log("weight", self.model.head.weight.norm())
        self.log("master", dict(self.named_parameters())["model.head.weight"].norm(), on_step=False, on_epoch=True)
        self.log("largest", max(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_logged_norms_are_those_of_ddp(stage: int) -> None:
    results = []
    for strategy in ("ddp", ZeroCompileStrategy(stage=stage, compile_options={"backend": "aot_eager"})):
        torch.manual_seed(0)
        module = Logs()
        trainer = models.make_trainer(strategy, max_steps=2, max_epochs=1, gradient_clip_val=0.1)
        trainer.fit(module, models.Batches(models.rank(), 2))
        results.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    ddp, ours = results
    assert ddp.keys() == ours.keys()
    assert max(abs(ddp[name] - ours[name]) for name in ddp if name != "loss") < 1e-5


def _forward(engine: Engine, model: nn.Module, number: int) -> None:
    with engine.training_step():
        engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[number]))


@ENDS
@on_ranks()
def test_one_rank_alone_raises_in_seconds(stage: int) -> None:
    """Rank 0 asks alone, while the others go on to another backward; it raises in seconds and can go on.

    Also if they ask for the same by then, but of their other gradients.
    """
    model, rank = models.ByteModel(), models.rank()
    with engines.engine(model, stage, compile=False, timeout=timedelta(minutes=2)) as engine:
        _forward(engine, model, 0)
        weight: Any = dict(model.named_parameters())["head.weight"]
        for number, ask in enumerate(
            (
                lambda: weight.grad.norm().item(),
                lambda: weight.grad.std(),
                lambda: weight.grad.norm().clone(),
                lambda: float(weight.norm()),
                lambda: weight.grad.full_tensor(),
                lambda: engine.full_gradients(model),
            )
        ):
            if rank == 0:
                start = time.monotonic()
                with pytest.raises(
                    RuntimeError, match=r"rank 0 asks for .*rank [1-9] (has|asks for).*full_parameters.*full_gradients"
                ):
                    ask()
                assert time.monotonic() - start < 20
            _forward(engine, model, 1 + number)
            try:
                norm = weight.grad.norm().item()
            except RuntimeError as error:  # a device, where this host waits for no collective
                assert rank > 0 and "after other backwards" in str(error), error
                norm = weight.grad.norm().item()
            assert norm > 0
        other = weight.grad.norm() if rank else weight.grad.sum()
        with pytest.raises(RuntimeError, match=r"asks for .*asks for .*"):
            other.item() if rank else other.tolist()
        assert weight.grad.norm().item() > 0


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_half_a_model_is_not_written(stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    model = models.ByteModel()
    with engines.engine(model, stage, compile=False) as engine:
        _forward(engine, model, 0)
        weight: Any = dict(model.named_parameters())["head.weight"]
        if models.rank() == 0:
            for value in (model.state_dict(), weight, weight.grad):
                with pytest.raises(RuntimeError, match=r"pickled.*full_parameters"):
                    pickle.dumps(value)
            with pytest.raises(RuntimeError, match=r"full_state_dict.*save_pretrained.*full_parameters.*save_file"):
                safetensors.torch.save_file(dict(model.state_dict()), f"{folder}/model.safetensors")
        with engine.full_parameters(model, writeback=False) as values:
            if models.rank() == 0:
                safetensors.torch.save_file(values, f"{folder}/model.safetensors")
                torch.save(values, f"{folder}/model.pt")
    loaded = safetensors.torch.load_file(f"{folder}/model.safetensors")
    if models.rank() == 0:
        assert all(torch.equal(loaded[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_what_a_failed_run_leaves_says_so(stage: int) -> None:
    class Fails(models.Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise ValueError("on purpose")
            return super().training_step(batch, batch_idx)

    module = Fails()
    with pytest.raises(ValueError, match="on purpose"):
        models.train(module, ZeroCompileStrategy(stage=stage, compile=False, unshard_after_fit=False))
    message = r"Parameter `model\.{}` is a shard.*former run.*trainer\.fit"
    with pytest.raises(RuntimeError, match=message.format("scale")):
        module.model(models.Batches(0)[0].cpu())
    with pytest.raises(RuntimeError, match=message.format(r"embedding\.weight")):
        module.model.embedding.weight.norm().item()
    with pytest.raises(RuntimeError, match=message.format("scale")):
        module.state_dict()
    with pytest.raises(RuntimeError, match="pickled"):
        pickle.dumps(module.model.embedding.weight)
