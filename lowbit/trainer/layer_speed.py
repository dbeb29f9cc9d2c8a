"""What a precision costs or gains layer by layer on this machine: `lowbit plan --bench`.

Layers of one size and one policy are one case: a forward and backward pass over so many tokens, in the policy with the
backends that a run would take, and in the plain layer from the same FP32 weight. The two take turns and the shortest
time of each counts, since other work on the machine only ever adds time. Compiled where a run compiles. A GPU's small
layers are bound by the host that launches their kernels, which a whole step may hide behind other work.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.configs.schema import MatrixBackend, RunConfig
from lowbit.errors import ConfigError
from lowbit.models.layers import GroupedLinear, Linear
from lowbit.quant.apply import bound, candidates
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.linear_products import linear_products
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.report import collapse
from lowbit.quant.resolve import Role, resolve
from lowbit.trainer.engine import wants_compile
from lowbit.trainer.hardware import compute_dtype, device_name
from lowbit.trainer.precision import on_meta

WORK = {"cpu": 4e9, "cuda": 4e13}
"""FLOPs of a pass that is timed, at most: it decides how many of a micro-batch's tokens there are."""
ROUNDS = 5


@dataclass(frozen=True)
class LayerSpeed:
    """Layers alike, as they are in some phase of the run."""

    names: tuple[str, ...]
    in_features: int
    out_features: int
    policy: LinearPolicy
    tokens: int
    plain_seconds: float
    """One layer, forward and backward, without quantisers."""
    seconds: float
    """The same in its policy."""


def layer_speeds(config: RunConfig, device: torch.device) -> list[LayerSpeed]:
    """Every kind of layer that some phase of the run quantises, timed on `device`; experts are not.

    Raises: ConfigError as `check_precision`; the layers are Transformer Engine's.
    """
    if config.precision.backend is MatrixBackend.te:
        raise ConfigError("plan --bench times lowbit's own layers: precision.backend=auto would work")
    dtype = compute_dtype(config.precision, device)
    layers = candidates(on_meta(config, dtype))
    chooser = Chooser.on(device, dtype, config.precision.backend, check=True)
    kinds: dict[tuple[int, int, LinearPolicy], list[str]] = {}
    for phase in resolve(config.precision).phases(Role.training):
        for name, policy in bound(phase, layers, chooser)[0].items():
            layer = layers[name]
            if policy.quantised and not isinstance(layer, GroupedLinear):
                names = kinds.setdefault((layer.in_features, layer.out_features, policy), [])
                names += [] if name in names else [name]
    compiled = wants_compile(config.engine.compile, device)
    most = config.batch.micro_batch * config.data.sequence_length
    found = []
    for (wide, high, policy), names in kinds.items():
        tokens = max(1, min(most, int(WORK[device.type] / (6 * wide * high))))
        times = _timed(wide, high, policy, tokens, dtype, device, compiled)
        found.append(LayerSpeed(tuple(names), wide, high, policy, tokens, *times))
    return found


def describe_speeds(config: RunConfig, device: torch.device, speeds: list[LayerSpeed]) -> list[str]:
    """The lines that `lowbit plan --bench` prints."""
    plain = {torch.bfloat16: "BF16", torch.float32: "FP32"}[compute_dtype(config.precision, device)]
    if not speeds:
        return [f"layer speed: no layer is quantised, all compute in {plain}"]
    lines = [f"layer speed on {device_name(device)}, forward and backward, over {plain}:"]
    for row in speeds:
        size = f"{row.in_features} x {row.out_features}, {row.tokens:,} tokens"
        times = f"{row.seconds * 1e3:9.3f} ms {row.plain_seconds / row.seconds:6.2f}x"
        lines.append(f"  {size:<32}{times}  {_formats(row.policy)}  {collapse(row.names)} ({len(row.names)})")
    per_token = [(len(row.names) / row.tokens, row) for row in speeds]
    ratio = sum(n * r.plain_seconds for n, r in per_token) / sum(n * r.seconds for n, r in per_token)
    return [*lines, f"  all of these layers: {ratio:.2f}x"]


def _formats(policy: LinearPolicy) -> str:
    """What a policy quantises to, and what multiplies it."""
    products = [p for p in (policy.fprop, policy.dgrad, policy.wgrad) if p.quantised]
    names = dict.fromkeys(operand.name for p in products for operand in (p.left, p.right))
    return f"{', '.join(names)} ({', '.join(dict.fromkeys(p.backend for p in products))})"


def _timed(
    wide: int, high: int, policy: LinearPolicy, tokens: int, dtype: torch.dtype, device: torch.device, compiled: bool
) -> tuple[float, float]:
    """Seconds of a plain layer and of one in `policy`."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    x, grad = normal(tokens, wide).to(dtype).requires_grad_(), normal(tokens, high).to(dtype)
    layer = Linear(wide, high).to(device)
    with torch.no_grad():
        layer.weight.copy_(normal(high, wide) * wide**-0.5)
    key, clock = make_key(1, "layer").to(device), make_clock().to(device)

    def quantised(x: Tensor) -> Tensor:
        return linear_products(x, [layer.weight], [key], clock, policy)[0]

    def work(forward: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        run = torch.compile(forward, fullgraph=True, dynamic=False) if compiled else forward

        def once() -> None:
            torch.autograd.grad(run(x), (x, layer.weight), grad)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return once

    if compiled:
        torch.compiler.reset()  # else the code of earlier sizes counts against the limit of a function's versions
    both = [work(layer), work(quantised)]
    shortest = [float("inf")] * 2
    for turn in range(1 + ROUNDS):
        for index, once in enumerate(both):
            started = time.perf_counter()
            once()
            if turn:
                shortest[index] = min(shortest[index], time.perf_counter() - started)
    return shortest[0], shortest[1]
