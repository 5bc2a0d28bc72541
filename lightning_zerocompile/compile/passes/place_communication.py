"""Forward and backward graph: the traced operators become the runtime's marks.

``gather``       -> ``gather_unit`` ("needed from here"), ``release_`` ("not needed any more")     [lifetime: one use]
                    (``gather_cast`` too: its source has the dtype of the cast)
                 -> the resident value itself, after ``wait_``                                     [lifetime: one step]
                 -> the same, and ``release_``                   [one use, in memory with an address that graphs record]
``reduce_grad``  -> ``reduce_unit_`` ("these gradients are here"), ``reduce_fence_`` ("not overwritten before here")

Each call costs the host some microseconds. So small values share a call with a neighbour (in a graph that is not one
region up to ``unit_bytes``, as consecutive units are joined there), and a single parameter has overloads without lists.

[Note: memory of shared buffers] Inductor plans memory by what it sees in the graph. It does not see that a gathered
value is shared with the runtime and with other graphs, nor that a gradient is read by a collective that runs on. So
each of them is an argument, declared mutable, of an operator after its last use: up to that operator Inductor neither
reuses nor overwrites its memory. A region's values and gradients are such arguments at its end. A graph that is not one
region gives them up earlier, while the runtime may still share them. Such a graph is compiled without reuse of buffers
(``allow_buffer_reuse``), so the memory that it gives up is freed, not written to. Only the memory of a gradient that
the graph itself reads, too, is kept until the end: Inductor may turn its last reader into one that works in place. A
gradient that others may hold as well, since the graph returns it or was given it, is handed over as a copy, as
AccumulateGrad does.

The pass depends on nothing but the graph and its own configuration: no rank, no identity (identities are the handles'
values), no communication. So a compile cache that ranks share always holds the right graph.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from lightning_zerocompile.compile.passes import merge_reductions
from lightning_zerocompile.compile.passes.recompute import TRAINING
from lightning_zerocompile.runtime.ops import flatten

_SMALL = 2**20  # bytes: a smaller value shares a call with a neighbour of any size

# at import: the files may change while this process runs their old code
_SOURCE = get_hash_for_files((__file__, merge_reductions.__file__))


def _output(graph: fx.Graph) -> fx.Node:
    return graph.output_node()


def _shape(node: fx.Node) -> list[Any]:
    return list(node.meta["val"].shape)


def _is_resident(gather: fx.Node) -> bool:
    """Whether the gather's source is the full value itself (lifetime: one step), or will be (a fixed place)."""
    source: Any = gather.args[0]
    size: Any = gather.args[2]
    return _shape(source) == list(size)


