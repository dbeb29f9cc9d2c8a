"""Models that cannot be: ranges, heads, layers that share keys, experts, rotary scaling.

The one place that says so: `validate` asks before a run, `models.Transformer` before it is built from Python.
"""

from typing import Any

from lowbit.configs.checks import NATURAL, POSITIVE, Range, check_ranges, nearest_divisor, refuse
from lowbit.configs.schema import ModelConfig, RopeScaling, RunConfig
from lowbit.configs.schema_model import head_dim_of

WIDTH = Range(1, 2**22)
"""Of all experts together, matrices of such widths still have fewer bytes than 63 bits count."""
MANY = Range(1, 2**16)
LONG = Range(1, 2**31 - 1)
"""What positions, and numbers of tokens, are kept in."""
SCALE = Range(1e-6, 1e6)
"""What FP32 multiplies and divides by without leaving its range."""
WEIGHT = Range(0, 1e6)
MODEL_RANGES: dict[str, Range] = {
    "model.layers": Range(1, 10_000),
    "model.width": WIDTH,
    "model.heads": MANY,
    "model.kv_heads": MANY,
    "model.head_dim": MANY,
    "model.mlp_width": WIDTH,
    "model.logit_softcap": SCALE,
    "model.attention_softcap": SCALE,
    "model.norm_eps": Range(1e-30, 1),  # well inside FP32, in which zero over zero would be NaN
    "model.max_sequence": LONG,
    "model.init_std": SCALE,
    "model.mup_base_width": WIDTH,
    "model.vocab_multiple": LONG,
    "model.vocab_rows": LONG,
    "model.attention_z": WEIGHT,
    "model.moe.experts": Range(0, 2**16),
    "model.moe.top_k": MANY,
    "model.moe.expert_width": WIDTH,
    "model.moe.shared": Range(0, 2**16),
    "model.moe.first_dense": NATURAL,
    "model.moe.gate_scale": SCALE,
    "model.moe.balance_loss": WEIGHT,
    "model.moe.z_loss": WEIGHT,
    "model.moe.bias_rate": WEIGHT,
    "model.moe.capacity": POSITIVE,
    "model.rope.theta": Range(1, 1e15, open_low=True),
    "model.rope.factor": Range(1, 1e6),
    "model.rope.original_sequence": LONG,
    "model.rope.low_freq_factor": SCALE,
    "model.rope.high_freq_factor": SCALE,
    "model.rope.beta_fast": SCALE,
    "model.rope.beta_slow": SCALE,
}
"""Beyond these ends a model would be numbers that are not, or more memory than there is anywhere."""

MODEL_EXAMPLES: dict[str, Any] = {
    "model.head_dim": 64,
    "model.logit_softcap": 30,
    "model.attention_softcap": 50,
    "model.mup_base_width": 256,
    "model.vocab_rows": 151_936,
    "model.moe.capacity": 1.25,
}
"""A value that works, for keys whose default is null."""


def check_architecture(model: ModelConfig) -> None:
    """Raise ConfigError for the first setting of a model, by itself, that cannot work."""
    config = RunConfig(model=model)
    check_ranges(config, MODEL_RANGES, MODEL_EXAMPLES)
    check_model(config)


def check_model(config: RunConfig) -> None:
    """Raise ConfigError for the first settings of the model, each within its range, that cannot work together."""
    _heads(config)
    _layers(config)
    _experts(config)
    _rope(config)


def check_used(config: RunConfig) -> None:
    """Raise ConfigError for settings of the model that would do nothing.

    A model that was trained with them is what it is, so this is asked of new runs only.
    """
    m = config.model
    if len(m.windows) > m.layers:
        works = f"model.layers={len(m.windows)} or fewer windows would work"
        raise refuse(config, "model.windows", "model.layers", why="the last windows are no layer's", works=works)
    if m.moe.shared and not m.moe.experts:
        why, works = "without experts nothing is beside them", "model.moe.shared=0 would work"
        raise refuse(config, "model.moe.shared", "model.moe.experts", why=why, works=works)


def _heads(config: RunConfig) -> None:
    m = config.model
    if m.head_dim is None and m.width % m.heads:
        whole = [h for h in range(m.kv_heads, m.width + 1, m.kv_heads) if m.width % (2 * h) == 0]
        best = min(whole, key=lambda h: abs(h - m.heads), default=None)
        works = f"model.heads={best} would work, or set model.head_dim" if best else "set model.head_dim"
        raise refuse(config, "model.width", "model.heads", why="heads must divide the width", works=works)
    if m.heads % m.kv_heads:
        works = f"model.kv_heads={nearest_divisor(m.heads, m.kv_heads)} would work"
        raise refuse(config, "model.heads", "model.kv_heads", why="kv_heads must divide heads", works=works)
    head_dim = head_dim_of(m)
    if head_dim % 2:
        keys = ("model.head_dim",) if m.head_dim else ("model.width", "model.heads", "model.head_dim")
        why = f"a head of width {head_dim} has no pairs to rotate, it must be even"
        raise refuse(config, *keys, why=why, works=f"model.head_dim={head_dim + 1} would work")


def _layers(config: RunConfig) -> None:
    m = config.model
    if not all(0 <= window <= LONG.high for window in m.windows):
        why = f"a window is a number up to {LONG.high:.0f}, or 0 for a global layer"
        raise refuse(config, "model.windows", why=why, works="model.windows=[] would work")
    shared = m.kv_from
    good = len(shared) == m.layers and all(0 <= s <= i and shared[s] == s for i, s in enumerate(shared))
    if shared and not good:
        why = f"each of {m.layers} layers uses its own keys, or those of an earlier layer that has some"
        raise refuse(config, "model.kv_from", "model.layers", why=why, works="model.kv_from=[] would work")


def _experts(config: RunConfig) -> None:
    moe, key = config.model.moe, "model.moe"
    if not moe.experts:
        return
    if moe.top_k > moe.experts:
        works = f"{key}.top_k={moe.experts} would work"
        raise refuse(config, f"{key}.top_k", f"{key}.experts", why="a token needs so many experts", works=works)
    if moe.first_dense >= config.model.layers:
        works = f"{key}.first_dense=0 would work"
        raise refuse(config, f"{key}.first_dense", "model.layers", why="no layer would have experts", works=works)


def _rope(config: RunConfig) -> None:
    m, r, key = config.model, config.model.rope, "model.rope"
    if r.scaling is RopeScaling.ntk and head_dim_of(m) == 2:
        why = "the base of a single pair does not matter, so there is nothing to stretch"
        raise refuse(config, f"{key}.scaling", why=why, works=f"model.head_dim=4 or {key}.scaling=linear would work")
    if r.scaling is RopeScaling.none and r.factor != 1:
        works = f"{key}.scaling=yarn (or linear, ntk, llama3) or {key}.factor=1 would work"
        raise refuse(config, f"{key}.factor", f"{key}.scaling", why="the factor would do nothing", works=works)
    if r.scaling is RopeScaling.llama3 and r.low_freq_factor >= r.high_freq_factor:
        keys = (f"{key}.low_freq_factor", f"{key}.high_freq_factor")
        raise refuse(config, *keys, why="low must be below high", works="1 and 4 would work")
    if r.scaling is RopeScaling.yarn and r.beta_slow >= r.beta_fast:
        keys = (f"{key}.beta_slow", f"{key}.beta_fast")
        raise refuse(config, *keys, why="slow must be below fast", works="1 and 32 would work")
