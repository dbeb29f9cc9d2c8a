"""The cache: what it holds, killed and resumed, made by several, damaged, and of something else."""

import errno
import hashlib
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lowbit.cli.distill import app
from lowbit.configs.schema import TokenizerConfig, TokenizerKind
from lowbit.configs.schema_distill import DistillConfig, Estimator
from lowbit.configs.stored import save_config
from lowbit.data.batch import Batch
from lowbit.data.dataset import Dataset, prepare_data
from lowbit.data.loader import SampleOrder
from lowbit.data.verified import STAMPS
from lowbit.distill import making, run, shards
from lowbit.distill.codec import decode
from lowbit.distill.inspect import rescore, statistics
from lowbit.distill.making import CacheMaker
from lowbit.distill.shards import MANIFEST, Cache, open_cache, read_manifest, token_checksums
from lowbit.distill.student import cache_digest
from lowbit.distill.teacher import Teacher, open_teacher
from lowbit.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from lowbit.trainer.exported import export, open_weights

Make = Callable[..., CacheMaker]
HELPER = Path(__file__).parent / "make_cache.py"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes but the times of verification."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != STAMPS}


def batch_of(dataset: Dataset, samples: list[int], seed: int = 1) -> Batch:
    return dataset.training_batch(*SampleOrder(dataset, seed).locate(np.array(samples, dtype=np.int64)))


def process(config: DistillConfig, folder: Path, *arguments: str) -> forked.Process:
    stored = folder.parent / f"{folder.name}.yaml"
    save_config(replace(config, cache=replace(config.cache, path=str(folder))), stored)
    printed = folder.parent / "printed"
    return forked.start([str(HELPER), str(stored), *arguments], folder.parent, os.environ, printed, printed)


def test_rows_are_the_teachers_distribution_of_the_next_token(
    maker: Make, teacher: Teacher, dataset: Dataset, tmp_path: Path
) -> None:
    """Exact entries and entropies against the teacher's own FP64 softmax, in any order; row t is for token t + 1."""
    cache = maker(tmp_path / "c", targets=24).make()
    assert (cache.samples, cache.length, len(cache.shards)) == (16, 32, 4)
    order = np.array([13, 2, 2, 9])
    packed = cache.read(order)
    got = decode(cache.layout, packed.words, packed.starts, cache.length)
    batch = batch_of(dataset, order.tolist())
    assert np.array_equal(packed.checksums, token_checksums(batch))
    logits = (teacher.hidden(batch) @ teacher.model.head_weight.t())[:, : teacher.model.vocab_size].double()
    p = torch.softmax(logits, dim=1).view(4, 32, -1)
    entropy = -(p * p.log()).sum(dim=2)
    assert (got.entropy - entropy).abs().max() <= 1 / 256 + 1e-6
    torch.testing.assert_close(got.weights.sum(dim=2), torch.ones(4, 32))
    likeliest = p.argmax(dim=2, keepdim=True)
    stored = (got.weights * (got.ids == likeliest)).sum(dim=2)
    peaked = p.amax(dim=2) > 0.3
    assert int(peaked.sum()) > 10
    assert (stored[peaked] / p.amax(dim=2)[peaked] - 1).abs().max() < 0.07
    # The rows belong to the tokens that follow: shifted by one they would fit the text much worse.
    q = torch.zeros_like(p).scatter_add_(2, got.ids, got.weights.double())
    right = q.gather(2, batch.targets[:, :, None]).mean()
    shifted = q[:, 1:].gather(2, batch.targets[:, :-1, None]).mean()
    same = q.gather(2, batch.tokens[:, :, None]).mean()
    assert right > 2 * shifted and right > 2 * same
    assert torch.equal(got.ids[1], got.ids[2])


def test_documents_are_kept_apart(maker: Make, dataset: Dataset, tmp_path: Path) -> None:
    """A row after a separator does not depend on the document before it."""
    m = maker(tmp_path / "c")
    eot = dataset.tokenizer.eot_id
    batch = next(b for i in range(16) if bool(((b := batch_of(dataset, [i, i + 1])).tokens[:, 8:24] == eot).any()))
    assert batch.visibility is not None
    row = int((batch.tokens[:, 8:24] == eot).any(dim=1).nonzero()[0])
    start = int((batch.tokens[row, 1:] == eot).nonzero()[0]) + 1
    other = batch.tokens.clone()
    other[row, :start] = (other[row, :start] + 1) % 200
    changed = Batch(other, batch.targets, batch.weights, batch.visibility, batch.valid_tokens)

    def ids(b: Batch) -> torch.Tensor:
        words, sizes, _ = m.rows(b, 0)
        return decode(m.layout, words.to(torch.int32), sizes.cumsum(0) - sizes, 32).ids[row]

    first, second = ids(batch), ids(changed)
    assert torch.equal(first[start:], second[start:]) and not torch.equal(first[:start], second[:start])


