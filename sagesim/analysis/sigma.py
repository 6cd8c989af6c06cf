"""Table 1 of the paper: errors on Gaussian inputs for growing standard deviations of Q and K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from sagesim.analysis.metrics import Comparison, compare
from sagesim.emulator import exact, trace
from sagesim.problem import AttentionProblem
from sagesim.spec import AttentionSpec

COLUMNS: Final = ("o", "dq", "dk", "dv")
"""The tensors of Table 1."""

PAPER_TABLE_1: Final = {
    1.0: ((0.9999, 0.0160), (0.9998, 0.0184), (0.9998, 0.0220), (0.9999, 0.0159)),
    3.0: ((0.9992, 0.0389), (0.9971, 0.0758), (0.9970, 0.0777), (0.9992, 0.0387)),
    5.0: ((0.9982, 0.0603), (0.9798, 0.2014), (0.9799, 0.2007), (0.9982, 0.0605)),
    8.0: ((0.9953, 0.0972), (0.8900, 0.4666), (0.8886, 0.4699), (0.9953, 0.0973)),
    10.0: ((0.9933, 0.1161), (0.7823, 0.6648), (0.7820, 0.6684), (0.9933, 0.1157)),
}
"""(cosine, relative L2 error) of each of `COLUMNS`, by sigma. Source: arXiv 2603.02170, Table 1."""

_STRIDE: Final = 0x9E3779B9
"""The distance of the first states of two seeds: the odd number next to 2^32 over the golden ratio.

Its multiples modulo 2^32 are far from each other: those of two seeds below n are at least
2^32 / (3 n) apart, for n up to 10,000. Source: Knuth, The Art of Computer Programming,
volume 3, section 6.4.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the paper does not state: length, head size, mask and number of independent draws.

    A draw is one head. V and dO have standard deviation 1. Seeds below 10,000 share
    none of their first 100,000 draws.

    Raises:
        ValueError: if tokens, head_dim or draws is not in 1..2^24, or seed is not in 0..2^32-1.
            PyTorch's generator on a CPU has no more states to begin with.
    """

    tokens: int = 2048
    head_dim: int = 64
    draws: int = 16
    is_causal: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "head_dim", "draws"):
            if not 1 <= (number := getattr(self, name)) <= 2**24:
                raise ValueError(f"{name}={number} is not in 1..2**24")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is not in 0..2**32-1")

    def problem(self, sigma: float, draw: int) -> AttentionProblem:
        """A draw: q, k, v, do [1, tokens, head_dim], float32; sigma is the deviation of q and k."""
        generator = torch.Generator().manual_seed((self.seed * _STRIDE + draw) % 2**32)
        q, k, v, do = torch.randn((4, 1, self.tokens, self.head_dim), generator=generator)
        q, k = q * sigma, k * sigma
        return AttentionProblem(q=q, k=k, v=v, do=do, is_causal=self.is_causal)


def gaussian_errors(sigma: float, spec: AttentionSpec, setting: Setting) -> Comparison:
    """Measure the errors of every intermediate under `spec`, over all draws of the setting.

    >>> spec = AttentionSpec.parse("fpa")
    >>> gaussian_errors(1.0, spec, Setting(tokens=64)).overall["dq"].rel_l2 < 1e-5
    True
    """
    problems = (setting.problem(sigma, draw) for draw in range(setting.draws))
    return Comparison.joined([compare(trace(x, spec=spec), exact(x)) for x in problems])
