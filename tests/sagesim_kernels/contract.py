"""Check a kernel against the emulator, stage by stage, as docs/numerics.md requires.

Each stage starts from what the kernel itself computed in the stages before, so that a code on the
other side of a tie does not affect later stages. No tolerance is chosen. A stage is recomputed in
float64, from the emulator's codes of Q, K, V and dO, as balls that contain every possible float32
result (see `error_balls.py`). The rounding that follows, to codes or to a dtype, is monotone,
so that the two ends of a ball bound its result.

| stage | from | must be |
| --- | --- | --- |
| codes and scales of q, k, v, do | inputs | the emulator's, bit for bit |
| pv.p | S of the codes | roundings of some 127 exp(S - tile row max) in the ball |
| lse | S of the codes | in the ball |
| o | the kernel's codes of P; 16 bit: P in the ball | in the ball, rounded to its dtype |
| delta | the kernel's o; or P and dP in the ball | in the ball |
| dv.p, dq.ds, dk.ds | P, dP in the ball; the kernel's delta | roundings of some map in the ball |
| dv.do, dk.q with scales from bounds | bounds in the ball | see `bound_contract.py` |
| dq, dk, dv | the kernel's codes and scales; 16 bit: maps in the ball | in the ball, rounded |
| dsinks | lse in the ball; the kernel's delta | in the ball, rounded |
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import sagesim
from sagesim import AttentionSpec, Delta, Granularity, Precision, RoundingMode, Trace
from sagesim.emulator import SHARED_AXES, flatten, from_tiles, to_tiles, uniform
from sagesim.emulator.rounding import CODE_MAX
from sagesim.emulator.row_bounds import TOP_CODES, has_row_bound
from sagesim.emulator.smoothing import subtract_block_means, subtract_head_mean
from sagesim.spec import MAPS, OPERANDS
from sagesim_kernels import Coded, KernelTrace
from sagesim_kernels import trace as kernel_trace
from tests.sagesim_kernels.bound_contract import (
    Rows,
    between,
    check_folded,
    check_row_scales,
    ds_bound,
    p_bound,
    product_error,
    rounded_codes,
    step,
)
from tests.sagesim_kernels.error_balls import EXP, TENSOR_CORE_U, TINY, Ball
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.float32_bound import U, gamma
from tests.support.inputs import Case

VANISHING = 127.0 * 2.0**-128
"""The largest amax for which 127 / amax overflows."""

SHORTEST_STEP = 32
"""Queries of a step, at least: the parts of a block of FP8 products are added in float32."""

LOG_127 = 4.85
"""log(127), rounded up."""

TANH = 2.0**-21
"""Relative error of `sagesim_kernels.operands.softcap.tanh`; libraries have a smaller one."""

_DTYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}

_Codes = tuple[Tensor, Tensor, Tensor]
"""Codes and scales of a map, and the radius of their products."""


@dataclass(slots=True)
class Tally:
    """Counts codes of P and dS that differ from the emulator's, over many cases.

    Only codes that float32 determines to within a quarter of a step, given the same O, are counted.
    """

    differing: dict[str, int] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, differing: int, entries: int) -> None:
        self.differing[name] = self.differing.get(name, 0) + differing
        self.entries[name] = self.entries.get(name, 0) + entries

    def add(self, other: Tally) -> None:
        for name, entries in other.entries.items():
            self.count(name, other.differing[name], entries)

    @property
    def total(self) -> int:
        """Codes that differ, of all maps."""
        return sum(self.differing.values())

    @property
    def counted(self) -> int:
        """Codes that are counted, of all maps."""
        return sum(self.entries.values())

    def __str__(self) -> str:
        parts = (
            f"{name} {self.differing[name]} of {entries}"
            for name, entries in sorted(self.entries.items())
        )
        share = self.total / max(1, self.counted)
        return f"codes unlike the emulator's: {share:.2e}; " + ", ".join(parts)


def run_kernels(case: Case, spec: AttentionSpec) -> KernelTrace:
    """Run the kernels on the device of a case, and return their trace on the CPU."""
    found = kernel_trace(*case.qkvdo, spec=spec, **case.kernel_options)
    numbers = {name: getattr(found, name).cpu() for name in OUTPUTS}
    if found.dsinks is not None:
        numbers["dsinks"] = found.dsinks.cpu()
    operands = {name: Coded(*(x.cpu() for x in coded)) for name, coded in found.operands.items()}
    return replace(found, operands=operands, **numbers)


OUTPUTS = ("o", "lse", "delta", "dq", "dk", "dv")


def emulated_case(case: Case) -> Case:
    """Return the case on the CPU, for the emulator."""
    on_cpu = {name: x.cpu() for name, x in case.tensors.items()}
    return replace(case, **on_cpu)


def emulate(case: Case, spec: AttentionSpec) -> Trace:
    return sagesim.trace(case, spec=spec)


def as_kernel_trace(trace: Trace) -> KernelTrace:
    """Return the emulator's trace in the form of a kernel's; it meets the contract too."""
    operands = {
        name: Coded(
            x.codes, torch.ones_like(x.scale) if name == "pv.p" else x.scale.expand(x.codes.shape)
        )
        for name, x in trace.operands.items()
    }
    numbers = {name: getattr(trace, name) for name in OUTPUTS}
    return KernelTrace(spec=trace.spec, operands=operands, dsinks=trace.dsinks, **numbers)


def check(case: Case, spec: AttentionSpec) -> Tally:
    """Run the kernels on a case and check their trace against the contract."""
    return check_trace(run_kernels(case, spec), emulated_case(case), spec)


def check_trace(found: KernelTrace, case: Case, spec: AttentionSpec) -> Tally:
    """Check a kernel's trace against the contract.

    case: as `emulated_case` returns it.

    Raises:
        AssertionError: if a stage fails; the message begins with the name of the stage. Outputs
            are all checked before it is raised.
    """
    return Checker(found, case, emulate(case, spec)).run()


class Checker:
    """Checks one trace. Maps are [batch, heads, n_q, n_k]; k and v are repeated for each group."""

    maximum_error = 0.0
    """Relative error of the maximum of a tile of P, beside its rounding."""

    lost_weight = 0.0
    """The largest weight of a tile of P in its row that may be taken as 0, in INT8."""

    def __init__(self, found: KernelTrace, case: Case, sim: Trace) -> None:
        self.found, self.sim, self.tally = found, sim, Tally()
        self.failures: list[str] = []  # of outputs
        self.x = flatten(case, sim.spec)
        self.spec, self.scale, self.groups = self.x.spec, self.x.scale, self.x.groups
        self.blocks = (self.spec.block_q, self.spec.block_k)
        shape = (*case.q.shape[:3], case.k.shape[2])
        self.attends = case.attends.expand(shape)
        valid_q, valid_k = self.x.valid
        q, k = self.x.q, self.x.k
        self.q_mean = self.k_mean = None
        if self.spec.smoothing.k:
            k, k_mean = subtract_head_mean(k, valid_k)
            self.k_mean = self._heads(k_mean)
        if self.spec.smoothing.q:
            q, q_mean = subtract_block_means(q, valid_q, self.spec.block_q)
            self.q_mean = self._heads(q_mean)
        self.softcap = case.softcap
        self.shift = self.sink = None
        if self.k_mean is not None:
            # Q before smoothing: the mean of K was taken from the logits of this Q.
            q_raw = Ball.exactly(self._heads(self.x.q))
            terms = q_raw.mid.shape[-1] + 4
            shift = q_raw.times(Ball.exactly(self.k_mean)).sum(-1, terms)
            self.shift = Ball(shift.mid * self.scale, shift.radius * abs(self.scale)).rounded(1)
        if case.sinks is not None:
            sink = Ball.exactly(case.sinks[:, None].expand(shape[:3]))
            has_shift = self.shift is not None and self.softcap is None
            self.sink = sink.minus(self.shift).rounded(1) if has_shift else sink
        do = self.x.flatten_queries(case.do)
        self.tokens = {"q": q, "k": k, "v": self.x.v, "do": do}
        self.tokens = {name: self._heads(t) for name, t in self.tokens.items()}

    def run(self) -> Tally:
        try:
            self._names()
            self._token_operands()
            self._forward()
            self._delta()
            self._backward()
        except AssertionError as error:
            self.failures.append(str(error))
            raise AssertionError("\n".join(self.failures)) from error
        if self.failures:
            raise AssertionError("\n".join(self.failures))
        return self.tally

    # Stages

    def _names(self) -> None:
        assert set(self.found.operands) == set(self.sim.operands), "operands: other names"

    def _token_operands(self) -> None:
        for name, sim in self.sim.operands.items():
            if name.rpartition(".")[2] not in MAPS and not self._is_folded(name):
                tri = self.found.operands[name]
                scale = tri.scale.expand(tri.codes.shape)
                expected = sim.scale.expand(sim.codes.shape)
                assert_bitwise(actual=scale, expected=expected, what=f"{name} scale")
                assert_bitwise(actual=tri.codes, expected=sim.codes, what=f"{name} codes")

    def _forward(self) -> None:
        """Check P relative to the maximum of its tile row, o and lse.

        The kernel keeps row maxima and rescales at every tile. Weights are products of exponentials
        of differences, and the roundings of their arguments add up to U |difference|.
        """
        s = self._logits("qk")
        tiles = self.key_tiles(s, -torch.inf)
        top = tiles.max(-1)  # [..., key block, 1]
        empty = top.mid == -torch.inf
        row_max = s.mid.amax(-1, keepdim=True)
        row_max = row_max.masked_fill(row_max == -torch.inf, 0.0)
        steps = tiles.mid.shape[-2]
        chain = (steps + 1) * (EXP + 2 * U)

        # 127 exp(S - top) = exp2(S - (top - log2(127))): two subtractions, and a constant.
        known_top = top.where(~empty, 0.0)
        below = tiles.minus(known_top)
        below = below.widened(U * (2 * known_top.size + 4 * LOG_127 + below.size))
        below = below.widened(self.maximum_error * known_top.size)
        p = below.where(tiles.mid != -torch.inf, -torch.inf).exp()
        if self.spec.pv.precision is Precision.INT8:
            codes = self._codes_of_p(self.from_key_tiles(Ball(127 * p.mid, 127 * p.radius)))

        weight = top.minus(Ball.exactly(row_max[..., None]))
        weight = weight.widened(U * weight.size).where(~empty, -torch.inf).exp()
        weight = weight.widened(chain * weight.size + self.lost_weight)
        # The numerators of the softmax relative to the maximum of the row, after any rescaling.
        e = tiles.minus(Ball.exactly(row_max[..., None]))
        e = e.widened(U * (2 * known_top.size + 4 * LOG_127 + e.size + row_max[..., None].abs()))
        e = e.where(tiles.mid != -torch.inf, -torch.inf).exp()
        e = e.widened(chain * e.size)
        e_rows = self.from_key_tiles(e)
        l = e_rows.sum(-1, self.spec.block_k + 2 * steps)
        dead = ~self.attends.any(-1)
        l = l.where(~dead, 1.0)
        if self.sink is not None:
            # Its exponent is in base 2 and relative to another maximum: five roundings, and the
            # exponentials of both differences.
            sink = self.sink.minus(Ball.exactly(row_max.squeeze(-1)))
            size = self.sink.size + row_max.squeeze(-1).abs() + 2 * LOG_127
            of_sink = sink.widened(gamma(5) * size).where(~dead, -torch.inf).exp()
            l = l.plus(of_sink.widened(2 * EXP * of_sink.size)).rounded(3)

        if self.spec.pv.precision is Precision.INT8:
            sums = self._tile_sums_over_keys(codes, self._numbers("pv", "v"))
            parts = sums.times(_swap(weight)).rounded(2)
            o = parts.sum(2, 2 * steps + 1)
            o = Ball(o.mid / 127, o.radius / 127)
        else:
            dtype = _DTYPES[self.spec.pv.precision]
            v = Ball.exactly(self._numbers("pv", "v"))
            o = e_rows.rounded16(dtype).matmul(v, e_rows.mid.shape[-1] + 2 * steps, TENSOR_CORE_U)
        o = o.over(Ball(l.mid[..., None], l.radius[..., None])).rounded(
            1 if self.sink is None else 3
        )
        self._inside("o", o.where(~dead[..., None], 0.0))

        # log2, ln(2) * x, and the subtraction of log2(127), in units of log2.
        size = row_max.squeeze(-1).abs() + l.mid.log().abs() + 2 * LOG_127
        log_l = l.log().widened(4 * U * (1 + size) + gamma(5) * size)
        lse = Ball(row_max.squeeze(-1) + log_l.mid, log_l.radius)
        self.lse = lse.widened(s.max(-1).radius.squeeze(-1) * gamma(5))
        lse = self.lse
        if self.shift is not None and self.softcap is None:
            lse = lse.plus(self.shift).rounded(1)
        self._inside("lse", lse.where(~dead, -torch.inf))
        self.dead = dead

    def _codes_of_p(self, high: Ball) -> Ball:
        """Return the codes of P in PV; high: 127 P relative to the maximum of each tile row."""
        self._codes("pv", high, torch.ones(()))
        return Ball.exactly(self.found.operands["pv.p"].codes)

    def _delta(self) -> None:
        s = self._logits("qk_recompute")
        if self.softcap is not None:
            t = Ball(s.mid / self.softcap, s.radius / self.softcap).where(self.attends, 0.0)
            slope = Ball(1 - t.mid.square(), t.radius * (2 * t.mid.abs() + t.radius))
            self.slope = slope.widened(4 * U)
        x = s.minus(Ball(self.lse.mid[..., None], self.lse.radius[..., None]))
        self.p = x.rounded(1).where(self.attends, -torch.inf).exp()
        do, v = self._numbers("dp", "do"), self._numbers("dp", "v")
        dp = self._tokens_by_tokens("dp", do, v)
        if self.spec.dp.precision is Precision.INT8:
            dp = dp.rounded(2)  # two scales
        self.dp = dp.where(self.attends, 0.0)
        if self.spec.delta is Delta.FROM_P:
            terms = self.p.mid.shape[-1] + 2
            delta = self.p.times(self.dp).rounded(1).sum(-1, terms)
        else:
            o = Ball.exactly(self.found.o)
            do = Ball.exactly(self.tokens["do"])
            delta = o.times(do).sum(-1, o.mid.shape[-1] + 1)
        delta = delta.where(~self.dead, 0.0)
        self._inside("delta", delta)
        self.ds = self._score_gradients(Ball.exactly(self.found.delta))
        self.ds_of_any = self._score_gradients(delta)

    def _score_gradients(self, delta: Ball) -> Ball:
        ds = self.dp.minus(Ball(delta.mid[..., None], delta.radius[..., None])).rounded(1)
        ds = ds.times(self.p).rounded(1)
        if self.softcap is not None:
            ds = ds.times(self.slope).rounded(1)
        return ds.where(self.attends, 0.0)

    def _backward(self) -> None:
        dv = self._map_transposed_by_tokens("dv", self.p, "do")
        self._inside("dv", self._of_key_heads(dv))
        rounding = self._dq_rounding()
        parts = self._map_by_tokens("dq", self.ds, "k")
        dq = parts.widened(rounding)
        if (gain := self._ds_sums()) is not None and self.k_mean is not None:
            gain = Ball(gain.mid[..., None], gain.radius[..., None])
            blocks = -(-self.attends.shape[-1] // self.spec.block_k)
            dq = dq.plus(gain.times(Ball.exactly(self.k_mean))).rounded(3 + blocks)
        # docs/numerics.md allows NaN in a row whose bound may count as infinite. Such a row may
        # also have numbers beyond the range of float16.
        overflows = self._scaled(parts).size.to(self.sim.dq.dtype).isinf()
        is_allowed = self.found.dq.isnan() | (self.found.dq.isinf() & overflows)
        self._inside("dq", self._scaled(dq), rounding.isinf().expand(dq.mid.shape) & is_allowed)
        dk = self._map_transposed_by_tokens("dk", self.ds, "q")
        if self.q_mean is not None:
            blocks = self._query_tiles(self.ds)  # [..., query block, block_q, n_k]
            columns = blocks.sum(-2, self.spec.block_q)
            count = columns.mid.shape[-2]
            bias = Ball(columns.mid.mT, columns.radius.mT).matmul(
                Ball.exactly(self.q_mean), 2 * count * self.groups + 3
            )
            dk = dk.widened(gamma(2 * count * self.groups) * dk.size).plus(bias)
        self._inside("dk", self._scaled(self._of_key_heads(dk)))

        if self.sink is not None:
            of_rows = self._p_sink().times(Ball.exactly(self.found.delta)).rounded(1)
            found = of_rows.sum(-1, 1).sum(0, 1)  # in float64
            self._inside("dsinks", Ball(-found.mid, found.radius).rounded(1))

    # What a stage is made of

    def _p_sink(self) -> Ball:
        """Return the sink's share of each row's sum."""
        assert self.sink is not None
        x = self.sink.minus(self.lse.where(~self.dead, 0.0))
        size = self.sink.size + self.lse.where(~self.dead, 0.0).size
        return x.widened(gamma(4) * size).where(~self.dead, -torch.inf).exp()

    def _ds_sums(self) -> Ball | None:
        """Return the sums of the rows of dS; None if docs/numerics.md takes them for 0."""
        if self.softcap is not None:
            return self.ds.sum(-1, self.ds.mid.shape[-1] + 2)
        if self.sink is None:
            return None
        return self._p_sink().times(Ball.exactly(self.found.delta)).rounded(1)

    def _dq_rounding(self) -> Tensor:
        """Return the error that adding parts of dQ as integers may cause, [..., n_q, 1].

        docs/numerics.md, "Sums of dQ": half a unit for each key block, and a unit is at most 2^-29
        times the bound on the row's sum.
        """
        spec = self.spec
        do, v, k = (self._numbers(*x) for x in (("dp", "do"), ("dp", "v"), ("dq", "k")))
        unlike = 2.0**-20 * (1.5 * self.lse.size).where(~self.dead, 0.0)
        if not self._has_codes("qk_recompute"):
            norms = [self._numbers("qk_recompute", x).norm(dim=-1) for x in ("q", "k")]
            size = norms[0] * norms[1].amax(-1, keepdim=True) * abs(self.scale)
            unlike = unlike + 2.0**-20 * 1.5 * max(32, 2 * self.x.q.shape[-1]) * size
        unlike = unlike.masked_fill(unlike > 127, torch.inf)  # more than x, which counts so
        p_sum = unlike.exp2() * self.p.size.sum(-1).clamp(min=1.0)
        ds_sum = p_sum * (
            do.norm(dim=-1) * v.norm(dim=-1).amax(-1, keepdim=True) + self.found.delta.abs()
        )
        growth, of_bound = 2.0, torch.zeros(())
        is_random = spec.rounding.mode is RoundingMode.STOCHASTIC
        if has_row_bound(spec, "dq"):
            if is_random:
                share = {Precision.FP8_E4M3: 2.0**-9 / 240, Precision.FP8_E5M2: 2.0**-16 / 32768}
                keys = self.attends.sum(-1)
                largest = self._row_bound("dq", self.found.delta).size
                of_bound = share.get(spec.dq.precision, 1 / 127) * keys * largest
        elif self._has_codes("dq") and is_random:
            growth = 1.0 + self.sim.spec.block_k / 127  # of the call, not of a short sequence
            if spec.dq.lhs is Granularity.PerTile:
                n, block = ds_sum.shape[-1], spec.block_q
                blocks = torch.nn.functional.pad(ds_sum, (0, -n % block)).unflatten(-1, (-1, block))
                ds_sum = block * blocks.amax(-1).repeat_interleave(block, -1)[..., :n]
        k_amax = k.abs().amax((-2, -1))[..., None]
        if self.softcap is not None and self.k_mean is not None:
            k_amax = k_amax + self.k_mean.abs().amax((-2, -1))[..., None]
        bound = (1.1 * (growth * ds_sum + of_bound) * k_amax).nan_to_num(torch.inf, torch.inf)
        parts = -(-self.attends.shape[-1] // spec.block_k)
        return (parts * 2.0**-30 * bound)[..., None]

    def _logits(self, site: str) -> Ball:
        """Return S of the smoothed Q and K, in natural units; -inf where it is masked.

        Sums of codes are exact. They are multiplied by two scales and by the logit scale, which is
        itself rounded: 4 roundings, and 2 in 16 bit. The product of the means is added before or
        after its own multiplication.
        """
        s = self._tokens_by_tokens(site, self._numbers(site, "q"), self._numbers(site, "k"))
        s = s.rounded(4)
        if self.q_mean is not None:
            k = self.tokens["k"].double()
            mean = self.q_mean.double().repeat_interleave(self.spec.block_q, 2)[
                :, :, : s.mid.shape[2]
            ]
            bias = Ball.exactly(mean).matmul(Ball.exactly(k.mT), mean.shape[-1] + 3)
            s = s.plus(bias).rounded(2)
        s = Ball(s.mid * self.scale, s.radius * abs(self.scale)).widened(TINY)
        if self.softcap is not None:
            s = self._capped(s)
        return s.where(self.attends, -torch.inf)

    def _capped(self, s: Ball) -> Ball:
        """Return c tanh(S / c) of the logits before smoothing.

        Scale and shift are divided by c, which is a rounding each, and added.
        """
        cap = self.softcap
        assert cap is not None
        if self.shift is not None:
            shift = Ball(self.shift.mid[..., None], self.shift.radius[..., None]).rounded(2)
            s = s.rounded(2).plus(shift)
        x = s.rounded(3)
        mid = torch.tanh(x.mid / cap)
        ends = torch.tanh(x.highest / cap) - mid, mid - torch.tanh(x.lowest / cap)
        radius = torch.maximum(*ends) + TANH * mid.abs()
        return Ball(cap * mid, cap * radius.nan_to_num(torch.inf)).rounded(2)

    def _tokens_by_tokens(self, site: str, left: Tensor, right: Tensor) -> Ball:
        terms = 0 if self._has_codes(site) else left.shape[-1]
        return Ball.exactly(left).matmul(Ball.exactly(right.mT), terms, TENSOR_CORE_U)

    def _map_by_tokens(self, site: str, x: Ball, right: str) -> Ball:
        """Return map times tokens, summed over keys, [..., n_q, channels]."""
        b = self._numbers(site, right)
        if not self._has_codes(site):
            x = x.rounded16(_DTYPES[self.spec.site(site).precision])
            return x.matmul(Ball.exactly(b), x.mid.shape[-1] + 2, TENSOR_CORE_U)
        codes, scale, radius = self._codes(site, x)
        parts = self._tile_sums_over_keys(Ball(codes * scale, radius), b)
        if self.spec.site(site).precision is not Precision.INT8:
            parts = parts.widened(self._fp8_error_over_keys(site, right, codes, scale))
        parts = parts.rounded(2)
        return parts.sum(2, parts.mid.shape[2])

    def _map_transposed_by_tokens(self, site: str, x: Ball, right: str) -> Ball:
        """Return the transposed map times tokens, summed over queries, [..., n_k, channels]."""
        b = self._numbers(site, right)
        if not self._has_codes(site):
            x = x.rounded16(_DTYPES[self.spec.site(site).precision])
            terms = self.groups * x.mid.shape[-2] + 2
            return Ball(x.mid.mT, x.radius.mT).matmul(Ball.exactly(b), terms, TENSOR_CORE_U)
        codes, scale, radius = self._codes(site, x)
        if has_row_bound(self.spec, site):
            scale = torch.ones_like(scale)  # the scales are in the other operand
        block_q, block_k = self.blocks
        left = Ball(  # [b, h, i, n_k, block_q]
            *(
                to_tiles(y, block_q, block_k).flatten(4)[..., : codes.shape[-1]].mT
                for y in (codes * scale, radius)
            )
        )
        right_tiles = to_tiles(b, block_q, b.shape[-1]).flatten(4)
        parts = left.matmul(Ball.exactly(right_tiles), 0)
        steps = parts.mid.shape[2]
        precision = self.spec.site(site).precision
        if precision is not Precision.INT8:
            coded = self.found.operands[f"{site}.{right}"]
            of_right, right_scale = (
                to_tiles(y.double(), block_q, b.shape[-1]).flatten(4)
                for y in (coded.codes, coded.scale.expand(coded.codes.shape))
            )
            lost = product_error(left.mid, of_right, block_q, precision)
            parts = parts.widened(lost * right_scale.amax(-2, keepdim=True))
            steps *= -(-block_q // SHORTEST_STEP)
        return parts.rounded(2).sum(2, self.groups * steps)

    def _fp8_error_over_keys(self, site: str, right: str, codes: Tensor, scale: Tensor) -> Tensor:
        """Return by how much sums of FP8 products may be off, [b, h, j, n_q, channels]."""
        coded, block_k = self.sim.operands[f"{site}.{right}"], self.spec.block_k
        of_right, right_scale = (
            to_tiles(y.double().repeat_interleave(self.groups, 1), block_k, y.shape[-1]).flatten(4)
            for y in (coded.codes, coded.scale.expand(coded.codes.shape))
        )
        left = to_tiles(codes, codes.shape[-2], block_k).squeeze(2).transpose(2, 3)
        lost = product_error(left, of_right, block_k, self.spec.site(site).precision)
        return lost * scale.amax(-1)[:, :, None, :, None] * right_scale.amax(-2, keepdim=True)

    def _tile_sums_over_keys(self, left: Ball, right: Tensor) -> Ball:
        """Return the part of each key block in left [..., n_q, n_k] @ right, [b, h, j, n_q,
        channels]."""
        block_k = self.spec.block_k
        tiles = Ball(*(to_tiles(y, y.shape[-2], block_k).squeeze(2).transpose(2, 3) for y in left))
        right_tiles = to_tiles(right, block_k, right.shape[-1]).flatten(4)
        return tiles.matmul(Ball.exactly(right_tiles), 0)

    def _codes(self, site: str, x: Ball, only_scale: Tensor | None = None) -> _Codes:
        """Check the codes and scales of a map, and return the kernel's in float64.

        x: the unrounded map; if `only_scale` is given, in units of codes.
        """
        name = f"{site}.{OPERANDS[site][0]}"
        tri, sim = self.found.operands[name], self.sim.operands[name]
        codes, scale = tri.codes.double(), tri.scale.double().expand(tri.codes.shape)
        if only_scale is not None:
            expected = only_scale.expand(tri.scale.shape)
            assert_bitwise(actual=tri.scale, expected=expected, what=f"{name} scale")
            y = x
        elif has_row_bound(self.spec, site):
            return self._bound_codes(site, x)
        else:
            y = self._scales(name, x, self.spec.site(site).lhs, scale)
        low, high = (self._round(site, end).clamp(-127, 127) for end in (y.lowest, y.highest))
        between(actual=tri.codes, lowest=low, highest=high, what=f"{name} codes")
        # The emulator's value differs by at most twice the radius and the difference of the scales.
        moved = 2 * y.radius
        if only_scale is None:
            sim_scale = sim.scale.double().expand(codes.shape)
            moved = moved + 127 * (scale / sim_scale - 1).abs()
        if OPERANDS[site][0] == "ds":
            moved = (
                moved + self.p.size * (self.found.delta - self.sim.delta).abs()[..., None] / scale
            )
        steps = _or_all(moved).ceil().clamp(1, 254)
        exact = sim.codes.double()
        assert_within_bound(
            actual=tri.codes, exact=exact, bound=steps, what=f"{name} codes against the emulator's"
        )
        counted = self.attends & (y.radius < 0.25)
        if only_scale is None:
            counted &= self._is_determined(site, x, scale)
        if OPERANDS[site][0] == "ds" and self.spec.delta is Delta.FROM_O:
            counted &= ~self._other_o[..., None]
        differing = (tri.codes != sim.codes) & counted
        self.tally.count(name, int(differing.sum()), int(counted.sum()))
        return codes, scale, torch.zeros_like(codes)

    def _bound_codes(self, site: str, x: Ball) -> _Codes:
        """Do what `_codes` does, for scales from bounds on the rows of the map x."""
        left, right = OPERANDS[site]
        name, matmul = f"{site}.{left}", self.spec.site(site)
        precision, rounding = matmul.precision, self.spec.rounding
        tri, sim = self.found.operands[name], self.sim.operands[name]
        rows = self._row_scales(site)
        if left != "ds" or site == "dk":
            check_folded(
                f"{site}.{right}",
                self.found.operands[f"{site}.{right}"],
                self.tokens[right],
                self._row_bound(site, self.found.delta),
                rows,
                matmul,
                rounding,
                self.spec.block_q,
            )
        scale = rows.scale[..., None]
        y = Ball(x.mid / scale, x.radius / scale).rounded(3).widened(x.size * 2.0**-149 / scale**2)
        y = y.where(rows.is_known[..., None], 0.0)
        low, high = (rounded_codes(end, precision, rounding, left) for end in (y.lowest, y.highest))
        between(actual=tri.codes.double(), lowest=low, highest=high, what=f"{name} codes")
        # Codes of other deltas and bounds, if the row has the same top code.
        of_sim = self._row_bound(site, self.sim.delta)
        other = Ball(of_sim.mid / rows.top, of_sim.radius / rows.top)
        sim_scale = sim.scale.double().expand(tri.codes.shape).amax(-1)
        is_same = rows.is_known & (sim_scale / other.mid - 1).abs().le(2.0**-8)
        unlike = (sim_scale / rows.scale - 1).abs()[..., None]
        moved = 2 * y.radius + y.size * unlike
        if left == "ds":
            between_deltas = (self.found.delta - self.sim.delta).abs()[..., None]
            moved = moved + self.p.size * between_deltas / scale
        near = is_same[..., None] & self.attends & moved.isfinite()
        codes, exact = (t.codes.double().masked_fill(~near, 0.0) for t in (tri, sim))
        bound = _or_all(moved.masked_fill(~near, 0.0)) + 2 * step(y.size, precision)
        what = f"{name} codes against the emulator's"
        assert_within_bound(actual=codes, exact=exact, bound=bound, what=what)
        counted = near & (4 * y.radius < step(y.mid, precision))
        if left == "ds":
            any_radius = self.ds_of_any.radius / scale + y.size * unlike
            counted &= 4 * any_radius < step(y.mid, precision)
            if self.spec.delta is Delta.FROM_O:
                counted &= ~self._other_o[..., None]
        differing = (tri.codes != sim.codes) & counted
        self.tally.count(name, int(differing.sum()), int(counted.sum()))
        codes = tri.codes.double()
        return codes, tri.scale.double().expand(codes.shape), torch.zeros_like(codes)

    def _row_bound(self, site: str, delta: Tensor) -> Ball:
        """Return the bound on each row of the map of a site, [..., n_q]."""
        of_p = p_bound(self.p)
        if site == "dv":
            return of_p
        do, v = self._numbers("dp", "do"), self._numbers("dp", "v")
        return ds_bound(of_p, do, v, delta).where(self.attends.any(-1), 0.0)

    def _row_scales(self, site: str) -> Rows:
        """Check the scales of a site's map, and return them.

        The top codes of dS are those of dk for dq too, in the same format.
        """
        name, precision = f"{site}.{OPERANDS[site][0]}", self.spec.site(site).precision
        tops = TOP_CODES[precision]
        is_shared = has_row_bound(self.spec, "dk") and self.spec.dk.precision is precision
        if site == "dq" and not is_shared:
            tops = (CODE_MAX[precision],)
        bound = self._row_bound(site, self.found.delta)
        rows = check_row_scales(name, self.found.operands[name], bound, self.attends, tops)
        if site == "dq" and is_shared:
            of_dk = self.found.operands["dk.ds"]
            for what in ("codes", "scale"):
                actual, expected = (getattr(y, what) for y in (self.found.operands[name], of_dk))
                assert_bitwise(actual=actual, expected=expected, what=f"{name} {what} of dk")
        return rows

    def _is_determined(self, site: str, x: Ball, scale: Tensor) -> Tensor:
        """Whether codes are known to within a quarter of a step, whoever computes them from O.

        Where dP - delta cancels to nothing, as in a row of one key, they are noise; and so are all
        that have their scale from there.
        """
        if OPERANDS[site][0] == "ds":
            x = self.ds_of_any
        least, most = self._amax(x, self.spec.site(site).lhs)
        either = torch.where(most <= VANISHING, 0.0, most / least - 1)
        return (x.radius + x.size * either) / scale < 0.25

    @property
    def _other_o(self) -> Tensor:
        """Whether a query's block has an o unlike the emulator's, so that delta and scales
        differ."""
        other = (self.found.o != self.sim.o).any(-1)
        n, block = other.shape[-1], self.spec.block_q
        blocks = torch.nn.functional.pad(other, (0, -n % block)).unflatten(-1, (-1, block))
        return blocks.any(-1).repeat_interleave(block, -1)[..., :n]

    def _scales(self, name: str, x: Ball, how: Granularity, scale: Tensor) -> Ball:
        """Check the scales of a map, and return the map in units of codes.

        If 127 / amax overflows, the scale is 1 and all codes are 0.
        """
        least, most = self._amax(x, how)
        vanishes = (most <= VANISHING) | ((least <= VANISHING) & (scale == 1))
        low = (least.clamp(min=VANISHING) / 127).float().double().masked_fill(vanishes, 1.0)
        high = (most / 127).float().double().masked_fill(vanishes, 1.0)
        between(actual=scale, lowest=low, highest=high, what=f"{name} scale")
        y = Ball(x.mid / scale, x.radius / scale)
        # Three roundings: scale, 127 / amax and the product. A subnormal scale has fewer digits.
        y = y.rounded(3).widened(y.size * 2.0**-149 / scale)
        return y.where(~vanishes, 0.0)

    def _amax(self, x: Ball, how: Granularity) -> tuple[Tensor, Tensor]:
        """Return bounds on amax for every element, over the elements that share its scale."""

        def top(magnitude: Tensor) -> Tensor:
            tiles = to_tiles(magnitude, *self.blocks)
            tops = tiles.amax(SHARED_AXES[how], keepdim=True).expand(tiles.shape)
            return from_tiles(tops, *magnitude.shape[-2:])

        return top(x.mid.abs() - x.radius).clamp(min=0.0), top(x.size)

    def _round(self, site: str, y: Tensor) -> Tensor:
        """Round to integers as the spec says. This is monotone and keeps infinities."""
        match self.spec.rounding.mode:
            case RoundingMode.HALF_EVEN:
                return y.round()
            case RoundingMode.HALF_AWAY:
                return (y.abs() + 0.5).floor().copysign(y)
            case RoundingMode.STOCHASTIC:
                seed = self.spec.rounding.seed
                assert seed is not None
                u = uniform(seed, OPERANDS[site][0], *y.shape[-2:], 0, y.device).double()
                return y.floor() + ((y - y.floor()) > u)

    def _inside(self, name: str, ball: Ball, is_free: Tensor | None = None) -> None:
        """Check that an output is a value of the ball, rounded to the dtype of the emulator's.

        is_free: elements that are not checked.
        """
        actual, sim = getattr(self.found, name), getattr(self.sim, name)
        if is_free is not None:
            actual = torch.where(is_free, sim, actual)
        assert actual.dtype == sim.dtype, f"{name}: {actual.dtype}, expected {sim.dtype}"
        assert actual.shape == sim.shape, f"{name}: {actual.shape}, expected {sim.shape}"
        low, high = (end.to(sim.dtype).double() for end in (ball.lowest, ball.highest))
        unknown = ball.radius.isinf() | ball.mid.isnan()
        low, high = low.masked_fill(unknown, -torch.inf), high.masked_fill(unknown, torch.inf)
        # An intermediate overflow gives NaN or infinity; the emulator shows where.
        overflown = unknown & ~sim.isfinite()
        actual = actual.double().masked_fill(overflown, 0.0)
        finite = actual.masked_fill(unknown & actual.isinf(), torch.nan)
        try:
            between(actual=finite, lowest=low, highest=high, what=name)
        except AssertionError as error:  # the stages after it start from the kernel's output
            is_wrong = ~((low <= finite) & (finite <= high))
            where = ""
            if is_wrong.ndim > 2:
                counts = is_wrong.flatten(2).sum(-1).tolist()
                rows = is_wrong.any(-1) if is_wrong.ndim > 3 else is_wrong
                tokens = rows.flatten(0, 1).any(0).nonzero().flatten().tolist()
                where = f"\nof [batch, head]: {counts}; at tokens {tokens[:64]}"
            self.failures.append(f"{error}{where}")

    # Shapes

    def _has_codes(self, site: str) -> bool:
        return self.spec.site(site).precision.is_scaled

    def _is_folded(self, name: str) -> bool:
        """Whether an operand's rows were multiplied by the bounds of a map."""
        site, _, tensor = name.partition(".")
        return tensor in ("q", "do") and has_row_bound(self.spec, site)

    def _numbers(self, site: str, tensor: str) -> Tensor:
        """Return a tensor as the site multiplies it: rounded to its format, in float64."""
        if not self._has_codes(site):
            dtype = _DTYPES[self.spec.site(site).precision]
            return self.tokens[tensor].to(dtype).double()
        name = f"{site}.{tensor}"
        x = (self.found if self._is_folded(name) else self.sim).operands[name]
        numbers = x.codes.double() * x.scale.double()
        return numbers.repeat_interleave(self.groups, 1) if tensor in ("k", "v") else numbers

    def _heads(self, x: Tensor) -> Tensor:
        return self.x.query_heads(x.expand(self.x.q.shape[0], *x.shape[1:]))

    def _of_key_heads(self, x: Ball) -> Ball:
        """Sum over the query heads of each group."""
        if self.groups == 1:
            return x
        mid, radius = (y.unflatten(1, (-1, self.groups)) for y in x)
        return Ball(mid, radius).sum(2, 2 * self.groups)

    def _scaled(self, x: Ball) -> Ball:
        """Multiply by the logit scale, which is itself rounded."""
        return Ball(x.mid * self.scale, x.radius * abs(self.scale)).rounded(2)

    def key_tiles(self, x: Ball, fill: float) -> Ball:
        """Reshape [..., n_q, n_k] to [..., n_q, key block, block_k]."""
        mid, radius = x
        padding = (0, -mid.shape[-1] % self.spec.block_k)
        mid = torch.nn.functional.pad(mid, padding, value=fill)
        radius = torch.nn.functional.pad(radius, padding)
        return Ball(*(y.unflatten(-1, (-1, self.spec.block_k)) for y in (mid, radius)))

    def from_key_tiles(self, x: Ball) -> Ball:
        return Ball(*(y.flatten(-2)[..., : self.attends.shape[-1]] for y in x))

    def _query_tiles(self, x: Ball) -> Ball:
        """Reshape [..., n_q, n_k] to [..., query block, block_q, n_k]."""
        padding = (0, 0, 0, -x.mid.shape[-2] % self.spec.block_q)
        return Ball(
            *(torch.nn.functional.pad(y, padding).unflatten(-2, (-1, self.spec.block_q)) for y in x)
        )


def _swap(x: Ball) -> Ball:
    """Transpose [b, h, n_q, key block, 1] to [b, h, key block, n_q, 1]."""
    return Ball(*(y.transpose(2, 3) for y in x))


def _or_all(x: Tensor) -> Tensor:
    return x.nan_to_num(torch.inf, torch.inf)
