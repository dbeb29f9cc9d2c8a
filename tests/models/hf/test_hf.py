"""Imported and exported models against `transformers`: logits, every tensor's bits, each way a folder can be wrong."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.cli.generate import generate
from lowbit.configs.schema import (
    GateKind,
    MlpKind,
    ModelConfig,
    MoeConfig,
    NormPlacement,
    QkNormScope,
    RopeConfig,
    RopeScaling,
)
from lowbit.configs.strict import build
from lowbit.data.tokenizer import bytes_tokenizer
from lowbit.errors import CheckpointError
from lowbit.models.cost import window_of
from lowbit.models.hf.config import Family, read_config
from lowbit.models.hf.describe import family_of, write_config
from lowbit.models.hf.folder import INDEX, SINGLE, TensorFolder
from lowbit.models.hf.load import check_tensors, load_model
from lowbit.models.hf.names import file_names
from lowbit.models.hf.parity import compare
from lowbit.models.hf.save import save_model
from lowbit.models.layers import weights_and_state
from lowbit.models.transformer import Transformer
from lowbit.quant.export import WeightEncoder, WeightFormat
from lowbit.trainer import hardware

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 3,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
DOTS = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "head_dim": 8,
}
CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": (Family.llama, {}),
    "llama tied": (Family.llama, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama 3.1": (Family.llama, {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama linear": (Family.llama, {"rope_parameters": LINEAR, "num_key_value_heads": 1}),
    "qwen3": (Family.qwen3, {"head_dim": 16}),
    "qwen3 yarn tied": (Family.qwen3, {"head_dim": 8, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3 local": (
        Family.qwen3,
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 local above": (
        Family.qwen3,
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "mixtral local": (Family.mixtral, {"num_local_experts": 3, "sliding_window": 10}),
    "qwen3 moe local": (Family.qwen3_moe, {**EXPERTS, "use_sliding_window": True, "sliding_window": 5}),
    "mixtral": (Family.mixtral, {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": None}),
    "qwen3 moe": (
        Family.qwen3_moe,
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "mlp_only_layers": [0],
        },
    ),
    "dots1": (Family.dots1, DOTS),
    "dots1 local": (
        Family.dots1,
        {**DOTS, "norm_topk_prob": True, "sliding_window": 6, "max_window_layers": 1, "routed_scaling_factor": 1.0},
    ),
    "qwen3 moe normalised": (
        Family.qwen3_moe,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
    "olmo2": (Family.olmo2, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
}


def stock_model(family: Family, changes: dict[str, Any]) -> Any:
    """A random model of `transformers`, with norms that are not all one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(str(family), **{**SHAPE, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            assert parameter.any(), name
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.uniform_(-0.3, 0.3)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 50), generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, changes = CASES[request.param]
    stock_model(family, changes).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return tmp_path / "theirs"


def test_an_imported_model_computes_the_same_and_comes_back_bit_by_bit(case: Path) -> None:
    assert (case / INDEX).is_file(), "the case is meant to have several shards"
    model = load_model(case, VOCAB, torch.float32)
    parity = compare(model, case, tokens())
    assert parity.scale > 0.5
    assert parity.first_drift(1e-4) is None, parity
    parity.require(1e-4)

    back = case.parent / "ours"
    files = save_model(back, model.config, weights_and_state(model), VOCAB, dtype="fp32", eos_id=3)
    assert [f.name for f in files] == [SINGLE] and (back / INDEX).is_file()
    with TensorFolder(case) as theirs, TensorFolder(back) as ours:
        assert ours.names() == theirs.names()
        for name in ours.names():
            assert torch.equal(ours.read(name), theirs.read(name)), name
    ours_again, theirs_read = read_config(back).model, read_config(case).model
    assert [window_of(ours_again, i) for i in range(3)] == [window_of(theirs_read, i) for i in range(3)]
    assert dataclasses.replace(ours_again, windows=[]) == dataclasses.replace(theirs_read, windows=[], name="ours")
    assert compare(model, back, tokens()).first_drift(1e-4) is None


@pytest.mark.parametrize("form", ["rope_scaling", "type"])
def test_rotary_settings_as_transformers_4_wrote_them(tmp_path: Path, form: str) -> None:
    stock_model(Family.llama, {"rope_parameters": LLAMA3}).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    content = json.loads(path.read_text())
    new = content.pop("rope_parameters")
    content["rope_theta"] = new.pop("rope_theta")
    if form == "type":
        new["type"] = new.pop("rope_type")
    content["rope_scaling"] = new
    path.write_text(json.dumps(content))
    model = load_model(tmp_path / "theirs", VOCAB, torch.float32)
    assert model.config.rope.scaling is RopeScaling.llama3
    assert compare(model, tmp_path / "theirs", tokens()).first_drift(1e-4) is None


def test_bf16_is_rounded_once_and_exact_from_then_on(tmp_path: Path) -> None:
    config = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, qk_norm=True, max_sequence=64)
    model = Transformer(config, VOCAB)
    model.init_weights(3)
    weights = weights_and_state(model)
    save_model(tmp_path / "a", config, weights, VOCAB, shard_bytes=9_000)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
    loaded = load_model(tmp_path / "a", VOCAB, torch.float32)
    for name, parameter in loaded.named_parameters():
        expected = weights[name][:VOCAB] if name in ("embedding.weight", "head.weight") else weights[name]
        assert torch.equal(parameter, expected.bfloat16().float()), name
    save_model(tmp_path / "b", loaded.config, dict(loaded.named_parameters()), VOCAB)
    with TensorFolder(tmp_path / "a") as a, TensorFolder(tmp_path / "b") as b:
        assert a.names() == b.names()
        assert all(torch.equal(a.read(n), b.read(n)) and a.read(n).dtype is torch.bfloat16 for n in a.names())
    assert compare(loaded, tmp_path / "a", tokens()).first_drift(1e-4) is None


