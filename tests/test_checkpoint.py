"""Checkpoints are whole or absent, notice any changed byte, and never run code from a file."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from qhyer import checkpoint, storage
from qhyer.errors import CorruptFile, Taken, UserError


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk() -> None:
    """In place of conftest's: here files go to the disk."""


def state(step: int = 1) -> tuple[dict, dict, dict]:
    g = torch.Generator().manual_seed(step)
    agent = {"weight": torch.randn(8, 4, generator=g), "scale": torch.tensor(float(step))}
    training = {"optimizer/0/0/step": torch.tensor(float(step)), "rng/torch": torch.get_rng_state()[:64]}
    return agent, training, {"step": step, "optimizers": [], "seconds": 1.5}


def save(folder: Path, step: int = 1, keep: int | None = None) -> Path:
    return checkpoint.save(folder, step, *state(step), keep)


def is_whole(path: Path, step: int) -> bool:
    loaded = checkpoint.load(path)
    agent, training, plain = state(step)
    same = all(torch.equal(loaded.agent[k], v) for k, v in agent.items())
    return same and loaded.training.keys() == training.keys() and loaded.state == plain


# ---------------------------------------------------------------------------------------------------- round trip


def test_round_trip_to_the_bit(tmp_path):
    agent = {
        "float": torch.randn(3, 2),
        "view": torch.randn(4, 6).t()[1:],  # not contiguous
        "scalar": torch.tensor(2.5),
        "int": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "half": torch.randn(3).bfloat16(),
        "double": torch.randn(2, dtype=torch.float64),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    training = {"rng": torch.get_rng_state(), "shared": agent["float"]}
    path = checkpoint.save(tmp_path, 7, agent, training, {"step": 7, "names": ["a", "b"], "rate": 0.1})
    loaded = checkpoint.load(path)
    for name, tensor in agent.items():
        assert loaded.agent[name].dtype == tensor.dtype and loaded.agent[name].shape == tensor.shape
        assert torch.equal(
            loaded.agent[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        )
    assert torch.equal(loaded.training["rng"], training["rng"])
    assert loaded.state == {"step": 7, "names": ["a", "b"], "rate": 0.1}
    assert path.name == "00000007" and sorted(p.name for p in path.iterdir()) == sorted(
        [*checkpoint.FILES, "manifest.json"]
    )


def test_keeps_the_newest(tmp_path):
    for step in (5, 10, 15, 100):
        save(tmp_path, step, keep=2)
    assert checkpoint.steps(tmp_path) == [15, 100]
    assert checkpoint.latest(tmp_path).name == "00000100"


def test_same_step_again(tmp_path):
    save(tmp_path, 3)
    assert is_whole(save(tmp_path, 3), 3)


def test_nothing_there_says_what_to_do(tmp_path):
    assert checkpoint.steps(tmp_path / "none") == []
    with pytest.raises(UserError, match="train first"):
        checkpoint.latest(tmp_path)
    with pytest.raises(UserError, match="no manifest"):
        checkpoint.load(tmp_path)


def test_another_format_is_refused(tmp_path):
    path = save(tmp_path)
    values = storage.read_sealed_json(path / "manifest.json")
    storage.write_sealed_json(path / "manifest.json", {**values, "format": 99})
    with pytest.raises(UserError, match="format 99, this version reads 2"):
        checkpoint.load(path)


# -------------------------------------------------------------------------------------------------------- damage


def test_a_thousand_flipped_bytes_are_all_noticed(tmp_path):
    """Over all files, the manifest included: every flip is found, and the file named."""
    path = save(tmp_path)
    draw = random.Random(0)
    files = sorted(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    whole = {file: file.read_bytes() for file in files}
    missed = []
    for _ in range(1000):
        file = draw.choices(files, sizes)[0]
        place, change = draw.randrange(len(whole[file])), draw.randrange(1, 256)
        spoilt = bytearray(whole[file])
        spoilt[place] ^= change
        file.write_bytes(spoilt)
        try:
            checkpoint.load(path)
            missed.append((file.name, place, change))
        except CorruptFile as error:
            assert file.name in str(error)
        file.write_bytes(whole[file])
    assert not missed
    assert is_whole(path, 1)


@pytest.mark.parametrize("name", [*checkpoint.FILES, "manifest.json"])
def test_truncated_and_grown_files(tmp_path, name):
    path = save(tmp_path)
    whole = (path / name).read_bytes()
    for spoilt in (b"", whole[:1], whole[:-1], whole[: len(whole) // 2], whole + b"\0", whole + b"\n"):
        (path / name).write_bytes(spoilt)
        with pytest.raises(CorruptFile, match=name):
            checkpoint.load(path)


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_missing_file(tmp_path, name):
    path = save(tmp_path)
    (path / name).unlink()
    with pytest.raises(CorruptFile, match=f"{name} is missing"):
        checkpoint.load(path)


def test_the_agent_can_be_read_alone(tmp_path):
    """Without the optimisers' state it is read, and not resumed; what is there must be as it was written."""
    path = save(tmp_path, 2)
    training = (path / checkpoint.TRAINING).read_bytes()
    (path / checkpoint.TRAINING).unlink()
    loaded = checkpoint.load(path, training=False)
    assert torch.equal(loaded.agent["weight"], state(2)[0]["weight"]) and not loaded.training
    assert loaded.state == checkpoint.read_state(path) == state(2)[2]
    with pytest.raises(CorruptFile, match=r"00000002 cannot be resumed: training\.safetensors is missing .*trained\.$"):
        checkpoint.load(path)
    save(tmp_path, 1)
    with pytest.raises(CorruptFile, match=r"or remove .*00000002 to fall back to update 1\.$"):
        checkpoint.load(path)

    (path / checkpoint.TRAINING).write_bytes(training[:-1])
    with pytest.raises(CorruptFile, match=r"training\.safetensors is damaged.* Without this file it can still be"):
        checkpoint.load(path, training=False)
    (path / checkpoint.TRAINING).unlink()
    for name in (checkpoint.WEIGHTS, "state.json", "manifest.json"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CorruptFile, match=f"{name} is damaged"):
            checkpoint.load(path, training=False)
        (path / name).write_bytes(whole)
    (path / checkpoint.WEIGHTS).unlink()
    with pytest.raises(CorruptFile, match=r"agent\.safetensors is missing\. Copy it from where .* or remove"):
        checkpoint.load(path, training=False)


def test_without_its_manifest_it_is_no_checkpoint(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").unlink()
    assert checkpoint.steps(tmp_path) == [1]
    (tmp_path / "00000001" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"00000002 is not whole: manifest\.json is missing"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_files_of_another_checkpoint(tmp_path, name):
    """Each is a valid file; together they are not this checkpoint."""
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    shutil.copy(second / name, first / name)
    with pytest.raises(CorruptFile, match=name):
        checkpoint.load(first)
    assert is_whole(second, 2)


def test_swapped_files(tmp_path):
    path = save(tmp_path)
    (path / "agent.safetensors").rename(path / "x")
    (path / "training.safetensors").rename(path / "agent.safetensors")
    (path / "x").rename(path / "training.safetensors")
    with pytest.raises(CorruptFile):
        checkpoint.load(path)


def test_a_pickle_in_the_place_of_the_weights_is_refused_and_not_run(tmp_path):
    """Even with a manifest that vouches for it."""
    import pickle

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    path = save(tmp_path)
    (path / "agent.safetensors").write_bytes(pickle.dumps(Bomb()))
    manifest = storage.read_sealed_json(path / "manifest.json")
    manifest["files"]["agent.safetensors"] = {
        "sha256": storage.sha256_file(path / "agent.safetensors"),
        "bytes": (path / "agent.safetensors").stat().st_size,
    }
    storage.write_sealed_json(path / "manifest.json", manifest)
    with pytest.raises(CorruptFile):
        checkpoint.load(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.name != "posix", reason="rights as POSIX has them")
def test_others_may_read_it_as_far_as_the_umask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        checkpoint.write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(2)})
        assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_what_the_disk_refuses_is_said_of_the_file_that_was_meant(tmp_path):
    with pytest.raises(PermissionError) as told, storage.atomic_file(tmp_path / "a.gif") as temporary:
        raise PermissionError(13, "Permission denied", str(temporary))
    assert told.value.filename == str(tmp_path / "a.gif") and not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError) as told, storage.atomic_file(tmp_path / "a.gif"):
        (tmp_path / "other").read_bytes()
    assert told.value.filename == str(tmp_path / "other")  # and of another file, of that one


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_a_full_disk_is_said_of_the_file_that_was_meant(tmp_path, monkeypatch):
    """Python's own error names no file, and that of safetensors is none of the system's."""
    with pytest.raises(OSError, match="No space left") as told, storage.atomic_file(tmp_path / "a.txt"):
        Path("/dev/full").write_text("x")
    assert told.value.filename == str(tmp_path / "a.txt")

    def save_file(tensors, path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    with pytest.raises(OSError, match="No space left") as told:
        checkpoint.write_tensors(tmp_path / "b", {"x": torch.ones(2)})
    assert told.value.errno == 28
    with pytest.raises(OSError, match="No space left") as told, storage.atomic_directory(tmp_path / "c") as folder:
        raise OSError(28, "No space left on device", str(folder / "weights"))
    assert told.value.filename == str(tmp_path / "c" / "weights")


# ----------------------------------------------------------------------------------------------- failing half-way


def count_calls(monkeypatch, fail_at: int | None) -> list[str]:
    """Counts the calls that touch the disk while saving; the one numbered `fail_at` fails as a full disk does."""
    calls: list[str] = []

    def wrap(owner, name):
        original = getattr(owner, name)

        def guarded(*args, **kwargs):
            if name == "mkdir" and Path(args[0]).is_dir():
                return original(*args, **kwargs)  # a folder that exists already: pathlib expects the failure
            calls.append(name)
            if len(calls) - 1 == fail_at:
                raise OSError(28, "No space left on device")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    for owner, name in (
        (os, "rename"), (os, "replace"), (os, "fsync"), (os, "mkdir"), (checkpoint, "write_tensors"),
        (Path, "write_text"), (checkpoint, "sha256_file"),
    ):  # fmt: skip
        wrap(owner, name)
    return calls


def test_a_failure_at_any_call_leaves_the_last_checkpoint_and_says_so(tmp_path, monkeypatch):
    folder = tmp_path / "count"
    save(folder, 1)
    with monkeypatch.context() as patch:
        calls = count_calls(patch, None)
        save(folder, 2)
    assert {"rename", "fsync", "write_tensors", "write_text", "sha256_file", "mkdir"} <= set(calls)
    assert calls.index("rename") > max(i for i, c in enumerate(calls) if c in ("write_tensors", "write_text"))
    assert "fsync" in calls[calls.index("rename") + 1 :]  # the directory, after the rename
    for number in range(len(calls)):
        folder = tmp_path / str(number)
        save(folder, 1)
        with monkeypatch.context() as patch:
            count_calls(patch, number)
            with pytest.raises(OSError, match="No space left"):
                save(folder, 2)
        for step in checkpoint.steps(folder):  # 2 is there only if the failure came after the rename
            assert is_whole(folder / f"{step:08d}", step), calls[number]
        assert checkpoint.steps(folder)[0] == 1
        assert not list(folder.glob(".partial-*"))
        save(folder, 2)
        assert is_whole(checkpoint.latest(folder), 2)


def test_every_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Write, fsync each file and the folder, rename, fsync the parent: in this order."""
    events: list[str] = []
    sync, rename = storage._sync, os.rename
    monkeypatch.setattr(storage, "_sync", lambda p: (events.append(f"sync {Path(p).name}"), sync(p)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    save(tmp_path / "c", 1)
    at = events.index("rename")
    for name in (*checkpoint.FILES, "manifest.json"):
        assert f"sync {name}" in events[:at]
    assert events[at - 1].startswith("sync .partial-00000001") and events[at + 1 :] == ["sync c"]


def test_litter_is_swept(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".partial-00000002-1-ab").mkdir()
    (tmp_path / ".partial-00000002-1-ab" / "agent.safetensors").write_bytes(b"half")
    (tmp_path / ".partial-x").write_bytes(b"")
    assert checkpoint.steps(tmp_path) == [1]
    checkpoint.clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


def test_two_hundred_kills_leave_no_unloadable_checkpoint(tmp_path):
    """A child saves in a loop and is killed with SIGKILL at a random instant, two hundred times over one folder.

    After each kill every checkpoint there loads, what the child had finished is still there, and the next child
    goes on from it.
    """
    draw = random.Random(0)
    folder = tmp_path / "checkpoints"
    step = litter = 0
    save(folder, 0)
    for _ in range(200):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # nothing but saving; never returns into pytest
            try:
                os.close(reader)
                checkpoint.clean(folder)
                mine = step
                while True:
                    begun = time.perf_counter()
                    mine += 1
                    save(folder, mine, keep=2)
                    os.write(writer, b"%12d %11.6f" % (mine, time.perf_counter() - begun))
            finally:
                os._exit(1)
        os.close(writer)
        finished, took = step, 0.0
        for _ in range(draw.randint(1, 2)):  # then, somewhere in the save after this one, whatever the disk's speed
            finished, took = (float(part) for part in os.read(reader, 24).split())
        time.sleep(draw.uniform(0.0, took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        litter += bool(list(folder.glob(".partial-*")))
        there = checkpoint.steps(folder)
        assert there and there[-1] >= finished, "a finished checkpoint is gone"
        for number in there:
            assert is_whole(folder / f"{number:08d}", number)
        step = there[-1]
    assert step >= 200
    assert litter > 50, f"only {litter} kills fell into a save: the test shows little"


# ---------------------------------------------------------------------------------------------------- optimisers


def fit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=g)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=1e-2),
    ],
    ids=["adamw", "adamw-fused", "amsgrad", "momentum", "sgd"],
)
def test_optimizers_continue_to_the_bit(tmp_path, make):
    """Through the disk: three updates, save, load into fresh ones, three more equal six."""

    def fresh():
        torch.manual_seed(0)
        models = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 1)]
        return models, [make(m.parameters()) for m in models]

    models, optimizers = fresh()
    for m, o in zip(models, optimizers):
        fit(m, o, 3, seed=1)
    optimizers[1].param_groups[0]["lr"] = 5e-3
    tensors, groups = checkpoint.pack_optimizers(optimizers)
    weights = {f"{i}.{k}": v for i, m in enumerate(models) for k, v in m.state_dict().items()}
    path = checkpoint.save(tmp_path, 3, weights, tensors, {"optimizers": groups})
    loaded = checkpoint.load(path)
    others, fresh_optimizers = fresh()
    for i, m in enumerate(others):
        m.load_state_dict({k[2:]: v for k, v in loaded.agent.items() if k.startswith(f"{i}.")})
    checkpoint.unpack_optimizers(fresh_optimizers, loaded.training, loaded.state["optimizers"])
    assert fresh_optimizers[1].param_groups[0]["lr"] == 5e-3
    for ms, os_ in ((models, optimizers), (others, fresh_optimizers)):
        for m, o in zip(ms, os_):
            fit(m, o, 3, seed=2)
    for a, b in zip(models, others):
        assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)
    json.dumps(groups)


# ---------------------------------------------------------------------------------------------------------- locks


def test_a_lock_is_one_process_s_and_leaves_nothing(tmp_path):
    path = tmp_path / "a" / "b" / "lock"
    with storage.locked(path, "it is done", "wait") as held:
        assert held
        said = rf"it is done by another process \({os.getpid()} on .*\): wait"
        with pytest.raises(Taken, match=said), storage.locked(path, "it is done", "wait"):
            pass
        assert path.is_file()
    assert not (tmp_path / "a").exists()  # it was made for the lock
    with pytest.raises(RuntimeError), storage.locked(path, "", ""):
        (path.parent / "work").touch()
        raise RuntimeError
    assert [item.name for item in path.parent.iterdir()] == ["work"]


def test_a_turn_is_waited_for_but_not_for_ever(tmp_path):
    pytest.importorskip("fcntl")
    path = tmp_path / "lock"
    told = pytest.raises(Taken, match="is being written to by another process")
    with storage.locked(path, "", ""), told, storage.in_turn(path, seconds=0.05):
        pass
    with storage.in_turn(path):
        assert path.is_file()
    assert not list(tmp_path.iterdir())


def test_a_lock_goes_with_its_process(tmp_path):
    path = tmp_path / "lock"
    if (child := os.fork()) == 0:
        try:
            with storage.locked(path, "", ""):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert path.is_file()
    with storage.locked(path, "", "") as held:
        assert held


def test_a_lock_on_a_removed_file_is_none(tmp_path, monkeypatch):
    """The one who had it removes it between another's opening and locking it: two must not have one each."""
    fcntl = pytest.importorskip("fcntl")
    path, flock = tmp_path / "lock", fcntl.flock

    def late(file, kind) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with storage.locked(path, "", "") as held:
        assert held and path.is_file()
        with pytest.raises(Taken), storage.locked(path, "", ""):
            pass


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(file, kind) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with storage.locked(tmp_path / "lock", "", "") as held, storage.locked(tmp_path / "lock", "", "") as other:
        assert not held and not other
    assert not list(tmp_path.iterdir())
