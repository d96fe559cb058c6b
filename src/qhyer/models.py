"""Exported models: a trained policy in a folder small enough to pass on, with all that acting needs and nothing more.

MODEL/model.safetensors   the weights that acting reads (`Agent.acting_state`)
      model.json          sealed: agent, configuration, data, updates, seed, versions, scores, SHA-256 of the weights
      README.md           the card: the same, for people

Models are never written to after export: evaluations and pictures of them go to runs/eval-NAME.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qhyer import agents, runs
from qhyer.agent import Agent, AgentConfig
from qhyer.checkpoint import write_tensors
from qhyer.config import from_dict, to_dict
from qhyer.data.bounds import told
from qhyer.data.episodes import DataSpec
from qhyer.errors import CorruptFile, UserError, did_you_mean
from qhyer.evaluate import EvalConfig, success_rate
from qhyer.manifest import field_and_value, overridden
from qhyer.policy import Policy
from qhyer.records import EpisodeRow, read_rows
from qhyer.storage import atomic_directory, read_sealed_json, sha256_file, write_json, write_sealed_json

FORMAT = 1
WEIGHTS, ABOUT, CARD = "model.safetensors", "model.json", "README.md"
SMALL = 32  # a matrix with fewer rows or columns stays in float32: it costs little, and heads are of that kind
MAX_MB = 16.0
OF_ITS_RUN = (
    *("agent", "preset", "dataset", "seed", "config", "train", "spec", "data", "versions", "command", "hardware"),
    "parameters",
)

Dtype = Literal["bf16", "fp32"]


# --------------------------------------------------------------------------------------------------------- export


def export(
    run: Path,
    out: Path | None = None,
    *,
    step: int | None = None,
    dtype: Dtype = "bf16",
    override: Sequence[str] = (),
    overwrite: bool = False,
) -> Path:
    """Writes a run's policy as a model -> its folder. `out`: models/DATASET when None.

    `override`: FIELD=VALUE of what acting alone reads (`AgentConfig.acting_alone`); the run's scores are then not the
    model's, and are left out.

    With bf16 the large matrices are rounded; biases, norms, normalisers, small matrices and all else stay float32.
    """
    info = runs.read(run)
    out = Path("models") / _short(info["dataset"]) if out is None else Path(out)
    if out.exists() and not (out / ABOUT).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is there and is not a model; give another folder with --out")
    if (out / ABOUT).is_file() and not overwrite:
        raise UserError(f"{out} holds a model already; --overwrite replaces it, --out names another folder")
    agent, updates = runs.load_agent(run, step)
    if override:
        as_it_was, agent = agent, _acting_otherwise(agent, override, info)
        override = [text for text in override if _differ(agent.config, as_it_was.config, field_and_value(text)[0])]
    state = {name: _stored(name, value, dtype) for name, value in agent.acting_state().items()}
    with atomic_directory(out) as folder:
        write_tensors(folder / WEIGHTS, state)
        weights = folder / WEIGHTS
        about = {
            "format": FORMAT,
            **{key: info.get(key) for key in ("agent", "preset", "dataset", "environment", "seed")},
            "updates": updates,
            "config": to_dict(agent.config) if override else info["config"],
            **({"override": list(override)} if override else {}),
            "train": info.get("train"),
            "spec": info["spec"],
            "data": {k: v for k, v in (info.get("data") or {}).items() if k not in ("path", "file")},
            "versions": info.get("versions"),
            "command": _portable(info.get("command")),
            "hardware": info.get("hardware"),
            "parameters": sum(value.numel() for value in state.values()),
            "dtype": dtype,
            "weights": {"sha256": sha256_file(weights), "bytes": weights.stat().st_size},
            "scores": None if override else scores(read_rows(Path(run) / "episodes.csv"), updates),
        }
        write_sealed_json(folder / ABOUT, about)
        (folder / CARD).write_text(card(out.resolve().name, about), encoding="utf-8")
    return out


def _acting_otherwise(agent: Agent, override: Sequence[str], info: Mapping[str, Any]) -> Agent:
    """The same weights with another configuration, of which they know nothing."""
    name, free, why = str(info["agent"]), agent.config.acting_alone, agent.config.unread
    if not free:
        raise UserError(f"--override {' '.join(override)}: {name} has no field that acting alone reads: leave it out")
    read = [field for field in free if field not in why]
    there = f"what can be changed: {', '.join(read)}" if read else "nothing of this policy can be changed"
    example = _example(agent.config, read[0]) if read else ""
    for text in override:
        if "=" not in text[1:]:
            such = f"such as {example}; {there}" if read else there
            raise UserError(f"--override {text}: write FIELD=VALUE, {such}")
    config = overridden(agent.config, override, name)
    trained = [field for field, _ in map(field_and_value, override) if field not in free]
    if trained:
        raise UserError(f"--override {', '.join(trained)}: training reads it, so it cannot be changed now ({there})")
    for text in override:
        field, _ = field_and_value(text)
        if field in why and _differ(config, agent.config, field):
            raise UserError(f"--override {text}: this policy does not read it ({why[field]}): leave it out ({there})")
    other = runs.build_agent(name, config, agent.spec, info["seed"])
    other.load_state_dict(agent.state_dict())
    return other.eval()


def _differ(config: AgentConfig, other: AgentConfig, field: str) -> bool:
    return getattr(config, field) != getattr(other, field)


def _example(config: AgentConfig, field: str) -> str:
    """FIELD=VALUE with another value than it has."""
    value, words = getattr(config, field), typing.get_args(typing.get_type_hints(type(config))[field])
    return f"{field}={next(word for word in words if word != value) if words else 2 * value}"


def _short(dataset: str) -> str:
    return dataset.removesuffix("-v0")


def _stored(name: str, value: Tensor, dtype: Dtype) -> Tensor:
    value = value.detach().cpu().contiguous().clone()
    large = value.is_floating_point() and value.ndim >= 2 and min(value.shape[-2:]) >= SMALL
    return value.to(torch.bfloat16) if dtype == "bf16" and large and name.endswith("weight") else value


def _portable(command: str | None) -> str | None:
    """The command without anybody's folders: of an absolute path, the last part."""
    if command is None:
        return None
    words = []
    for word in shlex.split(command):
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        words.append(option + equals + (Path(value).name if value.startswith("/") else value))
    return shlex.join(words)


