"""IQL: CORL's settings, whose antmaze values are the authors'."""

from qhyer.presets import Rule

CODE = "tinkoff-ai/CORL, algorithms/offline/iql.py and configs/offline/iql at eeeeef2"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of IQLConfig"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}, antmaze: tau 0.9, beta 10, rewards r - 1",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, expectile=0.9, temperature=10.0, reward_shift=-1.0),
        ),
        Rule(
            "maze2d-*",
            f"{CODE}, maze2d: tau 0.7, beta 3, raw rewards",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, terminal=False),
        ),
    ],
}
