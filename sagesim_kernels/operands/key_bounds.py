"""Bounds on each key and each key block, from which the units of dQ follow; see `dq_units`.

A kernel computes what the units need of each key. A function then takes the maximum over the keys
that a query attends to, and over no others: a key changes no unit of an earlier query under a
causal mask.
"""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import Specialized, launch, wait_for_earlier_kernels
from sagesim_kernels.operands.grid import program_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem, KernelSizes
from sagesim_kernels.operands.layout import length_of, stored_start_of, stored_tokens
from sagesim_kernels.operands.masking import (
    attends_in,
    causal_offset,
    first_live_key,
    is_unmasked,
    key_loops,
    live_keys,
)
from sagesim_kernels.operands.means import Means, load_mean
from sagesim_kernels.operands.operand import (
    Operand,
    head_pointers,
    load_channel_scales,
    load_token_scales,
    load_tokens,
    numbers_of,
)
from sagesim_kernels.operands.rounding import LAUNCH, largest, magnitude

BLOCKS_AT_ONCE = tl.constexpr(128)
"""Key blocks whose bounds a program reads in one step."""

KEYS_AT_ONCE = tl.constexpr(32)
"""Keys whose bounds a program reads in one step, if some queries attend to them and some do not."""

_FRACTION = tl.constexpr(2.0**-8)
"""Of norms: a token has at most 256 channels, so that this part of its norm does not overflow."""


