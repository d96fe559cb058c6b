"""NF-GCBC: goal-conditioned behaviour cloning with a normalizing flow as the policy (Ghugare and Eysenbach, 2025).

Idea. Where people act in more ways than one, a Gaussian imitates their average, which may be nobody's action. A
conditional flow gives the exact likelihood of an action and has as many modes as the data. It is fitted to actions
with a little noise on them, and a step along the score takes the noise off what it draws.
Paper. Normalizing Flows are Capable Models for RL, 2025 (arXiv 2505.23527).
Code. Princeton-RL/normalising-flows-4-reinforcement-learning, il-and-cil/flax_fcnf_gcbc.py at 5849e01.
Deviations. The authors draw fresh noise at each step of an episode; here the noise is a fixed table, so that acting is
a function of what is seen. Weight decay on matrices only; both hidden layers of a coupling have 256 units (320 and 256
in that file), and their LayerNorm eps 1e-5 (1e-6 there); PyTorch's initial weights in the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import TransitionSamplerConfig
from qhyer.errors import require
from qhyer.losses import gaussian_nll
from qhyer.nn.chance import next_rows, table
from qhyer.nn.flow import ConditionalRealNVP, SAEncoder
from qhyer.nn.optim import adamw, warm_up_cosine
from qhyer.nn.values import best_of

TABLE = 4096  # rows of noise for acting: longer than an episode, so that none repeats within one


@dataclass(frozen=True)
class NFGCBCConfig(GoalConfig):
    batch_size: int = 256
    """transitions per update"""
    discount: float = 0.97
    """gamma: goals lie Geom(1 - gamma) steps ahead, at most at the episode's end"""
    noise: float = 0.1
    """sigma: noise on the actions in training, and what the step along the score takes off"""
    flow_blocks: int = 6
    """linear map and coupling, this many times"""
    flow_channels: int = 256
    """width of the couplings' networks"""
    encoder_width: int = 512
    """of the encoder of state and goal"""
    encoder_layers: int = 4
    """of the encoder of state and goal"""
    representation: int = 64
    """width of what the encoder tells the flow"""
    weight_decay: float = 1e-6
    """AdamW's, on matrices only"""
    warmup: int = 500
    """updates over which the learning rate rises linearly; a cosine to `final_rate` follows"""
    final_rate: float = 1e-6
    """learning rate at the last update"""
    acting: Literal["denoised", "raw", "likeliest"] = "denoised"
    """a draw, denoised (the paper); a draw as it is (its ablation); the likeliest of `candidates` draws, denoised"""
    candidates: int = 32
    """draws to choose from, when acting is "likeliest" """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("noise", "weight_decay", "final_rate"):
            require(getattr(self, name) >= 0, f"{name} cannot be negative")
        require(self.candidates <= TABLE, f"candidates can be at most {TABLE}")


class NFGCBC(Agent):
    Config = NFGCBCConfig
    config: NFGCBCConfig

    def __init__(self, config: NFGCBCConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.encoder = SAEncoder(
            2 * spec.observation_dim, config.encoder_width, config.encoder_layers, config.representation
        )
        self.flow = ConditionalRealNVP(spec.action_dim, config.representation, config.flow_blocks, config.flow_channels)
        self.optimizer = adamw(self.parameters(), config.learning_rate, config.weight_decay)
        self.register_buffer("latents", table(TABLE, spec.action_dim), persistent=False)

    latents: Tensor

    def context(self, observations: Tensor, goals: Tensor) -> Tensor:
        """y = enc([s; g]), of raw observations: what the flow over actions is conditioned on."""
        return self.encoder(observations, goals).float()

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """-E[log pi(a + sigma eps | s, g)]: a density cannot be fitted to actions that repeat, as clipped ones do."""
        actions = batch["actions"] + self.config.noise * torch.randn_like(batch["actions"])
        context = self.context(batch["observations"], batch["goals"])
        # The flow itself stays in full precision: log-densities are differences of large numbers.
        with torch.autocast(actions.device.type, enabled=False):
            z, log_det = self.flow(actions.float(), context)  # (B, d_a), (B,)
        loss = (gaussian_nll(z, torch.zeros_like(z)) - log_det).mean()
        return loss, {"actor/nll": loss.detach(), "actor/latent_square": z.detach().square().mean()}

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        sampler = TransitionSamplerConfig(p_trajectory=1.0, discount=config.discount)
        return (
            Stage(
                "actor",
                config.steps,
                config.batch_size,
                sampler,
                self.loss,
                (self.optimizer,),
                schedule=warm_up_cosine(config.warmup, config.steps, config.final_rate / config.learning_rate),
            ),
        )

    # ------------------------------------------------------------------------------------------------ acting

    def denoise(self, actions: Tensor, context: Tensor) -> Tensor:
        """a + sigma^2 grad_a log pi(a | s, g): the mean of the clean action given the noisy one (Tweedie)."""
        with torch.enable_grad():
            actions = actions.detach().requires_grad_()
            (score,) = torch.autograd.grad(self.flow.log_prob(actions, context).sum(), actions)
        return actions.detach() + self.config.noise**2 * score

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """f^-1(z; s, g) with z ~ N(0, I) from the table, a row further at each step, then denoised."""
        context = self.context(observation, goal)  # (n, c)
        if self.config.acting == "likeliest":
            count = self.config.candidates
            contexts = context[:, None].expand(-1, count, -1)  # (n, candidates, c)
            latents = self.latents[:count].expand(len(context), -1, -1)
            draws = self.flow.inverse(latents, contexts)  # (n, candidates, d_a)
            action = best_of(draws, self.flow.log_prob(draws, contexts))  # (n, d_a)
            return self.denoise(action, context).clamp(-1.0, 1.0), None
        rows, row = next_rows(observation, goal, memory, 1, TABLE)  # (n, 1), (n,)
        action = self.flow.inverse(self.latents[rows[:, 0]], context)  # (n, d_a)
        if self.config.acting == "denoised":
            action = self.denoise(action, context)
        return action.clamp(-1.0, 1.0), {"row": row}
