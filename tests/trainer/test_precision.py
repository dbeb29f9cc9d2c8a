"""Precision in a run: every recipe learns, noise follows the clock, switches and resumes change no other bit."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch

from lowbit.cli.plan import plan
from lowbit.configs.compose import compose
from lowbit.configs.schema import (
    CompileMode,
    ComputeDtype,
    OutControlConfig,
    PolicyConfig,
    PrecisionConfig,
    PrecisionRule,
    PrecisionSwitch,
    ProductConfig,
    RunConfig,
    ScheduleConfig,
    StabiliserConfig,
)
from lowbit.errors import ConfigError
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import lowbit_layers
from lowbit.quant.kernels import cpu as kernels
from lowbit.quant.kernels import ops
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.presets import PRESETS
from lowbit.trainer.evaluate import evaluate
from lowbit.trainer.loaded import dataset_of, load_run
from lowbit.trainer.precision import RunPrecision, check_precision, forward_in_words, plan_precision, rehearsal
from lowbit.trainer.run import pretrain
from lowbit.trainer.schedule import decaying, lr_scale


def precision(**settings: Any) -> PrecisionConfig:
    return PrecisionConfig(compute=ComputeDtype.fp32, **settings)


@pytest.fixture
def small(tiny_run: RunConfig) -> RunConfig:
    """Four steps of two micro-batches; a checkpoint every second step."""
    return replace(
        tiny_run,
        max_steps=4,
        model=replace(tiny_run.model, layers=1),
        batch=replace(tiny_run.batch, sequences=4, micro_batch=2),
        evaluation=replace(tiny_run.evaluation, every_steps=0, sample_tokens=0),
        logging=replace(tiny_run.logging, softmax_saturation=False),
    )


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in tiny_runs.rows(run_dir)]


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys() and len(left) > 10
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_learns(small: RunConfig, tmp_path: Path, name: str) -> None:
    config = replace(small, max_steps=5, precision=precision(forward=name, backward=name))
    result = pretrain(config, tmp_path / "run")
    found = losses(tmp_path / "run")
    assert all(map(math.isfinite, found)) and found[-1] < found[0] - 0.05
    last = tiny_runs.rows(tmp_path / "run")[-1]
    assert math.isfinite(result.val_bpb)
    assert ("val_bpb_bf16" in last) == PRESETS[name].fprop.quantised
    if PRESETS[name].fprop.quantised:
        assert last["val_bpb_bf16"] != last["val_bpb"]
        assert abs(last["val_bpb_bf16"] / last["val_bpb"] - 1) < 0.02


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_recipe_ends_within_three_percent_of_bf16(tmp_path: Path) -> None:
    """Real text, the quick preset, the same seed: bits per byte at the end."""
    ends = {}
    for name in PRESETS:
        settings = ["preset=quick", f"precision={name}", "precision.compute=fp32", "device=cpu"]
        config = compose([*settings, "evaluation.sample_tokens=0", f"data.cache_dir={tmp_path / 'data'}"])
        ends[name] = pretrain(config, tmp_path / name).val_bpb
    assert all(abs(end / ends["bf16"] - 1) < 0.03 for end in ends.values()), ends


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp8_row", "mxfp8", "nvfp4_nvidia", "nvfp4"])
def test_recipes_learn_on_a_gpu_compiled_and_resume_exactly(
    small: RunConfig, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16 activations, blocks compiled; after a crash in the second phase the same bits come out."""
    switch = [PrecisionSwitch(at_step=3, forward="bf16")]
    config = replace(
        small,
        device="cuda",
        max_steps=6,
        model=replace(small.model, layers=2, width=128, mlp_width=256),
        precision=PrecisionConfig(compute=ComputeDtype.bf16, forward=name, backward=name, switch=switch),
        engine=replace(small.engine, compile=CompileMode.auto),
    )
    pretrain(config, tmp_path / "whole")
    found = losses(tmp_path / "whole")
    assert all(map(math.isfinite, found)) and found[-1] < found[0] - 0.05
    tiny_runs.crash_after(4, config, tmp_path / "parts", monkeypatch)
    pretrain(config, tmp_path / "parts")
    assert_equal(tiny_runs.tensors(tmp_path / "whole", 6), tiny_runs.tensors(tmp_path / "parts", 6))


