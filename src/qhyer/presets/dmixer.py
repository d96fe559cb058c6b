"""DMixer: the code's settings."""

from qhyer.presets import Rule

CODE = "ruthless-man/Decision-Mixer, main.py at 6f7438d"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of DMixerConfig; 1000 iterations of 6400 windows; capacity is ours"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}: scale 1, the first of its targets (1 to 1e5)",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, target_return=1.0),
        ),
        Rule(
            "maze2d-*",
            f"{CODE}: scale 10, the first of its targets (300 to 20)",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, return_scale=10.0, target_return=300.0),
        ),
    ],
}