def test_a_vocabulary_larger_than_the_tokenizers_keeps_its_rows(tmp_path: Path) -> None:
    theirs = stock_model(Family.qwen3, {"head_dim": 8})
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs", 90, torch.float32)
    assert model.vocab_size == 90 and model.padded_vocab == VOCAB
    assert compare(model, tmp_path / "theirs", tokens() % 90).first_drift(1e-4) is None
    save_model(tmp_path / "ours", model.config, weights_and_state(model), 90, dtype="fp32")
    with TensorFolder(tmp_path / "ours") as ours:
        assert torch.equal(ours.read("lm_head.weight"), theirs.lm_head.weight)
    with pytest.raises(CheckpointError, match="the tokenizer has 98 tokens and the model 97 embeddings"):
        load_model(tmp_path / "theirs", 98, torch.float32)


LOW_BITS = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}


@pytest.mark.parametrize("fmt", list(WeightFormat))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_weights_in_few_bits_are_read_by_transformers(name: str, tied: bool, fmt: WeightFormat, tmp_path: Path) -> None:
    """Packed and dequantised, the logits are those of our model with the dequantised weights."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    family, changes = CASES[name]
    stock_model(family, {**changes, **LOW_BITS, "tie_word_embeddings": tied}).save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs", VOCAB, torch.float32)
    out, weights = tmp_path / "low", weights_and_state(model)
    save_model(out, model.config, weights, VOCAB, encoder=WeightEncoder(fmt))
    packed = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    how = CompressedTensorsConfig(dequantize=True)
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, quantization_config=how).float()
    with torch.no_grad():
        for ours, parameter in weights.items():
            read = plain.get_parameter(file_names(family, ours)[0])
            layer = parameter.dim() == 2 and ours.startswith("blocks")
            close = (0.13 if fmt is WeightFormat.nvfp4 else 0.04) if layer else 0.004
            assert (read - parameter).norm() < close * parameter.norm(), ours
            parameter.copy_(read)
        logits = model(tokens()) @ model.head_weight[:VOCAB].t()
        torch.testing.assert_close(plain(tokens()).logits, logits, rtol=1e-4, atol=1e-4)
        assert (packed(tokens()).logits.float() - logits).norm() < 0.03 * logits.norm()


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe", "dots1"])
def test_experts_in_few_bits_which_transformers_misreads_are_refused(name: str, tmp_path: Path) -> None:
    stock_model(*CASES[name]).save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs", VOCAB, torch.float32)
    for fmt in WeightFormat:
        with pytest.raises(CheckpointError, match=r"model\.moe\.experts=[56]: transformers does not read experts"):
            save_model(tmp_path / "low", model.config, weights_and_state(model), VOCAB, encoder=WeightEncoder(fmt))
    assert not (tmp_path / "low").exists()


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


BAD_CONFIGS = [
    ({"model_type": "gpt2"}, 'model_type="gpt2" is not an architecture that lowbit has \\(llama, qwen3'),
    ({"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported'),
    ({"layer_types": ["chunked_attention"] * 3}, "is not supported without a sliding_window"),
    ({"attention_bias": True}, "attention_bias=true is not supported"),
    ({"hidden_size": "wide"}, 'hidden_size="wide" must be a whole number'),
    ({"num_hidden_layers": None}, "num_hidden_layers=null must be a whole number"),
    ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantised \\(fp8\\)"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic is none of default, linear, llama3, yarn"),
    ({"rope_parameters": {**YARN, "mscale": 1.0}}, "mscale would change what yarn computes"),
    ({"rope_parameters": {**YARN, "truncate": False}}, "truncate must be true"),
    ({"rope_parameters": {"type": "linear"}}, "linear needs factor"),
    ({"rope_parameters": {"rope_type": "linear", "factor": None}}, "linear needs factor"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn needs factor"),
    *(
        ({"rope_parameters": {k: v for k, v in LLAMA3.items() if k != key}}, f"llama3 needs {key}")
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    ),
    ({"hidden_size": 0}, "config.json: hidden_size=0: must be at least 1 and at most [^;]*$"),
    ({"num_hidden_layers": -1}, "config.json: num_hidden_layers=-1: must be [^;]*$"),
    ({"rms_norm_eps": 3}, "config.json: rms_norm_eps=3[.]0: must be [^;]*$"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 num_key_value_heads=3: [^;]*$"),
    ({"vocab_size": 0}, "config.json: vocab_size=0: "),
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": 9.0}}, "low_freq_factor=9[.]0 high_freq_factor=4[.]0: [^;]*$"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.5}}, "config.json: rope_theta=0[.]5: "),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "heads are rotated as a whole"),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "one set of rotary settings"),
]


BAD_EXPERTS = [
    ({"mlp_only_layers": [1]}, "dense layers must be the first ones"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
    ({"num_experts_per_tok": 9}, "config.json: num_experts_per_tok=9 num_experts=6: [^;]*$"),
    ({"moe_intermediate_size": 0}, "config.json: moe_intermediate_size=0: [^;]*$"),
    ({"mlp_only_layers": [0, 1, 2]}, "config.json: mlp_only_layers=3 num_hidden_layers=3: no layer"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size=null must be a whole number"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_EXPERTS)
def test_expert_layouts_that_we_do_not_have_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    stock_model(*CASES["qwen3 moe"]).save_pretrained(tmp_path)
    _edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, VOCAB, torch.float32)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    stock_model(*CASES["mixtral"]).save_pretrained(tmp_path)
    name = "model.layers.2.block_sparse_moe.experts.3.w3.weight"
    _edit_tensors(tmp_path, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=r"experts\.3\.w3\.weight is missing"):
        load_model(tmp_path, VOCAB, torch.float32)


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_what_a_config_asks_for_in_vain_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    stock_model(Family.llama, {}).save_pretrained(tmp_path)
    _edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(tmp_path, VOCAB, torch.float32)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "mixtral", "qwen3 moe", "dots1"])
def test_what_a_config_leaves_out_is_what_transformers_takes(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    family, changes = CASES[name]
    needed = {
        key: value for key, value in (SHAPE | changes).items() if key not in ("rope_parameters", "initializer_range")
    }
    needed = {key: value for key, value in needed.items() if value is not None and key != "routed_scaling_factor"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": str(family), **needed}))
    model, theirs = read_config(tmp_path).model, AutoConfig.from_pretrained(tmp_path)
    assert model.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert model.norm_eps == theirs.rms_norm_eps and model.init_std == theirs.initializer_range
    assert model.tied_head == theirs.tie_word_embeddings
    if family in (Family.qwen3_moe, Family.dots1):
        assert model.moe.normalise == theirs.norm_topk_prob
    if family is Family.dots1:
        assert model.moe.gate_scale == theirs.routed_scaling_factor
    elif model.moe.experts:
        assert model.moe.balance_loss == theirs.router_aux_loss_coef


NOTHING_LIKE_IT: list[Any] = [
    None, "x", -1, 0, 2.5, 2.0, float("inf"), float("nan"), [], [1], ["x"], {}, True, 10**30, 10**400,
]  # fmt: skip


def _spoiled(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key of a config.json, and of its rotary settings, left out or with a value of another kind."""
    places = [(content, key) for key in content]
    places += [(content["rope_parameters"], key) for key in content.get("rope_parameters") or {}]
    for section, key in places:
        kept = section.pop(key)
        yield f"no {key}", content
        for value in NOTHING_LIKE_IT:
            section[key] = value
            yield f"{key}={value!r:.20}", content
        section[key] = kept


