"""What the forward and the backward of the kernels compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What the forward computes besides o, for the backward."""

    rows: Tensor
    """Numbers of each query, float32 [1 or 2, sequences, heads, n_q]: `lse2`, and `row_max` if the
    spec has scales from bounds."""
    k_mean: Tensor | None
    """The mean that was subtracted from K, float32 [sequences, kv heads, 1, d]; None if K is not
    smoothed."""

    @property
    def lse2(self) -> Tensor:
        """The logsumexp in base 2 of the smoothed logits, [sequences, heads, n_q].

        The backward recomputes P from it. It is +inf for a query that attends to no key, so that
        its P is 0.
        """
        return self.rows[0]

    @property
    def row_max(self) -> Tensor | None:
        """The largest smoothed logit of each query in base 2, without a sink, or None.

        Any number for a query that attends to no key.
        """
        return self.rows[1] if self.rows.shape[0] > 1 else None


class RowStatistics(NamedTuple):
    """Two numbers for each query, from which the backward recomputes P and dS; each a `Rows`."""

    lse2: Any  #: see `ForwardResult.lse2`
    delta: Any  #: rowsum(P o dP), less the gradient of the logsumexp


class Gradients(NamedTuple):
    """dq, dk and dv: tensors with the shapes of q, k and v, which the backward fills."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
