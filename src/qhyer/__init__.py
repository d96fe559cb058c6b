"""qhyer: offline goal-conditioned reinforcement learning in PyTorch."""

import os

__version__ = "0.1.0"

# Before CUDA is begun: parts of an update run on some twenty streams, and where they share the eight queues to the
# device that there are otherwise, one waits for another that it has nothing to do with.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
