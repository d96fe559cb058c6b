"""SAW: the authors' settings; what differs is tau, beta, how far subgoals lie, the discount, and the policy's goals."""

from qhyer.presets import Rule

CODE = "johnlyzhou/saw impls/agents/saw.py at 1ce8ac7"
TABLE = "johnlyzhou/saw impls/hyperparameters.sh at 1ce8ac7"
INFERRED = "not published for these data: as for the others of its kind"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of SAWConfig"),
        *[
            Rule(pattern, f"{TABLE}: kl_alpha, subgoal_steps", dict(beta=1.0, subgoal_steps=10))
            for pattern in ("cube-double-play-*", "cube-triple-play-*", "scene-play-*")
        ],
        Rule("cube-quadruple-play-*", "as the authors have it in a later paper", dict(beta=1.0, subgoal_steps=10)),
        Rule(
            "cube-single-play-*",
            f"{TABLE}: kl_alpha, subgoal_steps, expectile",
            dict(beta=0.3, subgoal_steps=10, expectile=0.9),
        ),
        *[
            Rule(pattern, INFERRED, dict(beta=1.0, subgoal_steps=10))
            for pattern in ("cube-*-noisy-*", "scene-noisy-*", "puzzle-*")
        ],
        Rule("*-stitch-*", "not published for these data: OGBench's actor_p_randomgoal", dict(actor_p_random=0.5)),
        Rule("pointmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule("antmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule(
            "humanoidmaze-*",
            f"{TABLE}: subgoal_steps and discount of navigate",
            dict(subgoal_steps=100, discount=0.995),
        ),
    ],
}
