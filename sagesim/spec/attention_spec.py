"""What to compute: the precision, scales, smoothing and rounding of the seven matrix products.

A spec is plain data. This module imports neither torch nor other modules of the package, so that
the kernels, the emulator and the command line can all use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

SITES: Final = ("qk", "pv", "qk_recompute", "dv", "dp", "dq", "dk")
"""The sites: the seven matrix products of attention, in the order in which they run.

The forward computes qk and pv, the backward the other five.
"""

FORWARD_SITES: Final = SITES[:2]
"""The sites of the forward: qk and pv."""

OPERANDS: Final = {
    "qk": ("q", "k"),
    "pv": ("p", "v"),
    "qk_recompute": ("q", "k"),
    "dv": ("p", "do"),
    "dp": ("do", "v"),
    "dq": ("ds", "k"),
    "dk": ("ds", "q"),
}
"""The left and the right tensor of each site. dv and dk use the transpose of the left tensor."""

MAPS: Final = frozenset({"p", "ds"})
"""Operands with one row per query and one column per key. The others have one row per token."""


class Precision(StrEnum):
    """The number format to which both operands of a product are rounded."""

    INT8 = "int8"  #: integers -127..127 times a scale; products summed exactly in INT32
    FP8_E4M3 = "fp8_e4m3"  #: 3 mantissa bits, largest value 448, times a scale
    FP8_E5M2 = "fp8_e5m2"  #: 2 mantissa bits, largest value 57344, times a scale
    FP16 = "fp16"  #: IEEE half precision, no scale
    BF16 = "bf16"  #: bfloat16, no scale
    INPUT16 = "input16"
    """The inputs' dtype if it has 16 bit, no scale. For other inputs, FP16 in QK and its
    recomputation, and BF16 in the other products."""
    FP32 = "fp32"  #: no rounding at all (float64 inputs stay float64)

    @property
    def is_scaled(self) -> bool:
        """Whether operands are divided by a scale before they are rounded.

        A granularity has an effect only if they are.
        """
        return self in (Precision.INT8, Precision.FP8_E4M3, Precision.FP8_E5M2)


class Granularity(StrEnum):
    """Which elements of an operand share one scale. The spec gives the block sizes.

    The first five apply to operands with tokens (q, k, v, do), the last five to maps (p, ds). The
    rows of a map are queries and its columns are keys, also at sites that multiply its transpose.

    Only `PerRowBound` does not depend on the elements of the map: its scale follows from a bound on
    the row that is known before the row is computed. Not for pv: the forward knows no such bound.
    """

    PerHead = "head"  #: one scale for all tokens and channels of a head
    PerBlock = "block"  #: one per block of tokens
    PerToken = "token"  #: one per token
    PerChannel = "channel"  #: one per channel of a head
    PerBlockChannel = "block_channel"  #: one per channel and block of tokens
    PerTile = "tile"  #: one per block_q x block_k tile
    PerTileRow = "tile_row"  #: one per query row of a tile
    PerTileColumn = "tile_column"  #: one per key column of a tile
    PerRow = "row"  #: one per query row over all keys
    PerRowBound = "row_bound"  #: one per query row, from a bound on the row instead of its elements

    @property
    def is_map(self) -> bool:
        """Whether this is a granularity of maps (p, ds), not of operands with tokens."""
        return self in (
            Granularity.PerTile,
            Granularity.PerTileRow,
            Granularity.PerTileColumn,
            Granularity.PerRow,
            Granularity.PerRowBound,
        )

    @classmethod
    @cache
    def of(cls, site: str, tensor: str) -> tuple[Granularity, ...]:
        """The granularities that fit a tensor as an operand of one of `SITES`."""
        return tuple(
            g
            for g in cls
            if g.is_map == (tensor in MAPS) and (site != "pv" or g is not cls.PerRowBound)
        )


class Delta(StrEnum):
    """How delta in dS = P o (dP - delta) is computed; delta has one number per query."""

    FROM_O = "o"  #: rowsum(dO o O) with the O that the forward returned, as in the paper
    FROM_P = "p"  #: rowsum(P o dP) with the backward's own P and dP, so that rows of dS sum to 0


def _check_type(owner: str, name: str, value: object, kind: type) -> None:
    """Raise TypeError if a field's value is not of this type. True and False are no integers.

    A StrEnum member equals its string, but code that compares members with `is` would take the
    string for another member.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        needed = {bool: "True or False", int: "an integer"}.get(kind, f"a {kind.__name__}")
        raise TypeError(f"{owner}: {name} is {value!r}, not {needed}")


class RoundingMode(StrEnum):
    """How a value between two codes of a scaled format is rounded."""

    HALF_EVEN = "half_even"  #: to nearest, ties to the even code
    HALF_AWAY = "half_away"  #: to nearest, ties away from zero (SageAttention's)
    STOCHASTIC = "stochastic"  #: up with probability equal to the distance from the code below


