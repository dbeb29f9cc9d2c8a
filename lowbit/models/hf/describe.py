"""Which stock architecture computes what a model of ours computes, and the `config.json` that says so."""

from typing import Any

from lowbit.configs.schema import GateKind, MlpKind, ModelConfig, NormPlacement, QkNormScope, RopeScaling
from lowbit.configs.schema_model import head_dim_of
from lowbit.errors import CheckpointError
from lowbit.models.cost import kv_owners, window_of
from lowbit.models.hf.config import ARCHITECTURES, ROPE_SETTINGS, Family


def family_of(config: ModelConfig) -> Family:
    """The stock architecture that computes what this model computes.

    Raises:
        CheckpointError: there is none; names the setting.
    """
    if config.mlp is not MlpKind.swiglu:
        raise _no_family(f"model.mlp={config.mlp}", "only swiglu networks have one")
    if config.logit_softcap is not None:
        raise _no_family(f"model.logit_softcap={config.logit_softcap}", "none of ours caps its logits")
    if config.attention_softcap is not None:
        raise _no_family(f"model.attention_softcap={config.attention_softcap}", "none of ours caps attention's logits")
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
    return {"rope_type": kind, **{key: ours[key] for key in ROPE_SETTINGS[kind]}}, rope.theta
