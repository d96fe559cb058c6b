"""GCBC: one setting for every dataset."""

from qhyer.presets import Rule

PRESETS = {
    "paper": [
        Rule("*", "OGBench impls/agents/gcbc.py and hyperparameters.sh at 1d41409: the defaults of GCBCConfig"),
    ],
}
