"""The tasks by name."""

from lowbit.configs.schema_rl import TaskConfig, TaskKind
from lowbit.rl.tasks.base import Example, Generated, Split, Task, fingerprint
from lowbit.rl.tasks.files import FileTask
from lowbit.rl.tasks.generated import Add, Calculator, Countdown, Reverse, Sort
from lowbit.rl.tasks.gym import GymTask

__all__ = ["Example", "Split", "Task", "fingerprint", "make_task"]

GENERATED: dict[TaskKind, type[Generated]] = {
    TaskKind.add: Add,
    TaskKind.sort: Sort,
    TaskKind.reverse: Reverse,
    TaskKind.countdown: Countdown,
    TaskKind.calculator: Calculator,
}


def make_task(config: TaskConfig) -> Task:
    """The task that a configuration names. Raises ConfigError; files are read when a problem is asked for."""
    if config.kind is TaskKind.file:
        return FileTask(config.path, config.held_out_path, config.held_out)
    if config.kind is TaskKind.reasoning_gym:
        return GymTask(config.dataset, config.held_out)
    return GENERATED[config.kind](config.size, config.held_out)
