"""The codecs by name, each in its fastest form on the device that it is given."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.comm import message as messages
from lowbit.comm.codec import Bf16Codec, Codec, Fp32Codec, IntCodec
from lowbit.comm.fast import FastCoder
from lowbit.comm.grid import SQ48, SQUINCH, Grid
from lowbit.comm.noise import Noise
from lowbit.comm.squinch import ReferenceSquinch
from lowbit.errors import ConfigError

if TYPE_CHECKING:
    from lowbit.comm.kernels.coder import TritonCoder


class Squinch(ReferenceSquinch):
    """squinch or sq48: Triton kernels on a GPU, `fast` on a CPU, the reference elsewhere and, on a CPU, with noise.
    One format, the same bytes from all three.
    """

    def __init__(self, grid: Grid = SQ48, search: bool = True, warps: int | None = None) -> None:
        """warps: of a GPU's program; None: what the kernels are written for."""
        super().__init__(grid, search)
        self._warps = warps
        self._cpu = FastCoder(grid, search)
        self._gpu: TritonCoder | None = None

    def encode(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        if not self._quick(x, noise):
            return super().encode(x, noise)
        return self._encode_rows(x, 1, x.numel(), [noise] if noise else None)[0]

    def encode_rows(self, x: Tensor, rows: int, per_row: int, noise: Noise | None = None) -> Tensor:
        if not self._quick(x, noise):
            return super().encode_rows(x, rows, per_row, noise)
        return self._encode_rows(x, rows, per_row, [noise.fork(r) for r in range(rows)] if noise else None)

    def _quick(self, x: Tensor, noise: Noise | None) -> bool:
        """Whether there is something faster than the reference."""
        return x.is_cuda or (x.device.type == "cpu" and noise is None)

    def _encode_rows(self, x: Tensor, rows: int, per_row: int, noise: list[Noise] | None) -> Tensor:
        out = torch.empty(rows, self.nbytes(per_row), dtype=torch.uint8, device=x.device)
        if x.is_cuda:
            self.on_gpu().encode(x.contiguous(), rows, per_row, out, noise or None)
        else:
            for r in range(rows):
                self._cpu.encode(x[r * per_row : (r + 1) * per_row], per_row, out[r])
        return out

    def decode(self, message: Tensor, n: int) -> Tensor:
        out = torch.empty(n, dtype=torch.float32, device=message.device)
        self.decode_rows(message[None], n, out)
        return out

    def decode_rows(self, messages_: Tensor, per_row: int, out: Tensor) -> None:
        if out.is_cuda:
            self.on_gpu().decode(messages_.contiguous(), per_row, out)
        elif out.device.type != "cpu":
            super().decode_rows(messages_, per_row, out)
        else:
            for r in range(messages_.shape[0]):
                messages.check_header(self.grid, per_row, messages_[r])
                self._cpu.decode(messages_[r], per_row, out[r * per_row : (r + 1) * per_row])

    def sum_decode(self, messages_: Tensor, n: int, factor: float, out: Tensor | None = None) -> Tensor:
        if messages_.device.type not in ("cpu", "cuda"):
            return super().sum_decode(messages_, n, factor, out)
        if out is None:
            out = torch.empty(n, dtype=torch.float32, device=messages_.device)
        if messages_.is_cuda:
            self.on_gpu().sum(messages_.contiguous(), n, factor, out, encode=False)
        else:
            self._check(messages_, n)
            self._cpu.sum_decode(messages_, n, factor, out)
        return out

    def sum_encode(self, messages_: Tensor, n: int, factor: float, noise: Noise | None = None) -> Tensor:
        if not self._quick(messages_, noise):
            return super().sum_encode(messages_, n, factor, noise)
        out = torch.empty(self.nbytes(n), dtype=torch.uint8, device=messages_.device)
        if messages_.is_cuda:
            self.on_gpu().sum(messages_.contiguous(), n, factor, out, encode=True, noise=noise)
        else:
            self._check(messages_, n)
            self._cpu.sum_encode(messages_, n, factor, out)
        return out

    def _check(self, messages_: Tensor, n: int) -> None:
        """Headers, where looking at them costs nothing."""
        for message in messages_:
            messages.check_header(self.grid, n, message)

    def on_gpu(self) -> "TritonCoder":
        """The Triton coder: Triton is there only with a CUDA build of PyTorch."""
        if self._gpu is None:
            from lowbit.comm.kernels.coder import WARPS, TritonCoder

            self._gpu = TritonCoder(self.grid, self.search, self._warps or WARPS)
        return self._gpu


CODECS: dict[str, Callable[[], Codec]] = {
    "fp32": Fp32Codec,
    "bf16": Bf16Codec,
    "int8": lambda: IntCodec(8),
    "int4": lambda: IntCodec(4),
    "squinch": lambda: Squinch(SQUINCH),
    "sq48": lambda: Squinch(SQ48),
    "sq48_fast": lambda: Squinch(SQ48, search=False),
}


def make_codec(name: str) -> Codec:
    """The codec of that name, or `ConfigError` with the names there are."""
    if name not in CODECS:
        raise ConfigError(f"comm codec {name!r} is not one of {', '.join(CODECS)}")
    return CODECS[name]()
