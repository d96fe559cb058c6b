"""Drawn views of an environment: what its observations say, from above and from the front. No renderer is needed.

Numbers of the manipulation scenes (sizes, the layout and scales of observations) are OGBench's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qhyer import envs
from qhyer.data.registry import DATASETS
from qhyer.errors import UserError

INK, SOFT, PAPER, TABLE, WALL, STEEL = "#1b1d21", "#8a9099", "#ffffff", "#f1f3f6", "#c3c8d0", "#4a4f57"
RED, BLUE, ORANGE, GREEN, PURPLE, WHITE = "#e0424f", "#4f86e0", "#f0a026", "#1fae48", "#9447cc", "#ffffff"
CUBES = (RED, BLUE, ORANGE, GREEN, PURPLE, "#b5d916", "#cc47a0", "#808080")
PATH = "#0072b2"
MAZES = ("pointmaze", "antmaze")

ARM = 19  # entries of an observation before the objects'
CENTRE, SCALE = np.array([0.425, 0.0, 0.0]), 10.0  # observation = (position - centre) * scale
CUBE, CUBE_SIZE = 9, 0.04
BUTTON, PRESS = 4, 120.0
DRAWER, WINDOW = (36, 18.0), (38, 15.0)  # of a scene: entry, scale


def family(environment: str) -> str | None:
    """cube, scene, puzzle, pointmaze or antmaze; None for an environment that is not one of the datasets'."""
    return next((d.family for d in DATASETS.values() if d.environment == environment), None)


def drawable(environment: str) -> bool:
    return family(environment) is not None


def geometry(env: Any) -> dict[str, np.ndarray]:
    """What stands still, of an environment that has been reset: walls, or where buttons and handles are at rest."""
    if (maze := envs.maze_geometry(env)) is not None:
        return maze
    inner, found = env.unwrapped, {}
    if hasattr(inner, "_button_site_ids"):
        rest = inner._data.site_xpos[inner._button_site_ids].copy()
        rest[:, 2] -= [float(inner._data.joint(f"buttonbox_joint_{i}").qpos[0]) for i in range(len(rest))]
        found["buttons"] = rest
    for name in ("drawer", "window"):
        if hasattr(inner, f"_{name}_site_id"):
            joint = inner._model.joint(f"{name}_slide").id
            axis, handle = inner._data.xaxis[joint].copy(), inner._data.site_xpos[getattr(inner, f"_{name}_site_id")]
            found[name] = np.stack([handle - axis * float(inner._data.joint(f"{name}_slide").qpos[0]), axis])
    return found


