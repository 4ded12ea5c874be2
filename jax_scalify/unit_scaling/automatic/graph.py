"""The undirected graph of a program's groups, and its cut-edges.

Source: Blake et al., *Unit Scaling* (2023), section 4.2 and theorem 5.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax_scalify.unit_scaling.automatic.groups import Group
from jax_scalify.unit_scaling.automatic.program import Op, Scope, Value

Node = Any  # a Value (an argument, or an input of a body), a Group, or SINK
SINK = "results"
Carries = Callable[[Op], list[tuple[Value, Value]]]


@dataclasses.dataclass(eq=False)
class Edge:
    """From where a value is made to where it is used.

    `user` and `slot` say where a factor of the backward pass can be inserted: at an operand of a
    group, or of the equation of a body. There is none on the way from one step of a loop to the
    next, nor at the results.
    """

    start: Node
    end: Node
    user: Group | None = None
    slot: int = 0
    is_cut: bool = False


@dataclasses.dataclass(eq=False)
class Graph:
    """Edges, and the nodes that make the values."""

    edges: list[Edge] = dataclasses.field(default_factory=list)
    makers: dict[Value, Node] = dataclasses.field(default_factory=dict)
    around: dict[Node, list[Edge]] = dataclasses.field(default_factory=dict)

    def connect(self, value: Value, end: Node, user: Group | None = None, slot: int = 0) -> None:
        """Add an edge from where a value is made, if it may have a gradient."""
        if value.is_known:
            return
        edge = Edge(self.makers.setdefault(value, value), end, user, slot)
        self.edges.append(edge)
        for node in (edge.start, edge.end):
            self.around.setdefault(node, []).append(edge)

    def edge_of(self, group: Group, slot: int) -> Edge:
        """Return the edge at an operand of a group."""
        return next(
            e for e in self.around[self._end(group, slot)] if e.user is group and e.slot == slot
        )

    def _end(self, group: Group, slot: int) -> Node:
        return group if group.root.body is None else _body_input(group, slot)

    def branch(self, group: Group) -> list[Edge] | None:
        """Return the edges on which the branch of a residual sum starts.

        None if the branch is connected to the rest by more than these and the edge at its end:
        its gradients may not have a factor of their own then.
        """
        last = self.edge_of(group, group.branch)
        split = self.makers.get(group.split, group.split) if group.split is not None else None
        seen, pending, starts = set(), [last.start], []
        while pending:
            node = pending.pop()
            if node is group or node is split or node == SINK:
                return None
            if node in seen:
                continue
            seen.add(node)
            for edge in self.around[node]:
                if edge is last:
                    continue
                if edge.start is split:
                    starts.append(edge)
                else:
                    pending += [edge.start, edge.end]
        return starts if all(edge.user is not None for edge in starts) else None


def _body_input(group: Group, slot: int) -> Value:
    return body_pairs(group.root)[slot][1]


def body_pairs(op: Op) -> list[tuple[Value, Value]]:
    """Return the operands of a body that may have a gradient, with the body's inputs."""
    assert op.body is not None
    return [(x, i) for x, i in zip(op.inputs, op.body.inputs, strict=True) if not x.is_known]


def build(
    scope: Scope, groups: dict[Scope, list[Group]], results: Sequence[Value], carries: Carries
) -> Graph:
    """Return the graph of a program, in which `results` are connected with each other.

    Args:
        scope: the program.
        groups: of each scope.
        results: that gradients are taken of at the same time.
        carries: returns of the equation of a scan the pairs of inputs and outputs of its body
            that are the same value in the next step.
    """
    graph = Graph()
    _add_scope(graph, scope, groups, carries)
    for value in results:
        graph.connect(value, SINK)
    for edge in _bridges(graph):
        edge.is_cut = True
    return graph


def _add_scope(
    graph: Graph, scope: Scope, groups: dict[Scope, list[Group]], carries: Carries
) -> None:
    for group in groups[scope]:
        if group.root.body is None:
            for slot, value in enumerate(group.operands):
                graph.connect(value, group, group, slot)
            graph.makers.update(dict.fromkeys(group.outputs, group))
            continue
        body = group.root.body
        for slot, (value, inside) in enumerate(body_pairs(group.root)):
            graph.connect(value, inside, group, slot)
        _add_scope(graph, body, groups, carries)
        for value, inside in zip(group.outputs, body.outputs, strict=True):
            if not inside.is_known:
                graph.makers[value] = graph.makers.setdefault(inside, inside)
        for first, last in carries(group.root):
            graph.connect(last, first)


def _bridges(graph: Graph) -> list[Edge]:
    """Edges without which a part of the graph is not connected (Tarjan, without recursion)."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    found: list[Edge] = []
    for start in graph.around:
        if start in order:
            continue
        order[start] = low[start] = len(order)
        stack: list[tuple[Node, Edge | None, Any]] = [(start, None, iter(graph.around[start]))]
        while stack:
            node, via, edges = stack[-1]
            edge = next(edges, None)
            if edge is None:
                stack.pop()
                if via is not None:
                    parent = stack[-1][0]
                    low[parent] = min(low[parent], low[node])
                    if low[node] > order[parent]:
                        found.append(via)
            elif edge is not via:
                other = edge.end if edge.start is node else edge.start
                if other in order:
                    low[node] = min(low[node], order[other])
                else:
                    order[other] = low[other] = len(order)
                    stack.append((other, edge, iter(graph.around[other])))
    return found
