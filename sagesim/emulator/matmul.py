"""Emulated products: each tile's integer sum is exact, then scaled, then added to the others.

Three functions compute the products of the seven sites:

    tokens x tokens^T -> map     qk, qk_recompute, dp   contracts channels
    map x tokens      -> tokens  pv, dq                 contracts keys
    map^T x tokens    -> tokens  dv, dk                 contracts queries

Axes: Z heads, i query blocks, j key blocks.

A product of a map multiplies every entry of a tile, also masked entries, which are 0. A NaN or an
infinity of the right operand therefore reaches all results of a tile, unless every entry of the
tile is masked: such a tile is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagesim.emulator.quantization import COLUMN, ROW, Operand, may_hold
from sagesim.spec import Precision

_TENSOR_CORE_DTYPE = {
    Precision.INT8: torch.bfloat16,
    Precision.FP8_E4M3: torch.bfloat16,
    Precision.FP8_E5M2: torch.bfloat16,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}
"""For each format, the 16-bit dtype in which a GPU multiplies it.

The dtype represents every value of the format exactly, and tensor cores add in float32, so the
product is that of the format.
"""


def tokens_by_tokens(lhs: Operand, rhs: Operand) -> Tensor:
    """lhs [Z, i, block_q, 1, d] times the transpose of rhs [Z, j, block_k, 1, d].

    Returns: map tiles [Z, i, block_q, j, block_k].
    """
    lhs, rhs = (x.dequantize_if_scale_varies_along(COLUMN) for x in (lhs, rhs))
    left = lhs.values.flatten(3).flatten(1, 2)
    right = rhs.values.flatten(3).flatten(1, 2)
    out = _multiply(left, right.mT, _common_precision(lhs, rhs))
    out = out.unflatten(2, rhs.values.shape[1:3]).unflatten(1, lhs.values.shape[1:3])
    return _scaled(out, lhs.scale, None if rhs.scale is None else rhs.scale.permute(0, 3, 4, 1, 2))


def map_by_tokens(lhs: Operand, rhs: Operand, live: Tensor | None = None) -> Tensor:
    """lhs map [Z, i, block_q, j, block_k] times rhs [Z, j, block_k, 1, d].

    live: bool [Z or 1, i, j], which tiles are not entirely masked; None if rhs is finite or no
        tile is masked entirely.

    Returns: [Z, i * block_q, d].
    """
    if live is not None:
        rhs, bad = _split_nonfinite(rhs)
        reached = (live.float() @ bad.float() > 0).repeat_interleave(lhs.values.shape[ROW], 1)
        return map_by_tokens(lhs, rhs).masked_fill(reached, torch.nan)
    lhs = lhs.dequantize_if_scale_varies_along(COLUMN)
    rhs = rhs.dequantize_if_scale_varies_along(ROW)
    precision = _common_precision(lhs, rhs)
    left = lhs.values.flatten(1, 2)
    right = rhs.values.flatten(3)
    if lhs.scale is None and rhs.scale is None:
        return _multiply(left.flatten(2), right.flatten(1, 2), precision)
    out = _multiply(left.transpose(1, 2), right, precision)  # [Z, j, i * block_q, d]
    left_scale = None if lhs.scale is None else _expand_rows(lhs.scale, lhs.values).transpose(1, 2)
    return _add_tiles(_scaled(out, left_scale, None if rhs.scale is None else rhs.scale.flatten(3)))


def map_transposed_by_tokens(lhs: Operand, rhs: Operand, live: Tensor | None = None) -> Tensor:
    """The transpose of lhs map [Z, i, block_q, j, block_k] times rhs [Z, i, block_q, 1, d].

    live: as for `map_by_tokens`.

    Returns: [Z, j * block_k, d].
    """
    if live is not None:
        rhs, bad = _split_nonfinite(rhs)
        reached = (live.mT.float() @ bad.float() > 0).repeat_interleave(lhs.values.shape[COLUMN], 1)
        return map_transposed_by_tokens(lhs, rhs).masked_fill(reached, torch.nan)
    lhs, rhs = (x.dequantize_if_scale_varies_along(ROW) for x in (lhs, rhs))
    precision = _common_precision(lhs, rhs)
    left = lhs.values.flatten(3)
    right = rhs.values.flatten(3)
    if lhs.scale is None and rhs.scale is None:
        return _multiply(left.flatten(1, 2).mT, right.flatten(1, 2), precision)
    out = _multiply(left.mT, right, precision)  # [Z, i, j * block_k, d]
    out = out.unflatten(2, lhs.values.shape[3:])
    left_scale = None if lhs.scale is None else lhs.scale.squeeze(ROW).unsqueeze(-1)
    return _add_tiles(_scaled(out, left_scale, rhs.scale).flatten(2, 3))


def _scaled(sums: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Multiply sums of codes in place by both scales. Only the result over- or underflows.

    A sum times one large scale could overflow although the other scale is small, and a sum times
    one small scale could become 0 although the other scale is large. So extreme scales are divided
    by powers of two of about their roots, and the product of these is applied last. This gives the
    bits that the scales themselves give if both are moderate: no number is subnormal then, as a sum
    of codes is 0 or at least 2^-32.
    """
    scales = [x for x in (left, right) if x is not None]
    if len(scales) == 2 and any(may_hold(_is_extreme(x)) for x in scales):
        roots = [torch.exp2((torch.frexp(x).exponent // 2).to(x.dtype)) for x in scales]
        scales = [*(x / root for x, root in zip(scales, roots, strict=True)), roots[0] * roots[1]]
    for scale in scales:
        sums *= scale
    return sums


def _is_extreme(scale: Tensor) -> Tensor:
    """Whether each scale is below 2^-40, above 2^40 or NaN."""
    return ~((scale >= 2.0**-40) & (scale <= 2.0**40))


def _split_nonfinite(rhs: Operand) -> tuple[Operand, Tensor]:
    """rhs [Z, blocks, rows, 1, d] with 0 for NaN and infinities, and where its blocks hold them.

    The second result is bool [Z, blocks, d].
    """
    bad = ~rhs.values.isfinite()
    if rhs.scale is not None:
        bad |= ~rhs.scale.isfinite()
    values = rhs.values.masked_fill(bad, 0.0)
    scale = None if rhs.scale is None else rhs.scale.nan_to_num(1.0, 1.0)
    return Operand(values, scale, rhs.precision), bad.any(ROW).squeeze(2)


def _add_tiles(products: Tensor) -> Tensor:
    """The sum over axis 1, without copying a single tile."""
    return products.sum(1) if products.shape[1] > 1 else products.squeeze(1)


def _expand_rows(scale: Tensor, values: Tensor) -> Tensor:
    """Reshape a map's scale [Z, i or 1, block_q or 1, j or 1, 1] to [Z, i * block_q, j or 1, 1]."""
    return scale.expand(-1, *values.shape[1:3], -1, -1).flatten(1, 2)


def _common_precision(lhs: Operand, rhs: Operand) -> Precision:
    """The format of both operands' values; FP32 if one of them was dequantized."""
    return lhs.precision if lhs.precision is rhs.precision else Precision.FP32


def _multiply(left: Tensor, right: Tensor, precision: Precision) -> Tensor:
    """left @ right, [..., m, k] @ [..., k, n], accumulated in float32 (float64 stays float64).

    Sums of INT8 codes are exact. They are integers of at most 127**2 * k, which float32 represents
    up to k = 1040. Longer sums are computed in float64 and rounded to float32 once, as an INT32
    accumulator is.
    """
    if left.dtype is torch.float64:
        return product(left, right)
    if precision is Precision.INT8 and 127**2 * left.shape[-1] > 2**24:
        return (left.double() @ right.double()).float()
    dtype = _TENSOR_CORE_DTYPE.get(precision)
    if left.is_cuda and dtype is not None:
        out = torch.bmm(
            left.to(dtype).flatten(0, -3), right.to(dtype).flatten(0, -3), out_dtype=left.dtype
        )
        return out.unflatten(0, left.shape[:-2])
    return product(left, right)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, [..., m, k] @ [..., k, n]; a matrix in a batch gives the same bits as alone.

    CPU libraries add in an order that depends on the alignment of a matrix in memory, and on
    whether it is a single vector. Zeros pad all sizes to multiples of 16: every matrix of a batch
    then begins on a 64 byte boundary, and none is a vector. The usual block and head sizes are
    multiples of 16 and need no padding.
    """
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    if (m | k) % 16:
        left = torch.nn.functional.pad(left, (0, -k % 16, 0, -m % 16))
    if (k | n) % 16:
        right = torch.nn.functional.pad(right, (0, -n % 16, 0, -k % 16))
    return (left @ right)[..., :m, :n]
