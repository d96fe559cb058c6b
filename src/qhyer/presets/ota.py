"""OTA: HIQL's settings, as its authors advise, and the length of an option."""

from qhyer.presets import Rule

CODE = "ota-v/ota-v agents/ota.py, as in ktolnos/TTGS at 0a6d7a9"
ADVICE = "its README: HIQL's settings, OGBench impls/hyperparameters.sh at 1d41409"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of OTAConfig; its table of abstraction factors could not be had"),
        *[
            Rule(
                pattern,
                f"{ADVICE}: subgoal_steps; option_steps: 1 in the same group's later code for cube-double, "
                "cube-triple and scene, inferred for the others",
                dict(subgoal_steps=10, option_steps=1),
            )
            for pattern in ("cube-*", "scene-*", "puzzle-*")
        ],
        Rule("cube-quadruple-*", "option_steps: the same group's later code", dict(option_steps=5)),
        Rule("*-stitch-*", f"{ADVICE}: actor_p_randomgoal 0.5", dict(actor_p_random=0.5)),
        Rule("pointmaze-giant-*", f"{ADVICE}: discount", dict(discount=0.995)),
        Rule("antmaze-giant-*", f"{ADVICE}: discount", dict(discount=0.995)),
        Rule("humanoidmaze-*", f"{ADVICE}: subgoal_steps and discount", dict(subgoal_steps=100, discount=0.995)),
        Rule(
            "antmaze-*-explore-*",
            f"{ADVICE}: both alphas, actor_p_randomgoal 1",
            dict(alpha_low=10.0, alpha_high=10.0, actor_p_random=1.0),
        ),
    ],
}
