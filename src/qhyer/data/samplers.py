"""Batches by index arithmetic on the training device; no loader, no worker processes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from qhyer.data import goals
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.streams import fork

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransitionSamplerConfig:
    """I.i.d. transitions with a goal each, from OGBench's mixture."""

    p_current: float = 0.0
    p_trajectory: float = 1.0
    p_random: float = 0.0
    discount: float | None = None
    """geometric future goals with this discount; uniform future goals when None"""

    def build(self, episodes: Episodes, generator: goals.Source) -> TransitionSampler:
        return TransitionSampler(self, episodes, generator)


class TransitionSampler:
    def __init__(self, config: TransitionSamplerConfig, episodes: Episodes, generator: goals.Source) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, config = self.episodes, self.config
        shape = goals.batch_shape(self.generator, batch_size)
        rows = data.transitions[goals.random_index(self.generator, shape, data.num_transitions)]
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

    def draw(self, generator: goals.Source, episodes: Episodes, rows: Tensor) -> Tensor:
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
    away = (rows != goal_rows).float()
    return {"rewards": -away if negative else 1.0 - away, "masks": away}


def gather(table: Tensor, **rows: Tensor) -> dict[str, Tensor]:
    """The table's rows (..., d) under each name, copied at once: on a GPU a copy so small takes as long as all."""
    at = torch.stack(list(rows.values()))
    found = table.index_select(0, at.flatten()).view(*at.shape, *table.shape[1:])
    return dict(zip(rows, found.unbind()))


@dataclass(frozen=True)
class ValueActorSamplerConfig:
    """I.i.d. transitions with two goals each, one for the value and one for the actor, each from its own law."""

    value: GoalLaw
    actor: GoalLaw
    negative: bool = True
    """rewards -1 until the value's goal is reached and 0 there; otherwise 0 and 1"""

    def build(self, episodes: Episodes, generator: goals.Source) -> ValueActorSampler:
        return ValueActorSampler(self, episodes, generator)


class ValueActorSampler:
    def __init__(self, config: ValueActorSamplerConfig, episodes: Episodes, generator: goals.Source) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, generator = self.episodes, self.generator
        shape = goals.batch_shape(generator, batch_size)
        rows = data.transitions[goals.random_index(generator, shape, data.num_transitions)]  # (B,)
        value_rows = self.config.value.draw(generator, data, rows)
        actor_rows = self.config.actor.draw(generator, data, rows)
        return {
            "rows": rows,
            "value_goal_rows": value_rows,
            "actor_goal_rows": actor_rows,
            "actions": data.actions[rows],  # (B, d_a)
            **gather(
                data.observations,  # (B, d_s) each
                observations=rows,
                next_observations=rows + 1,
                value_goals=value_rows,
                actor_goals=actor_rows,
            ),
            **_reward(rows, value_rows, self.config.negative),  # (B,), (B,)
        }


@dataclass(frozen=True)
class HierarchicalSamplerConfig:
    """As ValueActorSampler's transitions, with the goals of two actors: one aims at the state `subgoal_steps` ahead,
    one at that state on the way to a far goal. With `option_steps`, also with what a value of options needs."""

    value: GoalLaw
    subgoal_steps: int
    p_random: float = 0.0
    """chance that the high actor's goal is any row of the dataset instead of a future one"""
    discount: float | None = None
    """geometric future goals for the high actor; uniform ones when None"""
    negative: bool = True
    """rewards -1 until the value's goal is reached and 0 there; otherwise 0 and 1"""
    option_steps: int | None = None
    """n: an option goes on for this many steps, or until its goal or the episode's end"""

    def build(self, episodes: Episodes, generator: goals.Source) -> HierarchicalSampler:
        return HierarchicalSampler(self, episodes, generator)