@pytest.mark.parametrize("name", ["llama 3.1", "qwen3 yarn tied", "olmo2", "mixtral local", "qwen3 moe", "dots1 local"])
def test_any_value_of_a_config_is_a_model_or_one_line(name: str, tmp_path: Path) -> None:
    stock_model(*CASES[name]).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    refused = 0
    for what, content in _spoiled(json.loads(path.read_text())):
        path.write_text(json.dumps(content))
        try:
            config = read_config(tmp_path)
        except CheckpointError as error:
            assert "\n" not in str(error) and str(path) in str(error), what
            refused += 1
        else:
            assert config.model == build(ModelConfig, dataclasses.asdict(config.model)), what
    assert refused > 100


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["llama 3.1", "qwen3 yarn tied", "qwen3 local", "olmo2", "mixtral local", "dots1 local"]
)
def test_what_is_read_of_any_config_is_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """Wherever both take a spoiled config.json; above all, missing keys have the same defaults."""
    stock_model(*CASES[name]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    compared = 0
    for what, content in _spoiled(json.loads(path.read_text())):
        path.write_text(json.dumps(content))
        try:
            model = load_model(tmp_path, VOCAB, torch.float32)
        except CheckpointError:
            continue
        try:
            parity = compare(model, tmp_path, tokens()[:, : model.config.max_sequence])
        except Exception:  # theirs does not take it
            continue
        assert parity.first_drift(1e-4) is None, what
        compared += 1
    assert compared > 50


BAD_TENSORS: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight is missing"),
    (lambda t: t.update(extra=torch.zeros(3)), "extra is not of this architecture"),
    (
        lambda t: t.update({"model.norm.weight": torch.ones(31)}),
        r"norm\.weight is \[31\], config\.json makes it",
    ),
    (
        lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}),
        r"norm\.weight is int32; only",
    ),
    (lambda t: t.update({k: v.double() for k, v in t.items()}), r"embed_tokens\.weight is float64; only"),
    (lambda t: t["model.norm.weight"][3:4].fill_(float("nan")), r"model\.norm\.weight has a number that is not finite"),
    (lambda t: t["model.layers.1.mlp.up_proj.weight"][0].fill_(-torch.inf), r"up_proj\.weight has a number that"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Callable[..., Any], message: str) -> None:
    stock_model(Family.llama, {}).save_pretrained(tmp_path)
    _edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, VOCAB, torch.float32)


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS[:3])
def test_names_and_shapes_are_looked_at_without_the_weights(
    tmp_path: Path, change: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock_model(Family.llama, {}).save_pretrained(tmp_path)
    monkeypatch.setattr(TensorFolder, "read", None)
    check_tensors(tmp_path)
    _edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        check_tensors(tmp_path)


def test_a_stored_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    stock_model(Family.llama, {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    table = "model.embed_tokens.weight"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t[table].clone(), **extra}))
    load_model(tmp_path, VOCAB, torch.float32)
    _edit_tensors(tmp_path, lambda t: t["lm_head.weight"].add_(1.0))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_model(tmp_path, VOCAB, torch.float32)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    stock_model(Family.llama, {}).save_pretrained(tmp_path / "good", max_shard_size="20KB")
    good = tmp_path / "good"
    shard = sorted(good.glob("*.safetensors"))[0]

    def broken(change: Callable[[Path], Any], message: str) -> None:
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        change(folder)
        with pytest.raises(CheckpointError, match=message) as error:
            load_model(folder, VOCAB, torch.float32)
        assert "\n" not in str(error.value)

    def index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    broken(lambda f: (f / "config.json").unlink(), "is not a Hugging Face model: config.json cannot be read")
    broken(lambda f: (f / "config.json").write_text("{"), "config.json is not JSON")
    broken(lambda f: (f / "config.json").write_bytes(b"\xff\x00"), "config.json is not JSON")
    broken(lambda f: (f / "config.json").write_text(100_000 * "["), "config.json is not JSON")
    broken(lambda f: (f / INDEX).write_text(100_000 * "["), "must map tensors to files under weight_map")
    broken(lambda f: index(f, lambda m: m.update(x="")), "is not a file of this folder")
    broken(lambda f: (f / shard.name).unlink(), "is missing, but model.safetensors.index.json names it")
    broken(lambda f: (f / shard.name).write_bytes(shard.read_bytes()[:-100]), "cannot be read: .*copy it again")
    broken(lambda f: (f / INDEX).write_text("[]"), "must map tensors to files under weight_map")
    broken(lambda f: index(f, lambda m: m.update(x="../../etc/passwd")), "is not a file of this folder")
    broken(lambda f: index(f, lambda m: m.update(x=shard.name)), "says that x lies in .*: it does not")
    broken(lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "holds no model.safetensors and no")
    broken(
        lambda f: [p.rename(f / "pytorch_model.bin") for p in f.glob("*.safetensors*")],
        r"pickled weights \(pytorch_model\.bin\)",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp": MlpKind.relu2}, "model.mlp=relu2"),
        ({"kv_from": [0, 0, 2, 2]}, r"model.kv_from=\[0, 0, 2, 2\]"),
        ({"windows": [4, 8]}, r"model.windows=\[4, 8\]"),
        ({"windows": [4, 0], "qk_norm": False}, r"model.windows=\[4, 0\]"),
        ({"moe": MoeConfig(experts=4, shared=1)}, "model.moe.shared=1"),
        ({"moe": MoeConfig(experts=4, bias_rate=0.1)}, "model.moe.bias_rate=0.1"),
        ({"moe": MoeConfig(experts=4, gate=GateKind.sigmoid)}, "model.moe.gate=sigmoid"),
        ({"moe": MoeConfig(experts=4, gate=GateKind.sigmoid, shared=1), "qk_norm": False}, "model.moe.gate=sigmoid"),
        ({"moe": MoeConfig(experts=4, first_dense=1), "qk_norm": False}, "a mixture of experts with these norms"),
        ({"logit_softcap": 30.0}, "model.logit_softcap=30.0"),
        ({"attention_softcap": 50.0}, "model.attention_softcap=50.0"),
        ({"qk_norm": True, "qk_norm_scope": QkNormScope.layer}, "model.qk_norm_scope=layer"),
        ({"norm_placement": NormPlacement.after, "qk_norm": False}, "norm_placement=after with model.qk_norm=false"),
        ({"width": 36, "heads": 8, "kv_heads": 8, "head_dim": 8, "qk_norm": False}, "model.heads=8 of model.width=36"),
    ],
)
def test_models_without_a_stock_architecture_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of(ModelConfig(**changes))


