"""The whole interface of an agent: how it learns (`stages`) and how it acts (`act`).

The trainer, the evaluator and the checkpoint know nothing else about an algorithm.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from qhyer.data.episodes import DataSpec, Episodes
from qhyer.errors import require

Batch = dict[str, Tensor]
Metrics = dict[str, Tensor]
Memory = dict[str, Tensor]
"""What an agent remembers of the episodes under way: tensors whose first dimension is the episode."""
Loss = Callable[[Batch], tuple[Tensor, Metrics]]
"""batch -> (scalar to minimise, detached metrics named group/name)"""


Range = tuple[Callable[[Any], bool], str]
_COUNT: Range = (lambda x: x >= 1, "must be at least 1")
_SIZE: Range = (lambda x: x > 0, "must be positive")
_WEIGHT: Range = (lambda x: x >= 0, "must be 0 or more")
_CHANCE: Range = (lambda x: 0.0 <= x <= 1.0, "must lie between 0 and 1")
_LEVEL: Range = (lambda x: 0.0 < x < 1.0, "must lie between 0 and 1, and be neither")
_SHARE: Range = (lambda x: 0.0 <= x < 1.0, "must be at least 0 and below 1")
_RATE: Range = (lambda x: 0.0 < x <= 1.0, "must be above 0 and at most 1")
RANGES: dict[str, Range] = {
    **dict.fromkeys(("steps", "batch_size", "context", "width", "layers", "chunk", "candidates"), _COUNT),
    **dict.fromkeys(("representation", "subgoal_steps", "option_steps", "distance_steps", "flow_steps"), _COUNT),
    **dict.fromkeys(("flow_blocks", "flow_channels", "encoder_width", "encoder_layers"), _COUNT),
    **dict.fromkeys(("learning_rate", "grad_clip"), _SIZE),
    **dict.fromkeys(("alpha", "alpha_low", "alpha_high", "warmup", "tolerance"), _WEIGHT),
    **dict.fromkeys(("p_current", "p_random", "value_p_current", "value_p_random", "actor_p_random"), _CHANCE),
    **dict.fromkeys(("discount", "dropout"), _SHARE),
    "expectile": _LEVEL,
    "target_rate": _RATE,
    "goal_part": (
        lambda part: len(set(part)) == len(part) and min(part, default=0) >= 0,
        "names goal coordinates by position, from 0, each once",
    ),
}
"""What agents' settings of these names may be, whoever has them; what is an agent's own, it checks itself. None is
allowed where a setting can be that."""


@dataclass(frozen=True)
class AgentConfig:
    """What every agent has. Subclasses add their own fields; presets and the command line override them."""

    steps: int = 1_000_000
    """gradient updates"""
    batch_size: int = 1024
    """samples (windows, for a sequence model) per update"""
    learning_rate: float = 3e-4
    """of the optimiser, before any schedule"""

    coordinates_option: ClassVar[str] = ""
    """the option, if there is one, with which an agent reads a goal's coordinates alone"""
    whole_goals: ClassVar[str] = ""
    """why there is none, where its mathematics is the reason"""
    stage_steps: ClassVar[tuple[str, ...]] = ("steps",)
    """the options with the updates of each stage, in the order of `stages`"""

    acting_alone: ClassVar[tuple[str, ...]] = ()
    """fields that training does not read: `qhyer export --override` may change them afterwards"""

    @property
    def unread(self) -> dict[str, str]:
        """Of `acting_alone`, what acting does not read either, as the other fields are set -> why."""
        return {}

    @property
    def updates(self) -> tuple[int, ...]:
        """of each stage"""
        return tuple(getattr(self, name) for name in self.stage_steps)

    @property
    def reads_whole_goals(self) -> bool:
        """Whether a goal's other coordinates count when acting."""
        return True

    @property
    def hides_coordinates(self) -> bool:
        """Whether `Agent` is to hide them from it, when it learns and when it acts."""
        return False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in RANGES and value is not None:
                holds, text = RANGES[name]
                require(holds(value), f"{name} {text}")
        for current, anywhere in (("p_current", "p_random"), ("value_p_current", "value_p_random")):
            both = getattr(self, current, 0.0) + getattr(self, anywhere, 0.0)
            require(both <= 1.0, f"{current} and {anywhere} exceed one")


