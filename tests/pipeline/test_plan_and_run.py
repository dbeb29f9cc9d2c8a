"""`--plan` against a run: tokens and disk as they were, work as PyTorch counts it, time as a bound.

Oracles: the files and the manifest that a finished pipeline left; PyTorch's own count of operations in its products.
"""

from pathlib import Path

import pytest
import torch
from pipeline_runs import SETTINGS
from torch.utils.flop_counter import FlopCounterMode

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import PIPELINE
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.distill.shards import open_cache
from lowbit.models.lm_head import lm_head_loss
from lowbit.models.transformer import Transformer
from lowbit.pipeline.manifest import read
from lowbit.pipeline.plan import Part, measured_rate, parts_of
from lowbit.trainer.jsonl import read_rows


@pytest.fixture
def planned(whole: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """Part by part, from the settings alone: the stages' folders play no part in it."""
    monkeypatch.chdir(whole)
    config: PipelineConfig = compose_for(PIPELINE, SETTINGS)
    stages = {Stage.pretrain: config.pretrain, Stage.distill: config.distill, Stage.rl: config.rl}
    return {part.name: part for stage, run in stages.items() for part in parts_of(stage, run)}


def of(folder: Path, pattern: str) -> int:
    """Bytes of the files that match."""
    return sum(file.stat().st_size for file in folder.glob(pattern))


@pytest.mark.slow
def test_tokens_disk_and_time(whole: Path, planned: dict[str, Part]) -> None:
    folder = whole / "runs" / "pipeline"
    records = read(folder).stages
    reached = {stage: record.reached["tokens"] for stage, record in records.items()}
    assert (
        planned["pretrain"].tokens == reached[Stage.pretrain]
        and planned["distill: student"].tokens == reached["distill"]
    )
    cache = open_cache(folder / "distill" / "cache")
    held = sum(shard.samples for shard in cache.shards) * 32
    assert planned["distill: teacher's cache"].tokens == held
    # Answers may end early: at most as many as planned, and not a small part of them.
    [*_, start] = read_rows(folder / "rl" / "warm_start" / "metrics.jsonl")
    for name, tokens in (
        ("rl: supervised start, at most", start["tokens"]),
        ("rl: rollouts and training", reached["rl"]),
    ):
        assert 0.3 * planned[name].tokens <= tokens <= planned[name].tokens, name
    # Two checkpoints are kept, and one more is there while it is written.
    kept = {"pretrain": "pretrain", "distill: student": "distill", "rl: rollouts and training": "rl"}
    kept["rl: supervised start, at most"] = "rl/warm_start"
    for name, place in kept.items():
        count = len(list((folder / place / "checkpoints").glob("step_*")))
        there = of(folder / place / "checkpoints", "*/*.safetensors")
        assert planned[name].disk == pytest.approx(3 * there / count, rel=0.05), name
        assert of(folder / place, "checkpoints/*/*") <= planned[name].disk, name
    # A row of targets is planned at its longest; most are shorter.
    assert 0.4 < of(folder / "distill" / "cache", "*") / planned["distill: teacher's cache"].disk <= 1
    # No stage was faster than the bound, at half the rate of a quiet machine.
    rate = measured_rate(torch.device("cpu"), torch.float32)
    for stage in Stage:
        work = sum(part.flops or 0 for name, part in planned.items() if name.startswith(stage))
        assert 0 < work / rate / 2 < records[stage].seconds, stage


def test_work_as_pytorch_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage whose attention, which PyTorch does not count on a CPU, is a small part.

    The plan counts all rows of the head, 320 with the padding, of which 257 are multiplied.
    """
    monkeypatch.chdir(tmp_path)
    config: PipelineConfig = compose_for(PIPELINE, ["pipeline=quick", "device=cpu", "data.sequence_length=16"])
    [part] = parts_of(Stage.pretrain, config.pretrain)
    model = Transformer(config.pretrain.model, 257)
    model.init_weights(1)
    tokens = torch.randint(257, (8, 16))
    weights = torch.ones(tokens.numel())
    with FlopCounterMode(display=False) as counted:
        hidden = model(tokens).flatten(0, 1)
        lm_head_loss(hidden, model.head_weight, tokens.flatten(), weights, vocab_size=257).loss_sum.backward()
    assert part.tokens == 20 * 8 * 16
    padding = part.tokens * 6 * (320 - 257) * 64
    assert part.flops is not None and part.flops - padding == pytest.approx(20 * counted.get_total_flops(), rel=0.03)
