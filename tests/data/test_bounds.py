"""Actions in units of their own: scaled and back, and what a dataset's file keeps of it."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qhyer import cli
from qhyer.data.bounds import options, scale, scaled, told, units, unscale
from qhyer.data.episodes import Episodes, read_npz
from qhyer.errors import DataError, UserError
from qhyer.storage import read_sealed_json

LOW, HIGH = np.float32([-0.05, 0.2, -300.0]), np.float32([0.07, 0.9, 100.0])


def recorded(seed: int = 0) -> dict[str, np.ndarray]:
    """Four walks of ten steps whose actions have units of their own; those of final states are nonsense."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(LOW, HIGH, (44, 3)).astype(np.float32)
    actions[10::11] = 9999.0
    observations = rng.normal(size=(44, 2)).astype(np.float32)
    return {"observations": observations, "actions": actions, "terminals": np.arange(44) % 11 == 10}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def said(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------------------- arithmetic

numbers = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=300, deadline=None)
@given(numbers, numbers, st.floats(0, 1))
def test_back_and_forth(a, b, part):
    """unscale(scale(a)) is a."""
    low, high = np.float32([min(a, b)]), np.float32([max(a, b)])
    action = np.clip(np.float32([low[0] + part * (high[0] - low[0])]), low, high)
    there = scale(action, low, high)
    assert there.dtype == np.float32 and np.abs(there) <= 1
    again = unscale(there, low, high)
    # A last digit of the larger bound, or float32's smallest number.
    slack = 1.2e-7 * max(abs(float(low[0])), abs(float(high[0]))) + 1.5e-45
    assert low <= again <= high and abs(float(again[0]) - float(action[0])) <= slack


def test_ends_and_middle():
    ends = np.float32([[-1, -1, -1], [0, 0, 0], [1, 1, 1]])
    back = unscale(ends, LOW, HIGH)
    assert np.array_equal(back[0], LOW) and np.array_equal(back[2], HIGH)  # exactly
    np.testing.assert_allclose(back[1], (LOW + HIGH) / 2, rtol=1e-6)
    assert np.array_equal(scale(back, LOW, HIGH)[[0, 2]], ends[[0, 2]])
    one = np.float32([0.3])  # a column that never changes: 0, and back to what it was, whatever is given
    assert scale(one, one, one) == 0 and np.array_equal(unscale(np.float32([[-1], [0.4], [1]]), one, one), [one] * 3)


def test_each_column_by_its_own_or_by_what_is_given():
    arrays = recorded()
    used = arrays["actions"][~arrays["terminals"]]
    made, (note,) = scaled(arrays)
    assert np.array_equal(made["action_low"], used.min(0)) and np.array_equal(made["action_high"], used.max(0))
    inside = made["actions"][~arrays["terminals"]]
    assert inside.min(0).tolist() == [-1] * 3 and inside.max(0).tolist() == [1] * 3
    assert not made["actions"][arrays["terminals"]].any() and made["actions"].dtype == np.float32
    np.testing.assert_allclose(unscale(inside, made["action_low"], made["action_high"]), used, rtol=1e-5, atol=1e-5)
    assert note == f"actions are scaled to [-1, 1]; -1 and 1 stand for {told(used.min(0), used.max(0))}"
    assert arrays["actions"][10, 0] == 9999 and "action_low" not in arrays  # what was given is left alone

    made, _ = scaled(arrays, LOW, HIGH)
    assert np.array_equal(made["action_low"], LOW) and np.abs(made["actions"]).max() < 1
    made, _ = scaled(arrays, [-300], [100])
    assert made["action_high"].tolist() == [100] * 3
    still = {**arrays, "actions": arrays["actions"] * np.float32([1, 0, 1])}
    made, notes = scaled(still)
    assert notes[1] == "actions that never change are 0 in [-1, 1]: columns 1" and not made["actions"][:, 1].any()
    tight = {**arrays, "actions": np.where(arrays["terminals"][:, None], 0, np.float64([0.1, 0.1, 0.1]))}
    assert scaled(tight, [-0.1], [0.1])[0]["actions"].max() == 1  # the same number in float32 and float64


