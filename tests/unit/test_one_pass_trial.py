"""Where the kernel of updates in one pass cannot be launched, torch updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zerocompile.optim.one_pass import OnePass


class _Places:
    def place(self, units: Any, /) -> list[Any]:
        raise AssertionError("nothing is placed where nothing can be launched")


class _Kernel:
    """As Triton's on a machine without a C compiler."""

    def __init__(self, error: Exception) -> None:
        self.error, self.launches = error, 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.launches += 1
        raise self.error


class _Kernels:
    FORMS = (0, 1)

    def __init__(self, error: Exception) -> None:
        self.adam = self.sgd = _Kernel(error)

    def dtype_of(self, dtype: torch.dtype | None) -> None:
        return None


def _prepared(monkeypatch: pytest.MonkeyPatch, error: Exception) -> tuple[OnePass, _Kernels, torch.optim.AdamW]:
    """On this machine's CPU, but for what the device decides."""
    one_pass, kernels = OnePass(_Places(), torch.device("cpu")), _Kernels(error)
    assert one_pass._off == "this is not a CUDA device"
    monkeypatch.setattr(one_pass, "_off", "")
    monkeypatch.setattr(one_pass, "_kernels", kernels)
    value = nn.Parameter(torch.ones(8))
    value.grad = torch.ones(8)
    return one_pass, kernels, torch.optim.AdamW([value], fused=True)


def test_torch_updates_where_triton_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    one_pass, kernels, optimizer = _prepared(monkeypatch, RuntimeError("Failed to find C compiler"))
    (value,) = optimizer.param_groups[0]["params"]
    assert one_pass.takes(optimizer)
    assert one_pass.update(optimizer, [0], [value], [0]) is None
    assert kernels.adam.launches == 1 and torch.equal(value.detach(), torch.ones(8))
    assert float(optimizer.state[value]["step"]) == 0
    assert not one_pass.takes(optimizer) and "Failed to find C compiler" in one_pass._off
    optimizer.step()
    assert float(value.detach()[0]) < 1 and kernels.adam.launches == 1


def test_a_device_without_memory_is_not_taken_for_one_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    one_pass, _, optimizer = _prepared(monkeypatch, torch.OutOfMemoryError("none left"))
    (value,) = optimizer.param_groups[0]["params"]
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        one_pass.update(optimizer, [0], [value], [0])
    assert one_pass.takes(optimizer)
