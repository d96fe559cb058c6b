"""Graphs of places: which states to make a node of, who is next to whom, and the shortest way to a goal.

A place is where a representation puts a state (..., d); the distance of two places is Euclidean. Decisions that a
rounding error could turn are made in double precision. Nothing that acting calls reads a value of a tensor on a GPU:
how often the loops turn is known when the graph is made.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 1024  # places that are compared with as many others at a time
LIMIT = {"cpu": 2**20, "cuda": 2**26}  # numbers at a time when ways are compared: what a cache holds, or 256 MB
TINY = 1e-10


def apart(a: Tensor, b: Tensor) -> Tensor:
    """Distances of all pairs (n, d), (m, d) -> (n, m), in double precision, by a product of matrices."""
    return torch.cdist(a.double(), b.double(), compute_mode="use_mm_for_euclid_dist")


def nearest(places: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """How far the nearest of the others is (n,), in double precision, and which it is (n,): of several, the first."""
    places = places.double()
    low = places.new_full((len(places),), torch.inf)
    which = torch.zeros(len(places), dtype=torch.long, device=places.device)
    for first in range(0, len(others), BLOCK):
        block = others[first : first + BLOCK].double()
        score, at = torch.addmm(block.square().sum(1), places, block.T, alpha=-2.0).min(1)  # |b|^2 - 2 a'b
        lower = score < low
        low, which = torch.where(lower, score, low), torch.where(lower, at + first, which)
    return (low + places.square().sum(1)).clamp(min=0.0).sqrt(), which


def direction(start: Tensor, end: Tensor) -> Tensor:
    """The unit vector from one place to another (..., d); zero where they are the same."""
    way = end - start
    return way / (torch.linalg.vector_norm(way, dim=-1, keepdim=True) + TINY)


# -------------------------------------------------------------------------------------------- which states are nodes


def efficient(places: Tensor, end_of: Tensor, beyond: Tensor, steps: int, threshold: float) -> Tensor:
    """Which states (N,) lie on a straight way: where they get in `steps` steps is, seen from them, in the direction of
    where they are first that far away (the row `beyond`), up to an angle whose cosine is the threshold.

    The last `steps` states of an episode, of which nobody knows, are taken to be.
    """
    rows = torch.arange(len(places), device=places.device)
    later = rows + steps
    in_time = direction(places, places[torch.minimum(later, end_of)])
    in_distance = direction(places, places[beyond])
    return (later > end_of) | ((in_time * in_distance).sum(-1) >= threshold)


def cluster(places: Tensor, radius: float) -> Tensor:
    """Which cluster each place belongs to (N,), one after the other: that of the nearest seed there is by then, and
    where none is within the radius, one of its own, whose seed it is.

    As if done one by one: a block of places is compared with all earlier seeds at once, and a seed that it brings forth
    with those that come after it.
    """
    seeds = places[:0].double()
    found = []
    for block in places.double().split(BLOCK):
        away, owner = nearest(block, seeds)
        born: list[int] = []
        while bool((far := away > radius).any()):
            first = int(far.byte().argmax())
            distance = torch.linalg.vector_norm(block - block[first], dim=-1)
            closer = distance < away
            closer[:first] = False  # those before it did not know of it
            away = torch.where(closer, distance, away)
            owner = torch.where(closer, len(seeds) + len(born), owner)
            born.append(first)
        seeds = torch.cat([seeds, block[born]])
        found.append(owner)
    return torch.cat(found)


def centres(places: Tensor, owner: Tensor) -> Tensor:
    """The mean place of each cluster (n, d). Summed on the CPU, in order: a GPU's sums differ from run to run."""
    places, owner = places.double().cpu(), owner.cpu()
    sizes = torch.bincount(owner)
    sums = places.new_zeros(len(sizes), places.shape[1]).index_add_(0, owner, places)
    return (sums / sizes[:, None]).float()


