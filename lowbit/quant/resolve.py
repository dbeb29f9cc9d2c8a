"""From the names a user writes to policies: `resolve(PrecisionConfig) -> PrecisionPolicy`.

A name is a preset or a description under `precision.define`; both are a `LinearPolicy`. `forward` takes the fprop of
what it names, `dgrad` and `wgrad` (or `backward`, for both) the gradient products. How W^T and X^T are aligned belongs
to the backward, the mean split of X to the forward.

The four stages of a model's life are three policies, because pretraining's forward and backward are one layer's:

    training   forward and backward, which switches may change during the run
    sampler    the forward alone
    trainer    the sampler's forward and, unless something else is named, a BF16 backward on its dequantised operands:
               the gradient is that of the function that was sampled from

A `StagePolicy` gives each layer its `LinearPolicy`: that of the first rule that matches its name, else the stage's
default. Everything here is data and is checked before a model exists; `apply` meets the layers.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from lowbit.configs.nearest import suggest
from lowbit.configs.schema import MatrixBackend, PolicyConfig, PrecisionConfig, ProductConfig
from lowbit.errors import ConfigError
from lowbit.quant.policy import Alignment, LinearPolicy, Operand, ProductPolicy, Signs
from lowbit.quant.presets import PRESETS
from lowbit.quant.spec import SPECS, VARIANTS

MOST_SWITCHES = 8
_BLOCK = re.compile(r"blocks\.(\d+)\.")


class Role(StrEnum):
    """What a model is there for."""

    training = "training"
    sampler = "sampler"
    trainer = "trainer"


@dataclass(frozen=True)
class Rule:
    """Layers whose full name the expression matches compute in `policy`."""

    match: str
    policy: LinearPolicy
    last_blocks: float
    optional: bool
    key: str
    """Where it stands in the configuration, for errors."""

    def matches(self, name: str, blocks: int) -> bool:
        """Whether it speaks of this layer of a model with so many blocks."""
        first = blocks - round(self.last_blocks * blocks)
        block = _BLOCK.match(name)
        inside = first == 0 or (block is not None and int(block[1]) >= first)
        return inside and re.fullmatch(self.match, name) is not None


@dataclass(frozen=True)
class StagePolicy:
    """What each layer computes in, in one stage."""

    default: LinearPolicy
    rules: tuple[Rule, ...] = ()

    @property
    def quantised(self) -> bool:
        """Whether it may quantise some layer."""
        return self.default.quantised or any(rule.policy.quantised for rule in self.rules)

    def rule_of(self, name: str, blocks: int) -> Rule | None:
        """The rule that decides about a layer, if any."""
        return next((rule for rule in self.rules if rule.matches(name, blocks)), None)


@dataclass(frozen=True)
class Switch:
    """A change of the training policy, from the first step at which its time has come. None: as before."""

    at: float | None
    """Share of the run done."""
    at_step: int | None
    """Optimizer steps done."""
    at_decay: bool
    """When the learning rate begins to fall."""
    forward: LinearPolicy | None = None
    dgrad: LinearPolicy | None = None
    wgrad: LinearPolicy | None = None
    label: str = ""
    """`forward bf16`: what it changes, in the user's names."""

    def due(self, step: int, progress: float, decaying: bool) -> bool:
        """Whether it holds for the step that starts after `step` steps, at `progress` of the run."""
        return (
            (self.at is not None and progress >= self.at)
            or (self.at_step is not None and step >= self.at_step)
            or (self.at_decay and decaying)
        )

    @property
    def when(self) -> str:
        """Its time, in words."""
        if self.at is not None:
            return f"at {100 * self.at:g}% of the run"
        return f"after step {self.at_step}" if self.at_step is not None else "when the learning rate begins to fall"

    def implies(self, other: "Switch") -> bool:
        """Whether `other` is always due when this one is."""
        if self.at is not None and other.at is not None:
            return other.at <= self.at
        if self.at_step is not None and other.at_step is not None:
            return other.at_step <= self.at_step
        return self.at_decay and other.at_decay

    def as_dict(self) -> dict[str, Any]:
        """Plain values (JSON): its time, and what its names stand for."""
        given = {"forward": self.forward, "dgrad": self.dgrad, "wgrad": self.wgrad}
        changes = {part: describe(policy) for part, policy in given.items() if policy is not None}
        return {"when": self.when, "label": self.label} | changes


