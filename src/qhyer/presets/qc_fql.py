"""QC-FQL: the authors' settings of single tasks with rewards, where alpha differs; what goals add is inferred."""

from qhyer.presets import Rule

CODE = "ColinQiyangLi/qc agents/acfql.py at 48283b4"
PAPER = "the paper's alpha of QC-FQL (arXiv 2507.07969), for single tasks"
FQL = "not published: FQL's alpha (seohongpark/fql README at 719d044), for single tasks"
INFERRED = "not published for these data: as for the others of their kind"

PRESETS = {
    "paper": [
        Rule("*", f"{CODE}: the defaults of QCFQLConfig, but for its goals, which are inferred"),
        *[Rule(f"{kind}-play-*", PAPER, dict(alpha=300.0)) for kind in ("scene", "puzzle-3x3", "cube-double")],
        *[Rule(f"{kind}-play-*", PAPER, dict(alpha=100.0)) for kind in ("cube-triple", "cube-quadruple")],
        Rule("cube-single-play-*", f"{FQL}, which is QC-FQL's on cube-double", dict(alpha=300.0)),
        Rule("puzzle-4x*-play-*", INFERRED, dict(alpha=300.0)),
        *[
            Rule(f"{kind}-noisy-*", INFERRED, dict(alpha=300.0))
            for kind in ("scene", "puzzle-*", "cube-single", "cube-double")
        ],
        *[Rule(f"{kind}-noisy-*", INFERRED, dict(alpha=100.0)) for kind in ("cube-triple", "cube-quadruple")],
        Rule("antmaze-*", FQL, dict(alpha=10.0)),
        Rule("pointmaze-*", "not published: as ant mazes have it", dict(alpha=10.0)),
        Rule("maze2d-*", "not published: as ant mazes have it", dict(alpha=10.0)),
        Rule("antsoccer-*", f"{FQL}; its discount", dict(alpha=10.0, discount=0.995)),
        Rule("humanoidmaze-*", f"{FQL}; its discount", dict(alpha=30.0, discount=0.995)),
        Rule("*maze-giant-*", f"{FQL}; its discount of antmaze-giant", dict(discount=0.995)),
        Rule("*-stitch-*", "not published for these data: OGBench's actor_p_randomgoal", dict(actor_p_random=0.5)),
        Rule("*-explore-*", "not published for these data: OGBench's actor_p_randomgoal", dict(actor_p_random=1.0)),
    ],
}
