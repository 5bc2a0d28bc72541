"""What DDP takes and this strategy does not: it raises by name, before anything starts."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_zerocompile.compile import is_compiled


def check_module(module: pl.LightningModule) -> None:
    """Raises if the module was compiled already.

    Raises:
        MisconfigurationException: names the module and the remedy.
    """
    for name, inner in module.named_modules():
        if is_compiled(inner):
            what = f"The module `{name}`" if name else "The LightningModule"
            raise MisconfigurationException(
                f"{what} was compiled by torch.compile. `strategy='zerocompile'` compiles the model itself: pass the "
                "module as it is, and options through ZeroCompileStrategy(compile=..., mode=..., options=...)."
            )