@dataclass(frozen=True)
class PrecisionPolicy:
    """Everything `precision` says, resolved."""

    forward: LinearPolicy
    """Whose fprop, dgrad and wgrad pretraining starts with."""
    dgrad: LinearPolicy
    wgrad: LinearPolicy
    sampler: StagePolicy
    trainer: StagePolicy
    rules: tuple[Rule, ...] = ()
    switches: tuple[Switch, ...] = ()
    backend: MatrixBackend = MatrixBackend.auto
    """As configured; which backend a layer gets is the device's matter."""

    def training(self, active: Sequence[bool] = ()) -> StagePolicy:
        """Pretraining's policy while these switches are due (none, if not given)."""
        forward, dgrad, wgrad = self.forward, self.dgrad, self.wgrad
        for switch, due in zip(self.switches, active, strict=False):
            if due:
                forward, dgrad, wgrad = switch.forward or forward, switch.dgrad or dgrad, switch.wgrad or wgrad
        return StagePolicy(_combine(forward, dgrad, wgrad), self.rules)

    def phases(self, role: Role = Role.training, active: Sequence[bool] = ()) -> list[StagePolicy]:
        """Every policy that a role can come to have once these switches are due, the one it then has first."""
        if role is not Role.training:
            return [self.sampler if role is Role.sampler else self.trainer]
        return list(dict.fromkeys(self.training(later) for later in self._reachable(active)))

    def _reachable(self, now: Sequence[bool]) -> Iterator[tuple[bool, ...]]:
        """The sets of switches that can be due at once, those of `now` among them."""
        choices = [(True,) if i < len(now) and now[i] else (False, True) for i in range(len(self.switches))]
        for active in itertools.product(*choices):
            pairs = itertools.permutations(zip(self.switches, active, strict=True), 2)
            if not any(on and not other_on and a.implies(b) for (a, on), (b, other_on) in pairs):
                yield active

    def as_dict(self) -> dict[str, Any]:
        """Plain values (JSON): what tells this policy from another one, for a checkpoint.

        Rules and switches in their order, which decides between them. The backend is among them: it changes the order
        of sums, hence bits.
        """
        return {
            "training": describe(self.training().default),
            "sampler": describe(self.sampler.default),
            "trainer": describe(self.trainer.default),
            "rules": [
                {"match": rule.match, "last_blocks": rule.last_blocks} | describe(rule.policy) for rule in self.rules
            ],
            "switch": [switch.as_dict() for switch in self.switches],
            "backend": self.backend.value,
        }

    def differences(self, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """What a checkpoint's `as_dict` says otherwise: by key its value and ours, None where there is none.

        Older checkpoints hold rules and switches without their order, and no backend: in those parts nothing differs.
        """
        now = self.as_dict()
        was = {"backend": now["backend"]} | {
            key: now[key] if isinstance(now.get(key), list) and isinstance(value, Mapping) else value
            for key, value in saved.items()
        }
        theirs, ours = _products_apart(was), _products_apart(now)
        keys = [key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)]
        return {key: (theirs.get(key), ours.get(key)) for key in keys}