# Randomness and time ------------------------------------------------------------------------------------------


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The clock at each training forward of the first low-bit layer."""
    seen: list[list[int]] = []
    forward = Transformer.forward

    def noting(self: Transformer, *arguments: Any, **named: Any) -> torch.Tensor:
        layers = list(lowbit_layers(self).values())
        if layers and torch.is_grad_enabled():
            seen.append(layers[0].clock.tolist())
            assert all(layer.clock is layers[0].clock for layer in layers)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(Transformer, "forward", noting)
    yield seen


def test_the_clock_ticks_with_steps_and_micro_batches(
    small: RunConfig, tmp_path: Path, ticks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(small, precision=precision(forward="int8"))
    pretrain(config, tmp_path / "run")
    assert ticks == [[step, micro_batch, 0] for step in range(4) for micro_batch in range(2)]
    ticks.clear()
    tiny_runs.crash_after(2, config, tmp_path / "parts", monkeypatch)
    ticks.clear()
    pretrain(config, tmp_path / "parts")
    assert ticks == [[step, micro_batch, 0] for step in (2, 3) for micro_batch in range(2)]


def test_noise_differs_between_micro_batches_and_repeats_with_the_clock(small: RunConfig) -> None:
    config = replace(small, precision=precision(backward="nvfp4"))
    model = Transformer(config.model, 60)
    model.init_weights(1)
    run = RunPrecision(config, model)
    tokens = torch.randint(0, 60, (2, 16))

    def gradient(step: int, micro_batch: int, rank: int) -> torch.Tensor:
        run.begin_micro_batch(step, micro_batch, rank)
        weight = model.blocks[0].mlp.down.weight
        return torch.autograd.grad(model(tokens).square().sum(), weight)[0]

    first = gradient(0, 0, 0)
    assert torch.equal(first, gradient(0, 0, 0))
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(first, gradient(*other))


def test_a_resumed_run_in_nvfp4_is_the_whole_run(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(small, precision=precision(forward="nvfp4", backward="nvfp4"))
    pretrain(config, tmp_path / "whole")
    tiny_runs.crash_after(2, config, tmp_path / "parts", monkeypatch)
    pretrain(config, tmp_path / "parts")
    assert_equal(tiny_runs.tensors(tmp_path / "whole", 4), tiny_runs.tensors(tmp_path / "parts", 4))
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


# Switches -----------------------------------------------------------------------------------------------------


def test_a_switch_holds_from_its_step_on_and_nothing_before_it_changes(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rehearsal of what follows leaves no trace either; a resume in the middle of the second phase is exact."""
    config = replace(small, max_steps=6)
    switching = replace(config, precision=precision(switch=[PrecisionSwitch(at_step=3, forward="nvfp4")]))
    pretrain(config, tmp_path / "plain")
    with caplog.at_level("INFO", "lowbit"):
        pretrain(switching, tmp_path / "whole")
    assert "precision after step 3: from here on forward nvfp4" in caplog.text
    assert_equal(tiny_runs.tensors(tmp_path / "plain", 2), tiny_runs.tensors(tmp_path / "whole", 2))
    plain, whole = losses(tmp_path / "plain"), losses(tmp_path / "whole")
    assert plain[:3] == whole[:3] and all(a != b for a, b in zip(plain[3:], whole[3:], strict=True))

    tiny_runs.crash_after(4, switching, tmp_path / "parts", monkeypatch)
    caplog.clear()
    with caplog.at_level("INFO", "lowbit"):
        pretrain(switching, tmp_path / "parts")
    assert "precision after" not in caplog.text and "precision of this run changes" not in caplog.text
    assert_equal(tiny_runs.tensors(tmp_path / "whole", 6), tiny_runs.tensors(tmp_path / "parts", 6))
    assert losses(tmp_path / "parts") == whole


def test_from_the_switch_on_it_is_a_run_in_the_other_precision(small: RunConfig, tmp_path: Path) -> None:
    """Oracle: a run that never knew the first precision, started from the checkpoint at the switch."""
    pretrain(
        replace(small, precision=precision(forward="nvfp4", switch=[PrecisionSwitch(at=0.5, forward="mxfp8")])),
        tmp_path / "run",
    )
    other = replace(small, precision=precision(forward="mxfp8"), resume=str(tmp_path / "run/checkpoints/step_00000002"))
    pretrain(other, tmp_path / "other")
    assert_equal(tiny_runs.tensors(tmp_path / "run", 4), tiny_runs.tensors(tmp_path / "other", 4))


