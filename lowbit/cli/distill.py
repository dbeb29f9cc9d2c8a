"""`lowbit distill`: a teacher's cache, students from it, and looking into caches."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from lowbit.cli.complete import distill_candidates
from lowbit.cli.generate import Device
from lowbit.cli.settings import TAKES_SETTINGS, Cfg, Multirun, Shown, settings

if TYPE_CHECKING:
    from lowbit.cli.task import Task


class _Settings(TyperGroup):
    """A group that is a command too: what begins with no command's name are settings of the whole distillation."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        helped = bool(args) and args[0] in ("-h", "--help")
        if not helped and (not args or args[0] not in self.commands):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="distill",
    cls=_Settings,
    help="Distil a model: a teacher's targets are stored once, small, and train any number of students. "
    "Alone (`lowbit distill KEY=VALUE ...`) it does everything: teacher, cache, student.",
)

Overrides = Annotated[
    list[str] | None,
    settings(
        "Settings, such as teacher.path=runs/pretrain model=quick cache.targets=16. Several values need -m.",
        distill_candidates,
    ),
]
CacheFolder = Annotated[Path, typer.Argument(metavar="CACHE", help="A cache's folder.")]


class _Work(StrEnum):
    run = "everything"
    cache = "cache"
    train = "train"


@app.command("run", hidden=True, context_settings=TAKES_SETTINGS)
def run(overrides: Overrides = None, multirun: Multirun = False, cfg: Cfg = None) -> None:
    """Train a teacher where none is named, store its targets, and train a student from them."""
    _do(_Work.run, overrides, multirun, cfg)


@app.command("cache", context_settings=TAKES_SETTINGS)
def cache(overrides: Overrides = None, multirun: Multirun = False, cfg: Cfg = None) -> None:
    """Store a teacher's targets. Killed, the same command goes on; started several times, they share the work."""
    _do(_Work.cache, overrides, multirun, cfg)


@app.command("train", context_settings=TAKES_SETTINGS)
def train(overrides: Overrides = None, multirun: Multirun = False, cfg: Cfg = None) -> None:
    """Train a student from a cache (cache.path=...)."""
    _do(_Work.train, overrides, multirun, cfg)


@app.command("stats")
def stats(path: CacheFolder) -> None:
    """Show what a cache holds, and its size."""
    from lowbit.distill.inspect import statistics
    from lowbit.distill.shards import open_cache

    print("\n".join(statistics(open_cache(path, report=print), path)))


@app.command("verify")
def verify(
    path: CacheFolder,
    samples: Annotated[
        int, typer.Option(min=0, help="Random samples that the teacher reads again; 0: hashes only.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="Which samples.")] = 1,
    teacher: Annotated[str | None, typer.Option(help="The teacher's folder, if it is no longer where it was.")] = None,
    device: Device = "auto",
) -> None:
    """Compare every shard with its SHA-256, and random rows with what the teacher says."""
    from lowbit.distill.inspect import rescore, unchecked
    from lowbit.distill.shards import open_cache

    found = open_cache(path, verify=True)
    print(f"{path}: {len(found.shards)} shards match their SHA-256")
    if warning := unchecked(found, samples):
        print(f"{path}: {warning}", file=sys.stderr)
    if samples:
        again = rescore(found, samples, seed, device, teacher)
        print(
            f"{path}: {again.samples} samples read again by the teacher, {again.identical} identical to the bit, "
            f"entropies {again.entropy_difference:.4f} nats apart on average"
        )


def _do(work: _Work, overrides: list[str] | None, multirun: bool, cfg: Shown | None) -> None:
    from lowbit.cli import job

    job.run(overrides or [], _task(work), multirun=multirun, cfg=cfg)


def _task(work: _Work) -> "Task":
    from lowbit.cli.task import Task
    from lowbit.configs import validate_distill as checks
    from lowbit.configs.overrides import DISTILL

    def function(config: Any, run_dir: Path) -> object:
        import lowbit.distill.run as distill

        return getattr(distill, work.value)(config, run_dir)

    check = {
        _Work.run: checks.validate_distill,
        _Work.cache: checks.validate_cache,
        _Work.train: checks.validate_train,
    }[work]
    return Task(DISTILL, function, check, joined=work is not _Work.cache, words=("distill", work.name))
