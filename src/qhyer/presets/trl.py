"""TRL: the authors' settings; lambda and alpha differ by dataset, gamma on humanoid mazes."""

from typing import Any

from qhyer.presets import Rule

CODE = "aoberai/trl agents/trl.py at adfec6f"
TABLE = "aoberai/trl hyperparameters.sh at adfec6f"
NOISY = "as play data, and OGBench's ratio of alpha, 0.03 (GCIQL)"


def published(dataset: str, power: float, alpha: float, **more: Any) -> Rule:
    return Rule(f"{dataset}-*", f"{TABLE}: lam, rpg.alpha", dict(distance_power=power, alpha=alpha, **more))


def inferred(pattern: str, reason: str, **overrides: Any) -> Rule:
    return Rule(pattern, f"not published for these data: {reason}", overrides)


PRESETS = {
    "paper": [
        Rule("*", f"{CODE}, and what the commands for the standard data share: {TABLE}"),
        # Manipulation. What the actor sees of scene's goals: its cube, both buttons, drawer and window.
        Rule("scene-*", "OGBench 1.2: oracle_reps of scene", dict(goal_part=(0, 1, 2, 7, 8, 9, 11))),
        published("scene-play", 1.0, 1.0),
        published("cube-single-play", 0.7, 1.0),
        published("cube-double-play", 1.0, 10.0),
        inferred("cube-triple-play-*", "as cube-double-play", distance_power=1.0, alpha=10.0),
        inferred("cube-quadruple-play-*", "as cube-double-play", distance_power=1.0, alpha=10.0),
        published("puzzle-3x3-play", 0.5, 2.0),
        published("puzzle-4x4-play", 2.0, 2.0),
        # The authors train on these with a billion steps of data only: larger networks, gamma 0.999, lambda 0, frs.
        inferred("puzzle-4x5-play-*", "as puzzle-4x4-play", distance_power=2.0, alpha=2.0),
        inferred("puzzle-4x6-play-*", "as puzzle-4x4-play", distance_power=2.0, alpha=2.0),
        inferred("scene-noisy-*", NOISY, distance_power=1.0, alpha=0.03),
        inferred("cube-*-noisy-*", NOISY, distance_power=1.0, alpha=0.3),
        inferred("cube-single-noisy-*", NOISY, distance_power=0.7, alpha=0.03),
        inferred("puzzle-*-noisy-*", NOISY, distance_power=2.0, alpha=0.06),
        inferred("puzzle-3x3-noisy-*", NOISY, distance_power=0.5, alpha=0.06),
        # Mazes.
        inferred("pointmaze-*", "as pointmaze-medium-navigate", distance_power=0.7, alpha=10.0),
        inferred("maze2d-*", "as pointmaze-medium-navigate", distance_power=0.7, alpha=10.0),
        inferred("antmaze-*", "as antmaze-large-navigate", distance_power=0.0, alpha=0.7),
        inferred("humanoidmaze-*", "as humanoidmaze-medium-navigate", distance_power=0.0, alpha=0.1, discount=0.995),
        inferred("antsoccer-*", "as antsoccer-arena-navigate", distance_power=0.5, alpha=0.3),
        published("pointmaze-medium-navigate", 0.7, 10.0),
        published("antmaze-large-navigate", 0.0, 0.7),
        published("humanoidmaze-medium-navigate", 0.0, 0.1, discount=0.995),
        published("humanoidmaze-large-navigate", 0.1, 0.1, discount=0.995),
        published("antsoccer-arena-navigate", 0.5, 0.3),
        inferred("*maze-giant-*", "OGBench's discount", discount=0.995),
        inferred("*-stitch-*", "OGBench's actor_p_randomgoal", actor_p_random=0.5),
        inferred("antmaze-*-explore-*", "OGBench's goals, and GCIQL's ratio of alpha", alpha=0.02, actor_p_random=1.0),
    ],
}
