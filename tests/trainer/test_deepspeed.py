"""What one process can say of several: variables, devices, versions, worlds, and the verdicts of the watch."""

import re
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch.distributed import HashStore

from lowbit.comm.collective import Work
from lowbit.comm.deepspeed import check_version, zero_config
from lowbit.configs.schema import (
    BatchConfig,
    BatchWarmupConfig,
    CommConfig,
    CommKind,
    EngineConfig,
    EngineKind,
    RunConfig,
)
from lowbit.configs.validate import check_world, validate
from lowbit.errors import ConfigError, DataError, RankError
from lowbit.trainer import distributed, watch
from lowbit.trainer.distributed import ALONE, Ranks
from lowbit.trainer.launch import Place, local_device
from lowbit.trainer.watch import Watch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_launchers_variables() -> None:
    assert Place.of({}) == Place()
    assert Place.of(TORCHRUN) == Place(5, 8, 1, 4, "node0", 29500, True, "2")
    deepspeed = {k: v for k, v in TORCHRUN.items() if not k.startswith("TORCHELASTIC") and k != "LOCAL_WORLD_SIZE"}
    assert Place.of(deepspeed | {"LOCAL_SIZE": "4"}) == Place(5, 8, 1, 4, "node0", 29500, False, "0")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8 .*MASTER_PORT.*start them with torchrun"):
        Place.of({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"})


def test_each_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(1, 4, 1, 4)
    assert local_device("cpu", place) == torch.device("cpu")
    with pytest.raises(ConfigError, match="device=cuda:1 with 4 processes on this machine"):
        local_device("cuda:1", place)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="4 processes on a machine with 2 GPUs: start --nproc_per_node=2"):
        local_device("auto", place)


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9", "0.19.12+abc"])
def test_known_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.19.7", "0.18.0", "0.20.0", "1.0.0"])
def test_unknown_versions(version: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"deepspeed {re.escape(version)} is installed.*pip install deepspeed==0.19.8"
    ):
        check_version(version)


def test_worlds_that_cannot_share_a_batch() -> None:
    config = RunConfig(engine=EngineConfig(kind=EngineKind.deepspeed), batch=BatchConfig(sequences=16, micro_batch=4))
    for world in (1, 2, 4):
        check_world(config, world)
    with pytest.raises(ConfigError, match=r"3 processes cannot share .* batch.sequences=12 would work"):
        check_world(config, 3)
    with pytest.raises(ConfigError, match=r"8 processes .*batch.sequences=32 or batch.micro_batch=2 would work"):
        check_world(config, 8)
    warmup = replace(config, batch=replace(config.batch, warmup=[BatchWarmupConfig(until_tokens=9, sequences=4)]))
    with pytest.raises(ConfigError, match=r"batch.warmup.0.sequences=4 .*2 processes"):
        check_world(warmup, 2)
    with pytest.raises(ConfigError, match=r"engine.kind=local with 2 processes"):
        check_world(replace(config, engine=EngineConfig()), 2)


def test_codes_need_somebody_to_send_to() -> None:
    config = RunConfig(max_steps=1, comm=CommConfig(kind=CommKind.sq48))
    with pytest.raises(ConfigError, match=r"comm.kind=sq48 engine.kind=local: .*engine=deepspeed"):
        validate(config)


def test_settings_of_deepspeed() -> None:
    for stage in range(4):
        config = zero_config(stage, 1000, 32, overlap=False)
        assert config["gradient_clipping"] == 0.0 and "bf16" not in config and "optimizer" not in config
        assert (config.get("gradient_allreduce_op") == "sum") == (stage < 3)


def test_one_process_agrees_with_itself() -> None:
    assert ALONE.sum([1, 2.5]) == [1.0, 2.5] and ALONE.gather("a") == ["a"] and ALONE.share({"a": 1}) == {"a": 1}
    assert ALONE.first_does(lambda: 3) == 3 and ALONE.together(lambda: 4) == 4


def test_what_rank_0_does_reaches_the_others_with_its_errors() -> None:
    """Two ranks take turns in one process: rank 0 posts, rank 1 reads."""
    board = HashStore()
    first, second = (Ranks(rank, 2, board=board) for rank in (0, 1))
    assert first.first_does(lambda: 3) == 3 and second.first_does(lambda: 1 / 0) is None
    with pytest.raises(DataError, match=r"^no text$"):
        first.first_does(_fail)
    with pytest.raises(DataError, match=r"^rank 0: no text$"):
        second.first_does(_fail)
    assert first.share([1]) == second.share([2]) == [1]


def test_a_rank_that_fails_does_not_wait_for_one_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other is in a collective of the same work and posts nothing."""
    monkeypatch.setattr(distributed, "ALIKE_SECONDS", 0.1)
    first, second = (Ranks(rank, 2, board=board) for board in [HashStore()] for rank in (0, 1))
    with pytest.raises(DataError, match=r"^no text$"):
        first.together(_fail)
    with pytest.raises(DataError, match=r"^rank 0: no text$"):
        second.together(lambda: 3)


class Lost:
    """A lookout that has lost a rank."""

    tolerant = True

    def __init__(self, message: str) -> None:
        self.message = message

    def check(self) -> None:
        raise RankError(self.message)

    def move(self, doing: str, patient: bool) -> None:
        """Nobody reads it."""


def test_work_that_posts_itself_does_not_mix_its_posts_with_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fails before the second's work gathers something: nobody takes the failure for what was gathered."""
    monkeypatch.setattr(distributed, "ALIKE_SECONDS", 0.1)
    first, second = (Ranks(rank, 2, board=board) for board in [HashStore()] for rank in (0, 1))
    with pytest.raises(DataError, match=r"^no text$"):
        first.together(_fail)

    second.lookout = Lost("rank 0 failed: no text")
    with pytest.raises(RankError, match="rank 0 failed"):
        second.together(lambda: second.gather(1))


def test_a_rank_that_fails_says_why_whatever_becomes_of_others() -> None:
    alone = Ranks(0, 2, board=HashStore(), lookout=Lost("rank 1 died"))
    with pytest.raises(DataError, match="no text"):
        alone.together(_fail)
    with pytest.raises(RankError, match="rank 1 died"):
        alone.together(lambda: 3)


def test_who_runs_the_store_stays_until_others_know() -> None:
    first, second = watches()
    first._look()
    begun = time.monotonic()
    first.linger()
    assert time.monotonic() - begun > 2.5
    second.explain(DataError("alike"))
    first._look()
    begun = time.monotonic()
    first.linger()
    assert time.monotonic() - begun < 0.5


def test_who_died_first_is_named_when_the_store_is_gone_too() -> None:
    """Rank 0 ends for a rank that has died, and takes the store along before another has looked."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for who, expected in (
        (1, r"^rank 1 \(process \d+ on .*\) died while it was at step 3$"),
        (0, "the job's store is gone"),
    ):
        store = HashStore()
        three = [Watch(store, rank, 3, 60) for rank in range(3)]
        for w in three:
            w.move("step 3", False)
            w._post()
        three[2]._look()
        three[2]._seen[who].beat.pid = dead.pid
        three[2]._blame_the_dead()
        assert re.search(expected, str(three[2].failure)), three[2].failure


def _fail() -> None:
    raise DataError("no text")


def watches(patience: float = 60) -> list[Watch]:
    """Two ranks that share a store and have posted once."""
    store = HashStore()
    pair = [Watch(store, rank, 2, patience) for rank in (0, 1)]
    for w in pair:
        w._post()
    return pair


def test_the_watch_is_content_while_all_live() -> None:
    first, second = watches()
    first._look()
    second._look()
    assert first.failure is None and second.failure is None
    first.check()


def test_the_watch_passes_on_what_another_rank_died_of() -> None:
    first, second = watches()
    error = ZeroDivisionError("oops")
    assert second.explain(error) is error
    first._look()
    assert first.failure is not None and "rank 1 (process " in first.failure and "oops" in first.failure
    with pytest.raises(RankError, match="failed: ZeroDivisionError: oops"):
        first.check()
    for echo in (RuntimeError("Connection closed by peer"), RankError("gradient exchange: rank 3 did not answer")):
        assert str(first.explain(echo)) == first.failure


def test_ranks_that_an_error_ends_are_said_to_be_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the watch, which looks for its cause: a collective that no rank gets out of times out on each."""
    monkeypatch.setattr(watch, "BROKEN_SECONDS", 0.0)
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.0)
    first, second = watches(patience=30)
    with pytest.raises(RuntimeError) as raised:
        ALONE.first_does(_time_out)
    first._look()
    for w in (second, first):
        w.move("step 3", False)
        w._ended = raised.value.__traceback__  # as `explain` begins
        w._post()
    first._look()
    found = first.explain(raised.value)
    assert str(found).count("at step 3, distributed.py:") == 2 and "explain" not in str(found), found
    assert "no rank moves, for 60 s" in str(found)


