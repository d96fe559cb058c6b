"""What the sequence models that condition on a return share: their settings, their inputs, and a window while acting.

Nothing here is an agent. An agent's file builds the pieces (`tokens`, `trunk`, heads, an optimiser) and says how it
learns and rolls out; what would be the same lines in a dozen files stands here once:

- states are standardised, and the goal's coordinates are put beside them with `goal` "concat";
- returns are divided by `return_scale`; the return asked for when acting is `target_return`, or what the best of a
  batch of the data has to come (a running mean);
- when acting, R_{t+1} = R_t - r_t / scale, r_t = 1 within `tolerance` of the goal: the reward of D4RL's mazes, which
  needs no word from the environment. Without a tolerance nothing is taken off until the episode is over.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from qhyer import distributed, losses
from qhyer.agent import Agent, AgentConfig, Batch, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import ReturnWindowSamplerConfig, Rewards
from qhyer.errors import require
from qhyer.nn.optim import warm_up, warm_up_cosine
from qhyer.nn.plain import Critics
from qhyer.nn.values import frozen
from qhyer.nn.windows import WindowTokens

Goal = Literal["concat", "none"]

TARGET_RATE = 0.01  # of the running mean of the greatest return in a batch


@dataclass(frozen=True)
class SequenceConfig(AgentConfig):
    """Decision Transformer's settings, from which the others depart."""

    steps: int = 100_000
    batch_size: int = 64
    learning_rate: float = 1e-4
    context: int = 20
    """K: steps of history the model sees"""
    width: int = 128
    """of a token"""
    layers: int = 3
    """blocks"""
    dropout: float = 0.1
    """in the blocks, and on the tokens where the method has it there"""
    horizon: int = 4096
    """time steps with an embedding of their own; later ones share the last"""
    goal: Goal = "none"
    """the goal's coordinates beside each state, or no goal at all: then the return is the only condition"""
    tolerance: float = 0.0
    """a state this near to the goal, in its coordinates, is worth a reward; 0: the goal's own row alone"""
    dataset_rewards: bool = False
    """returns from the dataset's own rewards instead of those of goals in hindsight"""
    return_scale: float = 1.0
    """returns are divided by it"""
    target_return: float | None = None
    """return asked for when acting; the greatest of a batch of the data when None"""
    p_random: float = 0.0
    """chance that a window's goal is any row; otherwise it lies ahead, uniformly"""
    weight_decay: float = 1e-4
    """AdamW's, on matrices only"""
    warmup: int = 10_000
    """updates over which the learning rate rises linearly"""
    grad_clip: float = 0.25
    """greatest norm of the gradient"""

    @property
    def reads_whole_goals(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.horizon >= 0, "horizon cannot be negative")
        require(self.return_scale > 0.0, "return_scale must be positive")


def heads_fit(width: int, heads: int) -> None:
    require(heads >= 1 and width % heads == 0, f"width {width} is not a multiple of {heads} heads")


def state_width(spec: DataSpec, goal: Goal) -> int:
    return spec.observation_dim + (spec.goal_dim if goal == "concat" else 0)


class Window(NamedTuple):
    """The steps of an episode the model sees. While acting the current one is last, its action zero and not read."""

    states: Tensor  # (n, T, d)
    returns: Tensor  # (n, T)
    actions: Tensor  # (n, T, d_a)
    times: Tensor  # (n, T)


