"""Does the critic know anything of binary goals: its nats beside those of guessing, and of counting?

For goals whose coordinates take two values (lamps, buttons), drawn as in training and in nats per goal:

uniform    every pattern is as likely as any other: D log 2.
counted    the entropy of what changes on the way to the goal, counted over the data, whatever state and action. A
           critic that knows less than this knows nothing of its state.
critic     the critic's own. Exact where it gives probabilities (binary_goals=bits). A flow gives a density of goals
           with noise sigma; what a noise of known size costs, D (log sigma + log sqrt(2 pi e)), is taken off, which is
           exact as long as sigma is small beside the distance of the two values.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qhyer.analyses._common import generator, load_critic, load_episodes
from qhyer.analyses.critic import log_density
from qhyer.data import goals
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import chunks
from qhyer.errors import UserError
from qhyer.storage import write_json

COUNTED = 400_000  # goals whose pattern of changes is counted
ASKED = 8192  # goals the critic is asked about


def changes(episodes: Episodes, rows: Tensor, goal_rows: Tensor) -> Tensor:
    """The pattern (n,) of coordinates that differ between two rows, as an integer."""
    at = list(episodes.goal_indices)
    middle = (episodes.observations[:, at].amin(0) + episodes.observations[:, at].amax(0)) / 2
    changed = (episodes.observations[rows][:, at] > middle) != (episodes.observations[goal_rows][:, at] > middle)
    return (changed.long() << torch.arange(len(at), device=rows.device)).sum(-1)


def entropy(pattern: Tensor) -> float:
    """Of the patterns' frequencies, in nats."""
    _, counts = torch.unique(pattern, return_counts=True)
    share = counts.double() / counts.sum()
    return float(-(share * share.log()).sum())


def noise_cost(dim: int, sigma: float) -> float:
    """Entropy of N(0, sigma^2 I): what noise on the goals adds to a density's negative log-likelihood."""
    return dim * (math.log(sigma) + 0.5 * math.log(2 * math.pi * math.e))


def run(run: Path, *, device: str = "cpu", data: Path | None = None) -> Path:
    agent, step = load_critic(run, device)
    if agent.config.critic == "contrastive":
        raise UserError("a contrastive critic gives a ratio of probabilities, not a probability")
    if agent.config.goal_part:
        raise UserError("the run's critic sees a part of the goal only (goal_part); this analysis is of whole goals")
    episodes, about = load_episodes(run, agent, data, device)
    binary, dim = episodes.spec().goal_binary, len(episodes.goal_indices)
    if not binary or not all(binary):
        raise UserError("this analysis is for goals whose every coordinate takes two values, such as puzzle's buttons")
    source, discount = generator("binary_goals", device), float(agent.config.discount)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        rows = episodes.transitions[goals.random_index(source, (count,), episodes.num_transitions)]
        return rows, goals.geometric_future(source, episodes, rows, discount)

    counted = entropy(changes(episodes, *draw(COUNTED)))
    rows, goal_rows = draw(ASKED)
    exact, sigma = len(agent.bit_at) == dim, float(agent.config.flow_noise)
    if len(agent.bit_at) and not exact:
        raise UserError("the run's critic has exact probabilities of some of these coordinates only")
    if not exact and sigma == 0.0:
        raise UserError("a flow trained without noise on its goals has no finite density of binary ones")
    target = episodes.observations[goal_rows].clone()
    if not exact:
        at = list(episodes.goal_indices)
        scale = agent.observation_std[at]
        target[:, at] += sigma * scale * torch.randn(ASKED, dim, generator=source, device=device)
    actions = chunks(episodes, rows, agent.config.chunk)
    nats = -float(log_density(agent, episodes.observations[rows], actions, target).double().mean())
    critic = nats if exact else nats - noise_cost(dim, sigma)
    result: dict[str, Any] = {
        "analysis": "binary_goals",
        "step": step,
        "data": about,
        "coordinates": dim,
        "uniform": dim * math.log(2.0),
        "counted": counted,
        "critic": critic,
        "exact": exact,
    }
    path = Path(run) / "analyses" / "binary_goals.json"
    write_json(path, result)
    print(f"nats a goal: critic {critic:.2f}, counting changes {counted:.2f}, guessing {result['uniform']:.2f}")
    if critic > counted:
        print("the critic knows less than the counts of what changes")
    return path
