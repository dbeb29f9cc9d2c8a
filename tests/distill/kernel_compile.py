"""Compiles the kernels for compute capability 9.0, on a machine that need not have a GPU, and prints what they take.

A line a kernel: name, vocabulary, targets, registers a thread, bytes of a thread's memory that spilled registers use,
instructions.
"""

import re
from typing import Any

import torch
from hopper import build, dumped, usage

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.codec import Layout
from lowbit.distill.kernels import choose, decode, encode, statistics
from lowbit.distill.kernels.choose import Chooser
from lowbit.distill.kernels.decode import Decoder
from lowbit.distill.kernels.encode import Encoder

TYPES = {
    **dict.fromkeys(("greatest", "total", "moment", "keys"), "*fp32"),
    **dict.fromkeys(("sample", "position", "key", "ids", "named_ptr", "ends", "starts"), "*i64"),
    **dict.fromkeys(("weights", "rest_ptr", "entropy_ptr", "lse_ptr", "levels"), "*fp64"),
    **dict.fromkeys(("headers", "values", "offsets", "lengths", "words"), "*i32"),
    **dict.fromkeys(("softcap", "temperature"), "fp32"),
    "logits": "*bf16",
    "counted": "*u8",
}
SIXTEENS = ("rows", "row_stride", "columns", "vocab", "blocks", "count", "length")
"""Arguments that are multiples of sixteen here."""


READ = TYPES | {"places": "*i64", "levels": "*fp32", "weights": "*fp32", "entropy": "*fp32"}
"""Of the kernels that read."""


def show(kernel: Any, constants: dict[str, Any], warps: int, label: str, types: dict[str, str] = TYPES) -> None:
    binary = build(kernel, types, constants, SIXTEENS, num_warps=warps, enable_fp_fusion=False)["cubin"]
    code = dumped(binary, "-sass")
    spilled = len(re.findall(r"\bSTL\b", code))
    count = len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s", code, re.M))
    print(kernel.__name__, label, usage(binary)[0], spilled, count)


def main() -> None:
    for gumbel in (False, True):
        constants = {"SOFTCAP": False, "TEMPERED": False, "GUMBEL": gumbel, "TILE": statistics.TILE}
        show(statistics.statistics_kernel, constants, statistics.WARPS, "gumbel" if gumbel else "plain")
    sizes = ((16_384, 16), (257, 1), (257, 255), (128_256, 16), (262_144, 16))
    for estimator in Estimator:
        for vocab, k in sizes if estimator is Estimator.varopt else sizes[:1]:
            chooser = Chooser(estimator, k, vocab)
            label = f"{estimator.value} {vocab} {k}"
            show(choose.choose_kernel, chooser.constants, chooser.warps, label)
            encoder = Encoder(Layout(estimator, k, vocab), torch.empty(0))
            show(encode.fields_kernel, encoder.constants | encoder.field_constants, encode.WARPS, label)
            decoder = Decoder(encoder.layout)
            show(decode.targets_kernel, decoder.constants | decoder.target_constants, decode.WARPS, label, READ)
    show(encode.scatter_kernel, encoder.constants, encode.WARPS, "16")
    headers = {"HEADER_BITS": decoder.layout.header_bits, "AT_ONCE": decode.AT_ONCE}
    show(decode.places_kernel, decoder.constants | headers, decode.WARPS, "16", READ)


if __name__ == "__main__":
    main()
