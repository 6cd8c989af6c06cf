"""A softcap in Hopper's kernels: logits, P and the derivative, from integer sums of S.

Kernels compute t = tanh(S / c), where c is the softcap. The logit in base 2 is t times `base2` of
`Softcap`, and 1 - t^2 is its derivative by S.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.operands import tanh


class DsSums(NamedTuple):
    """Sums of the rows of dS as integers, in padded storage of the queries.

    If K is smoothed, the sum of a row of dS times the mean of K is a part of dQ. Programs that own
    keys add their parts of the sum in any order, with the same result.
    """

    sums: Any  #: int64 [heads, tokens], in units
    inverse_unit: Any  #: float32 [heads, tokens], powers of two; see `capped_rows`


@gluon.jit
def tanh_of_sums(s, factor, shift, LAYOUT: gl.constexpr):
    """Return tanh(S / c) of integer sums.

    factor: what S / c is of a sum. shift: see `load_shift`; None if K is not smoothed. Both
    broadcast to s. LAYOUT: of the result. It moves no number.
    """
    x = gl.convert_layout(s.to(gl.float32), LAYOUT)
    x = x * factor if shift is None else gl.fma(x, factor, shift)
    return tanh(x)


@gluon.jit
def logits_plus(t, base2, addend):
    """Return the logits in base 2, plus a number of each row or column that broadcasts to t."""
    return gl.fma(t, base2, addend)


@gluon.jit
def slope_of(t):
    """Return the derivative of the logits by S."""
    return gl.fma(-t, t, 1.0)


_TO_INT64 = gl.constexpr("cvt.rni.s64.f32 $0, $1;")
_ADD = gl.constexpr("red.relaxed.gpu.global.add.u64 [$1], $2; mov.b32 $0, 0;")


@gluon.jit
def add_ds_sums(ds_sums, first, ds):
    """Add the sums of dS over the keys of each warp to those of the queries.

    ds_sums: `DsSums`. first: the first query in padded storage, over all heads. ds: transposed,
    float32 [keys, queries], of which each warp holds 16 keys in the layout of wgmma.
    """
    WARPS: gl.constexpr = ds.shape[0] // 16
    QUERIES: gl.constexpr = ds.shape[1]
    # A thread holds two keys, and two of each eight queries. Eight threads share these queries.
    parts = gl.sum(ds.reshape([WARPS, 2, 8, QUERIES // 8, 8]), 1)  # [warp, thread, octet, query]
    LAYOUT: gl.constexpr = parts.type.layout
    totals = gl.sum(parts, 1).expand_dims(1).broadcast_to(parts.shape)
    # Each of the eight threads adds the sums of one octet.
    THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    OCTET: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    thread = gl.arange(0, 8, THREAD).expand_dims(0).expand_dims(2).expand_dims(3)
    octet = gl.arange(0, QUERIES // 8, OCTET).expand_dims(0).expand_dims(1).expand_dims(3)
    totals = gl.sum(gl.where(thread == octet, totals, 0.0), 2)  # [warp, octet, query]
    SUMS: gl.constexpr = totals.type.layout
    octet = gl.arange(0, QUERIES // 8, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    query = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))
    octet = octet.expand_dims(0).expand_dims(2)
    query = query.expand_dims(0).expand_dims(1)
    at = (first + octet * 8 + query).broadcast_to(totals.shape)
    totals = totals * gl.load(ds_sums.inverse_unit + at)
    totals = gl.inline_asm_elementwise(_TO_INT64, "=l,f", [totals], gl.int64, True, 1)
    gl.inline_asm_elementwise(
        _ADD, "=r,l,l", [ds_sums.sums + at, totals], gl.int32, is_pure=False, pack=1
    )
