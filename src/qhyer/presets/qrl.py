"""QRL: OGBench's settings. Distances are IQE's and the actor is ddpgbc everywhere, alpha by kind of data.

OGBench also sets a discount of 0.995 for giant mazes; nothing in QRL reads it, since its goals are not geometric.
"""

from qhyer.presets import Rule

CODE = "OGBench impls/agents/qrl.py at 1d41409"
TABLE = "OGBench impls/hyperparameters.sh at 1d41409"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of QRLConfig"),
        Rule("*-play-*", f"{TABLE}: alpha of cube, scene and puzzle, play", dict(alpha=0.3)),
        Rule("*-noisy-*", f"{TABLE}: alpha of cube, scene and puzzle, noisy", dict(alpha=0.03)),
        Rule("pointmaze-*", f"{TABLE}: alpha of pointmaze", dict(alpha=0.0003)),
        Rule("antmaze-*-v0", f"{TABLE}: alpha of antmaze, navigate and stitch", dict(alpha=0.003)),
        Rule("*-stitch-*", f"{TABLE}: actor_p_randomgoal 0.5", dict(actor_p_random=0.5)),
        Rule("humanoidmaze-*", f"{TABLE}: alpha", dict(alpha=0.001)),
        Rule("antmaze-*-explore-*", f"{TABLE}: alpha, actor_p_randomgoal 1", dict(alpha=0.001, actor_p_random=1.0)),
    ],
}
