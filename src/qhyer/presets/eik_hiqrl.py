"""Eik-HiQRL: the released commands on mazes; on manipulation, where none is released, settings inferred.

The steps are OGBench's million, as of all agents here: the released script's own default is 100,000, and what the paper
used is not confirmed.
"""

from qhyer.presets import Rule

CODE = "Pi-HiQRL agents/pi_hiqrl.py at d9483b5"
TABLE = "Pi-HiQRL hyperparameters.sh at d9483b5"
INFERRED = (
    f"inferred, not confirmed: no command for manipulation in {TABLE}; encode_state with its default of 2 numbers "
    "in the agent's file, since the paper is said to learn a latent there; k is HIQL's in OGBench, a guess"
)

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of EikHiQRLConfig; steps as in OGBench; both alphas are 3"),
        *[
            Rule(pattern, f"{TABLE}: high_level_coordinates_only, of which there are 2", dict(coordinates=2))
            for pattern in ("pointmaze-*", "antmaze-*-v0")
        ],
        *[
            Rule(pattern, f"inferred, D4RL is not in it: as mazes in {TABLE}", dict(coordinates=2))
            for pattern in ("antmaze-*-v2", "maze2d-*")
        ],
        *[Rule(pattern, INFERRED, dict(subgoal_steps=10, encoding=2)) for pattern in ("cube-*", "scene-*", "puzzle-*")],
        Rule("*-stitch-*", f"{TABLE}: actor_p_randomgoal 0.5", dict(actor_p_random=0.5)),
        Rule("pointmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule("antmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule(
            "humanoidmaze-*",
            f"{TABLE}: high_level_coordinates_only, subgoal_steps and discount",
            dict(coordinates=2, subgoal_steps=100, discount=0.995),
        ),
        Rule(
            "antmaze-*-explore-*",
            f"{TABLE}: both alphas, actor_p_randomgoal 1",
            dict(alpha_low=10.0, alpha_high=10.0, actor_p_random=1.0),
        ),
    ],
}
