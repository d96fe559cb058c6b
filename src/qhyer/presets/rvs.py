"""RvS: RvS-G with the code's antmaze settings, everywhere."""

from qhyer.presets import Rule

CODE = "scottemmons/rvs, experiments/config/d4rl/antmaze_rvs_g.cfg at 90c0ffb"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of RvSConfig"),
    ],
}
