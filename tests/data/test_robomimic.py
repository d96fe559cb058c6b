"""robomimic's layout, and dicts of observations in Minari's: small files, whole and with what may be wrong in them."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from qhyer.cli import main
from qhyer.data.episodes import Episodes, goal_columns, read_npz
from qhyer.data.hdf5 import read, recorded_in
from qhyer.errors import CorruptFile, DataError, UserError
from qhyer.storage import read_sealed_json

LENGTHS = (4, 3, 5)
NAMES = ["gripper", *(f"object[{i}]" for i in range(3)), "robot0_eef_pos[0]", "robot0_eef_pos[1]"]


def states(length: int, seed: int) -> dict[str, np.ndarray]:
    """Of T + 1 states, by key."""
    rng = np.random.default_rng(seed)
    return {
        "robot0_eef_pos": rng.normal(size=(length + 1, 2)),
        "object": rng.normal(size=(length + 1, 3)),
        "gripper": rng.normal(size=length + 1),
        "agentview_image": rng.integers(0, 255, (length + 1, 6, 6, 3), dtype=np.uint8),
    }


def demos(path: Path, lengths=LENGTHS, following: bool = True, masks: dict[str, list[int]] | None = None) -> Path:
    """Demonstrations as robomimic keeps them; the reward is 1 at the last step."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {}})
        data.attrs["total"] = sum(lengths)
        for number, length in enumerate(lengths):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = length
            for key, value in states(length, number).items():
                demo[f"obs/{key}"] = value[:-1]
                if following:
                    demo[f"next_obs/{key}"] = value[1:]
            demo["actions"] = np.random.default_rng(100 + number).uniform(-1, 1, (length, 2))
            demo["rewards"] = (np.arange(length) == length - 1).astype(np.float64)
            demo["dones"] = (np.arange(length) == length - 1).astype(np.int64)
            demo["states"] = np.zeros((length, 9))
        for name, members in (masks or {}).items():
            file[f"mask/{name}"] = np.array([f"demo_{number}" for number in members], dtype="S")
    return path


def change(path: Path, **changes) -> Path:
    """Replaces what is at these paths, or removes it where the value is None."""
    with h5py.File(path, "a") as file:
        for place, value in changes.items():
            if place in file:
                del file[place]
            elif place.rsplit("/", 1)[0] in file and hasattr(file[place.rsplit("/", 1)[0]], "shape"):
                del file[place.rsplit("/", 1)[0]]  # an array, where a group is to be
            if value is not None:
                file[place] = value
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


# --------------------------------------------------------------------------------------------------------- robomimic


def test_rows_end_with_the_state_after_the_last_step(tmp_path):
    arrays, notes = read(demos(tmp_path / "lift.hdf5"))
    assert notes == ["images are left out: agentview_image"]
    assert np.flatnonzero(arrays["terminals"]).tolist() == [4, 8, 14]
    assert arrays["observation_names"].tolist() == NAMES  # by key in alphabetical order
    assert arrays["observations"].dtype == arrays["actions"].dtype == np.float32
    begin = 0
    for number, length in enumerate(LENGTHS):
        whole = states(length, number)
        expected = np.concatenate([whole["gripper"][:, None], whole["object"], whole["robot0_eef_pos"]], axis=1)
        rows = slice(begin, begin + length + 1)
        assert np.array_equal(arrays["observations"][rows], expected.astype(np.float32))
        assert arrays["rewards"][rows].tolist() == [0.0] * length + [1.0]  # of the state that was reached
        taken = np.random.default_rng(100 + number).uniform(-1, 1, (length, 2)).astype(np.float32)
        assert np.array_equal(arrays["actions"][rows], np.concatenate([taken, np.zeros((1, 2), np.float32)]))
        begin += length + 1
    episodes = Episodes.load(tmp_path / "lift.hdf5")
    assert (episodes.name, episodes.num_transitions, episodes.goal_indices) == ("lift-hdf5", 12, tuple(range(6)))


