"""Measurements of `theory.dq_sums`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sagesim import (
    FACTORED,
    FPA_FP16,
    SAGEBWD,
    AttentionSpec,
    Granularity,
    Precision,
    Rounding,
    Trace,
)
from sagesim.problem import resolve_input16
from theory.checks.check import Check, bounded, estimated
from theory.checks.samples import Sample, captured, gaussian, outlier_channels
from theory.dq_sums import (
    code_floor,
    ds_bound,
    error_bound,
    expected_error,
    growth,
    k_bound,
    largest_sum,
    last_place,
    loss_bound,
    p_bound,
    unit,
)

TOPIC = "dq_sums"

_TOKENS = 256

SPECS = {
    "sagebwd": SAGEBWD,
    "factored": FACTORED,
    "fpa_fp16": FPA_FP16,
    "sagebwd stochastic": replace(SAGEBWD, rounding=Rounding.stochastic(3)),
}


def checks() -> Iterator[Check]:
    """The bound, the sums and their errors, then rows that nearly reach the bound."""
    ordinary = (gaussian(1.0, _TOKENS), gaussian(3.0, _TOKENS, is_causal=True))
    inputs: dict[str, tuple[Sample, ...]]
    inputs = {s.name: (s,) for s in (*ordinary, outlier_channels(_TOKENS))}
    inputs[f"capture, all layers, N {_TOKENS}"] = captured(_TOKENS)
    for label, spec in SPECS.items():
        for name, samples in inputs.items():
            yield from _sums(f"{label}, {name}", [Sums.of(s, spec) for s in samples])

    for label, sample, spec, reached in (
        ("sagebwd", doubled(), SAGEBWD, 1.0),
        ("fpa_fp16", aligned(), FPA_FP16, 0.5),
        ("fpa_fp16", subnormal(), FPA_FP16, 1.0),
    ):
        sums = Sums.of(sample, spec)
        name = f"{label}, {sample.name}"
        row, found = sums.bound[..., -1:], sums.magnitudes[..., -1:]
        yield bounded(TOPIC, "parts add up to at most B_i", name, bound=row, measured=found)
        yield estimated(
            TOPIC,
            f"parts of the last row add up to {reached:g} B_i",
            name,
            predicted=reached * float(row.max()),
            measured=float(found.max()),
            within=0.02,
        )
        yield bounded(
            TOPIC,
            "magnitude of an integer sum, in units",
            name,
            bound=largest_sum(sums.attended),
            measured=sums.integers.abs().amax(-1),
        )


def _sums(name: str, all_sums: list[Sums]) -> Iterator[Check]:
    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([x.flatten() for x in parts])

    yield bounded(
        TOPIC,
        "sum of the magnitudes of the parts <= B_i",
        name,
        bound=joined([s.bound for s in all_sums]),
        measured=joined([s.magnitudes for s in all_sums]),
    )
    yield bounded(
        TOPIC,
        "magnitude of an integer sum, in units",
        name,
        bound=joined([largest_sum(s.attended) for s in all_sums]),
        measured=joined([s.integers.abs().amax(-1) for s in all_sums]),
    )
    yield bounded(
        TOPIC,
        "error of an integer sum <= u_i / 2 for each key block",
        name,
        bound=joined([s.error_bound.expand_as(s.error) for s in all_sums]),
        measured=joined([s.error.abs() for s in all_sums]),
    )
    yield bounded(
        TOPIC,
        "the same <= 2^-30 b max |K| for each key block",
        name,
        bound=joined([s.loss_bound.expand_as(s.error) for s in all_sums]),
        measured=joined([s.error.abs() for s in all_sums]),
    )
    predicted = joined([s.expected for s in all_sums])
    error = joined([s.error for s in all_sums])
    yield estimated(
        TOPIC,
        "RMS error of the integer sums = u_i sqrt(key blocks / 12)",
        name,
        predicted=_rms(predicted),
        measured=_rms(error),
        within=0.10,
    )
    for dtype, word in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        places = [s.last_place(dtype) for s in all_sums]
        yield estimated(
            TOPIC,
            f"the same in units of the last place of {word}, at the RMS of dQ",
            name,
            predicted=_rms(joined([s.expected / u for s, u in zip(all_sums, places, strict=True)])),
            measured=_rms(joined([s.error / u for s, u in zip(all_sums, places, strict=True)])),
            within=0.10,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums of dQ of a sample as integers, from the operands of the emulator's dQ."""

    bound: Tensor  #: B_i, [..., n_q]
    unit: Tensor  #: u_i, [..., n_q]
    loss: Tensor  #: `loss_bound`, [..., n_q]
    attended: Tensor  #: the key blocks with a key that the row attends to, [..., n_q]
    magnitudes: Tensor  #: sum_J |part_J| of the channel with the largest, [..., n_q]
    exact: Tensor  #: the sums of the parts, before the logit scale, [..., n_q, d]
    integers: Tensor  #: the sums in units, int64 [..., n_q, d]
    inexact: Tensor  #: the number of parts that are not 0, [..., n_q, d]
    in_float32: Tensor  #: the float32 sum of the parts in the order of the keys, [..., n_q, d]

    @classmethod
    def of(cls, sample: Sample, spec: AttentionSpec) -> Sums:
        """The sums of a sample with one query head for each key head, and a logit scale of d^-1/2.

        Parts are products of rounded operands in float64. Each is rounded to the nearest multiple
        of the row's unit, ties to even.
        """
        trace = sample.trace(spec)
        ds_sum = ds_bound_of(sample, trace)
        k = operand(sample, trace, "dq", "k")
        k_max = k_bound(k, sample.attends)
        bound, units = ds_sum * k_max, unit(ds_sum, k_max, floor=floor_of(ds_sum, sample, trace))
        sums = [torch.zeros_like(sample.q, dtype=torch.float64) for _ in range(4)]
        maps = (operand(sample, trace, "dq", "ds"), sample.attends.expand(trace.ds.shape))
        attended = torch.zeros_like(bound)
        in_float32 = torch.zeros_like(sample.q, dtype=torch.float32)
        for ds, attends, keys in zip(
            *(x.split(spec.block_k, -1) for x in maps), k.split(spec.block_k, -2), strict=True
        ):
            part = ds @ keys
            whole = (part / units[..., None]).round()
            for total, x in zip(sums, (part, part.abs(), whole, part != 0), strict=True):
                total += x
            attended += attends.any(-1)
            in_float32 += part.float()
        exact, magnitudes, integers, inexact = sums
        return cls(
            bound=bound,
            unit=units,
            loss=loss_bound(ds_sum, k_max, attended),
            attended=attended,
            magnitudes=magnitudes.amax(-1),
            exact=exact,
            integers=integers.long(),
            inexact=inexact,
            in_float32=in_float32,
        )

    @property
    def error(self) -> Tensor:
        """The error of the integer sums, [..., n_q, d]."""
        return self.integers * self.unit[..., None] - self.exact

    @property
    def float32_error(self) -> Tensor:
        """The error of the float32 sum, for comparison, [..., n_q, d]."""
        return self.in_float32.double() - self.exact

    @property
    def error_bound(self) -> Tensor:
        """`error_bound` with float64's error, [..., n_q, 1]."""
        float64 = 2.0**-50 * self.magnitudes
        return (error_bound(self.unit, self.attended) + float64)[..., None]

    @property
    def loss_bound(self) -> Tensor:
        """`loss_bound` with float64's error, [..., n_q, 1]."""
        return (self.loss + 2.0**-50 * self.magnitudes)[..., None]

    @property
    def expected(self) -> Tensor:
        """`expected_error`, [..., n_q, d]."""
        return expected_error(self.unit[..., None], self.inexact)

    def last_place(self, dtype: torch.dtype) -> Tensor:
        """A unit in the last place of the RMS of dQ, for the whole head."""
        return last_place(self.exact.square().mean((-2, -1), keepdim=True).sqrt(), dtype)


