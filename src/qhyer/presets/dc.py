"""DC: the settings of the code's readme; none of it is for maze2d."""

from qhyer.presets import Rule

CODE = "beanie00/Decision-ConvFormer, gym/readme-gym.md and experiment.py at 3db9b9e"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of DCConfig"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}: scale 1, the first of its targets (1 to 1e5); width and rate for antmaze not published",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, target_return=1.0),
        ),
        Rule(
            "maze2d-*",
            "ours: no settings published; the dataset's rewards, and the return to ask for from the data",
            dict(goal="none", dataset_rewards=True, tolerance=0.5),
        ),
    ],
}
