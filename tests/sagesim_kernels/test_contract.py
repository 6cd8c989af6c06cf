"""The contract detects each planted bug at the stage where it is planted."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sagesim import (
    FACTORED,
    FP8_GRADIENTS,
    FPA_FP16,
    HALF_AWAY,
    HALF_EVEN,
    PRESETS,
    SAGEBWD,
    SAGEBWD_ALL_INT8,
    Delta,
    Granularity,
    Precision,
    Rounding,
    Smoothing,
    quantize,
    with_precision,
)
from sagesim.spec import AttentionSpec
from sagesim_kernels import KernelTrace, supports
from sagesim_kernels import trace as kernel_trace
from tests.sagesim_kernels.bound_contract import fp8_sum_error
from tests.sagesim_kernels.contract import (
    Tally,
    as_kernel_trace,
    check_trace,
    emulate,
    run_kernels,
)
from tests.sagesim_kernels.error_balls import EXP, Ball
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.float32_bound import U
from tests.support.inputs import NASTY, Case, case, gaussian, half_integer_ties, offset
from tests.support.kernels import DEVICE, HERE, kernel_case

pytestmark = HERE

SHAPE = {"n_q": 70, "n_k": 90, "d": 24, "d_v": 16}
PLAIN = case(seed=1, heads=(1, 2), **SHAPE)
CAUSAL = replace(PLAIN, is_causal=True)
OFFSET = case(seed=2, heads=(1, 1), kinds=(offset, offset, offset, offset), **SHAPE)
TIES = case(seed=3, heads=(1, 1), kinds=(half_integer_ties,) * 4, scale=1e-5, **SHAPE)
GROUPED = replace(
    case(seed=4, heads=(1, 2), **SHAPE),
    q=PLAIN.q.repeat(1, 2, 1, 1),
    do=PLAIN.do.repeat(1, 2, 1, 1),
)
GROUPED = replace(GROUPED, enable_gqa=True)
Q_SMOOTHED = replace(SAGEBWD, smoothing=Smoothing(q=True, k=True))
RANDOM = replace(SAGEBWD, rounding=Rounding.stochastic(5))


Planted = tuple[Case, AttentionSpec, Callable[[KernelTrace], KernelTrace]]


def trace(case: Case, spec: AttentionSpec) -> KernelTrace:
    return as_kernel_trace(emulate(case, spec))


def with_operand(found: KernelTrace, name: str, **changes: torch.Tensor) -> KernelTrace:
    coded = found.operands[name]._replace(**changes)
    return replace(found, operands=dict(found.operands) | {name: coded})


def of_other_spec(*names: str, case: Case = PLAIN, spec=SAGEBWD, other: AttentionSpec):
    """Replace the named results by those of a trace under another spec."""

    def tamper(found: KernelTrace) -> KernelTrace:
        wrong = trace(case, other)
        for name in names:
            if name in found.operands:
                found = with_operand(found, name, **wrong.operands[name]._asdict())
            else:
                found = replace(found, **{name: getattr(wrong, name)})
        return found

    return case, spec, tamper


def of_other_case(name: str, case: Case, other: Case, spec=SAGEBWD):
    return case, spec, lambda found: replace(found, **{name: getattr(trace(other, spec), name)})


def scaled(name: str, factor: float, case: Case = PLAIN, spec=SAGEBWD):
    return case, spec, lambda found: replace(found, **{name: getattr(found, name) * factor})


def fp8_sum_off(name: str) -> Planted:
    """Multiply a gradient, by more than the tensor cores may lose of its sums."""

    def tamper(found: KernelTrace) -> KernelTrace:
        factor = 1 + 1e-4 + 4 * fp8_sum_error(BOUND.block_q)
        return replace(found, **{name: getattr(found, name) * factor})

    return PLAIN, BOUND, tamper


def shifted(name: str, by: int, spec=SAGEBWD):
    """Change one code in the middle of its range."""

    def tamper(found: KernelTrace) -> KernelTrace:
        codes = found.operands[name].codes.clone()
        codes.view(-1)[codes.flatten().abs().sub(60).abs().argmin()] += by
        return with_operand(found, name, codes=codes)

    return PLAIN, spec, tamper


def swapped(name: str, other: str, spec=SAGEBWD):
    return (
        PLAIN,
        spec,
        lambda found: with_operand(found, name, scale=found.operands[other].scale),
    )


def one_element(name: str, by: float, spec=SAGEBWD):
    def tamper(found: KernelTrace) -> KernelTrace:
        x = getattr(found, name).clone()
        x[0, 0, 5] += by * x.square().mean().sqrt()
        return replace(found, **{name: x})

    return PLAIN, spec, tamper


def minus_128(found: KernelTrace) -> KernelTrace:
    codes = found.operands["dq.ds"].codes.clone()
    codes.view(-1)[codes.flatten().argmin()] = -128
    return with_operand(found, "dq.ds", codes=codes)


def lost_row(name: str):
    def tamper(found: KernelTrace) -> KernelTrace:
        x = getattr(found, name).clone()
        x[:, :, -1] = 0
        return replace(found, **{name: x})

    return PLAIN, SAGEBWD, tamper


def not_a_number(name: str):
    def tamper(found: KernelTrace) -> KernelTrace:
        x = getattr(found, name).clone()
        x[0, 0, 3] = torch.nan
        return replace(found, **{name: x})

    return PLAIN, SAGEBWD, tamper


def without_a_head(found: KernelTrace) -> KernelTrace:
    """Replace dV by that of the first head of each group alone."""
    first = [0, 2]
    one = replace(GROUPED, q=GROUPED.q[:, first], do=GROUPED.do[:, first], enable_gqa=False)
    return replace(found, dv=trace(one, SAGEBWD).dv)


def without_q_mean(found: KernelTrace) -> KernelTrace:
    """Replace dK by that of the smoothed Q, without the term of Q's mean."""
    sim = emulate(OFFSET, Q_SMOOTHED)
    blocks = [
        (x.double(), ds) for x, ds in zip(OFFSET.q.split(64, 2), sim.ds.split(64, 2), strict=True)
    ]
    bias = sum(ds.sum(2)[..., None] * x.mean(2, keepdim=True) for x, ds in blocks)
    return replace(found, dk=(found.dk - bias * OFFSET.q.shape[-1] ** -0.5).float())


