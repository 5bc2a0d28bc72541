"""`load_pretrained` takes a folder that fits, or names what does not fit and loads nothing."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_zerocompile import load_pretrained
from lightning_zerocompile.sharding.pretrained import Source, source_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.first.weight


def _state() -> dict[str, Tensor]:
    torch.manual_seed(3)
    state = {name: torch.rand_like(value.float()).to(value.dtype) for name, value in Net().state_dict().items()}
    del state["tied.weight"]
    return state


def _save(folder: Path, state: dict[str, Tensor]) -> None:
    save_file(state, folder / "model.safetensors")


def test_onto_real_and_meta(tmp_path: Path) -> None:
    state = _state()
    _save(tmp_path, state)
    real = Net()
    load_pretrained(real, tmp_path)
    for name, value in state.items():
        assert torch.equal(real.state_dict()[name], value)
    assert real.tied.weight is real.first.weight
    with torch.device("meta"):
        meta = Net()
    load_pretrained(meta, tmp_path)
    meta = copy.deepcopy(meta)  # what is noted goes with it
    assert torch.equal(meta.norm.running_mean, state["norm.running_mean"])  # buffers are read at once
    for module, name, whole in ((meta.first, "weight", "first.weight"), (meta, "scale", "scale")):
        source = source_of(module, name)
        assert source is not None and source.name == whole
        parts = [source.rows(rank, 2) for rank in range(2)]
        assert torch.equal(torch.cat(parts) if state[whole].dim() else parts[1], state[whole])
    assert source_of(meta.tied, "weight") == source_of(meta.first, "weight")
    meta.scale = nn.Parameter(torch.tensor(1.0))  # the user has another value since
    assert source_of(meta, "scale") is None


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_rows(tmp_path: Path, world: int) -> None:
    value = torch.arange(20.0).view(5, 4)
    _save(tmp_path, {"value": value})
    source = Source(str(tmp_path / "model.safetensors"), "value", (5, 4), torch.float32)
    parts = [source.rows(rank, world) for rank in range(world)]
    assert torch.equal(torch.cat(parts), value)
    chunks = [len(part) for part in value.chunk(world)]
    assert [len(part) for part in parts] == chunks + [0] * (world - len(chunks))


def test_other_dtypes_by_cast_only(tmp_path: Path) -> None:
    _save(
        tmp_path, {name: value.bfloat16() if value.is_floating_point() else value for name, value in _state().items()}
    )
    with pytest.raises(ValueError, match=r"first\.weight is torch.bfloat16 there, torch.float32 here.*`cast=True`"):
        load_pretrained(Net(), tmp_path)
    model = Net()
    load_pretrained(model, tmp_path, cast=True)
    assert torch.equal(model.first.bias, _state()["first.bias"].bfloat16().float())


def _without_bias(state: dict[str, Tensor]) -> None:
    del state["first.bias"]


def _with_head(state: dict[str, Tensor]) -> None:
    state["head.weight"] = torch.zeros(2)


def _of_another_shape(state: dict[str, Tensor]) -> None:
    state["first.bias"] = torch.zeros(4)


def _of_integers(state: dict[str, Tensor]) -> None:
    state["first.bias"] = torch.zeros(5, dtype=torch.int32)


def _all_at_once(state: dict[str, Tensor]) -> None:
    _without_bias(state)
    _with_head(state)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without_bias, r"Missing: first\.bias\."),
        (_with_head, r"Of no parameter or buffer here: head\.weight\."),
        (_of_another_shape, r"Of another shape: first\.bias is \[4\] there, \[5\] here\."),
        (_of_integers, r"Of another dtype: first\.bias is torch.int32 there"),
        (_all_at_once, r"Missing: first\.bias\..*head\.weight"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_loaded(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], named: str, device: str
) -> None:
    state = _state()
    change(state)
    _save(tmp_path, state)
    with torch.device(device):
        model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"nothing was loaded.*{named}"):
        load_pretrained(model, tmp_path, cast=True)
    if device == "cpu":
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(source_of(inner, name) is None for inner in model.modules() for name in inner._parameters)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_pretrained(Net(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"scale": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors.*is not there"):
        load_pretrained(Net(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RuntimeError, match="no safetensors file that can be read"):
        load_pretrained(Net(), tmp_path)


def test_a_folder_that_changes_meanwhile(tmp_path: Path) -> None:
    _save(tmp_path, {"value": torch.zeros(5)})
    source = Source(str(tmp_path / "model.safetensors"), "value", (5,), torch.float32)
    _save(tmp_path, {"value": torch.zeros(6)})
    with pytest.raises(RuntimeError, match="must stay as it was"):
        source.rows(0, 2)


def test_safetensors_that_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"`pip install safetensors`"):
        load_pretrained(nn.Linear(2, 2), tmp_path)
