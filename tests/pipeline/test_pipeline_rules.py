"""What a pipeline decides before and after its stages, with stand-ins that leave a folder like a run's."""

import errno
import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from pipeline_runs import SETTINGS, place

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import PIPELINE
from lowbit.configs.schema import OptimizerKind, RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.configs.stored import save_config
from lowbit.configs.validate_distill import student_config
from lowbit.data.dataset import prepare_data
from lowbit.data.tokenizer import bytes_tokenizer
from lowbit.distill import shards
from lowbit.errors import CheckpointError, ConfigError, DataError, LowbitError
from lowbit.models.cost import parameter_parts
from lowbit.pipeline import manifest as store
from lowbit.pipeline.identity import weights_of
from lowbit.pipeline.manifest import State
from lowbit.pipeline.plan import parts_of
from lowbit.pipeline.run import run
from lowbit.trainer import snapshot


def composed(*overrides: str) -> PipelineConfig:
    config: PipelineConfig = compose_for(PIPELINE, [*SETTINGS, *overrides])
    return config


class Leaving:
    """In place of a stage: leaves weights, a configuration and a tokenizer, and remembers its folder."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, stage: Stage, run: RunConfig, folder: Path) -> None:
        self.made.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        save_config(student_config(run) if isinstance(run, DistillConfig) else run, folder / "config.yaml")
        (folder / "model.safetensors").write_text(f"weights of {folder.name}")
        bytes_tokenizer().save(folder / "tokenizer")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline's folder that is not there yet, beside documents."""
    monkeypatch.chdir(place(tmp_path))
    return tmp_path / "runs" / "pipeline"


def test_stages_that_read_other_documents_have_other_data(folder: Path) -> None:
    """The digests are those of the data sets opened alone."""
    config = composed("stages=[pretrain,distill]", "distill.data.held_out=0.4", "distill.data.prefetch=0")
    made = run(config, folder, Leaving())
    alone = {stage: prepare_data(getattr(config, stage).data, lambda _: None).fingerprint for stage in config.stages}
    assert {stage: record.inputs["data"] for stage, record in made.stages.items()} == alone
    assert alone[Stage.pretrain] != alone[Stage.distill]
    assert store.read(folder).stages == made.stages


def test_a_stage_left_out_is_what_the_next_begins_from(folder: Path, tmp_path: Path) -> None:
    """If it was done; else the one before it is, and a fresh folder's `stages=[pretrain,rl]` trains the teacher."""
    made = run(composed("stages=[pretrain,distill]"), folder, Leaving())
    made = run(composed("stages=[pretrain,rl]"), folder, Leaving())
    assert made.stages[Stage.rl].inputs["weights"] == made.stages[Stage.distill].outputs["weights"]
    fresh = run(composed("stages=[pretrain,rl]", "run_name=fresh"), tmp_path / "runs" / "fresh", Leaving())
    assert fresh.stages[Stage.rl].inputs["weights"] == fresh.stages[Stage.pretrain].outputs["weights"]
    assert fresh.stages[Stage.pretrain].outputs["weights"] != made.stages[Stage.distill].outputs["weights"]


def test_a_stage_left_out_must_be_as_it_was_left(folder: Path) -> None:
    stages = Leaving()
    run(composed("stages=[pretrain,distill]"), folder, stages)
    weights = folder / "distill" / "model.safetensors"
    left = weights.read_text()
    weights.write_text("trained on")
    with pytest.raises(
        LowbitError, match=r"^rl takes .* of distill in .*, but its newest .* name the folder in rl\.in"
    ):
        run(composed("stages=[rl]"), folder, stages)
    weights.unlink()
    with pytest.raises(LowbitError, match=r"^rl takes the weights of distill in .*, but its weights are gone"):
        run(composed("stages=[rl]"), folder, stages)
    weights.write_text(left)
    run(composed("stages=[rl]"), folder, stages)
    assert stages.made == ["pretrain", "distill", "rl"]


