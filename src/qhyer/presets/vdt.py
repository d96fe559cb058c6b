"""VDT: the code's gym settings; it has none for mazes."""

from qhyer.presets import Rule

CODE = "ruthless-man/VDT, main.py at 6726f55"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of VDTConfig"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}: rewards r - 1, in its loader; the rest is ours",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, reward_shift=-1.0),
        ),
        Rule(
            "maze2d-*",
            "ours: no settings published; the dataset's rewards, and the return to ask for from the data",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, terminal=False),
        ),
    ],
}
