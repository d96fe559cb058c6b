"""CRL: OGBench's settings. The actor is ddpgbc everywhere, alpha by kind of data."""

from qhyer.presets import Rule

CODE = "OGBench impls/agents/crl.py at 1d41409"
TABLE = "OGBench impls/hyperparameters.sh at 1d41409"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of CRLConfig"),
        Rule("*-play-*", f"{TABLE}: alpha of cube, scene and puzzle, play", dict(alpha=3.0)),
        Rule("*-noisy-*", f"{TABLE}: alpha of cube, scene and puzzle, noisy", dict(alpha=0.1)),
        Rule("pointmaze-*", f"{TABLE}: alpha of pointmaze", dict(alpha=0.03)),
        Rule("antmaze-*-v0", f"{TABLE}: alpha of antmaze, navigate and stitch", dict(alpha=0.1)),
        Rule("*-stitch-*", f"{TABLE}: actor_p_randomgoal 0.5", dict(actor_p_random=0.5)),
        Rule("pointmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule("antmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule("humanoidmaze-*", f"{TABLE}: alpha and discount", dict(alpha=0.1, discount=0.995)),
        Rule("antsoccer-*", f"{TABLE}: alpha", dict(alpha=0.3)),
        Rule("antmaze-*-explore-*", f"{TABLE}: alpha, actor_p_randomgoal 1", dict(alpha=0.003, actor_p_random=1.0)),
    ],
}
