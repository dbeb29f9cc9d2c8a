"""Rewards come from processes: hangs are killed, crashes survived, failures counted, a broken check ends the run."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowbit.configs.schema_rl import RewardConfig, TaskConfig
from lowbit.errors import ConfigError, LowbitError
from lowbit.rl.rewards import RewardPool
from lowbit.rl.tasks import Example

EXAMPLE = Example("p", "052", ("052",))
FUNCTION = "rewarding:reward"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{before}")


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    made = RewardPool(TaskConfig(), RewardConfig(function=FUNCTION, workers=2, seconds=4.0, failure_limit=0.9))
    yield made
    made.close()


def test_a_task_checks_in_order() -> None:
    pool = RewardPool(TaskConfig(), RewardConfig())
    texts = ["052", "0", "052", "53"] * 40
    scored = pool.score([([text], EXAMPLE) for text in texts])
    assert [s.reward for s in scored] == [1.0, 0.0, 1.0, 0.0] * 40
    assert scored[0].parts == {"correct": 1.0}
    process = pool._workers[0].process
    pool.close()
    assert process.poll() is not None


def test_threads_that_score_at_once_get_their_own() -> None:
    """As an evaluation does while conversations are drawn ahead."""
    pool = RewardPool(TaskConfig(), RewardConfig())

    def score(text: str) -> list[float | None]:
        return [scored.reward for _ in range(20) for scored in pool.score([([text], EXAMPLE)] * 50)]

    with ThreadPoolExecutor(2) as threads:
        right, wrong = threads.map(score, ["052", "53"])
    pool.close()
    assert right == [1.0] * 1000 and wrong == [0.0] * 1000


def test_a_hang_is_killed_and_costs_one_reward(pool: RewardPool) -> None:
    began = time.monotonic()
    pids = {worker.process.pid for worker in pool._workers}
    scored = pool.score([([text], EXAMPLE) for text in ["fine"] * 10 + ["hang"] + ["fine"] * 10])
    assert [s.reward for s in scored] == [1.0] * 10 + [None] + [1.0] * 10
    assert "took longer than reward.seconds=4" in scored[10].why
    assert pool.killed == 1 and time.monotonic() - began < 60
    gone = pids - {worker.process.pid for worker in pool._workers}
    assert len(gone) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(gone.pop(), 0)
    assert pool.score([(["fine"], EXAMPLE)])[0].reward == 1.0, "the slot works again"


def test_whatever_a_check_does_is_survived_and_said(pool: RewardPool) -> None:
    texts = ["crash", "raise", "none", "nan", "text", "parts", "print", "x" * 200_000]
    scored = pool.score([([text], EXAMPLE) for text in texts])
    assert [s.reward for s in scored] == [None] * 5 + [1.5, 1.0, 1.0]
    for s, why in zip(
        scored, ("exit code 3", "ValueError: broken on purpose", "returned None", "is nan", "could not"), strict=False
    ):
        assert why in s.why
    assert scored[5].parts == {"a": 1.0, "b": 0.5}


def test_too_many_failures_end_the_run_with_the_commonest_reason() -> None:
    pool = RewardPool(TaskConfig(), RewardConfig(function=FUNCTION, failure_limit=0.25))
    assert pool.score([(["raise"], EXAMPLE)] + [(["fine"], EXAMPLE)] * 3)[0].reward is None
    with pytest.raises(LowbitError, match=r"3 of 4 checks gave no reward.*2 times: ValueError: broken on purpose"):
        pool.score([([text], EXAMPLE) for text in ("raise", "raise", "none", "fine")])
    pool.close()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nope", "write package.module:function"),
        ("no_such_module:f", "cannot be imported .ModuleNotFoundError"),
        ("rewarding:nope", "cannot be imported .AttributeError"),
        ("rewarding:os", "is no function"),
    ],
)
def test_a_function_that_is_not_there(function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardPool(TaskConfig(), RewardConfig(function=function))
