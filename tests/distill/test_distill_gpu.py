"""On a GPU: the same rows as on the CPU up to the arithmetic of softmax, the same bits twice, and bounded memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny_runs
import torch
from test_codec import realistic
from test_student import DAMAGED, spoil

from lowbit.configs.schema_distill import DistillConfig, DistillLossConfig, Divergence, Estimator
from lowbit.data.dataset import Dataset
from lowbit.distill import batches
from lowbit.distill.batches import DistilledBatch, StoredRows, unpack
from lowbit.distill.blocks import Distributions
from lowbit.distill.codec import Layout, decode, encode, pack
from lowbit.distill.estimators import sampler
from lowbit.distill.fast import reader
from lowbit.distill.making import CacheMaker
from lowbit.distill.noise import Noise, Places
from lowbit.distill.shards import Cache
from lowbit.distill.teacher import open_teacher
from lowbit.errors import DataError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("estimator", Estimator)
def test_rows_equal_those_of_the_cpu(estimator: Estimator) -> None:
    """Noise is integer arithmetic, so only logits at the very edge of a choice may fall on the other side."""
    vocab, rows = 5000, 512
    logits = realistic(rows, vocab)
    layout = Layout(estimator, 16, vocab)
    found = []
    for device in ("cpu", "cuda"):
        index = torch.arange(rows, device=device)
        places, noise = Places(index // 64, index % 64), Noise(3, estimator.value)
        p = Distributions(logits.to(device).clone(), vocab)
        kept = sampler(estimator)(p, 16, noise, places)
        words, sizes = pack(*encode(layout, kept, p.entropy, noise, places), rows // 64)
        starts = sizes.cumsum(0) - sizes
        on_device = decode(layout, words.to(torch.int32), starts, 64)
        on_cpu = decode(layout, words.to(torch.int32).cpu(), starts.cpu(), 64)
        assert torch.equal(on_device.ids.cpu(), on_cpu.ids)
        torch.testing.assert_close(on_device.weights.cpu(), on_cpu.weights)
        found.append(on_cpu)
    cpu, cuda = found
    same = (cpu.ids.sort(dim=2).values == cuda.ids.sort(dim=2).values).all(dim=2)
    assert float(same.float().mean()) > 0.99
    assert float((cpu.entropy - cuda.entropy).abs().max()) <= 1 / 256


def test_a_cache_is_the_same_bits_twice(distillation: DistillConfig, dataset: Dataset, tmp_path: Path) -> None:
    teacher = open_teacher(distillation.teacher, distillation.engine, torch.device("cuda"))
    caches = [CacheMaker(tmp_path / name, distillation, 512, teacher, dataset).make() for name in "ab"]
    assert caches[0].manifest["shards"] == caches[1].manifest["shards"]


@pytest.mark.parametrize("estimator", [Estimator.varopt, Estimator.topk, Estimator.multinomial])
def test_the_sampler_works_from_a_chunk(estimator: Estimator) -> None:
    """Beyond the chunk's own logits it takes less than as much again, at 128k tokens."""
    vocab, rows = 128_256, 1024
    logits = (torch.randn(rows, vocab, device="cuda") * 2).bfloat16()
    index = torch.arange(rows, device="cuda")

    def run() -> None:
        p = Distributions(logits, vocab)
        sampler(estimator)(p, 16, Noise(1, "x"), Places(index, index))

    run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes


def test_training_reads_bits_on_the_device(
    distillation: DistillConfig, maker: Callable[..., CacheMaker], tmp_path: Path
) -> None:
    from lowbit.distill import run as distill

    cache = maker(Path(distillation.cache.path)).make()
    packed = cache.read(torch.arange(4).numpy())
    here, there = (
        unpack((StoredRows(cache.layout, packed.words.to(d), packed.starts.to(d)),), 32) for d in ("cpu", "cuda")
    )
    assert torch.equal(here.ids, there.ids.cpu())
    results = []
    for device in ("cpu", "cuda"):
        config = replace(distillation, device=device)
        results.append(distill.train(config, tmp_path / device).val_bpb)
    assert results[0] == pytest.approx(results[1], rel=1e-3)


@pytest.mark.parametrize("estimator", [Estimator.varopt, Estimator.topk])
def test_a_student_by_graphs_has_the_same_bits(
    estimator: Estimator,
    maker: Callable[..., CacheMaker],
    distillation: DistillConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lowbit.distill import run as distill

    replayed = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(1), replay(graph)))
    maker(Path(distillation.cache.path), estimator=estimator).make()
    for graphs in (False, True):
        assert not replayed
        engine = replace(distillation.engine, cuda_graphs=graphs)
        distill.train(replace(distillation, device="cuda", engine=engine, max_steps=12), tmp_path / str(graphs))
    assert len(replayed) >= 6  # of those after two as they are
    plain, found = (tiny_runs.tensors(tmp_path / name) for name in ("False", "True"))
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)
    rows = [[(row["loss"], row["kl"]) for row in tiny_runs.rows(tmp_path / name)] for name in ("False", "True")]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        *((estimator, Divergence.forward_kl) for estimator in Estimator),
        (Estimator.topk, Divergence.reverse_kl),
        (Estimator.topk, Divergence.jsd),
    ],
)
def test_an_id_outside_of_the_vocabulary_is_no_error_of_the_device(
    estimator: Estimator,
    divergence: Divergence,
    kernels: bool,
    maker: Callable[..., CacheMaker],
    distillation: DistillConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Damaged unnoticed, and in none of the samples that are looked at before: the step is not made, and the sample
    is named."""
    from lowbit.distill import run as distill

    cache = maker(Path(distillation.cache.path), estimator=estimator).make()
    spoil(cache, 9)
    monkeypatch.setattr(Cache, "check_ids", lambda _: None)
    if not kernels:
        monkeypatch.setattr(batches, "reader", lambda layout, _: partial(decode, layout))
    config = replace(distillation, device="cuda", loss=DistillLossConfig(divergence, 0.8))
    with pytest.raises(DataError, match=DAMAGED):
        distill.train(config, tmp_path / "student")
    torch.cuda.synchronize()


@pytest.mark.parametrize("estimator", Estimator)
def test_a_batch_waits_for_nothing_on_its_way(estimator: Estimator) -> None:
    """Once compiled: bits from page-locked memory become targets while the host goes on."""
    from lowbit.distill.kernels.decode import Decoder

    layout, index = Layout(estimator, 16, 5000), torch.arange(512)
    assert isinstance(reader(layout, torch.device("cuda")), Decoder), "the check passed"
    places, noise = Places(index // 64, index % 64), Noise(3, estimator.value)
    p = Distributions(realistic(512, 5000), 5000)
    kept = sampler(estimator)(p, 16, noise, places)
    words, sizes = pack(*encode(layout, kept, p.entropy, noise, places), 8)
    rows = StoredRows(layout, words.to(torch.int32), sizes.cumsum(0) - sizes)
    tokens = torch.zeros(8, 64, dtype=torch.int64)
    batch = DistilledBatch(tokens, tokens, torch.ones(8, 64), None, 512, rows=(rows,)).pin()
    expected = unpack((rows,), 64)
    batch.to("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = batch.to("cuda").teacher
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found is not None and torch.equal(found.ids.cpu(), expected.ids)
    torch.testing.assert_close(found.weights.cpu(), expected.weights, rtol=1e-6, atol=2e-7)
    assert torch.equal(found.entropy.cpu(), expected.entropy)