class KeyBounds(NamedTuple):
    """Bounds on each key, and on each block of keys, in padded storage.

    All are the bits of a float32 that is not negative, as int32: [kv heads, tokens] and
    [kv heads, key blocks].
    """

    v_norm: Any  #: 2^-8 times the norm of V; not finite if V is not
    k_amax: Any  #: the largest |K| of dQ's operand; not finite if K is not
    k_norm: Any  #: 2^-8 times the norm of K of the recomputed S, or 0; None if S is exact
    block_v_norm: Any
    block_k_amax: Any
    block_k_norm: Any
    tokens: Any  #: of a head, in padded storage
    IN_16_BIT: Any  #: constexpr bool: dQ's operand is in 16 bit
    TILE: Any  #: constexpr, keys that a product of dQ sums over

    @classmethod
    def empty(cls, problem: KernelProblem, tile: int) -> KeyBounds:
        """Memory for the bounds. tile: see `TILE`."""
        spec = problem.spec
        heads, tokens = problem.k.shape[1], stored_tokens(problem.cu_k, problem.k)
        is_exact = spec.qk_recompute.precision.is_scaled

        def memory(count: int) -> tuple[Tensor | None, ...]:
            shape = (2 if is_exact else 3, heads, count)
            found = torch.empty(shape, dtype=torch.int32, device=problem.k.device)
            return (*found, None) if is_exact else tuple(found)

        constants = map(tl.constexpr, (not spec.dq.precision.is_scaled, tile))
        return cls(
            *memory(tokens), *memory(tokens // spec.block_k), Specialized(tokens), *constants
        )


@triton.jit
def token_norms(
    x, base, scales, first, count: tl.constexpr, last, D_PAD: tl.constexpr, lowest=0, live=None
):
    """Return 2^-8 times the norms of tokens of an `Operand`, [count]; no finite one overflows."""
    tokens = numbers_of(x, load_tokens(x, base, first, count, last, D_PAD, lowest, live))
    norms = norms_of_squares(squares_of(tokens))
    return norms * load_token_scales(x, scales, first, count, last)


@triton.jit
def norms_of_squares(squares):
    """Return 2^-8 times the norms of tokens, float32; no finite one overflows.

    squares: sums of squares, float64.
    """
    return (tl.sqrt(squares) * _FRACTION).to(tl.float32)


@triton.jit
def squares_of(tokens):
    """Return the sum of the squares of each token, over the last axis, float64."""
    tokens = tokens.to(tl.float64)
    return tl.sum(tokens * tokens, len(tokens.shape) - 1)


@triton.jit
def store_bounds(of_keys, of_blocks, at, keys, BLOCK_K: tl.constexpr):
    """Store int32 bounds of a block of keys, and their maximum. at: the first key in storage."""
    tl.store(of_keys + at + tl.arange(0, BLOCK_K), keys)
    tl.store(of_blocks + at // BLOCK_K, largest(keys, 0))


@triton.jit
def key_bounds_kernel(grid, k, v, k_right, to_subtract, k_mean, bounds, lengths, sizes):
    """Compute the `KeyBounds` of a block of keys.

    k, v, k_right: `Operand` of qk_recompute, dp and dq. to_subtract: the `Means` of K, if k_right
    is K before smoothing, or None. k_mean: the `Means` of K, if rows of dS times the mean are added
    to the parts of dQ, or None.
    """
    wait_for_earlier_kernels()
    block, h, b = program_coordinates(grid)
    first = block * sizes.BLOCK_K
    if first >= length_of(lengths.cu_k, lengths.n_k, b):
        return
    n_k, low = live_keys(lengths, b), first_live_key(lengths, b)
    live = None
    if lengths.key_mask is not None:
        live = is_unmasked(lengths, b, first + tl.arange(0, sizes.BLOCK_K), n_k)
    at = h.to(tl.int64) * bounds.tokens + stored_start_of(lengths.cu_k, lengths.n_k, b) + first
    v_base, v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, h)
    norms = token_norms(v, v_base, v_scales, first, sizes.BLOCK_K, n_k, sizes.DV_PAD, low, live)
    store_bounds(bounds.v_norm, bounds.block_v_norm, at, magnitude(norms), sizes.BLOCK_K)

    k_base, k_scales = head_pointers(k_right, lengths.cu_k, lengths.n_k, b, h)
    tokens = load_tokens(k_right, k_base, first, sizes.BLOCK_K, n_k, sizes.D_PAD, low, live)
    tokens = numbers_of(k_right, tokens)
    if to_subtract is not None:  # and round, as the product's kernel does
        mean = load_mean(to_subtract, b, h, 0, sizes.D, tl.arange(0, sizes.D_PAD))
        tokens = (tokens - mean).to(k_right.ptr.dtype.element_ty).to(tl.float32)
        is_key = first + tl.arange(0, sizes.BLOCK_K) < n_k
        tokens = tl.where(is_key[:, None], tokens, 0.0)
    # A region of zeros has the scale 1: its scale alone would be no bound on the order of K.
    tokens *= load_channel_scales(k_right, k_scales, first, sizes.D, sizes.D_PAD)[None, :]
    k_amax = largest(magnitude(tokens), 1)
    if k_mean is not None:
        mean = load_mean(k_mean, b, h, 0, sizes.D, tl.arange(0, sizes.D_PAD))
        mean_amax = largest(magnitude(mean), 1).to(tl.float32, bitcast=True)
        k_amax = magnitude(k_amax.to(tl.float32, bitcast=True) + mean_amax)
    store_bounds(bounds.k_amax, bounds.block_k_amax, at, k_amax, sizes.BLOCK_K)

    if bounds.k_norm is not None:
        k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, h)
        norms = token_norms(k, k_base, k_scales, first, sizes.BLOCK_K, n_k, sizes.D_PAD, low, live)
        # If K is not finite, P is 0 exactly, or L or the row sum of P is not finite.
        norms = tl.where(norms < float("inf"), norms, 0.0)
        store_bounds(bounds.k_norm, bounds.block_k_norm, at, magnitude(norms), sizes.BLOCK_K)


@triton.jit
def _with_blocks(found, of_blocks, at, some):
    return tl.maximum(found, tl.load(of_blocks + at, mask=some, other=0))


@triton.jit
def _with_keys(found, of_keys, at, visible):
    keys = tl.load(of_keys + at)
    return tl.maximum(found, largest(tl.where(visible, keys[None, :], 0), 1))


