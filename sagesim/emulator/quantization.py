"""Round operands to their formats: from the amax of each region to its scale and its codes.

An operand is a tensor of tiles, [..., row blocks, rows, column blocks, columns]. A granularity is
the set of those four axes along which elements share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.checks import check_type
from sagesim.emulator.rounding import CODE_MAX, FLOAT8_DTYPE, STREAMS, round_codes_
from sagesim.problem import check_is_tensor
from sagesim.shapes import Float
from sagesim.spec import HALF_EVEN, Granularity, Precision, Rounding

ROW_BLOCK, ROW, COLUMN_BLOCK, COLUMN = -4, -3, -2, -1

SHARED_AXES: Final = {
    Granularity.PerHead: (COLUMN, COLUMN_BLOCK, ROW, ROW_BLOCK),
    Granularity.PerBlock: (COLUMN, COLUMN_BLOCK, ROW),
    Granularity.PerToken: (COLUMN, COLUMN_BLOCK),
    Granularity.PerChannel: (ROW, ROW_BLOCK),
    Granularity.PerBlockChannel: (ROW,),
    Granularity.PerTile: (COLUMN, ROW),
    Granularity.PerTileRow: (COLUMN,),
    Granularity.PerTileColumn: (ROW,),
    Granularity.PerRow: (COLUMN, COLUMN_BLOCK),
    Granularity.PerRowBound: (COLUMN, COLUMN_BLOCK),
}
"""For each granularity, the axes of a tiled operand along which elements share a scale.

A scale per row bound does not come from the elements: see `encode_within`.
"""


@dataclass(frozen=True, slots=True)
class QTensor:
    """A quantized tensor: x is approximately codes * scale.

    Invariants: INT8 codes are integers in [-127, 127], and FP8 codes are values of the float8
    format. scale is positive; only in a trace's "pv.p" may it underflow to 0. A region of zeros has
    codes 0 and scale 1. For INT8 with half-even or half-away rounding, |x - codes * scale| is at
    most scale / 2 elementwise, up to the rounding of float32.
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

    values: codes if there is a scale, else the rounded numbers; float32 or float64.
    scale: broadcastable to values; None for the unscaled formats.
    """

    values: Tensor
    scale: Tensor | None
    precision: Precision

    def dequantize(self) -> Tensor:
        """The numbers that the operand stands for, in tiles."""
        return self.values if self.scale is None else self.values * self.scale

    def without_scale(self) -> Operand:
        """The codes alone, for a product whose other operand has been multiplied by the scale."""
        return Operand(self.values, None, self.precision)

    def row_blocks(self, start: int, stop: int) -> Operand:
        """The operand's row blocks start..stop, as a view."""
        scale = self.scale
        if scale is not None and scale.shape[ROW_BLOCK] > 1:
            scale = scale[..., start:stop, :, :, :]
        return Operand(self.values[..., start:stop, :, :, :], scale, self.precision)

    def may_be_nonfinite(self) -> bool:
        """Whether a number of the operand may be NaN or infinite; see `may_hold`."""
        return any(x is not None and may_hold(~x.isfinite()) for x in (self.values, self.scale))

    def dequantize_if_scale_varies_along(self, axis: int) -> Operand:
        """The dequantized operand if its scale varies along the contracted axis, else itself.

        A scale that varies along the contracted axis cannot be taken out of an integer sum.
        """
        if self.scale is None or self.scale.shape[axis] == 1:
            return self
        return Operand(self.values * self.scale, None, Precision.FP32)


def may_hold(condition: Tensor) -> bool:
    """Whether a boolean tensor may have a True element. Only a CPU looks; a GPU would have to wait.

    The caller must compute the same numbers in either case.
    """
    return condition.device.type != "cpu" or bool(condition.any())


