"""Precisions that cannot be obeyed: rules and switches that decide nothing, stabilisers that come too late.

Which layers exist and which formats fit them is known later, to `lowbit.quant.apply`.
"""

import re

from lowbit.configs.checks import refuse
from lowbit.configs.schema import MlpKind, NormPlacement, RunConfig, ScheduleKind


def check_precision(config: RunConfig) -> None:
    """Raise ConfigError for the first setting of the precision that cannot work."""
    _rules(config)
    _switches(config)
    _stabilisers(config)


def _rules(config: RunConfig) -> None:
    for i, rule in enumerate(config.precision.rules):
        match, share = f"precision.rules.{i}.match", f"precision.rules.{i}.last_blocks"
        try:
            re.compile(rule.match)
        except re.error as error:
            works = "for example blocks\\.0\\..* for the first block"
            raise refuse(config, match, why=f"is no regular expression ({error})", works=works) from None
        if not rule.match:
            raise refuse(config, match, why="must match a layer's whole name", works=f"{match}=.* names all of them")
        if not 0 < rule.last_blocks <= 1:
            why = "must be greater than 0 and at most 1"
            raise refuse(config, share, why=why, works=f"{share}=0.15 would work")


def _switches(config: RunConfig) -> None:
    for i, switch in enumerate(config.precision.switch):
        key = f"precision.switch.{i}"
        times = [f"{key}.at", f"{key}.at_step", f"{key}.at_decay"]
        if sum((switch.at is not None, switch.at_step is not None, switch.at_decay)) != 1:
            raise refuse(config, *times, why="a switch has one time", works="set one of them alone")
        parts = ("forward", "backward", "dgrad", "wgrad")
        if all(getattr(switch, part) is None for part in parts):
            keys = [f"{key}.{part}" for part in parts]
            raise refuse(config, *keys, why="nothing would change", works=f"{key}.forward=bf16 would work")
        if switch.at is not None and not 0 < switch.at < 1:
            works = f"{key}.at=0.9 would work"
            raise refuse(config, f"{key}.at", why="must be greater than 0 and less than 1", works=works)
        if switch.at_step is not None and switch.at_step < 1:
            raise refuse(config, f"{key}.at_step", why="must be at least 1", works=f"{key}.at_step=1 would work")
        if switch.at_step is not None and config.max_steps is not None and switch.at_step >= config.max_steps:
            works = f"{key}.at=0.9 follows the run's length"
            raise refuse(config, f"{key}.at_step", "max_steps", why="the run ends before it", works=works)
        if switch.at_decay and config.optim.schedule.kind is not ScheduleKind.wsd:
            why = "the learning rate of this schedule has no phase in which it begins to fall"
            works = f"optim.schedule.kind=wsd or {key}.at=0.7 would work"
            raise refuse(config, f"{key}.at_decay", "optim.schedule.kind", why=why, works=works)


def _stabilisers(config: RunConfig) -> None:
    s, key = config.precision.stabilisers, "precision.stabilisers"
    o, keys = s.oscireset, (f"{key}.oscireset.window", f"{key}.oscireset.period")
    if o.enabled and o.window > o.period - 2:
        why = "a window opens, watches and closes within a period"
        raise refuse(config, *keys, why=why, works=f"{keys[1]}={o.window + 2} would work")
    if o.enabled and o.start_step is not None and config.max_steps is not None and o.start_step >= config.max_steps:
        works = f"{key}.oscireset.start_step=null follows the run's length"
        raise refuse(config, f"{key}.oscireset.start_step", "max_steps", why="the run ends before it", works=works)
    last = s.outcontrol.first_step + s.outcontrol.steps - 1
    if s.outcontrol.enabled and config.max_steps is not None and last >= config.max_steps:
        keys, first = (f"{key}.outcontrol.first_step", f"{key}.outcontrol.steps"), max(1, config.max_steps // 20)
        works = f"{keys[0]}={first} {keys[1]}={first} would work"
        raise refuse(config, *keys, "max_steps", why="the run ends before its channels are known", works=works)
    if s.clamp.enabled and config.model.mlp is not MlpKind.relu2:
        why = "the bound is that of a squared ReLU"
        raise refuse(config, f"{key}.clamp.enabled", "model.mlp", why=why, works="model.mlp=relu2 would work")
    if s.clamp.enabled and config.model.norm_placement is NormPlacement.after:
        why, works = "the bound needs an input of unit mean square", "model.norm_placement=before would work"
        raise refuse(config, f"{key}.clamp.enabled", "model.norm_placement", why=why, works=works)
