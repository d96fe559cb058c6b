"""The doctor always answers, quickly, and its exit code says whether training works."""

from __future__ import annotations

import builtins
import time
from pathlib import Path
from typing import Any

import pytest

from qhyer import doctor
from qhyer.doctor import Check


def test_it_answers_in_time_and_training_works_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QHYER_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path))
    begun = time.monotonic()
    assert doctor.doctor() == 0
    assert time.monotonic() - begun < 40
    shown = capsys.readouterr().out
    for name in ("python", "torch", "CUDA", "triton", "bf16", "mujoco", "ogbench", "gymnasium", "renderer egl"):
        assert name in shown
    assert "qhyer data generate" in shown  # no dataset: it says how to make one
    assert "Training works here." in shown


def test_a_renderer_that_mujoco_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("egl", "OSMesa ", "disable", ""):
        monkeypatch.setenv("MUJOCO_GL", given)
        assert doctor.check_choice() == []
    monkeypatch.setenv("MUJOCO_GL", "bad")
    (line,) = doctor.check_choice()
    assert line.status == "note" and "bad" in line.detail and "egl" in line.advice


def test_a_folder_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, where in ((tmp_path, f"free in {tmp_path};"), (tmp_path / "new", "new, which is not there yet;")):
        monkeypatch.setenv("QHYER_DATA", str(folder))
        assert where in doctor.check_disk()[0].detail


def test_a_check_that_raises_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Check]:
        raise RuntimeError("no such thing")

    (line,) = doctor.guarded("torch", broken)
    assert line.status == "FAIL" and "no such thing" in line.detail
    (line,) = doctor.guarded("datasets", broken)
    assert line.status == "note"


def test_without_torch_the_exit_code_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def no_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch" or name.startswith("torch."):
            raise ImportError("No module named 'torch'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    monkeypatch.setattr(doctor, "run_probe", lambda *_, **__: (False, "skipped"))
    assert doctor.doctor() == 1
    assert "pip install torch" in " ".join(capsys.readouterr().out.split())


def test_a_probe_that_hangs_or_fails_is_told_apart() -> None:
    assert doctor.run_probe("print('fine')") == (True, "fine")
    assert doctor.run_probe("import time; time.sleep(60)", seconds=0.5) == (False, "no answer within 0 s")
    works, said = doctor.run_probe("raise ValueError('bad driver')")
    assert not works and said == "ValueError: bad driver"
    works, said = doctor.run_probe("import os; os._exit(7)")
    assert not works and said == "ended with code 7"
    works, said = doctor.run_probe("import os; print(os.environ['MUJOCO_GL'])", MUJOCO_GL="egl")
    assert works and said == "egl"


def test_too_little_room_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**6})())
    line = doctor._disk("disk", tmp_path / "not" / "yet", 10**9, "a dataset")
    assert line.status == "note" and line.advice
