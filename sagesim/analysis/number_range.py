"""Operands of 16-bit products that FP16 cannot hold: values too small or too large for it.

FP16 has normal numbers from 6e-5 to 65504. A gradient dO of float32 inputs is often smaller, and
an activation can be larger. The product then has a large error that is no rounding error of
ordinary values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.analysis.metrics import TITLES
from sagesim.emulator import FlatProblem, SmoothedQK, flatten
from sagesim.problem import AttentionProblem
from sagesim.spec import OPERANDS, SITES, AttentionSpec, Precision

_FLOATS = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RangeLoss:
    """An operand of a product that loses more than rounding errors in the product's 16-bit format.

    lost: the L2 norm of the change over that of the operand, in the head where it is largest;
        infinite if an element overflows.
    """

    site: str
    tensor: str
    precision: Precision
    lost: float

    @property
    def overflows(self) -> bool:
        """Whether an element becomes infinite."""
        return math.isinf(self.lost)

    @property
    def operand(self) -> str:
        """The operand in the notation of the paper, for example "dO"."""
        return TITLES.get(self.tensor, self.tensor.upper() if self.tensor != "do" else "dO")


def range_losses(
    problems: Iterable[AttentionProblem], spec: AttentionSpec
) -> tuple[RangeLoss, ...]:
    """The largest range losses of Q, K, V and dO of some problems under a spec."""
    return worst(loss for problem in problems for loss in _of_tokens(problem, spec))


def _of_tokens(problem: AttentionProblem, spec: AttentionSpec) -> Iterator[RangeLoss]:
    x = flatten(problem, spec)
    smoothed, do = SmoothedQK.of(x, slice(None)), x.flatten_queries(problem.gradient)
    tensors = {"q": smoothed.q, "k": smoothed.k, "v": x.v, "do": do}
    for site in SITES:
        for tensor in OPERANDS[site]:
            if tensor in tensors:
                yield from _losses(x, site, tensor, tensors[tensor])


def ds_range_losses(x: FlatProblem, ds: Tensor) -> Iterator[RangeLoss]:
    """The range losses of dS [Z, n_q, n_k]. P has none: its elements are at most 1."""
    for site in ("dq", "dk"):
        yield from _losses(x, site, "ds", ds)


def worst(losses: Iterable[RangeLoss]) -> tuple[RangeLoss, ...]:
    """The largest loss of each site and operand."""
    found: dict[tuple[str, str], RangeLoss] = {}
    for loss in losses:
        key = (loss.site, loss.tensor)
        if key not in found or loss.lost > found[key].lost:
            found[key] = loss
    return tuple(found.values())


def _losses(x: FlatProblem, site: str, tensor: str, values: Tensor) -> Iterator[RangeLoss]:
    precision = x.spec.site(site).precision
    dtype = _FLOATS.get(precision)
    if dtype is None or not values.numel():
        return
    # Rounding to the nearest normal number changes a value, and so a norm, by at most eps/2.
    change = (values.to(dtype).to(values.dtype) - values).norm(dim=(-2, -1))
    relative = (change / values.norm(dim=(-2, -1))).nan_to_num(0.0, math.inf)
    lost = float(relative.max())
    if lost > torch.finfo(dtype).eps / 2:
        yield RangeLoss(site, tensor, precision, lost)
