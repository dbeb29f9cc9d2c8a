"""Weights that stay packed while a sampler decodes: fewer bytes to read at few rows.

A layer of four-bit weights (`nvfp4_w4a16`) in BF16 on a GPU holds its weight twice: as codes and scales for up to 32
rows, where reading it is all the work, and as the BF16 numbers that they stand for, for more rows (a prefill), where
multiplying is. Both are the same numbers: what changes at the border is the order of sums. Weights of eight bits
(`mxfp8_w8a16`, `fp8_w8a16`) have a kernel, too, which is not used yet: a copy multiplies.

A layer takes part whose kernel passes its check on this device; otherwise a warning names it and the BF16 copy serves
every number of rows.
"""

import logging
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.errors import in_a_line
from lowbit.infer import kernels
from lowbit.infer.arrangement import TILE_ROWS, arranged
from lowbit.infer.unfinished import Unfinished
from lowbit.models.layers import Linear
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import candidates
from lowbit.quant.formats import E2M1, E4M3
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import Product, Side, Stream
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.product import Wanted, factor, pack
from lowbit.quant.quantise import quantise
from lowbit.quant.spec import Outer, QuantSpec, Scale

logger = logging.getLogger("lowbit")

PAYING = (4,)
"""Bits an element. With 8 a step of the 8B shape gains on BF16 at one row, and loses at 8 (docs/RESULTS.md)."""
FEW_ROWS = 32
"""Most rows for which the packed form multiplies."""
CHECKED = ((192, 8192), (192, 2944), (208, 640), (16_400, 128))
CHECKED_ROWS = (1, 5, 16, FEW_ROWS)
"""Rows and columns of the check's weights, and rows of x: between them products are cut in every way that there is for
few rows, but for the number of programs that share the steps: 1, 4 unequal and 16 equal shares."""


def takes(spec: QuantSpec | None) -> bool:
    """Whether there is a kernel for weights of this format."""
    if spec is None:
        return False
    nvfp4 = spec.element is E2M1 and spec.block == (1, 16) and spec.outer in (Outer.TENSOR, Outer.ROW)
    mxfp8 = spec.element is E4M3 and spec.block == (1, 32) and spec.scale in (Scale.E8M0_UP, Scale.E8M0_FLOOR)
    fp8 = spec.element is E4M3 and spec.scale is Scale.FP32
    return nvfp4 or mxfp8 or fp8


def weight_only(policy: LinearPolicy) -> bool:
    """Whether a layer reads its input as it is and its weight in a format that there is a kernel for."""
    fprop = policy.fprop
    return fprop.left.spec is None and fprop.rotation == 0 and not policy.mean_split and takes(fprop.right.spec)


class PackedLinear(LowbitLinear):
    """A `LowbitLinear` for sampling, with its weight in few bits for few rows."""

    frozen_data: Tensor | None = None
    """uint8 [out / 16, steps, 1024]: codes, arranged."""
    frozen_scales: Tensor | None = None
    """uint8 [out / 16, steps, 128 or 32], where blocks have scales; arranged."""

    @torch.no_grad()
    def freeze(self, dtype: torch.dtype) -> None:
        """Make both forms of the weight."""
        stream = Stream(self.key, self.clock, Product.FPROP, Side.RIGHT)
        made = factor(self.effective(), self.policy.fprop.right, stream, None, dtype, wanted=Wanted.BOTH)
        self.frozen, after = made.operand().to(dtype), made.after()
        self.frozen_scale = None if after is None else after.expand(self.out_features, 1).contiguous()
        self.frozen_data, self.frozen_scales = arranged(pack(made), self.out_features)

    def project_together(self, x: Tensor, others: Sequence[Linear]) -> tuple[Tensor, ...]:
        """See `LowbitLinear.project_together`."""
        flat = x.reshape(-1, x.shape[-1])
        return tuple(finish(product).view(*x.shape[:-1], -1) for product in self.begin(flat, others))

    def begin(self, x: Tensor, others: Sequence[Linear]) -> tuple[Unfinished, ...]:
        """The products of x [rows, in] with this layer's weight and those of others that read it, too."""
        layers = [layer for layer in (self, *others) if isinstance(layer, PackedLinear)]
        if len(layers) <= len(others):
            return tuple(map(Unfinished.of, super().project_together(x, others)))
        return tuple(layer.form.begin(x) for layer in layers)

    @property
    def form(self) -> "Forms":
        """The weight in both forms."""
        assert self.frozen is not None and self.frozen_data is not None
        return Forms(self.frozen, self.frozen_data, self.frozen_scales, self.frozen_scale)


