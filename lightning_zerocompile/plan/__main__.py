"""Plans a run on any machine: ``python -m lightning_zerocompile.plan``.

The model is built on the meta device, so it takes no memory, and neither GPUs nor other processes are needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_zerocompile.arguments import explain
from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.picture import svg
from lightning_zerocompile.plan.plan import STAGES, Plan, make_plan
from lightning_zerocompile.plan.trace import PlanError, said

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS |= {f"{prefix}I": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)}
_SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler")
_COMPUTE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_PRECISIONS = ("32-true", *_COMPUTE, *_AUTOCAST)


def number(text: str) -> float:
    """``"80GiB"``, ``"400GB"``, ``"400e9"``, ``"900T"``: a positive number.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    bare = text.strip().upper().removesuffix("/S").removesuffix("FLOP").removesuffix("B")
    digits = bare.rstrip("KMGTPI")
    try:
        value = float(digits) * _UNITS[bare[len(digits) :]]
    except (ValueError, KeyError):
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number such as 80GiB, 400GB or 900T")
    return value


def keywords(text: str) -> dict[str, Any]:
    """Arguments by name, written as JSON.

    Raises:
        argparse.ArgumentTypeError: they are not.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON with arguments by name, such as '{{\"width\": 64}}'")
    return value


def _named(target: str) -> Any:
    """The object that ``module:name`` names.

    Raises:
        PlanError: there is none.
    """
    where, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python script.py` would find it
    try:
        found: Any = importlib.import_module(where)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"There is no `{target}`: {error}. Name it as `package.module:Class`.") from error
    return found


def _on_meta(make: Callable[[], Any], what: str) -> Any:
    """What ``make`` returns on the meta device.

    Raises:
        PlanError: it needs data.
    """
    try:
        with torch.device("meta"):
            return make()
    except PlanError:
        raise
    except Exception as error:  # the user's code
        raise PlanError(
            f"{what} cannot be built on the meta device, without memory: {said(error)} Make what "
            "needs numbers or files (pretrained weights, `.item()`) in `setup`, and layers in `configure_model`."
        ) from error


def _check_meta(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.is_meta:
            raise PlanError(
                f"{type(module).__name__} allocates `{name}` ({parameter.nbytes} bytes on {parameter.device}) while "
                "it is built, although the meta device was asked for. Leave `device=`, `.cuda()` and `.to()` out of "
                "`__init__`, or plan in a script: `make_plan(module, batch, world_size=...)`."
            )


def _first_batch(source: Any) -> Any:
    """Of its training data; ``None``: it has none.

    Raises:
        PlanError: it cannot be read.
    """
    try:
        if isinstance(source, pl.LightningDataModule):
            source.prepare_data()
            source.setup("fit")
        loader = source.train_dataloader()
        if any(isinstance(leaf, DataLoader) and leaf is not loader for leaf in tree_leaves(loader)):  # several
            loader = (batch for batch, _, _ in CombinedLoader(loader, "max_size_cycle"))
        return next(iter(loader), None)
    except (MisconfigurationException, NotImplementedError):
        return None
    except Exception as error:  # the user's code
        raise PlanError(
            f"The first batch of {type(source).__name__} cannot be read: {said(error)} Pass `--batch module:function`, "
            "a function that returns one; its tensors may be on the meta device."
        ) from error


def _made_by(name: str) -> Any:
    try:
        return _named(name)()
    except PlanError:
        raise
    except Exception as error:  # the user's code
        raise PlanError(f"`--batch {name}` makes no batch: {said(error)}") from error


def _from_config(path: str, model: str | None) -> tuple[pl.LightningModule, Any, dict[str, Any]]:
    """The module, its first batch and what the Trainer says, of a LightningCLI's configuration.

    Args:
        path: of the file.
        model: ``module:Class`` of a command line that is made for one class, whose file has no ``class_path``.
    """
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
        from lightning.pytorch.cli import LightningCLI

        sections = yaml.safe_load(Path(path).read_text())
    except ImportError as error:
        raise PlanError(
            f"A configuration needs LightningCLI: {error}. pip install 'jsonargparse[signatures]'."
        ) from error
    except OSError as error:
        raise PlanError(f"`{path}` cannot be read: {error.strerror}.") from error
    if not isinstance(sections, dict) or "model" not in sections:
        raise PlanError(f"`{path}` is not the configuration of a LightningCLI: it has no `model`.")
    sections = sections.get("fit", sections) if "trainer" not in sections else sections
    kept = {name: value for name, value in sections.items() if name in _SECTIONS}
    trainer = dict(kept.get("trainer") or {})
    here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "logger": False, "enable_progress_bar": False}
    kept["trainer"] = trainer | here
    kind = None if model is None else _named(model)
    if kind is None:
        _named_classes(kept)
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")  # of arguments beside a command line, which is this command's own
        cli = _on_meta(
            lambda: LightningCLI(kind, run=False, args=kept, save_config_callback=None, seed_everything_default=False),
            "The configuration",
        )
    strategy = cli.trainer.strategy
    config = getattr(strategy, "config", None)
    batch = _first_batch(cli.datamodule) if cli.datamodule is not None else _first_batch(cli.model)
    found = {
        "config": config if isinstance(config, Config) else Config(),
        "precision": cli.trainer.precision,
        "accumulate": cli.trainer.accumulate_grad_batches,
    }
    return cli.model, batch, found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what a Trainer says of this machine."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _named_classes(sections: dict[str, Any]) -> None:
    for name in ("model", "data"):
        value = sections.get(name)
        if isinstance(value, dict) and "class_path" in value:
            _named(":".join(value["class_path"].rsplit(".", 1)))  # an import error, before jsonargparse's long one
        elif name == "model":
            raise PlanError(
                "The configuration's `model` has no `class_path`, so its class is not known. Name it: `--model "
                "package.module:Class`."
            )


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that the command line asks for.

    Raises:
        PlanError: it cannot be made.
    """
    machine = Machine(
        int(options.gpu_memory) if options.gpu_memory else None,
        options.bandwidth,
        options.flops,
        options.gloo,
        ranks_per_node=options.ranks_per_node,
        node_bandwidth=options.node_bandwidth,
        latency=options.latency,
        node_latency=options.node_latency,
    )
    found: dict[str, Any] = {"config": Config(), "precision": "32-true", "accumulate": 1}
    if options.target.endswith((".yaml", ".yml")):
        module, batch, found = _from_config(options.target, options.model)
    else:
        kind = _named(options.target)
        module = _on_meta(lambda: kind(**options.arguments), f"`{options.target}`")
        if not isinstance(module, pl.LightningModule):
            raise PlanError(f"`{options.target}` makes a {type(module).__name__}, not a LightningModule.")
        batch = None if options.batch else _first_batch(module)
    _on_meta(module.configure_model, f"`configure_model` of {type(module).__name__}")
    _check_meta(module)
    if options.batch:
        batch = _made_by(options.batch)
    precision = options.precision or found["precision"]
    config: Config = found["config"]
    known = [option.name for option in dataclasses.fields(Config)]
    for name in options.options:
        if name not in known:
            raise PlanError(f"The strategy {explain(name, known)}")
    config = dataclasses.replace(config, **options.options)
    return make_plan(
        module,
        batch,
        world_size=options.world_size,
        config=config,
        machine=machine,
        compute_dtype=config.param_dtype or _COMPUTE.get(precision),
        autocast_dtype=_AUTOCAST.get(precision),
        stages=options.stage or STAGES,
        accumulate=found["accumulate"],
        measure=_here() if options.measure else None,
    )


