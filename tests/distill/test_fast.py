"""When kernels serve: after a check that finds what they do otherwise, and with a warning where they do not."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.data.batch import Batch
from lowbit.distill import fast
from lowbit.distill import rows as rows_module
from lowbit.distill.blocks import Distributions
from lowbit.distill.codec import Decoded, Layout, decode, encode, pack
from lowbit.distill.estimators import Chosen, sampler
from lowbit.distill.fast import Kernels, difference, takes, wrong
from lowbit.distill.making import CacheMaker
from lowbit.distill.noise import Noise, Places
from lowbit.distill.shards import shard_name
from lowbit.distill.teacher import Teacher
from lowbit.errors import NonFiniteError

CPU = torch.device("cpu")


def pretended(layout: Layout, noise: Noise, fault: str) -> Kernels:
    """PyTorch in the kernels' place, with a fault."""

    def choose(logits: Tensor, places: Places, key: Tensor, out: Chosen) -> None:
        assert key.tolist() == list(noise.key)
        p = Distributions(logits.clone(), layout.vocab_size)
        kept = sampler(layout.estimator)(p, layout.targets, noise, places)
        parts = vars(kept) | {"lse": p.lse, "entropy": p.entropy}
        for name, to in (vars(out.kept) | {"lse": out.lse, "entropy": out.entropy}).items():
            part = parts[name]
            if name == fault:
                part = (part + 1) % layout.vocab_size if part.dtype is torch.int64 else part * 1.01
            to.copy_(part)

    def code(chosen: Chosen, places: Places, key: Tensor, counted: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        words, sizes = pack(*encode(layout, chosen.kept, chosen.entropy, noise, places, counted), samples)
        if fault == "codes":
            words[3] ^= 1
        return torch.nn.functional.pad(words.to(torch.int32), (0, 9)), sizes

    return Kernels(layout.targets, choose, code, torch.tensor(noise.key))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Kernels with a fault, on every device."""

    def make(fault: str) -> None:
        wrong.cache_clear()
        monkeypatch.setattr(rows_module, "takes", lambda layout, device: True)
        monkeypatch.setattr(Kernels, "of", staticmethod(lambda layout, noise, *_: pretended(layout, noise, fault)))

    yield make
    wrong.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("estimator", Estimator)
def test_the_check_finds_each_fault(estimator: Estimator, dtype: torch.dtype, pretend: Callable[[str], None]) -> None:
    layout = Layout(estimator, 8, 700)

    def found(fault: str) -> str | None:
        pretend(fault)
        return difference(layout, None, 1.0, dtype, CPU)

    assert found("none") is None
    assert found("lse") == "lse differs" and found("entropy") == "entropy differs"
    assert str(found("ids")).startswith("other tokens are chosen in 6")
    assert found("weights") == "weights of the same tokens differ"
    assert found("codes") == "the codes differ"
    if estimator is Estimator.varopt:
        assert found("rest") == "rest of the same tokens differ"


@pytest.mark.parametrize("fault", ["none", "weights", "no Triton"])
def test_a_cache_is_made_either_way(
    fault: str,
    maker: Callable[..., CacheMaker],
    tmp_path: Path,
    pretend: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same bytes through kernels that pass, and through PyTorch with a warning where they fail or are none."""
    monkeypatch.setattr(logging.getLogger("lowbit"), "propagate", True)
    expected = maker(tmp_path / "a").make()
    pretend(fault)
    if fault == "no Triton":

        def missing(*_: object) -> Kernels:
            raise ModuleNotFoundError("No module named 'triton'")

        monkeypatch.setattr(Kernels, "of", staticmethod(missing))
    got = maker(tmp_path / "b").make()
    assert got.manifest["shards"] == expected.manifest["shards"]
    said = [r.message for r in caplog.records if "are not used here" in r.message]
    what = "the kernels that choose and code 8 targets of 257 tokens by varopt are not used here, PyTorch is: "
    reason = {
        "weights": "weights of the same tokens differ",
        "no Triton": "ModuleNotFoundError: No module named 'triton'",
    }
    assert said == ([what + reason[fault]] if fault in reason else [])


def test_a_shard_with_numbers_that_are_not_finite_is_not_written(
    maker: Callable[..., CacheMaker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though rows are looked at one micro-batch late: also in a shard's last one."""
    made, calls = maker(tmp_path / "c"), []
    hidden = Teacher.hidden

    def late(self: Teacher, batch: Batch) -> Tensor:
        calls.append(1)
        out = hidden(self, batch)
        return out * torch.nan if len(calls) == 4 else out  # two micro-batches a shard: the second one's last

    monkeypatch.setattr(Teacher, "hidden", late)
    with pytest.raises(NonFiniteError, match="not finite at sample 6, position 0: the shards written so far are good"):
        made.make()
    assert [p.name for p in sorted((tmp_path / "c").glob("shard-*.targets"))] == [shard_name(0)], "the first is good"


def test_which_devices_and_vocabularies_have_kernels() -> None:
    layout = Layout(Estimator.varopt, 16, 4096)
    assert not takes(layout, CPU)
    assert takes(layout, torch.device("cuda")) == (torch.version.cuda is not None)
    assert not takes(replace(layout, vocab_size=fast.MOST_TOKENS + 1), torch.device("cuda"))


@pytest.mark.parametrize("fault", ["none", "ids", "weights", "entropy", "no Triton"])
def test_a_cache_is_read_either_way(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By kernels that pass their check; by PyTorch, and with a warning, where they fail or are none."""
    layout = Layout(Estimator.varopt, 8, 257)
    assert fast.reader(layout, CPU).func is decode, "on a CPU"

    def pretended(words: Tensor, starts: Tensor, length: int) -> Decoded:
        found = decode(layout, words, starts, length)
        return replace(found, **{fault: getattr(found, fault) * 2 + 1}) if hasattr(found, fault) else found

    def kernels(_: Layout) -> fast.Reader:
        if fault == "no Triton":
            raise ModuleNotFoundError("No module named 'triton'")
        return pretended

    monkeypatch.setattr(fast, "takes", lambda layout, device: True)
    monkeypatch.setattr(fast, "_decoder", kernels)
    monkeypatch.setattr(logging.getLogger("lowbit"), "propagate", True)
    fast.reader.cache_clear()
    try:
        found = fast.reader(layout, CPU)
    finally:
        fast.reader.cache_clear()
    said = [r.message for r in caplog.records if "are not used here" in r.message]
    if fault == "none":
        assert found is pretended and not said
    else:
        reason = {"no Triton": "ModuleNotFoundError: No module named 'triton'"}.get(fault, f"{fault} differ")
        what = "the kernels that read 8 targets of 257 tokens by varopt are not used here, PyTorch is: "
        assert found is not pretended and said == [what + reason]
