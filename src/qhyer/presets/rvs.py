"""RvS: RvS-G with the code's antmaze settings, everywhere."""

from qhyer.presets import Rule

CODE = "scottemmons/rvs, its antmaze experiments"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of RvSConfig"),
    ],
}
