"""Dynamo's graph: regions inside it (``torch.compiler.nested_compile_region``) become a part of it.

A parameter that such a region reads would be gathered in a graph of its own. Our other passes work on one graph: they
would not recompute that gather in the backward, nor give its unit a place. A region saves compilations of equal layers,
which blocks do here.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import fx


def inline_regions(module: fx.GraphModule) -> None:
    """Puts the nodes of each region in the place of its call."""
    calls: list[Any] = [n for n in module.graph.nodes if n.target is torch.ops.higher_order.invoke_subgraph]
    for call in calls:
        region, _, *operands = call.args
        results = _copy(module, call, attrgetter(region.target)(module), operands)
        for result in list(call.users):  # each takes one of several
            result.replace_all_uses_with(results[result.args[1]])
            module.graph.erase_node(result)
        module.graph.erase_node(call)
        if not region.users:
            module.graph.erase_node(region)
    if calls:
        module.recompile()


def _copy(module: fx.GraphModule, call: fx.Node, region: fx.GraphModule, operands: list[Any]) -> Any:
    """Copies a region's nodes to before ``call``; returns what is its result there."""
    inline_regions(region)
    given = iter(operands)
    values: dict[fx.Node, Any] = {}
    for node in region.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        with module.graph.inserting_before(call):
            values[node] = copied = module.graph.node_copy(node, values.__getitem__)
        if node.op == "get_attr":
            copied.target = f"{copied.name}_of_region"
            setattr(module, copied.target, attrgetter(node.target)(region))
    return fx.map_arg(region.graph.output_node().args[0], values.__getitem__)
