"""Sums of dQ as integers: a bound on every row, the unit that follows, and the error.

A row of dQ is a sum of parts, one for each block of keys. A part is rounded to a multiple of the
row's unit u_i, and the multiples are added in int32, in any order. The unit follows from a bound
B_i on the sum of the magnitudes of the parts. All results are before the logit scale.

Computed in float64. Rows are [..., n_q]. Source: ours; docs/numerics.md, "Sums of dQ".
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sagesim.spec import Granularity, MatmulSpec, Precision, RoundingMode

SLACK: Final = 1 + 2.0**-6
"""The factor of B_i that covers float32 errors of the bound and of P: see `float32_error`."""

_UNDERFLOW: Final = 2.0**-120
"""Added to B_i / max |K|: more than the absolute errors of numbers that float32 rounds to 0.

A row has at most 2^20 of them, each of 2^-149.
"""

_BITS: Final = 30
_SMALLEST_NORMAL: Final = 2.0**-126
_LARGEST_DS: Final = 2.0**120
_LARGEST_EXPONENT: Final = 127
_PART: Final = 2.0**-14
"""More than the relative error of a part in float32, of up to 128 keys.

A 16-bit part has 127 sums, of which each may be truncated: 127 * 2^-23. An INT8 part is an exact
integer times a factor of three numbers. One of them is the inverse unit, a power of two. So there
are two roundings. Sums of FP8 products are off by more, but towards 0: see `theory.fp8_sums`.
"""

SMALLEST_SHARE: Final = {
    Precision.INT8: 1 / 127,
    Precision.FP8_E4M3: 2.0**-9 / 240,
    Precision.FP8_E5M2: 2.0**-16 / 32768,
}
"""The smallest code over the smallest top code of a row, whose scale is its bound over that."""

_16_BIT: Final = (Precision.FP16, Precision.BF16, Precision.INPUT16)


class Growth(NamedTuple):
    """What rounding dS may make of the sum of a row's magnitudes.

    It is at most own times the sum of the row plus shared times the sums of all rows of the block
    of queries, plus of_bound times the bound of the row for each of its keys.
    """

    own: float
    shared: float
    of_bound: float = 0.0


def growth(matmul: MatmulSpec, mode: RoundingMode, block_k: int) -> Growth:
    """The growth g of a row of dS: sum_j |rounded dS_ij| <= g sum_j |dS_ij|.

    - 16 bit: 2. A subnormal number may double: half of the smallest one, or a little more, becomes
      the smallest one. In FP16 subnormal numbers are below 2^-14, and gradients without loss
      scaling may be that small. A normal number changes by at most 2^-8 of itself.
    - Codes, to nearest: 2. A number below half a code becomes 0. One between half a code and a
      code becomes a code, which is at most twice the number. A larger one grows by less.
    - Codes, stochastic: a number grows by less than a code, which is amax / 127. A row of a tile
      has block_k elements. With one scale for each row of a tile, its amax is at most the sum of
      that row of the tile, so the row's sum grows by at most block_k / 127 of itself. The tiles of
      a row add up. With one scale for each tile, the amax is an element of any row of the tile. It
      is at most the sum of all rows of the tile.
    - Codes with scales from bounds, stochastic: a number above the smallest code at most doubles
      in FP8, and in INT8. A smaller one becomes at most the smallest code, which is
      `SMALLEST_SHARE` of the bound of the row or less.

    Args:
        matmul: the spec of the site dq.
        mode: how codes are rounded; a 16-bit format ignores it.
        block_k: keys of a tile.

    Raises:
        ValueError: if the format is FP32, or FP8 without scales from bounds, or rounding is
            stochastic and scales are neither per tile, per tile row nor from bounds.
    """
    by_bound = matmul.precision.is_scaled and matmul.lhs is Granularity.PerRowBound
    if matmul.precision in _16_BIT:
        return Growth(2.0, 0.0)
    if matmul.precision is not Precision.INT8 and not by_bound:
        raise ValueError(
            "sums of dQ are of products in INT8, in 16 bit, or with scales from bounds, not of "
            f"{matmul.precision.value} per {matmul.lhs.value}"
        )
    if mode is not RoundingMode.STOCHASTIC:
        return Growth(2.0, 0.0)
    if by_bound:
        return Growth(2.0, 0.0, SMALLEST_SHARE[matmul.precision])
    match matmul.lhs:
        case Granularity.PerTile:
            return Growth(1.0, block_k / 127)
        case Granularity.PerTileRow:
            return Growth(1 + block_k / 127, 0.0)
        case _:
            raise ValueError(f"stochastic rounding with one scale per {matmul.lhs.value}")


def ds_bound(
    *,
    v: Tensor,
    do: Tensor,
    delta: Tensor,
    p_bound: Tensor,
    attends: Tensor,
    growth: Growth,
    block_q: int,
    row_bound: Tensor | None = None,
) -> Tensor:
    """B_i / max |K|, an upper bound on sum_j |rounded dS_ij|, [..., n_q].

    It is g R_i (|dO_i| max_j |V_j| + |delta_i|). |dP_ij| <= |dO_i| |V_j| (Cauchy-Schwarz), and
    dS_ij = P_ij (dP_ij - delta_i). So sum_j |dS_ij| is at most R_i times the parentheses. Rounding
    dS makes it at most g times as large. j runs over the keys that the query attends to: all
    other P_ij are 0. It is not finite if such a V_j is not.

    The kernels multiply norms by 2^-8, so that no norm of finite numbers overflows in float32.

    Args:
        v: V as dP multiplies it, [..., n_k, d_v].
        do: dO as dP multiplies it, [..., n_q, d_v].
        delta: [..., n_q].
        p_bound: R_i, see `p_bound`.
        attends: which keys each query attends to, bool, broadcastable to [..., n_q, n_k].
        growth: see `growth`.
        block_q: queries of a tile.
        row_bound: beta_i of `theory.row_bounds`, if the scales of dS follow from it.
    """
    dp = do.double().norm(dim=-1) * largest_attended(v.double().norm(dim=-1), attends)
    of_ds = dp + delta.double().abs()
    sums = p_bound.double().masked_fill(of_ds == 0, 0.0) * of_ds  # p_bound may be infinite
    total = growth.own * sums
    if growth.shared:
        of_blocks = _of_blocks(sums, block_q).sum(-1)
        total = total + growth.shared * _to_rows(of_blocks, block_q, sums.shape[-1])
    if row_bound is not None:
        total = total + growth.of_bound * attends.sum(-1) * row_bound.double()
    return total


def largest_attended(x: Tensor, attends: Tensor) -> Tensor:
    """The largest number of the keys that each query attends to, or 0; [..., n_q].

    Args:
        x: not negative, [..., n_k].
        attends: see `ds_bound`.
    """
    return x[..., None, :].expand(*x.shape[:-1], *attends.shape[-2:]).where(attends, 0.0).amax(-1)


def k_bound(k: Tensor, attends: Tensor) -> Tensor:
    """max |K| of the keys that each query attends to, at least 2^-126; [..., n_q].

    A part is a sum of products of dS with elements of K. So B_i is `ds_bound` times this number.

    Args:
        k: K as dQ multiplies it, [..., n_k, d].
        attends: see `ds_bound`.
    """
    return largest_attended(k.double().abs().amax(-1), attends).clamp(min=_SMALLEST_NORMAL)


def p_bound(
    lse: Tensor,
    attends: Tensor,
    *,
    p_sums: Tensor | None = None,
    q: Tensor | None = None,
    k: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """R_i, an upper bound on the sum of row i of P as the backward computes it, [..., n_q].

    P is exp(S - L). The exact sum of a row is 1 if S is that of the forward. S and L are rounded: 8
    roundings of |L| in float32 change P by at most the factor 2^x with x = 2^-21 |L| log2 e. A key
    whose S is far below L has a larger error relative to L. Its P is small by as much, and `SLACK`
    covers it. In INT8, S is the same number in both passes. No S is above L then, so no P is above
    1, and the sum is at most the number of keys that the query attends to.

    A 16-bit S is a float32 sum of d products. The backward may add them in another order than the
    forward, or than the kernel that computes the sums of P. Each of the two sums is off by at most
    d truncations of 2^-23 of |Q_i| |K_j|. It adds 2^-21 d |Q_i| max_j |K_j| scale log2 e to x.

    2^x counts as infinite if x is above 127: float32 does not represent it.

    Args:
        lse: L of the logits as they are recomputed, from smoothed K: not the logsumexp that
            attention returns, to which the constant of the mean of K is added.
        attends: see `ds_bound`.
        p_sums: the row sums of P; None if qk_recompute and qk have the same operands.
        q: Q as qk_recompute multiplies it if it is in 16 bit, [..., n_q, d]; None in INT8.
        k: the same of K, [..., n_k, d]. A key that is not finite does not count: its P is 0, or L
            or the sum of P is not finite.
        scale: the logit scale.
    """
    is_exact = q is None or k is None
    if is_exact and p_sums is not None:
        return p_sums.double()
    size = lse.double().abs().masked_fill(lse.isinf(), 0.0)
    if q is not None and k is not None:
        channels = max(32, 1 << (q.shape[-1] - 1).bit_length())
        norms = k.double().norm(dim=-1)
        largest = largest_attended(norms.where(norms.isfinite(), 0.0), attends)
        size = size + channels * q.double().norm(dim=-1) * largest * abs(scale)
    x = 2.0**-21 * math.log2(math.e) * size
    rounding = torch.exp2(x).masked_fill(x > _LARGEST_EXPONENT, math.inf)
    if is_exact:
        return torch.minimum(rounding, attends.sum(-1).clamp(min=1).double())
    return rounding if p_sums is None else rounding * p_sums.double()


def unit(ds_bound: Tensor, k_bound: Tensor, *, floor: Tensor | None) -> Tensor:
    """u_i, the unit of a row: a power of two, float64.

    It is the least power of two that is not below b max |K|, times 2^-30, but at least 2^-126.
    Here b is (1 + 2^-6) B_i / max |K| + 2^-120. For codes it is also at least `code_floor`.

    It is NaN if b is not below 2^120, or if b max |K| is above 2^126 in 16 bit and 2^156 for codes.
    A part in 16 bit is then finite in float32, and the inverse of every unit is a normal number.

    Args:
        ds_bound: B_i / max |K|, see `ds_bound`.
        k_bound: max |K|, see `k_bound`.
        floor: `code_floor`; None if dQ is a product of 16-bit numbers.
    """
    total = _with_slack(ds_bound)
    power = _power_above(total * k_bound)
    units = torch.ldexp(power, torch.tensor(-_BITS)).clamp(min=_SMALLEST_NORMAL)
    if floor is not None:
        units = torch.maximum(units, floor)
    limit = 2.0**126 if floor is None else 2.0**156
    return units.where((total < _LARGEST_DS) & (power <= limit), math.nan)


def code_floor(
    ds_bound: Tensor,
    k: Tensor,
    attends: Tensor,
    *,
    per_tile: bool,
    block_q: int,
    block_k: int,
    row_bound: Tensor | None = None,
) -> Tensor:
    """The smallest unit of a row for codes: 2^-126 m max(1, |K|), as a power of two, [..., n_q].

    m is the largest b (see `unit`) of the rows that share a scale of dS with the row. If the scale
    follows from a bound on the row, which is over all keys of the head, m is at least that bound.
    |K| is the largest of all key blocks that the query's block attends to. A scale of dS with a
    code other than 0 is at most m, and one of K at most |K| or 1. Their product divided by the unit
    is therefore at most 2^126, also for single codes that are 0, and float32 does not overflow.

    A region of dS whose codes are all 0 has the scale 1, because the inverse of its amax / 127
    overflows. 1 may exceed m, which can be as small as 2^-120, and the product may then overflow.
    Such a region adds 0 whatever its scale is. The kernels multiply its codes by amax / 127
    instead, which is at most m (`map_step` in sagesim_kernels/operands/rounding.py).

    Args:
        ds_bound: B_i / max |K|, see `ds_bound`.
        k: K as dQ multiplies it, [..., n_k, d].
        attends: see `ds_bound`.
        per_tile: whether the rows of a tile of dS share a scale.
        block_q, block_k: queries and keys of a tile.
        row_bound: see `ds_bound`.
    """
    rows = ds_bound.shape[-1]
    total = _with_slack(ds_bound)
    if row_bound is not None:
        total = torch.maximum(total, row_bound.double())
    if per_tile:
        total = _to_rows(_of_blocks(total, block_q).amax(-1), block_q, rows)
    n_q, n_k = attends.shape[-2:]
    pad = (0, -n_k % block_k, 0, -n_q % block_q)
    tiles = torch.nn.functional.pad(attends, pad)
    tiles = tiles.unflatten(-1, (-1, block_k)).unflatten(-3, (-1, block_q)).any(-1).any(-2)
    of_blocks = _of_blocks(k.double().abs().amax(-1), block_k).amax(-1)
    largest = _to_rows(largest_attended(of_blocks, tiles), block_q, rows)
    power = _power_above(total * largest.clamp(min=_SMALLEST_NORMAL))
    return torch.ldexp(torch.maximum(power, _power_above(total)), torch.tensor(-126))


def largest_sum(key_blocks: Tensor) -> Tensor:
    """An upper bound on the magnitude of a sum of multiples, and of every partial sum, in units.

    The magnitudes of the parts add up to at most B_i, which is at most 2^30 units. Float32 changes
    a part by at most 2^-14 of its terms. Rounding to a multiple adds at most half a unit for each
    block of keys. The factor 1 + 2^-6 of the unit is left to `float32_error`.

    For 2^20 keys in blocks of 32 it is below 2^31: int32 does not overflow. Each query head has
    rows of its own, also if heads share K and V, so the number of query heads does not matter: a
    program that adds the gradients of K over a group adds the parts of dQ of each head to the sums
    of that head.

    Args:
        key_blocks: the number of key blocks that add a part.
    """
    return (1 + _PART) * 2.0**_BITS + key_blocks.double() / 2


def float32_error(keys: int, block_k: int, channels: int = 256) -> float:
    """An upper bound on the relative error of B_i, and of a row sum of |dS|, in float32.

    The forward adds a tile to the row sum l of P with three roundings: a product by exp(m - m'), of
    2^-24, an exponential, of 2^-22, and a sum, of 2^-24. If l is too small, the sum of the
    backward's P exceeds 1. In a tile, a sum has block_k roundings, and P has the error of an
    exponential in both passes. dP is a sum of `channels` products, which may be truncated. All
    other operations, and keys whose S is far below L, are 2^-18 together.

    Lengths of up to 2^20 keys in blocks of 32 stay below the 2^-6 of `SLACK`.
    """
    tiles = -(-keys // block_k)
    return tiles * 6 * 2.0**-24 + block_k * 2.0**-24 + 2 * 2.0**-22 + channels * 2.0**-23 + 2.0**-18


def error_bound(unit: Tensor, key_blocks: Tensor) -> Tensor:
    """An upper bound on |sum of multiples * unit - sum of parts|: half a unit for each key block.

    The sum of integers is exact. The logit scale multiplies both.

    Args:
        key_blocks: the number of key blocks that add a part.
    """
    return unit * (key_blocks.double() / 2)


def loss_bound(ds_bound: Tensor, k_bound: Tensor, key_blocks: Tensor) -> Tensor:
    """The same without the unit: 2^-30 b max |K| for each key block.

    A unit is less than 2^-29 b max |K|, see `unit`. This leaves out units that are as small as
    2^-126 or `code_floor`.
    """
    return 2.0**-_BITS * _with_slack(ds_bound) * k_bound * key_blocks.double()


def expected_error(unit: Tensor, key_blocks: Tensor) -> Tensor:
    """The root mean square of the same error: u_i sqrt(key_blocks / 12).

    The errors of the parts are taken as independent, and as uniform over a unit. It holds if parts
    span many units and are no multiples of the unit. A part that is 0 has no error.

    Args:
        key_blocks: the number of parts that are not 0.
    """
    return unit * (key_blocks.double() / 12).sqrt()


def last_place(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The gap between neighbours in `dtype` (bf16 or fp16) around x, elementwise and float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.double().abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent)


def _with_slack(ds_bound: Tensor) -> Tensor:
    return ds_bound * SLACK + _UNDERFLOW


def _of_blocks(x: Tensor, block: int) -> Tensor:
    """x [..., n] in blocks [..., blocks, block], padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))


def _to_rows(x: Tensor, block: int, rows: int) -> Tensor:
    """A number of each block, [..., blocks], for each of its rows, [..., rows]."""
    return x.repeat_interleave(block, -1)[..., :rows]


def _power_above(x: Tensor) -> Tensor:
    """The least power of two that is not below x >= 0; 0 for 0."""
    mantissa, exponent = torch.frexp(x)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(mantissa), exponent).where(x > 0, 0.0)
