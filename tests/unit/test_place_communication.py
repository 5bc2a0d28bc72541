"""What the pass calls together, on graphs made by hand."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import fx

from lightning_zerocompile.compile.passes.place_communication import PlaceCommunication
from lightning_zerocompile.runtime import build

BIG, HALF, SMALL = [1024, 1024], [600, 256], [10]  # 4 MiB, 0.6 MiB, 40 bytes in float32


@pytest.fixture(scope="module")
def operators() -> Any:
    build.load()
    return torch.ops.zerocompile


class Graph:
    """A graph of gathers or of gradients, ``[size]`` each, in the order in which they are added."""

    def __init__(self, operators: Any) -> None:
        self.operators, self.graph, self.results = operators, fx.Graph(), list[fx.Node]()
        self.names: dict[fx.Node, str] = {}  # of handles

    def _placeholder(self, name: str, size: list[int]) -> fx.Node:
        calls = [node for node in self.graph.nodes if node.op != "placeholder"]
        with self.graph.inserting_before(calls[0] if calls else None):  # inputs come first
            node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(size, device="meta")
        return node

    def _call(self, target: Any, *args: Any, size: list[int]) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(size, device="meta")
        return node

    def _handle(self, name: str) -> fx.Node:
        handle = self._placeholder(f"handle_{name}", [1])
        self.names[handle] = name
        return handle

    def use(self, name: str, size: list[int], resident: bool = True) -> None:
        source = self._placeholder(f"source_{name}", size if resident else [0])
        gathered = self._call(self.operators.gather.default, source, self._handle(name), size, size=size)
        self.results.append(self._call(torch.ops.aten.relu.default, gathered, size=size))

    def reduce(self, name: str, size: list[int]) -> None:
        value, handle = self._placeholder(f"value_{name}", size), self._handle(name)
        grad = self._call(torch.ops.aten.relu.default, value, size=size)
        self.results.append(self._call(self.operators.reduce_grad.default, grad, handle, size=[1]))

    def communicate(self) -> None:
        value = self._placeholder("value", [4])
        self._call(torch.ops._c10d_functional.all_reduce.default, value, "sum", "group", size=[4])

    def lowered(self, operator: str, unit_bytes: int = 1) -> list[list[str]]:
        """The parameters that each call of ``operator`` names; the graph is sound."""
        self.graph.output(tuple(self.results))
        PlaceCommunication(regional=False, unit_bytes=unit_bytes)(self.graph)
        return self.calls(operator)

    def calls(self, operator: str) -> list[list[str]]:
        calls = [n for n in self.graph.nodes if str(n.target).startswith(f"zerocompile.{operator}.")]
        assert all((str(n.target).endswith(".one")) == isinstance(n.args[1], fx.Node) for n in calls)
        handles = [n.args[1] if isinstance(n.args[1], (list, tuple)) else [n.args[1]] for n in calls]
        return [[self.names[handle] for handle in group] for group in handles]


def test_small_values_are_waited_for_with_what_is_used_before(operators: Any) -> None:
    graph = Graph(operators)
    for name, size in (("a", BIG), ("b", SMALL), ("c", SMALL), ("d", BIG), ("e", HALF), ("f", HALF), ("g", SMALL)):
        graph.use(name, size)
    assert graph.lowered("wait_") == [["a", "b", "c"], ["d", "e"], ["f", "g"]]


def test_up_to_unit_bytes_is_called_together(operators: Any) -> None:
    """Values that live for one use are gathered together, and released after the last use of all of them."""
    for resident, called in ((True, "wait_"), (False, "gather_unit")):
        graph = Graph(operators)
        for name, size in (("a", BIG), ("b", BIG), ("c", SMALL), ("d", BIG), ("e", HALF)):
            graph.use(name, size, resident)
        last_of_b, last_of_d = graph.results[2], graph.results[3]
        assert graph.lowered(called, 9 * 2**20) == [["a", "b", "c"], ["d", "e"]]
    assert graph.calls("release_") == [["a", "b", "c"], ["d", "e"]]
    nodes = list(graph.graph.nodes)
    first, _ = (nodes.index(node) for node in nodes if str(node.target).startswith("zerocompile.release_"))
    assert nodes.index(last_of_b) < first < nodes.index(last_of_d)


def test_values_that_live_for_one_use_are_not_gathered_together_beyond_it(operators: Any) -> None:
    graph = Graph(operators)
    for name, size in (("a", BIG), ("b", SMALL), ("c", BIG), ("d", HALF)):
        graph.use(name, size, resident=False)
    assert graph.lowered("gather_unit", unit_bytes=1) == [["a"], ["b"], ["c"], ["d"]]


def test_gradients_up_to_unit_bytes_are_handed_over_together(operators: Any) -> None:
    sizes = (("a", BIG), ("b", BIG), ("c", BIG), ("d", SMALL), ("e", BIG), ("f", BIG), ("g", BIG))
    for unit_bytes, expected in (
        (8 * 2**20, ["ab", "cd", "ef", "g"]),
        (2**40, ["abcdefg"]),
        (1, [*"abc", "de", *"fg"]),
    ):
        graph = Graph(operators)
        for name, size in sizes:
            graph.reduce(name, size)
        assert graph.lowered("reduce_unit_", unit_bytes) == [list(group) for group in expected]


def test_a_gather_in_between_parts_them(operators: Any) -> None:
    graph = Graph(operators)
    for name, resident in (("a", True), ("b", True), ("c", False), ("d", True)):
        graph.use(name, SMALL, resident)
    assert graph.lowered("wait_") == [["a", "b"], ["d"]]


def test_values_without_elements(operators: Any) -> None:
    graph = Graph(operators)
    for name, size, resident in (("a", [0], True), ("b", SMALL, True), ("c", SMALL, False), ("d", [0, 3], True)):
        graph.use(name, size, resident)
    assert graph.lowered("wait_") == [["a", "b"], ["d"]]


def test_a_backward_waits_once(operators: Any) -> None:
    graph = Graph(operators)
    for name in "abc":
        graph.use(name, BIG)
    graph.reduce("d", BIG)
    assert graph.lowered("wait_") == [["a", "b", "c"]]


def test_small_gradients_are_handed_over_with_the_next(operators: Any) -> None:
    graph = Graph(operators)
    for name, size in (("a", SMALL), ("b", SMALL), ("c", BIG), ("d", HALF), ("e", HALF), ("f", SMALL)):
        graph.reduce(name, size)
    assert graph.lowered("reduce_unit_") == [["a", "b", "c"], ["d", "e"], ["f"]]


def test_no_gradient_is_kept_until_after_a_collective(operators: Any) -> None:
    graph = Graph(operators)
    graph.reduce("a", SMALL)
    graph.reduce("b", SMALL)
    graph.communicate()
    graph.reduce("c", SMALL)
    graph.use("d", BIG, resident=False)
    graph.reduce("e", SMALL)
    assert graph.lowered("reduce_unit_", 2**40) == [["a", "b"], ["c"], ["e"]]


@pytest.mark.parametrize("late", [False, True])
def test_a_fence_names_what_the_graph_reads_itself(operators: Any, late: bool) -> None:
    """Also in part; the last reader might write to it. Nothing else is kept until the end of the graph."""
    graph = Graph(operators)
    for name in "abc":
        graph.reduce(name, BIG)
    (grad,) = graph.results[1].all_input_nodes[:1]
    with nullcontext() if late else graph.graph.inserting_after(grad):
        half = graph._call(torch.ops.aten.slice.Tensor, grad, 0, 0, 512, size=[512, 1024])
    with graph.graph.inserting_after(half):
        graph.results.append(graph._call(torch.ops.aten.relu.default, half, size=[512, 1024]))
    assert graph.lowered("reduce_unit_") == [["a"], ["b"], ["c"]]
    (fence,) = (n for n in graph.graph.nodes if n.target is operators.reduce_fence_.default)
    assert list(fence.args[0]) == [grad]


def test_a_fence_names_the_memory_and_not_a_view_of_it(operators: Any) -> None:
    graph = Graph(operators)
    graph.reduce("a", BIG)
    memory = graph.results[0].all_input_nodes[0]
    with graph.graph.inserting_after(memory):
        seen = graph._call(torch.ops.aten.view_as_complex.default, memory, size=BIG)
    graph.results[0].update_arg(0, seen)
    graph.results.append(graph._call(torch.ops.aten.relu.default, memory, size=BIG))
    graph.lowered("reduce_unit_")
    (fence,) = (n for n in graph.graph.nodes if n.target is operators.reduce_fence_.default)
    assert list(fence.args[0]) == [memory]


@pytest.mark.parametrize("given", [False, True], ids=["returned", "given"])
def test_a_gradient_that_others_may_hold_is_copied(operators: Any, given: bool) -> None:
    graph = Graph(operators)
    graph.reduce("a", BIG)
    graph.reduce("b", BIG)
    grad = graph.results[0].all_input_nodes[0]
    if given:
        graph.results[0].update_arg(0, grad.all_input_nodes[0])
    else:
        graph.results.append(graph._call(torch.ops.aten.permute.default, grad, [1, 0], size=BIG))
    graph.lowered("reduce_unit_")
    calls = [n for n in graph.graph.nodes if n.target is operators.reduce_unit_.one]
    copied = [call.args[0].target is torch.ops.aten.clone.default for call in calls]
    assert copied == [True, False]


def test_what_nobody_else_reads_needs_no_fence(operators: Any) -> None:
    graph = Graph(operators)
    for name in "abc":
        graph.reduce(name, BIG)
    turned = graph._call(torch.ops.aten.permute.default, graph.results[1].all_input_nodes[0], [1, 0], size=BIG)
    graph.results[1].update_arg(0, turned)  # as autograd hands over what a matmul has computed
    turned.append(graph.results[1])
    graph.lowered("reduce_unit_")
    assert not any(n.target is operators.reduce_fence_.default for n in graph.graph.nodes)


def test_a_value_is_released_after_the_last_use_of_its_parts(operators: Any) -> None:
    graph = Graph(operators)
    graph.use("a", BIG, resident=False)
    gathered = graph.results.pop().args[0]
    parts = graph._call(torch.ops.aten.split.Tensor, gathered, 512, size=BIG)
    part = graph._call(operator.getitem, parts, 1, size=[512, 1024])
    use = graph._call(torch.ops.aten.relu.default, part, size=[512, 1024])
    graph.results.append(graph._call(torch.ops.aten.relu.default, use, size=[512, 1024]))
    assert graph.lowered("release_") == [["a"]]
    assert str(use.next.target) == "zerocompile.release_.one"
