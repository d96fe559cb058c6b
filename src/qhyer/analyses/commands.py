"""`qhyer analyze`: parse, call, print."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from qhyer import analyses
from qhyer.errors import UserError
from qhyer.runs import resolve_device


def analyze(name: str, runs: tuple[Path, ...], /, *, device: str = "cpu", data: Path | None = None) -> int:
    """Ask trained runs one question. The answer is printed and written to RUN/analyses/.

    Args:
        name: an analysis of `qhyer list analyses`
        runs: run folders
        device: cpu, cuda, or auto
        data: an npz to look at instead of the dataset the run was trained on, such as its validation file
    """
    analysis = analyses.load(name)
    if not runs:
        raise UserError(f"give the run folders to look at: qhyer analyze {name} RUN ...")
    device = resolve_device(device)
    console = Console(stderr=True, highlight=False)
    print(analyses.question(name))
    failed = 0
    for run in runs:
        print(f"\n{run}")
        try:
            path = analysis.run(Path(run), device=device, data=data)
        except UserError as error:
            if len(runs) == 1:
                raise
            console.print(f"skipped: {error}", style="yellow", markup=False, soft_wrap=True)
            failed += 1
        else:
            print(f"written: {path}")
    return 1 if failed else 0
