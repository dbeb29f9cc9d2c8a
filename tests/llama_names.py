"""Names of our weights as transformers' Llama and Qwen3 have them: for tests that use those as an oracle."""

NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    **{f"attention.{x}.": f"self_attn.{x}_proj." for x in "qkv"},
    **{f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "blocks.": "model.layers.",
    "final_norm": "model.norm",
    "head.": "lm_head.",
    "embedding": "model.embed_tokens",
}


def llama_name(name: str) -> str:
    """Theirs for ours."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name
