"""`config.json` of a Hugging Face folder to `ModelConfig`; `describe.py` is the way back.

Every key that changes what a model computes is either understood or refused by name. Two spellings of the rotary
settings exist: `rope_theta` and `rope_scaling` (transformers 4), and `rope_parameters` (5). Both are read; written is
the older one, which both versions read.
"""

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeGuard

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
from lowbit.configs.validate_model import check_architecture
from lowbit.errors import CheckpointError, ConfigError

CONFIG = "config.json"


class Family(StrEnum):
    """Architectures that we read and write, by their `model_type`."""

    llama = "llama"
    qwen3 = "qwen3"
    olmo2 = "olmo2"
    mixtral = "mixtral"
    qwen3_moe = "qwen3_moe"
    dots1 = "dots1"
    """Sigmoid gates, shared experts and balancing biases, as DeepSeek-V3's, with Qwen3's attention."""


ARCHITECTURES = {
    Family.llama: "LlamaForCausalLM",
    Family.qwen3: "Qwen3ForCausalLM",
    Family.olmo2: "Olmo2ForCausalLM",
    Family.mixtral: "MixtralForCausalLM",
    Family.qwen3_moe: "Qwen3MoeForCausalLM",
    Family.dots1: "Dots1ForCausalLM",
}
_EPS = {Family.olmo2: 1e-5, Family.mixtral: 1e-5}
_THETA = {Family.mixtral: 1e6}
ROPE_SETTINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
"""The settings of each kind of rotary scaling."""

_REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
"""Those that have no default."""
_KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "windows": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "max_sequence": "max_position_embeddings",
    "init_std": "initializer_range",
    "vocab_rows": "vocab_size",
    "moe.experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.expert_width": "moe_intermediate_size",
    "moe.shared": "n_shared_experts",
    "moe.first_dense": "mlp_only_layers",
    "moe.gate_scale": "routed_scaling_factor",
    "moe.balance_loss": "router_aux_loss_coef",
    "rope.theta": "rope_theta",
    "rope.scaling": "rope_type",
    "rope.original_sequence": "original_max_position_embeddings",
}
"""Our settings by the keys of the file, where these are not the same word."""
_FAMILY_KEYS = {
    Family.mixtral: {"moe.experts": "num_local_experts", "moe.expert_width": "intermediate_size"},
    Family.dots1: {"moe.experts": "n_routed_experts", "moe.first_dense": "first_k_dense_replace"},
}


@dataclass(frozen=True)
class HfConfig:
    """What a `config.json` says."""

    family: Family
    model: ModelConfig
    vocab_size: int
    """Rows of the embedding and the head: at least the tokens of the tokenizer."""


def is_hf_folder(path: Path) -> bool:
    """Whether a folder is a Hugging Face model and not a run of ours."""
    return (path / CONFIG).is_file() and not (path / "config.yaml").is_file()


def read_config(folder: Path) -> HfConfig:
    """The model that a folder's `config.json` describes.

    Raises:
        CheckpointError: the file is missing or damaged, names an architecture that we do not have, or asks for
            something that our models do not do.
    """
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a Hugging Face model: config.json cannot be read ({error.strerror})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return _Reader(path, raw).read()


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < sys.float_info.max


