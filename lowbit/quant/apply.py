"""Precision meets a model: `apply_policy` exchanges its linear layers for low-bit ones.

    every Linear of the blocks --rules, default--> LinearPolicy --if it quantises anything--> LowbitLinear
    every GroupedLinear (experts)                                                            LowbitGroupedLinear

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
from lowbit.models.layers import GroupedLinear, Linear
from lowbit.quant.backends.base import Sizes
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.backends.te import TeLinear
from lowbit.quant.grouped import LowbitGroupedLinear, expert_name, keys_of
from lowbit.quant.linear import LowbitLinear, check_shape
from lowbit.quant.philox import MASK, layer_word, make_clock, make_key
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.report import NATIVE, PolicyReport, collapse, report
from lowbit.quant.resolve import PrecisionPolicy, Role, StagePolicy

BLOCKS = "blocks."
"""Where the layers are that a policy speaks of."""


Candidate = Linear | GroupedLinear


def candidates(model: nn.Module) -> dict[str, Candidate]:
    """The linear layers that a policy decides about, by full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Candidate) and name.startswith(BLOCKS)
    }


def assign(stage: StagePolicy, layers: Mapping[str, Candidate]) -> dict[str, LinearPolicy]:
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
    stage: StagePolicy, layers: Mapping[str, Candidate], chooser: Chooser
) -> tuple[dict[str, LinearPolicy], dict[str, tuple[str, ...]]]:
    """Of each layer: its policy with the backends that multiply it, and what the report should remark.

    Raises: ConfigError, as `assign`; a backend that the configuration names cannot take a layer.
    """
    policies, remarks = {}, {}
    for name, policy in assign(stage, layers).items():
        layer = layers[name]
        bind = chooser.bind_experts if isinstance(layer, GroupedLinear) else chooser.bind
        found = bind(name, policy, Sizes(layer.in_features, layer.out_features))
        policies[name], remarks[name] = found.policy, found.remarks
    return policies, remarks


def report_policy(
    model: nn.Module,
    policy: PrecisionPolicy,
    *,
    dtype: str,
    device: str,
    role: Role = Role.training,
    chooser: Chooser | None = None,
    plain: str = NATIVE,
) -> PolicyReport:
    """What `apply_policy` would do to a model (on the meta device, too), with all that could be wrong with it.

    Args: see `apply_policy`. Raises: ConfigError, as `bound`.
    """
    layers = candidates(model)
    phases = [bound(phase, layers, chooser or Chooser()) for phase in policy.phases(role)]
    policies, remarks = phases[0]
    return report(policies, dtype, device, plain, remarks)


def apply_policy(
    model: nn.Module,
    policy: PrecisionPolicy,
    *,
    seed: int,
    dtype: str = "bf16",
    device: str = "",
    role: Role = Role.training,
    chooser: Chooser | None = None,
    plain: str = NATIVE,
) -> PolicyReport:
    """Exchange the layers of a model that is on its device already; the first phase of the role is in force.

    Args:
        seed: of the run, 0..2**63-1; what the noise is keyed by.
        chooser: gives products their backends; None: all are emulated. dtype, device, plain: see `report`.

    Raises:
        ConfigError: as `bound`, for any phase; two layers whose names have the same hash.
    """
    layers = candidates(model)
    chooser = chooser or Chooser()
    phases = [bound(phase, layers, chooser) for phase in policy.phases(role)]
    chosen = [name for name in layers if any(policies[name].quantised for policies, _ in phases)]
    kind = TeLinear if chooser.wanted is MatrixBackend.te else LowbitLinear
    _require_distinct([noise for name in chosen for noise in _noise_names(name, layers[name])])
    clock: Tensor | None = None
    for name in chosen:
        linear, device_ = layers[name], layers[name].weight.device
        if isinstance(linear, LowbitLinear | LowbitGroupedLinear):
            raise ConfigError(f"{name} has a policy already: build the model anew, or use set_stage")
        clock = make_clock().to(device_) if clock is None else clock
        word, first = (seed ^ (seed >> 32)) & MASK, phases[0][0][name]
        low: nn.Module
        if isinstance(linear, GroupedLinear):
            low = LowbitGroupedLinear.of(linear, first, keys_of(word, name, linear.experts).to(device_), clock, name)
        else:
            low = kind.of(linear, first, make_key(word, name).to(device_), clock, name)
            low.phases = tuple(dict.fromkeys(policies[name] for policies, _ in phases))
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, low)
    return report(phases[0][0], dtype, device, plain, phases[0][1])


def _noise_names(name: str, layer: Candidate) -> list[str]:
    """What a layer's noise is keyed by."""
    return [expert_name(name, e) for e in range(layer.experts)] if isinstance(layer, GroupedLinear) else [name]


def _require_distinct(names: list[str]) -> None:
    words: dict[int, str] = {}
    for name in names:
        other = words.setdefault(layer_word(name), name)
        if other != name:
            raise ConfigError(f"{other} and {name} have the same 32-bit hash and would share noise: rename one")


def lowbit_layers(model: nn.Module) -> dict[str, LowbitLinear]:
    """The exchanged layers by full name, experts apart."""
    return {name: layer for name, layer in candidates(model).items() if isinstance(layer, LowbitLinear)}


def _exchanged(model: nn.Module) -> list[LowbitLinear | LowbitGroupedLinear]:
    """All of them."""
    return [layer for layer in candidates(model).values() if isinstance(layer, LowbitLinear | LowbitGroupedLinear)]


def set_stage(model: nn.Module, stage: StagePolicy, chooser: Chooser | None = None) -> None:
    """Put another policy in force, between two steps. Layers that no phase quantises were never exchanged.

    Raises: ConfigError, as `bound`; a layer that was not exchanged would have to be quantised.
    """
    layers = candidates(model)
    for name, policy in bound(stage, layers, chooser or Chooser())[0].items():
        layer = layers[name]
        if isinstance(layer, LowbitLinear | LowbitGroupedLinear):
            layer.policy = policy
        elif policy.quantised:
            raise ConfigError(
                f"{name}: this policy was not among the run's phases when the model was built: name the change in "
                "precision.switch"
            )


@contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """No layer quantises anything inside this context."""
    layers = _exchanged(model)
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
    found = {id(layer.clock): layer.clock for layer in _exchanged(model)}
    return list(found.values())


def set_clock(clock: Tensor, step: int, micro_batch: int, rank: int) -> None:
    """Move a clock, int64 [3], in place and without waiting for the device.

    Args:
        step: optimizer steps done. micro_batch: index in the step, over all ranks. rank: of this process.
    """
    for place, value in enumerate((step, micro_batch, rank)):
        clock[place].fill_(value)