def test_without_next_obs_the_last_step_is_the_final_state(tmp_path):
    path = demos(tmp_path / "lift.hdf5", following=False)
    arrays, notes = read(path)
    assert np.flatnonzero(arrays["terminals"]).tolist() == [3, 6, 11]
    assert np.array_equal(arrays["observations"][:4, 0], states(4, 0)["gripper"][:-1].astype(np.float32))
    assert not arrays["actions"][[3, 6, 11]].any() and not arrays["rewards"].any()
    assert "not there in 3 demonstrations: their last step is taken for the final state" in notes[1]
    assert "rewards of 3 last steps are left out" in notes[2]

    # What is read is not all that is there: a key that is not kept of next states, in one demonstration.
    arrays, notes = read(change(demos(path), **{"data/demo_1/next_obs/object": None}))
    assert np.flatnonzero(arrays["terminals"]).tolist() == [4, 7, 13]
    assert "not there in 1 demonstrations" in notes[1]
    assert read(path, keys=["gripper"])[0]["terminals"].sum() == 3 and not read(path, keys=["gripper"])[1]


def test_demonstrations_come_by_number_and_by_mask(tmp_path, capsys):
    path = demos(tmp_path / "lift.hdf5", range(2, 14), masks={"train": [11, 2, 0], "valid": [1], "none": []})
    arrays, notes = read(path)
    assert np.diff(np.flatnonzero(arrays["terminals"]), prepend=-1).tolist() == list(range(3, 15))  # 10 follows 9
    assert (
        notes[-1] == "all demonstrations are read; `qhyer data convert --split` takes those of none or train or valid"
    )
    arrays, notes = read(path, split="train")
    assert np.diff(np.flatnonzero(arrays["terminals"]), prepend=-1).tolist() == [3, 5, 14] and len(notes) == 1
    with pytest.raises(UserError, match=r"no split 'vald'; did you mean valid\? \(there are none, train, valid\)"):
        read(path, split="vald")
    with pytest.raises(DataError, match="mask/none lists no demonstration"):
        read(path, split="none")
    with h5py.File(path, "a") as file:
        file["data/demo_1"].attrs["num_samples"] = 0
    with pytest.raises(DataError, match="no demonstration of split valid with a step to learn from"):
        read(path, split="valid")
    with h5py.File(path, "a") as file:
        file["data/demo_1"].attrs["num_samples"] = 3
    with pytest.raises(UserError, match="it has no mask, and so no splits"):
        read(demos(tmp_path / "plain.hdf5"), split="train")
    with pytest.raises(DataError, match="mask/train names demo_11, which is not in data"):
        read(change(path, **{"data/demo_11": None}), split="train")

    assert run("data", "convert", path, tmp_path / "valid.npz", "--split", "valid") == 0
    assert "1 episodes" in capsys.readouterr().out
    assert read_sealed_json(tmp_path / "valid.json")["split"] == "valid"


def test_bounds_of_one_split_are_told_ready_for_the_other(tmp_path, capsys):
    path = demos(tmp_path / "lift.hdf5", (30,) * 3, masks={"train": [0, 2], "valid": [1]})
    assert run("data", "convert", path, tmp_path / "train.npz", "--split", "train", "--scale-actions") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "these bounds are those of split train alone. For another split give both conversions the same" in shown
    given = shown.split("wider ones: ")[1].split(" wrote ")[0].split()
    assert given[0] == "--action-low" and given[3] == "--action-high" and len(given) == 6
    again = ["--split", "train", *given]
    assert run("data", "convert", path, tmp_path / "again.npz", *again) == 0
    assert "split train alone" not in capsys.readouterr().out  # they were given
    first, second = (read_npz(tmp_path / name) for name in ("train.npz", "again.npz"))
    assert all(np.array_equal(first[key], second[key]) for key in ("actions", "action_low", "action_high"))
    assert run("data", "convert", path, tmp_path / "all.npz", "--scale-actions") == 0
    assert "alone" not in capsys.readouterr().out