@pytest.mark.parametrize("estimator", Estimator)
def test_every_estimator_makes_a_cache(maker: Make, estimator: Estimator, tmp_path: Path) -> None:
    m = maker(tmp_path / "c", estimator=estimator, temperature=1.5)
    cache = m.make()
    assert cache.identity["estimator"] == estimator.value and cache.identity["temperature"] == 1.5
    packed = cache.read(np.arange(16))
    got = decode(cache.layout, packed.words, packed.starts, 32)
    assert int(got.ids.max()) < 257 and torch.isfinite(got.weights).all() and float(got.entropy.min()) > 0
    if estimator is not Estimator.gumbel:
        assert float(got.weights.sum(dim=2).max()) < 1 + 1e-5


def test_made_twice_the_bytes_are_the_same_and_another_seed_draws_anew(maker: Make, tmp_path: Path) -> None:
    maker(tmp_path / "a").make()
    maker(tmp_path / "b").make()
    maker(tmp_path / "c", seed=2).make()
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b and a.keys() == c.keys() == {MANIFEST, *(f"shard-{i:05d}.targets" for i in range(4))}
    assert a["shard-00000.targets"] != c["shard-00000.targets"]


@pytest.mark.dist
def test_killed_and_resumed_the_result_is_byte_identical(
    distillation: DistillConfig, maker: Make, tmp_path: Path
) -> None:
    """kill -9 while the third shard is half written; then again before the last; then to the end."""
    maker(tmp_path / "whole").make()
    folder = tmp_path / "killed"
    for shards_done in (2, 3):
        one = process(distillation, folder, str(shards_done - (2 if shards_done == 3 else 0)))
        assert one.wait() == -signal.SIGKILL
        assert len(list(folder.glob("shard-*.targets"))) == shards_done
        with pytest.raises(DataError, match=f"is not finished: {shards_done} of 4 shards are there; run the same"):
            open_cache(folder)
    first = (folder / "shard-00000.targets").stat().st_mtime_ns
    maker(folder).make()
    assert (folder / "shard-00000.targets").stat().st_mtime_ns == first, "what was there is kept"
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.slow
def test_four_processes_make_the_same_bytes_as_one(distillation: DistillConfig, maker: Make, tmp_path: Path) -> None:
    maker(tmp_path / "one", tokens=2048).make()
    config = replace(distillation, cache=replace(distillation.cache, tokens=2048))
    folder = tmp_path / "four"
    together = [process(config, folder) for _ in range(3)] + [process(config, folder, "1")]
    codes = [p.wait() for p in together]
    assert codes[:3] == [0, 0, 0] and codes[3] in (0, -signal.SIGKILL), (tmp_path / "printed").read_text()
    assert contents(folder) == contents(tmp_path / "one")
    open_cache(folder, verify=True)


