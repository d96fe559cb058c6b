"""QHyer: Q-conditioned hybrid attention-Mamba transformer.

Idea. A conditional flow estimates Q(s, a, g) = log p(g | s, a), the log-probability of reaching g, from hindsight
goals. A causal decoder reads ([s;g], Q, a) tokens, predicts the best in-distribution Q by expectile regression,
then the action conditioned on that Q; when acting, the predicted best Q takes the place of the data's Q.
Paper. QHyer: Q-conditioned Hybrid Attention-mamba Transformer for Offline Goal-conditioned RL, ICML 2026.
Code. None published that we know of; the flow follows Ghugare and Eysenbach (2025), Mamba follows mamba-ssm.
Deviations. Token order, the sign of the expectile, the scale of Q, the goal laws and others that the paper
leaves open: docs/deviations.md lists each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer import distributed, losses
from qhyer.agent import Agent, AgentConfig, Ahead, Batch, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import WindowSamplerConfig
from qhyer.errors import require
from qhyer.nn import contrastive, cvae
from qhyer.nn.bits import Bits
from qhyer.nn.chance import next_rows
from qhyer.nn.flow import ConditionalRealNVP, SAEncoder
from qhyer.nn.hybrid import Backbone, HybridDecoder, StateSpace
from qhyer.nn.optim import adamw, warm_up, warm_up_cosine
from qhyer.nn.scan import kernels
from qhyer.nn.tokens import Tokenization, Tokens
from qhyer.nn.values import best_of
from qhyer.streams import concurrently

Q_SCALE_RATE = 0.01  # Unspecified in the paper: rate of the running mean of |Q|
LUCK_ROWS = 2**15  # of best_of_mixture's table of chance: 512 choices of 64 before it repeats
LOG_STD = (-3.0, 1.0)  # beyond the paper: range of a mixture's log standard deviations
CACHED = "cache/"  # in front of the decoder's names, in the memory of an episode whose window hops
Q_SCALE_FLOOR = 1e-3  # Unspecified in the paper: delta of its normalisation
RIVALS = {"cvae": cvae.given_context, "contrastive": contrastive.given_context}  # of the flow, in the ablation


def loss_kernels(*values: Tensor) -> ModuleType | None:
    """The kernels for what lies between networks and losses, where they can take these values, else None. Where
    processes share a batch its sums are over all of them: the plain code's."""
    if kernels(values[0]) is None or distributed.active():
        return None
    from qhyer.nn import losses_triton

    return losses_triton if losses_triton.fits(*values) else None


