"""The first losses of every agent, as they were: a change of numbers is either a bug or worth a line in the log.

After a change that is meant to move them: QHYER_GOLDEN=write python -m pytest tests/agents/test_golden.py, and commit
the new files together with that change, saying so in its message.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qhyer import agents
from qhyer.train import TrainConfig, train

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", agents.names())
def test_first_losses(name, tiny_config, point_world, tmp_path):
    """Ten updates of each stage through the trainer itself, so that sampling, noise and clipping count too."""
    run = train(
        name,
        "point-world",
        tiny_config(name),
        TrainConfig(device="cpu", log_every=1),
        run=tmp_path / "run",
        episodes=point_world,
        quiet=True,
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [{"stage": line["stage"], "step": line["step"], "loss": line["loss"]} for line in lines]
    path = GOLDEN / f"{name}.json"
    if os.environ.get("QHYER_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        path.write_text("[\n" + ",\n".join(json.dumps(line) for line in found) + "\n]\n")
    assert path.is_file(), (
        f"no golden losses of {name} yet: QHYER_GOLDEN=write python -m pytest tests/agents/test_golden.py -k {name}"
    )
    golden = json.loads(path.read_text())
    assert [(line["stage"], line["step"]) for line in found] == [(line["stage"], line["step"]) for line in golden]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in golden], rel=1e-4, abs=1e-5)


def test_no_golden_file_without_its_agent():
    assert {path.stem for path in GOLDEN.glob("*.json")} <= set(agents.names())
