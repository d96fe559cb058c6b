"""How well the released ant walks, on episodes that it was not chosen by: the rows behind docs/antmaze.md.

python docs/examples/ant_walks.py results/ant/walks.csv     # about three minutes on one core
"""

import csv
import itertools
import sys
from pathlib import Path

import numpy as np

from qhyer.data import registry
from qhyer.data.generate.recipe import EpisodeSeeds, collector_for, recipe_for

SEED = 100
COLUMNS = ("dataset", "episode", "rows", "arrived", "reached", "cells", "fallen", "rows_fallen", "rows_near")
out = Path(sys.argv[1])
out.parent.mkdir(parents=True, exist_ok=True)
with out.open("w", newline="") as file:
    table = csv.writer(file, lineterminator="\n")
    table.writerow(COLUMNS)
    for kind, episodes in (("stitch", 200), ("navigate", 50)):
        for maze in ("medium", "large", "giant"):
            name = f"antmaze-{maze}-{kind}"
            collector = collector_for(recipe_for(registry.get(name)))
            world = collector.environment
            for index in range(episodes):
                states = collector.episode(EpisodeSeeds(SEED, "ant-walks", "train", index))["observations"]
                xy, (_, x, y, _) = states[:, :2], states[:, 3:7].T
                centre = world.ij_to_xy(world.xy_to_ij(world.cur_goal_xy))
                down = 1 - 2 * (x * x + y * y) < 0  # the torso's own up, seen from above: its z axis
                near = np.linalg.norm(xy[50:] - xy[:-50], axis=1) < 2
                cells = [world.xy_to_ij(place) for place in xy]
                entered = sum(a != b for a, b in itertools.pairwise(cells))
                arrived = bool(np.linalg.norm(xy - centre, axis=1).min() <= 1.0) if kind == "stitch" else ""
                row = (len(xy), arrived, len(collector.arrivals), entered, bool(down[-1]), down.sum(), near.sum())
                table.writerow((name, index, *row))
