"""Joint graph: backward gathers again instead of keeping full weights.

The partitioner would otherwise save a transposed or cast copy of every weight for backward. So ``gather`` and
everything that is computed from nothing but gathers is tagged ``MUST_RECOMPUTE`` (lightning_zerocompile/README.md, rule
3). A gradient that depends on nothing but the forward (of a Function that ignores the gradient that it gets) is still
handed over in the backward.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zerocompile.compile.passes import merge_reductions

TRAINING = "zerocompile_training"  # in node.meta: this gather comes from a graph that has a backward


def tag_recompute(graph: fx.Graph) -> int:
    """Tags in place; returns how many nodes were tagged."""
    sources: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        is_gather = node.target in (torch.ops.zerocompile.gather.default, torch.ops.zerocompile.gather_cast.default)
        is_scale = node.target is torch.ops.zerocompile.float8_scale.default
        if is_gather:
            node.meta[TRAINING] = True
        elif node.target is torch.ops.zerocompile.reduce_grad.default:
            node.meta["partitioner_tag"] = "must_be_in_backward"
        if is_gather or is_scale:
            sources.append(node)
    return tag_what_follows(graph, sources)


def tag_what_follows(graph: fx.Graph, sources: Collection[fx.Node]) -> int:
    """Tags, in place, the sources and what is computed from nothing but these; returns how many nodes were tagged.

    An input of the graph is a source that needs no tag.
    """
    calls = [source for source in sources if source.op == "call_function"]
    recomputed = [*calls, *merge_reductions.computed_from(graph, sources)]
    for node in recomputed:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta.setdefault("ac_graph_id", 0)
    return len(recomputed)


def save_random(graph: fx.Graph) -> int:
    """Tags, in place, the nodes that draw random numbers, so that backward does not draw anew; returns how many.

    [Note: activation budget] Below a budget of 1 torch's partitioner may recompute anything. It may also recompute
    dropout's mask, and the recomputed mask would be another one. It never recomputes nodes that are ``MUST_SAVE``.
    """
    tagged = 0
    for node in graph.nodes:
        if node.op == "call_function" and _draws(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta.setdefault("ac_graph_id", 0)
            tagged += 1
    return tagged


def _draws(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = (argument.name for argument in node.target._schema.arguments)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p") != 0)  # attention without dropout draws nothing


# at import: the files may change while this process runs their old code
_SOURCE = get_hash_for_files((__file__, merge_reductions.__file__))


class PrepareJointGraph(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """:func:`merge_reductions` and :func:`tag_recompute` in their order: what the partitioner needs."""

    def __call__(self, graph: fx.Graph) -> None:
        merge_reductions.merge_reductions(graph)
        tag_recompute(graph)

    def uuid(self) -> bytes:
        return _SOURCE


class SaveRandom(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """:func:`save_random` as an Inductor pass."""

    def __call__(self, graph: fx.Graph) -> None:
        save_random(graph)

    def uuid(self) -> bytes:
        return _SOURCE