def test_keys_are_chosen_when_converting(tmp_path, capsys):
    path, out = demos(tmp_path / "lift.hdf5"), tmp_path / "lift.npz"
    assert run("data", "convert", path, out, "--keys", "robot0_eef_pos", "gripper") == 0
    arrays = read_npz(out)
    assert arrays["observation_names"].tolist() == ["robot0_eef_pos[0]", "robot0_eef_pos[1]", "gripper"]
    sidecar = read_sealed_json(out.with_suffix(".json"))
    assert sidecar["keys"] == ["robot0_eef_pos", "gripper"] and sidecar["recorded_in"] == "Lift"
    assert sidecar["notes"] == []  # who names keys knows that the others are left out
    assert Episodes.load(out, goal=["robot0_eef_pos"]).goal_indices == (0, 1)  # a key is all of its columns
    capsys.readouterr()
    assert run("data", "info", out) == 0
    shown = capsys.readouterr().out
    assert "observation 2 gripper" in shown and "robot0_eef_pos, gripper" in shown and "Lift" in shown
    for keys, words in (
        (["gripr"], "no observation is called 'gripr'; did you mean gripper? (there are agentview_image, gripper,"),
        (["agentview_image"], "agentview_image cannot be read: images can be no columns"),
    ):
        assert run("data", "convert", path, tmp_path / "no.npz", "--keys", *keys) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert run("data", "convert", out, tmp_path / "no.npz", "--keys", "gripper") == 2
    assert "choose from an HDF5 file" in " ".join(capsys.readouterr().err.split())


def test_check_and_info(tmp_path, capsys):
    path = demos(tmp_path / "lift.hdf5", (40,) * 4, masks={"train": [0, 1]})
    assert run("data", "check", path) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "images are left out: agentview_image" in shown and "nothing wrong in 164 rows, 4 episodes" in shown
    assert run("data", "info", path) == 0
    shown = capsys.readouterr().out
    assert "recorded in" in shown and "Lift" in shown and "object[2]" in shown
    with h5py.File(path, "a") as file:
        file["data"].attrs["env_args"] = "not JSON"
    assert recorded_in(path) is None and run("data", "info", path) == 0


def test_a_goal_is_named_by_key():
    names = ["a", "b[0]", "b[1]", "c/x[0]", "c/y", "bb[0]"]
    for goal, columns in ((["b"], (1, 2)), (["c", "a"], (3, 4, 0)), (["c/x", "b[1]"], (3, 2)), (["bb"], (5,))):
        assert goal_columns(goal, names, 6) == columns
    with pytest.raises(UserError, match="must be distinct"):
        goal_columns(["b", "b[0]"], names, 6)
    with pytest.raises(UserError, match="'d' is not known: the names are a, b"):
        goal_columns(["d"], names, 6)


def test_what_is_left_out_is_told(tmp_path):
    path = demos(tmp_path / "lift.hdf5", (3,))
    words = h5py.string_dtype()
    extra = {
        "depth": np.zeros((3, 6, 6, 1), np.float32),
        "grey": np.zeros((3, 6, 6), np.uint8),
        "pose": np.arange(3 * 4.0).reshape(3, 2, 2),
        "task": np.array(["lift"] * 3, dtype=words),
        "touch": np.array([0, 1, 1], np.uint8),
    }
    with h5py.File(path, "a") as file:
        for key, value in extra.items():
            file[f"data/demo_0/obs/{key}"] = file[f"data/demo_0/next_obs/{key}"] = value
    arrays, notes = read(path)
    assert notes == ["images are left out: agentview_image, depth, grey", "what is not numbers is left out: task"]
    added = ["pose[0,0]", "pose[0,1]", "pose[1,0]", "pose[1,1]"]
    assert arrays["observation_names"].tolist() == [*NAMES[:4], *added, *NAMES[4:], "touch"]
    assert arrays["observations"][1, 4:8].tolist() == [4, 5, 6, 7] and arrays["observations"][:, -1].tolist()[1] == 1

    with h5py.File(path, "a") as file:
        for key in set(file["data/demo_0/obs"]) - {"grey", "task"}:
            del file[f"data/demo_0/obs/{key}"]
    with pytest.raises(DataError, match=r"demo_0 has no observations of numbers.*: grey, task"):
        read(path)


def test_rows_beyond_num_samples_and_demonstrations_without_steps(tmp_path):
    path = demos(tmp_path / "lift.hdf5", (4, 3, 5, 0, 1))
    with h5py.File(path, "a") as file:
        file["data/demo_1"].attrs["num_samples"] = 2
        file["data"].create_group("demo_5")  # begun and never filled
        file["data/notes"] = [1]
        del file["data/demo_4/next_obs"]  # one step, and nothing after it
    arrays, notes = read(path)
    assert np.flatnonzero(arrays["terminals"]).tolist() == [4, 7, 13]
    following = states(3, 1)["gripper"].astype(np.float32)[:3]
    assert np.array_equal(arrays["observations"][5:8, 0], following)  # the state after the second step
    assert notes[1:3] == [
        "3 demonstrations without a step to learn from are left out",
        "1 demonstrations have more rows than num_samples says: those beyond are left out",
    ]


