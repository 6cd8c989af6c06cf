"""Hopper's own kernels, in Gluon, of specs where QK alone is INT8: which problems are theirs.

They are the twins of the portable ones, to which `forward` and `backward` of the package turn for
everything else: the same operands, codes and scales. Keys come in another order, so that P is
rounded against another maximum, and float32 sums are added up in another order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from torch import Tensor
from triton.runtime import driver

from sagesim.spec import AttentionSpec, Delta, Granularity, MatmulSpec, Precision
from sagesim_kernels.layout import stored_tokens
from sagesim_kernels.problem import Problem
from sagesim_kernels.quantize import DTYPES
from sagesim_kernels.support import IS_INTERPRETED

HEAD_SIZES: Final = (64, 128)
BLOCK: Final = 64
_QK: Final = MatmulSpec(Precision.INT8, Granularity.PerToken, Granularity.PerBlock)
_MOST_ROWS: Final = 2**29
"""Tokens of all heads in storage: TMA counts four rows of sums of dQ for each, in 31 bits."""


def serves(problem: Problem) -> bool:
    """Whether these kernels compute the problem, on the current device.

    Of the numbers in its tensors nothing matters, nor how sequences are packed: up to `_MOST_ROWS`,
    a sequence is computed by the same kernels alone and among others.
    """
    return (
        not IS_INTERPRETED
        and problem.q.shape[3] == problem.v.shape[3] in HEAD_SIZES
        and problem.scale >= 0
        and _serves_spec(problem.spec)
        and is_hopper()
        and max(_rows(problem.cu_q, problem.q), _rows(problem.cu_k, problem.k)) < _MOST_ROWS
    )


def is_hopper() -> bool:
    """Whether the current device is one."""
    active: Any = driver.active
    return active.get_current_target().arch == 90


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


def has_to_copy(problem: Problem, *, queries: bool) -> bool:
    """Whether keys in 16 bit have to be copied to storage of our own, or where `queries` are read
    in 16 bit too, any of both: see `Operands`.

    TMA reads zeros behind a tensor's last token only, and not between packed sequences, nor in
    place of dead tokens.
    """
    dead = has_dead_keys(problem) or (queries and has_dead_queries(problem))
    return problem.cu_q is not None or dead


def has_dead_keys(problem: Problem) -> bool:
    """Whether keys are left that no query attends to, of sequences that are not packed."""
    shorter = problem.q.shape[2] < problem.k.shape[2]
    return problem.is_causal and not problem.lower_right and shorter


def has_dead_queries(problem: Problem) -> bool:
    """Likewise, whether queries are left that attend to nothing."""
    shorter = problem.k.shape[2] < problem.q.shape[2]
    return problem.is_causal and problem.lower_right and shorter
