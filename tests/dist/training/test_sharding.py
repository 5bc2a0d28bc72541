"""Every kind of parameter is sharded, keeps its name, and trains as under DDP."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import architectures, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, reference

CELLS = [(3, EAGER), (3, AOT)]
LONG = [(1, EAGER), (1, MODEL), (2, EAGER), (3, MODEL)]
ALWAYS = {"transformer": [(1, MODEL)], "recurrent": [(1, MODEL)], "uneven": [(1, MODEL), (2, EAGER)]}  # and these


def _apart(left: nn.Module, right: nn.Module) -> float:
    return architectures.difference(dict(left.named_parameters()), dict(right.named_parameters()))


@pytest.mark.parametrize("architecture", architectures.ARCHITECTURES)
@on_ranks(timeout=200)
def test_trains_as_ddp(architecture: str, long: bool) -> None:
    """Parameters, gradients of every step and buffers equal the reference at every stage, compiled and eager."""
    twin = architectures.Net(architectures.ARCHITECTURES[architecture])
    state = copy.deepcopy(twin.state_dict())
    gradients = architectures.reference(twin)
    assert max(g.abs().max().item() for g in gradients[0].values() if g is not None and g.numel()) > 1e-3  # it trains
    for stage, options in CELLS + (LONG if long else ALWAYS.get(architecture, [])):
        case = (stage, options["compile"])
        module = architectures.Net(architectures.ARCHITECTURES[architecture])
        module.load_state_dict(state)
        names, keys = [n for n, _ in module.named_parameters()], list(module.state_dict())
        watch = architectures.fit(module, ZeroCompileStrategy(stage=stage, **options))
        assert _apart(module, twin) <= 1e-6, case
        worst = max(architectures.difference(a, b) for a, b in zip(watch.gradients, gradients, strict=True))
        assert worst <= 1e-6, case
        assert architectures.difference(dict(module.named_buffers()), dict(twin.named_buffers())) <= 1e-6, case
        assert watch.names == names == [n for n, _ in module.named_parameters()], case
        assert watch.keys == keys == list(module.state_dict()), case
        assert watch.local_numel < watch.full_numel, case


# ---- optimizers and clipping of torch on the masters ----

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd_foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "sgd_fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adam_foreach": (torch.optim.Adam, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "adam_fused": (torch.optim.Adam, {"lr": 1e-2, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adagrad_foreach": (torch.optim.Adagrad, {"lr": 1e-2, "foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "rmsprop_foreach": (torch.optim.RMSprop, {"lr": 1e-3, "foreach": True, "momentum": 0.5}),
}


class Subclassed(torch.optim.AdamW):
    """Not one of torch's exact types: it steps on the DTensors themselves."""


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks(timeout=200)
def test_optimizers_step_on_masters(stage: int) -> None:
    """torch's optimizers, in every implementation, give the reference's parameters."""
    for name, (kind, arguments) in {**OPTIMIZERS, "subclass": (Subclassed, {"lr": 1e-2})}.items():
        module, twin = models.pair(partial(architectures.Net, architectures.Mixed, kind, **arguments))
        architectures.fit(module, ZeroCompileStrategy(stage=stage, compile=False))
        architectures.reference(twin)
        assert _apart(module, twin) <= 2e-6, name


class ClipsByHand(L.Callback):
    """Calls torch's own function on the masters."""

    def __init__(self, clip: Callable[[Any], Tensor | None]) -> None:
        self.clip = clip
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        norm = self.clip(list(module.parameters()))
        self.norms.append(0.0 if norm is None else architectures.whole(norm).item())


def _mixed() -> architectures.Net:
    return architectures.Net(architectures.Mixed)


CLIPS: dict[str, Callable[[Any], Tensor | None]] = {
    "norm": partial(nn.utils.clip_grad_norm_, max_norm=0.05),
    "norm_foreach": partial(nn.utils.clip_grad_norm_, max_norm=0.05, foreach=True),
    "norm_3": partial(nn.utils.clip_grad_norm_, max_norm=0.01, norm_type=3.0),
    "norm_1": partial(nn.utils.clip_grad_norm_, max_norm=0.05, norm_type=1.0),
    "value": partial(nn.utils.clip_grad_value_, clip_value=0.01),
    "value_foreach": partial(nn.utils.clip_grad_value_, clip_value=0.01, foreach=True),
}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(timeout=200)
def test_torch_clips_masters(stage: int) -> None:
    """clip_grad_norm_ and clip_grad_value_ of torch see the norm of the whole model, scalars included."""
    for name, clip in CLIPS.items():
        module, twin = models.pair(_mixed)
        loose, ours, norms = copy.deepcopy(twin), ClipsByHand(clip), []

        def clip_twin(m: nn.Module, clip: Any = clip, norms: list[float] = norms) -> None:
            norm = clip(list(m.parameters()))
            norms.append(0.0 if norm is None else norm.item())

        architectures.fit(module, ZeroCompileStrategy(stage=stage, compile=False), callbacks=[ours])
        architectures.reference(twin, clip=clip_twin)
        architectures.reference(loose)
        assert _apart(twin, loose) > 1e-3, name  # it clips
        assert _apart(module, twin) <= 1e-6 and ours.norms == pytest.approx(norms, abs=1e-5), name


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.05), ("value", 0.01)])
@on_ranks()
def test_trainer_clips(algorithm: str, value: float, stage: int) -> None:
    """Trainer(gradient_clip_val=...) equals clipping the averaged gradient, by norm and by value."""
    module, twin = models.pair(_mixed)
    arguments = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    architectures.fit(module, ZeroCompileStrategy(stage=stage, compile=False), **arguments)
    architectures.reference(twin, clip=lambda m: CLIPS[algorithm](list(m.parameters())))
    assert _apart(module, twin) <= 1e-6


