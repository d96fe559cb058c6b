"""Goal-conditioned values as OGBench's agents have them: doubled MLPs, bilinear critics, networks that lag behind.

Values are kept in full precision whatever the training's: they run to -100 and policies are read off differences of
less than one, which bfloat16's eight bits cannot hold.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.losses import expectile_by, gelu, hl_gauss
from qhyer.nn.mlp import norm_kernel

M = TypeVar("M", bound=nn.Module)


class Ensemble(nn.Module):
    """Several MLPs (nn/mlp.py), each with its own weights, on the same input: one batched product per layer.

    (B, inputs) -> (members, B, outputs). What member i computes is what an `MLP` with its weights would.
    """

    def __init__(self, members: int, inputs: int, hidden: Sequence[int], outputs: int, layer_norm: bool = True) -> None:
        super().__init__()
        widths = [inputs, *hidden, outputs]
        self.weights = nn.ParameterList(torch.empty(members, a, b) for a, b in itertools.pairwise(widths))
        self.biases = nn.ParameterList(torch.zeros(members, 1, b) for b in widths[1:])
        normed = hidden if layer_norm else ()
        self.scales = nn.ParameterList(torch.ones(members, 1, b) for b in normed)
        self.shifts = nn.ParameterList(torch.zeros(members, 1, b) for b in normed)
        for member, weight in itertools.product(range(members), self.weights):
            nn.init.xavier_uniform_(weight[member])  # fans of a member, not of the stack

    def forward(self, *inputs: Tensor) -> Tensor:
        """Inputs (B, d_1), (B, d_2), ... are read side by side."""
        with torch.autocast(inputs[0].device.type, enabled=False):
            first = self.weights[0]
            x = torch.cat([part.to(first.dtype) for part in inputs], dim=-1).expand(len(first), -1, -1)  # (m, B, d)
            fused = norm_kernel(x) if len(self.scales) else None
            for i, (weight, bias) in enumerate(zip(self.weights, self.biases)):
                if fused is not None and i + 1 < len(self.weights):
                    x = fused(torch.bmm(x, weight), bias, self.scales[i], self.shifts[i], 1e-6)
                    continue
                x = torch.baddbmm(bias, x, weight)
                if i + 1 == len(self.weights):
                    break
                x = gelu(x)
                if len(self.scales):
                    x = torch.addcmul(self.shifts[i], F.layer_norm(x, x.shape[-1:], eps=1e-6), self.scales[i])
            return x


class Value(nn.Module):
    """V(s, g) or, with an action, Q(s, g, a): (members, B), one row per member."""

    def __init__(self, members: int, inputs: int, hidden: Sequence[int], layer_norm: bool = True) -> None:
        """inputs: the width of all that is passed, side by side."""
        super().__init__()
        self.net = Ensemble(members, inputs, hidden, 1, layer_norm)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(*inputs).squeeze(-1)


class HistogramValue(nn.Module):
    """V(s, g) or Q(s, g, a) as a histogram: logits (members, B, m) of m equal bins from `low` to `high`."""

    def __init__(
        self, members: int, inputs: int, hidden: Sequence[int], bins: int, low: float, high: float, sigma: float = 0.75
    ) -> None:
        """sigma: standard deviation, in bins, of the Gaussian that stands for a number."""
        super().__init__()
        self.net = Ensemble(members, inputs, hidden, bins)
        edges = torch.linspace(low, high, bins + 1)
        self.std = sigma * (high - low) / bins
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("centres", (edges[1:] + edges[:-1]) / 2, persistent=False)

    edges: Tensor
    centres: Tensor

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(*inputs)

    def mean(self, logits: Tensor) -> Tensor:
        """What histograms (..., m) stand for (...)."""
        return (logits.softmax(-1) * self.centres).sum(-1)

    def histogram(self, y: Tensor) -> Tensor:
        """Numbers (...) as histograms (..., m)."""
        return hl_gauss(y, self.edges, self.std)


class Metric(nn.Module):
    """V_j(s, g) = -|psi_j(s) - psi_j(g)|: a value that is a distance of places, (members, B)."""

    def __init__(self, members: int, inputs: int, hidden: Sequence[int], width: int, layer_norm: bool = True) -> None:
        """width: of a place psi(s)."""
        super().__init__()
        self.net = Ensemble(members, inputs, hidden, width, layer_norm)

    def forward(self, observations: Tensor, goals: Tensor) -> Tensor:
        here, there = self.net(torch.cat([observations, goals])).chunk(2, dim=1)  # (members, B, width)
        # A thousandth at least: the root has no slope at zero.
        return -(here - there).square().sum(-1).clamp(min=1e-6).sqrt()

    def place(self, observations: Tensor) -> Tensor:
        """psi(s) of the first member: (B, width)."""
        return self.net(observations)[0]


def implicit_value_loss(
    name: str,
    value: nn.Module,
    target: nn.Module,
    here: tuple[Tensor, Tensor],
    there: tuple[Tensor, Tensor],
    rewards: Tensor,
    masks: Tensor,
    discount: float,
    tau: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over j of E[L_tau(A, r + gamma V'_j(s', g) - V_j(s, g))], V' the target; and metrics, under this name.

    An upper expectile of one-step backups, the action being whatever the data did: its maximum over actions is one
    over outcomes, too, exact where the world is deterministic. The weight's sign is read off the targets, min_j for s'
    and the mean for s; the error is each value's own. `here` is (s, g), `there` (s', g), the goals as they are or
    represented.
    """
    with torch.no_grad():
        pairs = (torch.cat(both) for both in zip(there, here))
        v_next, v_here = target(*pairs).chunk(2, dim=1)  # (2, B)
        q = rewards + discount * masks * v_next  # (2, B)
        advantage = q.amin(0) - v_here.mean(0)  # (B,); the least q is that of the least V'(s', g)
    v = value(*here)  # (2, B)
    loss = expectile_by(advantage, q - v, tau).sum(0).mean()
    return loss, {f"{name}/loss": loss.detach(), **spread(v, name)}


