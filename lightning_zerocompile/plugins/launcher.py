"""Lightning's launchers of one process per device, which also keep an argument that the Trainer drops.

[Note: notebooks] Lightning starts the script again for each further rank. A notebook is no script, so there the running
process is forked for each rank (``start_method="auto"``). Then the run is in children. From rank 0 the module gets its
weights, the Trainer its metrics, and the strategy what it says of a run that has ended. One rank alone needs no further
process: it runs in the notebook's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import lightning.fabric.strategies.launchers as fabric_launchers
import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.launcher import _Launcher
from lightning.fabric.utilities import imports
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from typing_extensions import override

from lightning_zerocompile.config import Config


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
        return super().get_extra_results(trainer) | {"last_run": self._strategy.tell_last_run()}

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        self._strategy.hear_last_run(extra["last_run"])


class FabricLauncher(fabric_launchers._SubprocessScriptLauncher):
    """Fabric's, see [Note: notebooks]."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self.num_processes * self.num_nodes == 1
