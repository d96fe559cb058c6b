"""TRL: transitive reinforcement learning, values by divide and conquer (Park et al., 2026).

Idea. On the way from s to g through w, the chance gamma^d of a path of d steps is the product of those of its halves,
and the shortest way is the best product over all w. A value is learnt from two values of shorter ways, met at a state
that the data passed between s and g; so a way of T steps needs log T backups and not T. A Q of whole goal states is
learnt so, a second Q that sees the goal's coordinates alone imitates it, and the actor climbs that.
Paper. Transitive RL: Value Learning via Divide and Conquer, ICLR 2026 (arXiv 2510.22512).
Code. aoberai/trl, agents/trl.py at adfec6f.
Deviations. The final state of an episode may be a goal, and its last transition counts (the code's index arithmetic
leaves both out). Actions of the data are used as they are (there: cut to 1 - 1e-5). `frs` judges an action by the
lesser of both Q (there the greatest of all entries of both), and its noise is a fixed table, so that acting is a
function of what is seen. Left out: a critic without the second one, discrete actions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw
from qhyer.data.segments import MidpointSamplerConfig
from qhyer.errors import require
from qhyer.losses import ddpg_bc, gaussian_nll
from qhyer.nn.chance import next_rows, table
from qhyer.nn.matching import Velocity
from qhyer.nn.mlp import MLP
from qhyer.nn.values import Value, best_of, follow, frozen, spread, target_of
from qhyer.streams import all_at_once

TABLE = 2**15  # rows of noise for acting: 1024 steps of 32 candidates before it repeats


@dataclass(frozen=True)
class TRLConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the actor's hidden layers, with LayerNorm"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the hidden layers of each Q"""
    discount: float = 0.99
    """gamma: a way of d steps is worth gamma^d; also of the geometric future goals"""
    expectile: float = 0.7
    """kappa: how far Q leans to the shortest of the ways that the data show"""
    distance_power: float = 1.0
    """lambda: a sample of a way of d steps counts (1 + d)^-lambda; 0: all alike"""
    target_rate: float = 0.005
    """how far the target Q moves per update"""
    actor: Literal["rpg", "frs"] = "rpg"
    """a Gaussian that climbs Q and stays near the data, or a flow that imitates and of whose draws Q takes the best"""
    alpha: float = 1.0
    """weight of staying near the data (rpg)"""
    actor_p_random: float = 0.0
    """chance that an actor's goal is any row of the dataset; otherwise it lies ahead in the episode, uniformly"""
    goal_part: tuple[int, ...] = ()
    """of the dataset's goal coordinates the ones that the second Q and the actor see, by position from 0; all when
    empty"""
    candidates: int = 32
    """actions to choose from at each step (frs)"""
    flow_steps: int = 10
    """steps of Euler's from noise to an action (frs)"""

    whole_goals = (
        "a way ends where the next one begins, in a whole state; that holds while it learns, and its policy "
        "reads the coordinates alone as it is"
    )

    @property
    def reads_whole_goals(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.discount > 0.0, "discount must be above 0: the length of a way is read off it")
        require(self.distance_power >= 0.0, "distance_power cannot be negative")
        require(self.candidates <= TABLE, f"candidates can be at most {TABLE}")