class Bilinear(nn.Module):
    """f(x, g) = phi(x)' psi(g) / sqrt(d), where x is a state, or a state and an action; several members."""

    def __init__(
        self, members: int, inputs: int, goals: int, hidden: Sequence[int], latent: int, layer_norm: bool = True
    ) -> None:
        super().__init__()
        self.phi = Ensemble(members, inputs, hidden, latent, layer_norm)
        self.psi = Ensemble(members, goals, hidden, latent, layer_norm)
        self.factor = 1.0 / math.sqrt(latent)

    def forward(self, goals: Tensor, *inputs: Tensor) -> Tensor:
        """f(x_i, g_i): (members, B)."""
        return (self.phi(*inputs) * self.psi(goals)).sum(-1) * self.factor

    def table(self, goals: Tensor, *inputs: Tensor) -> Tensor:
        """f(x_i, g_k) for every pair of the batch: (members, B, B)."""
        with torch.autocast(goals.device.type, enabled=False):
            return self.phi(*inputs) * self.factor @ self.psi(goals).mT


def best_of(candidates: Tensor, values: Tensor) -> Tensor:
    """Of candidates (n, N, d) with values (n, N) the best (n, d)."""
    best = values.argmax(1)[:, None, None].expand(-1, 1, candidates.shape[-1])
    return candidates.gather(1, best).squeeze(1)


def spread(v: Tensor, name: str = "value") -> dict[str, Tensor]:
    """Metrics of a value, of all members and samples: where it lies."""
    low, high = v.detach().aminmax()
    return {f"{name}/mean": v.detach().mean(), f"{name}/min": low, f"{name}/max": high}


# ------------------------------------------------------------------------------------------------ target networks


def target_of(network: M) -> M:
    """A copy that no gradient reaches; it starts equal."""
    return copy.deepcopy(network).requires_grad_(False)


def follow(optimizer: torch.optim.Optimizer, target: nn.Module, network: nn.Module, rate: float) -> None:
    """From now on target <- (1 - rate) target + rate network, just before each step of the optimiser.

    Before it, as in OGBench: the target moves towards the weights at which the gradient was taken, not towards those
    that the step makes of them.
    """
    lagging: list[Tensor] = list(target.parameters())
    leading: list[Tensor] = list(network.parameters())

    @torch.no_grad()
    def move(*_: object) -> None:
        torch._foreach_lerp_(lagging, leading, rate)

    optimizer.register_step_pre_hook(move)


@contextlib.contextmanager
def frozen(*networks: nn.Module) -> Iterator[None]:
    """Inside, gradients pass through these networks and not into them: an actor climbs a critic and leaves it be.

    Their parameters are replaced by detached ones, not switched with requires_grad_: under vmap (stack.py) they are no
    leaves, and torch.compile can follow this.
    """
    places = [module._parameters for network in networks for module in network.modules()]
    kept = [dict(place) for place in places]
    try:
        for place in places:
            place.update({name: p.detach() for name, p in place.items() if p is not None})  # type: ignore[misc]
        yield
    finally:
        for place, before in zip(places, kept):
            place.update(before)
