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
- A number below 2^-126 has an absolute error of 2^-150. The codes are 0 if t / bound overflows, so
  other bounds are at least 2^-120. A sum of 256 such errors is below 2^-22 of them.

None of these grows with the number of keys.

Computed in float64. Source: ours.
"""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from sagesim.emulator import CODE_MAX
from sagesim.spec import Precision, RoundingMode
from theory.rounding import GRIDS, UNIT

OVERFLOW: Final = {
    Precision.INT8: 127.5 / 127,
    Precision.FP8_E4M3: 464 / 448,
    Precision.FP8_E5M2: 61440 / 57344,
}
"""How far a number may exceed the largest code before it is not rounded to the largest code."""


def excess(channels: int) -> float:
    """An upper bound on the relative error of an element of a row over its bound, in float32.

    Source: the list at the top of this module.
    """
    padded = math.ceil(math.log2(max(channels, 2)))
    return (4 + 2 * (channels + 1) + 2 * (2 + padded) + 8) * UNIT + 2.0**-22


def overflows(precision: Precision, channels: int) -> bool:
    """Whether a code of a row could exceed the largest code of the format.

    `excess` would have to exceed the distance to the first number that is not rounded to the
    largest code. Stochastic rounding goes up from any number above the largest code; there the
    emulator and the kernels clamp.
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
