"""What the time of our kernels goes into: products, or preparing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sagesim.spec import AttentionSpec, Delta
from sagesim_kernels.bench.meter import Kernel

PRODUCTS: Final = {
    "_forward": "forward",
    "query_tiles": "dq",
    "key_tiles": "dk and dv",
    "one_pass": "dq, dk and dv",
    "_finish": "dq, dk and dv",
}
"""Kernels that compute the seven products, and their jobs."""

PREPARATION: Final = {
    "_encode": "quantizing",
    "_copy": "quantizing",
    "_sum_chunks": "smoothing",
    "_divide_sums": "smoothing",
    "_delta_from_o": "delta",
    "_prepare_rows": "delta",
    "_natural_lse": "logsumexp",
}
"""Kernels that prepare them. What is in neither list is preparation too, called "other": memory
that is set or copied."""


def by_job(kernels: Iterable[Kernel], spec: AttentionSpec) -> dict[str, float]:
    """Seconds of each job, of launches in their order.

    Delta from P comes from the kernel of dQ, run once before it for each backward.
    """
    seconds: dict[str, float] = {}
    query_passes = 0
    for kernel in kernels:
        job = PRODUCTS.get(kernel.name) or PREPARATION.get(kernel.name, "other")
        if kernel.name == "query_tiles":
            query_passes += 1
            if spec.delta is Delta.FROM_P and query_passes % 2 == 1:
                job = "delta"
        seconds[job] = seconds.get(job, 0.0) + kernel.seconds
    return seconds


def preparation_share(seconds: dict[str, float]) -> float:
    """How much of all jobs' time is not in `PRODUCTS`.

    >>> preparation_share({"dq, dk and dv": 3.0, "quantizing": 1.0})
    0.25
    """
    products = sum(seconds.get(job, 0.0) for job in set(PRODUCTS.values()))
    return 1 - products / sum(seconds.values())
