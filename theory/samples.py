"""Inputs that the statements are measured on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

import sagesim
from sagesim import AttentionSpec, Capture
from sagesim.data import LLAMA


@dataclass(frozen=True, slots=True)
class Sample:
    """q, k, v, do [1, heads, tokens, d], float32 or as captured, and a name for tables."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    is_causal: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.do

    @property
    def unmasked(self) -> Sample:
        """Where every query sees every key: for statements about S, which a mask makes -inf."""
        return replace(self, name=f"{self.name}, unmasked", is_causal=False)

    def exact(self) -> sagesim.Exact:
        """In float64."""
        return sagesim.exact(*self.tensors, is_causal=self.is_causal)

    def trace(self, spec: AttentionSpec) -> sagesim.Trace:
        """Under `spec`, by the emulator."""
        return sagesim.trace(*self.tensors, spec=spec, is_causal=self.is_causal)


def gaussian(
    sigma: float, tokens: int = 512, d: int = 64, *, is_causal: bool = False, seed: int = 0
) -> Sample:
    """Table 1's: one head, Q and K of deviation sigma, V and dO of deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = torch.randn(4, 1, 1, tokens, d, generator=generator)
    mask = ", causal" if is_causal else ""
    name = f"Gaussian, sigma {sigma:g}, N {tokens}, d {d}{mask}"
    return Sample(name, q * sigma, k * sigma, v, do, is_causal)


def outlier_channels(tokens: int = 512, d: int = 64, *, seed: int = 0) -> Sample:
    """One channel of Q and V 16 times larger, of K with a mean of 16, and a row of dO 16 times."""
    x = gaussian(1.0, tokens, d, seed=seed)
    q, k, v, do = (t.clone() for t in x.tensors)
    q[..., 3] *= 16
    k[..., 5] += 16
    v[..., 7] *= 16
    do[..., tokens // 2, :] *= 16
    return Sample(f"outlier channels, N {tokens}, d {d}", q, k, v, do)


@cache
def captured(tokens: int = 512) -> tuple[Sample, ...]:
    """The first tokens of each layer's head of the shipped capture, which has 2048 of them. Under a
    causal mask they are an attention problem of their own."""
    found: list[Sample] = []
    for c in Capture.load(LLAMA).calls:
        q, k, v, do = (x[..., :tokens, :] for x in (c.q, c.k, c.v, c.do))
        found.append(Sample(f"capture, layer {c.index}", q, k, v, do, c.is_causal))
    return tuple(found)
