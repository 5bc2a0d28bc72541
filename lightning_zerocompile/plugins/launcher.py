"""Lightning's launcher of one process per device, which also keeps an argument that the Trainer drops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override


class Launcher(_SubprocessScriptLauncher):
    """Lightning's, see [Note: weights_only].

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
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            self.weights_only = before
