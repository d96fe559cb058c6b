"""Makes OGBench's and D4RL's datasets on this machine, with their environments, controllers and settings."""

from qhyer.data.generate.bench import measure_rate
from qhyer.data.generate.runner import generate

__all__ = ["generate", "measure_rate"]
