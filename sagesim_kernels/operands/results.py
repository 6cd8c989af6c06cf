"""What the forward and the backward of the kernels compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What the forward computes besides o, for the backward."""

    lse2: Tensor
    """The logsumexp in base 2 of the smoothed logits, float32 [sequences, heads, n_q]. The backward
    recomputes P from it. It is +inf for a query that attends to no key, so that its P is 0."""
    k_mean: Tensor | None
    """The mean that was subtracted from K, float32 [sequences, kv heads, 1, d]; None if K is not
    smoothed."""


class RowStatistics(NamedTuple):
    """Two numbers for each query, from which the backward recomputes P and dS; each a `Rows`."""

    lse2: Any  #: see `ForwardResult.lse2`
    delta: Any  #: rowsum(P o dP), less the gradient of the logsumexp


class Gradients(NamedTuple):
    """dq, dk and dv: tensors with the shapes of q, k and v, which the backward fills."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
