"""What a run says at its beginning (what will run) and at its end: how good the model is, and what to do next."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowbit.configs.schema import AttentionKernel, CommConfig, CommKind, EvalConfig, RunConfig
from lowbit.data.tokenizer import Tokenizer
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.transformer import Transformer
from lowbit.trainer.client_optimizer import numbers_of, travels_exactly
from lowbit.trainer.console import duration
from lowbit.trainer.files import SAMPLES
from lowbit.trainer.jsonl import keep_rows_until, to_line
from lowbit.trainer.loaded import shown_path
from lowbit.trainer.loop import Position
from lowbit.trainer.optim import GroupRow

logger = logging.getLogger("lowbit")


def introduce(config: RunConfig, model: Transformer, groups: Sequence[GroupRow], world: int) -> None:
    """The model, what trains of it and how, and how many ranks share the work."""
    parameters = sum(row.parameters for row in groups)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    note = f", {parameters / 1e6:.3g} million of them train" if frozen else ""
    logger.info("model %s: %.1f million parameters%s", config.model.name, (parameters + frozen) / 1e6, note)
    for row in groups:
        logger.info("  %s", row)
    if config.engine.attention is AttentionKernel.varlen and not model.uses_varlen:
        where = f"{model.head_weight.device.type} in {model.compute_dtype}".replace("torch.", "")
        logger.warning("engine.attention=varlen: no such kernel on %s, documents are masked", where)
    if world > 1:
        travel = how_gradients_travel(config.comm, model)
        logger.info("%d ranks, ZeRO %d, gradients travel as %s", world, config.engine.zero_stage, travel)


def how_gradients_travel(comm: CommConfig, model: Transformer) -> str:
    """In which form, and whether many of them are exact all the same."""
    if comm.kind is CommKind.none:
        return "FP32"
    sizes, exact = 0, 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sizes += numbers_of(parameter)
            exact += numbers_of(parameter) if travels_exactly(name, parameter, comm.exact_below) else 0
    if exact == sizes:
        return f"FP32, not {comm.kind.value}: all have fewer numbers than comm.exact_below={comm.exact_below}"
    note = f" ({exact / sizes:.0%} of them as FP32: small ones)" if exact > sizes / 10 else ""
    return comm.kind.value + note


def sample_text(model: Transformer, tokenizer: Tokenizer, settings: EvalConfig) -> str:
    """The prompt of the settings, and up to `sample_tokens` tokens that the model continues it with."""
    prompt = [tokenizer.eot_id, *tokenizer.encode(settings.sample_prompt)]
    length = min(settings.sample_tokens, model.config.max_sequence - len(prompt))
    sampler = EmbeddedSampler(model, tokenizer.eot_id, share=True, graphs=False)
    request = Request(tuple(prompt), key=0, max_new_tokens=length)
    [[completion]] = sampler.sample([request], SamplingConfig(temperature=0.8, top_p=0.95), seed=1)
    whole = tokenizer.decode([*prompt, *completion.tokens])  # a token's text may depend on the one before it
    return settings.sample_prompt + whole[len(tokenizer.decode(prompt)) :]


def keep_sample(run_dir: Path, step: int, prompt: str, sample: str) -> None:
    """Put a sample, which begins with its prompt, into samples.jsonl, in place of one of the same step."""
    path = run_dir / SAMPLES
    keep_rows_until(path, step - 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(to_line({"step": step, "prompt": prompt, "turns": [sample.removeprefix(prompt)]}))


def say_result(run_dir: Path, bpb: float, trigram_bpb: float, sample: str) -> None:
    """Bits per byte beside the byte-trigram baseline, the sample, and commands that go on from here."""
    verdict = "below" if bpb < trigram_bpb else "NOT below"
    logger.info("validation %.4f bits per byte, %s the byte-trigram baseline's %.4f", bpb, verdict, trigram_bpb)
    if sample:
        logger.info("sample:\n%s", sample)
    folder = shown_path(run_dir)
    logger.info("run folder: %s", folder)
    run = shlex.quote(folder)
    logger.info("next: lowbit generate %s --prompt 'import '", run)
    logger.info("      lowbit report %s", run)
    logger.info("      lowbit eval %s", run)


def say_finished(limits: Mapping[str, float], position: Position) -> None:
    """That a run was finished already, and which of its limits (those reached, by key) to raise."""
    logger.info(
        "this run is finished (%s) at step %d after %d tokens and %s: to go on, raise the limit, as in %s",
        " ".join(f"{key}={value}" for key, value in limits.items()),
        position.step,
        position.tokens,
        duration(position.seconds),
        " ".join(f"{key}={2 * value}" for key, value in limits.items()),
    )
