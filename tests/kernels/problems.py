"""What the fuzz tests draw: any attention that the kernels compute."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from sagesim import (
    CAUSAL_SAFE,
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    FPA_FP16,
    HALF_AWAY,
    HALF_EVEN,
    SAGE_FORWARD,
    SAGEBWD,
    SAGEBWD_ALL_INT8,
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    Smoothing,
)
from sagesim.presets import with_precision
from sagesim_kernels import supports
from tests.support.inputs import EXTREME, MODERATE, Builder, Case, gaussian
from tests.support.kernels import BF16, DEVICE

PRESETS: dict[str, AttentionSpec] = {
    "sagebwd": SAGEBWD,
    "sagebwd_all_int8": SAGEBWD_ALL_INT8,
    "sage_forward": SAGE_FORWARD,
    "factored": FACTORED,
    "factored_pv16": FACTORED_PV16,
    "factored_qk": FACTORED_QK,
    "causal_safe": CAUSAL_SAFE,
    "fpa_fp16": FPA_FP16,
}
"""What specs are variations of."""


def large(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A thousand times the usual; logits in the millions if Q and K are."""
    return gaussian(rng, shape) * np.float32(2.0**10)


KINDS: dict[str, Builder] = {
    name: build for name, build in EXTREME.items() if name != "huge_gain"
} | {"large": large}

ORDINARY = frozenset({"gaussian", "outlier_channel", "zero_block"})
"""Kinds over which codes of P and dS are counted: no logits beyond what training sees, no values
put on ties on purpose, and no V that makes dP the same for all keys, and dS nothing but noise."""

