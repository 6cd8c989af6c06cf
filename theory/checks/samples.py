"""Inputs on which the statements are measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

import sagesim
from sagesim import AttentionProblem, AttentionSpec, Capture
from sagesim.data import LLAMA


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample(AttentionProblem):
    """An attention problem with q, k, v, do [1, heads, tokens, d] and a name for tables."""

    do: Tensor
    name: str

    def exact(self) -> sagesim.Exact:
        """The computation in float64."""
        return sagesim.exact(self)

    def trace(self, spec: AttentionSpec) -> sagesim.Trace:
        """The emulation under `spec`."""
        return sagesim.trace(self, spec=spec)

    @property
    def unmasked(self) -> Sample:
        """The sample without its causal mask, for statements about S, which a mask sets to -inf."""
        return replace(self, name=f"{self.name}, unmasked", is_causal=False)


def gaussian(
    sigma: float, tokens: int = 512, d: int = 64, *, is_causal: bool = False, seed: int = 0
) -> Sample:
    """One head of Table 1's inputs: Q and K of deviation sigma, V and dO of deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = torch.randn(4, 1, 1, tokens, d, generator=generator)
    mask = ", causal" if is_causal else ""
    name = f"Gaussian, sigma {sigma:g}, N {tokens}, d {d}{mask}"
    return Sample(name=name, q=q * sigma, k=k * sigma, v=v, do=do, is_causal=is_causal)


def outlier_channels(tokens: int = 512, d: int = 64, *, seed: int = 0) -> Sample:
    """Gaussian inputs with outliers: a channel of Q and V 16 times larger, a channel of K with a
    mean of 16, and a row of dO 16 times larger."""
    q, k, v, do = (t.clone() for t in gaussian(1.0, tokens, d, seed=seed).qkvdo)
    q[..., 3] *= 16
    k[..., 5] += 16
    v[..., 7] *= 16
    do[..., tokens // 2, :] *= 16
    return Sample(name=f"outlier channels, N {tokens}, d {d}", q=q, k=k, v=v, do=do)


@cache
def captured(tokens: int = 512) -> tuple[Sample, ...]:
    """The first tokens of each layer of the shipped capture, which has one head of 2048 tokens.

    Under a causal mask the first tokens are an attention problem of their own.
    """
    found: list[Sample] = []
    for c in Capture.load(LLAMA).calls:
        q, k, v, do = (x[..., :tokens, :] for x in c.qkvdo)
        name = f"capture, layer {c.index}"
        found.append(Sample(name=name, q=q, k=k, v=v, do=do, is_causal=c.is_causal))
    return tuple(found)
