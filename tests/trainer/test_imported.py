"""Runs out to Hugging Face folders and in again: texts, tokens, weights, and a training that goes on from them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowbit.cli.export import Format
from lowbit.cli.export import export as export_command
from lowbit.cli.settings import read as read_settings
from lowbit.cli.start import with_start
from lowbit.cli.task import checked
from lowbit.configs.compose import compose
from lowbit.configs.schema import (
    ClampConfig,
    ComputeDtype,
    GateKind,
    MlpKind,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    StabiliserConfig,
    TokenizerConfig,
    TokenizerKind,
)
from lowbit.configs.validate import validate
from lowbit.data.tokenizer import bytes_tokenizer, train_bpe
from lowbit.errors import CheckpointError, ConfigError, DataError
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.hf.config import Family
from lowbit.models.hf.describe import family_of
from lowbit.models.hf.names import file_names
from lowbit.models.hf.save import TABLES
from lowbit.models.transformer import Transformer
from lowbit.trainer.evaluate import evaluate
from lowbit.trainer.exported import check_export, export, import_folder, open_weights
from lowbit.trainer.imported import begin_from, tokenizer_of
from lowbit.trainer.loaded import dataset_of, load_run
from lowbit.trainer.run import pretrain

TEXT = "document 3\nword1 naïve 東京 <|endoftext|>"


@pytest.fixture
def bpe_run(tiny_run: RunConfig) -> RunConfig:
    tokenizer = TokenizerConfig(kind=TokenizerKind.bpe, vocab_size=300)
    return replace(tiny_run, data=replace(tiny_run.data, tokenizer=tokenizer))


def _greedy(model: Transformer, prompt: list[int]) -> list[int]:
    """The twelve likeliest tokens behind a prompt."""
    request = Request(tuple(prompt), 0, 12)
    return EmbeddedSampler(model, None).sample([request], SamplingConfig(0.0), seed=0)[0][0].tokens


def test_a_run_becomes_a_folder_that_others_read_and_comes_back(bpe_run: RunConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    pretrain(bpe_run, run)
    out = tmp_path / "hf"
    export(open_weights(run), out, "fp32")
    assert "transformers computes the same" in check_export(out)

    ours = load_run(run, device="cpu")
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.encode("document 3\nword1 naïve 東京") == ours.tokenizer.encode("document 3\nword1 naïve 東京")
    assert theirs.eos_token_id == ours.tokenizer.eot_id
    prompt = [ours.tokenizer.eot_id, *ours.tokenizer.encode("document")]
    expected = _greedy(ours.model, prompt)
    model = AutoModelForCausalLM.from_pretrained(out)
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert generated[0, len(prompt) :].tolist() == expected

    opened = load_run(out, device="cpu")  # the folder itself, as `lowbit generate` opens it
    assert _greedy(opened.model, prompt) == expected
    assert opened.tokenizer.encode(TEXT) == ours.tokenizer.encode(TEXT)

    import_folder(out, tmp_path / "back")
    again = load_run(tmp_path / "back", device="cpu")
    assert again.step == 0
    rows = again.tokenizer.vocab_size
    for name, weight in ours.model.named_parameters():
        table = name in ("embedding.weight", "head.weight")
        assert torch.equal(again.model.get_parameter(name), weight[:rows] if table else weight), name
    export(open_weights(tmp_path / "back"), tmp_path / "hf2", "fp32")
    names = sorted(p.name for p in out.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "hf2").iterdir())
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "hf2" / name).read_bytes(), name
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        import_folder(out, tmp_path / "back")


def test_a_byte_model_is_exported_with_a_tokenizer_of_bytes(tiny_run: RunConfig, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run = tmp_path / "run"
    pretrain(replace(tiny_run, max_steps=1), run)
    export(open_weights(run), tmp_path / "hf", "bf16")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "hf"), bytes_tokenizer()
    text = "naïve 東京 🙂\n\t x"
    assert theirs.encode(text) == ours.encode(text) == list(text.encode())
    assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == ours.eot_id == 256
    assert "computes the same" in check_export(tmp_path / "hf")


def test_a_run_begins_with_an_imported_model_and_goes_on(bpe_run: RunConfig, tmp_path: Path) -> None:
    first = pretrain(bpe_run, tmp_path / "run")
    export(open_weights(tmp_path / "run"), tmp_path / "hf", "fp32")
    still = [
        "max_steps=2",
        "optim=adamw",
        "optim.lr=1e-12",
        "optim.schedule.warmup_steps=0",
        f"data.cache_dir={tmp_path / 'data'}",
    ]
    still += ["data=files", f"data.sources.files.path={tmp_path / 'corpus'}", "data.sequence_length=32", "device=cpu"]
    still += ["data.held_out=0.1", "evaluation.sample_tokens=4", "batch.sequences=4", "batch.micro_batch=4"]
    still += ["evaluation.final_tokens=512", "evaluation.sample_prompt=doc", "precision.compute=fp32"]
    for start in ("run", "hf"):
        config = compose(with_start([f"init_from={tmp_path / start}", *still]))
        validate(config)
        assert config.model.width == 32 and config.data.tokenizer.kind is TokenizerKind.file
        second = pretrain(config, tmp_path / f"from_{start}")
        assert second.val_bpb == pytest.approx(first.val_bpb, abs=1e-4)
    longer = compose(with_start([*still, f"init_from={tmp_path / 'hf'}", "model.max_sequence=999"]))
    assert longer.model.max_sequence == 999
    loaded = load_run(tmp_path / "hf", device="cpu")
    assert loaded.config.model.max_sequence == 64 and loaded.config.data.sequence_length == 64
    from_run = load_run(tmp_path / "from_run", device="cpu")
    measured = evaluate(loaded.model, dataset_of(from_run).validation_batches(4, 512), loaded.tokenizer.token_bytes())
    assert measured.bpb == pytest.approx(first.val_bpb, abs=1e-4)


def test_a_mixture_of_experts_with_its_biases_goes_out_and_comes_back(bpe_run: RunConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    moe = MoeConfig(experts=4, top_k=2, expert_width=16, shared=1, first_dense=1, gate=GateKind.sigmoid, bias_rate=3e-3)
    config = replace(bpe_run, model=replace(bpe_run.model, moe=moe), optim=replace(bpe_run.optim, ema_decay=0.5))
    pretrain(config, tmp_path / "run")
    weights = open_weights(tmp_path / "run")
    bias = weights.tensors["blocks.1.mlp.router.bias"]
    assert bias.any()
    export(weights, tmp_path / "hf", "fp32")
    assert "computes the same" in check_export(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(model.model.layers[1].mlp.gate.e_score_correction_bias, bias)
    opened = load_run(tmp_path / "hf", device="cpu")
    assert torch.equal(opened.model.blocks[1].mlp.router.bias, bias)  # type: ignore[union-attr, arg-type]
    export(weights, tmp_path / "bf16", "bf16")  # rounds weights, not biases
    again = open_weights(tmp_path / "bf16")
    assert torch.equal(again.tensors["blocks.1.mlp.router.bias"], bias)
    averaged = open_weights(tmp_path / "run", averaged=True)
    assert torch.equal(averaged.tensors["blocks.1.mlp.router.bias"], bias)
    export(averaged, tmp_path / "ema", "bf16")
    with_rate = compose(with_start([f"init_from={tmp_path / 'hf'}"]))
    assert with_rate.model.moe.bias_rate == 1e-3 and with_rate.model.moe.shared == 1
    opened.model.blocks[1].mlp.router.bias.zero_()  # type: ignore[union-attr, operator]
    begin_from(tmp_path / "hf", opened.model)
    assert torch.equal(opened.model.blocks[1].mlp.router.bias, bias)  # type: ignore[union-attr, arg-type]
    bare = Transformer(replace(opened.config.model, moe=replace(opened.config.model.moe, bias_rate=0.0)), 300)
    with pytest.raises(CheckpointError, match="its routers have biases"):
        begin_from(tmp_path / "hf", bare)
    with pytest.raises(CheckpointError, match="its routers have biases"):
        shorter = ["data.sequence_length=32", "evaluation.sample_tokens=4"]
        read_settings([f"init_from={tmp_path / 'hf'}", "model.moe.bias_rate=0", *shorter])


def test_beginnings_that_cannot_be(tiny_run: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is neither the folder of a run nor of a Hugging Face model"):
        with_start([f"init_from={tmp_path}"])
    with pytest.raises(ConfigError, match="model=tiny: the model comes from init_from"):
        with_start([f"init_from={tmp_path}", "model=tiny"])
    for tokenizer in ("data.tokenizer.kind=bpe", "data.tokenizer.path=elsewhere", "data.tokenizer={kind: bytes}"):
        with pytest.raises(ConfigError, match="mean the tokens of its own tokenizer; leave this out"):
            with_start([f"init_from={tmp_path}", tokenizer])
    with pytest.raises(ConfigError, match="a sweep begins all its runs from one checkpoint"):
        with_start(["init_from=a,b"])
    assert with_start(["init_from=''", "seed=2"]) == ["init_from=''", "seed=2"]
    run = tmp_path / "run"
    pretrain(replace(tiny_run, max_steps=1), run)
    config = replace(tiny_run, init_from=str(run), model=replace(tiny_run.model, width=64))
    with pytest.raises(CheckpointError, match=r"weights are of another model .*attention\.k\.weight"):
        pretrain(config, tmp_path / "other")
    assert compose(with_start([f"init_from={run}"])).data.tokenizer.kind is TokenizerKind.bytes


def test_a_beginning_that_does_not_fit_is_told_before_any_data_is_read(bpe_run: RunConfig, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "hf"
    pretrain(replace(bpe_run, max_steps=1), run)
    export(open_weights(run), folder, "fp32")
    settings = ["max_steps=1", "data.sequence_length=32", "evaluation.sample_tokens=4", "model.max_sequence=99"]

    def message(start: Path, *more: str) -> str:
        overrides = [f"init_from={start}", *settings, *more]
        with pytest.raises(CheckpointError) as first:
            read_settings(overrides)
        with pytest.raises(CheckpointError) as second:
            checked(with_start(overrides))
        assert str(first.value) == str(second.value) and "\n" not in str(first.value)
        return str(first.value)

    for start in (run, folder):
        for wrong in ("model.width=64", "model.tied_head=true", "model.qk_norm=false", "model.layers=3"):
            key = wrong.partition("=")[0]
            found = message(start, wrong)
            assert found.startswith(f"{wrong}: the weights of init_from={start} are of another model ({key}="), found
        both = message(start, "model.heads=3", "model.head_dim=8", "model.kv_heads=3")
        assert all(f"model.{key}=" in both for key in ("heads", "kv_heads")) and "max_sequence" not in both
        assert read_settings([f"init_from={start}", *settings, "model.rope.theta=5e5"]).model.max_sequence == 99
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-50])
    assert "cannot be read" in message(folder)


def test_exports_that_cannot_be(tiny_run: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = replace(tiny_run.model, logit_softcap=15.0)
    pretrain(replace(tiny_run, max_steps=1, model=model), run)
    with pytest.raises(CheckpointError, match=r"model\.logit_softcap=15\.0: no architecture"):
        export(open_weights(run), tmp_path / "hf", "bf16")
    with pytest.raises(CheckpointError, match="keeps no moving average"):
        open_weights(run, averaged=True)
    with pytest.raises(CheckpointError, match="is neither the folder of a run"):
        open_weights(tmp_path)
    assert not (tmp_path / "hf").exists()


def test_a_check_of_weights_in_few_bits_is_refused_before_anything_is_written(
    tiny_run: RunConfig, tmp_path: Path
) -> None:
    pretrain(replace(tiny_run, max_steps=1), tmp_path / "run")
    for fmt in (Format.nvfp4, Format.mxfp8):
        with pytest.raises(ConfigError, match=f"--check --format {fmt}: only bf16 and fp32 are compared"):
            export_command(tmp_path / "run", fmt, tmp_path / "hf", check=True)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("gate", list(GateKind))
def test_moe_tiny_has_an_export_with_sigmoid_gates_only(gate: GateKind) -> None:
    model = compose(["model=moe_tiny", f"model.moe.gate={gate}"]).model
    if gate is GateKind.sigmoid:
        assert family_of(model) is Family.dots1
        return
    with pytest.raises(CheckpointError, match=r"model\.moe\.shared=1: no architecture .* dots1 has sigmoid gates"):
        family_of(model)


def test_places_that_cannot_be_written_are_one_line(bpe_run: RunConfig, tmp_path: Path) -> None:
    pretrain(replace(bpe_run, max_steps=1), tmp_path / "run")
    folder = tmp_path / "hf"
    export(open_weights(tmp_path / "run"), folder, "bf16")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in (tmp_path / "file" / "x", Path("/proc/x"), tmp_path / "link"):
        with pytest.raises(CheckpointError, match=f"{place} cannot be written: ") as error:
            import_folder(folder, place)
        assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="file exists and is not empty"):
        import_folder(folder, tmp_path / "file")
    (folder / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(DataError, match=r"chat_template\.jinja cannot be read: .*UTF-8"):
        import_folder(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_run_is_not_imported_and_a_folder_has_one_checkpoint(bpe_run: RunConfig, tmp_path: Path) -> None:
    pretrain(replace(bpe_run, max_steps=1), tmp_path / "run")
    with pytest.raises(CheckpointError, match="run is a run already: copy it, or begin from it with init_from="):
        import_folder(tmp_path / "run", tmp_path / "back")
    with pytest.raises(CheckpointError, match="is neither the folder of a run nor of a Hugging Face model"):
        import_folder(tmp_path, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    export(open_weights(tmp_path / "run"), tmp_path / "hf", "bf16")
    for opens in (open_weights, load_run):
        with pytest.raises(CheckpointError, match=r"checkpoint 7: .*hf is a Hugging Face folder, which has no others"):
            opens(tmp_path / "hf", "7")  # type: ignore[operator]


def test_a_clamped_run_has_no_export_and_says_why(tiny_run: RunConfig, tmp_path: Path) -> None:
    """A squared ReLU has no stock architecture, so its INT8 ranges need no place in one; checkpoints keep them."""
    clamp = StabiliserConfig(clamp=ClampConfig(enabled=True))
    precision = PrecisionConfig(compute=ComputeDtype.fp32, forward="int8", backward="int8", stabilisers=clamp)
    model = replace(tiny_run.model, mlp=MlpKind.relu2)
    pretrain(replace(tiny_run, max_steps=1, model=model, precision=precision), tmp_path / "run")
    for fmt in ("bf16", "nvfp4"):
        with pytest.raises(CheckpointError, match=r"model\.mlp=relu2: no architecture that other software reads"):
            export(open_weights(tmp_path / "run"), tmp_path / "hf", fmt)
    assert not (tmp_path / "hf").exists()


def test_the_moving_average_is_exported_when_asked_for(tiny_run: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    optim = OptimConfig(ema_decay=0.5, schedule=ScheduleConfig(warmup_steps=0))
    pretrain(replace(tiny_run, max_steps=3, optim=optim), run)
    plain, averaged = open_weights(run), open_weights(run, averaged=True)
    assert plain.tensors.keys() == averaged.tensors.keys()
    assert not torch.equal(plain.tensors["embedding.weight"], averaged.tensors["embedding.weight"])


def test_side_files_of_a_tokenizer_travel_along(bpe_run: RunConfig, tmp_path: Path) -> None:
    pretrain(replace(bpe_run, max_steps=1), tmp_path / "run")
    export(open_weights(tmp_path / "run"), tmp_path / "hf", "bf16")
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    note = tmp_path / "hf" / "tokenizer_config.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"chat": "x"}))
    import_folder(tmp_path / "hf", tmp_path / "back")
    export(open_weights(tmp_path / "back"), tmp_path / "again", "bf16")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_a_tokenizer_that_is_not_there_or_too_large(bpe_run: RunConfig, tmp_path: Path) -> None:
    pretrain(replace(bpe_run, max_steps=1), tmp_path / "run")
    folder = tmp_path / "hf"
    export(open_weights(tmp_path / "run"), folder, "bf16")
    train_bpe(iter(f"some other word {i * 7919}" for i in range(400)), 310).save(tmp_path / "other")
    right = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes((tmp_path / "other" / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match="the tokenizer has 310 tokens and the model 300 embeddings"):
        load_run(folder, device="cpu")
    (folder / "tokenizer.json").write_bytes(right)
    load_run(folder, device="cpu")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="no tokenizer at"):
        load_run(folder, device="cpu")
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(DataError, match=r"SentencePiece tokenizer but no tokenizer\.json"):
        tokenizer_of(folder)


def test_texts_begin_as_the_tokenizer_says() -> None:
    from tokenizers.processors import TemplateProcessing

    from lowbit.data.tokenizer import Tokenizer

    plain = train_bpe(iter(["a b c " * 20]), 258)
    assert plain.begin == [plain.eot_id] and bytes_tokenizer().begin == [256]
    from tokenizers import Tokenizer as Backend

    assert plain.definition is not None
    backend = Backend.from_str(plain.definition.decode())
    backend.add_special_tokens(["<s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    assert Tokenizer(backend.to_str().encode(), plain.eot).begin == [backend.token_to_id("<s>")]
    assert ModelConfig().vocab_rows is None


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_a_quantised_export_is_what_transformers_then_computes(bpe_run: RunConfig, tmp_path: Path, fmt: str) -> None:
    """Its logits are those of our model whose layers hold the dequantised weights, as `test_export` reads them."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = replace(bpe_run.model, mlp_width=64, qk_norm=True)
    pretrain(replace(bpe_run, max_steps=2, model=model), tmp_path / "run")
    weights = open_weights(tmp_path / "run")
    export(weights, tmp_path / "hf", fmt, shard_bytes=20_000)
    how = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16, quantization_config=how)
    theirs = theirs.float()
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    ours = load_run(tmp_path / "run", device="cpu").model
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            (source,) = file_names(Family.qwen3, name)
            parameter[: 300 if name in TABLES else None].copy_(theirs.get_parameter(source))
            close = 0.2 if fmt == "nvfp4" and "blocks" in name and "norm" not in name else 0.05
            assert (parameter - weights.tensors[name]).norm() < close * weights.tensors[name].norm()
        tokens = torch.randint(0, 300, (2, 20))
        logits = ours(tokens) @ ours.head_weight[:300].t()
        expected = theirs(tokens).logits
        in_bf16 = packed(tokens).logits.float()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (in_bf16 - expected).norm() / expected.norm() < 0.03
    with pytest.raises(CheckpointError, match="the weights are quantised"):
        load_run(tmp_path / "hf", device="cpu")
