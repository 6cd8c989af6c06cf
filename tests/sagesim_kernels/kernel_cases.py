"""Random attention calls that the kernels support, for the fuzz tests."""

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
    FP8_GRADIENTS,
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
from sagesim.spec import OPERANDS, with_precision
from sagesim_kernels import supports
from tests.support.inputs import EXTREME, MODERATE, Builder, Case, gaussian
from tests.support.kernels import DEVICE

PRESETS: dict[str, AttentionSpec] = {
    "sagebwd": SAGEBWD,
    "sagebwd_all_int8": SAGEBWD_ALL_INT8,
    "sage_forward": SAGE_FORWARD,
    "factored": FACTORED,
    "factored_pv16": FACTORED_PV16,
    "factored_qk": FACTORED_QK,
    "causal_safe": CAUSAL_SAFE,
    "fpa_fp16": FPA_FP16,
    "fp8_gradients": FP8_GRADIENTS,
}
"""The presets from which random specs are derived."""


def large(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Gaussian, times 1024; if Q and K are both of this kind, logits reach millions."""
    return gaussian(rng, shape) * np.float32(2.0**10)


KINDS: dict[str, Builder] = {
    name: build for name, build in EXTREME.items() if name != "huge_gain"
} | {"large": large}

ORDINARY = frozenset({"gaussian", "outlier_channel", "zero_block"})
"""The kinds of input for which differing codes of P and dS are counted. Their logits are as small
as in training, their values are not placed on ties, and dP varies over keys, so that dS is not
noise."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYOUTS = ("contiguous", "tokens_first", "sliced", "heads_last")
SHORT = (1, 2, 7, 15, 16, 17, 23, 31, 32, 33, 40, 47, 50, 60, 63, 64)
LENGTHS = SHORT * 3 + (65, 80, 96, 127, 128, 129, 150)
HEAD_SIZES = (1, 8, 16, 16, 40, 64, 64, 72, 80, 96, 128)
HEADS = ((1, 1, 1),) * 24 + ((1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2))
"""Batch, heads of k and v, query heads for each."""
LENGTHS_OF_KEYS = {"int32 lengths": torch.int32, "int64 lengths": torch.int64}
"""Paddings that kernels get as `seqused_k`, and its dtype."""
PADDINGS = ("none", "none", "none", "none", "random", "right", "left", *LENGTHS_OF_KEYS)
SIDES = (-1, -1, 0, 1, 5, 16, 31, 32, 40, 64, 100)
"""Keys of a window on one side; -1: no limit."""
SOFTCAPS = (None, None, None, 0.5, 5.0, 50.0)
SCALES = (None, None, None, None, 0.03, 1.0, -0.3, 0.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class KernelCase:
    """A random attention call. Evaluating its repr gives an equal case.

    Constructing one does not call the package: its checked signatures draw random numbers, and
    hypothesis forbids that in a strategy.
    """

    spec: AttentionSpec | str  #: a spec or its label
    n_q: int
    n_k: int
    d: int
    d_v: int
    heads: tuple[int, int, int]
    kinds: tuple[str, str, str, str]
    dtype: str = "float32"
    is_causal: bool = False
    causal_alignment: str = "upper_left"
    window: tuple[int, int] = (-1, -1)
    padding: str = "none"  #: of keys: one of `PADDINGS`
    has_sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    layout: str = "contiguous"
    do_layout: str = "contiguous"
    seed: int = 0

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["spec"] = self.parsed.label()
        return f"KernelCase({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the repr in reports of hypothesis."""
        printer.text(repr(self))

    @cached_property
    def parsed(self) -> AttentionSpec:
        return AttentionSpec.parse(self.spec) if isinstance(self.spec, str) else self.spec

    @property
    def is_ordinary(self) -> bool:
        if self.do_layout == "expanded" and "zero_block" in self.kinds:
            return False  # rows repeat, so that one code at a tie would be counted many times
        return ORDINARY.issuperset(self.kinds) and self.scale in (None, 0.03)

    @cached_property
    def case(self) -> Case:
        """The tensors and options, on the device of the kernels."""
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
        seqused_k = None
        if self.padding in LENGTHS_OF_KEYS:
            dtype = LENGTHS_OF_KEYS[self.padding]
            seqused_k = _lengths(rng, batch, self.n_k).to(DEVICE, dtype)
            key_mask = torch.arange(self.n_k, device=DEVICE) < seqused_k[:, None]
        else:
            key_mask = _key_mask(rng, self.padding, batch, self.n_k)
        if key_mask is not None:
            is_padding = ~key_mask[:, None, :, None].cpu()
            k, v = (x.masked_fill(is_padding, float("nan")) for x in (k, v))
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
            causal_alignment=self.causal_alignment,
            window=self.window,
            key_mask=key_mask,
            seqused_k=seqused_k,
            sinks=(
                torch.from_numpy(gaussian(rng, (kv_heads * groups,)) * np.float32(3.0)).to(DEVICE)
                if self.has_sinks
                else None
            ),
            softcap=self.softcap,
            scale=self.scale,
            enable_gqa=groups > 1,
            kinds=self.kinds,
        )


def low_logits(d: int, n: int) -> Case:
    """A case with a random key mask, in bfloat16, whose logits are all near -50 sqrt(d).

    So exp(0 - L) overflows: P of a padded key whose K is stored as 0, if nothing masks it. The K
    must not be smoothed: a row's mean logit would be 0.
    """
    rng = np.random.default_rng(d)
    q, k, v, do = (
        torch.from_numpy(gaussian(rng, (2, 2, n, d))).to(DEVICE, torch.bfloat16) for _ in range(4)
    )
    mask = _key_mask(rng, "random", 2, n)
    return Case(q=7 + q / 8, k=k / 8 - 7, v=v, do=do, key_mask=mask, kinds=("low logits",))


def _lengths(rng: np.random.Generator, batch: int, n_k: int) -> Tensor:
    """Return lengths of sequences of keys: no key, one, all but one, all, or any number."""
    often = np.array([0, 1, n_k - 1, n_k])
    uniform = rng.integers(0, n_k + 1, batch)
    return torch.from_numpy(np.where(rng.random(batch) < 0.5, rng.choice(often, batch), uniform))


def _key_mask(rng: np.random.Generator, padding: str, batch: int, n_k: int) -> Tensor | None:
    """Return a mask of keys, bool [batch, n_k]; a sequence may be all padding."""
    if padding == "none":
        return None
    if padding == "random":
        mask = rng.random((batch, n_k)) < rng.choice((0.3, 0.9))
    else:
        mask = np.arange(n_k) < rng.integers(0, n_k + 1, (batch, 1))
    if padding == "left":
        mask = mask[:, ::-1].copy()
    return torch.from_numpy(mask).to(DEVICE)


def _gain_within_half(do: Tensor, v: Tensor) -> float:
    """Return a power of two that keeps dS in FP16's range: |dP - delta| is at most 2 max |dP|."""
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
        for lhs, rhs in itertools.product(*(Granularity.of(site, x) for x in OPERANDS[site]))
        for precision in (Precision.INT8, Precision.FP8_E4M3, Precision.FP8_E5M2)
        for matmul in [MatmulSpec(precision, lhs, rhs)]
        if supports(replace(SAGEBWD, **{site: matmul}))
    ]
    for site in SITES
}
"""Every format of codes of each product that the kernels support."""

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
    """The preset, with random parts replaced by others that the kernels support."""
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
    return spec if supports(spec) else replace(spec, block_q=128)  # 256 does not fit all formats


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
    ({}, 128, 128, "bfloat16", (1, 2)),  # the kernels for mma.sync and for Hopper need blocks of 64
    ({}, 96, 80, "float16", (1, 1)),
)
"""On a GPU, where every new combination is compiled: changes to the preset, d, d_v, dtype, heads of
k and v, and query heads for each. On a CPU these are drawn freely."""


