"""Algorithms 1 and 2 of arXiv 2603.02170 in numpy, for one head without a mask.

Written from the paper and docs/numerics.md, independently of the package. The softmax is online,
integer products are in int32, and every other number is float32. A `Scheme` says which elements of
a tile share a scale, so that the same loops compute the paper's scales and the factored ones.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

F = np.float32
Axis = Literal["all", "rows", "columns"]
"""Which elements of a tile share a scale: all, those of a row, or those of a column."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Which elements share a scale in each operand, and how delta is computed."""

    qk: Axis  #: of Q and of K
    v: Axis
    p_dv: Axis
    do: Axis
    ds_dq: Axis
    k_dq: Axis
    ds_dk: Axis
    q_dk: Axis
    delta_from_p: bool


PAPER = Scheme(
    qk="all",
    v="all",
    p_dv="all",
    do="all",
    ds_dq="all",
    k_dq="all",
    ds_dk="all",
    q_dk="all",
    delta_from_p=False,
)

FACTORED = Scheme(
    qk="rows",
    v="columns",
    p_dv="columns",
    do="columns",
    ds_dq="rows",
    k_dq="columns",
    ds_dk="columns",
    q_dk="columns",
    delta_from_p=True,
)


@dataclass
class Result:
    """Outputs, gradients, P and dS of the backward, and the quantized operands."""

    o: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    p: np.ndarray  #: the backward's P
    ds: np.ndarray
    codes: dict[str, np.ndarray] = field(default_factory=dict)
    """Codes by "site.tensor", as in the emulator's trace, in the shape of the tensor."""
    scales: dict[str, np.ndarray] = field(default_factory=dict)
    """The scale of every element, by "site.tensor"."""

    def put(self, name: str, rows: slice, columns: slice, codes: np.ndarray, s: np.ndarray) -> None:
        self.codes[name][rows, columns] = codes
        self.scales[name][rows, columns] = s