def policies(run: RunPrecision) -> set[str]:
    return {layer.policy.summary for layer in lowbit_layers(run.model).values()}


def test_the_three_ways_to_time_a_switch(small: RunConfig) -> None:
    schedule = replace(small.optim, schedule=ScheduleConfig(warmup_steps=0, decay_fraction=0.25))
    for switch, first in (
        (PrecisionSwitch(at=0.5, forward="nvfp4"), 50),
        (PrecisionSwitch(at_step=30, forward="nvfp4"), 30),
        (PrecisionSwitch(at_decay=True, forward="nvfp4"), 76),  # the rate of the step that begins at 75% is still 1
    ):
        config = replace(small, max_steps=100, optim=schedule, precision=precision(switch=[switch]))
        model = Transformer(config.model, 60)
        run = RunPrecision(config, model)
        switched = []
        for step in range(100):
            run.begin_step(step, step / 100)
            if run.quantised:
                switched.append(step)
            assert run.quantised == any("NVFP4" in text for text in policies(run))
        assert switched == list(range(first, 100))
        resumed = RunPrecision(config, Transformer(config.model, 60))
        resumed.begin_step(first, first / 100)
        assert policies(resumed) == policies(run)
    assert lr_scale(schedule.schedule, 75, 0.75) == 1.0 > lr_scale(schedule.schedule, 76, 0.76)
    assert not decaying(schedule.schedule, 0.75) and decaying(schedule.schedule, 0.76)


def test_layers_with_a_rule_keep_it(small: RunConfig) -> None:
    config = replace(
        small,
        precision=precision(
            forward="nvfp4",
            rules=[PrecisionRule(".*attention.*", "mxfp8")],
            switch=[PrecisionSwitch(at_step=1, forward="bf16")],
        ),
    )
    run = RunPrecision(config, Transformer(config.model, 60))
    run.begin_step(1, 0.3)
    layers = lowbit_layers(run.model)
    assert layers["blocks.0.attention.q"].policy == PRESETS["mxfp8"]
    assert not layers["blocks.0.mlp.up"].policy.quantised and run.quantised


def test_the_rehearsal_leaves_no_gradient_and_runs_what_is_to_come(small: RunConfig) -> None:
    switch = [PrecisionSwitch(at=0.3, forward="nvfp4"), PrecisionSwitch(at=0.6, backward="mxfp8")]
    config = replace(small, precision=precision(switch=switch))
    model = Transformer(config.model, 60)
    model.init_weights(1)
    run = RunPrecision(config, model)
    seen: list[set[str]] = []
    run_once = rehearsal(lambda: model(torch.randint(0, 60, (2, 16))).square().sum(), model)

    def rehearse() -> None:
        seen.append(policies(run))
        run_once()

    run.begin_step(0, 0.0, rehearse)
    assert len(seen) == 2 and all("NVFP4" in next(iter(texts)) for texts in seen)
    assert policies(run) == {"fprop BF16, dgrad BF16, wgrad BF16"}
    assert all(parameter.grad is None for parameter in model.parameters())
    run.begin_step(1, 0.1, rehearse)
    assert len(seen) == 2, "once"
    later = RunPrecision(config, Transformer(config.model, 60))
    later.set_active([True, False])
    seen.clear()
    later.begin_step(2, 0.4, lambda: seen.append(policies(later)))
    assert len(seen) == 1, "what is over is not rehearsed"


