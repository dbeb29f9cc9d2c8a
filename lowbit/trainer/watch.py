"""Ranks watch over each other, so that one that dies or hangs ends the job with an error that names it.

A collective operation that one rank never enters keeps the others waiting for good, without a word. Therefore a thread
on every rank posts once a second that the process lives and where its main thread is, and reads the others' posts:

    failed   a rank's own error ended it: it says so in its last post
    died     its process is gone (seen at once on the same machine), or its posts stop for `SILENT_SECONDS`, or for
             `BROKEN_SECONDS` when a connection has broken
    hangs    no rank has moved on for `engine.rank_timeout_seconds`, and this one is behind the others or does not wait
             for anybody

"Moved on" is a count that the training loop raises at each micro-batch. Before the first step, while rank 0 does
something alone (packs data, writes a checkpoint) and during evaluation, a rank may take as long as it lives.

The thread tells the main thread, which gets an error from its collective as soon as a connection breaks. One that
stays stuck (NCCL waits on the GPU and raises nothing) is ended from here `GRACE_SECONDS` later.
"""

import json
import os
import platform
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lowbit.errors import EXIT_FAILED, LowbitError, RankError

BEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0
"""A rank that posted nothing for so long is dead, or its machine is."""
BROKEN_SECONDS = 15.0
"""The same once a connection has broken."""
GRACE_SECONDS = 5.0
WAITING_IN = ("torch/distributed/", "lowbit/trainer/distributed.py", "lowbit/comm/collective.py")
"""Files that are on the stack of a main thread that waits for other ranks."""


class _Place(NamedTuple):
    """A place in the program, without its frame, which is not held longer than it takes to read: who holds another
    thread's frame when its function returns frees that function's variables."""

    file: str
    line: int
    function: str

    @classmethod
    def of(cls, frame: FrameType, line: int) -> "_Place":
        return cls(frame.f_code.co_filename, line, frame.f_code.co_name)


@dataclass
class Beat:
    """What a rank posts about itself."""

    host: str
    machine: str
    """Equal only within one machine and one space of process numbers."""
    pid: int
    count: int = 0
    """Posts so far."""
    moves: int = 0
    """How often the main thread has said that it moved on."""
    doing: str = "starting"
    tolerant: bool = True
    """Whether all ranks may wait for this one without limit."""
    waiting: bool = False
    """Whether the main thread waits for others."""
    at: str = ""
    """Where in the program the main thread is."""
    failed: str | None = None
    """The error that ended it."""
    finished: bool = False

    @property
    def process(self) -> str:
        """For people: which process this is."""
        return f"process {self.pid} on {self.host}"


@dataclass
class _Seen:
    """The last post of a rank, and when it last changed by this process's clock."""

    beat: Beat
    alive: float
    moved: float


