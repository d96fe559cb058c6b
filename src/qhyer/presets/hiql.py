"""HIQL: OGBench's settings; what differs is how far subgoals lie, the discount, and the actor's goals."""

from qhyer.presets import Rule

CODE = "OGBench impls/agents/hiql.py at 1d41409"
TABLE = "OGBench impls/hyperparameters.sh at 1d41409"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE} and {TABLE}: the defaults of HIQLConfig; both alphas are 3 but on explore data"),
        *[
            Rule(pattern, f"{TABLE}: subgoal_steps", dict(subgoal_steps=10))
            for pattern in ("cube-*", "scene-*", "puzzle-*")
        ],
        Rule("*-stitch-*", f"{TABLE}: actor_p_randomgoal 0.5", dict(actor_p_random=0.5)),
        Rule("pointmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule("antmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule("humanoidmaze-*", f"{TABLE}: subgoal_steps and discount", dict(subgoal_steps=100, discount=0.995)),
        Rule(
            "antmaze-*-explore-*",
            f"{TABLE}: both alphas, actor_p_randomgoal 1",
            dict(alpha_low=10.0, alpha_high=10.0, actor_p_random=1.0),
        ),
    ],
}
