"""docs/published.md from the code's own tables: every published number it knows, with its source.

`make published` writes the page; `tests/test_sources.py` holds it to the code.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from qhyer import agents
from qhyer.ablate import ablations, variant_names
from qhyer.report import ogbench
from qhyer.report.published import OGBENCH, QHYER, QHYER_D4RL, SCORE, Published, canonical, published
from qhyer.report.tables import markdown
from qhyer.storage import write_text

PAGE = Path("docs/published.md")
OWN = ("QHyer", QHYER)
HEAD = """# Published numbers

Every published number that the code knows, as printed and with its source: what `qhyer report` (in `published.csv`
and on its page) and `qhyer ablate` put beside ours. None is ours, none is guessed. A source's table is here as far
as the code uses it, and an empty cell means that the source prints no number there. Success is in percent, ± the
standard deviation over seeds where the source prints one. Scores of D4RL are normalised by its own references, and
not comparable with ours ([protocol.md](protocol.md#maze2d)).

This page is made by `make published` from `src/qhyer/report/published.py` and `src/qhyer/ablations/`, and a test
holds it to them.
"""


def _decimals(entries: Iterable[Published]) -> int:
    """As the source prints them: with one decimal throughout, or with none."""
    values = [value for entry in entries for value in (entry.mean, entry.std or 0.0)]
    return 0 if all(value == int(value) for value in values) else 1


def _text(mean: float, std: float | None, decimals: int) -> str:
    return f"{mean:.{decimals}f}" + ("" if std is None or math.isnan(std) else f" ± {std:.{decimals}f}")


def _linked(method: str) -> str:
    """A method's name with its card, where it is an agent here."""
    known = {canonical(name): name for name in agents.names()}
    name = known.get(canonical(method))
    return f"[{method}](agents/{name}.md)" if name else method


def _shown(source: str) -> str:
    """The pages whose tables have a source's numbers."""
    pages = {
        "[ogbench.md](ogbench.md)": ogbench.SOURCES,
        "[pointmaze.md](pointmaze.md)": (OGBENCH,),
        "[mazes.md](mazes.md)": (QHYER_D4RL,),
    }
    return ", ".join(page for page, sources in pages.items() if source in sources) or "reports alone"


def _matrix(entries: Sequence[Published]) -> str:
    """Datasets down, methods across, in the source's order."""
    methods, decimals = list(dict.fromkeys(entry.agent for entry in entries)), _decimals(entries)
    cells = {(entry.dataset, entry.agent): _text(entry.mean, entry.std, decimals) for entry in entries}
    body = [
        [dataset, *(cells.get((dataset, method), "") for method in methods)]
        for dataset in dict.fromkeys(entry.dataset for entry in entries)
    ]
    return markdown(["dataset", *map(_linked, methods)], body)


def page() -> str:
    by_source: dict[str, list[Published]] = {}
    for entry in published():
        by_source.setdefault(entry.source, []).append(entry)
    parts = [HEAD, "## Sources\n"]
    listed = [
        [source, "score" if entries[0].measure == SCORE else "success %", _shown(source), str(len(entries))]
        for source, entries in by_source.items()
    ]
    parts.append(markdown(["source", "what", "in the tables of", "numbers"], listed, left=3))
    for source, entries in by_source.items():
        parts += [f"## {source}\n", _matrix(entries)]
    parts += ["## Numbers that differ\n", "Methods for which more than one source has a number on the same dataset.\n"]
    parts.append(_differing(by_source))
    parts += ["## Ablations\n", "QHyer's paper on its variants, beside the tables of `qhyer ablate`.\n", _ablations()]
    return "\n".join(parts)


def _differing(by_source: Mapping[str, Sequence[Published]]) -> str:
    told: dict[tuple[str, str], list[list[str]]] = {}
    for source, entries in by_source.items():
        for entry in entries:
            line = [entry.dataset, entry.agent, source, _text(entry.mean, entry.std, _decimals(entries))]
            told.setdefault((entry.dataset, canonical(entry.agent)), []).append(line)
    body = [line for lines in told.values() if len(lines) > 1 for line in lines]
    return markdown(["dataset", "method", "source", "number"], body, left=3)


def _ablations() -> str:
    """The variant that is the paper's QHyer has its number from the main table."""
    main = {entry.dataset: (entry.mean, entry.std) for entry in published() if (entry.agent, entry.source) == OWN}
    body = []
    for ablation in ablations().values():
        for dataset, numbers in ablation.numbers.items():
            for variant in (name for name in variant_names(ablation) if name in numbers):
                mean, std = numbers[variant]
                source = QHYER if main.get(dataset) == (mean, std) else f"QHyer paper, {ablation.source}"
                body.append([ablation.name, dataset, variant, source, _text(mean, std, 0)])
    return markdown(["ablation", "dataset", "variant", "source", "success %"], body, left=4)


def main(arguments: Sequence[str]) -> None:
    path = Path(arguments[0]) if arguments else PAGE
    write_text(path, page())
    print(f"written: {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
