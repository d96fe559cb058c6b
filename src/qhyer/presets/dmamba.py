"""DMamba: the code's gym settings; it has none for mazes."""

from qhyer.presets import Rule

CODE = "Toshihiro-Ota/decision-mamba, gym at 35f9944"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of DMambaConfig"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}: scale 1 and target 1, from lines that are commented out",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, target_return=1.0),
        ),
        Rule(
            "maze2d-*",
            "ours: no settings published; the dataset's rewards, and the return to ask for from the data",
            dict(goal="none", dataset_rewards=True, tolerance=0.5),
        ),
    ],
}
