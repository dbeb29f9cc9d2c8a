"""What a model answers, greedily, to problems that were never trained on: during a run, and of a finished one.

    accuracy = answers with a reward of 1 or more / problems asked

The problems are the first `task.examine` of the held-out split in the order of the run's seed, the same ones each time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import load_config
from lowbit.errors import CheckpointError
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.kv_codec import KvFormat
from lowbit.quant.resolve import resolve
from lowbit.rl.prompts import Prompts
from lowbit.rl.rewards import RewardPool
from lowbit.rl.rollout import Collector, check_prompts
from lowbit.rl.tasks import Split, Task, make_task
from lowbit.trainer.loaded import load_run

SETTINGS = "rl.yaml"
"""Everything that was set, in a run's folder."""


@dataclass(frozen=True)
class Examined:
    """Of a checkpoint."""

    step: int
    asked: int
    accuracy: float
    reward: float
    """Mean."""
    length: float
    """Mean tokens of an answer."""
    precision: str
    """Of the sampler."""


def problems(task: Task, count: int) -> range:
    """Numbers of the held-out problems."""
    size = task.size(Split.held_out)
    return range(min(count, count if size is None else size))


def marks(judge: Collector, numbers: Sequence[int]) -> tuple[float, float, float, float]:
    """Sum of the rewards, right answers, problems asked, tokens drawn: what ranks add up."""
    groups = judge.draw(numbers, Split.held_out, 1, greedy=True)
    judge.check(groups)
    flat = [c for group in groups for c in group]
    rewards = [c.reward or 0.0 for c in flat]
    right = sum(reward >= 1.0 for reward in rewards)
    return math.fsum(rewards), float(right), float(len(flat)), float(sum(len(c.drawn) for c in flat))


def settings_of(run_dir: Path) -> Path | None:
    """Where the settings of a reinforcement-learning run, or of its warm start, are; None for any other folder."""
    folders = [run_dir, run_dir.parent] if run_dir.name == "warm_start" else [run_dir]
    return next((folder / SETTINGS for folder in folders if (folder / SETTINGS).is_file()), None)


def examine(run_dir: Path, checkpoint: str = "latest", device: str = "auto", count: int | None = None) -> Examined:
    """Have a run's checkpoint answer `count` held-out problems of its task; None: as many as the run did.

    Raises:
        CheckpointError: no run of `lowbit rl`, or no readable checkpoint.
    """
    settings = settings_of(run_dir)
    if settings is None:
        raise CheckpointError(f"{run_dir} is no run of lowbit rl: it has no {SETTINGS}")
    config = load_config(settings, RlConfig)
    loaded = load_run(run_dir, checkpoint, device)
    task, text = make_task(config.task), Prompts(loaded.tokenizer, config.task)
    check_prompts(config, task, text)
    numbers = problems(task, count or config.task.examine)
    policy = resolve(config.precision)
    sampler = EmbeddedSampler(
        loaded.model.requires_grad_(False),
        loaded.tokenizer.eot_id,
        policy,
        slots=config.rollout.slots,
        kv=KvFormat(config.rollout.cache.value),
        deterministic=config.deterministic,
        share=True,
    )
    rewards = RewardPool(config.task, config.reward)
    try:
        reward, right, asked, tokens = marks(Collector(config, task, text, sampler, rewards), numbers)
    finally:
        rewards.close()
    accuracy, mean, length = (value / max(asked, 1.0) for value in (right, reward, tokens))
    precision = config.precision.sampler or config.precision.forward
    return Examined(loaded.step, int(asked), accuracy, mean, length, precision)