@dataclass(frozen=True, slots=True)
class Rounding:
    """How operands are rounded to INT8 and FP8 codes. STOCHASTIC needs a seed.

    16-bit formats always round half-even, as hardware conversions do.

    Raises:
        TypeError: if mode is not a RoundingMode, or seed neither an int nor None.
        ValueError: if STOCHASTIC has no seed, another mode has one, or it is not a 32-bit number.
    """

    mode: RoundingMode
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_type("Rounding", "mode", self.mode, RoundingMode)
        if self.seed is not None:
            _check_type("Rounding", "seed", self.seed, int)
        if (self.mode is RoundingMode.STOCHASTIC) != (self.seed is not None):
            raise ValueError(
                f"rounding {self.mode.value} with seed={self.seed}: "
                "stochastic rounding needs a seed, the other modes take none"
            )
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"rounding seed {self.seed} is outside 0..2**32-1")

    @classmethod
    def stochastic(cls, seed: int) -> Rounding:
        """Stochastic rounding. The seed and an element's position give its random number."""
        return cls(RoundingMode.STOCHASTIC, seed)


HALF_EVEN: Final = Rounding(RoundingMode.HALF_EVEN)
HALF_AWAY: Final = Rounding(RoundingMode.HALF_AWAY)


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Which means are subtracted before Q and K are rounded.

    q: the mean of each block of queries, added back as a rank-one term.
    k: the mean of all keys of a head. P does not change.

    Raises:
        TypeError: if one is not True or False.
    """

    q: bool = False
    k: bool = False

    def __post_init__(self) -> None:
        _check_type("Smoothing", "q", self.q, bool)
        _check_type("Smoothing", "k", self.k, bool)


@dataclass(frozen=True, slots=True)
class MatmulSpec:
    """One product: its precision, and the granularities of its left and its right operand.

    Granularities have an effect only if the precision is scaled (INT8, FP8). They are always set,
    so that changing one field switches a site to INT8.
    """

    precision: Precision
    lhs: Granularity
    rhs: Granularity

    def __post_init__(self) -> None:
        _check_type("MatmulSpec", "precision", self.precision, Precision)
        _check_type("MatmulSpec", "lhs", self.lhs, Granularity)
        _check_type("MatmulSpec", "rhs", self.rhs, Granularity)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The numerics of one attention, forward and backward: one `MatmulSpec` for each of `SITES`.

    qk_recompute may be rounded differently from qk. P = exp(S - L) in the backward then combines S
    of one rounding with L of another: its rows do not sum to 1, and it may overflow if logits are
    in the tens of thousands.

    To change a field, use `dataclasses.replace(SAGEBWD, dp=...)` or a label:

    >>> AttentionSpec.parse("sagebwd dp=int8 dq=fp16").label()
    'sagebwd_all_int8 dq=fp16'

    Raises:
        ValueError: if a granularity does not fit its tensor, or a block size is not a positive
            integer.
        TypeError: if a field has another type, such as a string instead of an enum member.
    """

    qk: MatmulSpec
    pv: MatmulSpec
    qk_recompute: MatmulSpec
    dv: MatmulSpec
    dp: MatmulSpec
    dq: MatmulSpec
    dk: MatmulSpec
    smoothing: Smoothing = Smoothing(k=True)
    rounding: Rounding = HALF_EVEN
    delta: Delta = Delta.FROM_O
    block_q: int = 64
    block_k: int = 64

    def __post_init__(self) -> None:
        _check_type("AttentionSpec", "smoothing", self.smoothing, Smoothing)
        _check_type("AttentionSpec", "rounding", self.rounding, Rounding)
        _check_type("AttentionSpec", "delta", self.delta, Delta)
        for site in SITES:
            matmul = self.site(site)
            _check_type("AttentionSpec", site, matmul, MatmulSpec)
            for tensor, granularity in zip(OPERANDS[site], (matmul.lhs, matmul.rhs), strict=True):
                if granularity not in (fitting := Granularity.of(site, tensor)):
                    raise ValueError(
                        f"site {site}: granularity {granularity.value!r} does not fit {tensor}; "
                        f"use one of {', '.join(g.value for g in fitting)}"
                    )
        for name, size in (("block_q", self.block_q), ("block_k", self.block_k)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}={size} is not a positive number of tokens")

    def site(self, name: str) -> MatmulSpec:
        """The `MatmulSpec` of one of `SITES`."""
        if name not in SITES:
            raise ValueError(f"{name!r} is not a site; one of {', '.join(SITES)}")
        matmul: MatmulSpec = getattr(self, name)
        return matmul

    @property
    def is_quantized(self) -> bool:
        """Whether any product rounds its operands."""
        return any(self.site(s).precision is not Precision.FP32 for s in SITES)

    @classmethod
    def parse(cls, label: str) -> AttentionSpec:
        """The spec that a label names; the inverse of `label`. See `sagesim.spec.labels`.

        Raises:
            ValueError: if a word is wrong. The message names it and lists what is valid.
        """
        # Imported here because labels import the presets, which import this module.
        from sagesim.spec.labels import parse

        return parse(label)

    def __repr__(self) -> str:
        return f"AttentionSpec.parse({self.label()!r})"

    def label(self) -> str:
        """The shortest label: the name of a preset and one word for each field that differs."""
        from sagesim.spec.labels import format_label

        return format_label(self)
