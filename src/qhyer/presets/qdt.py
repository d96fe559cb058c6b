"""QDT: DT's model and CORL's CQL; the paper's own D4RL settings were not to be had."""

from qhyer.presets import Rule

CODE = "DT as in kzl/decision-transformer at e2d82e6, CQL as in tinkoff-ai/CORL at eeeeef2"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of QDTConfig"),
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
            dict(goal="none", dataset_rewards=True, tolerance=0.5, terminal=False),
        ),
    ],
}
