"""Rewards from processes of their own, with a hard deadline.

A check may hang (a parser, a simplifier, code from a model), crash, or exhaust its process: none of that may stop a
run, and a thread cannot be stopped. So each worker is a process (`worker.py`) with a pipe; the deadline of a check runs
from the moment its worker began with it; one that misses it is killed with everything it started, replaced, and gives
no reward. Several conversations wait in a worker's pipe, so that a check costs no round trip; those behind the one that
hung go to another worker.

A conversation without a reward is excluded from its group and counted. When too many are, the run stops with the
commonest reason: a broken check teaches nothing, and does so quietly.
"""

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Lock

from lowbit.configs.schema_rl import RewardConfig, TaskConfig
from lowbit.errors import ConfigError, LowbitError
from lowbit.rl.tasks.base import Example

logger = logging.getLogger("lowbit")

AHEAD_BYTES = 32_768
"""What a worker's pipe holds ahead of its work; less than a pipe takes, so that writing never waits for a check."""
START_SECONDS = 120.0
"""Longest start of a worker, imports included."""


@dataclass(frozen=True)
class Scored:
    """What became of one check."""

    parts: dict[str, float] | None
    """Reward by parts; None: there is none."""
    why: str = ""
    """Then, why."""

    @property
    def reward(self) -> float | None:
        """Sum of the parts."""
        return None if self.parts is None else sum(self.parts.values())


class _Worker:
    def __init__(self, task: TaskConfig, function: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lowbit.rl.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.waiting: deque[int] = deque()
        """Numbers of the conversations in its pipe, the one it works on first."""
        self.sizes: deque[int] = deque()
        """Their bytes."""
        self.since = 0.0
        self._buffer = b""
        self.send({"task": asdict(task), "function": function})
        self.flush()

    def send(self, message: object) -> int:
        """Put a line on its way, which goes with the next `flush`; its bytes."""
        assert self.process.stdin is not None
        line = json.dumps(message).encode() + b"\n"
        with suppress(BrokenPipeError):  # it died: noticed when its pipe is read
            self.process.stdin.write(line)
        return len(line)

    def flush(self) -> None:
        """Send what is on its way."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.flush()

    def done(self) -> int:
        """Number of the conversation that it has finished with, or never will."""
        self.since = time.monotonic()
        self.sizes.popleft()
        return self.waiting.popleft()

    @property
    def pipe(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read(self) -> list[dict[str, object]] | None:
        """Whole lines that have come; None at the end of the pipe."""
        data = os.read(self.pipe, 1 << 16)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class RewardPool:
    """Checks conversations; `close` it."""

    def __init__(self, task: TaskConfig, config: RewardConfig) -> None:
        """Starts the workers and waits until they are ready.

        Raises: ConfigError, with the worker's own words, when the check cannot be loaded.
        """
        self._task, self._config = task, config
        self._seen: set[str] = set()
        self._one = Lock()
        """An evaluation and the thread that draws ahead share the workers."""
        self.killed = 0
        """Workers that were killed for a check that took too long."""
        self._workers: list[_Worker] = []
        try:
            for _ in range(config.workers):
                self._workers.append(_Worker(task, config.function))
            for worker in self._workers:
                _await_ready(worker)
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[tuple[Sequence[str], Example]]) -> list[Scored]:
        """The rewards of conversations, given by the texts of the model's turns, in their order; one caller at a time.

        Raises: LowbitError when more than `reward.failure_limit` of them have none.
        """
        with self._one:
            found: dict[int, Scored] = {}
            queue = deque(range(len(items)))
            while len(found) < len(items):
                for worker in self._workers:
                    self._feed(worker, queue, items)
                self._listen(found, queue)
            scored = [found[i] for i in range(len(items))]
            self._judge(scored)
        return scored

    def _feed(self, worker: _Worker, queue: "deque[int]", items: Sequence[tuple[Sequence[str], Example]]) -> None:
        while queue and (not worker.waiting or sum(worker.sizes) < AHEAD_BYTES // 2):
            number = queue.popleft()
            if not worker.waiting:
                worker.since = time.monotonic()
            turns, example = items[number]
            worker.waiting.append(number)
            worker.sizes.append(worker.send({"turns": list(turns), "example": example.as_dict()}))
        worker.flush()

    def _listen(self, found: dict[int, Scored], queue: "deque[int]") -> None:
        """Take replies, until one comes or a deadline passes."""
        busy = [worker for worker in self._workers if worker.waiting]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.pipe, selectors.EVENT_READ, worker)
            deadline = min(worker.since for worker in busy) + self._config.seconds
            events = selector.select(max(0.0, deadline - time.monotonic()))
        for key, _ in events:
            worker = key.data
            replies = worker.read()
            if replies is None:
                code = worker.process.wait()
                self._replace(worker, found, queue, f"the check ended its process (exit code {code})")
                continue
            for reply in replies:
                found[worker.done()] = self._taken(reply)
        now = time.monotonic()
        for worker in busy:
            if worker.waiting and now - worker.since > self._config.seconds:
                self.killed += 1
                why = f"the check took longer than reward.seconds={self._config.seconds:g} and was killed"
                self._replace(worker, found, queue, why)

    def _taken(self, reply: dict[str, object]) -> Scored:
        parts, why = reply["parts"], str(reply["why"])
        if parts is None:
            kind = why.partition(":")[0]
            if kind not in self._seen:
                self._seen.add(kind)
                logger.warning("a reward is missing: %s%s", why, f"\n{reply['trace']}" if "trace" in reply else "")
            return Scored(None, why)
        assert isinstance(parts, dict)
        return Scored({str(name): float(value) for name, value in parts.items()})

    def _replace(self, worker: _Worker, found: dict[int, Scored], queue: "deque[int]", why: str) -> None:
        """The first in its pipe has no reward; those behind it are checked elsewhere; a new worker takes its place."""
        found[worker.done()] = self._taken({"parts": None, "why": why})
        queue.extendleft(reversed(worker.waiting))
        worker.kill()
        new = _Worker(self._task, self._config.function)
        self._workers[self._workers.index(worker)] = new
        _await_ready(new)

    def _judge(self, scored: Sequence[Scored]) -> None:
        missing = [s.why for s in scored if s.parts is None]
        if len(missing) > self._config.failure_limit * len(scored):
            why, count = Counter(missing).most_common(1)[0]
            raise LowbitError(
                f"{len(missing)} of {len(scored)} checks gave no reward, more than "
                f"reward.failure_limit={self._config.failure_limit:g}; {count} times: {why}"
            )

    def close(self) -> None:
        """End the workers; safe to call twice."""
        for worker in self._workers:
            worker.kill()
        self._workers = []


def _await_ready(worker: _Worker) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(worker.pipe, selectors.EVENT_READ)
        deadline = time.monotonic() + START_SECONDS
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                worker.kill()
                raise LowbitError(f"a reward worker did not start within {START_SECONDS:g} seconds")
            lines = worker.read()
            if lines is None:
                raise LowbitError("a reward worker ended while it started: its error is above")
            if lines:
                if not lines[0]["ready"]:
                    raise ConfigError(str(lines[0]["why"]))
                return
