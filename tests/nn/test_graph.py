"""Graphs of places against the slow and obvious: one state after the other, one edge after the other."""

from __future__ import annotations

import heapq
import math

import pytest
import torch
from torch import Tensor

from qhyer import checkpoint
from qhyer.nn import graph as graphs
from qhyer.nn.graph import (
    Graph,
    bridges,
    centres,
    cluster,
    components,
    direction,
    efficient,
    nearest,
    neighbour_list,
    pairs_within,
)


def scattered(count: int, dim: int = 3, seed: int = 0, size: float = 5.0) -> Tensor:
    return size * torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------- slow and obvious


def slow_cluster(places: Tensor, radius: float) -> list[int]:
    seeds: list[Tensor] = []
    found = []
    for place in places.double():
        distances = [float((place - seed).norm()) for seed in seeds]
        if not seeds or min(distances) > radius:
            found.append(len(seeds))
            seeds.append(place)
        else:
            found.append(distances.index(min(distances)))
    return found


def slow_edges(nodes: Tensor, radius: float) -> dict[tuple[int, int], float]:
    """Both ways, with lengths; then components are joined one by one to the first, each by the closest pair."""
    count = len(nodes)
    length = {(i, j): float((nodes[i].double() - nodes[j].double()).norm()) for i in range(count) for j in range(count)}
    edges = {pair: far for pair, far in length.items() if pair[0] != pair[1] and far <= radius}
    main = slow_reach(0, edges)
    while len(main) < count:
        i, j = min(((i, j) for i in main for j in set(range(count)) - main), key=lambda pair: length[pair])
        edges[i, j] = edges[j, i] = length[i, j]
        main = slow_reach(0, edges)
    return edges


def slow_reach(start: int, edges: dict[tuple[int, int], float]) -> set[int]:
    seen, todo = {start}, [start]
    while todo:
        at = todo.pop()
        for i, j in edges:
            if i == at and j not in seen:
                seen.add(j)
                todo.append(j)
    return seen


def dijkstra(count: int, edges: dict[tuple[int, int], float], links: dict[int, float]) -> tuple[list[float], list[int]]:
    """Distances of nodes to a goal that is linked to some of them, and who comes next: `count` is the goal."""
    distance, following = [math.inf] * count, [count] * count
    heap = [(far, node, count) for node, far in links.items()]
    heapq.heapify(heap)
    while heap:
        far, node, after = heapq.heappop(heap)
        if far >= distance[node]:
            continue
        distance[node], following[node] = far, after
        for (i, j), length in edges.items():
            if j == node:
                heapq.heappush(heap, (far + length, i, node))
    return distance, following


def edges_of(graph: Graph) -> dict[tuple[int, int], float]:
    return {
        (i, int(j)): float(length)
        for i in range(len(graph))
        for j, length in zip(graph.neighbours[i], graph.lengths[i])
        if math.isfinite(length)
    }


# ------------------------------------------------------------------------------------------------------------ nodes


