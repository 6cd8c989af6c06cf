"""Hopper's own kernels, in Gluon, of specs where QK alone is INT8.

They are the twins of the portable ones, to which `forward` and `backward` of the package turn for
everything else: the same operands, the same codes, the same places where numbers are rounded. What
differs is the order in which float32 sums are added up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from torch import Tensor

from sagesim.spec import AttentionSpec, Delta, Granularity, MatmulSpec, Precision
from sagesim_kernels.hopper.backward import backward
from sagesim_kernels.hopper.device import is_hopper
from sagesim_kernels.hopper.forward import forward
from sagesim_kernels.layout import stored_tokens
from sagesim_kernels.problem import Problem
from sagesim_kernels.quantize import DTYPES
from sagesim_kernels.support import IS_INTERPRETED

__all__ = ["backward", "forward", "is_stored", "serves"]

HEAD_SIZES: Final = (64, 128)
BLOCK: Final = 64
_QK: Final = MatmulSpec(Precision.INT8, Granularity.PerToken, Granularity.PerBlock)
_MOST_ROWS: Final = 2**29
"""Tokens of all heads in storage: TMA counts four rows of sums of dQ for each, in 31 bits."""


def serves(problem: Problem) -> bool:
    """Whether these kernels compute the problem, on the current device.

    Of the numbers in its tensors nothing matters, nor how sequences are packed: a sequence is
    computed by the same kernels alone and among others.
    """
    return (
        not IS_INTERPRETED
        and _serves_spec(problem.spec)
        and problem.q.shape[3] == problem.v.shape[3] in HEAD_SIZES
        and problem.scale >= 0
        and max(_rows(problem.cu_q, problem.q), _rows(problem.cu_k, problem.k)) < _MOST_ROWS
        and is_hopper()
    )


def _rows(cu: Tensor | None, x: Tensor) -> int:
    return x.shape[1] * stored_tokens(cu, x)


@lru_cache(maxsize=256)
def _serves_spec(spec: AttentionSpec) -> bool:
    (sixteen, *others) = {spec.site(site).precision for site in ("pv", "dv", "dp", "dq", "dk")}
    return (
        spec.qk == spec.qk_recompute == _QK
        and sixteen in DTYPES
        and not others
        and not spec.smoothing.q
        and spec.delta is Delta.FROM_O
        and spec.block_q == spec.block_k == BLOCK
    )


def is_stored(problem: Problem) -> bool:
    """Whether operands in 16 bit have to be copied to storage of our own, with zeros behind each
    sequence, and in place of queries that attend to nothing and keys that nothing attends to.

    In the caller's tensors TMA reads zeros behind the last token only.
    """
    n_q, n_k = problem.q.shape[2], problem.k.shape[2]
    some_are_dead = n_q > n_k if problem.lower_right else n_q < n_k
    return problem.cu_q is not None or (problem.is_causal and some_are_dead)
