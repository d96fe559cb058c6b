"""CGDT: the code's sizes; expectiles and weight of guidance per task are not in it."""

from qhyer.presets import Rule

CODE = "sharkwyf/cgdt, main.py at aa6933c"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of CGDTConfig; alpha and its rise are ours"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}: scale 1; the return to ask for from the data is ours",
            dict(goal="none", dataset_rewards=True, tolerance=0.5),
        ),
        Rule(
            "maze2d-*",
            f"{CODE}: its scale of all tasks but antmaze; the rest is ours, it has no maze2d",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, return_scale=1000.0),
        ),
    ],
}
