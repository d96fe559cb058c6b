"""Checkpoints: safetensors and JSON under a sealed manifest of SHA-256 sums; whole or absent; never pickle.

RUN/checkpoints/00005000/
    agent.safetensors      weights and buffers: all that acting needs
    training.safetensors   optimiser moments, random generators, running sums: all that resuming needs besides; it may
                           be left out where nobody resumes
    state.json             step of how many, optimiser groups, seconds, names of the metrics
    manifest.json          SHA-256 and size of each of the above, and of itself
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qhyer.errors import CorruptFile, UserError
from qhyer.storage import atomic_directory, discard, read_sealed_json, sha256_file, sweep_partial, write_sealed_json

FORMAT = 2  # 2: the flow's blocks are stacked
WEIGHTS, TRAINING = "agent.safetensors", "training.safetensors"
FILES = (WEIGHTS, TRAINING, "state.json")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    agent: dict[str, Tensor]
    training: dict[str, Tensor]
    """empty where it was not asked for"""
    state: dict[str, Any]


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies: safetensors refuses views that share memory."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file with the rights that any new file gets here; the library's own are for their owner alone."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:  # what the system refused stands in its text alone
        if found := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
        raise UserError(f"{path} cannot be written: {error}") from error
    path.chmod(mode)


def save(
    folder: Path,
    step: int,
    agent: Mapping[str, Tensor],
    training: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int | None = None,
) -> Path:
    """Writes `folder/STEP`; a reader sees it complete or not at all. Then prunes to the newest `keep`."""
    target = Path(folder) / f"{step:08d}"
    with atomic_directory(target) as temporary:
        write_tensors(temporary / WEIGHTS, _plain(agent))
        write_tensors(temporary / TRAINING, _plain(training))
        (temporary / "state.json").write_text(json.dumps(dict(state), indent=1))
        files = {
            name: {"sha256": sha256_file(temporary / name), "bytes": (temporary / name).stat().st_size}
            for name in FILES
        }
        write_sealed_json(temporary / "manifest.json", {"format": FORMAT, "step": step, "files": files})
    if keep is not None:
        for old in steps(folder)[:-keep]:
            discard(Path(folder) / f"{old:08d}")
    return target


def steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, oldest first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and (p / "manifest.json").is_file())


def latest(folder: Path) -> Path:
    """The newest checkpoint below `folder`."""
    found, folder = steps(folder), Path(folder)
    if found:
        return folder / f"{found[-1]:08d}"
    bare = sorted(path for path in folder.glob("*") if path.name.isdigit())
    if bare:
        raise UserError(f"{bare[-1]} is not whole: manifest.json is missing; copy it from where the run was trained")
    raise UserError(f"no checkpoint in {folder}; train first, or give the run's folder")


def _before(path: Path) -> str:
    """Half a sentence on what to do without this checkpoint, where there is an earlier one that is whole."""
    earlier = [step for step in steps(path.parent) if f"{step:08d}" < path.name]
    whole = [step for step in earlier if resumable(path.parent / f"{step:08d}")]
    return f", or remove {path} to fall back to update {whole[-1]}" if whole else ""


def verify(path: Path, training: bool = True) -> dict[str, Any]:
    """Checks every byte against the manifest and returns it; raises `CorruptFile` naming the file.

    Without `training`, the file of that name may be missing; where it is there, it must be as it was written.
    """
    path = Path(path)
    manifest_path = path / "manifest.json"
    if not manifest_path.is_file():
        raise UserError(f"{path} is not a checkpoint: it has no manifest.json")
    manifest = read_sealed_json(manifest_path)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path} has checkpoint format {manifest.get('format')}, this version reads {FORMAT}")
    if training:
        require_training(path)
    for name, recorded in manifest["files"].items():
        file = path / name
        if not file.is_file() and name == TRAINING:
            continue
        if not file.is_file():
            raise CorruptFile(
                f"{path} is incomplete: {name} is missing. Copy it from where the run was trained{_before(path)}."
            )
        if file.stat().st_size != recorded["bytes"] or sha256_file(file) != recorded["sha256"]:
            alone = " Without this file it can still be evaluated." if name == TRAINING else ""
            raise CorruptFile(
                f"{file} is damaged: its SHA-256 is not the manifest's. "
                f"Copy it again from where the run was trained{_before(path)}.{alone}"
            )
    return manifest


def resumable(path: Path) -> bool:
    """Whether it holds more than the agent, which acts, and cannot be trained further alone."""
    return (Path(path) / TRAINING).is_file()


def require_training(path: Path) -> None:
    if not resumable(path):
        raise CorruptFile(
            f"{path} cannot be resumed: {TRAINING} is missing (the optimisers' state and the random generators; "
            f"evaluation does without). Copy it from where the run was trained{_before(path)}."
        )


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part alone, checked against the manifest like all that is there."""
    path = Path(path)
    verify(path, training=False)
    return json.loads((path / "state.json").read_text())


def load(path: Path, device: str | torch.device = "cpu", training: bool = True) -> Checkpoint:
    """Verifies, then reads; without `training` what acting needs."""
    path = Path(path)
    verify(path, training)
    try:
        agent = load_file(path / WEIGHTS, device=str(device))
        rest = load_file(path / TRAINING) if training else {}
    except SafetensorError as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    return Checkpoint(path, agent, rest, json.loads((path / "state.json").read_text()))


def clean(folder: Path) -> None:
    """Remove what a killed save left behind."""
    sweep_partial(Path(folder))


# ------------------------------------------------------------------------------------------------- optimisers


def pack_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], list[Any]]:
    """Moments as flat tensors named optimizer/parameter/key, groups as JSON."""
    tensors: dict[str, Tensor] = {}
    groups: list[Any] = []
    for i, optimizer in enumerate(optimizers):
        packed = optimizer.state_dict()
        for parameter, values in packed["state"].items():
            for key, value in values.items():
                tensors[f"optimizer/{i}/{parameter}/{key}"] = torch.as_tensor(value)
        groups.append(
            [
                {k: (v.item() if isinstance(v, Tensor) else v) for k, v in group.items()}
                for group in packed["param_groups"]
            ]
        )
    return tensors, groups


def unpack_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor], groups: Sequence[Any]
) -> None:
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(f"optimizer/{i}/"):
                _, _, parameter, key = name.split("/")
                state.setdefault(int(parameter), {})[key] = tensor
        current = optimizer.state_dict()["param_groups"]
        merged = [
            {**now, **{k: v for k, v in saved.items() if k != "params"}} for now, saved in zip(current, groups[i])
        ]
        for group, now in zip(merged, optimizer.param_groups):
            if isinstance(now["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=now["lr"].dtype, device=now["lr"].device)
        optimizer.load_state_dict({"state": state, "param_groups": merged})
