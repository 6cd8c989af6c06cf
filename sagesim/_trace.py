"""Run the emulator and keep every intermediate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from sagesim._attention import plain_float32
from sagesim._quantize import Operand, QTensor, as_qtensor, from_tiles
from sagesim._typing import Bool, Float
from sagesim.backward import backward
from sagesim.forward import Smoothed, forward
from sagesim.grid import Panel
from sagesim.inputs import Inputs, check
from sagesim.spec import AttentionSpec

_ABSENT: Final = {
    "s": -math.inf,
    "s_recompute": -math.inf,
    "p_recompute": 0.0,
    "dp": 0.0,
    "ds": 0.0,
}
"""The maps a tape sees, and the value of their entries that take no part."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Every intermediate of one emulated attention; maps are [*heads, n_q, n_k].

    Float32 (float64 for float64 inputs), except o, dq, dk, dv, which have the inputs' dtype.
    Entries that take no part (masked) are -inf in s and 0 in p, dp and ds.
    """

    spec: AttentionSpec
    s: Tensor  #: the forward's logits; what K-smoothing subtracts from a row is added back
    p: Tensor  #: softmax of s, before it is rounded for PV
    o: Tensor
    lse: Tensor  #: of the true logits, natural log
    delta: Tensor
    dp: Tensor
    ds: Tensor  #: before it is rounded for dQ and dK
    dq: Tensor
    dk: Tensor
    dv: Tensor
    s_recompute: Tensor  #: the backward's logits; equal to s where qk_recompute equals qk
    p_recompute: Tensor  #: exp(s_recompute - lse), from which dV and dS are made
    operands: Mapping[str, QTensor]
    """Codes and scales of every quantized operand, by "site.tensor", such as "dq.ds"; those of k
    and v as the first query head of each group sees them."""


def trace(
    q: Float[Tensor, "*heads n_q d"],
    k: Float[Tensor, "*kv_heads n_k d"],
    v: Float[Tensor, "*kv_heads n_k d_v"],
    do: Float[Tensor, "*heads n_q d_v"],
    *,
    spec: AttentionSpec,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "*mask #n_q #n_k"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Trace:
    """What `attention` and its backward compute for the gradient do of o, all of it.

    o, dq, dk and dv are the bytes that `attention` gives. Holds whole maps: memory grows with
    n_q * n_k, at some 40 bytes an entry.

    Args, Raises: as `sagesim.attention`; do is shaped and typed as o, or ValueError names both.

    >>> from sagesim import SAGEBWD
    >>> t = trace(*torch.randn(4, 1, 1, 8, 4), spec=SAGEBWD)
    >>> t.operands["dq.ds"].codes.shape, t.operands["dq.ds"].codes.dtype
    (torch.Size([1, 1, 8, 8]), torch.int8)
    """
    x = check(
        q,
        k,
        v,
        spec=spec,
        is_causal=is_causal,
        attn_mask=attn_mask,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    recorder = Recorder(x, maps=frozenset(_ABSENT), operands=True)
    o, lse, lse_smoothed, dq, dk, dv = run(x, do, recorder)
    s, p = recorder.maps["s"], torch.exp(recorder.maps["s"] - _finite(lse_smoothed)[..., None])
    s_recompute = recorder.maps["s_recompute"]
    if spec.smoothing.k and x.grid.n_q and x.grid.n_k:
        shift = Smoothed.of(x, slice(None)).shift
        assert shift is not None
        s, s_recompute = s + shift[..., None], s_recompute + shift[..., None]
    return Trace(
        spec=spec,
        s=x.query_heads(s),
        p=x.query_heads(p),
        o=o,
        lse=x.query_heads(lse),
        delta=x.query_heads(recorder.delta),
        dp=x.query_heads(recorder.maps["dp"]),
        ds=x.query_heads(recorder.maps["ds"]),
        dq=dq,
        dk=dk,
        dv=dv,
        s_recompute=x.query_heads(s_recompute),
        p_recompute=x.query_heads(recorder.maps["p_recompute"]),
        operands=MappingProxyType(recorder.quantized()),
    )


class Recorder:
    """A `sagesim.forward.Tape` that keeps the named maps whole, and operands if asked to."""

    def __init__(self, x: Inputs, *, maps: frozenset[str], operands: bool) -> None:
        self._x = x
        shape = (x.q.shape[0], x.grid.n_q, x.grid.n_k)
        self.maps = {name: x.q.new_full(shape, _ABSENT[name]) for name in maps}
        self.delta = x.q.new_zeros(shape[:2])
        self._operands: dict[str, QTensor] | None = {} if operands else None

    def map(self, name: str, heads: slice, panel: Panel, tiles: Tensor) -> None:
        if name not in self.maps:
            return
        if panel.ignored is not None:
            tiles = tiles.masked_fill(panel.ignored, _ABSENT[name])
        rows, columns = self._extent(panel)
        self.maps[name][heads, rows, columns] = from_tiles(
            tiles, rows.stop - rows.start, columns.stop
        )

    def rows(self, name: str, heads: slice, values: Tensor) -> None:
        assert name == "delta"
        self.delta[heads] = values

    def operand(
        self, site: str, tensor: str, heads: slice, panel: Panel | None, operand: Operand
    ) -> None:
        if self._operands is None or operand.scale is None:
            return
        key = f"{site}.{tensor}"
        if panel is None:
            n = self._x.grid.n_k if tensor in ("k", "v") else self._x.grid.n_q
            part = as_qtensor(operand, n, operand.values.shape[-1])
            shape, scale_shape = part.codes.shape[1:], part.scale.shape[1:]
            rows, columns = slice(None), slice(None)
        else:
            rows, columns = self._extent(panel)
            part = as_qtensor(operand, rows.stop - rows.start, columns.stop)
            shape = scale_shape = (self._x.grid.n_q, self._x.grid.n_k)
        if key not in self._operands:
            heads_total = self._x.q.shape[0]
            self._operands[key] = QTensor(
                torch.zeros(heads_total, *shape, dtype=part.codes.dtype, device=part.codes.device),
                torch.ones(heads_total, *scale_shape, device=part.codes.device),
            )
        whole = self._operands[key]
        whole.codes[heads, rows, columns] = part.codes
        whole.scale[heads, rows, columns] = part.scale

    def quantized(self) -> dict[str, QTensor]:
        """The operands seen, with the caller's leading shapes of q, or of k for k and v."""
        shaped: dict[str, QTensor] = {}
        for key, whole in (self._operands or {}).items():
            codes, scale = self._x.query_heads(whole.codes), self._x.query_heads(whole.scale)
            tensor = key.rpartition(".")[2]
            if tensor in ("k", "v") and self._x.groups > 1:
                step = slice(None, None, self._x.groups)
                codes, scale = codes[..., step, :, :], scale[..., step, :, :]
            shaped[key] = QTensor(codes, scale)
        return shaped

    def _extent(self, panel: Panel) -> tuple[slice, slice]:
        grid = self._x.grid
        rows = slice(panel.rows.start, min(panel.rows.stop, grid.n_q))
        return rows, slice(0, min(panel.key_blocks * grid.block_k, grid.n_k))


