from __future__ import annotations

import html.parser
import re
import subprocess
import sys

import numpy as np
import pytest

from qhyer.report import figures, write_report
from qhyer.report import html as pages
from qhyer.report.collect import collect
from qhyer.report.commands import report as command
from qhyer.report.tables import groups

VOID = {"meta", "img", "source", "br", "path", "circle", "input"}


class Reader(html.parser.HTMLParser):
    """Checks that tags close, and keeps what a browser would load and what a reader would see."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.images = 0

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.note(tag, values)

    def handle_startendtag(self, tag, attrs):
        self.note(tag, dict(attrs))

    def note(self, tag, values):
        self.ids += [values["id"]] if "id" in values else []
        for name in ("src", "href", "srcset", "xlink:href", "data", "poster"):
            if values.get(name) and not values[name].startswith(("#", "data:")):
                self.loads.append(values[name])
        if tag in ("script", "link", "iframe", "object", "base"):
            self.loads.append(tag)
        if tag == "img":
            self.images += 1
            assert values.get("alt")
        if tag == "svg" and values.get("aria-hidden") != "true":
            self.images += 1
            assert values.get("role") == "img" and values.get("aria-label")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += data


def read(path):
    reader = Reader()
    text = path.read_text()
    reader.feed(text)
    assert reader.open == []
    return reader, text


def test_one_page_that_loads_nothing(runs, tmp_path):
    report = write_report([runs], tmp_path / "out")
    reader, text = read(report.page)
    assert reader.loads == [] and "@import" not in text
    assert re.findall(r"https?://", text) == [] and re.findall(r"url\((?!#)", text) == []
    assert len(reader.ids) == len(set(reader.ids))
    for target in re.findall(r'(?:href="|url\()#([\w.-]+)', text):
        assert target in reader.ids
    for words in (
        "qhyer",
        "gcbc",
        "62.5 ± 17.7",
        "50–75",
        "abcdef0123456789",
        "x86_64 CPU",
        "123,456",
        "tau",
    ):
        assert words in reader.text, words
    assert "qhyer train qhyer pointmaze-medium-navigate-v0 --seed 1" in reader.text
    assert reader.images == 6  # bars, maps, density, success over steps, two training curves
    assert "prefers-color-scheme: dark" in text and "<caption>" in text
    # every placeholder colour became a variable, and every variable has both themes
    assert not any(mark in text for mark in figures._placeholders().values())
    assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= {*figures.THEME, "sans", "serif", "mono"}
    assert len(text) < 3_000_000
    names = {path.name for path in report.page.parent.iterdir()}
    assert names == {"index.html", "success.csv", "success.md", "episodes.csv", "published.csv"}


def test_the_same_runs_give_the_same_bytes(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = write_report([runs], tmp_path / "out").page.read_bytes()
    assert write_report([runs], tmp_path / "out").page.read_bytes() == first


def test_names_are_escaped(tmp_path, make_run):
    make_run(tmp_path, "<b>evil", 0, {1: [1, 0]}, name="x", dataset="a&b<script>alert(1)</script>")
    _, text = read(write_report([tmp_path], tmp_path / "out").page)
    assert "<script" not in text and "<b>evil" not in text and "&lt;b&gt;evil" in text


def test_a_damaged_recording_costs_its_picture_only(runs, tmp_path):
    (runs / "qhyer-0" / "rollouts" / "00000200.npz").write_bytes(b"not a zip")
    np.savez(runs / "qhyer-0" / "analyses" / "goal_density.npz", x=np.zeros(3))
    report = write_report([runs], tmp_path / "out")
    reader, _ = read(report.page)
    assert reader.images == 4
    assert any("00000200.npz is damaged" in problem for problem in report.problems)
    assert any("goal_density.npz lacks y" in problem for problem in report.problems)
    assert "00000200.npz is damaged" in reader.text


def test_pickles_are_not_opened(runs, tmp_path):
    path = runs / "qhyer-0" / "rollouts" / "00000200.npz"
    np.savez(path, task=np.array([{}], dtype=object), success=[1], observations=[1], goals=[1])
    report = write_report([runs], tmp_path / "out")
    assert any("damaged" in problem for problem in report.problems)


def test_heavy_pictures_become_png_for_each_theme(runs, monkeypatch):
    group = next(group for group in groups(collect([runs])) if group.agent == "qhyer")
    monkeypatch.setattr(figures, "SVG_LIMIT", 0)
    figure = figures.rollout_maps(group)
    assert figure is not None and figure.markup.count("data:image/png;base64,") == 2
    assert 'media="screen and (prefers-color-scheme: dark)"' in figure.markup and 'alt="' in figure.markup


def test_the_page_stays_small(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "FIGURE_BUDGET", 0)
    report = write_report([runs], tmp_path / "out")
    reader, _ = read(report.page)
    assert reader.images == 1
    assert any("not drawn, to keep the page small" in problem for problem in report.problems)


def test_several_datasets(runs, tmp_path, make_run):
    make_run(runs, "qhyer", 0, {1: [1, 0]}, name="cube", dataset="cube-single-play-v0")
    reader, text = read(write_report([runs], tmp_path / "out").page)
    assert text.count('class="group"') == 2
    assert "cube-single-play-v0" in reader.text and "84 ± 4" in reader.text


def test_agents_keep_their_colours():
    assert figures.agent_variable("qhyer") == "agent-0" != figures.agent_variable("gcbc")
    assert figures.agent_variable("never heard of") == figures.agent_variable("never heard of")


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", [name for name in figures.THEME if name not in ("paper", "panel", "rule", "wall")])
@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_readable_on_their_paper(name, dark):
    text, paper = (luminance(figures.THEME[key][dark]) for key in (name, "paper"))
    contrast = (max(text, paper) + 0.05) / (min(text, paper) + 0.05)
    assert contrast >= (4.5 if name in ("ink", "soft") else 3.0)


def test_command_prints_the_headline(runs, tmp_path, capsys):
    command((runs,), out=tmp_path / "out")
    printed = capsys.readouterr().out
    assert "62.5 ± 17.7" in printed and "gcbc" in printed and "index.html" in printed.replace("\n", "")


def test_reports_need_no_torch():
    code = "import sys, qhyer.report, qhyer.report.commands, qhyer.report.html;sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_drawing_does_not_depend_on_where_objects_lie() -> None:
    one = '<g clip-path="url(#p0123456789)"/><path clip-path="url(#pabcdefabcd)"/><clipPath id="p0123456789">'
    other = one.replace("p0123456789", "pffffffffff").replace("pabcdefabcd", "p0000000000")
    expected = '<g clip-path="url(#p1)"/><path clip-path="url(#p2)"/><clipPath id="p1">'
    assert figures.steady(one) == figures.steady(other) == expected
    assert figures.steady("p0123456789 in the text") == "p0123456789 in the text"
