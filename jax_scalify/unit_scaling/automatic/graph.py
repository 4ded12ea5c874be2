"""The undirected graph of a program's groups, and its cut-edges.

Source: Blake et al., *Unit Scaling* (2023), section 5.1 and theorem 5.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_scalify.unit_scaling.automatic.groups import Group
from jax_scalify.unit_scaling.automatic.program import Scope, Value

Node = Any  # a Value (an argument, or an input of a body), a Group, or SINK
SINK = "results"


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
        return _entered(group, slot)[0] if group.root.bodies else group

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


def _entered(group: Group, slot: int) -> Sequence[Node]:
    """What an operand is in each body; the group itself if it is not taken there."""
    return group.root.passed[slot][1] or [group]


def build(scope: Scope, groups: dict[Scope, list[Group]], results: Sequence[Value]) -> Graph:
    """Return the graph of a program, in which `results` are connected with each other.

    Args:
        scope: the program.
        groups: of each scope.
        results: that gradients are taken of at the same time.
    """
    graph = Graph()
    _add_scope(graph, scope, groups)
    for value in results:
        graph.connect(value, SINK)
    for edge in _bridges(graph):
        edge.is_cut = True
    return graph


def _add_scope(graph: Graph, scope: Scope, groups: dict[Scope, list[Group]]) -> None:
    for group in groups[scope]:
        if group.root.bodies:
            _add_bodies(graph, group, groups)
            continue
        for slot, value in enumerate(group.operands):
            graph.connect(value, group, group, slot)
        graph.makers.update(dict.fromkeys(group.outputs, group))


def _add_bodies(graph: Graph, group: Group, groups: dict[Scope, list[Group]]) -> None:
    """Add the bodies of an equation; branches have the same inputs and meet at their results."""
    for slot, value in enumerate(group.operands):
        first, *others = _entered(group, slot)
        graph.connect(value, first, group, slot)
        graph.makers.update(dict.fromkeys(others, first))
    bodies = group.root.bodies
    for body in bodies:
        _add_scope(graph, body, groups)
    for value, *insides in zip(group.outputs, *(b.outputs for b in bodies), strict=True):
        if len(insides) > 1:
            for inside in insides:
                graph.connect(inside, value)
        elif not insides[0].is_known:
            graph.makers[value] = graph.makers.setdefault(insides[0], insides[0])
    for first, last in group.root.carries:
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
