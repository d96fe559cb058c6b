"""LSDT: the code's settings; per-task shares and kernels of the paper were not to be had."""

from qhyer.presets import Rule

CODE = "WangJinCheng1998/LSDT, its arguments and README"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of LSDTConfig"),
        Rule("pointmaze-*", "ours: the radius within which OGBench counts a point maze as solved", dict(tolerance=1.0)),
        Rule("antmaze-*-v0", "ours: the radius within which OGBench counts an ant maze as solved", dict(tolerance=0.5)),
        Rule(
            "antmaze-*-v2",
            f"{CODE}: target 100, scale 1000, goals beside states",
            dict(dataset_rewards=True, tolerance=0.5, return_scale=1000.0, target_return=100.0),
        ),
        Rule(
            "maze2d-*",
            f"{CODE}: target 300, scale 1000, goals beside states",
            dict(dataset_rewards=True, tolerance=0.5, return_scale=1000.0, target_return=300.0),
        ),
        Rule("maze2d-large-*", f"{CODE}: K", dict(context=30)),
    ],
}
