"""The row convention, your own arrays, the words of the errors, and files whose damage is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qhyer.data import registry
from qhyer.data.episodes import Episodes, read_npz
from qhyer.data.generate import generate
from qhyer.errors import CorruptFile, DataError, UserError
from qhyer.report import reproduce
from qhyer.storage import read_sealed_json, sha256_file, write_sealed_json


def arrays(lengths: tuple[int, ...] = (4, 2, 3)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = sum(lengths)
    terminals = np.zeros(rows, bool)
    terminals[np.cumsum(lengths) - 1] = True
    return rng.normal(size=(rows, 3)), rng.uniform(-1, 1, (rows, 2)), terminals


def test_row_convention():
    observations, actions, terminals = arrays()
    episodes = Episodes.from_arrays(observations, actions, terminals)
    assert episodes.num_episodes == 3 and episodes.num_transitions == 3 + 1 + 2
    assert episodes.starts.tolist() == [0, 4, 6] and episodes.ends.tolist() == [3, 5, 8]
    assert episodes.end_of.tolist() == [3, 3, 3, 3, 5, 5, 8, 8, 8]
    assert episodes.transitions.tolist() == [0, 1, 2, 4, 6, 7]  # a final state starts no transition
    assert episodes.observations.dtype == episodes.actions.dtype == torch.float32
    assert torch.equal(episodes.observations, torch.tensor(observations, dtype=torch.float32))
    assert "3 episodes, 6 transitions, observations (3,), actions (2,), goal [0, 1, 2]" in repr(episodes)


def test_thousand_and_one_rows_are_a_thousand_transitions():
    observations, actions, terminals = arrays((1001, 1001))
    episodes = Episodes.from_arrays(observations, actions, terminals)
    assert episodes.num_transitions == 2000
    assert not set(episodes.transitions.tolist()) & {1000, 2001}


def test_flags_and_row_numbers_mean_the_same():
    observations, actions, terminals = arrays()
    ways = [terminals, terminals.astype(np.float32), terminals.tolist(), np.array([3, 5, 8]), [3, 5, 8]]
    made = [Episodes.from_arrays(observations, actions, ends) for ends in ways]
    assert len({episodes.fingerprint for episodes in made}) == 1
    other = Episodes.from_arrays(observations, actions, [3, 6, 8])
    assert other.fingerprint != made[0].fingerprint


def test_goal_by_index_and_by_name():
    observations, actions, terminals = arrays()
    names = ["x", "y", "angle"]
    assert Episodes.from_arrays(observations, actions, terminals).goal_indices == (0, 1, 2)
    assert Episodes.from_arrays(observations, actions, terminals, goal=[2, 0]).goal_indices == (2, 0)
    named = Episodes.from_arrays(observations, actions, terminals, goal=["angle", "x"], observation_names=names)
    assert named.goal_indices == (2, 0) and named.spec().goal_dim == 2
    with pytest.raises(UserError, match="'z' is not known: the names are x, y, angle"):
        Episodes.from_arrays(observations, actions, terminals, goal=["z"], observation_names=names)
    with pytest.raises(UserError, match="no observation_names"):
        Episodes.from_arrays(observations, actions, terminals, goal=["x"])
    for bad in ([3], [-1], [0, 0], []):
        with pytest.raises(UserError, match=r"distinct and within 0\.\.2"):
            Episodes.from_arrays(observations, actions, terminals, goal=bad)


def test_spec():
    observations, actions, terminals = arrays((300, 200))
    observations[:, 1] = 5.0
    spec = Episodes.from_arrays(observations, actions, terminals, goal=[0]).spec()
    assert (spec.observation_dim, spec.action_dim, spec.goal_indices) == (3, 2, (0,))
    assert spec.observation_mean == pytest.approx(observations.mean(0), abs=1e-6)
    assert spec.observation_std[0] == pytest.approx(observations[:, 0].std(), abs=1e-6)
    assert spec.observation_std[1] == 1e-3  # constant: a floor, not a division by zero


def test_bad_arrays_are_refused_with_what_to_do():
    observations, actions, terminals = arrays()
    with pytest.raises(DataError, match=r"mine:\n  error \[range\].*2 \* \(actions - low\)"):
        Episodes.from_arrays(observations, actions * 9, terminals, name="mine")
    with pytest.raises(DataError, match=r"give 9 flags .*or the row numbers"):
        Episodes.from_arrays(observations, actions, [3, 5])
    with pytest.raises(DataError, match="or the row numbers"):
        Episodes.from_arrays(observations, actions, [3, 5, 11])
    with pytest.raises(DataError, match="or the row numbers"):
        Episodes.from_arrays(observations, actions, [-3, 5, 8])
    with pytest.raises(DataError, match=r"\[ends\]"):
        Episodes.from_arrays(observations, actions, np.zeros(9, bool))
    with pytest.raises(DataError, match=r"\[shape\]"):
        Episodes.from_arrays(observations, actions[:-1], terminals)
    for garbage in (None, 3.0, "text", [], [[1, 2], [3]]):
        with pytest.raises((DataError, UserError)):
            Episodes.from_arrays(garbage, actions, terminals)


def test_own_file_with_names_and_goal(tmp_path):
    observations, actions, terminals = arrays()
    path = tmp_path / "mine.npz"
    np.savez(
        path,
        observations=observations,
        actions=actions,
        terminals=terminals,
        observation_names=np.array(["x", "y", "angle"]),
        goal_indices=np.array([1]),
    )
    episodes = Episodes.load(path)
    assert (episodes.name, episodes.goal_indices) == ("mine", (1,))
    assert Episodes.load(path, goal=["angle"]).goal_indices == (2,)
    loaded, dataset = registry.load(path)
    assert dataset is None and loaded.fingerprint == episodes.fingerprint


@pytest.mark.parametrize("rows", [False, True], ids=["flags", "row numbers"])
def test_timeouts_end_episodes_in_an_npz_too(rows, tmp_path):
    observations, actions, ends = arrays()
    late = np.arange(len(ends)) == np.flatnonzero(ends)[-1]
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    np.savez(whole, observations=observations, actions=actions, terminals=ends)
    own, timeouts = (np.flatnonzero(each) if rows else each for each in (ends & ~late, late))
    np.savez(parts, observations=observations, actions=actions, terminals=own, timeouts=timeouts)
    assert Episodes.load(parts).fingerprint == Episodes.load(whole).fingerprint == reproduce._fingerprint(parts, 0)
    assert "timeouts" not in read_npz(parts) and registry.load(parts)[0].num_episodes == 3


@pytest.mark.parametrize(
    "timeouts",
    [np.zeros(3), np.full(9, 2), np.zeros((9, 1)), np.array([9]), np.array(["no"] * 9)],
    ids=["too few", "no flags", "a table", "beyond the last row", "text"],
)
def test_timeouts_that_do_not_fit_are_refused(timeouts, tmp_path):
    observations, actions, ends = arrays()
    np.savez(tmp_path / "odd.npz", observations=observations, actions=actions, terminals=ends, timeouts=timeouts)
    with pytest.raises(DataError, match=r"odd.npz: timeouts has shape .* does not fit 9 rows"):
        read_npz(tmp_path / "odd.npz")


def test_ends_that_do_not_fit_are_left_to_the_check(tmp_path):
    observations, actions, ends = arrays()
    np.savez(tmp_path / "odd.npz", observations=observations, actions=actions, terminals=2 * ends, timeouts=ends)
    assert np.array_equal(read_npz(tmp_path / "odd.npz")["terminals"], 2 * ends)


def test_files_that_are_no_datasets(tmp_path):
    with pytest.raises(UserError, match="qhyer data generate"):
        Episodes.load(tmp_path / "absent.npz")
    text = tmp_path / "text.npz"
    text.write_text("not a zip")
    with pytest.raises(CorruptFile, match="is not an npz file"):
        Episodes.load(text)
    np.savez(tmp_path / "part.npz", observations=np.zeros((3, 1)))
    with pytest.raises(DataError, match="lacks actions, terminals"):
        Episodes.load(tmp_path / "part.npz")
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, observations=np.array([None, {}]), actions=np.zeros(2), terminals=np.ones(2))
    with pytest.raises(CorruptFile):  # never unpickled
        Episodes.load(pickled)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    dataset = registry.get("pointmaze-medium-stitch")
    return generate(dataset, out=folder, episodes=6, workers=1, rows=40, validation=False, progress=False)


def test_registered_file_knows_its_goal(small, monkeypatch):
    episodes, dataset = registry.load(small)
    assert dataset is registry.get("pointmaze-medium-stitch") and episodes.goal_indices == (0, 1)
    monkeypatch.setenv("QHYER_DATA", str(small.parent))
    again, _ = registry.load("pointmaze-medium-stitch")
    assert again.fingerprint == episodes.fingerprint
    with pytest.raises(UserError, match="qhyer data generate cube-single-play-v0"):
        registry.load("cube-single-play")


def test_sidecar_of_another_file(small, tmp_path):
    path = tmp_path / small.name
    path.write_bytes(small.read_bytes())
    recorded = read_sealed_json(small.with_suffix(".json"))
    write_sealed_json(path.with_suffix(".json"), {**recorded, "sha256": "0" * 64})
    with pytest.raises(CorruptFile, match="SHA-256"):
        Episodes.load(path)
    write_sealed_json(path.with_suffix(".json"), {**recorded, "sha256": sha256_file(path)})
    Episodes.load(path)
    path.with_suffix(".json").unlink()
    Episodes.load(path)  # a file without a sidecar is the user's own


def test_every_one_of_a_thousand_changed_bytes_is_noticed(small, tmp_path):
    """Half of the changes in the data, half in the sidecar; each a random byte set to another value."""
    path, sidecar = tmp_path / small.name, (tmp_path / small.name).with_suffix(".json")
    contents = {path: small.read_bytes(), sidecar: small.with_suffix(".json").read_bytes()}
    for file, content in contents.items():
        file.write_bytes(content)
    Episodes.load(path)
    rng = np.random.default_rng(0)
    unnoticed = []
    for trial in range(1000):
        file = (path, sidecar)[trial % 2]
        damaged = bytearray(contents[file])
        place = int(rng.integers(len(damaged)))
        damaged[place] ^= int(rng.integers(1, 256))
        file.write_bytes(damaged)
        try:
            Episodes.load(path)
            unnoticed.append((file.name, place))
        except CorruptFile:
            pass
        file.write_bytes(contents[file])
    assert not unnoticed
    assert set(read_npz(path)) == {"observations", "actions", "terminals", "qpos", "qvel"}


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_truncated_files_are_noticed(small, tmp_path, kept):
    path = tmp_path / small.name
    path.write_bytes(small.read_bytes()[:kept])
    with pytest.raises(CorruptFile):  # even without a sidecar
        Episodes.load(path)
