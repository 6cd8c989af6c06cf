"""Hopper's backward with P and dS in codes, and its row sums of P.

A trace does not run it, so that gradients of calls are checked; see `untraced`. On another GPU
other kernels would run instead, so these tests are skipped there.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, seed
from hypothesis import strategies as st
from torch import Tensor

from sagesim import (
    FACTORED,
    FACTORED_PV16,
    FP8_GRADIENTS,
    SAGEBWD,
    AttentionSpec,
    Smoothing,
)
from sagesim_kernels import attention, attention_varlen, hopper
from tests.sagesim_kernels.hopper.marks import ON_HOPPER
from tests.sagesim_kernels.kernel_cases import (
    KINDS,
    LAYOUTS,
    ORDINARY,
    PADDINGS,
    KernelCase,
    low_logits,
)
from tests.sagesim_kernels.untraced import check_with_call, results_of_other_kernels
from tests.support import examples
from tests.support.assertions import assert_bitwise
from tests.support.kernels import (
    DEVICE,
    Results,
    all_served,
    assert_same,
    kernel_case,
    poisoned,
    run_kernels,
)

pytestmark = ON_HOPPER

SPECS: dict[str, AttentionSpec] = {
    "sagebwd": SAGEBWD,
    "factored": FACTORED,
    "factored_pv16": FACTORED_PV16,
    "fp8_gradients": FP8_GRADIENTS,
}
"""One scale for a tile of P and dS, one for each row and column, and then delta from P, or scales
of rows from bounds, in FP8."""

of_specs = pytest.mark.parametrize("spec", SPECS)
of_sizes = pytest.mark.parametrize("d", [64, 128], ids=lambda d: f"d{d}")

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "upper_left": {"is_causal": True},
    "lower_right": {"is_causal": True, "causal_alignment": "lower_right"},
    "window": {"window": (70, 30), "causal_alignment": "lower_right"},
    "padding": {"padding": "random", "has_sinks": True},
    "lengths": {"padding": "int32 lengths", "is_causal": True},
}

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 192, 200, 257, 300)


@pytest.fixture(autouse=True)
def is_served(unplanned, monkeypatch: pytest.MonkeyPatch):
    """Fail the test if another kernel ran a backward."""
    with all_served(monkeypatch, hopper, "serves_codes"):
        yield


def gaussian_case(spec: str, d: int, **fields: Any) -> KernelCase:
    given: dict[str, Any] = {"d_v": d, "kinds": ("gaussian",) * 4, "heads": (1, 2, 1)}
    return KernelCase(spec=SPECS[spec], d=d, **(given | fields))


@of_specs
@of_sizes
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_meet_the_contract(mask: str, d: int, spec: str) -> None:
    """The last tile of keys has one block and a part of another; some keys have no query."""
    problem = gaussian_case(
        spec, d, n_q=140, n_k=333, dtype="bfloat16", heads=(2, 2, 1), seed=d, **MASKS[mask]
    )
    check_with_call(problem.case, problem.parsed)


@of_specs
@of_sizes
@pytest.mark.parametrize("heads", [(1, 2, 3), (1, 4, 2)], ids=["split", "grouped"])
def test_grouped_queries_meet_the_contract(heads: tuple[int, int, int], d: int, spec: str) -> None:
    """A program has one query head of a group, or all of them. Some queries have no key."""
    problem = gaussian_case(
        spec, d, n_q=200, n_k=150, dtype="float16", heads=heads, seed=1, **MASKS["lower_right"]
    )
    check_with_call(problem.case, problem.parsed)


@of_specs
@of_sizes
def test_whole_tiles_of_queries_without_keys(d: int, spec: str) -> None:
    """Such a tile loads no key."""
    problem = gaussian_case(
        spec, d, n_q=449, n_k=63, dtype="bfloat16", seed=1, **MASKS["lower_right"]
    )
    check_with_call(problem.case, problem.parsed)


@pytest.mark.parametrize("spec", ["sagebwd", "factored"])
@pytest.mark.parametrize(
    "sizes",
    [(33, 56), (40, 40), (72, 72), (80, 80), (96, 80), (96, 96), (112, 112)],
    ids=lambda pair: f"d{pair[0]}-{pair[1]}",
)
def test_other_head_sizes_meet_the_contract(sizes: tuple[int, int], spec: str) -> None:
    d, d_v = sizes
    problem = gaussian_case(
        spec, d, d_v=d_v, n_q=200, n_k=190, dtype="bfloat16", heads=(1, 2, 2), is_causal=True
    )
    check_with_call(problem.case, problem.parsed)


@of_specs
@of_sizes
@pytest.mark.parametrize("keys", ["behind", "padding"])
def test_keys_are_masked_where_logits_are_low(keys: str, d: int, spec: str) -> None:
    """Keys behind the last one, or padding. Their K is 0, so that P would overflow, and be the
    maximum of its tile. K is not smoothed: a row's mean logit would be 0."""
    unsmoothed, case = replace(SPECS[spec], smoothing=Smoothing()), low_logits(d, 150)
    check_with_call(replace(case, key_mask=None) if keys == "behind" else case, unsmoothed)


