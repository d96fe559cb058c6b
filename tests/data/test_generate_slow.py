"""Our generator against a plain loop over OGBench's environment and oracles: the same data in distribution.

Rows within an episode depend on each other, so a test over rows would find differences that are not there.
Every statistic here is one number an episode; episodes are independent, and the two-sample Kolmogorov-Smirnov
test is valid on them. The last tests show that a wrong noise setting fails it.
"""

from __future__ import annotations

import dataclasses
import functools

import gymnasium
import numpy as np
import ogbench.manipspace  # noqa: F401
import pytest
from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle
from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle
from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle
from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle
from scipy import stats

from qhyer.data import registry
from qhyer.data.generate import generate
from qhyer.data.generate.recipe import EpisodeSeeds, collector_for, recipe_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EPISODES = 20
LEVEL = 0.01  # of all statistics of a dataset together (Bonferroni)


def reference_oracles(name: str, env) -> dict:
    plan = {"noise": 0.1, "noise_smoothing": 0.5}
    if name == "cube-single-play":
        return {"cube": CubePlanOracle(env=env, **plan)}
    if name == "cube-single-noisy":
        return {"cube": CubeMarkovOracle(env=env, min_norm=0.4)}
    if name == "puzzle-3x3-play":
        return {"button": ButtonPlanOracle(env=env, gripper_always_closed=True, **plan)}
    classes = {
        "cube": CubePlanOracle,
        "button": ButtonPlanOracle,
        "drawer": DrawerPlanOracle,
        "window": WindowPlanOracle,
    }
    return {task: oracle(env=env, **plan) for task, oracle in classes.items()}


def reference_episode(name: str, env, space, oracles: dict, seed: int) -> dict[str, np.ndarray]:
    """One episode, a step at a time, as OGBench's documentation of its datasets describes them."""
    ob, info = env.reset(seed=seed)
    noisy = name.endswith("noisy")
    p_stack = 0.0 if "single" in name else 0.5
    xi = np.random.uniform(0, 0.1)
    oracle = oracles[info["privileged/target_task"]]
    oracle.reset(ob, info)
    rows: dict[str, list] = {"actions": [], "qpos": [], "button_states": []}
    truncated = False
    while not truncated:
        if noisy and np.random.rand() < 0.1:
            action = space.sample()
        else:
            action = np.array(oracle.select_action(ob, info))
            if noisy:
                action += np.random.normal(0, [xi, xi, xi, 3 * xi, 10 * xi])
        action = np.clip(action, -1, 1)
        ob, _, _, truncated, info = env.step(action)
        rows["actions"].append(action)
        rows["qpos"].append(info["prev_qpos"])
        rows["button_states"].append(info.get("prev_button_states", np.zeros(0)))
        if oracle.done:
            new_ob, new_info = env.unwrapped.set_new_target(p_stack=p_stack)
            oracle = oracles[new_info["privileged/target_task"]]
            oracle.reset(new_ob, new_info)
    return {key: np.array(value) for key, value in rows.items()}


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    np.random.seed(0)
    env = gymnasium.make(
        registry.get(name).environment,
        terminate_at_goal=False,
        mode="data_collection",
        max_episode_steps=1001,
    )
    space = env.action_space
    space.seed(0)
    oracles = reference_oracles(name, env)
    found: list[dict[str, float]] = []
    seed = 0
    while len(found) < EPISODES:
        episode = reference_episode(name, env, space, oracles, seed)
        seed += 1
        y, z = episode["qpos"][:, 15], episode["qpos"][:, 16]
        gone = (y >= 0.29) | ((y <= -0.3) & ~((z >= 0.06) & (z <= 0.08)))
        if not (name.startswith("scene") and gone.any()):
            found.append(statistics(name, episode))
    return together(found)


@functools.cache
def ours(name: str, **changed: float) -> dict[str, np.ndarray]:
    dataset = registry.get(name)
    recipe = dataclasses.replace(recipe_for(dataset), **changed)  # type: ignore[arg-type]
    collector = collector_for(recipe)
    seeds = [EpisodeSeeds(0, dataset.name, "train", index) for index in range(EPISODES)]
    return together([statistics(name, collector.episode(seed)) for seed in seeds])


def together(episodes: list[dict[str, float]]) -> dict[str, np.ndarray]:
    return {key: np.array([episode[key] for episode in episodes]) for key in episodes[0]}


def statistics(name: str, episode: dict[str, np.ndarray]) -> dict[str, float]:
    """One number each for an episode: how its actions are spread and change, and how far its objects went."""
    actions = np.asarray(episode["actions"], np.float64)
    assert len(actions) == 1001
    found = {}
    for axis in range(5):
        column = actions[:, axis]
        found[f"action {axis} mean"] = column.mean()
        found[f"action {axis} std"] = column.std()
        found[f"action {axis} change"] = np.abs(np.diff(column)).mean()
        for quantile in (0.1, 0.25, 0.75, 0.9):
            found[f"action {axis} quantile {quantile}"] = np.quantile(column, quantile)
    qpos = np.asarray(episode["qpos"], np.float64)
    if name.startswith(("cube", "scene")):
        cube = qpos[:, 14:17]
        found["cube path"] = np.linalg.norm(np.diff(cube, axis=0), axis=1).sum()
        found["cube reach"] = np.linalg.norm(cube - cube[0], axis=1).max()
        found["cube lifted"] = (cube[:, 2] > 0.04).mean()
    if name.startswith("scene"):
        found["drawer path"] = np.abs(np.diff(qpos[:, 23])).sum()
        found["window path"] = np.abs(np.diff(qpos[:, 24])).sum()
    if name.startswith(("puzzle", "scene")):
        found["switches"] = float((np.diff(episode["button_states"], axis=0) != 0).sum())
    return found


def compare(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> dict[str, float]:
    """p-values, corrected for their number, of the statistics that differ."""
    assert left.keys() == right.keys()
    corrected = {key: len(left) * stats.ks_2samp(left[key], right[key]).pvalue for key in left}
    return {key: p for key, p in corrected.items() if p < LEVEL}


@pytest.mark.parametrize("name", ["cube-single-play", "cube-single-noisy", "puzzle-3x3-play", "scene-play"])
def test_same_distribution_as_the_plain_loop(name):
    assert compare(ours(name), reference(name)) == {}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("cube-single-play", {"noise": 0.2}),
        ("cube-single-play", {"noise_smoothing": 2.0}),
        ("cube-single-noisy", {"p_random_action": 0.2}),
        ("cube-single-noisy", {"noise": 0.4}),
    ],
)
def test_wrong_noise_is_noticed(name, wrong):
    assert compare(ours(name, **wrong), reference(name)) != {}


@pytest.mark.parametrize("name", registry.DATASETS)
def test_every_dataset_can_be_made_and_is_healthy(name, tmp_path):
    dataset = registry.get(name)
    path = generate(dataset, out=tmp_path, episodes=1, workers=1, rows=60, validation=False, progress=False)
    episodes, found = registry.load(path)
    assert found is dataset and episodes.num_transitions == 59
    assert episodes.goal_indices == dataset.goal_indices
