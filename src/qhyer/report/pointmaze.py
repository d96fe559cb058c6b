"""OGBench's medium point mazes as one table: all goal-conditioned agents, published and ours."""

from __future__ import annotations

from collections.abc import Sequence

from qhyer.report.ogbench import against, agents_table
from qhyer.report.published import OGBENCH
from qhyer.report.suite import Account, Suite
from qhyer.report.tables import Group, SuccessRow

DATASETS = ("pointmaze-medium-navigate-v0", "pointmaze-medium-stitch-v0")

NOTE = (
    "Success in percent, ± the standard deviation over seeds. Published: OGBench's own table (8 seeds, a million "
    "updates of 1024), quoted second-hand; it has neither QHyer nor NF-GCBC. Ours: the last evaluation of each run, on "
    "data made anew. In brackets: seeds; updates × batch."
)


def account(found: Sequence[Group], rows: Sequence[SuccessRow]) -> Account:
    return Account((agents_table(against(rows, DATASETS, (OGBENCH, "")), DATASETS),), (NOTE,))


POINTMAZE = Suite("pointmaze", "OGBench point mazes", DATASETS, account)