def _products_apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """`training.fprop` and so on, of `PrecisionPolicy.as_dict`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{part}": v for part, v in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


def describe(policy: LinearPolicy) -> dict[str, str]:
    """A policy in words, product by product."""
    words = {name: _describe_product(getattr(policy, name)) for name in ("fprop", "dgrad", "wgrad")}
    if policy.quantised:
        words["alignment"] = policy.alignment.value
    if policy.mean_split:
        words["fprop"] += ", mean split"
    return words


def _describe_product(product: ProductPolicy) -> str:
    if not product.quantised:
        return "BF16"
    rotation = f", rotation {product.rotation} {product.signs.value}" if product.rotation else ""
    return f"{product.left.name} x {product.right.name}{rotation}"


# From configuration -------------------------------------------------------------------------------------------


def resolve(config: PrecisionConfig) -> PrecisionPolicy:
    """The policies that a configuration names.

    Raises:
        ConfigError: an unknown name or format (with the choices and the nearest), a description that cannot be right,
            names that do not go together.
    """
    names = _Names(config.define)
    backward = names.get("precision.backward", config.backward)
    forward = names.get("precision.forward", config.forward)
    dgrad = names.get("precision.dgrad", config.dgrad) if config.dgrad is not None else backward
    wgrad = names.get("precision.wgrad", config.wgrad) if config.wgrad is not None else backward
    sampler = names.get("precision.sampler", config.sampler) if config.sampler is not None else forward
    trainer = None if config.trainer is None else names.get("precision.trainer", config.trainer)
    rules = tuple(
        Rule(
            rule.match,
            names.get(f"precision.rules.{i}.policy", rule.policy),
            rule.last_blocks,
            rule.optional,
            f"precision.rules.{i}",
        )
        for i, rule in enumerate(config.rules)
    )
    policy = PrecisionPolicy(
        forward,
        dgrad,
        wgrad,
        StagePolicy(_forward_of(sampler), tuple(replace(rule, policy=_forward_of(rule.policy)) for rule in rules)),
        StagePolicy(
            _forward_of(sampler) if trainer is None else trainer,
            tuple(rule if trainer else replace(rule, policy=_forward_of(rule.policy)) for rule in rules),
        ),
        rules,
        tuple(_switch(config, i, names) for i in range(len(config.switch))),
        config.backend,
    )
    if len(policy.switches) > MOST_SWITCHES:
        raise ConfigError(f"precision.switch has {len(policy.switches)} entries: at most {MOST_SWITCHES} are supported")
    try:
        policy.phases()
    except ConfigError as error:
        raise ConfigError(f"precision: {error}") from None
    return policy


def _switch(config: PrecisionConfig, index: int, names: "_Names") -> Switch:
    given = config.switch[index]
    key = f"precision.switch.{index}"
    found = {
        part: names.get(f"{key}.{part}", value)
        for part in ("forward", "backward", "dgrad", "wgrad")
        if (value := getattr(given, part)) is not None
    }
    return Switch(
        given.at,
        given.at_step,
        given.at_decay,
        found.get("forward"),
        found.get("dgrad", found.get("backward")),
        found.get("wgrad", found.get("backward")),
        ", ".join(f"{part} {getattr(given, part)}" for part in found),
    )


def _forward_of(policy: LinearPolicy) -> LinearPolicy:
    """Its forward, with a BF16 backward on the dequantised operands."""
    return LinearPolicy(fprop=policy.fprop, mean_split=policy.mean_split and policy.fprop.left.spec is not None)


def _combine(forward: LinearPolicy, dgrad: LinearPolicy, wgrad: LinearPolicy) -> LinearPolicy:
    """The products of three policies in one."""
    if forward == dgrad == wgrad:
        return forward
    alignment = dgrad.alignment
    if dgrad.alignment is not wgrad.alignment:
        if dgrad.dgrad.quantised and wgrad.wgrad.quantised:
            raise ConfigError(
                f"dgrad's policy quantises {_WHAT[dgrad.alignment]} operands and wgrad's {_WHAT[wgrad.alignment]} "
                "ones: describe one policy with both under precision.define, with the alignment that it shall have"
            )
        alignment = dgrad.alignment if dgrad.dgrad.quantised else wgrad.alignment
    quantises_x = forward.fprop.left.spec is not None or wgrad.wgrad.right.spec is not None
    return LinearPolicy(
        forward.fprop,
        dgrad.dgrad,
        wgrad.wgrad,
        alignment,
        forward.mean_split and quantises_x,
        dgrad.allow_bias or wgrad.allow_bias,
    )


_WHAT = {Alignment.ALIGNED: "dequantised", Alignment.ORIGINAL: "original"}


class _Names:
    """Presets and descriptions by name; each description is read once, strictly, whether it is used or not."""

    def __init__(self, define: Mapping[str, PolicyConfig]) -> None:
        self._define = define
        self._known: dict[str, LinearPolicy] = {}
        for name in define:
            if name in PRESETS:
                raise ConfigError(f"precision.define.{name}: a preset has this name already; choose another")
        for name in define:
            self._describe(name, ())

    def get(self, key: str, name: str) -> LinearPolicy:
        """The policy `name`, which the configuration has at `key`."""
        if name in PRESETS:
            return PRESETS[name]
        if name in self._known:
            return self._known[name]
        raise _unknown(key, name, "precision", [*PRESETS, *self._define])

    def _describe(self, name: str, above: tuple[str, ...]) -> LinearPolicy:
        if name in self._known:
            return self._known[name]
        key, given = f"precision.define.{name}", self._define[name]
        if name in above:
            raise ConfigError(f"{key}.base={given.base}: descriptions that are based on each other never end")
        if given.base in self._define:
            base = self._describe(given.base, (*above, name))
        else:
            base = self.get(f"{key}.base", given.base)
        products = {
            part: _product(f"{key}.{part}", described)
            for part in ("fprop", "dgrad", "wgrad")
            if (described := getattr(given, part)) is not None
        }
        try:
            made = LinearPolicy(
                **({part: getattr(base, part) for part in ("fprop", "dgrad", "wgrad")} | products),
                alignment=base.alignment if given.alignment is None else Alignment(given.alignment.value),
                mean_split=base.mean_split if given.mean_split is None else given.mean_split,
                allow_bias=base.allow_bias if given.allow_bias is None else given.allow_bias,
            )
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
        self._known[name] = made
        return made


def _product(key: str, given: ProductConfig) -> ProductPolicy:
    left, right = (_operand(f"{key}.{side}", getattr(given, side)) for side in ("left", "right"))
    try:
        return ProductPolicy(left, right, given.rotation, Signs(given.signs.value))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _operand(key: str, name: str) -> Operand:
    if name == "BF16":
        return Operand()
    formats = SPECS | VARIANTS
    if name not in formats:
        raise _unknown(key, name, "format", ["BF16", *formats])
    return Operand(formats[name])


def _unknown(key: str, name: str, kind: str, choices: Sequence[str]) -> ConfigError:
    known = f"{', '.join(choices)}{suggest(name, choices)}"
    return ConfigError(f"{key}={name}: there is no such {kind}; choices are {known}")