@triton.jit
def attended_bounds(
    bounds, lengths, b, k_head, block, first, queries, local_blocks, local_keys, sizes
):
    """Return the largest `KeyBounds` of the keys that each query attends to, int32 [queries].

    v_norm, k_amax and k_norm, and last the largest k_amax of all tiles of keys that some queries of
    the block attend to.

    Args:
        block: the first query of a block of BLOCK_Q.
        first, queries: the first of some consecutive queries of the block, and all of them.
        local_blocks, local_keys: the integers from 0 to `BLOCKS_AT_ONCE` and to `KEYS_AT_ONCE`. In
            Gluon they have layouts, and so have the queries.
    """
    ROWS: tl.constexpr = queries.shape[0]
    n_k, offset = live_keys(lengths, b), causal_offset(lengths, b)
    begin, _, _, end = key_loops(lengths, b, block, sizes.BLOCK_Q, sizes.BLOCK_K, n_k, offset)
    row_begin, whole_begin, whole_end, row_end = key_loops(
        lengths, b, first, ROWS, sizes.BLOCK_K, n_k, offset
    )
    at = k_head.to(tl.int64) * bounds.tokens + stored_start_of(lengths.cu_k, lengths.n_k, b)
    any_amax = local_blocks * 0
    block_v_norm, block_k_amax, block_k_norm = any_amax, any_amax, any_amax
    length = length_of(lengths.cu_k, lengths.n_k, b)
    blocks = tl.cdiv(tl.minimum(tl.cdiv(end, bounds.TILE) * bounds.TILE, length), sizes.BLOCK_K)
    first_block = begin // sizes.BLOCK_K
    if lengths.left is not None:
        first_block = begin // bounds.TILE * (bounds.TILE // sizes.BLOCK_K)
    for index in range(first_block, blocks, BLOCKS_AT_ONCE):
        local = index + local_blocks
        place, whole = at // sizes.BLOCK_K + local, local < whole_end // sizes.BLOCK_K
        if lengths.left is not None:
            whole = whole & (local >= whole_begin // sizes.BLOCK_K)
        any_amax = _with_blocks(any_amax, bounds.block_k_amax, place, local < blocks)
        block_v_norm = _with_blocks(block_v_norm, bounds.block_v_norm, place, whole)
        block_k_amax = _with_blocks(block_k_amax, bounds.block_k_amax, place, whole)
        if bounds.k_norm is not None:
            block_k_norm = _with_blocks(block_k_norm, bounds.block_k_norm, place, whole)
    v_norm = queries * 0 + largest(block_v_norm, 0)
    k_amax = queries * 0 + largest(block_k_amax, 0)
    k_norm = queries * 0 + largest(block_k_norm, 0)
    for PART in tl.static_range(1 if lengths.left is None else 2):
        part_begin, part_end = whole_end, row_end
        if PART:
            part_begin, part_end = row_begin, whole_begin
        for key in range(part_begin, part_end, KEYS_AT_ONCE):
            keys = key + local_keys
            visible = attends_in(lengths, b, queries[:, None], keys[None, :], n_k, offset)
            v_norm = _with_keys(v_norm, bounds.v_norm, at + keys, visible)
            k_amax = _with_keys(k_amax, bounds.k_amax, at + keys, visible)
            if bounds.k_norm is not None:
                k_norm = _with_keys(k_norm, bounds.k_norm, at + keys, visible)
    return v_norm, k_amax, k_norm, largest(any_amax, 0)


def compute_key_bounds(
    problem: KernelProblem,
    operands: dict[str, Operand],
    *,
    tile: int | None = None,
    to_subtract: Means | None = None,
    k_mean: Means | None = None,
) -> KeyBounds:
    """Return the bounds of all keys.

    operands: k of qk_recompute, v of dp, and k_right, K of dq.
    tile: keys that a product of dQ sums over; None for a block of the spec.
    to_subtract: the mean of K, if k_right is K before smoothing and the product's kernel subtracts
        the mean; else None.
    k_mean: the mean of K, if parts of dQ contain it; else None.
    """
    block = problem.spec.block_k
    bounds = KeyBounds.empty(problem, tile or block)
    grid = problem.key_grid(block)
    launch(
        key_bounds_kernel,
        grid.programs,
        grid,
        operands["k"],
        operands["v"],
        operands["k_right"],
        to_subtract,
        k_mean,
        bounds,
        problem.lengths,
        KernelSizes.of(problem, block),
        **LAUNCH,
    )
    return bounds
