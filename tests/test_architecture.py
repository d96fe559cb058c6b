"""Who may import whom, read from the sources: cli -> report, analyses, train -> agents -> nn, losses, data."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qhyer
from qhyer import agents

SOURCE = Path(qhyer.__file__).parent
MODULES = {
    "qhyer." + str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
    if path != SOURCE / "__init__.py"
}


def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Modules a file imports, as dotted names; with `everywhere` also inside functions."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else ast.iter_child_nodes(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else str(node.module))
    return found


IMPORTS = {name: imports(path) for name, path in MODULES.items()}


def ours(name: str) -> set[str]:
    return {i for i in IMPORTS[name] if i.split(".")[0] == "qhyer"} - {"qhyer"}


def within(module: str, *packages: str) -> bool:
    return any(module == f"qhyer.{p}" or module.startswith(f"qhyer.{p}.") for p in packages)


def members(*packages: str) -> list[str]:
    return [name for name in MODULES if within(name, *packages)]


FOUNDATION = ("errors", "config", "rng", "storage", "progress")
AGENTS = [f"agents.{name}" for name in agents.names()]

ALLOWED = {  # package -> what it may import of ours, besides itself
    "errors": (),
    "rng": (),
    "progress": (),
    "config": ("errors",),
    "storage": ("errors",),
    "distributed": ("errors",),
    "driver": (),
    "streams": ("driver",),
    "losses": ("distributed",),
    "nn": ("losses", "streams", "driver"),
    "launch": ("errors",),
    "data": (*FOUNDATION, "streams"),
    "envs": ("errors", "rng"),
    "agent": ("data", "errors"),
    "agents": ("agent", "nn", "losses", "distributed", "streams", "data", "config", "errors"),
    "presets": ("agents", "agent", "config", "errors"),
    "records": ("storage", "errors"),
    "checkpoint": ("storage", "errors"),
    "rollout": ("envs", "launch", "errors"),
    "policy": ("agent", "lane", "errors"),
    "evaluate": ("agent", "policy", "rollout", "rng", "errors", "records", "config"),
    "report": (*FOUNDATION, "records", "data.origin"),
}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package):
    assert members(package), f"qhyer.{package} is gone: update this test"
    for module in members(package):
        wrong = {i for i in ours(module) if not within(i, package, *ALLOWED[package])}
        # the data commands print: they are the command line's, and generation steps environments on many machines
        if module.startswith("qhyer.data.generate") or module == "qhyer.data.commands":
            wrong = {i for i in wrong if not within(i, "envs", "runs", "launch")}
        assert not wrong, f"{module} must not import {sorted(wrong)}"


def test_nothing_imports_the_command_line():
    for module in MODULES:
        if module not in ("qhyer.cli", "qhyer.__main__"):
            assert not any(within(i, "cli") for i in ours(module)), module


def test_no_agent_imports_another():
    for name in agents.names():
        other = {i for i in ours(f"qhyer.agents.{name}") if within(i, "agents") and i != f"qhyer.agents.{name}"}
        assert not {i for i in other if not i.split(".")[-1].startswith("_")} - {"qhyer.agents"}, name


@pytest.mark.parametrize(
    "module", ["train", "update", "lane", "distributed", "evaluate", "checkpoint", "runs", "agent", "records", "envs"]
)
def test_the_machinery_names_no_agent(module):
    """Neither an import nor a string: what is special to an agent is in its file."""
    path = MODULES[f"qhyer.{module}"]
    assert not {i for i in ours(f"qhyer.{module}") if within(i, *AGENTS)}
    docstrings = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(id(node.value))
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    }
    # "qhyer" is also the name of the package: the one in the list of versions stands for that.
    named = strings & (set(agents.names()) - {"qhyer"})
    assert not named, f"{path} names the agent {named}"


@pytest.mark.parametrize("package", ["report", "records", "storage", "config", "errors", "progress"])
def test_report_runs_without_torch(package):
    for module in members(package):
        assert not {i for i in IMPORTS[module] if i.split(".")[0] == "torch"}, module


def test_networks_need_torch_alone():
    standard = set(sys.stdlib_module_names) | {"torch", "qhyer", "triton"}
    for module in members("nn", "losses"):
        assert {i.split(".")[0] for i in IMPORTS[module]} <= standard, module


def test_environments_are_imported_where_they_are_made():
    """Training on one's own data must not need a simulator: no import of one at the top of any core module."""
    core = ("agent", "agents", "nn", "losses", "presets", "train", "checkpoint", "runs", "records")
    core += ("evaluate", "policy", "rollout", "envs")
    heavy = {"ogbench", "gymnasium", "mujoco", "dm_control", "matplotlib", "triton", "zuko", "scipy", "tensorboard"}
    heavy |= {"ray", "stable_baselines3"}
    kernels = {module for module in members("nn") if module.endswith("_triton")}  # imported where a GPU is used
    for module in [*members(*core), *members("data.episodes", "data.goals", "data.samplers", "data.registry")]:
        if module in kernels:
            continue
        assert not {i.split(".")[0] for i in imports(MODULES[module], everywhere=False)} & heavy, module


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(result.stdout.split())


def test_importing_an_agent_needs_no_optional_package():
    loaded = loaded_after("import qhyer.agents.qhyer, qhyer.train, qhyer.evaluate")
    assert "torch" in loaded
    assert not loaded & {
        "triton",
        "matplotlib",
        "ogbench",
        "gymnasium",
        "mujoco",
        "zuko",
        "scipy",
        "tensorboard",
        "ray",
        "stable_baselines3",
    }


def test_a_worker_that_steps_environments_needs_no_torch():
    loaded = loaded_after("import qhyer.rollout")
    assert "numpy" in loaded and not loaded & {"torch", "rich", "tyro", "gymnasium"}


def test_importing_the_report_needs_no_torch():
    loaded = loaded_after("import qhyer, qhyer.report")
    assert "numpy" in loaded and not loaded & {"torch", "ogbench", "gymnasium", "mujoco"}


def test_no_pickle_is_ever_read():
    """No torch.load, no pickle module, no allow_pickle=True: a file can hold data, never code."""
    for module, path in MODULES.items():
        assert not {i.split(".")[0] for i in IMPORTS[module]} & {"pickle", "cPickle", "dill", "joblib", "shelve"}, (
            module
        )
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "torch.save", "eval", "exec"), f"{path}:{node.lineno}"
                if called in ("np.load", "numpy.load"):
                    options = {k.arg: ast.unparse(k.value) for k in node.keywords}
                    assert options.get("allow_pickle", "False") == "False", f"{path}:{node.lineno}"