@settings(max_examples=100, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=4))
def test_bounds_are_told_as_options_that_are_read_again(ends):
    low, high = options(np.float32(ends), np.float32([1e30])).split(" --action-high ")
    assert "e" not in low.removeprefix("--action-low") + high
    given = np.float32([float(number) for number in low.split()[1:]])
    assert np.array_equal(given, np.float32(ends)) and np.float32(float(high)) == np.float32(1e30)


@pytest.mark.parametrize(
    "low, high, words",
    [
        (LOW, (), "give both --action-low and --action-high"),
        (LOW[:2], HIGH, "--action-low has 2 numbers: give one for each of 3 columns, or one"),
        (HIGH, LOW, "action_low is greater than action_high in column 0: 0.07, -0.05"),
        ([np.nan], [1], "must be finite"),
        ([-1], [1], r"beyond the bounds given, by column: 2: -29.*Give bounds that hold them"),
    ],
)
def test_bounds_that_cannot_be(low, high, words):
    with pytest.raises(UserError, match=words):
        scaled(recorded(), low, high)


@pytest.mark.parametrize(
    "actions, ends, stand",
    [
        ([0.05, 0.05], [0.05, 0.05], "doubtful"),
        ([0.05, 0.8], [0.05, 1], "doubtful"),  # a gripper's are in [-1, 1] by nature
        ([0.05, 0.8], [0.05, 0.7], "scaled"),
        ([1, 1], [0.05, 0.05], "scaled"),  # as whoever scales by each column's own has them
        ([0.06, 0.01], [0.05, 0.05], "scaled"),
        ([0.5, 0.5], [0.5, 0.5], "scaled"),  # half of the range is not rare
        ([0.1, 0.1], [1, 1], "scaled"),
        ([0, 0], [0, 0], "scaled"),  # nothing moves
        ([2, 2], [2, 2], "raw"),
        ([2, 0.03], [2, 0.05], "raw"),
        ([90, 250], [100, 300], "raw"),
        ([1.3, 0.9], [300, 2], "doubtful"),  # a policy's noise on scaled actions
        ([1.01, 0.9], [3, 3], "doubtful"),  # the same
        ([1.0005, 1], [2, 2], "doubtful"),  # rounding
        ([2.1, 1], [2, 2], "beyond"),
        ([1.3, 1], [0.05, 2], "beyond"),
    ],
)
def test_units_of_actions_that_have_bounds_beside_them(actions, ends, stand):
    assert units(-np.float64(actions), actions, -np.float32(ends), np.float32(ends)) == stand


def test_units_of_columns_that_are_not_symmetric():
    assert units([0, 0.21], [0.08, 0.3], [0, 0.2], [0.08, 0.9]) == "doubtful"
    assert units([-1, 0.21], [1, 0.3], [0, 0.2], [0.08, 0.9]) == "scaled"
    assert units([np.inf] * 2, [-np.inf] * 2, [0, 0], [0.1, 0.1]) == "scaled"  # no action is used
    assert units([0.05, 0.1], [0.05, 0.2], [0.05, 0.1], [0.05, 0.2]) == "doubtful"  # one never changes


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4))
def test_what_was_scaled_by_its_own_bounds_is_never_doubted(columns):
    """Whatever the bounds; and so it is not scaled again."""
    a, b, *parts = np.float64(columns).T
    low, high = np.float32(np.minimum(a, b)), np.float32(np.maximum(a, b))
    inner = [low + part * (high.astype(np.float64) - low) for part in parts]
    rows = np.stack([low, high, *inner, low]).astype(np.float32).clip(low, high)  # the last is a final state's
    three = {"observations": rows, "actions": rows, "terminals": np.arange(5) == 4}
    made = scaled(three)[0]
    used = made["actions"][:-1]
    assert units(used.min(0), used.max(0), made["action_low"], made["action_high"]) == "scaled"
    with pytest.raises(UserError, match="scaled already"):
        scaled(made)
    with pytest.raises(UserError, match="scaled already"):
        scaled(made, [-1], [1])


# ---------------------------------------------------------------------------------------------------------- datasets


