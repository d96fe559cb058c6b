"""EDT: the code's gym settings; it has none for mazes."""

from qhyer.presets import Rule

CODE = "kristery/Elastic-DT at 8517ef6, its gym configurations"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of EDTConfig"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            "ours: no settings published; the dataset's rewards, and the return to ask for from the data",
            dict(goal="none", dataset_rewards=True, tolerance=0.5),
        ),
        Rule(
            "maze2d-*",
            "ours: no settings published; the dataset's rewards, and the return to ask for from the data",
            dict(goal="none", dataset_rewards=True, tolerance=0.5),
        ),
    ],
}
