"""Stabilisers and statistics in a run: when they act, that nothing else changes, and that resumes change no bit."""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch

from lowbit.configs.schema import (
    ClampConfig,
    CompileMode,
    ComputeDtype,
    MatrixBackend,
    MlpKind,
    NormPlacement,
    OsciDetector,
    OsciResetConfig,
    OutControlConfig,
    PolicyConfig,
    PrecisionConfig,
    PrecisionRule,
    PrecisionSwitch,
    ProductConfig,
    Recompute,
    RunConfig,
    StabiliserConfig,
    StatisticsConfig,
)
from lowbit.configs.validate import validate
from lowbit.data.batch import Batch
from lowbit.errors import ConfigError
from lowbit.models.visibility import Visibility
from lowbit.quant.apply import lowbit_layers
from lowbit.quant.quantise import fake_quantise
from lowbit.quant.spec import NVFP4_POW2_46
from lowbit.quant.stabilisers.clamp import ClampedSquare, activation_deviation
from lowbit.quant.stabilisers.outcontrol import RetainedChannels
from lowbit.trainer.loaded import load_run
from lowbit.trainer.precision import check_precision
from lowbit.trainer.run import Pretraining, pretrain
from lowbit.trainer.snapshot import read_snapshot

OSCI = OsciResetConfig(enabled=True, start=0.0, period=4, window=2, threshold=2.0, tracked=0.3)
OUT = OutControlConfig(enabled=True, first_step=2, steps=2)


def precision(
    preset: str = "nvfp4",
    osci: OsciResetConfig | None = None,
    out: OutControlConfig | None = None,
    clamp: ClampConfig | None = None,
    **settings: Any,
) -> PrecisionConfig:
    stabilisers = StabiliserConfig(osci or OsciResetConfig(), out or OutControlConfig(), clamp or ClampConfig())
    return PrecisionConfig(
        compute=ComputeDtype.fp32, forward=preset, backward=preset, stabilisers=stabilisers, **settings
    )


@pytest.fixture
def small(tiny_run: RunConfig) -> RunConfig:
    """Eight steps of two micro-batches of a model of one block."""
    return replace(
        tiny_run,
        max_steps=8,
        model=replace(tiny_run.model, layers=1),
        batch=replace(tiny_run.batch, sequences=4, micro_batch=2),
        checkpoint=replace(tiny_run.checkpoint, every_steps=1, keep_last=8),
        evaluation=replace(tiny_run.evaluation, every_steps=0, sample_tokens=0),
        logging=replace(tiny_run.logging, softmax_saturation=False, every_steps=1),
    )


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys() and len(left) > 10
    return [name for name in left if not torch.equal(left[name], right[name])]


# OsciReset ---------------------------------------------------------------------------------------------------------


