"""Every kind of parameter is sharded, keeps its name, and trains as under DDP."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import architectures, models
from tests.support.harness import Ranks

EAGER: dict[str, Any] = {"compile": False}
BLOCKS: dict[str, Any] = {"compile": "blocks", "backend": "aot_eager"}
MODEL: dict[str, Any] = {"compile": "model", "backend": "aot_eager"}
CELLS = [(3, EAGER), (3, BLOCKS)]
LONG = [(1, EAGER), (1, MODEL), (2, EAGER), (3, MODEL)]
ALWAYS = {"transformer": [(1, MODEL)], "recurrent": [(1, MODEL)], "uneven": [(1, MODEL), (2, EAGER)]}  # and these


def _train(architecture: str, cells: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    results = []
    twin = architectures.Net(architectures.ARCHITECTURES[architecture])
    state = copy.deepcopy(twin.state_dict())
    gradients = architectures.reference(twin)
    for stage, options in cells:
        module = architectures.Net(architectures.ARCHITECTURES[architecture])
        module.load_state_dict(state)
        names, keys = [n for n, _ in module.named_parameters()], list(module.state_dict())
        watch = architectures.fit(module, ZeroCompileStrategy(stage=stage, **options))
        results.append({
            "case": (stage, options["compile"]),
            "parameters": architectures.difference(dict(module.named_parameters()), dict(twin.named_parameters())),
            "gradients": max(architectures.difference(a, b) for a, b in zip(watch.gradients, gradients, strict=True)),
            "buffers": architectures.difference(dict(module.named_buffers()), dict(twin.named_buffers())),
            "names": watch.names == names == [n for n, _ in module.named_parameters()],
            "keys": watch.keys == keys == list(module.state_dict()),
            "sharded": watch.local_numel < watch.full_numel,
            "moved": max(g.abs().max().item() for g in gradients[0].values() if g is not None and g.numel()),
        })  # fmt: skip
    return results


@pytest.mark.parametrize("architecture", architectures.ARCHITECTURES)
def test_trains_as_ddp(ranks: Ranks, architecture: str, long: bool) -> None:
    """Parameters, gradients of every step and buffers equal the reference at every stage, compiled and eager."""
    more = LONG if long else ALWAYS.get(architecture, [])
    for results in ranks.run(_train, architecture, CELLS + more, timeout=200):
        for result in results:
            case = result["case"]
            assert result["moved"] > 1e-3, case  # the reference trains at all
            assert result["parameters"] <= 1e-6, (case, result)
            assert result["gradients"] <= 1e-6, (case, result)
            assert result["buffers"] <= 1e-6, (case, result)
            assert result["names"] and result["keys"] and result["sharded"], (case, result)


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


def _optimize(stage: int) -> dict[str, float]:
    worst = {}
    for name, (kind, arguments) in {**OPTIMIZERS, "subclass": (Subclassed, {"lr": 1e-2})}.items():
        module = architectures.Net(architectures.Mixed, kind, **arguments)
        twin = architectures.Net(architectures.Mixed, kind, **arguments)
        twin.load_state_dict(module.state_dict())
        architectures.fit(module, ZeroCompileStrategy(stage=stage, compile=False))
        architectures.reference(twin)
        worst[name] = architectures.difference(dict(module.named_parameters()), dict(twin.named_parameters()))
    return worst


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_optimizers_step_on_masters(ranks: Ranks, stage: int) -> None:
    """torch's optimizers, in every implementation, give the reference's parameters."""
    for worst in ranks.run(_optimize, stage, timeout=200):
        assert max(worst.values()) <= 2e-6, worst


class ClipsByHand(L.Callback):
    """Calls torch's own function on the masters."""

    def __init__(self, clip: Callable[[Any], Tensor | None]) -> None:
        self.clip, self.norms = clip, []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        norm = self.clip(list(module.parameters()))
        self.norms.append(None if norm is None else architectures.whole(norm).item())


CLIPS: dict[str, Callable[[Any], Tensor | None]] = {
    "norm": functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05),
    "norm_foreach": functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05, foreach=True),
    "norm_3": functools.partial(nn.utils.clip_grad_norm_, max_norm=0.01, norm_type=3.0),
    "norm_1": functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05, norm_type=1.0),
    "value": functools.partial(nn.utils.clip_grad_value_, clip_value=0.01),
    "value_foreach": functools.partial(nn.utils.clip_grad_value_, clip_value=0.01, foreach=True),
}