@dataclass(frozen=True)
class QHyerConfig(AgentConfig):
    context: int = 20
    """K: steps of history the decoder sees"""
    width: int = 256
    """d_model"""
    layers: int = 4
    """blocks of the decoder"""
    heads: int = 4
    """attention heads"""
    dropout: float = 0.1
    """on attention, branch outputs and MLPs"""
    state_size: int = 16
    """N: Mamba's state per channel"""
    expectile: float = 0.99
    """tau of the Q regression: towards 1, the best Q in the data"""
    discount: float = 0.99
    """gamma of the goal law, Eq. (1)"""
    p_random: float = 0.0
    """chance of a random goal for a window; 0.2 on noisy data"""
    flow_blocks: int = 6
    """linear map and coupling, this many times"""
    flow_channels: int = 256
    """width of the couplings' networks"""
    flow_noise: float = 0.05
    """sigma: noise on the flow's goals in training, in standard deviations"""
    encoder_width: int = 1024
    """of the state-action encoder"""
    encoder_layers: int = 4
    """of the state-action encoder"""
    representation: int = 64
    """width of the state-action representation the flow is conditioned on"""
    flow_batch: float = 0.25
    """flow transitions per window step"""
    weight_critic: float = 1.0
    """lambda of the flow's likelihood, Eq. (14)"""
    weight_bc: float = 1.0
    """lambda of behaviour cloning"""
    weight_q: float = 1.0
    """lambda of the Q regression"""
    weight_decay: float = 0.0
    """AdamW's, on matrices only"""
    grad_clip: float = 1.0
    """greatest gradient norm, critic and actor apart"""
    warmup: int = 0
    """updates over which the learning rate rises linearly"""
    cosine: bool = False
    """let the learning rate fall to zero along a cosine after the warm-up"""
    backbone: Backbone = "hybrid"
    """ablation: both branches, or one alone"""
    ssm: StateSpace = "mamba"
    """the Mamba of that branch; beyond the paper mamba2, whose channels share a decay per head, so that its scan is a
    product of matrices: less work an update"""
    conditioning: Literal["flow", "none", "rtg"] = "flow"
    """ablation: what the Q token holds: the critic's Q, nothing (no token), or the return-to-go of the sparse reward"""
    critic: Literal["flow", "cvae", "contrastive"] = "flow"
    """ablation: what estimates Q: the flow, a conditional VAE or a contrastive classifier of about its size, given the
    same encoding of (s, a). The classifier's Q is log p(g | s, a) / p(g): apart by a number of the goal's own"""
    tokenization: Tokenization = "concat"
    """ablation: goal beside the state, as a token of its own, or left out"""
    regression: Literal["expectile", "quantile", "mse"] = "expectile"
    """ablation: how Q-hat is fitted"""
    flow_defence: float = 0.0
    """beyond the paper: weight of a standard normal mixed into the flow's density. A bare flow's tails fall off so
    fast that a rare but reachable goal gets log p = -40; the mixture, still normalised, keeps Q in range"""
    stitch_rate: float = 0.0
    """beyond the paper: chance per step that a goal's path goes on in another episode passing nearby"""
    stitch_cell: float = 0.1
    """beyond the paper: how near, in standard deviations of the goal coordinates"""
    q_normalization: Literal["scale", "standardize"] = "scale"
    """Q divided by its mean magnitude (the paper), or its mean taken off first and divided by its mean deviation"""
    past_q: Literal["predicted", "critic"] = "predicted"
    """what the Q tokens of past steps hold when acting: the Q-hat that was predicted then (the paper), or, as they do
    in training, the critic's Q of what was done. With a high tau a past that is all Q-hat is like none in the data"""
    history: Literal["sliding", "hopping"] = "sliding"
    """how the window follows when acting. sliding: the last K steps (the paper), decoded anew at each step. Beyond the
    paper hopping: once full, it goes on with the later half of its steps and grows again, and what was decoded is kept:
    a step costs what its own tokens cost, and sees between K / 2 and K steps"""
    goal_input: Literal["observation", "coordinates", "difference"] = "observation"
    """what the decoder sees of a goal: the whole observation (the paper), only the coordinates that make it a goal (the
    rest, such as its arm pose, tells in hindsight what comes next, and nothing then), or those less the state's"""
    goal_frame: Literal["absolute", "relative"] = "absolute"
    """beyond the paper: the critic sees goal coordinates as they are, or as seen from the state (the same density)"""
    binary_goals: Literal["flow", "bits"] = "flow"
    """beyond the paper: goal coordinates of two values are left to the flow (the paper), or get exact probabilities"""
    goal_part: tuple[int, ...] = ()
    """beyond the paper: of the dataset's goal coordinates the ones that critic and decoder see, by position from 0; all
    when empty. (With goal_input observation the decoder sees everything; stitch_cell always looks at all)"""
    action_head: Literal["gaussian", "mixture", "best_of_mixture"] = "gaussian"
    """one Gaussian of fixed width (OGBench's); beyond the paper a mixture: the likeliest of it acts, or a draw
    that the critic chooses. Where several ways lead to a goal, one Gaussian takes their mean: perhaps none"""
    mixtures: int = 8
    """Gaussians of the mixture"""
    candidates: int = 64
    """draws from the mixture between which the critic chooses (best_of_mixture)"""
    choice_temperature: float = 0.2
    """how freely (best_of_mixture): a draw is chosen in proportion to exp(Q / this); 0: the one with the highest Q"""
    chunk: int = 1
    """beyond the paper: actions predicted, judged by the critic and carried out at a time (with context 1). One action
    of a hand that moves for 30 steps says little of where it is going; chosen anew at every step, it may dither"""

    coordinates_option = "--agent.goal-input coordinates"
    acting_alone = ("history", "past_q", "candidates", "choice_temperature")

    @property
    def unread(self) -> dict[str, str]:
        why: dict[str, str] = {}
        if self.context == 1:
            why |= dict.fromkeys(("history", "past_q"), "its context is one step")
        elif self.conditioning != "flow":
            why["past_q"] = f"its conditioning is {self.conditioning}, without a critic"
        if self.action_head != "best_of_mixture":
            why |= dict.fromkeys(("candidates", "choice_temperature"), f"its action_head is {self.action_head}")
        return why

    @property
    def reads_whole_goals(self) -> bool:
        return self.goal_input == "observation" and self.tokenization != "no_goal"

    @staticmethod
    def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration written by an earlier version, with what it has no more and did not use left out."""
        require(
            "prior_weight" not in values or values.get("action_head") != "best_of_mixture",
            "this run is of a version whose best_of_mixture chose by prior_weight, which is gone: train it again",
        )
        return {name: value for name, value in values.items() if name != "prior_weight"}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("heads", "state_size", "mixtures"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        require(self.width % self.heads == 0, f"width {self.width} is not a multiple of {self.heads} heads")
        require(0.0 <= self.stitch_rate <= 1.0, "stitch_rate must lie between 0 and 1")
        require(0.0 <= self.flow_defence < 1.0, "flow_defence must be at least 0 and below 1")
        require(self.flow_noise >= 0.0, "flow_noise cannot be negative")
        require(self.stitch_cell > 0.0, "stitch_cell must be positive")
        require(self.choice_temperature >= 0.0, "choice_temperature cannot be negative")
        require(
            self.conditioning != "flow" or self.batch_size * self.context * self.flow_batch >= 1.0,
            "flow_batch is so small that the flow would see no transition",
        )
        require(
            self.critic != "contrastive" or self.batch_size * self.context * self.flow_batch >= 2.0,
            "a contrastive critic tells goals of a batch apart: flow_batch must give it two transitions or more",
        )
        require(
            self.critic != "contrastive" or self.goal_frame == "absolute",
            "a contrastive critic needs goal_frame absolute: relative, its Q is off by a number of the state's too",
        )
        require(
            self.critic == "flow" or self.binary_goals == "flow",
            f"binary_goals bits goes with critic flow alone: write binary_goals flow to have a {self.critic} critic",
        )
        require(
            self.past_q == "predicted" or self.conditioning == "flow",
            "past_q critic asks the critic: write conditioning flow",
        )
        require(
            self.chunk == 1 or self.context == 1,
            "several actions at a time (chunk) go with one step of context: write context 1",
        )
        require(
            self.action_head != "best_of_mixture" or self.conditioning == "flow",
            "best_of_mixture asks the critic, and there is one only with conditioning flow",
        )
        require(
            self.conditioning != "rtg" or self.stitch_rate == 0.0,
            "the return-to-go is defined on a trajectory of its own: it cannot go with stitch_rate",
        )


class QHyer(Agent):
    Config = QHyerConfig
    training_only = ("critic.",)
    config: QHyerConfig

    def __init__(self, config: QHyerConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d = config.width
        self.plan_dim = config.chunk * spec.action_dim  # of what is chosen at a time; d_a below, unless said
        part = self.narrow(config.goal_part)
        goal_dim = spec.observation_dim if config.goal_input == "observation" else len(part)
        flags = spec.goal_binary or (False,) * spec.goal_dim
        binary = [config.binary_goals == "bits" and flags[i] for i in part]
        self.register_buffer("bit_at", torch.tensor(binary).nonzero()[:, 0], persistent=False)
        self.register_buffer("rest_at", torch.tensor(binary).logical_not().nonzero()[:, 0], persistent=False)
        bits, rest = sum(binary), len(part) - sum(binary)
        self.critic: nn.ModuleDict | None = None
        if config.conditioning == "flow":
            c = config.representation
            inputs = spec.observation_dim + self.plan_dim
            self.critic = nn.ModuleDict({"encoder": SAEncoder(inputs, config.encoder_width, config.encoder_layers, c)})
            if config.critic != "flow":
                make = RIVALS[config.critic]
                self.critic[config.critic] = make(rest, c, config.flow_blocks, config.flow_channels)
            elif rest:
                self.critic["flow"] = ConditionalRealNVP(rest, c, config.flow_blocks, config.flow_channels)
            if bits:
                self.critic["bits"] = Bits(bits, c, config.flow_channels)
            if bits and rest:
                self.critic["given"] = nn.Linear(bits, c)  # the flow's context, given the bits
        self.tokens = Tokens(
            spec.observation_dim,
            self.plan_dim,
            goal_dim,
            d,
            config.context,
            config.tokenization,
            with_q=config.conditioning != "none",
        )
        self.decoder = HybridDecoder(
            d, config.layers, config.heads, config.dropout, config.backbone, config.state_size, config.ssm
        )
        self.q_head = nn.Linear(d, 1) if config.conditioning != "none" else None
        mixture = config.action_head != "gaussian"
        if config.action_head == "best_of_mixture":
            source = torch.Generator().manual_seed(0)
            self.register_buffer("draws", torch.randn(LUCK_ROWS, self.plan_dim, generator=source), persistent=False)
            gumbel = -torch.empty(LUCK_ROWS).exponential_(generator=source).log()
            self.register_buffer("luck", config.choice_temperature * gumbel, persistent=False)
        self.action_head = nn.Linear(d, config.mixtures * (1 + 2 * self.plan_dim) if mixture else self.plan_dim)
        # Mean |Q| of the data, running: the batch mean of the paper's Q normalisation does not exist when acting.
        self.register_buffer("q_shift", torch.zeros(()))
        self.register_buffer("q_scale", torch.ones(()))
        self.register_buffer("q_seen", torch.zeros(()))
        # Unspecified in the paper: gradients are clipped for critic and actor apart. No gradient passes between
        # them, so one's outliers should not shrink the other's steps.
        critic = list(self.critic.parameters()) if self.critic is not None else []
        actor = [p for name, p in self.named_parameters() if not name.startswith("critic.")]
        self.optimizers = tuple(
            adamw(parameters, config.learning_rate, config.weight_decay) for parameters in (actor, critic) if parameters
        )

    draws: Tensor
    luck: Tensor
    bit_at: Tensor
    rest_at: Tensor
    q_shift: Tensor
    q_scale: Tensor
    q_seen: Tensor

    # -------------------------------------------------------------------------------------------- the critic

    def log_density(self, observations: Tensor, actions: Tensor, goals: Tensor) -> Tensor:
        """Eq. (4): Q(s, a, g) = log p(g | s, a), goals in standard units of the goal coordinates; all (..., d)."""
        assert self.critic is not None
        state = self.normalize(observations)
        context = self.critic["encoder"](state, actions)
        # The density itself stays in full precision: log-densities are differences of large numbers.
        with torch.autocast(observations.device.type, enabled=False):
            log_p = self._log_prob(goals.float(), state.float()[..., self.goal_indices], context.float())
            if self.config.flow_defence == 0.0:
                return log_p
            weight = self.config.flow_defence
            if self.config.critic == "contrastive":  # a ratio to the data's goals: mixed with these, of ratio one
                return torch.logaddexp(log_p + math.log1p(-weight), torch.full_like(log_p, math.log(weight)))
            rest = goals.float()[..., self.rest_at]
            broad = -losses.gaussian_nll(torch.zeros_like(rest), rest) - len(self.bit_at) * math.log(2.0)
            return torch.logaddexp(log_p + math.log1p(-weight), broad + math.log(weight))

    def _log_prob(self, goals: Tensor, here: Tensor, context: Tensor) -> Tensor:
        """log p(goals | context): the flow's, with exact probabilities of the binary coordinates where asked for.

        Seen from the state, a goal is a difference, a bit one that has changed or not: both maps keep volume (and
        count), so the density is the same number, and a goal that stays where it is needs no network to say so.
        """
        assert self.critic is not None
        relative = self.config.goal_frame == "relative"
        if "bits" not in self.critic:
            density = self.critic[self.config.critic]
            return density.log_prob(goals - here if relative else goals, context)  # type: ignore[operator]
        bits = goals[..., self.bit_at] > 0.0  # in standard units the lower of two values is negative
        if relative:
            bits = bits != (here[..., self.bit_at] > 0.0)
        bits = bits.float()
        log_p = self.critic["bits"].log_prob(bits, context)  # type: ignore[operator]
        if "flow" not in self.critic:
            return log_p
        rest = (goals - here if relative else goals)[..., self.rest_at]
        return log_p + self.critic["flow"].log_prob(rest, context + self.critic["given"](bits))  # type: ignore[operator]

    def goal_coordinates(self, goals: Tensor) -> Tensor:
        """Raw goal observations (..., d_s) -> the standardised coordinates that make the goal (..., d_g)."""
        return self.normalize(goals)[..., self.goal_indices]

    def actor_goals(self, goals: Tensor, observations: Tensor) -> Tensor:
        """What the decoder sees of raw goals (B, d_s), beside each of the raw observations (B, K, d_s)."""
        if self.config.goal_input == "observation":
            return self.normalize(goals)[:, None].expand(-1, observations.shape[1], -1)
        seen = self.goal_coordinates(goals)[:, None].expand(-1, observations.shape[1], -1)
        return seen - self.goal_coordinates(observations) if self.config.goal_input == "difference" else seen

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Eq. (5): maximum likelihood of hindsight goals, with noise on the goals (the denoising of Alg. 1)."""
        goals = self.goal_coordinates(batch["flow_goals"])
        noise = self.config.flow_noise * torch.randn_like(goals)
        goals = goals + (noise if len(self.bit_at) == 0 else noise.index_fill(-1, self.bit_at, 0.0))
        if self.config.critic != "flow":
            loss = self._rival_loss(batch["flow_observations"], batch["flow_actions"], goals)
            return loss, {"critic/loss": loss.detach()}
        log_p = self.log_density(batch["flow_observations"], batch["flow_actions"], goals)  # (M,)
        loss = -log_p.mean()
        return loss, {"critic/nll": loss.detach(), "critic/log_p_std": log_p.detach().std(correction=0)}

    def _rival_loss(self, observations: Tensor, actions: Tensor, goals: Tensor) -> Tensor:
        """Ablation: what the critic that is not a flow minimises, a bound of Eq. (5) or a classifier's error."""
        assert self.critic is not None
        state = self.normalize(observations)
        context = self.critic["encoder"](state, actions)
        if self.config.goal_frame == "relative":
            goals = goals - state[..., self.goal_indices]
        with torch.autocast(observations.device.type, enabled=False):
            return self.critic[self.config.critic].loss(goals.float(), context.float())  # type: ignore[operator]

    @torch.no_grad()
    def window_density(self, batch: Batch) -> Batch:
        """The critic's log-density at each step of a window (B, K), as an entry of its batch: Q, not yet normalised."""
        observations = batch["observations"]
        goals = self.goal_coordinates(batch["goals"])[:, None].expand(-1, observations.shape[1], -1)
        return {"log_density": self.log_density(observations, batch["actions"], goals)}

    @torch.no_grad()
    def q_values(self, batch: Batch) -> Tensor:
        """The Q tokens and targets of a window (B, K), normalised. No gradient: the flow learns from Eq. (5) alone."""
        config = self.config
        if config.conditioning == "rtg":  # sum of 1[s = g] to come: one where the goal is on this trajectory
            return batch["reached"][:, None].expand(batch["observations"].shape[:2])
        q = batch["log_density"] if "log_density" in batch else self.window_density(batch)["log_density"]  # (B, K)
        if self.training:
            if config.q_normalization == "scale" and (kernel := loss_kernels(q)) is not None:  # what follows, as one
                running = self.q_shift, self.q_scale, self.q_seen
                return kernel.normalized(q, batch["valid"], *running, Q_SCALE_RATE, Q_SCALE_FLOOR)
            share = losses.shares(batch["valid"])
            rate = torch.where(self.q_seen > 0, Q_SCALE_RATE, 1.0)  # the first batch sets the scale, later ones move it
            if config.q_normalization == "standardize":
                self.q_shift.lerp_(distributed.mean(losses.masked_mean(q, share)), rate)
            spread = losses.masked_mean((q - self.q_shift).abs(), share)
            self.q_scale.lerp_(distributed.mean(spread), rate)
            self.q_seen.fill_(1.0)
        return self.normalized(q)

    def normalized(self, q: Tensor) -> Tensor:
        """As a token holds it: the appendix's Q normalisation, by running statistics."""
        return (q - self.q_shift) / (self.q_scale + Q_SCALE_FLOOR)

    # --------------------------------------------------------------------------------------------- the actor

    def _read(self, h: Tensor) -> tuple[Tensor | None, Tensor]:
        """From outputs at all tokens but the actions: Q-hat at the states (B, K), and the action head's numbers.

        Both heads at all of them are one product; each alone, at its half of them, would be two and four copies.
        Kernels can read a head at its own tokens (`heads_triton.py`).
        """
        _, step = self.tokens.read
        if kernels(h) is not None:
            from qhyer.nn import heads_triton

            places = step, self.tokens.state_at, self.tokens.action_from
            if heads_triton.fits(h, self.action_head, *places):
                return heads_triton.read_heads(h, self.action_head, self.q_head, *places)
        heads = [head for head in (self.action_head, self.q_head) if head is not None]
        weight = torch.cat([head.weight for head in heads])
        bias = torch.cat([head.bias for head in heads])
        spare = -len(weight) % 8  # matrix units like multiples of eight
        out = F.linear(h, F.pad(weight, (0, 0, 0, spare)), F.pad(bias, (0, spare))).float()
        actions = self.action_head.out_features
        q_hat = None if self.q_head is None else out[:, self.tokens.state_at :: step, actions]
        return q_hat, out[:, self.tokens.action_from :: step, :actions]

    def _action(self, numbers: Tensor) -> Tensor:
        """The action (..., d_a) to take: the mean, of the likeliest Gaussian where there are several."""
        if self.config.action_head == "gaussian":
            return numbers
        logits, means, _ = self._mixture(numbers)
        best = logits.argmax(-1)[..., None, None].expand(*logits.shape[:-1], 1, means.shape[-1])
        return means.gather(-2, best).squeeze(-2)

    def _mixture(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The action head's numbers -> log-weights (..., M), means and log standard deviations (..., M, d_a)."""
        m, d = self.config.mixtures, self.plan_dim
        logits, means, log_stds = numbers.float().split([m, m * d, m * d], dim=-1)
        means, log_stds = means.unflatten(-1, (m, d)), log_stds.unflatten(-1, (m, d))
        return logits, means, log_stds.clamp(*LOG_STD)

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Eqs. (15) and (10): imitate the action given Q, and regress the best Q. Returns L_BC, L_Q, metrics."""
        config = self.config
        ready = self.decoder.prepare(batch["observations"], batch["observations"].shape[1] * self.tokens.per_step - 1)
        observations = self.normalize(batch["observations"])  # (B, K, d_s)
        goals = self.actor_goals(batch["goals"], batch["observations"])  # (B, K, d_g)
        q = self.q_values(batch) if self.q_head is not None else None  # (B, K)
        x = self.tokens(observations, goals, q, batch["actions"], last=False)
        h, _ = self.decoder(x, read=self.tokens.read, ready=ready)
        q_hat, numbers = self._read(h)  # (B, K), (B, K, d_a) with a Gaussian
        mean = self._action(numbers)
        usual = (config.action_head, config.regression) == ("gaussian", "expectile")
        if usual and q is not None and q_hat is not None:
            values = mean, batch["actions"], q_hat, q
            if (kernel := loss_kernels(*values)) is not None:  # what follows, as two
                bc, regression, beside = kernel.actor_losses(*values, batch["valid"], config.expectile)
                return bc, regression, self._actor_metrics(bc, regression, *beside)
        share = losses.shares(batch["valid"])
        # Unspecified in the paper: the action is Gaussian with a fixed unit variance, OGBench's convention.
        if config.action_head == "gaussian":
            nll = losses.gaussian_nll(mean, batch["actions"])
        else:
            nll = losses.mixture_nll(*self._mixture(numbers), batch["actions"])
        bc = losses.masked_mean(nll, share)  # Eq. (15)
        error = losses.masked_mean((mean - batch["actions"]).square().mean(-1), share)
        if q_hat is None or q is None:
            return bc, bc.new_zeros(()), {"actor/bc": bc.detach(), "actor/mse": error.detach()}
        # u = Q - Q-hat as in Eq. (10); Algorithm 1 prints the arguments swapped, which would fit the lower tail.
        u = q - q_hat
        if config.regression == "expectile":
            per_token = losses.expectile(u, config.expectile)
        elif config.regression == "quantile":
            per_token = losses.quantile(u, config.expectile)
        else:
            per_token = losses.mse(u)
        regression = losses.masked_mean(per_token, share)
        q_mean, gap = losses.masked_mean(q, share), losses.masked_mean(-u.detach(), share)
        return bc, regression, self._actor_metrics(bc, regression, error, q_mean, gap)

    def _actor_metrics(self, bc: Tensor, regression: Tensor, error: Tensor, q_mean: Tensor, gap: Tensor) -> Metrics:
        return {
            "actor/bc": bc.detach(),
            "actor/mse": error.detach(),
            "actor/q_loss": regression.detach(),
            "q/mean": q_mean,
            "q/hat_minus_q": gap,
            "q/scale": self.q_scale.clone(),
        }

    def critic_part(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Of Eq. (14): the critic's."""
        nll, metrics = self.critic_loss(batch)
        return losses.weighted(self.config.weight_critic, nll), metrics

    def actor_part(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Of Eq. (14): the actor's two."""
        config = self.config
        bc, regression, metrics = self.actor_loss(batch)
        return losses.weighted(config.weight_bc, bc) + losses.weighted(config.weight_q, regression), metrics

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Eq. (14): the three losses, jointly."""
        if self.critic is None:
            return self.actor_part(batch)
        # No gradient passes between the two, so they can be computed side by side.
        (critic, critic_metrics), (actor, metrics) = concurrently(
            "critic", lambda: self.critic_part(batch), lambda: self.actor_part(batch), batch.values()
        )
        return actor + critic, metrics | critic_metrics

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        sampler = WindowSamplerConfig(
            context=config.context,
            discount=config.discount,
            p_random=config.p_random,
            flow_batch=config.flow_batch if config.conditioning == "flow" else 0.0,
            stitch_rate=config.stitch_rate,
            stitch_cell=config.stitch_cell,
            chunk=config.chunk,
        )
        ahead = None
        if self.critic is not None:
            ahead = Ahead(self.critic_part, self.optimizers[1], self.window_density, self.actor_part)
        return (
            Stage(
                "joint",
                config.steps,
                config.batch_size,
                sampler,
                self.loss,
                self.optimizers,
                grad_clip=config.grad_clip,
                schedule=warm_up_cosine(config.warmup, config.steps) if config.cosine else warm_up(config.warmup),
                ahead=ahead,
            ),
        )

    def update_bytes(self) -> int:
        """The decoder's share of it, nearly all; the critic sees fewer rows, and they are narrower."""
        length = self.config.context * self.tokens.per_step - 1
        return 4 * self.config.batch_size * self.decoder.kept(length)

    # ---------------------------------------------------------------------------------------------- acting

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """Algorithm 1: predict the best Q at the state token, write it into the Q token, read the action there.

        Stage 2 adds one token to stage 1's sequence, so it runs through stage 1's cache: exact, and no second
        pass over the window.
        """
        if not (goal.is_cuda and torch.cuda.is_current_stream_capturing()):
            memory = self.for_goal(memory, goal)
        memory = memory or {}
        if "plan" in memory and memory["plan"].shape[1]:  # what is left of a chunk, whatever is seen
            plan = memory["plan"].clone()
            return plan[:, 0], {**memory, "plan": plan[:, 1:]}
        numbers, window, kept = self._decide(observation, goal, memory)
        after: Memory = {}
        if self.config.action_head == "best_of_mixture":
            rows, after["row"] = next_rows(observation, goal, memory, self.config.candidates, LUCK_ROWS)  # (n, N)
            action = self._chosen_action(observation, goal, rows, *self._mixture(numbers))
        else:
            action = self._action(numbers).clamp(-1.0, 1.0)
        if self.config.chunk > 1:
            plan = action.unflatten(-1, (self.config.chunk, -1))  # (n, chunk, d_a of one)
            action, after["plan"] = plan[:, 0], plan[:, 1:]
        keep = self.config.context - 1
        if self.config.history == "hopping" and window["observations"].shape[1] > keep:
            keep, kept = self.config.context // 2, {}  # at other places in the window: decoded anew
        if keep > 0:
            if self.config.past_q == "critic":
                done = self.log_density(observation, action, self.goal_coordinates(goal))  # (n,)
                window["q"] = torch.cat([window["q"][:, :-1], self.normalized(done)[:, None]], dim=1)
            before = [memory["actions"]] if "actions" in memory else []
            window["actions"] = torch.cat([*before, action[:, None]], dim=1)
            after |= {key: value[:, -keep:] for key, value in window.items()} | kept
        return action, after or None

    def _decide(self, observation: Tensor, goal: Tensor, past: Memory) -> tuple[Tensor, Memory, Memory]:
        """The action head's numbers for the newest state, the window (n, T, ...) with it, T <= K, and, where the window
        hops, the decoder's cache of all its tokens up to that state."""
        before = [past["observations"]] if "observations" in past else []
        observations = torch.cat([*before, observation[:, None]], dim=1)  # (n, T, d_s)
        steps = observations.shape[1]
        s = self.normalize(observations)
        g = self.actor_goals(goal, observations)
        current = self.tokens.state_tokens(s[:, -1:], g[:, -1:], first=steps - 1).flatten(1, 2)  # (n, 1 or 2, d)
        cache = self.decoder.unpack({k.removeprefix(CACHED): v for k, v in past.items() if k.startswith(CACHED)})
        if cache is not None:  # since then: what the last step's Q and action were
            tokens = [self.tokens.q_token(past["q"][:, -1:], first=steps - 2)] if self.q_head is not None else []
            tokens.append(self.tokens.action_token(past["actions"][:, -1:], first=steps - 2))
            current = torch.cat([*tokens, current], dim=1)
        elif steps > 1:
            tokens = [self.tokens(s[:, :-1], g[:, :-1], past.get("q"), past["actions"])]
            current = torch.cat([*tokens, current], dim=1)
        h, cache = self.decoder(current, cache)
        window: Memory = {"observations": observations}
        kept: Memory = {}
        if self.config.history == "hopping" and self.config.context > 1:
            kept = {CACHED + name: value for name, value in self.decoder.pack(cache).items()} | {"goal": goal.clone()}
        if self.q_head is not None:
            q_hat = self.q_head(h[:, -1])  # (n, 1): stage 1
            h, _ = self.decoder(self.tokens.q_token(q_hat, first=steps - 1), cache)  # stage 2: one more token
            window["q"] = torch.cat([past["q"], q_hat], dim=1) if steps > 1 else q_hat
        return self.action_head(h[:, -1]), window, kept

    def for_goal(self, memory: Memory | None, goal: Tensor) -> Memory | None:
        """Without what was decoded for another goal: every state token has it, the past ones, too."""
        if memory is None or "goal" not in memory or torch.equal(memory["goal"], goal):
            return memory
        return {k: v for k, v in memory.items() if k != "goal" and not k.startswith(CACHED)}

    def acting_state(self) -> dict[str, Tensor]:
        """All but the critic, since acting reads Q-hat alone, unless the critic chooses or says what was done."""
        config = self.config
        asked = config.action_head == "best_of_mixture" or (config.past_q == "critic" and config.context > 1)
        return self.state_dict() if asked else super().acting_state()

    def _chosen_action(
        self, observation: Tensor, goal: Tensor, rows: Tensor, logits: Tensor, means: Tensor, log_stds: Tensor
    ) -> Tensor:
        """Of draws from the mixture, for each state and goal one, in proportion to exp(Q / choice_temperature).

        Were it always the best, a hand that misses its button would come back the same way and miss again. Chance is
        in the table's `rows` (n, N), which the episode tells: played again, it is the same. A Gaussian is drawn from as
        its weight is, so that one the data never chose here is not: the critic knows nothing there.
        """
        noise, d, count = self.draws[rows], means.shape[-1], rows.shape[1]  # (n, N, d_a)
        share = (torch.arange(count, device=noise.device) + 0.5) / count
        heaps = logits.softmax(-1).cumsum(-1)  # (n, M)
        which = torch.searchsorted(heaps, share.expand(len(heaps), -1).contiguous()).clamp(max=heaps.shape[-1] - 1)
        at = which[..., None].expand(-1, -1, d)  # (n, N, d_a)
        actions = (means.gather(1, at) + log_stds.gather(1, at).exp() * noise).clamp(-1.0, 1.0)

        def each(x: Tensor) -> Tensor:
            return x[:, None].expand(-1, count, *x.shape[1:])

        q = self.log_density(each(observation), actions, each(self.goal_coordinates(goal)))  # (n, N)
        return best_of(actions, q + self.luck[rows])  # Gumbel's trick: the largest is a draw from the softmax of Q / T

    @torch.no_grad()
    def readout(self, batch: Batch) -> list[dict[str, Tensor]]:
        """Per block, on a batch of windows: alpha, Delta_t and A_bar_t (the paper's memory analysis)."""
        observations = self.normalize(batch["observations"])
        goals = self.actor_goals(batch["goals"], batch["observations"])
        q = self.q_values(batch) if self.q_head is not None else None
        return self.decoder.readout(self.tokens(observations, goals, q, batch["actions"]))
