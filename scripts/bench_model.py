"""Speed of what models are made of: masked attention, local layers, trees, mixtures of experts. One table, and JSON.

    python scripts/bench_model.py attention                # one sequence of 32k tokens, then 2k: which mask costs what
    python scripts/bench_model.py attention --length 2048 --only "whole document" "documents of 512"
    python scripts/bench_model.py experts                  # mixtures against dense models of the same active size
    python scripts/bench_model.py kernels                  # attention alone: documents by mask, or by varying lengths
    python scripts/bench_model.py attention --small        # seconds, on a CPU: a check of the script, not of speed

Forward and backward of the whole model with its LM head, blocks compiled on a GPU, no optimizer. Random tokens: the
time does not depend on them, but for the experts' loads, which a fresh router spreads evenly.

Attention's rows: `causal` is plain; `whole document` is the same visibility through the mask (what a packed batch pays
when documents are as long as the sequence); then documents of other lengths (as long as the sequence, but cut where
sequences are), each by mask and, on a GPU, by the kernel for varying lengths (`engine.attention=varlen`); windows,
trees of 8 answers, Z-Reg, capped logits. `mask` is the time to make a batch's masks, of a rule that lies on the device,
as a share of the step, waiting for the device included, which a step does not do. The loader's thread makes the rules.

Experts' rows: each mixture's ratio is over the dense model that multiplies a token with as many weights.

Kernels' rows: forward and backward of one layer's attention over the same documents, through FlexAttention's mask,
and through flash attention's kernel for sequences of varying lengths; and plain causal.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import print_table, wall_seconds, write
from torch import Tensor

from lowbit.configs.compose import compose
from lowbit.configs.schema import AttentionKernel, ModelConfig, MoeConfig
from lowbit.models.attention import attention, prepare_mask
from lowbit.models.cost import flops_per_token, parameter_parts, window_of
from lowbit.models.layers import state_buffers
from lowbit.models.lm_head import lm_head_loss
from lowbit.models.transformer import Transformer
from lowbit.models.trees import Node, flatten, visibility_of
from lowbit.models.visibility import Visibility, causal, documents

VOCAB = 32_768
SHAPE = ModelConfig(name="12x1024", layers=12, width=1024, heads=16, kv_heads=4, mlp_width=2816, max_sequence=32_768)
SMALL = ModelConfig(name="2x64", layers=2, width=64, heads=2, kv_heads=1, mlp_width=128, max_sequence=512)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    config: ModelConfig
    batch: int
    length: int
    rule: Visibility | None = None
    kernel: AttentionKernel = AttentionKernel.flex
    over: str = "causal"
    """The row, of the same batch and length, that the ratio is over."""


def random_documents(batch: int, length: int, mean: int) -> Visibility:
    """Packed documents of `mean` tokens on average, between half and one and a half of that."""
    generator = torch.Generator().manual_seed(mean)
    first = torch.zeros(batch, length, dtype=torch.bool)
    for row in first:
        at = int(torch.randint(0, mean, (1,), generator=generator))
        while at < length:
            row[at] = True
            at += int(torch.randint(mean // 2, mean + mean // 2 + 1, (1,), generator=generator))
    return documents(first)


def random_trees(batch: int, length: int, answers: int = 8) -> Visibility:
    """Rows of prompts of 512 tokens with so many answers of 128 each (an eighth of that when rows are short)."""
    prompt, answer = (512, 128) if length >= 2048 else (64, 16)
    tree = flatten(Node([1] * prompt, 0.0, [Node([1] * answer)] * answers), 0)
    return visibility_of([[tree] * (length // len(tree))] * batch, length)


def attention_cases(small: bool, gpu: bool = True) -> list[Case]:
    """Masks at two lengths, about the same tokens."""
    config, shapes = (SMALL, [(1, 512)]) if small else (SHAPE, [(1, 32_768), (16, 2048)])
    cases = []
    for batch, length in shapes:
        window = replace(config, windows=[*[min(1024, length // 4)] * 5, 0])
        cases.append(Case("causal", config, batch, length))
        rules = {"whole document": causal(batch, length)}
        for mean in (length, length // 4, length // 32):
            rules[f"documents of {mean}"] = random_documents(batch, length, mean)
        for name, rule in rules.items():
            cases.append(Case(name, config, batch, length, rule))
            if gpu:
                cases.append(Case(f"{name}, varlen", config, batch, length, rule.with_ends(), AttentionKernel.varlen))
        cases += [
            Case("5 local layers to a global one", window, batch, length),
            Case("trees of 8 answers", config, batch, length, random_trees(batch, length)),
            Case("causal, Z-Reg", replace(config, attention_z=1e-4), batch, length),
            Case("causal, capped logits", replace(config, attention_softcap=50.0), batch, length),
        ]
    return cases


def experts_cases(small: bool) -> list[Case]:
    """Dense models, and mixtures that multiply each token with as many weights."""
    if small:
        few = replace(SMALL, name="tiny experts", moe=MoeConfig(experts=8, top_k=2, expert_width=64))
        pairs = [(few, 1, 256)]
    else:
        fine = MoeConfig(experts=64, top_k=8, expert_width=1024)
        wide = ModelConfig(name="64 experts", layers=8, width=2048, heads=16, kv_heads=4, moe=fine)
        presets = [(compose([f"model={name}"]).model, n) for name, n in (("moe_30m_a10m", 32), ("moe_1b_a300m", 8))]
        pairs = [(wide, 16, 2048), *((config, batch, 2048) for config, batch in presets)]
    cases = []
    for config, batch, length in pairs:
        moe, name = config.moe, f"dense as {config.name}"
        dense = replace(config, name=name, mlp_width=(moe.top_k + moe.shared) * moe.expert_width, moe=MoeConfig())
        cases += [Case(name, dense, batch, length, over=name), Case(config.name, config, batch, length, over=name)]
    return cases


@torch.no_grad()
def fill(model: Transformer) -> None:
    """Weights at random on the device itself: `init_weights` draws billions of them on the CPU."""
    for buffer in state_buffers(model).values():
        buffer.zero_()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, model.config.init_std)


def measure(case: Case, device: torch.device, steps: int) -> dict[str, Any]:
    """Median time of a step after three to warm up, and of building its masks."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = Transformer(case.config, VOCAB, dtype)
    model.to_empty(device=device)
    fill(model)
    model.attention_kernel = case.kernel
    if device.type == "cuda":
        model.compile_blocks()
    tokens = torch.randint(0, VOCAB, (case.batch, case.length), generator=torch.Generator().manual_seed(1)).to(device)
    rule = None if case.rule is None else case.rule.to(device)
    weights = torch.ones(tokens.numel(), device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        hidden = model(tokens, rule).flatten(0, 1)
        loss = lm_head_loss(hidden, model.head_weight, tokens.flatten(), weights, vocab_size=VOCAB).loss_sum
        auxiliary = model.take_auxiliary()
        (loss / tokens.numel() if auxiliary is None else loss / tokens.numel() + auxiliary).backward()  # type: ignore[no-untyped-call]

    windows = {window_of(case.config, layer) for layer in range(case.config.layers)}

    def masks() -> list[Any]:
        how = (model.needs_flex, model.uses_varlen)
        return [prepare_mask(rule, case.batch, case.length, device, window or None, *how) for window in windows]

    seconds, building = (wall_seconds(part, device, steps, warm_up=3) for part in (step, masks))
    tokens_per_second = tokens.numel() / seconds
    parts = parameter_parts(case.config, VOCAB)
    return {
        "row": case.name,
        "model": case.config.name,
        "shape": f"{case.batch} x {case.length}",
        "parameters": parts.total,
        "active": parts.active,
        "tokens_per_second": round(tokens_per_second),
        "tflops": round(tokens_per_second * flops_per_token(case.config, VOCAB, case.length) / 1e12, 2),
        "mask": round(building / seconds, 5),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
    }


def kernels(small: bool, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """Attention alone, forward and backward: rows with milliseconds and the factor over plain causal."""
    config, shapes = (SMALL, [(1, 512)]) if small else (SHAPE, [(1, 32_768), (16, 2048)])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows: list[dict[str, Any]] = []
    for batch, length in shapes:
        sizes = [(batch, heads, length, config.width // config.heads) for heads in (config.heads, config.kv_heads)]
        q, k, v = (torch.randn(sizes[i], device=device, dtype=dtype).requires_grad_() for i in (0, 1, 1))
        seed = torch.randn_like(q)
        ways = {("causal", "plain"): partial(attention, q, k, v, None)}
        for mean in (length, length // 4, length // 32):
            rule, name = random_documents(batch, length, mean).with_ends().to(device), f"documents of {mean}"
            mask = prepare_mask(rule, batch, length, device)
            ways[name, "mask"] = partial(attention, q, k, v, mask)
            if device.type == "cuda":
                mask = prepare_mask(rule, batch, length, device, varlen=True)
                ways[name, "varlen"] = partial(attention, q, k, v, mask)
        causal_ms = 0.0
        for (name, way), forward in ways.items():

            def work(
                forward: Callable[[], Tensor] = forward,
                inputs: tuple[Tensor, ...] = (q, k, v),
                seed: Tensor = seed,
            ) -> object:
                return torch.autograd.grad(forward(), inputs, seed)

            milliseconds = wall_seconds(work, device, steps, warm_up=3) * 1e3
            causal_ms = causal_ms or milliseconds
            rows.append({"row": name, "way": way, "shape": f"{batch} x {length}", "ms": round(milliseconds, 3)})
            rows[-1]["over_causal"] = round(milliseconds / causal_ms, 3)
    print_table(rows)
    return rows


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Speed of masked attention and of experts.")
    parser.add_argument("what", choices=("attention", "experts", "kernels"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, help="Cases with sequences of this length alone.")
    parser.add_argument("--only", nargs="+", default=[""], help="Cases with one of these words, and their bases.")
    parser.add_argument("--small", action="store_true", help="Tiny shapes, to see that the script runs.")
    parser.add_argument("--out", type=Path, default=Path("bench_model.json"))
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.what == "kernels":
        alone = kernels(args.small, device, args.steps)
        write(args.out, {"rows": alone})
        return alone
    cases = (
        attention_cases(args.small, device.type == "cuda") if args.what == "attention" else experts_cases(args.small)
    )
    cases = [case for case in cases if args.length in (None, case.length)]
    chosen = [case for case in cases if any(word in case.name for word in args.only)]
    needed = {(name, case.length) for case in chosen for name in (case.name, case.over)}
    cases = [case for case in cases if (case.name, case.length) in needed]
    rows: list[dict[str, Any]] = []
    for case in cases:
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row = measure(case, device, args.steps)
        base = next(r for r in (*rows, row) if r["row"] == case.over and r["shape"] == row["shape"])
        row |= {"over": case.over, "ratio": round(row["tokens_per_second"] / base["tokens_per_second"], 3)}
        rows.append(row)
        print(
            f"{row['row']:<32} {row['shape']:>10}  {row['tokens_per_second']:>10,} tokens/s  {row['tflops']:>7} TFLOP/s"
            f"  {row['ratio']:>5} of {case.over}  mask {row['mask']:.2%}  {row['active'] / 1e6:,.0f} of "
            f"{row['parameters'] / 1e6:,.0f} million active",
            flush=True,
        )
    write(args.out, {"rows": rows})
    return rows


if __name__ == "__main__":
    main()