def _clip(stage: int) -> dict[str, tuple[float, float, bool]]:
    results = {}
    for name, clip in CLIPS.items():
        module, twin, loose = (
            architectures.Net(architectures.Mixed),
            architectures.Net(architectures.Mixed),
            architectures.Net(architectures.Mixed),
        )
        twin.load_state_dict(module.state_dict())
        loose.load_state_dict(module.state_dict())
        ours = ClipsByHand(clip)
        architectures.fit(module, ZeroCompileStrategy(stage=stage, compile=False), callbacks=[ours])
        norms: list[float | None] = []

        def clip_twin(m: nn.Module, clip: Any = clip, norms: list[float | None] = norms) -> None:
            norm = clip(list(m.parameters()))
            norms.append(None if norm is None else norm.item())

        architectures.reference(twin, clip=clip_twin)
        architectures.reference(loose)
        norm_error = max(abs((a or 0.0) - (b or 0.0)) for a, b in zip(ours.norms, norms, strict=True))
        clipped = architectures.difference(dict(twin.named_parameters()), dict(loose.named_parameters())) > 1e-3
        error = architectures.difference(dict(module.named_parameters()), dict(twin.named_parameters()))
        results[name] = (error, norm_error, clipped)
    return results


@pytest.mark.parametrize("stage", [1, 3])
def test_torch_clips_masters(ranks: Ranks, stage: int) -> None:
    """clip_grad_norm_ and clip_grad_value_ of torch see the norm of the whole model, scalars included."""
    for results in ranks.run(_clip, stage, timeout=200):
        for name, (parameters, norm, clipped) in results.items():
            assert clipped, name
            assert parameters <= 1e-6 and norm <= 1e-5, (name, results)


def _clip_by_trainer(stage: int) -> dict[str, float]:
    results = {}
    for algorithm, value in (("norm", 0.05), ("value", 0.01)):
        module, twin = architectures.Net(architectures.Mixed), architectures.Net(architectures.Mixed)
        twin.load_state_dict(module.state_dict())
        arguments = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
        architectures.fit(module, ZeroCompileStrategy(stage=stage, compile=False), **arguments)
        clip = CLIPS[algorithm]
        architectures.reference(twin, clip=lambda m, clip=clip: clip(list(m.parameters())))
        results[algorithm] = architectures.difference(dict(module.named_parameters()), dict(twin.named_parameters()))
    return results


@pytest.mark.parametrize("stage", [1, 3])
def test_trainer_clips(ranks: Ranks, stage: int) -> None:
    """Trainer(gradient_clip_val=...) equals clipping the averaged gradient, by norm and by value."""
    for results in ranks.run(_clip_by_trainer, stage):
        assert max(results.values()) <= 1e-6, results


# ---- state while sharded ----


class Inspect(L.Callback):
    """Calls a function in the middle of training; keeps what it returns."""

    def __init__(self, inspect: Callable[[L.Trainer, Any], Any], step: int = 1) -> None:
        self.inspect, self.step = inspect, step

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.result = self.inspect(trainer, module)


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