def test_ntk_is_written_as_the_larger_theta() -> None:
    rope = RopeConfig(theta=1e4, scaling=RopeScaling.ntk, factor=4.0)
    written = write_config(ModelConfig(rope=rope), 100, "bfloat16", 0)
    assert written["rope_scaling"] is None
    assert written["rope_theta"] == pytest.approx(1e4 * 4 ** (64 / 62))


def test_nothing_is_written_over_and_no_half_folder_stays(tmp_path: Path) -> None:
    config = ModelConfig(layers=1, width=32, heads=4, kv_heads=2, mlp_width=48)
    model = Transformer(config, VOCAB)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        save_model(tmp_path / "full", config, weights_and_state(model), VOCAB)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_model(tmp_path / "file" / "below", config, weights_and_state(model), VOCAB)
    (tmp_path / "empty").mkdir()
    save_model(tmp_path / "empty", config, weights_and_state(model), VOCAB)
    assert not list(tmp_path.glob(".*"))


def test_parity_names_the_first_block_that_drifts(tmp_path: Path) -> None:
    stock_model(Family.qwen3, {"head_dim": 8}).save_pretrained(tmp_path)
    model = load_model(tmp_path, VOCAB, torch.float32)
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[0, 0] += 0.5  # type: ignore[union-attr, index]
    parity = compare(model, tmp_path, tokens())
    assert parity.first_drift(1e-4) == "blocks.1"
    assert dict(parity.blocks)["blocks.0"] < 1e-5
    with pytest.raises(CheckpointError, match=r"blocks\.1 differs by"):
        parity.require(1e-4)


