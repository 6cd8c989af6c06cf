"""Relative L2 errors of o, dq, dk and dv against float64, on the rounded inputs.

The reference is `sagesim.exact`, which shares no code with the emulator. The inputs are the draws
of Table 1 and the shipped capture, as for the emulator's errors in docs/paper.md. The errors come
from the same run, machine and code as the times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from sagesim.analysis import Setting
from sagesim.data import LLAMA
from sagesim.emulator import exact
from sagesim.models import Capture
from sagesim.problem import AttentionProblem
from sagesim_kernels.bench.cases import CaptureCase, GaussianCase

OUTPUTS: Final = ("o", "dq", "dk", "dv")


def problems(
    case: GaussianCase | CaptureCase, device: torch.device, dtype: torch.dtype
) -> Iterator[AttentionProblem]:
    """The problems of a case: one with all draws, or one for each layer of the capture.

    Raises:
        ValueError: if a captured call has a mask, grouped heads or a scale of its own.
    """
    if isinstance(case, GaussianCase):
        setting = Setting(
            tokens=case.tokens,
            head_dim=case.head_dim,
            draws=case.draws,
            is_causal=case.is_causal,
        )
        draws = [setting.problem(case.sigma, draw).qkvdo for draw in range(case.draws)]
        q, k, v, do = (torch.stack(x).to(device, dtype) for x in zip(*draws, strict=True))
        yield AttentionProblem(q=q, k=k, v=v, do=do, is_causal=case.is_causal)
        return
    for call in Capture.load(LLAMA).calls:
        usual = call.scale is None or math.isclose(call.scale, call.q.shape[-1] ** -0.5)
        if call.attn_mask is not None or call.enable_gqa or not usual:
            raise ValueError(f"{call}: a mask, grouped heads or a scale of its own is not timed")
        q, k, v, do = (x.to(device, dtype) for x in call.qkvdo)
        yield AttentionProblem(q=q, k=k, v=v, do=do, is_causal=call.is_causal)


def errors(
    problem: AttentionProblem, results: Sequence[dict[str, Tensor]]
) -> list[dict[str, float]]:
    """|x - exact| / |exact| over all heads, for each result and each of `OUTPUTS`.

    The reference is computed one head at a time, because it holds whole maps in float64.
    """
    squares = torch.zeros(len(results), len(OUTPUTS), dtype=torch.float64)
    whole = torch.zeros(len(OUTPUTS), dtype=torch.float64)
    batch, heads = problem.q.shape[:2]
    for at in ((b, h) for b in range(batch) for h in range(heads)):
        q, k, v, do = (x[at][None] for x in problem.qkvdo)
        true = exact(q, k, v, do, is_causal=problem.is_causal)
        for j, name in enumerate(OUTPUTS):
            reference = getattr(true, name)[0]
            whole[j] += reference.square().sum().cpu()
            for i, result in enumerate(results):
                squares[i, j] += (result[name][at].double() - reference).square().sum().cpu()
    relative = (squares / whole).sqrt()
    return [dict(zip(OUTPUTS, map(float, row), strict=True)) for row in relative]


def distance(result: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest |x - reference| / |reference| of several tensors; NaN if one of them is NaN."""

    def of(name: str) -> float:
        x, y = result[name].float(), reference[name].float()
        return float((x - y).norm() / y.norm())

    found = [of(name) for name in reference]
    return math.nan if any(map(math.isnan, found)) else max(found)


def mean_errors(several: Iterable[dict[str, float]]) -> dict[str, Any]:
    """Geometric means over problems."""
    rows = list(several)
    return {
        name: math.exp(sum(math.log(row[name]) for row in rows) / len(rows)) for name in OUTPUTS
    }
