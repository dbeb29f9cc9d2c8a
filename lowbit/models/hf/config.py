"""`config.json` of a Hugging Face folder to `ModelConfig` and back.

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
from lowbit.models.cost import head_dim_of, kv_owners, window_of

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
_NUMBERS = {
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
        if kind not in _NUMBERS:
            raise self.wrong(key, f"is not supported: {kind} is none of default, {', '.join(_NUMBERS)}")
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_NUMBERS[kind]}
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


def family_of(config: ModelConfig) -> Family:
    """The stock architecture that computes what this model computes.

    Raises:
        CheckpointError: there is none; names the setting.
    """
    if config.mlp is not MlpKind.swiglu:
        raise _no_family(f"model.mlp={config.mlp}", "only swiglu networks have one")
    if config.logit_softcap is not None:
        raise _no_family(f"model.logit_softcap={config.logit_softcap}", "none of ours caps its logits")
    if len(kv_owners(config)) < config.layers:
        raise _no_family(f"model.kv_from={config.kv_from}", "none of ours shares keys and values between layers")
    family = _moe_family(config) if config.moe.experts else _dense_family(config)
    windows = {window_of(config, layer) for layer in range(config.layers)}
    one_window = len(windows - {0}) == 1
    everywhere = family in (Family.mixtral, Family.qwen3_moe) and len(windows) == 1
    if windows != {0} and not (one_window and (family in (Family.qwen3, Family.dots1) or everywhere)):
        raise _no_family(
            f"model.windows={config.windows}", "Qwen3 and dots1 have one window, Mixtral and Qwen3-MoE everywhere"
        )
    return family


def _dense_family(config: ModelConfig) -> Family:
    norms = (config.norm_placement, config.qk_norm_scope if config.qk_norm else None)
    families = {
        (NormPlacement.before, None): Family.llama,
        (NormPlacement.before, QkNormScope.head): Family.qwen3,
        (NormPlacement.after, QkNormScope.layer): Family.olmo2,
    }
    if config.norm_placement is NormPlacement.before and not config.qk_norm and config.width % config.heads:
        raise _no_family(f"model.heads={config.heads} of model.width={config.width}", "Llama wants whole heads")
    if norms not in families:
        what = f"model.norm_placement={config.norm_placement} with model.qk_norm={str(config.qk_norm).lower()}"
        raise _no_family(what + (f" and model.qk_norm_scope={config.qk_norm_scope}" if config.qk_norm else ""))
    return families[norms]


def _moe_family(config: ModelConfig) -> Family:
    moe = config.moe
    of_heads = config.norm_placement is NormPlacement.before and config.qk_norm_scope is QkNormScope.head
    if moe.gate is GateKind.sigmoid and moe.shared and of_heads and config.qk_norm:
        return Family.dots1
    for key, wanted in (("gate", GateKind.softmax), ("shared", 0), ("bias_rate", 0), ("gate_scale", 1)):
        if getattr(moe, key) != wanted:
            raise _no_family(
                f"model.moe.{key}={getattr(moe, key)}",
                f"Mixtral and Qwen3-MoE have {wanted}; dots1 has sigmoid gates, shared experts and norms of heads",
            )
    if config.norm_placement is NormPlacement.before and config.qk_norm and config.qk_norm_scope is QkNormScope.head:
        return Family.qwen3_moe
    if config.norm_placement is NormPlacement.before and not config.qk_norm and moe.normalise and not moe.first_dense:
        return Family.mixtral
    raise _no_family(
        "a mixture of experts with these norms, model.moe.normalise or first_dense", "see Mixtral and Qwen3-MoE"
    )


def _no_family(what: str, why: str = "") -> CheckpointError:
    known = ", ".join(Family)
    return CheckpointError(f"{what}: no architecture that other software reads computes this ({why or known})")


def write_config(config: ModelConfig, vocab_size: int, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """The `config.json` of a model, for `transformers` 4 and 5.

    Args:
        vocab_size: rows of the written embedding. dtype: bfloat16 or float32. eos_id: the end-of-text token.

    Raises:
        CheckpointError: as `family_of`.
    """
    family = family_of(config)
    rope, theta = _written_rope(config)
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": str(family),
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": head_dim_of(config),
        "max_position_embeddings": config.max_sequence,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": theta,
        "rope_scaling": rope,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied_head,
        "vocab_size": vocab_size,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": None,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if family is Family.llama:
        values["mlp_bias"] = False
    return values | _written_windows(config, family) | _written_experts(config, family)


def _written_windows(config: ModelConfig, family: Family) -> dict[str, Any]:
    windows = [window_of(config, layer) for layer in range(config.layers)]
    if not any(windows):
        return {} if family in (Family.llama, Family.olmo2) else {"sliding_window": None}
    values: dict[str, Any] = {"sliding_window": max(windows)}
    if family not in (Family.mixtral, Family.dots1):
        values["use_sliding_window"] = True
    if family in (Family.qwen3, Family.dots1):
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        values |= {"layer_types": kinds, "max_window_layers": 0}
    return values


def _written_experts(config: ModelConfig, family: Family) -> dict[str, Any]:
    moe = config.moe
    common = {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.balance_loss}
    if family is Family.dots1:
        return {
            "n_routed_experts": moe.experts,
            "n_shared_experts": moe.shared,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.expert_width,
            "first_k_dense_replace": moe.first_dense,
            "norm_topk_prob": moe.normalise,
            "routed_scaling_factor": moe.gate_scale,
            "n_group": 1,
            "topk_group": 1,
        }
    if family is Family.mixtral:
        return {"num_local_experts": moe.experts, "intermediate_size": moe.expert_width, **common}
    if family is Family.qwen3_moe:
        return {
            "num_experts": moe.experts,
            "moe_intermediate_size": moe.expert_width,
            "norm_topk_prob": moe.normalise,
            "mlp_only_layers": list(range(moe.first_dense)),
            "decoder_sparse_step": 1,
            **common,
        }
    return {}


def _written_rope(config: ModelConfig) -> tuple[dict[str, Any] | None, float]:
    """(rope_scaling, rope_theta). "ntk" is nothing but a larger theta."""
    rope, head_dim = config.rope, head_dim_of(config)
    if rope.scaling is RopeScaling.none:
        return None, rope.theta
    if rope.scaling is RopeScaling.ntk:
        return None, rope.theta * rope.factor ** (head_dim / (head_dim - 2))
    ours = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_sequence,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
    }
    kind = str(rope.scaling)
    return {"rope_type": kind, **{key: ours[key] for key in _NUMBERS[kind]}}, rope.theta
