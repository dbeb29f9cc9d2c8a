"""Oracles written apart from lowbit: numpy with ml_dtypes' casts (C++), gfloat (Python), torchao (PyTorch).

Everything takes and returns numpy arrays. FP32 arithmetic is numpy's (IEEE, no contraction); where an order of
operations matters it is spelled out here once more from the papers' and libraries' descriptions, not imported from
lowbit.
"""

from dataclasses import dataclass

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from lowbit.quant import formats

Array = NDArray[np.float32]

ML_DTYPES = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
}
GFLOAT = {
    "E2M1": gf.format_info_ocp_e2m1,
    "E2M3": gf.format_info_ocp_e2m3,
    "E3M2": gf.format_info_ocp_e3m2,
    "E4M3": gf.format_info_ocp_e4m3,
    "E5M2": gf.format_info_ocp_e5m2,
}
FLOAT_FORMATS = [f for f in formats.ELEMENT_FORMATS if not f.integer]


def cast(x: Array, name: str) -> Array:
    """Clamp to the format's range and round with ml_dtypes, back in FP32."""
    dtype = ML_DTYPES[name]
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype).astype(np.float32)


def gfloat_round(x: Array, name: str, mode: gfloat.RoundMode = gfloat.RoundMode.TiesToEven) -> Array:
    """gfloat's array rounding, saturating, FP64 inside."""
    return np.asarray(gfloat.round_ndarray(GFLOAT[name], x.astype(np.float64), mode, sat=True), dtype=np.float32)


def all_bf16() -> Array:
    """The 65536 BF16 patterns, as FP32."""
    return np.arange(1 << 16, dtype=np.uint32).__lshift__(16).view(np.float32)


def to_bf16(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def tensor(x: Array, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, except that any NaN equals any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    view = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[a.dtype]
    return bool(((a.view(view) == b.view(view)) | (a.isnan() & b.isnan())).all())


@dataclass(frozen=True)
class TwoLevel:
    """Elements and block scales on their grids, and the outer scale, of NVFP4."""

    elements: Array
    scales: Array
    outer: Array


def transformer_engine_nvfp4(x: Array, rows: int = 1, by_row: bool = False) -> TwoLevel:
    """Transformer Engine's order (x [R, K] holds BF16 numbers; blocks of `rows` x 16):

    S = min(2688/amax, FLT_MAX), 1 for a zero tensor; s = e4m3(min(amax_b * (S * (1/6)), 448));
    encode = min(1 / (s * (1/S)), FLT_MAX); q = e2m1(clamp(x * encode, 6)).
    """
    one, six, most = np.float32(1), np.float32(6), np.float32(448)
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // 16, 16)
    amax = np.abs(blocks).max(axis=(1, 3))
    total = np.abs(x).max(axis=1, keepdims=True) if by_row else np.abs(x).max().reshape(1, 1)
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.minimum(np.float32(2688) / total, np.finfo(np.float32).max)
        encode = np.where(total == 0, one, encode).astype(np.float32)
        decode = one / encode
        scales = cast(np.minimum(amax * (encode * (one / six)), most), "E4M3")
        inverse = np.minimum(one / (scales * decode), np.finfo(np.float32).max)
    elements = cast(blocks * inverse[:, None, :, None], "E2M1").reshape(x.shape)
    return TwoLevel(elements, scales, decode)


def tetrajet_nvfp4(x: Array) -> TwoLevel:
    """TetraJet-v2's double block: outer 1x128 = amax/448/6 (1 if 0), inner e4m3(amax16/outer/6) (2**-9 if 0)."""
    f = np.float32
    blocks = x.reshape(x.shape[0], -1, 8, 16)
    amax = np.abs(blocks).max(axis=3)
    outer = amax.max(axis=2) / f(448) / f(6)
    outer = np.where(outer == 0, f(1), outer)
    scales = cast(amax / outer[..., None] / f(6), "E4M3")
    scales = np.where(scales == 0, f(2**-9), scales)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(f(1) / (outer[..., None] * scales), np.finfo(f).max)
    elements = cast(blocks * inverse[..., None], "E2M1").reshape(x.shape)
    return TwoLevel(elements, scales.reshape(x.shape[0], -1), outer)
