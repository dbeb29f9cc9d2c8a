"""The C++ quantisers: compiled on first use by the machine's own compiler, called through ctypes.

One file, no headers of PyTorch: it compiles in a few seconds, once, into the user's cache folder, under a name that
holds the hash of source, flags, compiler and processor. Without a compiler everything still works, through the
PyTorch reference, some thirty times slower; `missing` says why.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowbit.quant import formats
from lowbit.quant.bits import f32
from lowbit.quant.formats import decode, decode_e8m0
from lowbit.quant.packing import unpack_codes
from lowbit.quant.spec import E4M3_SCALES, Outer, QuantSpec, Rounding, Scale

SOURCE = Path(__file__).with_name("quantise.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
OPTIONAL = ("-fopenmp",)
"""Without it, one thread."""

_SCALES = ("BF16_ONLY", *(kind.name for kind in Scale))
_OUTERS = [kind.name for kind in Outer]
_ROUNDINGS = [kind.name for kind in Rounding]


class Spec(ctypes.Structure):
    """`struct Spec` of quantise.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("mantissa", "bias", "bits", "integer", "has_nan", "nan_code")),
        *((name, ctypes.c_int32) for name in ("block_rows", "block_columns", "scale", "outer", "rounding")),
        *((name, ctypes.c_float) for name in ("max", "bound", "target", "limit", "inverse_target")),
    ]


