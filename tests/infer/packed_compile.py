"""Compiles the packed product for compute capability 9.0, on a machine that need not have a GPU.

A line a variant: bits, scaled, tiles of rows, groups, rows of x, warps, whether every product of the tensor core has
its threads where it wants them, registers, bytes that spilled.
"""

import re
from typing import Any

from hopper import build, usage

from lowbit.infer.kernels import packed
from lowbit.infer.kernels.ring import declaration, waiting

TYPES = {"x": "*bf16", "data": "*u8", "scales": "*u8", "after": "*fp32", "y": "*bf16"}


def made_for(bits: int, scaled: bool, shape: packed.Shape, asm: bool = True) -> dict[str, Any]:
    constants = {"BITS": bits, "SCALED": scaled, "TILES": shape.tiles, "GROUPS": shape.groups}
    constants |= {"X_ROWS": shape.x_rows, "WARPS": shape.warps}
    constants |= {"AFTER": 2, "ASM": asm, "CHAINED": asm, "STAGES": shape.stages}
    constants |= {"DECLARATION": declaration(shape.stages * shape.turn_bytes), "WAITING": waiting(shape.stages - 2)}
    found: dict[str, Any] = build(packed._product_kernel, TYPES, constants, ("x_row",), num_warps=shape.warps)
    return found


def show(bits: int, scaled: bool, shape: packed.Shape) -> None:
    made = made_for(bits, scaled, shape)
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S+<.*)$", made["ttgir"], re.M))
    wanted = [
        layout
        for layout, text in layouts.items()
        if "threadsPerWarp = [1, 1, 32]" in text and f"warpsPerCTA = [1, 1, {shape.warps}]" in text
    ]
    products = [line for line in made["ttgir"].splitlines() if "mma.sync" in line]
    right = bool(products) and all(re.findall(r"#\w+(?=>)", line)[-1] in wanted for line in products)
    print(bits, scaled, *shape[:4], right, *usage(made["cubin"]))


if __name__ == "__main__":
    shapes = {
        packed.shape_of(rows, tiles, steps)._replace(splits=1)
        for rows in (1, 8, 16, 32, 64)
        for tiles in (256, 384, 2048)
        for steps in (1, 32, 112)
    }
    for shape in sorted(shapes):
        show(4, True, shape)
    for shape in sorted(shapes)[:4]:
        show(8, True, shape)
        show(8, False, shape)
    for bits, scaled in ((4, True), (8, True), (8, False)):  # without assembly: that it compiles
        made_for(bits, scaled, packed.Shape(2, 2, 8, 4), asm=False)