def test_direction():
    way = direction(torch.tensor([1.0, 1.0]), torch.tensor([[4.0, 5.0], [1.0, 1.0]]))
    torch.testing.assert_close(way, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


@pytest.mark.parametrize("block", [1, 3, 1024])
def test_nearest_by_hand(monkeypatch, block):
    """Of two at the same distance the first; and none of none."""
    monkeypatch.setattr(graphs, "BLOCK", block)
    distance, which = nearest(torch.tensor([[0.0], [5.0], [9.0]]), torch.tensor([[1.0], [4.0], [6.0], [-1.0], [9.0]]))
    assert distance.tolist() == [1.0, 1.0, 0.0] and which.tolist() == [0, 1, 4]
    assert nearest(torch.zeros(2, 3), torch.zeros(0, 3))[0].tolist() == [math.inf, math.inf]
    places, others = scattered(30) + 100.0, scattered(20, seed=1) + 100.0
    distance, which = nearest(places, others)
    expected = (places[:, None] - others).double().norm(dim=-1).min(1)
    torch.testing.assert_close(distance, expected.values, rtol=1e-9, atol=1e-9)
    assert torch.equal(which, expected.indices)


def test_efficient_by_hand():
    """H = 2. A way that goes on straight is efficient, one that turns back is not, and the last two states are."""
    x = torch.tensor([[0.0, 0], [1, 0], [2, 0], [3, 0], [2, 0], [2, 1], [2, 2]])
    end_of = torch.full((7,), 6)
    beyond = torch.tensor([2, 3, 6, 6, 6, 6, 6])  # first at distance 2, or the last
    # 0: both at (2, 0). 1: both at (3, 0). 2: after two steps back where it was: no direction. 3: two steps later at
    # (2, 1), far away at (2, 2): cosine of (-1, 1) and (-1, 2) is 3 / sqrt(10) = 0.949. 4: both at (2, 2).
    for threshold, third in ((0.94, True), (0.95, False)):
        found = efficient(x, end_of, beyond, 2, threshold)
        assert found.tolist() == [True, True, False, third, True, True, True]


def test_efficient_does_not_look_beyond_the_episode():
    """Two episodes of three rows: only the first row of each is judged, by its own episode's."""
    x = torch.tensor([[0.0], [1.0], [2.0], [0.0], [-1.0], [-2.0]])
    end_of, beyond = torch.tensor([2, 2, 2, 5, 5, 5]), torch.tensor([2, 2, 2, 5, 5, 5])
    assert efficient(x, end_of, beyond, 2, 0.9).all()
    assert efficient(x, end_of, torch.tensor([2, 2, 2, 0, 5, 5]), 2, 0.9).tolist() == [True] * 3 + [False, True, True]


@pytest.mark.parametrize("block", [1, 7, 64, 1024])
@pytest.mark.parametrize("radius", [0.1, 2.0, 4.0, 100.0])
def test_clusters_as_one_by_one(monkeypatch, block, radius):
    monkeypatch.setattr(graphs, "BLOCK", block)
    places = scattered(300)
    assert cluster(places, radius).tolist() == slow_cluster(places, radius)


def test_clusters_on_a_lattice():
    """Where many distances are equal, and equal to the radius, which still counts as within; the older seed wins."""
    places = torch.cartesian_prod(torch.arange(6.0), torch.arange(6.0))
    places = places[torch.randperm(36, generator=torch.Generator().manual_seed(3))]
    assert cluster(places, 2.0).tolist() == slow_cluster(places, 2.0)
    assert cluster(torch.tensor([[0.0], [4.0], [2.0]]), 2.0).tolist() == [0, 1, 0]


def test_a_later_seed_does_not_take_earlier_places(monkeypatch):
    """1.9 joins 0; then 3 is too far from 0 and a seed of its own, nearer to 1.9: which stays; a second 1.9 goes."""
    places = torch.tensor([[0.0], [1.9], [3.0], [1.9]])
    for block in (1, 2, 4):
        monkeypatch.setattr(graphs, "BLOCK", block)
        assert cluster(places, 2.0).tolist() == [0, 0, 1, 1]


def test_centres_are_means():
    owner = torch.tensor([0, 1, 0, 1, 1])
    places = torch.tensor([[0.0, 0], [1, 1], [2, 4], [2, 2], [3, 6]])
    torch.testing.assert_close(centres(places, owner), torch.tensor([[1.0, 2], [2, 3]]))


# ------------------------------------------------------------------------------------------------------------ edges


@pytest.mark.parametrize("block", [5, 2048])
@pytest.mark.parametrize("radius", [0.5, 3.0, 6.0, 50.0])
def test_edges_as_one_by_one(monkeypatch, block, radius):
    """Few, some and all nodes joined by distance; what is left apart, by the shortest bridges."""
    monkeypatch.setattr(graphs, "BLOCK", block)
    nodes = scattered(40, seed=1)
    graph = Graph(3)
    graph.build(nodes, radius)
    expected = slow_edges(nodes, radius)
    found = edges_of(graph)
    assert set(found) == set(expected)
    for pair, length in expected.items():
        assert found[pair] == pytest.approx(length, rel=1e-6)


def test_components_and_bridges_by_hand():
    """On a line: 0 1 2 | 10 11 | 5 | 30. From the first piece to 5, on to 10, and from 11 to 30."""
    nodes = torch.tensor([[0.0], [1], [2], [10], [11], [5], [30]])
    pairs = pairs_within(nodes, 1.0)
    assert sorted(map(tuple, pairs.tolist())) == [(0, 1), (1, 0), (1, 2), (2, 1), (3, 4), (4, 3)]
    label = components(7, pairs)
    assert label.tolist() == [0, 0, 0, 3, 3, 5, 6]
    assert bridges(nodes, label).tolist() == [[2, 5], [5, 3], [4, 6]]
    neighbours, lengths = neighbour_list(nodes, torch.cat([pairs, bridges(nodes, label)]))
    assert neighbours.shape == (7, 2)
    assert lengths[2].tolist() == [1.0, 3.0] and lengths[6].tolist() == [math.inf, math.inf]


def test_a_long_chain_is_one_component():
    """Its numbers run against it, and jump."""
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    pairs = torch.stack([order[:-1], order[1:]], dim=1)
    assert (components(500, torch.cat([pairs, pairs.flip(1)])) == 0).all()
    assert components(3, torch.zeros(0, 2, dtype=torch.long)).tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------------ routes


@pytest.mark.parametrize("radius", [0.5, 3.0, 6.0])
@pytest.mark.parametrize("limit", [1, 2**20])
def test_routes_as_dijkstra(monkeypatch, radius, limit):
    monkeypatch.setitem(graphs.LIMIT, "cpu", limit)  # nodes one at a time, or all at once
    nodes, goals = scattered(60, seed=2), scattered(7, seed=3, size=8.0)
    graph = Graph(3)
    graph.build(nodes, radius)
    distance, following = graph.routes(goals, radius)
    edges = edges_of(graph)
    for goal, far, after in zip(goals, distance, following):
        direct = (nodes - goal).norm(dim=1)
        reach = max(radius, 1.2 * float(direct.min()))
        links = {i: float(d) for i, d in enumerate(direct) if d < reach}
        expected, next_ones = dijkstra(60, edges, links)
        torch.testing.assert_close(far, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert after[:-1].tolist() == next_ones and after[-1] == 60


def test_a_goal_far_from_all_is_joined_to_the_nearest():
    """Nodes at 0, 1, ..., 5; the goal at 15 is 10 from the last, 11 and 12 from two more; less than 12 counts."""
    graph = Graph(1)
    graph.build(torch.arange(6.0)[:, None], 1.0)
    distance, following = graph.routes(torch.tensor([[15.0], [5.0]]), 1.0)
    assert following.tolist()[0] == [1, 2, 3, 4, 6, 6, 6] and distance[0].tolist() == [15, 14, 13, 12, 11, 10]
    # On a node, with H = 1: the one at a distance of exactly one is not joined.
    assert following.tolist()[1] == [1, 2, 3, 4, 5, 6, 6] and distance[1].tolist() == [5, 4, 3, 2, 1, 0]


def test_the_bound_on_hops_is_enough(monkeypatch):
    """Without the early end, which a GPU does not have, the result is the same: all rounds are run, and suffice."""
    monkeypatch.setattr(graphs, "settled", lambda unsettled: False)
    for seed in range(5):
        nodes = scattered(80, dim=2, seed=seed)
        graph = Graph(2)
        graph.build(nodes, 1.5)
        goals = scattered(3, dim=2, seed=seed + 9)
        distance, following = graph.routes(goals, 1.5)
        again, _ = graph._relax(distance, following[:, :-1], 80)
        torch.testing.assert_close(again, distance, rtol=1e-6, atol=0)
        for after in following:
            for start in range(80):
                at, hops = start, 0
                while at != 80:
                    at, hops = int(after[at]), hops + 1
                assert hops <= graph.hops


def test_hops_are_no_more_than_nodes(monkeypatch):
    """One node very far away, that a bridge joins: rounds are counted by nodes, and suffice."""
    monkeypatch.setattr(graphs, "settled", lambda unsettled: False)
    graph = Graph(1)
    graph.build(torch.tensor([[0.0], [4.0], [1e5]]), 8.0)
    assert graph.hops == 3
    distance, following = graph.routes(torch.tensor([[1e5]]), 8.0)
    assert distance.tolist() == [[1e5, 99996.0, 0.0]] and following[0, [0, 1, 2]].tolist() in ([1, 2, 3], [2, 2, 3])
    assert int(graph.farthest(torch.tensor([0]), following, torch.ones(1, 4, dtype=torch.bool))) == 3


def test_nodes_in_one_place_make_no_circle():
    """Pairs of equal nodes, at no distance of each other: every way still ends at the goal."""
    nodes = torch.arange(5.0)[:, None].repeat_interleave(3, 0)
    graph = Graph(1)
    graph.build(nodes, 1.0)
    distance, following = graph.routes(torch.tensor([[4.0]]), 1.0)
    assert distance[0].tolist() == [4.0] * 3 + [3.0] * 3 + [2.0] * 3 + [1.0] * 3 + [0.0] * 3
    at = torch.arange(15)
    for _ in range(graph.hops):
        at = following[0][at]
    assert (at == 15).all()


def test_farthest_by_hand():
    """The way 0 -> 1 -> 2 -> 3 -> goal (4): the last within reach, also beyond one that is not; or the start."""
    graph = Graph(1)
    graph.build(torch.arange(4.0)[:, None], 1.0)
    following = torch.tensor([[1, 2, 3, 4, 4]]).expand(5, -1)
    within = torch.tensor(
        [[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool
    )
    start = torch.tensor([0, 0, 0, 0, 2])
    assert graph.farthest(start, following, within).tolist() == [1, 2, 0, 4, 2]


def test_one_node():
    graph = Graph(2)
    graph.build(torch.zeros(1, 2), 3.0)
    distance, following = graph.routes(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), 3.0)
    assert distance.tolist() == [[5.0], [1.0]] and following.tolist() == [[1, 1], [1, 1]]


# ------------------------------------------------------------------------------------------------------------ saving


def test_saved_and_loaded_whatever_the_size(tmp_path):
    """Into an empty one, into a larger one, and empty into a full one; what is saved passes through a checkpoint."""
    empty, small, large = Graph(3), Graph(3), Graph(3)
    small.build(scattered(10), 3.0)
    large.build(scattered(50), 3.0)
    for i, source in enumerate((small, large, Graph(3))):
        for target in (empty, small, large):
            other = Graph(3)
            other.load_state_dict(target.state_dict())
            path = checkpoint.save(
                tmp_path / f"{i}", 1, {f"graph.{k}": v for k, v in source.state_dict().items()}, {}, {}
            )
            saved = {k.removeprefix("graph."): v for k, v in checkpoint.load(path).agent.items()}
            other.load_state_dict(saved)
            assert len(other) == len(source) and other.hops == source.hops
            assert all(torch.equal(a, b) for a, b in zip(other.buffers(), source.buffers()))
            if len(source):
                goal = torch.ones(1, 3)
                assert all(torch.equal(a, b) for a, b in zip(other.routes(goal, 3.0), source.routes(goal, 3.0)))