def without_k_mean(found: KernelTrace) -> KernelTrace:
    """Replace lse by that of the smoothed logits."""
    shift = (OFFSET.q * OFFSET.k.mean(2, keepdim=True)).sum(-1) * OFFSET.q.shape[-1] ** -0.5
    return replace(found, lse=found.lse - shift)


def rounded(rounding: Rounding) -> Callable[[KernelTrace], KernelTrace]:
    """Round dS of dK in another way."""

    def tamper(found: KernelTrace) -> KernelTrace:
        ds = emulate(PLAIN, RANDOM).ds
        right = quantize(
            ds, Granularity.PerTile, block=(64, 64), rounding=RANDOM.rounding, tensor="ds"
        )
        assert_bitwise(actual=right.codes, expected=found.operands["dk.ds"].codes, what="codes")
        wrong = quantize(ds, Granularity.PerTile, block=(64, 64), rounding=rounding, tensor="ds")
        return with_operand(found, "dk.ds", codes=wrong.codes)

    return tamper


def reversed_scales(name: str, axis: int, spec=SAGEBWD) -> Planted:
    def tamper(found: KernelTrace) -> KernelTrace:
        return with_operand(found, name, scale=found.operands[name].scale.flip(axis))

    return PLAIN, spec, tamper


DEAD = replace(case(seed=6, n_q=40, n_k=30, d=8), is_causal=True, causal_alignment="lower_right")
"""Its first queries attend to no key."""

