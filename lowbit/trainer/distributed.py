"""Several processes as one job: who is who, and what they agree on besides gradients.

Two channels, apart from the one that carries gradients:

    board   a key-value store (PyTorch's TCPStore). Rank 0 does what must be done once (prepare data, hold the run's
            lock, write checkpoints) and posts how it went; the others wait for the post. An error is posted too, so
            that every rank raises it: nobody waits in a collective for a rank that has left.
    group   a gloo group on the CPU for a few numbers a step: tokens, losses, whether a signal came. It works beside
            NCCL and never waits for the GPU.

Everything here is called by all ranks in the same order. One process has neither channel, and every call is immediate.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lowbit import errors
from lowbit.errors import Interrupted, LowbitError, RankError

T = TypeVar("T")

POLL_SECONDS = 0.05
ALIKE_SECONDS = 15.0
"""How much longer than one rank another may take to fail alike; later it may wait in a collective for the first."""


class Lookout(Protocol):
    """Knows whether other ranks still live (`trainer.watch.Watch`)."""

    def check(self) -> None:
        """Raise LowbitError, naming the rank, when one has died or failed."""
        ...

    def move(self, doing: str, patient: bool) -> None:
        """This rank begins with `doing`; `patient`: which may take as long as it likes."""
        ...

    @property
    def tolerant(self) -> bool:
        """Settable: while true, a rank that is alive may take as long as it likes."""
        ...

    @tolerant.setter
    def tolerant(self, value: bool) -> None: ...


class Ranks:
    """The processes of a job; `rank` is this one's number."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        local_rank: int = 0,
        local_world: int = 1,
        board: Store | None = None,
        group: dist.ProcessGroup | None = None,
        lookout: Lookout | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.local_rank = local_rank
        self.local_world = local_world
        self.group = group
        self.lookout = lookout
        self._board = board
        self._posts = 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def move(self, doing: str, patient: bool = False) -> None:
        """Say that this rank moves on, and to what: those that watch for a rank that hangs read it.

        `patient`: it may take as long as it likes, as everything does before the first step.
        """
        if self.lookout is not None:
            self.lookout.move(doing, patient)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums of host numbers over all ranks, FP64; the same bits on every rank."""
        if self.group is None:
            return [float(value) for value in values]
        total = torch.tensor([float(value) for value in values], dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return [float(value) for value in total]

    def first_does(self, work: Callable[[], T]) -> T | None:
        """Rank 0 does `work` while the others wait; its result there, None on the others.

        However long it takes. An error that rank 0 raises is raised on every rank.
        """
        if self._board is None:
            return work()
        result, outcome = _attempt(work, only=self.first)
        key = self._next_key()
        if self.first:
            self._post(key, outcome.as_dict())
        else:
            outcome = _Outcome.of(self._read(key))
        outcome.require(f"rank 0: {outcome.message}" if not self.first else None)
        return result

    def share(self, value: T) -> T:
        """Rank 0's value, of JSON types, on every rank."""
        if self._board is None:
            return value
        key = self._next_key()
        if self.first:
            self._post(key, value)
            return value
        shared: T = self._read(key)
        return shared

    def gather(self, value: T) -> list[T]:
        """Every rank's value, of JSON types, in the order of ranks, on every rank."""
        return list(self._gather(self._next_key(), value))

    def _gather(self, key: str, value: T, until: float = math.inf) -> Iterator[T]:
        """The same, as far as they have come until then (by the monotonic clock)."""
        if self._board is None:
            yield value
            return
        self._post(f"{key}/{self.rank}", value)
        for rank in range(self.world):
            if not self._wait(f"{key}/{rank}", until):
                return
            yield json.loads(self._board.get(f"{key}/{rank}"))

    def together(self, work: Callable[[], T]) -> T:
        """Every rank does `work`; when one of them fails, all raise: its own error where it was, and told elsewhere.

        A rank that fails while others wait in a collective of `work` raises after `ALIKE_SECONDS`; `Watch` ends them.
        """
        key = self._next_key()  # before the work, which may post as well, and may end before it does
        result, outcome = _attempt(work)
        seconds = math.inf if outcome.error is None else ALIKE_SECONDS
        try:
            for rank, entry in enumerate(self._gather(key, outcome.as_dict(), time.monotonic() + seconds)):
                if rank != self.rank and not outcome.message:
                    theirs = _Outcome.of(entry)
                    theirs.require(f"rank {rank}: {theirs.message}")
        except RankError:  # of one that went down meanwhile, perhaps because of this one
            if outcome.error is None:
                raise
        outcome.require(None)
        return result  # type: ignore[return-value]

    def beside(self, name: str, check: Callable[[], None]) -> "Ranks":
        """The same processes for a thread of its own, which is nobody's main thread on any of them.

        Its calls need not come in one order with this object's, and go over the board alone. While it waits for other
        ranks it calls `check`, which may raise; the death of a rank ends it, too.
        """
        return self if self._board is None else _Beside(self, PrefixStore(name, self._board), check)

    def _next_key(self) -> str:
        self._posts += 1
        return f"lowbit/post/{self._posts}"

    def _post(self, key: str, value: Any) -> None:
        assert self._board is not None
        self._board.set(key, json.dumps(value))

    def _read(self, key: str) -> Any:
        """Wait for a post and read it."""
        assert self._board is not None
        self._wait(key)
        return json.loads(self._board.get(key))

    def _wait(self, key: str, until: float = math.inf) -> bool:
        """Wait for a post, whether it came until then; ends with an error when a rank dies meanwhile."""
        assert self._board is not None
        patience = POLL_SECONDS / 16
        before = True
        if self.lookout is not None:
            before, self.lookout.tolerant = self.lookout.tolerant, True
        try:
            while not self._board.check([key]):
                if self.lookout is not None:
                    self.lookout.check()
                if time.monotonic() > until:
                    return False
                time.sleep(patience)
                patience = min(2 * patience, POLL_SECONDS)
            return True
        finally:
            if self.lookout is not None:
                self.lookout.tolerant = before


