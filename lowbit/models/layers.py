"""The layers everything else is built from: Linear, GroupedLinear, RMSNorm, Embedding, and the KV-cache protocol.

Parameters are FP32 masters. A matrix product runs in its input's type: the weight is rounded to that type at use,
so the only state is the FP32 weight and a checkpoint never depends on the compute type. The rounding costs
6 bytes a weight (read 4, write 2) each micro-batch; for 0.4 billion weights on a 4.3 TB/s GPU that is 0.6 ms
beside a micro-batch of about 200 ms, which is why training keeps no second copy. Decoding reads every weight once
a token and does gain: there `frozen_weights` holds the rounded copies while nothing trains.

RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps) * weight, its statistics in FP32.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.errors import DataError
from lowbit.models import kernels
from lowbit.models.low_rank import LowRank
from lowbit.models.rope import Rope


class Linear(nn.Module):
    """y = x @ weight.T without bias; FP32 master weight [out, in], product in the type of x."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.low_rank: LowRank | None = None
        self.frozen: Tensor | None = None

    def effective(self) -> Tensor:
        """The FP32 weight [out, in] that products multiply with: the parameter, or its sum with what is learned
        beside it (`low_rank`)."""
        if self.low_rank is None:
            return self.weight
        total: Tensor = self.low_rank(self.weight)
        return total

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        weight = self.effective().to(x.dtype) if self.frozen is None else self.frozen
        return F.linear(x, weight)

    def freeze(self, dtype: torch.dtype) -> None:
        """Make and use a copy of the weight as products in `dtype` read it; see `frozen_weights`."""
        self.frozen = self.effective().detach().to(dtype)

    def project_together(self, x: Tensor, others: "Sequence[Linear]") -> tuple[Tensor, ...]:
        """See `project`; a layer that gains from a shared input overrides this."""
        return tuple(linear(x) for linear in (self, *others))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class GroupedLinear(nn.Module):
    """One Linear for each of several groups of rows: experts. FP32 master weight [experts, out, in].

    Rows [offsets[e - 1], offsets[e]) of x belong to expert e; an expert may have none. One product for all of them.
    """

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.experts = experts
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.zeros(experts, out_features, in_features))
        self.frozen: Tensor | None = None

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [rows, in], offsets int32 [experts], the last one equal to rows -> [rows, out]."""
        weight = self.weight.to(x.dtype) if self.frozen is None else self.frozen
        return grouped_product(x, weight, offsets)

    def freeze(self, dtype: torch.dtype) -> None:
        """See `Linear.freeze`."""
        self.frozen = self.weight.detach().to(dtype)

    def project_together(self, x: Tensor, offsets: Tensor, others: "Sequence[GroupedLinear]") -> tuple[Tensor, ...]:
        """Outputs of layers that read the same rows; see `Linear.project_together`."""
        return tuple(linear(x, offsets) for linear in (self, *others))

    def extra_repr(self) -> str:
        return f"{self.experts} x {self.in_features}, {self.out_features}"


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each group's rows times its own matrix: x [rows, in], weight [experts, out, in] -> [rows, out] in their type.

    In BF16 PyTorch's grouped kernel. In FP32 that exists on the CPU only, and the compiler does not know it: there it
    is an operator of our own.
    """
    if x.dtype is torch.bfloat16:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    product: Tensor = _grouped(x, weight, offsets)
    return product


@torch.library.custom_op("lowbit::grouped_product", mutates_args=())
def _grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, (begin, end) in enumerate(pairwise([0, *ends])):
        torch.mm(x[begin:end], weight[expert].t(), out=out[begin:end])
    return out


@_grouped.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("lowbit::grouped_product_grad", mutates_args=())
def _grouped_grad(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Gradient of the weight: grad [rows, out], x [rows, in] -> [experts, out, in]."""
    out = x.new_empty(len(offsets), grad.shape[1], x.shape[1])
    for expert, (begin, end) in enumerate(pairwise([0, *offsets.tolist()])):
        torch.mm(grad[begin:end].t(), x[begin:end], out=out[expert])
    return out


@_grouped_grad.register_fake
def _(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])


def _grouped_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    dx = _grouped(grad, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    dw = _grouped_grad(grad, x, offsets) if ctx.needs_input_grad[1] else None
    return dx, dw, None


_grouped.register_autograd(_grouped_backward, setup_context=_grouped_setup)


def project(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """The outputs of layers that read the same x [..., in]: [..., out] each."""
    return linears[0].project_together(x, linears[1:])


def weights_and_state(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model, live: the parameters, and buffers that are state (routers' biases)."""
    return {name: p.detach() for name, p in model.named_parameters()} | state_buffers(model)


def state_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are state, by full name."""
    return {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict(keep_vars=True)}


@contextmanager
def frozen_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round every Linear's weight to `dtype` once and use the copies until the context ends.

    For generation and other passes in which no weight changes and no gradient is wanted: none reaches the masters
    inside it. A low-bit layer's copy holds the numbers that its quantiser makes of the weight.
    """
    linears = [module for module in model.modules() if isinstance(module, (Linear, GroupedLinear))]
    try:
        for linear in linears:
            linear.freeze(dtype)
        yield
    finally:
        for linear in linears:
            linear.frozen = None


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension; statistics and product in FP32, result in the type of x."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)

    def with_sum(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and that normalised; one kernel on a GPU."""
        if x.is_cuda:
            total, normed = kernels.add_norm(x, delta, self.weight, self.eps)
            return total, normed
        x = x + delta
        return x, self(x)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Embedding(nn.Module):
    """Rows of an FP32 table [rows, width] by token id."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> FP32 [..., width].

        Raises DataError for no tokens at all, another type, and on a CPU for a token without a row.
        """
        if tokens.dtype not in (torch.int32, torch.int64) or not tokens.numel():
            raise DataError(f"tokens are {tokens.dtype} {list(tokens.shape)}: they must be int64, and at least one")
        try:
            return F.embedding(tokens, self.weight)
        except IndexError:
            rows = self.weight.shape[0]
            raise DataError(f"tokens lie in {int(tokens.min())}..{int(tokens.max())}, not in 0..{rows - 1}") from None

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class KVCache(Protocol):
    """Keys and values of the tokens that sequences have seen; what `Transformer.forward` asks of a cache.

    How they are stored is the cache's business (blocks, eight bits), so it attends to them itself.
    """

    def rope(self, new_tokens: int, tables: Callable[[Tensor], Rope]) -> Rope:
        """Rotary tables of the next T tokens of each row; `tables` gives them for positions, int64 [B, T]."""
        ...

    def mask(self, new_tokens: int, window: int | None) -> Any:
        """What `attend` has to know of what the next T tokens see, in layers with this window."""
        ...

    def attend(self, layer: int, q: Tensor, new: tuple[Tensor, Tensor] | None, mask: Any) -> Tensor:
        """Store the next tokens' keys and values, where the layer has its own, and attend to all of the row's.

        Args:
            layer: counted among those that have keys and values of their own. q: [B, H, T, D]. new: [B, Hkv, T, D]
                each. mask: of `mask`.

        Returns:
            [B, H, T, D].
        """
        ...
