"""Checkpoints: safetensors and JSON under a sealed manifest of SHA-256 sums; whole or absent; never pickle.

RUN/checkpoints/00005000/
    agent.safetensors      weights and buffers: all that acting needs
    training.safetensors   optimiser moments, random generators, running sums: all that resuming needs besides
    state.json             step of how many, optimiser groups, seconds, names of the metrics
    manifest.json          SHA-256 and size of each of the above, and of itself
"""

from __future__ import annotations

import json
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
FILES = ("agent.safetensors", "training.safetensors", "state.json")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    agent: dict[str, Tensor]
    training: dict[str, Tensor]
    state: dict[str, Any]


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies: safetensors refuses views that share memory."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file with the rights that any new file gets here; the library's own are for their owner alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path)
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
        write_tensors(temporary / "agent.safetensors", _plain(agent))
        write_tensors(temporary / "training.safetensors", _plain(training))
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
    found = steps(folder)
    if not found:
        raise UserError(f"no checkpoint in {folder}; train first, or give the run's folder")
    return Path(folder) / f"{found[-1]:08d}"


def verify(path: Path) -> dict[str, Any]:
    """Checks every byte against the manifest and returns it; raises `CorruptFile` naming the file."""
    path = Path(path)
    manifest_path = path / "manifest.json"
    if not manifest_path.is_file():
        raise UserError(f"{path} is not a checkpoint: it has no manifest.json")
    manifest = read_sealed_json(manifest_path)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path} has checkpoint format {manifest.get('format')}, this version reads {FORMAT}")
    for name, recorded in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CorruptFile(f"{path} is incomplete: {name} is missing")
        if file.stat().st_size != recorded["bytes"] or sha256_file(file) != recorded["sha256"]:
            raise CorruptFile(
                f"{file} is damaged: its SHA-256 is not the manifest's. "
                f"Remove {path} to fall back to the checkpoint before it."
            )
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part alone, checked against the manifest like all of it."""
    path = Path(path)
    verify(path)
    return json.loads((path / "state.json").read_text())


def load(path: Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Verifies, then reads."""
    path = Path(path)
    verify(path)
    try:
        agent = load_file(path / "agent.safetensors", device=str(device))
        training = load_file(path / "training.safetensors")
    except SafetensorError as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    return Checkpoint(path, agent, training, json.loads((path / "state.json").read_text()))


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
