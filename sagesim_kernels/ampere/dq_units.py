"""Parts of dQ as integers, in units of their rows, and their addition to the sums."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.ampere.device import CHUNK
from sagesim_kernels.operands import amax

_TO_INT32 = gl.constexpr("cvt.rni.s32.f32 $0, $1;")


@gluon.jit
def to_int32(x):
    """Round float32 to int32, ties to even."""
    return gl.inline_asm_elementwise(_TO_INT32, "=r,r", [x], gl.int32, True, 1)


@constexpr_function
def _order_of(row, column, channels):
    """Return where a number of a part of dQ is among the sums; see `operands.add_part`."""
    group = (row // 8 * (channels // 8) + column // 8) * 2 + column % 2
    return group * 32 + row % 8 * 4 + column % 8 // 2


@constexpr_function
def _of_register(layout, i):
    """Return the row and the column that register i adds to those of its thread."""
    bases = layout.reg_bases
    chosen = [bases[bit] for bit in range(len(bases)) if i >> bit & 1]
    return sum(base[0] for base in chosen), sum(base[1] for base in chosen)


@constexpr_function
def _add_registers(layout, channels):
    """Return the assembly that adds the registers of a thread, their operands, and their number.

    The first operand is the address of the thread's first number. A constant is added to it.
    """
    count = 2 ** len(layout.reg_bases)
    lines = []
    for i in range(count):
        at = _of_register(layout, i)
        offset = 4 * _order_of(at[0], at[1], channels)
        lines.append(f"red.relaxed.gpu.global.add.s32 [${count} + {offset}], ${2 * count + i};")
    return " ".join(lines), ",".join(["=r"] * count + ["l"] * count + ["r"] * count), count


@gluon.jit
def add_units(dq_sums, at, units, C: gl.constexpr, CHANNELS: gl.constexpr):
    """Add chunk C of the channels of a part of dQ, int32, to the sums of some queries.

    at: the index of the first query in padded storage, over all heads. CHANNELS: of `dq_sums`.
    """
    LAYOUT: gl.constexpr = gl.to_linear_layout(units.type.layout, units.shape)
    LAST: gl.constexpr = _of_register(LAYOUT, 2 ** len(LAYOUT.reg_bases) - 1)
    # Of the bits of a row and a column, those that are not of a register: one address a thread.
    row = gl.arange(0, units.shape[0], gl.SliceLayout(1, LAYOUT))[:, None] & ~LAST[0]
    column = gl.arange(0, units.shape[1], gl.SliceLayout(0, LAYOUT))[None, :] & ~LAST[1]
    column += C * CHUNK
    group = (row // 8 * (CHANNELS // 8) + column // 8) * 2 + column % 2
    order = group * 32 + row % 8 * 4 + column % 8 // 2
    ptrs = dq_sums.sums + at * CHANNELS + order
    ASM: gl.constexpr = _add_registers(LAYOUT, CHANNELS)
    units = gl.convert_layout(units, LAYOUT, assert_trivial=True)
    gl.inline_asm_elementwise(ASM[0], ASM[1], [ptrs, units], gl.int32, False, ASM[2])


@gluon.jit
def mark_nonfinite(dq_sums, at, part):
    """Set the units of the rows of a part of dQ to NaN where it is not finite."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    is_bad = ~(amax(part, 1) < float("inf"))
    ptrs = dq_sums.unit + at + gl.arange(0, part.shape[0], LAYOUT)
    gl.store(ptrs, gl.full([part.shape[0]], float("nan"), gl.float32, LAYOUT), mask=is_bad)
