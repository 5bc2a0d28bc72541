"""Clipping: how torch's is called, and what of it goes with an optimizer that updates inside the backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from lightning_zerocompile.optim.in_backward import CLIPPING, OPTION
from lightning_zerocompile.sharding.full_values import in_own_dtypes
from lightning_zerocompile.sharding.master import as_plain_tensors, bound_gradient, rows_of_gradients


def clip_value_in_backward(trainer: pl.Trainer, module: pl.LightningModule, plugin: Precision) -> float | None:
    """What gradients are clamped to before their update; ``None``: nothing.

    Raises:
        MisconfigurationException: the run scales its loss, or clips in a way that needs all gradients at once.
    """
    refuse_scaling(getattr(plugin, "scaler", None), str(plugin.precision))
    if module.automatic_optimization and is_overridden("configure_gradient_clipping", module):
        raise MisconfigurationException(CLIPPING.format(f"`{type(module).__name__}.configure_gradient_clipping`"))
    value = trainer.gradient_clip_val
    if not value or value <= 0:
        return None
    if trainer.gradient_clip_algorithm != "value":
        raise MisconfigurationException(CLIPPING.format(f"Clipping by norm (`gradient_clip_val={value}`)"))
    return float(value)


def clip_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, with the numbers of whole gradients.

    [Note: clipping] torch's takes operations on a DTensor for each gradient, which cost the host much more than those
    on plain tensors. Here a rank takes the norms of its rows, and one collective gives those of the whole gradients.
    The rest is as torch does it: each norm is rounded to its gradient's dtype, and the norm of the norms is the total.
    What this does not know (other parameters, complex gradients, norms of order 0) goes to torch.

    Returns:
        The total norm before the clipping, a 0-dim tensor.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
    """
    listed = list(parameters)
    found = _rows_of(listed) if float(norm_type) > 0 else None
    if found is None:
        foreach = _foreach(listed)
        return torch.nn.utils.clip_grad_norm_(listed, max_norm, norm_type, error_if_nonfinite, foreach)
    masters, rows, bound = found
    with torch.no_grad():
        total = _total_norm(masters, rows, float(norm_type))
        if error_if_nonfinite:
            torch.nn.utils.get_total_norm([total], norm_type, error_if_nonfinite)  # which is what raises
        torch._foreach_mul_(rows, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    increment_version(bound)
    return total


def clip_value(parameters: Iterable[Tensor], value: float) -> None:
    """``torch.nn.utils.clip_grad_value_``, on this rank's rows, see [Note: clipping]."""
    listed = list(parameters)
    found = _rows_of(listed)
    if found is None:
        torch.nn.utils.clip_grad_value_(listed, value, foreach=_foreach(listed))
        return
    _, rows, bound = found
    with torch.no_grad():
        torch._foreach_clamp_min_(rows, -float(value))
        torch._foreach_clamp_max_(rows, float(value))
    increment_version(bound)


def _rows_of(parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:
    """Masters with gradients, this rank's rows of these, and those that are bound; None: torch clips."""
    found = rows_of_gradients(parameters)
    if found is None or not found[1] or any(rows.is_complex() for rows in found[1]):
        return None
    with as_plain_tensors():
        bound = [grad for master in found[0] if (grad := bound_gradient(master)) is not None]
    return *found, bound


def _total_norm(masters: Sequence[Any], rows: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients, 0-dim, in the widest of their dtypes."""
    mesh = masters[0].device_mesh
    first = mesh.get_local_rank() == 0  # who counts what all ranks have
    exact = torch.float64 if any(one.dtype == torch.float64 for one in rows) else torch.float32
    zero = torch.zeros((), dtype=exact, device=rows[0].device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for one in rows:
        by_dtype.setdefault(one.dtype, []).append(one)
    norms: list[Tensor] = []
    for same in by_dtype.values():
        counts = [one.numel() > 0 and (first or one.dim() > 0) for one in same]
        counted = [one for one, counting in zip(same, counts, strict=True) if counting]
        found = iter(torch._foreach_norm(counted, norm_type, exact) if counted else ())
        norms += [next(found) if counting else zero for counting in counts]
    parts = torch.stack(norms)
    if mesh.size() > 1:
        parts = _joined(parts, norm_type, mesh.get_group())
    whole = torch.split(parts, [len(same) for same in by_dtype.values()])
    widest = functools.reduce(torch.promote_types, by_dtype)
    rounded = [one.to(dtype).to(widest) for one, dtype in zip(whole, by_dtype, strict=True)]
    with in_own_dtypes(zero):
        total: Tensor = torch.linalg.vector_norm(torch.cat(rounded), norm_type)
    return total


def _joined(norms: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """The norms of whole gradients, from those of each rank's rows; both [gradients]."""
    if norm_type == math.inf:  # see [Note: NaN in a maximum]
        gathered = norms.new_empty(dist.get_world_size(group) * norms.numel())
        dist.all_gather_into_tensor(gathered, norms, group=group)
        return gathered.view(-1, norms.numel()).amax(0)
    powers = norms.pow_(norm_type)
    dist.all_reduce(powers, group=group)
    return powers.pow_(1.0 / norm_type)


def _foreach(parameters: list[Tensor]) -> bool | None:
    """torch's ``foreach``: by itself it takes one operation for all gradients only of plain tensors."""
    return True if all(isinstance(parameter, DTensor) for parameter in parameters) else None


def refuse_scaling(scaler: object, precision: str) -> None:
    """Raises MisconfigurationException for a loss scaler that is on."""
    if scaler is not None and scaler.is_enabled():  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"{OPTION} does not work with precision={precision!r}, which scales the loss: whether a step is skipped is "
            "known only when all gradients are there. Use bfloat16 ('bf16-true', 'bf16-mixed'), or drop the option."
        )