def test_successes_are_no_ends(tmp_path):
    path = change(demos(tmp_path / "lift.hdf5"), **{"data/demo_0/dones": [0, 1, 1, 1], "data/demo_1/rewards": None})
    arrays, notes = read(path)
    assert np.flatnonzero(arrays["terminals"]).tolist() == [4, 8, 14] and "rewards" not in arrays
    assert notes[1:] == [
        "rewards are left out: not all demonstrations have them",
        "dones marks 2 steps before the last of their demonstrations: not cut there",
    ]


def test_rewards_are_left_out_for_one_reason(tmp_path):
    """Next states and rewards in one demonstration alone: nothing is said of rewards of last steps, all are gone."""
    path = demos(tmp_path / "lift.hdf5")
    gone = ["data/demo_0/rewards", "data/demo_1/next_obs", "data/demo_2/next_obs", "data/demo_2/rewards"]
    arrays, notes = read(change(path, **dict.fromkeys(gone)))
    assert "rewards" not in arrays
    assert [note for note in notes if "rewards" in note] == ["rewards are left out: not all demonstrations have them"]


def test_a_mask_that_is_no_group_of_lists(tmp_path):
    path = change(demos(tmp_path / "lift.hdf5"), mask=np.ones(3))
    arrays, notes = read(path)
    assert arrays["terminals"].sum() == 3 and len(notes) == 1
    with pytest.raises(UserError, match=r"no split 'train' \(it has no mask, and so no splits\)"):
        read(path, split="train")
    with h5py.File(path, "a") as file:
        del file["mask"]
        file.create_group("mask/train")
    with pytest.raises(DataError, match="mask/train is no list"):
        read(path, split="train")