def scores(rows: list[EpisodeRow], step: int) -> dict[str, Any] | None:
    """Success of these updates' evaluation: mean over tasks, and each task's with its episodes; None without one. It
    names the environment where that is not the run's own."""
    tasks: dict[str, dict[str, Any]] = {}
    for number in sorted({row.task for row in rows if row.step == step}):
        successes = [row.success for row in rows if row.step == step and row.task == number]
        tasks[str(number)] = {"success": sum(successes) / len(successes), "episodes": len(successes)}
    if not tasks:
        return None
    elsewhere = next((row.environment for row in rows if row.step == step), "")
    mean = sum(task["success"] for task in tasks.values()) / len(tasks)
    return {"mean": mean, "tasks": tasks, **({"environment": elsewhere} if elsewhere else {})}


def megabytes(about: Mapping[str, Any]) -> float:
    return about["weights"]["bytes"] / 1e6


def size_text(about: Mapping[str, Any]) -> str:
    size = megabytes(about)
    return f"{size:.1f} MB" if size >= 0.9995 else f"{1e3 * size:.0f} kB"


def card(name: str, about: Mapping[str, Any]) -> str:
    """The model's README, from what model.json says."""
    data, found = about["data"], about["scores"]
    ends = from_dict(DataSpec, about["spec"]).action_bounds
    rounded = about["dtype"] == "bf16"
    lines = [
        f"# {name}",
        "",
        f"A policy of `{about['agent']}` (preset `{about['preset']}`), trained on {about['dataset']}.",
        "",
        "| | |",
        "|---|---|",
        f"| data | {about['dataset']}"
        + (f", {data['episodes']} episodes, {data['transitions']} transitions" if "transitions" in data else "")
        + " |",
        f"| fingerprint of the data | `{data.get('fingerprint', 'unknown')}` |",
        f"| training | {about['updates']} updates, seed {about['seed']}"
        + (f", {about['hardware']}" if about["hardware"] else "")
        + " |",
        f"| weights | {about['parameters']:,} numbers that acting reads, {about['dtype']}, {size_text(about)} |",
        f"| SHA-256 of {WEIGHTS} | `{about['weights']['sha256']}` |",
        "| versions | " + ", ".join(f"{k} {v}" for k, v in (about["versions"] or {}).items()) + " |",
        *([f"| actions | in the units of the data, by column: {told(*ends)} |"] if ends else []),
        "",
    ]
    if about.get("override"):
        lines += [f"It acts with {', '.join(f'`{each}`' for each in about['override'])}, otherwise than the run.", ""]
    if about["command"]:
        lines += ["Trained with:", "", "```sh", about["command"], "```", ""]
    lines += ["## Scores", ""]
    if found:
        lines += [
            "| task | success % | episodes |",
            "|---|---:|---:|",
            *(
                f"| {number} | {100 * task['success']:.1f} | {task['episodes']} |"
                for number, task in found["tasks"].items()
            ),
            f"| **mean over tasks** | **{100 * found['mean']:.1f}** |"
            f" {sum(task['episodes'] for task in found['tasks'].values())} |",
            "",
            "One training seed, final success, deterministic policy (docs/protocol.md)."
            + (f" Measured in {found['environment']}." if "environment" in found else "")
            + (" Measured with the run's float32 weights, before they were rounded to bf16." if rounded else ""),
        ]
    elif about.get("override"):
        lines += ["Not evaluated: the run's scores are of another way of acting."]
    else:
        lines += ["The run had not been evaluated when it was exported."]
    environment = "" if about["environment"] else " --env ENVIRONMENT"
    lines += [
        "",
        "## Run it",
        "",
        "```sh",
        f"qhyer eval --model {name}{environment}     # every task, 50 episodes each, on a CPU; no data needed",
        f"qhyer show {name} --task 1{environment}    # one episode as an animation",
        "```",
        "",
        "```python",
        "from qhyer import models",
        "",
        f'policy = models.policy("{name}")',
        "policy.reset()                        # an episode begins",
        "action = policy(observation, goal)    # arrays, raw, as in the data; and so on, to its end",
        "```",
        "",
    ]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------- find and load


