"""Speed of the sampler: rollouts against the floor of bytes and FLOPs, packed weights against BF16, weight updates.

    python scripts/bench_infer.py rollout                     # the 1B shape: 16, 64 and 256 rows in each precision
    python scripts/bench_infer.py rollout --shape 8B --rows 1 4 16
    python scripts/bench_infer.py kv                          # keys and values in BF16, FP8, INT8 at 256 rows
    python scripts/bench_infer.py transformers                # this engine and `generate` of transformers, batched
    python scripts/bench_infer.py update                      # new weights, in each precision
    python scripts/bench_infer.py profile --rows 64           # kernels of one step, longest first
    python scripts/bench_infer.py products --rows 1 16 64     # packed NVFP4 weights against BF16, product by product
    python scripts/bench_infer.py cuts --rows 1 16            # the same products by every cut of the kernel, best first
    python scripts/bench_infer.py rollout --shape small       # seconds, on a CPU: a check of the script, not of speed

A rollout is one call of `sample`: the prompts read, then every row decoded to its full length (no stop id), as many
slots as rows, random weights (times do not depend on them). Its **floor** is the sum over its steps of the longer of

    bytes / 4.28 TB/s      weights of the blocks and the head as stored, keys and values of all rows so far
    FLOPs / 800 TFLOP/s    2 x weights x rows (1474 where both factors are FP8)

the measured speeds of an H200 (docs/RESULTS.md), the prompts' FLOPs added. `of floor` is floor / time.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from measure import Row, gpu_seconds, print_table, wall_seconds, write
from torch import Tensor
from torch.nn import functional as F

from lowbit.configs.schema import ModelConfig, PrecisionConfig
from lowbit.configs.schema_model import head_dim_of
from lowbit.infer.arrangement import arranged
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.kernels import PACKED_ROWS, chaining
from lowbit.infer.kv_codec import KvCodec, KvFormat
from lowbit.infer.packed import FEW_ROWS, begin_product, finish
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.infer.unfinished import Unfinished
from lowbit.models.cost import kv_cache_bytes_per_token, parameter_parts
from lowbit.models.layers import weights_and_state
from lowbit.models.transformer import Transformer
from lowbit.quant.quantise import quantise
from lowbit.quant.quantised import Quantised
from lowbit.quant.resolve import resolve
from lowbit.quant.spec import NVFP4_46

BANDWIDTH, BF16_FLOPS, FP8_FLOPS = 4.28e12, 800e12, 1474e12
VOCAB = 32_768
SHAPES = {
    "1B": ModelConfig(name="1B", layers=16, width=2048, heads=16, kv_heads=8, mlp_width=8192, max_sequence=4096),
    "8B": ModelConfig(name="8B", layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14_336, max_sequence=4096),
    "small": ModelConfig(name="small", layers=2, width=128, heads=2, kv_heads=1, mlp_width=256, max_sequence=512),
}
WEIGHT_BITS = {"bf16": 16.0, "nvfp4_w4a16": 4.5, "mxfp8_w8a16": 8.25, "fp8_w8a16": 8.0, "fp8_row": 8.0}


@dataclass(frozen=True)
class Load:
    """What is sampled."""

    rows: int
    prompt: int
    new: int
    group: int
    """Samples of a prompt."""

    def requests(self, start: int) -> list[Request]:
        """Prompts that no earlier call had, so that none is found in the prefix cache."""
        generator = torch.Generator().manual_seed(start)
        count = self.rows // self.group
        prompts = torch.randint(1, VOCAB // 64, (count, self.prompt), generator=generator).tolist()
        return [Request(tuple(p), start * count + i, self.new, self.group) for i, p in enumerate(prompts)]


def model_of(config: ModelConfig, device: torch.device) -> Transformer:
    """Random weights, made where they stay."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = Transformer(config, VOCAB if config.name != "small" else VOCAB // 64, dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    return model


