"""Compiles the packed product for compute capability 9.0, on a machine that need not have a GPU.

A line a variant: bits, scaled, tiles of rows, tiles of x, whether every product of the tensor core has its threads
where it wants them, registers, bytes that spilled.
"""

import re
from typing import Any

from hopper import build, usage

from lowbit.infer.kernels import packed

TYPES = {"x": "*bf16", "data": "*u8", "scales": "*u8", "after": "*fp32", "y": "*bf16", "partial": "*fp32"}
TYPES["counters"] = "*i32"


def made_for(bits: int, scaled: bool, tiles: int, x_tiles: int, asm: bool = True) -> dict[str, Any]:
    constants = {"BITS": bits, "SCALED": scaled, "TILES": tiles, "X_TILES": x_tiles, "WARPS": packed.WARPS}
    constants |= {"AHEAD": packed.AHEAD, "AFTER": 2, "ASM": asm}
    found: dict[str, Any] = build(packed._product_kernel, TYPES, constants, ("x_row",), num_warps=packed.WARPS)
    return found


def show(bits: int, scaled: bool, tiles: int, x_tiles: int) -> None:
    made = made_for(bits, scaled, tiles, x_tiles)
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S+<.*)$", made["ttgir"], re.M))
    wanted = [
        layout
        for layout, text in layouts.items()
        if "threadsPerWarp = [1, 1, 32]" in text and f"warpsPerCTA = [1, 1, {packed.WARPS}]" in text
    ]
    products = [line for line in made["ttgir"].splitlines() if "mma.sync" in line]
    right = bool(products) and all(re.findall(r"#\w+(?=>)", line)[-1] in wanted for line in products)
    print(bits, scaled, tiles, x_tiles, right, *usage(made["cubin"]))


if __name__ == "__main__":
    for given in ((4, True, 1, 1), (4, True, 2, 1), (4, True, 2, 2), (4, True, 1, 2), (4, True, 1, 4), (4, True, 1, 8)):
        show(*given)
    for given in ((8, True, 1, 1), (8, True, 2, 2), (8, False, 1, 1), (8, False, 2, 2)):
        show(*given)
    for bits, scaled in ((4, True), (8, True), (8, False)):  # without assembly: that it compiles
        made_for(bits, scaled, 2, 1, asm=False)