class ReturnToGo(nn.Module):
    """The scale of returns, the one to ask for when acting, and what a step takes off it."""

    def __init__(
        self, scale: float, target: float | None, tolerance: float, reward_scale: float = 1.0, reward_shift: float = 0.0
    ) -> None:
        """reward_scale, reward_shift: what the data's rewards were multiplied by and shifted, so acting's are, too."""
        super().__init__()
        self.scale, self.asked, self.tolerance = scale, target, tolerance
        self.reward_scale, self.reward_shift = reward_scale, reward_shift
        self.register_buffer("greatest", torch.zeros(()))
        self.register_buffer("updates", torch.zeros(()))
        self.latest = torch.zeros(())

    greatest: Tensor
    updates: Tensor

    def forward(self, batch: Batch) -> Tensor:
        """The window's returns to go (B, K), scaled; in passing, the greatest of them is noted for `after_step`."""
        returns = batch["returns"] / self.scale
        self.latest = returns.detach().masked_fill(~batch["valid"], -math.inf).amax()
        return returns

    @torch.no_grad()
    def after_step(self) -> None:
        """Counts updates, and moves the return to ask for towards the greatest just seen (the first sets it).

        Not in the loss: a loss may be computed once more without a step, and must leave no trace.
        """
        rate = torch.where(self.updates > 0, TARGET_RATE, 1.0)
        self.greatest.lerp_(distributed.mean(self.latest.to(self.greatest)), rate)
        self.updates.add_(1.0)

    def target(self) -> Tensor:
        """The return asked for, scaled: ()."""
        return self.greatest if self.asked is None else torch.full_like(self.greatest, self.asked / self.scale)

    def spent(self, here: Tensor, there: Tensor) -> Tensor:
        """The scaled reward of being `here` with the goal `there`, (n, d_g) each: (n,)."""
        near = ((here - there).square().sum(-1) <= self.tolerance**2).float() * float(self.tolerance > 0.0)
        return (self.reward_scale * near + self.reward_shift) / self.scale


