"""What user code reads of a sharded module is what it reads under DDP: flags, comparisons, copies, histograms."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

CELLS = [
    pytest.param(1, EAGER, id="1-eager"),
    pytest.param(3, EAGER, id="3-eager"),
    pytest.param(3, AOT, id="3-aot_eager"),
    pytest.param(2, EAGER, id="2-eager", marks=pytest.mark.long),
    pytest.param(1, AOT, id="1-aot_eager", marks=pytest.mark.long),
]
HOOKS = (
    "on_fit_start", "on_train_start", "on_validation_batch_end", "on_validation_epoch_end", "on_after_backward",
    "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end", "on_train_end",
    "on_fit_end"
)  # fmt: skip


class At(L.Callback):
    """Calls ``act(module)`` in the hooks of these names, and counts."""

    def __init__(self, act: Callable[[L.LightningModule], None], hooks: tuple[str, ...] = HOOKS) -> None:
        self.seen: set[str] = set()
        for hook in hooks:
            setattr(self, hook, self._calling(act, hook))

    def _calling(self, act: Callable[[L.LightningModule], None], hook: str) -> Callable[..., None]:
        def call(trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            act(module)
            self.seen.add(hook)

        return call


def _fit(act: Callable[[Any], None], stage: int, options: dict[str, Any], hooks: tuple[str, ...] = HOOKS) -> Any:
    module, at = models.Module(), At(act, hooks)
    module.model.shift.requires_grad_(False)
    trainer = models.make_trainer(ZeroCompileStrategy(stage, **options), max_epochs=1, callbacks=[at])
    trainer.fit(module, models.Batches(models.rank(), 2), models.Batches(models.rank(), 1))
    assert at.seen == set(hooks)
    return module


def _full(module: Any) -> dict[str, Tensor]:
    strategy = module.trainer.strategy
    if strategy._engine is None:
        return {name: p.detach().clone() for name, p in module.named_parameters()}
    with strategy.full_parameters(writeback=False) as values:
        return {name: value.clone() for name, value in values.items()}


def _flags(module: Any) -> None:
    """By the attribute and by `parameters()`, with and without grad mode."""
    for name, parameter in module.named_parameters():
        owner, _, local = name.rpartition(".")
        for _ in range(2):
            value = getattr(module.get_submodule(owner), local)
            assert value.requires_grad is parameter.requires_grad is (name != "model.shift"), name
            assert not value.detach().requires_grad
        assert module.get_parameter(name) is parameter
        assert module.model.get_parameter(name.removeprefix("model.")) is parameter
    with pytest.raises(AttributeError):
        module.get_parameter("model.head.nothing")


@pytest.mark.parametrize(("stage", "options"), CELLS)
@on_ranks()
def test_flags_and_names(stage: int, options: dict[str, Any]) -> None:
    _fit(_flags, stage, options)


def _compare(module: Any) -> None:
    """`module.weight` and the parameter of `parameters()`, a DTensor, against full tensors."""
    full = _full(module)["model.head.weight"]
    for value in (module.model.head.weight, dict(module.named_parameters())["model.head.weight"]):
        with torch.no_grad():
            assert bool(torch.eq(value, full).all()) and torch.equal(value, full) and torch.allclose(value, full)
            assert not torch.allclose(value, full + 1) and not torch.equal(value, full + 1)
            assert bool(torch.isclose(value, full).all()) and bool((value == full).all())
            if isinstance(value, DTensor):
                new = torch.__version__ >= "2.13"  # torch's own remedy; before, it compared the values
                with pytest.raises(TypeError, match="full_tensor") if new else nullcontext():
                    torch.testing.assert_close(value, full)
                torch.testing.assert_close(value.full_tensor(), full)
                continue
            torch.testing.assert_close(value, full)
            with pytest.raises(AssertionError, match="not close"):
                torch.testing.assert_close(value, full + 1)


@pytest.mark.parametrize(("stage", "options"), CELLS)
@on_ranks()
def test_comparisons(stage: int, options: dict[str, Any]) -> None:
    _fit(_compare, stage, options, ("on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"))


def _copies(module: Any) -> None:
    """Whole, ordinary and independent; it computes what the model computes."""
    full, copied = _full(module), copy.deepcopy(module.trainer.lightning_module)
    assert type(copied) is models.Module and type(copied.model) is models.ByteModel
    assert copied._trainer is None
    for name, parameter in copied.named_parameters():
        assert type(parameter) is nn.Parameter and torch.equal(parameter, full[name])
        assert parameter.requires_grad is (name != "model.shift")
    assert not [key for inner in copied.modules() for key in vars(inner) if key.startswith("_zerocompile")]
    loss = copied.loss(models.Batches(models.rank())[5])
    assert torch.isfinite(loss)
    if torch.is_grad_enabled():
        loss.backward()
        assert copied.model.head.weight.grad is not None
    with torch.no_grad():
        copied.model.head.weight.zero_()
        part = copy.deepcopy(module.model.layers)
    assert torch.equal(part[1].up.weight, full["model.layers.1.up.weight"])


@pytest.mark.parametrize(("stage", "options"), CELLS)
@on_ranks()
def test_a_copy_in_a_callback_is_whole(stage: int, options: dict[str, Any]) -> None:
    module = _fit(_copies, stage, options, ("on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end"))
    assert module.model.head.weight.abs().max() > 0


def _copies_of_the_trainer(module: Any) -> None:
    """Callbacks, and so the Trainer, the strategy and the optimizer, as under DDP. The copied rows are the model's."""
    trainer = module.trainer
    before = copy.deepcopy(list(module.parameters()))
    state = copy.deepcopy(trainer.optimizers[0].state_dict())
    trainer.callbacks[0].trainer = trainer  # as progress bars and checkpoint callbacks have
    callbacks, optimizer = copy.deepcopy([trainer.callbacks, trainer.optimizers[0]])
    assert callbacks[0].trainer is not trainer
    assert [type(callback) for callback in callbacks] == [type(callback) for callback in trainer.callbacks]
    both = copy.deepcopy([trainer.optimizers[0], module])[1]
    full = _full(module)
    for (name, parameter), rows in zip(module.named_parameters(), before, strict=True):
        assert rows is not parameter and isinstance(rows, nn.Parameter) and torch.equal(rows, full[name])
        assert rows.requires_grad is parameter.requires_grad
    assert all(torch.equal(parameter, full[name]) for name, parameter in both.named_parameters())
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].zero_()
    assert all(torch.equal(value, full[name]) for name, value in _full(module).items())
    trainer.optimizers[0].load_state_dict(state)