class View:
    """Draws observations of one episode. `width`: pixels."""

    def __init__(self, environment: str, fixed: Mapping[str, np.ndarray], goal: np.ndarray, width: int = 200) -> None:
        kind = family(environment)
        if kind is None:
            raise UserError(f"there is no drawing of {environment}: only of the datasets' environments")
        self.kind, self.fixed, self.goal, self.width = kind, fixed, goal, width

    def draw(self, trail: np.ndarray) -> np.ndarray:
        """The last of these observations (t, d_s), and the way there -> RGB (height, width, 3)."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        left, right, low, high = self._limits()
        height = round(self.width * (high - low) / (right - left))
        dpi = self.width / 2.0  # two inches wide: lines and letters grow with the picture
        figure = Figure(figsize=(self.width / dpi, height / dpi), dpi=dpi, facecolor=PAPER)
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(left, right), ylim=(low, high))
        ax.set_axis_off()
        if self.kind in MAZES:
            self._maze(ax, trail)
        else:
            self._table(ax, trail)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    def _limits(self) -> tuple[float, float, float, float]:
        if self.kind in MAZES:
            rows, columns = self.fixed["maze_map"].shape
            unit, (x, y) = float(self.fixed["maze_unit"]), self.fixed["maze_offset"]
            return -0.5 * unit - x, (columns - 0.5) * unit - x, -0.5 * unit - y, (rows - 0.5) * unit - y
        self.side = 0.52 if self.kind == "scene" else 0.37
        self.back = 0.04 if self.kind == "scene" else 0.2  # how near the robot's base the view from above begins
        self.front = 0.65
        self.floor = -self.front - 0.41  # height of the table in the front view, which stands below the other
        return -self.side, self.side, self.floor - 0.02, -self.back

    # ------------------------------------------------------------------------------------------------------ mazes

    def _maze(self, ax: Any, trail: np.ndarray) -> None:
        from matplotlib.patches import Rectangle

        unit, (x, y) = float(self.fixed["maze_unit"]), self.fixed["maze_offset"]
        for i, j in np.argwhere(self.fixed["maze_map"] == 1):
            corner = ((j - 0.5) * unit - x, (i - 0.5) * unit - y)
            ax.add_patch(Rectangle(corner, unit, unit, facecolor=WALL, edgecolor=WALL, linewidth=0.5))
        ax.plot(*trail[:, :2].T, color=PATH, linewidth=1.2, solid_joinstyle="round", zorder=3)
        ax.plot(*trail[0, :2], "o", markersize=3, color=PAPER, markeredgecolor=PATH, markeredgewidth=1, zorder=4)
        ax.plot(*self.goal[:2], "*", markersize=11, color=ORANGE, markeredgecolor=INK, markeredgewidth=0.6, zorder=5)
        ax.plot(*trail[-1, :2], "o", markersize=5.5, color=PATH, markeredgecolor=PAPER, markeredgewidth=0.8, zorder=6)

    # ---------------------------------------------------------------------------------------------------- the table

    def _table(self, ax: Any, trail: np.ndarray) -> None:
        """From above: right is y, down is x, the robot's base beyond the upper edge. Below it, from the front."""
        now = trail[-1]
        self._box(ax, (-self.side, -self.front), (self.side, -self.back), TABLE, zorder=-2)
        self._box(ax, (-self.side, self.floor - 0.02), (self.side, self.floor), WALL, zorder=-2)
        for text, height in (("from above", -self.front), ("from the front", self.floor + 0.41)):
            above = height == -self.front
            ax.text(
                -self.side + 0.015,
                height + (0.012 if above else -0.012),
                text,
                fontsize=6,
                color=SOFT,
                va="bottom" if above else "top",
                zorder=50,
            )
        if self.kind in ("scene", "puzzle"):
            self._buttons(ax, now)
        if self.kind == "scene":
            self._drawer(ax, now)
            self._window(ax, now)
        if self.kind in ("cube", "scene"):
            for i in range(1 if self.kind == "scene" else (len(now) - ARM) // CUBE):
                self._cube(ax, self.goal, i, target=True)
                self._cube(ax, now, i)
        path = trail[:, 12:15] / SCALE + CENTRE
        ax.plot(path[:, 1], -path[:, 0], color=PATH, linewidth=0.8, alpha=0.5, zorder=9)
        ax.plot(path[:, 1], path[:, 2] + self.floor, color=PATH, linewidth=0.8, alpha=0.5, zorder=9)
        self._gripper(ax, now)

    def _box(self, ax: Any, low: tuple[float, float], high: tuple[float, float], colour: str, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        style = {"edgecolor": "none", **style}
        ax.add_patch(Rectangle(low, high[0] - low[0], high[1] - low[1], facecolor=colour, **style))

    def _cube(self, ax: Any, observation: np.ndarray, number: int, target: bool = False) -> None:
        from matplotlib.patches import Polygon

        own = observation[ARM + CUBE * number : ARM + CUBE * (number + 1)]
        x, y, z = own[:3] / SCALE + CENTRE
        cosine, sine = own[7:9]
        half = CUBE_SIZE / 2
        corners = np.array([(half, half), (-half, half), (-half, -half), (half, -half)])
        turned = corners @ np.array([[cosine, sine], [-sine, cosine]]) + (x, y)
        style: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.7}
        if target:
            style = {"edgecolor": CUBES[number], "linewidth": 0.8, "linestyle": (0, (2, 1))}
        face = CUBES[number] + ("38" if target else "ff")
        above = 3 + z + (0 if not target else -1)
        ax.add_patch(Polygon(np.stack([turned[:, 1], -turned[:, 0]], 1), facecolor=face, zorder=above, **style))
        reach = half * (abs(cosine) + abs(sine))
        low, high = (y - reach, z - half + self.floor), (y + reach, z + half + self.floor)
        self._box(ax, low, high, face, zorder=3 + x + (0 if not target else -1), **style)

    def _gripper(self, ax: Any, observation: np.ndarray) -> None:
        """Two fingers, open as wide as they are, across the wrist's yaw."""
        x, y, z = observation[12:15] / SCALE + CENTRE
        cosine, sine = observation[15:17]
        length = math.hypot(cosine, sine) or 1.0
        across = np.array([-sine, cosine]) / length
        gap = 0.006 + 0.0425 * (1.0 - float(np.clip(observation[17] / 3.0, 0.0, 1.0)))  # half of it
        ax.plot([0.0, y], [0.0, -x], color=SOFT, linewidth=5, alpha=0.35, solid_capstyle="round", zorder=8)
        fingers = np.array([(x, y) + side * gap * across for side in (-1, 1)])
        ax.plot(fingers[:, 1], -fingers[:, 0], color=STEEL, linewidth=1.2, zorder=10)
        for finger in fingers:
            ends = np.array([finger + side * 0.011 * np.array([cosine, sine]) / length for side in (-1, 1)])
            ax.plot(ends[:, 1], -ends[:, 0], color=INK, linewidth=2.6, solid_capstyle="butt", zorder=11)
        level, ceiling = z + self.floor, self.floor + 0.38
        palm = min(level + 0.075, ceiling)
        ax.plot([y, y], [palm, ceiling], color=SOFT, linewidth=5, alpha=0.35, solid_capstyle="butt", zorder=8)
        reach = max(0.02, float(np.ptp(fingers[:, 1])) / 2)
        self._box(ax, (y - reach - 0.004, palm - 0.012), (y + reach + 0.004, palm), STEEL, zorder=10)
        for finger in fingers:
            ax.plot([finger[1]] * 2, [level - 0.012, palm], color=INK, linewidth=2, solid_capstyle="butt", zorder=11)

    def _buttons(self, ax: Any, observation: np.ndarray) -> None:
        """The colour is the button's state; the frame around it is what the goal asks for."""
        from matplotlib.patches import Circle

        first = ARM + (CUBE if self.kind == "scene" else 0)
        colours = (RED, WHITE) if self.kind == "scene" else (RED, BLUE)
        for i, (x, y, z) in enumerate(self.fixed["buttons"]):
            own = slice(first + BUTTON * i, first + BUTTON * (i + 1))
            _, on, press, _ = observation[own]
            colour = colours[int(on > 0.5)]
            wanted = colours[int(self.goal[own][1] > 0.5)]
            framed = STEEL if wanted == WHITE else wanted
            corner = (y - 0.043, -x - 0.043), (y + 0.043, -x + 0.043)
            dashes = (0, (2, 1))
            self._box(ax, *corner, "#dfe3e9", edgecolor=framed, linewidth=1.3, linestyle=dashes, zorder=1)
            ax.add_patch(
                Circle(
                    (y, -x),
                    0.021 + 0.3 * min(0.0, press / PRESS),
                    facecolor=colour,
                    edgecolor=INK,
                    linewidth=0.7,
                    zorder=2,
                )
            )
            near = 1 + x  # from the front, the nearer hides the farther
            base = self.floor + 0.075
            self._box(
                ax, (y - 0.046, self.floor), (y + 0.046, base), "#dfe3e9", edgecolor=WALL, linewidth=0.6, zorder=near
            )
            top = self.floor + z + press / PRESS
            self._box(ax, (y - 0.007, base), (y + 0.007, top - 0.012), STEEL, zorder=near)
            cap = (y - 0.021, top - 0.016), (y + 0.021, top)
            self._box(ax, *cap, colour, edgecolor=INK, linewidth=0.6, zorder=near)

    def _slid(self, name: str, observation: np.ndarray) -> np.ndarray:
        """Where the handle of the drawer or of the window is."""
        entry, scale = {"drawer": DRAWER, "window": WINDOW}[name]
        rest, axis = self.fixed[name]
        return rest + axis * float(observation[entry]) / scale

    def _handle(self, observation: np.ndarray, button: int) -> str:
        """Red when its button has locked it."""
        return WHITE if observation[ARM + CUBE + BUTTON * button + 1] > 0.5 else RED

    def _drawer(self, ax: Any, now: np.ndarray) -> None:
        edge: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.6}
        pale = "#c4d5f5"
        self._box(ax, (-0.52, -0.44), (-0.32, -0.22), "#9db8e8", **edge, zorder=0)
        self._box(ax, (-0.52, self.floor), (-0.32, self.floor + 0.168), "#9db8e8", **edge, zorder=0.5)
        for observation, target in ((self.goal, True), (now, False)):
            y = self._slid("drawer", observation)[1]
            z = self.floor + self._slid("drawer", observation)[2]
            colour = "none" if target else self._handle(now, 0)
            style = edge | ({"edgecolor": BLUE, "linestyle": (0, (2, 1)), "linewidth": 1.1} if target else {})
            if not target:
                self._box(ax, (y - 0.25, -0.43), (y - 0.07, -0.23), pale, **edge, zorder=0.2)
                front = self.floor + 0.03, self.floor + 0.15
                self._box(ax, (y - 0.25, front[0]), (y - 0.07, front[1]), pale, **edge, zorder=0.6)
                for arm in (-0.37, -0.29, z):
                    ax.plot([y - 0.07, y - 0.02], [arm, arm], color=INK, linewidth=1, zorder=3.9)
            self._box(ax, (y - 0.02, -0.38), (y, -0.28), colour, **style, zorder=4)
            self._box(ax, (y - 0.02, z - 0.012), (y, z + 0.012), colour, **style, zorder=4)

    def _window(self, ax: Any, now: np.ndarray) -> None:
        edge: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.6}
        self._box(ax, (0.27, -0.53), (0.33, -0.07), "#e6e9ee", **edge, zorder=0)
        self._box(ax, (0.27, self.floor + 0.01), (0.33, self.floor + 0.38), "#e6e9ee", **edge, zorder=0)
        for observation, target in ((self.goal, True), (now, False)):
            x, _, z = self._slid("window", observation)
            colour = "none" if target else self._handle(now, 1)
            style = edge | ({"edgecolor": BLUE, "linestyle": (0, (2, 1)), "linewidth": 1.1} if target else {})
            if not target:
                self._box(ax, (0.278, -x - 0.014), (0.295, -x + 0.186), "#8fb7c9", **edge, zorder=0.2)
            self._box(ax, (0.2, -x - 0.012), (0.285, -x + 0.012), colour, **style, zorder=4)
            if not target:
                self._box(ax, (0.2, self.floor + z - 0.08), (0.217, self.floor + z + 0.01), colour, **style, zorder=4)