class HierarchicalSampler:
    def __init__(self, config: HierarchicalSamplerConfig, episodes: Episodes, generator: goals.Source) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        self.future = GoalLaw(discount=config.discount)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, config, generator = self.episodes, self.config, self.generator
        shape = goals.batch_shape(generator, batch_size)
        rows = data.transitions[goals.random_index(generator, shape, data.num_transitions)]  # (B,)
        value_rows = config.value.draw(generator, data, rows)
        low_rows = torch.minimum(rows + config.subgoal_steps, data.end_of[rows])
        high_rows = self.future.draw(generator, data, rows)
        target_rows = torch.minimum(low_rows, high_rows)  # no farther than a goal on the way
        if config.p_random > 0.0:  # on the way to a random goal is whatever came next
            swap = goals.uniform(generator, shape) < config.p_random
            high_rows = torch.where(swap, goals.random_rows(generator, data, shape), high_rows)
            target_rows = torch.where(swap, low_rows, target_rows)
        option: dict[str, Tensor] = {}
        done: dict[str, Tensor] = {}
        if config.option_steps is not None:
            option = self.options(rows, config.option_steps)
            done = _reward(
                option["option_ends"], option["option_goals"], config.negative
            )  # an option is done where its end is its goal
        return {
            "rows": rows,
            "value_goal_rows": value_rows,
            **{f"{name[:-1]}_rows": found for name, found in option.items()},
            "low_actor_goal_rows": low_rows,
            "high_actor_goal_rows": high_rows,
            "high_actor_target_rows": target_rows,
            "actions": data.actions[rows],  # (B, d_a)
            **gather(
                data.observations,  # (B, d_s) each
                observations=rows,
                next_observations=rows + 1,
                value_goals=value_rows,
                low_actor_goals=low_rows,
                high_actor_goals=high_rows,
                high_actor_targets=target_rows,
                **option,
            ),
            **_reward(rows, value_rows, config.negative),  # (B,), (B,)
            **{f"option_{name}": value for name, value in done.items()},  # (B,), (B,)
        }

    def options(self, rows: Tensor, steps: int) -> dict[str, Tensor]:
        """Where an option ends, and its goal: from the value's mixture, whose current state is here the end itself, as
        if one had been asked to go there."""
        data, law, generator = self.episodes, self.config.value, self.generator
        future = GoalLaw(discount=law.discount).draw(generator, data, rows)
        u = goals.uniform(generator, tuple(rows.shape))
        anywhere = goals.random_rows(generator, data, tuple(rows.shape))
        ends = torch.minimum(rows + steps, data.end_of[rows])
        # Two coins: is the goal ahead or anywhere, which decides where the option stops; is it the end instead.
        ahead = goals.uniform(generator, tuple(rows.shape)) < law.p_trajectory / (1.0 - law.p_current)
        ends = torch.where(ahead, torch.minimum(ends, future), ends)
        goal_rows = torch.where(u < law.p_current, ends, torch.where(ahead, future, anywhere))
        return {"option_ends": ends, "option_goals": goal_rows}


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
    chunk: int = 1
    """actions that come with each step: its own and those after it, side by side"""

    def build(self, episodes: Episodes, generator: torch.Generator) -> WindowSampler:
        return WindowSampler(self, episodes, generator)


def chunks(episodes: Episodes, rows: Tensor, chunk: int) -> Tensor:
    """Actions of each row (...,) and of the chunk - 1 after it, (..., chunk * d_a); an episode's last one repeats."""
    if chunk == 1:
        return episodes.actions[rows]
    ahead = rows[..., None] + torch.arange(chunk, device=rows.device)
    return episodes.actions[torch.minimum(ahead, episodes.end_of[rows][..., None] - 1)].flatten(-2)


