"""ZeRO-1, 2 and 3 for PyTorch Lightning through torch.compile.

Importing this package registers ``Trainer(strategy="zerocompile")`` and ``zerocompile_stage_1``, ``_2``, ``_3``.
"""

from lightning_zerocompile.registry import register_strategies
from lightning_zerocompile.strategy import ZeroCompileStrategy

__version__ = "0.1.0"
__all__ = ["ZeroCompileStrategy"]

register_strategies()
