"""docs/paper_map.md and docs/deviations.md keep their word: what they name exists, and what must be named is."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import qhyer

ROOT = Path(__file__).parent.parent
SOURCE = Path(qhyer.__file__).parent
MAP = (ROOT / "docs" / "paper_map.md").read_text()
DEVIATIONS = (ROOT / "docs" / "deviations.md").read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row, following in zip(cells, [*cells[1:], [""]]) if not _is_rule(row) and not _is_rule(following)]


def _is_rule(row: list[str]) -> bool:
    return all(set(cell) <= {"-"} and cell for cell in row)


ROWS = rows(MAP)


def find(name: str) -> Any:
    """The module, class, function or method with this dotted name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def cited(text: str) -> set[int]:
    """Equation numbers a text cites: Eq. (4) · Eqs. (2), (4) · Eqs. (15) and (10) · Eqs. (6) to (8)."""
    numbers: set[int] = set()
    for match in re.finditer(r"Eqs?\.\s*((?:\(\d+\)(?:\s*(?:,|and|to|,\s*and)\s*(?=\(\d))?)+)", text):
        tokens = re.findall(r"\((\d+)\)|(to)", match[1])
        previous, span = None, False
        for number, word in tokens:
            if word:
                span = True
                continue
            here = int(number)
            numbers |= set(range(previous, here + 1)) if span and previous is not None else {here}
            previous, span = here, False
    return numbers


def test_citations_are_understood():
    assert cited("# Eq. (9): and Eqs. (2), (4): x; Eqs. (15) and (10)") == {9, 2, 4, 15, 10}
    assert cited("Eqs. (6) to (8), in plain PyTorch (13)") == {6, 7, 8}
    assert cited("Eqs. (7), (8), (13).") == {7, 8, 13}


def source_of(item: Any) -> str:
    if isinstance(item, ModuleType):
        return item.__doc__ or ""
    return inspect.getsource(item)


def test_every_equation_has_a_row():
    found = {int(m[1]) for row in ROWS if (m := re.fullmatch(r"Eq\. \((\d+)\)", row[0]))}
    assert found == set(range(1, 16))
    named = {row[0] for row in ROWS}
    assert {"Algorithm 1", "Section 3.2", "Section 3.3", "Appendix"} <= named


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{i}" for i, row in enumerate(ROWS)])
def test_row(row):
    """The code exists and cites what it stands for; the tests exist."""
    label, _, code, tests = row
    names = re.findall(r"`([^`]+)`", code)
    assert names or code == "—"
    for name in names:
        source = source_of(find(name))
        if match := re.fullmatch(r"Eq\. \((\d+)\)", label):
            assert int(match[1]) in cited(source), f"{name} does not cite {label}"
        elif label.startswith(("Section", "Algorithm")):
            assert label in source, f"{name} does not cite {label}"
    tests_named = re.findall(r"`([^`]+)`", tests)
    assert tests_named or tests == "—"
    for test in tests_named:
        path, function = test.split("::")
        tree = ast.parse((ROOT / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_code_cites_no_equation_that_is_not_in_the_map():
    for path in SOURCE.rglob("*.py"):
        if "nn" in path.parts or path.name in ("losses.py", "qhyer.py", "goals.py", "samplers.py"):
            assert cited(path.read_text()) <= set(range(1, 16)), path


def words(text: str) -> str:
    return " ".join(text.replace("\\|", "|").split())


def test_every_mark_is_listed():
    """`# Unspecified in the paper: ...` in the code, its first sentence word for word in deviations.md."""
    marks = []
    for path in sorted(SOURCE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "Unspecified in the paper:" in line:
                sentence = line.split("Unspecified in the paper:", 1)[1].split(". ")[0].strip().rstrip(".")
                marks.append((f"{path.name}:{number}", sentence))
    assert len(marks) >= 3
    missing = [(where, sentence) for where, sentence in marks if words(sentence) not in words(DEVIATIONS)]
    assert not missing, f"add to docs/deviations.md: {missing}"


def test_every_option_beyond_the_paper_is_listed():
    """Fields whose description begins with "beyond the paper"."""
    listed = set(re.findall(r"`(\w+)`", DEVIATIONS.split("## Beyond the paper")[1].split("\n## ")[0]))
    fields = set()
    for module in pkgutil.iter_modules([str(SOURCE / "agents")]):
        tree = ast.parse((SOURCE / "agents" / f"{module.name}.py").read_text())
        for cls in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
            for field, text in zip(cls.body, cls.body[1:]):
                described = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if (
                    isinstance(field, ast.AnnAssign)
                    and described
                    and str(text.value.value).startswith("beyond the paper")
                ):
                    fields.add(ast.unparse(field.target))
    assert fields and fields <= listed, f"add to docs/deviations.md: {sorted(fields - listed)}"


def test_entries_have_a_reason_and_an_effect():
    for section in DEVIATIONS.split("\n## ")[1:]:
        heading = section.splitlines()[0]
        if heading == "Not implemented":
            continue
        for row in rows(section):
            assert all(row), f"{heading}: an empty cell in {row[0]}"
            assert len(row) == (5 if heading == "Where the paper contradicts itself" else 4), row[0]


def test_files_the_code_points_to_exist():
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"docs/[\w/]+\.md", path.read_text()):
            assert (ROOT / name).is_file(), f"{path} points to {name}"