@dataclass(frozen=True)
class GoalConfig(AgentConfig):
    """Of agents that read a goal as a state like any other, unless they are told what of it counts."""

    goal_input: Literal["observation", "coordinates"] = "observation"
    """what is read of a goal or subgoal: the whole observation, or the coordinates that make it a goal alone; the
    others then hold the data's mean, in training and when acting"""

    coordinates_option = "--agent.goal-input coordinates"

    @property
    def reads_whole_goals(self) -> bool:
        return self.goal_input == "observation"

    @property
    def hides_coordinates(self) -> bool:
        return self.goal_input == "coordinates"

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = self.goal_input == "observation" or not self.whole_goals
        require(allowed, f"goal_input can only be observation here: {self.whole_goals}")


class Sampler(Protocol):
    """Draws batches. All randomness comes from the generator it was built with."""

    def sample(self, batch_size: int) -> Batch: ...


class SamplerConfig(Protocol):
    def build(self, episodes: Episodes, generator: torch.Generator) -> Sampler: ...


@dataclass(frozen=True)
class Ahead:
    """How a stage's loss falls apart where a critic learns for itself, and the rest reads what it says of the batch.

    loss(b) + rest(b) is the stage's loss of the batch b, drawn in this order, with the metrics of `rest` before those
    of `loss`; rest(b | prepare(b)) is the same as rest(b). The two share no parameter and no optimiser. So the critic
    can be one batch ahead of the rest (`update.py`).
    """

    loss: Loss
    """the critic's, on parameters of its own"""
    optimizer: torch.optim.Optimizer
    """its own, one of the stage's"""
    prepare: Callable[[Batch], Batch]
    """what the rest reads of the critic, as more entries of the batch: no gradient, no chance, nothing that stays"""
    rest: Loss


@dataclass(frozen=True)
class Stage:
    """One phase of training: which batches, which loss, which optimisers."""

    name: str
    steps: int
    batch_size: int
    sampler: SamplerConfig
    loss: Loss
    optimizers: Sequence[torch.optim.Optimizer]
    grad_clip: float | None = None
    """norm of the gradient over each optimiser's parameters"""
    schedule: Callable[[int], float] | None = None
    """update number (from 0) -> factor on the learning rates; a pure function, so it needs no state"""
    after_step: Callable[[], None] | None = None
    """e.g. target networks"""
    finish: Callable[[Episodes], None] | None = None
    """once, when the stage is over"""
    ahead: Ahead | None = None
    """where the loss falls apart so, and nothing follows a step"""

    def __post_init__(self) -> None:
        assert self.ahead is None or self.after_step is None


