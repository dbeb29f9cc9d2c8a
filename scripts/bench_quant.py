"""Speed of quantised products on a GPU: prints tables, writes JSON.

    python scripts/bench_quant.py fp8            # a linear layer forward and backward, and where its time goes
    python scripts/bench_quant.py fp8 --table    # many sizes; prints rows for lowbit/quant/backends/measured.py

`fp8`: 16384 tokens; our layers, compiled, in FP8 by tensor, row and 128-wide blocks, against `nn.Linear` in BF16, not
compiled, and against our BF16 layer from the same FP32 master weight, compiled, which is what the rule of `measured`
chooses instead; Transformer Engine's `Linear` where it can be imported. Its weights are BF16, so a row of ours with
BF16 weights stands beside it. `off_bf16` and `off_emulated` are relative differences of Y, dX and dW from our BF16
layer and from the emulation of the same format. Times are medians of single passes between two events on the device;
variants take turns, so that clocks and heat are the same for all; inputs are normal numbers, three sets in turn.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import print_table, where, write
from torch import Tensor, nn

from lowbit.models.layers import Linear
from lowbit.quant.backends import NATIVE
from lowbit.quant.backends.base import Sizes, bind, describe_device
from lowbit.quant.backends.fp8_codes import fp8_codes
from lowbit.quant.linear_products import linear_products
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.presets import PRESETS

Pass = Callable[[int], tuple[Tensor, ...]]
"""Forward and backward on the input set of this number -> (Y, dX, dW)."""

GPU = torch.device("cuda")
TARGET_SIZES = ((2048, 8192), (4096, 14336))
TABLE_SIZES = (
    *((512, 512), (512, 2048), (1024, 1024), (1024, 4096), (1280, 1280), (1280, 5120)),
    *((2048, 2048), (2048, 8192), (4096, 4096)),
)
PRESET = {"tensor": "fp8_tensor", "row": "fp8_row", "block": "fp8_block"}
SETS = 3


class Case:
    """Inputs, gradients and weights of one size, and the layers to time."""

    def __init__(self, tokens: int, width: int, out: int) -> None:
        torch._dynamo.reset()  # else compiled code of earlier sizes counts against the limit of a function's versions
        generator = torch.Generator(device=GPU).manual_seed(0)

        def normal(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(rows, columns, device=GPU, generator=generator).to(dtype)

        self.tokens, self.width, self.out = tokens, width, out
        self.x = [normal(tokens, width, torch.bfloat16).requires_grad_() for _ in range(SETS)]
        self.dy = [normal(tokens, out, torch.bfloat16) for _ in range(SETS)]
        self.weight = (normal(out, width, torch.float32) * width**-0.5).requires_grad_()
        self.key, self.clock = make_key(1, "layer").to(GPU), make_clock().to(GPU)

    def of(self, layer: Callable[[Tensor], Tensor], weight: Tensor) -> Pass:
        """One pass of a layer whose parameter is `weight`."""

        def run(turn: int) -> tuple[Tensor, ...]:
            x, dy = self.x[turn % SETS], self.dy[turn % SETS]
            y = layer(x)
            return y, *torch.autograd.grad(y, (x, weight), dy)

        return run

    def ours(self, policy: LinearPolicy, weight: Tensor) -> Pass:
        """Our layer under a policy, compiled."""

        def layer(x: Tensor) -> Tensor:
            return linear_products(x, [weight], [self.key], self.clock, policy)[0]

        return self.of(torch.compile(layer, fullgraph=True, dynamic=False), weight)

    def emulated(self, policy: LinearPolicy) -> tuple[Tensor, ...]:
        """Y, dX and dW of the first set, eager, by the reference."""
        y = linear_products(self.x[0], [self.weight], [self.key], self.clock, policy)[0]
        return y, *torch.autograd.grad(y, (self.x[0], self.weight), self.dy[0])

    def bf16(self) -> Pass:
        """Our BF16 layer from the FP32 weight, compiled."""
        linear = Linear(self.width, self.out).to(GPU)
        linear.weight = nn.Parameter(self.weight.detach())
        return self.of(torch.compile(linear, fullgraph=True, dynamic=False), linear.weight)

    def plain(self) -> Pass:
        """`nn.Linear` in BF16, eager."""
        linear = nn.Linear(self.width, self.out, bias=False, device=GPU, dtype=torch.bfloat16)
        linear.weight = nn.Parameter(self.weight.detach().bfloat16())
        return self.of(linear, linear.weight)

    def engine(self, preset: str) -> Pass:
        """Transformer Engine's own layer, BF16 weight."""
        import transformer_engine.pytorch as te

        from lowbit.quant.backends.te import recipe_of

        recipe = recipe_of(PRESETS[preset])
        assert recipe is not None
        built = recipe.build()
        linear = te.Linear(self.width, self.out, bias=False, params_dtype=torch.bfloat16)
        linear.weight.data.copy_(self.weight)

        def layer(x: Tensor) -> Tensor:
            with te.autocast(enabled=True, recipe=built):
                y: Tensor = linear(x)
                return y

        return self.of(layer, linear.weight)


