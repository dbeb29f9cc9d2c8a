"""The precision of the two sides, each as the `precision` of a model that does nothing else.

sampler   the forward that `precision.sampler` names (else `precision.forward`)
trainer   that forward, and a BF16 backward on its dequantised operands: the gradient is that of the function that
          was sampled from. `precision.trainer` names something else.
"""

from dataclasses import replace

from lowbit.configs.schema import AlignmentKind, PolicyConfig, PrecisionConfig, ProductConfig
from lowbit.errors import ConfigError
from lowbit.quant.spec import Outer
from lowbit.quant.stages import Stage, resolve


def sampler_precision(config: PrecisionConfig) -> PrecisionConfig:
    """What the sampler's model computes in."""
    return _forward_alone(config, config.sampler or config.forward)


def trainer_precision(config: PrecisionConfig) -> PrecisionConfig:
    """What the trainer's model computes in."""
    if config.trainer is None:
        return _forward_alone(config, config.sampler or config.forward)
    return replace(
        config,
        forward=config.trainer,
        backward=config.trainer,
        dgrad=None,
        wgrad=None,
        sampler=None,
        trainer=None,
        switch=[],
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
        config, forward=name, backward="bf16", dgrad=None, wgrad=None, sampler=None, trainer=None, switch=[],
        define=define, rules=rules,
    )  # fmt: skip


def check_batch_invariant(config: PrecisionConfig) -> None:
    """Raise ConfigError when the sampler's activations have a scale that spans the batch.

    A token's probability would depend on what else is sampled at the same time, which no trainer can reproduce.
    """
    stage = resolve(config).phases(Stage.sampler)[0]
    named = [(config.sampler or config.forward, "precision.sampler", stage.default)]
    named += [
        (given.policy, f"precision.rules.{i}.policy", rule.policy)
        for i, (given, rule) in enumerate(zip(config.rules, stage.rules, strict=True))
    ]
    for name, key, policy in named:
        spec = policy.fprop.left.spec
        why = ""
        if spec is not None and (spec.outer is Outer.TENSOR or spec.block[0] != 1):
            why = f"its activations ({spec.name}) have a scale that spans the batch"
        elif policy.mean_split:
            why = "it takes the mean over the batch out of its activations"
        elif policy.fprop.quantised and any(
            operand.spec is not None and operand.spec.stochastic for operand in (policy.fprop.left, policy.fprop.right)
        ):
            why = "its forward rounds at random, and the trainer's noise is another"
        if why:
            raise ConfigError(
                f"{key}={name}: {why}, so that a token's probability would depend on what is sampled beside it and the "
                "trainer could not agree; nvfp4, mxfp8, fp8_row, fp8_block or weights only (nvfp4_w4a16) would work"
            )