def test_a_refused_command_leaves_the_settings_that_were_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever stage refuses, pipeline.yaml and the manifest stay; a full disk is one line and leaves them too."""
    given, stages = "stages=[pretrain,distill]", Leaving()
    run(composed(given), folder, stages)
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert {"pipeline.yaml", "pipeline.json"} <= before.keys()
    for change in ("pretrain.max_steps=6", "distill.loss.alpha=0.5"):
        with pytest.raises(ConfigError, match="was made otherwise"):
            run(composed(given, change), folder, stages)
        assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before

    def full(path: Path, text: str, **_: str) -> None:
        with path.open("w") as file:
            file.write(text[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(LowbitError, match=r"yaml cannot be written \(the disk is full"):
        patch.setattr(Path, "write_text", full)
        run(composed(given, "logging.every_steps=3"), folder, stages)
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
    run(composed(given, "logging.every_steps=3"), folder, stages)
    assert (folder / "pipeline.yaml").read_bytes() != before["pipeline.yaml"]
    assert stages.made == ["pretrain", "distill"]


def test_what_a_stage_left_is_read_before_it_counts_as_done(folder: Path) -> None:
    """Without weights it failed, and the line and the manifest say which and why; the same command goes on."""
    leaving = Leaving()

    def without_weights(stage: Stage, config: RunConfig, place: Path) -> None:
        leaving(stage, config, place)
        (place / "model.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"^pretrain: .* holds no checkpoint$"):
        run(composed("stages=[pretrain]"), folder, without_weights)
    record = store.read(folder).stages[Stage.pretrain]
    assert record.state is State.failed and "holds no checkpoint" in record.error
    done = run(composed("stages=[pretrain]"), folder, leaving).stages[Stage.pretrain]
    assert done.state is State.done and list(done.outputs) == ["weights"] and not done.error


def test_the_end_asks_nothing_of_a_stage_left_out(folder: Path) -> None:
    """The problems of an earlier command's rl may be gone, or set otherwise now."""
    run(composed(), folder, Leaving())
    run(composed("stages=[pretrain]", "rl.task.kind=file", "rl.task.path=gone.jsonl"), folder, Leaving())


