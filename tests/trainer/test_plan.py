"""The plan of a run: its length against a simulation of the loop, memory at the border of what fits."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.cli.plan import describe
from lowbit.configs.compose import compose
from lowbit.configs.schema import BatchConfig, BatchWarmupConfig, RunConfig
from lowbit.trainer.plan import Length, Plan, plan, run_length
from lowbit.trainer.schedule import progress, sequences_at
from lowbit.trainer.zero_plan import describe_wire, wire


def simulate(config: RunConfig) -> Length:
    """Count steps as the loop takes them, with its own schedule functions."""
    step = sample = 0
    length = config.data.sequence_length
    while progress(config, step, sample * length, 0.0) < 1:
        sample += sequences_at(config, sample)
        step += 1
    return Length(step, sample * length)


STAGES = st.lists(st.tuples(st.integers(1, 40_000), st.integers(1, 9)), max_size=3)


@given(st.one_of(st.none(), st.integers(1, 60)), st.one_of(st.none(), st.integers(1, 90_000)), STAGES)
def test_length(max_steps: int | None, max_tokens: int | None, stages: list[tuple[int, int]]) -> None:
    if max_steps is None and max_tokens is None:
        assert run_length(RunConfig()) == Length(None, None)
        return
    warmup = [BatchWarmupConfig(until, size) for until, size in sorted(dict(stages).items())]
    config = RunConfig(max_steps=max_steps, max_tokens=max_tokens, batch=BatchConfig(8, 1, warmup))
    assert run_length(config) == simulate(config)


@pytest.mark.parametrize("overrides", [["model=150m"], ["model=370m", "optim=muon"], ["engine.recompute=full"]])
def test_the_largest_micro_batch_fits_and_the_next_does_not(overrides: list[str]) -> None:
    config = compose([*overrides, "data.sequence_length=1024"])
    memory = 24 * 2**30
    best = plan(config, 50_304, memory_bytes=memory).largest_micro_batch[config.engine.recompute.value]

    def fits(micro_batch: int) -> bool | None:
        batch = dataclasses.replace(config.batch, sequences=micro_batch, micro_batch=micro_batch)
        return plan(dataclasses.replace(config, batch=batch), 50_304, memory_bytes=memory).fits

    assert best > 1 and fits(best) and not fits(best + 1)


def test_recomputing_more_never_fits_less() -> None:
    fitting = plan(compose(["model=370m"]), 50_304, memory_bytes=80 * 2**30).largest_micro_batch
    assert 0 < fitting["none"] < fitting["selective"] < fitting["full"]


def test_numbers_by_hand() -> None:
    """The tiny model with 4096 tokens: every part written out."""
    config = compose(["max_steps=100", "batch.sequences=16", "batch.micro_batch=16"])
    made = plan(config, 4096, compute_bytes=4)
    blocks = 4 * (4 * 192 * 192 + 3 * 192 * 512)
    table = 4096 * 192
    norms = 4 * (2 * 192 + 2 * 64) + 192
    assert made.parameters.total == blocks + 2 * table + norms
    assert made.parameters.without_embedding == blocks + table + norms
    assert made.flops_per_token == 6 * (blocks + table) + 6 * 4 * 192 * 256  # layers x width x sequence
    assert made.kv_cache_bytes_per_token == 2 * 4 * 192 * 4
    assert made.length == Length(100, 100 * 16 * 256)
    assert made.total_flops == made.flops_per_token * 100 * 16 * 256
    assert made.memory.parameters == made.memory.gradients == 4 * made.parameters.total
    assert made.fits is None and made.largest_micro_batch == {}


def test_what_is_printed() -> None:
    config = compose(["model=8b", "max_tokens=1_000_000_000", "batch.sequences=16", "batch.micro_batch=16"])
    # Llama 3 8B has 8,030,261,248; the 32 x 2 x 128 norms of queries and keys are ours
    text = "\n".join(describe(config, plan(config, 128_256, memory_bytes=80 * 2**30), 128_256, "a GPU"))
    assert "8,030,269,440 parameters" in text
    assert "DOES NOT FIT in the 75.1 GiB" in text and "none with recompute=full" in text
    assert "1,000,001,536 tokens" in text
    assert f"{32 * 2 * 8 * 128 * 2:,} bytes of keys and values a token" in text
    sharing = compose(["model=8b", f"model.kv_from={[layer - layer % 4 for layer in range(32)]}"])
    text = "\n".join(describe(sharing, plan(sharing, 128_256), 128_256, "a GPU"))
    assert f"{32 * 2 * 8 * 128 * 2 // 4:,} bytes of keys and values a token" in text, "a quarter of the layers keep any"
    small = compose(["preset=cpu"])
    text = "\n".join(describe(small, plan(small, 4096, memory_bytes=8 * 2**30), 4096, "a GPU"))
    assert "fits in" in text and "at most 1.6 minutes" in text


def test_memory_and_wire_under_zero() -> None:
    """Against the table of trainer/zero_plan.py, at one billion parameters' worth of model on four ranks."""
    config = compose(
        ["model=1b", "optim=adamw", "engine=deepspeed", "batch.sequences=32", "batch.micro_batch=8", "comm=sq48"]
    )

    def of(stage: int, micro_batch: int = 8) -> tuple[Plan, RunConfig]:
        changed = dataclasses.replace(
            config,
            engine=dataclasses.replace(config.engine, zero_stage=stage),
            batch=dataclasses.replace(config.batch, micro_batch=micro_batch),
        )
        return plan(changed, 32_768, ranks=4), changed

    bucket = 2 * config.engine.bucket_mib * 2**20
    total = of(0)[0].parameters.total
    near = pytest.approx
    assert of(0)[0].memory.optimizer == 8 * total
    table = 4 * 32_768 * config.model.width  # more than a bucket
    assert of(0)[0].memory.gradients == near(4 * total + 2 * table) and 2 * table > bucket
    assert of(1)[0].memory.optimizer == near(2 * total) and of(1)[0].memory.parameters == near(5 * total)
    assert of(2)[0].memory.gradients == near(total + bucket)
    assert of(2, 4)[0].memory.gradients == near(5 * total + bucket)  # two micro-batches add up
    assert of(3)[0].memory.parameters < 0.6 * of(2)[0].memory.parameters
    expected = {0: (1.125, 0.0), 1: (0.5625, 1.5), 2: (0.5625, 1.5), 3: (0.5625, 3.0)}
    for stage, numbers in expected.items():
        sent = wire(of(stage)[1], 2, 4)
        assert sent is not None and (sent.gradients, sent.weights) == near(numbers)
    assert "4 ranks under ZeRO 1: each sends 0.562 bytes of gradients (sq48) and 1.5 of weights" in describe_wire(
        of(1)[1], 2, 4
    )
