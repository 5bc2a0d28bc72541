"""Joint graph: a parameter that the graph uses several times has one gradient, the sum of those of its uses.

[Note: equal gradients] Each use of a parameter has a ``reduce_grad`` of its own, and its result stands for the use's
gradient in a sum that nobody reads. Two uses may have the same gradient: in ``layer(x) + layer(y)`` the layer's bias
has. Then the two calls have equal arguments, and torch's partitioner, which merges equal calls, would make one of them:
half of the gradient would be lost. So the calls are merged into one before that, with the sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx


def merge_reductions(graph: fx.Graph) -> int:
    """Leaves one ``reduce_grad`` for each handle, in place; returns how many are gone."""
    by_handle: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.zerocompile.reduce_grad.default:
            by_handle.setdefault(node.args[1], []).append(node)
    gone = 0
    for handle, nodes in by_handle.items():
        if len(nodes) == 1:
            continue
        last, sums = nodes[-1], computed_from(graph, nodes)
        last.args = (_sum_of_gradients(graph, nodes), handle)
        for node in (*nodes[:-1], *sums):  # the graph's result has the whole sum, which comes after all of them
            node.replace_all_uses_with(last, delete_user_cb=lambda user: user.op == "output")
        for node in (*reversed(sums), *nodes[:-1]):
            graph.erase_node(node)
        gone += len(nodes) - 1
    return gone


def _sum_of_gradients(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    """The sum of the gradients that these ``reduce_grad`` nodes have, before the last of them."""
    total = nodes[0].args[0]
    assert isinstance(total, fx.Node)
    with graph.inserting_before(nodes[-1]):
        for node in nodes[1:]:
            part = node.args[0]
            value = torch.ops.aten.add.Tensor(total.meta["val"], part.meta["val"])  # type: ignore[union-attr]
            total = graph.call_function(torch.ops.aten.add.Tensor, (total, part))
            total.meta["val"] = value
    return total


def computed_from(graph: fx.Graph, nodes: Collection[fx.Node]) -> list[fx.Node]:
    """What is computed from nothing but the results of these nodes, without themselves, in graph order."""
    known, found = set(nodes), []
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and node not in known and inputs and all(i in known for i in inputs):
            known.add(node)
            found.append(node)
    return found
