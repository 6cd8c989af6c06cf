"""P and dS of a step of the backward, transposed [keys, queries], and the keys of a block."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.hopper.backward_masks import are_live, attends_between
from sagesim_kernels.hopper.capped_logits import logits_plus, slope_of, tanh_of_sums
from sagesim_kernels.hopper.dq_parts import BLOCK_Q

ST_INT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 32]))
"""Layout of S transposed [keys, queries] of eight warps, as the INT8 product leaves it."""
ST_FLOAT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
"""Layout of S, P, dP and dS transposed [keys, queries] of eight warps, in float32."""
ST_ROWS = gl.constexpr(gl.SliceLayout(1, ST_FLOAT32.value))
"""Layout of one number for each row of S transposed, a key."""
ST_COLUMNS = gl.constexpr(gl.SliceLayout(0, ST_FLOAT32.value))
"""Layout of one number for each column of S transposed, a query."""

BLOCK_K = gl.constexpr(64)
"""Keys of a block, half of a tile. A warpgroup computes it."""

BLOCK_INT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
"""Layout of S transposed [keys, queries] of a block, as the INT8 product leaves it."""
BLOCK_FLOAT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Layout of S, P, dP and dS transposed [keys, queries] of a block, in float32. It is also that of
64 channels of dV and of dQ."""
BLOCK_COLUMNS = gl.constexpr(gl.SliceLayout(0, BLOCK_FLOAT32.value))
"""Layout of one number for each column of S transposed, a query."""


@gluon.jit
def start_keys(k_scale, key_mask, tile, FIRST: gl.constexpr):
    """Return index (2^30 if no query attends to it) and scale of each key of a block.

    k_scale: pointer to the scale of the tile's first key. tile: `KeyTile`. FIRST: the block's first
    key in the tile.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, BLOCK_FLOAT32)
    # There is no scale for a block behind the sequence's last key.
    scale = gl.load(k_scale + gl.minimum(tile.length - 1 - tile.first, FIRST) // BLOCK_K)
    keys = tile.first + FIRST + gl.arange(0, BLOCK_K, ROWS)
    scales = gl.full((BLOCK_K,), 1.0, gl.float32, ROWS) * scale
    return gl.where(are_live(keys, tile, key_mask), keys, 2**30), scales


@gluon.jit
def attends_to(keys, i, tile):
    """Return what `operands.attends_in` does, for keys whose index is 2^30 if no query attends.

    Without a limit on either side of the diagonal the result does not depend on i.
    """
    COLUMNS: gl.constexpr = gl.SliceLayout(0, keys.type.layout.parent)
    queries = i * BLOCK_Q + gl.arange(0, BLOCK_Q, COLUMNS)
    return attends_between(queries[None, :], keys[:, None], tile.offset, tile.lowest)


@gluon.jit
def compute_p(MASKED: gl.constexpr, s, k_scale, factor, minus_lse2, shift, cap2, keys, i, tile):
    """Return P transposed, and the factor of dP - delta in dS, from the integer sums of S.

    The factor is P, and with a softcap P times the slope. shift: of each query; or None. cap2:
    `base2` of `Softcap`.
    """
    LAYOUT: gl.constexpr = keys.type.layout.parent
    factor = factor[None, :] * k_scale[:, None]
    if cap2 is not None:
        shifts = shift[None, :] if shift is not None else None
        t = tanh_of_sums(s, factor, shifts, LAYOUT)
        x = logits_plus(t, cap2, minus_lse2[None, :])
    else:
        x = gl.convert_layout(s.to(gl.float32), LAYOUT)
        x = gl.fma(x, factor, minus_lse2[None, :].broadcast_to(x.shape))
    if MASKED:
        x = gl.where(attends_to(keys, i, tile), x, -float("inf"))
    p = gl.exp2(x)
    if cap2 is not None:
        return p, p * slope_of(t)
    else:
        return p, p


@gluon.jit
def compute_ds(MASKED: gl.constexpr, weight, dp, delta, cap2, keys, i, tile):
    """Return dS transposed.

    weight: the factor of dP - delta. delta: of each query; None if it is subtracted from dp.
    """
    ds = dp
    if delta is not None:
        ds = ds - delta[None, :]
    # P is 0 there, but 0 times an infinite or NaN dP or slope would be NaN.
    if MASKED and cap2 is None:
        ds = gl.where(attends_to(keys, i, tile), ds, 0.0)
    ds = weight * ds
    if MASKED and cap2 is not None:
        ds = gl.where(attends_to(keys, i, tile), ds, 0.0)
    return ds