def folders() -> list[Path]:
    """Where models are looked for: $QHYER_MODELS, ./models, and the source checkout's."""
    given = os.environ.get("QHYER_MODELS")
    checkout = Path(__file__).resolve().parents[2]
    places = [Path(given)] if given else []
    places.append(Path("models"))
    if (checkout / "pyproject.toml").is_file():
        places.append(checkout / "models")
    return places


def available() -> dict[str, Path]:
    """Every model there is, by name; of two with one name, the one that `find` takes."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob(f"*/{ABOUT}")):
            found.setdefault(path.parent.name, path.parent)
    return dict(sorted(found.items()))


def find(name: str | Path) -> Path:
    """The folder of a model, by path or by name, or an error that says which there are."""
    if (Path(name) / ABOUT).is_file():
        return Path(name)
    known = available()
    short = _short(str(name))
    if short in known:
        return known[short]
    if (Path(name) / "run.json").is_file():
        if model := runs.read(Path(name)).get("model"):
            raise UserError(f"{name} has the rows of a model, and is none: `qhyer eval --model {model['name']}`")
        makes = f"`qhyer eval {name}` evaluates it, and `qhyer export {name}` makes a model of it"
        raise UserError(f"{name} is a run, not a model: {makes}")
    if told := runs.folder_of_runs(Path(name)):
        raise UserError(told)
    hint = did_you_mean(short, known)
    looked = ", ".join(dict.fromkeys(str(folder) for folder in folders()))
    there = f"there are {', '.join(known)}" if known else "there are none"
    raise UserError(
        f"no model is called {str(name)!r}{hint} (looked in {looked}: {there}); "
        "give a model's folder, or make one with `qhyer export RUN`"
    )


def read(folder: Path) -> dict[str, Any]:
    """model.json, checked against its own seal."""
    about = read_sealed_json(Path(folder) / ABOUT)
    if about.get("format") != FORMAT:
        raise UserError(f"{folder} has model format {about.get('format')}, this version reads {FORMAT}")
    return about


def load(name: str | Path, device: str = "cpu") -> tuple[Agent, dict[str, Any]]:
    """A model's agent, ready to act, and what model.json says of it. What acting does not read is left untrained."""
    folder = find(name)
    about = read(folder)
    file, recorded = folder / WEIGHTS, about["weights"]
    if not file.is_file():
        raise CorruptFile(f"{folder} is incomplete: {WEIGHTS} is missing; fetch or export the model again")
    if file.stat().st_size != recorded["bytes"] or sha256_file(file) != recorded["sha256"]:
        raise CorruptFile(f"{file} is damaged: its SHA-256 is not that of {ABOUT}; fetch or export the model again")
    config = from_dict(agents.load(about["agent"]).Config, about["config"])
    agent = runs.build_agent(about["agent"], config, from_dict(DataSpec, about["spec"]), about["seed"])
    try:
        state = load_file(file)
    except SafetensorError as error:
        raise CorruptFile(f"{file} cannot be read: {error}") from error
    try:
        agent.load_state_dict(state, strict=False)  # bf16 becomes float32 here: every value as it was stored
        fits = agent.acting_state().keys() == state.keys()
    except RuntimeError:  # another shape; what an agent learns the size of makes room for it
        fits = False
    if not fits:
        raise UserError(
            f"{file} does not hold what {about['agent']} acts with in this version: "
            f"it was written by qhyer {(about['versions'] or {}).get('qhyer', 'unknown')}"
        )
    return agent.to(device).eval(), about