def medians(passes: dict[str, Callable[[int], Any]], rounds: int = 5, each: int = 10) -> dict[str, float]:
    """Milliseconds of one pass of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for run in passes.values():
        for turn in range(5):
            run(turn)
    for _ in range(rounds):
        for name, run in passes.items():
            events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(each)]  # type: ignore[no-untyped-call]
            run(0)
            for turn, (start, end) in enumerate(events):
                start.record()
                run(turn)
                end.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(end) for start, end in events]
    return {name: statistics.median(found) for name, found in times.items()}


def off(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> list[float]:
    """Relative differences of Y, dX and dW."""
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(found, wanted, strict=True)]
    return [round(float((a - b).norm() / b.norm()), 5) for a, b in pairs]


def missing_engine() -> str | None:
    from lowbit.quant.backends import te

    return te.missing()


def usable(scales: str) -> bool:
    """Whether this device multiplies a preset's products."""
    device, policy = describe_device(GPU), PRESETS[PRESET[scales]]
    backend = NATIVE["fp8"]
    return not any(
        backend.refuses(getattr(policy, p), p, Sizes(4096, 4096), device) for p in ("fprop", "dgrad", "wgrad")
    )


def bench_layer(tokens: int, width: int, out: int) -> list[dict[str, Any]]:
    """Every variant of one layer."""
    case = Case(tokens, width, out)
    narrow = case.weight.detach().bfloat16().requires_grad_()
    passes: dict[str, Pass] = {"nn.Linear BF16": case.plain(), "our BF16 (FP32 master)": case.bf16()}
    for scales in filter(usable, PRESET):
        policy = bind(PRESETS[PRESET[scales]], "fp8", "fp8", "fp8")
        passes[f"our FP8 {scales} (FP32 master)"] = case.ours(policy, case.weight)
        if scales != "row":
            passes[f"our FP8 {scales} (BF16 weight)"] = case.ours(policy, narrow)
    if missing_engine() is None:
        passes["te.Linear current"] = case.engine("fp8_tensor")
        passes["te.Linear block"] = case.engine("fp8_block")
    reference = passes["our BF16 (FP32 master)"](0)
    emulated = {scales: case.emulated(PRESETS[PRESET[scales]]) for scales in filter(usable, PRESET)}
    from_bf16, from_emulated = {}, {}
    for name, run in passes.items():
        found_once = run(0)
        from_bf16[name] = off(found_once, reference)
        kind = next((s for s in emulated if s in name.replace("current", "tensor")), None)
        from_emulated[name] = None if kind is None else off(found_once, emulated[kind])
    found = medians(passes)
    rows = []
    for name, ms in found.items():
        rows.append(
            {
                "size": f"{width}x{out}",
                "tokens": tokens,
                "layer": name,
                "ms": round(ms, 4),
                "over_nn_linear": round(found["nn.Linear BF16"] / ms, 3),
                "over_our_bf16": round(found["our BF16 (FP32 master)"] / ms, 3),
                "tflops": round(6 * tokens * width * out / ms / 1e9),
                "off_bf16": from_bf16[name],
                "off_emulated": from_emulated[name],
            }
        )
    return rows


def bench_parts(tokens: int, width: int, out: int) -> list[dict[str, Any]]:
    """Quantisers in bytes a second, products in FLOP/s: where a layer's time goes."""
    case = Case(tokens, width, out)
    rows: list[dict[str, Any]] = []
    matrices = {"X": [x.detach() for x in case.x], "dY": case.dy, "W": [case.weight.detach()] * SETS}
    none = torch.empty(0, device=GPU)
    largest = torch.compile(lambda x: x.abs().amax(), dynamic=False)
    for name, sets in matrices.items():
        r, c = sets[0].shape
        read = sets[0].element_size() * r * c
        one = torch.ones(1, 1, device=GPU)
        by_row, by_column = torch.ones(r, 1, device=GPU), torch.ones(c, 1, device=GPU)
        jobs: dict[str, tuple[Callable[[int], Any], int]] = {"amax": (partial(_in_turn, sets, largest), read)}
        for kind, m, mt in (
            ("tensor", one, one),
            ("row", by_row, by_column),
            ("block", none, none),
            ("square", none, none),
        ):
            for both in (False, True):
                job = partial(_in_turn, sets, partial(_codes, m, mt, kind, both))
                jobs[f"codes {kind}{' both ways' if both else ''}"] = job, read + r * c * (2 if both else 1)
        found = medians({key: job for key, (job, _) in jobs.items()}, rounds=2)
        for key, (_, moved) in jobs.items():
            rate = moved / found[key] / 1e9
            rows.append({"part": f"{name} {key}", "ms": round(found[key], 4), "tb_s": round(rate, 2)})
    rows += _bench_products(case)
    return rows


