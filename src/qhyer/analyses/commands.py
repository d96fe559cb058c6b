"""`qhyer analyze`: parse, call, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from qhyer import analyses
from qhyer.errors import UserError
from qhyer.runs import below, resolve_device


def main(args: Sequence[str]) -> int:
    """An analysis of runs takes the options of `analyze`; one that needs no run has its own."""
    if args and not args[0].startswith("-") and not analyses.needs_run(args[0]):
        analysis = analyses.load(args[0])
        path = tyro.cli(analysis.run, args=args[1:], prog=f"qhyer analyze {args[0]}")
        print(f"written: {path} and beside it .csv, .png and .svg")
        return 0
    return tyro.cli(analyze, args=args, prog="qhyer analyze", description=_description(args))


def _description(args: Sequence[str]) -> str:
    name = args[0].replace("-", "_") if args else ""
    if name in analyses.names():
        text = f"{analyses.question(name)}\n\nqhyer analyze {name} RUN...: printed, and written to RUN/analyses/."
        several = f"\nSeveral runs are put side by side in results/analyses/{name}/."
        return text + (several if hasattr(analyses.load(name), "compare") else "")

    def lines(of_runs: bool) -> str:
        names = [name for name in analyses.names() if analyses.needs_run(name) == of_runs]
        shown = [name if of_runs else name.replace("_", "-") for name in names]
        return "".join(f"\n  {title:<19}{analyses.question(name)}" for title, name in zip(shown, names))

    return (
        "Answer one question.\n\n"
        f"Of trained runs (qhyer analyze NAME RUN...), written to RUN/analyses/:{lines(of_runs=True)}\n\n"
        "Without a run (qhyer analyze NAME; --help after NAME for its options), written to results/analyses/NAME/:"
        f"{lines(of_runs=False)}"
    )


def analyze(
    name: str,
    runs: tuple[Path, ...],
    /,
    *,
    device: str = "cpu",
    data: Path | None = None,
    out: Path | None = None,
) -> int:
    """Ask trained runs one question. The answer is printed and written to RUN/analyses/.

    Args:
        name: an analysis of `qhyer list analyses`
        runs: run folders, or folders of runs
        device: cpu, cuda, or auto
        data: an npz to look at instead of the dataset the run was trained on, such as its validation file
        out: folder of the table and figure of several runs side by side, where the analysis makes them (memory);
            results/analyses/NAME when not given
    """
    analysis = analyses.load(name)
    if not analyses.needs_run(name):
        raise UserError(f"{name} looks at no run: qhyer analyze {name}")
    if not runs:
        raise UserError(f"give the run folders to look at: qhyer analyze {name} RUN ...")
    compare = getattr(analysis, "compare", None)
    if out is not None and compare is None:
        raise UserError(f"{name} does not put runs side by side, so --out has no meaning; it writes to RUN/analyses/")
    device = resolve_device(device)
    console = Console(stderr=True, highlight=False)
    print(analyses.question(name))
    answered = []
    runs = tuple(below(*runs))
    for run in runs:
        print(f"\n{run}")
        try:
            path = analysis.run(Path(run), device=device, data=data)
        except UserError as error:
            if len(runs) == 1:
                raise
            console.print(f"skipped: {error}", style="yellow", markup=False, soft_wrap=True)
        else:
            print(f"written: {path}")
            answered.append(Path(run))
    if compare is not None and answered:
        print()
        path = compare(answered, out)
        print(f"written: {path} and beside it .csv, .png and .svg")
    return 0 if len(answered) == len(runs) else 1
