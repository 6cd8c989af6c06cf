"""Bounds on the rows of P and dS that are known before the loop: no code overflows.

docs/numerics.md, "Scales from bounds", defines the scales. Here is the proof that a code is at most
the top code of its row, and how much of an operand becomes 0.

A row of P is at most w_i = exp(m_i - L_i), because S_ij <= m_i. With |dP_ij| <= |dO_i| |V_j|
(Cauchy-Schwarz), a row of dS = P (dP - delta) is at most w_i (|dO_i| max_j |V_j| + |delta_i|). In
float32, the following can make an element of a row larger than the bound that was computed. u is
2^-24.

- P. S_ij and m_i are the same float32 numbers, and so is L_i: S_ij - L_i is at most m_i - L_i also
  after it is rounded. The two exponentials are off by at most 2 u each.
- dP is a sum of d products, whose float32 additions may truncate: (d + 1) 2 u of |dO_i| |V_j|.
- A norm has a square, log2 of the padded d additions, and a root: (2 + log2 d) u at most. Its
  largest element is at least 1/2 after the division by a power of two, so that squares that
  underflow do not count.
- The product of the norms, its sum with |delta|, the product with w, dP - delta, its product with
  P, the inverse and the product with the inverse are 8 roundings at most. The slope of a softcap is
  at most 1.
- A number below 2^-126 has an absolute error of 2^-150. The codes are 0 if top / bound overflows.
  The smallest top code is 127, that of INT8. So the bounds of all other rows are at least
  127 * 2^-128, which is above 2^-122. A sum of 256 such errors is 2^-142, which is below 2^-20 of
  any of these bounds.

None of these grows with the number of keys.

Computed in float64. Source: ours.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sagesim.emulator import CODE_MAX
from sagesim.spec import MatmulSpec, Precision, RoundingMode
from theory.fp8_sums import Instruction, relative_bound
from theory.matmul import float32_error
from theory.rounding import GRIDS, UNIT, region_amax, rounding_bound

OVERFLOW: Final = {
    Precision.INT8: 127.5 / 127,
    Precision.FP8_E4M3: 464 / 448,
    Precision.FP8_E5M2: 61440 / 57344,
}
"""How far a number may exceed the largest code before that code is off by more than half a step.