def _returns_alias(node: Any) -> bool:
    if node.target is operator.getitem:  # one of several views, such as those of a split
        return _returns_alias(node.args[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _aliases(node: fx.Node) -> set[fx.Node]:
    """The node and every view of it."""
    found, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user not in found and _returns_alias(user):
                found.add(user)
                stack.append(user)
    return found


def _readers(node: fx.Node) -> set[fx.Node]:
    """The nodes that use the node or a view of it."""
    aliases = _aliases(node)
    return {user for alias in aliases for user in alias.users} - aliases


def _base(node: Any) -> fx.Node:
    """What the node is a view of, or itself."""
    while _returns_alias(node):
        node = node.all_input_nodes[0]
    return node  # type: ignore[no-any-return]


def _call(graph: fx.Graph, operation: Any, tensors: list[Any], handles: list[Any], *args: bool) -> None:
    """The operator, by its overload for one parameter if there is one."""
    if len(tensors) == 1:
        node = graph.call_function(operation.one, (tensors[0], handles[0], *args))
    else:
        node = graph.call_function(operation.default, (tensors, handles, *args))
    node.meta["val"] = None


class PlaceCommunication(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """The pass. ``regional``: the graph is one region, whose parameters are all gathered when it starts and whose
    gradients are handed over when it ends; otherwise parameters are gathered at their first use and gradients
    are handed over where they are produced, up to ``unit_bytes`` at once. ``releases``: values that the graph waits for
    may live for one use, see [Note: fixed places]."""

    def __init__(self, regional: bool, unit_bytes: int = 1, releases: bool = False) -> None:
        self.regional, self.unit_bytes, self.releases = regional, unit_bytes, releases

    def __call__(self, graph: fx.Graph) -> None:
        self._lower_gathers(graph)
        self._lower_reductions(graph)  # after the releases: user code may run in a reduction, see [Note: fixed places]
        graph.lint()

    def uuid(self) -> bytes:
        """All that a graph that Inductor has cached depends on, as far as Inductor's own key does not have it."""
        # [Note: donated buffers] A backward may write to what autograd has saved for it, if nothing else reads that. It
        # may not where it can run twice (`retain_graph=True`, `torch._functorch.config.donated_buffer = False`). torch
        # compiles either code, but its key for the compile cache is the same, so a run would find the other code.
        context = TracingContext.try_get()
        donated = context and context.fw_metadata and context.fw_metadata.bw_donated_idxs
        options = f"regional={self.regional} unit_bytes={self.unit_bytes} releases={self.releases}"
        return _SOURCE + f"{options} donated={donated or []}".encode()

    # ---- gathers ----

    def _lower_gathers(self, graph: fx.Graph) -> None:
        gathers = (torch.ops.zerocompile.gather.default, torch.ops.zerocompile.gather_cast.default)
        by_read: dict[Any, fx.Node] = {}  # by operator and handle: one gather for equal reads of a parameter
        for node in list(graph.nodes):
            if node.target not in gathers:
                continue
            read = node.target, node.args[1]
            if read in by_read:
                node.replace_all_uses_with(by_read[read])
                graph.erase_node(node)
            elif not node.users:
                graph.erase_node(node)
            else:
                by_read[read] = node
        resident = [node for node in by_read.values() if _is_resident(node)]
        used = [node for node in by_read.values() if not _is_resident(node)]
        _copy_what_is_returned(graph, list(by_read.values()))
        used, resident = _by_first_use(graph, used), _by_first_use(graph, resident)
        # a backward waits for all of them at once: its forward has waited for them long before
        at_once = self.regional or _is_backward(graph)
        limit = max(self.unit_bytes, _SMALL)
        for group in [resident] if at_once else _with_neighbours(graph, resident, used, limit):
            if group:
                sources, handles = _wait(graph, group)
                if self.releases:
                    self._release(graph, sources, handles)
        for group in [used] if self.regional else _with_neighbours(graph, used, [], self.unit_bytes):
            if group:
                self._gather_group(graph, group)

    def _gather_group(self, graph: fx.Graph, group: list[fx.Node]) -> None:
        handles = [g.args[1] for g in group]
        training = any(g.meta.get(TRAINING, False) for g in group)
        with graph.inserting_before(_first_use(graph, group)):
            fulls = _gather(graph, group, training)
        for gather, full in zip(group, fulls, strict=True):
            gather.replace_all_uses_with(full)
            graph.erase_node(gather)
        self._release(graph, fulls, handles)

    def _release(self, graph: fx.Graph, fulls: list[fx.Node], handles: list[Any]) -> None:
        if self.regional:
            with graph.inserting_before(_output(graph)):
                _call(graph, torch.ops.zerocompile.release_, fulls, handles, True)
            return
        users = set[fx.Node]().union(*(_aliases(full) | _readers(full) for full in fulls))
        with graph.inserting_after(max(users, key=_positions(graph).__getitem__)):
            _call(graph, torch.ops.zerocompile.release_, fulls, handles, False)

    # ---- reductions ----

    def _lower_reductions(self, graph: fx.Graph) -> None:
        reductions = [n for n in graph.nodes if n.target is torch.ops.zerocompile.reduce_grad.default]
        if not reductions:
            return
        dummies = _drop_dummies(graph, reductions)
        grads = [(_own(graph, node.args[0], node), node.args[1], node) for node in reductions]  # one for each handle
        if self.regional:
            with graph.inserting_before(_output(graph)):
                _hand_over(graph, [(grad, handle) for grad, handle, _ in grads])
        else:
            self._reduce_where_produced(graph, grads)
        for node in reversed(dummies):
            graph.erase_node(node)
        memory = dict.fromkeys(_base(grad) for grad, _, _ in grads)  # two may be views of one
        kept = [base for base in memory if self.regional or _is_read(base)]
        if kept:
            _fence(graph, kept)

    def _reduce_where_produced(self, graph: fx.Graph, grads: list[tuple[fx.Node, Any, fx.Node]]) -> None:
        meetings = _meetings(graph)
        waiting: list[tuple[fx.Node, Any]] = []  # gradients that will share a call with the next one
        for (grad, handle, anchor), following in itertools.zip_longest(grads, grads[1:]):
            waiting.append((grad, handle))
            size = sum(_bytes(g) for g, _ in waiting)
            enough = following is None or (size >= _SMALL and size + _bytes(following[0]) > self.unit_bytes)
            if enough or meetings[anchor] != meetings[following[2]]:
                with graph.inserting_before(anchor):
                    _hand_over(graph, waiting)
                waiting = []


def _meta(node: fx.Node) -> dict[str, Any]:
    """The entries of ``node.meta`` that describe its value."""
    return {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}


def _bytes(node: fx.Node) -> int:
    """The bytes of the node's value; 0 if its size is not known."""
    nbytes = node.meta["val"].numel() * node.meta["val"].element_size()
    return nbytes if isinstance(nbytes, int) else 0


def _is_backward(graph: fx.Graph) -> bool:
    return any(n.target is torch.ops.zerocompile.reduce_grad.default for n in graph.nodes)


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _first_use(graph: fx.Graph, gathers: list[fx.Node]) -> fx.Node:
    return min((user for g in gathers for user in g.users), key=_positions(graph).__getitem__)


def _by_first_use(graph: fx.Graph, gathers: list[fx.Node]) -> list[fx.Node]:
    position = _positions(graph)
    return sorted(gathers, key=lambda g: min(position[u] for u in g.users))


def _meetings(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many nodes before each node may wait for other ranks.

    A gradient that is ready before such a waiting node must be handed over before it: the other ranks may wait for the
    gradient.
    """
    count, before = 0, {}
    for node in graph.nodes:
        before[node] = count
        schema = getattr(node.target, "_schema", None)
        count += schema is not None and schema.name.startswith(("zerocompile::gather", "_c10d_functional", "c10d"))
    return before


def _with_neighbours(graph: fx.Graph, gathers: list[fx.Node], others: list[fx.Node], limit: int) -> list[list[fx.Node]]:
    """Groups of up to ``limit`` bytes, in the order of use. Small gathers may follow a larger one in its group.

    A group ends at each of ``others``.
    """
    groups: list[list[fx.Node]] = []
    room = -1  # not even for a parameter without elements
    for gather in _by_first_use(graph, gathers + others):
        if gather in others:
            room = -1
        elif _bytes(gather) <= room:
            groups[-1].append(gather)
            room -= _bytes(gather)
        else:
            groups.append([gather])
            room = max(limit - _bytes(gather), min(limit, _SMALL))
    return groups


def _gather(graph: fx.Graph, group: list[fx.Node], training: bool) -> list[fx.Node]:
    sources, handles, sizes = ([g.args[i] for g in group] for i in range(3))
    metas = [_meta(g) for g in group]
    operation = torch.ops.zerocompile.gather_unit
    if len(group) == 1:
        one = graph.call_function(operation.one, (sources[0], handles[0], sizes[0], training))
        one.meta.update(metas[0])
        return [one]
    unit = graph.call_function(operation.default, (sources, handles, flatten(sizes), training))  # type: ignore[arg-type]
    unit.meta["val"] = [meta["val"] for meta in metas]
    fulls = [graph.call_function(operator.getitem, (unit, i)) for i in range(len(group))]
    for full, meta in zip(fulls, metas, strict=True):
        full.meta.update(meta)
    return fulls


def _hand_over(graph: fx.Graph, grads: list[tuple[fx.Node, Any]]) -> None:
    _call(graph, torch.ops.zerocompile.reduce_unit_, [g for g, _ in grads], [h for _, h in grads])


def _is_read(memory: fx.Node) -> bool:
    """Whether the graph itself reads a gradient's memory, in whole or in part."""
    ours = torch.ops.zerocompile.reduce_unit_
    return any(getattr(reader.target, "overloadpacket", None) is not ours for reader in _readers(memory))


def _fence(graph: fx.Graph, memory: list[fx.Node]) -> None:
    with graph.inserting_before(_output(graph)):
        node = graph.call_function(torch.ops.zerocompile.reduce_fence_.default, (memory,))
    node.meta["val"] = None


def _own(graph: fx.Graph, grad: fx.Node, anchor: fx.Node) -> fx.Node:
    """The gradient, or a copy of it, made before ``anchor``, if others than the graph may hold it."""
    base = _base(grad)
    if base.op != "placeholder" and _output(graph) not in _readers(base):
        return grad
    with graph.inserting_before(anchor):
        return _copy(graph, grad)


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta.update(_meta(node))
    return copy


def _wait(graph: fx.Graph, group: list[fx.Node]) -> tuple[list[Any], list[Any]]:
    """Puts the sources in the gathers' place, after a wait for all of them; returns them, and the handles."""
    training = any(g.meta.get(TRAINING, False) for g in group)
    sources, handles = [g.args[0] for g in group], [g.args[1] for g in group]
    with graph.inserting_before(_first_use(graph, group)):
        _call(graph, torch.ops.zerocompile.wait_, sources, handles, training)
    for gather, source in zip(group, sources, strict=True):
        gather.replace_all_uses_with(source)  # type: ignore[arg-type]
        graph.erase_node(gather)
    return sources, handles


def _copy_what_is_returned(graph: fx.Graph, gathers: list[fx.Node]) -> None:
    """A graph that returns a weight, or a view of one, returns a copy: the weight itself is shared."""
    output = _output(graph)
    for gather in gathers:
        for alias in _aliases(gather):
            if output not in alias.users:
                continue
            with graph.inserting_before(output):
                copy = _copy(graph, alias)
            output.replace_input_with(alias, copy)


def _drop_dummies(graph: fx.Graph, reductions: list[fx.Node]) -> list[fx.Node]:
    """Replaces the handles' gradients in the output by None; returns the nodes that compute them, users after uses."""
    order = [*reductions, *merge_reductions.computed_from(graph, reductions)]
    dead = set(order)
    output = _output(graph)
    results = output.args[0]
    visible = output.meta.get("user_visible_output_idxs")  # Inductor has set it before this pass
    if visible is not None:
        output.meta["user_visible_output_idxs"] = [i for i in visible if results[i] not in dead]  # type: ignore
    output.args = (type(results)(None if isinstance(r, fx.Node) and r in dead else r for r in results),)  # type: ignore
    return order