def to_tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """Reshape [..., n, m] to [..., ceil(n/rows), rows, ceil(m/columns), columns].

    Zeros pad the last tiles. They change no amax and no sum.
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
    granularity: Granularity,
    rounding: Rounding,
    tensor: str,
    first_row: int = 0,
) -> Operand:
    """Round x to `precision`, with one scale per region if the precision is scaled.

    Args:
        x: tiles [..., row blocks, rows, column blocks, columns] in float32 or float64; padding
            and masked elements are zero.
        tensor: the tensor's name, for stochastic rounding.
        first_row: the index of the first row in its head, for stochastic rounding.
    """
    match precision:
        case Precision.FP32:
            return Operand(x, None, precision)
        case Precision.FP16 | Precision.BF16:
            dtype = torch.float16 if precision is Precision.FP16 else torch.bfloat16
            return Operand(x.to(dtype).to(x.dtype), None, precision)
        case Precision.INPUT16:
            raise AssertionError("INPUT16 has no format; resolve_input16 replaces it")
        case Precision.INT8 | Precision.FP8_E4M3 | Precision.FP8_E5M2:
            x32 = x.float()
            scale, inverse = scales(amax_of(x32, SHARED_AXES[granularity]), CODE_MAX[precision])
            y = round_tiles_(x32 * inverse, precision, rounding, tensor, first_row)
            return Operand(y.to(x.dtype), scale.to(x.dtype), precision)


def encode_p_per_tile_row_(
    tile_exp: Tensor,
    weight: Tensor,
    all_masked: Tensor,
    precision: Precision,
    rounding: Rounding,
    first_row: int,
) -> Operand:
    """Round the unnormalised P = tile_exp * weight with one scale per tile row.

    tile_exp has the maximum 1 in each tile row. The codes are tile_exp * code_max, rounded, and the
    scale is weight / code_max, so that the codes depend on the tile alone. Overwrites tile_exp.

    Args:
        tile_exp: tiles of exp(S - tile row max); 0 in a tile row that is fully masked.
        weight: exp(tile row max - row max), [..., row blocks, rows, column blocks, 1]. It may
            underflow to 0, and the scale with it.
        all_masked: bool, shaped as weight; True for a tile row that is fully masked.
        precision: a scaled format.
        first_row: the index of the first row in its head, for stochastic rounding.
    """
    code_max = CODE_MAX[precision]
    codes = round_tiles_(tile_exp.mul_(code_max), precision, rounding, "p", first_row)
    scale = (weight / torch.full_like(weight, code_max)).masked_fill_(all_masked, 1.0)
    return Operand(codes, scale, precision)


def encode_within(
    x: Tensor,
    bound: Tensor,
    top: Tensor,
    precision: Precision,
    rounding: Rounding,
    tensor: str,
    first_row: int,
) -> Operand:
    """Round the rows of a map, with scales that follow from a bound on each row.

    Args:
        x: tiles [..., row blocks, rows, column blocks, columns].
        bound: [..., row blocks, rows, 1, 1].
        top: the code of the bound, in the shape of bound.
        precision: a scaled format.
        first_row: the index of the first row in its head, for stochastic rounding.
    """
    scale, inverse = scales(bound.float(), top.float())
    # The scale alone is NaN if the bound is: a masked entry has the code 0.
    inverse = inverse.nan_to_num(0.0)
    y = round_tiles_(x.float() * inverse, precision, rounding, tensor, first_row)
    return Operand(y.to(x.dtype), scale.to(x.dtype), precision)


def scales(amax: Tensor, code_max: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return scale = amax / code_max and inverse = code_max / amax, each one rounded division.

    If the inverse would overflow (amax is 0 or below about 2^-128 code_max: 3.7e-37 for INT8), the
    scale is 1 and the inverse 0. If amax is NaN or infinite, the scale is NaN, which reaches the
    output.
    """
    # Dividing by a Python number is a multiplication by its reciprocal on some devices.
    divisor = code_max if isinstance(code_max, Tensor) else torch.full_like(amax, code_max)
    inverse = divisor / amax
    overflows = inverse.isinf()
    scale = (amax / divisor).masked_fill_(overflows, 1.0).masked_fill_(amax.isinf(), torch.nan)
    return scale, inverse.masked_fill_(overflows, 0.0)


