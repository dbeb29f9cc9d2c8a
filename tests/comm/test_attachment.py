"""Where our reductions take DeepSpeed's place: what is not as known is refused, the first result is looked at.

The engines here are stand-ins with the names and arguments that matter; real ones are in tests/dist.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.comm.deepspeed import Attachment, _parts_of_ranks
from lowbit.comm.flat import buckets
from lowbit.comm.whole import WholeReduction
from lowbit.errors import LowbitError


class Known:
    """ZeRO 1, 2 and 3 as 0.19.8 has them."""

    def gradient_reduction_w_predivide(self, tensor: Tensor, communication_data_type: torch.dtype) -> Tensor:
        return tensor

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: Any, communication_data_type: Any
    ) -> Any:
        return params_to_reduce


class Renamed:
    """A version in which they are gone."""


class Changed:
    """A version in which they take something else."""

    def gradient_reduction_w_predivide(self, bucket: Tensor) -> Tensor:
        return bucket

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(self, params_to_reduce: Any) -> Any:
        return params_to_reduce


def attachment(zero: Any, stage: int) -> Attachment:
    engine = SimpleNamespace(optimizer=zero, zero_reduce_bucket_size=lambda: 10)
    reducer = SimpleNamespace(sent=0.0, sent_inside=0.0)
    return Attachment(engine, stage, 0, 2, reducer, [], set())  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_attaches_to_what_it_knows_and_to_nothing_else(stage: int) -> None:
    zero = Known()
    attachment(zero, stage).attach()
    [name] = vars(zero)
    assert getattr(zero, name).__self__.__class__ is Attachment
    for other in (Renamed(), Changed()):
        with pytest.raises(LowbitError, match=r"is not what this version of lowbit attaches to; install 0\.19\.8"):
            attachment(other, stage).attach()
        assert not vars(other)


def test_stage_0_attaches_to_nothing() -> None:
    zero = Renamed()
    attachment(zero, 0).attach()
    assert not vars(zero)


@pytest.mark.parametrize(
    ("ours", "refused"),
    [
        (lambda x: x * 1.05, None),  # what six bits may do
        (lambda x: x / 2, "50%"),  # a mean where a sum is wanted
        (lambda x: x * 65_536, "6553500%"),
        (lambda x: -x, "200%"),
        (torch.zeros_like, "100%"),  # too small for a code, say
        (lambda x: x.flip(0), r"1[0-9][0-9]%"),  # right numbers in wrong places
        (lambda x: x * torch.nan, "nan%"),
    ],
)
def test_the_first_result_is_held_against_the_stock_reduction(ours: Any, refused: str | None) -> None:
    torch.manual_seed(1)
    stock = torch.randn(1000)
    one = attachment(Known(), 1)
    if refused is None:
        one._check(ours(stock), stock)
    else:
        with pytest.raises(LowbitError, match=rf"differ by {refused} from what DeepSpeed's own reduction gives"):
            one._check(ours(stock), stock)


def test_an_overflow_is_not_the_codes_fault() -> None:
    """Gradients that are not finite are judged by whoever scales or stops, not here; zeros are alike."""
    stock = torch.tensor([1.0, torch.inf])
    attachment(Known(), 1)._check(torch.full((2,), torch.nan), stock)
    attachment(Known(), 1)._check(torch.zeros(2), torch.zeros(2))


def test_a_rank_may_own_nothing() -> None:
    """ZeRO 3's cut: equal lengths, the last ones shorter or empty."""
    for n in (0, 1, 2, 3, 7, 100):
        for world in (1, 2, 3, 4, 7):
            parts = list(_parts_of_ranks(torch.arange(n), world))
            assert len(parts) == world and torch.equal(torch.cat(parts), torch.arange(n))
            assert all(len(part) <= -(-n // world) for part in parts)


def test_buckets_keep_order_and_size() -> None:
    tensors = [torch.empty(n) for n in (5, 3, 9, 1, 1, 20)]
    assert [[t.numel() for t in bucket] for bucket in buckets(tensors, 9)] == [[5, 3], [9], [1, 1], [20]]
    assert list(buckets([], 9)) == []


class Sum:
    """A stand-in for a reduction over two ranks with equal gradients: twice the gradient, once it is waited for."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.waited = flat, False

    def wait(self) -> None:
        assert not self.waited
        self.flat *= 2
        self.waited = True


def test_buckets_leave_from_the_last_and_in_order() -> None:
    """Each as soon as its gradients are there; at most two under way; what has none counts as zeros."""
    weights = [torch.full((4,), 1.0 + k, requires_grad=True) for k in range(6)]
    said: list[str] = []
    sums: list[Sum] = []

    def begin(index: int, flat: Tensor) -> Sum:
        assert sum(not one.waited for one in sums) < 2
        said.append(f"bucket {index}")
        sums.append(Sum(flat))
        return sums[-1]

    reduction = WholeReduction(weights, 8, begin)
    for k, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, k=k: said.append(f"gradient {k}"))  # type: ignore[no-untyped-call]

    def backward(used: list[int]) -> None:
        said.clear()
        for weight in weights:
            weight.grad = None
        x = torch.ones(4, requires_grad=True)
        for k in used:  # the last one's gradient comes first
            x = x * weights[k]
        x.sum().backward()

    def product(k: int, used: list[int]) -> float:
        return 2 * torch.tensor([1.0 + j for j in used if j != k]).prod().item()

    everything = list(range(6))
    for early in (False, True):
        if early:
            reduction.open()
        backward(everything)
        before = [word for word in said if word.startswith("bucket")]
        assert before == (["bucket 2", "bucket 1", "bucket 0"] if early else [])
        if early:  # its own hook runs first
            assert said.index("bucket 2") == said.index("gradient 4") - 1
        reduction.finish()
        assert [one for one in said if one.startswith("bucket")] == ["bucket 2", "bucket 1", "bucket 0"]
        for k, weight in enumerate(weights):
            assert weight.grad is not None and torch.equal(weight.grad, torch.full((4,), product(k, everything)))
    reduction.open()
    backward([0, 1, 2, 3, 5])  # the first bucket to leave is never complete: the others wait for it
    assert not any(word.startswith("bucket") for word in said)
    reduction.finish()
    assert weights[4].grad is not None and not weights[4].grad.any()
    assert weights[0].grad is not None and weights[0].grad[0] == product(0, [0, 1, 2, 3, 5])
    backward(everything)  # not opened: an earlier micro-batch
    assert not any(word.startswith("bucket") for word in said)
