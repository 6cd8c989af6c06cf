"""Bounds on the rows of P and dS that are known before the backward computes these maps.

docs/numerics.md, "Scales from bounds", defines them; `theory.row_bounds` proves them.

dV and dK are sums over rows of P and dS, which have different scales. If the scales follow from
bounds, the rows of the other operand, dO or Q, are multiplied by the bounds before it is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.emulator.quantization import (
    SHARED_AXES,
    Operand,
    amax_of,
    from_tiles,
    round_tiles_,
    scales,
    to_tiles,
)
from sagesim.emulator.rounding import CODE_MAX
from sagesim.spec import (
    HALF_EVEN,
    SITES,
    AttentionSpec,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
)

TOP_CODES: Final = {
    Precision.INT8: (127.0,),
    Precision.FP8_E4M3: (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0),
    Precision.FP8_E5M2: (57344.0, 49152.0, 40960.0, 32768.0),
}
"""The codes that the bound of a row may get: in FP8 the largest ones, over one power of two."""


@dataclass(frozen=True, slots=True)
class RowBound:
    """The bound on each row of a map, and the code that the bound gets, each [Z, n].

    top: for the precision `fitted`; any other precision has its largest code.
    """

    bound: Tensor
    top: Tensor | None = None
    fitted: Precision | None = None

    def top_of(self, precision: Precision) -> Tensor:
        """The code that the bound of each row gets, [Z, n]."""
        if self.top is not None and precision is self.fitted:
            return self.top
        return torch.full_like(self.bound, CODE_MAX[precision])


def has_row_bounds(spec: AttentionSpec) -> bool:
    """Whether a site needs bounds on the rows of P or dS."""
    return any(has_row_bound(spec, site) for site in SITES)


def has_row_bound(spec: AttentionSpec, site: str) -> bool:
    """Whether the map of a site is rounded with scales per row bound."""
    matmul = spec.site(site)
    return matmul.precision.is_scaled and matmul.lhs is Granularity.PerRowBound


def p_bound(row_max: Tensor, lse: Tensor) -> Tensor:
    """The bound exp(m - L) on each row of P, [Z, n]; 0 in a row without keys.

    row_max: m, the largest logit of each row as qk_recompute computes it; -inf in a row without
        keys.
    lse: L of the forward, of the same logits.
    """
    return (row_max - lse).exp().masked_fill(row_max == -torch.inf, 0.0)


def ds_bound(of_p: Tensor, do: Operand, v: Operand, delta: Tensor) -> Tensor:
    """The bound exp(m - L) (|dO_i| max_j |V_j| + |delta_i|) on each row of dS, [Z, n].

    Args:
        of_p: `p_bound`.
        do, v: the operands of dp, in tiles.
        delta: [Z, n].
    """
    return of_p * (_norms(do) * _norms(v).amax(1, keepdim=True) + delta.abs())


def fold(
    x: Tensor, bound: Tensor, matmul: MatmulSpec, block: int, rounding: Rounding, tensor: str
) -> tuple[Operand, RowBound]:
    """Round dO or Q with the rows multiplied by the bounds of a map, and choose the top codes.

    The scale of row i of the map is bound_i / top_i. Row i of x is multiplied by it, so the product
    of the codes needs no scale but that of the result. Of `TOP_CODES`, the one is chosen whose row
    loses least to rounding; of equal ones, the largest.

    Args:
        x: [Z, n, d].
        bound: of the map's rows, [Z, n].
        matmul: the spec of dv or dk.
        block: tokens of a block of x.
        tensor: the name of x, for stochastic rounding.
    """
    precision, tops = matmul.precision, TOP_CODES[matmul.precision]
    tiles = to_tiles((x * bound[..., None]).float(), block, x.shape[-1])
    amax = amax_of(tiles, SHARED_AXES[matmul.rhs])
    # With the smallest top code the largest element of a region gets the largest code.
    scale, inverse = scales(amax, CODE_MAX[precision] * tops[-1])
    scaled = tiles * inverse
    best = torch.full_like(scaled[..., :1], tops[0])
    if len(tops) > 1:
        least = torch.full_like(best, torch.inf)
        for code in tops:
            top = torch.full_like(best, code)
            rounded = round_tiles_(scaled / top, precision, HALF_EVEN, tensor, 0)
            loss = _sum_pairwise((rounded * top - scaled).square())
            best, least = torch.where(loss < least, top, best), torch.minimum(loss, least)
    codes = round_tiles_(scaled / best, precision, rounding, tensor, 0)
    right = Operand(codes.to(x.dtype), scale.to(x.dtype), precision)
    top = from_tiles(best, x.shape[1], 1).squeeze(-1)
    return right, RowBound(bound, top.to(x.dtype), precision)


def _norms(x: Operand) -> Tensor:
    """The norms of the tokens of an operand, [Z, n]; they overflow only if they exceed float32.

    Each token is divided by a power of two first.
    """
    values = x.dequantize().flatten(3).flatten(1, 2)
    # frexp gives no exponent of infinity and NaN: 0 leaves them as they are.
    exponent = torch.frexp(values.abs().amax(-1, keepdim=True).nan_to_num(0.0, 0.0)).exponent
    exponent = exponent.clamp(-126, 127)  # 2**exponent and its inverse are finite
    squares = _sum_pairwise(torch.ldexp(values, -exponent).square())
    # In float32, a library may be off by a unit in the last place.
    roots = squares.double().sqrt().to(squares.dtype)
    return torch.ldexp(roots, exponent).squeeze(-1)


def _sum_pairwise(x: Tensor) -> Tensor:
    """The sum over the last axis, which is kept, in an order that no library chooses.

    Zeros pad the axis to a power of two. The second half is added to the first until one number is
    left.
    """
    n = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, n - x.shape[-1]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x
