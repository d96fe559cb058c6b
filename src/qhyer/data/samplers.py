"""Batches by index arithmetic on the training device; no loader, no worker processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qhyer.data import goals
from qhyer.data.episodes import Episodes


@dataclass(frozen=True)
class TransitionSamplerConfig:
    """I.i.d. transitions with a goal each, from OGBench's mixture."""

    p_current: float = 0.0
    p_trajectory: float = 1.0
    p_random: float = 0.0
    discount: float | None = None
    """geometric future goals with this discount; uniform future goals when None"""

    def build(self, episodes: Episodes, generator: torch.Generator) -> TransitionSampler:
        return TransitionSampler(self, episodes, generator)


class TransitionSampler:
    def __init__(self, config: TransitionSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, config = self.episodes, self.config
        pick = goals.random_index(self.generator, (batch_size,), data.num_transitions)
        rows = data.transitions[pick]
        goal_rows = goals.mixture(
            self.generator,
            data,
            rows,
            p_current=config.p_current,
            p_trajectory=config.p_trajectory,
            p_random=config.p_random,
            discount=config.discount,
        )
        return {
            "rows": rows,
            "goal_rows": goal_rows,
            "observations": data.observations[rows],
            "actions": data.actions[rows],
            "goals": data.observations[goal_rows],
        }


@dataclass(frozen=True)
class GoalLaw:
    """OGBench's mixture of goals: the state itself, a later one of its episode, any row. The shares sum to one."""

    p_current: float = 0.0
    p_trajectory: float = 1.0
    p_random: float = 0.0
    discount: float | None = None
    """geometric future goals with this discount; uniform future goals when None"""

    def draw(self, generator: torch.Generator, episodes: Episodes, rows: Tensor) -> Tensor:
        return goals.mixture(
            generator,
            episodes,
            rows,
            p_current=self.p_current,
            p_trajectory=self.p_trajectory,
            p_random=self.p_random,
            discount=self.discount,
        )


def _reward(rows: Tensor, goal_rows: Tensor, negative: bool) -> dict[str, Tensor]:
    """A goal is reached where it is the very row: reward 0 there and -1 elsewhere (or 1 and 0), and nothing follows."""
    reached = (rows == goal_rows).float()
    return {"rewards": reached - 1.0 if negative else reached, "masks": 1.0 - reached}


@dataclass(frozen=True)
class ValueActorSamplerConfig:
    """I.i.d. transitions with two goals each, one for the value and one for the actor, each from its own law."""

    value: GoalLaw
    actor: GoalLaw
    negative: bool = True
    """rewards -1 until the value's goal is reached and 0 there; otherwise 0 and 1"""

    def build(self, episodes: Episodes, generator: torch.Generator) -> ValueActorSampler:
        return ValueActorSampler(self, episodes, generator)


class ValueActorSampler:
    def __init__(self, config: ValueActorSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, generator = self.episodes, self.generator
        rows = data.transitions[goals.random_index(generator, (batch_size,), data.num_transitions)]  # (B,)
        value_rows = self.config.value.draw(generator, data, rows)
        actor_rows = self.config.actor.draw(generator, data, rows)
        return {
            "rows": rows,
            "value_goal_rows": value_rows,
            "actor_goal_rows": actor_rows,
            "observations": data.observations[rows],  # (B, d_s)
            "actions": data.actions[rows],  # (B, d_a)
            "next_observations": data.observations[rows + 1],  # (B, d_s)
            "value_goals": data.observations[value_rows],  # (B, d_s)
            "actor_goals": data.observations[actor_rows],  # (B, d_s)
            **_reward(rows, value_rows, self.config.negative),  # (B,), (B,)
        }


@dataclass(frozen=True)
class HierarchicalSamplerConfig:
    """As ValueActorSampler's transitions, with the goals of two actors: one aims at the state `subgoal_steps` ahead,
    one at that state on the way to a far goal."""

    value: GoalLaw
    subgoal_steps: int
    p_random: float = 0.0
    """chance that the high actor's goal is any row of the dataset instead of a future one"""
    discount: float | None = None
    """geometric future goals for the high actor; uniform ones when None"""
    negative: bool = True
    """rewards -1 until the value's goal is reached and 0 there; otherwise 0 and 1"""

    def build(self, episodes: Episodes, generator: torch.Generator) -> HierarchicalSampler:
        return HierarchicalSampler(self, episodes, generator)


class HierarchicalSampler:
    def __init__(self, config: HierarchicalSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        self.future = GoalLaw(discount=config.discount)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, config, generator = self.episodes, self.config, self.generator
        rows = data.transitions[goals.random_index(generator, (batch_size,), data.num_transitions)]  # (B,)
        value_rows = config.value.draw(generator, data, rows)
        low_rows = torch.minimum(rows + config.subgoal_steps, data.end_of[rows])
        high_rows = self.future.draw(generator, data, rows)
        target_rows = torch.minimum(low_rows, high_rows)  # no farther than a goal on the way
        if config.p_random > 0.0:  # on the way to a random goal is whatever came next
            swap = goals.uniform(generator, (batch_size,)) < config.p_random
            high_rows = torch.where(swap, goals.random_rows(generator, data, (batch_size,)), high_rows)
            target_rows = torch.where(swap, low_rows, target_rows)
        return {
            "rows": rows,
            "value_goal_rows": value_rows,
            "low_actor_goal_rows": low_rows,
            "high_actor_goal_rows": high_rows,
            "high_actor_target_rows": target_rows,
            "observations": data.observations[rows],  # (B, d_s)
            "actions": data.actions[rows],  # (B, d_a)
            "next_observations": data.observations[rows + 1],  # (B, d_s)
            "value_goals": data.observations[value_rows],  # (B, d_s)
            "low_actor_goals": data.observations[low_rows],  # (B, d_s)
            "high_actor_goals": data.observations[high_rows],  # (B, d_s)
            "high_actor_targets": data.observations[target_rows],  # (B, d_s)
            **_reward(rows, value_rows, config.negative),  # (B,), (B,)
        }


@dataclass(frozen=True)
class WindowSamplerConfig:
    """K consecutive steps with one goal, for the decoder, and i.i.d. transitions with a goal each, for the flow.

    The window's goal lies in the future of its last state: when acting, every state of the window precedes the
    goal. The flow's goals lie geometrically ahead of each transition, since only that law makes its density
    log p(g | s, a) the Q of Eq. (1).
    """

    context: int
    discount: float
    p_random: float = 0.0
    """chance that a window's goal is any row of the dataset instead of a future one"""
    flow_batch: float = 0.25
    """flow transitions per window step"""
    stitch_rate: float = 0.0
    """chance per step that a goal's path goes on in another episode passing nearby; 0: goals stay in the episode"""
    stitch_cell: float = 0.1
    """how near: side of a cell of goal coordinates, in standard deviations"""

    def build(self, episodes: Episodes, generator: torch.Generator) -> WindowSampler:
        return WindowSampler(self, episodes, generator)


class WindowSampler:
    def __init__(self, config: WindowSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        self.steps = torch.arange(config.context, device=episodes.device)
        # Every row with K transitions ahead can start a window; an episode shorter than K gives one, padded.
        ahead = episodes.end_of - torch.arange(len(episodes.end_of), device=episodes.device)
        fits = ahead >= config.context
        short = (episodes.ends - episodes.starts) < config.context
        fits[episodes.starts[short]] = True
        self.window_starts = torch.nonzero(fits).squeeze(1)
        self.neighbours = goals.Neighbours(episodes, config.stitch_cell) if config.stitch_rate > 0.0 else None

    def _future(self, rows: Tensor) -> Tensor:
        """The goal law of windows and flow alike: geometric, within the episode or stitched."""
        if self.neighbours is None:
            return goals.geometric_future(self.generator, self.episodes, rows, self.config.discount)
        return goals.stitched_future(
            self.generator, self.episodes, self.neighbours, rows, self.config.discount, self.config.stitch_rate
        )

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, config, generator = self.episodes, self.config, self.generator
        start = self.window_starts[goals.random_index(generator, (batch_size,), len(self.window_starts))]  # (B,)
        end = data.end_of[start]
        rows = start[:, None] + self.steps  # (B, K)
        valid = rows < end[:, None]
        rows = torch.minimum(rows, end[:, None] - 1)
        last = rows[:, -1]
        goal_rows = self._future(last)
        reached = torch.ones_like(goal_rows, dtype=torch.float32)
        if config.p_random > 0.0:
            swap = goals.uniform(generator, (batch_size,)) < config.p_random
            goal_rows = torch.where(swap, goals.random_rows(generator, data, (batch_size,)), goal_rows)
            reached = torch.where(swap, torch.zeros_like(reached), reached)
        batch = {
            "rows": start,
            "goal_rows": goal_rows,
            "observations": data.observations[rows],  # (B, K, d_s)
            "actions": data.actions[rows],  # (B, K, d_a)
            "goals": data.observations[goal_rows],  # (B, d_s)
            "valid": valid,  # (B, K)
            "reached": reached,  # (B,) 1 unless the goal was drawn at random
        }
        count = round(batch_size * config.context * config.flow_batch)
        if count:
            flow_rows = data.transitions[goals.random_index(generator, (count,), data.num_transitions)]
            flow_goals = self._future(flow_rows)
            batch |= {
                "flow_rows": flow_rows,
                "flow_goal_rows": flow_goals,
                "flow_observations": data.observations[flow_rows],  # (M, d_s)
                "flow_actions": data.actions[flow_rows],  # (M, d_a)
                "flow_goals": data.observations[flow_goals],  # (M, d_s)
            }
        return batch