def check_gradient(x: Inputs, do: Tensor) -> None:
    """Raise ValueError unless do is shaped and typed as the output of x."""
    shape = (*x.heads, x.grid.n_q, x.v.shape[-1])
    if do.shape != shape or do.dtype != x.dtype:
        raise ValueError(
            f"do is {do.dtype} {tuple(do.shape)}; the gradient of o is {x.dtype} {shape}"
        )


def run(x: Inputs, do: Tensor, recorder: Recorder) -> tuple[Tensor, ...]:
    """Forward and backward as `attention` runs them, under a recorder.

    Returns: o, lse, lse_smoothed, dq, dk, dv; lse and lse_smoothed still [Z, n_q].
    """
    check_gradient(x, do)
    with torch.no_grad(), plain_float32(x.q.device.type):
        result = forward(x, recorder)
        o = x.query_heads(result.o).to(x.dtype)
        grads = backward(x, x.widen(do), x.widen(o), result.lse_smoothed, recorder)
    dq = x.query_heads(grads.dq).to(x.dtype)
    dk, dv = x.key_heads(grads.dk).to(x.dtype), x.key_heads(grads.dv).to(x.dtype)
    return o, result.lse, result.lse_smoothed, dq, dk, dv


def _finite(lse: Tensor) -> Tensor:
    """lse with 0 in rows that attend to nothing, so that exp(-inf - lse) is 0 there."""
    return lse.masked_fill(lse == -math.inf, 0.0)
