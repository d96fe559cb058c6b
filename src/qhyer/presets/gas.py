"""GAS: the authors' commands; what differs is H, the discount, alpha, and on humanoids the expectile."""

from qhyer.presets import Rule

CODE = "qortmdgh4141/GAS M_utils/agents/gas.py at c9e590f"
COMMANDS = "qortmdgh4141/GAS README.md at c9e590f"
INFERRED = "inferred: nothing is published for these data;"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE} and {COMMANDS}: the defaults of GASConfig, which are those of antmaze"),
        Rule("scene-play-*", f"{COMMANDS}: way_steps", dict(reach=48)),
        *[
            Rule(pattern, f"{INFERRED} scene-play's way_steps", dict(reach=48))
            for pattern in ("cube-*-play-*", "puzzle-*-play-*")
        ],
        Rule(
            "*-noisy-*",
            f"{INFERRED} scene-play's way_steps; alpha of OGBench's GCIQL, which has this loss (1 on play, too)",
            dict(reach=48, alpha=0.03),
        ),
        Rule("pointmaze-*", f"{INFERRED} antmaze's settings"),
        Rule("pointmaze-giant-*", f"{INFERRED} antmaze-giant's discount", dict(discount=0.995)),
        Rule("maze2d-*", f"{INFERRED} antmaze's settings"),
        Rule("antsoccer-*", f"{INFERRED} antmaze's settings"),
        Rule("antmaze-giant-*", f"{COMMANDS}: discount", dict(discount=0.995)),
        Rule("antmaze-*-explore-*", f"{COMMANDS}: alpha", dict(alpha=0.01)),
        Rule(
            "humanoidmaze-*",
            f"{COMMANDS}: way_steps, tdr_expectile, alpha",
            dict(reach=32, distance_expectile=0.95, alpha=0.1),
        ),
        Rule("humanoidmaze-giant-*", f"{COMMANDS}: discount", dict(discount=0.995)),
    ],
}
