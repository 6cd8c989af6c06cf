"""P and dS inside a kernel: each tile is rounded where it is the left operand of a product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sagesim_kernels.operands import (
    Rounding,
    amax,
    code_product,
    in_register_order,
    map_codes,
    map_inverse,
    map_scale,
    map_step,
)


class MapTrace(NamedTuple):
    """Where a kernel writes the codes and scales of a map, [sequences, heads, n_q, n_k]."""

    codes: Any  #: int8, contiguous
    scale: Any  #: float32, contiguous, one for every element

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device) -> MapTrace:
        """Codes 0 and scales 1, which stay where no kernel writes."""
        return cls(
            torch.zeros(shape, dtype=torch.int8, device=device), torch.ones(shape, device=device)
        )


class MapTraces(NamedTuple):
    """Where the backward writes the codes of its maps; None for maps that it does not write."""

    dv_p: MapTrace | None = None
    dq_ds: MapTrace | None = None
    dk_ds: MapTrace | None = None


UNTRACED = MapTraces()


class MapProduct(NamedTuple):
    """How a kernel computes a product whose left operand is a map.

    The first three fields are those of a `Rounding`, in which place a `MapProduct` may be used.
    """

    MODE: Any
    seed: Any
    STREAM: Any
    PER_TILE: Any  #: constexpr bool: a tile of codes has one scale instead of one for each row
    SAME_RIGHT: Any  #: constexpr bool: the kernel has loaded the right operand for S or dP

    @classmethod
    def of(cls, rounding: Rounding, *, per_tile: bool, same_right: bool) -> MapProduct:
        return cls(*rounding, tl.constexpr(per_tile), tl.constexpr(same_right))


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
def add_product(total, map, tokens, channel_scale, how, trace, at):
    """Return total [m, d] + map [m, n] @ tokens [n, d]; map is rounded to the format of tokens.

    Codes of tokens are in register order.

    channel_scale: of tokens, [d] or [1].
    how: a `MapProduct`.
    at: the `MapTile` of map.
    """
    if tokens.dtype == tl.int8:
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
    if k_tile.dtype == tl.int8:
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
