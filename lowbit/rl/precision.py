"""The precision of the two sides, each as the `precision` of a model that does nothing else.

sampler   the forward that `precision.sampler` names (else `precision.forward`)
trainer   that forward, and a BF16 backward on its dequantised operands: the gradient is that of the function that
          was sampled from. `precision.trainer` names something else.
"""

from dataclasses import replace

from lowbit.configs.schema import AlignmentKind, PolicyConfig, PrecisionConfig, ProductConfig


def trainer_precision(config: PrecisionConfig) -> PrecisionConfig:
    """What the trainer's model computes in; it still names the sampler, for whoever prints or resolves it."""
    sampler = config.sampler or config.forward
    if config.trainer is None:
        return _forward_alone(config, sampler)
    return replace(
        config, forward=config.trainer, backward=config.trainer, dgrad=None, wgrad=None, sampler=sampler, switch=[]
    )


def _forward_alone(config: PrecisionConfig, name: str) -> PrecisionConfig:
    """The forward of `name` and of each rule, with a BF16 backward on dequantised operands."""
    define = dict(config.define)
    rules = []
    for rule in config.rules:
        own = f"{rule.policy}_forward"
        define[own] = PolicyConfig(
            base=rule.policy, dgrad=ProductConfig(), wgrad=ProductConfig(), alignment=AlignmentKind.aligned
        )
        rules.append(replace(rule, policy=own))
    return replace(
        config, forward=name, backward="bf16", dgrad=None, wgrad=None, sampler=name, switch=[], define=define,
        rules=rules,
    )  # fmt: skip
