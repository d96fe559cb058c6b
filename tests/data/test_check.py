"""Each kind of damage is found and explained; healthy data is left in peace; garbage crashes nothing."""

from __future__ import annotations

import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qhyer.data import commands
from qhyer.data.check import Problem, describe, find_problems, misspelt
from qhyer.data.episodes import Episodes
from qhyer.errors import DataError, UserError

EPISODES, LENGTH = 20, 50


def healthy(episodes: int = EPISODES, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random walks from far-apart starts, with a switch column that is 0 or 1."""
    rng = np.random.default_rng(0)
    walks = rng.normal(size=(episodes, length, 4)).cumsum(1) * 0.05 + rng.uniform(-20, 20, (episodes, 1, 4))
    switch = (rng.random((episodes, length, 1)) < 0.01).cumsum(1) % 2
    observations = np.concatenate([walks, switch], -1).reshape(-1, 5).astype(np.float32)
    actions = rng.uniform(-1, 1, (episodes * length, 2)).astype(np.float32)
    terminals = np.zeros(episodes * length, bool)
    terminals[length - 1 :: length] = True
    return observations, actions, terminals


def only(problems: list[Problem], severity: str, code: str) -> str:
    assert [(p.severity, p.code) for p in problems] == [(severity, code)], problems
    return problems[0].message


def test_healthy_data_has_no_problems():
    assert find_problems(*healthy()) == []
    observations, actions, terminals = healthy()
    assert find_problems(observations.astype(np.float64), actions, terminals.astype(np.int64)) == []


def test_not_finite():
    observations, actions, terminals = healthy()
    observations[123, 2] = np.nan
    observations[200, 0] = np.inf
    message = only(find_problems(observations, actions, terminals), "error", "nan")
    assert "observations has 2 values" in message and "row 123, column 2" in message
    observations, actions, terminals = healthy()
    actions[10, 1] = -np.inf
    assert "row 10, column 1" in only(find_problems(observations, actions, terminals), "error", "nan")


def test_final_actions_may_be_anything_finite():
    observations, actions, terminals = healthy()
    actions[terminals] = 77.0
    assert find_problems(observations, actions, terminals) == []
    actions[terminals] = np.nan
    assert "write zeros" in only(find_problems(observations, actions, terminals), "error", "nan")


def test_too_large_for_float32():
    observations, actions, terminals = healthy()
    large = observations.astype(np.float64)
    large[5, 1] = 1e39
    assert "row 5, column 1" in only(find_problems(large, actions, terminals), "error", "nan")


def test_shapes_and_dtypes():
    observations, actions, terminals = healthy()
    assert "(rows, columns)" in only(find_problems(observations[:, 0], actions, terminals), "error", "shape")
    message = only(find_problems(observations, actions[:-1], terminals), "error", "shape")
    assert "1000 of observations" in message and "999 of actions" in message
    assert "dtype" in only(find_problems(observations.astype(object), actions, terminals), "error", "shape")
    assert "dtype" in only(find_problems(observations, actions.astype(str), terminals), "error", "shape")
    assert "dtype" in only(find_problems(observations, actions.astype(complex), terminals), "error", "shape")
    assert "(rows,)" in only(find_problems(observations, actions, terminals[:, None]), "error", "shape")
    assert "no rows" in only(find_problems(observations[:0], actions[:0], terminals[:0]), "error", "shape")
    assert "no columns" in only(find_problems(observations, actions[:, :0], terminals), "error", "shape")


def test_ends():
    observations, actions, terminals = healthy()
    none = np.zeros_like(terminals)
    assert "marks no end" in only(find_problems(observations, actions, none), "error", "ends")
    cut = terminals.copy()
    cut[-1] = False
    message = only(find_problems(observations, actions, cut), "error", "ends")
    assert "last row (999)" in message and "row 949" in message
    short = terminals.copy()
    short[50] = True
    message = only(find_problems(observations, actions, short), "error", "ends")
    assert "single row" in message and "episode 1 at row 50" in message
    everywhere = np.ones_like(terminals)
    assert "1 everywhere" in only(find_problems(observations, actions, everywhere), "error", "ends")
    odd = terminals.astype(np.float32)
    odd[3] = 0.5
    assert "0.5 in row 3" in only(find_problems(observations, actions, odd), "error", "ends")
    one = find_problems(observations[:1], actions[:1], np.ones(1, bool))
    assert one[0].code == "ends"


def test_actions_out_of_range_say_how_to_scale():
    observations, actions, terminals = healthy()
    actions[:, 1] *= 3.0
    message = only(find_problems(observations, actions, terminals), "error", "range")
    assert "1: -2.9" in message and "2 * (actions - low) / (high - low) - 1" in message
    observations, actions, terminals = healthy()
    actions[60, 0] = 1.0 + 5e-7  # rounding is no error
    assert find_problems(observations, actions, terminals) == []
    actions[60, 0] = 1.001
    assert "row 60" in only(find_problems(observations, actions, terminals), "error", "range")


def test_missing_end_shows_as_a_jump():
    observations, actions, terminals = healthy(40, 200)
    terminals[399] = False  # two episodes run together
    message = only(find_problems(observations, actions, terminals), "warning", "jump")
    assert "1 steps" in message and "after row 399 of episode 1" in message
    # All ends missing but the last: 0.5% of the steps, more than the quantile that measures one column.
    terminals[:-1] = False
    message = only(find_problems(observations, actions, terminals), "warning", "jump")
    assert 20 <= int(message.split()[0]) <= 39  # some episodes begin near where another ended


def test_missing_ends_show_where_velocities_do_not_jump():
    """x, y, vx, vy: at an end the position jumps and the velocity, which comes and goes, does not."""
    rng = np.random.default_rng(0)
    velocity = rng.normal(0.0, 0.1, (20 * 300, 2))
    position = velocity.reshape(20, 300, 2).cumsum(1) + rng.uniform(-40, 40, (20, 1, 2))
    observations = np.concatenate([position.reshape(-1, 2), velocity], axis=1)
    ends = np.zeros(len(observations), bool)
    ends[-1] = True
    actions = rng.uniform(-1, 1, (len(observations), 2))
    (problem,) = [p for p in find_problems(observations, actions, ends) if p.code == "jump"]
    assert "steps inside an episode are far larger than usual, the first after row 299" in problem.message
    ends[299::300] = True
    assert not [p for p in find_problems(observations, actions, ends) if p.code == "jump"]


def test_one_column_that_jumps():
    observations, actions, terminals = healthy()
    observations[333:340, 3] += 1000.0
    message = only(find_problems(observations, actions, terminals), "warning", "jump")
    assert "2 steps" in message and "column 3" in message


def test_a_single_bad_row_is_no_missing_end():
    observations, actions, terminals = healthy(40, 200)
    observations[333, 3] = 1000.0
    observations[5555] -= 300.0
    message = only(find_problems(observations, actions, terminals), "warning", "spike")
    assert message.startswith("2 single rows") and "row 333 of episode 1: column 3 is 1000 between" in message
    terminals[399] = False  # both are told apart
    spike, jump = find_problems(observations, actions, terminals)
    assert spike.message == message and jump.code == "jump"
    assert "1 steps" in jump.message and "after row 399" in jump.message


def test_what_is_not_finite_hides_nothing():
    observations, actions, terminals = healthy(40, 200)
    terminals[399] = False
    observations[:, 4] = 7.0
    observations[6000:6200], actions[6000:6200] = observations[5800:6000], actions[5800:6000]
    clean = find_problems(observations, actions, terminals)
    assert [problem.code for problem in clean] == ["jump", "constant", "duplicate"]
    observations[77, 1], observations[1234], actions[10, 0] = np.nan, np.inf, np.nan
    problems = find_problems(observations, actions, terminals)
    assert [problem.code for problem in problems] == ["nan", "nan", "jump", "constant", "duplicate"]
    assert problems[2:] == clean
    actions[20, 1] = 3.0
    assert [problem.code for problem in find_problems(observations, actions, terminals)][:3] == ["nan", "nan", "range"]
    observations[:] = np.nan
    assert {problem.code for problem in find_problems(observations, actions, terminals)} == {
        "nan",
        "range",
        "duplicate",
    }


def test_actions_far_inside_their_range():
    observations, actions, terminals = healthy()
    actions[:, 0] *= 0.04
    actions[terminals] = 0.9  # never used
    message = only(find_problems(observations, actions, terminals), "warning", "small")
    assert "in some columns: 0: -0.039" in message and "1: " not in message
    assert "`qhyer data convert FILE OUT.npz --scale-actions` maps" in message
    assert find_problems(observations, actions, terminals, low=-np.ones(2), high=np.ones(2)) == []
    actions[5, 0] = -0.21  # as little as that is enough
    assert find_problems(observations, actions, terminals) == []
    actions[:, 0] = 0.04  # a column that never changes is something else
    actions[terminals, 0] = 0.9
    only(find_problems(observations, actions, terminals), "warning", "constant")
    actions[:, 1] *= 3  # scaling those that are too large scales all
    codes = [problem.code for problem in find_problems(observations, actions, terminals)]
    assert codes == ["range", "constant"]


def test_constant_columns():
    observations, actions, terminals = healthy()
    observations[:, 1] = 7.0
    assert "1 (always 7)" in only(find_problems(observations, actions, terminals), "warning", "constant")
    observations, actions, terminals = healthy()
    actions[~terminals, 0] = 0.5
    message = only(find_problems(observations, actions, terminals), "warning", "constant")
    assert "actions" in message and "0 (always 0.5)" in message


def test_duplicate_episodes():
    observations, actions, terminals = healthy()
    observations[100:150], actions[100:150] = observations[:50], actions[:50]
    observations[150:200], actions[150:200] = observations[:50], actions[:50]
    message = only(find_problems(observations, actions, terminals), "warning", "duplicate")
    assert "2 of 20 episodes" in message and "2 = 0, 3 = 0" in message


def test_errors_come_first_and_training_uses_the_same_words():
    observations, actions, terminals = healthy()
    observations[:, 1] = 7.0
    actions *= 2.0
    problems = find_problems(observations, actions, terminals)
    assert [p.severity for p in problems] == ["error", "warning"]
    with pytest.raises(DataError) as refused:
        Episodes.from_arrays(observations, actions, terminals, name="mine")
    assert str(refused.value) == describe("mine", problems[:1])
    Episodes.from_arrays(observations, actions / 2.0, terminals)  # warnings do not refuse


def test_fast_enough():
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(1_000_000, 28)).astype(np.float32)
    actions = rng.uniform(-1, 1, (1_000_000, 5)).astype(np.float32)
    terminals = np.arange(1_000_000) % 1000 == 999
    begun = time.process_time()
    assert find_problems(observations, actions, terminals) == []
    assert time.process_time() - begun < 4.0  # 0.4 s on a laptop core; slack for a busy machine


anything = st.one_of(
    hnp.arrays(
        dtype=st.one_of(
            hnp.scalar_dtypes(),
            st.sampled_from([np.dtype(object), np.dtype("f2"), np.dtype("longdouble"), np.dtype("b1")]),
        ),
        shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
        fill=st.nothing(),
    ),
    st.none(),
    st.text(),
    st.lists(st.lists(st.floats())),
)
numbers = hnp.arrays(
    dtype=st.one_of(hnp.floating_dtypes(), hnp.integer_dtypes(), hnp.boolean_dtypes()),
    shape=st.tuples(st.just(40), st.integers(1, 3)),
)


@settings(max_examples=150, deadline=None)
@given(anything, anything, anything)
def test_garbage_does_not_crash(observations, actions, terminals):
    assert all(isinstance(p, Problem) and p.message for p in find_problems(observations, actions, terminals))


@settings(max_examples=150, deadline=None)
@given(numbers, numbers, hnp.arrays(dtype=hnp.boolean_dtypes(), shape=st.just(40)))
def test_well_shaped_garbage_does_not_crash(observations, actions, terminals):
    problems = find_problems(observations, actions, terminals)
    assert not any("cannot be examined" in p.message for p in problems), problems


# ------------------------------------------------------------------------------------------------ commands


def write(path, observations, actions, terminals):
    np.savez(path, observations=observations, actions=actions, terminals=terminals)
    return path


def test_check_command(tmp_path, capsys):
    assert commands.check(write(tmp_path / "good.npz", *healthy())) == 0
    assert "nothing wrong in 1000 rows, 20 episodes" in capsys.readouterr().out
    observations, actions, terminals = healthy()
    assert commands.check(write(tmp_path / "bad.npz", observations, actions * 5, terminals)) == 1
    assert "error [range]" in capsys.readouterr().out
    observations[:, 0] = 0
    assert commands.check(write(tmp_path / "meh.npz", observations, actions, terminals)) == 0
    assert "warning [constant]" in capsys.readouterr().out
    np.savez(tmp_path / "lacking.npz", observations=observations)
    assert commands.check(tmp_path / "lacking.npz") == 1
    assert "lacks actions, terminals" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no dataset at .*god.npz; did you mean good.npz\?"):
        commands.check(tmp_path / "god.npz")
    observations, actions, terminals = healthy()
    rows = write(tmp_path / "rows.npz", observations, actions, np.flatnonzero(terminals))  # ends as row numbers
    assert commands.check(rows) == 0 and "1000 rows, 20 episodes" in capsys.readouterr().out
    assert commands.info(str(rows)) == 0 and "20 of 50 rows" in capsys.readouterr().out


def test_several_files_are_checked_each_on_its_own(tmp_path, capsys):
    observations, actions, terminals = healthy()
    good = write(tmp_path / "good.npz", observations, actions, terminals)
    bad = write(tmp_path / "bad.npz", observations, actions * 5, terminals)
    assert commands.check(good, good) == 0 and capsys.readouterr().out.count("nothing wrong") == 2
    assert commands.check(bad, tmp_path / "absent.npz", good) == 1
    out = capsys.readouterr().out
    assert "error [range]" in out and "no dataset at" in out and "good.npz: nothing wrong" in out
    with pytest.raises(UserError, match="at least one"):
        commands.check()


def test_small_actions_are_told_unless_they_have_bounds(tmp_path, capsys):
    observations, actions, terminals = healthy()
    mine = write(tmp_path / "mine.npz", observations, actions * np.float32([0.04, 1]), terminals)
    assert commands.check(mine) == 0 and "warning [small]" in capsys.readouterr().out
    assert commands.info(str(mine)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "never leave [-0.2, 0.2] in columns 0: if these have other units, `qhyer data convert FILE" in shown
    assert commands.convert(str(mine), tmp_path / "scaled.npz", scale_actions=True) == 0
    capsys.readouterr()
    assert commands.check(tmp_path / "scaled.npz") == 0 and commands.info(str(tmp_path / "scaled.npz")) == 0
    wide = dict(action_low=(-1.0,), action_high=(1.0,))  # whoever gives bounds knows them
    assert commands.convert(str(mine), tmp_path / "wide.npz", **wide) == 0
    assert commands.check(tmp_path / "wide.npz") == 0
    assert "warning" not in capsys.readouterr().out


def test_an_npz_has_the_episodes_of_the_same_arrays_in_hdf5(tmp_path, capsys):
    observations, actions, ends = healthy()
    late = ends & (np.cumsum(ends) % 2 == 0)
    both = {"observations": observations, "actions": actions, "terminals": ends & ~late, "timeouts": late}
    np.savez(tmp_path / "both.npz", **both)
    with h5py.File(tmp_path / "both.hdf5", "w") as file:
        file.update(both)
    assert commands.check(tmp_path / "both.npz", tmp_path / "both.hdf5") == 0
    assert capsys.readouterr().out.count("nothing wrong in 1000 rows, 20 episodes") == 2
    assert commands.info(str(tmp_path / "both.npz")) == 0 and "20 of 50 rows" in capsys.readouterr().out
    assert commands.convert(str(tmp_path / "both.npz"), tmp_path / "out.npz") == 0
    assert "1,000 rows, 20 episodes" in capsys.readouterr().out
    with np.load(tmp_path / "out.npz") as file:
        assert "timeouts" not in file.files and np.array_equal(file["terminals"], ends)


def test_misspelt_arrays_are_told(tmp_path, capsys):
    observations, actions, ends = healthy()
    three = {"observations": observations, "actions": actions, "terminals": ends}
    odd = {"goal_indexes": np.array([0, 1]), "observation_name": np.array(list("abcde")), "reward": np.zeros(len(ends))}
    pairs = {"goal_indexes": "goal_indices", "observation_name": "observation_names", "reward": "rewards"}
    told = [f"{wrong} is no array that is read; did you mean {right}?" for wrong, right in pairs.items()]
    mine = tmp_path / "mine.npz"
    np.savez(mine, **three, **odd)
    assert commands.check(mine) == 0
    shown = capsys.readouterr().out
    assert "nothing wrong" not in shown and all(f"warning [name] {each}" in shown for each in told)
    assert commands.info(str(mine)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"warning {each}" in shown for each in told)
    warnings = Episodes.load(mine).warnings
    assert sorted(each.brief for each in warnings) == sorted(told) and {each.code for each in warnings} == {"name"}
    with h5py.File(tmp_path / "mine.hdf5", "w") as file:
        file.update({**three, "goal_indexes": odd["goal_indexes"]})
    assert commands.check(tmp_path / "mine.hdf5") == 0 and f"when read: {told[0]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, near",
    [
        ("timeout", "timeouts"),
        ("Rewards", "rewards"),
        ("goal_index", "goal_indices"),
        ("goalindices", "goal_indices"),
        ("actions_low", "action_low"),
        *((name, None) for name in ("next_observations", "observation_mean", "observation_dim", "action_names")),
        *((name, None) for name in ("timesteps", "time", "qpos", "goals", "goal", "infos", "dones", "action_max")),
    ],
)
def test_only_names_that_are_near_are_told(name, near):
    three = ["observations", "actions", "terminals"]
    told = [problem.message for problem in misspelt([*three, name])]
    assert told == ([] if near is None else [f"{name} is no array that is read; did you mean {near}?"])
    assert misspelt([*three, name, *([near] if near else [])]) == []  # beside what it would stand for it is another


def test_what_a_file_lacks_is_told_with_what_it_has(tmp_path, capsys):
    observations, actions, ends = healthy()
    np.savez(tmp_path / "typo.npz", observation=observations, actions=actions, terminals=ends)
    with h5py.File(tmp_path / "obs.hdf5", "w") as file:
        file.update({"obs": observations, "actions": actions, "terminals": ends})
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file.update({"obs": observations, "act": actions})
    assert commands.check(*tmp_path.iterdir()) == 1
    shown = capsys.readouterr().out
    said = "lacks observations (it has observation, actions, terminals); did you mean observations where it says "
    assert f"typo.npz {said}observation?" in shown
    said = "lacks observations (it has actions, obs, terminals); did you mean observations where it says obs?"
    assert f"obs.hdf5 {said}" in shown
    assert "(it holds act, obs)" in shown and "; did you mean actions where it says act?" in shown


def test_convert_takes_no_json_that_is_not_its_own(tmp_path, monkeypatch):
    mine, out = write(tmp_path / "mine.npz", *healthy()), tmp_path / "out.npz"
    own = out.with_suffix(".json")
    own.write_text('{"mine": 1}')
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"out\.json is not a sidecar this project wrote; rename it"):
            commands.convert(str(mine), out, overwrite=overwrite)
        assert own.read_text() == '{"mine": 1}' and not out.exists()
    own.unlink()
    own.mkdir()
    with pytest.raises(UserError, match="is not a sidecar"):
        commands.convert(str(mine), out)
    own.rmdir()

    assert commands.convert(str(mine), out) == 0
    before = out.read_bytes(), own.read_bytes()

    def fails(*arrays, **others):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(np, "savez", fails)
        commands.convert(str(mine), out, overwrite=True)
    assert (out.read_bytes(), own.read_bytes()) == before  # the older file and its sidecar, both
    assert commands.convert(str(mine), out, overwrite=True) == 0 and Episodes.load(out).num_episodes == EPISODES
    out.unlink()  # what is left is ours, and may go
    assert commands.convert(str(mine), out) == 0 and Episodes.load(out).num_episodes == EPISODES


def test_info_and_list_commands(tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "cube-single-play-v0.npz", *healthy())
    with pytest.raises(UserError, match="did you mean cube-single-play-v0"):
        commands.info("cube-singl-play")
    assert commands.info(str(path)) == 0
    shown = capsys.readouterr().out
    assert "20 of 50 rows" in shown and "columns 19, 20, 21" in shown and "provenance" in shown
    with pytest.raises(UserError, match="check"):
        commands.info(str(write(tmp_path / "flat.npz", np.zeros(3), np.zeros(3), np.ones(3))))
    monkeypatch.setenv("QHYER_DATA", str(tmp_path))
    assert commands.list_() == 0
    assert "puzzle-4x6-noisy-v0" in capsys.readouterr().out
    assert commands.info("cube-single-play") == 0


def test_units_in_names_are_shown_as_they_are(tmp_path, capsys, monkeypatch):
    """Brackets are markup to the terminal's library: it would take them for styles, or for ends of styles."""
    observations, actions, terminals = healthy()
    names = ["x[m]", "v[m/s]", "rate[/s]", "[/s]", "force [bold]"]
    monkeypatch.chdir(tmp_path)
    folder = Path("of[/s]")  # a folder in a folder
    folder.mkdir(parents=True)
    three = {"observations": observations, "actions": actions, "terminals": terminals}
    np.savez(folder / "mine.npz", **three, observation_names=names, **{"extra[/kg]": np.zeros(1)})
    assert commands.info(str(folder / "mine.npz")) == 0
    shown = capsys.readouterr().out
    assert all(f"observation {index} {name}" in shown for index, name in enumerate(names))
    assert "extra[/kg] (1,)" in shown and "of[/s]" in shown
    assert (
        commands.convert(str(folder / "mine.npz"), folder / "out.npz") == 0 and commands.check(folder / "out.npz") == 0
    )
    assert "of[/s]/out.npz: 1,000 rows" in capsys.readouterr().out


def test_generate_command(tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match="no dataset is called"):
        commands.generate("cube-pentuple-play")
    monkeypatch.setenv("QHYER_DATA", str(tmp_path))
    assert commands.generate("pointmaze-medium-stitch", episodes=2, workers=1) == 0
    capsys.readouterr()
    assert commands.check(tmp_path / "pointmaze-medium-stitch-v0.npz") == 0
    assert "nothing wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rewards, words",
    [
        (np.zeros(5), "rewards has shape (5,)"),
        (np.where(np.arange(40) == 7, np.nan, 0.0), "not finite, the first in row 7"),
        (np.where(np.arange(40) == 3, 1e300, 0.0), "not finite, the first in row 3"),  # as they are kept, in float32
    ],
)
def test_rewards_are_refused_by_the_check_as_by_training(rewards, words):
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(40, 3)), rng.uniform(-1, 1, (40, 2)), np.arange(40) % 10 == 9
    assert not find_problems(*arrays, np.zeros(40))
    (problem,) = find_problems(*arrays, rewards)
    assert (problem.severity, problem.code) == ("error", "rewards") and words in problem.message
    with pytest.raises(DataError) as refused:
        Episodes.from_arrays(*arrays, goal=[0], rewards=rewards)
    assert problem.message in str(refused.value)