@st.composite
def problems(draw: st.DrawFn, preset: AttentionSpec) -> KernelCase:
    """A random attention call, with a random variation of the preset."""
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
    numbers, extras = draw(_numbers(spec)), draw(_extras())
    if extras.get("padding", "none") != "none" and draw(st.booleans()):
        heads = (2, *heads[1:])  # two sequences have different padding
    return KernelCase(
        spec=spec,
        n_q=draw(st.sampled_from(LENGTHS)),
        n_k=draw(st.sampled_from(LENGTHS)),
        d=d,
        d_v=d_v,
        heads=heads,
        dtype=dtype,
        is_causal=draw(st.booleans()),
        causal_alignment=draw(st.sampled_from(("upper_left", "lower_right"))),
        **extras,
        layout=draw(st.sampled_from(LAYOUTS)),
        do_layout=draw(st.sampled_from((*LAYOUTS, "expanded"))),
        **numbers,
    )


@st.composite
def _extras(draw: st.DrawFn) -> dict[str, Any]:
    """Window, padding, sinks and softcap of a case; half of the cases have none of them."""
    if draw(st.booleans()):
        return {}
    side = st.sampled_from(SIDES)
    return {
        "window": (draw(side), draw(side)),
        "padding": draw(st.sampled_from(PADDINGS)),
        "has_sinks": draw(st.booleans()),
        "softcap": draw(st.sampled_from(SOFTCAPS)),
    }


def _compiled_for(length: int) -> tuple[int, bool, bool]:
    return length % 16, length == 1, length <= 64


class Alike(tuple[KernelCase, ...]):
    """Cases that share one compilation of the kernels.

    Hypothesis refuses to print more than 30,000 characters, and this hides why a test failed.
    """

    def __repr__(self) -> str:
        return f"{len(self)} cases like {self[0]!r}"


@st.composite
def alike(draw: st.DrawFn, preset: AttentionSpec, count: int) -> Alike:
    """Cases that share one compilation of the kernels.

    They differ in values, and in lengths to which Triton gives the same specialization: the same
    remainder by 16, and all or none of them one token, or one block.
    """
    first = draw(problems(preset))
    n_q, n_k = (
        st.sampled_from([m for m in LENGTHS if _compiled_for(m) == _compiled_for(n)])
        for n in (first.n_q, first.n_k)
    )
    others = [
        replace(first, n_q=draw(n_q), n_k=draw(n_k), **draw(_numbers(first.parsed)))
        for _ in range(count - 1)
    ]
    return Alike((first, *others))


@st.composite
def _numbers(draw: st.DrawFn, spec: AttentionSpec) -> dict[str, Any]:
    """The values of a case: kinds, scale and seed."""
    # If qk and qk_recompute round differently, exp(S - L) is bounded only for bounded logits.
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
