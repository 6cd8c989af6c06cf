"""The preparation of a backward under a softcap computes what the kernels for one job each do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sagesim_kernels.hopper.capped_logits import DsSums
from sagesim_kernels.hopper.capped_rows import prepare_capped_backward, sums_of_ds
from sagesim_kernels.operands import (
    DqSums,
    KernelProblem,
    OperandCache,
    Rows,
    RowStatistics,
    Softcap,
    compute_k_means,
    compute_logit_shift,
)
from tests.sagesim_kernels.layouts import stored_rows
from tests.sagesim_kernels.preparation.backward_calls import (
    Call,
    check,
    expected_of,
    tokens,
)
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE, HERE
from tests.support.ptx_worker import prepared_backward

pytestmark = HERE

CALLS = {
    "float16, causal": Call(65, 200, dtype=torch.float16, mask="upper_left", has_d_lse=True),
    "key mask": Call(130, 130, dtype=torch.float32, has_key_mask=True),
    "packed": Call(130, 130, batch=1, starts=(0, 100, 100, 130)),
    "unsmoothed": Call(65, 200, mask="lower_right", is_smooth=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_softcap(name: str) -> None:
    """Units then contain the mean of K, and logits are divided by the softcap."""
    call = CALLS[name]._replace(softcap=3.0)
    tensors, gradients = call.tensors(), call.gradients()
    problem = call.problem(tensors)
    if call.is_smooth:
        gradients["k_mean"] = compute_k_means(problem).ptr
    expected = expected_of(problem, **gradients)
    shift = compute_logit_shift(problem, gradients.get("k_mean"))
    softcap = Softcap.of(problem, shift)

    def prepare(*given: object, **options: Any) -> None:
        shifts, ds_sums = prepare_capped_backward(*given, softcap, **options)
        check_capped_rows(shifts, ds_sums, shift, gradients["lse2"], problem)

    found = prepared_backward(problem, **gradients, prepare=prepare)
    check(found, expected, call, problem, gradients["lse2"])


@pytest.mark.parametrize("mean", [0.0, 1e-30, 0.7, 1e4])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e4])
def test_sums_of_ds_lose_nothing_that_dq_has(mean, size):
    """As integers they are below 2^60 at their bound, and off by less than 2^-20 units of dQ,
    or than the smallest normal number of float32."""
    q, k, v, o, do = (tokens(1, 2, 70, 40, dtype=torch.float32, seed=i) for i in range(5))
    k = torch.randn_like(k) * 1e-3 + mean
    call = Call(70, 70, dtype=torch.float32, softcap=3.0)
    problem = call.problem({"q": q, "k": k, "v": v})
    lse2 = Rows.of(torch.ones(1, 2, 70, device=DEVICE))
    statistics = RowStatistics(lse2, Rows.of(torch.empty(1, 2, 70, device=DEVICE)))
    operands = OperandCache(problem, do * size)
    assert operands.k_mean is not None
    sums, row_stats = DqSums.by_tma(problem, 64), torch.empty(2 * 128 * 4, device=DEVICE)
    softcap = Softcap.of(problem, compute_logit_shift(problem, operands.k_mean.ptr))
    _, ds_sums = prepare_capped_backward(
        problem, operands, o, do * size, statistics, None, sums, row_stats, softcap, tile=128
    )
    assert ds_sums is not None
    inverse, unit = ds_sums.inverse_unit[:, :70].double(), sums.unit[:, :70].double()
    assert bool((inverse.frexp().mantissa == 0.5).all())
    largest = operands.k_mean.ptr.abs().amax().double()
    bound = unit * 2.0**30 / largest  # of the sum of |dS|; the unit contains the mean
    assert bool((bound * inverse < 2.0**60).all())
    assert bool(((largest / inverse <= 2.0**-20 * unit) | (inverse == 2.0**126)).all())
    of_rows = (torch.linspace(-1, 1, 70, device=DEVICE).double() * bound).float()
    ds_sums.sums[:, :70] = (of_rows.double() * inverse).round().long()
    found = sums_of_ds(problem, ds_sums).ptr[0]
    off = (found.double() - of_rows.double()).abs()
    allowed = 0.5 / inverse + 2.0**-23 * of_rows.abs() + 2.0**-126
    assert bool((off <= allowed).all())


def check_capped_rows(
    shifts: Tensor | None,
    ds_sums: DsSums | None,
    shift: Tensor | None,
    lse2: Tensor,
    problem: KernelProblem,
) -> None:
    """Check the shifts, and that the sums of dS are 0. shift: of the logits, or None."""
    assert (shifts is None) == (ds_sums is None) == (shift is None)
    if shifts is None or ds_sums is None or shift is None:
        return
    rows = stored_rows(problem.q, problem.cu_q)
    assert not bool(ds_sums.sums[:, rows].any())
    if problem.cu_q is None:
        batch, heads, n, _ = problem.q.shape
        cap = problem.extras.softcap
        assert cap is not None
        padded = -(-n // 64) * 64
        found = shifts.view(heads, -1)[:, rows].view(heads, batch, padded).transpose(0, 1)
        expected = shift * torch.tensor(1 / cap, device=DEVICE)
        expected = expected.masked_fill(lse2 == torch.inf, 0.0)
        expected = torch.nn.functional.pad(expected, (0, padded - n))
        assert_bitwise(actual=found, expected=expected, what="shifts")