def ds_bound_of(sample: Sample, trace: Trace) -> Tensor:
    """B_i / max |K| of a sample, from the operands of its emulation."""
    spec = trace.spec
    in_16_bit = not spec.qk_recompute.precision.is_scaled
    has_sums = spec.qk != spec.qk_recompute
    return ds_bound(
        v=operand(sample, trace, "dp", "v"),
        do=operand(sample, trace, "dp", "do"),
        delta=trace.delta,
        p_bound=p_bound(
            smoothed_lse(sample, trace),
            sample.attends,
            p_sums=trace.p_recompute.double().sum(-1) if has_sums else None,
            q=operand(sample, trace, "qk_recompute", "q") if in_16_bit else None,
            k=operand(sample, trace, "qk_recompute", "k") if in_16_bit else None,
            scale=sample.q.shape[-1] ** -0.5,
        ),
        attends=sample.attends,
        growth=growth(spec.dq, spec.rounding.mode, spec.block_k),
        block_q=spec.block_q,
    )


def floor_of(ds_sum: Tensor, sample: Sample, trace: Trace) -> Tensor | None:
    """`code_floor` of a sample; None if dQ is a product of 16-bit numbers."""
    spec = trace.spec
    if not spec.dq.precision.is_scaled:
        return None
    return code_floor(
        ds_sum,
        operand(sample, trace, "dq", "k"),
        sample.attends,
        per_tile=spec.dq.lhs is Granularity.PerTile,
        block_q=spec.block_q,
        block_k=spec.block_k,
    )