def psi(x: np.ndarray, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a tile: return int32 codes, and scales that are broadcastable to them."""
    over = {"all": (0, 1), "rows": (1,), "columns": (0,)}[axis]
    amax = np.abs(x).max(over, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = F(127) / amax
    overflows = np.isinf(inverse)
    codes = np.rint(x * np.where(overflows, F(0), inverse)).astype(np.int32)
    return codes, np.where(overflows, F(1), amax / F(127))


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    *,
    scheme: Scheme,
    block_q: int,
    block_k: int,
) -> Result:
    """Run both algorithms with K smoothed; q, do [n_q, d] and k, v [n_k, d] are float32."""
    (n_q, d), n_k = q.shape, k.shape[0]
    scale = F(1 / math.sqrt(d))
    query_tiles = [slice(i, min(i + block_q, n_q)) for i in range(0, n_q, block_q)]
    key_tiles = [slice(j, min(j + block_k, n_k)) for j in range(0, n_k, block_k)]
    whole = slice(None)

    k_mean = np.array([math.fsum(column) / n_k for column in k.T.astype(float)]).astype(F)
    k_sm = k - k_mean

    shapes = {
        **dict.fromkeys(("qk.q", "qk_recompute.q", "dk.q"), q.shape),
        **dict.fromkeys(("qk.k", "qk_recompute.k", "dq.k"), k.shape),
        "pv.v": v.shape,
        "dv.do": do.shape,
        **dict.fromkeys(("pv.p", "dv.p", "dq.ds", "dk.ds"), (n_q, n_k)),
    }
    r = Result(
        o=np.zeros_like(do),
        lse=np.zeros(n_q, F),
        dq=np.zeros_like(q),
        dk=np.zeros_like(k),
        dv=np.zeros_like(v),
        p=np.zeros((n_q, n_k), F),
        ds=np.zeros((n_q, n_k), F),
        codes={name: np.zeros(shape, np.int32) for name, shape in shapes.items()},
        scales={name: np.zeros(shape, F) for name, shape in shapes.items()},
    )

    # Algorithm 1, line 3: quantize the tokens.
    q_hat = [psi(q[i], scheme.qk) for i in query_tiles]
    k_hat = [psi(k_sm[j], scheme.qk) for j in key_tiles]
    v_hat = [psi(v[j], scheme.v) for j in key_tiles]
    for tile, quantized in zip(query_tiles, q_hat, strict=True):
        r.put("qk.q", tile, whole, *quantized)
        r.put("qk_recompute.q", tile, whole, *quantized)
    for tile, quantized in zip(key_tiles, k_hat, strict=True):
        r.put("qk.k", tile, whole, *quantized)
        r.put("qk_recompute.k", tile, whole, *quantized)
    for tile, quantized in zip(key_tiles, v_hat, strict=True):
        r.put("pv.v", tile, whole, *quantized)

    def logits(i: int, j: int) -> np.ndarray:
        (qc, qs), (kc, ks) = q_hat[i], k_hat[j]
        return (qc @ kc.T).astype(F) * qs * ks.T * scale

    lse_smoothed = np.zeros(n_q, F)
    for i, rows in enumerate(query_tiles):
        count = rows.stop - rows.start
        row_max, row_sum = np.full((count, 1), -np.inf, F), np.zeros((count, 1), F)
        o = np.zeros((count, v.shape[1]), F)
        tile_scales = []  # scales of P's tiles, corrected whenever the running maximum grows
        for j, columns in enumerate(key_tiles):
            s = logits(i, j)
            tile_max = s.max(1, keepdims=True)
            new_max = np.maximum(row_max, tile_max)
            p = np.exp(s - new_max)
            s_p = np.exp(tile_max - new_max) / F(127)
            codes = np.rint(F(127) * np.exp(s - tile_max)).astype(np.int32)
            vc, vs = v_hat[j]
            correction = np.exp(row_max - new_max)
            row_sum = row_sum * correction + p.sum(1, keepdims=True)
            o = o * correction + (codes @ vc).astype(F) * s_p * vs
            tile_scales = [scale_p * correction for scale_p in tile_scales] + [s_p]
            row_max = new_max
            r.codes["pv.p"][rows, columns] = codes
        for columns, s_p in zip(key_tiles, tile_scales, strict=True):
            r.scales["pv.p"][rows, columns] = s_p
        r.o[rows], lse_smoothed[rows] = o / row_sum, (row_max + np.log(row_sum))[:, 0]
    r.lse = lse_smoothed + (q * k_mean).sum(1, dtype=F) * scale

    # Algorithm 2.
    delta = (do * r.o).sum(1, keepdims=True, dtype=F)
    half = np.float16
    dp = do.astype(half).astype(F) @ v.astype(half).astype(F).T
    if scheme.delta_from_p:
        for i, rows in enumerate(query_tiles):
            delta[rows] = 0
            for j, columns in enumerate(key_tiles):
                p = np.exp(logits(i, j) - lse_smoothed[rows, None])
                delta[rows] += (p * dp[rows, columns]).sum(1, keepdims=True, dtype=F)
    for j, columns in enumerate(key_tiles):
        k_dq = psi(k_sm[columns], scheme.k_dq)
        r.put("dq.k", columns, whole, *k_dq)
        for i, rows in enumerate(query_tiles):
            p = np.exp(logits(i, j) - lse_smoothed[rows, None])
            p_dv, do_dv = psi(p, scheme.p_dv), psi(do[rows], scheme.do)
            ds = p * (dp[rows, columns] - delta[rows])
            ds_dq, ds_dk = psi(ds, scheme.ds_dq), psi(ds, scheme.ds_dk)
            q_dk = psi(q[rows], scheme.q_dk)
            r.dv[columns] += (p_dv[0].T @ do_dv[0]).astype(F) * p_dv[1].T * do_dv[1]
            r.dq[rows] += (ds_dq[0] @ k_dq[0]).astype(F) * ds_dq[1] * k_dq[1] * scale
            r.dk[columns] += (ds_dk[0].T @ q_dk[0]).astype(F) * ds_dk[1].T * q_dk[1] * scale
            r.p[rows, columns], r.ds[rows, columns] = p, ds
            r.put("dv.p", rows, columns, *p_dv)
            r.put("dv.do", rows, whole, *do_dv)
            r.put("dq.ds", rows, columns, *ds_dq)
            r.put("dk.ds", rows, columns, *ds_dk)
            r.put("dk.q", rows, whole, *q_dk)
    return r
