"""What user code does to the values of a checkpoint while it loads, in the hooks of the module and of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

WEIGHT = "model.layers.0.up.weight"  # [21, 10]


def _edit(value: Tensor) -> None:
    value[2].zero_()
    value[3:5].mul_(2)
    value.data[:4].add_(0.25)
    value.mul_(1 + value.sum().item() / 100)
    value[0] = 0.5
    value[7:9].copy_(torch.full((2, value.shape[1]), 0.125))
    value.add_(torch.linspace(0, 0.1, value.numel(), device=value.device).view(value.shape))


class _Edited(models.Module):
    """``edits``: whether the weight and the optimizer's states are changed on their way in."""

    edits = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.edits:
            return
        _edit(checkpoint["state_dict"][WEIGHT])
        for entry in checkpoint["optimizer_states"][0]["state"].values():
            for kept in entry.values():
                if kept.dim() == 2:
                    kept[1:3].mul_(3)


class _Copying(nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "weight"] * 2)
            self.bias.copy_(state_dict[prefix + "bias"])


class _InLayers(models.Module):
    """A layer has a hook of its own, and another one a method, for what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers[0].up.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: _edit(state[prefix + "weight"])
        )
        self.model.layers[1].up.__class__ = _Copying


def _resumed(module: models.Module, strategy: Any, path: str) -> dict[str, Tensor]:
    models.fit_epochs(module, strategy, 2, path)
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def _apart(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    apart = {name: (value - expected[name]).abs().max().item() for name, value in ours.items()}
    return {name: by for name, by in apart.items() if not by <= 1e-6}


@pytest.mark.parametrize(
    ("kind", "stage", "compiled"),
    [("full", 3, False), ("sharded", 1, False), ("sharded", 2, True), ("sharded", 3, True)],
)
@on_ranks()
def test_on_load_checkpoint(kind: str, stage: Any, compiled: bool, tmp_path: Path) -> None:
    def trained(strategy: Any, path: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        models.fit_epochs(_Edited(), strategy(), 1).save_checkpoint(path)
        module = _Edited()
        module.edits = True
        return _resumed(module, strategy(), path)

    def ours() -> ZeroCompileStrategy:
        return ZeroCompileStrategy(stage=stage, state_dict_type=kind, **(AOT if compiled else EAGER))  # type: ignore[arg-type]

    expected = trained(lambda: "ddp", f"{tmp_path}/ddp")
    assert _apart(trained(ours, f"{tmp_path}/ours"), expected) == {}


@pytest.mark.parametrize(("stage", "compiled"), [(1, False), (2, True), (3, False), (3, True)])
@on_ranks()
def test_hooks_and_methods_of_layers(stage: Any, compiled: bool, tmp_path: Path) -> None:
    """With a file that DDP has written."""
    torch.manual_seed(0)
    path = f"{tmp_path}/ddp"
    models.fit_epochs(models.Module(), "ddp", 1).save_checkpoint(path)
    expected = _resumed(_InLayers(), "ddp", path)
    ours = ZeroCompileStrategy(stage=stage, **(AOT if compiled else EAGER))
    assert _apart(_resumed(_InLayers(), ours, path), expected) == {}
