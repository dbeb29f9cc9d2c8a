"""Every impossible combination is refused with the keys, the values, and a value that does work."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowbit.configs.schema import RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import plain
from lowbit.configs.strict import build, locate, schema_paths, unwrap_optional
from lowbit.configs.validate import RANGES, validate
from lowbit.configs.validate_distill import validate_distill, validate_train
from lowbit.configs.validate_rl import validate_rl
from lowbit.errors import ConfigError

BASE: dict[str, Any] = plain(RunConfig(max_steps=10))


def tree(changes: dict[str, Any], base: dict[str, Any] = BASE) -> dict[str, Any]:
    changed = copy.deepcopy(base)
    for key, value in changes.items():
        *parents, last = key.split(".")
        node: Any = changed
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[last] = value
    return changed


CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"model.heads": 3}, ["model.width=256", "model.heads=3"]),
    ({"model.kv_heads": 3}, ["model.heads=4", "model.kv_heads=3"]),
    ({"model.heads": 2, "model.kv_heads": 4}, ["model.heads=2", "model.kv_heads=4"]),
    ({"model.width": 12}, ["model.width=12", "model.heads=4", "even"]),
    ({"model.head_dim": 63}, ["model.head_dim=63", "even"]),
    ({"model.rope.factor": 4.0}, ["model.rope.factor=4", "model.rope.scaling=none"]),
    ({"model.rope.scaling": "ntk", "model.head_dim": 2}, ["model.rope.scaling=ntk", "model.head_dim=4"]),
    ({"model.rope.scaling": "llama3", "model.rope.low_freq_factor": 8.0}, ["low_freq_factor=8", "high_freq_factor=4"]),
    ({"model.rope.scaling": "yarn", "model.rope.beta_slow": 64.0}, ["beta_slow=64", "beta_fast=32"]),
    ({"model.windows": [4, -1]}, ["model.windows=[4, -1]", "model.windows=[] would work"]),
    ({"model.kv_from": [0, 0]}, ["model.kv_from=[0, 0]", "model.layers=4"]),
    ({"model.kv_from": [0, 2, 2, 3]}, ["model.kv_from=[0, 2, 2, 3]", "an earlier layer"]),
    ({"model.moe.experts": 2, "model.moe.top_k": 3}, ["model.moe.top_k=3", "model.moe.experts=2"]),
    ({"model.moe.experts": 2, "model.moe.first_dense": 4}, ["model.moe.first_dense=4", "no layer would have experts"]),
    ({"model.windows": [0, 9, 0, 0, 9]}, ["model.windows=[0, 9, 0, 0, 9]", "model.layers=4", "model.layers=5 or"]),
    ({"model.moe.shared": 2}, ["model.moe.shared=2", "model.moe.experts=0", "model.moe.shared=0 would work"]),
    (
        {
            "precision.stabilisers.clamp.enabled": True,
            "model.mlp": "relu2",
            "model.norm_placement": "after",
        },
        ["clamp.enabled=true model.norm_placement=after", "unit mean square", "model.norm_placement=before would work"],
    ),
    ({"data.sequence_length": 4096}, ["data.sequence_length=4096", "model.max_sequence=2048"]),
    ({"data.shard_tokens": 256}, ["data.shard_tokens=256", "data.sequence_length=256"]),
    ({"evaluation.sample_tokens": 4000}, ["evaluation.sample_tokens=4000", "model.max_sequence=2048"]),
    ({"evaluation.sample_prompt": "x" * 2048}, ["evaluation.sample_tokens=96", "prompt of up to 2049"]),
    ({"batch.sequences": 17}, ["batch.sequences=17", "batch.micro_batch=16"]),
    ({"batch.sequences": 8}, ["batch.sequences=8", "batch.micro_batch=16"]),
    ({"batch.warmup": [{"until_tokens": 9, "sequences": 12}]}, ["batch.warmup.0.sequences=12", "batch.micro_batch=16"]),
    ({"batch.warmup": [{"until_tokens": 9, "sequences": 0}]}, ["batch.warmup.0.sequences=0"]),
    ({"batch.warmup": [{"until_tokens": 0, "sequences": 16}]}, ["batch.warmup.0.until_tokens=0"]),
    (
        {"batch.warmup": [{"until_tokens": 9, "sequences": 16}, {"until_tokens": 9, "sequences": 16}]},
        ["batch.warmup.1.until_tokens=9", "after 9"],
    ),
    ({"data.tokenizer.eot": "</s>"}, ["data.tokenizer.eot=</s>", "data.tokenizer.kind=bpe"]),
    ({"max_steps": None}, ["max_steps=null", "max_tokens=null", "max_minutes=null"]),
    ({"deterministic": True, "max_minutes": 1.0}, ["deterministic=true", "max_minutes=1"]),
    ({"resume": "/nowhere/step-7"}, ["resume=/nowhere/step-7", "no such"]),
    ({"run_name": ""}, ["run_name=", "runs/"]),
    ({"run_name": "../x"}, ["run_name=../x"]),
    ({"run_name": "/abs"}, ["run_name=/abs"]),
    ({"device": "gpu"}, ["device=gpu", "cuda:N"]),
    ({"device": "cuda:x"}, ["device=cuda:x"]),
    ({"optim.schedule.decay_fraction": 0.0}, ["optim.schedule.kind=wsd", "optim.schedule.decay_fraction=0"]),
    ({"precision.rules": [{"match": ""}]}, ["precision.rules.0.match=", "whole name"]),
    ({"precision.rules": [{"match": ".*"}, {"match": "blocks.(3"}]}, ["rules.1.match=blocks.(3", "regular expression"]),
    ({"precision.rules": [{"match": ".*", "last_blocks": 0.0}]}, ["precision.rules.0.last_blocks=0", "at most 1"]),
    ({"precision.switch": [{"forward": "bf16"}]}, ["switch.0.at=null", "switch.0.at_step=null", "one time"]),
    ({"precision.switch": [{"at": 0.5, "at_decay": True, "wgrad": "bf16"}]}, ["at=0.5", "at_decay=true", "one time"]),
    ({"precision.switch": [{"at": 0.5}]}, ["precision.switch.0.forward=null", "nothing would change"]),
    ({"precision.switch": [{"at": 1.0, "forward": "bf16"}]}, ["precision.switch.0.at=1", "less than 1"]),
    ({"precision.switch": [{"at_step": 0, "forward": "bf16"}]}, ["precision.switch.0.at_step=0", "at least 1"]),
    ({"precision.switch": [{"at_step": 10, "forward": "bf16"}]}, ["switch.0.at_step=10", "max_steps=10"]),
    (
        {"precision.switch": [{"at_decay": True, "forward": "bf16"}], "optim.schedule.kind": "cosine"},
        ["switch.0.at_decay=true", "optim.schedule.kind=cosine"],
    ),
    ({"engine.processes": 2}, ["engine.processes=2", "engine.kind=local", "engine.kind=deepspeed"]),
    *(
        ({key: True, "comm.kind": kind, "engine.kind": "deepspeed"}, [f"{key}=true", f"comm.kind={kind}"])
        for key in ("comm.error_feedback", "comm.stochastic_rounding")
        for kind in ("none", "bf16", "auto")
    ),
    (
        {f"comm.{key}": True for key in ("error_feedback", "stochastic_rounding")}
        | {"comm.kind": "sq48", "engine.kind": "deepspeed"},
        ["comm.error_feedback=true", "comm.stochastic_rounding=true", "comm.stochastic_rounding=false would work"],
    ),
    ({"engine.cuda_graphs": True, "engine.kind": "deepspeed"}, ["engine.cuda_graphs=true", "one process on one GPU"]),
    ({"engine.cuda_graphs": True, "model.moe.experts": 4}, ["model.moe.experts=4", "not the same each time"]),
    ({"engine.cuda_graphs": True, "model.attention_z": 1e-4}, ["model.attention_z", "engine.cuda_graphs=false"]),
    ({"engine.cuda_graphs": True, "device": "cpu"}, ["device=cpu", "a CPU has no graphs"]),
    (
        {"engine.attention": "varlen", "model.attention_softcap": 50.0},
        ["engine.attention=varlen model.attention_softcap=50", "knows no cap", "engine.attention=flex would work"],
    ),
    ({"engine.attention": "varlen", "precision.compute": "fp32"}, ["precision.compute=fp32", "multiplies BF16"]),
    ({"engine.attention": "varlen", "model.head_dim": 12}, ["model.head_dim=12", "a multiple of 8"]),
    ({"engine.attention": "varlen", "model.head_dim": 264}, ["model.head_dim=264", "heads of 256 at most; "]),
    (
        {"engine.attention": "varlen", "model.head_dim": 256, "model.attention_z": 1e-4},
        ["model.head_dim=256 model.attention_z=0.0001", "heads of 256 at most, 8 less with Z-Reg"],
    ),
    ({"engine.expert_parallel": True}, ["engine.expert_parallel=true", "model.moe.experts=0", "no experts"]),
    ({"engine.expert_parallel": True, "model.moe.experts": 4}, ["engine.kind=local", "one process has all experts"]),
    (
        {"engine": {"expert_parallel": True, "kind": "deepspeed", "zero_stage": 3}, "model.moe.experts": 4},
        ["engine.expert_parallel=true", "engine.zero_stage=3"],
    ),
    ({"data.sources": {}}, ["data.sources={}", "nothing to train on"]),
    ({"data.sources.python_docs.weight": 0.0}, ["data.sources.python_docs.weight=0"]),
    ({"data.sources.python_docs.weight": -1.0}, ["data.sources.python_docs.weight=-1"]),
    ({"data.sources.python_docs.max_documents": 0}, ["data.sources.python_docs.max_documents=0"]),
    ({"data.sources.python_docs.document_bytes": 0}, ["data.sources.python_docs.document_bytes=0"]),
    ({"data.sources.python_docs.path": "x"}, ["python_docs.path=x", "reads no path"]),
    ({"data.sources.python_docs.kind": "files"}, ["python_docs.path=", "kind=files", "needs a path"]),
    ({"data.sources.python_docs.kind": "huggingface"}, ["python_docs.path=", "needs a path"]),
    ({"data.sources": {"f": {"kind": "files", "path": "/nowhere/*.txt"}}}, ["f.path=/nowhere/*.txt", "no such"]),
    ({"data.tokenizer.vocab_size": 256}, ["data.tokenizer.vocab_size=256", "at least 257"]),
    ({"data.tokenizer.kind": "file"}, ["data.tokenizer.kind=file", "data.tokenizer.path="]),
    ({"data.tokenizer.kind": "file", "data.tokenizer.path": "/nowhere.json"}, ["path=/nowhere.json", "no such"]),
    ({"data.tokenizer.kind": "bytes", "data.tokenizer.path": "x"}, ["path=x", "kind=bytes"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "fragments"), CASES, ids=[f[0] for _, f in CASES])
def test_impossible_combinations(changes: dict[str, Any], fragments: list[str]) -> None:
    validate(build(RunConfig, BASE))
    with pytest.raises(ConfigError) as caught:
        validate(build(RunConfig, tree(changes)))
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def advice(changes: dict[str, Any]) -> tuple[str, str, str] | None:
    """The refusal of a configuration, and the first KEY=VALUE behind its last semicolon that `would work`."""
    with pytest.raises(ConfigError) as caught:
        validate(build(RunConfig, tree(changes)))
    message = str(caught.value)
    found = re.match(r"([a-z_0-9.]+)=(\S+?)[ ,].*would", message.rsplit("; ", 1)[1] + " ")
    return (message, found[1], found[2]) if found and found[1] != "data" else None


ADVISED = [changes for changes, _ in CASES if advice(changes)]


def test_most_errors_offer_an_assignment() -> None:
    assert len(ADVISED) >= 25


@pytest.mark.parametrize("changes", ADVISED, ids=str)
def test_the_value_offered_works(changes: dict[str, Any]) -> None:
    """Follow the advice, and the run is accepted (or another thing is wrong, such as the path a kind then needs)."""
    message, key, text = advice(changes) or ("", "", "")
    better = tree({key: yaml.safe_load(text)}, tree(changes))
    if key == "max_minutes":  # "max_minutes=null with max_steps=1000 would work"
        better["max_steps"] = 1000
    try:
        validate(build(RunConfig, better))
    except ConfigError as error:
        assert str(error).split(":")[0] != message.split(":")[0]
        assert "path" in str(error)


def bounds() -> list[tuple[str, float, bool]]:
    """For each range: values at and just beyond its ends, and whether they are inside."""
    found: list[tuple[str, float, bool]] = []
    for key, r in RANGES.items():
        found += [(key, r.low - 1, False), (key, r.low, not r.open_low)]
        if r.high != float("inf"):
            found += [(key, r.high, not r.open_high), (key, r.high + 1, False)]
    return found


@pytest.mark.parametrize(("key", "value", "inside"), bounds())
def test_ranges(key: str, value: float, inside: bool) -> None:
    kind = unwrap_optional(locate(key))[0]
    config = build(RunConfig, tree({key: kind(value)}))
    try:
        validate(config)
    except ConfigError as error:
        refused_for_range = re.match(rf"{re.escape(key)}=\S+: must be (at least|greater than) ", str(error))
        assert bool(refused_for_range) is not inside, error
    else:
        assert inside


def test_every_number_of_the_schema_has_a_range() -> None:
    elsewhere = {"weight", "max_documents", "document_bytes"}  # of each source, in _source
    elsewhere |= {"rotation"}  # of each product, in lowbit.quant.policy
    numbers = {p for p in schema_paths() if unwrap_optional(locate(p.replace("NAME", "x")))[0] in (int, float)}
    assert {p for p in numbers if p.rsplit(".", 1)[-1] not in elsewhere} == set(RANGES)


def test_paths_are_looked_for_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for path in (tmp_path, tmp_path / "a.txt", tmp_path / "*.txt", tmp_path / "**" / "a.*"):
        validate(build(RunConfig, tree({"data.sources": {"f": {"kind": "files", "path": str(path)}}})))
    validate(build(RunConfig, tree({"resume": str(tmp_path)})))
    tokenizer = {"data.tokenizer.kind": "file", "data.tokenizer.path": str(tmp_path)}
    validate(build(RunConfig, tree(tokenizer)))


def _distill(key: str, path: str) -> None:
    config = build(DistillConfig, tree({"teacher.path": ".", key: path}, plain(DistillConfig(max_steps=10))))
    (validate_train if key == "cache.path" else validate_distill)(config)


def _pretrain(key: str, path: str) -> None:
    base = tree({"data.sources": {"f": {"kind": "files"}}, "data.tokenizer.kind": "file", "data.tokenizer.path": "."})
    base["data"]["sources"]["f"]["path"] = "."
    validate(build(RunConfig, tree({key: path}, base)))


def _rl(key: str, path: str) -> None:
    base = tree({"data.sources": {}, "data.tokenizer.kind": "bytes"}, plain(RlConfig(max_steps=10)))
    needs: dict[str, dict[str, Any]] = {
        "task": {"task.kind": "file", "task.path": "problems.jsonl"},
        "algorithm": {"algorithm.kl": 0.01},
    }
    validate_rl(build(RlConfig, tree({**needs.get(key.partition(".")[0], {}), key: path}, base)))


def test_a_sampler_that_drops_no_tokens_wants_a_trainer_that_drops_none() -> None:
    base = tree({"data.sources": {}, "data.tokenizer.kind": "bytes"}, plain(RlConfig(max_steps=10)))
    moe = {"model.moe.experts": 4, "model.moe.capacity": 1.5}
    why = "model.moe.experts=4 model.moe.capacity=1.5: .* another function than the sampler; model.moe.capacity=null"
    with pytest.raises(ConfigError, match=why):
        validate_rl(build(RlConfig, tree(moe, base)))
    validate_rl(build(RlConfig, tree({**moe, "model.moe.capacity": None}, base)))
    validate_rl(build(RlConfig, tree({"model.moe.capacity": 1.5}, base)))
    validate(build(RunConfig, tree(moe)))


PATHS: list[tuple[Callable[[str, str], None], str]] = [
    (_pretrain, "resume"),
    (_pretrain, "data.sources.f.path"),
    (_pretrain, "data.tokenizer.path"),
    (_distill, "teacher.path"),
    (_distill, "cache.path"),
    (_rl, "algorithm.reference"),
    (_rl, "teacher.path"),
    (_rl, "task.path"),
    (_rl, "task.held_out_path"),
]


@pytest.mark.parametrize(("check", "key"), PATHS, ids=[f"{c.__name__}-{k}" for c, k in PATHS])
def test_a_misspelt_path_is_answered_with_the_nearest(
    check: Callable[[str, str], None], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/pretrain/step_00000250", ".secret"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    for given, nearest in [
        ("rusn", "runs"),
        ("runs/pretrian", "runs/pretrain"),
        ("runs/pretrian/step_00000250", "runs/pretrain"),  # the part that is wrong
        (f"{tmp_path}/runs/pretrainn", f"{tmp_path}/runs/pretrain"),
        ("problem.jsonl", "problems.jsonl"),
    ]:
        with pytest.raises(ConfigError, match=rf"{re.escape(key)}=.*no such .*; nearest: {re.escape(nearest)}; "):
            check(key, given)
    for given in ("secret", "something/else", "/proc/nowhere"):
        with pytest.raises(ConfigError, match="no such") as caught:
            check(key, given)
        assert "nearest" not in str(caught.value)


@pytest.mark.parametrize(("given", "nearest"), [("autoo", "auto"), ("Auto", "auto"), ("non", "none"), ("noen", "none")])
def test_a_misspelt_word_is_answered_with_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"resume={given}: no such file or folder; nearest: {nearest}; use"):
        validate(build(RunConfig, tree({"resume": given})))
