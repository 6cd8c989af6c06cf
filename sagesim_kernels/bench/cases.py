"""What is measured: shapes, who takes part at each, and the operations that they count for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sagesim.presets import FACTORED, with_precision
from sagesim.spec import SITES, AttentionSpec, Precision

SPECS: Final = ("factored", "factored_pv16", "factored_qk", "sagebwd", "sage_forward")
"""Labels of what is timed where none are asked for."""

PEERS: Final = ("sdpa flash", "sdpa cudnn", "sdpa efficient", "flash-attn-4", "FlexAttention")
"""What people would pick instead; the first that runs is also what results are held against."""

QUICK_SPECS: Final = ("factored_qk", "sagebwd")
QUICK_PEERS: Final = PEERS[:-1]
"""FlexAttention is compiled anew at every length, which takes longer than a quick run may."""

PAYOFF_BASE: Final = FACTORED
"""All six INT8 products, so that each site is seen both ways beside the same others."""

PAYOFF_SITES: Final = (*SITES, "qk+qk_recompute")
"""Each site on its own, and both products of Q and K together, as they are used."""

PASSES: Final = ("forward", "backward", "both")

SIGMAS: Final = (1.0, 5.0)
"""Deviations of Q and K at which errors are measured: ordinary logits, and large ones."""

_TOKENS: Final = 16384
_CHANNELS: Final = 2048
"""Tokens of a batch and channels of all heads, as in the FlashAttention papers' figures."""

_LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_HEAD_DIMS: Final = (64, 128)
_PAYOFF_LENGTH: Final = 8192
_QUICK_LENGTH: Final = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention problem: q, k and v are [batch, heads, tokens, head_dim]."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    is_causal: bool

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "full"

    def flop(self, which: str) -> float:
        """Operations of one of `PASSES` by the usual count, whatever is recomputed or masked.

        4 B H N^2 d for the forward, half of it under a causal mask; 2.5 times that for the
        backward, which has five products to the forward's two.

        >>> Shape(2, 3, 8, 4, True).flop("both") == 3.5 * 2 * 2 * 3 * 8**2 * 4
        True
        """
        forward = 4.0 * self.batch * self.heads * self.tokens**2 * self.head_dim
        forward *= 0.5 if self.is_causal else 1.0
        return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[which]


@dataclass(frozen=True, slots=True)
class TimedCase:
    """Contenders that are timed in turns on one problem."""

    part: str  #: "speed" or "payoff"
    shape: Shape
    contenders: tuple[str, ...]

    @property
    def key(self) -> str:
        """What names the case in a record.

        >>> TimedCase("speed", Shape(4, 32, 4096, 64, True), ("factored",)).key
        'speed d64 causal n4096'
        """
        s = self.shape
        return f"{self.part} d{s.head_dim} {s.mask} n{s.tokens}"


@dataclass(frozen=True, slots=True)
class GaussianCase:
    """Contenders whose errors are measured on the inputs of the paper's Table 1.

    Draws are those of `sagesim.experiments.gaussian.Setting`, each a batch of one head.
    """

    sigma: float
    head_dim: int
    is_causal: bool
    contenders: tuple[str, ...]
    tokens: int = 2048
    draws: int = 16

    @property
    def key(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return f"accuracy d{self.head_dim} {mask} sigma{self.sigma:g}"


@dataclass(frozen=True, slots=True)
class CaptureCase:
    """Contenders whose errors are measured on every layer of the shipped capture."""

    contenders: tuple[str, ...]
    key: str = "accuracy llama"


Case = TimedCase | GaussianCase | CaptureCase


def payoff_spec(sites: str) -> AttentionSpec:
    """`PAYOFF_BASE` with one of `PAYOFF_SITES` the other way: 16 bit for INT8, INT8 for 16 bit.

    >>> payoff_spec("dp").label(), payoff_spec("dq").label()
    ('factored dp=int8', 'factored dq=input16')
    """
    names = sites.split("+")
    is_int8 = PAYOFF_BASE.site(names[0]).precision is Precision.INT8
    return with_precision(PAYOFF_BASE, Precision.INPUT16 if is_int8 else Precision.INT8, *names)


def payoff_labels() -> tuple[str, ...]:
    """The base, and it with each of `PAYOFF_SITES` the other way."""
    return (PAYOFF_BASE.label(), *(payoff_spec(sites).label() for sites in PAYOFF_SITES))


def all_cases(specs: Sequence[str]) -> list[Case]:
    """Everything: speed at every shape, then the pay-off of each site, then errors."""
    timed = tuple(dict.fromkeys([*specs, *PEERS]))
    payoff = (*payoff_labels(), PEERS[0])
    everyone = tuple(dict.fromkeys([*specs, *payoff_labels(), *PEERS]))
    shapes = [(d, is_causal) for d in _HEAD_DIMS for is_causal in (False, True)]
    return [
        *(TimedCase("speed", _shape(n, *s), timed) for n in _LENGTHS for s in shapes),
        *(TimedCase("payoff", _shape(_PAYOFF_LENGTH, *s), payoff) for s in shapes),
        *(GaussianCase(sigma, *s, everyone) for s in shapes for sigma in SIGMAS),
        CaptureCase(everyone),
    ]


def quick_cases(specs: Sequence[str]) -> list[Case]:
    """One length and the causal mask, and the errors at the smaller head size."""
    contenders = tuple(dict.fromkeys([*specs, *QUICK_PEERS]))
    return [
        *(TimedCase("speed", _shape(_QUICK_LENGTH, d, True), contenders) for d in _HEAD_DIMS),
        *(GaussianCase(sigma, _HEAD_DIMS[0], True, contenders) for sigma in SIGMAS),
    ]


def _shape(tokens: int, head_dim: int, is_causal: bool) -> Shape:
    """As many tokens and channels in all as at every other shape; one sequence if it is longer."""
    batch = max(1, _TOKENS // tokens)
    return Shape(batch, _CHANNELS // head_dim, tokens, head_dim, is_causal)
