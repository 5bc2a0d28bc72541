"""ZeRO-1, 2 and 3 for PyTorch Lightning through torch.compile.

Importing this package registers ``Trainer(strategy="zerocompile")`` and ``zerocompile_stage_1``, ``_2``, ``_3``.
"""

import sys
from typing import NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zerocompile.plugins.precision import (
    MixedPrecision,
    ZeroCompileDoublePrecision,
    ZeroCompileHalfPrecision,
    ZeroCompilePrecision,
)
from lightning_zerocompile.ranks.errors import CommunicationError
from lightning_zerocompile.strategy import ZeroCompileStrategy

__version__ = "0.1.0"
__all__ = [
    "CommunicationError",
    "MixedPrecision",
    "ZeroCompileDoublePrecision",
    "ZeroCompileHalfPrecision",
    "ZeroCompilePrecision",
    "ZeroCompileStrategy",
]


def register_strategies() -> None:
    """Registers the names with Lightning; again (a reload) the newest class counts."""
    foreign = sys.modules.get("pytorch_lightning.strategies")  # a package of its own, with its own registry
    for name, stage in (("zerocompile", 3), *((f"zerocompile_stage_{stage}", stage) for stage in (1, 2, 3))):
        description = f"ZeRO stage {stage} by torch.compile"
        StrategyRegistry.register(name, ZeroCompileStrategy, description=description, override=True, stage=stage)
        FABRIC_REGISTRY.register(name, _refuse_fabric, description="for the Trainer, not for Fabric", override=True)
        if foreign is not None:
            foreign.StrategyRegistry.register(name, _refuse_foreign, description=description, override=True)


def _refuse_fabric() -> NoReturn:
    raise MisconfigurationException(
        "strategy='zerocompile' does not work with Fabric, since it takes the steps from a Trainer. Put the training "
        "loop into a LightningModule (`automatic_optimization = False` leaves every step to you) and use "
        "`lightning.Trainer(strategy='zerocompile')`, or use Fabric's strategy='fsdp'."
    )


def _refuse_foreign() -> NoReturn:
    raise ImportError(
        "strategy='zerocompile' works with the Trainer of `lightning`, whose classes are not those of "
        "`pytorch_lightning`. Use `import lightning as L` instead of `import pytorch_lightning as pl`."
    )


register_strategies()