@pytest.mark.parametrize(("stage", "options"), CELLS)
@on_ranks()
def test_the_trainer_and_its_parts_are_copied(stage: int, options: dict[str, Any]) -> None:
    _fit(_copies_of_the_trainer, stage, options, ("on_train_batch_end", "on_train_epoch_end"))


class OnDTensors(torch.optim.AdamW):
    """A subclass may do anything, so it steps on DTensors."""


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, OnDTensors])
@on_ranks()
def test_numbers_of_an_optimizers_state_are_whole(optimizer: type[Optimizer], tmp_path: Path) -> None:
    """Also of a state that was loaded, and against full tensors."""

    def norms(module: Any) -> None:
        held = module.trainer.optimizers[0]
        for parameter in held.param_groups[0]["params"]:
            moment = held.state[parameter]["exp_avg_sq"]
            if parameter.dim() == 0:
                continue
            whole = moment.full_tensor()
            assert moment.norm().item() == pytest.approx(whole.norm().item(), rel=1e-5)
            assert moment.mean().item() == pytest.approx(whole.mean().item(), rel=1e-5)
            assert torch.equal(moment, whole) and bool(torch.eq(moment, whole).all())

    def fit(epochs: int, path: Path | None = None) -> Any:
        module, at = models.Module(), At(norms, ("on_train_epoch_end",))
        module.configure_optimizers = lambda: optimizer(module.parameters(), lr=1e-3)
        trainer = models.make_trainer(ZeroCompileStrategy(3, **EAGER), max_epochs=epochs, callbacks=[at])
        trainer.fit(module, models.Batches(models.rank(), 2), ckpt_path=path)
        assert at.seen
        return trainer

    path = tmp_path / "a.ckpt"
    fit(1).save_checkpoint(path)
    fit(2, path)