def squares(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().sum()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_a_switch_compiles_each_policy_once_and_then_runs_the_new_one(small: RunConfig, backend: str) -> None:
    """All graphs exist after the first step; blocks with the same policies share theirs; nothing compiles later."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    switch = [PrecisionSwitch(at_step=2, forward="int8", wgrad="fp8_row")]
    rules = [PrecisionRule(r"blocks\.2\.mlp.*", "bf16")]
    config = replace(small, model=replace(small.model, layers=3), precision=precision(switch=switch, rules=rules))
    tokens = torch.arange(32).reshape(2, 16)
    outputs = []
    for compiled in (True, False):
        model = Transformer(config.model, 60)
        model.init_weights(1)
        run = RunPrecision(config, model)
        for block in model.blocks if compiled else ():
            block.compile(fullgraph=True, dynamic=False, backend=backend)
        rehearse = rehearsal(partial(squares, model, tokens), model)
        graphs = []
        for step in range(4):
            run.begin_step(step, step / 4, rehearse)
            for micro_batch in range(2):
                run.begin_micro_batch(step, micro_batch, 0)
                out = model(tokens)
                out.square().sum().backward()
            outputs.append(out.detach())
            graphs.append(counters["stats"]["unique_graphs"])
        assert set(graphs) == {graphs[0]}
    assert graphs[0] <= 2 * 2, "two phases of two kinds of block"
    assert not counters["graph_break"]
    assert not torch.equal(outputs[1], outputs[2])
    for now, eager in zip(outputs[:4], outputs[4:], strict=True):
        torch.testing.assert_close(now, eager, rtol=0, atol=0 if backend == "eager" else 1e-4)


@torch._dynamo.config.patch(recompile_limit=8)
def test_the_compiler_may_make_as_many_graphs_as_the_run_needs(small: RunConfig) -> None:
    """Its default, 8, is less than two phases of two kinds of block need, with and without gradients."""
    RunPrecision(replace(small, precision=precision(forward="nvfp4")), Transformer(small.model, 60))
    assert torch._dynamo.config.recompile_limit >= 2 * 2 * 2 + 2 * 2
    switch = [PrecisionSwitch(at_step=2, forward="bf16", backward="mxfp8")]
    rules = [PrecisionRule(r"blocks\.0\..*", "bf16")]
    config = replace(small, model=replace(small.model, layers=3), precision=precision(forward="nvfp4", rules=rules))
    RunPrecision(replace(config, precision=replace(config.precision, switch=switch)), Transformer(config.model, 60))
    needed = 3 * 2 * 2 * 2 + 2 * 2
    assert torch._dynamo.config.recompile_limit >= needed, "kinds, gradients, masks, batches; and the unquantised ones"
    out = StabiliserConfig(outcontrol=OutControlConfig(enabled=True))
    config = replace(config, precision=replace(config.precision, switch=switch, stabilisers=out))
    RunPrecision(config, Transformer(config.model, 60))
    assert torch._dynamo.config.recompile_limit >= 2 * needed - 2 * 2, "each once more, with channels in MXFP8"


# Validation, checkpoints, generation --------------------------------------------------------------------------


def test_validation_says_its_precision(small: RunConfig, tmp_path: Path) -> None:
    """`val_bpb` is the training forward's, `val_bpb_bf16` that of the same weights in a plain model."""
    result = pretrain(replace(small, precision=precision(forward="nvfp4", backward="nvfp4")), tmp_path / "run")
    run = load_run(tmp_path / "run", device="cpu")
    assert len(lowbit_layers(run.model)) == 7
    data = dataset_of(run)

    def bpb(model: Transformer) -> float:
        return evaluate(model, data.validation_batches(2, 512), data.tokenizer.token_bytes()).bpb

    assert bpb(run.model) == pytest.approx(result.val_bpb, rel=1e-9)
    assert next(iter(lowbit_layers(run.model).values())).clock.tolist() == [4, 0, 0]
    plain = Transformer(run.config.model, run.tokenizer.vocab_size)
    plain.load_state_dict(run.model.state_dict())
    assert bpb(plain) == pytest.approx(tiny_runs.rows(tmp_path / "run")[-1]["val_bpb_bf16"], rel=1e-9)
    assert bpb(plain) != result.val_bpb
    assert forward_in_words(run.model) == "NVFP4_POW2_46 x NVFP4_POW2_46 and fp32"
    assert forward_in_words(plain) == "fp32"


def test_a_stochastic_forward_is_evaluated_alike_in_the_run_and_when_it_is_opened(
    small: RunConfig, tmp_path: Path
) -> None:
    product = ProductConfig("NVFP4_POW2_SR", "NVFP4_POW2_SR", 16)
    noisy = precision(forward="noisy", define={"noisy": PolicyConfig(fprop=product)})
    result = pretrain(replace(small, precision=noisy), tmp_path / "run")
    run = load_run(tmp_path / "run", device="cpu")
    data = dataset_of(run)
    again = evaluate(run.model, data.validation_batches(2, 512), data.tokenizer.token_bytes())
    assert again.bpb == pytest.approx(result.val_bpb, rel=1e-9)


def test_a_run_is_opened_in_the_precision_its_last_step_had(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(small, precision=precision(forward="nvfp4", switch=[PrecisionSwitch(at_step=3, forward="bf16")]))
    pretrain(config, tmp_path / "run")
    last = load_run(tmp_path / "run", device="cpu")
    before = load_run(tmp_path / "run", "step_00000002", device="cpu")

    def quantised(model: Transformer) -> bool:
        return any(layer.policy.quantised for layer in lowbit_layers(model).values())

    assert quantised(before.model) and not quantised(last.model)
    for step, format in ((2, "NVFP4_POW2_46"), (4, "FP32")):
        meta = json.loads((tmp_path / f"run/checkpoints/step_{step:08d}/meta.json").read_text())["meta"]["precision"]
        assert meta["layers"]["rows"][0]["format"] == format and meta["active"] == [step == 4]


def test_another_precision_goes_on_and_says_so(
    small: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pretrain(replace(small, precision=precision(forward="nvfp4", backward="nvfp4")), tmp_path / "run")
    with caplog.at_level("INFO", "lowbit"):
        pretrain(replace(small, max_steps=5, precision=precision(forward="nvfp4")), tmp_path / "run")
    [line] = [line for line in caplog.text.splitlines() if "precision of this run changes after step 4" in line]
    assert "training.dgrad: NVFP4_POW2_EDEN x NVFP4_POW2_EDEN, rotation 128 fresh so far, BF16 now" in line
    caplog.clear()
    with caplog.at_level("INFO", "lowbit"):
        pretrain(replace(small, max_steps=6, precision=precision(forward="nvfp4")), tmp_path / "run")
    assert "precision of this run changes" not in caplog.text


def test_another_backend_is_said_and_changes_no_switch(small: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers are the policy's whoever multiplies; sums, hence bits, are not. Older checkpoints name no backend."""
    switch = [PrecisionSwitch(at_step=3, forward="bf16")]
    run = RunPrecision(
        replace(small, precision=precision(forward="nvfp4", switch=switch)), Transformer(small.model, 60)
    )
    mine = json.loads(json.dumps(run.policy.as_dict()))
    older = {key: mine[key] for key in ("training", "sampler", "trainer")} | {
        "rules": {},
        "switch": {"after step 3": ""},
    }
    for policy, said in ((mine | {"backend": "fp8"}, 1), (mine, 0), (older, 0)):
        caplog.clear()
        run.set_active([False])
        run.resume({"policy": policy, "active": [True]}, 4)
        assert run.active == (True,)
        assert caplog.text.count("precision of this run changes after step 4: backend: fp8 so far, auto now") == said
        assert caplog.text.count("precision of this run changes") == said
    run.set_active([False])
    run.resume({"policy": mine | {"switch": []}, "active": [True]}, 4)
    assert run.active == (False,) and "switch: nothing so far, [{'when': 'after step 3'" in caplog.text


def test_checkpoints_without_a_precision_are_read(small: RunConfig) -> None:
    run = RunPrecision(replace(small, precision=precision(forward="nvfp4")), Transformer(small.model, 60))
    run.resume(None, 7)
    assert next(iter(lowbit_layers(run.model).values())).clock.tolist() == [7, 0, 0]


# What is printed, and mistakes --------------------------------------------------------------------------------


def test_the_start_of_a_run_prints_the_table(
    small: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    switch = [PrecisionSwitch(at=0.9, forward="bf16")]
    config = replace(small, max_steps=1, precision=precision(name="mine", forward="nvfp4", switch=switch))
    with caplog.at_level("INFO", "lowbit"):
        pretrain(config, tmp_path / "run")
    assert "precision mine on CPU, 1 threads, quantised products emulated:" in caplog.text
    assert "blocks.0.{attention.{q,k,v,out},mlp.{gate,up,down}} (7 layers)" in caplog.text
    assert "at 90% of the run: forward bf16, quantised products" not in caplog.text
    assert "at 90% of the run: forward bf16:" in caplog.text


def test_plan_prints_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    plan(["model=tiny", "precision=nvfp4_nvidia", "device=cpu"], None)
    out = capsys.readouterr().out
    assert "blocks.{0..2}.{attention.{q,k,v,out},mlp.{gate,up,down}} (21 layers)" in out
    assert "emulated" in out and "of the original W" in out and "RL trainer: fprop NVFP4 x NVFP4_2D, dgrad BF16" in out


def test_the_default_run_says_what_is_native_and_what_emulated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(["device=cpu"], None)
    out = capsys.readouterr().out
    head, leg = out.split("at 90% of the run: forward nvfp4, backward nvfp4, quantised products emulated:")
    assert "in all three products, native" in head.partition("precision nvfp4_leg")[2] or "BF16 in all" in head
    assert leg.count("NVFP4_POW2_46") == 3 and leg.count("emulated") == 6 and "slower" not in leg
    monkeypatch.setattr(kernels, "missing", lambda: "no C++ compiler")
    plan(["device=cpu"], None)
    assert "no kernels quantise here, but PyTorch's operators, some thirty times slower: no C++ compiler" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(("capability", "said"), [((7, 5), True), ((8, 0), False), ((9, 0), False), ((12, 0), False)])
def test_gpus_before_ampere_have_no_kernels_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], said: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")
    ops._missing.cache_clear()
    try:
        lines = plan_precision(compose(["precision=nvfp4"]), torch.device("cuda", 0))
        found = [line for line in lines if "no kernels quantise here" in line]
        assert [line.endswith("compute capability 8.0 or later, and this is 7.5") for line in found] == [True] * said
    finally:
        ops._missing.cache_clear()


def test_what_a_gpu_would_get() -> None:
    lines = plan_precision(compose(["precision=mxfp8"]))
    assert lines[0] == "precision mxfp8 on a GPU, quantised products emulated:"
    assert any(line.startswith("  embeddings, norms, attention, LM head: BF16") for line in lines)
    assert plan_precision(compose(["precision=bf16"])) == ["precision bf16 on a GPU: BF16 in every layer, native"]


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["precision.forward=nvfp5"], ["precision.forward=nvfp5", "nearest: nvfp4"]),
        (["precision.rules=[{match: 'blocks.9.*', policy: mxfp8}]"], ["rules.0.match=blocks.9.*", "blocks.{0..3}"]),
        (["precision=nvfp4", "model.mlp_width=500"], ["blocks.0.mlp.gate", "out_features=500"]),
        (
            ["precision=auto", "precision.sampler=nvfp4", "model.mlp_width=500"],
            ["blocks.0.mlp.down", "in_features=500"],
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(
    overrides: list[str], fragments: list[str], tmp_path: Path
) -> None:
    config = compose(overrides)
    with pytest.raises(ConfigError) as caught:
        check_precision(config)
    for fragment in fragments:
        assert fragment in str(caught.value)
    with pytest.raises(ConfigError):
        pretrain(replace(config, data=replace(config.data, cache_dir=str(tmp_path / "data"))), tmp_path / "run")
    assert not (tmp_path / "data").exists()


def test_recomputation_changes_no_bit(small: RunConfig, tmp_path: Path) -> None:
    """Noise has no state, so a recomputed forward is the forward."""
    from lowbit.configs.schema import Recompute

    config = replace(small, max_steps=2, precision=precision(forward="nvfp4", backward="nvfp4"))
    pretrain(config, tmp_path / "kept")
    pretrain(replace(config, engine=replace(config.engine, recompute=Recompute.full)), tmp_path / "recomputed")
    assert_equal(tiny_runs.tensors(tmp_path / "kept", 2), tiny_runs.tensors(tmp_path / "recomputed", 2))


def test_low_bit_layers_are_linears_to_everyone_else(small: RunConfig) -> None:
    assert small.engine.compile is CompileMode.off
    model = Transformer(small.model, 60)
    RunPrecision(replace(small, precision=precision(forward="nvfp4")), model)
    assert all(isinstance(layer, LowbitLinear) for layer in lowbit_layers(model).values())
    from lowbit.trainer.optim import build_optimizer

    hidden = [row for row in map(str, build_optimizer(model, small.optim).groups()) if "hidden" in row]
    assert hidden and "7 tensors" in hidden[0]