@torch.no_grad()
def quantize(
    x: Float[Tensor, "*heads n d"],
    how: Granularity,
    *,
    block: int | tuple[int, int] = 64,
    precision: Precision = Precision.INT8,
    rounding: Rounding = HALF_EVEN,
    tensor: str = "q",
) -> QTensor:
    """Round x to INT8 or FP8 codes with one scale per region.

    Not differentiable: codes and scale require no gradient.

    Args:
        x: finite in float32, in which it is computed; of any floating dtype. For a map granularity,
            n is the number of queries and d the number of keys.
        how: the granularity, which elements share a scale.
        block: tokens per block; (block_q, block_k) for a map granularity.
        precision: INT8 or one of the FP8 formats.
        tensor: "q", "k", "v", "do", "p" or "ds"; each has other random numbers in stochastic
            rounding.

    Returns:
        codes in the shape of x, and scale, float32 and broadcastable to codes; see `QTensor`.

    Raises:
        TypeError: if x is no dense tensor of a floating dtype, or how, precision or rounding is not
            of its type.
        ValueError: if x is empty, not finite in float32 or has fewer than two axes, if the
            precision has no scale, if the block is not positive or does not fit the granularity, if
            there is no such tensor, or if the granularity is `PerRowBound`, because x does not
            determine the bound.

    Source: arXiv 2603.02170, Algorithm 1, line 3 (psi). Differs in: there is no epsilon, and a
    region of zeros has scale 1.

    >>> q = quantize(torch.tensor([[1.0, -127.0], [254.0, 63.0]]), Granularity.PerToken)
    >>> q.codes.tolist(), q.scale.tolist()
    ([[1, -127], [127, 32]], [[1.0], [2.0]])
    """
    check_is_tensor("x", x)
    check_type("how", how, Granularity, "a sagesim.Granularity")
    check_type("precision", precision, Precision, "a sagesim.Precision")
    check_type("rounding", rounding, Rounding, "a sagesim.Rounding")
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; it must have a floating dtype")
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"x must be [..., n, d] and not empty; it has shape {tuple(x.shape)}")
    if not precision.is_scaled:
        raise ValueError(f"precision {precision.value!r} has no scale; use INT8 or FP8")
    if how is Granularity.PerRowBound:
        raise ValueError("granularity 'row_bound': x does not determine the bound on its rows")
    if tensor not in STREAMS:
        raise ValueError(f"tensor is {tensor!r}; it must be one of {', '.join(STREAMS)}")
    n, m = x.shape[-2:]
    rows, columns = _tile_sizes(block, how, m)
    x = x.float()
    if not bool(x.isfinite().all()):
        raise ValueError(f"x of shape {tuple(x.shape)} is not finite in float32")
    return as_qtensor(encode(to_tiles(x, rows, columns), precision, how, rounding, tensor), n, m)


def _tile_sizes(block: int | tuple[int, int], how: Granularity, m: int) -> tuple[int, int]:
    """The rows and columns of a tile of a tensor [..., n, m].

    Raises:
        ValueError: if the block is not positive or does not fit the granularity.
    """
    match block if how.is_map else (block, m):
        case (int() as rows, int() as columns):
            if min(rows, columns) < 1:
                raise ValueError(f"block {block!r} is not a positive number of tokens")
            return rows, columns
        case _:
            wanted = "(block_q, block_k)" if how.is_map else "a number of tokens"
            raise ValueError(f"granularity {how.value!r} takes block={wanted}; got {block!r}")


def as_qtensor(operand: Operand, n: int, m: int) -> QTensor:
    """The codes and scale [..., n, m] of a scaled operand in tiles, without padding."""
    assert operand.scale is not None
    dtype = FLOAT8_DTYPE.get(operand.precision, torch.int8)
    codes = from_tiles(operand.values, n, m).to(dtype)
    scale = operand.scale.float()
    shape = list(operand.values.shape)
    for block, axis in ((ROW_BLOCK, ROW), (COLUMN_BLOCK, COLUMN)):
        if scale.shape[block] == scale.shape[axis] == 1:
            shape[block] = shape[axis] = 1
    return QTensor(codes, from_tiles(scale.expand(*scale.shape[:-4], *shape[-4:]), n, m))


def amax_of(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """max |x| over `axes`, which are kept. Two reductions cost less than a copy of |x|."""
    return torch.maximum(x.amax(axes, keepdim=True), -x.amin(axes, keepdim=True))


def round_tiles_(
    y: Tensor, precision: Precision, rounding: Rounding, tensor: str, first_row: int
) -> Tensor:
    flat = y.flatten(-4, -3).flatten(-2, -1)  # a view: y is contiguous
    return round_codes_(flat, precision, rounding, tensor, first_row).view_as(y)