class TRL(Agent):
    Config = TRLConfig
    training_only = ("critic.", "target_critic.", "oracle_critic.")
    stackable = True
    config: TRLConfig

    def __init__(self, config: TRLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d_s, d_g, d_a = spec.observation_dim, len(self.narrow(config.goal_part)), spec.action_dim
        # Their outputs are logits: Q = sigmoid of them.
        self.critic = Value(2, 2 * d_s + d_a, config.value_hidden)
        self.oracle_critic = Value(2, d_s + d_g + d_a, config.value_hidden)
        self.actor: MLP | Velocity
        if config.actor == "rpg":  # the mean layer starts near zero: flax variance scale 1e-2
            self.actor = MLP(d_s + d_g, config.hidden, d_a, layer_norm=True, final_scale=1e-2)
        else:
            self.actor = Velocity(d_a, d_s + d_g, config.hidden, layer_norm=True)
            self.stackable = False  # its loss draws noise
            self.register_buffer("noise", table(TABLE, d_a), persistent=False)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=config.learning_rate, fused=True)
        self.target_critic = target_of(self.critic)
        follow(self.optimizer, self.target_critic, self.critic, config.target_rate)

    noise: Tensor

    def oracle(self, goals: Tensor) -> Tensor:
        """What of a goal (..., d_s) decides whether it is reached (..., d_g)."""
        return goals[..., self.goal_indices]

    # ------------------------------------------------------------------------------------------- the critics

    def logits(self, batch: Batch) -> Tensor:
        """Of Q(s_i, a_i, s_j) (2, B), j the value's goal."""
        return self.critic(batch["observations"], batch["value_goals"], batch["actions"])

    def critic_loss(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Metrics]:
        """E[w BCE(Q_h(s_i, a_i, s_j), y_h)], y_h = Q'_h(s_i, a_i, s_k) Q'_h(s_k, a_k, s_j), Q' the target, the mean
        over both heads h.

        w = (kappa where y >= Q, else 1 - kappa) (1 + log_gamma y)^-lambda: the greatest product counts most, and short
        ways, of which the long ones are made, before long ones. A factor of no step or one is known: gamma^steps.
        """
        config, log_gamma = self.config, math.log(self.config.discount)
        with torch.no_grad():
            middle, steps = batch["midpoints"], torch.cat([batch["first_steps"], batch["second_steps"]])  # (2 B,)
            halves = self.target_critic(
                torch.cat([batch["observations"], middle]),
                torch.cat([middle, batch["value_goals"]]),
                torch.cat([batch["actions"], batch["midpoint_actions"]]),
            )  # (2, 2 B) logits
            log_q = torch.where(steps <= 1.0, steps * log_gamma, F.logsigmoid(halves))  # (2, 2 B)
            first, second = log_q.chunk(2, dim=1)
            log_y = first + second  # (2, B)
            y, distance = log_y.exp(), log_y / log_gamma
            lean = torch.where(y >= logits.sigmoid(), config.expectile, 1.0 - config.expectile)
            weight = lean * (1.0 + distance) ** -config.distance_power  # (2, B)
        loss = (weight * F.binary_cross_entropy_with_logits(logits, y, reduction="none")).mean()
        return loss, {
            "critic/loss": loss.detach(),
            "critic/target": y.mean(),
            "critic/weight": weight.mean(),
            **spread(logits.sigmoid(), "critic"),
        }

    def oracle_critic_loss(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Metrics]:
        """E[BCE(Q_o(s_i, a_i, o(s_j)), Q(s_i, a_i, s_j))], head by head, o(g) the goal's coordinates: what is not of
        the goal is averaged out."""
        q = logits.detach().sigmoid()  # (2, B)
        found = self.oracle_critic(batch["observations"], self.oracle(batch["value_goals"]), batch["actions"])
        loss = F.binary_cross_entropy_with_logits(found, q)
        return loss, {
            "oracle_critic/loss": loss.detach(),
            "oracle_critic/error": F.l1_loss(found.detach().sigmoid(), q),
        }

    # --------------------------------------------------------------------------------------------- the actor

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """At the actor's goals. rpg: -E[f(s, mu, g)] / E|f| - alpha E[log pi(a | s, g)], f the lesser logit of Q_o, mu
        the mean cut to [-1, 1]. frs: flow matching, E[(v(x_t, t | s, g) - (a - x_0))^2]."""
        s, a, g = batch["observations"], batch["actions"], self.oracle(batch["actor_goals"])
        if isinstance(self.actor, Velocity):
            loss = self.actor.errors(a, s, g).mean()
            return loss, {"actor/loss": loss.detach()}
        mean = self.actor(torch.cat([s, g], dim=-1))  # (B, d_a)
        with frozen(self.oracle_critic):
            q = self.oracle_critic(s, g, mean.clamp(-1.0, 1.0)).amin(0)  # (B,)
        loss = ddpg_bc(q, gaussian_nll(mean, a), self.config.alpha)
        metrics = {"actor/loss": loss, "actor/q": q.mean(), "actor/mse": F.mse_loss(mean, a)}
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All three at once; no gradient passes between them."""
        logits = self.logits(batch)
        losses = [
            partial(self.critic_loss, batch, logits),
            partial(self.oracle_critic_loss, batch, logits),
            partial(self.actor_loss, batch),
        ]
        return all_at_once(losses, [*batch.values(), logits])

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        actor = GoalLaw(0.0, 1.0 - config.actor_p_random, config.actor_p_random)
        sampler = MidpointSamplerConfig(config.discount, actor)
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, (self.optimizer,)),)

    # ------------------------------------------------------------------------------------------------ acting

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """rpg: the mean. frs: rows of the table, carried along the flow; the one whose lesser Q_o is greatest."""
        seen = self.oracle(goal)
        if not isinstance(self.actor, Velocity):
            return self.actor(torch.cat([observation, seen], dim=-1)).clamp(-1.0, 1.0), None
        count = self.config.candidates
        rows, row = next_rows(observation, goal, memory, count, TABLE)  # (n, N), (n,)
        s, g = (x[:, None].expand(-1, count, -1) for x in (observation, seen))
        actions = self.actor.carry(self.noise[rows], s, g, steps=self.config.flow_steps).clamp(-1.0, 1.0)  # (n, N, d_a)
        q = self.oracle_critic(*(x.flatten(0, 1) for x in (s, g, actions))).amin(0).view(-1, count)  # (n, N)
        return best_of(actions, q), {"row": row}

    def acting_state(self) -> dict[str, Tensor]:
        """The actor, and where it imitates the critic that chooses."""
        state = super().acting_state()
        if self.config.actor == "frs":
            state |= {name: p for name, p in self.state_dict().items() if name.startswith("oracle_critic.")}
        return state
