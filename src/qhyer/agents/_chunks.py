"""What agents that choose h actions at a time share: flow Q-learning's policy (Park et al., 2025) over chunks.

Nothing here is an agent. An agent's file says what a chunk is worth (`critic`, `q`) and how that is learnt; what would
be the same lines in two files stands here once:

- batches of chunks, with the goals' laws of OGBench's GCIQL;
- a flow that imitates the data's chunks, and an actor that makes a chunk of noise in one step: it is taught by the
  flow and climbs the critic;
- when acting, a chunk is carried out to its end, whatever is seen meanwhile.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw
from qhyer.data.segments import ChunkSamplerConfig
from qhyer.nn.chance import next_rows, table
from qhyer.nn.matching import Velocity, fresh
from qhyer.nn.mlp import MLP
from qhyer.nn.values import follow, frozen

TABLE = 4096  # rows of noise for acting: more than an episode has chunks, so that none repeats within one


@dataclass(frozen=True)
class ChunkConfig(GoalConfig):
    """QC-FQL's settings, from which the others depart."""

    batch_size: int = 256
    """chunks per update"""
    hidden: tuple[int, ...] = (512, 512, 512, 512)
    """widths of the hidden layers of the flow and of the actor"""
    value_hidden: tuple[int, ...] = (512, 512, 512, 512)
    """widths of the hidden layers of every value"""
    chunk: int = 5
    """h: actions that are chosen, judged and carried out at a time"""
    discount: float = 0.99
    """gamma, per step, of what follows a chunk, and of the value's geometric goals"""
    alpha: float = 100.0
    """weight of staying near the flow's chunks, beside a critic that is not normalised"""
    flow_steps: int = 10
    """Euler's steps of the flow, in training alone"""
    target_rate: float = 0.005
    """how far the target critic moves towards the critic at each update"""
    value_p_current: float = 0.2
    """chance that a value's goal is the state itself"""
    value_p_random: float = 0.3
    """chance that it is any row of the dataset; otherwise it lies ahead in the episode"""
    actor_p_random: float = 0.0
    """chance that an actor's goal is any row; otherwise it lies ahead in the episode"""


class ChunkAgent(Agent):
    config: ChunkConfig
    critic: nn.Module
    """Q(s, g, a_{t:t+h}); `q` reads it"""

    def __init__(self, config: ChunkConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.pair = 2 * spec.observation_dim
        self.size = config.chunk * spec.action_dim  # of a chunk, its actions side by side
        self.flow = Velocity(self.size, self.pair, config.hidden)
        self.actor = MLP(self.pair + self.size, config.hidden, self.size)
        self.register_buffer("noise", table(TABLE, self.size), persistent=False)

    noise: Tensor

    def learn(self, critic: nn.Module, target: nn.Module) -> None:
        """One Adam for every network there is but the target, which follows the critic."""
        learned = [p for p in self.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(learned, lr=self.config.learning_rate, fused=True)
        follow(self.optimizer, target, critic, self.config.target_rate)

    @abstractmethod
    def q(self, observations: Tensor, goals: Tensor, chunks: Tensor) -> Tensor:
        """What the critic makes of chunks (B, h d_a), for the actor to climb: (B,)."""

    def propose(self, noise: Tensor, observations: Tensor, goals: Tensor) -> Tensor:
        """mu(s, g, z): the actor's chunk (B, h d_a) of noise z (B, h d_a), not cut to [-1, 1] yet."""
        return self.actor(torch.cat([observations, goals, noise], dim=-1))

    def flow_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """E[|v(x_t, t | s, g) - (x1 - x0)|^2] per coordinate, x1 the data's chunk; steps that are not there count as
        none."""
        errors = self.flow.errors(batch["actions"], batch["observations"], batch["actor_goals"])  # (B, h d_a)
        loss = (errors.unflatten(-1, (self.config.chunk, -1)) * batch["valid"][..., None]).mean()
        return loss, {"flow/loss": loss.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """alpha E[|mu(s, g, z) - F(s, g, z)|^2] per coordinate - E[Q(s, g, mu(s, g, z))], F where the flow carries the
        same noise z; F, and the chunks that Q sees, are cut to [-1, 1]."""
        s, g, steps = batch["observations"], batch["actor_goals"], self.config.flow_steps
        noise = fresh(batch["actions"])
        with torch.no_grad():
            taught = self.flow.carry(noise, s, g, steps=steps).clamp(-1.0, 1.0)  # (B, h d_a)
        chunks = self.propose(noise, s, g)
        distillation = F.mse_loss(chunks, taught)
        with frozen(self.critic):
            q = self.q(s, g, chunks.clamp(-1.0, 1.0)).mean()
        loss = self.config.alpha * distillation - q
        metrics = {"actor/loss": loss, "actor/distillation": distillation, "actor/q": q}
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All losses together."""

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        # Unspecified in the paper: rewards and goal laws of reward-based methods that are adapted to goals. OGBench's.
        current, anywhere = config.value_p_current, config.value_p_random
        sampler = ChunkSamplerConfig(
            value=GoalLaw(current, 1.0 - current - anywhere, anywhere, config.discount),
            actor=GoalLaw(0.0, 1.0 - config.actor_p_random, config.actor_p_random),
            chunk=config.chunk,
        )
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, (self.optimizer,)),)

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """mu(s, g, z) with z ~ N(0, I) from the table, a row further at each chunk; then the rest of the chunk."""
        if memory is not None and memory["plan"].shape[1]:  # whatever is seen
            plan, row = memory["plan"].clone(), memory["row"]
        else:
            rows, row = next_rows(observation, goal, memory, 1, TABLE)  # (n, 1), (n,)
            chunk = self.propose(self.noise[rows[:, 0]], observation, goal).clamp(-1.0, 1.0)
            plan = chunk.unflatten(-1, (self.config.chunk, -1))  # (n, h, d_a)
        return plan[:, 0], {"plan": plan[:, 1:], "row": row}
