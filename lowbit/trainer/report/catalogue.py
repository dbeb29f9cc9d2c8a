"""What the metrics of a run mean, and which of them are drawn together, in which part of the page.

A metric that is not listed here is drawn all the same, among its kind if its name says which, else at the end. Standard
errors (`..._se`) are not drawn; metrics of single layers are drawn over the depth of the model (`layers.py`).
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One chart."""

    title: str
    keys: tuple[str, ...]
    """More than one: drawn in one chart, told apart by dashes, where the runs are few."""
    help: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    name: str
    title: str
    figures: tuple[Figure, ...]
    prefixes: tuple[str, ...] = ()
    """Where metrics that are not listed belong, by how they begin."""


def _one(key: str, help: str = "") -> Figure:
    return Figure(key, (key,), help)


SECTIONS = (
    Section(
        "quality",
        "What was learned",
        (
            Figure("loss", ("loss",), "mean over the step's valid tokens, nats"),
            Figure(
                "validation bits per byte",
                ("val_bpb", "val_bpb_bf16", "val_bpb_ema"),
                "in the training forward, without quantisation, of averaged weights",
            ),
            _one("val_loss", "nats a token"),
            Figure("kl", ("kl",), "to the teacher or the reference, nats a token; single steps may be negative"),
            Figure("reward", ("reward", "val_reward"), "mean of the step's conversations; of held-out problems"),
            Figure("held-out accuracy", ("val_accuracy",), "greedy answers"),
            _one("entropy", "of the policy, nats a token"),
        ),
    ),
    Section(
        "optimisation",
        "Optimisation",
        (
            Figure("learning rate", ("lr",)),
            Figure("gradient norm", ("grad_norm",), "before clipping"),
            _one("spike_score", "deviations of the loss above its recent mean"),
            _one("policy_loss"),
            _one("ratio", "trainer's probability over that when the rollout's steps began"),
            Figure("share of tokens clipped", ("clip/low", "clip/high")),
            _one("sequences", "a step"),
        ),
        ("clip/", "oscireset/", "outcontrol/", "clamp/"),
    ),
    Section(
        "speed",
        "Speed",
        (
            Figure("tokens a second", ("tokens_per_second",), "a GPU; evaluation and checkpoints left out"),
            Figure("rollout and training", ("rollout_tokens_per_second", "train_tokens_per_second"), "tokens a second"),
            Figure("model FLOPs utilisation", ("mfu",)),
            Figure("memory", ("memory_gib",), "GiB, peak"),
            Figure("share of time beside the steps", ("time/data", "time/eval", "time/checkpoint")),
            Figure("rollout, training: share of a step's time", ("share/rollout", "share/train")),
            Figure("the rest's share of a step's time", ("share/reward", "share/score", "share/sync")),
        ),
        ("time/", "share/"),
    ),
    Section("precision", "Precision", ()),
    Section("error", "Format error", (), ("quant/",)),
    Section(
        "mismatch",
        "Sampler against trainer",
        (
            Figure("KL", ("mismatch/k3_kl",), "sampler to trainer, k3 estimate, nats a token"),
            Figure("mean e^|d|", ("mismatch/mult_prob_error",), "above 1.02 look, above 1.05 worry"),
            Figure("greatest |d|", ("mismatch/abs_max",), "of log-probabilities, nats"),
            Figure("mean ratio", ("mismatch/ratio",), "trainer's probability over the sampler's"),
            Figure("corrected tokens", ("correction/truncated", "correction/rejected"), "shares"),
        ),
        ("mismatch/", "correction/"),
    ),
    Section(
        "rollouts",
        "Rollouts",
        (
            Figure("length", ("length", "val_length"), "drawn tokens a conversation"),
            Figure("groups of equal rewards", ("groups/zero_variance",), "share; they teach nothing"),
            _one("turns"),
            Figure("how answers end", ("finish/stop", "finish/length"), "shares"),
            _one("stale/steps", "age of the rollout's weights"),
            _one("rewards/failed", "checks that failed"),
        ),
        ("reward/", "finish/", "groups/", "rewards/", "stale/"),
    ),
    Section(
        "wire",
        "Bytes on the wire",
        (
            Figure(
                "bytes that a rank sends a step",
                ("comm/gradient_bytes", "comm/weight_bytes", "comm/node_bytes", "comm/token_bytes"),
            ),
        ),
        ("comm/",),
    ),
    Section(
        "layers",
        "Experts and attention",
        (
            Figure("load of experts", ("experts/load_max", "experts/load_min"), "1 when even"),
            _one("experts/entropy", "of routers, nats"),
            _one("experts/dropped", "share of choices"),
            _one("experts/bias_max"),
            _one("attention_z/max", "greatest logsumexp of attention logits"),
            Figure("saturated attention rows", ("softmax_saturation",), "share whose largest weight exceeds 0.99"),
        ),
        ("experts/", "attention_z/"),
    ),
    Section("samples", "Samples", ()),
    Section("settings", "Settings", ()),
)
"""In the order of the page."""

OTHER = Section("other", "Other metrics", (), ("",))
AXES = frozenset({"step", "tokens", "seconds"})
"""What others are drawn over."""
LINEAR = ("loss", "val_", "lr", "reward", "share/", "time/", "clip/", "finish/", "correction/", "groups/")
"""Beginnings of metrics that are never drawn on a logarithmic axis."""
FALLING = ("loss", "val_bpb", "val_loss", "kl")
"""Beginnings of those whose first values may be left out, so that the rest can be seen."""


def figures_of(section: Section, keys: Collection[str]) -> list[Figure]:
    """The charts of a section for runs that have these metrics, the unlisted ones of its kind at the end."""
    figures = []
    for figure in section.figures:
        present = tuple(key for key in figure.keys if key in keys)
        if present:
            one_of = f" ({present[0]})" if len(present) == 1 < len(figure.keys) and present[0] != figure.title else ""
            figures.append(Figure(figure.title + one_of, present, "" if one_of else figure.help))
    return figures + [_one(key) for key in sorted(keys) if key not in LISTED and _belongs(key) is section]


def _belongs(key: str) -> Section:
    """The section of an unlisted metric."""
    return next((s for s in SECTIONS if any(key.startswith(prefix) for prefix in s.prefixes)), OTHER)


LISTED = frozenset(key for section in SECTIONS for figure in section.figures for key in figure.keys)


def drawable(key: str, keys: Collection[str]) -> bool:
    """Whether a metric gets a curve of its own."""
    if key in AXES or (key.endswith("_se") and key.removesuffix("_se") in keys):
        return False
    return "blocks." not in key