LOGITS_OF_MILLIONS: dict[str, dict[str, Any]] = {
    "factored": {
        "n_q": 40, "n_k": 32, "d": 96, "d_v": 80, "heads": (2, 1, 1), "dtype": "float16",
        "kinds": ("large", "outlier_token", "offset", "gaussian"), "window": (32, -1),
        "seed": 119394,
    },
    "fp8_gradients": {
        "n_q": 31, "n_k": 47, "d": 128, "d_v": 128, "heads": (2, 1, 2), "dtype": "bfloat16",
        "kinds": ("large", "outlier_token", "large", "offset"), "layout": "tokens_first",
        "do_layout": "expanded", "seed": 23888,
    },
}  # fmt: skip


@pytest.mark.parametrize("spec", LOGITS_OF_MILLIONS)
def test_logits_of_millions(spec: str) -> None:
    """One key has all of P of a row. These kernels do not round S, so that P is 2^0.5 or 2^-0.5 in
    place of 1, and dS is not 0. With float16, dQ is infinite."""
    problem = KernelCase(spec=SPECS[spec], **LOGITS_OF_MILLIONS[spec])
    check_with_call(problem.case, problem.parsed)


@st.composite
def problems(draw: st.DrawFn, spec: AttentionSpec, d: int) -> KernelCase:
    kind = st.sampled_from(draw(st.sampled_from((sorted(ORDINARY), sorted(KINDS)))))
    return KernelCase(
        spec=spec,
        n_q=draw(st.sampled_from(LENGTHS)),
        n_k=draw(st.sampled_from(LENGTHS)),
        d=d,
        d_v=d,
        heads=draw(st.sampled_from(((1, 1, 1), (2, 1, 1), (1, 2, 2)))),
        kinds=(draw(kind), draw(kind), draw(kind), draw(kind)),
        dtype=draw(st.sampled_from(("bfloat16", "float16", "float32"))),
        is_causal=draw(st.booleans()),
        causal_alignment=draw(st.sampled_from(("upper_left", "lower_right"))),
        window=draw(st.sampled_from(((-1, -1), (-1, -1), (70, -1), (3, 200)))),
        padding=draw(st.sampled_from(PADDINGS)),
        has_sinks=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.03, 1.0, -0.3, 0.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
        do_layout=draw(st.sampled_from((*LAYOUTS, "expanded"))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@of_specs
@of_sizes
@pytest.mark.parametrize("part", range(2))
def test_any_problem_meets_the_contract(part: int, d: int, spec: str) -> None:
    @seed(part)
    @examples(4)
    @given(problems(SPECS[spec], d))
    def run(problem: KernelCase) -> None:
        check_with_call(problem.case, problem.parsed)

    run()


@of_specs
@of_sizes
def test_the_gradient_of_the_logsumexp(d: int, spec: str) -> None:
    """It is subtracted from delta, in other kernels too. Few codes are unlike theirs."""
    case = kernel_case(torch.bfloat16, seed=1, n_q=150, n_k=200, d=d, heads=(2, 2), is_causal=True)
    d_lse = torch.randn(case.q.shape[:-1], device=DEVICE)
    found = run_kernels(case, SPECS[spec], d_lse=d_lse)
    twin = results_of_other_kernels(case, SPECS[spec], d_lse=d_lse)
    for name in ("dq", "dk", "dv"):
        x, y = (getattr(each, name).double() for each in (found, twin))
        assert float((x - y).norm()) <= 0.005 * float(y.norm()), name


@of_specs
@pytest.mark.parametrize("d", [40, 64, 96, 128], ids=lambda d: f"d{d}")
def test_repeated_runs_give_the_same_bits(d: int, spec: str) -> None:
    """Integer sums of dQ do not depend on the order in which programs add their parts."""
    case = kernel_case(torch.bfloat16, seed=0, n_q=2000, n_k=2000, d=d, heads=(2, 16))
    once = run_kernels(case, SPECS[spec], is_causal=True)
    assert all(bool(x.isfinite().all()) for x in once)
    for _ in range(20):
        assert_same(run_kernels(case, SPECS[spec], is_causal=True), once)


@of_specs
@of_sizes
@pytest.mark.parametrize("mask", ["full", "upper_left"])
def test_memory_is_written_before_it_is_read(mask: str, d: int, spec: str) -> None:
    case = kernel_case(torch.bfloat16, seed=3, n_q=129, n_k=200, d=d, heads=(2, 2), **MASKS[mask])
    d_lse = torch.randn(case.q.shape[:-1], device=DEVICE)
    once = run_kernels(case, SPECS[spec], d_lse=d_lse)
    with poisoned():
        assert_same(run_kernels(case, SPECS[spec], d_lse=d_lse), once)


def gradients(o: Tensor, leaves: Sequence[Tensor], do: Tensor) -> list[Tensor]:
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


@pytest.mark.parametrize("spec", ["sagebwd", "factored"])
@pytest.mark.parametrize("mask", ["full", "upper_left"])
@pytest.mark.parametrize("d", [40, 64, 80, 128], ids=lambda d: f"d{d}")
def test_a_sequence_has_the_same_bits_alone_and_packed(d: int, mask: str, spec: str) -> None:
    """The other packed sequences are empty, longer, shorter, or contain NaN."""
    lengths_q, lengths_k = (130, 0, 65, 1, 200, 70), (300, 40, 200, 1, 140, 77)
    options: dict[str, Any] = {"spec": SPECS[spec], "enable_gqa": True, **MASKS[mask]}
    q, do = (torch.randn(sum(lengths_q), 4, d, device=DEVICE).bfloat16() for _ in range(2))
    k, v = (torch.randn(sum(lengths_k), 2, d, device=DEVICE).bfloat16() for _ in range(2))
    spoilt = 4
    for x, lengths in ((q, lengths_q), (do, lengths_q), (k, lengths_k), (v, lengths_k)):
        x.split(lengths)[spoilt][7] = -math.nan
    cu = [
        torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=DEVICE)
        for x in (lengths_q, lengths_k)
    ]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention_varlen(*leaves, *cu, max(lengths_q), max(lengths_k), **options)
    together = gradients(o, leaves, do)
    lengths = (lengths_q, lengths_q, lengths_k, lengths_k)
    parts = [x.split(n) for x, n in zip(together, lengths, strict=True)]
    for i in (0, 2, 3, 5):
        one = [x.split(n)[i] for x, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))]
        leaves = [x.transpose(0, 1)[None].clone().requires_grad_() for x in one]
        one_do = do.split(lengths_q)[i].transpose(0, 1)[None]
        alone = gradients(attention(*leaves, **options), leaves, one_do)
        for found, part, name in zip(alone, parts, ("o", "dq", "dk", "dv"), strict=True):
            assert_bitwise(actual=part[i].transpose(0, 1), expected=found[0], what=f"{name} of {i}")