@pytest.mark.parametrize("name", ["llama 3.1", "llama tied", "qwen3 local", "olmo2", "mixtral", "qwen3 moe", "dots1"])
def test_generate_goes_on_as_transformers_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lowbit generate FOLDER` of a folder that `transformers` wrote, a token after the other with a cache."""
    family, changes = CASES[name]
    end = bytes_tokenizer().eot_id
    theirs = stock_model(family, changes | {"vocab_size": end + 8, "eos_token_id": end})
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(bytes_tokenizer().hugging_face())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": bytes_tokenizer().eot}))
    monkeypatch.setattr(hardware, "fast_bf16", lambda device: False)
    generate(tmp_path, prompt="Once upon", max_tokens=40, temperature=0.0, top_k=None, device="cpu")
    ids = [end, *b"Once upon"]  # a tokenizer that says nothing else begins texts with its end of text
    with torch.no_grad():
        for _ in range(40):  # without a cache: the whole text each time, none but the tokenizer's tokens
            ids.append(int(theirs(torch.tensor([ids])).logits[0, -1, : end + 1].argmax()))
            if ids[-1] == end:
                break
    assert capsys.readouterr().out == bytes_tokenizer().decode(ids[1 : -1 if ids[-1] == end else None]) + "\n"
    assert len(ids) > 20
