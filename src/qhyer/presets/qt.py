"""QT: the code's settings; its antmaze rows are for v0."""

from qhyer.presets import Rule

CODE = "charleshsc/QT, experiment.py and run.sh at cb9e1a4"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of QTConfig"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}, antmaze-v0: scale 1, clip 9, targets from 1; eta of umaze",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, target_return=1.0, eta=0.05),
        ),
        Rule("antmaze-umaze-diverse-v2", f"{CODE}, antmaze-v0", dict(eta=0.01)),
        Rule("antmaze-medium-*-v2", f"{CODE}, antmaze-v0: medium-diverse", dict(eta=0.01, steps=100_000)),
        Rule(
            "antmaze-large-*-v2",
            f"{CODE}, antmaze-v0: large-diverse, rewards 4 (r - 0.5)",
            dict(eta=0.005, reward_scale=4.0, reward_shift=-2.0, steps=100_000),
        ),
        Rule(
            "maze2d-*",
            f"{CODE}, maze2d: scale 10, targets from 300",
            dict(
                goal="none",
                dataset_rewards=True,
                tolerance=0.5,
                terminal=False,
                return_scale=10.0,
                target_return=300.0,
                eta=5.0,
            ),
        ),
        Rule("maze2d-umaze-*", f"{CODE}, maze2d: clip and epochs", dict(grad_clip=20.0, steps=100_000)),
        Rule("maze2d-medium-*", f"{CODE}, maze2d: epochs", dict(steps=100_000)),
        Rule("maze2d-large-*", f"{CODE}, maze2d: eta", dict(eta=4.0)),
    ],
}
