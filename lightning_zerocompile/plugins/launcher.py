"""Lightning's launchers of one process per device, which also keep an argument that the Trainer drops.

[Note: notebooks] Lightning starts the script again for each further rank. A notebook is no script, so there the running
process is forked for each rank (``start_method="auto"``). Then the run is in children. From rank 0 the module gets its
weights, the Trainer its metrics, and the strategy what it says of a run that has ended. Layers that are made in
``configure_model``, or are on the meta device, are only in the children, so they are made here, too, before the module
gets the weights. One rank alone needs no further process: it runs in the notebook's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import lightning.fabric.strategies.launchers as fabric_launchers
import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.launcher import _Launcher
from lightning.fabric.utilities import imports
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from typing_extensions import override

from lightning_zerocompile.config import Config
from lightning_zerocompile.sharding.meta_init import initialize_all


class Launched(Protocol):
    """A strategy of Lightning's, as its launchers see it, which can say in one process what a run in another did."""

    config: Config
    cluster_environment: ClusterEnvironment | None
    num_nodes: int

    @property
    def num_processes(self) -> int: ...

    def tell_last_run(self) -> bytes: ...

    def hear_last_run(self, told: bytes) -> None: ...


def forks(strategy: Launched) -> bool:
    """Whether the processes of further ranks are forks, see [Note: notebooks]."""
    start_method, environment = strategy.config.start_method, strategy.cluster_environment
    if start_method != "auto" or environment is None or environment.creates_processes_externally:
        return start_method == "fork"
    return imports._IS_INTERACTIVE and strategy.num_processes * strategy.num_nodes > 1


class KeepsWeightsOnly(_Launcher):
    """A part of a launcher, see [Note: weights_only].

    [Note: weights_only] ``Trainer.fit(..., weights_only=False)`` lets the checkpoint be unpickled. The Trainer passes
    that argument only to strategies that load before their set-up (Lightning 2.6, ``Trainer._run``), but a sharded
    model loads after it. Every entry point of the Trainer goes through ``launch`` with all of its arguments.

    Attributes:
        weights_only: the argument of the running ``fit``, ``validate``, ``test`` or ``predict``; None: it had none.
    """

    weights_only: bool | None = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        before = self.weights_only
        self.weights_only = inspect.signature(function).bind(*args, **kwargs).arguments.get("weights_only")
        try:
            # Lightning's own launcher comes next
            return super().launch(function, *args, trainer=trainer, **kwargs)  # type: ignore[safe-super]
        finally:
            self.weights_only = before


class Launcher(KeepsWeightsOnly, _SubprocessScriptLauncher):
    """Lightning's, see [Note: weights_only]."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self.num_processes * self.num_nodes == 1


class ForkLauncher(KeepsWeightsOnly, _MultiProcessingLauncher):
    """Lightning's, see [Note: notebooks] and [Note: weights_only]."""

    _strategy: Any  # Lightning's type of it, and `Launched`

    def __init__(self, strategy: Launched) -> None:
        super().__init__(strategy, start_method="fork")  # type: ignore[arg-type]

    @override
    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        told = {"last_run": self._strategy.tell_last_run(), "names": list(trainer.lightning_module.state_dict())}
        return super().get_extra_results(trainer) | told

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        if worker_output.weights_path is not None:
            _make_layers(trainer, worker_output.extra["names"], worker_output.weights_path)
        super()._recover_results_in_main_process(worker_output, trainer)

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        self._strategy.hear_last_run(extra["last_run"])


def _make_layers(trainer: pl.Trainer, names: Sequence[str], path: str) -> None:
    """Makes the layers of the module that the run has made, on the CPU, see [Note: notebooks].

    Args:
        trainer: of this process, in which nothing has run.
        names: the state dict's, where the run has ended.
        path: the file with the trained weights.

    Raises:
        RuntimeError: the layers cannot be made, or a layer is still missing, so its trained weights would be lost.
    """
    module, why = trainer.lightning_module, "The layer was made in the run's processes only."
    try:
        module.trainer = trainer
        with torch.random.fork_rng(devices=()):
            module.configure_model()
            initialize_all(module, torch.device("cpu"))
    except Exception as error:
        why = f"Making the layers anew has raised {type(error).__name__}: {error}."
    missing = sorted(set(names) - {name for name, value in module.state_dict().items() if not _is_meta(value)})
    if missing:
        raise RuntimeError(
            f"The run has trained `{missing[0]}`, which the notebook's module has not. {why} Make the layers in "
            f"`__init__` or `configure_model`; this run's weights are in a file: "
            f"`module.load_state_dict(torch.load({path!r}))`."
        )


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


class FabricLauncher(fabric_launchers._SubprocessScriptLauncher):
    """Fabric's, see [Note: notebooks]."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self.num_processes * self.num_nodes == 1
