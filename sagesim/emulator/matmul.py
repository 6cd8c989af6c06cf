"""One emulated product: integer sums exact, scales applied to each tile's sum, tiles then added.

Three forms serve the seven sites; Z counts heads, i query blocks, j key blocks:

    tokens x tokens^T -> map     qk, qk_recompute, dp   contracts channels
    map x tokens      -> tokens  pv, dq                 contracts keys
    map^T x tokens    -> tokens  dv, dk                 contracts queries
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagesim.emulator.quantization import COLUMN, ROW, Operand
from sagesim.spec import Precision

_CARRIER = {
    Precision.INT8: torch.bfloat16,
    Precision.FP8_E4M3: torch.bfloat16,
    Precision.FP8_E5M2: torch.bfloat16,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}
"""A GPU's 16-bit type that holds every value of the format exactly, so that tensor cores, which
add in float32, compute the same product."""


def tokens_by_tokens(lhs: Operand, rhs: Operand) -> Tensor:
    """lhs [Z, i, block_q, 1, d] times the transpose of rhs [Z, j, block_k, 1, d].

    Returns: map tiles [Z, i, block_q, j, block_k].
    """
    lhs, rhs = lhs.factored_from(COLUMN), rhs.factored_from(COLUMN)
    left = lhs.values.flatten(3).flatten(1, 2)
    right = rhs.values.flatten(3).flatten(1, 2)
    out = _multiply(left, right.mT, _common(lhs, rhs))
    out = out.unflatten(2, rhs.values.shape[1:3]).unflatten(1, lhs.values.shape[1:3])
    if lhs.scale is not None:
        out *= lhs.scale
    if rhs.scale is not None:
        out *= rhs.scale.permute(0, 3, 4, 1, 2)
    return out


def map_by_tokens(lhs: Operand, rhs: Operand) -> Tensor:
    """lhs map [Z, i, block_q, j, block_k] times rhs [Z, j, block_k, 1, d].

    Returns: [Z, i * block_q, d].
    """
    lhs, rhs = lhs.factored_from(COLUMN), rhs.factored_from(ROW)
    left = lhs.values.flatten(1, 2)
    right = rhs.values.flatten(3)
    if lhs.scale is None and rhs.scale is None:
        return _multiply(left.flatten(2), right.flatten(1, 2), _common(lhs, rhs))
    out = _multiply(left.transpose(1, 2), right, _common(lhs, rhs))  # [Z, j, i * block_q, d]
    if lhs.scale is not None:
        out *= _expand_rows(lhs.scale, lhs.values).transpose(1, 2)
    if rhs.scale is not None:
        out *= rhs.scale.flatten(3)
    return _add_tiles(out)


def map_transposed_by_tokens(lhs: Operand, rhs: Operand) -> Tensor:
    """The transpose of lhs map [Z, i, block_q, j, block_k] times rhs [Z, i, block_q, 1, d].

    Returns: [Z, j * block_k, d].
    """
    lhs, rhs = lhs.factored_from(ROW), rhs.factored_from(ROW)
    left = lhs.values.flatten(3)
    right = rhs.values.flatten(3)
    if lhs.scale is None and rhs.scale is None:
        return _multiply(left.flatten(1, 2).mT, right.flatten(1, 2), _common(lhs, rhs))
    out = _multiply(left.mT, right, _common(lhs, rhs))  # [Z, i, j * block_k, d]
    out = out.unflatten(2, lhs.values.shape[3:])
    if lhs.scale is not None:
        out *= lhs.scale.squeeze(ROW).unsqueeze(-1)
    if rhs.scale is not None:
        out *= rhs.scale
    return _add_tiles(out.flatten(2, 3))


def _add_tiles(products: Tensor) -> Tensor:
    """The sum over axis 1; a single tile is its own sum."""
    return products.sum(1) if products.shape[1] > 1 else products.squeeze(1)


def _expand_rows(scale: Tensor, values: Tensor) -> Tensor:
    """A map's scale [Z, i|1, block_q|1, j|1, 1] as [Z, i * block_q, j|1, 1]."""
    return scale.expand(-1, *values.shape[1:3], -1, -1).flatten(1, 2)


def _common(lhs: Operand, rhs: Operand) -> Precision:
    """The format both operands' values are in; FP32 where one of them was dequantized."""
    return lhs.precision if lhs.precision is rhs.precision else Precision.FP32


def _multiply(left: Tensor, right: Tensor, precision: Precision) -> Tensor:
    """left @ right, [..., m, k] @ [..., k, n], accumulated in float32 (float64 stays float64).

    Sums of INT8 codes are exact: each is an integer of at most 127**2 * k, which float32 holds
    up to k = 1040; above that they are summed in float64 and rounded once, as INT32 would be.
    """
    if left.dtype is torch.float64:
        return product(left, right)
    if precision is Precision.INT8 and 127**2 * left.shape[-1] > 2**24:
        return (left.double() @ right.double()).float()
    carrier = _CARRIER.get(precision)
    if left.is_cuda and carrier is not None:
        out = torch.bmm(
            left.to(carrier).flatten(0, -3), right.to(carrier).flatten(0, -3), out_dtype=left.dtype
        )
        return out.unflatten(0, left.shape[:-2])
    return product(left, right)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, [..., m, k] @ [..., k, n], each matrix of a batch as if it were alone.

    A CPU's libraries add up float products in an order that depends on where in memory a matrix
    begins, and on whether it is a single vector. Padded with zeros to multiples of 16, every
    matrix begins on a 64 byte boundary and none is a vector. Sizes that are such multiples
    already, as those of the usual blocks and heads, are left alone.
    """
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    if (m | k) % 16:
        left = torch.nn.functional.pad(left, (0, -k % 16, 0, -m % 16))
    if (k | n) % 16:
        right = torch.nn.functional.pad(right, (0, -n % 16, 0, -k % 16))
    return (left @ right)[..., :m, :n]