DTYPES = {"float32": torch.float32, "float16": torch.float16} | (
    {"bfloat16": torch.bfloat16} if BF16 else {}
)
LAYOUTS = ("contiguous", "tokens_first", "sliced", "heads_last")
SHORT = (1, 2, 7, 15, 16, 17, 23, 31, 32, 33, 40, 47, 50, 60, 63, 64)
LENGTHS = SHORT * 3 + (65, 80, 96, 127, 128, 129, 150)
HEAD_SIZES = (1, 8, 16, 16, 40, 64, 64, 72, 80, 96, 128)
HEADS = ((1, 1, 1),) * 24 + ((1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2))
"""Batch, heads of k and v, query heads for each."""
SCALES = (None, None, None, None, 0.03, 1.0, -0.3, 0.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class Problem:
    """One attention. Its repr makes it again.

    Made without calling the package: its checked signatures draw random numbers, which hypothesis
    allows no strategy to do.
    """

    spec: AttentionSpec | str  #: or its label
    n_q: int
    n_k: int
    d: int
    d_v: int
    heads: tuple[int, int, int]
    kinds: tuple[str, str, str, str]
    dtype: str = "float32"
    is_causal: bool = False
    causal_alignment: str = "upper_left"
    scale: float | None = None
    layout: str = "contiguous"
    do_layout: str = "contiguous"
    seed: int = 0

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["spec"] = self.parsed.label()
        return f"Problem({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints."""
        printer.text(repr(self))

    @cached_property
    def parsed(self) -> AttentionSpec:
        return AttentionSpec.parse(self.spec) if isinstance(self.spec, str) else self.spec

    @property
    def is_ordinary(self) -> bool:
        if self.do_layout == "expanded" and "zero_block" in self.kinds:
            return False  # whole rows repeat, and one code at a tie would count as many
        return ORDINARY.issuperset(self.kinds) and self.scale in (None, 0.03)

    @cached_property
    def case(self) -> Case:
        """On the kernels' device."""
        rng = np.random.default_rng(self.seed)
        batch, kv_heads, groups = self.heads
        shapes = (
            (batch, kv_heads * groups, self.n_q, self.d),
            (batch, kv_heads, self.n_k, self.d),
            (batch, kv_heads, self.n_k, self.d_v),
            (batch, kv_heads * groups, self.n_q, self.d_v),
        )
        q, k, v, do = (
            torch.from_numpy(KINDS[kind](rng, shape))
            for kind, shape in zip(self.kinds, shapes, strict=True)
        )
        if self.do_layout == "expanded":
            do = do.flatten()[:1].expand(do.shape)
        if any(self.parsed.site(s).precision is not Precision.INT8 for s in ("dq", "dk")):
            do = do * _gain_within_half(do, v.repeat_interleave(groups, 1))
        dtype = DTYPES[self.dtype]
        layouts = (self.layout,) * 3 + (self.do_layout,)
        q, k, v, do = (
            _lay_out(x.to(dtype).to(DEVICE), layout)
            for x, layout in zip((q, k, v, do), layouts, strict=True)
        )
        return Case(
            q=q,
            k=k,
            v=v,
            do=do,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=groups > 1,
            kinds=self.kinds,
        )


def _gain_within_half(do: Tensor, v: Tensor) -> float:
    """A power of two that keeps dS within FP16: |dP - delta| is at most about twice max |dP|."""
    largest = 4 * float((do.abs() @ v.abs().mT).max())
    return 2.0 ** min(0.0, np.floor(np.log2(3e4 / largest))) if largest > 0 else 1.0


def _lay_out(x: Tensor, layout: str) -> Tensor:
    match layout:
        case "tokens_first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "heads_last":
            return x.movedim(1, -1).contiguous().movedim(-1, 1)
        case "sliced":
            b, h, n, d = x.shape
            out = x.new_full((b, h + 1, n + 2, 2 * d + 3), float("nan"))[:, 1:, 1:-1, 3::2]
            return out.copy_(x)
        case "expanded":
            return x[:1, :1, :1, :1].expand(x.shape)
        case _:
            return x.contiguous()


MATMULS: dict[str, list[MatmulSpec]] = {
    site: [
        matmul
        for lhs, rhs in itertools.product(Granularity, Granularity)
        if lhs.is_map == SAGEBWD.site(site).lhs.is_map and not rhs.is_map
        for matmul in [MatmulSpec(Precision.INT8, lhs, rhs)]
        if supports(replace(SAGEBWD, **{site: matmul}))
    ]
    for site in SITES
}
"""Every INT8 product that there are kernels for."""

UNSCALED = tuple(
    p
    for p in (Precision.INPUT16, Precision.FP16, Precision.BF16)
    if supports(with_precision(SAGEBWD, p, "dp"))
)


seeds = st.integers(0, 2**32 - 1)
roundings = st.one_of(st.just(HALF_EVEN), st.just(HALF_AWAY), seeds.map(Rounding.stochastic))
smoothings = st.builds(Smoothing, q=st.booleans(), k=st.booleans())


@st.composite
def matmuls(draw: st.DrawFn, site: str) -> MatmulSpec:
    matmul = draw(st.sampled_from(MATMULS[site]))
    if draw(st.integers(0, 2)) == 0:
        matmul = replace(matmul, precision=draw(st.sampled_from(UNSCALED)))
    return matmul


@st.composite
def specs(draw: st.DrawFn, preset: AttentionSpec) -> AttentionSpec:
    """The preset with any part replaced by anything that the kernels support."""
    spec = preset
    sites = draw(st.lists(st.sampled_from(SITES), unique=True, max_size=4))
    spec = replace(spec, **{site: draw(matmuls(site)) for site in sites})
    if draw(st.integers(0, 7)):
        spec = replace(spec, qk_recompute=spec.qk)
    if draw(st.booleans()):
        spec = replace(spec, smoothing=draw(smoothings), rounding=draw(roundings))
    if draw(st.booleans()):
        block_q, block_k = (draw(st.sampled_from((32, 64, 128))) for _ in range(2))
        spec = replace(spec, block_q=block_q, block_k=block_k)
    if draw(st.integers(0, 3)) == 0:
        spec = replace(spec, delta=draw(st.sampled_from(Delta)))
    return spec


_Q_SMOOTHED = {
    "smoothing": Smoothing(q=True, k=True),
    "rounding": HALF_AWAY,
    "block_q": 128,
    "block_k": 32,
}
COMPILED: tuple[tuple[dict[str, Any], int, int, str, tuple[int, int]], ...] = (
    ({}, 64, 64, "bfloat16", (1, 1)),
    (_Q_SMOOTHED, 80, 40, "float16", (1, 2)),
    ({"block_q": 32}, 128, 128, "float32", (2, 1)),
)
"""What kernels are compiled for, on a GPU: changes to the preset, d, d_v, dtype, and heads of k and
v with query heads for each. On a CPU nothing is compiled, and anything goes."""


@st.composite
def problems(draw: st.DrawFn, preset: AttentionSpec) -> Problem:
    """Any attention under a variation of the preset."""
    if DEVICE == "cuda":
        changes, d, d_v, dtype, heads = draw(st.sampled_from(COMPILED))
        spec = replace(preset, **changes)
        heads = (draw(st.integers(1, 2)), *heads)
        if spec.rounding.seed is None and draw(st.booleans()):
            spec = replace(spec, rounding=draw(roundings))
    else:
        spec = draw(specs(preset))
        d = draw(st.sampled_from(HEAD_SIZES))
        if draw(st.integers(0, 30)) == 17:  # not the first number that hypothesis tries
            d = 256
        d_v = draw(st.sampled_from(HEAD_SIZES)) if draw(st.integers(0, 2)) == 0 else d
        heads = draw(st.sampled_from(HEADS))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
    numbers = draw(_numbers(spec))
    return Problem(
        spec=spec,
        n_q=draw(st.sampled_from(LENGTHS)),
        n_k=draw(st.sampled_from(LENGTHS)),
        d=d,
        d_v=d_v,
        heads=heads,
        dtype=dtype,
        is_causal=draw(st.booleans()),
        causal_alignment=draw(st.sampled_from(("upper_left", "lower_right"))),
        layout=draw(st.sampled_from(LAYOUTS)),
        do_layout=draw(st.sampled_from((*LAYOUTS, "expanded"))),
        **numbers,
    )


def _compiled_for(length: int) -> tuple[int, bool, bool]:
    return length % 16, length == 1, length <= 64


@st.composite
def alike(draw: st.DrawFn, preset: AttentionSpec, count: int) -> list[Problem]:
    """Problems for which kernels are compiled once: they differ in their numbers, and in lengths as
    far from a multiple of 16, and all or none of them one token, or one block."""
    first = draw(problems(preset))
    n_q, n_k = (
        st.sampled_from([m for m in LENGTHS if _compiled_for(m) == _compiled_for(n)])
        for n in (first.n_q, first.n_k)
    )
    others = [
        replace(first, n_q=draw(n_q), n_k=draw(n_k), **draw(_numbers(first.parsed)))
        for _ in range(count - 1)
    ]
    return [first, *others]


@st.composite
def _numbers(draw: st.DrawFn, spec: AttentionSpec) -> dict[str, Any]:
    """What a problem is filled with."""
    # exp(S - L) of two different roundings is only bounded where logits are.
    is_wild = spec.qk == spec.qk_recompute
    anything = sorted(KINDS if is_wild else MODERATE)
    kind = st.sampled_from(
        draw(st.sampled_from((["gaussian"], sorted(ORDINARY & set(anything)), anything)))
    )
    return {
        "kinds": (draw(kind), draw(kind), draw(kind), draw(kind)),
        "scale": draw(st.sampled_from(SCALES)) if is_wild else None,
        "seed": draw(seeds),
    }
