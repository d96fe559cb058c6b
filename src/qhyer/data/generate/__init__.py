"""Makes OGBench's datasets on this machine, with OGBench's environments, oracles and settings."""

from qhyer.data.generate.bench import measure_rate
from qhyer.data.generate.runner import generate

__all__ = ["generate", "measure_rate"]