class SequenceAgent(Agent):
    config: SequenceConfig
    ask: ReturnToGo
    optimizer: torch.optim.Optimizer

    @property
    def acting_context(self) -> int:
        """Steps of history while acting."""
        return self.config.context

    def states(self, observations: Tensor, goals: Tensor) -> Tensor:
        """Raw observations (B, T, d_s) and goals (B, d_s) -> what a state token is made of (B, T, d)."""
        s = self.normalize(observations)
        if self.config.goal == "none":
            return s
        g = self.normalize(goals)[:, self.goal_indices]
        return torch.cat([s, g[:, None].expand(-1, s.shape[1], -1)], dim=-1)

    def window(self, batch: Batch) -> Window:
        """A batch as the model sees it."""
        states = self.states(batch["observations"], batch["goals"])
        return Window(states, self.ask(batch), batch["actions"], batch["times"])

    def stages(self) -> tuple[Stage, ...]:
        return self.learn(self.optimizer)

    def learn(
        self,
        *optimizers: torch.optim.Optimizer,
        name: str = "model",
        rewards: tuple[float, float] = (1.0, 0.0),
        ahead: int = 0,
        cosine: bool = False,
    ) -> tuple[Stage, ...]:
        """One stage on windows: everything at once. rewards: their scale and shift; ahead: rows after the window."""
        config = self.config
        worth = Rewards(config.tolerance, config.dataset_rewards, *rewards)
        return (
            Stage(
                name,
                config.steps,
                config.batch_size,
                ReturnWindowSamplerConfig(config.context, worth, config.p_random, ahead),
                self.loss,
                optimizers,
                grad_clip=config.grad_clip,
                schedule=warm_up_cosine(config.warmup, config.steps) if cosine else warm_up(config.warmup),
                after_step=self.ask.after_step,
            ),
        )

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """On windows of `learn`'s sampler."""

    # ---------------------------------------------------------------------------------------------- acting

    def recall(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> Window:
        """The window that ends with this observation; its return is the target less the rewards so far."""
        n = len(observation)
        here = observation[:, None]
        nothing = observation.new_zeros(n, 1, self.spec.action_dim)
        if memory is None:
            time = torch.zeros(n, 1, dtype=torch.long, device=observation.device)
            return Window(self.states(here, goal), self.ask.target().expand(n, 1), nothing, time)
        observations = torch.cat([memory["observations"], here], dim=1)
        steps = observations.shape[1]
        back = torch.arange(1 - steps, 1, device=observation.device)
        return Window(
            self.states(observations, goal),
            torch.cat([memory["returns"], memory["next_return"][:, None]], dim=1),
            torch.cat([memory["actions"], nothing], dim=1),
            memory["time"][:, None] + back,
        )

    def remember(
        self, window: Window, observation: Tensor, goal: Tensor, action: Tensor, memory: Memory | None
    ) -> Memory:
        """What the next step needs: the last K - 1 steps, the return then to come, and what time it is then."""
        past = [] if memory is None else [memory["observations"]]
        after = {
            "observations": torch.cat([*past, observation[:, None]], dim=1),
            "actions": torch.cat([window.actions[:, :-1], action[:, None]], dim=1),
            "returns": window.returns,
        }
        drop = max(0, window.returns.shape[1] - (self.acting_context - 1))
        kept = {name: value[:, drop:] for name, value in after.items()}
        spent = self.ask.spent(observation[:, self.goal_indices], goal[:, self.goal_indices])
        return kept | {"next_return": window.returns[:, -1] - spent, "time": window.times[:, -1] + 1}


class ReturnConditioned(SequenceAgent):
    """Tokens return, state, action; the action is read at the state; the data's actions are imitated (DT's loss).

    Subclasses build the parts.
    """

    tokens: WindowTokens
    trunk: nn.Module
    action_head: nn.Module

    def read(self, h: Tensor) -> Tensor:
        """Outputs (B, L, d) -> what the action head sees (B, T, ·)."""
        return self.tokens.read(h, "state")

    def tokenize(self, states: Tensor, returns: Tensor, actions: Tensor, times: Tensor) -> Tensor:
        """A window -> tokens (B, 3 T - 1, d): the last action is the past of nothing."""
        return self.tokens({"return": returns, "state": states, "action": actions}, times)[:, :-1]

    def predict(self, states: Tensor, returns: Tensor, actions: Tensor, times: Tensor) -> Tensor:
        """A window -> the action at each of its steps (B, T, d_a), from what came before it."""
        return self.action_head(self.read(self.trunk(self.tokenize(states, returns, actions, times))))

    def imitation(self, batch: Batch, actions: Tensor) -> tuple[Tensor, Metrics]:
        """E[(a-hat - a)^2], over valid steps and action dimensions."""
        share = losses.shares(batch["valid"])
        loss = losses.masked_mean(losses.mse(actions - batch["actions"]).mean(-1), share)
        asked = losses.masked_mean(batch["returns"] / self.config.return_scale, share)
        return loss, {"actor/mse": loss.detach(), "return/mean": asked}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.imitation(batch, self.predict(*self.window(batch)))

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """Asks for the target return, less what was collected on the way."""
        window = self.recall(observation, goal, memory)
        action = self.predict(*window)[:, -1].clamp(-1.0, 1.0)
        return action, self.remember(window, observation, goal, action, memory)


class ChoosesByValue(ReturnConditioned):
    """Return-conditioned, with twin critics: of the actions for several target returns, the one they like best."""

    critic: Critics
    target_critic: Critics

    def climb(self, states: Tensor, actions: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """-E[Q_i(s, a-hat)] / E|Q_j|, i and j the critics in an order that a coin decides, and E[min_j Q_j] to report.

        No gradient enters the critics. Divided by the other's magnitude, Q's scale does not matter.
        """
        with frozen(self.critic):
            q = self.critic(states, actions)  # (2, B, K)
        first = torch.rand((), device=q.device) < 0.5
        climbed, other = torch.where(first, q[0], q[1]), torch.where(first, q[1], q[0])
        size = distributed.mean(losses.masked_mean(other.detach().abs(), share)).clamp(min=1e-6)
        return -losses.masked_mean(climbed, share) / size, losses.masked_mean(q.detach().amin(0), share)

    @torch.no_grad()
    def choose(
        self, observation: Tensor, goal: Tensor, memory: Memory | None, candidates: int
    ) -> tuple[Tensor, Memory | None]:
        """Targets at equal steps down from the greatest; each has its own returns, all the way back."""
        window = self.recall(observation, goal, memory)
        n, width = len(observation), self.spec.action_dim
        less = self.ask.target().abs() * torch.arange(candidates, device=observation.device) / candidates  # (C,)
        each = Window(*(part.repeat_interleave(candidates, dim=0) for part in window))  # (n C, T, ...)
        each = each._replace(returns=each.returns - less.repeat(n)[:, None])
        actions = self.predict(*each)[:, -1].clamp(-1.0, 1.0).unflatten(0, (n, candidates))  # (n, C, d_a)
        here = window.states[:, -1:].expand(-1, candidates, -1)
        liked = self.target_critic(here, actions).amin(0).argmax(-1)  # (n,)
        action = actions.gather(1, liked[:, None, None].expand(n, 1, width)).squeeze(1)
        return action, self.remember(window, observation, goal, action, memory)