# ---- state while sharded ----


class Inspect(L.Callback):
    """Calls a function in the middle of training; keeps what it returns."""

    def __init__(self, inspect: Callable[[L.Trainer, Any], Any], step: int = 1) -> None:
        self.inspect, self.step, self.called = inspect, step, False

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.result, self.called = self.inspect(trainer, module), True


def _dcp_tools(trainer: L.Trainer, module: architectures.Net) -> dict[str, Any]:
    options = dcp.StateDictOptions(full_state_dict=True)
    optimizer = trainer.optimizers[0]
    plain = module.state_dict()
    return {
        "model": {n: architectures.whole(v) for n, v in dcp.get_model_state_dict(module, options=options).items()},
        "sharded": {n: architectures.whole(v) for n, v in dcp.get_model_state_dict(module).items()},
        "optimizer": dcp.get_optimizer_state_dict(module, optimizer, options=options),
        "plain": plain,
        "dtensors": all(isinstance(plain[n], DTensor) for n, _ in module.named_parameters()),
    }


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_state_dicts(stage: int) -> None:
    """torch's state-dict tools see full values under the module's own names; `state_dict` itself holds DTensors."""
    module, twin = models.pair(partial(architectures.Net, architectures.Mixed, torch.optim.Adam, lr=1e-2))
    inspect = Inspect(_dcp_tools)
    architectures.fit(module, ZeroCompileStrategy(stage=stage, **AOT), steps=2, callbacks=[inspect])
    architectures.reference(twin, steps=1)
    expected, state = dict(twin.state_dict()), inspect.result
    assert list(state["model"]) == list(expected) == list(state["plain"]) == list(state["sharded"])
    assert max(architectures.difference(state[which], expected) for which in ("model", "sharded")) <= 1e-6
    assert state["dtensors"]
    moments = {n: e["exp_avg"] for n, e in state["optimizer"]["state"].items()}
    assert {n: m.shape for n, m in moments.items()} == {n: p.shape for n, p in twin.named_parameters()}
    assert all(m.abs().max() > 0 for m in moments.values())


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "blocks"])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_load_full_state_dict_while_sharded(stage: int, options: dict[str, Any]) -> None:
    """Full tensors load at any time, partly too; the next read and the next step see them."""
    module, other = _mixed(), _mixed()
    x = architectures.Floats(0)[7]

    def load(trainer: L.Trainer, net: architectures.Net) -> None:
        plain = net.load_state_dict(other.state_dict())
        assert (plain.missing_keys, plain.unexpected_keys) == ([], [])
        with torch.no_grad():
            assert (net.model(x.to(net.device)).cpu() - other.model(x)).abs().max() <= 1e-6
        part = {"model.scale": torch.tensor(3.0), "model.stranger": torch.ones(1)}
        partly = net.load_state_dict(part, strict=False)
        assert partly.unexpected_keys == ["model.stranger"] and partly.missing_keys
        with torch.no_grad():
            assert architectures.whole(net.state_dict()["model.scale"]) == net.model.scale == 3.0
        with pytest.raises(RuntimeError, match=r"size mismatch for model\.head\.weight"):
            net.load_state_dict({**other.state_dict(), "model.head.weight": torch.ones(1, 1)})
        net.load_state_dict(other.state_dict())

    inspect = Inspect(load)
    architectures.fit(module, ZeroCompileStrategy(stage=stage, **options), steps=2, callbacks=[inspect])
    assert inspect.called
    reference(other, [1], lambda net, batch: net.training_step(batch, 1), architectures.Floats, lr=0.1)
    assert _apart(module, other) <= 1e-6


@on_ranks()
def test_copies_are_refused_while_sharded() -> None:
    """A sharded module is neither pickled nor copied in part; after `fit` both work again."""
    module = _mixed()

    def attempt(trainer: L.Trainer, net: architectures.Net) -> None:
        for function, target in itertools.product((pickle.dumps, copy.copy), (net.model, net.model.layers[0].up)):
            with pytest.raises(RuntimeError, match=r"(?s)cannot be pickled or copied.*state_dict"):
                function(target)

    inspect = Inspect(attempt)
    architectures.fit(module, ZeroCompileStrategy(stage=3, compile=False), steps=2, callbacks=[inspect])
    assert inspect.called
    for clone in (copy.deepcopy(module.model), pickle.loads(pickle.dumps(module.model))):
        assert _apart(clone, module.model) == 0.0
