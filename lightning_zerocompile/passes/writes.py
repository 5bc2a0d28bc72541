"""Dynamo's graph: a write to a parameter inside a compiled region is an error, not a silent loss.

In a graph a gathered value is a temporary: `weight.mul_(2)` would change that temporary and nothing else.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_VIEWS = {"detach", "view", "reshape", "t", "transpose", "permute", "narrow", "select", "unsqueeze", "squeeze", "chunk",
          "split", "flatten", "expand", "view_as", "unbind", "swapaxes", "movedim", "data"}  # fmt: skip
_IN_PLACE_FUNCTIONS = {
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.imatmul,
    operator.setitem,
}


def _name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _is_gather(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (
        torch.ops.zerocompile.gather,
        torch.ops.zerocompile.gather.default,
    )


def _writes(node: fx.Node) -> bool:
    name = _name(node)
    in_place_name = name.endswith("_") and not name.endswith("__")
    return node.target in _IN_PLACE_FUNCTIONS or in_place_name or node.target is torch.Tensor.set_


def _written(node: fx.Node) -> list[Any]:
    """What the node writes to in place."""
    written: list[Any] = [node.kwargs.get("out")]
    if _writes(node) and node.args:
        first = node.args[0]
        written += first if isinstance(first, list | tuple) else [first]  # torch._foreach_mul_ takes lists
    if _name(node) in ("embedding", "embedding_bag"):
        arguments = dict(zip(("input", "weight", "", "max_norm"), node.args, strict=False)) | node.kwargs
        if arguments.get("max_norm") is not None:
            written.append(arguments.get("weight"))
    return written


def reject_writes(graph: fx.Graph) -> None:
    """Raises if the graph writes in place to a parameter, or to a view of one.

    Raises:
        RuntimeError: names the parameter's shape, the operation and the line of the user's code.
    """
    derived: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_gather(node):
            derived.add(node)
            continue
        if node.op not in ("call_function", "call_method"):
            continue
        if any(isinstance(target, fx.Node) and target in derived for target in _written(node)):
            where = (node.meta.get("stack_trace") or "").strip()
            raise RuntimeError(
                f"`{_name(node)}` writes in place to a parameter inside a compiled region; the write would be lost. "
                "Move it out of the module's forward (for example to `on_train_batch_end`, inside "
                "`strategy.full_parameters(module, writeback=True)`), or keep this module out of compilation with "
                f"`torch.compiler.disable`.\n{where}"
            )
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in derived:
            continue
        if node.target is operator.getitem or _name(node).removesuffix("_copy") in _VIEWS or "get_data" in _name(node):
            derived.add(node)
