"""Minimum vertex cuts: the cheapest values that every way from the sources to the sinks passes.

Every value is an edge of a network, from its "in" to its "out", whose capacity is its price; all other edges
are unlimited. A maximum flow by shortest augmenting paths (Edmonds and Karp) shows the cuts of least price.
The nearest to the sinks and the nearest to the sources do not depend on which maximum flow was found.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class Cuts(NamedTuple):
    """Two minimum cuts, in the order of the prices."""

    latest: list[Any]  # nearest to the sinks
    earliest: list[Any]  # nearest to the sources


def minimum_cuts(
    prices: Mapping[Any, int],
    edges: Iterable[tuple[Any, Any]],
    sources: Iterable[Any],
    sinks: Iterable[Any],
) -> Cuts:
    """The sets of vertices of least total price that separate the sources from the sinks.

    Args:
        prices: every vertex with its price; sources and sinks may be part of a cut too.
        edges: from a vertex to one computed from it.
        sources: where ways begin.
        sinks: where they end.

    Examples:
        >>> minimum_cuts({"a": 3, "b": 2, "c": 2}, [("a", "b"), ("b", "c")], ["a"], ["c"])
        Cuts(latest=['c'], earliest=['b'])
    """
    unlimited = sum(prices.values()) + 1
    room: dict[Any, dict[Any, int]] = defaultdict(dict)

    def connect(start, end, capacity):
        room[start][end] = capacity
        room[end].setdefault(start, 0)

    for vertex, price in prices.items():
        connect(("in", vertex), ("out", vertex), price)
    for start, end in edges:
        connect(("out", start), ("in", end), unlimited)
    for source in sources:
        connect("source", ("in", source), unlimited)
    for sink in sinks:
        connect(("out", sink), "sink", unlimited)
    _saturate(room)
    before = _reach(room, "source", lambda start, end: room[start][end])
    after = _reach(room, "sink", lambda start, end: room[end][start])
    return Cuts(
        latest=[v for v in prices if ("out", v) in after and ("in", v) not in after],
        earliest=[v for v in prices if ("in", v) in before and ("out", v) not in before],
    )


def _saturate(room: dict[Any, dict[Any, int]]) -> None:
    """Fill the network with a maximum flow; `room` is left with what is free."""
    while "sink" in (parents := _reach(room, "source", lambda start, end: room[start][end])):
        path, node = [], "sink"
        while node != "source":
            path.append((parents[node], node))
            node = parents[node]
        flow = min(room[start][end] for start, end in path)
        for start, end in path:
            room[start][end] -= flow
            room[end][start] += flow


def _reach(room: Mapping, start, space: Callable[[Any, Any], int]) -> dict[Any, Any]:
    """Breadth first: the nodes reached from `start` where there is space, and where each was reached from."""
    parents, queue = {start: None}, deque([start])
    while queue:
        node = queue.popleft()
        for other in room[node]:
            if other not in parents and space(node, other) > 0:
                parents[other] = node
                queue.append(other)
    return parents