@of_specs
@of_sizes
@pytest.mark.parametrize("tensor", ["q", "k", "v", "do"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
def test_nan_and_infinity_reach_the_gradients_of_their_head(
    value: float, tensor: str, d: int, spec: str
) -> None:
    """Elements of dK and dV that are not finite are those of other kernels."""
    case = kernel_case(torch.bfloat16, seed=2, n_q=150, n_k=140, d=d, heads=(2, 2))
    clean = run_kernels(case, SPECS[spec])
    getattr(case, tensor)[1, 1, 20, 5] = value
    found = run_kernels(case, SPECS[spec])
    touched = torch.zeros(2, 2, dtype=torch.bool)
    touched[1, 1] = True
    for name in Results._fields:
        x, y = getattr(found, name), getattr(clean, name)
        assert_bitwise(actual=x[~touched], expected=y[~touched], what=name)
    assert not bool(found.dq[1, 1].isfinite().all())
    twin = results_of_other_kernels(case, SPECS[spec])
    assert torch.equal(found.dk.isfinite(), twin.dk.isfinite())
    assert torch.equal(found.dv.isfinite(), twin.dv.isfinite())


@of_specs
@of_sizes
def test_tokens_that_attend_to_nothing_have_no_influence(d: int, spec: str) -> None:
    """Keys behind the last query, and queries before the first key, may be NaN."""
    for mask, n_q, n_k in (("upper_left", 100, 150), ("lower_right", 150, 100)):
        case = kernel_case(torch.bfloat16, seed=4, n_q=n_q, n_k=n_k, d=d, heads=(1, 2))
        queries, keys = (case.q, case.do), (case.k, case.v)
        dead = (
            [x[..., n_q:, :] for x in keys]
            if n_k > n_q
            else [x[..., : n_q - n_k, :] for x in queries]
        )
        found: list[Results] = []
        for value in (0.0, math.nan):
            for x in dead:
                x.fill_(value)
            found.append(run_kernels(case, SPECS[spec], **MASKS[mask]))
        assert all(bool(x.isfinite().all()) for x in (found[0].o, *found[0][2:]))
        assert_same(found[1], found[0])


@of_specs
@pytest.mark.parametrize("d", [64, 80], ids=lambda d: f"d{d}")
def test_strides_do_not_change_any_bit(d: int, spec: str) -> None:
    case = kernel_case(torch.bfloat16, seed=3, n_q=150, n_k=140, d=d, heads=(2, 2), is_causal=True)
    expected = run_kernels(case, SPECS[spec])
    for lay_out in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1))[..., 3:-1, 1:-2],
    ):
        assert_same(run_kernels(case.map(lay_out), SPECS[spec]), expected)
    expanded = replace(case, k=case.k[:, :1].expand_as(case.k), v=case.v[:, :1].expand_as(case.v))
    expected = run_kernels(expanded.map(torch.Tensor.contiguous), SPECS[spec])
    assert_same(run_kernels(expanded, SPECS[spec]), expected)
