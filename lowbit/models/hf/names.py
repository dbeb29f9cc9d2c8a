"""Our parameter names and those of Hugging Face's files.

A matrix of ours is one tensor there, with two exceptions: the expert weights of a layer, [experts, out, in] here, are
one tensor an expert there; and a tied head is not stored at all.
"""

import re
from collections.abc import Iterable

from lowbit.errors import CheckpointError
from lowbit.models.hf.config import Family

HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_OUTSIDE = {
    "embedding.weight": TABLE,
    "final_norm.weight": "model.norm.weight",
    "head.weight": HEAD,
}
_ATTENTION = {
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
_MLP = {
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_NORMS_BEFORE = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
_NORMS_AFTER = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "post_feedforward_layernorm.weight",
}
_EXPERTS = {
    Family.mixtral: {
        "mlp.router.weight": "block_sparse_moe.gate.weight",
        "mlp.experts.gate.weight": "block_sparse_moe.experts.*.w1.weight",
        "mlp.experts.up.weight": "block_sparse_moe.experts.*.w3.weight",
        "mlp.experts.down.weight": "block_sparse_moe.experts.*.w2.weight",
    },
    Family.qwen3_moe: {
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.gate.weight": "mlp.experts.*.gate_proj.weight",
        "mlp.experts.up.weight": "mlp.experts.*.up_proj.weight",
        "mlp.experts.down.weight": "mlp.experts.*.down_proj.weight",
    },
}
_EXPERTS[Family.dots1] = {
    **_EXPERTS[Family.qwen3_moe],
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "mlp.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "mlp.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}
IN_FP32 = re.compile(r".*\.e_score_correction_bias")
"""Tensors that files hold in FP32 whatever the others are in."""
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors of old files that hold nothing."""


def file_names(family: Family, ours: str, experts: int = 0) -> list[str]:
    """The tensors of a file that make up the parameter `ours`: one, or one an expert.

    Raises: CheckpointError when the architecture has no place for it.
    """
    if ours in _OUTSIDE:
        return [_OUTSIDE[ours]]
    match = _BLOCK.fullmatch(ours)
    norms = _NORMS_AFTER if family is Family.olmo2 else _NORMS_BEFORE
    inside = {**_ATTENTION, **_MLP, **norms, **_EXPERTS.get(family, {})}
    if match is None or match[2] not in inside:
        raise CheckpointError(f"{ours} has no place in the {family} architecture")
    name = f"model.layers.{match[1]}.{inside[match[2]]}"
    return [name.replace("*", str(expert)) for expert in range(experts)] if "*" in name else [name]


def surplus(names: Iterable[str], used: set[str]) -> list[str]:
    """Tensors of a file that no parameter of ours takes, sorted."""
    return sorted(name for name in names if name not in used and not IGNORED.fullmatch(name))
