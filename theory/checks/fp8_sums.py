"""Measurements of `theory.fp8_sums`: sums over the queries of one key, by length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from theory.checks.check import Check, bounded
from theory.fp8_sums import ADA, BLACKWELL, HOPPER, tensor_core_sum, truncation_bound

TOPIC: Final = "fp8_sums"
PROMOTE: Final = 256
LENGTHS: Final = (4096, 16384, 65536, 131072)
BIASES: Final = {"unbiased dO": 0.0, "dO with a mean of a quarter": 0.25, "dO of one sign": 4.0}
_CHANNELS: Final = 4


def column(tokens: int, bias: float, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes of one column of P, [1, tokens], and of dO, [channels, tokens].

    P is log-normal, as that of Gaussian logits of deviation 1. dO has deviation 1 and mean `bias`.
    """
    generator = torch.Generator().manual_seed(seed)
    p = torch.exp(torch.randn(1, tokens, generator=generator))
    do = torch.randn(_CHANNELS, tokens, generator=generator) + bias
    return _codes(p), _codes(do)


def loss(left: Tensor, right: Tensor, promote: int | None) -> float:
    """The relative L2 error of the sums of the channels."""
    found = tensor_core_sum(left, right, promote=promote)
    exact = (left * right).sum(-1)
    return float((found - exact).norm() / exact.norm())


def checks() -> Iterator[Check]:
    """The bound at every length, and that promoted sums lose no more when they are longer."""
    for name, bias in BIASES.items():
        for tokens in LENGTHS:
            left, right = column(tokens, bias)
            exact = (left * right).sum(-1)
            others = (("Ada", ADA), ("Blackwell", BLACKWELL)) if tokens == LENGTHS[0] else ()
            for promote in (None, PROMOTE):
                for gpu, how in (("Hopper", HOPPER), *others):
                    found = tensor_core_sum(left, right, how, promote=promote)
                    yield bounded(
                        TOPIC,
                        f"loss on {gpu}, " + (f"promoted every {promote}" if promote else "never"),
                        f"{name}, N {tokens}",
                        bound=truncation_bound(left, right, how, promote=promote),
                        measured=(found - exact).abs(),
                    )


def _codes(x: Tensor) -> Tensor:
    scaled = x * (448 / x.abs().amax())
    return scaled.to(torch.float8_e4m3fn).double()