class Windows:
    """Where windows of K steps lie, and a draw of them."""

    def __init__(self, episodes: Episodes, context: int, generator: torch.Generator) -> None:
        self.episodes, self.generator = episodes, generator
        self.steps = torch.arange(context, device=episodes.device)
        # Every row with K transitions ahead can start a window; an episode shorter than K gives one, padded.
        ahead = episodes.end_of - torch.arange(len(episodes.end_of), device=episodes.device)
        fits = ahead >= context
        longest = int((episodes.ends - episodes.starts).max())
        if context > longest:
            log.warning("%s: a context of %d, where no episode has more than %d steps", episodes.name, context, longest)
        short = (episodes.ends - episodes.starts) < context
        fits[episodes.starts[short]] = True
        self.starts = torch.nonzero(fits).squeeze(1)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows (B, K), the last one repeated where an episode is over, and which of them count (B, K)."""
        start = self.starts[goals.random_index(self.generator, (count,), len(self.starts))]  # (B,)
        end = self.episodes.end_of[start][:, None]
        rows = start[:, None] + self.steps
        return torch.minimum(rows, end - 1), rows < end


class WindowSampler:
    def __init__(self, config: WindowSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        self.windows = Windows(episodes, config.context, generator)
        self.neighbours = goals.Neighbours(episodes, config.stitch_cell) if config.stitch_rate > 0.0 else None

    def _future(self, rows: Tensor) -> Tensor:
        """The goal law of windows and flow alike: geometric, within the episode or stitched."""
        if self.neighbours is None:
            return goals.geometric_future(self.generator, self.episodes, rows, self.config.discount)
        return goals.stitched_future(
            self.generator, self.episodes, self.neighbours, rows, self.config.discount, self.config.stitch_rate
        )

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        count = round(batch_size * self.config.context * self.config.flow_batch)
        first, second = lambda: self._windows(batch_size), lambda: self._flow(count)
        windows, flow = fork("windows", first, second, self.episodes.device)  # drawn in this order
        return {**windows, **flow}

    def _windows(self, batch_size: int) -> dict[str, Tensor]:
        data, config, generator = self.episodes, self.config, self.generator
        rows, valid = self.windows.draw(batch_size)  # (B, K)
        last = rows[:, -1]
        goal_rows = self._future(last)
        reached = torch.ones_like(goal_rows, dtype=torch.float32)
        if config.p_random > 0.0:
            swap = goals.uniform(generator, (batch_size,)) < config.p_random
            goal_rows = torch.where(swap, goals.random_rows(generator, data, (batch_size,)), goal_rows)
            reached = torch.where(swap, torch.zeros_like(reached), reached)
        return {
            "rows": rows[:, 0],
            "goal_rows": goal_rows,
            "observations": data.observations[rows],  # (B, K, d_s)
            "actions": chunks(data, rows, config.chunk),  # (B, K, chunk * d_a)
            "goals": data.observations[goal_rows],  # (B, d_s)
            "valid": valid,  # (B, K)
            "reached": reached,  # (B,) 1 unless the goal was drawn at random
        }

    def _flow(self, count: int) -> dict[str, Tensor]:
        data = self.episodes
        if not count:
            return {}
        flow_rows = data.transitions[goals.random_index(self.generator, (count,), data.num_transitions)]
        flow_goals = self._future(flow_rows)
        return {
            "flow_rows": flow_rows,
            "flow_goal_rows": flow_goals,
            "flow_observations": data.observations[flow_rows],  # (M, d_s)
            "flow_actions": chunks(data, flow_rows, self.config.chunk),  # (M, chunk * d_a)
            "flow_goals": data.observations[flow_goals],  # (M, d_s)
        }


# ------------------------------------------------------------------------------------------- rewards and returns


@dataclass(frozen=True)
class Rewards:
    """What a row is worth: scale * r + shift, r the dataset's own reward, or 1 at a goal and 0 elsewhere, in hindsight.

    A row is at a goal where its goal coordinates lie within `tolerance` of the goal's, or, with tolerance 0, where it
    is the goal's own row. The reward of row t belongs to the state s_t, as in D4RL's maze2d files. An episode's final
    state counts too.
    """

    tolerance: float = 0.0
    dataset: bool = False
    """the dataset's rewards, whatever the goal"""
    scale: float = 1.0
    shift: float = 0.0

    def of(self, episodes: Episodes) -> RewardsOf:
        return RewardsOf(self, episodes)


class RewardsOf:
    """Rewards of one dataset's rows, and their sums to the ends of episodes."""

    def __init__(self, config: Rewards, episodes: Episodes) -> None:
        self.config, self.episodes = config, episodes
        lengths = episodes.ends - episodes.starts + 1
        self.longest = int(lengths.max())
        self.start_of = torch.repeat_interleave(episodes.starts, lengths)  # (N,)
        self.stored: Tensor | None = None
        if config.dataset:
            stored = getattr(episodes, "rewards", None)
            if stored is None:
                raise UserError(f"{episodes.name} has no rewards of its own: train with dataset_rewards off")
            self.stored = stored.to(episodes.device).float()
            sums = torch.cumsum(self._worth(self.stored).double(), 0)
            self.stored_returns = (sums[episodes.end_of] - sums).float() + self._worth(self.stored)
        self.places = episodes.observations[:, list(episodes.goal_indices)]  # (N, d_g)
        # Row r's own and the `longest` - 1 after it, coordinate by coordinate: a view, whose rows are copied in one go.
        beyond = self.places.new_zeros(self.places.shape[1], self.longest)
        self.coming = torch.cat([self.places.T, beyond], dim=1).unfold(1, self.longest, 1)  # (d_g, N + 1, longest)

    def _worth(self, reached: Tensor) -> Tensor:
        return self.config.scale * reached + self.config.shift

    def reached(self, rows: Tensor, goal_rows: Tensor) -> Tensor:
        """1 at a goal, 0 elsewhere; rows and goals of the same shape."""
        if self.config.tolerance == 0.0:
            return (rows == goal_rows).float()
        far = (self.places[rows] - self.places[goal_rows]).square().sum(-1)
        return (far <= self.config.tolerance**2).float()

    def at(self, rows: Tensor, goal_rows: Tensor) -> Tensor:
        """Rewards of rows, of their shape."""
        return self._worth(self.paid(rows, goal_rows))

    def paid(self, rows: Tensor, goal_rows: Tensor) -> Tensor:
        """The same before scale and shift: the dataset's, or 1 at a goal."""
        return self.reached(rows, goal_rows) if self.stored is None else self.stored[rows]

    def to_go(self, rows: Tensor, goal_rows: Tensor) -> Tensor:
        """Sums of the rewards from these rows (B,) to the ends of their episodes, those of both included."""
        if self.stored is not None:
            return self.stored_returns[rows]
        end = self.episodes.end_of[rows]
        left = (end - rows + 1).float()
        if self.config.tolerance == 0.0:  # there is one such row at most
            count = ((goal_rows >= rows) & (goal_rows <= end)).float()
        else:
            far = (self.coming[:, rows] - self.places[goal_rows].T[..., None]).square().sum(0)  # (B, longest)
            there = torch.arange(self.longest, device=rows.device) < left[:, None]
            count = ((far <= self.config.tolerance**2) & there).sum(1).float()
        return self.config.scale * count + self.config.shift * left