def test_a_shard_edited_between_two_runs_is_made_again(
    distillation: DistillConfig, maker: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker(tmp_path / "whole").make()
    folder = tmp_path / "c"
    process(distillation, folder, "2").wait()
    path = folder / "shard-00001.targets"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    maker(folder).make()
    assert (
        "shard-00001.targets was edited or damaged: its SHA-256 is not the manifest's; it is made again" in caplog.text
    )
    assert "delete" not in caplog.text
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_full_disk_is_one_line_and_spoils_nothing(
    maker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker(tmp_path / "whole").make()
    folder, write, count = tmp_path / "c", shards.atomic_write, 0

    def full(path: Path, pieces: object, needed: int) -> None:
        nonlocal count
        count += path.suffix == ".targets"
        if count == 3:
            raise DataError(f"disk full while writing {path}; set data.cache_dir to a larger disk")
        write(path, pieces, needed)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "atomic_write", full)
    with pytest.raises(DataError, match=r"disk full .*shard-00002.targets; set cache.path to a larger disk"):
        maker(folder).make()
    monkeypatch.undo()
    assert maker(folder).make().samples == 16 and contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize(("nth", "left"), [(1, 16), (3, 16), (5, 16), (11, 8)])
def test_a_full_disk_says_what_is_still_to_be_written(
    nth: int, left: int, maker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all shards that are missing, not by the file that failed: a megabyte a sample here. It fails for the manifest,
    the first shard, its record, the third shard."""
    monkeypatch.setattr(making, "expected_bytes", lambda layout, samples, length, shards: samples * 1_000_000)
    real, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=rf"disk full while writing .*: about {left}.0 MB are needed there"):
        maker(tmp_path / "c").make()


# Length -------------------------------------------------------------------------------------------------------


def begun(maker: Make, folder: Path, shards: int, **settings: object) -> CacheMaker:
    """A cache of which so many shards are there."""
    m = maker(folder, **settings)
    m._begin()
    for number in range(shards):
        m._make_shard(number)
    m._loader.close()
    return m


@pytest.mark.parametrize(("tokens", "shards"), [(512, 2), (576, 5), (576, 3), (512, 0)])
def test_an_unfinished_cache_is_extended(maker: Make, tokens: int, shards: int, tmp_path: Path) -> None:
    """To more tokens than it was begun with; its last shard, if shorter (576: of 2 samples), is made again."""
    begun(maker, tmp_path / "c", shards, tokens=tokens)
    maker(tmp_path / "c", tokens=1024).make()
    maker(tmp_path / "whole", tokens=1024).make()
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def test_who_began_with_fewer_tokens_goes_along(maker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extended while another process makes its shorter last shard: that process finishes the longer cache."""
    early = begun(maker, tmp_path / "c", 4, tokens=576)
    maker(tmp_path / "c", tokens=1024)._begin()
    early._make_shard(4)
    monkeypatch.setattr(early, "_begin", lambda: False)  # it has begun long ago
    assert early.make().samples == 32
    maker(tmp_path / "whole", tokens=1024).make()
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def test_a_cache_finished_meanwhile_is_left_alone(maker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extended and finished between a slower process' look at a shard and its lock."""
    slow, real = begun(maker, tmp_path / "c", 4, tokens=576), making._claimed

    @contextmanager
    def late(path: Path, *rest: Any) -> Iterator[bool]:
        monkeypatch.setattr(making, "_claimed", real)
        maker(tmp_path / "c", tokens=1024).make()
        with real(path, *rest) as mine:
            yield mine

    monkeypatch.setattr(making, "_claimed", late)
    assert slow.make().samples == 32
    maker(tmp_path / "whole", tokens=1024).make()
    assert contents(tmp_path / "c") == contents(tmp_path / "whole"), "no lock is left, either"


def test_an_unfinished_cache_without_a_wish_is_finished_as_it_was_begun(
    distillation: DistillConfig, maker: Make, tmp_path: Path
) -> None:
    """cache.tokens=null: a student of more steps goes over it again."""
    m = begun(maker, tmp_path / "c", 1)
    settings = replace(distillation, cache=replace(m.config, tokens=None))
    for tokens in (2048, 128):
        other = CacheMaker(tmp_path / "c", settings, tokens, m.teacher, m.dataset)
        assert other.make().samples == 16


@pytest.mark.parametrize("finished", [False, True])
def test_another_length_names_the_setting_and_what_to_do(finished: bool, maker: Make, tmp_path: Path) -> None:
    m = begun(maker, tmp_path / "c", 1)
    if finished:
        m.make()
    message = (
        r"c holds another cache than configured \(cache.tokens=512 {}; else give another cache.path, or delete it\): "
        r"cache.tokens: 512 there, {} here"
    )
    for tokens in (256, 1024) if finished else (256,):
        takes = "takes it" if finished else "goes on with it"
        with pytest.raises(DataError, match=message.format(takes, tokens) + "$"):
            maker(tmp_path / "c", tokens=tokens).make()


def test_what_would_take_a_cache_is_named_only_if_it_would(maker: Make, tmp_path: Path) -> None:
    maker(tmp_path / "c", estimator=Estimator.topk).make()
    message = r"c holds another .* \(cache.estimator=topk takes it; else give .*\): cache.estimator: \"topk"
    with pytest.raises(DataError, match=message):
        maker(tmp_path / "c").make()
    m = maker(tmp_path / "c")
    m.identity["teacher"] = m.identity["teacher"] | {"digest": "f" * 64}
    with pytest.raises(DataError, match=r"configured \(give another cache.path, or delete it\): cache.estimator: "):
        m.make()


# A place that cannot be written -------------------------------------------------------------------------------


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in which nothing can be made, written or removed once `seal` is there."""
    place, opens, mkdir, unlink = tmp_path / "sealed", Path.open, Path.mkdir, Path.unlink

    def refused(path: Path) -> None:
        if path.is_relative_to(place) and (place / "seal").exists():
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    def opened(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if set(mode) & set("wax+"):
            refused(path)
        return opens(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", opened)
    for name, real in (("mkdir", mkdir), ("unlink", unlink)):
        monkeypatch.setattr(Path, name, lambda path, *a, real=real, **k: (refused(path), real(path, *a, **k))[1])
    return place


@pytest.mark.parametrize("stamped", [True, False])
def test_a_complete_cache_in_a_read_only_place_is_passed_over(
    distillation: DistillConfig, maker: Make, read_only: Path, tmp_path: Path, stamped: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "lowbit")
    maker(read_only / "c").make()
    if not stamped:
        (read_only / "c" / STAMPS).unlink()
    (read_only / "c.lock").unlink()
    (read_only / "seal").touch()
    before = contents(read_only / "c")
    config = replace(distillation, cache=replace(distillation.cache, path=str(read_only / "c")))
    assert run.cache(config, tmp_path / "run", torch.device("cpu")).samples == 16
    assert "c is complete already" in caplog.text
    assert ("cannot write" in caplog.text) != stamped
    assert run.train(config, tmp_path / "run").step == 6
    assert run.everything(config, tmp_path / "again").step == 6
    assert contents(read_only / "c") == before and not (read_only / "c.lock").exists()


def test_an_unfinished_cache_in_a_read_only_place_is_one_line(maker: Make, read_only: Path) -> None:
    begun(maker, read_only / "c", 1)
    (read_only / "seal").touch()
    with pytest.raises(
        DataError, match=r"cannot write .*: Read-only file system; choose another place with cache.path"
    ):
        maker(read_only / "c").make()


# Damage -------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(maker: Make, tmp_path: Path) -> Path:
    maker(tmp_path / "cache").make()
    return tmp_path / "cache"


def edit(folder: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_damage_is_found(made: Path) -> None:
    shard = made / "shard-00002.targets"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    with pytest.raises(DataError, match=r"shard-00002.targets is truncated or was changed: \d+ bytes, not \d+; delete"):
        open_cache(made)
    middle = len(whole) // 2
    shard.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(DataError, match=r"shard-00002.targets was edited or damaged: its SHA-256"):
        open_cache(made)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00002.targets is missing"):
        open_cache(made)
    shard.write_bytes(whole)  # copied back: another time, verified once
    said: list[str] = []
    open_cache(made, report=said.append)
    assert len(said) == 1 and "verifying" in said[0]
    open_cache(made, report=said.append)
    assert len(said) == 1
    open_cache(made, verify=True, report=said.append)
    assert len(said) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="x"), "is not of format lowbit.kdcache/1"),
        (lambda m: m.pop("identity"), "was edited or damaged: KeyError 'identity'"),
        (
            lambda m: m["identity"].update(estimator="magic"),
            "edited or damaged: identity.estimator=magic: expected",
        ),
        (
            lambda m: m["identity"].update(samples="many"),
            "edited or damaged: identity.samples=many: expected an int",
        ),
        (lambda m: m["shards"].pop(), "its shards do not hold 16 samples"),
        (lambda m: m["shards"].reverse(), "shards.0 is not of the samples that belong there"),
        (lambda m: m["shards"][0].pop("sha256"), "was edited or damaged: TypeError"),
        (
            lambda m: m["identity"].update(sequence_length=64),
            "ValueError identity is not the one that the cache was made",
        ),
        (lambda m: m["identity"].update(targets=7), "identity is not the one that the cache was made with"),
        (lambda m: m["identity"].update(estimator="topk"), "identity is not the one that the cache was made with"),
        (lambda m: m["identity"].update(temperature=1.01), "identity is not the one that the cache was made with"),
    ],
)
def test_an_edited_manifest_is_one_line(made: Path, change: Callable[[dict], None], message: str) -> None:  # type: ignore[type-arg]
    edit(made, change)
    with pytest.raises(DataError, match=message) as caught:
        open_cache(made).read(np.array([0]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep_time", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda b: b"",
        lambda b: b[:12],
        lambda b: b[:40],
        lambda b: b"X" + b[1:],
        lambda b: b[:8] + b"\xff\xff\xff\x7f" + b[12:],
        lambda b: b[:8] + b"\0\0\0\0" + b[12:],
        lambda b: b[:12] + b"\1\0\0\0" + b[16:],
        lambda b: b[:16] + b"\1" + b[17:],
        lambda b: b[:31] + b"\xff" + b[32:],
        lambda b: b[:48] + b"\xff" + b[49:],
        lambda b: b + b"x",
    ],
)
def test_a_damaged_header_is_one_line(made: Path, change: Callable[[bytes], bytes], keep_time: bool) -> None:
    """Whether it is found when the cache is opened or, changed afterwards or with its time put back, when it is read"""
    path = made / "shard-00001.targets"
    cache, whole, stat = open_cache(made), path.read_bytes(), path.stat()
    path.write_bytes(change(whole))
    if keep_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match=r"shard-00001.targets is damaged: its index does not fit; delete the file"):
        cache.read(np.arange(4, 8))
    with pytest.raises(DataError, match=r"shard-00001.targets (is|was) \w+") as caught:
        open_cache(made).read(np.arange(4, 8))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_not_to_be_deleted(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(made)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", denied)
    monkeypatch.setattr(Path, "read_text", denied)
    for act in (lambda: cache.read(np.array([0])), lambda: open_cache(made)):
        with pytest.raises(DataError, match=r"cannot read .*: Permission denied; make it readable, or give") as caught:
            act()
        assert "delete" not in str(caught.value) and "\n" not in str(caught.value)


REMOVED = object()
ODD = [REMOVED, None, -1, 0, 1e400, 10**30, "x", [], {}, [None], True, "../../x"]


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where everything in nested mappings and lists is, the inner ones before what holds them."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict | list):
            yield from fields(inner, (*path, key))
        yield (*path, key)


def test_any_field_of_a_manifest_may_hold_anything(made: Path) -> None:
    """A field that is lost or odd is one line, from whatever looks at the cache, or does not matter to it."""
    whole = json.loads((made / MANIFEST).read_text())
    plain = {key: whole[key] for key in whole if key != "made_with"}
    refused = 0
    for path in fields(plain):
        if path[:3] == ("identity", "teacher", "model") and path[3:] not in ((), ("layers",)):
            continue
        if path[0] == "shards" and path[1:2] not in ((), (1,)):
            continue
        for value in ODD:
            changed = json.loads(json.dumps(whole))
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder.pop(path[-1]) if value is REMOVED else holder.__setitem__(path[-1], value)
            (made / MANIFEST).write_text(json.dumps(changed))
            try:
                cache = open_cache(made)
                statistics(cache, made)
                cache.read(np.arange(min(cache.samples, 16)))
                cache_digest(cache)
            except DataError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 200


def test_a_shard_of_another_cache_is_not_verified(made: Path, maker: Make, tmp_path: Path) -> None:
    """Its hash put into the manifest, too: the samples' checksums tell."""
    assert rescore(open_cache(made), 16, 1, "cpu").identical == 16
    maker(tmp_path / "other", seed=2).make()
    name = "shard-00001.targets"
    (made / name).write_bytes((tmp_path / "other" / name).read_bytes())
    records = json.loads((tmp_path / "other" / MANIFEST).read_text())["shards"]
    edit(made, lambda m: m["shards"].__setitem__(1, records[1]))
    with pytest.raises(DataError, match=r"sample \d+ was made from other text than the data have there"):
        rescore(open_cache(made, verify=True), 16, 1, "cpu")


def rewrite(folder: Path, change: Callable[[bytearray, int], None]) -> None:
    """Change each shard behind its headers of positions (`change(bytes, where)`), and its hash in the manifest."""
    cache = open_cache(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    for number, record in enumerate(manifest["shards"]):
        index = cache._open_shard(number).index.astype(int)
        path = folder / record["file"]
        data = bytearray(path.read_bytes())
        begin = len(data) - 4 * int(index[-1])
        for first, end in pairwise(index):
            for at in range(begin + 4 * first + (cache.layout.header_bits * cache.length + 7) // 8, begin + 4 * end):
                change(data, at)
        path.write_bytes(data)
        record["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("estimator", Estimator)
@pytest.mark.parametrize("bit", [0, 2, 7])
def test_other_targets_with_the_same_entropies_are_not_verified(
    maker: Make, estimator: Estimator, bit: int, tmp_path: Path
) -> None:
    """Ids and weights, not only entropies, are compared: here the hash in the manifest is that of the changed shard."""
    maker(tmp_path / "c", estimator=estimator).make()

    def flip(data: bytearray, at: int) -> None:
        data[at] ^= 1 << bit

    rewrite(tmp_path / "c", flip)
    with pytest.raises(DataError, match=r"16 of 16 re-scored samples differ, and .*: these rows are not .*--teacher"):
        rescore(open_cache(tmp_path / "c", verify=True), 16, 1, "cpu")


@pytest.mark.parametrize("estimator", Estimator)
@pytest.mark.parametrize("noise", [1e-6, 2**-9])
def test_another_device_verifies_a_cache(
    maker: Make, estimator: Estimator, noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states that differ by FP32's rounding, or by BF16's: other bits, the same teacher."""
    cache = maker(tmp_path / "c", estimator=estimator).make()
    hidden, generator = Teacher.hidden, torch.Generator().manual_seed(1)

    def elsewhere(teacher: Teacher, batch: Batch) -> torch.Tensor:
        found = hidden(teacher, batch)
        return found * (1 + noise * torch.randn(found.shape, generator=generator))

    monkeypatch.setattr(Teacher, "hidden", elsewhere)
    found = rescore(cache, 16, 1, "cpu")
    assert found.agreeing > 0.9 and found.alike > 0.98, found
    assert noise < 1e-3 or found.identical < 16


@pytest.mark.parametrize("change", [{"targets": 7}, {"temperature": 2.0}, {"estimator": "gumbel"}])
def test_an_edited_identity_is_not_verified_without_its_hash(made: Path, change: dict[str, object]) -> None:
    """As in caches of earlier versions."""
    edit(made, lambda m: (m["identity"].update(change), m.pop("identity_sha256")))
    with pytest.raises(DataError, match=r"16 of 16 re-scored samples differ"):
        rescore(open_cache(made), 16, 1, "cpu")


@pytest.mark.parametrize("samples", [0, 4])
def test_verify_says_what_it_does_not_check(made: Path, samples: int) -> None:
    """Of a cache of an earlier version, one line; of one with the hash of its identity, nothing."""
    command = ["verify", str(made), "--samples", str(samples), "--device", "cpu"]
    quiet = CliRunner().invoke(app, command)
    edit(made, lambda m: m.pop("identity_sha256"))
    told = CliRunner().invoke(app, command)
    assert (quiet.exit_code, told.exit_code, quiet.stderr) == (0, 0, ""), told.output
    assert told.stdout == quiet.stdout and told.stderr.count("\n") == 1
    assert told.stderr.startswith(f"{made}: its manifest is of an earlier version, without a hash of its settings: e")
    assert ("--samples 64 finds them" in told.stderr) == (samples == 0)
    assert ("only rows that the teacher reads again, here 4 samples, show" in told.stderr) == (samples > 0)


def test_a_cache_is_verified_from_any_folder(
    distillation: DistillConfig, teacher: Teacher, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths of the teacher and the data are kept as absolute ones."""
    monkeypatch.chdir("/")
    data = distillation.data
    corpus = data.sources["files"]
    near = replace(data, sources={"files": replace(corpus, path=corpus.path.lstrip("/"))})
    config = replace(
        distillation,
        data=replace(near, cache_dir=data.cache_dir.lstrip("/")),
        teacher=replace(distillation.teacher, path=distillation.teacher.path.lstrip("/")),
    )
    cache = CacheMaker(tmp_path / "c", config, 512, teacher, dataset).make()
    monkeypatch.chdir(tmp_path)
    assert rescore(cache, 4, 1, "cpu").identical == 4


@pytest.mark.parametrize("text", ["", "null", "[" * 100_000, "\0", '{"a": 1'])
def test_json_that_is_none(made: Path, maker: Make, text: str) -> None:
    """In the manifest one line; in the record of a finished shard, the shard is made again."""
    whole = contents(made)
    record = made / "shard-00001.json"
    manifest = json.loads((made / MANIFEST).read_text())
    (made / MANIFEST).write_text(json.dumps(manifest | {"shards": None}))
    for number, shard in enumerate(manifest["shards"]):
        (made / f"shard-{number:05d}.json").write_text(json.dumps(shard))
    record.write_text(text)
    maker(made).make()
    assert contents(made) == whole
    (made / MANIFEST).write_text(text)
    with pytest.raises(DataError) as caught:
        open_cache(made)
    assert "\n" not in str(caught.value)


def test_no_cache_there(tmp_path: Path, maker: Make) -> None:
    (tmp_path / "letter").touch()
    for name in ("nothing", "letter"):
        with pytest.raises(DataError, match=r"holds no teacher's cache: manifest.json is missing; make one with"):
            open_cache(tmp_path / name)
    with pytest.raises(DataError, match=r"cannot write .*letter/manifest.json: .*; choose another .* cache.path"):
        maker(tmp_path / "letter").make()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(DataError, match=r"holds something that is no teacher's cache: give another cache.path"):
        maker(tmp_path / "other").make()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / MANIFEST).write_text("{")
    with pytest.raises(DataError, match="cannot read"):
        maker(tmp_path / "broken").make()


def test_a_cache_of_something_else_is_refused_naming_the_field(made: Path, maker: Make) -> None:
    for settings, message in (
        ({"targets": 9}, "holds another cache than configured .*: cache.targets: 8 there, 9 here"),
        ({"temperature": 2.0}, "temperature: 1.0 there, 2.0 here"),
        ({"estimator": Estimator.gumbel}, 'estimator: "varopt" there, "gumbel" here'),
        ({"tokens": 1024}, "cache.tokens: 512 there, 1024 here"),
        ({"seed": 5}, "seed: 1 there, 5 here"),
    ):
        with pytest.raises(DataError, match=message):
            maker(made, **settings).make()
    m = maker(made)
    m.identity["teacher"] = m.identity["teacher"] | {"digest": "f" * 64}
    with pytest.raises(DataError, match=r"teacher.digest: \"\w+... there, \"f+... here"):
        m.make()
    m = maker(made)
    m.identity["data"] = m.identity["data"] | {"document_mask": False}
    with pytest.raises(DataError, match=r"data.document_mask: true there, false here"):
        m.make()
    assert maker(made).make().samples == 16, "the same again is the cache as it is"


# Bad input ----------------------------------------------------------------------------------------------------


def test_logits_that_are_not_finite(maker: Make, teacher: Teacher, dataset: Dataset, tmp_path: Path) -> None:
    batch = batch_of(dataset, [4, 5])
    with torch.no_grad():
        teacher.model.embedding.weight[batch.tokens[1, 7]] = float("nan")
    # (Attention spreads it over the sample: 0 * NaN is NaN.)
    sample = 4 + int((batch.tokens == batch.tokens[1, 7]).any(dim=1).nonzero()[0])
    with pytest.raises(NonFiniteError, match=rf"logits are not finite at sample {sample}, position \d+: the shards"):
        maker(tmp_path / "c").rows(batch, 4)


def test_positions_whose_next_token_is_not_learned_have_empty_rows(
    maker: Make, dataset: Dataset, tmp_path: Path
) -> None:
    """A last token without a next one, or a prompt: no targets, few bits, and nothing else changes."""
    m, batch = maker(tmp_path / "c"), batch_of(dataset, [4, 5])
    whole, sizes, totals = m.rows(batch, 4)
    before = decode(m.layout, whole.to(torch.int32), sizes.cumsum(0) - sizes, 32)
    batch.weights[1, -1] = batch.weights[0, 3:20] = 0.0
    fewer, sizes, left = m.rows(batch, 4)
    after = decode(m.layout, fewer.to(torch.int32), sizes.cumsum(0) - sizes, 32)
    kept = batch.weights != 0
    assert torch.equal(before.ids[kept], after.ids[kept]) and torch.equal(before.weights[kept], after.weights[kept])
    assert not after.weights[~kept].any() and not after.ids[~kept].any()
    assert (float(totals[0]), float(left[0])) == (64, 46) and len(fewer) < 0.8 * len(whole)


def test_teacher_and_data_must_fit(maker: Make, teacher: Teacher, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache.targets=257: cache.estimator=varopt keeps 1 to 255"):
        maker(tmp_path / "c", targets=257)
    with pytest.raises(DataError, match=r"tokenizer: the teacher .* has \w{12}, the data abc; .*data.tokenizer.path"):
        teacher.require_tokenizer("abc", 257)
    with pytest.raises(DataError, match=r"vocab_size: the teacher .* knows 257 tokens, the data 300"):
        teacher.require_tokenizer(teacher.tokenizer, 300)


def test_padding_rows_of_the_teacher_have_no_probability(maker: Make, teacher: Teacher, tmp_path: Path) -> None:
    """The head has rows beyond the tokenizer's vocabulary, whatever is in them."""
    assert teacher.model.padded_vocab > 257
    cache = maker(tmp_path / "a").make()
    with torch.no_grad():
        teacher.model.head_weight[257:] = 100.0
    again = maker(tmp_path / "b").make()
    assert cache.manifest["shards"] == again.manifest["shards"]


def test_reading_is_by_sample_and_does_not_load_the_rest(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(made)
    opened: list[int] = []
    real = cache._open_shard
    monkeypatch.setattr(cache, "_open", lambda number: (opened.append(number), real(number))[1])
    cache.read(np.array([15, 14, 3]))
    assert opened == [3, 3, 0]
    assert isinstance(real(0).words.base, np.memmap) or isinstance(real(0).words, np.memmap)
    assert isinstance(cache, Cache) and read_manifest(made)["shards"] is not None


def test_a_hugging_face_folder_teaches_like_the_run_it_was_made_from(
    distillation: DistillConfig, maker: Make, dataset: Dataset, teacher_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    export(open_weights(teacher_run), folder, "fp32")
    tokenizer = TokenizerConfig(kind=TokenizerKind.file, path=str(folder))
    data = prepare_data(replace(distillation.data, tokenizer=tokenizer), lambda _: None)
    config = replace(distillation, teacher=replace(distillation.teacher, path=str(folder)))
    imported = open_teacher(config.teacher, config.engine, torch.device("cpu"))
    ours, theirs = maker(tmp_path / "a"), CacheMaker(tmp_path / "b", config, 512, imported, data)
    batch = batch_of(dataset, [0, 1])
    assert torch.equal(batch.tokens, batch_of(data, [0, 1]).tokens)
    for mine, other in zip(ours.rows(batch, 0), theirs.rows(batch, 0), strict=True):
        assert torch.equal(mine, other)
    assert imported.tokenizer_path == folder


@pytest.mark.parametrize("kind", ["hf", "run"])
def test_a_moved_teacher_is_verified(kind: str, distillation: DistillConfig, teacher_run: Path, tmp_path: Path) -> None:
    """The data's tokenizer was in its folder, too; without --teacher the message says to give one."""
    folder = tmp_path / "old"
    if kind == "hf":
        export(open_weights(teacher_run), folder, "fp32")
    else:
        shutil.copytree(teacher_run, folder)
    tokenizer = TokenizerConfig(kind=TokenizerKind.file, path=str(folder if kind == "hf" else folder / "tokenizer"))
    config = replace(
        distillation,
        data=replace(distillation.data, tokenizer=tokenizer),
        teacher=replace(distillation.teacher, path=str(folder)),
    )
    opened = open_teacher(config.teacher, config.engine, torch.device("cpu"))
    data = prepare_data(config.data, lambda _: None)
    cache = CacheMaker(tmp_path / "c", config, 512, opened, data).make()
    folder.rename(tmp_path / "new")
    with pytest.raises(DataError, match=r"cannot open its teacher: .*old: .*name its folder with --teacher FOLDER"):
        rescore(cache, 16, 1, "cpu")
    assert rescore(cache, 16, 1, "cpu", str(tmp_path / "new")).identical == 16


def test_a_device_that_is_none_is_not_the_teachers_fault(maker: Make, tmp_path: Path) -> None:
    cache = maker(tmp_path / "c").make()
    with pytest.raises(ConfigError, match="tpu") as caught:
        rescore(cache, 16, 1, "tpu")
    assert "teacher" not in str(caught.value)


def test_a_checkpoint_of_the_teacher_that_is_none_is_named_by_its_key(distillation: DistillConfig) -> None:
    wrong = replace(distillation.teacher, checkpoint="9")
    message = (
        r"^teacher.checkpoint=9: 9 is neither a checkpoint nor a folder with checkpoints; .*/run/checkpoints holds "
        r"step_00000200$"
    )
    with pytest.raises(CheckpointError, match=message):
        open_teacher(wrong, distillation.engine, torch.device("cpu"))


def test_a_flat_teachers_mass_is_not_below_zero(maker: Make, tmp_path: Path) -> None:
    """Sums of rows whose rest is all there is may round to a little more than there are rows."""
    cache = maker(tmp_path / "c").make()
    for shard in cache.shards:
        shard.totals["rest"] = shard.totals["rows"] * (1 + 1e-7)
    [line] = [line for line in statistics(cache, cache.folder) if "targets   " in line]
    assert " entries exact, with 0.0% of the mass" in line


def test_a_deleted_shard_of_a_complete_cache_is_made_anew(maker: Make, tmp_path: Path) -> None:
    """As the message about a damaged one says: to the same bytes, or not at all."""
    folder = tmp_path / "c"
    maker(folder).make()
    before = contents(folder)
    path = folder / "shard-00002.targets"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(
        DataError, match=r"shard-00002.targets is truncated .*; delete the file and run the same `lowbit"
    ):
        maker(folder).make()
    path.unlink()
    with pytest.raises(DataError, match=r"shard-00002.targets is missing; delete the file and run the same `lowbit"):
        open_cache(folder)
    (folder / "shard-00000.targets").unlink()
    assert maker(folder).make().samples == 16
    assert contents(folder) == before
    open_cache(folder, verify=True)
    path.unlink()
    other = maker(folder)
    with torch.no_grad():
        other._row_maker.head.matrix.mul_(1.01)  # another device's arithmetic, much exaggerated
    with pytest.raises(DataError, match=r"shard-00002.targets is not what it was when made anew here, .* delete the"):
        other.make()
    assert contents(folder) == {name: data for name, data in before.items() if name != path.name}
