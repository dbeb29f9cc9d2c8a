"""Compiles attention of a decoding step for compute capability 9.0, on a machine that need not have a GPU.

A line a case: width of heads, bytes of a number, programs, tiles at once, shared memory that it takes, and that it may.
"""

import itertools

from hopper import build

from lowbit.infer.kernels import attention

LIMITS = {"H200": 232_448, "L40": 101_376}
"""Shared memory of a program, in bytes, at most."""
TYPES = {
    **dict.fromkeys(("key_scales", "value_scales", "partial", "logsums"), "*fp32"),
    **dict.fromkeys(("table", "start"), "*i64"),
    "scale": "fp32",
}


def show(dim: int, kind: str, programs: int, limit: int) -> None:
    size = {"bf16": 2, "fp32": 4, "i8": 1}[kind]
    tile = 128 if dim <= 64 else 64
    stages = attention.stages_of(programs, 2 * tile * dim * size, limit)
    queries = "*fp32" if kind == "fp32" else "*bf16"
    types = TYPES | {"q": queries, "whole": queries, "keys": f"*{kind}", "values": f"*{kind}"}
    constants = {"HEADS": 8, "GROUP": 4, "PADDED": 16, "D": dim, "BLOCK": 64, "TILE": tile, "CHUNK": attention.CHUNK}
    constants |= {"PIECES": 2, "WINDOW": 0, "SCALED": kind == "i8", "CAP": 0.0, "STAGES": stages, "CHAINED": True}
    made = build(attention._piece_kernel, types, constants, ("q_row", "q_head"), num_warps=4)
    print(dim, size, programs, stages, made["shared"], limit)


if __name__ == "__main__":
    for dim, kind, programs in itertools.product((64, 128, 256), ("bf16", "fp32", "i8"), (16, 4096)):
        for name, limit in LIMITS.items():
            if name == "H200" or dim * {"bf16": 2, "fp32": 4, "i8": 1}[kind] <= 512:
                show(dim, kind, programs, limit)