def _prints(module: Any) -> None:
    """Which rows of it these are; without a collective, so one rank may print alone."""
    weight = dict(module.named_parameters())["model.head.weight"]
    if models.rank() == 1:
        text, world = repr(weight), models.world()
        rows = -(-13 // world)
        held = f"rank 1 of {world} holds [{rows}:{min(2 * rows, 13)}] of it"
        assert f"of shape (13, 10): {held}" in text and "full_tensor()" in text
        assert repr(weight) == f"{weight}"


@on_ranks()
def test_a_printed_parameter_says_which_rows_it_shows() -> None:
    _fit(_prints, 3, EAGER, ("on_train_batch_end",))


# ---- histograms and other logging ----


def _histograms(module: Any) -> None:
    """As TensorBoard's and W&B's, of all values; numbers that DTensor knows no rule for."""
    full = _full(module)
    for name, parameter in module.named_parameters():
        value = full[name].cpu()
        for read in (parameter, parameter.detach(), parameter.data):
            assert np.array_equal(read.detach().cpu().numpy(), value.numpy())
        assert parameter.detach().cpu().tolist() == value.tolist()
        with torch.no_grad():
            assert parameter.detach().flatten().tolist() == parameter.view(-1).tolist() == value.flatten().tolist()
            assert torch.histc(parameter.float(), 10).tolist() == torch.histc(value, 10).tolist()
            expected = torch.histogram(value.flatten(), 5)
            if parameter.device.type == "cpu":
                assert torch.histogram(parameter.flatten(), 5).hist.tolist() == expected.hist.tolist()
            assert torch.quantile(parameter.flatten(), 0.5).item() == torch.quantile(value.flatten(), 0.5).item()
            assert parameter.reshape(-1).sort()[0][0].item() == value.reshape(-1).min().item()
        if parameter.grad is not None:
            grad = parameter.grad.detach().cpu()
            assert grad.numpy().shape == value.shape and len(grad.flatten().tolist()) == value.numel()
            assert torch.histc(parameter.grad).sum().item() == value.numel()
    norms = {name: value.item() for name, value in grad_norm(module, 2).items()}
    strategy = module.trainer.strategy
    grads = strategy.full_gradients() if norms and strategy._engine is not None else {}
    expected = {f"grad_2.0_norm/{name}": grad.norm().item() for name, grad in grads.items()}
    if expected:
        expected["grad_2.0_norm_total"] = sum(norm**2 for norm in expected.values()) ** 0.5
    assert norms == pytest.approx(expected, rel=1e-5, abs=1e-7) or strategy._engine is None
    assert module.trainer.strategy.stats.gathers > 0 or module.trainer.state.fn == "fit"


@pytest.mark.parametrize(
    ("stage", "options"), [*CELLS[2:], pytest.param(3, EAGER, id="3-eager", marks=pytest.mark.long)]
)
@on_ranks()
def test_histograms_in_every_hook(stage: int, options: dict[str, Any]) -> None:
    _fit(_histograms, stage, options)


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_parameters_and_gradients_as_wandb_watch_logs_them(options: dict[str, Any]) -> None:
    """`wandb.watch(log="parameters")` is a hook after the forward; gradients as the error of `register_hook` says."""
    seen: dict[str, list[Any]] = {"parameters": [], "gradients": []}

    def statistics(value: Tensor) -> list[Any]:
        flat = value.detach().clone().reshape(-1)
        assert bool(torch.isfinite(flat).all())
        low, high = flat.min().item(), flat.max().item()
        return [low, high, flat.histc(bins=8, min=low, max=high).cpu().tolist() if low < high else [flat.numel()]]

    def watch(module: nn.Module, *_: Any) -> None:
        for _, parameter in module.named_parameters():
            seen["parameters"].append(statistics(parameter.data.cpu()))

    class Watched(models.Module):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            full = _full(self)
            expected = [statistics(full[f"model.{name}"].cpu()) for name, _ in self.model.named_parameters()]
            assert seen["parameters"][-len(expected) :] == expected
            for name, grad in self.trainer.strategy.full_gradients().items():
                seen["gradients"].append(statistics(grad))
                assert grad.shape == full[name].shape

    module = Watched()
    module.model.register_forward_hook(watch)
    trainer = models.make_trainer(ZeroCompileStrategy(3, **options), max_epochs=1)
    trainer.fit(module, models.Batches(models.rank(), 2))
    assert seen["parameters"] and seen["gradients"]


def _own_collectives(module: Any) -> None:
    """They would add different rows of the ranks to each other; a whole value is the same on all, as under DDP."""
    parameter = module.get_parameter("model.head.weight")
    before = module.trainer.strategy.full_gradients()["model.head.weight"].clone()
    for value in (parameter.grad, parameter.grad.data, parameter.data):
        with pytest.raises(
            RuntimeError, match=r"allreduce_.*each rank holds other rows of it.*leave the collective out"
        ):
            torch.distributed.all_reduce(value)
    assert torch.equal(module.trainer.strategy.full_gradients()["model.head.weight"], before)
    whole = parameter.grad.full_tensor().clone()
    torch.distributed.all_reduce(whole)
    torch.testing.assert_close(whole / models.world(), before)


@pytest.mark.parametrize(("stage", "options"), CELLS[:3])
@on_ranks()
def test_a_collective_of_ones_own_on_a_shard_raises(stage: int, options: dict[str, Any]) -> None:
    _fit(_own_collectives, stage, options, ("on_before_optimizer_step",))


def _alone(module: Any) -> None:
    if models.rank() == 0 and not hasattr(module, "message"):
        start = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            torch.histc(next(p for p in module.parameters() if p.dim() == 2).detach())
        module.message, module.seconds = str(raised.value), time.monotonic() - start


@on_ranks()
def test_a_histogram_of_one_rank_alone_raises() -> None:
    """In seconds, when the other has come to something else; and training goes on."""
    module = _fit(_alone, 3, EAGER, ("on_before_optimizer_step",))
    if models.rank() == 0:
        assert "`histc`" in module.message, module.message
        # which of the two is found first
        assert "Every rank must ask" in module.message or "Do it on all ranks" in module.message, module.message
        assert module.seconds < 35


# ---- checkpoints ----


class Unoptimized(models.Module):
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks()
def test_a_fit_without_an_optimizer_is_saved_and_resumed(kind: str, tmp_path: Path) -> None:
    """Lightning's stand-in has an empty state dict."""
    module, path = Unoptimized(), f"{tmp_path}/{kind}.ckpt"
    saves = At(lambda module: module.trainer.save_checkpoint(path), ("on_train_batch_end",))
    strategy = ZeroCompileStrategy(3, state_dict_type=kind, **EAGER)  # type: ignore[arg-type]
    trainer = models.make_trainer(strategy, max_epochs=1, callbacks=[saves])
    trainer.fit(module, models.Batches(models.rank(), 1))
    again = models.make_trainer(ZeroCompileStrategy(1, **EAGER), max_epochs=2)
    again.fit(module, models.Batches(models.rank(), 1), ckpt_path=path, weights_only=False)
    assert again.current_epoch == 2


class Recording(TorchCheckpointIO):
    calls: list[Any]

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", path, storage_options))
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        self.calls.append(("load", path))
        return super().load_checkpoint(path, map_location, weights_only)


@on_ranks()
def test_a_plugin_gets_the_path_and_the_options(tmp_path: Path) -> None:
    """As from DDP: on rank 0 for saving, with what the user gave, of the type that the user gave."""
    recording, path = Recording(), str(tmp_path / "plugin.ckpt")
    recording.calls = []
    trainer = models.make_trainer(ZeroCompileStrategy(3, **EAGER), max_steps=1, plugins=[recording])
    trainer.fit(models.Module(), models.Batches(models.rank()))
    trainer.save_checkpoint(path, storage_options={"key": 1})
    assert recording.calls == ([("save", path, {"key": 1})] if models.rank() == 0 else [])
    trainer.validate(models.Module(), models.Batches(models.rank(), 1), ckpt_path=path, verbose=False)
    assert recording.calls[-1] == ("load", path)


def test_saving_before_there_is_a_process_group(tmp_path: Path) -> None:
    """In one process, without any rank: as `Trainer.save_checkpoint` under DDP before `fit`."""
    assert not torch.distributed.is_initialized()
    for kind in ("full", "sharded"):
        path, module = tmp_path / f"{kind}.ckpt", models.Module()
        strategy = ZeroCompileStrategy(3, state_dict_type=kind)  # type: ignore[arg-type]
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
        trainer.strategy.connect(module)
        trainer.save_checkpoint(path)
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
