"""One page that carries everything it shows: no script, no font, no picture is loaded from anywhere."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import qhyer
from qhyer.errors import UserError
from qhyer.report import figures
from qhyer.report.collect import Run, Table
from qhyer.report.compare import (
    ABOVE,
    AGREES,
    BELOW,
    NO_NUMBER,
    NOT_RUN,
    OTHER_SCALE,
    Comparison,
    difference_text,
    ours_text,
    published_text,
    tally,
)
from qhyer.report.published import SCORE
from qhyer.report.reproduce import commands
from qhyer.report.statistics import RESAMPLES
from qhyer.report.suite import Account, Part, Suite
from qhyer.report.tables import (
    OVERALL,
    SCORE_NOTE,
    Group,
    SuccessRow,
    all_scored,
    best,
    between,
    has_scores,
    identity,
    label,
    number,
    overall_cells,
    overall_heads,
    ranked,
    wide,
)

T = TypeVar("T")

FIGURE_BUDGET = 2_400_000  # bytes of pictures in a page; what comes after is named, not drawn

CSS = """
:root { color-scheme: light dark; LIGHT
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, "Source Serif 4", Georgia, serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Code", Menlo, Consolas, monospace; }
@media (prefers-color-scheme: dark) { :root { DARK } }
@media print { :root { LIGHT } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.6 var(--sans); }
main, header, footer { max-width: 68rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 3.5rem; padding-bottom: .5rem; }
h1, h2, h3 { font-family: var(--serif); font-weight: 600; line-height: 1.2; text-wrap: balance;
  overflow-wrap: anywhere; }
h1 { font-size: clamp(1.75rem, 1.2rem + 2.4vw, 2.6rem); margin: 0 0 .5rem; letter-spacing: -.012em; }
h2 { font-size: clamp(1.35rem, 1.1rem + 1vw, 1.65rem); margin: 3.5rem 0 .75rem; padding-top: 1.1rem;
  border-top: 1px solid var(--rule); }
h3 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .6rem 0; max-width: 44rem; }
.lead { color: var(--soft); font-size: 1.05rem; }
.small { color: var(--soft); font-size: .88rem; max-width: 44rem; }
ol.small { padding-left: 1.4rem; }
a { color: var(--good); text-underline-offset: .18em; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; margin: 1rem 0 0;
  font-size: .92rem; }
.scroll { overflow-x: auto; margin: 1rem 0 .4rem; border: 1px solid var(--rule); border-radius: .5rem;
  -webkit-overflow-scrolling: touch; }
.scroll:focus-visible { outline: 2px solid var(--good); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; font-variant-numeric: tabular-nums; }
caption { caption-side: top; text-align: left; padding: .7rem .9rem; color: var(--soft); font-size: .88rem; }
th, td { padding: .42rem .9rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--rule); }
thead th { color: var(--soft); font-weight: 500; font-size: .85rem; border-top: 1px solid var(--rule); }
caption span { position: sticky; left: .9rem; display: inline-block; max-width: calc(100vw - 4.5rem); }
tbody th { font-weight: 500; }
tbody th[scope=row] { position: sticky; left: 0; background: var(--paper); }
th.t, td.t { text-align: left; }
sup { font-size: .68em; color: var(--soft); margin-left: .15em; line-height: 0; }
tr.group th { text-align: left; background: var(--panel); color: var(--ink); font-weight: 600;
  padding-top: .6rem; }
.dot { display: inline-block; width: .68em; height: .68em; border-radius: 50%; margin-right: .55em; }
.best { font-weight: 700; }
.best::after { content: " ★"; font-size: .72em; vertical-align: .15em; color: var(--agent-4); }
.task { color: var(--soft); }
.task.best { color: var(--ink); }
.quiet, .quiet th { color: var(--soft); }
.above { color: var(--good); } .below { color: var(--bad); }
.tag { font-weight: 600; }
figure { margin: 1.25rem 0 2rem; }
figure .scroll { border: 0; border-radius: 0; margin: 0; }
figure .scroll > * { display: block; }
figure svg, figure img { width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .88rem; max-width: 44rem; margin-top: .35rem; }
.key { color: var(--soft); font-size: .88rem; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem;
  max-width: none; }
