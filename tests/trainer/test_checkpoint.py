"""Checkpoints: bitwise round trips, retention, damage, full disks, and processes killed at every moment."""

import json
import random
import resource
import signal
import threading
from pathlib import Path

import forked
import pytest
import safetensors.torch
import torch

from lowbit.configs.schema import CheckpointConfig
from lowbit.errors import CheckpointError
from lowbit.trainer import checkpoint
from lowbit.trainer.checkpoint import CheckpointStore, Snapshot
from lowbit.trainer.snapshot import read_manifest
from lowbit.trainer.tensorfile import DTYPES, hash_file, read_tensors, write_tensors

FOREGROUND = CheckpointConfig(background=False)


def _snapshot(step: int, ema: bool = False) -> Snapshot:
    weights = {"embedding.weight": torch.randn(5, 3) + step, "blocks.0.norm.weight": torch.randn(3)}
    state = {f"{name}.exp_avg": torch.randn_like(t) for name, t in weights.items()}
    state["blocks.0.norm.weight.step"] = torch.tensor(float(step))
    meta = {"tokens": 10 * step, "seconds": 0.1 + step, "cursor": {"sample": step}}
    return Snapshot(step, weights, state, {k: v * 2 for k, v in weights.items()} if ema else None, meta)


def _same(a: Snapshot, b: Snapshot) -> bool:
    return (
        a.step == b.step
        and a.meta == b.meta
        and a.parts.keys() == b.parts.keys()
        and all(x.keys() == b.parts[part].keys() for part, x in a.parts.items())
        and all(torch.equal(t, b.parts[part][name]) for part, x in a.parts.items() for name, t in x.items())
    )


def _names(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.list()]


# The file ---------------------------------------------------------------------------------------------------------


def test_files_are_safetensors(tmp_path: Path) -> None:
    """The library reads what we write, for every type, shape and layout."""
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "transposed": torch.randn(4, 6).T}
    tensors |= {'a "quoted" näme': torch.arange(3), "slice": torch.arange(20)[3:17:2]}
    record = write_tensors(tmp_path / "x", tensors)
    assert record == hash_file(tmp_path / "x")
    back = safetensors.torch.load_file(tmp_path / "x")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name].float(), tensor.float()), name


def test_we_read_the_library_s_files(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.arange(4.0)}, tmp_path / "x")
    assert torch.equal(read_tensors(tmp_path / "x")["a"], torch.arange(4.0))
    (tmp_path / "y").write_bytes(b"not a tensor file at all")
    with pytest.raises(ValueError, match="y"):
        read_tensors(tmp_path / "y")


# Round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("ema", [False, True], ids=["plain", "ema"])
def test_round_trip(tmp_path: Path, background: bool, ema: bool) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(background=background))
    assert _names(store) == []
    snapshot = _snapshot(7, ema)
    store.save(snapshot)
    store.wait()
    [path] = store.list()
    assert path == tmp_path / "checkpoints" / "step_00000007"
    for which in ("latest", path, str(path), tmp_path, tmp_path / "checkpoints"):
        assert _same(store.load(which), snapshot)
    weights = store.load(weights_only=True)
    assert weights.optimizer == {} and weights.model.keys() == snapshot.model.keys()
    assert (weights.ema is not None) == ema


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    weight = torch.randn(4, 2)
    snapshot = Snapshot(1, {"embedding.weight": weight, "head.weight": weight, "other": weight.clone()}, {}, None, {})
    for config in (FOREGROUND, CheckpointConfig(background=True)):
        store = CheckpointStore(tmp_path / str(config.background), config)
        store.save(snapshot)
        store.wait()
        stored = safetensors.torch.load_file(store.list()[-1] / "model.safetensors")
        assert sorted(stored) == ["embedding.weight", "other"]
        loaded = store.load().model
        assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
        assert torch.equal(loaded["head.weight"], weight)


