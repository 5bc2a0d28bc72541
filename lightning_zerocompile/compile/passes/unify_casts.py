"""Dynamo's graph: a parameter that is also read in full is asked for in full only, and cast in the graph.

Eager code gathers for every read, a graph only for the values that it computes with. A rank that compiles and a rank
that does not must ask for the same, so a read whose value is dropped later counts here, too (see [Note: casting layers]
in sharding/autocast.py).
"""

from __future__ import annotations

import torch
from torch import fx

from lightning_zerocompile.sharding.float8 import DTYPE


def _is(node: fx.Node, name: str) -> bool:
    packet = getattr(torch.ops.zerocompile, name)
    return node.op == "call_function" and node.target in (packet, packet.default)


def _scales(node: fx.Node) -> bool:
    """Whether it reads a value as float8: eager code never does, so there is nothing to be alike."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    return source.meta["example_value"].dtype is DTYPE


def unify_casts(module: fx.GraphModule) -> None:
    """Replaces the casting reads of parameters that are also read in full by casts in the graph; in place."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule) and _unify_casts(inner.graph):
            inner.recompile()


def _unify_casts(graph: fx.Graph) -> bool:
    full = {node.args[1]: node for node in graph.nodes if _is(node, "gather")}
    casting = [node for node in graph.nodes if _is(node, "gather_cast") and node.args[1] in full and not _scales(node)]
    for node in casting:
        source: fx.Node = node.args[0]
        read = full[node.args[1]]
        with graph.inserting_before(node):
            value = graph.call_function(read.target, read.args)
            value.meta = dict(read.meta)
            cast = graph.call_method("to", (value, source.meta["example_value"].dtype))
            cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast)
        graph.erase_node(node)
    return bool(casting)
