"""The Hopper kernels with dV, dK and dQ in FP8: their products, their operands, and invariance.

They compute FP8_GRADIENTS at head sizes from 33 to 128. On another GPU the portable kernels would
run instead, so these tests are skipped there.
"""

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from sagesim import FP8_GRADIENTS
from sagesim.problem import resolve_input16
from sagesim_kernels import attention, attention_varlen, hopper
from sagesim_kernels.dispatch import backward, forward
from sagesim_kernels.operands import Gradients, KernelProblem, OperandCache
from tests.support.assertions import assert_bitwise
from tests.support.inputs import Case
from tests.support.kernels import Results, assert_same, kernel_case, poisoned, run_kernels

IS_HOPPER = torch.cuda.is_available() and hopper.is_hopper()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="not compiled for Hopper"),
]

SPEC = FP8_GRADIENTS
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "upper_left": {"is_causal": True},
    "lower_right": {"is_causal": True, "causal_alignment": "lower_right"},
    "window": {"window": (200, 70), "causal_alignment": "upper_left"},
}
HEAD_SIZES = (64, 128)

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-9}
"""Relative L2 distance of results that are rounded to a dtype. In bfloat16 it is twice the largest
rounding error. In float16 codes on the other side of a tie and the loss of FP8 sums are larger."""


@pytest.fixture
def is_served(unplanned, monkeypatch: pytest.MonkeyPatch):
    """Fail the test if the Hopper kernels did not run every problem."""
    served: list[bool] = []
    serves = hopper.serves

    def watched(problem):
        served.append(serves(problem))
        return served[-1]

    monkeypatch.setattr(hopper, "serves", watched)
    yield
    assert served and all(served)


def assert_close(actual: Tensor, expected: Tensor, limit: float, what: str) -> None:
    """Assert that the relative L2 distance is at most the limit."""
    x, y = actual.double(), expected.double()
    distance = float((x - y).norm() / y.norm())
    assert distance <= limit, f"{what}: distance {distance:.2e}, limit {limit:.2e}"


class Prepared:
    """What the one pass reads, in the order of the tensors, for one sequence without packing."""

    def __init__(self, problem: KernelProblem, do: Tensor, operands: OperandCache, rows, dq_sums):
        heads, kv_heads = problem.q.shape[1], problem.k.shape[1]
        self.n_q, self.n_k = problem.q.shape[2], problem.k.shape[2]
        self.problem, self.groups = problem, heads // kv_heads
        self.do, self.v = do[0].float(), self._grouped(problem.v[0].float())
        block_q, block_k = problem.spec.block_q, problem.spec.block_k
        self.do_t, self.do_scale = self._columns(rows.do, heads, block_q, self.n_q)
        self.q_t, self.q_scale = self._columns(rows.q, heads, block_q, self.n_q)
        k, scale = self._columns(operands.get("dq", "k"), kv_heads, block_k, self.n_k)
        self.k = self._grouped(k * scale[:, None])
        statistics = rows.statistics.view(heads, -1, 5, 64).transpose(1, 2).flatten(2)
        self.shift, self.of_dp, self.delta, self.dq_scale = statistics[:, 1:, : self.n_q].unbind(1)
        self.unit = dq_sums.unit.view(heads, -1)[:, : self.n_q]
        q8, k8 = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
        q = self._tokens(q8, heads, self.n_q) * statistics[:, 0, : self.n_q, None]
        key_scales = k8.scale.view(kv_heads, -1)[:, : self.n_k, None]
        self.k8 = self._grouped(self._tokens(k8, kv_heads, self.n_k) * key_scales)
        self.logits = (q.double() @ self.k8.double().mT).float()

    def _grouped(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.groups, 0)

    def _tokens(self, x, heads: int, n: int) -> Tensor:
        return x.ptr.view(heads, -1, x.stride_n)[:, :n].float()

    def _columns(self, x, heads: int, block: int, n: int) -> tuple[Tensor, Tensor]:
        codes = x.ptr.view(torch.float8_e4m3fn).view(heads, -1, x.stride_d).float()
        if x.IN_PAIRS.value:
            codes = codes.unflatten(-1, (-1, 8, 2)).transpose(-1, -2).flatten(-3)
        else:
            codes = codes.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)
        return codes[:, :, :n], x.scale.view(heads, -1).repeat_interleave(block, 1)[:, :n]

    def gradients(self, attends: Tensor) -> Gradients:
        """dQ, dK and dV from the codes, each with one rounding. attends: bool [n_q, n_k]."""
        scale, shape = self.problem.scale, (self.problem.k.shape[1], self.groups)
        p = torch.exp2(self.logits + self.shift[..., None]).masked_fill(~attends, 0.0)
        dp = self.do @ self.v.mT
        ds = p * (dp * self.of_dp[..., None] + self.delta[..., None])
        p, ds = (x.to(torch.float8_e4m3fn).double() for x in (p, ds.masked_fill(~attends, 0.0)))
        dv = p.mT @ (self.do_t * self.do_scale[:, None]).double().mT
        dk = ds.mT @ (self.q_t * self.q_scale[:, None]).double().mT * scale
        dq = ds @ self.k.double().mT * (self.dq_scale * self.unit).double()[..., None] * scale
        dk, dv = (x.unflatten(0, shape).sum(1)[None] for x in (dk, dv))
        return Gradients(
            *(x[..., :d] for x, d in zip((dq[None], dk, dv), self._channels(), strict=True))
        )

    def _channels(self) -> tuple[int, int, int]:
        d, d_v = self.problem.q.shape[3], self.problem.v.shape[3]
        return d, d, d_v


