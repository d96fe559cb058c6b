"""SHARSA: the authors' settings, of four tasks with a hundred to a thousand times the data; elsewhere inferred."""

from qhyer.presets import Rule

CODE = "seohongpark/horizon-reduction agents/sharsa.py at c298aed"
TABLE = "seohongpark/horizon-reduction README.md at c298aed"
INFERRED = "not published for these data: inferred from the authors' {}"

CUBE = dict(subgoal_steps=50, actor_p_random=0.0)
MAZE = dict(subgoal_steps=50, actor_p_random=0.0, actor_geometric=False, aggregate="mean")
ORACLE = (0, 1, 2, 7, 8, 9, 11)  # of the thirteen: the cube's xyz, both buttons, drawer and window

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of SHARSAConfig, which are puzzle-4x5's; but 1M updates, not 5M"),
        *[
            Rule(pattern, f"{TABLE}: puzzle-4x5 and 4x6 of 1B steps, the same as the defaults; inferred for fewer")
            for pattern in ("puzzle-4x5-play-*", "puzzle-4x6-play-*")
        ],
        *[
            Rule(pattern, INFERRED.format("puzzle-4x5-play"))
            for pattern in ("puzzle-3x3-*", "puzzle-4x4-*", "puzzle-*-noisy-*")
        ],
        Rule("cube-octuple-play-*", f"{TABLE}: subgoal_steps, actor_p_randomgoal", CUBE),
        *[
            Rule(f"cube-{count}-*", INFERRED.format("cube-octuple-play"), CUBE)
            for count in ("single", "double", "triple", "quadruple")
        ],
        Rule("scene-*", INFERRED.format("cube-octuple-play"), CUBE),
        Rule("scene-*", "OGBench's oraclerep of scene at 1d41409: seven coordinates", dict(goal_part=ORACLE)),
        Rule(
            "humanoidmaze-giant-navigate-*",
            f"{TABLE}: subgoal_steps, actor_p_randomgoal, actor_geom_sample, q_agg",
            MAZE,
        ),
        *[
            Rule(pattern, INFERRED.format("humanoidmaze-giant-navigate"), MAZE)
            for pattern in (
                *("humanoidmaze-[ml]*", "humanoidmaze-giant-stitch-*", "antmaze-*", "antsoccer-*"),
                *("pointmaze-*", "maze2d-*"),
            )
        ],
        Rule("*-stitch-*", "not published for these data: OGBench's actor_p_randomgoal", dict(actor_p_random=0.5)),
    ],
}