def test_training_may_go_on_while_the_background_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is held up until the tensors and the metadata have changed."""
    changed, write = threading.Event(), checkpoint.write_snapshot

    def held_up(*args: object) -> None:
        assert changed.wait(30)
        write(*args)

    monkeypatch.setattr(checkpoint, "write_snapshot", held_up)
    snapshot = _snapshot(1, ema=True)
    expected = {part: {k: t.clone() for k, t in tensors.items()} for part, tensors in snapshot.parts.items()}
    store = CheckpointStore(tmp_path, CheckpointConfig(background=True))
    store.save(snapshot)
    for tensors in snapshot.parts.values():
        for tensor in tensors.values():
            tensor.fill_(-1)
    snapshot.meta["cursor"]["sample"] = -1
    changed.set()
    store.wait()
    loaded = store.load()
    assert all(torch.equal(loaded.parts[part][k], t) for part, tensors in expected.items() for k, t in tensors.items())
    assert loaded.meta["cursor"] == {"sample": 1}


@pytest.mark.gpu
def test_from_the_gpu(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(background=True))
    for step in (1, 2):
        weight = torch.full((1000, 1000), float(step), device="cuda")
        store.save(Snapshot(step, {"a": weight, "tied": weight}, {}, None, {}))
        weight.fill_(-1)
    store.wait()
    for step in (1, 2):
        loaded = store.load(tmp_path / f"step_{step:08d}").model
        assert torch.equal(loaded["tied"], torch.full((1000, 1000), float(step)))


# Retention --------------------------------------------------------------------------------------------------------


def test_keep_last_and_keep_every(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(background=False, keep_last=2, keep_every_steps=4))
    for step in range(1, 11):
        store.save(_snapshot(step))
    assert _names(store) == [f"step_{step:08d}" for step in (4, 8, 9, 10)]
    assert sorted(path.name for path in tmp_path.iterdir()) == _names(store)


def test_newest_is_what_was_written_last(tmp_path: Path) -> None:
    """A run that went back to step 20 must not fall into the steps it left behind."""
    store = CheckpointStore(tmp_path, CheckpointConfig(background=False, keep_last=3))
    for step in (10, 20, 30):
        store.save(_snapshot(step))
    store.save(_snapshot(25))
    assert store.load().step == 25
    replacement = _snapshot(30)
    store.save(replacement)
    assert _same(store.load(), replacement)
    assert _names(store) == ["step_00000020", "step_00000025", "step_00000030"]


def test_the_only_good_one_is_never_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(background=False, keep_last=1))
    store.save(_snapshot(10))
    for name in ("step_00000020", "step_00000030"):  # newer in name, empty inside
        (tmp_path / name).mkdir()
    assert store.load().step == 10
    store.save(_snapshot(15))
    assert store.load().step == 15
    assert _names(store) == ["step_00000015"]


# Damage -----------------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "one bit": _flip,
    "missing": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "meta.json", "manifest.json"])
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_newest_checkpoint_falls_back_and_says_so(tmp_path: Path, file: str, damage: str) -> None:
    said: list[str] = []
    store = CheckpointStore(tmp_path, FOREGROUND, said.append)
    good = _snapshot(1)
    store.save(good)
    store.save(_snapshot(2))
    DAMAGES[damage](tmp_path / "step_00000002" / file)
    assert _same(store.load("latest"), good)
    assert any("step_00000002" in line for line in said) and any("falling back" in line for line in said)
    with pytest.raises(CheckpointError, match="step_00000002"):
        store.load(tmp_path / "step_00000002")
    DAMAGES[damage](tmp_path / "step_00000001" / file)
    with pytest.raises(CheckpointError, match="none of the 2"):
        store.load()


def test_a_lone_damaged_checkpoint_is_no_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, FOREGROUND)
    store.save(_snapshot(1))
    (tmp_path / "step_00000001" / "meta.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 1"):
        store.load()


@pytest.mark.parametrize(
    "manifest",
    ["[]", "null", '{"format": "lowbit checkpoint 1"}', '{"format": "lowbit checkpoint 99"}', "\x00", "[" * 10],
)
def test_odd_manifests(tmp_path: Path, manifest: str) -> None:
    store = CheckpointStore(tmp_path, FOREGROUND)
    store.save(_snapshot(1))
    (tmp_path / "step_00000001" / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError):
        store.load(tmp_path / "step_00000001")
    store.save(_snapshot(1))
    assert store.load().step == 1


def test_nothing_to_load(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none", FOREGROUND)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        store.load()
    with pytest.raises(CheckpointError, match="neither"):
        store.load(tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        store.load(tmp_path / "step_00000009")


# Full disks -------------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from pathlib import Path
import torch
from lowbit.configs.schema import CheckpointConfig
from lowbit.errors import CheckpointError
from lowbit.trainer.checkpoint import CheckpointStore, Snapshot
folder, background = Path(sys.argv[1]), sys.argv[2] == "True"
store = CheckpointStore(folder, CheckpointConfig(background=background))
make = lambda step, size: Snapshot(step, {"a": torch.full((size,), float(step))}, {}, None, {})
store.save(make(1, 100))
store.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    store.save(make(2, 1 << 20))
    store.wait()
except CheckpointError as error:
    print(error)
else:
    print("no error")
assert [path.name for path in folder.iterdir()] == ["step_00000001"], list(folder.iterdir())
assert store.load().step == 1
store.save(make(3, 100))
store.wait()
assert store.load().step == 3
"""


