"""docs/published.md is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from qhyer import ablate, sources
from qhyer.report.published import QHYER, published

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / sources.PAGE).read_text(encoding="utf-8")


def tables(section: str) -> list[dict[str, str]]:
    """The lines of a section's table, by the names of its columns, without links."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *body = [
        [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell.strip()) for cell in line[1:-1].split("|")] for line in lines
    ]
    return [dict(zip(head, cells, strict=True)) for cells in body]


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_page_is_made_of_the_code(tmp_path, capsys):
    sources.main([str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == PAGE, "run `make published`"
    assert "page.md" in capsys.readouterr().out


def test_every_number_is_in_its_sources_table_and_no_other():
    """Read back from the page, without the code that wrote it."""
    found = set()
    for line in tables(section("Sources")):
        source = line["source"]
        cells = {
            (row["dataset"], method, source, *(float(part) for part in text.split(" ± ")))
            for row in tables(section(source))
            for method, text in row.items()
            if method != "dataset" and text
        }
        assert int(line["numbers"]) == len(cells)
        found |= cells
    assert found == {
        (entry.dataset, entry.agent, entry.source, entry.mean, *([] if entry.std is None else [entry.std]))
        for entry in published()
    }


def test_numbers_that_differ_and_ablations():
    differing = tables(section("Numbers that differ"))
    pairs = {(line["dataset"], line["method"]) for line in differing}
    assert ("cube-single-play-v0", "SAW") in pairs and len(differing) == 2 * len(pairs)
    shown = tables(section("Ablations"))
    assert len(shown) == sum(len(each) for a in ablate.ablations().values() for each in a.numbers.values())
    by_variant = {(line["ablation"], line["dataset"], line["variant"]): line for line in shown}
    line = by_variant["backbone", "cube-single-play-v0", "mamba"]
    assert line["success %"] == "80 ± 2" and "table of backbones" in line["source"]
    line = by_variant["expectile", "cube-single-play-v0", "expectile=0.99"]
    assert line["success %"] == "84 ± 4" and line["source"] == QHYER  # not of the section on tau


def test_cards_that_are_linked_are_there():
    links = set(re.findall(r"\]\(([\w/]+\.md)", PAGE))
    assert len(links) > 20 and all((ROOT / "docs" / link).is_file() for link in links)
