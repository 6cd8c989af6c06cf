"""The errors of captured attention problems under a spec, and their means over layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sagesim._exact import Exact, exact
from sagesim._trace import trace
from sagesim.captured import Call
from sagesim.metrics import TENSORS, Comparison, Error, compare, geometric_mean, mean
from sagesim.spec import AttentionSpec

GRADIENTS: Final = ("dq", "dk", "dv")
"""The tensors that training sees."""


def reference(call: Call) -> Exact:
    """The call in float64."""
    return exact(call.q, call.k, call.v, call.do, **call.options)


def errors(
    call: Call, spec: AttentionSpec, exactly: Callable[[Call], Exact] = reference
) -> Mapping[str, Error]:
    """The error of each of `TENSORS` over all heads of a call.

    Args:
        exactly: gives the reference of the call, or of some of its heads: they are taken in
            groups, so that memory does not grow with their number.
    """

    def part(of: Call) -> Comparison:
        return compare(trace(of.q, of.k, of.v, of.do, spec=spec, **of.options), exactly(of))

    return Comparison.joined([part(of) for of in head_groups(call)]).overall


def head_groups(call: Call, entries: int = 2**24) -> Iterator[Call]:
    """The call itself, or parts of whole key heads whose maps have about that many entries."""
    batch, heads, n_q, _ = call.q.shape
    key_heads, n_k = call.k.shape[1:3]
    if batch * heads * n_q * n_k <= entries:
        yield call
        return
    shared = heads // key_heads
    step = max(1, entries // (shared * n_q * n_k))
    for item in range(batch):
        for start in range(0, key_heads, step):
            keys = slice(start, start + step)
            queries = slice(start * shared, (start + step) * shared)
            mask = call.attn_mask
            if mask is not None:
                mask = mask[item : item + 1] if mask.shape[0] > 1 else mask
                mask = mask[:, queries] if mask.shape[1] > 1 else mask
            yield replace(
                call,
                q=call.q[item : item + 1, queries],
                k=call.k[item : item + 1, keys],
                v=call.v[item : item + 1, keys],
                do=call.do[item : item + 1, queries],
                attn_mask=mask,
            )


def pool_errors(measured: Sequence[Mapping[str, Error]]) -> dict[str, Error]:
    """The errors of several layers as one, in which every layer counts alike.

    Geometric mean of rel_l2, mean of cosine and of sqnr_db, the largest max_error.
    """

    def pooled(several: Sequence[Error]) -> Error:
        return Error(
            cosine=mean([e.cosine for e in several]),
            rel_l2=geometric_mean([e.rel_l2 for e in several]),
            sqnr_db=mean([e.sqnr_db for e in several]),
            max_error=max(e.max_error for e in several),
        )

    return {t: pooled([by[t] for by in measured]) for t in TENSORS}


def gradient_error(rel_l2: Mapping[str, float]) -> float:
    """One number for a spec: the root mean square of the relative L2 errors of `GRADIENTS`.

    >>> round(gradient_error({"dq": 0.03, "dk": 0.04, "dv": 0.0}), 4)
    0.0289
    """
    return math.sqrt(mean([rel_l2[t] ** 2 for t in GRADIENTS]))
