"""P and dS inside a kernel: each tile is rounded where it is the left operand of a product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sagesim.spec import Precision
from sagesim_kernels.operands import (
    INT8,
    Rounding,
    Rows,
    amax,
    code_product,
    format_of,
    in_register_order,
    load_rows,
    loaded_codes,
    map_codes,
    map_inverse,
    map_scale,
    map_step,
    memory_dtype,
    stored_codes,
    to_codes,
)


class MapTrace(NamedTuple):
    """Where a kernel writes the codes and scales of a map, [sequences, heads, n_q, n_k]."""

    codes: Any  #: as `formats` describes, contiguous
    scale: Any  #: float32, contiguous, one for every element

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], device: torch.device, precision: Precision = Precision.INT8
    ) -> MapTrace:
        """Codes 0 and scales 1, which stay where no kernel writes."""
        dtype = memory_dtype(format_of(precision))
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.ones(shape, device=device))


class MapTraces(NamedTuple):
    """Where the backward writes the codes of its maps; None for maps that it does not write."""

    dv_p: MapTrace | None = None
    dq_ds: MapTrace | None = None
    dk_ds: MapTrace | None = None


UNTRACED = MapTraces()


class MapProduct(NamedTuple):
    """How a kernel computes a product whose left operand is a map.

    The first four fields are those of a `Rounding`, in which place a `MapProduct` may be used.
    """

    MODE: Any
    seed: Any
    STREAM: Any
    FORMAT: Any
    PER_TILE: Any  #: constexpr bool: a tile of codes has one scale instead of one for each row
    SAME_RIGHT: Any  #: constexpr bool: the kernel has loaded the right operand for S or dP
    BY_BOUND: Any  #: constexpr bool: the scales of the map's rows follow from bounds
    SAME_CODES: Any  #: constexpr bool: the codes of dS are those of dK

    @classmethod
    def of(
        cls,
        rounding: Rounding,
        *,
        per_tile: bool,
        same_right: bool,
        by_bound: bool = False,
        same_codes: bool = False,
    ) -> MapProduct:
        constants = map(tl.constexpr, (per_tile, same_right, by_bound, same_codes))
        return cls(*rounding, *constants)


class QueryRows(NamedTuple):
    """Queries of a head, for `load_rows`."""

    cu: Any
    b: Any
    h: Any
    queries: Any
    n: Any


class MapTile(NamedTuple):
    """Where the elements of a tile are in their map."""

    z: Any  #: index of sequence and head together
    queries: Any  #: broadcastable to the tile
    keys: Any  #: broadcastable to the tile
    n_q: Any
    n_k: Any


@triton.jit
def store_codes(trace, codes, scale, at):
    """Write a tile's codes and scales to a `MapTrace`, unless it is None. at: a `MapTile`."""
    if trace is not None:
        row = at.z.to(tl.int64) * at.n_q + at.queries
        ptrs = row * at.n_k + at.keys
        mask = (at.queries < at.n_q) & (at.keys < at.n_k)
        tl.store(trace.codes + ptrs, codes, mask=mask)
        tl.store(trace.scale + ptrs, scale + tl.zeros(codes.shape, tl.float32), mask=mask)


@triton.jit
def load_row_scales(inverse, scale, row_scales, rows):
    """Load the scales of rows of a map, and their inverses.

    inverse, scale: two fields of row_scales, a `RowScales`. rows: `QueryRows`.
    """
    stride_b, stride_h = row_scales.stride_b, row_scales.stride_h
    of_inverse, of_scale = Rows(inverse, stride_b, stride_h), Rows(scale, stride_b, stride_h)
    return (
        load_rows(of_inverse, rows.cu, rows.b, rows.h, rows.queries, rows.n, 0.0),
        load_rows(of_scale, rows.cu, rows.b, rows.h, rows.queries, rows.n, 1.0),
    )


