"""Batches of segments: stretches of an episode from a row to a later one, with what lies on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qhyer.data import goals
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import GoalLaw, chunks, gather
from qhyer.errors import require

log = logging.getLogger(__name__)

ROWS, WINDOW = 256, 512  # states that look ahead at a time, and how far, unless that is not far enough


def segment(episodes: Episodes, rows: Tensor, goal_rows: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Where segments of `steps` steps end, and how many they take: no more than to their goal, if it lies ahead, nor
    than to the episode's end. Rows and goals of one shape, and both results of it."""
    room = (episodes.end_of[rows] - rows).clamp(max=steps)
    ahead = goal_rows - rows
    taken = torch.where((ahead >= 0) & (ahead < room), ahead, room)
    return rows + taken, taken


@dataclass(frozen=True)
class SubgoalSamplerConfig:
    """I.i.d. transitions with the segments that begin there: one towards a goal of the value, one towards a goal of the
    high actor, and one without a goal, whose end is where the low actor goes. With `low_value`, also with a goal of a
    value of single steps, and the segment of one step towards it."""

    steps: int
    """n: how long a segment is that neither a goal nor the episode's end cuts short"""
    value: GoalLaw
    actor: GoalLaw
    low_value: GoalLaw | None = None
    end_is_goal: bool = True
    """a segment that is cut short is done, by the episode's end as well as by its goal; otherwise where its end is its
    goal"""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "a segment has at least 1 step")

    def build(self, episodes: Episodes, generator: goals.Source) -> SubgoalSampler:
        return SubgoalSampler(self, episodes, generator)


