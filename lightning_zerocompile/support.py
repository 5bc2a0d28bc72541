"""What Lightning offers and this strategy does not do yet: each raises by name, before anything starts.

Lightning's own checks test for its built-in strategies and do not fire for another one.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.layer_sync import LayerSync

from lightning_zerocompile.compile import is_compiled


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raises if the Trainer or the module asks for something that cannot work.

    Raises:
        MisconfigurationException: names the feature and the remedy.
    """
    layer_sync: LayerSync | None = getattr(trainer.strategy, "_layer_sync", None)
    if layer_sync is not None:
        raise MisconfigurationException(
            "`sync_batchnorm=True` does not work with `strategy='zerocompile'` yet. Convert the model yourself with "
            "`torch.nn.SyncBatchNorm.convert_sync_batchnorm` in `configure_model`."
        )
    for name, inner in module.named_modules():
        if is_compiled(inner):
            what = f"The module `{name}`" if name else "The LightningModule"
            raise MisconfigurationException(
                f"{what} was compiled by torch.compile. `strategy='zerocompile'` compiles the model itself: pass the "
                "module as it is, and options through ZeroCompileStrategy(compile=..., mode=..., options=...)."
            )
