"""The agents' cards in docs/agents against the configurations they describe."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from qhyer import agents

CARDS = Path(__file__).parents[2] / "docs" / "agents"
NUMBER = r"-?\d[\d,]*\d(?!\d)(?:\.\d+)?(?:e-?\d+)?|-?\d(?:\.\d+)?(?:e-?\d+)?"
WORDS = {("qhyer", "goal_part"): "all", ("rvs", "target_return"): "from the data"}  # words that stand for no value


def options(card: str) -> str:
    text = (CARDS / f"{card}.md").read_text(encoding="utf-8")
    return text.split("\n## Configuration\n")[1].split("\n## ")[0]


def told(card: str) -> dict[str, str]:
    """A card's options -> what stands in brackets behind each: its default."""
    cells = [line.split("|")[1] for line in options(card).splitlines() if line.startswith("| `")]
    return dict(pair for cell in cells for pair in re.findall(r"`(\w+)` \(([^)]*)\)", cell))


def defaults(name: str) -> dict[str, object]:
    return {field.name: field.default for field in dataclasses.fields(agents.load(name).Config)}


def means(text: str, value: object) -> bool:
    """Whether a card's words are this default."""
    text = text.strip("`")
    if value is None or isinstance(value, bool):
        return text == {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, str):
        return text == value
    numbers = [float(part.replace(",", "")) for part in re.findall(NUMBER, text)]
    return numbers == [float(part) for part in (value if isinstance(value, tuple) else (value,))]


@pytest.mark.parametrize("name", agents.names())
def test_a_card_has_the_defaults_of_its_agent(name):
    said, have = told(name), defaults(name)
    assert said and set(said) <= set(have)
    for field, text in said.items():
        assert means(text, have[field]) or WORDS.get((name, field)) == text, f"{field}: {text}, not {have[field]}"


@pytest.mark.parametrize("text, value", [("512, 512", (512, 512)), ("1,000,000", 10**6), ("3e-4", 3e-4), ("-1", -1.0)])
def test_values_are_read_as_they_are_written(text, value):
    assert means(text, value) and not means(text, 0.5)


def test_the_table_of_the_sequence_models_has_their_defaults():
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in options("sequence").splitlines()]
    head = next(line for line in lines if line[0] == "default")
    found = {line[0].lower(): dict(zip(head[1:], line[1:])) for line in lines if len(line) == len(head)}
    names = {name for name in agents.names() if "learning_rate" in defaults(name) and "context" in defaults(name)}
    assert set(found) - {"default", "---"} == names - {"qhyer"}
    for name in names - {"qhyer"}:
        for field, text in found[name].items():
            value = defaults(name).get(field.strip("`"))
            assert means(text, value) if text else value is None, f"{name}, {field}: {text}, not {value}"
