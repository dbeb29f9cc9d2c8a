"""`lowbit export`: a run as a Hugging Face folder."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.generate import Checkpoint, Run
from lowbit.errors import ConfigError


class Format(StrEnum):
    """What the weights are written in."""

    bf16 = "bf16"
    fp32 = "fp32"
    nvfp4 = "nvfp4"
    mxfp8 = "mxfp8"


def export(
    run: Run,
    format: Annotated[Format, typer.Option("--format", "-f", help="What the weights are written in.")] = Format.bf16,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="New folder; by default RUN/export-FORMAT.")] = None,
    checkpoint: Checkpoint = "latest",
    averaged: Annotated[bool, typer.Option(help="The moving average (optim.ema_decay) of the weights.")] = False,
    shard_gb: Annotated[float, typer.Option(min=0.001, help="Most gigabytes in one file.")] = 5.0,
    check: Annotated[
        bool,
        typer.Option(help="Load the folder (bf16, fp32) with transformers, compare logits and blocks' outputs."),
    ] = False,
) -> None:
    """Write a run as a Hugging Face folder, which AutoModelForCausalLM and others read.

    nvfp4 and mxfp8 quantise the weights of the layers, in the layout of compressed-tensors.
    """
    from lowbit.trainer.exported import check_export, open_weights
    from lowbit.trainer.exported import export as write

    if check and format not in (Format.bf16, Format.fp32):
        raise ConfigError(f"--check --format {format}: only bf16 and fp32 are compared; leave --check out")
    folder = out or run / f"export-{format}"
    weights = open_weights(run, checkpoint, averaged=averaged)
    files = write(weights, folder, format.value, int(shard_gb * 1e9))
    size = sum(file.stat().st_size for file in files)
    print(f"step {weights.step}: {size / 1e6:,.1f} MB in {len(files)} file{'s' * (len(files) != 1)}: {folder}")
    if check:
        print(check_export(folder))
