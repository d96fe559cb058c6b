"""GCBC: goal-conditioned behaviour cloning (Ghosh et al., 2021), as in OGBench's reference implementation.

Idea. Imitate the dataset's action, given the state and a goal drawn from the same trajectory's future.
Paper. Learning to Reach Goals via Iterated Supervised Learning, ICLR 2021; protocol of OGBench, ICLR 2025.
Code. seohongpark/ogbench, impls/agents/gcbc.py at 1d41409.
Deviations. The final state of an episode may be a goal (OGBench's index arithmetic leaves it out).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import TransitionSamplerConfig
from qhyer.losses import gaussian_nll
from qhyer.nn.mlp import MLP


@dataclass(frozen=True)
class GCBCConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the actor's hidden layers"""
    discount: float | None = None
    """geometric future goals with this discount; uniform future goals when None (OGBench)"""


class GCBC(Agent):
    Config = GCBCConfig
    stackable = True
    config: GCBCConfig

    def __init__(self, config: GCBCConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        # The mean layer starts near zero: flax variance scale 1e-2.
        self.actor = MLP(2 * spec.observation_dim, config.hidden, spec.action_dim, final_scale=1e-2)
        self.optimizer = torch.optim.Adam(self.actor.parameters(), lr=config.learning_rate, fused=True)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """-E[log pi(a | s, g)], a Gaussian of unit variance."""
        mean = self.actor(torch.cat([batch["observations"], batch["goals"]], dim=-1))
        loss = gaussian_nll(mean, batch["actions"]).mean()
        return loss, {"actor/bc": loss.detach(), "actor/mse": F.mse_loss(mean.detach(), batch["actions"])}

    def stages(self) -> tuple[Stage, ...]:
        sampler = TransitionSamplerConfig(p_trajectory=1.0, discount=self.config.discount)
        return (Stage("actor", self.config.steps, self.config.batch_size, sampler, self.loss, (self.optimizer,)),)

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return self.actor(torch.cat([observation, goal], dim=-1)).clamp(-1.0, 1.0), None
