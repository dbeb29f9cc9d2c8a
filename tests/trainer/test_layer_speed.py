"""`lowbit plan --bench`: every quantised layer is timed once, in its own policy, beside the plain one."""

import time
from typing import Any

import pytest
import torch

from lowbit.cli.main import run
from lowbit.configs.compose import compose
from lowbit.errors import ConfigError
from lowbit.models.transformer import Transformer
from lowbit.trainer import layer_speed
from lowbit.trainer.layer_speed import LayerSpeed, describe_speeds, layer_speeds

CPU = torch.device("cpu")
QUICK = ["preset=quick", "device=cpu", "precision.compute=fp32", "batch.micro_batch=1", "data.sequence_length=64"]


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (["precision=nvfp4"], 3),
        (["precision=int8", "precision.rules=[{match: 'blocks.0.*', policy: bf16}]"], 3),
        (["precision=nvfp4", "precision.switch=[{at: 0.5, forward: int8}]"], 6),
    ],
)
def test_each_quantised_layer_once_a_policy(overrides: list[str], kinds: int) -> None:
    config = compose([*QUICK, *overrides])
    speeds = layer_speeds(config, CPU)
    assert len(speeds) == kinds
    weights = dict(Transformer(config.model, 1, torch.float32).named_parameters())
    seen = [(name, row.policy) for row in speeds for name in row.names]
    assert len(set(seen)) == len(seen)
    rules = "precision=int8" in overrides
    expected = {
        name.removesuffix(".weight") for name, w in weights.items() if name.startswith("blocks.") and w.ndim == 2
    }
    assert {name for name, _ in seen} == {name for name in expected if not (rules and name.startswith("blocks.0."))}
    for row in speeds:
        assert row.seconds > 0 and row.plain_seconds > 0 and row.tokens == 64 and row.policy.quantised
        for name in row.names:
            assert tuple(weights[f"{name}.weight"].shape) == (row.out_features, row.in_features)


def test_what_is_slow_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantiser that sleeps for 30 ms is that much slower than a layer that does not call it."""
    stock = layer_speed.linear_products

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.03)
        return stock(*args, **options)

    monkeypatch.setattr(layer_speed, "linear_products", slow)
    for row in layer_speeds(compose([*QUICK, "precision=nvfp4"]), CPU):
        assert row.seconds > 0.03 and row.seconds > row.plain_seconds + 0.015


def test_a_large_layer_is_timed_on_fewer_tokens() -> None:
    config = compose(["preset=quick", "model=8b", "device=cpu", "precision=mxfp8", "batch.micro_batch=8"])
    row = max((row for row in _sizes(config)), key=lambda row: row.in_features * row.out_features)
    assert 6 * row.in_features * row.out_features * row.tokens <= layer_speed.WORK["cpu"]


def _sizes(config: Any) -> list[LayerSpeed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_speed, "_timed", lambda *_: (1.0, 2.0))
        return layer_speeds(config, CPU)


def test_what_is_printed() -> None:
    config = compose([*QUICK, "precision=nvfp4"])
    first, *rows, last = describe_speeds(config, CPU, _sizes(config))
    assert first.endswith("forward and backward, over FP32:") and last == "  all of these layers: 0.50x"
    assert all("2000.000 ms   0.50x" in row and "64 tokens" in row and "(emulated)" in row for row in rows)
    assert any("blocks.{0,1}.attention.{q,k,v,out} (8)" in row for row in rows)
    plain = compose([*QUICK, "precision=bf16"])
    assert describe_speeds(plain, CPU, layer_speeds(plain, CPU)) == [
        "layer speed: no layer is quantised, all compute in FP32"
    ]


def test_what_it_cannot_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"times lowbit's own layers: precision\.backend=auto would work"):
        layer_speeds(compose([*QUICK, "precision=mxfp8", "precision.backend=te", "engine.compile=off"]), CPU)
    assert run(["plan", "--bench", "--memory-gb", "80", "preset=quick"]) == 2
    assert "--bench times this machine's device" in capsys.readouterr().err
    assert run(["plan", "--bench", *QUICK, "precision=bf16"]) == 0
    assert "no layer is quantised" in capsys.readouterr().out