def policy(name: str | Path, device: str = "cpu") -> Policy:
    """A model, or a run by its folder, for a loop of one's own."""
    run = (Path(name) / "run.json").is_file()
    agent, _ = runs.load_agent(Path(name), device=device) if run else load(name, device)
    return Policy(agent)


# ------------------------------------------------------------------------------------------------------- evaluation


def evaluation_folder(folder: Path) -> Path:
    """Where evaluations and pictures of a model go, unless told otherwise."""
    return Path("runs") / f"eval-{Path(folder).resolve().name}"


def evaluate_model(
    name: str | Path,
    config: EvalConfig | None = None,
    *,
    out: Path | None = None,
    environment: str | None = None,
    device: str = "cpu",
    workers: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> tuple[float, Path]:
    """The protocol, as for a run -> success rate and the folder with the rows, which `qhyer report` reads as a run."""
    folder = find(name)
    about = read(folder)
    out = evaluation_folder(folder) if out is None else Path(out)
    if (out / ABOUT).is_file() or folder.resolve() in out.resolve().parents:
        raise UserError(f"{out} belongs to a model, and those are not written to; give another folder with --out")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder with --out")
    with runs.hold_rows(out):
        whose = {"name": folder.resolve().name, "sha256": about["weights"]["sha256"], "dtype": about["dtype"]}
        whose |= {"override": about["override"]} if about.get("override") else {}  # the same weights, acting otherwise
        before = runs.read(out).get("model") or {} if (out / "run.json").is_file() else whose
        if before.get("name") != whose["name"]:
            raise UserError(f"{out} holds a run, or rows of another model; give another folder with --out")
        if before != whose and not overwrite:
            raise UserError(
                f"{out} has rows of {whose['name']} as it was exported before; --overwrite replaces them, --out names "
                "another folder"
            )
        environment = environment or about["environment"]
        if environment is None:
            raise UserError(f"{folder} was trained on own data; name the environment to evaluate in with --env")
        device = runs.resolve_device(device)
        results, at, what = runs.evaluate_agent(
            lambda: (load(folder, device)[0], about["updates"]),
            f"evaluating {whose['name']} on {environment}",
            environment,
            config or EvalConfig(),
            about,
            rows=out / "episodes.csv",
            workers=workers,
            overwrite=overwrite,
            quiet=quiet,
        )
        info = {key: about[key] for key in OF_ITS_RUN} | {
            "environment": about["environment"] or environment,
            "model": whose,
        }
        if before != whose:
            (out / "episodes.csv").unlink(missing_ok=True)
            shutil.rmtree(out / "rollouts", ignore_errors=True)
        write_json(out / "run.json", info)
        runs.save_evaluation(out, at, results, environment, what)
        return success_rate(results), out


# ------------------------------------------------------------------------------------------------ the command line


def export_command(
    run: Path,
    /,
    *,
    out: Path | None = None,
    dtype: Dtype = "bf16",
    step: int | None = None,
    max_mb: float = MAX_MB,
    override: tuple[str, ...] = (),
    overwrite: bool = False,
) -> int:
    """Write a run's policy as a model: the weights that acting needs, model.json and a card.

    Args:
        run: the run's folder
        out: the model's folder, whose name is the model's; models/DATASET when not given
        dtype: how large matrices are stored: bf16 (half the size, rounded) or fp32 (acts exactly as the run)
        step: export this checkpoint instead of the last
        max_mb: warn when the weights take more megabytes than this
        override: what acting alone reads, as FIELD=VALUE, such as history=hopping (of qhyer also past_q, candidates and
            choice_temperature)
        overwrite: replace a model that is there already
    """
    made = export(run, out, step=step, dtype=dtype, override=override, overwrite=overwrite)
    about = read(made)
    print(f"{made}: {size_text(about)}")
    early = runs.cut_short(run, step)
    if early:
        print(f"warning: {early}", file=sys.stderr)
    if megabytes(about) > max_mb:
        advice = "--dtype bf16 halves it" if dtype == "fp32" else "train a smaller one (--agent.width)"
        print(f"warning: the weights take {size_text(about)}, more than {max_mb:g} MB; {advice}", file=sys.stderr)
    return 0