def _state(stage: int) -> dict[str, Any]:
    adam: dict[str, Any] = {"lr": 1e-2}
    module, twin = (
        architectures.Net(architectures.Mixed, torch.optim.Adam, **adam),
        architectures.Net(architectures.Mixed, torch.optim.Adam, **adam),
    )
    twin.load_state_dict(module.state_dict())
    inspect = Inspect(_dcp_tools)
    architectures.fit(module, ZeroCompileStrategy(stage=stage, **BLOCKS), steps=2, callbacks=[inspect])
    architectures.reference(twin, steps=1)
    expected = dict(twin.state_dict())
    state = inspect.result
    moments = {n: e["exp_avg"] for n, e in state["optimizer"]["state"].items()}
    return {
        "keys": list(state["model"]) == list(expected) == list(state["plain"]) == list(state["sharded"]),
        "full": architectures.difference(state["model"], expected),
        "sharded": architectures.difference(state["sharded"], expected),
        "dtensors": state["dtensors"],
        "moments": sorted(moments) == sorted(n for n, _ in twin.named_parameters()),
        "moment_shapes": all(moments[n].shape == p.shape for n, p in twin.named_parameters()),
        "moments_move": all(m.abs().max() > 0 for m in moments.values()),
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_state_dicts(ranks: Ranks, stage: int) -> None:
    """torch's state-dict tools see full values under the module's own names; `state_dict` itself holds DTensors."""
    for result in ranks.run(_state, stage):
        assert result["keys"] and result["dtensors"], result
        assert result["moments"] and result["moment_shapes"] and result["moments_move"], result
        assert result["sharded"] <= 1e-6 and result["full"] <= 1e-6, result


def _load(stage: int, options: dict[str, Any]) -> dict[str, Any]:
    """Other weights are loaded after the first step: all, then a part with strict=False, then wrong ones."""
    other = architectures.Net(architectures.Mixed)
    module, twin = architectures.Net(architectures.Mixed), architectures.Net(architectures.Mixed)
    x = architectures.Floats(0)[7]

    def load(trainer: L.Trainer, net: architectures.Net) -> dict[str, Any]:
        plain = net.load_state_dict(other.state_dict())
        with torch.no_grad():
            seen = net.model(x.to(net.device)).cpu()
            expected = other.model(x)
        part = {"model.scale": torch.tensor(3.0), "model.stranger": torch.ones(1)}
        partly = net.load_state_dict(part, strict=False)
        scale = architectures.whole(net.state_dict()["model.scale"]).item()
        with torch.no_grad():
            read = net.model.scale.item()
        try:
            net.load_state_dict({**other.state_dict(), "model.head.weight": torch.ones(1, 1)})
            message = ""
        except RuntimeError as error:
            message = str(error)
        net.load_state_dict(other.state_dict())
        return {
            "keys": (plain.missing_keys, plain.unexpected_keys, partly.unexpected_keys, len(partly.missing_keys) > 0),
            "forward": (seen - expected).abs().max().item(), "scale": (scale, read), "message": message,
        }  # fmt: skip

    inspect = Inspect(load)
    architectures.fit(module, ZeroCompileStrategy(stage=stage, **options), steps=2, callbacks=[inspect])
    twin.load_state_dict(other.state_dict())
    optimizer = twin.configure_optimizers()
    for rank in range(models.world()):
        (twin.training_step(architectures.Floats(rank)[1], 1) / models.world()).backward()
    optimizer.step()
    parameters = architectures.difference(dict(module.named_parameters()), dict(twin.named_parameters()))
    return {**inspect.result, "parameters": parameters}


@pytest.mark.parametrize("options", [EAGER, BLOCKS], ids=["eager", "blocks"])
@pytest.mark.parametrize("stage", [1, 3])
def test_load_full_state_dict_while_sharded(ranks: Ranks, stage: int, options: dict[str, Any]) -> None:
    """Full tensors load at any time, partly too; the next read and the next step see them."""
    for result in ranks.run(_load, stage, options):
        assert result["keys"] == ([], [], ["model.stranger"], True)
        assert result["forward"] <= 1e-6
        assert result["scale"] == (3.0, 3.0)
        assert "model.head.weight" in result["message"] and "size mismatch" in result["message"]
        assert result["parameters"] <= 1e-6


def _copies() -> list[str]:
    module = architectures.Net(architectures.Mixed)

    def attempt(trainer: L.Trainer, net: architectures.Net) -> list[str]:
        messages = []
        for function in (pickle.dumps, copy.copy):
            for target in (net.model, net.model.layers[0].up):
                try:
                    function(target)
                    messages.append("no error")
                except RuntimeError as error:
                    messages.append(str(error))
        return messages

    inspect = Inspect(attempt)
    architectures.fit(module, ZeroCompileStrategy(stage=3, compile=False), steps=2, callbacks=[inspect])
    for clone in (copy.deepcopy(module.model), pickle.loads(pickle.dumps(module.model))):
        assert architectures.difference(dict(clone.named_parameters()), dict(module.model.named_parameters())) == 0.0
    return inspect.result


def test_copies_are_refused_while_sharded(ranks: Ranks) -> None:
    """A sharded module is neither pickled nor copied in part; after `fit` both work again."""
    for messages in ranks.run(_copies):
        assert len(messages) == 4
        assert all("cannot be pickled or copied" in m and "state_dict" in m for m in messages), messages
