"""`lowbit pipeline`: every stage from one configuration, and the hidden `lowbit stage` that a stage's ranks run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli.complete import pipeline_candidates
from lowbit.cli.settings import Cfg, Multirun, settings

if TYPE_CHECKING:
    from lowbit.cli.task import Task

Overrides = Annotated[
    list[str] | None,
    settings(
        "Settings, such as precision=nvfp4 teacher=30m pretrain.max_steps=900 rl.task=sort. Several values need -m.",
        pipeline_candidates,
    ),
]


def pipeline(
    overrides: Overrides = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print tokens, FLOPs, memory, disk and time of each stage, and stop.")
    ] = False,
    multirun: Multirun = False,
    cfg: Cfg = None,
) -> None:
    """Pretrain a teacher, distil a student from it, and train the student by rewards.

    Each stage begins with what the one before it left. The same command again goes on where it was, and does nothing
    twice. Alone it takes minutes on a CPU; docs/pipeline.md says more.
    """
    from lowbit.cli import job

    task, given = _task(), overrides or []
    if plan and cfg is None:
        _print_plan(given, multirun, task)
    else:
        job.run(given, task, multirun=multirun, cfg=cfg)


def stage(
    name: Annotated[str, typer.Argument(help="pretrain, distill or rl.")],
    config: Annotated[Path, typer.Argument(help="Its configuration.")],
    folder: Annotated[Path, typer.Argument(help="Its folder.")],
) -> None:
    """One stage as a rank of a launcher runs it; `lowbit pipeline engine.processes=N` starts these."""
    from lowbit.configs.schema_pipeline import Stage
    from lowbit.configs.stage_configs import STAGES
    from lowbit.configs.stored import load_config
    from lowbit.errors import ConfigError

    if name not in list(Stage):
        raise ConfigError(f"stage {name}: expected one of {', '.join(Stage)}")
    from lowbit.pipeline.stages import perform

    perform(Stage(name), load_config(config, STAGES[Stage(name)]), folder)


def _print_plan(given: list[str], multirun: bool, task: "Task") -> None:
    from lowbit.cli.task import checked
    from lowbit.configs.overrides import expand_sweep
    from lowbit.pipeline.plan import describe

    for number, one in enumerate(expand_sweep(given, task.command) if multirun else [given]):
        lines = describe(checked(one, task))  # type: ignore[arg-type]
        print("\n".join([f"job {number}: {' '.join(one)}", *lines] if multirun else lines))


def _perform(stage: Any, run: Any, folder: Path) -> Any:
    """A stage in this process, or in as many as `engine.processes` says."""
    from lowbit.cli import torchrun
    from lowbit.configs.stored import save_config
    from lowbit.pipeline.stages import perform

    if not torchrun.starts_ranks(run):
        return perform(stage, run, folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "stage.yaml"
    save_config(run, written)
    torchrun.run_ranks(run, ("stage",), [stage.value, str(written), str(folder)])
    return None


def _task() -> "Task":
    from lowbit.cli import torchrun
    from lowbit.cli.task import Task
    from lowbit.configs.overrides import PIPELINE
    from lowbit.configs.validate_pipeline import runs_of, validate_pipeline
    from lowbit.errors import ConfigError

    def work(config: Any, run_dir: Path) -> object:
        from lowbit.pipeline.run import run

        ended: list[Any] = []

        def performed(stage: Any, run: Any, folder: Path) -> Any:
            ended.append(_perform(stage, run, folder))
            return ended[-1]

        run(config, run_dir, performed)
        return ended[-1] if ended else None

    def stages_in(folder: Path) -> list[Path]:
        from lowbit.trainer.report.read import runs_in

        return runs_in(folder)

    def check(config: Any) -> None:
        if torchrun.world() > 1:
            raise ConfigError(
                f"{torchrun.world()} processes: a pipeline starts the ranks of its stages itself; leave torchrun "
                "out, and set engine.processes"
            )
        validate_pipeline(config)
        from lowbit.pipeline.stages import check_sampling  # PyTorch, which most mistakes need not wait for

        check_sampling(config)

    return Task(
        PIPELINE,
        work,
        check,
        joined=False,
        words=("pipeline",),
        runs=lambda config: list(runs_of(config).values()),
        shown=stages_in,
    )
