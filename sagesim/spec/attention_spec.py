"""What to compute: the precision, scales, smoothing and rounding of the seven matrix products.

A spec is plain data. It imports neither torch nor anything else of this package, so kernels,
command line and emulator can all speak it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SITES: Final = ("qk", "pv", "qk_recompute", "dv", "dp", "dq", "dk")
"""The seven matrix products of attention in the order they run; the first two are the forward."""

OPERANDS: Final = {
    "qk": ("q", "k"),
    "pv": ("p", "v"),
    "qk_recompute": ("q", "k"),
    "dv": ("p", "do"),
    "dp": ("do", "v"),
    "dq": ("ds", "k"),
    "dk": ("ds", "q"),
}
"""Left and right tensor of each site. dv and dk multiply the transpose of their left tensor."""

MAPS: Final = frozenset({"p", "ds"})
"""Operands with a row per query and a column per key; the others have a row per token."""


class Precision(StrEnum):
    """The number format both operands of a product are rounded to before they are multiplied."""

    INT8 = "int8"  #: integers -127..127 times a scale; products summed exactly in INT32
    FP8_E4M3 = "fp8_e4m3"  #: 3 mantissa bits, largest value 448, times a scale
    FP8_E5M2 = "fp8_e5m2"  #: 2 mantissa bits, largest value 57344, times a scale
    FP16 = "fp16"  #: IEEE half precision, no scale
    BF16 = "bf16"  #: bfloat16, no scale
    INPUT16 = "input16"  #: BF16 where the inputs are bfloat16, FP16 otherwise; no scale
    FP32 = "fp32"  #: no rounding at all (float64 inputs stay float64)

    @property
    def is_scaled(self) -> bool:
        """Whether operands are divided by a scale first, so that a granularity matters."""
        return self in (Precision.INT8, Precision.FP8_E4M3, Precision.FP8_E5M2)


class Granularity(StrEnum):
    """Which elements of an operand share one scale. Block sizes are the spec's.

    The first five are for operands with tokens (q, k, v, do), the last four for maps (p, ds),
    whose rows are always queries and whose columns are always keys, also where a site
    multiplies the transpose.
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

    @property
    def is_map(self) -> bool:
        """Whether this divides a map (p, ds) rather than an operand with tokens."""
        return self in (
            Granularity.PerTile,
            Granularity.PerTileRow,
            Granularity.PerTileColumn,
            Granularity.PerRow,
        )


class Delta(StrEnum):
    """Where delta, the row constant of dS = P o (dP - delta), comes from."""

    FROM_O = "o"  #: rowsum(dO o O) with the O that the forward returned, as in the paper
    FROM_P = "p"  #: rowsum(P o dP) with the backward's own P and dP, so that rows of dS sum to 0


def _check_type(owner: str, name: str, value: object, kind: type) -> None:
    """Enum members compare equal to their words, and code that asks `is` would not notice."""
    if not isinstance(value, kind):
        raise TypeError(f"{owner}: {name} is {value!r}, not a {kind.__name__}")


class RoundingMode(StrEnum):
    """How a value between two codes of a scaled format is rounded."""

    HALF_EVEN = "half_even"  #: to nearest, ties to the even code
    HALF_AWAY = "half_away"  #: to nearest, ties away from zero (SageAttention's)
    STOCHASTIC = "stochastic"  #: up with probability equal to the distance from the code below


@dataclass(frozen=True, slots=True)
class Rounding:
    """A rounding mode for the codes of INT8 and FP8 operands; the seed belongs to STOCHASTIC.

    16-bit formats always round half-even, as the hardware's conversions do.
    """

    mode: RoundingMode
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_type("Rounding", "mode", self.mode, RoundingMode)
        if (self.mode is RoundingMode.STOCHASTIC) != (self.seed is not None):
            raise ValueError(
                f"rounding {self.mode.value} with seed={self.seed}: "
                "a seed belongs to stochastic rounding, and only to it"
            )
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"rounding seed {self.seed} is outside 0..2**32-1")

    @classmethod
    def stochastic(cls, seed: int) -> Rounding:
        """Stochastic rounding whose random numbers are a function of `seed` and element."""
        return cls(RoundingMode.STOCHASTIC, seed)


HALF_EVEN: Final = Rounding(RoundingMode.HALF_EVEN)
HALF_AWAY: Final = Rounding(RoundingMode.HALF_AWAY)


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Which means are subtracted before Q and K are rounded.

    q: the mean of each block of queries, added back as a rank-one term.
    k: the mean of a head's keys, which changes no row of P.
    """

    q: bool = False
    k: bool = False


@dataclass(frozen=True, slots=True)
class MatmulSpec:
    """One product: its precision and the granularity of its left and right operand.

    Granularities take effect where the precision is scaled (INT8, FP8). They are always given,
    so that switching a site to INT8 is a change of one field.
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

    Rounding qk_recompute otherwise than qk is allowed, and harsh: P = exp(S - L) then has S and L
    of two different roundings, its rows no longer sum to 1, and with logits in the tens of
    thousands it may overflow.

    Ablations are `dataclasses.replace(SAGEBWD, dp=...)`, or words of a label:

    >>> AttentionSpec.parse("sagebwd dp=int8 dq=fp16").label()
    'sagebwd_all_int8 dq=fp16'

    Raises:
        ValueError: naming the site, where a granularity does not fit its tensor, or the block
            size that is not a positive integer.
        TypeError: naming the field that is of another type, such as a word for an enum member.
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
            for tensor, how in zip(OPERANDS[site], (matmul.lhs, matmul.rhs), strict=True):
                if how.is_map != (tensor in MAPS):
                    fitting = [g.value for g in Granularity if g.is_map == (tensor in MAPS)]
                    raise ValueError(
                        f"site {site}: granularity {how.value!r} does not fit {tensor}; "
                        f"one of {', '.join(fitting)}"
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
            ValueError: naming the word that is wrong and what would have been right.
        """
        from sagesim.spec.labels import (
            parse,  # the grammar knows the presets, which know this class
        )

        return parse(label)

    def label(self) -> str:
        """The shortest label: a preset's name and a word for each difference from it."""
        from sagesim.spec.labels import format_label

        return format_label(self)
