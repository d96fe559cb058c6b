"""`qhyer doctor`: what works on this machine, and what to do about what does not.

Nothing is imported before it is asked for, and whatever may hang or crash (simulator, renderers) runs in a process of
its own with a time limit; all of those run at the same time.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

Status = Literal["ok", "note", "FAIL"]

PROBE_SECONDS = 20.0
ROWS = 1_000_000
# float32 columns of a cube-single row: observation 28, action 5, qpos 21, qvel 20; and one flag.
BYTES_PER_ROW = 4 * (28 + 5 + 21 + 20) + 1
# Validation is another tenth; while the finished file is being joined the single episodes still lie beside it.
DATASET_BYTES = int(2 * 1.1 * ROWS * BYTES_PER_ROW)
RUN_BYTES = 10**9  # a few checkpoints of the largest presets

STEP = """
import numpy as np
from qhyer import envs
env = envs.make("pointmaze-medium-v0")
observation, goal = envs.seeded_reset(env, 0, 1)
observation, *_ = env.step(np.ones(env.action_space.shape, np.float32))
assert np.isfinite(observation).all()
print(f"pointmaze-medium-v0 resets and steps, {len(observation)} observed values")
"""

RENDER = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom type="sphere" size=".3"/></worldbody></mujoco>')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 48, 64)
renderer.update_scene(data)
picture = renderer.render()
assert picture.max() > 0, "the picture is black"
print("draws")
"""

RENDERERS = {
    "egl": "apt-get install libegl1 libgl1 (and the graphics driver, on a GPU)",
    "osmesa": "apt-get install libosmesa6",
    "glfw": "needs a screen; on a server use EGL or OSMesa",
}
SWITCHES = ("", "enable", "enabled", "on", "true", "1", "disable", "disabled", "off", "false", "0")
CHOICES = {*RENDERERS, "glx", "cgl", "wgl", *SWITCHES}  # as MuJoCo knows them


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def run_probe(code: str, seconds: float = PROBE_SECONDS, **environment: str) -> tuple[bool, str]:
    """Runs Python code in a process of its own -> whether it ended well, and the last line it said."""
    here = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {seconds:.0f} s"
    except OSError as error:
        return False, str(error)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0:
        return True, said[-1] if said else ""
    errors = [line for line in said if line[:1].isalpha() and "Error" in line]
    return False, (errors or said or [f"ended with code {done.returncode}"])[-1]


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


# --------------------------------------------------------------------------------------------------- the checks


def check_python() -> list[Check]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return [Check("python", "ok", found)]


