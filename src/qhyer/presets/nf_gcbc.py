"""NF-GCBC: one setting for every dataset, but for the discount of two."""

from qhyer.presets import Rule

CODE = "Princeton-RL/normalising-flows-4-reinforcement-learning, il-and-cil at 5849e01"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: flax_fcnf_gcbc.py and its README's commands, which are the defaults of NFGCBCConfig"),
        # Its README has 0.97 here too.
        Rule("cube-double-play-*", "the paper's table of discounts (arXiv 2505.23527)", dict(discount=0.99)),
        Rule("antmaze-large-navigate-*", "the paper's table of discounts (arXiv 2505.23527)", dict(discount=0.99)),
        # Not trained on by its authors: their setting for every other dataset.
        Rule("*-noisy-*", "measured nowhere: the setting of the authors' other datasets"),
        Rule("pointmaze-*", "measured nowhere: the setting of the authors' other datasets"),
        # Of these they trained on large-navigate and medium-stitch.
        Rule("antmaze-*", "the authors' setting; measured by nobody but on large-navigate and medium-stitch"),
    ],
}