def _time_out() -> None:
    raise RuntimeError("Timed out waiting 120000ms for send operation to complete")


def test_the_watch_notices_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.05)
    first, second = watches()  # each takes the limit when it is made
    second._beat.machine = "another"
    second._post()
    first._look()
    assert first.failure is None
    time.sleep(0.1)
    first._look()
    assert first.failure is not None and "rank 1" in first.failure and "has not been heard of" in first.failure


def test_the_watch_names_the_one_that_hangs() -> None:
    first, second = watches(patience=0.05)
    for _ in range(2):
        first.move("step 2", False)
        first._post()
    second.move("step 1", False)
    second._post()
    first._look()
    assert first.failure is None
    time.sleep(0.1)
    first._post()
    second._post()
    first._look()
    assert first.failure is not None and first.failure.startswith("rank 1 (") and "at step 1" in first.failure
    assert "hangs" in first.failure


def test_a_rank_that_waits_for_an_exchange_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are as far; one waits in the middle of a backward pass, where a bucket of gradients is under way."""
    first, second = watches(patience=0.05)
    exchange = Future[None]()
    waiter = threading.Thread(target=Work(exchange).wait)
    waiter.start()
    monkeypatch.setattr(first, "_main", waiter.ident)
    for w in (first, second):
        w.move("step 2", False)
    for _ in range(2):
        for w in (first, second):
            w._post()
        second._look()
        time.sleep(0.1)
    exchange.set_result(None)
    waiter.join()
    assert second.failure is not None and second.failure.startswith("rank 1 (") and "hangs" in second.failure


def test_the_watch_keeps_nothing_of_the_main_thread_alive() -> None:
    """Neither in the post nor while it is on its way: what a function held is gone when it has returned."""
    held: list[weakref.ref[torch.Tensor]] = []

    class SlowStore:
        def set(self, *_: str) -> None:
            posting.set()
            done.wait(10)

    def function() -> None:
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor))
        thread.start()
        posting.wait(10)

    posting, done = threading.Event(), threading.Event()
    slow = Watch(cast(HashStore, SlowStore()), 0, 2, 60)
    thread = threading.Thread(target=slow._post)
    function()
    assert held[0]() is None
    done.set()
    thread.join()
    assert "test_deepspeed.py" in slow._beat.at or "threading.py" in slow._beat.at


def test_the_watch_is_patient_where_it_was_told_to_be() -> None:
    first, second = watches(patience=0.01)
    first.move("step 2", False)
    second.move("evaluation", True)
    for _ in range(2):
        first._post()
        second._post()
        first._look()
        time.sleep(0.05)
    assert first.failure is None


def test_a_finished_rank_is_not_missed() -> None:
    first, second = watches()
    second.finish()
    second._beat.failed = "late"
    second._post()
    first._look()
    assert first.failure is None
