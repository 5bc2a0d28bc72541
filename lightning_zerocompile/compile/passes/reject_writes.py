"""Dynamo's graph: a write to a parameter inside a compiled region is an error, not a silent loss.

In a graph a gathered value is a temporary: `weight.mul_(2)` would change that temporary and nothing else. Views of it
are recognised by their storage: Dynamo has run each operation on tensors without data, which are kept in
`example_value`.

Where Dynamo has broken a frame, a graph may hand such a temporary to the eager code that follows it (`handed_on`). A
write there would be lost as well, so it is looked for when the region ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from lightning_zerocompile.sharding.master import is_in_place
from lightning_zerocompile.sharding.unsharded import Unsharded


def reject_writes(module: fx.GraphModule) -> None:
    """Raises if the graph, or one inside it, writes in place to a parameter or to a view of one.

    Raises:
        RuntimeError: names the operation and the line of the user's code.
    """
    nodes = [node for inner in module.modules() if isinstance(inner, fx.GraphModule) for node in inner.graph.nodes]
    weights = {storage: _first_version(node) for node in nodes if _is_weight(node) for storage in _storages(node)}
    if not weights:
        return
    for node in nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        for target in tree_leaves(_written(node)):
            if isinstance(target, fx.Node) and weights.keys() & _storages(target):
                _refuse(node)
    for node in nodes:  # written to by an operation that does not declare it
        for value in _tensors(node):
            before = weights.get(_storage(value))
            if before is not None and not value.is_inference() and value._version > before:
                _refuse(node)


_REMEDY = (
    "writes in place to a parameter inside a compiled region; the write would be lost. Move it out of the module's "
    "forward (for example to `on_train_batch_end`, inside `strategy.full_parameters(module, writeback=True)`), or "
    "write in a function with `torch.compiler.disable` that reads the module's attribute itself."
)


@dataclass(frozen=True)
class Handed:
    """A weight, or a view of one, that a graph has handed to eager code.

    Attributes:
        value: the graph's result.
        line: of user code, where it was read.
        version: of ``value`` at the end of the graph; -1: it has none.
        address: of its memory then.
    """

    value: Tensor
    line: str
    version: int
    address: int

    @classmethod
    def of(cls, value: Tensor, line: str) -> Handed:
        return cls(value, line, -1 if value.is_inference() else value._version, value.data_ptr())

    def check(self) -> None:
        """Raises RuntimeError if eager code has written to it, or has set its ``data``."""
        if self.value.data_ptr() != self.address or (self.version >= 0 and self.value._version != self.version):
            raise RuntimeError(f"Eager code after a graph break {_REMEDY} The parameter was read here:\n{self.line}")


def handed_on(module: fx.GraphModule) -> dict[int, str]:
    """Which of the graph's results are parameters that it has gathered, or views of these: the lines that read them."""
    gathers = [node for node in module.graph.nodes if node.op == "call_function" and _is_weight(node)]
    lines = {storage: _line(node) for node in gathers for storage in _storages(node)}
    results = next(node for node in module.graph.nodes if node.op == "output").args[0] if lines else ()
    found = {}
    for place, result in enumerate(results if isinstance(results, (tuple, list)) else ()):
        shared = lines.keys() & _storages(result) if isinstance(result, fx.Node) else set()
        if shared:
            found[place] = lines[shared.pop()]
    return found


def takes_weights(module: fx.GraphModule) -> bool:
    """Whether the graph takes a parameter that eager code between two of a frame's graphs has read from a module."""
    return any(_is_weight(node) for node in module.graph.nodes if node.op == "placeholder")


def _line(node: fx.Node) -> str:
    return (node.meta.get("stack_trace") or "").strip()


def _refuse(node: fx.Node) -> None:
    raise RuntimeError(f"`{_name(node)}` {_REMEDY}\n{_line(node)}")


def _is_weight(node: fx.Node) -> bool:
    """Whether the graph gathers it, or takes it as an argument that eager code has read from a module."""
    if node.op == "placeholder":
        return isinstance(_argument(node), Unsharded)
    return node.op == "call_function" and node.target in (
        torch.ops.zerocompile.gather,
        torch.ops.zerocompile.gather.default,
    )


def _argument(node: fx.Node) -> object:
    """What Dynamo's graph was traced with, for a ``placeholder`` node; None: it does not say."""
    return getattr(node.meta.get("grapharg"), "example", None)


def _first_version(node: fx.Node) -> int:
    """The version that a weight has at the graph's beginning: an argument may have been written to before."""
    argument = _argument(node)
    return int(argument._version) if isinstance(argument, Unsharded) and not argument.is_inference() else 0


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    return (_unwrapped(value) for value in tree_leaves(node.meta.get("example_value")) if isinstance(value, Tensor))


def _unwrapped(value: Tensor) -> Tensor:
    """The tensor that a transform (``torch.vmap`` inside the region) has wrapped: the wrapper has no storage."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata if value.layout == torch.strided else 0


def _storages(node: fx.Node) -> set[int]:
    return {_storage(value) for value in _tensors(node)}


def _name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _written(node: fx.Node) -> list[Any]:
    """The arguments to which the node writes in place."""
    name = _name(node)
    written: list[Any] = [node.kwargs.get("out")]
    if node.args and (is_in_place(name) or node.kwargs.get("inplace")):
        written.append(node.args[0])  # torch._foreach_mul_ takes lists
    if name in ("embedding", "embedding_bag"):
        arguments = dict(zip(("input", "weight", "", "max_norm"), node.args, strict=False)) | node.kwargs
        if arguments.get("max_norm") is not None:
            written.append(arguments.get("weight"))
    for schema in _schemas(node.target):
        for position, argument in enumerate(schema.arguments):
            if argument.is_write:
                written += [node.kwargs.get(argument.name), *node.args[position : position + 1]]
    return written


def _schemas(target: Any) -> list[Any]:
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, overload)._schema for overload in target.overloads()]  # type: ignore[no-untyped-call]
    return []
