"""ZeRO-1, 2 and 3 for PyTorch Lightning through torch.compile.

Importing this package registers ``Trainer(strategy="zerocompile")`` and ``Fabric(strategy="zerocompile")``, and the
names ``zerocompile_stage_1``, ``_2``, ``_3``.
"""

import sys
from typing import NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zerocompile.fabric_strategy import ZeroCompileFabricStrategy
from lightning_zerocompile.monitor import ZeroCompileMonitor
from lightning_zerocompile.plugins.precision import (
    MixedPrecision,
    ZeroCompileDoublePrecision,
    ZeroCompileHalfPrecision,
    ZeroCompilePrecision,
)
from lightning_zerocompile.ranks.errors import CommunicationError
from lightning_zerocompile.sharding.pretrained import load_pretrained
from lightning_zerocompile.strategy import ZeroCompileStrategy

__version__ = "0.1.0"
__all__ = [
    "CommunicationError",
    "MixedPrecision",
    "ZeroCompileDoublePrecision",
    "ZeroCompileFabricStrategy",
    "ZeroCompileHalfPrecision",
    "ZeroCompileMonitor",
    "ZeroCompilePrecision",
    "ZeroCompileStrategy",
    "load_pretrained",
]


def register_strategies() -> None:
    """Registers the names with Lightning. Called again, after a reload, it registers the newest class."""
    ZeroCompileStrategy.register_strategies(StrategyRegistry)
    ZeroCompileFabricStrategy.register_strategies(FABRIC_REGISTRY)
    foreign = sys.modules.get("pytorch_lightning.strategies")  # a package of its own, with its own registry
    if foreign is not None:
        for name in StrategyRegistry.available_strategies():
            if StrategyRegistry[name]["strategy"] is ZeroCompileStrategy:
                description = StrategyRegistry[name]["description"]
                foreign.StrategyRegistry.register(name, _refuse_foreign, description=description, override=True)


def _refuse_foreign() -> NoReturn:
    raise ImportError(
        "strategy='zerocompile' works with the Trainer of `lightning`, whose classes are not those of "
        "`pytorch_lightning`. Use `import lightning as L` instead of `import pytorch_lightning as pl`."
    )


register_strategies()