class Watch:
    """This rank's side: its posts, and what it knows of the others."""

    def __init__(self, store: Store, rank: int, world: int, patience: float) -> None:
        self.failure: str | None = None
        """Why the job cannot go on, naming the rank that is to blame."""
        self._store = store
        self._rank = rank
        self._world = world
        self._patience = patience
        self._interval = max(BEAT_SECONDS, world / 64)
        self._beat = Beat(platform.node(), _machine(), os.getpid())
        self._seen: dict[int, _Seen] = {}
        self._stop = threading.Event()
        self._found = threading.Event()
        self._silence = SILENT_SECONDS
        self._post_lock = threading.Lock()
        self._main = threading.main_thread().ident
        self._ended: TracebackType | None = None  # of the error that ends the main thread
        self._thread = threading.Thread(target=self._run, name="lowbit-watch", daemon=True)

    # For the main thread ------------------------------------------------------------------------------------------

    @property
    def tolerant(self) -> bool:
        """Whether others may wait for this rank without limit; see `distributed.Lookout`."""
        return self._beat.tolerant

    @tolerant.setter
    def tolerant(self, value: bool) -> None:
        self._beat.tolerant = value

    def move(self, doing: str, patient: bool) -> None:
        """The main thread begins with `doing`; see `distributed.Lookout`."""
        self._beat.doing = doing
        self._beat.tolerant = patient
        self._beat.moves += 1

    def start(self) -> None:
        """Begin to post and to watch."""
        self._post()
        self._thread.start()

    def check(self) -> None:
        """Raise RankError when another rank has died, failed or hangs."""
        if self.failure is not None:
            raise RankError(self.failure)

    def explain(self, error: BaseException) -> BaseException:
        """What to raise in place of an `error` that ends this rank: the other rank's fate, if that is its cause.

        An error of this rank's own is told to the others.
        """
        self._ended = error.__traceback__
        if isinstance(error, RankError) or (not isinstance(error, LowbitError) and self._from_others(error)):
            self._silence = min(self._silence, BROKEN_SECONDS)
            self._found.wait(BROKEN_SECONDS + 3 * BEAT_SECONDS)
            if self.failure is None and "imed out" in str(error):  # a collective's own limit, in a patient phase
                self._blame_the_late(2 * self._patience)
            if self.failure is not None:
                return RankError(self.failure)
            if isinstance(error, RankError):  # whose message did not come, which may have waited for another's
                return error
        text = str(error) if isinstance(error, LowbitError) else f"{type(error).__name__}: {error}"
        self._beat.failed = " ".join(text.split())[:500]
        self._post()
        return error

    def _from_others(self, error: BaseException) -> bool:
        """Whether the error may be the echo of another rank's end: a broken connection, or its launcher's signal."""
        return self.failure is not None or isinstance(error, (RuntimeError, KeyboardInterrupt, dist.DistError))

    def finish(self) -> None:
        """All is done: this rank's silence is no death from here on."""
        self._beat.finished = True
        self._post()

    def linger(self) -> None:
        """Who runs the store and ends by an error: until the others have ended as well, or had time to read why."""
        until = time.monotonic() + 3 * self._interval
        while time.monotonic() < until:
            others = [seen.beat for rank, seen in list(self._seen.items()) if rank != self._rank]
            if len(others) == self._world - 1 and all(beat.failed or beat.finished for beat in others):
                return
            time.sleep(BEAT_SECONDS / 20)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * BEAT_SECONDS)
        self._ended = None  # with everything that the functions on the way held

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._post()
                self._look()
            except (RuntimeError, dist.DistError):  # the store is gone, and with it the process that ran it
                self._blame_the_dead()
            if self.failure is not None:
                break
        if self.failure is None:
            return
        awake = self._ended is not None  # the main thread is on its way out, in `explain`
        if not self._stop.wait(GRACE_SECONDS + BROKEN_SECONDS * awake):
            print(f"lowbit: error (rank {self._rank}): {self.failure}", file=sys.stderr, flush=True)
            os._exit(EXIT_FAILED)

    def _post(self) -> None:
        with self._post_lock:
            stack = self._stack()
            self._beat.count += 1
            self._beat.waiting = any(part in place.file for place in stack for part in WAITING_IN)
            self._beat.at = _describe(stack)
            self._store.set(f"beat/{self._rank}", json.dumps(asdict(self._beat)))

    def _stack(self) -> list[_Place]:
        """Where the main thread is, innermost first; once an error ends it, where that was raised."""
        if self._ended is not None:
            return [_Place.of(*at) for at in traceback.walk_tb(self._ended)][::-1]
        frame = sys._current_frames().get(self._main or 0)
        return [] if frame is None else [_Place.of(*at) for at in traceback.walk_stack(frame)]

    def _look(self) -> None:
        """Read the others' posts and judge."""
        now = time.monotonic()
        for rank in range(self._world):
            self._update(rank, now)
        for rank, seen in self._seen.items():
            if rank != self._rank and not seen.beat.finished and (end := self._end_of(seen, now)):
                self._blame(f"rank {rank} ({seen.beat.process}) {end}")
                return
        self._judge_progress(now)

    def _end_of(self, seen: _Seen, now: float) -> str | None:
        """How another rank ended; None while it lives."""
        beat = seen.beat
        if beat.failed is not None:
            return f"failed: {beat.failed}"
        if self._gone(beat):
            return f"died while it was at {beat.doing}"
        if now - seen.alive > self._silence:
            return f"has not been heard of for {now - seen.alive:.0f} s; it was at {beat.doing}"
        return None

    def _update(self, rank: int, now: float) -> None:
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return
        beat = Beat(**json.loads(self._store.get(key)))
        seen = self._seen.get(rank)
        if seen is None:
            self._seen[rank] = _Seen(beat, now, now)
            return
        seen.alive = now if beat.count != seen.beat.count else seen.alive
        seen.moved = now if beat.moves != seen.beat.moves else seen.moved
        seen.beat = beat

    def _gone(self, beat: Beat) -> bool:
        """Whether a process of this machine no longer runs."""
        if not beat.machine or beat.machine != self._beat.machine:
            return False
        try:
            return Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            return Path("/proc/self").exists()
        except OSError:
            return False

    def _judge_progress(self, now: float) -> None:
        """Find out who hangs, when nobody has moved on for too long."""
        everyone = list(self._seen.items())
        if len(everyone) < self._world or any(s.beat.tolerant or s.beat.finished for _, s in everyone):
            return
        if now - max(seen.moved for _, seen in everyone) >= self._patience:
            self._blame_the_late(self._patience)

    def _blame_the_late(self, seconds: float) -> None:
        """Name the ranks that are behind the others, or else those that do not wait for anybody."""
        everyone = list(self._seen.items())
        if not everyone:  # none has been looked at yet
            return
        behind = min(seen.beat.moves for _, seen in everyone)
        late = [(rank, seen) for rank, seen in everyone if seen.beat.moves == behind]
        if len(late) == len(everyone):
            busy = [(rank, seen) for rank, seen in late if not seen.beat.waiting]
            late = busy if 0 < len(busy) < len(everyone) else late
        names = "; ".join(
            f"rank {rank} ({seen.beat.process}) at {seen.beat.doing}, {seen.beat.at}" for rank, seen in late[:4]
        )
        which = "no rank moves" if len(late) == len(everyone) else "it hangs and the others wait"
        self._blame(f"{names}: {which}, for {seconds:g} s now (engine.rank_timeout_seconds={self._patience:g})")

    def _blame_the_dead(self) -> None:
        """Name whom rank 0, which ran the store, has ended for, if that process was of this machine; else rank 0."""
        for rank, seen in self._seen.items():
            if rank not in (0, self._rank) and not seen.beat.finished and self._gone(seen.beat):
                self._blame(f"rank {rank} ({seen.beat.process}) died while it was at {seen.beat.doing}")
        self._blame("the job's store is gone: rank 0's process or machine has died")

    def _blame(self, failure: str) -> None:
        self.failure = self.failure or failure
        self._found.set()


def _describe(stack: list[_Place]) -> str:
    """The innermost place in this package, else the innermost place at all."""
    if not stack:
        return "?"
    place = next((place for place in stack if "/lowbit/" in place.file), stack[0])
    return f"{Path(place.file).name}:{place.line} {place.function}"


def _machine() -> str:
    """This boot of this machine and the namespace that process numbers count in; empty where there is neither."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