@dataclass(frozen=True)
class ReturnWindowSamplerConfig:
    """K consecutive steps with one goal, their rewards and the returns still to come, for return-conditioned models.

    The goal lies ahead of the window's last state, uniformly, or is any row of the dataset with chance `p_random`.
    """

    context: int
    rewards: Rewards = Rewards()
    p_random: float = 0.0
    ahead: int = 0
    """this many rows after the window, too, with their returns"""

    def build(self, episodes: Episodes, generator: torch.Generator) -> ReturnWindowSampler:
        return ReturnWindowSampler(self, episodes, generator)


class ReturnWindowSampler:
    def __init__(self, config: ReturnWindowSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        self.windows = Windows(episodes, config.context, generator)
        self.law = GoalLaw(0.0, 1.0 - config.p_random, config.p_random)
        self.rewards = config.rewards.of(episodes)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, config, generator = self.episodes, self.config, self.generator
        rows, valid = self.windows.draw(batch_size)  # (B, K)
        last = rows[:, -1]
        goal_rows = self.law.draw(generator, data, last)
        rewards = self.rewards.at(rows, goal_rows[:, None].expand_as(rows)) * valid  # (B, K)
        later = self.rewards.to_go(last + 1, goal_rows)  # (B,) from the state after the window
        returns = later[:, None] + rewards.flip(1).cumsum(1).flip(1)
        batch = {
            "rows": rows[:, 0],
            "goal_rows": goal_rows,
            "observations": data.observations[rows],  # (B, K, d_s)
            "actions": data.actions[rows],  # (B, K, d_a)
            "next_observations": data.observations[rows + 1],  # (B, K, d_s)
            "goals": data.observations[goal_rows],  # (B, d_s)
            "valid": valid,  # (B, K)
            "rewards": rewards,  # (B, K)
            "reached": (self.rewards.paid(rows, goal_rows[:, None].expand_as(rows)) > 0).float(),  # (B, K)
            "returns": returns,  # (B, K)
            "times": rows - self.rewards.start_of[rows],  # (B, K) steps since the episode began
        }
        if config.ahead:
            end = data.end_of[last][:, None]
            after = last[:, None] + torch.arange(1, config.ahead + 1, device=rows.device)  # (B, M)
            there = after <= end
            after = torch.minimum(after, end)
            coming = self.rewards.at(after, goal_rows[:, None].expand_as(after)) * there
            batch |= {
                "ahead_observations": data.observations[after],  # (B, M, d_s)
                "ahead_valid": there,  # (B, M)
                "ahead_rewards": coming,  # (B, M)
                "ahead_returns": later[:, None] - coming.cumsum(1) + coming,  # (B, M) from each of them
            }
        return batch


@dataclass(frozen=True)
class RewardSamplerConfig:
    """I.i.d. transitions with a goal each and the reward of the state, for methods that learn values."""

    goal: GoalLaw = GoalLaw()
    rewards: Rewards = Rewards()
    terminal: bool = True
    """nothing follows a goal once it is reached; otherwise the task goes on, as in D4RL's maze2d"""
    average: bool = False
    """also the mean reward per step from here to the end of the longest episode (RvS-R's outcome)"""

    def build(self, episodes: Episodes, generator: torch.Generator) -> RewardSampler:
        return RewardSampler(self, episodes, generator)


class RewardSampler:
    def __init__(self, config: RewardSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        self.rewards = config.rewards.of(episodes)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, generator = self.episodes, self.generator
        rows = data.transitions[goals.random_index(generator, (batch_size,), data.num_transitions)]  # (B,)
        goal_rows = self.config.goal.draw(generator, data, rows)
        reached = self.rewards.paid(rows, goal_rows)
        batch = {
            "rows": rows,
            "goal_rows": goal_rows,
            "observations": data.observations[rows],  # (B, d_s)
            "actions": data.actions[rows],  # (B, d_a)
            "next_observations": data.observations[rows + 1],  # (B, d_s)
            "goals": data.observations[goal_rows],  # (B, d_s)
            "rewards": self.rewards.at(rows, goal_rows),  # (B,)
            "masks": 1.0 - (reached > 0).float() if self.config.terminal else torch.ones_like(reached),  # (B,)
        }
        if self.config.average:
            left = self.rewards.longest - (rows - self.rewards.start_of[rows])
            batch["averages"] = self.rewards.to_go(rows, goal_rows) / left  # (B,)
        return batch
