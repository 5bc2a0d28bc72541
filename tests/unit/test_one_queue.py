"""CUDA_DEVICE_MAX_CONNECTIONS=1, with which all streams of a device share one queue."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_zerocompile.runtime.peer_memory import warn_of_one_queue


def test_one_queue_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.warns(UserWarning, match=r"wait for each other for ever.*`unset CUDA_DEVICE_MAX_CONNECTIONS`"):
        warn_of_one_queue(torch.device("cuda"), 2)


@pytest.mark.parametrize(("value", "device", "world"), [("8", "cuda", 2), ("1", "cpu", 2), ("1", "cuda", 1)])
def test_nothing_else_is(monkeypatch: pytest.MonkeyPatch, value: str, device: str, world: int) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_one_queue(torch.device(device), world)
