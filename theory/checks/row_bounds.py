"""Measurements of `theory.row_bounds`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sagesim import (
    FP8_GRADIENTS,
    AttentionProblem,
    AttentionSpec,
    Granularity,
    Precision,
    QTensor,
    Trace,
)
from theory.checks.check import Check, bounded
from theory.checks.samples import Sample, captured, gaussian, outlier_channels
from theory.rounding import GRIDS
from theory.row_bounds import ds_bound, excess, nearest_top_code, p_bound

TOPIC: Final = "row_bounds"
_TOKENS: Final = 256
INT8: Final = AttentionSpec.parse(
    "fp8_gradients dv=int8@row_bound,block dq=int8@row_bound,block dk=int8@row_bound,block"
)


def attained(tokens: int = _TOKENS) -> Sample:
    """A row of dS that reaches its bound but for 1 / tokens.

    One key has almost the whole of a query's P, and a delta of almost its dP. The other keys have
    V of the same length and the opposite sign, and P of 1 / tokens each.
    """
    q, k, v, do = (torch.zeros(1, 1, tokens, 8) for _ in range(4))
    k[..., 0] = torch.linspace(-1e-3, 1e-3, tokens)
    q[..., 0], do[..., 0] = 1.0, 1.0
    v[..., 0] = 1.0
    v[..., tokens // 2 :, 0] = -1.0
    return Sample(name="V of two signs, parallel to dO", q=q, k=k, v=v, do=do)


class RowCodes(NamedTuple):
    """What the scales of a map mean for each row, [..., n_q, 1]; 0 in a row whose codes are all 0.

    The scale is beta_i / t_i. Of the top codes, t_i is taken to be the one nearest to the exact
    beta_i over the scale.
    """

    largest: Tensor
    """The largest |element| over the scale, so before it is rounded to a code, over t_i."""
    off: Tensor
    """|beta_i / scale / t_i - 1| for the exact beta_i."""

    @classmethod
    def of(cls, map: Tensor, bound: Tensor, operand: QTensor, precision: Precision) -> RowCodes:
        """From a map of a trace, the exact bounds of its rows and the map as an operand."""
        scale = operand.scale[..., :1].double()
        top = nearest_top_code(bound / scale, precision)
        # Below this, top / bound may overflow, and the codes are 0.
        used = bound > GRIDS[precision].largest * 2.0**-127
        largest = map.double().abs().amax(-1, keepdim=True) / scale / top
        off = (bound / scale / top - 1).abs()
        return cls(*(x.where(used, 0.0) for x in (largest, off)))


def row_codes(t: Trace, do: Tensor, v: Tensor) -> dict[str, RowCodes]:
    """By operand, such as "dv.p", of which the scales follow from bounds.

    do, v: as dp rounds them; see `of_dp`.
    """
    bounds = {
        "p": p_bound(t.p_recompute),
        "ds": ds_bound(t.p_recompute, do, v, t.delta),
    }
    maps = {"p": t.p_recompute, "ds": t.ds}
    found = dict[str, RowCodes]()
    for site, name in (("dv", "p"), ("dq", "ds"), ("dk", "ds")):
        matmul, key = t.spec.site(site), f"{site}.{name}"
        if matmul.precision.is_scaled and matmul.lhs is Granularity.PerRowBound:
            operand = t.operands[key]
            found[key] = RowCodes.of(maps[name], bounds[name], operand, matmul.precision)
    return found


def of_dp(x: AttentionProblem) -> tuple[Tensor, Tensor]:
    """dO and V in the INPUT16 of dp, in float64."""
    assert x.do is not None
    dtype = torch.float16 if x.v.dtype is torch.float16 else torch.bfloat16
    return x.do.to(dtype).double(), x.v.to(dtype).double()


def checks() -> Iterator[Check]:
    """Codes against the top codes of their rows, and scales against the exact bounds."""
    inputs: dict[str, tuple[Sample, ...]] = {
        s.name: (s,)
        for s in (
            gaussian(1.0, _TOKENS),
            gaussian(5.0, _TOKENS, is_causal=True),
            outlier_channels(_TOKENS),
            attained(),
        )
    }
    inputs[f"capture, all layers, N {_TOKENS}"] = captured(_TOKENS)
    for name, samples in inputs.items():
        for precision, spec in ((Precision.FP8_E4M3, FP8_GRADIENTS), (Precision.INT8, INT8)):
            found = [row_codes(x.trace(spec), *of_dp(x)) for x in samples]
            most = torch.tensor(excess(samples[0].v.shape[-1]), dtype=torch.float64)
            for key, title in (("dv.p", "P"), ("dk.ds", "dS")):
                rows = [x[key] for x in found]
                yield bounded(
                    TOPIC,
                    f"{title}: largest number of a row in codes <= its top code",
                    f"{precision.value}, {name}",
                    bound=1 + most,
                    measured=torch.cat([x.largest.flatten() for x in rows]),
                )
                yield bounded(
                    TOPIC,
                    f"{title}: scale of a row is its exact bound over a top code",
                    f"{precision.value}, {name}",
                    bound=most,
                    measured=torch.cat([x.off.flatten() for x in rows]),
                )
