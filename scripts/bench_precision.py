"""What each recipe costs on a GPU: time and peak memory of one micro-batch, forward and backward, compiled.

    python scripts/bench_precision.py                                # every shape in BF16 and NVFP4
    python scripts/bench_precision.py 20x1280:bf16 20x1280:mxfp8     # SHAPE:RECIPE pairs, in this order
    python scripts/bench_precision.py 30m:nvfp4 30m:nvfp4:graphs     # and replayed as a CUDA graph (engine.cuda_graphs)
    python scripts/bench_precision.py 24x2048:bf16 24x2048:fp8_tensor:native    # on the tensor cores that there are
    python scripts/bench_precision.py 30m:nvfp4 --kernels 12         # and the kernels that take longest

`micro_step` of the engine: the model, its blocks compiled, and the LM head; no optimizer. Inputs are random tokens.
Compare rows of one run only.
"""

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import show_kernels, write

from lowbit.configs.schema import EngineConfig, MatrixBackend, MlpKind, ModelConfig, OptimConfig, PrecisionConfig
from lowbit.data.batch import Batch
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import apply_policy, clocks, set_clock
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.resolve import resolve
from lowbit.trainer.engine import LocalEngine
from lowbit.trainer.objective import NextToken

Shape = tuple[ModelConfig, int, int, int]
"""Model, vocabulary, sequences, tokens a sequence."""


def model_of(layers: int, width: int, heads: int, mlp: MlpKind, mlp_width: int, length: int) -> ModelConfig:
    """A model without grouped heads."""
    return ModelConfig(
        layers=layers, width=width, heads=heads, kv_heads=heads, mlp=mlp, mlp_width=mlp_width, max_sequence=length
    )


SHAPES: dict[str, Shape] = {
    "30m": (model_of(6, 640, 10, MlpKind.swiglu, 1728, 512), 16384, 64, 512),
    "20x1280": (model_of(20, 1280, 10, MlpKind.relu2, 5120, 2048), 32768, 16, 2048),
    "24x2048": (model_of(24, 2048, 16, MlpKind.swiglu, 8192, 2048), 32768, 8, 2048),
    "2x4096": (model_of(2, 4096, 32, MlpKind.swiglu, 14336, 4096), 32768, 4, 4096),
}


def milliseconds(run: Callable[[], Any], times: int = 5) -> float:
    """Mean time on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    taken: float = start.elapsed_time(end) / times
    return taken


def bench(shape: str, recipe: str, graphs: bool, native: bool, kernels: int) -> dict[str, Any]:
    """One row."""
    config, vocabulary, sequences, length = SHAPES[shape]
    device = torch.device("cuda")
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        model = Transformer(config, vocabulary, torch.bfloat16)
    model = model.to_empty(device=device)
    model.init_weights(1)
    wanted = MatrixBackend.auto if native else MatrixBackend.emulated
    chooser = Chooser.on(device, torch.bfloat16, wanted, check=True)
    apply_policy(model, resolve(PrecisionConfig(forward=recipe, backward=recipe)), seed=1, chooser=chooser)
    engine = LocalEngine(model, OptimConfig(), EngineConfig(cuda_graphs=graphs))
    tokens = torch.randint(0, vocabulary, (sequences, length + 1), device=device)
    weights = torch.ones(sequences, length, device=device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, None, weights.numel())
    objective, step = NextToken(), 0

    def micro_batch() -> torch.Tensor:
        nonlocal step
        step += 1
        for clock in clocks(model):
            set_clock(clock, step, 0, 0)
        return engine.micro_step(objective, batch, 1 / weights.numel()).nll_sum

    start = time.perf_counter()
    loss = micro_batch().item() / weights.numel()
    first = time.perf_counter() - start
    for _ in range(3):  # a graph is recorded on the third pass
        micro_batch()
    taken = milliseconds(micro_batch)
    if kernels:
        show_kernels(micro_batch, kernels)
    return {
        "shape": shape,
        "recipe": recipe + ", native" * native + ", graphs" * graphs,
        "ms": round(taken, 2),
        "tokens_per_second": round(weights.numel() / taken * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_seconds": round(first, 1),
        "loss": round(loss, 4),
    }


def main() -> None:
    """Run the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pairs = [f"{shape}:{recipe}" for shape in SHAPES for recipe in ("bf16", "nvfp4")]
    parser.add_argument("pairs", nargs="*", default=pairs)
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("bench_precision.json"))
    args = parser.parse_args()
    rows = []
    for pair in args.pairs:
        shape, recipe, *how = pair.split(":")
        rows.append(bench(shape, recipe, "graphs" in how, "native" in how, args.kernels))
        same = [row for row in rows if row["shape"] == shape and row["recipe"] == "bf16"]
        if same:
            rows[-1]["over_bf16"] = round(rows[-1]["ms"] / same[0]["ms"], 3)
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
