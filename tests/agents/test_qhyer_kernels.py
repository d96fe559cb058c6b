"""QHyer's loss with kernels is its loss without; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qhyer.nn import heads_triton, tokens_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "1" if DEVICE == "cuda" else "interpret"
CASES = [  # changes of the configuration; whether kernels write the tokens, and read the heads
    ({}, True, True),
    ({"context": 1}, True, True),
    ({"conditioning": "none"}, False, True),
    ({"tokenization": "separate"}, False, True),
    ({"tokenization": "no_goal", "action_head": "mixture"}, True, False),
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
    """Which of the two was called."""
    found: set[str] = set()
    embed, heads = tokens_triton.embed, heads_triton.heads
    monkeypatch.setattr(tokens_triton, "embed", lambda *a: found.add("tokens") or embed(*a))
    monkeypatch.setattr(heads_triton, "heads", lambda *a: found.add("heads") or heads(*a))
    return found


def make(tiny_agent, shake, point_world, **changes):
    agent = tiny_agent("qhyer", dropout=0.0, **changes).to(DEVICE)
    shake(agent)
    (stage,) = agent.stages()
    batch = stage.sampler.build(point_world, torch.Generator().manual_seed(0)).sample(8)
    return agent, {name: value.to(DEVICE) for name, value in batch.items()}


@pytest.mark.parametrize(("changes", "tokens", "heads"), CASES)
def test_the_same_loss_and_gradients(changes, tokens, heads, tiny_agent, shake, point_world, used, monkeypatch):
    agent, batch = make(tiny_agent, shake, point_world, **changes)
    monkeypatch.setenv("QHYER_TRITON", "0")
    plain = outcome(agent, batch)
    assert not used
    monkeypatch.setenv("QHYER_TRITON", KERNELS)
    same(outcome(agent, batch), plain)
    assert ("tokens" in used, "heads" in used) == (tokens, heads)


@pytest.mark.slow
def test_the_compiler_can_follow(tiny_agent, shake, point_world, monkeypatch):
    agent, batch = make(tiny_agent, shake, point_world)
    monkeypatch.setenv("QHYER_TRITON", KERNELS)
    compiled = outcome(agent, batch, lambda f: torch.compile(f, fullgraph=True, dynamic=False, backend="aot_eager"))
    same(compiled, outcome(agent, batch))
