"""EDT: Elastic Decision Transformer (Wu et al., 2023).

Idea. A long history ties the model to the episode it is in; a short one lets it change to a better one. At each step
compare histories of several lengths by the best return they promise, and act on the best of them.
Paper. Elastic Decision Transformer, NeurIPS 2023.
Code. kristery/Elastic-DT at 8517ef6, read for its tokens, losses, search and gym settings; it has none for mazes.
Deviations. Returns are counted in bins between 0 and the greatest of the data (a running mean), where the code has the
bounds of D4RL's scores. The return of a history is the likeliest bin after leaning to the high ones; the code draws it.
Encoding and decoding of bins agree here (the code divides by B - 1 and by B). Windows and padding as DT's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer import losses
from qhyer.agent import Batch, Memory, Metrics
from qhyer.agents._sequence import ReturnToGo, SequenceAgent, SequenceConfig, Window, heads_fit, state_width
from qhyer.data.episodes import DataSpec
from qhyer.errors import require
from qhyer.nn.backbones import Block, FirstReturnAttention, Trunk
from qhyer.nn.optim import adamw
from qhyer.nn.windows import WindowTokens

UNLIKELY = 0.15  # this share of the bins, the least likely, is never chosen


@dataclass(frozen=True)
class EDTConfig(SequenceConfig):
    steps: int = 50_000
    batch_size: int = 256
    width: int = 512
    layers: int = 4
    heads: int = 4
    """attention heads"""
    bins: int = 60
    """of returns"""
    expectile: float = 0.99
    """tau of the return regression"""
    weight_state: float = 1.0
    """of predicting the next state"""
    weight_return: float = 0.5
    """of the expectile return"""
    weight_bins: float = 0.001
    """of the cross-entropy of the bins"""
    lean: float = 25.0
    """added to the log-odds of the greatest bin, linearly less below: 10 and 15 of the code together"""
    stride: int = 2
    """the lengths compared differ by this many steps"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)
        require(self.bins >= 2 and self.stride >= 1, "bins must be at least 2 and stride at least 1")


class EDT(SequenceAgent):
    Config = EDTConfig
    training_only = ("state_head.",)
    config: EDTConfig

    def __init__(self, config: EDTConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d, state = config.width, state_width(spec, config.goal)
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        self.tokens = WindowTokens({"state": state, "return": 1, "action": spec.action_dim}, d, config.horizon)
        mixers = [FirstReturnAttention(d, config.heads, config.dropout, kind=1) for _ in range(config.layers)]
        blocks = [Block(d, mixer, config.dropout, post_norm=True) for mixer in mixers]
        self.trunk = Trunk(d, blocks, final_norm=False, init=None)
        self.bin_head = nn.Linear(d, config.bins)
        self.return_head = nn.Linear(d, 1)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        self.state_head = nn.Linear(d + spec.action_dim, spec.observation_dim)
        self.optimizer = adamw(self.parameters(), config.learning_rate, config.weight_decay)

    def bin_of(self, returns: Tensor) -> Tensor:
        """Scaled returns -> bins 0 ... B - 1, evenly between 0 and the greatest return."""
        return (self.fraction(returns) * (self.config.bins - 1)).round()

    def fraction(self, returns: Tensor) -> Tensor:
        return (returns / self.ask.target().clamp(min=1e-6)).clamp(0.0, 1.0)

    def hidden(self, states: Tensor, bins: Tensor, actions: Tensor, times: Tensor) -> Tensor:
        """A window with returns in bins (B, T) -> outputs (B, 3 T - 1, d)."""
        level = 2.0 * bins / (self.config.bins - 1) - 1.0
        return self.trunk(self.tokens({"state": states, "return": level, "action": actions}, times)[:, :-1])

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """MSE of actions + w_s MSE of next states + w_R E[L_tau(R - R-hat)] + w_b cross-entropy of R's bin."""
        config, window = self.config, self.window(batch)
        bins = self.bin_of(window.returns)
        h = self.hidden(window.states, bins, window.actions, window.times)
        at_state, at_return = self.tokens.read(h, "state"), self.tokens.read(h, "return")
        actions = self.action_head(at_return)
        next_states = self.state_head(torch.cat([at_return, actions], dim=-1))
        share = losses.shares(batch["valid"])
        imitation = losses.masked_mean(losses.mse(actions - batch["actions"]).mean(-1), share)
        change = losses.mse(next_states - self.normalize(batch["next_observations"])).mean(-1)
        u = self.fraction(window.returns) - self.return_head(at_state).squeeze(-1)
        logits = self.bin_head(at_state).float()
        parts = {
            "actor/mse": imitation,
            "state/mse": losses.masked_mean(change, share),
            "return/loss": losses.masked_mean(losses.expectile(u, config.expectile), share),
            "return/bins": losses.masked_mean(F.cross_entropy(logits.mT, bins.long(), reduction="none"), share),
        }
        weights = (1.0, config.weight_state, config.weight_return, config.weight_bins)
        total = sum(w * part for w, part in zip(weights, parts.values()))
        return torch.as_tensor(total), {name: part.detach() for name, part in parts.items()}

    def promising(self, at_state: Tensor) -> Tensor:
        """Outputs at states (n, T, d) -> the bin to ask for there: likely, and high."""
        logits = self.bin_head(at_state)
        least = logits.sort(-1).values[..., int(UNLIKELY * self.config.bins)][..., None]
        leaning = logits + self.config.lean * torch.linspace(0.0, 1.0, self.config.bins, device=logits.device)
        return leaning.masked_fill(logits < least, -torch.inf).argmax(-1).to(logits.dtype)

    def judge(self, window: Window) -> tuple[Tensor, Tensor, Tensor]:
        """One history: the return promised at its end (n,), the action then (n, d_a), and the bin asked for (n,)."""
        states, returns, actions, times = window
        first = self.hidden(states, self.bin_of(returns), actions, times)
        bins = self.promising(self.tokens.read(first, "state"))
        second = self.hidden(states, bins, actions, times)
        promised = self.return_head(self.tokens.read(second, "state")[:, -1]).squeeze(-1)
        return promised, self.action_head(self.tokens.read(second, "return")[:, -1]), bins[:, -1]

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """Of the whole window and shorter ends of it, the action of the one that promises most."""
        window = self.recall(observation, goal, memory)
        steps = window.returns.shape[1]
        cuts = [Window(*(part[:, i:] for part in window)) for i in range(0, steps, self.config.stride)]
        promised, actions, bins = (torch.stack(parts) for parts in zip(*map(self.judge, cuts)))  # (C, n, ...)
        best, rows = promised.argmax(0), torch.arange(len(observation), device=observation.device)
        action = actions[best, rows].clamp(-1.0, 1.0)
        asked = bins[best, rows] / (self.config.bins - 1) * self.ask.target()
        window = window._replace(returns=torch.cat([window.returns[:, :-1], asked[:, None]], dim=1))
        return action, self.remember(window, observation, goal, action, memory)
