"""One rank of a distributed test: `worker.py FOLDER BACKEND` runs the cases in FOLDER/cases.json.

A case trains a tiny model for a few steps on made-up micro-batches, with the engine that it names, and rank 0 writes
what came out: FOLDER/NAME.json (loss and gradient norm of each step, notes) and FOLDER/NAME.safetensors (weights and
optimizer states). The same function, `train`, runs in the test's own process with `LocalEngine`: that is the oracle.
BACKEND is gloo (on the CPU) or nccl (each rank on its own GPU).
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nearness import exact_muon
from safetensors.torch import load_file, save_file

from lowbit.configs.schema import (
    BatchConfig,
    CommConfig,
    CommKind,
    CompileMode,
    EngineConfig,
    EngineKind,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    OptimizerKind,
    Recompute,
    RunConfig,
    WeightsDtype,
)
from lowbit.data.batch import Batch
from lowbit.models.adapters import adapt, adapted
from lowbit.models.block import BlockOutput
from lowbit.models.transformer import Transformer
from lowbit.trainer.distributed import ALONE, Ranks
from lowbit.trainer.engine import Engine, LocalEngine
from lowbit.trainer.launch import open_ranks
from lowbit.trainer.objective import NextToken, Objective, ObjectiveOutput

MODEL = ModelConfig(layers=2, width=32, heads=2, kv_heads=1, mlp_width=48, max_sequence=64)
MOE = MoeConfig(experts=4, top_k=2, expert_width=16, shared=1)
VOCAB = 257
MICRO_BATCHES = 12
"""In a step, over all ranks: 1, 2, 3 and 4 divide it."""
PARTS = ("model/", "optimizer/")
"""What names in a case's file begin with."""


def config_of(case: dict[str, Any]) -> RunConfig:
    """The configuration a case asks for."""
    return RunConfig(
        device=case.get("device", "cpu"),
        batch=BatchConfig(sequences=MICRO_BATCHES, micro_batch=1),
        model=replace(
            MODEL,
            width=case.get("width", MODEL.width),
            mlp_width=3 * case.get("width", MODEL.width) // 2,
            tied_head=case.get("tied", False),
            moe=MOE if case.get("moe") else MODEL.moe,
        ),
        engine=EngineConfig(
            kind=EngineKind.deepspeed,
            compile=CompileMode(case.get("compile", "off")),
            recompute=Recompute(case.get("recompute", "none")),
            zero_stage=case.get("stage", 0),
            expert_parallel=case.get("spread", False),
            bucket_mib=case.get("bucket_mib", 200),
        ),
        comm=CommConfig(
            kind=CommKind(case.get("comm", "none")),
            weights=WeightsDtype(case.get("weights", "auto")),
            exact_below=case.get("exact_below", 65_536),
            error_feedback=case.get("feedback", False),
            stochastic_rounding=case.get("stochastic", False),
        ),
        optim=OptimConfig(kind=OptimizerKind(case.get("optimizer", "adamw"))),
    )


