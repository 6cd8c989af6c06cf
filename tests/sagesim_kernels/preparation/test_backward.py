"""The fused preparations compute what the kernels for one job each compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sagesim import FACTORED_QK, AttentionSpec, Smoothing
from sagesim_kernels.hopper.capped_logits import DsSums
from sagesim_kernels.hopper.capped_rows import prepare_capped_backward, sums_of_ds
from sagesim_kernels.operands import (
    NO_EXTRAS,
    DqSums,
    Extras,
    KernelProblem,
    OperandCache,
    Packing,
    Rows,
    RowStatistics,
    Softcap,
    compute_delta_from_o,
    compute_k_means,
    compute_logit_shift,
    compute_units,
)
from sagesim_kernels.operands.dq_sums import BY_TMA
from sagesim_kernels.ops import _resolve
from sagesim_kernels.preparation import (
    has_one_pass,
    prepare_backward_in_one_pass,
)
from tests.sagesim_kernels.layouts import stored_rows, viewed
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

D, D_V = 40, 56
MASKS = {
    "full": {"is_causal": False, "lower_right": False},
    "upper_left": {"is_causal": True, "lower_right": False},
    "lower_right": {"is_causal": True, "lower_right": True},
}


def tokens(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + 1).to(DEVICE, dtype)


def filled(shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, -7.0, device=DEVICE)


@pytest.mark.parametrize(
    ("lengths", "mask", "dtype"),
    [
        ((130, 130), "full", torch.float32),
        ((65, 200), "upper_left", torch.float16),
        ((65, 200), "lower_right", torch.float32),
        ((200, 70), "lower_right", torch.bfloat16),
    ],
)
def test_it_computes_what_the_kernels_for_one_job_each_do(lengths, mask, dtype):
    check(*lengths, dtype=dtype, mask=mask, has_d_lse=dtype is torch.float16)


def extras(name: str, batch: int, n_k: int) -> Extras:
    """Windows and padded keys, of which the host knows no number."""
    if name == "window":
        return Extras(window=(40, 0))
    if name == "both sides":
        return Extras(window=(10, 70))
    if name == "seqused_k":
        counts = torch.tensor([n_k // 2, 0, n_k], dtype=torch.int32, device=DEVICE)
        return Extras(seqused_k=counts[:batch])
    generator = torch.Generator().manual_seed(8)
    return Extras(key_mask=(torch.rand(batch, n_k, generator=generator) < 0.5).to(DEVICE))


@pytest.mark.parametrize(
    ("name", "lengths", "mask"),
    [
        ("window", (130, 130), "full"),
        pytest.param("both sides", (65, 200), "lower_right", marks=pytest.mark.exhaustive),
        ("seqused_k", (130, 130), "full"),
        ("key_mask", (65, 200), "lower_right"),
    ],
)
def test_windows_and_padded_keys(name, lengths, mask):
    more = extras(name, 3, lengths[1])
    check(*lengths, dtype=torch.bfloat16, mask=mask, has_d_lse=False, batch=3, more=more)


@pytest.mark.parametrize("mask", ["upper_left"])
def test_packed_sequences(mask):
    starts = torch.tensor([0, 100, 100, 130], dtype=torch.int32, device=DEVICE)
    packing = Packing(starts, starts, 100, 100)
    check(130, 130, dtype=torch.bfloat16, mask=mask, has_d_lse=False, batch=1, packing=packing)


@pytest.mark.parametrize(
    ("lengths", "mask", "dtype", "name"),
    [
        ((65, 200), "upper_left", torch.float16, ""),
        ((130, 130), "full", torch.float32, "key_mask"),
        ((130, 130), "full", torch.bfloat16, "packed"),
        ((65, 200), "lower_right", torch.bfloat16, "unsmoothed"),
    ],
)
def test_a_softcap(lengths, mask, dtype, name):
    """Units then contain the mean of K, and logits are divided by the softcap."""
    batch, packing, more = 2, None, NO_EXTRAS
    if name == "packed":
        starts = torch.tensor([0, 100, 100, 130], dtype=torch.int32, device=DEVICE)
        batch, packing = 1, Packing(starts, starts, 100, 100)
    elif name == "key_mask":
        more = extras(name, batch, lengths[1])
    check(
        *lengths,
        dtype=dtype,
        mask=mask,
        has_d_lse=dtype is torch.float16,
        batch=batch,
        packing=packing,
        more=more._replace(softcap=3.0),
        is_smooth=name != "unsmoothed",
    )


@pytest.mark.parametrize("mean", [0.0, 1e-30, 0.7, 1e4])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e4])
def test_sums_of_ds_lose_nothing_that_dq_has(mean, size):
    """As integers they are below 2^60 at their bound, and off by less than 2^-20 units of dQ,
    or than the smallest normal number of float32."""
    q, k, v, o, do = (tokens(1, 2, 70, D, dtype=torch.float32, seed=i) for i in range(5))
    k = torch.randn_like(k) * 1e-3 + mean
    options = {"spec": _resolve(FACTORED_QK.label(), torch.float32), "scale": 0.2, **MASKS["full"]}
    problem = KernelProblem.of(q, k, v, **options, extras=Extras(softcap=3.0))
    lse2 = Rows.of(torch.ones(1, 2, 70, device=DEVICE))
    statistics = RowStatistics(lse2, Rows.of(filled((1, 2, 70))))
    operands = OperandCache(problem, do * size)
    assert operands.k_mean is not None
    sums, row_stats = DqSums.by_tma(problem, 64), filled((2 * 128 * 4,))
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


@pytest.mark.parametrize("view", ["offset", "stride", "transposed", "both divisors"])
def test_any_strides_give_the_same_codes(view):
    """Kernels are told of strides that are multiples of 8, and others are taken as they are."""
    check(65, 130, dtype=torch.bfloat16, mask="full", has_d_lse=False, view=view)


def test_blocks_of_queries_that_share_a_scale():
    words = "qk=int8@block,block qk_recompute=int8@block,block"
    check(130, 70, dtype=torch.bfloat16, mask="lower_right", has_d_lse=True, words=words)


def test_all_sums_to_which_threads_add_are_cleared():
    check(70, 130, dtype=torch.bfloat16, mask="full", has_d_lse=False, are_added_by_tma=False)


@pytest.mark.parametrize(
    "words",
    [
        "qk=bf16",
        "qk=int8@token,token",
        "qk=int8@token,token qk_recompute=int8@token,token",
        "qk=bf16 qk_recompute=bf16",
        "dv=int8@tile_column,block",
        "dp=fp16",
        "dq=fp16",
        "delta=p",
        "smooth=qk",
    ],
)
def test_what_is_not_prepared_in_one_pass(words):
    assert not has_one_pass(_resolve(f"factored_qk {words}", torch.bfloat16))


def check(
    n_q: int,
    n_k: int,
    *,
    dtype: torch.dtype,
    mask: str,
    has_d_lse: bool,
    batch: int = 2,
    packing: Packing | None = None,
    more: Extras = NO_EXTRAS,
    view: str = "",
    is_smooth: bool = True,
    words: str = "",
    are_added_by_tma: bool = True,
) -> None:
    plain = [
        tokens(batch, heads, n, d, dtype=dtype, seed=seed)
        for seed, (heads, n, d) in enumerate(
            [(4, n_q, D), (2, n_k, D), (2, n_k, D_V), (4, n_q, D_V), (4, n_q, D_V)]
        )
    ]
    spec = AttentionSpec.parse(f"factored_qk {words}")
    if not is_smooth:
        spec = replace(spec, smoothing=Smoothing())
    spec = _resolve(spec.label(), dtype)
    assert has_one_pass(spec)
    options: dict[str, Any] = {
        "spec": spec,
        "scale": 0.2,
        **MASKS[mask],
        "packing": packing,
        "extras": more,
    }
    problem = KernelProblem.of(*plain[:3], **options)
    lse2 = tokens(batch, 4, n_q, dtype=torch.float32, seed=9)
    lse2[..., 5] = torch.inf
    d_lse = Rows.of(tokens(batch, 4, n_q, dtype=torch.float32, seed=10)) if has_d_lse else None
    mean = compute_k_means(problem).ptr if is_smooth else None
    shift = compute_logit_shift(problem, mean)
    softcap = Softcap.of(problem, shift)
    is_capped = softcap.base2 is not None
    results = []
    for is_fused in (True, False):
        *qkv, o, do = (viewed(x, view) for x in plain) if is_fused else plain
        problem = KernelProblem.of(*qkv, **options)
        statistics = RowStatistics(Rows.of(lse2), Rows.of(filled((batch, 4, n_q))))
        if are_added_by_tma:
            sums = DqSums.by_tma(problem, 64)
        else:
            sums = DqSums.by_threads(problem, 64, 64, 4)
        sums.sums.fill_(-7)
        sums.unit.fill_(-7.0)
        operands = OperandCache(problem, do, k_mean=mean)
        if is_fused:
            row_stats = filled((4 * sums.tokens * 4,))
            given = (problem, operands, o, do, statistics, d_lse, sums, row_stats)
            if is_capped:
                shifts, ds_sums = prepare_capped_backward(*given, softcap, tile=64)
                check_capped_rows(shifts, ds_sums, shift, statistics, problem)
            else:
                prepare_backward_in_one_pass(*given, tile=64)
            check_row_stats(row_stats, statistics, sums, operands, problem)
        else:
            operands.quantize("qk_recompute")
            compute_delta_from_o(problem, o, do, statistics, d_lse)
            used = {
                "q": operands.get("qk_recompute", "q"),
                "k": operands.get("qk_recompute", "k"),
                "do": operands.get("dp", "do"),
                "v": operands.get("dp", "v"),
                "k_right": operands.get("dq", "k"),
            }
            in_parts = operands.k_mean if is_capped else None
            compute_units(problem, used, in_parts, statistics, None, sums)
        results.append((statistics, sums, operands))
    (found, found_sums, found_operands), (expected, sums, operands) = results
    assert_bitwise(actual=found.delta.ptr, expected=expected.delta.ptr, what="delta")
    assert_bitwise(actual=found_sums.unit, expected=sums.unit, what="units")
    check_codes(found_operands, operands, problem, "qk_recompute")


def check_codes(
    found: OperandCache, expected: OperandCache, problem: KernelProblem, site: str
) -> None:
    for name, tensor, cu in (("q", problem.q, problem.cu_q), ("k", problem.k, problem.cu_k)):
        x, y = (each.get(site, name) for each in (found, expected))
        written = stored_rows(tensor, cu)
        codes = [each.ptr.view(tensor.shape[1], -1, each.stride_n)[:, written] for each in (x, y)]
        assert_bitwise(actual=codes[0], expected=codes[1], what=f"codes of {name}")
        scales = written[:: x.TOKENS.value] // x.TOKENS.value
        assert_bitwise(
            actual=x.scale[:, scales], expected=y.scale[:, scales], what=f"scales of {name}"
        )


def check_capped_rows(
    shifts: Tensor | None,
    ds_sums: DsSums | None,
    shift: Tensor | None,
    statistics: RowStatistics,
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
        expected = expected.masked_fill(statistics.lse2.ptr == torch.inf, 0.0)
        expected = torch.nn.functional.pad(expected, (0, padded - n))
        assert_bitwise(actual=found, expected=expected, what="shifts")


def check_row_stats(
    row_stats: Tensor,
    statistics: RowStatistics,
    sums: DqSums,
    operands: OperandCache,
    problem: KernelProblem,
) -> None:
    """Check the statistics, in blocks of 64 queries, and that the sums are 0."""
    rows = stored_rows(problem.q, problem.cu_q)
    q8 = operands.get("qk_recompute", "q")
    scale = q8.scale[..., 0][:, rows // q8.TOKENS.value]
    blocks = row_stats.view(4, -1, 4, 64)[:, rows[::64] // 64]
    cap = problem.extras.softcap
    of_all = 0.2 * (1.4426950408889634 if cap is None else 1 / cap)
    factor = scale * torch.tensor(of_all, device=DEVICE)
    assert_bitwise(actual=blocks[:, :, 0].flatten(1), expected=factor, what="factors")
    assert_bitwise(actual=blocks[:, :, 3].flatten(1), expected=1 / sums.unit[:, rows], what="units")
    summed = 64 * 64
    if sums.ORDER.value == BY_TMA.value:  # padding channels, which have no sum, come last
        summed = 64 * -(-problem.q.shape[3] // 8) * 8
    of_blocks = sums.sums.view(4, sums.tokens // 64, -1)[:, rows[::64] // 64]
    assert not bool(of_blocks[..., :summed].any())
    if problem.cu_q is None:
        n = problem.q.shape[2]
        padded = -(-n // 64) * 64
        for index, each in ((1, -statistics.lse2.ptr), (2, statistics.delta.ptr)):
            found = blocks[:, :, index].reshape(4, problem.q.shape[0], padded).transpose(0, 1)
            assert_bitwise(actual=found[..., :n], expected=each, what=f"statistic {index}")
        assert bool((blocks[:, :, 1].reshape(4, -1, padded)[..., n:] == -torch.inf).all())
