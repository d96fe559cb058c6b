"""GCIVL: OGBench's settings, which differ by maze alone."""

from qhyer.presets import Rule

CODE = "OGBench impls/agents/gcivl.py at 1d41409"
TABLE = "OGBench impls/hyperparameters.sh at 1d41409"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE} and {TABLE}: the defaults of GCIVLConfig; alpha is 10 everywhere"),
        Rule("*-stitch-*", f"{TABLE}: actor_p_randomgoal 0.5", dict(actor_p_random=0.5)),
        Rule("pointmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule("antmaze-giant-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule("humanoidmaze-*", f"{TABLE}: discount", dict(discount=0.995)),
        Rule("antmaze-*-explore-*", f"{TABLE}: actor_p_randomgoal 1", dict(actor_p_random=1.0)),
    ],
}
