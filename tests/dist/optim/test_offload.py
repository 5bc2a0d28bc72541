"""Optimizer states and masters in host memory: the numbers of a run without offload, to the bit."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.report.report import memory_by_kind
from lightning_zerocompile.report.start import costs_of
from lightning_zerocompile.sharding.full_values import ON_HOST
from lightning_zerocompile.sharding.master import record_of
from tests.support import engines, models, precisions
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

OFFLOAD: dict[str, Any] = {"offload": "optimizer"}
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


class Trained(models.Module):
    """By AdamW, or by SGD with momentum."""

    def __init__(self, kind: str = "adamw") -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), **MOMENTUM)
        fused = True if self.kind == "fused" else None
        return torch.optim.AdamW(self.parameters(), lr=0.01, amsgrad=self.kind == "amsgrad", fused=fused)


class Look(L.Callback):
    """What is where when training ends, and the whole states."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.stats = strategy.stats
        runtime = strategy.engine.runtime
        self.units = len(runtime.unit_of)
        self.on_host = [s for s in runtime.sharded_parameters if s.on_host]
        optimizer = trainer.optimizers[0]
        self.states = {}
        for s in runtime.sharded_parameters:
            for name, kept in optimizer.state[s.master].items():
                full = kept.full_tensor() if isinstance(kept, DTensor) else kept
                self.states[s.name, name] = full.cpu().clone()


def _fit(module: L.LightningModule, stage: int, steps: int = 3, **options: Any) -> Look:
    look = Look()
    arguments = {name: options.pop(name) for name in ("precision", "gradient_clip_val") if name in options}
    accumulate = options.pop("accumulate_grad_batches", 1)
    strategy = ZeroCompileStrategy(stage=stage, **options)
    trainer = models.make_trainer(
        strategy, max_steps=steps, callbacks=[look], accumulate_grad_batches=accumulate, **arguments
    )
    trainer.fit(module, models.Batches(models.rank(), steps * accumulate))
    return look


def _same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name].cpu(), right[name].cpu()) for name in left)


def _assert_bit_equal(kind: str, stage: int, steps: int = 3, **options: Any) -> tuple[Look, Look]:
    """Fits with and without offload; both."""
    torch.manual_seed(0)
    start = Trained(kind)
    plain, offloaded = copy.deepcopy(start), copy.deepcopy(start)
    theirs = _fit(plain, stage, steps, **options)
    ours = _fit(offloaded, stage, steps, **options, **OFFLOAD)
    assert models.deviation(plain, start) > 1e-3
    assert _same(offloaded.state_dict(), plain.state_dict())
    assert ours.states and _same(ours.states, theirs.states)
    assert offloaded.losses == plain.losses
    assert theirs.stats.offload_bytes == theirs.stats.offload_in_bytes == theirs.stats.offload_out_bytes == 0
    assert ours.stats.offload_in_bytes == ours.stats.offload_out_bytes == steps * ours.stats.offload_bytes > 0
    assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in offloaded.parameters())
    return ours, theirs


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "stage", "scope"),
    [
        ("adamw", 1, "aot"),
        ("adamw", 3, "eager"),
        ("sgd", 3, "aot"),
        *(
            pytest.param(kind, stage, scope, marks=pytest.mark.long)
            for kind in ("adamw", "sgd", "amsgrad")
            for stage in (1, 2, 3)
            for scope in ("aot", "eager")
        ),
    ],
)
@on_ranks()
def test_bit_equal(kind: str, stage: int, scope: str) -> None:
    """At stage 3 in float32 gathers read the masters at each use, so the states alone are in host memory."""
    ours, _ = _assert_bit_equal(kind, stage, **(AOT if scope == "aot" else EAGER))
    assert bool(ours.on_host) == (stage != 3)


