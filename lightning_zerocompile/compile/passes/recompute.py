"""Joint graph: backward gathers again instead of keeping full weights.

The partitioner would otherwise save a transposed or cast copy of every weight for backward. So ``gather`` and
everything that is computed from nothing but gathers is tagged ``MUST_RECOMPUTE`` (lightning_zerocompile/README.md, rule
3). What must not be computed again is tagged ``MUST_SAVE``. A gradient that depends on nothing but the forward (of a
Function that ignores the gradient that it gets) is still handed over in the backward.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils._pytree import tree_leaves
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
        _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    return len(recomputed)


def _tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta.setdefault("ac_graph_id", 0)


def save_what_is_overwritten(graph: fx.Graph) -> int:
    """Tags, in place, what the forward reads from inputs that it writes to (buffers); returns how many nodes.

    [Note: overwritten inputs] The forward's graph ends with the writes. A backward that computed such a value again
    would read the input's new value: of ``self.count += 1; y = x * self.count`` the count would be one too high (torch
    2.13's partitioner keeps the input, which costs nothing). So the values that are read from it are kept instead.
    """
    written = [node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    known = {node for node in written if isinstance(node, fx.Node) and node.op == "placeholder"}
    in_backward = {node for node in graph.nodes if node.op == "placeholder" and "tangents" in str(node.target)}
    tagged = 0
    for node in graph.nodes if known else ():
        if node.op != "call_function":
            continue
        if not in_backward.isdisjoint(node.all_input_nodes):
            in_backward.add(node)
        elif node.target is not torch.ops.aten.copy_.default and not known.isdisjoint(node.all_input_nodes):
            if isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
                known.add(node)
            elif "recompute" not in node.meta:
                _tag(node, CheckpointPolicy.MUST_SAVE)
                tagged += 1
    return tagged


def save_random(graph: fx.Graph) -> int:
    """Tags, in place, the nodes that draw random numbers, so that backward does not draw anew; returns how many.

    [Note: activation budget] Below a budget of 1 torch's partitioner may recompute anything. It may also recompute
    dropout's mask, and the recomputed mask would be another one. It never recomputes nodes that are ``MUST_SAVE``. Of
    an operator with several results it saves these, unless a checkpoint has tagged them to be computed again.
    """
    tagged = 0
    for node in graph.nodes:
        if node.op != "call_function" or not _draws(node):
            continue
        _tag(node, CheckpointPolicy.MUST_SAVE)
        tagged += 1
        for part in node.users if has_several(node) else ():
            part.meta.pop("recompute", None)
    return tagged


def has_several(node: fx.Node) -> bool:
    """Whether the node has several results, which come in a tuple."""
    return isinstance(node.meta.get("val"), (tuple, list))


def saves_a_tuple(forward: fx.Graph) -> bool:
    """Whether a forward's graph hands a tuple to the backward, which AOTAutograd cannot save.

    torch's partitioner makes such a graph where there is nothing to recompute but what must be saved.
    """
    (values,) = forward.output_node().args
    return any(has_several(value) for value in tree_leaves(values) if isinstance(value, fx.Node))


def _draws(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = (argument.name for argument in node.target._schema.arguments)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p") != 0)  # attention without dropout draws nothing


# at import: the files may change while this process runs their old code
_SOURCE = get_hash_for_files((__file__, merge_reductions.__file__))


class PrepareJointGraph(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """What the partitioner needs: :func:`merge_reductions`, then :func:`tag_recompute`, then
    :func:`save_what_is_overwritten`."""

    def __call__(self, graph: fx.Graph) -> None:
        merge_reductions.merge_reductions(graph)
        tag_recompute(graph)
        save_what_is_overwritten(graph)

    def uuid(self) -> bytes:
        return _SOURCE


class SaveRandom(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """:func:`save_random` as an Inductor pass."""

    def __call__(self, graph: fx.Graph) -> None:
        save_random(graph)

    def uuid(self) -> bytes:
        return _SOURCE
