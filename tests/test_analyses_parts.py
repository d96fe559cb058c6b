"""Parts of goals: shares worked out by hand, and a run's own recording."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qhyer import runs
from qhyer.agents.gcbc import GCBCConfig
from qhyer.analyses import parts
from qhyer.data.generate import generate
from qhyer.data.registry import get
from qhyer.errors import UserError
from qhyer.evaluate import EvalConfig
from qhyer.train import TrainConfig, train


def test_gaps_are_in_standard_units_of_the_goal_coordinates() -> None:
    spec = SimpleNamespace(goal_indices=(2, 0), observation_std=(2.0, 9.0, 0.5))
    found = parts.gaps(np.array([[0.0, 7.0, 1.0], [4.0, 7.0, 2.0]]), np.array([4.0, 0.0, 2.0]), spec)
    assert found.tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_shares_by_hand() -> None:
    """Coordinate 0 is asked for and stays done in one episode of two, and is passed in both; 1 is right from the start
    and disturbed in one; 2 is asked for in the second episode alone, and never done."""
    first = np.array([[1.0, 0.0, 0.1], [0.2, 0.0, 0.1], [0.5, 0.4, 0.1]])
    second = np.array([[1.0, 0.0, 3.0], [0.3, 2.0, 3.0], [0.6, 2.0, 0.6]])
    found = parts.of_task([first, second])
    assert found["asked"] == [1.0, 0.0, 0.5] and found["episodes"] == 2
    assert found["done"] == [0.5, None, 0.0] and found["passed"] == [1.0, None, 0.0]
    assert found["kept"] == pytest.approx(2 / 3)  # 1 and 2 of the first, 1 of the second lost
    _, lines = parts.table({"4": {"success": 0.5, **found}}, [19, 20, 36])
    assert lines == [["4", "50", "67", "19", "50", "100"]]
    nothing = {**found, "asked": [0.0] * 3, "kept": None}
    assert parts.table({"1": {"success": 1.0, **nothing}}, [19, 20, 36])[1] == [["1", "100", "–", "none", "", ""]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    dataset = get("pointmaze-medium-stitch")
    generate(dataset, out=folder, episodes=4, rows=30, workers=1, progress=False)
    config = GCBCConfig(steps=2, batch_size=8, hidden=(8,))
    npz = folder / f"{dataset.name}.npz"
    train(
        "gcbc", str(npz), config, TrainConfig(device="cpu", threads=1), preset="paper", run=folder / "run", quiet=True
    )
    return folder / "run"


def test_of_a_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"no recorded rollouts; `qhyer eval .* --record 10"):
        parts.run(trained)
    runs.evaluate_run(trained, EvalConfig(episodes=2, tasks=(2, 3), record=1), workers=0, quiet=True)
    with pytest.raises(UserError, match="leave out --data"):
        parts.run(trained, data=Path("x.npz"))
    found = json.loads(parts.run(trained).read_text())
    assert found["columns"] == [0, 1] and list(found["tasks"]) == ["2", "3"] and found["step"] == 2
    with np.load(trained / "rollouts" / "00000002.npz") as arrays:
        start = np.abs(arrays["observations"][0, 0] - arrays["goals"][0])
    agent, _ = runs.load_agent(trained)
    asked = start[:2] / np.asarray(agent.spec.observation_std)[:2] > parts.NEAR
    assert found["tasks"]["2"]["asked"] == asked.astype(float).tolist() and asked.any()
    assert found["tasks"]["2"]["episodes"] == 1
    assert "asked: observation" in capsys.readouterr().out