class Narrow(torch.nn.Module):
    """A block of which one rank has all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, 10]
        return x * torch.tanh(self.gate(x))


def _narrow(**options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = models.Stacked(Narrow)
    with engines.engine(model, **options) as engine:
        units = engine.runtime.units_in_order()
        rows = [sum(record_of(master).local.numel() for master in masters) for _, masters in units]
        assert (0 in rows) == (models.rank() > 0)
        optimizer = torch.optim.SGD(model.parameters(), **MOMENTUM)
        engine.attach_optimizers([optimizer])
        for number in range(3):
            batch = models.Batches(models.rank())[number]
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, batch))
            engine.step(optimizer, lambda: None)
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_units_of_which_a_rank_has_no_rows(stage: int) -> None:
    """Their update on that rank has no elements, and is one on the device like those of the other ranks."""
    plain = _narrow(stage=stage, **EAGER)
    for more in ({}, {"optimizer_in_backward": True}):
        for options in (EAGER, AOT):
            offloaded = _narrow(stage=stage, **options, **OFFLOAD, **more)
            assert models.deviation(offloaded, plain) <= 1e-6, (more, options)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_low_precision_clipping_and_accumulation(stage: int) -> None:
    """Masters in float32 of a model in bfloat16 are in host memory at every stage."""
    more = {"precision": "bf16-true", "gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    torch.manual_seed(0)
    start = Trained("fused" if stage == 3 else "adamw")  # fused kernels raise no versions
    plain, offloaded = copy.deepcopy(start), copy.deepcopy(start)
    theirs, ours = _fit(plain, stage, **more, **EAGER), _fit(offloaded, stage, **more, **EAGER, **OFFLOAD)
    assert _same(offloaded.state_dict(), plain.state_dict()) and _same(ours.states, theirs.states)
    assert len(ours.on_host) > 10


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks()
def test_what_is_where_between_steps(stage: int) -> None:
    """In host memory nothing of a unit has storage on the device, and what has no dimensions stays there."""
    torch.manual_seed(0)
    model = models.ByteModel(width=16).to(torch.bfloat16)
    with engines.engine(model, stage, compile=False, **OFFLOAD) as made:
        runtime = made.runtime
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)  # its kernels raise no versions
        made.attach_optimizers([optimizer])
        for number in range(2):
            with made.training_step():
                engines.backward(made, engines.token_loss(model, models.Batches(models.rank())[number]))
            made.step(optimizer, lambda: None)
        held = [s for s in runtime.sharded_parameters if s.on_host]
        assert [s.name for s in runtime.sharded_parameters if not s.on_host] == ["scale"]  # it has no dimensions
        slabs = {s.local.untyped_storage().data_ptr() for s in held}
        assert len(slabs) == len(runtime.unit_of)
        for s in held:
            assert s.local.device.type == "cpu" and s.local.dtype == torch.float32
            states = [kept for kept in optimizer.state[s.master].values() if isinstance(kept, DTensor)]
            assert len(states) == 2
            for kept in states:
                assert kept._local_tensor.untyped_storage().data_ptr() == s.local.untyped_storage().data_ptr()
                assert models.device() == "cpu" or kept._local_tensor.is_pinned()
        if stage == 3:  # gathers read the copies on the device, which the update has renewed, and not host memory
            (units,) = made.steps._offload._slabs.values()
            shown = [(slot.sharded, slot.shown) for slab in units.values() for slot in slab.slots.values()]
            assert len(shown) == len(held) and all(
                torch.equal(s.local.to(torch.bfloat16), kept.cpu()) for s, kept in shown
            )
            shown[0][1].zero_()
            with made.full_parameters(model, False) as values:
                assert not values[shown[0][0].name].any()
        total = sum(3 * s.local.nbytes for s in held)
        assert total <= made.runtime.stats().offload_bytes < total + 512 * 3 * len(held)
        if models.rank() == 0:  # it has the most rows
            planned = costs_of(made, [optimizer]).memory
            assert planned.host == pytest.approx(total, rel=0.01)
            copies = sum(s.local.numel() for s in held) * (2 if stage == 3 else 0)
            assert copies <= planned.masters <= copies + 4  # `scale`
            assert memory_by_kind(made, made.runtime.stats())["masters"] == copies + 4
        made.attach_optimizers([torch.optim.AdamW(model.parameters(), lr=0.01)])
    assert all(p.device.type == "cpu" and p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize(("kind", "stage"), [("full", 1), ("sharded", 3)])
@on_ranks()
def test_checkpoints(kind: str, stage: int, tmp_path: Path) -> None:
    """Saved with offload and read without it, and the other way round."""
    torch.manual_seed(0)
    start = Trained()
    whole = copy.deepcopy(start)
    more: dict[str, Any] = {"precision": "bf16-true"}
    epochs = models.fit_epochs(whole, ZeroCompileStrategy(stage=stage, **EAGER), 2, **more)
    assert epochs.global_step == 6
    for number, (first, second) in enumerate([(OFFLOAD, {}), ({}, OFFLOAD), (OFFLOAD, OFFLOAD)]):
        half, resumed = copy.deepcopy(start), copy.deepcopy(start)
        path = str(tmp_path / f"{number}.ckpt")
        save = _SaveAtEnd(path)
        strategy = ZeroCompileStrategy(stage=stage, state_dict_type=kind, **EAGER, **first)
        models.fit_epochs(half, strategy, 1, callbacks=[save], **more)
        strategy = ZeroCompileStrategy(stage=stage, state_dict_type=kind, **EAGER, **second)
        models.fit_epochs(resumed, strategy, 2, path, **more)
        assert _same(resumed.state_dict(), whole.state_dict()), (first, second)
        assert (strategy.stats.offload_in_bytes > 0) == bool(second)


class _SaveAtEnd(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_users_read_and_write_masters(stage: int) -> None:
    """Norms, full values, loaded weights and states have the numbers of a run without offload."""
    torch.manual_seed(0)
    plain, offloaded = models.pair(lambda: models.ByteModel(width=16).to(torch.bfloat16))
    plain = copy.deepcopy(offloaded).cpu()
    seen = []
    for model, options in ((plain, {}), (offloaded, OFFLOAD)):
        found: list[Tensor] = []
        with engines.engine(model, stage, compile=False, **options) as made:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            made.attach_optimizers([optimizer])
            for number in range(4):
                with made.training_step():
                    engines.backward(made, engines.token_loss(model, models.Batches(models.rank())[number]))
                weight = dict(model.named_parameters())["layers.1.up.weight"]
                assert weight.grad is not None and weight.grad.to_local().device == engines.place()
                found += [weight.grad.norm().full_tensor(), (weight * 2).sum().full_tensor()]
                made.step(optimizer, lambda: None)
                found += [weight.detach().norm().full_tensor(), optimizer.state[weight]["exp_avg"].norm().full_tensor()]
                if number == 0:
                    model.load_state_dict({n: v * 0.5 for n, v in _full(made).items()})
                elif number == 1:
                    with made.full_parameters(model, True) as values:
                        values["head.weight"].mul_(1.5)
                elif number == 2:
                    with torch.no_grad():
                        weight.mul_(0.5)
                        optimizer.state[weight]["exp_avg"].zero_()
                found += [value.float().sum() for value in _full(made).values()]
        seen.append([value.cpu().clone() for value in found] + [p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*seen, strict=True))


def _written(model: Any, where: str, number: int) -> None:
    """Writes through ``data``, which raises no version."""
    if where == "step" or (where == "once" and number == 2):
        model.head.weight.data.mul_(0.8)
        model.embedding.weight.data[3] += 0.1


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot"])
@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.bfloat16)])
@on_ranks()
def test_writes_without_a_version(stage: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """What user code writes through `data` counts, before the backward and after it."""
    torch.manual_seed(0)
    start = models.ByteModel(width=16)
    for forward, after in (("step", ""), ("", "step"), ("once", "once")):
        found = []
        for offload in ({}, OFFLOAD):
            model = copy.deepcopy(start)
            with engines.engine(model, stage, param_dtype=dtype, **options, **offload) as made:
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                made.attach_optimizers([optimizer])
                for number in range(4):
                    with made.training_step():
                        _written(model, forward, number)
                        engines.backward(made, engines.token_loss(model, models.Batches(models.rank())[number]))
                        _written(model, after, number)
                    made.step(optimizer, lambda: None)
                if offload:
                    assert made.runtime.core.stats().host_writes > 0
                found.append({name: value.cpu() for name, value in _full(made).items()})
        apart = {name: (value - found[1][name]).abs().max().item() for name, value in found[0].items()}
        assert {name: by for name, by in apart.items() if by > 0} == {}, (forward, after)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_copies_in_the_backward(stage: int) -> None:
    """Two units come in before the step. What user code writes after that counts, and a step without a backward, or one
    that does not come, loses nothing."""
    torch.manual_seed(0)
    plain = models.ByteModel(width=16).to(torch.bfloat16)
    offloaded = copy.deepcopy(plain)
    for model, options in ((plain, {}), (offloaded, OFFLOAD)):
        with engines.engine(model, stage, compile=False, **options) as made:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            made.attach_optimizers([optimizer])
            first, last = (dict(model.named_parameters())[n] for n in ("embedding.weight", "layers.0.norm.bias"))
            for number in range(5):
                held, start = (getattr(made.runtime.stats(), f"offload_{name}bytes") for name in ("", "in_"))
                with made.training_step():
                    engines.backward(made, engines.token_loss(model, models.Batches(models.rank())[number]))
                if options:
                    assert (0 < made.runtime.stats().offload_in_bytes - start < held) == (number > 0)
                if number == 2:
                    with torch.no_grad():
                        first.mul_(0.5)
                        optimizer.state[last]["exp_avg"].zero_()
                elif number == 3:
                    optimizer.zero_grad()
                    made.steps.skip(optimizer)
                made.step(optimizer, lambda: None)
                if options:  # a slab that was written to, and slabs that no step has used, are copied again
                    assert (made.runtime.stats().offload_in_bytes - start > held) == (number in (2, 3))
            if options:
                sizes = [sum(slab.most for slab in slabs) for slabs in made.steps._offload._orders[optimizer]]
                assert sizes[-1] == min(size for size in sizes if size) and len(sizes) == len(made.runtime.unit_of)
    models.assert_equal(offloaded, plain)


def _full(made: Any) -> dict[str, Tensor]:
    with made.full_parameters(made.model, False) as values:
        return {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_exception_in_the_middle_of_a_step(stage: int) -> None:
    """A retry updates the units that are left: nothing was lost."""
    torch.manual_seed(0)
    plain = models.ByteModel(width=16).to(torch.bfloat16)
    offloaded = copy.deepcopy(plain)
    for model, options in ((plain, {}), (offloaded, OFFLOAD)):
        with engines.engine(model, stage, compile=False, **options) as made:
            optimizer = torch.optim.SGD(model.parameters(), **MOMENTUM)
            made.attach_optimizers([optimizer])
            for number in range(3):
                with made.training_step():
                    engines.backward(made, engines.token_loss(model, models.Batches(models.rank())[number]))
                if options and number != 1:
                    _fail_at(3, made, optimizer)
                made.step(optimizer, lambda: None)
    models.assert_equal(offloaded, plain)


def _fail_at(unit: int, made: Any, optimizer: torch.optim.Optimizer) -> None:
    """Steps, and raises in the update of this unit, after it has written."""
    left, module = unit, sys.modules[torch.optim.SGD.__module__]
    real = module.sgd  # type: ignore[attr-defined]

    def fails(*args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        real(*args, **kwargs)
        if left == 0:
            raise ValueError("on purpose")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="on purpose"):
        patch.setattr(module, "sgd", fails)
        made.step(optimizer, lambda: None)
    assert left == 0


class _Subclass(torch.optim.AdamW):
    pass


@on_ranks()
def test_what_cannot_be_offloaded_raises() -> None:
    """By name, with the remedy, and before anything is moved."""
    model = models.ByteModel()
    with engines.engine(model, 3, compile=False, **OFFLOAD) as made:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        for optimizer in (torch.optim.Muon(matrices), _Subclass(model.parameters())):
            name = type(optimizer).__name__
            with pytest.raises(MisconfigurationException, match=f"optimizer {name}: only torch's elementwise"):
                made.attach_optimizers([optimizer])
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_zerocompile.optim.offload.host_memory", lambda: ("here", 1000))
            with pytest.raises(RuntimeError, match=r"ranks of host here need \d+ bytes .* 1000 bytes .*drop `offload`"):
                made.attach_optimizers([optimizer])
        assert not any(s.on_host for s in made.runtime.sharded_parameters)
        made.attach_optimizers([optimizer])
        with made.training_step():
            engines.backward(made, engines.token_loss(model, models.Batches(0)[0]))
        with pytest.raises(RuntimeError, match=r"AdamW.step\(\) was called past Lightning, and offload"):
            optimizer.step()
        made.step(optimizer, lambda: None)
        assert made.runtime.stats().offload_out_bytes > 0


def _give(first: Any, second: Any, how: str) -> None:
    """The last two parameters of one optimizer go to another one, or into both, or to none."""
    given = first.param_groups[0]["params"][-2:]
    if how != "share":
        del first.param_groups[0]["params"][-2:]
    if how != "drop":
        second.add_param_group({"params": given, "lr": 0.05})


@pytest.mark.parametrize("how", ["move", "share", "drop"])
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (3, {"param_dtype": torch.bfloat16})])
@on_ranks()
def test_parameters_that_go_to_another_optimizer(stage: int, options: dict[str, Any], how: str) -> None:
    """What updates them from then on finds them where it updates."""
    found: list[Any] = []
    for offload in ({}, OFFLOAD):
        torch.manual_seed(0)
        model = models.ByteModel(width=16)
        with engines.engine(model, stage, compile=False, **options, **offload) as made:
            parts = list(model.layers.parameters()), [*model.embedding.parameters(), *model.head.parameters()]
            first, second = (torch.optim.SGD(part, **MOMENTUM) for part in parts)
            made.attach_optimizers([first, second])
            for number in range(4):
                if number == 2:
                    moved = first.param_groups[0]["params"][-2:]
                    _give(first, second, how)
                with made.training_step():
                    engines.backward(made, engines.token_loss(model, models.Batches(models.rank())[number]))
                for optimizer in (first, second):
                    made.step(optimizer, lambda: None)
            if offload:
                slabs = made.steps._offload._slabs
                held = [[m for slab in slabs[one].values() for m in slab.slots if m in set(moved)] for one in slabs]
                assert [len(one) for one in held] == {"move": [0, 2], "share": [0, 0], "drop": [0, 0]}[how]
                states = [kept for master in moved for kept in first.state[master].values()]
                assert states and (how == "move" or not any(getattr(kept, ON_HOST, False) for kept in states))
            found.append({name: value.cpu() for name, value in _full(made).items()})
    apart = {name: (value - found[1][name]).abs().max().item() for name, value in found[0].items()}
    assert {name: by for name, by in apart.items() if by > 0} == {}


class _Two(models.Module):
    """Two optimizers, which share the head, and a window."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        layers = [*self.model.layers.parameters(), self.model.head.weight]
        rest = [*self.model.embedding.parameters(), self.model.head.weight, self.model.scale]
        return torch.optim.AdamW(layers, lr=0.01), torch.optim.SGD(rest, **MOMENTUM)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        with self.trainer.strategy.coalesce_grad_reduction():  # type: ignore[attr-defined]
            for chunk in batch.chunk(2):
                self.manual_backward(self.loss(chunk))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_windows_and_several_optimizers(stage: int) -> None:
    """A master that two optimizers hold stays on the device."""
    torch.manual_seed(0)
    start = _Two()
    plain, offloaded = copy.deepcopy(start), copy.deepcopy(start)
    more = {"precision": "bf16-true"}
    _fit(plain, stage, **more, **EAGER)
    ours = _fit(offloaded, stage, **more, **EAGER, **OFFLOAD)
    assert _same(offloaded.state_dict(), plain.state_dict()) and models.deviation(plain, start) > 1e-3
    names = {s.name for s in ours.on_host}
    assert "model.head.weight" not in names and {"model.layers.0.up.weight", "model.embedding.weight"} <= names


@on_ranks()
def test_loss_scaling() -> None:
    """A step that the scaler skips moves nothing."""
    torch.manual_seed(0)
    start = Trained()
    plain, offloaded = copy.deepcopy(start), copy.deepcopy(start)
    found = []
    for module, options in ((plain, {}), (offloaded, OFFLOAD)):
        look = Look()
        strategy = ZeroCompileStrategy(stage=3, **EAGER, **options)
        more = precisions.arguments("16-mixed", init_scale=2.0**40, growth_interval=2)
        trainer = models.make_trainer(strategy, max_steps=26, callbacks=[look], gradient_clip_val=0.1, **more)
        trainer.fit(module, models.Batches(models.rank(), 26))
        found.append(look)
    assert _same(offloaded.state_dict(), plain.state_dict()) and models.deviation(plain, start) > 1e-3
    assert _same(found[1].states, found[0].states)
    assert 0 < found[1].stats.offload_in_bytes < 26 * found[1].stats.offload_bytes
