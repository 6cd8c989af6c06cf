"""The cases of the benchmark: shapes, the contenders of each, and their operation counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sagesim.spec import FACTORED, SITES, AttentionSpec, Precision, with_precision
from sagesim_kernels.bench.masks import MaskCase, mask_cases
from sagesim_kernels.bench.models import (
    MODEL_SPECS,
    ModelCase,
    TrainingCase,
    model_cases,
    training_cases,
)
from sagesim_kernels.bench.shape import Shape

SPECS: Final = ("factored", "factored_pv16", "factored_qk", "sagebwd", "sage_forward")
"""Labels of the specs that are timed by default."""

PEERS: Final = (
    "sdpa flash",
    "sdpa cudnn",
    "sdpa efficient",
    "flash-attn-4",
    "flash-attn-4 deterministic",
    "FlexAttention",
)
"""Attention of other projects. The first one that runs is the reference of all results."""

QUICK_SPECS: Final = ("factored_qk", "sagebwd")
QUICK_PEERS: Final = PEERS[:-1]
"""Without FlexAttention: it is compiled at every length, which takes too long for a quick run."""

CODE_SPECS: Final = ("fpa_bf16", "factored_qk", "sagebwd", "factored_pv16", "factored")
CODE_PEERS: Final = PEERS[:1]
"""FlashAttention-2: it multiplies with mma.sync, as the code of other GPUs does."""

PAYOFF_BASE: Final = FACTORED
"""The spec whose products are switched between INT8 and 16 bit one at a time. Six are INT8."""

PAYOFF_SITES: Final = (*SITES, "qk+qk_recompute")
"""Each site on its own, and both products of Q and K together, as `factored_qk` has them."""

PASSES: Final = ("forward", "backward", "both")

SIGMAS: Final = (1.0, 5.0)
"""Standard deviations of Q and K at which errors are measured: ordinary and large logits."""

_TOKENS: Final = 16384
_CHANNELS: Final = 2048
"""Tokens of a batch and channels of all heads, as in the figures of the FlashAttention papers."""

_LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_HEAD_DIMS: Final = (64, 128)
_SHAPES: Final = [(d, is_causal) for d in _HEAD_DIMS for is_causal in (False, True)]
_PAYOFF_LENGTH: Final = 8192
_QUICK_LENGTH: Final = 4096
_CODE_LENGTHS: Final = (4096, 8192)


@dataclass(frozen=True, slots=True)
class TimedCase:
    """Contenders that are timed together on one problem."""

    part: str  #: "speed" or "payoff"
    shape: Shape
    contenders: tuple[str, ...]

    @property
    def key(self) -> str:
        """The name of the case in a record.

        >>> TimedCase("speed", Shape(4, 32, 4096, 64, True), ("factored",)).key
        'speed d64 causal n4096'
        """
        s = self.shape
        return f"{self.part} d{s.head_dim} {s.mask} n{s.tokens}"


@dataclass(frozen=True, slots=True)
class GaussianCase:
    """Contenders whose errors are measured on the inputs of the paper's Table 1.

    sigma is the standard deviation of Q and K. The inputs are the draws of
    `sagesim.analysis.Setting`, each one head.
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


Case = TimedCase | ModelCase | MaskCase | TrainingCase | GaussianCase | CaptureCase


def payoff_spec(sites: str) -> AttentionSpec:
    """`PAYOFF_BASE` with one of `PAYOFF_SITES` switched between INT8 and 16 bit.

    >>> payoff_spec("dp").label(), payoff_spec("dq").label()
    ('factored dp=int8', 'factored dq=input16')
    """
    names = sites.split("+")
    is_int8 = PAYOFF_BASE.site(names[0]).precision is Precision.INT8
    return with_precision(PAYOFF_BASE, Precision.INPUT16 if is_int8 else Precision.INT8, *names)


def payoff_labels() -> tuple[str, ...]:
    """Labels of `PAYOFF_BASE` and of `payoff_spec` of each of `PAYOFF_SITES`."""
    return (PAYOFF_BASE.label(), *(payoff_spec(sites).label() for sites in PAYOFF_SITES))


def all_cases(specs: Sequence[str], peers: Sequence[str]) -> list[Case]:
    """All cases: speed at every shape, each site in INT8 and in 16 bit, errors, models, masks.

    specs, peers: of the cases for speed and, beside others, of those for errors.
    """
    timed = _unique(*specs, *peers)
    payoff = (*payoff_labels(), PEERS[0])
    everyone = _unique(*specs, *MODEL_SPECS, *payoff_labels(), *peers)
    return [
        *(TimedCase("speed", _shape(n, *s), timed) for n in _LENGTHS for s in _SHAPES),
        *(TimedCase("payoff", _shape(_PAYOFF_LENGTH, *s), payoff) for s in _SHAPES),
        *(GaussianCase(sigma, *s, everyone) for s in _SHAPES for sigma in SIGMAS),
        CaptureCase(everyone),
        *model_cases(),
        *mask_cases(),
        *training_cases(),
    ]


def quick_cases(specs: Sequence[str], peers: Sequence[str]) -> list[Case]:
    """Speed at one length under the causal mask, and errors at the smaller head size."""
    contenders = _unique(*specs, *peers)
    return [
        *(TimedCase("speed", _shape(_QUICK_LENGTH, d, True), contenders) for d in _HEAD_DIMS),
        *(GaussianCase(sigma, _HEAD_DIMS[0], True, contenders) for sigma in SIGMAS),
    ]


def code_cases(specs: Sequence[str], peers: Sequence[str]) -> list[Case]:
    """Speed at two lengths, of the code of another GPU."""
    contenders = _unique(*specs, *peers)
    return [TimedCase("speed", _shape(n, *s), contenders) for n in _CODE_LENGTHS for s in _SHAPES]


def _unique(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _shape(tokens: int, head_dim: int, is_causal: bool) -> Shape:
    """A shape of `_TOKENS` tokens and `_CHANNELS` channels in all; one sequence if it is longer."""
    batch = max(1, _TOKENS // tokens)
    return Shape(batch, _CHANNELS // head_dim, tokens, head_dim, is_causal)
