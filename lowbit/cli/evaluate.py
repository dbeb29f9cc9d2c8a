"""`lowbit eval`: bits per byte of a run's checkpoint on its held-out documents, or accuracy on held-out problems."""

from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.generate import Checkpoint, Device, Run


def evaluate(
    run: Run,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most held-out tokens to read; by default as the run's last evaluation.")
    ] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="Of a run of `lowbit rl`: held-out problems to answer greedily.")
    ] = None,
    device: Device = "auto",
    checkpoint: Checkpoint = "latest",
) -> None:
    """Measure a trained model on the documents, or the problems of a task, that its run held out."""
    from lowbit.errors import ConfigError
    from lowbit.rl.examine import settings_of
    from lowbit.trainer.evaluate import evaluate as measure
    from lowbit.trainer.loaded import dataset_of, load_run
    from lowbit.trainer.memory import explain_out_of_memory
    from lowbit.trainer.precision import forward_in_words

    if settings_of(run) is not None:
        if max_tokens is not None:
            raise ConfigError(f"--max-tokens: {run} learned a task and has no documents: --problems would work")
        _examine(run, checkpoint, device, problems)
        return
    if problems is not None:
        raise ConfigError(f"--problems: {run} is no run of lowbit rl: --max-tokens would work")
    with explain_out_of_memory(lambda: "out of memory: take --device cpu (a batch is as large as in training)"):
        loaded = load_run(run, checkpoint, device)
        data = dataset_of(loaded)
        budget = max_tokens or loaded.config.evaluation.final_tokens
        batches = data.validation_batches(loaded.config.batch.micro_batch, budget)
        result = measure(loaded.model, batches, loaded.tokenizer.token_bytes())
    print(
        f"step {loaded.step}: {result.bpb:.4f} bits per byte, {result.loss:.4f} nats per token "
        f"({result.tokens:,} tokens, {result.text_bytes:,} bytes, {forward_in_words(loaded.model)})"
    )


def _examine(run: Path, checkpoint: str, device: str, problems: int | None) -> None:
    """Print the accuracy of a run of `lowbit rl`."""
    from lowbit.rl.examine import examine
    from lowbit.trainer.memory import explain_out_of_memory

    with explain_out_of_memory(lambda: "out of memory: take --device cpu"):
        found = examine(run, checkpoint, device, problems)
    print(
        f"step {found.step}: held-out greedy accuracy {found.accuracy:.1%}, mean reward {found.reward:.3f} "
        f"({found.asked:,} problems, {found.length:.1f} tokens an answer, sampler {found.precision})"
    )