class _Beside(Ranks):
    """See `Ranks.beside`."""

    def __init__(self, ranks: Ranks, board: Store, check: Callable[[], None]) -> None:
        super().__init__(ranks.rank, ranks.world, ranks.local_rank, ranks.local_world, board)
        self.lookout = _Glance(ranks.lookout, check)

    def sum(self, values: Sequence[float]) -> list[float]:
        """See `Ranks.sum`."""
        return [math.fsum(column) for column in zip(*self.gather([float(value) for value in values]), strict=True)]


class _Glance:
    """A lookout for another thread, whose waiting says nothing of how the rank gets on."""

    tolerant = True

    def __init__(self, lookout: Lookout | None, check: Callable[[], None]) -> None:
        self._lookout, self._check = lookout, check

    def check(self) -> None:
        self._check()
        if self._lookout is not None:
            self._lookout.check()

    def move(self, doing: str, patient: bool) -> None:
        """Nothing that others read."""


class _Outcome:
    """How a piece of work ended, in a form that can be posted."""

    def __init__(self, kind: str = "", message: str = "", error: BaseException | None = None) -> None:
        self.kind = kind
        self.message = message
        self.error = error

    @classmethod
    def of(cls, entry: dict[str, str]) -> "_Outcome":
        return cls(entry["kind"], entry["message"])

    def as_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message}

    def require(self, message: str | None) -> None:
        """Raise the error, if there was one: this rank's own, or one of the same class that says `message`."""
        if self.error is not None:
            raise self.error
        if self.kind:
            raise getattr(errors, self.kind, LowbitError)(message or self.message)


def _attempt(work: Callable[[], T], only: bool = True) -> tuple[T | None, _Outcome]:
    """Do `work` (where `only` says so) and keep what it raises."""
    if not only:
        return None, _Outcome()
    try:
        return work(), _Outcome()
    except KeyboardInterrupt as error:
        return None, _Outcome(Interrupted.__name__, "interrupted", error)
    except BaseException as error:
        kind = type(error).__name__ if isinstance(error, LowbitError) else LowbitError.__name__
        message = str(error) if isinstance(error, LowbitError) else f"{type(error).__name__}: {error}"
        return None, _Outcome(kind, message or type(error).__name__, error)


ALONE = Ranks()
"""The one process of a job without others."""
