"""What our kernels spend their time on: matrix products, or preparing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sagesim_kernels.bench.meter import Kernel

PRODUCTS: Final = {
    "forward_kernel": "forward",
    "failed_rows_kernel": "forward",
    "gradients_kernel": "dq, dk and dv",
    "finish_dq_kernel": "dq, dk and dv",
    "hopper_forward": "forward",
    "hopper_forward_codes": "forward",
    "hopper_backward": "dq, dk and dv",
    "hopper_codes_backward": "dq, dk and dv",
    "hopper_wide": "products of wide heads",
    "add_splits_kernel": "dq, dk and dv",
    "ampere_forward": "forward",
    "ampere_backward": "dq, dk and dv",
}
"""The kernels that compute the seven matrix products, and the job of each."""

PREPARATION: Final = {
    "quantize_kernel": "quantizing",
    "cast_kernel": "quantizing",
    "fold_kernel": "quantizing",
    "v_norms_kernel": "bounds of rows",
    "ds_bounds_kernel": "bounds of rows",
    "sum_chunks_kernel": "smoothing",
    "divide_sums_kernel": "smoothing",
    "delta_kernel": "delta",
    "p_rows_kernel": "delta",
    "ampere_p_rows": "delta",
    "hopper_p_rows": "delta",
    "hopper_codes_of_operands": "quantizing",
    "start_rows_kernel": "delta",
    "start_fp8_rows_kernel": "delta",
    "key_bounds_kernel": "units of dq",
    "units_kernel": "units of dq",
    "prepare_forward_kernel": "quantizing",
    "prepare_keys_kernel": "units of dq",
    "prepare_queries_kernel": "delta",
    "row_statistics_kernel": "delta",
    "capped_rows_kernel": "delta",
    "sums_of_ds_kernel": "delta",
    "natural_lse_kernel": "logsumexp",
    "logit_shift_kernel": "smoothing",
    "count_keys_kernel": "smoothing",
    "packed_tiles_kernel": "packing",
    "packing_kernel": "packing",
}
"""The kernels that prepare products, and the job of each. A kernel in neither table, which sets or
copies memory, is preparation with the job "other"."""


def by_job(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the seconds of each job."""
    seconds: dict[str, float] = {}
    for kernel in kernels:
        job = PRODUCTS.get(kernel.name) or PREPARATION.get(kernel.name, "other")
        seconds[job] = seconds.get(job, 0.0) + kernel.seconds
    return seconds


def preparation_share(seconds: dict[str, float]) -> float:
    """Return the share of the time that is spent in jobs of `PREPARATION`, or "other".

    >>> preparation_share({"dq, dk and dv": 3.0, "quantizing": 1.0})
    0.25
    """
    jobs = {*PREPARATION.values(), "other"}
    return sum(seconds.get(job, 0.0) for job in jobs) / sum(seconds.values())
