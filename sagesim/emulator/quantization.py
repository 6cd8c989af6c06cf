"""amax -> scale -> codes: the one place where numbers are rounded to an operand's format.

Every operand is held as tiles, [..., row blocks, rows, column blocks, columns], so that a
granularity is nothing but the set of those four axes along which a scale is shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.emulator.rounding import CODE_MAX, FLOAT8_DTYPE, round_codes_
from sagesim.shapes import Float
from sagesim.spec import HALF_EVEN, Granularity, Precision, Rounding

ROW_BLOCK, ROW, COLUMN_BLOCK, COLUMN = -4, -3, -2, -1

SHARED: Final = {
    Granularity.PerHead: (COLUMN, COLUMN_BLOCK, ROW, ROW_BLOCK),
    Granularity.PerBlock: (COLUMN, COLUMN_BLOCK, ROW),
    Granularity.PerToken: (COLUMN, COLUMN_BLOCK),
    Granularity.PerChannel: (ROW, ROW_BLOCK),
    Granularity.PerBlockChannel: (ROW,),
    Granularity.PerTile: (COLUMN, ROW),
    Granularity.PerTileRow: (COLUMN,),
    Granularity.PerTileColumn: (ROW,),
    Granularity.PerRow: (COLUMN, COLUMN_BLOCK),
}
"""The axes of a tiled operand along which each granularity shares a scale."""


@dataclass(frozen=True, slots=True)
class QTensor:
    """A quantized tensor.

    Invariants: codes are integers in [-127, 127] (INT8), or values of the float8 format; scale
    is positive float32, in units of x per code (a trace's pv.p may have it underflow to 0); a
    region of zeros has codes 0 and scale 1; |x - codes * scale| <= scale / 2 elementwise for
    INT8 under half-even and half-away rounding, up to the rounding of float32.
    """

    codes: Tensor
    """int8, or float8_e4m3fn / float8_e5m2; the shape of x."""
    scale: Tensor
    """float32, broadcastable to codes."""

    def dequantize(self) -> Tensor:
        """codes * scale, float32."""
        return self.codes.float() * self.scale


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a product, rounded to its site's format, in tiles.

    values: codes where scale is given, else the rounded numbers themselves; float32 or float64.
    scale: broadcastable to values, or None for the unscaled formats.
    """

    values: Tensor
    scale: Tensor | None
    precision: Precision

    def row_blocks(self, start: int, stop: int) -> Operand:
        """The operand's row blocks start..stop, as a view."""
        scale = self.scale
        if scale is not None and scale.shape[ROW_BLOCK] > 1:
            scale = scale[..., start:stop, :, :, :]
        return Operand(self.values[..., start:stop, :, :, :], scale, self.precision)

    def factored_from(self, *axes: int) -> Operand:
        """Self where no scale varies along the contracted `axes`; else the dequantized numbers.

        A scale that varies along the contraction cannot be taken out of an integer sum.
        """
        if self.scale is None or all(self.scale.shape[axis] == 1 for axis in axes):
            return self
        return Operand(self.values * self.scale, None, Precision.FP32)


def to_tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """[..., n, m] -> [..., ceil(n/rows), rows, ceil(m/columns), columns], padded with zeros.

    Zeros are neutral in everything that follows: they raise no amax and add to no sum.
    """
    n, m = x.shape[-2:]
    pad_n, pad_m = -n % rows, -m % columns
    if pad_n or pad_m:
        x = torch.nn.functional.pad(x, (0, pad_m, 0, pad_n))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def from_tiles(tiles: Tensor, n: int, m: int) -> Tensor:
    """The inverse of `to_tiles`: [..., n, m] without the padding."""
    return tiles.flatten(-4, -3).flatten(-2, -1)[..., :n, :m]


def encode(
    x: Tensor,
    precision: Precision,
    how: Granularity,
    rounding: Rounding,
    tensor: str,
    row0: int = 0,
) -> Operand:
    """Round x to `precision` with one scale per region of `how`.

    Args:
        x: tiles [..., row blocks, rows, column blocks, columns] in float32 or float64; padding
            and masked elements are zero.
        tensor: the tensor's name, for stochastic rounding.
        row0: the index in its head of the first row, for stochastic rounding.
    """
    match precision:
        case Precision.FP32:
            return Operand(x, None, precision)
        case Precision.FP16 | Precision.BF16:
            dtype = torch.float16 if precision is Precision.FP16 else torch.bfloat16
            return Operand(x.to(dtype).to(x.dtype), None, precision)
        case Precision.INPUT16:
            raise AssertionError("input16 is resolved where the inputs' dtype is known")
        case Precision.INT8 | Precision.FP8_E4M3 | Precision.FP8_E5M2:
            x32 = x.float()
            scale, inverse = scales(_amax(x32, SHARED[how]), CODE_MAX[precision])
            y = _round_tiles_(x32 * inverse, precision, rounding, tensor, row0)
            return Operand(y.to(x.dtype), scale.to(x.dtype), precision)


def encode_unit_(
    x: Tensor,
    weight: Tensor,
    empty: Tensor,
    precision: Precision,
    rounding: Rounding,
    row0: int,
) -> Operand:
    """Round map p = x * weight to a scaled `precision`, where x is p over its own tile row max.

    The codes depend on x alone, hence on the tile alone. Overwrites x.

    Args:
        x: tiles of exp(S - tile row max), whose largest element in a tile row is 1 (0 where all
            is masked).
        weight: [..., row blocks, rows, column blocks, 1], exp(tile row max - row max); may
            underflow to 0 where a tile row counts for nothing, and then the scale does.
        empty: bool, shaped as weight, True where all of a tile row is masked.
    """
    code_max = CODE_MAX[precision]
    codes = _round_tiles_(x.mul_(code_max), precision, rounding, "p", row0)
    scale = (weight / torch.full_like(weight, code_max)).masked_fill_(empty, 1.0)
    return Operand(codes, scale, precision)


def scales(amax: Tensor, code_max: float) -> tuple[Tensor, Tensor]:
    """scale = amax / code_max and inverse = code_max / amax, float32, each one rounded division.

    A region whose inverse would overflow (amax 0, or below about 3.7e-37) has scale 1, inverse 0.
    A region with a NaN has a NaN for both, so that it reaches the output.
    """
    c = torch.full_like(amax, code_max)  # tensor by tensor: only that is one division everywhere
    inverse = c / amax
    vanishing = inverse.isinf()
    return (amax / c).masked_fill_(vanishing, 1.0), inverse.masked_fill_(vanishing, 0.0)


def quantize(
    x: Float[Tensor, "*heads n d"],
    how: Granularity,
    *,
    block: int | tuple[int, int] = 64,
    precision: Precision = Precision.INT8,
    rounding: Rounding = HALF_EVEN,
    tensor: str = "q",
) -> QTensor:
    """Round x to a scaled format with one scale per region of `how`.

    Args:
        x: finite, any float dtype; computed in float32. For map granularities n are the queries
            and d the keys.
        block: tokens per block; (block_q, block_k) for map granularities.
        precision: INT8 or one of the FP8 formats.
        tensor: which tensor of attention this is; stochastic rounding draws differ by tensor.

    Returns:
        codes in x's shape and scale float32 broadcastable to it; see `QTensor`.

    Raises:
        ValueError: if x is not finite or has fewer than two axes, if the precision has no
            scale, or if the block does not fit the granularity.

    Source: arXiv 2603.02170, Algorithm 1, line 3 (psi). Differs in: no epsilon; a region of
    zeros has scale 1.

    >>> q = quantize(torch.tensor([[1.0, -127.0], [254.0, 63.0]]), Granularity.PerToken)
    >>> q.codes.tolist(), q.scale.tolist()
    ([[1, -127], [127, 32]], [[1.0], [2.0]])
    """
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"quantize takes [..., n, d], not empty; got shape {tuple(x.shape)}")
    if not precision.is_scaled:
        raise ValueError(f"quantize rounds to a scaled format; {precision.value!r} has no scale")
    if how.is_map == isinstance(block, int):
        wanted = "(block_q, block_k)" if how.is_map else "a number of tokens"
        raise ValueError(f"granularity {how.value!r} takes block={wanted}; got {block!r}")
    if not bool(x.isfinite().all()):
        raise ValueError(f"quantize takes finite numbers; x of shape {tuple(x.shape)} is not")
    rows, columns = (block, x.shape[-1]) if isinstance(block, int) else block
    if min(rows, columns) < 1:
        raise ValueError(f"block {block!r} is not a positive number of tokens")
    n, m = x.shape[-2:]
    operand = encode(to_tiles(x.float(), rows, columns), precision, how, rounding, tensor)
    return as_qtensor(operand, n, m)


def as_qtensor(operand: Operand, n: int, m: int) -> QTensor:
    """A scaled operand's codes in their own dtype and [..., n, m] shape, padding cut off."""
    assert operand.scale is not None
    dtype = FLOAT8_DTYPE.get(operand.precision, torch.int8)
    codes = from_tiles(operand.values, n, m).to(dtype)
    scale = operand.scale.float()
    shape = list(operand.values.shape)
    for block, axis in ((ROW_BLOCK, ROW), (COLUMN_BLOCK, COLUMN)):
        if scale.shape[block] == scale.shape[axis] == 1:
            shape[block] = shape[axis] = 1
    return QTensor(codes, from_tiles(scale.expand(*scale.shape[:-4], *shape[-4:]), n, m))


def _amax(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """max |x| over `axes`, kept; two reductions, because a copy of |x| would cost more."""
    return torch.maximum(x.amax(axes, keepdim=True), -x.amin(axes, keepdim=True))


def _round_tiles_(
    y: Tensor, precision: Precision, rounding: Rounding, tensor: str, row0: int
) -> Tensor:
    flat = y.flatten(-4, -3).flatten(-2, -1)  # a view: y is contiguous
    return round_codes_(flat, precision, rounding, tensor, row0).view_as(y)