BATCH = case(seed=7, n_q=70, n_k=90, d=24, heads=(2, 2))
BATCH = replace(BATCH, k=BATCH.k + 1.0)  # a mean of K
WINDOW = replace(BATCH, window=(20, 5), causal_alignment="upper_left")
PADDED_KEYS = replace(BATCH, key_mask=torch.arange(90) < torch.tensor([[60], [80]]))
SINKS = replace(BATCH, sinks=torch.tensor([0.5, 4.0]))
SOFTCAP = replace(BATCH, softcap=2.0)


def without_sink_gradient(found: KernelTrace) -> KernelTrace:
    assert found.dsinks is not None
    return replace(found, dsinks=torch.zeros_like(found.dsinks))


BOUND = replace(FP8_GRADIENTS, block_q=64)
BOUND_INT8 = AttentionSpec.parse("fp8_gradients dv=int8@row_bound,block_channel block=64x64")


def scaled_rows(name: str, factor: float) -> Planted:
    """Multiply the scales of a map's rows, and nothing else."""

    def tamper(found: KernelTrace) -> KernelTrace:
        return with_operand(found, name, scale=found.operands[name].scale * factor)

    return PLAIN, BOUND, tamper


def other_top_codes(found: KernelTrace) -> KernelTrace:
    """Give every row of P the largest code as its top code, in P and in dO."""
    p, do = found.operands["dv.p"], found.operands["dv.do"]
    bound = emulate(PLAIN, BOUND).p_recompute.amax(-1, keepdim=True)
    scale = (bound / 448).expand(p.codes.shape)
    codes = (emulate(PLAIN, BOUND).p_recompute / scale).to(p.codes.dtype)
    found = with_operand(found, "dv.p", codes=codes, scale=scale)
    right = (PLAIN.do * bound / do.scale / 448).to(do.codes.dtype)
    return with_operand(found, "dv.do", codes=right)


def without_delta(found: KernelTrace) -> KernelTrace:
    """Give dS the bound without |delta|."""
    sim = emulate(PLAIN, BOUND)
    of_v = PLAIN.v.norm(dim=-1).amax(-1, keepdim=True)
    of_dp = PLAIN.do.norm(dim=-1) * of_v
    share = (of_dp / (of_dp + sim.delta.abs()))[..., None]
    for name in ("dk.ds", "dq.ds"):
        found = with_operand(found, name, scale=found.operands[name].scale * share)
    return found


PER_COLUMN = replace(SAGEBWD, dv=replace(SAGEBWD.dv, lhs=Granularity.PerTileColumn))
PER_ROW = replace(SAGEBWD, dq=replace(SAGEBWD.dq, lhs=Granularity.PerTileRow))
UNSMOOTHED = replace(SAGEBWD, smoothing=Smoothing())
PADDED = (24 / 32) ** 0.5

