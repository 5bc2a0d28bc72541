"""The names: registered by the import, in any order and number of imports; a wrong one says what is right."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_zerocompile
from lightning_zerocompile import ZeroCompileStrategy

NAMES = {"zerocompile": 3, "zerocompile_stage_1": 1, "zerocompile_stage_2": 2, "zerocompile_stage_3": 3}
QUIET = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}

needs_pytorch_lightning = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed"
)
needs_jsonargparse = pytest.mark.skipif(
    importlib.util.find_spec("jsonargparse") is None, reason="jsonargparse is not installed"
)


def _python(code: str, *arguments: str) -> str:
    """What a fresh interpreter prints."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=root, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "stage"), NAMES.items())
def test_name_selects_the_stage(name: str, stage: int) -> None:
    strategy = L.Trainer(strategy=name, **QUIET).strategy
    assert type(strategy) is ZeroCompileStrategy
    assert strategy.config.stage == stage
    assert isinstance(strategy, DDPStrategy)  # Lightning asks for it: samplers, compiled modules


def test_names_are_case_insensitive_as_lightnings_are() -> None:
    assert L.Trainer(strategy="ZeroCompile_Stage_2", **QUIET).strategy.config.stage == 2  # type: ignore[attr-defined]


def test_import_twice_and_reload() -> None:
    """A second import or a reload neither fails nor registers twice."""
    importlib.reload(lightning_zerocompile)
    from lightning_zerocompile import register_strategies

    register_strategies()
    assert {name for name in StrategyRegistry.available_strategies() if name.startswith("zerocompile")} == set(NAMES)
    assert type(L.Trainer(strategy="zerocompile", **QUIET).strategy) is lightning_zerocompile.ZeroCompileStrategy


def test_registered_description_tells_what_it_is() -> None:
    assert all("ZeRO" in StrategyRegistry[name]["description"] for name in NAMES)


def test_typo_in_the_name() -> None:
    """Lightning's own error: it repeats what was asked for."""
    with pytest.raises(ValueError, match="zerocompil'"):
        L.Trainer(strategy="zerocompil", **QUIET)


def test_class_instead_of_instance() -> None:
    with pytest.raises(ValueError, match="ZeroCompileStrategy"):
        L.Trainer(strategy=ZeroCompileStrategy, **QUIET)  # type: ignore[arg-type]


def test_import_has_no_side_effects_beyond_the_names() -> None:
    """The import is cheap: no extension is built, no process group or CUDA context exists afterwards."""
    printed = _python(
        "import lightning_zerocompile, torch;"
        "from lightning_zerocompile.runtime import build;"
        "built = hasattr(torch.ops.zerocompile, 'gather');"
        "print(torch.distributed.is_initialized(), torch.cuda.is_initialized(), built)"
    )
    assert printed.split() == ["False", "False", "False"]


@pytest.mark.parametrize("device", ["mps", "xla"])
def test_other_accelerators_are_refused(device: str) -> None:
    """A device that is neither CPU nor CUDA raises before any process group exists, and names the two."""
    strategy = ZeroCompileStrategy(parallel_devices=[torch.device(device)])
    with pytest.raises(RuntimeError, match=f"not on '{device}'.*accelerator='cpu' or accelerator='cuda'"):
        strategy.setup_environment()
    assert not torch.distributed.is_initialized()


# ---- beside pytorch_lightning ----

FOREIGN = """
import sys, {order}
arguments = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
import lightning
assert type(lightning.Trainer(strategy="zerocompile", **arguments).strategy).__name__ == "ZeroCompileStrategy"
for strategy in lightning_zerocompile.ZeroCompileStrategy(), "zerocompile":
    try:
        pytorch_lightning.Trainer(strategy=strategy, **arguments)
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
"""


@needs_pytorch_lightning
@pytest.mark.parametrize("first", ["pytorch_lightning", pytest.param("lightning_zerocompile", marks=pytest.mark.long)])
def test_in_a_pytorch_lightning_trainer(first: str) -> None:
    """The classes of an instance are others: the error says which package to import. So does that for the name, which
    this Trainer knows if it was imported first; imported later, its own error repeats it."""
    second = "lightning_zerocompile" if first == "pytorch_lightning" else "pytorch_lightning"
    instance, name = _python(FOREIGN.format(order=f"{first}, {second}")).splitlines()
    assert "ZeroCompileStrategy" in instance and "import lightning" in instance
    if first == "pytorch_lightning":
        assert "import lightning" in name
    else:
        assert name.startswith("ValueError") and "zerocompile" in name


# ---- LightningCLI ----

CLI = """
import sys, lightning as L, lightning_zerocompile
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
for line in sys.argv[1:]:
    sys.argv[1:] = ["--trainer.accelerator", "cpu", *line.split()]
    cli = LightningCLI(BoringModel, run=False, save_config_callback=None)
    print(type(cli.trainer.strategy).__name__, cli.trainer.strategy.config)
"""
CLASS = "--trainer.strategy lightning_zerocompile.ZeroCompileStrategy"
LINES = {
    "--trainer.strategy zerocompile_stage_2": ["stage=2"],
    f"{CLASS} --trainer.strategy.stage 1": ["stage=1"],
    f"{CLASS} --trainer.strategy.param_dtype bfloat16 --trainer.strategy.compile false --trainer.strategy.prefetch 2": [
        "torch.bfloat16", "compile=False", "prefetch=2",
    ],
}  # fmt: skip


@needs_jsonargparse
def test_command_line() -> None:
    """LightningCLI takes the name, and the class with its arguments."""
    for printed, expected in zip(_python(CLI, *LINES).splitlines(), LINES.values(), strict=True):
        assert printed.startswith("ZeroCompileStrategy")
        assert all(part in printed for part in expected)


YAML = """
import sys
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
config = sys.argv[1:]
for argument in [], ["--print_config"], ["--trainer.strategy.help", "lightning_zerocompile.ZeroCompileStrategy"]:
    sys.argv[1:] = [*config, *argument]
    try:
        cli = LightningCLI(BoringModel, run=False, save_config_callback=None)
        print(type(cli.trainer.strategy).__name__, cli.trainer.strategy.config)
    except SystemExit:  # it has printed what was asked for
        pass
    print("the end of", argument)
"""


@needs_jsonargparse
def test_yaml_without_an_import(tmp_path: Path) -> None:
    """User code imports nothing; `--print_config` shows every option, and the help of the class explains it."""
    path = tmp_path / "run.yaml"
    line = "{class_path: lightning_zerocompile.ZeroCompileStrategy, init_args: {stage: 2, compile: false}}"
    path.write_text(f"trainer: {{accelerator: cpu, logger: false, strategy: {line}}}\n")
    printed, config, shown, _ = _python(YAML, "--config", str(path)).split("the end of")
    assert printed.startswith("ZeroCompileStrategy Config(stage=2, compile=False")
    options = list(inspect.signature(ZeroCompileStrategy).parameters)
    assert [option for option in options if f"      {option}:" not in config] == []
    shown = " ".join(shown.split())
    described = re.findall(r"--trainer\.strategy\.(\w+) [^ ]+(?:, [^ ]+ [^ ]+)? (?!\(type)", shown)
    ours = options[: options.index("accelerator")]  # the others are those of Lightning's strategies
    assert [option for option in ours if option not in described] == []