def smoothed_lse(sample: Sample, trace: Trace) -> Tensor:
    """L of the logits of the smoothed K; `trace.lse` includes the constant that smoothing took."""
    if not trace.spec.smoothing.k:
        return trace.lse
    keys = sample.k.double()[..., sample.attends.any(-2), :]
    constant = (sample.q.double() * keys.mean(-2, keepdim=True)).sum(-1)
    return trace.lse - constant * sample.q.shape[-1] ** -0.5


def operand(sample: Sample, trace: Trace, site: str, tensor: str) -> Tensor:
    """An operand as a site multiplies it, float64: "ds", or an input that is not smoothed."""
    codes = trace.operands.get(f"{site}.{tensor}")
    if codes is not None:
        return codes.codes.double() * codes.scale.double()
    x = trace.ds if tensor == "ds" else getattr(sample, tensor)
    assert isinstance(x, Tensor)
    spec = resolve_input16(trace.spec, sample.q.dtype)
    is_bf16 = spec.site(site).precision is Precision.BF16
    return (x.bfloat16() if is_bf16 else x.half()).double()


def aligned(tokens: int = _TOKENS, d: int = 64, *, v: float = 1.0, do: float = 1.0) -> Sample:
    """Every part has one sign, and every dP its largest magnitude: B_i / g is reached.

    Q is 0, so P is uniform. Half of the values are v, the others -v, in every channel. So delta is
    0 and |dP_ij| = |dO_i| |V_j|. K has the sign of V.
    Its size makes (1 + 2^-6) B_i a little less than a power of two, so that the unit is as small
    as it can be for B_i.
    """
    sign = torch.ones(1, 1, tokens, d)
    sign[..., 1::2, :] = -1
    return Sample(
        name=f"aligned signs, N {tokens}, d {d}",
        q=torch.zeros_like(sign),
        k=1.94 * sign,
        v=v * sign,
        do=torch.full_like(sign, do),
    )


def subnormal(tokens: int = _TOKENS, d: int = 64) -> Sample:
    """`aligned`, and every dS is a little more than 2^-25, which FP16 doubles."""
    x = aligned(tokens, d, v=2.0**-12, do=1.002 * 2.0**-13 * tokens / d)
    return replace(x, name=f"{x.name}, subnormal dS")


def doubled(tokens: int = _TOKENS, d: int = 64) -> Sample:
    """`aligned`, and rounding dS to nearest doubles it, with one scale for each tile.

    The first row of each block of dO is 253 times larger than the others. Their dS are then a
    little more than half a code, and become a code.
    """
    x = aligned(tokens, d)
    do = x.do.clone()
    do[..., ::64, :] *= 253
    return replace(x, name=f"{x.name}, dS of half a code", do=do)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