def grouped_case(dtype: torch.dtype, **arguments: Any) -> Case:
    """A case in which two query heads share each head of K and V."""
    c = kernel_case(dtype, **arguments)
    return replace(c, k=c.k[:, ::2].contiguous(), v=c.v[:, ::2].contiguous(), enable_gqa=True)


def problem_of(c: Case, **options: Any) -> KernelProblem:
    q, k, v, _ = c.qkvdo
    return KernelProblem.of(
        q,
        k,
        v,
        spec=resolve_input16(SPEC, q.dtype),
        scale=q.shape[3] ** -0.5,
        is_causal=options.get("is_causal", False),
        lower_right=options.get("causal_alignment") == "lower_right",
    )


def attends(n_q: int, n_k: int, **options: Any) -> Tensor:
    found = torch.ones(n_q, n_k, dtype=torch.bool, device="cuda")
    if options.get("is_causal"):
        offset = n_k - n_q if options.get("causal_alignment") == "lower_right" else 0
        found = found.tril(offset)
    return found


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("mask", ["full", "upper_left", "lower_right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [40, *HEAD_SIZES])
def test_gradients_are_products_of_the_codes(d, dtype, mask, monkeypatch: pytest.MonkeyPatch):
    """Codes and scales are those that the kernels have prepared. Sums have several parts."""
    from sagesim_kernels.hopper import fp8_backward

    prepare, kept = fp8_backward.prepare_rows, []

    def keep(problem, operands, o, do, *others):
        rows = prepare(problem, operands, o, do, *others)
        kept.append(Prepared(problem, do, operands, rows, others[-2]))
        return rows

    monkeypatch.setattr(fp8_backward, "prepare_rows", keep)
    for n_q, n_k in ((70, 300), (1500, 1300), (2200, 2200)):
        c = grouped_case(dtype, seed=7, n_q=n_q, n_k=n_k, d=d, heads=(1, 4))
        problem = problem_of(c, **MASKS[mask])
        o = torch.empty_like(c.do)
        result = forward(problem, o)
        grads = Gradients(*map(torch.empty_like, (c.q, c.k, c.v)))
        backward(problem, c.do, None, o, result, grads)
        expected = kept.pop().gradients(attends(n_q, n_k, **MASKS[mask]))
        for name, x, y in zip(Gradients._fields, grads, expected, strict=True):
            assert_close(x, y, ROUNDING[dtype], f"{name} of {n_q} x {n_k}")


def portable(c: Case, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Results:
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "serves", lambda _: False)
        return run_kernels(c, SPEC, **options)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_results_are_those_of_the_portable_kernels(d, mask, monkeypatch):
    """The contract's tests check the portable kernels. Both round the same numbers to codes."""
    c = grouped_case(torch.bfloat16, seed=1, n_q=700, n_k=500, d=d, heads=(2, 4))
    d_lse = torch.randn(c.q.shape[:-1], device="cuda")
    found = run_kernels(c, SPEC, d_lse=d_lse, **MASKS[mask])
    twin = portable(c, monkeypatch, d_lse=d_lse, **MASKS[mask])
    assert torch.equal(found.lse.isinf(), twin.lse.isinf())
    for name in ("o", "dq", "dk", "dv"):
        assert_close(getattr(found, name), getattr(twin, name), ROUNDING[torch.bfloat16], name)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("mask", ["full", "upper_left"])
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_repeated_runs_give_the_same_bits(d, mask):
    """Parts of dK and dV in memory, and integer sums of dQ, have no order of programs."""
    c = grouped_case(torch.bfloat16, seed=6, n_q=3000, n_k=3000, d=d, heads=(1, 8))
    once = run_kernels(c, SPEC, **MASKS[mask])
    assert all(bool(x.isfinite().all()) for x in once)
    for _ in range(10):
        assert_same(run_kernels(c, SPEC, **MASKS[mask]), once)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", HEAD_SIZES)
@pytest.mark.parametrize("lengths", [(1, 1), (129, 513), (2100, 333)])
def test_memory_is_written_before_it_is_read(lengths, d, mask):
    n_q, n_k = lengths
    c = grouped_case(torch.bfloat16, seed=3, n_q=n_q, n_k=n_k, d=d, heads=(2, 4))
    once = run_kernels(c, SPEC, **MASKS[mask])
    with poisoned():
        assert_same(run_kernels(c, SPEC, **MASKS[mask]), once)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("mask", ["full", "lower_right"])
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_a_sequence_has_the_same_bits_alone_and_packed(d, mask):
    """The other packed sequences are empty, longer, shorter, or contain NaN."""
    lengths_q, lengths_k = (300, 0, 65, 1, 1513, 64, 1100), (300, 40, 200, 1, 400, 0, 1029)
    options = {"spec": SPEC, "enable_gqa": True, **MASKS[mask]}
    q, do = (torch.randn(sum(lengths_q), 4, d, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(sum(lengths_k), 2, d, device="cuda").bfloat16() for _ in range(2))
    spoilt = 4
    for x, lengths in ((q, lengths_q), (do, lengths_q), (k, lengths_k), (v, lengths_k)):
        x.split(lengths)[spoilt][7] = -math.nan
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(x)], dtype=torch.int32, device="cuda")
        for x in (lengths_q, lengths_k)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention_varlen(*leaves, cu_q, cu_k, max(lengths_q), max(lengths_k), **options)
    together = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    of_lengths = (lengths_q, lengths_q, lengths_k, lengths_k)
    parts = [x.split(n) for x, n in zip(together, of_lengths, strict=True)]
    for i, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if i == spoilt or 0 in (n_q, n_k):
            continue
        one = [x.split(n)[i] for x, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))]
        leaves = [x.transpose(0, 1)[None].clone().requires_grad_() for x in one]
        o = attention(*leaves, **options)
        grads = torch.autograd.grad(o, leaves, do.split(lengths_q)[i].transpose(0, 1)[None])
        for found, part, name in zip((o, *grads), parts, ("o", "dq", "dk", "dv"), strict=True):
            expected = found.detach()[0].transpose(0, 1)
            assert_bitwise(actual=part[i], expected=expected, what=f"{name} of {i}")


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_nan_and_infinity_stay_in_their_head(tensor, value, d):
    c = kernel_case(torch.bfloat16, seed=2, n_q=400, n_k=333, d=d, heads=(2, 3))
    c = replace(c, is_causal=True)
    clean = run_kernels(c, SPEC)
    c.qkvdo[tensor][1, 1, 20, 5] = value
    found = run_kernels(c, SPEC)
    touched = torch.zeros(2, 3, dtype=torch.bool)
    touched[1, 1] = True
    for name in Results._fields:
        x, y = getattr(found, name), getattr(clean, name)
        assert_bitwise(actual=x[~touched], expected=y[~touched], what=name)
    assert not bool(found.dq[1, 1].isfinite().all())


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(
    ("mask", "lengths"), [("upper_left", (100, 333)), ("lower_right", (333, 100))]
)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_tokens_outside_the_mask_have_no_influence(mask, lengths, d):
    n_q, n_k = lengths
    c = kernel_case(torch.bfloat16, seed=4, n_q=n_q, n_k=n_k, d=d, heads=(2, 2))
    dead = [c.k[..., n_q:, :], c.v[..., n_q:, :]]
    if mask == "lower_right":
        dead = [c.q[..., : n_q - n_k, :], c.do[..., : n_q - n_k, :]]
    found: list[Results] = []
    for value in (0.0, math.nan):
        for x in dead:
            x.fill_(value)
        found.append(run_kernels(c, SPEC, **MASKS[mask]))
    assert all(bool(x.isfinite().all()) for x in (found[0].o, *found[0][2:]))
    assert_same(found[1], found[0])


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("d", [80, *HEAD_SIZES])
def test_strides_do_not_change_any_bit(d):
    c = kernel_case(torch.bfloat16, seed=3, n_q=300, n_k=257, d=d, heads=(2, 4), is_causal=True)
    expected = run_kernels(c, SPEC)
    for lay_out in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1))[..., 3:-1, 1:-2],
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert_same(run_kernels(c.map(lay_out), SPEC), expected)
