"""DEAS: what is known of the authors' settings, chunk lengths and discounts; the rest, alpha above all, is inferred."""

from qhyer.presets import Rule

KNOWN = "arXiv 2510.07730, as summaries of it have it: the length of a sequence"
EXAMPLE = "csmile-1006/DEAS-FQL, the README's example: alpha 300, chunk 4, discounts 0.9 and 0.99"
INFERRED = "not published: as in the authors' example on cube-double"

PRESETS = {
    "paper": [
        Rule("*", "inferred: the defaults of DEASConfig, of the authors' critic for robots and their example"),
        Rule("cube-*", f"{KNOWN}; alpha {INFERRED}", dict(chunk=4)),
        Rule("cube-double-play-*", EXAMPLE, dict(chunk=4, alpha=300.0, discount=0.99)),
        Rule("scene-*", f"{KNOWN}; alpha {INFERRED}", dict(chunk=8)),
        Rule("puzzle-*", f"{KNOWN}; alpha {INFERRED}", dict(chunk=8)),
        *[
            Rule(f"{kind}-*", "not published: QC-FQL's alpha (arXiv 2507.07969)", dict(alpha=100.0))
            for kind in ("cube-triple", "cube-quadruple")
        ],
        *[
            Rule(f"{kind}-*", "not published: FQL's alpha (seohongpark/fql README at 719d044)", dict(alpha=10.0))
            for kind in ("antmaze", "antsoccer")
        ],
        Rule("pointmaze-*", "not published: as ant mazes have it", dict(alpha=10.0)),
        Rule("maze2d-*", "not published: as ant mazes have it", dict(alpha=10.0)),
        Rule("antsoccer-*", "not published: FQL's discount (at 719d044)", dict(discount=0.995)),
        Rule("humanoidmaze-*", "not published: FQL's (seohongpark/fql at 719d044)", dict(alpha=30.0, discount=0.995)),
        Rule("*maze-giant-*", "not published: FQL's discount of antmaze-giant (at 719d044)", dict(discount=0.995)),
        Rule("*-stitch-*", "not published for these data: OGBench's actor_p_randomgoal", dict(actor_p_random=0.5)),
        Rule("*-explore-*", "not published for these data: OGBench's actor_p_randomgoal", dict(actor_p_random=1.0)),
    ],
}
