"""qhyer: offline goal-conditioned reinforcement learning in PyTorch."""

__version__ = "0.1.0"
