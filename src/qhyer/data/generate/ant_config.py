"""How the ant is trained, as plain values: the command line shows them without loading a simulator."""

from __future__ import annotations

from dataclasses import dataclass

from qhyer.errors import require


@dataclass(frozen=True)
class AntConfig:
    """How the ant is trained. Reward, discount, target entropy and rate of the target networks are OGBench's."""

    steps: int = 300_000
    """steps of the simulator"""
    seed: int = 0
    width: int = 128
    """of the two hidden layers of actor and critics"""
    batch_size: int = 256
    learning_rate: float = 3e-4
    environments: int = 4
    """ants that walk at once; a round is a step of each"""
    updates: int = 2
    """after each round"""
    warmup: int = 10_000
    """steps of random actions before the first update"""
    turn_every: int = 100
    """steps between new directions, on average"""
    evaluate_every: int = 25_000
    episodes: int = 40
    """of an evaluation"""

    def __post_init__(self) -> None:
        for name in ("steps", "width", "batch_size", "environments", "updates", "turn_every", "evaluate_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        require(self.episodes >= 1, f"episodes must be at least 1, not {self.episodes}")
        require(self.warmup >= 0, f"warmup must not be negative, and is {self.warmup}")
        require(self.learning_rate > 0, f"learning_rate must be positive, not {self.learning_rate}")
        require(self.seed >= 0, f"seed must not be negative, and is {self.seed}")
