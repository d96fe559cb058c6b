"""HDT: the sizes of the paper's D4RL runs; it gives no others for this ablation."""

from qhyer.presets import Rule

PAPER = "QHyer, table of D4RL settings"

PRESETS = {
    "paper": [
        Rule(
            "*",
            f"{PAPER}: width, layers, heads, batch; goals beside states; the rest is DT's",
            dict(goal="concat", batch_size=256, learning_rate=2e-4),
        ),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{PAPER}: K of umaze; the dataset's rewards, and the return to ask for from the data",
            dict(dataset_rewards=True, tolerance=0.5, context=2),
        ),
        Rule("antmaze-medium-*-v2", f"{PAPER}: K", dict(context=3)),
        Rule("antmaze-large-*-v2", f"{PAPER}: K and learning rate", dict(context=3, learning_rate=4e-4)),
        Rule(
            "maze2d-*",
            f"{PAPER}: K of umaze; the dataset's rewards, and the return to ask for from the data",
            dict(dataset_rewards=True, tolerance=0.5, context=10, return_scale=10.0),
        ),
    ],
}