def _in_turn(sets: Sequence[Tensor], work: Callable[[Tensor], Any], turn: int) -> Any:
    """Work on the input set of this turn."""
    return work(sets[turn % SETS])


def _codes(m: Tensor, mt: Tensor, kind: str, both: bool, x: Tensor) -> Any:
    return fp8_codes(x, m, mt, kind, True, both)


def _bench_products(case: Case) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    x, dy, w = case.x[0].detach(), case.dy[0], case.weight.detach()
    shapes = {
        "fprop": (x, w, torch.bfloat16),
        "dgrad": (dy, w.t(), torch.bfloat16),
        "wgrad": (dy.t(), x.t(), torch.float32),
    }
    jobs: dict[str, Callable[[int], Any]] = {}
    for product, (left, right, dtype) in shapes.items():
        a, b = left.bfloat16().contiguous(), right.bfloat16().contiguous().t()
        jobs[f"{product} BF16"] = partial(_whatever_turn, partial(torch.matmul, a, b))
        for scales in filter(usable, PRESET):
            policy = getattr(PRESETS[PRESET[scales]], product)
            backend = NATIVE["fp8"]
            factors = backend.factor(left, policy.left.spec), backend.factor(right, policy.right.spec)
            for fast in (True, False) if scales != "block" else (False,):
                name = f"{product} {scales}{' fast' if fast else ''}"
                jobs[name] = partial(_whatever_turn, partial(backend.multiply, *factors, dtype, None, fast))
    for name, ms in medians(jobs, rounds=3).items():
        tflops = 2 * case.tokens * case.width * case.out / ms / 1e9
        rows.append({"part": name, "ms": round(ms, 4), "tflops": round(tflops)})
    return rows


def _whatever_turn(work: Callable[[], Any], turn: int) -> Any:
    return work()


def bench_table(tokens: int) -> list[dict[str, Any]]:
    """Speed-ups over our BF16 layer, as rows of `measured.TABLE`."""
    rows = []
    for width, out in TABLE_SIZES:
        case = Case(tokens, width, out)
        passes: dict[str, Pass] = {"bf16": case.bf16()}
        for scales in filter(usable, PRESET):
            passes[scales] = case.ours(bind(PRESETS[PRESET[scales]], "fp8", "fp8", "fp8"), case.weight)
        found = medians(passes)
        for scales in list(passes)[1:]:
            speedup = round(found["bf16"] / found[scales], 2)
            rows.append({"scales": scales, "in": width, "out": out, "tokens": tokens, "speedup": speedup})
    return rows


def bench_fp8(args: argparse.Namespace) -> dict[str, Any]:
    """See the module's docstring."""
    if args.table:
        rows = bench_table(args.tokens)
        print_table(rows)
        chip = "H200" if "H200" in torch.cuda.get_device_name() else torch.cuda.get_device_name()
        print("\nrows of lowbit/quant/backends/measured.py:")
        for r in rows:
            print(f'    Measured("{chip}", "{r["scales"]}", {r["in"]}, {r["out"]}, {r["tokens"]}, {r["speedup"]}),')
        return {"table": rows}
    layers: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for width, out in args.sizes:
        layers += bench_layer(args.tokens, width, out)
        parts += [{"size": f"{width}x{out}", **row} for row in bench_parts(args.tokens, width, out)]
        torch.cuda.empty_cache()
    print_table(layers)
    print_table(parts)
    why = missing_engine()
    if why is not None:
        print(f"\nTransformer Engine was not timed: {why}")
    return {"layers": layers, "parts": parts}


def size(text: str) -> tuple[int, int]:
    """`4096x14336` -> (in, out)."""
    width, _, out = text.partition("x")
    return int(width), int(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=["fp8"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sizes", type=size, nargs="+", default=TARGET_SIZES, help="INxOUT")
    parser.add_argument("--table", action="store_true", help="many sizes, as rows of measured.py")
    parser.add_argument("--out", type=Path, default=Path("bench_quant.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_quant needs a CUDA device")
    print(" ".join(f"{key}={value}" for key, value in where().items()))
    write(args.out, bench_fp8(args))


if __name__ == "__main__":
    main()
