"""Reinformer: the code's defaults; K and expectile per task are in a table of the paper we could not get."""

from qhyer.presets import Rule

CODE = "Dragon-Zhuang/Reinformer, main.py at 61eaed9"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of ReinformerConfig"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}: rewards 100 r + 1, scale 1",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, reward_scale=100.0, reward_shift=1.0),
        ),
        Rule(
            "maze2d-*", f"{CODE}: scale 100", dict(goal="none", dataset_rewards=True, tolerance=0.5, return_scale=100.0)
        ),
    ],
}
