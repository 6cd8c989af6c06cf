"""Operands whose rows are multiplied by bounds on the rows of a map before they are rounded.

docs/numerics.md, "Scales from bounds", defines them: dO of dv, and Q of dk.
"""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands.delta import load_rows
from sagesim_kernels.operands.formats import (
    code_max,
    count_of_tops,
    nearest_number,
    top_code,
)
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import (
    ALIGNMENT,
    Grid,
    Rows,
    Strided,
    TokenBlocks,
    length_of,
    program_coordinates,
    stored_start_of,
)
from sagesim_kernels.operands.operand import Operand, scale_start_of
from sagesim_kernels.operands.quantization import (
    TokenTensor,
    load_source,
    memory_of_codes,
    store_codes_of_tokens,
)
from sagesim_kernels.operands.rounding import (
    LAUNCH,
    Rounding,
    largest,
    magnitude,
    row_sums,
    scale_and_inverse,
    to_codes,
)
from sagesim_kernels.operands.row_bounds import FoldedRows, store_scales

_TILE: Final = 32
"""Tokens that a program holds at once."""


@triton.jit
def load_folded(x, mean, bound, lengths, i, first, COUNT: tl.constexpr, h, b, n_q, blocks):
    """Load tokens of block i as `load_source` does, times the bounds of their rows."""
    tokens = load_source(x, mean, lengths, i, first, COUNT, h, b, blocks)
    queries = first + tl.arange(0, COUNT)
    return tokens * load_rows(bound, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]


@triton.jit
def _better_top(y, best, least, TOP: tl.constexpr, FORMAT: tl.constexpr):
    """Return the better of two top codes for each row of y, and what it loses.

    best, least: the other code and what it loses, [rows, 1].
    """
    # Near a tie both codes lose the same: the quotient need not be rounded correctly.
    lost = nearest_number(y * (1.0 / TOP), FORMAT) * TOP - y
    loss = row_sums(lost * lost)[:, None]  # off by less than what makes losses differ
    return tl.where(loss < least, TOP, best), tl.minimum(least, loss)


@triton.jit
def best_top(y, FORMAT: tl.constexpr, TOPS: tl.constexpr):
    """Return the top code of each row of y with which it loses least, [rows, 1]. TOPS: how many."""
    best = tl.full((y.shape[0], 1), code_max(FORMAT), tl.float32)
    if TOPS > 1:
        least = tl.full((y.shape[0], 1), float("inf"), tl.float32)
        for index in tl.static_range(TOPS):  # pyright: ignore[reportGeneralTypeIssues]
            best, least = _better_top(y, best, least, top_code(FORMAT, index), FORMAT)
    return best


@triton.jit
def over_top(y, top):
    """Return y / top, correctly rounded if it is a normal number; top: a code for each row."""
    inverse = tl.math.div_rn(tl.full(top.shape, 1.0, tl.float32), top)
    inverse = tl.broadcast_to(inverse, y.shape)
    quotient = y * inverse
    remainder = tl.fma(-quotient, tl.broadcast_to(top, y.shape), y)
    return tl.fma(remainder, inverse, quotient)


@triton.jit
def fold_kernel(
    grid, x, mean, bound, out, inverse, scale, rounding, lengths, blocks, TOPS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Round a block of dO or Q with its rows multiplied by bounds, and choose their top codes.

    x, mean, out, rounding, blocks: as those of `quantize_kernel`. bound: `Rows` of the bounds of a
    map. inverse, scale: `Rows` of the scales of the map. TOPS: top codes to choose from.
    """
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    begin = i * blocks.BLOCK
    if begin >= n_q:
        return
    amax = tl.zeros((1, blocks.D_PAD), tl.int32)
    for first in range(begin, tl.minimum(begin + blocks.BLOCK, n_q), TILE):
        z = load_folded(x, mean, bound, lengths, i, first, TILE, h, b, n_q, blocks)
        amax = tl.maximum(amax, largest(magnitude(z), 0)[None, :])
    if not out.BY_CHANNEL:
        amax = largest(amax, 1)[:, None]
    FORMAT: tl.constexpr = rounding.FORMAT
    # With the smallest top code, the largest number of a region gets the largest code.
    MOST: tl.constexpr = code_max(FORMAT) * top_code(FORMAT, TOPS - 1)
    of_block, inverse_of_block = scale_and_inverse(amax, MOST)
    ptr = out.scale + h.to(tl.int64) * out.scale_stride_h
    ptr += (scale_start_of(out, lengths.cu_q, lengths.n_q, b) + i) * out.scale_stride_n
    if out.BY_CHANNEL:
        column = tl.arange(0, blocks.D_PAD)[None, :]
        tl.store(ptr + column, of_block, mask=column < blocks.D)
    else:
        tl.store(ptr + tl.arange(0, 1)[None, :], of_block)

    start = stored_start_of(lengths.cu_q, lengths.n_q, b)
    end = tl.minimum(begin + blocks.BLOCK, tl.cdiv(n_q, ALIGNMENT) * ALIGNMENT)
    for first in range(begin, end, TILE):
        z = load_folded(x, mean, bound, lengths, i, first, TILE, h, b, n_q, blocks)
        y = z * inverse_of_block
        best = best_top(y, FORMAT, TOPS)
        queries = first + tl.arange(0, TILE)
        y = over_top(y, best)
        column = tl.arange(0, blocks.D_PAD)[None, :]
        codes = to_codes(y, queries[:, None], column, rounding)
        store_codes_of_tokens(out, codes, h, start + first, TILE, blocks)
        of_rows = load_rows(bound, lengths.cu_q, b, h, queries, n_q, 0.0)
        top = tl.reshape(best, (TILE,))
        store_scales(inverse, scale, lengths, b, h, queries, n_q, of_rows, top)


def fold(
    problem: KernelProblem, source: TokenTensor, site: str, bound: Rows
) -> tuple[Operand, FoldedRows]:
    """Round dO of dv or Q of dk with its rows multiplied by the bounds of the map.

    bound: of the rows of P or dS.
    """
    d, matmul = source.x.shape[3], problem.spec.site(site)
    heads, device = problem.q.shape[1], problem.q.device
    out = memory_of_codes(source, matmul.precision, matmul.rhs, contract_tokens=True)
    rows = FoldedRows(
        *(torch.empty(problem.q.shape[:3], dtype=torch.float32, device=device) for _ in range(2))
    )
    grid = Grid(-(-source.longest // source.block), heads, problem.sequences)
    launch(
        fold_kernel,
        grid.programs,
        grid,
        Strided.of(source.x),
        source.mean,
        bound,
        out,
        Rows.of(rows.inverse),
        Rows.of(rows.scale),
        Rounding.of(problem.spec, source.name, matmul.precision),
        problem.lengths,
        TokenBlocks.of(source.is_key, d, triton.next_power_of_2(out.CHANNELS.value), source.block),
        count_of_tops(out.FORMAT) if site == "dk" else 1,
        _TILE,
        **LAUNCH,
    )
    return out, rows
