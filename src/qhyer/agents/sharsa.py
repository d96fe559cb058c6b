"""SHARSA: SARSA over subgoals, and flows that propose them (Park et al., 2025).

Idea. Values are hard to learn over many steps, and so are policies: both horizons are cut. A value of the behaviour
itself, without any maximum, is learnt over n steps at a time, the place n steps ahead taking the action's place. One
flow imitates where the data are n steps later on the way to a goal, another how they get there. When acting, the first
proposes subgoals, the value picks the best of them, and the second goes there. Double SHARSA picks the action in the
same way, by a value of single steps.
Paper. Horizon Reduction Makes RL Scalable, 2025 (arXiv 2506.04168).
Code. seohongpark/horizon-reduction, agents/sharsa.py, agents/dsharsa.py and utils/datasets.py at c298aed.
Deviations. The authors draw fresh noise at each step of an episode; here the noise is a fixed table, so that acting is
a function of what is seen. The final state of an episode may be a goal or a subgoal (the code's index arithmetic leaves
it out). Actions are not cut to 1e-5 less than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.agent import Agent, AgentConfig, Batch, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw
from qhyer.data.segments import SubgoalSamplerConfig
from qhyer.errors import require
from qhyer.nn.chance import next_rows, table
from qhyer.nn.matching import Velocity
from qhyer.nn.values import Value, best_of, follow, spread, target_of
from qhyer.streams import all_at_once

TABLE = 2**16  # rows of noise for acting: 2048 steps of 32 candidates before it repeats


@dataclass(frozen=True)
class SHARSAConfig(AgentConfig):
    hidden: tuple[int, ...] = (1024, 1024, 1024, 1024)
    """widths of the hidden layers of both flows"""
    value_hidden: tuple[int, ...] = (1024, 1024, 1024, 1024)
    """widths of the hidden layers of V and of each Q"""
    subgoal_steps: int = 25
    """n: subgoals lie this many steps ahead, and values are backed up over as many"""
    discount: float = 0.999
    """gamma, of the values over subgoals and of the actor's geometric goals"""
    target_rate: float = 0.005
    """how far the target Q moves per update"""
    aggregate: Literal["min", "mean"] = "min"
    """which of the two target Qs, or what of both, V learns"""
    value_p_current: float = 0.2
    """chance that a value's goal is the state itself"""
    value_p_random: float = 0.3
    """chance that it is any row of the dataset; otherwise it lies ahead in the episode, uniformly"""
    actor_p_random: float = 0.5
    """chance that the high flow's goal is any row; otherwise it lies ahead in the episode"""
    actor_geometric: bool = True
    """such goals lie Geom(1 - gamma) steps ahead; off: uniform over the rest of the episode"""
    end_is_goal: bool = True
    """as in the authors' code, a segment cut short by its episode's end has arrived, wherever its goal is; off: only
    one that ends at its goal has"""
    goal_part: tuple[int, ...] = ()
    """of the dataset's goal coordinates the ones that make goals and subgoals, by position from 0; all when empty"""
    flow_steps: int = 10
    """of Euler's, from noise to a draw"""
    candidates: int = 32
    """subgoals to choose from when acting; of actions as many, with `double`"""
    double: bool = False
    """Double SHARSA: actions, too, are chosen, by a value of single steps"""

    @property
    def reads_whole_goals(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.candidates <= TABLE, f"candidates can be at most {TABLE}")