class SubgoalSampler:
    def __init__(self, config: SubgoalSamplerConfig, episodes: Episodes, generator: goals.Source) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        longest = int((episodes.ends - episodes.starts).max())
        if config.steps > longest:
            what = "all of them count as arrived, wherever their goal is" if config.end_is_goal else "all are cut short"
            told = "%s: segments of %d steps, where no episode has more than %d: %s"
            log.warning(told, episodes.name, config.steps, longest, what)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, config, generator = self.episodes, self.config, self.generator
        shape = goals.batch_shape(generator, batch_size)
        rows = data.transitions[goals.random_index(generator, shape, data.num_transitions)]  # (B,)
        value, numbers = self.towards("value", config.value.draw(generator, data, rows), rows, config.steps)
        actor_rows = config.actor.draw(generator, data, rows)
        found = {
            "observations": rows,
            **value,
            "low_actor_goals": torch.minimum(rows + config.steps, data.end_of[rows]),
            "high_actor_goals": actor_rows,
            "high_actor_targets": segment(data, rows, actor_rows, config.steps)[0],
        }
        if config.low_value is not None:
            low, more = self.towards("low_value", config.low_value.draw(generator, data, rows), rows, 1)
            found, numbers = found | low, numbers | more
        return {
            "rows": rows,
            **{f"{name[:-1]}_rows": at for name, at in found.items() if name != "observations"},
            "actions": data.actions[rows],  # (B, d_a)
            **gather(data.observations, **found),  # (B, d_s) each
            **numbers,  # (B,) each
        }

    def towards(
        self, name: str, goal_rows: Tensor, rows: Tensor, steps: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Goals and ends of a value's segments; the steps they take, and whether nothing follows them."""
        ends, taken = segment(self.episodes, rows, goal_rows, steps)
        done = taken < steps if self.config.end_is_goal else ends == goal_rows
        return (
            {f"{name}_goals": goal_rows, f"{name}_ends": ends},
            {f"{name}_steps": taken.float(), f"{name}_done": done.float()},
        )


@dataclass(frozen=True)
class MidpointSamplerConfig:
    """I.i.d. transitions i, each with a later state j of its episode, a transition k between them, and a goal for the
    actor. All k in i..j-1 are as likely, i itself among them."""

    discount: float | None
    """j lies geometrically ahead with this discount, at most at the episode's end; uniformly ahead when None"""
    actor: GoalLaw

    def build(self, episodes: Episodes, generator: goals.Source) -> MidpointSampler:
        return MidpointSampler(self, episodes, generator)


class MidpointSampler:
    def __init__(self, config: MidpointSamplerConfig, episodes: Episodes, generator: goals.Source) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        self.future = GoalLaw(discount=config.discount)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, generator = self.episodes, self.generator
        shape = goals.batch_shape(generator, batch_size)
        rows = data.transitions[goals.random_index(generator, shape, data.num_transitions)]  # (B,)
        value_rows = self.future.draw(generator, data, rows)  # (B,) at least one step ahead
        # Below j - i, in float64 even of the greatest u below 1: k is never a final state, which has no action.
        middle_rows = rows + (goals.uniform(generator, shape) * (value_rows - rows)).long()
        actor_rows = self.config.actor.draw(generator, data, rows)
        return {
            "rows": rows,
            "midpoint_rows": middle_rows,
            "value_goal_rows": value_rows,
            "actor_goal_rows": actor_rows,
            "first_steps": (middle_rows - rows).float(),  # (B,) k - i
            "second_steps": (value_rows - middle_rows).float(),  # (B,) j - k
            **gather(data.actions, actions=rows, midpoint_actions=middle_rows),  # (B, d_a) each
            **gather(
                data.observations,  # (B, d_s) each
                observations=rows,
                midpoints=middle_rows,
                value_goals=value_rows,
                actor_goals=actor_rows,
            ),
        }


@dataclass(frozen=True)
class ChunkSamplerConfig:
    """I.i.d. transitions, each with the h actions from there on and two goals, one for the value, one for the actor.

    A chunk ends at the value's goal: steps before it cost -1, its own row and all that follows nothing, and there is
    nothing to bootstrap from where it is among the chunk's h rows. A goal is reached where it is the very row.
    """

    value: GoalLaw
    actor: GoalLaw
    chunk: int
    """h: actions of a chunk"""

    def build(self, episodes: Episodes, generator: goals.Source) -> ChunkSampler:
        return ChunkSampler(self, episodes, generator)


class ChunkSampler:
    def __init__(self, config: ChunkSamplerConfig, episodes: Episodes, generator: goals.Source) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        self.steps = torch.arange(config.chunk, device=episodes.device)
        longest = int((episodes.ends - episodes.starts).max())
        require(
            config.chunk <= longest,
            f"{episodes.name}: no chunk of {config.chunk} actions fits into an episode, the longest of which has "
            f"{longest}, so that the critic would learn nothing: --agent.chunk {longest} or less",
        )

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, config, generator = self.episodes, self.config, self.generator
        shape = goals.batch_shape(generator, batch_size)
        rows = data.transitions[goals.random_index(generator, shape, data.num_transitions)]  # (B,)
        value_rows = config.value.draw(generator, data, rows)
        actor_rows = config.actor.draw(generator, data, rows)
        end = data.end_of[rows]
        ahead = rows[..., None] + self.steps  # (B, h); beyond the end they are another episode's
        # The goal is this step's row or an earlier one's, and the chunk's own: not before it, nor in another episode.
        on_way = (value_rows >= rows) & (value_rows <= end)
        reached = on_way[..., None] & (value_rows[..., None] <= ahead)
        away = (~reached).float()
        return {
            "rows": rows,
            "value_goal_rows": value_rows,
            "actor_goal_rows": actor_rows,
            "actions": chunks(data, rows, config.chunk),  # (B, h d_a); an episode's last action repeats
            "valid": (ahead < end[..., None]).float(),  # (B, h) 1 where there is such a step
            "rewards": -away,  # (B, h)
            "masks": away[..., -1],  # (B,) 0 where the goal is one of the chunk's rows
            **gather(
                data.observations,  # (B, d_s) each
                observations=rows,
                next_observations=torch.minimum(rows + config.chunk, end),  # s_{t+h}
                value_goals=value_rows,
                actor_goals=actor_rows,
            ),
        }


def first_beyond(episodes: Episodes, places: Tensor, distance: float) -> Tensor:
    """For each row (N,), the first later one of its episode whose place (N, d) is at least this far from its own; the
    final state where none is."""
    beyond = episodes.end_of.clone()
    for start, end in zip(episodes.starts.tolist(), episodes.ends.tolist()):
        for first in range(start, end, ROWS):
            here = slice(first, min(first + ROWS, end))
            own = places[here].double()
            for window in range(first + 1, end + 1, WINDOW):
                ahead = places[window : min(window + WINDOW, end + 1)].double()
                far = torch.cdist(own, ahead, compute_mode="use_mm_for_euclid_dist") >= distance
                far = far.triu(first + 1 - window)  # what comes later: row first + i, column window + j
                found = torch.where(far.any(1), window + far.byte().argmax(1), end)
                beyond[here] = torch.minimum(beyond[here], found)
                if bool((beyond[here] < end).all()):
                    break
    return beyond


@dataclass(frozen=True)
class DirectionSamplerConfig:
    """I.i.d. transitions and the places of their states, and of a state geometrically far ahead, but no farther than
    the first one at some distance: what to head for."""

    embed: Callable[[Tensor], Tensor]
    """observations (N, d_s) -> places (N, d), of all rows at once, when the sampler is built"""
    distance: float
    """how far ahead, at most"""
    discount: float
    """of the geometric law"""

    def build(self, episodes: Episodes, generator: torch.Generator) -> DirectionSampler:
        return DirectionSampler(self, episodes, generator)


class DirectionSampler:
    def __init__(self, config: DirectionSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator
        self.places = config.embed(episodes.observations)  # (N, d)
        self.beyond = first_beyond(episodes, self.places, config.distance)  # (N,)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, generator = self.episodes, self.generator
        rows = data.transitions[goals.random_index(generator, (batch_size,), data.num_transitions)]  # (B,)
        steps = goals.geometric_steps(generator, (batch_size,), self.config.discount)
        goal_rows = torch.minimum(rows + steps, self.beyond[rows])
        return {
            "rows": rows,
            "goal_rows": goal_rows,
            "actions": data.actions[rows],  # (B, d_a)
            **gather(data.observations, observations=rows, next_observations=rows + 1),  # (B, d_s) each
            **gather(self.places, places=rows, next_places=rows + 1, goal_places=goal_rows),  # (B, d) each
        }
