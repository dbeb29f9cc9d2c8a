"""What a thread will read next, on its way to shared memory: a ring of places of each thread's own.

Reads into registers ahead of their use are put off by the assembler until the registers are free, a third of a turn
before what they read is wanted. An asynchronous copy needs none. A thread copies for itself alone and reads what it has
copied, so that nothing is exchanged and nobody waits for another:

    place    [stage, piece, thread] of 16 bytes, so that a warp's 32 lie side by side
    turn t   waits for the copies of its own, reads them, and sends for those of turn t + STAGES - 1

Copies beyond the end read nothing and leave zeros.
"""

import triton
import triton.language as tl

_COPY = {
    size: f"cp.async.{way}.shared.global.L2::256B [$1], [$2], {size}, $3; mov.b32 $0, 0;"
    for size, way in ((16, "cg"), (8, "ca"), (4, "ca"))
}
COPY_16, COPY_8, COPY_4 = (tl.constexpr(_COPY[size]) for size in (16, 8, 4))
COPY_16_IF, COPY_8_IF = (
    tl.constexpr(
        f"{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.{way}.shared.global [$1], [$2], {size}; mov.b32 $0, 0; }}"
    )
    for size, way in ((16, "cg"), (8, "ca"))
)
TOGETHER = tl.constexpr("bar.sync $1, $2; mov.b32 $0, 0;")
WARP_TOGETHER = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")
COMMIT = tl.constexpr("cp.async.commit_group; mov.b32 $0, $1;")
TAKE_4 = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
TAKE_2 = tl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")
TAKE_1 = tl.constexpr("ld.shared.b32 $0, [$1];")


def declaration(size: int) -> str:
    """Assembly that sets `size` bytes of shared memory apart, once a kernel, and gives their address."""
    return f".shared .align 16 .b8 lowbit_ring[{size}]; mov.u32 $0, lowbit_ring;"


def waiting(turns: int) -> str:
    """Assembly that waits until all copies but those of the last turns have come."""
    return f"cp.async.wait_group {turns}; mov.b32 $0, $1;"


@triton.jit
def once(what: tl.constexpr, thread):  # type: ignore[no-untyped-def]
    """An instruction of every thread."""
    return tl.inline_asm_elementwise(what, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def send(place, pointer, there, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy 16, 8 or 4 bytes from a pointer to a place; zeros where not `there`."""
    how: tl.constexpr = COPY_16 if BYTES == 16 else COPY_8 if BYTES == 8 else COPY_4
    tl.inline_asm_elementwise(
        how, "=r,r,l,r", [place, pointer, tl.where(there, BYTES, 0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def send_if(place, pointer, there, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy 16 or 8 bytes from a pointer to a place; nothing where not `there`."""
    how: tl.constexpr = COPY_16_IF if BYTES == 16 else COPY_8_IF
    tl.inline_asm_elementwise(
        how, "=r,r,l,r", [place, pointer, tl.where(there, 1, 0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def together(member, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the warps of all groups that are the same member, int32 a thread. What they had copied, and waited for,
    is there; what they had read they have."""
    if GROUPS == 1:
        once(WARP_TOGETHER, member)
    else:
        count = tl.full(member.shape, 32 * GROUPS, tl.int32)
        tl.inline_asm_elementwise(TOGETHER, "=r,r,r", [member + 1, count], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take_four(place):  # type: ignore[no-untyped-def]
    """The four words at a place."""
    return tl.inline_asm_elementwise(
        TAKE_4, "=&r,=&r,=&r,=&r,r", [place], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def take_two(place):  # type: ignore[no-untyped-def]
    """The two words at a place."""
    return tl.inline_asm_elementwise(TAKE_2, "=&r,=&r,r", [place], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)


@triton.jit
def take_one(place):  # type: ignore[no-untyped-def]
    """The word at a place."""
    return tl.inline_asm_elementwise(TAKE_1, "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1)
