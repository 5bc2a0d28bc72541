"""What is published: the sdist, the wheel, and a run of the installed package."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLISHED = ["pyproject.toml", "LICENSE", "README.md", "lightning_zerocompile", "csrc"]
TOP_LEVEL = {*PUBLISHED, "tests", "examples"}

TRAIN = """
import sys
import lightning as L
import lightning_zerocompile
import torch
from torch.utils.data import DataLoader

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 4), batch_size=4)

trainer = L.Trainer(
    strategy="zerocompile", accelerator="cpu", devices=1, max_steps=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Model())
assert trainer.global_step == 1
print("imported from", lightning_zerocompile.__file__)
"""


def run(*command: str, **options: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel built from that sdist."""
    pytest.importorskip("build")
    # A copy: setuptools leaves build/ behind, and would put a stale one into the wheel.
    source = tmp_path_factory.mktemp("source")
    for name in PUBLISHED:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, source / name)
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(source))
    return target


def wheel_path(distributions: Path) -> Path:
    [wheel] = distributions.glob("*.whl")
    return wheel


def expected_sources() -> set[str]:
    return {path.name for pattern in ["*.cpp", "*.h", "*.cu"] for path in (REPOSITORY / "csrc").glob(pattern)}


def expected_modules() -> set[str]:
    return {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "lightning_zerocompile").rglob("*.py")}


def test_wheel_contents(distributions: Path) -> None:
    wheel = wheel_path(distributions)
    assert wheel.name.endswith("-py3-none-any.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert expected_sources()
    assert {f"lightning_zerocompile/_csrc/{name}" for name in expected_sources()} <= files
    assert expected_modules() <= files
    assert {
        "lightning_zerocompile/LIMITS.md",
        "lightning_zerocompile/README.md",
        "lightning_zerocompile/py.typed",
        "lightning_zerocompile/compile/passes/__init__.py",
    } <= files
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert {name.partition("/")[0].partition("-")[0] for name in files} == {"lightning_zerocompile"}


def test_sdist_contents(distributions: Path) -> None:
    [sdist] = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"csrc/{name}" for name in expected_sources()} <= files
    assert expected_modules() <= files
    assert {"lightning_zerocompile/py.typed", "pyproject.toml", "LICENSE", "README.md"} <= files


def test_every_file_of_csrc_is_packaged() -> None:
    names = {path.name for path in (REPOSITORY / "csrc").iterdir()}
    assert {name for name in names if not name.startswith(".")} == expected_sources()


def test_version_is_the_same_everywhere(distributions: Path) -> None:
    tree = ast.parse((REPOSITORY / "lightning_zerocompile" / "__init__.py").read_text())
    [version] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert wheel_path(distributions).name.split("-")[1] == version


def test_top_level_of_the_repository() -> None:
    if not (REPOSITORY / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listing = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY)
    names = {line.partition("/")[0] for line in listing.splitlines()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


@pytest.mark.slow
def test_installed_wheel_trains(distributions: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    wheel = str(wheel_path(distributions))
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), wheel)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    output = run(sys.executable, str(script), cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(target)})
    assert f"imported from {target / 'lightning_zerocompile' / '__init__.py'}" in output
