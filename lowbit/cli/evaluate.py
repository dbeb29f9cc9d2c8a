"""`lowbit eval`: bits per byte of a run's checkpoint on its held-out documents."""

from typing import Annotated

import typer

from lowbit.cli.generate import Checkpoint, Device, Run


def evaluate(
    run: Run,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most held-out tokens to read; by default as the run's last evaluation.")
    ] = None,
    device: Device = "auto",
    checkpoint: Checkpoint = "latest",
) -> None:
    """Measure a trained model on the documents its run held out."""
    from lowbit.trainer.evaluate import evaluate as measure
    from lowbit.trainer.loaded import dataset_of, load_run
    from lowbit.trainer.memory import explain_out_of_memory
    from lowbit.trainer.precision import forward_in_words

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
