"""What a backend is: something that quantises and multiplies factors of the formats it has hardware for.

Asked with a product of a policy, the sizes of a layer and the device, a backend says why it cannot (`refuses`), or
nothing. If it can, it makes both factors (`factor`), as codes and scales, and multiplies them (`multiply`). Codes and
scales are those of the reference quantiser, bit for bit; the product differs from the reference's in the order of its
sums, and in how many bits a tensor core carries along.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lowbit.quant.philox import Stream
from lowbit.quant.policy import EMULATED, LinearPolicy, ProductPolicy
from lowbit.quant.quantise import Memory
from lowbit.quant.quantised import Quantised
from lowbit.quant.spec import QuantSpec


@dataclass(frozen=True)
class Device:
    """What decides which formats a device multiplies itself."""

    kind: str
    """cpu, cuda, ..., or meta: some device that is not known."""
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability."""
    cuda: tuple[int, int] = (0, 0)
    """Version of CUDA that PyTorch was built with."""
    name: str = ""


UNKNOWN = Device("meta")


def describe_device(device: torch.device | None) -> Device:
    """None: some device that is not known."""
    if device is None or device.type == "meta":
        return UNKNOWN
    if device.type != "cuda" or torch.version.cuda is None:
        return Device(device.type)
    major, minor = torch.version.cuda.split(".")[:2]
    capability = torch.cuda.get_device_capability(device)
    return Device("cuda", capability, (int(major), int(minor)), torch.cuda.get_device_name(device))


@dataclass(frozen=True)
class Sizes:
    """Of a layer's weight [out, in]."""

    in_features: int
    out_features: int

    def of(self, product: str) -> tuple[int | None, int, int | None]:
        """(m, n, k) of fprop, dgrad or wgrad: left [m, k], right [n, k]. None: the number of tokens, which varies."""
        if product == "fprop":
            return None, self.out_features, self.in_features
        if product == "dgrad":
            return None, self.in_features, self.out_features
        return self.out_features, self.in_features, None


@dataclass(frozen=True)
class Native(Quantised):
    """A factor as a backend other than the emulation multiplies it."""

    backend: str = EMULATED

    @classmethod
    def of(cls, quantised: Quantised, backend: str) -> "Native":
        """The same codes and scales."""
        q = quantised
        return cls(q.codes, q.scales, q.outer, q.shape, q.spec, backend)


def with_backend(policy: ProductPolicy, backend: str) -> ProductPolicy:
    """The product with the backend that multiplies it; a BF16 product stays what it is."""
    if not policy.quantised or backend == policy.backend:
        return policy
    return replace(policy, left=replace(policy.left, backend=backend), right=replace(policy.right, backend=backend))


def bind(policy: LinearPolicy, fprop: str, dgrad: str, wgrad: str) -> LinearPolicy:
    """The policy with a backend for each product."""
    return replace(
        policy,
        fprop=with_backend(policy.fprop, fprop),
        dgrad=with_backend(policy.dgrad, dgrad),
        wgrad=with_backend(policy.wgrad, wgrad),
    )


class Backend(Protocol):
    """See the module's docstring."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def note(self) -> str:
        """What a report adds to the name, before what the start-up check found; empty if there is nothing to say."""
        ...

    def takes(self, left: QuantSpec | None, right: QuantSpec | None) -> bool:
        """Whether hardware of this kind exists for factors in these formats."""
        ...

    def refuses(self, policy: ProductPolicy, product: str, sizes: Sizes, device: Device) -> str | None:
        """Why this device cannot compute `product` (fprop, dgrad or wgrad) of a layer, in a few words; None: it can.

        Of formats that it takes.
        """
        ...

    def factor(
        self,
        x: Tensor,
        spec: QuantSpec,
        amax: Tensor | None = None,
        stream: Stream | None = None,
        memory: Memory | None = None,
    ) -> Quantised:
        """x [rows, k] BF16 or FP32, any strides, already rotated -> codes and scales; see `quantise_values`."""
        ...

    def factor_pair(
        self, x: Tensor, spec: QuantSpec, spec_t: QuantSpec, amax: Tensor | None = None
    ) -> tuple[Quantised, Quantised] | tuple[None, None]:
        """Factors of x in `spec` and of x^T in `spec_t` from one reading of x; (None, None) where it cannot."""
        ...

    def multiply(
        self, left: Quantised, right: Quantised, out_dtype: torch.dtype, after: Tensor | None = None, fast: bool = False
    ) -> Tensor:
        """left [m, k], right [n, k] -> left right^T [m, n], with every scale, in `out_dtype` (BF16 or FP32).

        after: one more FP32 factor of the result, [1, 1], [m, 1] or [1, n]. fast: the sum may be carried in fewer bits
        than FP32 where the hardware gains by it.
        """
        ...


def dotted(version: tuple[int, int]) -> str:
    """(9, 0) -> 9.0."""
    return f"{version[0]}.{version[1]}"
