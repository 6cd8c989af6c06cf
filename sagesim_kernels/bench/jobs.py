"""What our kernels spend their time on: matrix products, or preparing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sagesim.spec import AttentionSpec, Delta
from sagesim_kernels.bench.meter import Kernel

PRODUCTS: Final = {
    "forward_kernel": "forward",
    "dq_kernel": "dq",
    "dkdv_kernel": "dk and dv",
    "hopper_forward": "forward",
    "hopper_backward": "dq, dk and dv",
    "hopper_postprocess": "dq, dk and dv",
}
"""The kernels that compute the seven matrix products, and the job of each."""

PREPARATION: Final = {
    "quantize_kernel": "quantizing",
    "cast_kernel": "quantizing",
    "sum_chunks_kernel": "smoothing",
    "divide_sums_kernel": "smoothing",
    "delta_kernel": "delta",
    "hopper_preprocess": "delta",
    "natural_lse_kernel": "logsumexp",
}
"""The kernels that prepare products, and the job of each. A kernel in neither table, which sets or
copies memory, is preparation with the job "other"."""


def by_job(kernels: Iterable[Kernel], spec: AttentionSpec) -> dict[str, float]:
    """Return the seconds of each job, from launches in their order.

    If delta comes from P, each backward launches the kernel of dQ twice: for delta, then for dQ.
    """
    seconds: dict[str, float] = {}
    dq_launches = 0
    for kernel in kernels:
        job = PRODUCTS.get(kernel.name) or PREPARATION.get(kernel.name, "other")
        if kernel.name == "dq_kernel":
            dq_launches += 1
            if spec.delta is Delta.FROM_P and dq_launches % 2 == 1:
                job = "delta"
        seconds[job] = seconds.get(job, 0.0) + kernel.seconds
    return seconds


def preparation_share(seconds: dict[str, float]) -> float:
    """Return the share of the time that is not spent in jobs of `PRODUCTS`.

    >>> preparation_share({"dq, dk and dv": 3.0, "quantizing": 1.0})
    0.25
    """
    products = sum(seconds.get(job, 0.0) for job in set(PRODUCTS.values()))
    return 1 - products / sum(seconds.values())
