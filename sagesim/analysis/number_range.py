"""Operands of 16-bit products that FP16 cannot hold: values too small or too large for it.

FP16 has normal numbers from 6e-5 to 65504. A gradient dO of float32 inputs is often smaller, and
an activation can be larger. The product then has a large error that is no rounding error of
ordinary values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.analysis.metrics import SITE_NAMES, TITLES
from sagesim.analysis.sampling import Sample
from sagesim.emulator import SmoothedQK, Trace, flatten, trace
from sagesim.problem import AttentionProblem, resolve_input16
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
    problems: Iterable[AttentionProblem], spec: AttentionSpec, sample: Sample | None = None
) -> tuple[RangeLoss, ...]:
    """The largest range losses of some problems under a spec: of Q, K, V, dO, P and dS.

    P and dS are those of the spec's own backward, which is emulated for some heads at a time.

    sample: how much of P and dS to measure; None measures all of them.

    >>> import torch, sagesim
    >>> q, k, v, do = torch.randn(4, 1, 1, 32, 16)
    >>> problem = sagesim.AttentionProblem(q=q, k=k, v=v, do=1e-7 * do)
    >>> {loss.operand for loss in range_losses([problem], sagesim.FPA_FP16)} == {"dO", "dS"}
    True
    """
    return largest_losses(
        loss for problem in problems for loss in _of_problem(problem, spec, sample)
    )


def _of_problem(
    problem: AttentionProblem, spec: AttentionSpec, sample: Sample | None
) -> Iterator[RangeLoss]:
    yield from token_range_losses(problem, spec)
    parts = problem.head_groups()
    if sample is not None:
        parts = sample.parts(problem, spec)
    for part in parts:
        yield from map_range_losses(trace(part, spec=spec))


@torch.no_grad()
def token_range_losses(problem: AttentionProblem, spec: AttentionSpec) -> list[RangeLoss]:
    """The range losses of Q, K, V and dO."""
    problem = problem.autocast()
    x = flatten(problem, spec)
    problem.check_gradient()
    smoothed, do = SmoothedQK.of(x, slice(None)), x.flatten_queries(problem.gradient)
    tensors = {"q": smoothed.q, "k": smoothed.k, "v": x.v, "do": do}
    return [
        loss
        for site in SITES
        for tensor in OPERANDS[site]
        if tensor in tensors
        for loss in _losses(x.spec, site, tensor, tensors[tensor])
    ]


def map_range_losses(traced: Trace) -> Iterator[RangeLoss]:
    """The range losses of the backward's P and dS.

    P = exp(S - L) of the backward may exceed 1, because S is recomputed at another site than L. The
    forward's P has no loss: relative to the maximum of its row, its largest element is 1.
    """
    spec = resolve_input16(traced.spec, traced.o.dtype)
    for site, tensor, values in (
        ("dv", "p", traced.p_recompute),
        ("dq", "ds", traced.ds),
        ("dk", "ds", traced.ds),
    ):
        yield from _losses(spec, site, tensor, values)


def largest_losses(losses: Iterable[RangeLoss]) -> tuple[RangeLoss, ...]:
    """The largest loss of each site and operand."""
    found: dict[tuple[str, str], RangeLoss] = {}
    for loss in losses:
        key = (loss.site, loss.tensor)
        if key not in found or loss.lost > found[key].lost:
            found[key] = loss
    return tuple(found.values())


def _losses(spec: AttentionSpec, site: str, tensor: str, values: Tensor) -> Iterator[RangeLoss]:
    """The range loss of an operand [*heads, rows, columns]. spec: without INPUT16."""
    precision = spec.site(site).precision
    dtype = _FLOATS.get(precision)
    if dtype is None or not values.numel():
        return
    rounded = values.to(dtype)
    if bool((rounded.isinf() & values.isfinite()).any()):
        yield RangeLoss(site, tensor, precision, math.inf)
        return
    # Rounding to the nearest normal number changes a value, and so a norm, by at most eps/2.
    values = values.double()  # norms of float32 numbers may underflow or overflow
    change = (rounded.double() - values).norm(dim=(-2, -1))
    lost = float((change / values.norm(dim=(-2, -1))).nan_to_num(0.0).max())
    if lost > torch.finfo(dtype).eps / 2:
        yield RangeLoss(site, tensor, precision, lost)


def range_warnings(losses: Sequence[RangeLoss]) -> list[str]:
    """A sentence for each operand that a 16-bit format cannot hold, and what to do."""
    found = [_range_warning(loss) for loss in losses]
    if any(not loss.overflows for loss in losses):
        found.append(
            "The errors measure this loss, not the rounding of ordinary values. Multiply the loss "
            "by a larger power of two when recording, or record in bfloat16."
        )
    return found


def _range_warning(loss: RangeLoss) -> str:
    kind, product = loss.precision.value.upper(), SITE_NAMES[loss.site]
    if loss.overflows:
        return f"{loss.operand} overflows {kind} in {product}: elements become infinite."
    return (
        f"{loss.operand} underflows {kind} in {product}: rounding changes it by up to "
        f"{100 * loss.lost:.2g}% of its norm."
    )
