"""CQL: CORL's settings."""

from qhyer.presets import Rule

CODE = "tinkoff-ai/CORL, algorithms/offline/cql.py and configs/offline/cql at eeeeef2"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of CQLConfig"),
        Rule("*", "ours, for data without rewards: goals beside states, rewards in hindsight", dict(goal="concat")),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}, antmaze: w 5, gap 0.8, best of ten backed up, 5 layers, rewards 10 r - 5",
            dict(
                goal="none",
                dataset_rewards=True,
                tolerance=0.5,
                weight=5.0,
                gap=0.8,
                best_backup=True,
                floor=-200.0,
                policy_learning_rate=1e-4,
                value_hidden=(256,) * 5,
                reward_scale=10.0,
                reward_shift=-5.0,
            ),
        ),
        Rule(
            "maze2d-*",
            f"{CODE}, maze2d: w 10, gap 5, policy rate 3e-5",
            dict(goal="none", dataset_rewards=True, tolerance=0.5, terminal=False),
        ),
    ],
}