class Sarsa(nn.Module):
    """V(s, g) and Q(s, w, g) of the behaviour, as logits: how much of one is left, at a discount a step, on arrival.

    w is what is done in s: a subgoal, or an action.
    """

    def __init__(self, states: int, goals: int, done: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.value = Value(1, states + goals, hidden)
        self.critic = Value(2, states + goals + done, hidden)
        self.target_critic = target_of(self.critic)

    def value_loss(
        self, name: str, s: Tensor, w: Tensor, g: Tensor, aggregate: Literal["min", "mean"]
    ) -> tuple[Tensor, Metrics]:
        """E[BCE(V(s, g), min_j sigma(Q'_j(s, w, g)))], Q' the target critics; or the mean in the place of the least."""
        with torch.no_grad():
            both = torch.sigmoid(self.target_critic(s, g, w))  # (2, B)
            q = both.amin(0) if aggregate == "min" else both.mean(0)  # (B,)
        v = self.value(s, g).squeeze(0)  # (B,)
        loss = F.binary_cross_entropy_with_logits(v, q)
        return loss, {f"{name}/loss": loss.detach(), **spread(torch.sigmoid(v), name)}

    def critic_loss(
        self, name: str, s: Tensor, w: Tensor, g: Tensor, ends: Tensor, factor: Tensor, done: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Sum over j of E[BCE(Q_j(s, w, g), y)]; y = factor where a segment is done, else factor sigma(V(s', g)), s'
        its end and factor = gamma^steps. V is the online one, and gets no gradient."""
        with torch.no_grad():
            onward = torch.sigmoid(self.value(ends, g).squeeze(0))  # (B,)
            y = factor * (done + (1.0 - done) * onward)  # (B,)
        q = self.critic(s, g, w)  # (2, B)
        loss = F.binary_cross_entropy_with_logits(q, y.expand_as(q), reduction="none").sum(0).mean()
        return loss, {f"{name}/loss": loss.detach(), f"{name}/target": y.mean(), f"{name}/done": done.mean()}

    def best(self, s: Tensor, w: Tensor, g: Tensor) -> Tensor:
        """Of candidates w (n, N, d) the one with the greatest min_j Q_j(s, w, g): (n, d)."""
        s, g = (x[:, None].expand(-1, w.shape[1], -1).flatten(0, 1) for x in (s, g))  # (n N, ...)
        return best_of(w, self.critic(s, g, w.flatten(0, 1)).amin(0).view(w.shape[:2]))


class SHARSA(Agent):
    Config = SHARSAConfig
    training_only = ("high.value.", "high.target_critic.", "low.value.", "low.target_critic.")
    config: SHARSAConfig

    def __init__(self, config: SHARSAConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d_s, d_g, d_a = spec.observation_dim, len(self.narrow(config.goal_part)), spec.action_dim
        self.high = Sarsa(d_s, d_g, d_g, config.value_hidden)
        self.high_actor = Velocity(d_g, d_s + d_g, config.hidden, layer_norm=True)  # of subgoals, given s and g
        self.low_actor = Velocity(d_a, d_s + d_g, config.hidden, layer_norm=True)  # of actions, given s and a subgoal
        self.low = Sarsa(d_s, d_g, d_a, config.value_hidden) if config.double else None
        learned = [p for p in self.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(learned, lr=config.learning_rate, fused=True)
        for level in filter(None, (self.high, self.low)):
            follow(self.optimizer, level.target_critic, level.critic, config.target_rate)
        self.register_buffer("noise", table(TABLE, d_g + d_a), persistent=False)

    noise: Tensor

    def coordinates(self, goals: Tensor) -> Tensor:
        """What is seen of goals and of subgoals (..., d_s): their goal coordinates (..., d_g), as they are."""
        return goals[..., self.goal_indices]

    # ----------------------------------------------------------------------------------------------- learning

    def value_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Of V(s, g) on Q'(s, w, g), w the place where the segment ends."""
        w, g = self.coordinates(batch["value_ends"]), self.coordinates(batch["value_goals"])
        return self.high.value_loss("value", batch["observations"], w, g, self.config.aggregate)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Of Q(s, w, g) on gamma^kappa (1 if done, else sigma(V(s', g))), s' the state kappa <= n steps ahead."""
        ends, g = batch["value_ends"], self.coordinates(batch["value_goals"])
        factor = self.config.discount ** batch["value_steps"]
        s, w, done = batch["observations"], self.coordinates(ends), batch["value_done"]
        return self.high.critic_loss("critic", s, w, g, ends, factor, done)

    def high_actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """E[|v(x_t, t | s, g) - (w - x_0)|^2] / d_g, w the place n steps ahead, or g where g is nearer."""
        w, g = self.coordinates(batch["high_actor_targets"]), self.coordinates(batch["high_actor_goals"])
        loss = self.high_actor.errors(w, batch["observations"], g).mean()
        return loss, {"high_actor/loss": loss.detach()}

    def low_actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """E[|v(x_t, t | s, w) - (a - x_0)|^2] / d_a, w the place n steps ahead."""
        w = self.coordinates(batch["low_actor_goals"])
        loss = self.low_actor.errors(batch["actions"], batch["observations"], w).mean()
        return loss, {"low_actor/loss": loss.detach()}

    def low_value_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Double SHARSA's: of V(s, g) on Q'(s, a, g)."""
        assert self.low is not None
        s, a, g = batch["observations"], batch["actions"], self.coordinates(batch["low_value_goals"])
        return self.low.value_loss("low_value", s, a, g, self.config.aggregate)

    def low_critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Double SHARSA's: of Q(s, a, g) on 1 where s is the goal, else on gamma_low sigma(V(s', g)), s' the next."""
        assert self.low is not None
        s, a, g = batch["observations"], batch["actions"], self.coordinates(batch["low_value_goals"])
        factor = self.low_discount ** batch["low_value_steps"]
        return self.low.critic_loss("low_critic", s, a, g, batch["low_value_ends"], factor, batch["low_value_done"])

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All at once, on the same transitions; no gradient passes between them."""
        losses: list[Callable[[Batch], tuple[Tensor, Metrics]]]
        losses = [self.value_loss, self.critic_loss, self.high_actor_loss, self.low_actor_loss]
        if self.low is not None:
            losses += [self.low_value_loss, self.low_critic_loss]
        return all_at_once([partial(loss, batch) for loss in losses], batch.values())

    @property
    def low_discount(self) -> float:
        """gamma_low = 1 - 1 / n: the value of single steps looks as far as a subgoal."""
        return 1.0 - 1.0 / self.config.subgoal_steps

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        current, anywhere = config.value_p_current, config.value_p_random
        value = GoalLaw(current, 1.0 - current - anywhere, anywhere)
        low = GoalLaw(value.p_current, value.p_trajectory, value.p_random, self.low_discount)
        far = config.discount if config.actor_geometric else None
        sampler = SubgoalSamplerConfig(
            steps=config.subgoal_steps,
            value=value,
            actor=GoalLaw(0.0, 1.0 - config.actor_p_random, config.actor_p_random, far),
            low_value=low if config.double else None,
            end_is_goal=config.end_is_goal,
        )
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, (self.optimizer,)),)

    # ------------------------------------------------------------------------------------------------- acting

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """Candidates of w from the high flow, the best of them by Q(s, w, g), and an action from the low flow, given it
        (with `double`, the best of as many by Q(s, a, w)). At each step so many rows further in the table of noise."""
        config, g = self.config, self.coordinates(goal)
        rows, row = next_rows(observation, goal, memory, config.candidates, TABLE)  # (n, N), (n,)
        for_subgoals, for_actions = self.noise[rows].split([g.shape[-1], self.spec.action_dim], dim=-1)
        subgoals = self.draw(self.high_actor, for_subgoals, observation, g)  # (n, N, d_g)
        w = self.high.best(observation, subgoals, g)  # (n, d_g)
        if self.low is None:
            action = self.draw(self.low_actor, for_actions[:, :1], observation, w).squeeze(1)  # (n, d_a)
        else:
            action = self.low.best(observation, self.draw(self.low_actor, for_actions, observation, w), w)
        return action.clamp(-1.0, 1.0), {"row": row}

    def draw(self, flow: Velocity, noise: Tensor, s: Tensor, g: Tensor) -> Tensor:
        """Where the flow carries noise (n, N, d), given s and g (n, ...)."""
        s, g = (x[:, None].expand(-1, noise.shape[1], -1) for x in (s, g))
        return flow.carry(noise, s, g, steps=self.config.flow_steps)