def check_torch() -> list[Check]:
    try:
        import torch
    except Exception as error:
        return [Check("torch", "FAIL", f"does not import: {error}", "pip install torch")]
    checks = [Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "this torch was built without CUDA" if built is None else f"torch has CUDA {built}, no usable device"
        advice = "training runs on the CPU; for a GPU install a CUDA build of torch" if built is None else "nvidia-smi"
        return [*checks, Check("CUDA", "note", why, advice), Check("triton", "note", "only used on CUDA")]
    properties = torch.cuda.get_device_properties(0)
    capability = f"capability {properties.major}.{properties.minor}"
    memory = gigabytes(properties.total_memory)
    checks.append(Check("CUDA", "ok", f"{properties.name}, {capability}, {memory}, CUDA {torch.version.cuda}"))
    try:
        import triton

        checks.append(Check("triton", "ok", triton.__version__))
    except Exception as error:
        advice = "pip install triton; without it training runs plain PyTorch on the GPU, slower"
        checks.append(Check("triton", "note", f"does not import: {error}", advice))
    from qhyer.nn import adamw_cuda, mamba2_cuda, mamba_cuda

    kernels = {"the scan": mamba_cuda, "Mamba-2's scan": mamba2_cuda, "AdamW": adamw_cuda}
    made = {name: kernel.works(torch.device("cuda", 0)) for name, kernel in kernels.items()}
    missing = [name for name, works in made.items() if not works]
    if missing:
        advice = "they run as Triton's and torch's own, slower; a warning above says why"
        checks.append(Check("kernels by hand", "note", f"not compiled here: {', '.join(missing)}", advice))
    else:
        checks.append(Check("kernels by hand", "ok", "compiled by NVRTC"))
    return checks


def check_bf16() -> list[Check]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
    x = torch.ones(8, 8, device=device, dtype=torch.bfloat16)
    works = bool(((x @ x).float() == 8.0).all())
    if not works:
        return [Check("bf16", "note", f"wrong products on {device}", "train with --precision fp32 (the default)")]
    if not native:
        return [Check("bf16", "note", f"works on this {device}, but not in hardware", "fp32 is faster here")]
    return [Check("bf16", "ok", f"in hardware on this {device}")]


def check_training() -> list[Check]:
    """Two real updates of the smallest agent: sampler, loss, backward, optimiser."""
    import numpy as np
    import torch

    from qhyer import runs
    from qhyer.agents.gcbc import GCBCConfig
    from qhyer.data.episodes import Episodes
    from qhyer.train import Update

    rng = np.random.default_rng(0)
    episodes = Episodes.from_arrays(rng.normal(size=(40, 3)), rng.uniform(-1, 1, (40, 2)), [19, 39])
    agent = runs.build_agent("gcbc", GCBCConfig(steps=2, batch_size=8, hidden=(8,)), episodes.spec(), seed=0)
    stage = agent.stages()[0]
    before = torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    update = Update(agent, stage, stage.sampler.build(episodes, torch.Generator()), "fp32", torch.device("cpu"))
    for step in range(2):
        update(step)
    after = torch.nn.utils.parameters_to_vector(agent.parameters()).detach()
    if not torch.isfinite(after).all() or torch.equal(before, after):
        return [Check("training", "FAIL", "an update left the weights unchanged or not finite", "reinstall torch")]
    return [Check("training", "ok", "two updates of a small agent")]


def check_packages() -> list[Check]:
    checks = []
    for package in ("mujoco", "ogbench", "gymnasium"):
        try:
            checks.append(Check(package, "ok", version(package)))
        except PackageNotFoundError:
            checks.append(
                Check(package, "note", "not installed", f"evaluation and data need it: pip install {package}")
            )
    try:
        checks.append(Check("tensorboard", "ok", version("tensorboard")))
    except PackageNotFoundError:
        checks.append(Check("tensorboard", "note", "not installed", "optional: pip install 'qhyer[tensorboard]'"))
    return checks


def check_environment() -> list[Check]:
    works, said = run_probe(STEP, MUJOCO_GL="disable", OMP_NUM_THREADS="1")
    if works:
        return [Check("environment", "ok", said)]
    advice = "evaluation and data generation need it: pip install --force-reinstall ogbench mujoco gymnasium"
    return [Check("environment", "note", said, advice)]


def check_choice() -> list[Check]:
    """The probes below choose renderers themselves; what the user has chosen is what else will see."""
    given = os.environ.get("MUJOCO_GL", "").lower().strip()
    if given in CHOICES:
        return []
    known = ", ".join([*RENDERERS, "disable"])
    return [Check("MUJOCO_GL", "note", f"MuJoCo does not start with {given}", f"unset it, or choose one of {known}")]


def check_renderer(name: str) -> list[Check]:
    works, said = run_probe(RENDER, MUJOCO_GL=name, PYOPENGL_PLATFORM=name if name != "glfw" else "")
    if works:
        return [Check(f"renderer {name}", "ok", f"{said}; choose it with MUJOCO_GL={name}")]
    advice = f"not needed for training or evaluation; videos need one renderer: {RENDERERS[name]}"
    return [Check(f"renderer {name}", "note", said, advice)]


def _free(folder: Path) -> int:
    """Free bytes where the folder is, or where it would be made."""
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _disk(name: str, folder: Path, needed: int, what: str) -> Check:
    free = _free(folder)
    where = f"in {folder}" if folder.exists() else f"for {folder}, which is not there yet"
    detail = f"{gigabytes(free)} free {where}; {what} takes about {gigabytes(needed)}"
    if free < needed:
        return Check(name, "note", detail, "make room, or choose another folder")
    return Check(name, "ok", detail)


def check_disk() -> list[Check]:
    from qhyer.data.registry import data_dir

    checks = [_disk("disk, data", data_dir(), DATASET_BYTES, "generating a dataset of 1M rows")]
    working = Path.cwd()
    if not os.access(working, os.W_OK):
        advice = "go to a folder you may write to, or give --out"
        return [*checks, Check("disk, runs", "FAIL", f"{working} cannot be written to", advice)]
    return [*checks, _disk("disk, runs", working, RUN_BYTES, "a large run")]


def check_datasets() -> list[Check]:
    from qhyer.data import registry

    found = [name for name in registry.DATASETS if registry.find(name) is not None]
    if found:
        return [Check("datasets", "ok", ", ".join(found))]
    where = f"none in {registry.data_dir()} ($QHYER_DATA chooses the folder) or ~/.ogbench/data"
    return [Check("datasets", "note", where, "qhyer data generate cube-single-play")]


REQUIRED = {"python", "torch", "training"}
"""A check of these that cannot even run is a failure; of the others, a note."""


def guarded(name: str, check: Callable[[], Sequence[Check]]) -> list[Check]:
    """A check that raises says so in its line instead of ending the doctor."""
    try:
        return list(check())
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        status: Status = "FAIL" if name in REQUIRED else "note"
        return [Check(name, status, f"{type(error).__name__}: {error}", "reinstall qhyer and its dependencies")]


def examine() -> list[Check]:
    """All checks, in the order of the table."""
    with ThreadPoolExecutor(max_workers=1 + len(RENDERERS)) as pool:
        environment = pool.submit(guarded, "environment", check_environment)
        renderers = [
            pool.submit(guarded, f"renderer {name}", lambda name=name: check_renderer(name))  # type: ignore[misc]
            for name in RENDERERS
        ]
        here: list[tuple[str, Callable[[], Sequence[Check]]]] = [
            ("python", check_python),
            ("torch", check_torch),
            ("bf16", check_bf16),
            ("training", check_training),
            ("packages", check_packages),
            ("MUJOCO_GL", check_choice),
            ("disk", check_disk),
            ("datasets", check_datasets),
        ]
        checks = [line for name, check in here for line in guarded(name, check)]
        checks += environment.result()
        for renderer in renderers:
            checks += renderer.result()
    return checks


def doctor() -> int:
    """Show what works on this machine and what to do about what does not. The exit code is 0 if training works."""
    checks = examine()
    failed = [check.name for check in checks if check.status == "FAIL"]
    last = f"Training does not work here: mend {', '.join(failed)}." if failed else "Training works here."
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # the one tool whose job is a broken installation
        for check in checks:
            print(f"{check.status:5} {check.name:16} {check.detail}  {check.advice}".rstrip())
        print(last)
        return 1 if failed else 0
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    styles = {"ok": "green", "note": "yellow", "FAIL": "bold red"}
    for check in checks:
        table.add_row(
            Text(check.status, style=styles[check.status]), check.name, Text(check.detail), Text(check.advice)
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(last, style="bold red" if failed else "green")
    return 1 if failed else 0