# ----------------------------------------------------------------------------------------------- who is next to whom


def pairs_within(nodes: Tensor, radius: float) -> Tensor:
    """All pairs of different nodes (E, 2), both ways, at a distance of at most the radius."""
    found = []
    for first in range(0, len(nodes), BLOCK):
        pairs = (apart(nodes[first : first + BLOCK], nodes) <= radius).nonzero()
        pairs[:, 0] += first
        found.append(pairs[pairs[:, 0] != pairs[:, 1]])
    return torch.cat(found)


def components(count: int, pairs: Tensor) -> Tensor:
    """For each node the least of those it can reach (n,); pairs go both ways."""
    label = torch.arange(count, device=pairs.device)
    while True:
        lower = label.scatter_reduce(0, pairs[:, 0], label[pairs[:, 1]], "amin")
        lower = lower[lower]  # and that one's, which shortens long chains
        if torch.equal(lower, label):
            return label
        label = lower


def bridges(nodes: Tensor, label: Tensor) -> Tensor:
    """Pairs (b, 2), one way, that join the components: from what node 0 reaches, always to the nearest of the rest."""
    fresh = inside = label == label[0]
    away = torch.full((len(nodes),), torch.inf, dtype=torch.float64, device=nodes.device)
    via = torch.zeros_like(label)
    found = []
    while not bool(inside.all()):
        rows = fresh.nonzero().squeeze(1)
        distance, which = nearest(nodes, nodes[rows])
        closer = distance < away
        away, via = torch.where(closer, distance, away), torch.where(closer, rows[which], via)
        out = away.masked_fill(inside, torch.inf).argmin()
        found.append(torch.stack([via[out], out]))
        fresh = label == label[out]
        inside = inside | fresh
    return torch.stack(found) if found else label.new_zeros(0, 2)


