"""Precision meets a model: `apply_policy` exchanges its linear layers for low-bit ones.

    every Linear of the blocks --rules, default--> LinearPolicy --if it quantises anything--> LowbitLinear

The exchange keeps the parameter objects, hence names, optimizer state and checkpoints. Embeddings, norms, routers and
the LM head are no candidates. A layer is exchanged if any phase of the run will quantise it; while its policy is BF16
alone, a low-bit layer computes exactly what a Linear does. A switch (`set_stage`) then only replaces `layer.policy`.

All layers share one clock tensor, which `set_clock` moves in place before each micro-batch. Noise is keyed by a hash
of each layer's full name, and two names that hash alike would share their noise: refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from lowbit.configs.schema import MatrixBackend
from lowbit.errors import ConfigError
from lowbit.models.layers import Linear
from lowbit.quant.backends.base import Sizes
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.backends.te import TeLinear
from lowbit.quant.linear import LowbitLinear, check_shape
from lowbit.quant.philox import MASK, layer_word, make_clock, make_key
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.report import NATIVE, PolicyReport, collapse, report
from lowbit.quant.stages import PrecisionPolicy, Stage, StagePolicy, resolve

__all__ = [
    "PrecisionPolicy",
    "Stage",
    "StagePolicy",
    "apply_policy",
    "assign",
    "bound",
    "candidates",
    "high_precision",
    "report_policy",
    "resolve",
    "set_clock",
    "set_stage",
]

BLOCKS = "blocks."
"""Where the layers are that a policy speaks of."""


def candidates(model: nn.Module) -> dict[str, Linear]:
    """The linear layers that a policy decides about, by full name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, Linear) and name.startswith(BLOCKS)
    }


def assign(stage: StagePolicy, layers: Mapping[str, Linear]) -> dict[str, LinearPolicy]:
    """The policy of each layer, checked against its shape.

    Raises:
        ConfigError: a rule that is not optional decides no layer; a layer has a shape that its policy cannot quantise.
    """
    blocks = 1 + max((int(name.split(".")[1]) for name in layers), default=-1)
    policies: dict[str, LinearPolicy] = {}
    used = set()
    for name, layer in layers.items():
        rule = stage.rule_of(name, blocks)
        used.add(None if rule is None else rule.key)
        policies[name] = stage.default if rule is None else rule.policy
        check_shape(name, layer.in_features, layer.out_features, policies[name])
    for rule in stage.rules:
        if rule.key not in used and not rule.optional:
            others = [name for name in layers if rule.matches(name, blocks)]
            why = (
                f"earlier rules decide all of {collapse(others)}" if others else "matches no linear layer of the model"
            )
            raise ConfigError(
                f"{rule.key}.match={rule.match}: {why}; the layers are {collapse(layers)} (embeddings, norms and the "
                f"LM head always stay in high precision); {rule.key}.optional=true would allow it"
            )
    return policies


def bound(
    stage: StagePolicy, layers: Mapping[str, Linear], chooser: Chooser
) -> tuple[dict[str, LinearPolicy], dict[str, tuple[str, ...]]]:
    """Of each layer: its policy with the backends that multiply it, and what the report should remark.

    Raises: ConfigError, as `assign`; a backend that the configuration names cannot take a layer.
    """
    policies, remarks = {}, {}
    for name, policy in assign(stage, layers).items():
        found = chooser.bind(name, policy, Sizes(layers[name].in_features, layers[name].out_features))
        policies[name], remarks[name] = found.policy, found.remarks
    return policies, remarks


def report_policy(
    model: nn.Module,
    policy: PrecisionPolicy,
    *,
    dtype: str,
    device: str,
    stage: Stage = Stage.training,
    chooser: Chooser | None = None,
    plain: str = NATIVE,
) -> PolicyReport:
    """What `apply_policy` would do to a model (on the meta device, too), with all that could be wrong with it.

    Args: see `apply_policy`. Raises: ConfigError, as `bound`.
    """
    layers = candidates(model)
    phases = [bound(phase, layers, chooser or Chooser()) for phase in policy.phases(stage)]
    policies, remarks = phases[0]
    return report(policies, dtype, device, plain, remarks)


def apply_policy(
    model: nn.Module,
    policy: PrecisionPolicy,
    *,
    seed: int,
    dtype: str = "bf16",
    device: str = "",
    stage: Stage = Stage.training,
    chooser: Chooser | None = None,
    plain: str = NATIVE,
) -> PolicyReport:
    """Exchange the layers of a model that is on its device already; the stage's first phase is in force.

    Args:
        seed: of the run, 0..2**63-1; what the noise is keyed by.
        chooser: gives products their backends; None: all are emulated. dtype, device, plain: see `report`.

    Raises:
        ConfigError: as `bound`, for any phase; two layers whose names have the same hash.
    """
    layers = candidates(model)
    chooser = chooser or Chooser()
    phases = [bound(phase, layers, chooser) for phase in policy.phases(stage)]
    chosen = [name for name in layers if any(policies[name].quantised for policies, _ in phases)]
    kind = TeLinear if chooser.wanted is MatrixBackend.te else LowbitLinear
    _require_distinct(chosen)
    clock: Tensor | None = None
    for name in chosen:
        linear, device_ = layers[name], layers[name].weight.device
        if isinstance(linear, LowbitLinear):
            raise ConfigError(f"{name} has a policy already: build the model anew, or use set_stage")
        clock = make_clock().to(device_) if clock is None else clock
        key = make_key((seed ^ (seed >> 32)) & MASK, name).to(device_)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, kind.of(linear, phases[0][0][name], key, clock, name))
    return report(phases[0][0], dtype, device, plain, phases[0][1])


def _require_distinct(names: list[str]) -> None:
    words: dict[int, str] = {}
    for name in names:
        other = words.setdefault(layer_word(name), name)
        if other != name:
            raise ConfigError(f"{other} and {name} have the same 32-bit hash and would share noise: rename one")


def lowbit_layers(model: nn.Module) -> dict[str, LowbitLinear]:
    """The exchanged layers by full name."""
    return {name: layer for name, layer in candidates(model).items() if isinstance(layer, LowbitLinear)}


def set_stage(model: nn.Module, stage: StagePolicy, chooser: Chooser | None = None) -> None:
    """Put another policy in force, between two steps. Layers that no phase quantises were never exchanged.

    Raises: ConfigError, as `bound`; a layer that was not exchanged would have to be quantised.
    """
    layers = candidates(model)
    for name, policy in bound(stage, layers, chooser or Chooser())[0].items():
        layer = layers[name]
        if isinstance(layer, LowbitLinear):
            layer.policy = policy
        elif policy.quantised:
            raise ConfigError(f"{name}: this policy was not among the run's phases when the model was built")


@contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """No layer quantises anything inside this context."""
    layers = lowbit_layers(model).values()
    before = [layer.policy for layer in layers]
    try:
        for layer in layers:
            layer.policy = LinearPolicy()
        yield
    finally:
        for layer, policy in zip(layers, before, strict=True):
            layer.policy = policy


def clocks(model: nn.Module) -> list[Tensor]:
    """The clock tensors of a model: one, or none if nothing is quantised."""
    found = {id(layer.clock): layer.clock for layer in lowbit_layers(model).values()}
    return list(found.values())


def set_clock(clock: Tensor, step: int, micro_batch: int, rank: int) -> None:
    """Move a clock, int64 [3], in place and without waiting for the device.

    Args:
        step: optimizer steps done. micro_batch: index in the step, over all ranks. rank: of this process.
    """
    for place, value in enumerate((step, micro_batch, rank)):
        clock[place].fill_(value)
