"""The command that makes one file of a directory of shards, without ranks."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zerocompile import consolidate
from lightning_zerocompile.checkpoint import directory as checkpoint_directory

STATE = {"weight": torch.arange(40.0).reshape(8, 5), "bias": torch.ones(3, dtype=torch.bfloat16)}
REST = {"lr_schedulers": [], "epoch": 3}


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.trace,)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    _save(path, {})
    yield path


def _save(path: Path, more: dict[str, Any]) -> None:
    groups = [{"lr": 0.1, "params": ["weight"]}]
    optimizer = {"state": {"weight": {"exp_avg": STATE["weight"] * 2}}, "param_groups": groups}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        checkpoint_directory.save({"state_dict": STATE, "optimizer_states": [optimizer], **REST, **more}, path)
    finally:
        dist.destroy_process_group()


def test_the_file_has_all_of_the_directory(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal to the bit; beside the directory if no name is given; what is there is replaced only by force."""
    directory = Path(shutil.copytree(saved, tmp_path / "a.ckpt"))
    assert consolidate.main([str(directory)]) == 0
    assert capsys.readouterr().out == f"{directory}.consolidated\n"
    loaded = torch.load(f"{directory}.consolidated")
    assert all(torch.equal(loaded["state_dict"][name], value) for name, value in STATE.items())
    [optimizer] = loaded["optimizer_states"]
    assert torch.equal(optimizer["state"]["weight"]["exp_avg"], STATE["weight"] * 2)
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": ["weight"]}] and loaded["epoch"] == 3
    other = tmp_path / "other.ckpt"
    other.write_text("mine")
    assert consolidate.main([str(directory), str(other)]) == 1
    assert "--force" in capsys.readouterr().err and other.read_text() == "mine"
    assert consolidate.main([str(directory), str(other), "--force"]) == 0
    assert torch.load(other)["epoch"] == 3
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "a.ckpt.consolidated", "other.ckpt"]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.pt", "checksums.json"])
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_damage_is_found(saved: Path, name: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped byte and a file that is cut short, in every file; nothing is written."""
    directory = Path(shutil.copytree(saved, tmp_path / "a.ckpt"))
    content = bytearray((directory / name).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / name).write_bytes(content if how == "flipped" else content[: len(content) // 2])
    assert consolidate.main([str(directory)]) == 1
    assert f"is damaged: `{name}` does not match its checksum. Load another one." in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("place", ["rest", "index"])
def test_no_code_is_run(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An object that would run code when it is unpickled is refused, unless the user trusts the directory."""
    directory, trace = tmp_path / "a.ckpt", tmp_path / "trace"
    _save(directory, {"mine": Trap(trace)} if place == "rest" else {})
    if place == "index":
        (directory / "checksums.json").unlink()
        (directory / ".metadata").write_bytes(pickle.dumps(Trap(trace)))
    assert consolidate.main([str(directory)]) == 1
    assert "--trust" in capsys.readouterr().err and os.listdir(tmp_path) == ["a.ckpt"]
    if place == "rest":
        assert consolidate.main([str(directory), "--trust"]) == 0 and trace.is_dir()


def test_command_line(saved: Path, tmp_path: Path) -> None:
    """As a process: the help, a directory without checksums, and what is no directory."""
    directory = Path(shutil.copytree(saved, tmp_path / "a.ckpt"))
    (directory / "checksums.json").unlink()
    command = [sys.executable, "-m", "lightning_zerocompile.consolidate"]
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True)
    assert done.returncode == 0 and "no checksums" in done.stderr, done.stderr
    assert done.stdout == f"{directory}.consolidated\n"


def test_what_is_no_directory_of_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, text in (("nowhere", "There is no directory"), ("file", "is a file"), ("empty", "is no checkpoint")):
        assert consolidate.main([str(tmp_path / name)]) == 1
        assert text in capsys.readouterr().err
    for arguments, status in ((["--help"], 0), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            consolidate.main(arguments)
        assert ended.value.code == status
    assert "DIRECTORY" in capsys.readouterr().out