An error of more than half a step is more than `theory.rounding.rounding_bound` allows. What such a
number becomes depends on the conversion. INT8 has no code for it. PTX with satfinite, and PyTorch
2.13 in E4M3, give the largest code. PyTorch gives infinity in E5M2.
"""

TOP_CODES: Final = {
    Precision.INT8: (127.0,),
    Precision.FP8_E4M3: (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0),
    Precision.FP8_E5M2: (57344.0, 49152.0, 40960.0, 32768.0),
}
"""The codes that the bound of a row may get (docs/numerics.md, "Scales from bounds")."""

UNDERFLOW_SHARE: Final = 2.0**-20
"""What underflow adds to an element, relative to its bound: see the list at the top."""


def excess(channels: int) -> float:
    """An upper bound on the relative error of an element of a row over its bound, in float32.

    Source: the list at the top of this module.
    """
    padded = math.ceil(math.log2(max(channels, 2)))
    return (4 + 2 * (channels + 1) + 2 * (2 + padded) + 8) * UNIT + UNDERFLOW_SHARE


def overflows(precision: Precision, channels: int) -> bool:
    """Whether a number of a row could be too large for the largest code of the format.

    `excess` would have to exceed the distance of `OVERFLOW`. Stochastic rounding goes up from any
    number above the largest code; there the emulator and the kernels clamp.
    """
    return 1 + excess(channels) >= OVERFLOW[precision]


def p_bound(p: Tensor) -> Tensor:
    """w_i: the largest element of each row of P, [..., n_q, 1]. The bound is attained."""
    return p.double().amax(-1, keepdim=True)


def ds_bound(p: Tensor, do: Tensor, v: Tensor, delta: Tensor) -> Tensor:
    """The bound on each row of dS, [..., n_q, 1].

    It is attained if the key of the largest P has the longest V, and dO is parallel to it and
    delta negative.

    Args:
        p: [..., n_q, n_k].
        do: [..., n_q, d_v].
        v: [..., n_k, d_v].
        delta: [..., n_q].
    """
    of_v = v.double().norm(dim=-1).amax(-1)[..., None]
    return p_bound(p) * (do.double().norm(dim=-1) * of_v + delta.double().abs())[..., None]


def vanishing(precision: Precision, mode: RoundingMode = RoundingMode.HALF_EVEN) -> float:
    """The magnitude, relative to the largest of its region, up to which a number may become 0.

    To nearest, it is half the smallest code over the largest. The top codes of FP8 are up to 1.87
    times smaller (1.75 for E5M2), so this is for the largest one. A whole row of dO or Q becomes 0
    only if, times its bound, it is about that small against the largest row of its block.
    """
    grid = GRIDS[precision]
    smallest = grid.smallest if mode is RoundingMode.STOCHASTIC else grid.smallest / 2
    return smallest / CODE_MAX[precision]


class RowBound(NamedTuple):
    """The bound on each row of P or dS as an implementation may compute it, [..., n_q, 1].

    Its own error is in the two ends.
    """

    low: Tensor
    high: Tensor

    @classmethod
    def of_ds(
        cls,
        of_p: RowBound,
        do: tuple[Tensor, Tensor],
        v: tuple[Tensor, Tensor],
        delta: tuple[Tensor, Tensor],
    ) -> RowBound:
        """That of dS, from that of P and from dO, V and delta [..., n_q, 1], each with a bound on
        its error."""
        least = [_norms(x).sub(_norms(off)).clamp(min=0.0) for x, off in (do, v)]
        most = [_norms(x) + _norms(off) for x, off in (do, v)]
        size, off = delta[0].abs(), delta[1]
        float32 = float32_error(do[0].shape[-1])  # norms, their product, the sum
        return cls(
            of_p.low
            * (least[0] * least[1].amax(-2, keepdim=True) + (size - off).clamp(min=0.0))
            * (1 - float32),
            of_p.high * (most[0] * most[1].amax(-2, keepdim=True) + size + off) * (1 + float32),
        )

    def share(self, map: Tensor) -> Tensor:
        """An upper bound on the elements of a map over the bound of their row.

        map: a bound on its magnitudes. No code exceeds the top code, up to the scale's rounding.
        """
        return torch.where(map > 0, (map / self.low).clamp(max=1 + 2.0**-10), 0.0)


def widest(precision: Precision) -> float:
    """The largest code over the smallest top code (docs/numerics.md, "Scales from bounds")."""
    tops = TOP_CODES.get(precision, (1.0,))
    return tops[0] / tops[-1]


def nearest_top_code(x: Tensor, precision: Precision) -> Tensor:
    """The top code nearest to each element."""
    tops = torch.tensor(TOP_CODES[precision], dtype=x.dtype, device=x.device)
    return tops[(x[..., None] - tops).abs().argmin(-1)]


def folded_sum_bound(
    map: Tensor,
    x: Tensor,
    map_off: Tensor,
    x_off: Tensor,
    bound: RowBound,
    matmul: MatmulSpec,
    block: int,
    mode: RoundingMode,
    instruction: Instruction | None,
) -> Tensor:
    """An upper bound on |computed - map^T @ x|, dV or dK, whose map has scales per row bound.

    Row i of x is multiplied by the row's bound beta_i, and z_i, the result, is rounded. An error e
    of z_i is an error e / beta_i of x_i. It is multiplied by an element of the map, which is at
    most beta_i. So rows whose beta_i is hardly known do no harm.

    Args:
        map: P or dS, [..., n_q, n_k].
        x: dO or Q, [..., n_q, d].
        map_off, x_off: bounds on the errors of both; that of x is its error before it is rounded.
        block: queries of a block.
        instruction: how tensor cores add FP8 products; None: in float32.

    Source: ours.
    """
    size, precision = x.abs(), matmul.precision
    z = (size + x_off) * bound.high
    amax = region_amax(z, matmul.rhs, block, z.shape[-1]) * widest(precision)
    off = rounding_bound(z, amax, precision, mode)
    # Two roundings more than in other operands: of z, and of its quotient by the top code. Regions
    # become 0 that are larger than others by the smallest top code.
    vanishing = GRIDS[precision].largest ** 2 * 2.0**-128
    off = off + float32_error(1) * (z + off) + z.clamp(max=vanishing)
    total = map.abs() + map_off
    share = bound.share(total)
    error = map_off.mT @ size + total.mT @ x_off + share.mT @ off
    added = total.mT @ (size + x_off) + share.mT @ off
    error = error + float32_error(map.shape[-2]) * added
    if instruction is not None:
        error = error + truncated_sum_bound(share.mT, z + off, amax, precision, block, instruction)
    return error


def truncated_sum_bound(
    share: Tensor,
    right: Tensor,
    amax: Tensor,
    precision: Precision,
    block: int,
    instruction: Instruction,
) -> Tensor:
    """An upper bound on what tensor cores lose in share @ right, [..., m, d]; 0 unless it is FP8.

    A part of at most `block` terms loses relative_bound of the sum of magnitudes, in which a
    subnormal code counts as the smallest normal one (`theory.fp8_sums`).

    Args:
        share: bounds on magnitudes of the left operand over what the top code stands for.
        right: bounds on magnitudes of the right operand.
        amax: what the largest code of each element of `right` stands for.
    """
    grid = GRIDS[precision]
    if grid.unit == 0:
        return torch.zeros((), dtype=right.dtype)
    least = grid.smallest / (2 * grid.unit) / grid.largest  # normal code, of the largest one
    share = torch.where(share > 0, share.clamp(min=least * widest(precision)), 0.0)
    part = min(block, share.shape[-1])
    return relative_bound(part, instruction) * (share @ torch.maximum(right, least * amax))


def _norms(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True)