class Call(ctypes.Structure):
    """`struct Call` of quantise.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "row_stride", "column_stride")),
        *((name, ctypes.c_int32) for name in ("x_is_bf16", "out_is_bf16")),
        *((name, ctypes.c_int64) for name in ("width", "padded", "stored")),
        ("signs", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("rotation", "threads")),
        ("rotation_scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("choice", "static_amax")),
        ("key", ctypes.c_uint32 * 2),
        ("clock", ctypes.c_uint32 * 3),
        ("lane", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("operand", "after", "data", "scales", "outer")),
    ]


class Unpack(ctypes.Structure):
    """`struct Unpack` of quantise.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "scales", "outer", "element_table", "scale_table")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "stored", "padded")),
        *((name, ctypes.c_int32) for name in ("out_is_bf16", "threads")),
        ("operand", ctypes.c_void_p),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None where it cannot be made (see `missing`)."""
    return _build()[0]


def handles(spec: QuantSpec | None) -> bool:
    """Whether there is a library and it knows this kind of spec."""
    if library() is None:
        return False
    if spec is None or spec.scale not in E4M3_SCALES:
        return spec is None or (spec.block[1] % 16 == 0 and (spec.block[0] > 0 or spec.block[1] == 0))
    return spec.block in ((1, 16), (16, 16))


def missing() -> str | None:
    """Why there is no library, in a few words; None if there is one."""
    return _build()[1]


@cache
def _build() -> tuple[ctypes.CDLL | None, str | None]:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return None, "no C++ compiler (c++, g++ or clang++)"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        parts = (SOURCE.read_text(encoding="utf-8"), FLAGS, OPTIONAL, version, _processor())
        name = f"quantise-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
        try:
            folder = Path.home() / ".cache" / "lowbit"
            folder.mkdir(parents=True, exist_ok=True)
            made = folder / name
            if not made.exists():
                _compile(compiler, made)
            return _declared(ctypes.CDLL(str(made))), None
        except (OSError, RuntimeError):  # a home that cannot be written, or a user without one
            with tempfile.TemporaryDirectory() as temporary:
                made = Path(temporary) / name
                _compile(compiler, made)
                return _declared(ctypes.CDLL(str(made))), None
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return None, f"{compiler} failed: {said.splitlines()[-1] if said else type(error).__name__}"


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
    except OSError:
        return platform.machine() + platform.processor()


def _compile(compiler: str, made: Path) -> None:
    """Compile beside the goal and rename, so that processes that start together do not meet half a file."""
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=made.parent)
    os.close(handle)
    command = [compiler, *FLAGS, *OPTIONAL, str(SOURCE), "-o", temporary]
    try:
        if subprocess.run(command, capture_output=True, text=True).returncode != 0:
            plain = [part for part in command if part not in OPTIONAL]
            subprocess.run(plain, capture_output=True, text=True, check=True)
        Path(temporary).replace(made)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _declared(made: ctypes.CDLL) -> ctypes.CDLL:
    pointer, words = ctypes.c_void_p, ctypes.c_uint32 * 2
    made.lowbit_factor.argtypes, made.lowbit_factor.restype = [pointer, pointer], None
    made.lowbit_unpack.argtypes, made.lowbit_unpack.restype = [pointer, pointer], None
    made.lowbit_signs.argtypes = [words, ctypes.c_uint32 * 3, ctypes.c_uint32, ctypes.c_int64, pointer]
    made.lowbit_signs.restype = None
    return made


@cache
def _spec(spec: QuantSpec | None) -> Spec:
    if spec is None:
        return Spec()
    e = spec.element
    numbers = [e.mantissa_bits, e.bias, e.bits, e.integer, e.has_nan, e.nan_code, *spec.block]
    kinds = [_SCALES.index(spec.scale.name), _OUTERS.index(spec.outer.name), _ROUNDINGS.index(spec.rounding.name)]
    reals = [e.max, spec.bound, spec.target, f32(spec.bound * spec.target), f32(1 / spec.target)]
    return Spec(*map(int, numbers), *kinds, *reals)


@cache
def _tables(spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """What each code and each scale byte stands for, FP32."""
    every = torch.arange(256).to(torch.uint8)
    codes = (
        unpack_codes(every, 8, spec.element.code_dtype) if spec.element.bits == 8 else every[: 1 << spec.element.bits]
    )
    scales = decode(every, formats.E4M3) if spec.scale in E4M3_SCALES else decode_e8m0(every)
    return decode(codes, spec.element), scales


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def run_factor(
    x: Tensor,
    spec: QuantSpec | None,
    signs: Tensor | None,
    key: Tensor,
    clock: Tensor,
    lane: int,
    choice: Tensor | None,
    amax: Tensor | None,
    padded: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """x [rows, columns] into `out`: operand, after, data, scales, outer, contiguous; what is empty is not wanted."""
    made = library()
    assert made is not None
    operand, after, data, scales, outer = out
    signs = None if signs is None else signs.contiguous()
    choice = None if choice is None else choice.to(torch.int8).contiguous()
    amax = None if amax is None else amax.float()
    stored = 0
    if data.numel() and spec is not None:
        stored = data.shape[1] * 8 // spec.element.bits
    rotation = 0 if signs is None else signs.shape[0]
    width = -(-x.shape[1] // rotation) * rotation if rotation else x.shape[1]
    call = Call(
        _pointer(x),
        *x.shape,
        *x.stride(),
        x.dtype == torch.bfloat16,
        operand.dtype == torch.bfloat16,
        width,
        padded,
        stored,
        _pointer(signs),
        rotation,
        torch.get_num_threads(),
        f32(rotation**-0.5) if rotation else 1.0,
        _pointer(choice),
        _pointer(amax),
        (ctypes.c_uint32 * 2)(*key.tolist()),
        (ctypes.c_uint32 * 3)(*clock.tolist()),
        lane,
        *(_pointer(tensor) for tensor in (operand, after, data, scales, outer)),
    )
    made.lowbit_factor(ctypes.byref(_spec(spec)), ctypes.byref(call))


def run_unpack(
    data: Tensor, scales: Tensor, outer: Tensor | None, spec: QuantSpec, padded: int, operand: Tensor
) -> None:
    """Packed codes into `operand` [rows, width]."""
    made = library()
    assert made is not None
    data, scales = data.contiguous(), scales.contiguous()
    outer = None if outer is None else outer.contiguous()
    elements, table = _tables(spec)
    call = Unpack(
        *(_pointer(tensor) for tensor in (data, scales, outer, elements, table)),
        *operand.shape,
        data.shape[1] * 8 // spec.element.bits,
        padded,
        operand.dtype == torch.bfloat16,
        torch.get_num_threads(),
        _pointer(operand),
    )
    made.lowbit_unpack(ctypes.byref(_spec(spec)), ctypes.byref(call))


def run_signs(key: Tensor, clock: Tensor, lane: int, out: Tensor) -> None:
    """`Stream.signs` into `out`, FP32."""
    made = library()
    assert made is not None
    words = (ctypes.c_uint32 * 2)(*key.tolist()), (ctypes.c_uint32 * 3)(*clock.tolist())
    made.lowbit_signs(*words, lane, out.numel(), out.data_ptr())