def test_an_error_before_a_stage_names_it(folder: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "empty"
    teacher.mkdir()
    with pytest.raises(CheckpointError, match=r"^distill: .* holds no checkpoint$"):
        run(composed("stages=[distill]", f"distill.teacher.path={teacher}"), folder, Leaving())
    with pytest.raises(CheckpointError, match=r"^rl: init_from=.* is neither the folder of a run"):
        run(composed("stages=[rl]", f"rl.init_from={teacher}"), folder, Leaving())
    with pytest.raises(DataError, match=r"^pretrain: "):
        run(composed("data.sources.files.path=nowhere"), folder, Leaving())
    with pytest.raises(ConfigError, match=r"^rl: rollout\.temperature"):
        run(composed("rl.rollout.temperature=0"), folder, Leaving())


def test_a_manifest_of_an_earlier_version_is_read(folder: Path) -> None:
    """It had the hash of a stage's settings, and the tokenizer's digest among its outputs."""
    made = run(composed("stages=[pretrain]"), folder, Leaving())
    content = json.loads((folder / store.FILE).read_text())
    content["stages"]["pretrain"] |= {"config": "0" * 64}
    content["stages"]["pretrain"]["outputs"] |= {"tokenizer": "1" * 64}
    (folder / store.FILE).write_text(json.dumps(content))
    again, stages = store.read(folder), Leaving()
    assert again.stages[Stage.pretrain].settings == made.stages[Stage.pretrain].settings
    run(composed("stages=[pretrain]"), folder, stages)
    assert stages.made == []


def leave_cache(folder: Path, content: bytes) -> str:
    """A complete cache of one shard, as far as a cache's files say what is in it; returns its folder."""
    folder.mkdir(exist_ok=True)
    name, sha256 = shards.shard_name(0), hashlib.sha256(content).hexdigest()
    (folder / name).write_bytes(content)
    totals = dict.fromkeys(shards.TOTALS, 0.0)
    shard = shards.Shard(name, first=0, samples=4, bytes=len(content), sha256=sha256, totals=totals)
    numbers = dict.fromkeys(("samples", "sequence_length", "targets", "shard_samples", "micro_batch", "seed"), 4)
    teacher = {"digest": "", "step": 4, "compute": "fp32", "model": {"layers": 1, "width": 8}}
    identity = numbers | {
        "vocab_size": 16, "estimator": "varopt", "temperature": 1.0, "tokenizer": "", "data": {"fingerprint": ""},
        "teacher": teacher,
    }  # fmt: skip
    manifest = {"format": shards.FORMAT, "identity": identity, "shards": [asdict(shard)]}
    (folder / shards.MANIFEST).write_text(json.dumps(manifest))
    return str(folder)


def leave_checkpoint(run_folder: Path, step: int, content: bytes) -> str:
    """A checkpoint of a run, as far as its weights; returns their SHA-256."""
    folder = run_folder / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    files = {"model.safetensors": {"sha256": sha256, "bytes": len(content)}}
    text = json.dumps({"format": snapshot.FORMAT, "step": step, "sequence": step, "files": files})
    (folder / "manifest.json").write_text(text)
    return sha256


def test_weights_of_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    first, second = leave_checkpoint(tmp_path, 1, b"one"), leave_checkpoint(tmp_path, 2, b"two")
    assert weights_of(tmp_path) == weights_of(tmp_path, "latest") == second != first
    folder = tmp_path / "checkpoints" / "step_00000001"
    for name in ("step_00000001", str(folder)):
        assert weights_of(tmp_path, name) == first
    for name in (str(tmp_path), str(tmp_path / "checkpoints")):
        assert weights_of(tmp_path, name) == second
    (folder / "model.safetensors").write_bytes(b"ooo")
    with pytest.raises(CheckpointError, match="is not what was written"):
        weights_of(tmp_path, "step_00000001")


def test_what_a_stage_reads_besides_counts_by_what_lies_there(folder: Path, tmp_path: Path) -> None:
    """The reference and the teacher of rl, and further caches of distill: moved they are the same, edited another."""
    for name in ("reference", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    leave_cache(tmp_path / "cache", b"targets")

    settings = [
        "rl.algorithm.kl=0.1", f"rl.algorithm.reference={tmp_path}/reference", f"rl.teacher.path={tmp_path}/judge",
        f"distill.cache.more=[{tmp_path}/cache]",
    ]  # fmt: skip
    stages = Leaving()
    made = run(composed(*settings), folder, stages)
    assert {"reference", "teacher"} <= made.stages[Stage.rl].inputs.keys()
    (tmp_path / "judge").rename(tmp_path / "moved")
    moved = [setting.replace("/judge", "/moved") for setting in settings]
    run(composed(*moved), folder, stages)
    (tmp_path / "moved").rename(tmp_path / "judge")
    assert stages.made == ["pretrain", "distill", "rl"]
    edited = {
        "reference/model.safetensors": r"rl in .* was made otherwise: the reference's weights changed",
        "judge/model.safetensors": r"rl in .* was made otherwise: the teacher's weights changed",
    }
    for name, message in edited.items():
        left = (tmp_path / name).read_text()
        (tmp_path / name).write_text("other")
        with pytest.raises(ConfigError, match=message):
            run(composed(*settings), folder, stages)
        (tmp_path / name).write_text(left)
    with pytest.raises(ConfigError, match=r"distill in .* was made otherwise: the caches in cache\.more changed"):
        leave_cache(tmp_path / "cache", b"other targets")
        run(composed(*settings), folder, stages)
    assert stages.made == ["pretrain", "distill", "rl"]


def test_what_adapters_take() -> None:
    """By hand: with LoRA gradients and AdamW's two moments are those of what trains, here adapters and norms."""
    rank, given = 4, ["rl.optim.kind=adamw", "rl.warm_start.steps=3", "student.layers=2"]
    plain = composed(*given).rl
    adapted = composed(*given, f"rl.lora.rank={rank}", "rl.lora.also=[norms]").rl
    m = plain.model
    assert (m.width, m.mlp_width, m.heads, m.kv_heads, m.mlp.value) == (64, 128, 2, 2, "swiglu")
    total = parameter_parts(m, 257).total
    adapters = 2 * rank * (4 * (64 + 64) + 3 * (64 + 128))
    norms = 64 * (2 * 2 + 1) + 2 * 2 * 32  # before attention and MLP, and at the end; of queries and keys
    before, now = parts_of(Stage.rl, plain), parts_of(Stage.rl, adapted)
    assert now[0] == before[0], "all weights train in the supervised start"
    trained = adapters + norms
    assert before[1].memory - now[1].memory == 12 * (total - trained) - 4 * adapters
    kept = 2  # after two steps, and after the third, which is the last
    assert before[1].disk == kept * 12 * total
    assert now[1].disk == kept * (4 * (total + adapters) + 8 * trained)
    muon = parts_of(Stage.rl, replace(adapted, optim=replace(adapted.optim, kind=OptimizerKind.muon)))
    assert muon[1] == now[1], "no matrix is left for Muon"