@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_the_system_refuses(tmp_path: Path, background: bool) -> None:
    """A real refusal in the middle of a file (a file-size limit): one error, nothing left, the old one readable."""
    script, folder = tmp_path / "limited.py", tmp_path / "checkpoints"
    script.write_text(LIMITED)
    folder.mkdir()
    result = forked.run([str(script), str(folder), str(background)], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "step 2 could not be written" in result.stdout and "4.0 MiB" in result.stdout
    assert len(result.stdout.strip().splitlines()) == 1


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, FOREGROUND)
    store.save(_snapshot(1))
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(CheckpointError, match=r"only 0.0 MiB are free.*earlier checkpoints are intact"):
        store.save(_snapshot(2))
    assert store.load().step == 1
    assert _names(store) == ["step_00000001"]


def test_a_background_error_comes_out_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(background=True))
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0})())
    store.save(_snapshot(1))
    with pytest.raises(CheckpointError, match="step 1"):
        store.save(_snapshot(2))
    store.wait()
    monkeypatch.undo()
    store.save(_snapshot(3))
    store.wait()
    assert store.load().step == 3


# Kills ------------------------------------------------------------------------------------------------------------


def _writer(folder: Path, mode: str, number: int) -> list[dict[str, int]]:
    script = Path(__file__).with_name("crashing_writer.py")
    result = forked.run([str(script), str(folder), mode, str(number)], folder.parent)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def _require_whole(store: CheckpointStore) -> int:
    """Every visible checkpoint is complete and true to its step; returns the newest step."""
    for path in store.list():
        read_manifest(path)
        snapshot = store.load(path)
        assert snapshot.meta == {"at": snapshot.step}
        assert torch.equal(snapshot.model["b"], torch.full_like(snapshot.model["b"], snapshot.step + 1.0))
    return store.load().step


def test_killed_at_every_operation_on_the_folder(tmp_path: Path) -> None:
    ends = _writer(tmp_path, "point", 44)
    statuses = [end["status"] for end in ends]
    survived = statuses.index(0)
    assert survived > 20 and set(statuses[:survived]) == {signal.SIGKILL} and set(statuses[survived:]) == {0}
    newest = []
    for end in ends:
        folder = tmp_path / str(end["call"])
        store = CheckpointStore(folder, FOREGROUND)
        newest.append(_require_whole(store))
        store.save(Snapshot(9, {"b": torch.full((1,), 10.0)}, {}, None, {"at": 9}))
        assert not [path for path in folder.iterdir() if path.name.startswith(".")], "leftovers are cleaned"
        assert _require_whole(store) == 9
    assert newest == sorted(newest) and newest[0] == 2 and newest[-1] == 3


def test_a_checkpoint_by_its_bare_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, FOREGROUND)
    for step in (1, 2):
        store.save(Snapshot(step, {"b": torch.full((1,), float(step))}, {}, None, {}))
    assert store.load("step_00000001").step == 1 and store.load("latest").step == 2
    with pytest.raises(CheckpointError, match="step_00000003"):
        store.load("step_00000003")


def test_killed_at_random_moments(tmp_path: Path) -> None:
    ends = _writer(tmp_path, "random", random.Random(0).randrange(1000))
    assert {end["status"] for end in ends} == {signal.SIGKILL}
    assert _require_whole(CheckpointStore(tmp_path, FOREGROUND)) >= 0
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
