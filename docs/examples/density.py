"""Where will I be? Learn log p(goal | state, action) from your own trajectories with any estimator of qhyer.

    python docs/examples/density.py                # the flow, QHyer's critic
    python docs/examples/density.py contrastive    # or cvae, clearning

A point walks in the plane, each walk with a heading of its own; the action is the step. What it learns: given a step,
goals ahead are likelier than goals behind.
"""

import sys

import torch

from qhyer.data.goals import geometric_steps
from qhyer.nn.clearning import CLearning
from qhyer.nn.contrastive import Contrastive
from qhyer.nn.cvae import CVAE
from qhyer.nn.densities import DensityEstimator, FlowDensity

DISCOUNT = 0.9


def walks(count: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """States (count, length + 1, 2) and actions (count, length, 2)."""
    heading = 2 * torch.pi * torch.rand(count, 1, generator=generator)
    heading = heading + 0.3 * torch.randn(count, length, generator=generator)
    actions = 0.1 * torch.stack([heading.cos(), heading.sin()], dim=-1)
    start = 2 * torch.rand(count, 1, 2, generator=generator) - 1
    return torch.cat([start, start + actions.cumsum(1)], dim=1), actions


def make(name: str) -> DensityEstimator:
    dims = {"state_dim": 2, "action_dim": 2, "goal_dim": 2}
    if name == "cvae":
        return CVAE(**dims, hidden=(64, 64))
    if name == "clearning":
        return CLearning(**dims, hidden=(64, 64))
    if name == "contrastive":
        return Contrastive(**dims, hidden=(64, 64), representation=16)
    return FlowDensity(**dims, blocks=3, channels=32, encoder_width=64, encoder_layers=2, representation=16)


def main(name: str = "flow", steps: int = 500) -> float:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    states, actions = walks(300, 50, generator)
    scale = actions.std()  # networks like inputs of size one; so do they like goals
    estimator = make(name)
    optimizer = torch.optim.Adam(estimator.parameters(), lr=3e-3)
    for _ in range(steps):
        walk = torch.randint(300, (256,), generator=generator)
        t = torch.randint(50, (256,), generator=generator)
        ahead = (t + geometric_steps(generator, (256,), DISCOUNT)).clamp(max=50)
        goal, state, action = states[walk, ahead], states[walk, t], actions[walk, t] / scale
        optimizer.zero_grad()
        estimator.loss(goal, state, action).backward()
        optimizer.step()
        estimator.after_step(goal, state, action)

    # One state, eight goals around it at the distance of five steps, one action: to the right.
    angle = torch.arange(8) * torch.pi / 4
    goals = 0.5 * torch.stack([angle.cos(), angle.sin()], dim=-1)  # (8, 2)
    with torch.no_grad():
        log_prob = estimator.log_prob(goals, torch.zeros(8, 2), torch.tensor([0.1, 0.0]).expand(8, 2) / scale)
    for degrees, value in zip(range(0, 360, 45), log_prob.tolist()):
        print(f"goal at {degrees:3d} degrees: log p {value:6.2f}")
    ahead_less_behind = float(log_prob[0] - log_prob[4])
    print(f"{name}: ahead less behind {ahead_less_behind:.2f}")
    return ahead_less_behind


if __name__ == "__main__":
    main(*sys.argv[1:2])
