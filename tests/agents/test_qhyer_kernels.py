"""QHyer's loss with kernels is its loss without; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qhyer import distributed
from qhyer.nn import heads_triton, losses_triton, tokens_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "1" if DEVICE == "cuda" else "interpret"
EVERY = {"tokens", "heads", "actor", "scale", "density"}
CASES = [  # changes of the configuration; what kernels do then of these
    ({}, EVERY),
    ({"weight_bc": 0.5, "weight_q": 3.0, "weight_critic": 0.1}, EVERY),
    ({"context": 1}, EVERY),
    ({"conditioning": "none"}, {"heads"}),
    ({"conditioning": "rtg"}, {"tokens", "heads", "actor"}),
    ({"tokenization": "separate", "regression": "quantile"}, {"heads", "scale", "density"}),
    ({"tokenization": "no_goal", "action_head": "mixture"}, {"tokens", "scale", "density"}),
    ({"q_normalization": "standardize"}, EVERY - {"scale"}),
]


def outcome(agent, batch, follow=lambda loss: loss) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    agent.zero_grad()
    torch.manual_seed(0)
    loss, _ = follow(agent.loss)(batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in agent.named_parameters()}


def same(ours, theirs) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    for name, gradient in theirs[1].items():
        assert (gradient is None) == (ours[1][name] is None), name
        if gradient is not None:
            torch.testing.assert_close(
                ours[1][name], gradient, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.fixture
def used(monkeypatch):
    """What was called."""
    found: set[str] = set()

    def watch(module, operator: str, name: str) -> None:
        original = getattr(module, operator)
        monkeypatch.setattr(module, operator, lambda *a: found.add(name) or original(*a))

    watch(tokens_triton, "embed", "tokens")
    watch(heads_triton, "heads", "heads")
    watch(losses_triton, "actor", "actor")
    watch(losses_triton, "normalized", "scale")
    watch(losses_triton, "normal", "density")
    return found


def make(tiny_agent, shake, point_world, **changes):
    agent = tiny_agent("qhyer", dropout=0.0, **changes).to(DEVICE)
    shake(agent)
    (stage,) = agent.stages()
    batch = stage.sampler.build(point_world, torch.Generator().manual_seed(0)).sample(3)
    return agent, {name: value.to(DEVICE) for name, value in batch.items()}


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_the_same_loss_and_gradients(changes, expected, tiny_agent, shake, point_world, used, monkeypatch):
    agent, batch = make(tiny_agent, shake, point_world, **changes)
    start = {name: buffer.clone() for name, buffer in agent.named_buffers() if name.startswith("q_")}
    monkeypatch.setenv("QHYER_TRITON", "0")
    plain, running = outcome(agent, batch), {name: agent.get_buffer(name).clone() for name in start}
    assert not used
    for name, value in start.items():
        agent.get_buffer(name).copy_(value)
    monkeypatch.setenv("QHYER_TRITON", KERNELS)
    same(outcome(agent, batch), plain)
    assert used == expected
    for name, value in running.items():
        torch.testing.assert_close(agent.get_buffer(name), value, rtol=1e-4, atol=1e-5)


def test_the_same_metrics(tiny_agent, shake, point_world, monkeypatch):
    agent, batch = make(tiny_agent, shake, point_world)
    found = []
    for use in ("0", KERNELS):
        monkeypatch.setenv("QHYER_TRITON", use)
        agent.q_seen.zero_()
        torch.manual_seed(0)
        found.append(agent.loss(batch)[1])
    assert list(found[0]) == list(found[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_sums_of_several_processes_are_the_plain_codes(tiny_agent, shake, point_world, used, monkeypatch):
    agent, batch = make(tiny_agent, shake, point_world)
    monkeypatch.setenv("QHYER_TRITON", KERNELS)
    monkeypatch.setattr(distributed, "active", lambda: True)
    outcome(agent, batch)
    assert used == EVERY - {"actor", "scale"}


@pytest.mark.slow
def test_the_compiler_can_follow(tiny_agent, shake, point_world, monkeypatch):
    agent, batch = make(tiny_agent, shake, point_world)
    monkeypatch.setenv("QHYER_TRITON", KERNELS)
    compiled = outcome(agent, batch, lambda f: torch.compile(f, fullgraph=True, dynamic=False, backend="aot_eager"))
    same(compiled, outcome(agent, batch))