.key span { white-space: nowrap; }
.key svg { vertical-align: -.15em; margin-right: .45em; }
details { border: 1px solid var(--rule); border-radius: .5rem; margin: .6rem 0; }
summary { cursor: pointer; padding: .6rem .9rem; overflow-wrap: anywhere; }
summary:focus-visible { outline: 2px solid var(--good); }
details[open] > summary { border-bottom: 1px solid var(--rule); }
details > .inside { padding: .4rem .9rem .9rem; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .25rem 1.25rem;
  margin: .6rem 0; font-size: .93rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code, pre { font-family: var(--mono); font-size: .86rem; }
pre { background: var(--panel); border-radius: .5rem; padding: .8rem 1rem; overflow-x: auto; margin: .6rem 0;
  line-height: 1.5; }
.note { border-left: 3px solid var(--bad); background: var(--panel); padding: .6rem 1rem; margin: 1.25rem 0;
  border-radius: 0 .5rem .5rem 0; }
.note p { font-weight: 600; } .note ul { margin: .3rem 0; padding-left: 1.1rem; overflow-wrap: anywhere; }
ul.plain { padding-left: 1.1rem; max-width: 44rem; } ul.plain li { margin: .35rem 0; }
footer { color: var(--soft); font-size: .88rem; padding-top: 3rem; padding-bottom: 3rem; }
@media (max-width: 40rem) {
  main, header, footer { padding-left: 1rem; padding-right: 1rem; }
  header { padding-top: 2rem; } th, td { padding-left: .65rem; padding-right: .65rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
@media print {
  body { font-size: 10pt; } p { max-width: none; }
  table { font-size: 8pt; } th, td { padding: .2rem .4rem; }
  thead th { font-size: 7.5pt; white-space: normal; }
  caption span { max-width: none; } main, header, footer { max-width: none; padding: 0; }
  .scroll { overflow: visible; } figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  figure .scroll > * { min-width: 0 !important; } nav { display: none; } pre { white-space: pre-wrap; } }
"""


def escape(text: object) -> str:
    return html.escape(str(text))


def _table(caption: str, head: str, body: str) -> str:
    """A table in its own scrolling box; the box takes focus, so that it scrolls by keyboard."""
    name = html.escape(caption, quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead>{head}</thead>{body}</table></div>"
    )


def _dot(agent: str) -> str:
    colour = f"var(--{figures.agent_variable(agent)})"
    return f'<span class="dot" style="background:{colour}" aria-hidden="true"></span>'


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def anchor(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())


def _headline(rows: Sequence[SuccessRow]) -> str:
    """The answer first: one line for each agent, grouped by dataset."""
    marked = best(rows)
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    several = len(datasets) > 1
    scored = has_scores(rows)
    columns = ["agent", "preset", "seeds", *overall_heads(scored), "episodes", "step"]
    heads = [f'<th scope="col"{" class=t" if i < 2 else ""}>{name}</th>' for i, name in enumerate(columns)]
    if not several:
        heads += [f'<th scope="col">task {escape(task)}</th>' for task in wide(rows, datasets[0])[0]]
    body = ""
    for dataset in datasets:
        lines = ""
        if several:
            lines += f'<tr class="group"><th colspan="{len(heads)}" scope="rowgroup">{escape(dataset)}</th></tr>'
        for cells in ranked(rows, dataset)[1]:
            row = cells[0]
            assert row is not None
            shown = overall_cells(row, scored, identity(row) in marked)
            lines += (
                f'<tr><th scope="row" class="t">{_dot(row.agent)}{escape(label(row))}</th>'
                f'<td class="t">{escape(row.preset)}</td><td>{row.seeds}</td>'
                + "".join(f"<td{' class=best' if strong else ''}>{text}</td>" for text, strong in shown)
                + f"<td>{row.episodes:,}</td><td>{escape(_steps(row.step))}</td>"
            )
            for cell in cells[1:] if not several else []:
                top = " best" if cell is not None and identity(cell) in marked else ""
                lines += f'<td class="task{top}">{number(cell.mean) if cell else ""}</td>'
            lines += "</tr>"
        body += f"<tbody>{lines}</tbody>"
    star = (
        f" ★ marks the highest mean{' (score, where there is one)' if scored else ''} of a dataset."
        if len(rows) > 1 and marked
        else ""
    )
    caption = f"Success at the last evaluation; ± is the standard deviation over seeds.{star}"
    caption += f" {SCORE_NOTE}" if scored else ""
    return _table(caption, f"<tr>{''.join(heads)}</tr>", body)


def _steps(text: str) -> str:
    return "–".join(f"{int(part):,}" for part in text.split("–")) if text else ""


def _per_task(rows: Sequence[SuccessRow], dataset: str) -> str:
    """Task by task, with intervals: what the bars show, in numbers."""
    marked = best(rows)
    tasks, lines = ranked(rows, dataset)
    head = '<tr><th scope="col" class="t">agent</th>'
    head += "".join(f'<th scope="col">task {escape(task)}</th>' for task in tasks) + "</tr>"
    body = ""
    for cells in lines:
        row = cells[0]
        assert row is not None
        body += f'<tr><th scope="row" class="t">{_dot(row.agent)}{escape(label(row))}'
        body += f' <span class="task">{escape(row.preset)}</span></th>'
        for cell in cells[1:]:
            if cell is None:
                body += "<td></td>"
                continue
            strong = ' class="best"' if identity(cell) in marked else ""
            body += f"<td><span{strong}>{number(cell.mean)}</span> "
            body += f'<span class="task">({between(cell)})</span></td>'
        body += "</tr>"
    return _table("Success % for each task, with its 95 % interval.", head, f"<tbody>{body}</tbody>")


def _comparison(lines: Sequence[Comparison]) -> str:
    scored = lines[0].measure == SCORE
    unit = "" if scored else " %"
    columns = [
        "agent",
        f"published{unit}",
        f"ours{unit} (interval)",
        "seeds",
        "step",
        "difference",
        "verdict",
    ]
    text = {0, 6}
    sources = list(dict.fromkeys(line.source for line in lines if line.source))
    head = "".join(f'<th scope="col"{" class=t" if i in text else ""}>{name}</th>' for i, name in enumerate(columns))
    body = ""
    shown = [line for line in lines if line.verdict != NO_NUMBER]
    for line in shown:
        name = f"{line.agent} ({line.variant})" if line.variant else line.agent
        name += f" {line.preset}" if line.preset else ""
        quiet = ' class="quiet"' if line.verdict == NOT_RUN else ""
        mark = f"<sup>{sources.index(line.source) + 1}</sup>" if line.source else ""
        tone = {ABOVE: " above", BELOW: " below"}.get(line.verdict, "")
        body += (
            f'<tr{quiet}><th scope="row" class="t">{escape(name)}</th><td>{published_text(line)}{mark}</td>'
            f"<td>{ours_text(line)}</td><td>{line.seeds or ''}</td><td>{_steps(line.step)}</td>"
            f'<td>{difference_text(line)}</td><td class="t tag{tone}">{escape(line.verdict)}</td></tr>'
        )
    counts = tally(lines)
    compared = sum(counts.values())
    summary = (
        f"Of {_plural(compared, 'comparison')}: {counts[ABOVE]} above the published mean, {counts[AGREES]} "
        f"in agreement with it (it lies in our interval), {counts[BELOW]} below."
        if compared
        else "None of the agents run here has a published number on this dataset."
    )
    beside = sum(line.verdict == OTHER_SCALE for line in lines)
    if beside:
        summary = f"{_plural(beside, 'published score')} beside ours, on another scale."
    partly = sum(bool(line.partial) and line.verdict == line.partial for line in lines)
    if partly:
        summary = summary if compared else ""
        summary += f" {_plural(partly, 'comparison')} without a verdict: not all tasks were evaluated in each run."
    unknown = list(dict.fromkeys(line.agent for line in lines if line.verdict == NO_NUMBER))
    if unknown and (compared or beside or partly):
        summary += f" No published number is known here for {', '.join(map(escape, unknown))}."
    return (
        f"<p>{summary.strip()}</p>"
        + _table(
            f"Published {'scores' if scored else 'success'} against ours; the small number names the source.",
            f"<tr>{head}</tr>",
            f"<tbody>{body}</tbody>",
        )
        + f"<ol class=small>{''.join(f'<li>{escape(source)}</li>' for source in sources)}</ol>"
    )


def _part(part: Part) -> str:
    """A table of plain cells."""
    kinds = [" class=t" if i < part.left else "" for i in range(len(part.header))]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, part.header))
    body = ""
    for first, *rest in part.body:
        body += f'<tr><th scope="row" class="t">{escape(first)}</th>'
        for kind, cell in zip(kinds[1:], rest):
            body += f"<td{' class=quiet' if cell == NOT_RUN else kind}>{escape(cell)}</td>"
        body += "</tr>"
    return _table(part.caption, f"<tr>{head}</tr>", f"<tbody>{body}</tbody>")


def _suite(suite: Suite, account: Account) -> str:
    return (
        f'<section id="{suite.name}"><h2>{escape(suite.title)}</h2>'
        + "".join(map(_part, account.parts))
        + "".join(f"<p class=small>{escape(note)}</p>" for note in account.notes)
        + "</section>"
    )


class _Pictures:
    """Draws within the page's budget; a picture that cannot be drawn becomes a sentence."""

    def __init__(self) -> None:
        self.spent = 0
        self.problems: list[str] = []

    def __call__(self, draw: Callable[[T], figures.Figure | None], about: T, name: str, heading: str = "") -> str:
        if self.spent > FIGURE_BUDGET:
            self.problems.append(f"{name} is not drawn, to keep the page small; report fewer runs to see it")
            return ""
        try:
            figure = draw(about)
        except UserError as error:
            self.problems.append(str(error))
            return ""
        except (ValueError, IndexError, KeyError, TypeError) as error:
            self.problems.append(f"{name} could not be drawn ({error}); its recording has an unexpected shape")
            return ""
        if figure is None:
            return ""
        self.spent += figure.size
        # Below this width the text would be too small to read: the box scrolls instead.
        least = min(figure.width, max(300, round(figure.width * 0.78)))
        box = (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
            f'<div style="min-width:{least}px;max-width:{figure.width + 60}px">{figure.markup}</div></div>'
        )
        caption = f"<figcaption>{heading}{escape(figure.caption)}</figcaption>"
        # A row of maps is named above, like a row of a table; a picture is explained below.
        return f"<figure>{caption + box if heading else box + caption}</figure>"


MAP_KEY = """<p class="key" aria-label="Key">
<span><svg width="26" height="10" aria-hidden="true"><path d="M0 5h26" stroke="var(--good)" stroke-width="2.2"
/></svg>reached the goal</span>
<span><svg width="26" height="10" aria-hidden="true"><path d="M0 5h26" stroke="var(--bad)" stroke-width="2.2"
stroke-dasharray="6 2.5"/></svg>did not</span>
<span><svg width="12" height="12" aria-hidden="true"><circle cx="6" cy="6" r="4" fill="var(--paper)"
stroke="var(--ink)" stroke-width="1.3"/></svg>start</span>
<span>★ goal</span></p>"""


def _dataset(
    dataset: str,
    title: str,
    found: Sequence[Group],
    rows: Sequence[SuccessRow],
    lines: Sequence[Comparison],
    pictures: _Pictures,
) -> str:
    part = f'<section id="{anchor(dataset)}"><h2>{escape(title)}</h2>'
    scored = all_scored(row for row in rows if row.dataset == dataset)
    part += pictures(figures.success_bars, found, f"{'Scores' if scored else 'Success for each task'} on {dataset}")
    if any(row.dataset == dataset and row.task != OVERALL for row in rows):
        part += f"<details><summary>{'Success' if scored else 'The same'} in numbers</summary><div class=inside>"
        part += _per_task(rows, dataset) + "</div></details>"
    if lines:
        part += "<h3>Published against ours</h3>" + _comparison(lines)
        part += (
            "<p class=small>The published scores are D4RL's: normalised by its references, in its environment, on its "
            "data. Ours are normalised by references measured here (docs/protocol.md). Each scale ranks agents; their "
            "numbers cannot be subtracted.</p>"
            if lines[0].measure == SCORE
            else "<p class=small>Published numbers come from full-length training on the "
            "published dataset, and OGBench averages the last three evaluations. Ours are the last "
            "evaluation of the runs listed below, with the steps and data given there.</p>"
        )
    maps = "".join(
        pictures(figures.rollout_maps, group, f"Rollouts of {group.label} on {dataset}", _dot(group.agent))
        for group in found
    )
    if maps:
        part += f"<h3>Where the policies go</h3>{MAP_KEY}{maps}"
        part += f"<p class=small>Up to {figures.ROLLOUTS} recorded rollouts for each task. The percentage "
        part += "above a map is the success over all evaluation episodes of all seeds.</p>"
    density = "".join(
        pictures(figures.density_maps, group, f"Goal density of {group.label} on {dataset}") for group in found
    )
    if density:
        part += f"<h3>What the critic believes</h3>{density}"
    over = pictures(figures.success_over_steps, found, f"Success over steps on {dataset}")
    curves = [
        (
            group,
            pictures(figures.learning_curves, group, f"Training curves of {group.label}"),
        )
        for group in found
    ]
    curves = [(group, markup) for group, markup in curves if markup]
    if over or curves:
        part += f"<h3>Training</h3>{over}"
        for group, markup in curves:
            opened = " open" if len(curves) == 1 else ""
            part += f"<details{opened}><summary>{_dot(group.agent)}Training curves of {escape(group.label)}"
            part += f'</summary><div class="inside">{markup}</div></details>'
    return part + "</section>"


def _ranked(found: Sequence[Group], rows: Sequence[SuccessRow], dataset: str) -> list[Group]:
    """Sections list agents as the headline does, the best first; without an evaluation, last."""
    order = [(row.agent, row.preset, row.variant) for row, *_ in ranked(rows, dataset)[1] if row]
    places = {key: place for place, key in enumerate(order)}
    return sorted(found, key=lambda group: places.get((group.agent, group.preset, group.variant), len(places)))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _details(run: Run) -> str:
    info = run.info
    data = info.get("data") if isinstance(info.get("data"), Mapping) else {}
    versions = info.get("versions") if isinstance(info.get("versions"), Mapping) else {}
    assert isinstance(data, Mapping) and isinstance(versions, Mapping)
    entries: list[tuple[str, str]] = []

    def add(name: str, value: Any, code: bool = False) -> None:
        if value not in (None, "", {}):
            entries.append((name, f"<code>{escape(value)}</code>" if code else escape(value)))

    add("command", info.get("command"), code=True)
    add("environment", info.get("environment"))
    add("evaluated in", run.elsewhere)
    size = [f"{data[name]:,} {name}" for name in ("episodes", "transitions") if isinstance(data.get(name), int)]
    add("data", ", ".join(size))
    add("fingerprint", data.get("fingerprint"), code=True)
    parameters = info.get("parameters")
    add("parameters", f"{parameters:,}" if isinstance(parameters, int) else parameters)
    add("training time", _duration(run.seconds) if run.seconds is not None else None)
    if run.episodes:
        add("evaluation", _plural(len(run.episodes), "episode") + _at_steps(run))
    add("hardware", info.get("hardware"))
    add("versions", ", ".join(f"{name} {value}" for name, value in versions.items()))
    if not info:
        add("source", f"rows of {run.path.name}; no run.json came with them")
    listing = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in entries)
    blocks = ""
    for name in ("config", "train"):
        if info.get(name):
            text = escape(json.dumps(info[name], indent=1, ensure_ascii=False))
            blocks += f"<details><summary>{name}</summary><pre>{text}</pre></details>"
    title = f"{_dot(run.agent)}<strong>{escape(run.agent)}</strong> {escape(run.preset)} "
    title += f'on {escape(run.dataset)}, seed {run.seed} <span class="task">{escape(run.name)}</span>'
    return f"<details><summary>{title}</summary><div class=inside><dl>{listing}</dl>{blocks}</div></details>"


def _at_steps(run: Run) -> str:
    shown = ", ".join(f"{step:,}" for step in run.steps[-4:])
    more = "…, " if len(run.steps) > 4 else ""
    return f", at step {more}{shown}"


def _reproduce(table: Table, sources: Sequence[Path], out: Path) -> str:
    lines, notes = commands(table, sources, out)
    known = "".join(f" {escape(note)}" for note in notes)
    return (
        "<p>These commands, one after the other in a folder that has the data, train the runs, evaluate them and write "
        "this page again; the same seed on the same versions "
        f"gives the same rows.{known}</p><pre><code>{escape(chr(10).join(lines))}</code></pre>"
    )


def _statistics(rows: Sequence[SuccessRow]) -> str:
    kinds = {row.interval for row in rows}
    notes = [
        "<strong>Success.</strong> An evaluation runs a fixed number of episodes for each task. A run's "
        "score is the mean of its task means at its last evaluated step.",
        "<strong>±</strong> is the sample standard deviation over seeds (n − 1). One seed has none.",
    ]
    if "wilson" in kinds:
        notes.append(
            "<strong>Interval with one seed.</strong> Wilson's 95 % score interval over the episodes. It "
            "says how well this one policy was measured, not how another seed would do."
        )
    if "bootstrap" in kinds:
        notes.append(
            "<strong>Interval with several seeds.</strong> A 95 % percentile bootstrap of the mean "
            f"({RESAMPLES:,} resamples, fixed generator): seeds are drawn with replacement, each with "
            "all its tasks. With fewer than about five seeds it is too narrow, with two or three no more than their "
            "range. Where all seeds scored "
            "alike, Wilson's stands in."
        )
    if has_scores(rows):
        notes.append(
            f"<strong>Score.</strong> {escape(SCORE_NOTE)} Its interval is a bootstrap over seeds, or of one seed over "
            "its episodes. Where there are scores, agents are ranked by them."
        )
    notes.append(
        "<strong>Files.</strong> <code>success.csv</code> has every row with mean, std, interval and "
        "interquartile mean; <code>episodes.csv</code> has every episode these numbers come from."
    )
    return f"<ul class=plain>{''.join(f'<li>{note}</li>' for note in notes)}</ul>"


def page(
    table: Table,
    found: Sequence[Group],
    rows: Sequence[SuccessRow],
    lines: Sequence[Comparison],
    suites: Sequence[tuple[Suite, Account]],
    notes: Sequence[str],
    sources: Sequence[Path],
    out: Path,
) -> tuple[str, list[str]]:
    """The page, and the problems met while drawing it."""
    datasets = list(dict.fromkeys(group.dataset for group in found))
    pictures = _Pictures()
    sections = "".join(
        _dataset(
            dataset,
            dataset if len(datasets) > 1 else "Task by task",
            _ranked([group for group in found if group.dataset == dataset], rows, dataset),
            rows,
            [line for line in lines if line.dataset == dataset],
            pictures,
        )
        for dataset in datasets
    )
    word = "Scores" if all_scored(rows) else "Success"
    title = f"{word} on {datasets[0]}" if len(datasets) == 1 else f"{word} by dataset and agent"
    agents = len({group.agent for group in found})
    lead = ", ".join(
        [
            _plural(agents, "agent"),
            _plural(len(datasets), "dataset"),
            _plural(len(table.runs), "run"),
            _plural(len(table.episodes), "evaluation episode"),
        ]
    )
    problems = [*table.problems, *notes, *pictures.problems]
    warning = ""
    if problems:
        items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
        warning = f'<aside class="note"><p>Before you compare</p><ul>{items}</ul></aside>'
    against = "".join(_suite(suite, account) for suite, account in suites)
    links = [*((anchor(dataset), dataset) for dataset in datasets)] if len(datasets) > 1 else []
    links = [*((suite.name, suite.title) for suite, _ in suites), *links]
    links += [("runs", "Runs"), ("reproduce", "Reproduce"), ("statistics", "How to read the numbers")]
    nav = "".join(f'<li><a href="#{target}">{escape(name)}</a></li>' for target, name in links)
    css = CSS.replace("LIGHT", figures.theme_css(dark=False)).replace("DARK", figures.theme_css(dark=True))
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{css}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="lead">{lead}</p>
<nav aria-label="Contents"><ul>{nav}</ul></nav>
</header>
<main>
<section aria-label="Results">
{_headline(rows)}
{warning}
</section>
{against}
{sections}
<section id="runs"><h2>Runs</h2>{"".join(_details(run) for run in table.runs)}</section>
<section id="reproduce"><h2>Reproduce</h2>{_reproduce(table, sources, out)}</section>
<section id="statistics"><h2>How to read the numbers</h2>{_statistics(rows)}</section>
</main>
<footer>Written by qhyer {escape(qhyer.__version__)}.</footer>
</body>
</html>
"""
    return text, pictures.problems
