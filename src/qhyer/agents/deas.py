"""DEAS: detached value learning with action sequences (Kim et al., 2025), here towards goals.

Idea. Values of whole action sequences look further ahead, but an actor that climbs them finds their errors. So the
values are learnt without it: V(s, g) is an upper expectile of Q over the data's sequences, as in IQL, and Q the backup
of V over h steps. Both are histograms learnt by cross-entropy, and rewards within a sequence have a discount of their
own. A policy is then extracted, here as flow Q-learning does.
Paper. DEAS: DEtached value learning with Action Sequence for Scalable Offline RL, 2025 (arXiv 2510.07730).
Code. None read: that of the OGBench experiments (csmile-1006/DEAS-FQL) was not to be had. Built from descriptions of
the method and from the settings of the authors' critic for robots (csmile-1006/Isaac-GR00T).
Deviations. Unknown for OGBench, and so inferred: the expectile, the bins, their support and sigma, the networks' sizes,
the batch, alpha on all but cube-double, how the actor is extracted, and that sequences cut by an episode's end count as
none. The authors learn one task from its rewards. Here every network sees the goal, rewards are -1 until the goal's own
row and 0 there, and a sequence ends at its goal: neither rewards nor bootstrapping after it; goals follow the laws of
OGBench's GCIQL, with uniform future ones for the actor. When acting, noise comes from a fixed table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qhyer.agent import Batch, Metrics
from qhyer.agents._chunks import ChunkAgent, ChunkConfig
from qhyer.data.episodes import DataSpec
from qhyer.errors import require
from qhyer.losses import cross_entropy, discounted
from qhyer.nn.values import HistogramValue, spread, target_of
from qhyer.streams import all_at_once


# Unspecified in the paper: expectile, bins, support and alpha of DEAS. Nor are they in what could be read of DEAS's own
# for OGBench; these are of its authors' critic for robots, and alpha is that of their one example.
@dataclass(frozen=True)
class DEASConfig(ChunkConfig):
    chunk: int = 4
    """h: actions that are chosen, judged and carried out at a time"""
    alpha: float = 300.0
    """weight of staying near the flow's chunks, beside a critic that is not normalised"""
    reward_discount: float = 0.9
    """gamma_1, of rewards within a chunk; `discount` is gamma_2, of what follows it"""
    expectile: float = 0.9
    """tau: how far V leans to the best of the data"""
    bins: int = 101
    """m, of the histograms that values are"""
    sigma: float = 0.75
    """standard deviation, in bins, of the Gaussian that stands for a number"""
    lowest: float | None = None
    """where the histograms begin (they end at 0); the least return there can be when None"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 <= self.reward_discount <= 1.0, "reward_discount must lie between 0 and 1")
        require(self.bins >= 2, "bins must be at least 2")
        require(self.sigma > 0.0, "sigma must be positive")
        require(self.lowest is None or self.lowest < 0.0, "lowest must be negative")

    def never(self) -> float:
        """The least return there can be, that of never reaching a goal: -1 / (1 - gamma), which is where the authors'
        histograms for robots begin, if both discounts are gamma."""
        return -sum(self.reward_discount**u for u in range(self.chunk)) / (1.0 - self.discount**self.chunk)


class DEAS(ChunkAgent):
    Config = DEASConfig
    training_only = ("flow.", "value.", "critic.", "target_critic.")
    config: DEASConfig

    def __init__(self, config: DEASConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        low = config.never() if config.lowest is None else config.lowest
        histograms = config.value_hidden, config.bins, low, 0.0, config.sigma
        self.value = HistogramValue(1, self.pair, *histograms)
        self.critic: HistogramValue = HistogramValue(2, self.pair + self.size, *histograms)
        self.target_critic = target_of(self.critic)
        self.learn(self.critic, self.target_critic)

    def q(self, observations: Tensor, goals: Tensor, chunks: Tensor) -> Tensor:
        return self.critic.mean(self.critic(observations, goals, chunks)).mean(0)

    def value_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """E[|tau - 1(Q' < V)| CE(Q'(s, g, a), V(s, g))], Q' that of the target critics with the lesser mean: V's
        histogram is drawn to Q', more where Q' is better."""
        s, g = batch["observations"], batch["value_goals"]
        logits = self.value(s, g).squeeze(0)  # (B, m)
        with torch.no_grad():
            v = self.value.mean(logits)  # (B,)
            both = self.target_critic(s, g, batch["actions"])  # (2, B, m)
            q, which = self.target_critic.mean(both).min(0)  # (B,)
            masses = both.softmax(-1).gather(0, which[None, :, None].expand(1, *both.shape[1:])).squeeze(0)  # (B, m)
            weight = torch.where(q < v, 1.0 - self.config.expectile, self.config.expectile)
        loss = (weight * cross_entropy(logits, masses) * batch["valid"][..., -1]).mean()
        return loss, {"value/loss": loss.detach(), "value/advantage": (q - v).mean(), **spread(v)}

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Mean over j of E[CE(hist(y), Q_j(s, g, a))], y = sum_u gamma_1^u r_u + gamma_2^h V(s_h, g): V is the online
        one, and gets no gradient; s_h is the state after the chunk."""
        s, s_h, g, config = batch["observations"], batch["next_observations"], batch["value_goals"], self.config
        with torch.no_grad():
            after = self.value.mean(self.value(s_h, g)).squeeze(0)  # (B,)
            y = discounted(batch["rewards"], config.reward_discount)
            y = y + config.discount**config.chunk * batch["masks"] * after
            masses = self.critic.histogram(y)  # (B, m)
        logits = self.critic(s, g, batch["actions"])  # (2, B, m)
        loss = (cross_entropy(logits, masses) * batch["valid"][..., -1]).mean()
        q = self.critic.mean(logits.detach())
        return loss, {"critic/loss": loss.detach(), "critic/target": y.mean(), **spread(q, "critic")}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All four at once; no gradient passes between them."""
        losses = (self.value_loss, self.critic_loss, self.flow_loss, self.actor_loss)
        return all_at_once([partial(loss, batch) for loss in losses], batch.values())
