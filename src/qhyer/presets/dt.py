"""DT: the gym settings of the authors' code; mazes, which it does not have, as CORL ran them."""

from qhyer.presets import Rule

CODE = "kzl/decision-transformer, gym/experiment.py at e2d82e6"
CORL = "tinkoff-ai/CORL, configs/offline/dt at eeeeef2"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of DTConfig"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CORL}, antmaze: the first of its targets, 1.0 and 0.5",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, target_return=1.0),
        ),
        Rule(
            "maze2d-*",
            f"{CORL}, maze2d: the first of its targets, 280 and 140",
            dict(
                goal="none",
                dataset_rewards=True,
                tolerance=0.5,
                target_return=280.0,
                batch_size=4096,
                learning_rate=8e-4,
            ),
        ),
    ],
}