PLANTED: dict[str, tuple[str, Planted]] = {
    # bug: the stage where it must be detected, and how it is planted
    "K's scales in another order": ("qk.k scale", reversed_scales("qk.k", 2, FACTORED)),
    "V's scales of other channels": ("pv.v scale", reversed_scales("pv.v", 3, FACTORED)),
    "a code of dO one off": ("dv.do codes", shifted("dv.do", 1)),
    "ties of Q away from zero": (
        "qk.q codes",
        of_other_spec(
            "qk.q", case=TIES, spec=UNSMOOTHED, other=replace(UNSMOOTHED, rounding=HALF_AWAY)
        ),
    ),
    "K not smoothed": ("qk.k scale", of_other_spec("qk.k", case=OFFSET, other=UNSMOOTHED)),
    "P over the row's maximum": (
        "pv.p codes",
        of_other_spec("pv.p", other=replace(SAGEBWD, block_k=128)),
    ),
    "a code of P two off": ("pv.p codes", shifted("pv.p", 2)),
    "a code of P one off": ("pv.p codes", shifted("pv.p", 1)),
    "the mask lost": ("o", of_other_case("o", CAUSAL, replace(CAUSAL, is_causal=False))),
    "one row of O wrong": ("o", one_element("o", 1e-5)),
    "O a little too large": ("o", scaled("o", 1 + 1e-5)),
    "NaN in O": ("o", not_a_number("o")),
    "the logsumexp in base 2": ("lse", scaled("lse", 1.4427)),
    "the logsumexp of smoothed logits": ("lse", (OFFSET, SAGEBWD, without_k_mean)),
    "the logsumexp of nothing is 0": (
        "lse",
        (DEAD, SAGEBWD, lambda found: replace(found, lse=found.lse.clamp(min=-1e30))),
    ),
    "delta from P and dP": (
        "delta",
        of_other_spec("delta", other=replace(SAGEBWD, delta=Delta.FROM_P)),
    ),
    "delta from O": (
        "delta",
        of_other_spec("delta", spec=FACTORED, other=replace(FACTORED, delta=Delta.FROM_O)),
    ),
    "delta negated": ("delta", scaled("delta", -1)),
    "P with a scale per column": ("dv.p scale", of_other_spec("dv.p", "dv", other=PER_COLUMN)),
    "P's scale of forward's logits": ("dv.p scale", swapped("dv.p", "dq.ds")),
    "a code of the backward's P one off": ("dv.p codes", shifted("dv.p", 1)),
    "one head of a group": ("dv", (GROUPED, SAGEBWD, without_a_head)),
    "no dV for the last key": ("dv", lost_row("dv")),
    "dS with a scale per row": ("dq.ds scale", of_other_spec("dq.ds", "dq", other=PER_ROW)),
    "dP in float32": (
        "dq.ds (scale|codes)",
        of_other_spec("dq.ds", other=with_precision(SAGEBWD, Precision.FP32, "dp")),
    ),
    "dP in 16 bit": (
        "dq.ds (scale|codes)",
        of_other_spec("dq.ds", spec=SAGEBWD_ALL_INT8, other=SAGEBWD),
    ),
    "a code of dS two off": ("dq.ds codes", shifted("dq.ds", 2)),
    "-128": ("dq.ds codes", (PLAIN, SAGEBWD, minus_128)),
    "dQ without the logit scale": ("dq", scaled("dq", 24**0.5)),
    "dQ with the scale of a padded head": ("dq", scaled("dq", PADDED)),
    "NaN in dQ": ("dq", not_a_number("dq")),
    "other random numbers": ("dk.ds codes", (PLAIN, RANDOM, rounded(Rounding.stochastic(6)))),
    "dS rounded to nearest": ("dk.ds codes", (PLAIN, RANDOM, rounded(HALF_EVEN))),
    "dK without the logit scale": ("dk", scaled("dk", 24**0.5)),
    "dK without Q's mean": ("dk", (OFFSET, Q_SMOOTHED, without_q_mean)),
    "no dK for the last key": ("dk", lost_row("dk")),
    "a window one key longer on the left": (
        "o",
        of_other_case("o", WINDOW, replace(WINDOW, window=(21, 5))),
    ),
    "a window one key shorter on the left, backward": (
        "dv",
        of_other_case("dv", WINDOW, replace(WINDOW, window=(19, 5))),
    ),
    "a window one key longer on the right": (
        "lse",
        of_other_case("lse", WINDOW, replace(WINDOW, window=(20, 6))),
    ),
    "a window one key shorter on the right, backward": (
        "dk",
        of_other_case("dk", WINDOW, replace(WINDOW, window=(20, 4))),
    ),
    "a window at the other corner": (
        "o",
        of_other_case("o", WINDOW, replace(WINDOW, causal_alignment="lower_right")),
    ),
    "padded keys in the mean of K": (
        "lse",
        of_other_case("lse", PADDED_KEYS, replace(PADDED_KEYS, key_mask=None)),
    ),
    "gradients of padded keys": (
        "dv",
        of_other_case("dv", PADDED_KEYS, replace(PADDED_KEYS, key_mask=None)),
    ),
    "the sink forgotten": ("o", of_other_case("o", SINKS, replace(SINKS, sinks=None))),
    "the sink forgotten in dQ": ("dq", of_other_case("dq", SINKS, replace(SINKS, sinks=None))),
    "no gradient of the sinks": ("dsinks", (SINKS, SAGEBWD, without_sink_gradient)),
    "the softcap forgotten": ("o", of_other_case("o", SOFTCAP, replace(SOFTCAP, softcap=None))),
    "one row of dK wrong in 16 bit": ("dk", one_element("dk", 1e-2, FPA_FP16)),
    "P's bound a little too large": ("dv.p scale", scaled_rows("dv.p", 1 + 1e-4)),
    "dS's bound a little too small": ("dq.ds scale", scaled_rows("dq.ds", 1 - 1e-4)),
    "dS's bound without delta": ("dq.ds scale", (PLAIN, BOUND, without_delta)),
    "the largest code for every row": ("dv.do top codes", (PLAIN, BOUND, other_top_codes)),
    "a code of the folded dO one off": ("dv.do codes", shifted("dv.do", 1, BOUND_INT8)),
    "a code of P with a bound one off": ("dv.p codes", shifted("dv.p", 1, BOUND_INT8)),
    "a sum of FP8 products off": ("dv", fp8_sum_off("dv")),
    "dQ of FP8 products off": ("dq", fp8_sum_off("dq")),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_at_its_stage(bug: str) -> None:
    stage, (case, spec, tamper) = PLANTED[bug]
    right = trace(case, spec)
    check_trace(right, case, spec)
    with pytest.raises(AssertionError, match=f"^{stage}: "):
        check_trace(tamper(right), case, spec)


def test_bugs_in_a_kernels_trace_are_found() -> None:
    """Other tests plant bugs in traces of the emulator, which take less time."""
    on_device = PLAIN.map(lambda x: x.to(DEVICE))
    right = run_kernels(on_device, SAGEBWD)
    check_trace(right, PLAIN, SAGEBWD)
    for bug in ("a code of P two off", "-128", "O a little too large", "NaN in dQ"):
        stage, (_, _, tamper) = PLANTED[bug]
        with pytest.raises(AssertionError, match=f"^{stage}: "):
            check_trace(tamper(right), PLAIN, SAGEBWD)


@pytest.mark.parametrize("name", ["operands", "o", "lse"])
def test_names_dtypes_and_shapes_are_checked(name: str) -> None:
    right = trace(PLAIN, SAGEBWD)
    wrong = {
        "operands": {"qk.q": right.operands["qk.q"]},
        "o": right.o.half(),
        "lse": right.lse[..., None],
    }[name]
    with pytest.raises(AssertionError, match=f"^{name}: ") as raised:
        check_trace(replace(right, **{name: wrong}), PLAIN, SAGEBWD)
    assert isinstance(raised.value.__cause__, AssertionError)  # its traceback shows the place


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("preset", [name for name, spec in PRESETS.items() if supports(spec)])
def test_the_emulator_meets_the_contract(preset: str, is_causal: bool) -> None:
    """A kernel that meets the contract differs from the emulator by at most twice the radius."""
    spec = PRESETS[preset]
    for seed, kind in enumerate(NASTY.values()):
        c = case(seed=seed, kinds=(kind, gaussian, kind, gaussian), is_causal=is_causal, **SHAPE)
        tally = check_trace(trace(c, spec), c, spec)
        assert tally.total == 0


def test_balls_of_ordinary_numbers_are_small() -> None:
    """The contract is tight: codes of P are known to within a thousandth of a step."""
    p = Ball.exactly(torch.tensor([-3.0])).widened(20 * U).exp()
    assert float(127 * p.radius) < 1e-3
    assert float(p.radius) < (20 * U + EXP) * math.exp(-3) * 1.01


def test_a_tally_adds_up() -> None:
    one, other = Tally(), Tally()
    one.count("dv.p", 1, 100)
    other.count("dv.p", 2, 100)
    other.count("dq.ds", 0, 100)
    one.add(other)
    assert one.total / one.counted == 0.01
    assert "dv.p 3 of 200" in str(one)


class TestBall:
    """Float32 computations in any order give results inside their balls."""

    def numbers(self, seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator)

    def inside(self, actual: torch.Tensor, ball: Ball) -> None:
        assert_within_bound(actual=actual, exact=ball.mid, bound=ball.radius, what="ball")

    def test_sums_and_products(self) -> None:
        x, y = self.numbers(1, 30, 200), self.numbers(2, 200, 20)
        exact_x, exact_y = Ball.exactly(x), Ball.exactly(y)
        self.inside(x @ y, exact_x.matmul(exact_y, 200))
        self.inside(x.sum(1), exact_x.sum(1, 200))
        self.inside(x.flip(1).cumsum(1)[:, -1], exact_x.sum(1, 200))
        self.inside(x * y.mT[:1], exact_x.times(Ball.exactly(y.mT[:1])).rounded(1))
        self.inside(x - 3, exact_x.minus(Ball.exactly(torch.tensor(3.0))).rounded(1))
        positive = y.mT[:1].abs() + 1
        self.inside(x / positive, exact_x.over(Ball.exactly(positive)).rounded(1))

    def test_functions(self) -> None:
        x = self.numbers(3, 1000) * 20
        self.inside(x.exp(), Ball.exactly(x).exp())
        self.inside(x.abs().log(), Ball.exactly(x.abs()).log().rounded(2))
        nothing = Ball.exactly(torch.tensor([-torch.inf])).exp()
        assert nothing.mid.item() == nothing.radius.item() == 0

    def test_16_bit(self) -> None:
        x = self.numbers(4, 1000) * torch.logspace(-9, 6, 1000)
        for dtype in (torch.float16, torch.bfloat16):
            ball = Ball.exactly(x).rounded16(dtype)
            known = ball.radius.isfinite()
            assert bool(known.all()) == (dtype is torch.bfloat16)
            self.inside(x[known].to(dtype), Ball(*(y[known] for y in ball)))

    def test_what_is_not_known_stays_so(self) -> None:
        unknown = Ball(torch.tensor([1.0]).double(), torch.tensor([torch.inf]).double())
        zero = Ball.exactly(torch.zeros(1))
        for ball in (unknown.times(zero), unknown.plus(zero), unknown.exp(), zero.over(unknown)):
            assert ball.radius.item() == torch.inf


@pytest.mark.parametrize("gone", [{}, {"attn_mask": torch.ones(40, 40, dtype=torch.bool)}])
def test_a_recorded_call_goes_into_trace(gone):
    """With its options. There are no kernels for its mask, which raises."""
    c = kernel_case(seed=2, n_q=40, n_k=40, d=16, heads=(1, 4), is_causal=not gone)
    call = replace(c, k=c.k[:, :2], v=c.v[:, :2], scale=0.3, enable_gqa=True, **gone)
    if gone:
        with pytest.raises(ValueError, match="attn_mask: there are no kernels"):
            kernel_trace(call, spec=SAGEBWD)
        return
    options = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    expected = kernel_trace(*call.qkvdo, spec=SAGEBWD, **options)
    found = kernel_trace(call, spec=SAGEBWD)
    for name in ("o", "dq", "dk", "dv"):
        assert_bitwise(actual=getattr(found, name), expected=getattr(expected, name), what=name)
