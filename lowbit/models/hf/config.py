"""`config.json` of a Hugging Face folder to `ModelConfig`; `describe.py` is the way back.

Every key that changes what a model computes is either understood or refused by name. Two spellings of the rotary
settings exist: `rope_theta` and `rope_scaling` (transformers 4), and `rope_parameters` (5). Both are read; written is
the older one, which both versions read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

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
from lowbit.errors import CheckpointError

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
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return _Reader(path, raw).read()


class _Reader:
    """Reads one `config.json`, naming the key of whatever is wrong."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path, self.raw = path, raw
        kind = raw.get("model_type")
        if kind not in set(Family):
            known = ", ".join(Family)
            raise self.wrong("model_type", f"is not an architecture that lowbit has ({known})")
        self.family = Family(kind)

    def wrong(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key}={json.dumps(self.raw.get(key))} {why}")

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "must be a number")
        return value

    def must_be(self, key: str, wanted: Any, why: str) -> None:
        if self.raw.get(key) not in (None, wanted):
            raise self.wrong(key, why)

    def read(self) -> HfConfig:
        self.must_be("hidden_act", "silu", "is not supported: only silu (SwiGLU) networks are")
        for key in ("attention_bias", "mlp_bias"):
            self.must_be(key, False, "is not supported: our layers have no biases")
        if self.raw.get("quantization_config") is not None:
            kind = self.raw["quantization_config"].get("quant_method", "?")
            raise CheckpointError(
                f"{self.path}: the weights are quantised ({kind}): import the original in BF16 or FP32"
            )
        heads = self.number("num_attention_heads")
        layers = self.number("num_hidden_layers")
        model = ModelConfig(
            name=str(self.path.parent.resolve().name),
            layers=layers,
            width=self.number("hidden_size"),
            heads=heads,
            kv_heads=self.number("num_key_value_heads", heads),
            head_dim=self.head_dim(heads),
            windows=self.windows(layers),
            mlp=MlpKind.swiglu,
            mlp_width=self.number("intermediate_size"),
            moe=self.moe(),
            qk_norm=self.family not in (Family.llama, Family.mixtral),
            qk_norm_scope=QkNormScope.layer if self.family is Family.olmo2 else QkNormScope.head,
            norm_placement=NormPlacement.after if self.family is Family.olmo2 else NormPlacement.before,
            tied_head=bool(self.raw.get("tie_word_embeddings", False)),
            norm_eps=self.number("rms_norm_eps", _EPS.get(self.family, 1e-6)),
            rope=self.rope(),
            max_sequence=self.number("max_position_embeddings"),
            init_std=self.number("initializer_range", 0.02),
            vocab_rows=self.number("vocab_size"),
        )
        return HfConfig(self.family, model, self.number("vocab_size"))

    def head_dim(self, heads: int) -> int | None:
        """None where it is width / heads."""
        if self.raw.get("head_dim") is None and self.family is not Family.qwen3:
            return None
        dim = int(self.number("head_dim", 128))
        return None if dim * heads == self.raw["hidden_size"] else dim

    def moe(self) -> MoeConfig:
        """Experts; their losses are those that go on training a model, and change nothing of what it computes."""
        if self.family is Family.dots1:
            return self.sigmoid_moe()
        if self.family not in (Family.mixtral, Family.qwen3_moe):
            return MoeConfig()
        experts = self.number("num_local_experts", self.raw.get("num_experts"))
        width, normalise, first_dense = self.number("intermediate_size"), True, 0
        if self.family is Family.qwen3_moe:
            width, normalise = self.number("moe_intermediate_size"), bool(self.raw.get("norm_topk_prob", False))
            dense = sorted(self.raw.get("mlp_only_layers") or [])
            first_dense = len(dense)
            if dense != list(range(first_dense)):
                raise self.wrong("mlp_only_layers", "is not supported: dense layers must be the first ones")
            self.must_be("decoder_sparse_step", 1, "is not supported: every layer behind the dense ones has experts")
        return MoeConfig(
            experts=experts,
            top_k=self.number("num_experts_per_tok"),
            expert_width=width,
            first_dense=first_dense,
            normalise=normalise,
            balance_loss=float(self.number("router_aux_loss_coef", 0.001)),
            z_loss=0.0,
        )

    def sigmoid_moe(self) -> MoeConfig:
        self.must_be("n_group", 1, "is not supported: experts are chosen out of one group")
        return MoeConfig(
            experts=self.number("n_routed_experts", self.raw.get("num_local_experts")),
            top_k=self.number("num_experts_per_tok"),
            expert_width=self.number("moe_intermediate_size"),
            shared=self.number("n_shared_experts"),
            first_dense=self.number("first_k_dense_replace", 0),
            gate=GateKind.sigmoid,
            normalise=bool(self.raw.get("norm_topk_prob", False)),
            gate_scale=float(self.number("routed_scaling_factor", 1.0)),
            balance_loss=0.0,
            z_loss=0.0,
            bias_rate=1e-3,
        )

    def windows(self, layers: int) -> list[int]:
        """Window of each layer; nothing where all are global."""
        used = self.raw.get("use_sliding_window", self.family in (Family.mixtral, Family.dots1))
        if self.raw.get("sliding_window") is None or not used or self.family in (Family.llama, Family.olmo2):
            if set(self.raw.get("layer_types") or ["full_attention"]) != {"full_attention"}:
                raise self.wrong("layer_types", "is not supported without a sliding_window")
            return []
        window = int(self.number("sliding_window"))
        if self.family in (Family.mixtral, Family.qwen3_moe):
            return [window]
        kinds = self.raw.get("layer_types")
        if kinds is None:
            first = self.number("max_window_layers", 62 if self.family is Family.dots1 else 28)
            kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
        if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
            raise self.wrong("layer_types", f"must say sliding_attention or full_attention for each of {layers} layers")
        windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
        return windows if any(windows) else []

    def rope(self) -> RopeConfig:
        """Either spelling of the rotary settings."""
        given = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        key = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise self.wrong(key, "is not supported: one set of rotary settings for all layers is")
        theta = given.get("rope_theta", self.number("rope_theta", _THETA.get(self.family, 10_000.0)))
        if given.get("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
            raise self.wrong(key, "is not supported: heads are rotated as a whole")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return RopeConfig(theta=float(theta))
        if kind not in ROPE_SETTINGS:
            raise self.wrong(key, f"is not supported: {kind} is none of default, {', '.join(ROPE_SETTINGS)}")
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_SETTINGS[kind]}
        if kind == "yarn":
            known |= self.yarn_extras(key, given)
        others = sorted(name for name, value in given.items() if name not in known and value is not None)
        if others:
            raise self.wrong(key, f"is not supported: {', '.join(others)} would change what {kind} computes")
        defaults = RopeConfig()
        original = given.get("original_max_position_embeddings", self.number("max_position_embeddings"))
        return RopeConfig(
            theta=float(theta),
            scaling=RopeScaling(kind),
            factor=float(given.get("factor") or self.number("max_position_embeddings") / original),
            original_sequence=int(original),
            low_freq_factor=float(given.get("low_freq_factor", defaults.low_freq_factor)),
            high_freq_factor=float(given.get("high_freq_factor", defaults.high_freq_factor)),
            beta_fast=float(given.get("beta_fast") or defaults.beta_fast),
            beta_slow=float(given.get("beta_slow") or defaults.beta_slow),
        )

    def yarn_extras(self, key: str, given: Mapping[str, Any]) -> set[str]:
        """YaRN's further settings are accepted where they say what we do anyway."""
        if given.get("truncate", True) is not True:
            raise self.wrong(key, "is not supported: truncate must be true")
        temperature = 0.1 * math.log(given["factor"]) + 1.0 if given.get("factor") else None
        same = temperature is not None and abs(given.get("attention_factor", 0.0) - temperature) < 1e-6
        return {"truncate", *(("attention_factor",) if same else ())}
