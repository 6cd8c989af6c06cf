"""One attention problem, laid out for the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sagesim.arguments import check_scale
from sagesim.spec import AttentionSpec
from sagesim_kernels.layout import Lengths


@dataclass(frozen=True, slots=True)
class Problem:
    """q [sequences, heads, n_q, d], k and v [sequences, kv heads, n_k, d or d_v], any strides.

    Packed sequences of unequal length have one batch, and their beginnings in cu_q and cu_k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec  #: no site is INPUT16
    scale: float
    is_causal: bool
    lower_right: bool
    cu_q: Tensor | None
    cu_k: Tensor | None
    longest_q: int
    longest_k: int

    @property
    def lengths(self) -> Lengths:
        """What a kernel knows of the sequences."""
        return Lengths(
            self.cu_q,
            self.cu_k,
            self.q.shape[2],
            self.k.shape[2],
            tl.constexpr(self.is_causal),
            tl.constexpr(self.is_causal and self.lower_right),
        )

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1

    @property
    def groups(self) -> int:
        """Query heads for each head of k and v."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether no query attends to any key, whatever the mask."""
        return 0 in (self.sequences, self.q.shape[1], self.longest_q, self.longest_k)


def logit_scale(q: Tensor, scale: float | None) -> float:
    """What the logits are multiplied by: 1/sqrt(d) of the true head size where none is given."""
    check_scale(scale)
    return 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def padded(channels: int) -> int:
    """Channels of a tile: a power of two, and no fewer than an INT8 product contracts."""
    return max(32, triton.next_power_of_2(channels))
