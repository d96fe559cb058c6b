"""Published success rates and scores, copied as printed, each with its source. None is ours, and none is guessed.

The same algorithm may stand twice for one dataset when two papers report different numbers: both are shown,
because which of them a reader believes decides what "reproduced" means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

SUCCESS, SCORE = "success", "score"

QHYER = "QHyer paper, table “Results on OGBench manipulation tasks” (8 seeds; 4 for pixels)"
QHYER_RECENT = "QHyer paper, table “Recent offline RL methods adapted to offline GCRL” (8 seeds)"
QHYER_GAS = "QHyer paper, table “Comparison with GAS” (5 seeds)"
QHYER_D4RL = "QHyer paper, table “Results on D4RL” (5 seeds; all but QHyer's from their own papers)"
SAW = "SAW paper (Zhou et al. 2025), table 1"
SAW_QUOTING = "OGBench paper (Park et al. 2025), as quoted in table 1 of the SAW paper (Zhou et al. 2025)"
NF = "Normalizing-flow paper (Ghugare and Eysenbach 2025), NF-GCBC, 5 seeds, means only"
OGBENCH = "OGBench paper (Park et al. 2025), 8 seeds, quoted second-hand"

_QHYER_TABLE = """
dataset                           HIQL     SAW     OTA Eik-HIQRL  GCBC  GCIVL   GCIQL     QRL     CRL   QHyer
cube-single-play-v0               15±3    23±2    13±1     0±0     6±2    53±4    68±6     5±1    19±2    84±4
cube-double-play-v0                6±2    26±3     2±1     0±0     1±1    36±3    40±5     1±0    10±2    56±2
cube-triple-play-v0                3±1    19±4     1±0     0±0     1±1     1±0     3±1     0±0     4±1    10±5
cube-quadruple-play-v0             0±0     0±0     0±0     0±0     0±0     0±0     0±0     0±0     2±1     2±1
cube-single-noisy-v0              41±6    38±2    40±2     2±1     8±3    71±9    99±1    25±6    38±2    95±5
cube-double-noisy-v0               2±1    12±1     5±2     0±0     1±1    14±3    23±3     3±1     2±1    30±4
cube-triple-noisy-v0               2±1    13±1     1±0     0±0     1±1     9±1     2±1     1±0     3±1    14±1
cube-quadruple-noisy-v0            0±0     1±0     0±0     0±0     0±0     0±0     0±0     0±0     0±0     6±4
scene-play-v0                     38±3    58±3    19±4    11±3     5±1    42±4    51±4     5±1    19±2    53±2
scene-noisy-v0                    25±4    25±2    12±1    12±0     1±1    26±5    26±2     9±2     1±1    25±5
puzzle-3x3-play-v0                12±2     6±1    21±5     9±0     2±0     6±1    95±1     1±0     3±1    92±2
puzzle-4x4-play-v0                 7±2     6±1     5±2     2±1     0±0    13±2    26±3     0±0     0±0    28±5
puzzle-4x5-play-v0                 4±1     2±1     2±1     0±0     0±0     7±1    14±1     0±0     1±0    31±1
puzzle-4x6-play-v0                 3±1     5±0     1±1     0±0     0±0    10±2    12±1     0±0     4±1    18±2
puzzle-3x3-noisy-v0              51±11   78±39    53±6     6±2     1±0   42±19    94±3     0±0    30±6    89±8
puzzle-4x4-noisy-v0               16±4     0±0     0±0     3±1     0±0    20±3    29±7     0±0     0±0    33±6
puzzle-4x5-noisy-v0                5±1    15±1     1±1     2±2     0±0    19±0    19±0     0±0     3±2    26±2
puzzle-4x6-noisy-v0                2±1    11±2     0±0     0±0     0±0    17±2    18±2     0±0     6±3    24±3
visual-cube-single-play-v0        89±0    88±3    40±4       /     5±1    60±5    30±5   41±15   31±15    42±2
visual-cube-double-play-v0        39±2    40±3   36±17       /     1±1    10±2     1±1     5±0     2±1    37±3
visual-cube-triple-play-v0        21±0    20±1    24±2       /    15±2    14±2    15±1    16±1    17±2    20±4
visual-scene-play-v0              49±4    47±6    62±3       /    12±2    25±3    12±2    10±1    11±2    96±1
visual-scene-noisy-v0             50±1    54±3    63±2       /    13±2    23±2    12±4     2±0    15±2    36±4
"""

# Made for single tasks (DEAS, QC-FQL) or for more data (TRL, SHARSA): the QHyer paper's adaptations.
_RECENT_TABLE = """
dataset                         GC-TrL GC-SHARSA   GC-DEAS  GC-QCFQL
cube-single-play-v0           46.2±0.8  30.7±3.8  44.1±2.6  38.4±1.5
cube-double-play-v0            1.6±0.8  49.3±4.7  10.7±3.0   5.1±0.0
cube-triple-play-v0            0.8±0.6  36.8±4.0  18.1±2.3   1.4±0.7
cube-quadruple-play-v0         0.0±0.0   2.3±0.3   0.1±0.1   0.0±0.0
scene-play-v0                 27.7±6.2  44.0±9.1  48.7±3.4  36.9±4.5
puzzle-3x3-play-v0             7.6±1.6  35.6±2.5 32.7±11.0  14.9±9.6
puzzle-4x4-play-v0             2.3±0.7  32.4±9.7  26.7±6.7   0.3±0.7
puzzle-4x5-play-v0             2.0±1.5  15.1±3.1  16.1±1.3   9.7±3.1
puzzle-4x6-play-v0             1.6±0.5  12.1±2.4  17.9±4.5   8.3±5.5
"""

_GAS_TABLE = """
dataset                            GAS
antmaze-giant-stitch-v0           88±4
visual-scene-play-v0              54±6
"""

# Only what the tables above lack, or print differently.
_SAW_TABLE = """
dataset                           GCBC   GCIVL   GCIQL     QRL     CRL    HIQL
antmaze-large-navigate-v0         24±2    16±5    34±4    75±6    83±4    91±2
pointmaze-large-navigate-v0       29±6    45±5    34±3    86±9    39±7    58±5
"""

_SAW_OWN = """
dataset                            SAW
cube-single-play-v0               72±5
cube-double-play-v0               40±7
cube-triple-play-v0                4±2
scene-play-v0                     63±6
antmaze-large-navigate-v0         90±3
pointmaze-large-navigate-v0      85±10
"""

_SAW_RERUN = """
dataset                           HIQL
cube-single-play-v0               44±9
"""

_OGBENCH_TABLE = """
dataset                           GCBC   GCIVL   GCIQL     QRL     CRL    HIQL
pointmaze-medium-navigate-v0       9±6    63±6    53±8    82±5    29±7    79±5
pointmaze-giant-navigate-v0        1±2     0±0     0±0    68±7   27±10    46±9
pointmaze-medium-stitch-v0       23±18   70±14    21±9   80±12     0±1    74±6
pointmaze-large-stitch-v0          7±5    12±6    31±2   84±15     0±0    13±6
pointmaze-giant-stitch-v0          0±0     0±0     0±0    50±8     0±0     0±0
antmaze-medium-navigate-v0        29±4    72±8    71±4    88±3    95±1    96±1
antmaze-giant-navigate-v0          0±0     0±0     0±0    14±3    16±3    65±5
antmaze-medium-stitch-v0         45±11    44±6    29±6    59±7    53±6    94±1
antmaze-large-stitch-v0            3±3    18±2     7±2    18±2    11±2    67±5
antmaze-giant-stitch-v0            0±0     0±0     0±0     0±0     0±0     2±2
"""

_NF_TABLE = """
dataset                        NF-GCBC
cube-single-play-v0               79.5
cube-double-play-v0               35.1
scene-play-v0                     42.0
puzzle-3x3-play-v0                 4.5
"""

# D4RL's normalised scores: its references, environment and data, under the names these mazes have here.
_MAZE2D_TABLE = """
dataset             CQL   IQL    DT   QDT   GDT   VDT    DC DMamba DMixer    QT  LSDT      QHyer
maze2d-umaze-v1    94.7  74.0  31.0  57.3  50.4  60.3  20.1   83.4   86.9 105.4  72.3  118.5±1.9
maze2d-medium-v1   41.8  84.0   8.2  13.3   7.8  88.0  38.2   98.7   95.2 172.0  68.4 173.0±11.9
"""


@dataclass(frozen=True)
class Published:
    """One printed number: success in percent or a score, and its spread over seeds where the source prints one."""

    dataset: str
    agent: str  # as the source prints it
    mean: float
    std: float | None
    source: str
    measure: str = SUCCESS  # or SCORE: a return normalised by the source's own references, not by ours


def _read(table: str, source: str, measure: str = SUCCESS) -> Iterator[Published]:
    header, *lines = table.strip().splitlines()
    agents = header.split()[1:]
    for line in lines:
        dataset, *cells = line.split()
        for agent, cell in zip(agents, cells, strict=True):
            if cell == "/":  # not reported
                continue
            mean, _, std = cell.partition("±")
            yield Published(dataset, agent, float(mean), float(std) if std else None, source, measure)


@cache
def published() -> tuple[Published, ...]:
    return (
        *_read(_QHYER_TABLE, QHYER),
        *_read(_RECENT_TABLE, QHYER_RECENT),
        *_read(_GAS_TABLE, QHYER_GAS),
        *_read(_SAW_TABLE, SAW_QUOTING),
        *_read(_SAW_OWN, SAW),
        *_read(_SAW_RERUN, f"{SAW}, rerun there with expectile 0.9"),
        *_read(_OGBENCH_TABLE, OGBENCH),
        *_read(_NF_TABLE, NF),
        *_read(_MAZE2D_TABLE, QHYER_D4RL, SCORE),
    )


def canonical(agent: str) -> str:
    """`Eik-HiQRL`, `eik_hiqrl` and `eik-hiqrl` are one algorithm, and so are `GC-QCFQL` and `qc_fql`."""
    return re.sub(r"^gc-|[^a-z0-9]", "", agent.lower())


def for_dataset(dataset: str) -> tuple[Published, ...]:
    return tuple(entry for entry in published() if entry.dataset == dataset)


def tasks_of(dataset: str) -> tuple[str, ...]:
    """The tasks that its published numbers are means of: OGBench's environments have five, mazes with scores one."""
    measures = {entry.measure for entry in for_dataset(dataset)}
    return ("1", "2", "3", "4", "5") if SUCCESS in measures else ("1",) if measures else ()
