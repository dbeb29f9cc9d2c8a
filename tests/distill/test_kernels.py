"""The kernels of caching, in Triton's interpreter and on a GPU: `kernel_cases` and what only a GPU has."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_codec import realistic

from lowbit.configs.schema_distill import DistillConfig, Estimator
from lowbit.data.dataset import Dataset
from lowbit.distill.codec import Layout, decode
from lowbit.distill.estimators import Chosen
from lowbit.distill.fast import Kernels, takes, wrong
from lowbit.distill.inspect import rescore
from lowbit.distill.making import CacheMaker
from lowbit.distill.noise import Noise, Places
from lowbit.distill.rows import Head, RowMaker
from lowbit.distill.teacher import open_teacher

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


def interpreted(*groups: str) -> None:
    """Groups of `kernel_cases` in a process of their own: the interpreter is chosen when Triton is imported."""
    script = Path(__file__).with_name("kernel_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script, *groups], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(groups)


QUICK = ["first", "broken", "damaged", "bits", "average"]
MORE = ["alone", "selections", "logits_as_they_come", "large", "more_bits", "averages", "checked"]


@pytest.mark.slow
@NEEDS_TRITON
def test_the_kernels_in_the_interpreter() -> None:
    interpreted(*QUICK)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@NEEDS_TRITON
@pytest.mark.parametrize("group", MORE)
def test_every_case_in_the_interpreter(group: str) -> None:
    interpreted(group)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@NEEDS_TRITON
def test_they_compile_for_hopper_and_nothing_spills() -> None:
    script = Path(__file__).with_name("kernel_compile.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 28 and all(int(spilled) == 0 for *_, spilled, _ in lines), done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("group", [*QUICK, *MORE])
def test_on_a_gpu(group: str) -> None:
    import kernel_cases

    kernel_cases.GROUPS[group]("cuda")


def heads(estimator: Estimator, vocab: int, width: int = 64) -> tuple[Layout, Noise, Head]:
    """An LM head that spreads logits like a model's, in BF16."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    matrix = torch.randn(vocab, width, generator=generator, device="cuda").to(torch.bfloat16) / 4
    return Layout(estimator, 16, vocab), Noise(3, estimator.value), Head(matrix, None, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("estimator", Estimator)
def test_nothing_waits_for_the_device(estimator: Estimator) -> None:
    """Once compiled; words are those of the same rows asked for at once."""
    layout, noise, head = heads(estimator, 16_384)
    make = RowMaker(layout, noise, head)
    assert make._kernels is not None, "the check passed"
    hidden = torch.randn(8 * 512, 64, device="cuda").to(torch.bfloat16)
    weights = torch.ones(8, 512, device="cuda")
    expected = make(hidden, weights, 8).wait()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = [make(hidden, weights, sample) for sample in (8, 16)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, wanted in zip(rows[0].wait(), expected, strict=True):
        assert torch.equal(got, wanted)
    assert not torch.equal(rows[1].wait()[0], expected[0]) or estimator is Estimator.topk


@pytest.mark.gpu
@pytest.mark.parametrize("estimator", Estimator)
def test_kernels_and_pytorch_keep_the_same(estimator: Estimator) -> None:
    """Decoded rows of whole samples agree but for a few at boundaries."""
    layout, noise, head = heads(estimator, 16_384)
    hidden = torch.randn(4 * 256, 64, device="cuda").to(torch.bfloat16)
    weights = torch.ones(4, 256, device="cuda")
    weights[:, -1] = 0
    found = []
    for kernels in (True, False):
        make = RowMaker(layout, noise, head)
        assert make._kernels is not None
        if not kernels:
            make._kernels = None
        words, sizes, sums = make(hidden, weights, 0).wait()
        assert sums[0] == 4 * 255
        found.append((decode(layout, words, sizes.cumsum(0) - sizes, 256), sums))
    (ours, our_sums), (theirs, their_sums) = found
    torch.testing.assert_close(our_sums, their_sums, rtol=2e-3, atol=1e-6)
    same = (ours.ids.sort(dim=2).values == theirs.ids.sort(dim=2).values).all(dim=2)
    if estimator is not Estimator.topk:  # BF16 logits are often equal at its edge, where PyTorch takes any
        assert float(same.float().mean()) > 0.98
    assert float((ours.entropy - theirs.entropy).abs().max()) <= 1 / 256


@pytest.mark.gpu
@pytest.mark.parametrize("estimator", Estimator)
def test_memory_beyond_the_logits(estimator: Estimator) -> None:
    """A quarter of a chunk's logits at most, at 128k tokens."""
    vocab, rows = 128_256, 1024
    logits = realistic(rows, vocab).to("cuda", torch.bfloat16)
    index = torch.arange(rows, device="cuda")
    layout, noise, device = Layout(estimator, 16, vocab), Noise(1, "x"), torch.device("cuda")
    assert takes(layout, device) and wrong(layout, None, 1.0, torch.bfloat16, device) is None
    kernels, out = Kernels.of(layout, noise, None, 1.0, device), Chosen.empty(rows, 16, device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.choose(logits, Places(index, index), kernels.key, out)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 4


@pytest.mark.gpu
def test_a_cache_made_by_the_kernels_is_verified(distillation: DistillConfig, dataset: Dataset, tmp_path: Path) -> None:
    teacher = open_teacher(distillation.teacher, distillation.engine, torch.device("cuda"))
    made = CacheMaker(tmp_path / "a", distillation, 512, teacher, dataset)
    assert made._row_maker._kernels is not None
    found = rescore(made.make(), 8, 0, "cuda")
    assert found.identical == found.samples and found.entropy_difference == 0
