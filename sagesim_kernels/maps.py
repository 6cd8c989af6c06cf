"""P and dS inside a kernel: rounded tile by tile where they are the left operand of a product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sagesim_kernels.primitives import magnitude, scale_and_inverse, to_codes


class MapTrace(NamedTuple):
    """Where a kernel writes a map's codes and scales: [sequences, heads, n_q, n_k], contiguous."""

    codes: Any  #: int8
    scale: Any  #: float32, one for every element

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device) -> MapTrace:
        """Codes 0 and scales 1, as where no kernel writes."""
        return cls(
            torch.zeros(shape, dtype=torch.int8, device=device), torch.ones(shape, device=device)
        )


class MapTraces(NamedTuple):
    """Where the backward writes the codes of its maps; None where it does not."""

    dv_p: MapTrace | None = None
    dq_ds: MapTrace | None = None
    dk_ds: MapTrace | None = None


UNTRACED = MapTraces()


@triton.jit
def store_codes(trace, codes, scale, z, queries, keys, n_q, n_k):
    """Write a tile's codes and scales, if they are traced.

    z: the index of sequence and head; queries, keys: broadcastable to codes.
    """
    if trace is not None:
        row = z.to(tl.int64) * n_q + queries
        ptrs = row * n_k + keys
        mask = (queries < n_q) & (keys < n_k)
        tl.store(trace.codes + ptrs, codes, mask=mask)
        tl.store(trace.scale + ptrs, scale + tl.zeros(codes.shape, tl.float32), mask=mask)


@triton.jit
def add_product(
    total,
    map,
    tokens,
    channel_scale,
    rounding,
    PER_TILE: tl.constexpr,
    trace,
    z,
    queries,
    keys,
    n_q,
    n_k,
):
    """total [m, d] + map [m, n] times tokens [n, d], map rounded to the format of tokens.

    Codes have a scale for each row of map, or with PER_TILE one for all of it; channel_scale [d]
    or [1] belongs to tokens.
    """
    if tokens.dtype == tl.int8:
        amax = tl.max(magnitude(map), 1)[:, None]
        if PER_TILE:
            amax = tl.max(amax, 0)[None, :]
        scale, inverse = scale_and_inverse(amax)
        codes = to_codes(map * inverse, queries, keys, rounding)
        store_codes(trace, codes, scale, z, queries, keys, n_q, n_k)
        sums = tl.dot(codes, tokens, out_dtype=tl.int32).to(tl.float32)
        return tl.fma(sums, scale * channel_scale[None, :], total)
    else:
        return tl.dot(map.to(tokens.dtype), tokens, total)
