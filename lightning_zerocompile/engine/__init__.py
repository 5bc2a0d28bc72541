"""One sharded, compiled model, without Lightning."""

from lightning_zerocompile.engine.engine import Engine

__all__ = ["Engine"]