class Forms(NamedTuple):
    """A weight in both forms."""

    dense: Tensor
    """BF16 [out, in]."""
    data: Tensor
    scales: Tensor | None
    """See `arrangement.arranged`."""
    after: Tensor | None
    """FP32 [out, 1]: what both are to be multiplied by."""

    def begin(self, x: Tensor) -> Unfinished:
        """x [rows, in] -> [rows, out]: the packed form for few rows."""
        if 0 < x.shape[0] <= FEW_ROWS:
            return begin_product(x, self.data, self.scales, self.after)
        return Unfinished(F.linear(x, self.dense)[None], self.after, x.dtype)


def begin_product(x: Tensor, data: Tensor, scales: Tensor | None, after: Tensor | None) -> Unfinished:
    """x [rows, in] times a packed weight."""
    y: Unfinished = kernels.begin_product(x, data, scales, after)
    return y


def finish(product: Unfinished) -> Tensor:
    """[rows, columns], rounded as the emulation's: its product first, where a copy multiplied, and then the result."""
    if product.parts.is_cuda:
        y: Tensor = kernels.finish(product)
        return y
    return product.written_out()


def pack_layers(model: Transformer) -> int:
    """Exchange the weight-only layers of a sampler's model that gain from it; how many."""
    device = model.head_weight.device
    if device.type != "cuda" or model.compute_dtype is not torch.bfloat16:
        return 0
    exchanged = 0
    for name, layer in candidates(model).items():
        if (
            not isinstance(layer, LowbitLinear)
            or not weight_only(layer.policy)
            or layer.in_features % kernels.PACKED_MULTIPLE
            or layer.out_features % TILE_ROWS
        ):
            continue
        spec = layer.policy.fprop.right.spec
        if spec is None or spec.element.bits not in PAYING or layer.retained is not None or layer.choice is not None:
            continue
        if wrong(spec, device) is not None:
            continue
        packed = PackedLinear.of(layer, layer.policy, layer.key, layer.clock, name)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, packed)
        exchanged += 1
    return exchanged


@cache
def wrong(spec: QuantSpec, device: torch.device) -> str | None:
    """Why the kernel cannot be used for a format on a device, with a warning the first time; None if it can.

    Random numbers through weights of every kind of shape; and the identity, which shows codes and scales of the first
    and the last columns as they were unpacked.
    """
    generator = torch.Generator().manual_seed(1)
    rows, width = CHECKED[0]
    ends = torch.eye(width)[[*range(64), *range(width - 64, width)]]
    sizes = torch.logspace(-3, 3, rows)[:, None]
    why = None
    try:
        for height, columns in CHECKED:
            weight = torch.randn(height, columns, generator=generator)
            inputs = [torch.randn(n, columns, generator=generator) for n in CHECKED_ROWS]
            if (height, columns) == CHECKED[0]:
                weight, inputs = weight * sizes, [*inputs, *torch.split(ends, FEW_ROWS)]
            if not _agrees(spec, weight, inputs, device):
                why = "it computes something else than the emulation"
    except torch.OutOfMemoryError:  # which says nothing of the kernel
        raise
    except Exception as error:  # whatever a compiler or a driver may raise
        why = in_a_line(error)
    if why is not None:
        logger.warning("packed weights in %s are not used here, BF16 copies are: %s", spec.name, why)
    return why


def _agrees(spec: QuantSpec, weight: Tensor, inputs: Sequence[Tensor], device: torch.device) -> bool:
    """Whether products with a packed weight are those with the numbers that it stands for, up to BF16 and sums."""
    made = quantise(weight, spec)
    after, dense = made.after(), made.operand().float()
    data, scales = (None if part is None else part.to(device) for part in arranged(made.pack(), len(weight)))
    assert data is not None
    times = torch.ones(1, 1) if after is None else after.t()
    for x in inputs:
        given = x.to(device, torch.bfloat16)
        got = finish(begin_product(given, data, scales, None if after is None else after.to(device))).float().cpu()
        expected, size = (f(given.float().cpu()) @ f(dense).t() * times for f in (torch.clone, torch.abs))
        if not bool(((got - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * size).all()):
            return False
    return True
