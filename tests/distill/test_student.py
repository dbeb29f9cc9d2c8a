"""The student: rows meet their words, the objective is what it says, and a run resumes, refuses and learns."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs
import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.configs.schema import (
    PrecisionConfig,
    ResumeDifference,
    SourceConfig,
    SourceKind,
    TokenizerConfig,
    TokenizerKind,
)
from lowbit.configs.schema_distill import CacheConfig, DistillConfig, DistillLossConfig, Divergence, Estimator
from lowbit.configs.schema_precision import StatisticsConfig
from lowbit.configs.stored import load_config
from lowbit.configs.validate_distill import student_config, validate_cache, validate_distill, validate_train
from lowbit.data.dataset import Dataset
from lowbit.data.loader import Cursor, SampleOrder
from lowbit.distill import run as distill
from lowbit.distill.batches import CachedLoader, DistilledBatch, StoredRows
from lowbit.distill.codec import decode
from lowbit.distill.making import CacheMaker
from lowbit.distill.run import with_teacher
from lowbit.distill.shards import Cache, is_there, open_cache, token_checksums
from lowbit.distill.student import Distilled, changed_loss, open_caches, renormalised, repeated
from lowbit.distill.teacher import Teacher, open_teacher
from lowbit.errors import CheckpointError, ConfigError, DataError
from lowbit.models.sparse_head import DistillTerms, SparseTargets
from lowbit.models.transformer import Transformer
from lowbit.trainer.distributed import ALONE
from lowbit.trainer.loaded import load_run
from lowbit.trainer.run import pretrain

Make = Callable[..., CacheMaker]


@pytest.fixture
def cache(maker: Make, distillation: DistillConfig) -> Cache:
    return maker(Path(distillation.cache.path)).make()


def loader(dataset: Dataset, caches: list[Cache], **settings: Any) -> CachedLoader:
    defaults: dict[str, Any] = {"seed": 3, "sequences_at": lambda _: 4, "micro_batch": 2, "prefetch": 0}
    return CachedLoader(dataset, caches, **(defaults | settings))


# Joining ------------------------------------------------------------------------------------------------------


def test_rows_meet_the_words_they_were_made_from(cache: Cache, dataset: Dataset, teacher: Teacher) -> None:
    source = loader(dataset, [cache])
    seen: list[int] = []
    for _ in range(8):  # two epochs of 16 samples
        for batch in source.next_step():
            assert isinstance(batch, DistilledBatch) and batch.teacher is None
            here = batch.to("cpu")
            assert here.teacher is not None and here.teacher.ids.shape == (2 * 32, 8)
            sums = token_checksums(batch)
            for row in range(2):
                everything = [int(s) for s in cache.read(np.arange(16)).checksums]
                sample = everything.index(int(sums[row]))
                seen.append(sample)
                stored = cache.read(np.array([sample]))
                expected = decode(cache.layout, stored.words, stored.starts, 32)
                assert torch.equal(here.teacher.ids.view(2, 32, 8)[row], expected.ids[0])
                assert torch.equal(here.teacher.entropy.view(2, 32)[row], expected.entropy[0])
            logits = teacher.hidden(batch) @ teacher.model.head_weight.t()
            p = torch.softmax(logits[:, : teacher.model.vocab_size], dim=1)
            entropy = -(p * p.clamp(min=1e-30).log()).sum(dim=1)
            assert (here.teacher.entropy - entropy).abs().max() < 1 / 256 + 1e-5
    assert sorted(seen[:16]) == sorted(seen[16:]) == list(range(16)) and seen[:16] != seen[16:]
    assert source.epochs() == {"cache": 2.0}


def test_order_is_the_students_own_and_independent_of_ranks(cache: Cache, dataset: Dataset) -> None:
    one = [b for _ in range(4) for b in loader(dataset, [cache]).next_step()]
    other = loader(dataset, [cache], seed=4).next_step()
    assert not torch.equal(one[0].tokens, other[0].tokens)
    ranks = [loader(dataset, [cache], rank=r, world=2).next_step() for r in range(2)]
    assert torch.equal(torch.cat([b.tokens for b in ranks[0] + ranks[1]]), torch.cat([b.tokens for b in one[:2]]))
    ahead, source = loader(dataset, [cache], prefetch=3), loader(dataset, [cache])
    for _ in range(3):
        want = source.next_step()
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(ahead.next_step(), want, strict=True))
    resumed = loader(dataset, [cache])
    resumed.seek(Cursor(8, 3, dataset.fingerprint))
    assert torch.equal(resumed.next_step()[1].tokens, want[1].tokens)
    ahead.close()


def test_rows_of_other_words_are_an_error(cache: Cache, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    source = loader(dataset, [cache])
    monkeypatch.setattr(source, "_cached", SampleOrder(dataset, 99))
    with pytest.raises(DataError, match=r"sample \d+ was made from other text than the data have there"):
        source.next_step()


def test_pinned_and_moved_batches_are_the_same(cache: Cache, dataset: Dataset) -> None:
    [batch, _] = loader(dataset, [cache]).next_step()
    assert isinstance(batch, DistilledBatch)
    first, again = batch.to("cpu"), batch.to("cpu").to("cpu")
    assert first.teacher is not None and again.teacher is not None
    assert torch.equal(first.teacher.weights, again.teacher.weights) and torch.equal(first.tokens, batch.tokens)
    assert (first.visibility is None) == (batch.visibility is None) and first.valid_tokens == 64


@pytest.mark.parametrize("estimator", Estimator)
def test_a_copy_into_which_another_batch_is_written_is_that_batch(
    maker: Make, dataset: Dataset, teacher: Teacher, estimator: Estimator, tmp_path: Path
) -> None:
    """As a CUDA graph has it: memory that stays, filled with whatever a pass reads."""
    cache = maker(tmp_path / "one", estimator=estimator).make()
    given, other = (batch.to("cpu") for batch in loader(dataset, [cache]).next_step())
    objective = Distilled(DistillTerms(alpha=0.7), renormalise=estimator is Estimator.topk)
    found = [objective(teacher.model, batch).loss_sum.item() for batch in (given, other)]
    assert found[0] != found[1]
    kept = given.clone()
    assert kept.replayable and len(kept.tensors()) == len(other.tensors()) == len(given.tensors())
    for ours, theirs in zip(kept.tensors(), other.tensors(), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            ours.copy_(theirs)
    assert [objective(teacher.model, batch).loss_sum.item() for batch in (given, kept)] == found


# The objective ------------------------------------------------------------------------------------------------


def gradients(model: Transformer) -> dict[str, Tensor]:
    out = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out


def test_the_gradient_is_that_of_full_distillation_on_average(
    maker: Make, teacher: Teacher, dataset: Dataset, distillation: DistillConfig, tmp_path: Path
) -> None:
    """Over 150 seeds of the cache: the mean gradient of every parameter of a student, along the true gradient and along
    random directions, within five standard errors."""
    batch = dataset.training_batch(*SampleOrder(dataset, 1).locate(np.array([0, 1])))
    student = Transformer(replace(distillation.model, layers=1, width=16), dataset.tokenizer.vocab_size)
    student.init_weights(5)
    with torch.no_grad():
        logits = (teacher.hidden(batch) @ teacher.model.head_weight.t())[:, : student.vocab_size]
    p = torch.softmax(logits, dim=1)
    ours = student(batch.tokens, batch.visibility).flatten(0, 1) @ student.head_weight[: student.vocab_size].t()
    exact = F.kl_div(F.log_softmax(ours, dim=1), p, reduction="sum")
    exact.backward()
    full = gradients(student)
    found: dict[str, list[Tensor]] = {name: [] for name in full}
    values = []
    for seed in range(150):
        m = maker(tmp_path / "unused", seed=seed, targets=4)
        words, sizes, _ = m.rows(batch, 0)
        stored = StoredRows(m.layout, words.to(torch.int32), sizes.cumsum(0) - sizes)
        joined = DistilledBatch(**vars(batch), rows=(stored,))
        out = Distilled(DistillTerms())(student, joined.to("cpu"))
        out.loss_sum.backward()
        values.append(float(out.moments["kl"][0]))
        for name, gradient in gradients(student).items():
            found[name].append(gradient)
    for name, expected in full.items():
        draws = torch.stack(found[name]).flatten(1).double()
        directions = torch.cat([expected.flatten()[None], torch.randn(20, expected.numel())]).double()
        projected = draws @ directions.t()  # [seeds, 21]
        spread = projected.std(dim=0) / len(draws) ** 0.5
        error = (projected.mean(dim=0) - directions @ expected.flatten().double()).abs()
        assert (error <= 5 * spread + 1e-6).all(), name
    assert abs(np.mean(values) - float(exact)) < 5 * np.std(values) / len(values) ** 0.5
    assert np.std(values) > 0.1, "single estimates do differ"


def test_several_teachers_are_averaged(maker: Make, dataset: Dataset, tmp_path: Path) -> None:
    """Two caches of one order: the gradient is the mean of what each alone gives."""
    caches = [
        maker(tmp_path / name, estimator=e).make() for name, e in (("a", Estimator.varopt), ("b", Estimator.gumbel))
    ]
    model = Transformer(maker(tmp_path / "c").teacher.model.config, dataset.tokenizer.vocab_size)
    model.init_weights(2)

    def run(chosen: list[Cache]) -> tuple[float, dict[str, Tensor]]:
        batch = loader(dataset, chosen).next_step()[0].to("cpu")
        out = Distilled(DistillTerms(alpha=0.7))(model, batch)
        out.loss_sum.backward()
        return float(out.loss_sum.detach()), gradients(model)

    a, b, both = run(caches[:1]), run(caches[1:]), run(caches)
    assert both[0] == pytest.approx((a[0] + b[0]) / 2, rel=1e-5)
    for name, gradient in both[1].items():
        torch.testing.assert_close(gradient, (a[1][name] + b[1][name]) / 2, rtol=1e-3, atol=1e-5)


def test_topk_alone_is_renormalised(maker: Make, dataset: Dataset, tmp_path: Path) -> None:
    cache = maker(tmp_path / "k", estimator=Estimator.topk).make()
    batch = loader(dataset, [cache]).next_step()[0].to("cpu")
    assert isinstance(batch, DistilledBatch) and batch.teacher is not None
    t = batch.teacher
    assert float(t.weights.sum(dim=1).max()) < 1
    model = Transformer(maker(tmp_path / "c").teacher.model.config, dataset.tokenizer.vocab_size)
    model.init_weights(2)
    out = Distilled(DistillTerms(), renormalise=True)(model, batch)
    weights = t.weights / t.weights.sum(dim=1, keepdim=True)
    scaled = SparseTargets(t.ids, weights, -(weights * weights.log()).sum(dim=1))
    want = Distilled(DistillTerms())(model, replace(batch, teacher=scaled))
    torch.testing.assert_close(out.loss_sum, want.loss_sum)


@pytest.mark.parametrize("several", [False, True])
def test_topk_beside_prompts_is_a_divergence(several: bool, maker: Make, dataset: Dataset, tmp_path: Path) -> None:
    """Rows without targets leave gradients finite; KL(p' || s) is that of the renormalised targets, never below zero,
    and zero for a student that says them."""
    model = Transformer(maker(tmp_path / "unused").teacher.model.config, dataset.tokenizer.vocab_size)
    model.init_weights(2)
    batch = dataset.training_batch(*SampleOrder(dataset, 1).locate(np.array([0, 1])))
    batch.weights[0, 3:20] = batch.weights[1] = 0.0
    rows = []
    for targets in (8, 5) if several else (8,):
        m = maker(tmp_path / "unused", estimator=Estimator.topk, targets=targets)
        words, sizes, _ = m.rows(batch, 0)
        rows.append(StoredRows(m.layout, words.to(torch.int32), sizes.cumsum(0) - sizes))
    joined = DistilledBatch(**vars(batch), rows=tuple(rows)).to("cpu")
    out = Distilled(DistillTerms(), renormalise=True)(model, joined)
    out.loss_sum.backward()
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients(model).values())
    with torch.no_grad():
        logits = model(batch.tokens, batch.visibility).flatten(0, 1) @ model.head_weight[: model.vocab_size].t()
    log_s, expected, perfect = F.log_softmax(logits, dim=1), 0.0, 0.0
    for stored in rows:
        got = decode(stored.layout, stored.words, stored.starts, 32)
        p = torch.zeros_like(logits).scatter_add_(1, got.ids.flatten(0, 1), got.weights.flatten(0, 1))
        p = (p / p.sum(dim=1, keepdim=True))[batch.weights.flatten() > 0]
        expected += float(F.kl_div(log_s[batch.weights.flatten() > 0], p, reduction="sum")) / len(rows)
        perfect += float(torch.xlogy(p, p).sum()) / len(rows)
    assert float(out.moments["kl"][0]) == pytest.approx(expected, rel=1e-4) and expected > 0
    assert joined.teacher is not None
    scaled = renormalised(joined.teacher, [stored.layout.targets for stored in rows])
    assert float((scaled.entropy * batch.weights.flatten()).sum()) == pytest.approx(-perfect, rel=1e-4)
    assert not scaled.weights[batch.weights.flatten() == 0].any() and float(scaled.weights.min()) >= 0


# Runs ---------------------------------------------------------------------------------------------------------


def test_a_run_reports_its_divergence_and_leaves_an_ordinary_run(
    cache: Cache, distillation: DistillConfig, tmp_path: Path
) -> None:
    result = distill.train(distillation, tmp_path / "student")
    assert result.step == 6
    log = tiny_runs.rows(result.run_dir)
    assert all(r["kl_se"] > 0 and r["kl"] > 0 for r in log) and log[-1]["kl"] < log[0]["kl"]
    assert log[-1]["epoch/cache"] == 3.0
    loaded = load_run(result.run_dir, device="cpu")
    assert loaded.config.seed == 3 and type(loaded.config).__name__ == "RunConfig"
    assert (result.run_dir / "distill.yaml").is_file()


def test_statistics_are_taken_with_the_teachers_targets(
    cache: Cache, distillation: DistillConfig, tmp_path: Path
) -> None:
    """Per-layer errors in the log; the run is bit for bit the one without them."""
    plain = replace(distillation, precision=PrecisionConfig(name="mxfp8", forward="mxfp8", backward="mxfp8"))
    statistics = StatisticsConfig(every_steps=3, sequences=1)
    measured = replace(plain, precision=replace(plain.precision, statistics=statistics))
    for config, name in ((plain, "plain"), (measured, "measured")):
        distill.train(config, tmp_path / name)
    without, with_ = tiny_runs.tensors(tmp_path / "plain"), tiny_runs.tensors(tmp_path / "measured")
    assert all(torch.equal(without[name], with_[name]) for name in without)
    rows = tiny_runs.rows(tmp_path / "measured")
    errors = {k: v for k, v in rows[-1].items() if k.startswith("quant/") and k.endswith("/relative_mse")}
    assert {key.split("/")[2] for key in errors} == {"weight", "input", "gradient"}
    assert all(0 < value < 0.01 for value in errors.values())


def test_resuming_changes_no_bit(cache: Cache, distillation: DistillConfig, tmp_path: Path) -> None:
    config = replace(distillation, checkpoint=replace(distillation.checkpoint, every_steps=3, keep_last=3))
    distill.train(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000006")
    distill.train(config, tmp_path / "cut")
    whole, cut = tiny_runs.tensors(tmp_path / "whole"), tiny_runs.tensors(tmp_path / "cut")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert [r["kl"] for r in tiny_runs.rows(tmp_path / "whole")] == [r["kl"] for r in tiny_runs.rows(tmp_path / "cut")]


def test_going_on_with_another_cache_is_refused(
    cache: Cache, maker: Make, distillation: DistillConfig, tmp_path: Path
) -> None:
    distill.train(distillation, tmp_path / "student")
    maker(tmp_path / "other", seed=9).make()
    other = replace(distillation, max_steps=9, cache=replace(distillation.cache, path=str(tmp_path / "other")))
    with pytest.raises(CheckpointError, match=r"learned from other teachers' targets than cache.path"):
        distill.train(other, tmp_path / "student")


def test_going_on_with_another_loss_is_announced(
    cache: Cache, distillation: DistillConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    distill.train(distillation, tmp_path / "student")
    distill.train(replace(distillation, max_steps=7), tmp_path / "student")
    assert "the loss of this run changes" not in caplog.text
    other = replace(distillation, max_steps=8, loss=DistillLossConfig(alpha=0.5))
    assert distill.train(other, tmp_path / "student").step == 8
    assert "the loss of this run changes after step 7: loss.alpha: 1.0 so far, 0.5 now" in caplog.text
    assert changed_loss(None, other.loss) == [], "an earlier version's checkpoint does not say"
    assert changed_loss({"divergence": "jsd", "alpha": 0.5}, other.loss) == [
        "loss.divergence: jsd so far, forward_kl now"
    ]


def test_a_run_of_another_kind_is_not_gone_on_with(cache: Cache, distillation: DistillConfig, tmp_path: Path) -> None:
    """Neither a student without its teacher nor the other way round; its weights may begin another run."""
    distill.train(distillation, tmp_path / "student")
    plain = replace(student_config(distillation), max_steps=7)
    with pytest.raises(CheckpointError, match=r"is of a student of a teacher's cache: `lowbit distill train` goes on"):
        pretrain(plain, tmp_path / "student")
    with pytest.raises(CheckpointError, match=r"is of a student of a teacher's cache"):
        pretrain(replace(plain, resume=str(tmp_path / "student")), tmp_path / "new")
    pretrain(replace(plain, init_from=str(tmp_path / "student")), tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"is of a run without a teacher: .* another run_name .*init_from=FOLDER"):
        distill.train(replace(distillation, max_steps=9), tmp_path / "plain")
    begun = replace(distillation, init_from=str(tmp_path / "plain"))
    assert distill.train(begun, tmp_path / "again").step == 6


@pytest.mark.parametrize(
    ("estimator", "limits", "times"),
    [
        (Estimator.varopt, {"max_steps": 2}, None),
        (Estimator.varopt, {"max_steps": 3}, "1.5 times"),
        (Estimator.gumbel, {"max_steps": None, "max_tokens": 1024}, "2 times"),
        (Estimator.topk, {"max_steps": 3}, None),
    ],
)
def test_learning_the_same_draws_again_is_told(
    estimator: Estimator,
    limits: dict[str, int | None],
    times: str | None,
    maker: Make,
    distillation: DistillConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    maker(Path(distillation.cache.path), estimator=estimator).make()
    distill.train(replace(distillation, **limits), tmp_path / "student")  # type: ignore[arg-type]
    told = [r.getMessage() for r in caplog.records if "goes over its cache" in r.getMessage()]
    assert len(told) == (times is not None) and all(f"cache {times}:" in line for line in told)
    assert repeated(replace(distillation, max_steps=None), open_cache(Path(distillation.cache.path))) is None


def test_what_does_not_fit_is_refused_naming_the_field(
    cache: Cache, distillation: DistillConfig, teacher_run: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(60):
        (corpus / f"{i}.txt").write_text(f"other text number {i} " * 20)
    source = {"files": SourceConfig(kind=SourceKind.files, path=str(corpus))}
    for change, message in (
        ({"data": replace(distillation.data, sources=source)}, r"does not fit the student .*: data.fingerprint: \"\w+"),
        ({"data": replace(distillation.data, sequence_length=16)}, r"data.sequence_length: 32 there, 16 here"),
        ({"data": replace(distillation.data, document_mask=False)}, "data.document_mask: true there, false here"),
        ({"cache": replace(distillation.cache, temperature=2.0)}, "temperature: 1.0 there, 2.0 here"),
        (
            {"loss": DistillLossConfig(Divergence.jsd)},
            "loss.divergence=jsd: needs the exact probabilities of one cache",
        ),
    ):
        with pytest.raises((DataError, ConfigError), match=message) as caught:
            distill.train(replace(distillation, **change), tmp_path / "student")  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("made_with", [True, False])
def test_another_tokenizer_is_named_first_and_what_takes_the_cache(
    made_with: bool, cache: Cache, distillation: DistillConfig, tmp_path: Path
) -> None:
    """Though it makes other shards of all data, too: the settings that the cache was made with, if it says them."""
    if not made_with:
        manifest = json.loads((cache.folder / "manifest.json").read_text())
        del manifest["made_with"]
        (cache.folder / "manifest.json").write_text(json.dumps(manifest))
    trained = TokenizerConfig(kind=TokenizerKind.bpe, vocab_size=300)
    other = replace(distillation, data=replace(distillation.data, tokenizer=trained, sequence_length=16))
    wishes = "data.tokenizer.kind=bytes data.tokenizer.vocab_size=4096 data.sequence_length=32" if made_with else ""
    message = (
        rf"does not fit the student \(there: the cache; here: this run; it was made with {wishes or 'other data'}: "
        r"give these, or another cache.path\): sequence_length: 32 there, 16 here; tokenizer: \"\w+... there, \"\w+... "
        "here; vocab_size: 257 there, 300 here; data.fingerprint: "
    )
    with pytest.raises(DataError, match=message) as caught:
        distill.train(other, tmp_path / "student")
    assert "\n" not in str(caught.value)
    warm = replace(distillation, cache=replace(distillation.cache, temperature=2.0))
    with pytest.raises(DataError, match=r"made with cache.temperature=1.0: give .*: temperature: 1.0 there, 2.0"):
        distill.train(warm, tmp_path / "student")


def test_a_cache_is_not_averaged_with_itself(
    cache: Cache, maker: Make, distillation: DistillConfig, tmp_path: Path
) -> None:
    """By another path, or a copy of it."""
    shutil.copytree(cache.folder, tmp_path / "copy")
    maker(tmp_path / "other", seed=1, targets=5).make()
    for more in ([cache.folder], [tmp_path / "copy"], [tmp_path / "other", tmp_path / "x" / ".." / "other"]):
        (tmp_path / "x").mkdir(exist_ok=True)
        config = replace(distillation, cache=replace(distillation.cache, more=[str(path) for path in more]))
        with pytest.raises(ConfigError, match=r"cache.more: .* holds what .* does, .* takes each cache once; leave it"):
            distill.train(config, tmp_path / "student")


def test_caches_of_other_samples_cannot_be_averaged(
    cache: Cache, maker: Make, distillation: DistillConfig, tmp_path: Path
) -> None:
    maker(tmp_path / "longer", tokens=1024).make()
    more = replace(distillation.cache, more=[str(tmp_path / "longer")])
    with pytest.raises(DataError, match=r"holds other samples than .*: samples: 32 there, 16 here"):
        distill.train(replace(distillation, cache=more), tmp_path / "student")


@pytest.mark.parametrize("divergence", [Divergence.reverse_kl, Divergence.jsd])
def test_bucketed_divergences_train(
    divergence: Divergence, maker: Make, distillation: DistillConfig, tmp_path: Path
) -> None:
    maker(Path(distillation.cache.path), estimator=Estimator.topk).make()
    config = replace(distillation, loss=DistillLossConfig(divergence, 0.8))
    log = tiny_runs.rows(distill.train(config, tmp_path / "student").run_dir)
    assert log[-1]["kl"] < log[0]["kl"] and all(r["kl"] >= 0 for r in log)


def spoil(cache: Cache, sample: int) -> None:
    """Ones in place of a sample's targets, behind the headers of its positions; the file's time stays as it was."""
    number, place = divmod(sample, cache.shards[0].samples)
    path, index = cache.folder / cache.shards[number].file, cache._open_shard(number).index.astype(int)
    stat, data = path.stat(), bytearray(path.read_bytes())
    first, end = len(data) - 4 * (index[-1] - index[place : place + 2])
    first += (32 * cache.layout.header_bits + 7) // 8
    data[first:end] = b"\xff" * (end - first)
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGED = r"shard-00002.targets is damaged: sample 9, position \d+: an id outside of the vocabulary of 257; delete"


def test_an_id_outside_of_the_vocabulary_is_found_before_training(
    cache: Cache, distillation: DistillConfig, dataset: Dataset, tmp_path: Path
) -> None:
    """In one of the samples that are looked at, though bits were damaged unnoticed."""
    spoil(cache, 9)
    with pytest.raises(DataError, match=DAMAGED):
        open_caches(distillation, cache.folder, dataset)
    with pytest.raises(DataError, match=DAMAGED):
        distill.train(distillation, tmp_path / "student")


@pytest.mark.parametrize(
    ("estimator", "divergence", "several"),
    [
        *((estimator, Divergence.forward_kl, False) for estimator in Estimator),
        (Estimator.varopt, Divergence.forward_kl, True),
        (Estimator.topk, Divergence.reverse_kl, False),
        (Estimator.topk, Divergence.jsd, False),
    ],
)
def test_an_id_outside_of_the_vocabulary_stops_training_and_is_named(
    estimator: Estimator,
    divergence: Divergence,
    several: bool,
    maker: Make,
    distillation: DistillConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a later one, the step that reads it is not made: neither an error of the device nor a bad student."""
    folders = [tmp_path / "good", Path(distillation.cache.path)] if several else [Path(distillation.cache.path)]
    for folder in folders:  # the last with as many targets as always
        cache = maker(folder, estimator=estimator, targets=8 if folder == folders[-1] else 5).make()
    spoil(cache, 9)
    monkeypatch.setattr(Cache, "check_ids", lambda _: None)
    config = replace(
        distillation,
        cache=replace(distillation.cache, path=str(folders[0]), more=[str(path) for path in folders[1:]]),
        loss=DistillLossConfig(divergence, 0.8),
        checkpoint=replace(distillation.checkpoint, every_steps=1, keep_last=9),
    )
    with pytest.raises(DataError, match=DAMAGED) as caught:
        distill.train(config, tmp_path / "student")
    assert "\n" not in str(caught.value)
    for path in (tmp_path / "student").glob("checkpoints/step_*"):
        loaded = load_run(tmp_path / "student", path.name, device="cpu")
        assert all(bool(torch.isfinite(p).all()) for p in loaded.model.parameters())


def test_a_longer_training_goes_over_a_finished_cache_again(distillation: DistillConfig, tmp_path: Path) -> None:
    """With cache.tokens=null, whatever else is changed of the student; a shorter one takes a part of it."""
    config = replace(distillation, cache=replace(distillation.cache, path="", tokens=None))
    distill.everything(config, tmp_path / "run")
    made = (tmp_path / "run" / "cache" / "manifest.json").read_bytes()
    longer = distill.everything(replace(config, max_steps=9), tmp_path / "run")
    assert longer.step == 9 and tiny_runs.rows(longer.run_dir)[-1]["epoch/cache"] == 1.5
    assert (tmp_path / "run" / "cache" / "manifest.json").read_bytes() == made
    other = replace(config, max_steps=2, cache=replace(config.cache, path=str(tmp_path / "run" / "cache")))
    assert distill.everything(other, tmp_path / "shorter").step == 2
    for change, message in (
        ({"tokens": 2048}, "cache.tokens: 1536 there, 2048 here"),
        ({"targets": 9}, "cache.targets: 8 there"),
    ):
        with pytest.raises(DataError, match=f"holds another cache than configured .*{message}"):
            distill.cache(replace(other, cache=replace(other.cache, **change)), tmp_path)  # type: ignore[arg-type]


def test_a_teacher_is_not_trained_further_than_its_cache(distillation: DistillConfig, tmp_path: Path) -> None:
    config = replace(
        distillation,
        teacher=replace(distillation.teacher, path="", model=distillation.model, max_steps=4),
        cache=replace(distillation.cache, path="", tokens=None),
    )
    distill.everything(config, tmp_path / "all")
    further = replace(config, teacher=replace(config.teacher, max_steps=6))
    message = (
        r"teacher.max_steps=6: the teacher is at step 4, and .*cache holds the cache that a teacher made at step 4: "
    )
    with pytest.raises(ConfigError, match=message + r"go on with teacher.max_steps=4, or give another run_name"):
        distill.everything(further, tmp_path / "all")
    assert distill.everything(replace(config, max_steps=7), tmp_path / "all").step == 7, "the run is as good as before"


def test_other_settings_of_a_finished_teacher_are_refused_by_key(
    distillation: DistillConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What makes another teacher is refused, though nothing of it is left to train; its recipe only warned about."""
    teacher = replace(distillation.teacher, path="", model=distillation.model, max_steps=4)
    config = replace(distillation, teacher=teacher, cache=replace(distillation.cache, path="", tokens=None))
    distill.everything(config, tmp_path / "all")
    wide = replace(config, teacher=replace(teacher, model=replace(teacher.model, layers=3)))
    softcap = replace(teacher.model, logit_softcap=20.0)
    shape = (
        r"teacher.model.layers: 2 in the checkpoint, 3 now\. It is finished: to train another, give another run_name"
    )
    shorter = (
        r"teacher.max_steps=3: the teacher in .*teacher has made 4 steps: go on with teacher.max_steps=4, or give "
        "another run_name"
    )
    for other, message in (
        (wide, shape),
        (replace(config, teacher=replace(wide.teacher, max_steps=9)), "teacher.model.layers: 2 in the"),
        (replace(config, teacher=replace(teacher, max_steps=3)), shorter),
        (replace(config, teacher=replace(teacher, model=softcap)), "teacher.model.logit_softcap: null in"),
        (replace(config, teacher=replace(teacher, model=softcap), resume_allow=[ResumeDifference.model]), "finished"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
            distill.everything(other, tmp_path / "all")
        assert "\n" not in str(caught.value)
    assert "trained with other settings" not in caplog.text
    recipe = replace(config, optim=replace(config.optim, lr=1e-3), max_steps=7)
    assert distill.everything(recipe, tmp_path / "all").step == 7
    assert "all/teacher was trained with other settings, and stays as it is: optim.lr: 0.01 then, 0.001 now" in (
        caplog.text
    )


def test_an_unfinished_teachers_settings_are_named_as_the_teachers(distillation: DistillConfig, tmp_path: Path) -> None:
    teacher = replace(distillation.teacher, path="", model=distillation.model, max_steps=4)
    config = replace(distillation, teacher=teacher, cache=replace(distillation.cache, path="", tokens=None))
    device = torch.device("cpu")
    with_teacher(config, tmp_path / "all", ALONE, device)
    other = replace(teacher, max_steps=6, model=replace(teacher.model, layers=3))
    with pytest.raises(CheckpointError, match=r"another run: teacher.model.layers: 2 in the checkpoint, 3 now"):
        with_teacher(replace(config, teacher=other), tmp_path / "all", ALONE, device)


def test_a_sequence_longer_than_the_teacher_takes_is_refused_before_anything_is_written(
    distillation: DistillConfig, maker: Make, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    model = replace(distillation.model, max_sequence=4096)
    data = replace(distillation.data, sequence_length=65, cache_dir=str(tmp_path / "data"))
    long = replace(distillation, model=model, data=data)
    message = r"data.sequence_length=65: the teacher .* takes 64 tokens at most .*data.sequence_length=64 would work"
    with pytest.raises(ConfigError, match=message):
        distill.cache(long, tmp_path / "run", torch.device("cpu"))
    teacher = maker(tmp_path / "unused").teacher
    with pytest.raises(ConfigError, match=message):
        teacher.require_length(65)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("divergence", [Divergence.reverse_kl, Divergence.jsd])
def test_the_cache_itself_says_what_its_targets_are(
    divergence: Divergence, maker: Make, distillation: DistillConfig, tmp_path: Path
) -> None:
    """loss.divergence is judged by it, not by cache.estimator, whose default is another."""
    config = replace(distillation, loss=DistillLossConfig(divergence))
    missing = replace(config, cache=replace(config.cache, path=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="sampled targets would bias it"):
        validate_distill(missing)
    maker(Path(config.cache.path), estimator=Estimator.topk).make()
    for check in (validate_train, validate_distill):
        check(config)
    maker(tmp_path / "more", estimator=Estimator.topk, targets=5).make()
    two = replace(config, cache=replace(config.cache, more=[str(tmp_path / "more")]))
    validate_train(two)
    with pytest.raises(
        ConfigError, match=r"of one cache .*, here are 2, and it is not linear .*leave cache.more empty"
    ):
        distill.train(two, tmp_path / "student")
    maker(tmp_path / "sampled").make()
    sampled = replace(config, cache=replace(config.cache, path=str(tmp_path / "sampled")))
    with pytest.raises(ConfigError, match=r"cache.estimator=topk, here varopt; sampled targets would bias it"):
        distill.train(sampled, tmp_path / "student")


def test_settings_beside_a_finished_cache_are_named_and_its_own_kept(
    cache: Cache, distillation: DistillConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = replace(distillation.cache, estimator=Estimator.gumbel, targets=9, seed=5, tokens=2048)
    run = distill.train(replace(distillation, max_steps=1, cache=odd), tmp_path / "odd").run_dir
    [line] = [r.getMessage() for r in caplog.records if "are ignored" in r.getMessage()]
    assert line.endswith(
        "has its own settings, so these are ignored: cache.estimator=gumbel (there: varopt), cache.targets=9 (there: "
        "8), cache.seed=5 (there: 1), cache.tokens=2048 (there: 512)"
    )
    assert load_config(run / "distill.yaml", DistillConfig).cache == distillation.cache
    caplog.clear()
    for name, settings in (("same", distillation.cache), ("none", CacheConfig(path=distillation.cache.path))):
        run = distill.train(replace(distillation, max_steps=1, cache=settings), tmp_path / name).run_dir
        assert load_config(run / "distill.yaml", DistillConfig).cache == distillation.cache
    assert "are ignored" not in caplog.text


def test_a_teachers_summary_says_what_it_computes_in(distillation: DistillConfig, teacher: Teacher) -> None:
    assert " million parameters, float32 on CPU" in teacher.summary()
    quantised = replace(distillation.teacher.precision, forward="nvfp4")
    other = open_teacher(replace(distillation.teacher, precision=quantised), distillation.engine, torch.device("cpu"))
    assert " million parameters, float32 with nvfp4 products on CPU" in other.summary()


@pytest.mark.parametrize("key", ["teacher.path", "cache.path", "cache.more"])
def test_folders_that_may_not_be_looked_at_are_one_line(
    key: str, distillation: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    secret, is_dir, is_file = tmp_path / "secret", Path.is_dir, Path.is_file

    def looked(real: Callable[[Path], bool]) -> Callable[[Path], bool]:
        def look(path: Path) -> bool:
            if path.is_relative_to(secret):
                raise PermissionError(13, "Permission denied")
            return real(path)

        return look

    monkeypatch.setattr(Path, "is_dir", looked(is_dir))
    monkeypatch.setattr(Path, "is_file", looked(is_file))
    if key == "teacher.path":
        config = replace(distillation, teacher=replace(distillation.teacher, path=str(secret / "x")))
        with pytest.raises(ConfigError, match=r"teacher.path=.*secret/x: cannot be read: Permission denied"):
            open_teacher(config.teacher, config.engine, torch.device("cpu"))
        check = validate_cache
    else:
        path = str(secret / "x")
        given = {"path": path} if key == "cache.path" else {"more": [path]}
        config = replace(distillation, cache=replace(distillation.cache, **given))  # type: ignore[arg-type]
        check = validate_train
    with pytest.raises(ConfigError, match=rf"{key}=.*: .*secret/x cannot be read: Permission denied; make it readable"):
        check(config)
    with pytest.raises(DataError, match=r"cannot read .*secret/x/manifest.json: Permission denied; make it readable"):
        is_there(secret / "x" / "manifest.json")


def test_everything_trains_a_teacher_caches_and_trains(distillation: DistillConfig, tmp_path: Path) -> None:
    """Without a teacher one is trained first; the same command again does nothing twice."""
    config = replace(
        distillation,
        teacher=replace(distillation.teacher, path="", model=distillation.model, max_steps=4),
        cache=replace(distillation.cache, path="", tokens=None),
    )
    result = distill.everything(config, tmp_path / "all")
    assert result.step == 6
    made = tmp_path / "all" / "cache" / "manifest.json"
    assert json.loads(made.read_text())["identity"]["samples"] == 6 * 8
    times = [p.stat().st_mtime_ns for p in (made, tmp_path / "all" / "teacher" / "config.yaml")]
    again = distill.everything(config, tmp_path / "all")
    assert again.val_bpb == result.val_bpb
    assert times == [p.stat().st_mtime_ns for p in (made, tmp_path / "all" / "teacher" / "config.yaml")]


def test_other_settings_are_refused_before_anything_is_made(
    teacher_run: Path, distillation: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that holds a run of other data: no teacher is trained, nothing is packed or cached for it."""
    for name in ("with_teacher", "cache"):
        monkeypatch.setattr(distill, name, None)
    shutil.copytree(teacher_run, tmp_path / "run")
    other = replace(distillation, data=replace(distillation.data, held_out=0.3))
    with pytest.raises(CheckpointError, match=r"data\.held_out: .* 0\.3 now.*resume_allow=\[data\]"):
        distill.everything(other, tmp_path / "run")
