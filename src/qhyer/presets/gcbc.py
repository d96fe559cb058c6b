"""GCBC: one setting for every dataset."""

from qhyer.presets import Rule

PRESETS = {
    "paper": [
        Rule("*", "OGBench impls/agents/gcbc.py and hyperparameters.sh at 1d41409: the defaults of GCBCConfig"),
    ],
    # OGBench's network, batch and goals; as many updates as fit into the time the demo gives QHyer on a core.
    "demo": [Rule("*", "measured here: docs/demo.md, results/demo/", dict(steps=3400))],
}