def _here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1 if there is no plan, or 2 for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_zerocompile.plan",
        description="Says what a run will need, by stage: memory, bytes of communication and, where rates are given, "
        "time. Works without GPUs, for any number of them.",
    )
    parser.add_argument("target", metavar="TARGET", help="a LightningCLI's configuration (.yaml), or module:Class")
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--gpu-memory", type=number, help="of one rank, for example 80GiB")
    parser.add_argument("--bandwidth", type=number, help="bytes a second of a rank in a collective, for example 300GB")
    parser.add_argument(
        "--ranks-per-node", type=int, help="ranks of a host; --bandwidth is then a rank's between hosts"
    )
    parser.add_argument(
        "--node-bandwidth", type=number, help="bytes a second of a rank in a host; default: --bandwidth"
    )
    parser.add_argument("--latency", type=number, help="seconds of a collective's step between hosts, such as 14e-6")
    parser.add_argument("--node-latency", type=number, help="the same inside a host; default: the same")
    parser.add_argument(
        "--options",
        default={},
        type=keywords,
        metavar="JSON",
        help='the strategy\'s, by name and as JSON, such as {"offload": "optimizer"}',
    )
    parser.add_argument(
        "--flops", type=number, help="FLOP a second that the model reaches on one rank, for example 400T"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time the blocks and what is around them here, on the GPU if there is one, for what is not given",
    )
    parser.add_argument("--stage", type=int, action="append", choices=STAGES, help="only this one; may be repeated")
    parser.add_argument("--batch", metavar="MODULE:FUNCTION", help="returns a batch; default: the first of the data")
    parser.add_argument("--model", metavar="MODULE:CLASS", help="of a configuration that does not name it")
    parser.add_argument("--arguments", default={}, type=keywords, metavar="JSON", help="of the Class, by name")
    parser.add_argument("--precision", choices=_PRECISIONS, help="the Trainer's; default: the configuration's")
    parser.add_argument("--gloo", action="store_true", help="the ranks are CPU processes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a picture, too")
    options = parser.parse_args(arguments)
    if options.plot is not None and options.plot.suffix != ".svg":
        parser.error(f"--plot writes SVG: name the file {options.plot.with_suffix('.svg')}")
    try:
        plan = plan_of(options)
        if options.plot is not None:
            options.plot.write_text(svg(plan))
    except (PlanError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(plan.as_json() if options.json else plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