def test_oscireset_changes_masters_in_its_steps_and_nothing_else(small: RunConfig, tmp_path: Path) -> None:
    """Until the first reset, step 7 of period 4 and window 2, the run without it has the same bits; then the weights
    of quantised layers differ, and the optimizer's state of that step does not."""
    pretrain(replace(small, precision=precision()), tmp_path / "without")
    pretrain(replace(small, precision=precision(osci=OSCI)), tmp_path / "with")
    for step in range(1, 9):
        left, right = tiny_runs.tensors(tmp_path / "without", step), tiny_runs.tensors(tmp_path / "with", step)
        state = {name: right.pop(name) for name in list(right) if name.startswith("stabilisers/")}
        assert any(".moved" in name for name in state) == (step in (4, 5, 6, 8))
        changed = differing(left, right)
        if step < 7:
            assert not changed
        elif step == 7:
            layers = ("attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
            assert set(changed) <= {f"model/blocks.0.{name}.weight" for name in layers} and len(changed) >= 5
            for name in changed:
                moved = left[name] != right[name]
                assert torch.equal(right[name][moved], fake_quantise(left[name], NVFP4_POW2_46).float()[moved])
    found = [row for row in tiny_runs.rows(tmp_path / "with") if "quant/reset_share" in row]
    assert [row["step"] for row in found] == [7] and 0 < found[0]["quant/reset_share"] < 0.5
    assert 0 <= found[0]["quant/blocks.0.mlp.up/weight/reset_share"] < 0.5 and "quant/flip_share" in found[0]


def test_the_average_sees_the_weights_after_the_reset(small: RunConfig, tmp_path: Path) -> None:
    config = replace(small, max_steps=7, optim=replace(small.optim, ema_decay=0.5), precision=precision(osci=OSCI))
    pretrain(config, tmp_path / "run")
    before, after = tiny_runs.tensors(tmp_path / "run", 6), tiny_runs.tensors(tmp_path / "run", 7)
    key = "blocks.0.mlp.up.weight"
    want = before[f"ema/{key}"] + (after[f"model/{key}"] - before[f"ema/{key}"]) * 0.5
    torch.testing.assert_close(after[f"ema/{key}"], want, rtol=1e-5, atol=1e-7)


def test_it_waits_for_its_share_of_the_run(small: RunConfig, tmp_path: Path) -> None:
    config = replace(small, max_steps=12, precision=precision(osci=replace(OSCI, start=0.5)))
    pretrain(config, tmp_path / "run")
    assert [row["step"] for row in tiny_runs.rows(tmp_path / "run") if "quant/reset_share" in row] == [11]


CUTS = [(cut, detector) for cut in (3, 5) for detector in OsciDetector]
ALWAYS = [(3, OsciDetector.full), (5, OsciDetector.efficient)]


@pytest.mark.parametrize(
    ("cut", "detector"), [pytest.param(*c, marks=() if c in ALWAYS else pytest.mark.exhaustive) for c in CUTS]
)
def test_everything_resumes_bit_for_bit(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detector: OsciDetector, cut: int
) -> None:
    """Cut while OutControl measures and while a window is open, with hysteresis, statistics and an average."""
    config = replace(
        small,
        optim=replace(small.optim, ema_decay=0.9),
        precision=precision(
            osci=replace(OSCI, detector=detector, hysteresis=0.2),
            out=replace(OUT, first_step=3),
            statistics=StatisticsConfig(every_steps=3),
        ),
    )
    pretrain(config, tmp_path / "whole")
    tiny_runs.crash_after(cut, config, tmp_path / "cut", monkeypatch)
    pretrain(config, tmp_path / "cut")
    assert differing(tiny_runs.tensors(tmp_path / "whole", 8), tiny_runs.tensors(tmp_path / "cut", 8)) == []
    keys = {
        key for row in tiny_runs.rows(tmp_path / "whole") for key in row if key.startswith("quant/") or key == "loss"
    }
    assert len(keys) > 50
    for left, right in zip(tiny_runs.rows(tmp_path / "whole"), tiny_runs.rows(tmp_path / "cut"), strict=True):
        assert {k: left.get(k) for k in keys} == {k: right.get(k) for k in keys}


# OutControl --------------------------------------------------------------------------------------------------------


def test_outcontrol_measures_the_steps_micro_batches_and_fixes_channels(small: RunConfig, tmp_path: Path) -> None:
    """Steps 2 and 3 are measured: their checkpoints hold the sums of the norms of what went in, found anew here by
    hooks in the model as it was before each step; from step 4 on the channels are fixed."""
    config = replace(small, precision=precision(out=OUT))
    run = Pretraining(config, tmp_path / "run")
    trainer = run.build()
    total = torch.zeros(32, dtype=torch.float64)
    after = {}
    seen: list[torch.Tensor] = []
    norm = run.model.blocks[0].attention_norm
    norm.register_forward_hook(lambda module, inputs, out: seen.append(out.detach()))
    try:
        for step in range(1, 7):
            seen.clear()
            trainer.train_step()
            state = run.stabilisers.state()
            assert state is not None
            if step in (2, 3):  # the measuring passes come first
                assert len(seen) == 4
                for x, again in zip(seen[:2], seen[2:], strict=True):
                    assert torch.equal(x, again)
                    total += x.double().reshape(-1, 32).norm(dim=0)
                norms = state["outcontrol.blocks.0.attention.q.norms"].double()
                torch.testing.assert_close(norms, total, rtol=1e-6, atol=0)
            else:
                assert len(seen) == 2
            after[step] = state.keys()
    finally:
        run.close()
    assert not any(".order" in key for key in after[3]) and any(".order" in key for key in after[4])
    channels = run.model.blocks[0].attention.q.retained
    assert isinstance(channels, RetainedChannels) and channels.count == 3
    assert channels.order.tolist() == total.argsort(descending=True).tolist()
    assert run.model.blocks[0].attention.v.retained is channels


def test_outcontrol_starts_to_act_when_its_channels_are_fixed(small: RunConfig, tmp_path: Path, caplog: Any) -> None:
    pretrain(replace(small, precision=precision()), tmp_path / "without")
    with caplog.at_level(logging.INFO, "lowbit"):
        pretrain(replace(small, precision=precision(out=OUT)), tmp_path / "with")
    losses = [[row["loss"] for row in tiny_runs.rows(tmp_path / name)] for name in ("without", "with")]
    assert losses[0][:3] == losses[1][:3] and losses[0][3] != losses[1][3]
    assert all(map(math.isfinite, losses[1]))
    assert "OutControl: from step 4 on input channels in MXFP8: 3 of 32 (9.38%), 5 of 48 (10.42%)" in caplog.text


def test_a_run_opened_for_use_has_its_channels_and_bounds(small: RunConfig, tmp_path: Path) -> None:
    pretrain(replace(small, precision=precision(out=OUT, osci=replace(OSCI, hysteresis=0.5))), tmp_path / "run")
    run = load_run(tmp_path / "run")
    layers = lowbit_layers(run.model)
    saved = read_snapshot(tmp_path / "run" / "checkpoints" / "step_00000008").stabilisers
    assert saved is not None
    for name, layer in layers.items():
        assert isinstance(layer.retained, RetainedChannels) and layer.choice is not None
        assert torch.equal(layer.retained.order, saved[f"outcontrol.{name}.order"])
        assert torch.equal(layer.choice, saved[f"oscireset.{name}.weight.held"]) and layer.choice.any()
    assert layers["blocks.0.attention.q"].retained is layers["blocks.0.attention.v"].retained
    high = load_run(tmp_path / "run", precision=PrecisionConfig(compute=ComputeDtype.fp32))
    tokens = torch.arange(32)[None]
    assert not torch.equal(run.model(tokens), high.model(tokens))


def test_a_switch_to_bf16_ends_both_and_can_be_resumed(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = [PrecisionSwitch(at_step=6, forward="bf16")]
    config = replace(small, precision=precision(out=OUT, osci=OSCI, switch=switch))
    pretrain(config, tmp_path / "whole")
    assert not [row for row in tiny_runs.rows(tmp_path / "whole") if "quant/reset_share" in row]
    tiny_runs.crash_after(7, config, tmp_path / "cut", monkeypatch)
    pretrain(config, tmp_path / "cut")
    assert differing(tiny_runs.tensors(tmp_path / "whole", 8), tiny_runs.tensors(tmp_path / "cut", 8)) == []
    assert load_run(tmp_path / "cut").step == 8


# Switches ----------------------------------------------------------------------------------------------------------

LEG = [PrecisionSwitch(at_step=3, forward="nvfp4", backward="nvfp4")]
INT8_LEG = [PrecisionSwitch(at_step=3, forward="int8")]


@pytest.mark.parametrize(
    "name",
    [
        "oscireset",
        "clamp",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("hysteresis", "outcontrol", "statistics")),
    ],
)
def test_a_run_that_begins_in_bf16_has_its_stabilisers_when_a_switch_gives_them_something_to_do(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As `nvfp4_leg` and `stages` do. Until the switch the run is one without them; resumes on both sides of it change
    no bit."""
    wanted: dict[str, Any] = {
        "oscireset": {"osci": OSCI, "switch": LEG},
        "hysteresis": {"osci": replace(OSCI, hysteresis=0.2), "switch": LEG},
        "outcontrol": {"out": replace(OUT, steps=3), "switch": LEG},
        "clamp": {"clamp": ClampConfig(enabled=True), "switch": INT8_LEG},
        "statistics": {"statistics": StatisticsConfig(every_steps=2), "switch": LEG},
    }
    small = replace(small, model=replace(small.model, mlp=MlpKind.relu2))
    config = replace(small, precision=precision("bf16", **wanted[name]))
    without = replace(small, precision=precision("bf16", switch=wanted[name]["switch"]))
    pretrain(config, tmp_path / "whole")
    pretrain(without, tmp_path / "without")
    for step in range(1, 9):
        left, right = (tiny_runs.tensors(tmp_path / folder, step) for folder in ("without", "whole"))
        changed = differing(left, {key: t for key, t in right.items() if not key.startswith("stabilisers/")})
        first = {"oscireset": 7, "hysteresis": 5, "outcontrol": 5, "clamp": 4, "statistics": 9}[name]
        assert not changed if step < first else changed or (name == "hysteresis" and step < 8), step
    found = [row["step"] for row in tiny_runs.rows(tmp_path / "whole") if any(k.startswith("quant/") for k in row)]
    assert found == {"oscireset": [7], "hysteresis": [7], "statistics": [4, 6, 8]}.get(name, [])
    for cut in (2, 5):
        tiny_runs.crash_after(cut, config, tmp_path / f"cut{cut}", monkeypatch)
        pretrain(config, tmp_path / f"cut{cut}")
        ends = [tiny_runs.tensors(tmp_path / folder, 8) for folder in ("whole", f"cut{cut}")]
        assert differing(*ends) == []
    assert load_run(tmp_path / "whole").step == 8


def test_a_resume_without_a_stabiliser_says_so(small: RunConfig, tmp_path: Path, caplog: Any) -> None:
    """What the forward computes may change with it."""
    short = replace(small, max_steps=4, checkpoint=replace(small.checkpoint, every_steps=0))
    pretrain(replace(short, precision=precision(out=OUT, osci=OSCI)), tmp_path / "run")
    for steps, settings, said in ((5, {"osci": OSCI}, ["outcontrol"]), (6, {}, ["oscireset"]), (7, {}, [])):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lowbit"):
            pretrain(replace(short, max_steps=steps, precision=precision(**settings)), tmp_path / "run")
        found = [line.getMessage() for line in caplog.records if "goes on without" in line.getMessage()]
        assert found == [f"this run goes on without {name}, which it has had so far" for name in said]
    high = replace(small.precision, forward="bf16")
    caplog.clear()
    load_run(tmp_path / "run", "step_00000004", precision=high)
    assert "goes on without" not in caplog.text


@pytest.mark.parametrize(
    ("product", "stabilisers", "why"),
    [
        (ProductConfig("NVFP4_POW2_SR", "NVFP4_POW2_SR"), StabiliserConfig(oscireset=OSCI), "is stochastic"),
        (ProductConfig("NVFP4_POW2", "NVFP4_POW2", 16), StabiliserConfig(oscireset=OSCI), "is rotated"),
        (ProductConfig("NVFP4_POW2", "NVFP4_POW2", 16), StabiliserConfig(outcontrol=OUT), "both deal with outliers"),
    ],
)
def test_what_a_switch_would_break_is_refused_before_the_run(
    small: RunConfig, tmp_path: Path, product: ProductConfig, stabilisers: StabiliserConfig, why: str
) -> None:
    define, switch = {"later": PolicyConfig(fprop=product)}, [PrecisionSwitch(at_step=6, forward="later")]
    config = replace(precision("nvfp4", define=define, switch=switch), stabilisers=stabilisers)
    with pytest.raises(ConfigError, match=rf"blocks\.0\..*{why}"):
        Pretraining(replace(small, precision=config), tmp_path / "run")


def test_inputs_are_measured_beside_a_sibling_that_a_rule_keeps_in_another_format(
    small: RunConfig, tmp_path: Path
) -> None:
    """While the others compute in the rule's format, they are quantised together with it."""
    settings: dict[str, Any] = {"rules": [PrecisionRule(r".*\.k", "mxfp8")], "out": replace(OUT, first_step=1)}
    config = precision("nvfp4", switch=[PrecisionSwitch(at_step=1, forward="mxfp8", backward="mxfp8")], **settings)
    pretrain(replace(small, max_steps=4, precision=config), tmp_path / "run")
    state = read_snapshot(tmp_path / "run" / "checkpoints" / "step_00000004").stabilisers
    assert state is not None
    names = ("attention.q", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
    assert {key for key in state if key.endswith(".order")} == {f"outcontrol.blocks.0.{name}.order" for name in names}


# Dynamic clamping --------------------------------------------------------------------------------------------------


@pytest.fixture
def squared(small: RunConfig) -> RunConfig:
    config = precision("int8", clamp=ClampConfig(enabled=True, deviations=3.0))
    return replace(small, model=replace(small.model, mlp=MlpKind.relu2, layers=2), precision=config)


def test_bounds_follow_the_weights_once_a_step(squared: RunConfig, tmp_path: Path) -> None:
    """The bound that a step computes with is that of the weights it starts from."""
    run = Pretraining(squared, tmp_path / "run")
    trainer = run.build()
    try:
        for _ in range(3):
            for block in run.model.blocks:
                want = 3 * activation_deviation(block.mlp.up.weight.detach(), block.mlp_norm.weight.detach())
                assert isinstance(block.mlp.square, ClampedSquare)
                assert torch.equal(block.mlp.square.bound, want)
                assert torch.equal(block.mlp.down.input_amax, want * want)
            trainer.train_step()
    finally:
        run.close()


def test_clamped_training_resumes_and_opens_with_its_bounds(
    squared: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(squared, tmp_path / "whole")
    tiny_runs.crash_after(3, squared, tmp_path / "cut", monkeypatch)
    pretrain(squared, tmp_path / "cut")
    end = tiny_runs.tensors(tmp_path / "whole", 8)
    assert differing(end, tiny_runs.tensors(tmp_path / "cut", 8)) == []
    found = [row["loss"] for row in tiny_runs.rows(tmp_path / "whole")]
    assert found[-1] < found[0]
    run = load_run(tmp_path / "whole")
    for name in ("blocks.0.mlp", "blocks.1.mlp"):
        square = run.model.get_submodule(name).square
        assert isinstance(square, ClampedSquare)
        assert torch.equal(square.bound, end[f"stabilisers/clamp.{name}.bound"])
    last = tiny_runs.rows(tmp_path / "whole")[-1]
    assert last["val_bpb_bf16"] != last["val_bpb"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"precision": precision(clamp=ClampConfig(enabled=True))}, r"mlp\.down multiplies NVFP4_POW2_46.*int8"),
        ({"precision": precision("bf16", clamp=ClampConfig(enabled=True))}, r"mlp\.down multiplies BF16"),
        ({"norm_placement": NormPlacement.after}, "unit mean square"),
        ({"mlp": MlpKind.swiglu}, "no squared-ReLU network"),
        ({"precision": precision("mxfp8", out=OUT)}, "fewer than 8"),
        ({"precision": precision("bf16", osci=OSCI)}, "no layer's forward product quantises its weight"),
        ({"precision": precision("bf16", statistics=StatisticsConfig(every_steps=1))}, "no layer is quantised"),
    ],
)
def test_what_has_nothing_to_do_is_refused(squared: RunConfig, tmp_path: Path, change: Any, why: str) -> None:
    config = replace(squared, precision=change.pop("precision", squared.precision))
    config = replace(config, model=replace(config.model, **change))
    with pytest.raises(ConfigError, match=why):
        Pretraining(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("stabilisers", "why"),
    [
        (StabiliserConfig(oscireset=replace(OSCI, window=3)), r"window=3 .*period=4: .*period=5 would work"),
        (StabiliserConfig(oscireset=replace(OSCI, start_step=8)), "start_step=8 max_steps=8: the run ends before it"),
        (StabiliserConfig(outcontrol=replace(OUT, first_step=7)), "the run ends before its channels are known"),
        (StabiliserConfig(clamp=ClampConfig(enabled=True)), "model.mlp=swiglu: the bound is that of a squared ReLU"),
    ],
)
def test_settings_that_cannot_work(small: RunConfig, stabilisers: StabiliserConfig, why: str) -> None:
    validate(small)
    with pytest.raises(ConfigError, match=why):
        validate(replace(small, precision=replace(small.precision, stabilisers=stabilisers)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stabilisers": StabiliserConfig(outcontrol=OUT), "backend": MatrixBackend.te}, "quantise all channels alike"),
        (
            {"stabilisers": StabiliserConfig(oscireset=replace(OSCI, hysteresis=0.1)), "backend": MatrixBackend.te},
            "hysteresis=0.1: Transformer Engine chooses by itself",
        ),
        (
            {
                "forward": "nvfp4_quartet2",
                "stabilisers": StabiliserConfig(oscireset=replace(OSCI, hysteresis=0.1)),
                "switch": [PrecisionSwitch(at=0.5, forward="nvfp4")],
            },
            r"blocks.0.*: a switch changes .* 2 blocks a row in NVFP4_46 and 8 blocks a row in NVFP4_POW2_46",
        ),
    ],
)
def test_stabilisers_that_would_do_nothing_or_lose_their_place(small: RunConfig, change: Any, why: str) -> None:
    engine = replace(small.engine, compile=CompileMode.off)
    with pytest.raises(ConfigError, match=why):
        check_precision(replace(small, precision=replace(small.precision, **change), engine=engine))


# Statistics --------------------------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """Every forward of the model: sequences, and whether gradients were recorded."""
    from lowbit.models.transformer import Transformer

    seen: list[tuple[int, bool]] = []
    forward = Transformer.forward

    def noting(self: Transformer, tokens: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        seen.append((len(tokens), torch.is_grad_enabled()))
        return forward(self, tokens, *arguments, **named)

    monkeypatch.setattr(Transformer, "forward", noting)
    yield seen


@pytest.mark.parametrize("gradients", [True, False])
def test_statistics_change_nothing_and_cost_nothing_in_other_steps(
    small: RunConfig, tmp_path: Path, passes: list[tuple[int, bool]], caplog: Any, gradients: bool
) -> None:
    """Of eight steps two are sampled, whatever the logging interval; the weights are those without statistics."""
    plain = replace(small, checkpoint=replace(small.checkpoint, every_steps=0))
    pretrain(replace(plain, precision=precision()), tmp_path / "without")
    usual = list(passes)
    passes.clear()
    settings = StatisticsConfig(every_steps=3, sequences=1, gradients=gradients)
    sampled = replace(
        plain,
        logging=replace(small.logging, every_steps=8),
        engine=replace(small.engine, recompute=Recompute.full),
        precision=precision(statistics=settings),
    )
    with caplog.at_level(logging.INFO, "lowbit"):
        pretrain(sampled, tmp_path / "with")
    assert differing(tiny_runs.tensors(tmp_path / "without", 8), tiny_runs.tensors(tmp_path / "with", 8)) == []
    extra = [(1, gradients)] * 2
    assert len(passes) == len(usual) + 2 and sorted(passes) == sorted(usual + extra)
    found = {row["step"]: row for row in tiny_runs.rows(tmp_path / "with")}
    assert found.keys() == {3, 6, 8}
    keys = {key for key in found[3] if key.startswith("quant/")}
    assert keys == {key for key in found[6] if key.startswith("quant/")}
    assert not any(key.startswith("quant/") for key in found[8])
    count = 7 * 5 + 4 * 4 + (7 * 4 if gradients else 0)  # q, k and v read one input, gate and up another
    assert len(keys) == count
    assert 0.004 < found[3]["quant/blocks.0.mlp.up/weight/relative_mse"] < 0.02
    lines = [line for line in caplog.messages if line.startswith("quantisation at step")]
    assert len(lines) == 2 and "weight: error " in lines[0] and ("gradient: error " in lines[0]) == gradients


def test_gradients_are_measured_at_the_scale_they_have_in_training(small: RunConfig, tmp_path: Path) -> None:
    """The largest dY of the last layer against hooks in the training step itself, on a step of one sequence."""
    batch = replace(small.batch, sequences=1, micro_batch=1)
    config = replace(small, batch=batch, precision=precision(statistics=StatisticsConfig(every_steps=1)))
    run = Pretraining(config, tmp_path / "run")
    trainer = run.build()
    seen: list[float] = []
    try:
        down = run.model.blocks[0].mlp.down
        hook = down.register_full_backward_hook(lambda m, i, grads: seen.append(float(grads[0].bfloat16().abs().max())))
        row = trainer.train_step()
        hook.remove()
    finally:
        run.close()
    assert len(seen) == 2 and seen[0] == pytest.approx(seen[1], rel=1e-3)
    measured = row["quant/blocks.0.mlp.down/gradient/amax"]  # rotated: a sum of 128 of them over sqrt(128)
    assert seen[1] / 12 < measured < seen[1] * 12


@pytest.mark.slow
def test_statistics_of_compiled_blocks_leave_no_trace(small: RunConfig, tmp_path: Path) -> None:
    """The passes run uncompiled, and the compiled blocks are not compiled again."""
    torch._dynamo.reset()
    config = replace(
        small,
        max_steps=3,
        engine=replace(small.engine, compile=CompileMode.on),
        precision=precision("mxfp8", statistics=StatisticsConfig(every_steps=2)),
    )
    run = Pretraining(config, tmp_path / "run")
    trainer = run.build()
    try:
        trainer.train_step()
        torch._dynamo.utils.counters.clear()
        rows = [trainer.train_step(), trainer.train_step()]
    finally:
        run.close()
    assert [any(key.startswith("quant/") for key in row) for row in rows] == [True, False]
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == 0


@pytest.mark.gpu
def test_a_compiled_run_on_a_gpu_with_everything(small: RunConfig, tmp_path: Path) -> None:
    """BF16, compiled blocks, both stabilisers, statistics: it learns, and a resume inside a window changes no bit."""
    torch._dynamo.reset()
    config = replace(
        small,
        device="cuda",
        model=replace(small.model, width=128, mlp_width=256),
        engine=replace(small.engine, compile=CompileMode.on),
        precision=replace(
            precision(osci=OSCI, out=OUT, statistics=StatisticsConfig(every_steps=3)), compute=ComputeDtype.bf16
        ),
    )
    pretrain(config, tmp_path / "whole")
    found = tiny_runs.rows(tmp_path / "whole")
    assert found[-1]["loss"] < found[0]["loss"]
    assert [row["step"] for row in found if "quant/reset_share" in row] == [7]
    assert [row["step"] for row in found if "quant/blocks.0.mlp.up/weight/amax" in row] == [3, 6]
    resume = str(tmp_path / "whole" / "checkpoints" / "step_00000005")
    pretrain(replace(config, resume=resume), tmp_path / "resumed")
    assert differing(tiny_runs.tensors(tmp_path / "whole", 8), tiny_runs.tensors(tmp_path / "resumed", 8)) == []


def test_the_first_sequences_of_a_batch() -> None:
    weights = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    ids, numbers = torch.arange(6).reshape(3, 2), torch.arange(6, dtype=torch.int32).reshape(3, 2)
    batch = Batch(ids, ids + 1, weights, Visibility(numbers, numbers, numbers), 3)
    small = batch.head(2)
    assert small.valid_tokens == 3 and small.tokens.tolist() == [[0, 1], [2, 3]]
    assert small.visibility is not None and small.visibility.limit.shape == (2, 2)
    assert batch.head(9).tokens.shape == (3, 2)
