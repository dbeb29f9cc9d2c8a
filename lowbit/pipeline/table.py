"""What a pipeline says at its end: a line a stage, where its files are, and what to do next."""

import logging
import shlex
from collections.abc import Collection
from pathlib import Path

from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.pipeline.manifest import Manifest, Record
from lowbit.trainer.aligned import columns
from lowbit.trainer.console import duration
from lowbit.trainer.loaded import shown_path

logger = logging.getLogger("lowbit")


def table(folder: Path, manifest: Manifest, kept: Collection[Stage]) -> list[str]:
    """A line for each stage that is there."""
    rows = [["stage", "took", "tokens", "precision", "reached", "files"]]
    for stage in Stage:
        record = manifest.stages.get(stage)
        if record is not None:
            rows.append(
                [
                    stage.value + (" (done before)" if stage in kept else ""),
                    duration(record.seconds),
                    f"{record.reached.get('tokens', 0):,.0f}",
                    record.precision,
                    _reached(record) or record.state.value,
                    shown_path(folder / record.folder),
                ]
            )
    return columns(rows, right=(1, 2))


def say_end(config: PipelineConfig, folder: Path, manifest: Manifest, kept: Collection[Stage]) -> None:
    """The table, and commands that go on from here."""
    for line in table(folder, manifest, kept):
        logger.info("%s", line)
    folders = [folder / manifest.stages[stage].folder for stage in Stage if stage in manifest.stages]
    runs = [shlex.quote(shown_path(path)) for path in folders]
    last, prompt = runs[-1], "'import '"
    if Stage.rl in config.stages:
        from lowbit.rl.tasks import Split, make_task

        task = make_task(config.rl.task)
        prompt = shlex.quote(task.example(Split.held_out, config.rl.seed, 0).prompt)
    logger.info("next: lowbit generate %s --prompt %s", last, prompt)
    logger.info("      lowbit report %s", " ".join(runs))
    logger.info("      lowbit export %s OUT (an exported folder for other programs)", last)


def _reached(record: Record) -> str:
    """In words."""
    found = record.reached
    words = []
    if "val_bpb" in found:
        words.append(f"{found['val_bpb']:.4f} bits per byte")
    if "kl" in found:
        words.append(f"KL to the teacher {found['kl']:.4f}")
    if "reward" in found:
        words.append(f"reward {found['reward']:.3f}")
    if "val_accuracy" in found:
        words.append(f"held-out accuracy {found['first_accuracy']:.1%} -> {found['val_accuracy']:.1%}")
    return ", ".join(words)