def test_the_check_names_the_command_that_scales(tmp_path, capsys):
    np.savez(tmp_path / "mine.npz", **recorded())
    assert run("data", "check", tmp_path / "mine.npz") == 1
    assert "`qhyer data convert FILE OUT.npz --scale-actions` scales them" in said(capsys.readouterr().out)
    assert run("data", "convert", tmp_path / "mine.npz", tmp_path / "no.npz") == 2
    assert "error [range]" in capsys.readouterr().err and not (tmp_path / "no.npz").exists()

    out = tmp_path / "scaled.npz"
    assert run("data", "convert", tmp_path / "mine.npz", out, "--scale-actions") == 0
    assert "-1 and 1 stand for 0: -0.04" in said(capsys.readouterr().out)
    assert run("data", "check", out) == 0 and run("data", "info", out) == 0
    shown = said(capsys.readouterr().out)
    assert "own units -1 and 1 of actions stand for 0: -0.04" in shown and "action_high (3,)" in shown
    assert "stand for" in read_sealed_json(out.with_suffix(".json"))["notes"][0]
    assert run("data", "convert", out, tmp_path / "no.npz", "--scale-actions") == 2
    assert "scaled already" in said(capsys.readouterr().err)

    assert run("data", "convert", out, tmp_path / "again.npz") == 0  # bounds go along
    assert Episodes.load(tmp_path / "again.npz").fingerprint == Episodes.load(out).fingerprint
    rows = {**recorded(), "terminals": np.flatnonzero(recorded()["terminals"])}  # as training takes them, too
    np.savez(tmp_path / "rows.npz", **rows)
    assert run("data", "convert", tmp_path / "rows.npz", tmp_path / "same.npz", "--scale-actions") == 0
    assert Episodes.load(tmp_path / "same.npz").fingerprint == Episodes.load(out).fingerprint
    options = ["--action-low", *LOW.tolist(), "--action-high", *HIGH.tolist()]
    assert run("data", "convert", tmp_path / "mine.npz", tmp_path / "given.npz", *options) == 0
    assert np.array_equal(read_npz(tmp_path / "given.npz")["action_low"], LOW)


@pytest.mark.parametrize("layout", ["d4rl", "maze2d", "minari", "robomimic"])
def test_what_is_scaled_is_not_clipped_before(layout, tmp_path, capsys):
    """1.0008 of a unit is no rounding: the bound is what was recorded, and can be given again."""
    path, out = tmp_path / f"{layout}.hdf5", tmp_path / "out.npz"
    observations = np.random.default_rng(0).normal(size=(9, 4))
    actions = np.float32(np.linspace(-1.0008, 1.0002, 16).reshape(8, 2))
    flat = layout in ("d4rl", "maze2d")
    with h5py.File(path, "w") as file:
        place = {"minari": "episode_0/", "robomimic": "data/demo_0/"}.get(layout, "")
        if layout == "robomimic":
            file[f"{place}obs/x"], file[f"{place}next_obs/x"] = observations[:-1], observations[1:]
        else:
            file[f"{place}observations"] = 1e-3 * observations  # of one walk, in which nothing jumps
        file[f"{place}actions"] = np.append(actions, actions[:1], 0) if flat else actions
        if flat:
            file["terminals"] = np.arange(9) == 8
    assert run("data", "convert", path, out, "--scale-actions") == 0
    made = read_npz(out)
    assert np.array_equal(made["action_low"], actions.min(0)) and np.array_equal(made["action_high"], actions.max(0))
    assert np.array_equal(unscale(made["actions"][:1], made["action_low"], made["action_high"]), actions[:1])
    given = ["--action-low", -1.01, "--action-high", 1.01]
    assert run("data", "convert", path, out, "--overwrite", *given) == 0
    np.testing.assert_allclose(unscale(read_npz(out)["actions"][0], -1.01, 1.01), actions[0], atol=1e-6)
    assert "clipped" not in capsys.readouterr().out
    for plain in ([], ["--action-low", -1, "--action-high", 1]):  # in [-1, 1] by nature, but for rounding
        assert run("data", "convert", path, out, "--overwrite", *plain) == 0
        assert "actions up to 1.0008 are clipped to 1" in said(capsys.readouterr().out)
        assert np.array_equal(read_npz(out)["actions"][:-1], actions.clip(-1, 1))


def beside(tmp_path, size: float, bound: float, **others):
    """A file of raw actions that reach `size`, beside the bounds of their space."""
    arrays = recorded()
    arrays["actions"] = np.random.default_rng(1).uniform(-size, size, (44, 3)).astype(np.float32)
    arrays["actions"][0] = size
    ends = {"action_low": np.full(3, -bound, np.float32), "action_high": np.full(3, bound, np.float32)}
    np.savez(tmp_path / "mine.npz", **{**arrays, **ends, **others})
    return tmp_path / "mine.npz", arrays["actions"]