def floor_seconds(config: ModelConfig, load: Load, precision: str, kv_bytes: float) -> float:
    """See the module's docstring."""
    parts = parameter_parts(config, VOCAB)
    head = VOCAB * config.width
    bits = WEIGHT_BITS[precision]
    if precision.endswith("a16") and load.rows > FEW_ROWS:
        bits = 16.0
    weights = parts.hidden_matrices * bits / 8 + head * 2
    flops = 2 * (parts.hidden_matrices + head) * load.rows
    speed = FP8_FLOPS if precision == "fp8_row" else BF16_FLOPS
    total = 2 * parts.hidden_matrices * load.prompt * (load.rows // load.group) / speed
    for step in range(load.new):
        read = weights + (load.prompt + step) * load.rows * kv_bytes
        total += max(read / BANDWIDTH, flops / speed)
    return total


def sampler_of(model: Transformer, precision: str, rows: int, **settings: Any) -> EmbeddedSampler:
    policy = None if precision == "bf16" else resolve(PrecisionConfig(sampler=precision))
    return EmbeddedSampler(model, None, policy, slots=rows, share=True, **settings)


def rollout_seconds(sampler: EmbeddedSampler, load: Load, repeats: int) -> float:
    """Median time of a call."""
    calls = iter(range(10_000))
    device = sampler.device
    work = lambda: sampler.sample(load.requests(next(calls)), SamplingConfig(), seed=1)  # noqa: E731
    return wall_seconds(work, device, repeats, warm_up=1)


def rollouts(args: argparse.Namespace, model: Transformer) -> list[Row]:
    """Every precision at every number of rows; `over bf16` is tokens/s over those of BF16 at as many rows."""
    found: list[Row] = []
    base: dict[int, float] = {}
    for precision in args.precisions:
        for rows in args.rows:
            load = Load(rows, args.prompt, args.new, min(args.group, rows))
            sampler = sampler_of(model, precision, rows)
            seconds = rollout_seconds(sampler, load, args.repeats)
            floor = floor_seconds(model.config, load, precision, kv_cache_bytes_per_token(model.config))
            speed = rows * args.new / seconds
            base.setdefault(rows, speed if precision == "bf16" else float("nan"))
            found.append(
                {
                    "precision": precision,
                    "rows": rows,
                    "tokens/s": speed,
                    "ms a step": 1e3 * seconds / args.new,
                    "of floor": floor / seconds,
                    "over bf16": speed / base[rows],
                    "packed layers": sampler.packed,
                }
            )
            print_table(found[-1:])
            del sampler
            _free()
    return found


def caches(args: argparse.Namespace, model: Transformer) -> list[Row]:
    """Formats of keys and values, at the most rows."""
    found: list[Row] = []
    rows = max(args.rows)
    load = Load(rows, args.prompt, args.new, min(args.group, rows))
    for kv in (KvFormat.bf16, KvFormat.fp8, KvFormat.int8):
        sampler = sampler_of(model, "bf16", rows, kv=kv)
        seconds = rollout_seconds(sampler, load, args.repeats)
        codec = KvCodec.of(kv, model.compute_dtype)
        token = kv_cache_bytes_per_token(model.config, 1) * codec.token_bytes
        floor = floor_seconds(model.config, load, "bf16", token)
        found.append({"kv": kv.value, "rows": rows, "tokens/s": rows * args.new / seconds, "of floor": floor / seconds})
        del sampler
        _free()
    return found


def updates(args: argparse.Namespace, model: Transformer) -> list[Row]:
    """New weights from the same device, checks included; shared masters and copies."""
    found: list[Row] = []
    weights = weights_and_state(model)
    for precision in args.precisions:
        for share in (True, False):
            policy = None if precision == "bf16" else resolve(PrecisionConfig(sampler=precision))
            sampler = EmbeddedSampler(model, None, policy, slots=1, share=share)
            seconds = wall_seconds(partial(sampler.update, weights.items()), sampler.device, args.repeats)
            found.append({"precision": precision, "shared": str(share), "update ms": 1e3 * seconds})
            del sampler
            _free()
    return found


def against_transformers(args: argparse.Namespace, model: Transformer) -> list[Row]:
    """The same shape, batch and lengths through `generate` of transformers in BF16, its batch as one call."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config, device = model.config, model.head_weight.device
    rows = max(args.rows)
    load = Load(rows, args.prompt, args.new, min(args.group, rows))
    ours = rollout_seconds(sampler_of(model, "bf16", rows), load, args.repeats)
    twin = Qwen3Config(
        vocab_size=model.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.width // config.heads,
        tie_word_embeddings=False,
        max_position_embeddings=config.max_sequence,
    )
    with device:
        theirs: Any = Qwen3ForCausalLM(twin)
    theirs = theirs.to(model.compute_dtype).eval()
    prompts = [list(r.prompt) for r in load.requests(0) for _ in range(load.group)]
    tokens = torch.tensor(prompts, device=device)
    settings = {
        "max_new_tokens": args.new,
        "min_new_tokens": args.new,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
    }
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        work = lambda: theirs.generate(tokens, attention_mask=mask, **settings)  # noqa: E731
        other = wall_seconds(work, device, args.repeats, warm_up=1)
    return [
        {"engine": name, "rows": rows, "tokens/s": rows * args.new / seconds, "over transformers": other / seconds}
        for name, seconds in (("lowbit", ours), ("transformers", other))
    ]


def profiled(args: argparse.Namespace, model: Transformer) -> list[Row]:
    """Kernels of a rollout by their time, for the first precision and number of rows."""
    load = Load(args.rows[0], args.prompt, args.new, min(args.group, args.rows[0]))
    sampler = sampler_of(model, args.precisions[0], load.rows)
    sampler.sample(load.requests(0), SamplingConfig(), seed=1)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if sampler.device.type == "cuda":
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        sampler.sample(load.requests(1), SamplingConfig(), seed=1)
        if sampler.device.type == "cuda":
            torch.cuda.synchronize()
    time = attrgetter(f"self_{'device' if sampler.device.type == 'cuda' else 'cpu'}_time_total")
    averages: Any = profile
    events = sorted(averages.key_averages(), key=time, reverse=True)[:25]
    return [
        {"ms a step": 1e-3 * time(e) / load.new, "calls a step": e.count / load.new, "kernel": e.key[:90]}
        for e in events
    ]


COLD = 400e6
"""Bytes of BF16 weights that products go through in turns: packed, more than the 50 MB that the caches hold."""


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """A block's products: numbers of rows and columns of their weights."""
    inner, keys = config.heads * head_dim_of(config), config.kv_heads * head_dim_of(config)
    return {
        "q, k, v": (inner + 2 * keys, config.width),
        "out": (config.width, inner),
        "gate, up": (2 * config.mlp_width, config.width),
        "down": (config.width, config.mlp_width),
    }


def packed_weights(columns: int, width: int, device: torch.device) -> tuple[Quantised, list[tuple[Tensor, Tensor]]]:
    """A random weight in NVFP4, and so many arranged copies that a pass over them finds none in the caches."""
    made = quantise(0.02 * torch.randn(columns, width, device=device), NVFP4_46)
    codes, scales = arranged(made.pack(), columns)
    assert scales is not None
    copies = max(1, int(COLD / (2 * columns * width))) if device.type == "cuda" else 1
    return made, [(codes.clone(), scales.clone()) for _ in range(copies)]


def _product(*operands: Any, begin: Callable[..., Unfinished] = begin_product) -> Tensor:
    """With a launch for what a step leaves to the reader."""
    return finish(begin(*operands))


def products(args: argparse.Namespace, model: Transformer) -> list[Row]:
    """The products of a block, packed NVFP4 weights against BF16, as long as the kernel takes so many rows."""
    device = model.head_weight.device
    found: list[Row] = []
    for name, (columns, width) in shapes_of(model.config).items():
        made, packed = packed_weights(columns, width, device)
        after, copies = made.after(), len(packed)
        plain = [made.operand().clone() for _ in range(copies)]
        for rows in args.rows:
            x = torch.randn(rows, width, device=device).to(torch.bfloat16)
            row: Row = {"product": name, "shape": f"{columns} x {width}", "rows": rows}
            row["bf16 us"] = 1e6 / copies * _seconds([partial(F.linear, x, w) for w in plain], device)
            if device.type == "cuda" and rows <= PACKED_ROWS:
                ours = [partial(_product, x, data, of_blocks, after) for data, of_blocks in packed]
                with chaining(True):  # as a step of packed weights has them
                    row["packed us"] = 1e6 / copies * _seconds(ours, device)
                row["floor us"] = 1e6 * sum(part.nbytes for part in packed[0]) / BANDWIDTH
                row["over bf16"] = row["bf16 us"] / row["packed us"]
            found.append(row)
        print_table(found[-len(args.rows) :])
        del plain, packed
        _free()
    return found


def cuts(args: argparse.Namespace, model: Transformer) -> list[Row]:
    """Every way to cut a block's packed products (`kernels.packed.Shape`), best first, and which one is usual."""
    device = model.head_weight.device
    if device.type != "cuda":
        raise SystemExit("cuts: there is nothing to cut without a GPU, whose kernel this is")
    from lowbit.infer.kernels.packed import Shape, begin_product, shape_of

    found: list[Row] = []
    for name, (columns, width) in shapes_of(model.config).items():
        made, packed = packed_weights(columns, width, device)
        after, (tiles, steps) = made.after(), packed[0][0].shape[:2]
        for rows in args.rows:
            x = torch.randn(rows, width, device=device).to(torch.bfloat16)
            usual, here = shape_of(rows, tiles, steps), []
            choices = itertools.product((1, 2), (1, 2, 4, 8), (2, 4, 8), (2, 3, 4), (1, 2, 4, 8))
            for each, groups, warps, ahead, splits in choices:
                cut = Shape(each, groups, usual.x_rows, warps, ahead, splits)
                if groups > warps or cut.stages < ahead or splits > steps:  # or no room in shared memory
                    continue
                calls = [partial(_product, x, *held, after, begin=partial(begin_product, shape=cut)) for held in packed]
                with chaining(True):
                    seconds = _seconds(calls, device) / len(packed)
                shown = f"{each} tiles, {groups} groups, {warps} warps, {ahead} ahead, {splits} splits"
                here.append({"product": name, "rows": rows, "cut": shown, "us": 1e6 * seconds, "usual": cut == usual})
            found += sorted(here, key=lambda row: row["us"])
        print_table(found[-3:])
        del packed
        _free()
    return found


def _seconds(calls: Sequence[Callable[[], Tensor]], device: torch.device) -> float:
    """Time of all calls together, on a GPU as one graph."""

    def work() -> list[Tensor]:
        return [call() for call in calls]

    if device.type != "cuda":
        return wall_seconds(work, device)
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    seconds = gpu_seconds(graph.replay)
    del kept
    return seconds


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PARTS = {
    "rollout": rollouts,
    "kv": caches,
    "update": updates,
    "transformers": against_transformers,
    "profile": profiled,
    "products": products,
    "cuts": cuts,
}


def main(words: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--shape", choices=SHAPES, default="1B")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--precisions", nargs="+", choices=WEIGHT_BITS, default=list(WEIGHT_BITS))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    model = model_of(SHAPES[args.shape], torch.device(args.device))
    rows = PARTS[args.part](args, model)
    print_table(rows)
    if args.out is not None:
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        write(args.out, {"part": args.part, "settings": settings, "rows": rows})
    return rows


if __name__ == "__main__":
    main()