class _Reader:
    """Reads one `config.json`, naming the key of whatever is wrong."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path, self.raw = path, raw
        kind = raw.get("model_type")
        if not isinstance(kind, str) or kind not in set(Family):
            known = ", ".join(Family)
            raise self.wrong("model_type", f"is not an architecture that lowbit has ({known})")
        self.family = Family(kind)

    def wrong(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key}={json.dumps(self.raw.get(key))} {why}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if not _is_number(value):
            raise self.wrong(key, "must be a number")
        return float(value)

    def whole(self, key: str, default: Any = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not _is_number(value) or not isinstance(value, int):
            raise self.wrong(key, "must be a whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return default if value is None else value

    def listed(self, key: str, kind: type) -> list[Any]:
        value = self.raw.get(key)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            raise self.wrong(key, f"must be a list, each {'text' if kind is str else 'a whole number'}")
        return value or []

    def must_be(self, key: str, wanted: Any, why: str) -> None:
        if self.raw.get(key) not in (None, wanted):
            raise self.wrong(key, why)

    def read(self) -> HfConfig:
        self.must_be("hidden_act", "silu", "is not supported: only silu (SwiGLU) networks are")
        for key in ("attention_bias", "mlp_bias"):
            self.must_be(key, False, "is not supported: our layers have no biases")
        quantised = self.raw.get("quantization_config")
        if quantised is not None:
            kind = quantised.get("quant_method", "?") if isinstance(quantised, dict) else quantised
            raise CheckpointError(
                f"{self.path}: the weights are quantised ({kind}): import the original in BF16 or FP32"
            )
        heads = self.whole("num_attention_heads")
        layers = self.whole("num_hidden_layers")
        model = ModelConfig(
            name=str(self.path.parent.resolve().name),
            layers=layers,
            width=self.whole("hidden_size"),
            heads=heads,
            kv_heads=self.whole("num_key_value_heads", heads),
            head_dim=self.head_dim(heads),
            windows=self.windows(layers),
            mlp=MlpKind.swiglu,
            mlp_width=self.whole("intermediate_size"),
            moe=self.moe(),
            qk_norm=self.family not in (Family.llama, Family.mixtral),
            qk_norm_scope=QkNormScope.layer if self.family is Family.olmo2 else QkNormScope.head,
            norm_placement=NormPlacement.after if self.family is Family.olmo2 else NormPlacement.before,
            tied_head=self.flag("tie_word_embeddings", False),
            norm_eps=self.number("rms_norm_eps", _EPS.get(self.family, 1e-6)),
            rope=self.rope(),
            max_sequence=self.whole("max_position_embeddings"),
            init_std=self.number("initializer_range", 0.02),
            vocab_rows=self.whole("vocab_size"),
        )
        try:
            check_architecture(model)
        except ConfigError as error:
            raise CheckpointError(f"{self.path}: {self.in_its_words(str(error))}") from None
        return HfConfig(self.family, model, self.whole("vocab_size"))

    def in_its_words(self, error: str) -> str:
        """What is wrong with our settings, by the file's keys; a value that would work for others is none for these."""
        keys = _KEYS | _FAMILY_KEYS.get(self.family, {})
        what = error.rpartition("; ")[0]
        return re.sub(r"\bmodel\.([a-z_.]+)", lambda m: keys.get(m[1], m[1].rpartition(".")[2]), what)

    def head_dim(self, heads: int) -> int | None:
        """None where it is width / heads."""
        if self.raw.get("head_dim") is None and self.family is not Family.qwen3:
            return None
        dim = self.whole("head_dim", 128)
        return None if dim * heads == self.whole("hidden_size") else dim

    def moe(self) -> MoeConfig:
        """Experts; their losses are those that go on training a model, and change nothing of what it computes."""
        if self.family is Family.dots1:
            return self.sigmoid_moe()
        if self.family not in (Family.mixtral, Family.qwen3_moe):
            return MoeConfig()
        experts = self.whole("num_local_experts", self.raw.get("num_experts"))
        width, normalise, first_dense = self.whole("intermediate_size"), True, 0
        if self.family is Family.qwen3_moe:
            width, normalise = self.whole("moe_intermediate_size"), self.flag("norm_topk_prob", False)
            dense = sorted(self.listed("mlp_only_layers", int))
            first_dense = len(dense)
            if dense != list(range(first_dense)):
                raise self.wrong("mlp_only_layers", "is not supported: dense layers must be the first ones")
            self.must_be("decoder_sparse_step", 1, "is not supported: every layer behind the dense ones has experts")
        return MoeConfig(
            experts=experts,
            top_k=self.whole("num_experts_per_tok"),
            expert_width=width,
            first_dense=first_dense,
            normalise=normalise,
            balance_loss=self.number("router_aux_loss_coef", 0.001),
            z_loss=0.0,
        )

    def sigmoid_moe(self) -> MoeConfig:
        for key in ("n_group", "topk_group"):
            self.must_be(key, 1, "is not supported: experts are chosen out of one group")
        return MoeConfig(
            experts=self.whole("n_routed_experts", self.raw.get("num_local_experts")),
            top_k=self.whole("num_experts_per_tok"),
            expert_width=self.whole("moe_intermediate_size"),
            shared=self.whole("n_shared_experts"),
            first_dense=self.whole("first_k_dense_replace", 0),
            gate=GateKind.sigmoid,
            normalise=self.flag("norm_topk_prob", False),
            gate_scale=self.number("routed_scaling_factor", 1.0),
            balance_loss=0.0,
            z_loss=0.0,
            bias_rate=1e-3,
        )

    def windows(self, layers: int) -> list[int]:
        """Window of each layer; nothing where all are global."""
        used = self.flag("use_sliding_window", self.family in (Family.mixtral, Family.dots1))
        kinds = self.listed("layer_types", str)
        if self.raw.get("sliding_window") is None or not used or self.family in (Family.llama, Family.olmo2):
            if set(kinds) - {"full_attention"}:
                raise self.wrong("layer_types", "is not supported without a sliding_window")
            return []
        window = self.whole("sliding_window")
        if self.family in (Family.mixtral, Family.qwen3_moe):
            return [window]
        if not kinds:
            first = self.whole("max_window_layers", 62 if self.family is Family.dots1 else 28)
            kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
        if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
            raise self.wrong("layer_types", f"must say sliding_attention or full_attention for each of {layers} layers")
        windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
        return windows if any(windows) else []

    def rope(self) -> RopeConfig:
        """Either spelling of the rotary settings."""
        key = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        given = self.raw.get(key) or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise self.wrong(key, "is not supported: one set of rotary settings for all layers is")

        def number(name: str, default: float) -> float:
            value = default if given.get(name) is None else given[name]
            if not _is_number(value):
                raise self.wrong(key, f"is not supported: {name} must be a number")
            return float(value)

        theta = number("rope_theta", self.number("rope_theta", _THETA.get(self.family, 10_000.0)))
        if given.get("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
            raise self.wrong(key, "is not supported: heads are rotated as a whole")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return RopeConfig(theta=theta)
        if not isinstance(kind, str) or kind not in ROPE_SETTINGS:
            raise self.wrong(key, f"is not supported: {kind} is none of default, {', '.join(ROPE_SETTINGS)}")
        missing = [name for name in _REQUIRED[kind] if given.get(name) is None]
        if missing:
            raise self.wrong(key, f"is not supported: {kind} needs {', '.join(missing)}")
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_SETTINGS[kind]}
        defaults, longest = RopeConfig(), self.whole("max_position_embeddings")
        original = number("original_max_position_embeddings", longest)
        if original < 1 or original != int(original):
            raise self.wrong(key, "is not supported: original_max_position_embeddings must be a whole number")
        rope = RopeConfig(
            theta=theta,
            scaling=RopeScaling(kind),
            factor=number("factor", 1.0),
            original_sequence=int(original),
            low_freq_factor=number("low_freq_factor", defaults.low_freq_factor),
            high_freq_factor=number("high_freq_factor", defaults.high_freq_factor),
            beta_fast=number("beta_fast", defaults.beta_fast),
            beta_slow=number("beta_slow", defaults.beta_slow),
        )
        if kind == "yarn":  # further settings are accepted where they say what we do anyway
            if given.get("truncate", True) is not True:
                raise self.wrong(key, "is not supported: truncate must be true")
            temperature = 0.1 * math.log(max(rope.factor, 1.0)) + 1.0
            same = abs(number("attention_factor", temperature) - temperature) < 1e-6
            known |= {"truncate", *(("attention_factor",) if same else ())}
        others = sorted(name for name, value in given.items() if name not in known and value is not None)
        if others:
            raise self.wrong(key, f"is not supported: {', '.join(others)} would change what {kind} computes")
        return rope