def neighbour_list(nodes: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes next to each (n, k), and how far they are (n, k); infinitely far where there are fewer than k."""
    pairs = torch.unique(pairs, dim=0)  # sorted, too
    count = torch.bincount(pairs[:, 0], minlength=len(nodes))
    place = torch.arange(len(pairs), device=pairs.device) - (count.cumsum(0) - count)[pairs[:, 0]]
    width = max(1, int(count.max()))
    neighbours = pairs.new_zeros(len(nodes), width)
    lengths = torch.full((len(nodes), width), torch.inf, dtype=torch.float32, device=nodes.device)
    neighbours[pairs[:, 0], place] = pairs[:, 1]
    ends = nodes.double()[pairs]  # (E, 2, d)
    lengths[pairs[:, 0], place] = torch.linalg.vector_norm(ends[:, 0] - ends[:, 1], dim=-1).float()
    return neighbours, lengths


# -------------------------------------------------------------------------------------------------------- the graph


def settled(unsettled: Tensor) -> bool:
    """Whether nothing is left to do. Only the CPU looks: on a GPU one would have to wait, and could not capture."""
    return not unsettled.is_cuda and not bool(unsettled.any())


class Graph(nn.Module):
    """Nodes with edges to all within a radius, and to as many others as make it one piece. Empty until it is built;
    what is built is saved and loaded with the weights, whatever its size."""

    nodes: Tensor
    """places (n, d)"""
    neighbours: Tensor
    """(n, k)"""
    lengths: Tensor
    """(n, k), infinite where there is no neighbour"""
    most: Tensor
    """hops that the shortest way between any node and a goal may have, at most: ()"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("nodes", torch.zeros(0, width))
        self.register_buffer("neighbours", torch.zeros(0, 1, dtype=torch.long))
        self.register_buffer("lengths", torch.zeros(0, 1))
        self.register_buffer("most", torch.tensor(0))
        self.hops = 0  # the same number, for loops

    def __len__(self) -> int:
        return len(self.nodes)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, mine in self._buffers.items():
            saved = state.get(prefix + name)
            if saved is not None and mine is not None:  # make room for it
                self._buffers[name] = mine.new_empty(saved.shape)
        super()._load_from_state_dict(state, prefix, *rest)
        self.hops = int(self.most)

    @torch.no_grad()
    def build(self, nodes: Tensor, radius: float) -> None:
        nodes = nodes.to(self.nodes.device)
        pairs = pairs_within(nodes, radius)
        joints = bridges(nodes, components(len(nodes), pairs))
        self.nodes = nodes
        self.neighbours, self.lengths = neighbour_list(nodes, torch.cat([pairs, joints, joints.flip(1)]))
        # Two hops in a row are longer than the radius, or one would do: a way of m hops is longer than floor(m / 2)
        # radii. No two nodes are farther apart than both from node 0 together, and a goal is one hop from a node. Nor
        # does a shortest way pass a node twice.
        first = self.lengths.new_full((1, len(nodes)), torch.inf)
        first[0, 0] = 0.0
        distance = self._relax(first, torch.zeros_like(first, dtype=torch.long), 64)[0]
        while not torch.equal(first, distance):
            first, distance = distance, self._relax(distance, torch.zeros_like(first, dtype=torch.long), 64)[0]
        self.hops = min(2 * math.ceil(2.0 * float(distance.max()) / radius) + 2, len(nodes))
        self.most = torch.tensor(self.hops, device=nodes.device)

    def _relax(self, distance: Tensor, following: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
        """Bellman and Ford's: in each round every node asks its neighbours. Who comes next changes only where that is
        strictly nearer, so that ways of no length do not become circles. (m, n), (m, n) -> the same."""
        distance, following = distance.T.contiguous(), following.T  # (n, m): what a neighbour knows lies together
        size = max(1, LIMIT[distance.device.type] // (self.lengths.shape[1] * distance.shape[1]))
        blocks = list(zip(self.neighbours.split(size), self.lengths[..., None].split(size)))
        for _ in range(rounds):
            found = [
                (distance.index_select(0, who.flatten()).unflatten(0, who.shape) + far).min(1) for who, far in blocks
            ]
            best, which = (torch.cat(parts) for parts in zip(*found))  # (n, m)
            nearer = best < distance
            if settled(nearer):
                break
            distance = torch.where(nearer, best, distance)
            following = torch.where(nearer, self.neighbours.gather(1, which), following)
        return distance.T, following.T

    # ---------------------------------------------------------------------------------------------------- acting

    def away(self, places: Tensor) -> Tensor:
        """From places (m, d) to all nodes (m, n); each pair by itself, so that it is the same alone and in a batch."""
        return torch.cdist(places, self.nodes, compute_mode="donot_use_mm_for_euclid_dist")

    def routes(self, goals: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        """From each node to goals (m, d), which are joined to the nodes nearer than the radius, or than 1.2 times the
        nearest: lengths of the shortest ways (m, n), and who comes next (m, n + 1), n being the goal itself."""
        direct = self.away(goals)
        reach = (1.2 * direct.amin(1, keepdim=True)).clamp(min=radius)
        distance = torch.where(direct < reach, direct, torch.inf)
        goal = torch.full((len(goals), len(self) + 1), len(self), device=goals.device)
        # One hop is there already.
        distance, following = self._relax(distance, goal[:, 1:], self.hops)
        return distance, torch.cat([following, goal[:, :1]], dim=1)

    def farthest(self, start: Tensor, following: Tensor, within: Tensor) -> Tensor:
        """On the ways from these nodes (m,) to the goal, the last that is within reach; the start where none is.
        within: (m, n + 1), of all nodes and of the goal."""
        at, best = start, start
        for _ in range(self.hops):
            at = following.gather(1, at[:, None]).squeeze(1)
            best = torch.where(within.gather(1, at[:, None]).squeeze(1), at, best)
            if settled(at != len(self)):
                break
        return best
