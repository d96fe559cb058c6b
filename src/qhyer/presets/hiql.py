"""HIQL: OGBench's settings; what differs is how far subgoals lie, the discount, and the actor's goals."""

from qhyer.presets import Rule

CODE = "OGBench impls/hyperparameters.sh at 1d41409"

PRESETS = {
    "paper": [
        Rule("*", "OGBench impls/agents/hiql.py and hyperparameters.sh at 1d41409: the defaults of HIQLConfig"),
        *[Rule(pattern, CODE, dict(subgoal_steps=10)) for pattern in ("cube-*", "scene-*", "puzzle-*")],
        Rule("*-giant-*", CODE, dict(discount=0.995)),
        Rule("*-stitch-*", CODE, dict(actor_p_random=0.5)),
    ],
}
