"""`lowbit plan`: what a run will take, before it is started."""

from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli.complete import plan_candidates
from lowbit.cli.settings import read, settings
from lowbit.errors import ConfigError

if TYPE_CHECKING:
    from lowbit.configs.schema import RunConfig
    from lowbit.models.cost import ParameterCount
    from lowbit.trainer.network_plan import Network
    from lowbit.trainer.plan import Plan

PlanOverrides = Annotated[
    list[str] | None,
    settings(
        "Settings, such as preset=gpu model=30m; also network=25gbit nodes=16, to compare codes of gradients.",
        plan_candidates,
    ),
]


def plan(
    overrides: PlanOverrides = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=1e6, help="Memory of the GPU to plan for, in GiB; without it, this machine's device."
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Processes, each with its own device; needs engine=deepspeed.")
    ] = 1,
    bench: Annotated[
        bool, typer.Option("--bench", help="Time each kind of layer in its precision here, over the plain one.")
    ] = False,
) -> None:
    """Print parameters, FLOPs a token, memory by part, the largest micro-batch that fits, the run's length, what
    each layer computes in, and what gradients cost on a network."""
    from lowbit.configs.compose import replaced_limits
    from lowbit.configs.validate import check_world
    from lowbit.trainer.hardware import GIB, pick_device
    from lowbit.trainer.network_plan import ranks_on, take_network
    from lowbit.trainer.plan import plan as make_plan
    from lowbit.trainer.plan import planned_vocabulary
    from lowbit.trainer.precision import plan_precision
    from lowbit.trainer.zero_plan import describe_wire

    network, rest = take_network(overrides or [])
    config = read(rest)
    if bench and memory_gb is not None:
        raise ConfigError("--bench times this machine's device, --memory-gb plans for another: give one of them")
    ranks = ranks_on(network, ranks) if network is not None else ranks
    precision = plan_precision(config, None if memory_gb is not None else pick_device(config.device))
    device, memory_bytes, compute_bytes = _device(config, memory_gb)
    vocab_size = planned_vocabulary(config)
    check_world(config, ranks)
    made = make_plan(config, vocab_size, compute_bytes=compute_bytes, memory_bytes=memory_bytes, ranks=ranks)
    dtype = "bf16" if compute_bytes == 2 else "fp32"
    lines = describe(config, made, vocab_size, f"{device}, {memory_bytes / GIB:.1f} GiB, {dtype}")
    lines += replaced_limits(rest)
    if ranks > 1:
        lines.append(describe_wire(config, compute_bytes, ranks))
    if network is not None:
        lines += _network(config, made, network, ranks, compute_bytes, planned_for_gpu=memory_gb is not None)
    print("\n".join([*lines, *precision]), flush=True)
    if bench:
        from lowbit.trainer.layer_speed import describe_speeds, layer_speeds

        here = pick_device(config.device)
        print("\n".join(describe_speeds(config, here, layer_speeds(config, here))))


def _network(
    config: "RunConfig", made: "Plan", network: "Network", ranks: int, compute_bytes: int, planned_for_gpu: bool
) -> list[str]:
    """Lines about codes of gradients on a network."""
    from lowbit.trainer.hardware import peak_flops, pick_device
    from lowbit.trainer.network_plan import GPU_PEAK, UTILISATION, describe_network, plan_network

    peak, on_gpu = GPU_PEAK, True
    if not planned_for_gpu:
        device = pick_device(config.device)
        on_gpu, peak = device.type == "cuda", peak_flops(device) or 0.0
    compared = plan_network(
        config,
        network,
        made.parameters.total,
        made.flops_per_token,
        compute_bytes=compute_bytes,
        on_gpu=on_gpu,
        node_flops=ranks // network.nodes * UTILISATION * peak or None,
    )
    return describe_network(compared, made.parameters.total)


def describe(config: "RunConfig", made: "Plan", vocab_size: int, device: str) -> list[str]:
    """The printed lines of a plan."""
    from lowbit.models.cost import attention_flops_per_token
    from lowbit.trainer.hardware import GIB

    p, memory = made.parameters, made.memory
    b, m = config.batch, config.model
    attention = attention_flops_per_token(m, config.data.sequence_length)
    lines = [
        f"model {m.name}: {p.total:,} parameters, {p.without_embedding:,} without the input embedding"
        + (f"; {p.active:,} active a token" if p.experts else ""),
        f"  embedding {p.embedding:,}, attention {p.attention:,}, mlp {p.mlp:,}, {_experts(p)}norms {p.norms:,}, "
        f"head {f'{p.head:,}' if p.head else 'tied'} (vocabulary {vocab_size:,})",
        f"work: {made.flops_per_token:,} FLOPs a token = 6 x {(made.flops_per_token - attention) // 6:,} weights "
        f"(head included{', of experts those of one token' if p.experts else ''}) + {attention:,} for causal attention "
        "(6 x layers x heads x head_dim x sequence)",
        f"step: {b.sequences} sequences x {config.data.sequence_length} tokens = {made.tokens_per_step:,} tokens, "
        f"in {b.sequences // b.micro_batch} micro-batches of {b.micro_batch}",
        _length(config, made),
        f"memory on {device}:",
    ]
    parts = {
        "parameters (FP32)": memory.parameters,
        "gradients (FP32)": memory.gradients,
        f"optimizer ({config.optim.kind}, FP32)": memory.optimizer,
        "rounded weights": memory.rounded_weights,
        f"activations (recompute {config.engine.recompute})": memory.activations,
        "LM head's chunk": memory.head_chunk,
        **({"OsciReset's windows": memory.windows} if memory.windows else {}),
        "total": memory.total,
    }
    lines += [f"  {name:<34}{size / GIB:10.3f} GiB" for name, size in parts.items()]
    if made.usable_bytes is not None:
        verdict = "fits in" if made.fits else "DOES NOT FIT in"
        lines.append(f"  {verdict} the {made.usable_bytes / GIB:.1f} GiB that training can use")
        fitting = ", ".join(f"{n or 'none'} with recompute={kind}" for kind, n in made.largest_micro_batch.items())
        lines.append(f"largest micro-batch that fits: {fitting}")
    lines.append(f"generation: {made.kv_cache_bytes_per_token:,} bytes of keys and values a token")
    return lines


def _experts(parts: "ParameterCount") -> str:
    if not parts.experts:
        return ""
    return f"experts {parts.experts:,} ({parts.active_experts:,} active), router {parts.router + parts.biases:,}, "


def _length(config: "RunConfig", made: "Plan") -> str:
    clock = f"at most {config.max_minutes:g} minutes" if config.max_minutes is not None else ""
    if made.length.steps is None:
        return f"length: {clock}; steps depend on the machine's speed"
    tokens, work = made.length.tokens or 0, made.total_flops or 0
    text = f"length: {made.length.steps:,} steps, {tokens:,} tokens, {work:.3g} FLOPs"
    return f"{text}, or {clock}, whichever comes first" if clock else text


def _device(config: "RunConfig", memory_gb: float | None) -> tuple[str, int, int]:
    """Name, bytes of memory and bytes of a compute number of the device to plan for."""
    from lowbit.configs.schema import ComputeDtype
    from lowbit.trainer.hardware import GIB, compute_dtype, device_memory, device_name, pick_device

    if memory_gb is not None:
        return "a GPU", int(memory_gb * GIB), 4 if config.precision.compute is ComputeDtype.fp32 else 2
    device = pick_device(config.device)
    dtype = compute_dtype(config.precision, device)
    return device_name(device), device_memory(device), dtype.itemsize
