"""Attention as a device runs it, in a step without data on the CPU.

[Note: attention of devices] What attention keeps for the backward depends on the kernel, and torch chooses that by the
device. On the CPU attention with dropout has no fused kernel: it keeps all scores, which is more than all else that a
block keeps. On CUDA the fused kernels know dropout and masks, and keep queries, keys, values, their result and a number
for each row. So a plan for devices asks for these kernels by name where the CPU would take none. They have no code for
the CPU, but a step without data (see [Note: fake step]) needs sizes alone. Where a mask itself has a gradient (the
learned positions of T5), torch.compile takes no fused kernel on CUDA either, and eager code does (torch 2.11).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATEN = torch.ops.aten
_ALIGNED = 8  # elements, of a mask's rows
_PLACES = {  # of the query in what an operator is called with; key and value follow
    _ATEN._scaled_dot_product_flash_attention: 0,
    _ATEN._scaled_dot_product_efficient_attention: 0,
    _ATEN._scaled_dot_product_cudnn_attention: 0,
    _ATEN._scaled_dot_product_flash_attention_backward: 1,
    _ATEN._scaled_dot_product_efficient_attention_backward: 1,
    _ATEN._scaled_dot_product_cudnn_attention_backward: 1,
}


class AttentionOfDevices(TorchFunctionMode):
    """See [Note: attention of devices].

    Args:
        compiled: whether torch.compile compiles the attention.
    """

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self._compiled = compiled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        fused = _fused(self._compiled, *args, **kwargs)
        return func(*args, **kwargs) if fused is None else fused


def _fused(
    compiled: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """By a kernel of CUDA's; ``None``: the CPU's own choice keeps as much."""
    if dropout_p == 0.0 or query.dim() != 4 or query.dtype is torch.float64:
        return None
    if compiled and attn_mask is not None and attn_mask.requires_grad:
        return None
    if enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    if torch.is_autocast_enabled("cpu"):
        lower = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(lower) for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(lower)
    half = query.dtype in (torch.float16, torch.bfloat16) and value.shape[-1] == query.shape[-1]
    if attn_mask is None and half:
        result: Tensor = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    result = _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the kernel takes it: of numbers, for each head, with aligned rows."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    length = key.shape[-2]
    if length % _ALIGNED:
        mask = F.pad(mask, (0, _ALIGNED - length % _ALIGNED))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)


def to_count(packet: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What torch's registry of FLOPs is asked with.

    Heads that share keys and values count as heads of their own (torch 2.11 refuses to count them).

    Args:
        packet: of an operator.
        args: that it is called with.
    """
    at = _PLACES.get(packet)
    if at is None or args[at].shape[1] == args[at + 1].shape[1]:
        return args
    query, *shared = args[at : at + 3]
    sizes = (torch.Size((other.shape[0], query.shape[1], *other.shape[2:])) for other in shared)
    return (*args[: at + 1], *sizes, *args[at + 3 :])
