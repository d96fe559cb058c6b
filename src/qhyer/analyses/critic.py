"""Does the critic's log-density say anything: nearer goals, better actions, Q's that differ?

Three tests of log p(g | s, a) on recorded episodes.

nearing   Along an episode towards one of its own states as the goal: Spearman's rank correlation of log p with minus
          the steps to go. 1: it rises at every step; 0: it does not know. Per goal, so that the density of the goal
          itself cancels; `pooled` mixes all pairs.
action    How often the action taken has a higher log p of the goal it led to than another action at the same state:
          uniform random, or one taken elsewhere in the data. An AUC over pairs of the same state and goal: 0.5 is
          chance.
tokens    What the decoder is given and predicts, on windows drawn as in training: spread of the normalised Q over all
          tokens and within a window, and Q-hat minus Q (positive where the prediction is above the data's Q).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qhyer.agent import Batch
from qhyer.analyses._common import generator, load_critic, load_episodes, spearman
from qhyer.data import goals
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import chunks
from qhyer.storage import write_json

GOALS = 256  # goals whose approach is followed
APPROACH = 32  # states on the way to each
PAIRS = 4096  # state, action and goal reached
WINDOWS = 256
CHUNK = 1024


@torch.no_grad()
def log_density(agent: Any, observations: Tensor, actions: Tensor, goal: Tensor) -> Tensor:
    """log p of raw goals (n, d_s), in pieces."""
    pieces = zip(observations.split(CHUNK), actions.split(CHUNK), goal.split(CHUNK))
    return torch.cat([agent.log_density(s, a, agent.goal_coordinates(g)) for s, a, g in pieces])


def nearing(agent: Any, episodes: Episodes, horizon: int, source: torch.Generator) -> dict[str, Any]:
    """Rank correlation of log p with nearness, on the way to `GOALS` states of the data."""
    starts = torch.repeat_interleave(episodes.starts, episodes.ends - episodes.starts + 1)  # row -> first of episode
    rows = torch.arange(len(starts), device=episodes.device)
    reach = torch.clamp(rows - starts, max=horizon)  # steps of approach there are
    usable = torch.nonzero(reach >= min(APPROACH, int(reach.max()))).squeeze(1)
    goal = usable[goals.random_index(source, (GOALS,), len(usable))]
    count = min(APPROACH, int(reach[goal].min()))
    # Evenly spread over the way, from one step before the goal to as far as the episode or the horizon allows.
    share = torch.linspace(0, 1, count, device=episodes.device, dtype=torch.float64)
    steps = 1 + torch.floor(share * (reach[goal][:, None] - 1)).long()  # (GOALS, count)
    at = (goal[:, None] - steps).flatten()
    repeated = goal[:, None].expand_as(steps).flatten()
    actions = chunks(episodes, at, agent.config.chunk)
    log_p = log_density(agent, episodes.observations[at], actions, episodes.observations[repeated])
    values, distance = log_p.view_as(steps).cpu().numpy(), steps.cpu().numpy()
    each = spearman(values, -distance)
    each = each[np.isfinite(each)]
    return {
        "spearman": float(each.mean()) if len(each) else None,
        "spearman_standard_error": float(each.std() / np.sqrt(len(each))) if len(each) else None,
        "spearman_pooled": float(spearman(values.ravel(), -distance.ravel())),
        "goals": len(each),
        "states_per_goal": count,
        "horizon": horizon,
    }


def action_ranking(agent: Any, episodes: Episodes, discount: float, source: torch.Generator) -> dict[str, Any]:
    """How often the action taken beats another for the goal it led to."""
    rows = episodes.transitions[goals.random_index(source, (PAIRS,), episodes.num_transitions)]
    reached = goals.geometric_future(source, episodes, rows, discount)
    states, target = episodes.observations[rows], episodes.observations[reached]
    taken = log_density(agent, states, chunks(episodes, rows, agent.config.chunk), target)
    uniform = 2.0 * goals.uniform(source, (PAIRS, agent.plan_dim)).float() - 1.0
    elsewhere = episodes.transitions[goals.random_index(source, (PAIRS,), episodes.num_transitions)]
    result: dict[str, Any] = {"pairs": PAIRS}
    for name, actions in (("random", uniform), ("other", chunks(episodes, elsewhere, agent.config.chunk))):
        other = log_density(agent, states, actions, target)
        above = (taken > other).double() + 0.5 * (taken == other).double()
        result[f"auc_{name}"] = float(above.mean())
        result[f"auc_{name}_standard_error"] = float(above.std(correction=0) / PAIRS**0.5)
        result[f"advantage_{name}"] = float((taken - other).median())
    return result


@torch.no_grad()
def token_spread(agent: Any, windows: Batch) -> dict[str, Any]:
    """The Q tokens of windows, and what the decoder predicts in their place."""
    q = agent.q_values(windows)  # (B, K)
    observations = agent.normalize(windows["observations"])
    goal = agent.actor_goals(windows["goals"], windows["observations"])
    hidden, _ = agent.decoder(agent.tokens(observations, goal, q, windows["actions"]))
    q_hat = agent.q_head(hidden[:, agent.tokens.state_at :: agent.tokens.per_step]).squeeze(-1)  # (B, K)
    valid = windows["valid"]
    values, gap = q[valid].double(), (q_hat - q)[valid].double()
    whole = q[valid.all(dim=1)].double()
    return {
        "windows": len(q),
        "q_mean": float(values.mean()),
        "q_std": float(values.std(correction=0)),
        "q_std_within_window": float(whole.std(dim=1, correction=0).mean()) if len(whole) else None,
        "q_hat_minus_q_mean": float(gap.mean()),
        "q_hat_minus_q_std": float(gap.std(correction=0)),
        "q_hat_above_q": float((gap > 0).double().mean()),
    }


def run(run: Path, *, device: str = "cpu", data: Path | None = None) -> Path:
    agent, step = load_critic(run, device)
    episodes, about = load_episodes(run, agent, data, device)
    source = generator("critic", device)
    discount = float(getattr(agent.config, "discount", 0.99))
    horizon = max(2, round(2.0 / (1.0 - discount)))  # twice the mean distance of a training goal
    windows = agent.stages()[0].sampler.build(episodes, source).sample(WINDOWS)
    result: dict[str, Any] = {
        "analysis": "critic",
        "step": step,
        "data": about,
        "nearing": nearing(agent, episodes, horizon, source),
        "action": action_ranking(agent, episodes, discount, source),
        "tokens": token_spread(agent, windows),
    }
    path = Path(run) / "analyses" / "critic.json"
    write_json(path, result)
    near, action, tokens = result["nearing"], result["action"], result["tokens"]
    rises = "unknown" if near["spearman"] is None else f"{near['spearman']:.2f} ± {near['spearman_standard_error']:.2f}"
    print(f"nearing the goal: rank correlation {rises} (1: rises at every step; pooled {near['spearman_pooled']:.2f})")
    print(f"the action taken ranks above a random one in {100 * action['auc_random']:.0f} % of pairs, ", end="")
    print(f"above one taken elsewhere in {100 * action['auc_other']:.0f} % (50: chance)")
    print(
        f"Q tokens: std {tokens['q_std']:.3f}; Q-hat - Q: {tokens['q_hat_minus_q_mean']:.3f} ± "
        f"{tokens['q_hat_minus_q_std']:.3f}, above in {100 * tokens['q_hat_above_q']:.0f} %"
    )
    return path
