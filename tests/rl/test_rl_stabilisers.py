"""Stabilisers in reinforcement learning: the sampler computes what the trainer does, or the run is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from changes import changed

from lowbit.configs.schema import (
    ClampConfig,
    MlpKind,
    OsciResetConfig,
    OutControlConfig,
    PrecisionConfig,
    StabiliserConfig,
)
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.validate_rl import validate_rl
from lowbit.errors import ConfigError
from lowbit.rl.run import train
from lowbit.trainer.jsonl import read_rows

OSCI = OsciResetConfig(enabled=True, start=0.0, period=4, window=2, threshold=1e-9)
OUT = OutControlConfig(enabled=True, first_step=1, steps=1)


def with_stabilisers(config: RlConfig, forward: str, stabilisers: StabiliserConfig) -> RlConfig:
    return changed(config, precision=PrecisionConfig(forward=forward, stabilisers=stabilisers))


@pytest.mark.usefixtures("even_reward")
def test_the_sampler_has_the_weights_that_oscireset_has_reset(config: RlConfig, tmp_path: Path) -> None:
    config = with_stabilisers(config, "nvfp4", StabiliserConfig(oscireset=OSCI))
    config = changed(config, reward__function="lowbit_test_rewards:even", max_steps=9)
    validate_rl(config)
    train(config, tmp_path / "run")
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert rows[6]["quant/reset_share"] > 0.01, "step 7 closes a window"
    assert all(row["mismatch/abs_max"] < 2e-5 for row in rows)


@pytest.mark.parametrize(
    ("forward", "stabilisers", "key"),
    [
        ("nvfp4", StabiliserConfig(outcontrol=OUT), r"outcontrol\.enabled=true"),
        ("nvfp4", StabiliserConfig(oscireset=replace(OSCI, hysteresis=0.1)), r"oscireset\.hysteresis=0\.1"),
        ("int8", StabiliserConfig(clamp=ClampConfig(enabled=True)), r"clamp\.enabled=true"),
    ],
)
def test_one_that_changes_the_trainers_forward_alone_is_refused(
    config: RlConfig, forward: str, stabilisers: StabiliserConfig, key: str
) -> None:
    config = replace(config, model=replace(config.model, mlp=MlpKind.relu2))
    with pytest.raises(ConfigError, match=rf"precision\.stabilisers\.{key}: .*another function than the sampler"):
        validate_rl(with_stabilisers(config, forward, stabilisers))