class Agent(nn.Module, ABC):
    """One algorithm. The file name is the agent's name; `Config` holds its hyperparameters.

    With `goal_input` "coordinates" (`GoalConfig`), what a subclass defines as `act` is given goals whose other
    coordinates are hidden (`as_goal`), and the losses of its `stages` batches in which they are. It need do nothing
    about it, unless it reads an entry of a batch both as a state and as a goal.
    """

    Config: ClassVar[type[AgentConfig]]
    training_only: ClassVar[tuple[str, ...]] = ()
    """how the names of weights begin that acting does not read: critics, values, targets"""
    stackable: bool = False
    """whether several seeds can be trained as one (stack.py): one stage without schedule or clipping, a loss that draws
    nothing and keeps nothing, no buffers but those here, a sampler that takes `goals.Several`"""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, hiding in (("act", _acting), ("stages", _learning)):
            if name in vars(cls):
                setattr(cls, name, hiding(vars(cls)[name]))

    def __init__(self, config: AgentConfig, spec: DataSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        # Normalisers are the agent's own buffers: everyone else passes raw observations.
        self.register_buffer("observation_mean", torch.tensor(spec.observation_mean, dtype=torch.float32))
        self.register_buffer("observation_std", torch.tensor(spec.observation_std, dtype=torch.float32))
        self.register_buffer("goal_indices", torch.tensor(spec.goal_indices, dtype=torch.long), persistent=False)
        named = torch.zeros(spec.observation_dim, dtype=torch.bool)
        named[list(spec.goal_indices)] = True
        self.register_buffer("goal_named", named, persistent=False)  # the same as a mask (d_s,)

    observation_mean: Tensor
    observation_std: Tensor
    goal_indices: Tensor
    goal_named: Tensor

    def narrow(self, goal_part: tuple[int, ...]) -> tuple[int, ...]:
        """Goals are made of these of the dataset's goal coordinates, by position; of all when empty. -> those"""
        count = self.spec.goal_dim
        part = goal_part or tuple(range(count))
        require(max(part) < count, f"goal_part: this dataset's goals have coordinates 0 to {count - 1}")
        self.goal_indices = self.goal_indices[list(part)]
        return part

    def normalize(self, observations: Tensor) -> Tensor:
        return (observations - self.observation_mean) / self.observation_std

    def as_goal(self, states: Tensor) -> Tensor:
        """Raw states (..., d_s) as goals: as they are or, with goal_input "coordinates", what does not make them goals
        replaced by the data's mean. Twice is once."""
        if not self.config.hides_coordinates:
            return states
        return torch.where(self.goal_named, states, self.observation_mean)

    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """How it learns. Only a view on optimisers made in `__init__`: calling it twice changes nothing."""

    @abstractmethod
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """Raw observations (n, d_s) and goals (n, d_s) -> actions (n, d_a) in [-1, 1], and what to remember.

        `memory` is None at the first step of the episodes; they run in lock-step. Deterministic.
        """

    def for_goal(self, memory: Memory | None, goal: Tensor) -> Memory | None:
        """What may be remembered of the past now that this is the goal. `act` asks itself; who records it as a graph
        asks before each replay, since a graph cannot look."""
        return memory

    def update_bytes(self) -> int | None:
        """What an update keeps in memory for its backward pass where no kernels do the work, about and rather too
        little; None where nobody has counted. On a CPU it is compared with the memory there is before anything is
        trained."""
        return None

    def acting_state(self) -> dict[str, Tensor]:
        """The part of the state that `act` reads: what an exported model holds."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith(self.training_only)}


def _acting(act: Callable[..., tuple[Tensor, Memory | None]]) -> Callable[..., tuple[Tensor, Memory | None]]:
    """`act`, given goals as they are to be read."""

    @functools.wraps(act)
    def acting(self: Agent, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return act(self, observation, self.as_goal(goal), memory)

    return acting


def _learning(stages: Callable[..., tuple[Stage, ...]]) -> Callable[..., tuple[Stage, ...]]:
    """`stages`, whose losses are given batches with goals as they are to be read: entries whose names end in so."""

    def hiding(agent: Agent, stage: Stage) -> Stage:
        assert stage.ahead is None and stage.finish is None  # they would be given batches and episodes as they are

        def loss(batch: Batch) -> tuple[Tensor, Metrics]:
            read = {name: agent.as_goal(value) for name, value in batch.items() if name.endswith("goals")}
            return stage.loss(batch | read)

        return replace(stage, loss=loss)

    @functools.wraps(stages)
    def learning(self: Agent) -> tuple[Stage, ...]:
        made = stages(self)
        return tuple(hiding(self, stage) for stage in made) if self.config.hides_coordinates else made

    return learning