@pytest.mark.parametrize(
    "stored, steps",
    [(np.array([2]), 2), (np.float64(2), 2), ("3", 3), ("many", None), (np.array([2, 3]), None), (np.nan, None)],
)
def test_num_samples_as_others_write_them(stored, steps, tmp_path):
    path = demos(tmp_path / "lift.hdf5")
    with h5py.File(path, "a") as file:
        file["data/demo_1"].attrs["num_samples"] = stored
    if steps is None:
        with pytest.raises(DataError, match=r"num_samples of demo_1 is .*, not a number of steps"):
            read(path)
    else:
        assert np.flatnonzero(read(path)[0]["terminals"]).tolist() == [4, 5 + steps, 11 + steps]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data/demo_1": np.zeros(3)}, "demo_1 is an array; a demonstration is a group"),
        ({"data/demo_1": 3.0}, "demo_1 is an array"),
        ({"data/demo_1/next_obs": np.zeros((3, 6))}, "next_obs of demo_1 is one array; it must be a group by key"),
        ({"data/demo_1/actions": np.array([["a", "b"]] * 3, "S")}, "actions of demo_1 holds text, not numbers"),
        ({"data/demo_1/rewards": np.array(["a"] * 3, "S")}, "rewards of demo_1 holds text, not numbers"),
        ({"data/demo_1/rewards/inside": np.zeros(3)}, "rewards of demo_1 is a group, not an array"),
        ({"data/demo_1/rewards": h5py.Empty("f")}, "rewards of demo_1 is empty, not an array"),
        ({"data/demo_1/dones": np.array(["a"] * 3, "S")}, "dones of demo_1 holds text"),
        ({"data/demo_1/next_obs/object": h5py.Empty("f")}, r"cannot be read \(.*D4RL's is flat"),  # the last resort
        (
            {"data/demo_1/obs/object": None, "data/demo_1/next_obs/object": None},
            r"demo_1 lacks object, which demo_0 has; `qhyer data convert FILE OUT.npz --keys gripper robot0_eef_pos`",
        ),
        (
            {"data/demo_1/obs/force": np.zeros(3)},
            "demo_0 lacks force, which demo_1 has; .*--keys gripper object robot0",
        ),
        (
            {"data/demo_1/obs/object": np.zeros((3, 4)), "data/demo_1/next_obs/object": np.zeros((3, 4))},
            r"a step's object has the shape \(4,\) in demo_1 and \(3,\) in demo_0; .*--keys gripper robot0_eef_pos`",
        ),
        ({"data/demo_1/next_obs/object": np.zeros((3, 4))}, r"object has the shape \(4,\) in demo_1/next_obs"),
        ({"data/demo_1/obs/gripper": np.zeros(2)}, "gripper of demo_1 has 2 rows, not 3"),
        ({"data/demo_1/next_obs/gripper": np.zeros(4)}, "gripper of demo_1/next_obs has 4 rows, not 3"),
        ({"data/demo_1/actions": np.zeros((2, 2))}, "demo_1 has 2 actions, and 3 by its num_samples: it was cut off"),
        ({"data/demo_1/actions": np.zeros((3, 1))}, "different numbers of columns"),
        ({"data/demo_1/actions": np.zeros(3)}, r"demo_1 has no actions \(steps, columns\)"),
        ({"data/demo_1/actions": None}, "demo_1 has no actions .* it has dones, next_obs, obs, rewards, states"),
        ({"data/demo_1/rewards": np.zeros(2)}, "demo_1 has 2 rewards and 3 actions"),
        (
            {"data/demo_0/obs": None},
            "demo_0 has no obs, .* it has actions, dones, .* dataset_states_to_obs.py makes one",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_told_with_the_demonstration(changes, words, tmp_path):
    path = change(demos(tmp_path / "lift.hdf5"), **changes)
    with pytest.raises(DataError, match=words) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert run("data", "check", path) == 1


def test_what_the_advice_says_works(tmp_path):
    path = change(demos(tmp_path / "lift.hdf5"), **{"data/demo_1/obs/object": None})
    arrays, notes = read(path, keys=["gripper", "robot0_eef_pos"])
    assert arrays["observations"].shape == (15, 3) and not notes


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_file_that_was_cut_off(share, tmp_path):
    content = demos(tmp_path / "lift.hdf5").read_bytes()
    (tmp_path / "cut.hdf5").write_bytes(content[: int(share * len(content))])
    with pytest.raises(CorruptFile, match="its end is missing"):
        read(tmp_path / "cut.hdf5")


def test_a_link_to_nothing(tmp_path):
    path = change(demos(tmp_path / "lift.hdf5"), **{"data/demo_1/obs/object": h5py.SoftLink("/nowhere")})
    with pytest.raises(CorruptFile):
        read(path)


def test_training_reads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = demos(tmp_path / "lift.hdf5")
    options = ["--steps", "2", "--agent.batch-size", "4", "--agent.hidden", "8", "--device", "cpu", "--out", "run"]
    assert run("train", "gcbc", path, "--goal", "object", *options) == 0
    info = json.loads(Path("run/run.json").read_text())
    assert info["dataset"] == "lift-hdf5" and info["spec"]["goal_indices"] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------- dicts in Minari's


def dicts(path: Path, lengths=(3, 2)) -> Path:
    """Nested observations: an arm's two arrays, a tuple of numbers, and a camera."""
    with h5py.File(path, "w") as file:
        for number, length in enumerate(lengths):
            group = file.create_group(f"episode_{number}")
            rows = np.arange(length + 1.0)
            group["observations/arm/velocity"] = rows[:, None] * [1, 2] + 100
            group["observations/arm/position"] = rows[:, None] * [1, 2]
            for place in range(11):
                group[f"observations/touch/_index_{place}"] = rows + 1000 * place
            jpeg = [np.frombuffer(b"\xff\xd8\xff" + bytes(2 + i % 2), np.uint8) for i in range(length + 1)]
            if number:  # of one size by chance: no array of arrays
                group["observations/camera"] = np.stack([np.resize(frame, 5) for frame in jpeg])
            else:
                frames = group["observations"].create_dataset("camera", (length + 1,), h5py.vlen_dtype(np.uint8))
                for row, frame in enumerate(jpeg):
                    frames[row] = frame
            group["observations/task"] = np.array(["reach"] * (length + 1), dtype=h5py.string_dtype())
            group["actions"] = np.full((length, 1), 0.5)
    return path


def test_dicts_become_columns(tmp_path, capsys):
    path = dicts(tmp_path / "arm.hdf5")
    arrays, notes = read(path)
    assert notes == ["images are left out: camera", "what is not numbers is left out: task"]
    arm = [f"arm/{key}[{i}]" for key in ("position", "velocity") for i in range(2)]
    assert arrays["observation_names"].tolist() == [*arm, *(f"touch/_index_{place}" for place in range(11))]
    assert arrays["observations"][2, :5].tolist() == [2, 4, 102, 104, 2] and arrays["observations"][1, -1] == 10001
    assert np.flatnonzero(arrays["terminals"]).tolist() == [3, 6] and "goal_indices" not in arrays
    assert Episodes.load(path, goal=["arm/position"]).goal_indices == (0, 1)

    chosen, notes = read(path, keys=["touch/_index_3", "arm"])
    assert chosen["observation_names"].tolist() == ["touch/_index_3", *arm] and not notes
    with pytest.raises(UserError, match="no observation is called 'leg'"):
        read(path, keys=["leg"])
    with h5py.File(path, "a") as file:
        del file["episode_1/observations/arm/velocity"]
    with pytest.raises(DataError, match="episode_1 lacks arm/velocity, which episode_0 has"):
        read(path)
    with h5py.File(path, "a") as file:
        file["episode_1/observations/arm/velocity"] = np.zeros((2, 2))
    with pytest.raises(DataError, match=r"arm/velocity of episode_1 has 2 rows, not 3"):
        read(path)


def test_goal_environments_stay_as_they_are(tmp_path):
    """`observation` alone, or with goals; what else is there is told, and goals may be dicts themselves."""
    with h5py.File(tmp_path / "plain.hdf5", "w") as file:
        file["episode_0/observations/observation"] = np.ones((4, 3))
        file["episode_0/observations/camera"] = np.zeros((4, 2, 2, 3), np.uint8)
        file["episode_0/actions"] = np.zeros((3, 1))
    arrays, notes = read(tmp_path / "plain.hdf5")
    assert set(arrays) == {"observations", "actions", "terminals"} and arrays["observations"].shape == (4, 3)
    assert notes == ["of the observations, `observation` alone is read, not camera: `qhyer data convert --keys`"]

    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "kitchen.hdf5", "w") as file:
        for number in range(2):
            kettle, light = rng.normal(size=(4, 2)), rng.normal(size=(4, 1))
            observations = file.create_group(f"episode_{number}/observations")
            observations["observation"] = np.concatenate([rng.normal(size=(4, 3)), light, kettle], axis=1)
            for name, shift in (("achieved_goal", 0), ("desired_goal", 1)):
                observations[f"{name}/light"], observations[f"{name}/kettle"] = light + shift, kettle + shift
            file[f"episode_{number}/actions"] = np.zeros((3, 1))
    arrays, notes = read(tmp_path / "kitchen.hdf5")
    assert arrays["goal_indices"].tolist() == [4, 5, 3] and not notes  # the kettle's, then the light's
    assert np.allclose(arrays["goals"], arrays["observations"][:, [4, 5, 3]] + 1)
    chosen, _ = read(tmp_path / "kitchen.hdf5", keys=["observation"])
    assert set(chosen) == {"observations", "actions", "terminals", "observation_names"}


def test_keys_and_splits_are_refused_where_there_are_none(tmp_path):
    with h5py.File(tmp_path / "flat.hdf5", "w") as file:
        file["observations"], file["actions"], file["terminals"] = np.zeros((4, 2)), np.zeros((4, 1)), [0, 0, 0, 1]
    with h5py.File(tmp_path / "array.hdf5", "w") as file:
        file["episode_0/observations"], file["episode_0/actions"] = np.zeros((4, 3)), np.zeros((3, 1))
    with pytest.raises(UserError, match="no observations by key"):
        read(tmp_path / "flat.hdf5", keys=["x"])
    with pytest.raises(UserError, match="one array, without keys"):
        read(tmp_path / "array.hdf5", keys=["x"])
    for name in ("flat", "array"):
        with pytest.raises(UserError, match="has no splits"):
            read(tmp_path / f"{name}.hdf5", split="train")
