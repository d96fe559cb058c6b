"""Cube, scene and puzzle episodes: OGBench's scripted oracles chase one random target after another.

play   follows a noisy plan made when the target was drawn (open loop, so not Markovian)
noisy  reacts to the state (closed loop) with Gaussian action noise, and now and then a uniform action
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import ogbench.manipspace  # noqa: F401  (registers the environments)
from ogbench.manipspace.oracles.markov.button_markov import ButtonMarkovOracle
from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle
from ogbench.manipspace.oracles.markov.drawer_markov import DrawerMarkovOracle
from ogbench.manipspace.oracles.markov.window_markov import WindowMarkovOracle
from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle
from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle
from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle

from qhyer.data.generate.recipe import Arrays, EpisodeSeeds, Recipe
from qhyer.rng import global_numpy

_PLAN = {
    "cube": CubePlanOracle,
    "button": ButtonPlanOracle,
    "drawer": DrawerPlanOracle,
    "window": WindowPlanOracle,
}
_MARKOV = {
    "cube": CubeMarkovOracle,
    "button": ButtonMarkovOracle,
    "drawer": DrawerMarkovOracle,
    "window": WindowMarkovOracle,
}
_TASKS = {"cube": ("cube",), "puzzle": ("button",), "scene": ("cube", "button", "drawer", "window")}
_NOISE_SCALE = np.array([1.0, 1.0, 1.0, 3.0, 10.0])  # xyz, yaw, gripper: noise of the closed-loop oracles


def make_environment(recipe: Recipe) -> Any:
    """The bare environment: no step limit and no checker around it, both of which cost time at every step."""
    environment = gymnasium.make(
        recipe.environment, terminate_at_goal=False, mode="data_collection", disable_env_checker=True
    ).unwrapped
    environment.reset(seed=0)  # compiles the model
    return environment


def make_oracles(recipe: Recipe, environment: Any) -> dict[str, Any]:
    if recipe.kind == "play":
        classes = _PLAN
        settings = {"noise": recipe.noise, "noise_smoothing": recipe.noise_smoothing}
    else:
        classes = _MARKOV
        settings = {"min_norm": recipe.min_norm}
    closed = {"gripper_always_closed": True} if recipe.family == "puzzle" else {}
    return {task: classes[task](env=environment, **settings, **closed) for task in _TASKS[recipe.family]}


class ManipulationCollector:
    """Episodes of one manipulation dataset."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.environment = make_environment(recipe)
        self.oracles = make_oracles(recipe, self.environment)
        self.has_buttons = recipe.family in ("scene", "puzzle")

    def episode(self, seeds: EpisodeSeeds) -> Arrays:
        attempt = 0
        while True:
            arrays = self._attempt(seeds, attempt)
            if arrays is not None:
                return arrays
            attempt += 1

    def _attempt(self, seeds: EpisodeSeeds, attempt: int) -> Arrays | None:
        """An episode, or None as soon as it has become one that must be redone."""
        recipe, environment = self.recipe, self.environment
        scene = recipe.family == "scene"
        rows = recipe.rows
        observation, info = environment.reset(seed=seeds.stream("environment", attempt))
        # What is random outside the environment and the oracles is drawn at once; the oracles use the global
        # generator. The environment makes its action_space anew, unseeded, at every access: no source to use.
        draws = np.random.default_rng(seeds.stream("actions", attempt))
        p_stack = draws.uniform(*recipe.stacking)
        play = recipe.kind == "play"
        if not play:
            level = draws.uniform(0.0, recipe.noise)
            noise = draws.normal(0.0, level * _NOISE_SCALE, (rows, 5))
            replaced = draws.random(rows) < recipe.p_random_action
            random_actions = draws.uniform(-1.0, 1.0, (rows, 5))

        arrays: Arrays = {
            "observations": np.empty((rows, len(observation)), np.float32),
            "actions": np.empty((rows, 5), np.float32),
            "terminals": np.zeros(rows, bool),
            "qpos": np.empty((rows, environment.model.nq), np.float32),
            "qvel": np.empty((rows, environment.model.nv), np.float32),
        }
        arrays["terminals"][-1] = True
        if self.has_buttons:
            arrays["button_states"] = np.empty((rows, len(info["button_states"])), np.int64)
        observations, actions = arrays["observations"], arrays["actions"]
        qpos, qvel, buttons = arrays["qpos"], arrays["qvel"], arrays.get("button_states")

        with global_numpy(seeds.stream("oracle", attempt)):
            oracle = self.oracles[info["privileged/target_task"]]
            oracle.reset(observation, info)
            for row in range(rows):
                if play:
                    action = oracle.select_action(observation, info)
                elif replaced[row]:
                    action = random_actions[row]
                else:
                    action = oracle.select_action(observation, info) + noise[row]
                observations[row] = observation
                np.clip(action, -1.0, 1.0, out=actions[row], casting="same_kind")
                # The environment is given the rounded action that is recorded, so the file replays exactly.
                observation, _, _, _, info = environment.step(actions[row])
                qpos[row] = info["prev_qpos"]
                if scene and not cube_is_visible(info["prev_qpos"]):
                    return None
                qvel[row] = info["prev_qvel"]
                if buttons is not None:
                    buttons[row] = info["prev_button_states"]
                if oracle.done:
                    # As in OGBench's script, the next action still sees the info from before the new target.
                    new_observation, new_info = environment.set_new_target(p_stack=p_stack)
                    oracle = self.oracles[new_info["privileged/target_task"]]
                    oracle.reset(new_observation, new_info)
        return arrays


def cube_is_visible(qpos: np.ndarray) -> bool:
    """OGBench redoes scene episodes in which the cube leaves the view, unless it lies in the drawer."""
    y, z = qpos[15], qpos[16]
    too_far_right = y >= 0.29
    too_far_left = y <= -0.3 and not 0.06 <= z <= 0.08
    return not (too_far_right or too_far_left)