@triton.jit
def bound_codes(map, inverse, how, at):
    """Round a transposed map [keys, queries] with scales from bounds on its rows.

    inverse: of the scales, [queries]. how: a `MapProduct`. at: the `MapTile` of map.
    """
    if how.FORMAT == INT8:
        # The bound of a 16-bit S may be from sums in another order: no code may wrap around.
        y = tl.minimum(tl.maximum(map * inverse[None, :], -127.0), 127.0)
        return to_codes(y, at.queries, at.keys, how)
    else:
        return map_codes(map, inverse[None, :], at.queries, at.keys, how)


@triton.jit
def store_bound_codes(trace, codes, inverse, scale, how, at):
    """Write `bound_codes` and their scales [queries] to a `MapTrace`, unless it is None."""
    if trace is not None:
        # A row that vanishes has the scale 1.
        scale = tl.where((inverse == 0.0) & (scale == scale), 1.0, scale)
        store_codes(trace, stored_codes(codes), scale[None, :], at)


@triton.jit
def _sums(codes, tokens):
    """Return codes [m, k] times codes of tokens [k, n], float32. Only sums of FP8 are inexact."""
    if tokens.dtype == tl.int8:
        return code_product(codes, tokens)
    else:
        return tl.dot(codes, tokens, out_dtype=tl.float32)


@triton.jit
def add_bound_codes(total, codes, tokens, channel_scale, how):
    """Return total [m, d] + codes [m, n] @ tokens [n, d]; the scales of rows are in the tokens.

    codes: see `bound_codes`. Others: see `add_product`. Each sum of a tensor core is of one step.
    """
    if tokens.dtype == tl.int8:  # also the bits of FP8
        codes = in_register_order(codes)
    sums = _sums(codes, loaded_codes(tokens, how.FORMAT))
    return tl.fma(sums, tl.broadcast_to(channel_scale[None, :], total.shape), total)


@triton.jit
def part_of_bound_codes(codes, scale, k_tile, inverse_unit, channel_scale, how):
    """Return what `part_of_dq` does, from `bound_codes` and the scales [queries] of their rows."""
    product = _sums(tl.trans(codes), loaded_codes(k_tile, how.FORMAT))
    return product * (scale[:, None] * inverse_unit * channel_scale[None, :])


@triton.jit
def add_product(total, map, tokens, channel_scale, how, trace, at):
    """Return total [m, d] + map [m, n] @ tokens [n, d]; map is rounded to the format of tokens.

    Codes of tokens are in register order.

    channel_scale: of tokens, [d] or [1].
    how: a `MapProduct`.
    at: the `MapTile` of map.
    """
    if how.FORMAT == INT8:
        largest = amax(map, 1)[:, None]
        if how.PER_TILE:
            largest = amax(largest, 0)[None, :]
        scale = map_scale(largest)
        codes = map_codes(map, map_inverse(largest), at.queries, at.keys, how)
        store_codes(trace, codes, scale, at)
        sums = code_product(in_register_order(codes), tokens)
        return tl.fma(sums, scale * channel_scale[None, :], total)
    else:
        return tl.dot(map.to(tokens.dtype), tokens, total)


@triton.jit
def part_of_dq(ds, k_tile, inverse_unit, channel_scale, how, trace, at):
    """Return the part of dQ of a block of keys in units of its rows, float32 [queries, d].

    ds [keys, queries] is transposed, and rounded to the format of k_tile [keys, d].
    inverse_unit: [queries, 1].
    channel_scale: of k_tile, [d] or [1].
    how: a `MapProduct`.
    at: the `MapTile` of ds.
    """
    if how.FORMAT == INT8:
        largest = amax(ds, 0)[None, :]
        if how.PER_TILE:
            largest = amax(largest, 1)[:, None]
        codes = map_codes(ds, map_inverse(largest), at.queries, at.keys, how)
        if trace is not None:
            store_codes(trace, codes, map_scale(largest), at)
        product = code_product(tl.trans(codes), k_tile)
        # Each thread holds fewer rows of the product than columns of dS. The scale 1 of codes that
        # are all 0 could overflow where it is divided by a small unit; `map_step` is then small.
        return product * (map_step(tl.trans(largest)) * inverse_unit * channel_scale[None, :])
    else:
        return tl.dot(tl.trans(ds.to(k_tile.dtype)), k_tile, out_dtype=tl.float32) * inverse_unit