def build(config: RunConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> Transformer:
    """The tiny model with its first weights."""
    with torch.device("meta"):
        model = Transformer(config.model, VOCAB, dtype)
    model = model.to_empty(device=device)
    model.init_weights(1)
    return model


def model_of(case: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a case; with `lora` adapters of that rank, which have learned something, on frozen weights."""
    model = build(config_of(case), device, dtype)
    if "lora" in case:
        adapt(model, case["lora"], 8.0, ["all"], seed=1, also=case.get("also", []))
        with torch.no_grad():
            for layer in adapted(model).values():
                assert layer.low_rank is not None
                layer.low_rank.b.add_(0.01)
    return model


def micro_batch(step: int, index: int) -> Batch:
    """Made-up tokens. The number of valid targets differs, and every fifth micro-batch has none."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, VOCAB, (2, 17), generator=generator)
    weights = (torch.rand(2, 16, generator=generator) > 0.3 * (index % 3)).float() * (index % 5 != 4)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, None, int(weights.sum()))


def train(engine: Engine, ranks: Ranks, steps: int, objective: Objective | None = None) -> list[Any]:
    """Loss and gradient norm of each step; the way the training loop goes about it, with clipping at half the norm."""
    objective = objective or NextToken(1e-4)
    share = MICRO_BATCHES // ranks.world
    rows = []
    for step in range(steps):
        batches = [micro_batch(step, ranks.rank * share + i) for i in range(share)]
        [valid] = ranks.sum([sum(b.valid_tokens for b in batches)])
        nll = torch.zeros((), device=engine.device)
        for index, batch in enumerate(batches):
            nll += engine.micro_step(objective, batch.to(engine.device), 1 / valid, index == share - 1).nll_sum
        norm = float(engine.gradient_norm())
        [loss] = ranks.sum([float(nll)])
        engine.step(0.5 + 0.1 * step, 0.5 / norm)
        rows.append([loss / valid, norm])
    return rows


def tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """Weights and optimizer states, on rank 0."""
    model = {f"model/{name}": t for name, t in engine.model_tensors().items()}
    states = {f"optimizer/{name}": t for name, t in engine.optimizer_tensors().items()}
    return {name: t.detach().cpu().clone() for name, t in (model | states).items()}


def tensors_of(model: Transformer) -> dict[str, torch.Tensor]:
    """Parameters by name."""
    return {name: p.detach() for name, p in model.named_parameters()}


def half_used(model: Transformer, batch: Batch) -> ObjectiveOutput:
    """An objective that leaves the second block without gradients on micro-batches with an odd number of targets."""
    return NextToken(1e-4)(model, batch) if batch.valid_tokens % 2 == 0 else without_second_block(model, batch)


def without_second_block(model: Transformer, batch: Batch) -> ObjectiveOutput:
    """An objective that gives it no gradients."""
    block = model.blocks[1]
    block.forward, kept = (lambda x, *rest: BlockOutput(x)), block.forward  # type: ignore[method-assign]
    try:
        return NextToken(1e-4)(model, batch)
    finally:
        block.forward = kept  # type: ignore[method-assign]


class UsedAtFirst:
    """Uses everything in the first micro-batches, those of the step that tells what gets gradients; on one rank no
    second block after that."""

    def __init__(self, ranks: Ranks) -> None:
        self.left = MICRO_BATCHES // ranks.world
        self.drops = ranks.rank + 1 == ranks.world

    def __call__(self, model: Transformer, batch: Batch) -> ObjectiveOutput:
        self.left -= 1
        return (without_second_block if self.drops and self.left < 0 else NextToken(1e-4))(model, batch)


def objective_of(case: dict[str, Any], ranks: Ranks) -> Objective:
    """What a case trains for."""
    known = {"next_token": NextToken(1e-4), "half_used": half_used, "used_at_first": UsedAtFirst(ranks)}
    return known[case.get("objective", "next_token")]


def local(case: dict[str, Any], device: str = "cpu") -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The same case in one process, by `LocalEngine`."""
    config = config_of(case)
    engine = LocalEngine(
        model_of(case, torch.device(device)), config.optim, replace(config.engine, kind=EngineKind.local)
    )
    return train(engine, ALONE, case.get("steps", 3), objective_of(case, ALONE)), tensors(engine)


@contextmanager
def exchanged_rows(rank: int) -> Iterator[list[int]]:
    """Bytes of each exchange of tokens that leave this rank, as PyTorch is asked to send them."""
    found: list[int] = []
    send = dist.all_to_all_single

    def counted(out: torch.Tensor, x: torch.Tensor, received: Any = None, sent: Any = None, **settings: Any) -> Any:
        if sent is not None:
            found.append((sum(sent) - sent[rank]) * x[:1].nbytes if len(x) else 0)
        return send(out, x, received, sent, **settings)

    dist.all_to_all_single = counted
    try:
        yield found
    finally:
        dist.all_to_all_single = send


def run_case(case: dict[str, Any], folder: Path, ranks: Ranks, device: torch.device) -> None:
    """Train as the case says and write what came out."""
    from lowbit.trainer.deepspeed_engine import DeepSpeedEngine

    config = config_of(case)
    dtype = torch.bfloat16 if case.get("dtype") == "bf16" else torch.float32
    engine = DeepSpeedEngine(model_of(case, device, dtype), config, ranks, device)
    if "load" in case:  # a file of an oracle's
        saved = load_file(case["load"]) if ranks.first else {}
        model, states = ({n.removeprefix(p): t for n, t in saved.items() if n.startswith(p)} for p in PARTS)
        engine.load(model, states)
    if case.get("late"):  # as if no bucket left during a backward pass
        assert engine._wire.attachment is not None
        engine._wire.attachment.leave_early = lambda: None  # type: ignore[method-assign]
    with exchanged_rows(ranks.rank) as exchanged:
        rows = train(engine, ranks, case.get("steps", 3), objective_of(case, ranks))
    traffic = engine.traffic() | {"exchanged": sum(exchanged)}
    saved = tensors(engine)
    prints = ranks.gather(fingerprint(engine))
    if ranks.first:
        (folder / f"{case['name']}.json").write_text(json.dumps({"rows": rows, "weights": prints, "traffic": traffic}))
        save_file(saved, folder / f"{case['name']}.safetensors")
    engine.close()


def compare_gradients(case: dict[str, Any], folder: Path, ranks: Ranks, device: torch.device) -> None:
    """Reduced gradients of one step beside the exact sums of what the ranks had, and beside the simulated code."""
    from lowbit.comm.codecs import make_codec
    from lowbit.comm.simulate import simulate
    from lowbit.trainer.deepspeed_engine import DeepSpeedEngine

    config = config_of(case)
    engine = DeepSpeedEngine(build(config, device), config, ranks, device)
    share = MICRO_BATCHES // ranks.world
    for index in range(share):
        batch = micro_batch(0, ranks.rank * share + index).to(device)
        engine.micro_step(NextToken(1e-4), batch, 0.01, index == share - 1)
    factor = ranks.world if engine.stage == 3 else 1  # there the loss is scaled, and the mean is taken
    local = {name: p.grad.detach().clone() / factor for name, p in engine.model.named_parameters()}
    norm = engine.gradient_norm()
    found = engine.gradient_parts()
    everyone = {name: gather(grad, ranks) for name, grad in local.items()}
    errors = {}
    for name, grads in everyone.items():
        exact = torch.stack(grads).double().sum(0)
        kept = engine.shards.parts[name].cut(exact)
        errors[name] = [float((found[name].double().view(-1) - kept).square().sum()), float(kept.square().sum())]
    same_as_simulated = None
    if engine.stage == 0 and case["comm"] not in ("none", "bf16"):
        coded = [n for n, g in local.items() if g.ndim >= 2 and g.numel() >= config.comm.exact_below]
        flats = [torch.cat([everyone[n][rank].view(-1) for n in coded]) for rank in range(ranks.world)]
        summed = simulate(flats, make_codec(case["comm"]), factor=1.0, node_size=case.get("node_size", 1))
        same_as_simulated = torch.equal(summed, torch.cat([found[n].reshape(-1) for n in coded]))
    mine = 1.0 if engine.stage > 0 or ranks.first else 0.0  # at stage 0 every rank has all of it
    totals = {n: ranks.sum([mine * number for number in pair]) for n, pair in errors.items()}
    if ranks.first:
        row = {"errors": totals, "norm": float(norm), "traffic": engine.traffic(), "simulated": same_as_simulated}
        (folder / f"{case['name']}.json").write_text(json.dumps(row))
    engine.close()


def conserve(case: dict[str, Any], folder: Path, ranks: Ranks, device: torch.device) -> None:
    """Error feedback over some steps that change nothing: sums of reduced gradients, what is left, the exact sums.

    Exact ones are those of a copy of the model. `load`: a file with what was left over before, on other ranks.
    """
    from lowbit.trainer.deepspeed_engine import DeepSpeedEngine

    config = config_of(case)
    engine, copy = DeepSpeedEngine(build(config, device), config, ranks, device), build(config, device)
    before = load_file(case["load"]) if "load" in case and ranks.first else {}
    engine.load_exchange(before)
    share = MICRO_BATCHES // ranks.world
    got = {name: torch.zeros_like(part).view(-1) for name, part in engine.weights().items()}
    for step in range(3):
        for index in range(share):
            batch = micro_batch(step, ranks.rank * share + index).to(device)
            engine.micro_step(NextToken(1e-4), batch, 0.01, index == share - 1)
            (NextToken(1e-4)(copy, batch).loss_sum * 0.01).backward()  # type: ignore[no-untyped-call]
        engine.gradient_norm()
        for name, part in engine.gradient_parts().items():
            got[name] += part.view(-1)
        engine.step(0.0, 1.0)
    exact = {n: torch.stack(gather(p.grad, ranks)).double().sum(0).cpu() for n, p in copy.named_parameters()}
    parts = {name: part.view_as(engine.weights()[name]) for name, part in got.items()}
    reduced, left = engine.collect(parts), engine.exchange_tensors()
    if ranks.first:
        rows = {}
        for name in [key.removeprefix("sent.") for key in left if key.startswith("sent.")]:
            missing = exact[name] + total_left(before, name) - reduced[name].cpu()
            size = float(exact[name].abs().max())
            after = float((missing - total_left(left, name)).abs().max())
            rows[name] = [float(missing.abs().max()) / size, after / size]
        (folder / f"{case['name']}.json").write_text(json.dumps({"rows": rows, "keys": sorted(left)}))
        save_file(left, folder / f"{case['name']}.safetensors")
    engine.close()


def when_reduced(case: dict[str, Any], folder: Path, ranks: Ranks, device: torch.device) -> None:
    """When coded buckets leave this rank, step by step: in which pass, and whether all gradients were there by then."""
    from lowbit.trainer.deepspeed_engine import DeepSpeedEngine

    config = config_of(case)
    engine = DeepSpeedEngine(build(config, device), config, ranks, device)
    assert engine._wire.attachment is not None
    reducer = engine._wire.attachment.reducer
    method = "reduce_scatter" if engine.stage else "all_reduce"
    stock, now, calls, complete = getattr(reducer, method), "", list[tuple[str, bool]](), False

    def reduce(*args: Any, **options: Any) -> Any:
        calls.append((now, complete))
        return stock(*args, **options)

    def arrived(_: torch.Tensor) -> None:
        nonlocal complete
        complete = True

    setattr(reducer, method, reduce)
    engine.model.embedding.weight.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
    share, found = MICRO_BATCHES // ranks.world, []
    for step in range(3):
        calls.clear()
        for index in range(share):
            now, complete = "last" if index == share - 1 else "early", False
            batch = micro_batch(step, ranks.rank * share + index).to(device)
            engine.micro_step(NextToken(1e-4), batch, 0.01, index == share - 1)
        now = "after"
        engine.gradient_norm()
        found.append(list(calls))
        engine.step(1.0, 1.0)
    if ranks.first:
        (folder / f"{case['name']}.json").write_text(json.dumps(found))
    engine.close()


def compare_wire(case: dict[str, Any], folder: Path, ranks: Ranks, device: torch.device) -> None:
    """Bytes that left the network device in some steps beside those that the engine counted."""
    from shaped_network import sent_bytes

    from lowbit.trainer.deepspeed_engine import DeepSpeedEngine

    config = config_of(case)
    engine = DeepSpeedEngine(build(config, device), config, ranks, device)
    train(engine, ranks, 1)  # finds out what gets gradients, and compares with DeepSpeed's own reductions
    engine.traffic()
    ranks.gather(0)
    before = sent_bytes()
    train(engine, ranks, 3)
    ranks.gather(0)
    row = {"sent": sent_bytes() - before, "counted": engine.traffic()}
    rows = ranks.gather(row)
    if ranks.first:
        (folder / f"{case['name']}.json").write_text(json.dumps(rows))
    engine.close()


def total_left(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What all ranks have left over of one parameter's gradients."""
    sent, owned = state.get(f"sent.{name}"), state.get(f"owned.{name}", torch.zeros(()))
    return torch.zeros(()).double() if sent is None else sent.double().sum(0) + owned.double()


def gather(tensor: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """Every rank's tensor."""
    if ranks.world == 1:
        return [tensor]
    everyone = [torch.empty_like(tensor) for _ in range(ranks.world)]
    torch.distributed.all_gather(everyone, tensor.contiguous())
    return everyone


def fingerprint(engine: Engine) -> float:
    """A number that differs when the weights that this rank computes with differ in any bit (ZeRO 0 to 2)."""
    total = 0
    for index, parameter in enumerate(engine.model.parameters()):
        total += (index + 1) * int(parameter.detach().contiguous().view(torch.int32).sum(dtype=torch.int64))
    return float(total % (1 << 50))


WORK = {"gradients": compare_gradients, "conserve": conserve, "when": when_reduced, "wire": compare_wire}


def main() -> None:
    """Run the cases one after the other."""
    torch.set_num_threads(1)
    exact_muon()
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    cases = json.loads((folder / "cases.json").read_text())
    device = "cuda" if backend == "nccl" else "cpu"
    with open_ranks(config_of({"device": device})) as (ranks, place):
        for case in cases:
            work = WORK.get(case.get("kind", ""), run_case)
            work(case | {"device": device}, folder, ranks, place)


if __name__ == "__main__":
    main()