def test_raw_actions_beside_wide_bounds_are_scaled_by_these(tmp_path, capsys):
    mine, actions = beside(tmp_path, 1.9, 2.0)
    assert run("data", "check", mine) == 1
    shown = said(capsys.readouterr().out)
    assert "They lie between action_low and action_high, which say what -1 and 1 stand for (0: -2 to 2," in shown
    assert "not scaled yet. `qhyer data convert FILE OUT.npz --scale-actions` scales them by these bounds" in shown
    with pytest.raises(DataError, match="not scaled yet"):
        Episodes.load(mine)
    assert run("data", "convert", mine, tmp_path / "out.npz", "--scale-actions") == 0
    assert "by the bounds that were beside them; -1 and 1 stand for 0: -2 to 2" in said(capsys.readouterr().out)
    made = read_npz(tmp_path / "out.npz")
    assert made["action_high"].tolist() == [2, 2, 2] and np.abs(made["actions"]).max() == np.float32(0.95)
    back = unscale(made["actions"], made["action_low"], made["action_high"])
    np.testing.assert_allclose(back[:10], actions[:10], atol=1e-6)
    assert run("data", "check", tmp_path / "out.npz") == 0 and "nothing wrong" in capsys.readouterr().out
    given = ["--action-low", -4, "--action-high", 4]  # one's own word goes before the file's
    assert run("data", "convert", mine, tmp_path / "wide.npz", *given) == 0
    assert read_npz(tmp_path / "wide.npz")["action_high"].tolist() == [4, 4, 4]


def test_raw_actions_beside_narrow_bounds_are_told_and_scaled_on_ones_word(tmp_path, capsys):
    mine, actions = beside(tmp_path, 0.05, 0.05)
    assert run("data", "check", mine) == 0
    shown = said(capsys.readouterr().out)
    assert "warning [units] actions never leave action_low and action_high, which are a small part" in shown
    word = "--action-low -0.05 -0.05 -0.05 --action-high 0.05 0.05 0.05"
    assert f"`qhyer data convert FILE OUT.npz {word}` scales them. If they were scaled, nothing is wrong" in shown
    assert [problem.code for problem in Episodes.load(mine).warnings] == ["units"]
    assert run("data", "info", mine) == 0 and "never leave action_low and action_high" in said(capsys.readouterr().out)
    assert run("data", "convert", mine, tmp_path / "no.npz", "--scale-actions") == 2
    assert (
        "may be scaled already: they lie between action_low and action_high, which are beside them (0: -0.05 to "
        in (refusal := said(capsys.readouterr().err))
    )
    assert f"If they are, say so: {word}" in refusal and not (tmp_path / "no.npz").exists()
    assert run("data", "convert", mine, tmp_path / "out.npz", *word.split()) == 0
    assert "warning" not in capsys.readouterr().out
    made = read_npz(tmp_path / "out.npz")
    back = unscale(made["actions"], made["action_low"], made["action_high"])
    np.testing.assert_allclose(back[:10], actions[:10], atol=1e-8)
    assert np.abs(made["actions"]).max() == 1 and not Episodes.load(tmp_path / "out.npz").warnings
    assert run("data", "convert", tmp_path / "out.npz", tmp_path / "no.npz", *word.split()) == 2
    assert "scaled already" in said(capsys.readouterr().err)


def test_bounds_beside_actions_that_are_of_neither(tmp_path, capsys):
    mine, _ = beside(tmp_path, 3.0, 2.0)
    assert run("data", "check", mine) == 1
    assert "Nor do they lie between action_low and action_high" in said(capsys.readouterr().out)
    assert run("data", "convert", mine, tmp_path / "no.npz", "--scale-actions") == 2
    assert "neither in [-1, 1] nor between action_low" in said(capsys.readouterr().err)
    assert run("data", "convert", mine, tmp_path / "out.npz", "--action-low", -3, "--action-high", 3) == 0
    mine, _ = beside(tmp_path, 1.3, 300.0)  # noise on scaled actions?
    assert run("data", "check", mine) == 1
    shown = said(capsys.readouterr().out)
    assert (
        "whether they were scaled: if so, clip them to [-1, 1]; if not, `qhyer data convert FILE OUT.npz --ac" in shown
    )
    assert run("data", "convert", mine, tmp_path / "no.npz", "--scale-actions") == 2
    mine, _ = beside(tmp_path, 0.05, 0.05, action_high=np.ones(2))  # of the bounds themselves it is told first
    assert (
        run("data", "check", mine) == 1 and "[units]" not in (shown := capsys.readouterr().out) and "[bounds]" in shown
    )


