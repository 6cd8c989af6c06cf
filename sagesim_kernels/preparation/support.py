"""Which backwards are prepared in one pass over keys and queries."""

from __future__ import annotations

from functools import lru_cache

from sagesim.spec import AttentionSpec, Delta, Granularity, Precision
from sagesim_kernels.operands import DTYPES


@lru_cache(maxsize=256)
def has_one_pass(spec: AttentionSpec) -> bool:
    """Return whether `prepare_backward_in_one_pass` prepares the backward of a spec.

    QK is in INT8, its scales of K are of blocks, and all else is in one 16-bit format. The backward
    recomputes the forward's S: otherwise the units of dQ need the row sums of P. The caller checks
    the blocks, the head sizes and that there is no softcap.
    """
    (sixteen, *others) = {spec.site(site).precision for site in ("dv", "dp", "dq", "dk")}
    return (
        spec.qk == spec.qk_recompute
        and spec.qk.precision is Precision.INT8
        and spec.qk.rhs is Granularity.PerBlock
        and sixteen in DTYPES
        and not others
        and not spec.smoothing.q
        and spec.delta is Delta.FROM_O
    )
