"""How fast episodes are made, against how fast the bare environment could replay them."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qhyer.data.generate.recipe import EpisodeSeeds, collector_for, recipe_for
from qhyer.data.generate.runner import write_chunk
from qhyer.errors import UserError

if TYPE_CHECKING:
    from qhyer.data.registry import Dataset


def measure_rate(dataset: Dataset, episodes: int = 3, rows: int | None = None) -> dict[str, Any]:
    """Steps a second of generation (writing included) and of replaying the recorded actions, in one process.

    The two take turns, episode by episode, so that a machine whose speed drifts treats both alike.
    """
    if dataset.is_maze:
        raise UserError("the rate is measured on manipulation datasets: a maze replays nothing but its noise")
    if episodes < 1:
        raise UserError(f"episodes must be at least 1, not {episodes}")
    if rows is not None and rows < 2:
        raise UserError(f"an episode has at least 2 rows, not {rows}")
    recipe = recipe_for(dataset, rows)
    collector: Any = collector_for(recipe)
    generating = replaying = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for index in range(-1, episodes):  # the first is a warm-up
            seeds = EpisodeSeeds(0, f"bench/{dataset.name}", "train", index + 1)
            begun = time.perf_counter()
            arrays = collector.episode(seeds)
            write_chunk(Path(folder) / f"{index}.npz", arrays)
            generated = time.perf_counter()
            collector.environment.reset(seed=seeds.stream("environment"))
            for action in arrays["actions"]:
                collector.environment.step(action)
            replayed = time.perf_counter()
            if index >= 0:
                generating += generated - begun
                replaying += replayed - generated
    steps = episodes * recipe.rows
    return {
        "dataset": dataset.name,
        "episodes": episodes,
        "steps": steps,
        "generation_steps_per_s": steps / generating,
        "replay_steps_per_s": steps / replaying,
        "ratio": replaying / generating,
    }