def test_narrow_bounds_that_one_gave_are_not_doubted_where_they_are_given(tmp_path, capsys):
    arrays = recorded()
    np.savez(tmp_path / "mine.npz", **{**arrays, "actions": np.float32(0.02) * np.sin(np.arange(132)).reshape(44, 3)})
    options = ["--action-low", -0.2, "--action-high", 0.2]
    assert run("data", "convert", tmp_path / "mine.npz", tmp_path / "out.npz", *options) == 0
    assert "warning" not in capsys.readouterr().out


def test_other_errors_are_told_before_anything_is_scaled(tmp_path, capsys):
    arrays = recorded()
    arrays["actions"][3, 1] = np.nan
    np.savez(tmp_path / "mine.npz", **arrays)
    assert run("data", "convert", tmp_path / "mine.npz", tmp_path / "no.npz", "--scale-actions") == 2
    assert "error [nan] actions has 1 value that is not finite" in said(capsys.readouterr().err)


def test_episodes_carry_them():
    arrays = scaled(recorded())[0]
    three = (arrays["observations"], arrays["actions"], arrays["terminals"])
    bounds = {name: arrays[name] for name in ("action_low", "action_high")}
    plain, carried = Episodes.from_arrays(*three), Episodes.from_arrays(*three, **bounds)
    assert plain.action_low is None and plain.spec().action_bounds is None
    assert carried.action_low.dtype == torch.float32 and carried.action_high.shape == (3,)
    assert np.array_equal(carried.spec().action_bounds[1], arrays["action_high"])
    lists = {name: value.tolist() for name, value in bounds.items()}
    assert Episodes.from_arrays(*three, **lists).fingerprint == carried.fingerprint
    wider = {**bounds, "action_high": 2 * np.abs(arrays["action_high"])}
    assert len({plain.fingerprint, carried.fingerprint, Episodes.from_arrays(*three, **wider).fingerprint}) == 3


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"action_high": None}, "action_high is missing"),
        ({"action_low": None}, "action_low is missing"),
        ({"action_low": np.zeros(2)}, r"action_low has shape \(2,\) .*give 3 numbers"),
        ({"action_low": np.array(["a", "b", "c"])}, "action_low has shape"),
        ({"action_low": np.full(3, 1e6)}, "action_low is greater than action_high in column 0"),
        ({"action_high": np.full(3, np.inf)}, "action_low and action_high must be finite"),
    ],
    ids=lambda value: "",
)
def test_bounds_that_do_not_fit_are_refused_by_the_check_as_by_training(changes, words, tmp_path, capsys):
    arrays = {key: value for key, value in {**scaled(recorded())[0], **changes}.items() if value is not None}
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=rf"error \[bounds\] {words}"):
        Episodes.load(tmp_path / "mine.npz")
    assert run("data", "check", tmp_path / "mine.npz") == 1 and "error [bounds]" in capsys.readouterr().out
    assert run("data", "info", tmp_path / "mine.npz") == 0 and "own units" not in capsys.readouterr().out


def test_data_without_them_are_what_they_were():
    """The fingerprint that these arrays had before there were bounds, and what runs and models keep of a spec."""
    three = np.arange(27.0).reshape(9, 3) / 8, np.arange(18.0).reshape(9, 2) / 32, [3, 5, 8]
    plain = Episodes.from_arrays(*three, goal=[0])
    assert plain.fingerprint == "6b38598d23545a087316dce0ad20ef176189d951c8c9b0192d25884f119a1440"
    assert list(plain.spec().stored()) == [
        *("observation_dim", "action_dim", "goal_indices", "observation_mean", "observation_std", "goal_binary")
    ]
    given = np.zeros((5, 2), np.float32)
    assert plain.spec().own_units(given) is given  # bit for bit
    assert list(Episodes.from_arrays(*three, action_low=[0, 0], action_high=[1, 1]).spec().stored())[6:] == [
        *("action_low", "action_high")
    ]
