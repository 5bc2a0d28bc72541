"""What the user chose, validated once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch


class Lifetime(Enum):
    """How long a gathered value lives."""

    USE = "use"  # gathered for each forward and each backward use
    STEP = "step"  # gathered once, after the optimizer wrote


@dataclass(frozen=True)
class Policy:
    """What one stage does with every parameter: two independent policies.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2019).
    """

    lifetime: Lifetime
    accumulates_locally: bool  # gradients of an accumulation wait, unreduced, for its last backward

    @classmethod
    def of_stage(cls, stage: int) -> Policy:
        return cls(
            lifetime=Lifetime.USE if stage == 3 else Lifetime.STEP,
            accumulates_locally=stage == 1,
        )


CompileScope = Literal["blocks", "model", False]

_MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def as_dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point dtype from itself or from its name (``"bfloat16"``, ``"torch.bfloat16"``).

    Raises:
        ValueError: the name is no floating-point dtype of torch.
    """
    if value is None:
        return None
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"`{name}={value!r}` is not a floating-point dtype; use for example torch.bfloat16 or None.")
    return dtype


_RENAMED = {
    "checkpoint": "`state_dict_type` ('full' or 'sharded')",
    "accumulate": "`defer_grad_sync` (True for 'local')",
    "whole_values": "`full_param_optimizers`",
}
P = ParamSpec("P")
R = TypeVar("R")


def refuse_old_names(init: Callable[P, R]) -> Callable[P, R]:
    """Decorates a constructor: an argument that had another name in an earlier version raises with the new one."""

    @wraps(init)  # its signature stays what LightningCLI reads
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for old, new in _RENAMED.items():
            if old in kwargs:
                raise TypeError(f"ZeroCompileStrategy has no argument `{old}` any more; use {new}.")
        return init(*args, **kwargs)

    return checked


@dataclass(frozen=True)
class Config:
    """The options of :class:`~lightning_zerocompile.strategy.ZeroCompileStrategy`, which documents each.

    Raises:
        ValueError: a value is outside what its field allows; the message names the field, what is allowed and what to
            do instead.
    """

    stage: int = 3
    compile: CompileScope = "blocks"
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    param_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = torch.float32
    unit_bytes: int = 64 * 2**20
    prefetch: int = 1
    keep_gathered: tuple[str, ...] = ()
    memory_budget: int | Literal["auto"] | None = None
    copy_engine: bool | Literal["auto"] = "auto"
    defer_grad_sync: bool = False
    keep_gradients: bool = False
    unshard_after_fit: bool = True
    state_dict_type: str = "full"
    full_param_optimizers: tuple[str, ...] = ()
    timeout: timedelta = timedelta(minutes=30)

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (1, 2, 3):
            raise ValueError(
                f"`stage={self.stage!r}` is not a ZeRO stage; choose 1 (optimizer states sharded), 2 (and gradients) "
                "or 3 (and parameters)."
            )
        if self.compile not in ("blocks", "model", False) or self.compile is None:
            raise ValueError(
                f"`compile={self.compile!r}` is not understood; choose 'blocks' (each repeated block), 'model' "
                "(each top-level child as one graph) or False (no compilation)."
            )
        if self.backend not in ("inductor", "aot_eager"):
            raise ValueError(
                f"`backend={self.backend!r}` is not supported; choose 'inductor' or 'aot_eager', or compile=False."
            )
        if not isinstance(self.options, dict):
            raise ValueError(f"`options={self.options!r}` must be a dictionary of Inductor's options.")
        if self.mode not in _MODES:
            raise ValueError(f"`mode={self.mode!r}` is not a mode of torch.compile; choose one of {_MODES}.")
        self._check_cuda_graphs()
        if self.backend != "inductor" and (self.mode is not None or self.options):
            raise ValueError(f"`mode` and `options` belong to Inductor; drop them with backend={self.backend!r}.")
        for name in ("param_dtype", "reduce_dtype", "master_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ValueError(f"`{name}={value!r}` must be a floating-point torch.dtype or None.")
        if not (self.dynamic is None or isinstance(self.dynamic, bool)):
            raise ValueError(f"`dynamic={self.dynamic!r}` is not understood; choose True, False or None.")
        if self.state_dict_type not in ("full", "sharded"):
            raise ValueError(
                f"`state_dict_type={self.state_dict_type!r}` is not understood; choose 'full' (one file with full "
                "tensors) or 'sharded' (a directory to which every rank writes its shards)."
            )
        for name in ("defer_grad_sync", "cast_forward_inputs", "keep_gradients", "unshard_after_fit"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}={getattr(self, name)!r}` is not understood; choose True or False.")
        if not isinstance(self.unit_bytes, int) or isinstance(self.unit_bytes, bool) or self.unit_bytes <= 0:
            raise ValueError(f"`unit_bytes={self.unit_bytes!r}` must be a positive number of bytes, for example 2**26.")
        if not isinstance(self.prefetch, int) or isinstance(self.prefetch, bool) or self.prefetch < 0:
            raise ValueError(f"`prefetch={self.prefetch!r}` must be a number of units, 0 or more.")
        if not all(isinstance(name, str) and name for name in self.keep_gathered):
            raise ValueError(
                f"`keep_gathered={self.keep_gathered!r}` must be names of modules, for example ['vision']."
            )
        budget = self.memory_budget
        if not (budget in (None, "auto") or (isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0)):
            raise ValueError(
                f"`memory_budget={budget!r}` is not understood; give a number of bytes on each device, 'auto' (three "
                "quarters of what is free at the peak of the first two steps) or None (nothing more stays gathered)."
            )
        if not all(isinstance(name, str) and name for name in self.full_param_optimizers):
            raise ValueError(
                f"`full_param_optimizers={self.full_param_optimizers!r}` must be names of optimizer classes, for "
                "example ['Shampoo']."
            )
        if not (isinstance(self.copy_engine, bool) or self.copy_engine == "auto"):
            raise ValueError(
                f"`copy_engine={self.copy_engine!r}` is not understood; choose 'auto' (where all ranks' GPUs are in "
                "one host and reach each other's memory), True (or raise) or False."
            )
        if not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0):
            raise ValueError(f"`timeout={self.timeout!r}` must be a positive datetime.timedelta.")
        if self.compile is False and (self.mode is not None or self.options):
            warnings.warn("`mode` and `options` have no effect with compile=False.", stacklevel=3)

    def _check_cuda_graphs(self) -> None:
        if "cudagraph_policy" in self.options:
            raise ValueError("`cudagraph_policy` records whole graphs, with the communication in them; drop it.")
        if not self.cuda_graphs:
            return
        if self.options.get("triton.cudagraph_trees") is False:
            raise ValueError(
                "CUDA graphs without `triton.cudagraph_trees` overwrite what other blocks still need; drop the option."
            )
        if self.options.get("cpp_wrapper"):
            raise ValueError(
                "Inductor records no CUDA graphs with `cpp_wrapper`; drop it, or choose "
                "mode='max-autotune-no-cudagraphs' or None."
            )

    @property
    def cuda_graphs(self) -> bool:
        """Whether what a graph computes between our operators is replayed as CUDA graphs, see [Note: CUDA graphs]."""
        chosen = self.options.get("triton.cudagraphs", self.mode in _CUDA_GRAPH_MODES)
        return self.compile is not False and bool(chosen)
