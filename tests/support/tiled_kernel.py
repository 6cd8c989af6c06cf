"""Attention computed tile by tile as in a kernel, for specs that a kernel supports.

A second implementation of docs/numerics.md, independent of the package. It has an online softmax
with a running maximum, exponentials of base 2, one factor per row (scale of Q * logit scale *
log2(e)) that is applied before the scale of K, and keys in the outer loop of the backward.

Tests use it in two ways: the fuzzer must accept it, although it rounds in another order than the
emulator, and must reject it if one of `BUGS` is planted.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sagesim import AttentionSpec, Delta, Granularity, Precision, RoundingMode
from sagesim.problem import resolve_input16
from sagesim.spec import OPERANDS

LOG2E = math.log2(math.e)

BUGS: dict[str, tuple[str, str]] = {
    "causal mask off by one": ("o", "qk"),
    "logit scale lost": ("o", "qk"),
    "logit scale of the padded head size": ("o", "qk"),
    "mean of K over the batch": ("o", "qk"),
    "mean of K over all heads": ("o", "qk"),
    "K not smoothed": ("o", "qk"),
    "scales of Q and K swapped": ("o", "qk"),
    "ties away from zero": ("o", "qk"),
    "codes up to 127.5": ("o", "qk"),
    "epsilon in the scale": ("o", "qk"),
    "tail reads the next head": ("o", "qk"),
    "head of K by remainder": ("o", "qk"),
    "P rounded by its tile": ("o", "pv"),
    "running sum not corrected": ("o", "qk"),
    "V of the forward not dequantized by channel": ("o", "pv"),
    "P of the backward from logits not smoothed": ("dv", "qk_recompute"),
    "dO per tensor, not per block": ("dv", "dv"),
    "delta from O before it is rounded": ("dq", "dp"),
    "delta forgotten": ("dq", "dp"),
    "delta of the next row": ("dq", "dp"),
    "dP in 8 bit": ("dq", "dp"),
    "dQ not scaled": ("dq", "dq"),
    "dQ with unsmoothed K": ("dq", "dq"),
    "dK not scaled": ("dk", "dk"),
    "dK without the mean of Q": ("dk", "dk"),
    "dK of one query head of the group": ("dv", "dv"),
    "dV rounded to 16 bit for each tile": ("dv", "dv"),
    "mean of K over the padded block": ("o", "qk"),
    "keys that no query attends to in the mean of K": ("o", "qk"),
    "codes truncated": ("o", "qk"),
    "dP in bfloat16": ("dq", "dp"),
    "dS per tile": ("dq", "dq"),
    "dS in bfloat16": ("dq", "dq"),
    "codes of dS truncated": ("dq", "dq"),
    "heads of K by remainder, also in dK": ("o", "qk"),
}
"""For each bug, the first result that it changes and the site that the fuzzer infers.

The fuzzer infers the site from the outputs alone. If the running sum is not corrected, L is wrong,
and so is P in the backward. A bug in S has the same effect, so the fuzzer infers qk.
"""

G = Granularity
_AXES = {
    G.PerBlock: (-2, -1),
    G.PerTile: (-2, -1),
    G.PerToken: (-1,),
    G.PerTileRow: (-1,),
    G.PerBlockChannel: (-2,),
    G.PerTileColumn: (-2,),
}


def supported(spec: AttentionSpec) -> bool:
    """Whether every scale is that of a tile, of a row of a tile, or of a column of a tile."""
    sites = [spec.site(site) for site in OPERANDS]
    scaled = [s for s in sites if s.precision.is_scaled]
    return (
        spec.rounding.mode is not RoundingMode.STOCHASTIC
        and all(s.precision is Precision.INT8 and s.lhs in _AXES and s.rhs in _AXES for s in scaled)
        and (spec.pv.precision is not Precision.INT8 or spec.pv.lhs is G.PerTileRow)
    )


def kernel(spec: AttentionSpec, bug: str = "") -> Callable[..., Tensor]:
    """A function with SDPA's arguments that computes `spec`, with one of `BUGS` or none."""
    assert bug == "" or bug in BUGS, bug

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert enable_gqa or q.shape[1] == k.shape[1]
        return _Attention.apply(q, k, v, _Tiled(spec, bug, is_causal, scale, q, k))

    return attention


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, tiled):
        o = tiled.forward(q, k, v)
        ctx.save_for_backward(q, k, v, o)
        ctx.tiled = tiled
        return o

    @staticmethod
    def backward(ctx, do):
        return (*ctx.tiled.backward(*ctx.saved_tensors, do), None)


class _Tiled:
    def __init__(self, spec, bug, is_causal, scale, q, k):
        self.bug, self.is_causal = bug, is_causal
        self.spec = resolve_input16(spec, q.dtype)
        self.b, self.h, self.n_q, self.d = q.shape
        self.h_k, self.n_k = k.shape[1:3]
        self.groups = self.h // self.h_k
        d = (
            2 ** math.ceil(math.log2(self.d))
            if bug == "logit scale of the padded head size"
            else self.d
        )
        self.scale = 1 / math.sqrt(d) if scale is None else scale
        if bug == "logit scale lost" and scale is None:
            self.scale = 1.0
        self.dtype = q.dtype
        self.dtypes_16_bit = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
        # Under a causal mask, keys beyond the last query are padding.
        self.n_valid = min(self.n_k, self.n_q) if is_causal else self.n_k
        bq, bk = spec.block_q, spec.block_k
        self.rows = [slice(i, min(i + bq, self.n_q)) for i in range(0, self.n_q, bq)]
        self.columns = [slice(j, min(j + bk, self.n_valid)) for j in range(0, self.n_valid, bk)]

    # --- operands ---------------------------------------------------------------------------

    def psi(self, x, granularity):
        """Quantize one tile [Z, n, m]: return codes and scales."""
        amax = x.abs().amax(_AXES[granularity], keepdim=True)
        code_max = 127.5 if self.bug == "codes up to 127.5" else 127.0
        if self.bug == "epsilon in the scale":
            amax = amax + 1e-6
        inverse = torch.full_like(amax, code_max) / amax
        overflows = inverse.isinf()
        y = x * inverse.masked_fill(overflows, 0.0)
        away = self.spec.rounding.mode is RoundingMode.HALF_AWAY
        if away != (self.bug == "ties away from zero"):
            codes = torch.copysign((y.abs().double() + 0.5).floor().float(), y)
        elif self.bug == "codes truncated":
            codes = y.trunc()
        else:
            codes = y.round()
        codes = codes.clamp(-127, 127)
        return codes, (amax / torch.full_like(amax, code_max)).masked_fill(overflows, 1.0)

    def token(self, site, tensor, x):
        """Round one block of tokens for a site: return values, and scales or None."""
        m = self.spec.site(site)
        granularity = m.lhs if OPERANDS[site][0] == tensor else m.rhs
        return self.operand(m.precision, granularity, x)

    def operand(self, precision, granularity, x):
        if precision is Precision.FP32:
            return x, None
        if precision in self.dtypes_16_bit:
            return x.to(self.dtypes_16_bit[precision]).float(), None
        return self.psi(x, granularity)

    @staticmethod
    def dot(left, right, row=None, column=None):
        """The product of one tile: its integer sum, rounded to float32, times its scales."""
        if row is None:
            return left @ right
        return (left.double() @ right.double()).float() * row * column

    # --- the two passes ---------------------------------------------------------------------

    def prepare(self, q, k, v):
        z = self.b * self.h
        q = q.float().reshape(z, self.n_q, self.d)
        heads = torch.arange(self.h) // self.groups
        if self.bug.startswith(("head of K by remainder", "heads of K by remainder")):
            heads = torch.arange(self.h) % self.h_k
        self.every_key = k.float()[:, heads].reshape(z, self.n_k, self.d)
        k, v = (
            x.float()[:, heads, : self.n_valid].reshape(z, self.n_valid, self.d) for x in (k, v)
        )
        self.k_raw, self.q_raw = k, q
        if self.spec.smoothing.k and self.bug != "K not smoothed":
            mean = k.double().mean(1, keepdim=True)
            if self.bug == "mean of K over the padded block":
                mean = mean * self.n_valid / (self.n_valid + -self.n_valid % self.spec.block_k)
            if self.bug == "keys that no query attends to in the mean of K":
                mean = self.every_key.double().mean(1, keepdim=True)
            if self.bug == "mean of K over the batch":
                by_batch = mean.unflatten(0, (self.b, self.h)).mean(0, keepdim=True)
                mean = by_batch.expand(self.b, -1, -1, -1).flatten(0, 1)
            if self.bug == "mean of K over all heads":
                by_head = mean.unflatten(0, (self.b, self.h)).mean(1, keepdim=True)
                mean = by_head.expand(-1, self.h, -1, -1).flatten(0, 1)
            k = k - mean.float()
        self.q_means = None
        if self.spec.smoothing.q:
            self.q_means = [q[:, r].double().mean(1, keepdim=True).float() for r in self.rows]
            q = torch.cat([q[:, r] - m for r, m in zip(self.rows, self.q_means, strict=True)], 1)
        self.q, self.k, self.v = q, k, v

    def tail(self, x, block):
        """A block of tokens and its length; with the bug, more tokens follow the last block's."""
        part = x[:, block]
        if self.bug == "tail reads the next head":
            size = self.spec.block_k - (block.stop - block.start)
            if size:
                behind = x.roll(-1, 0)[:, :size] * 3
                return torch.cat([part, behind], 1), part.shape[1]
        return part, part.shape[1]

    def key_operand(self, site, tensor, block):
        x, n = self.tail(self.k if tensor == "k" else self.v, block)
        values, s = self.token(site, tensor, x)
        return values[:, :n], s if s is None or s.shape[1] == 1 else s[:, :n]

    def logits(self, site, i, j):
        """Masked logits of a tile, times log2(e)."""
        rows, columns = self.rows[i], self.columns[j]
        qc, qs = self.token(site, "q", self.q[:, rows])
        kc, ks = self.key_operand(site, "k", columns)
        factor = torch.tensor(self.scale * LOG2E, dtype=torch.float32)
        if qs is None:
            s = (qc @ kc.mT) * factor
        else:
            if self.bug == "scales of Q and K swapped":
                qs, ks = ks[:, :1], qs[:, :1]
            s = self.dot(qc, kc.mT, qs * factor, ks.mT)
        if self.q_means is not None:
            s = s + self.q_means[i] @ self.k[:, columns].mT * factor
        return s.masked_fill(self.masked(rows, columns), -math.inf)

    def masked(self, rows, columns):
        if not self.is_causal:
            return torch.zeros((), dtype=torch.bool)
        row = torch.arange(rows.start, rows.stop)[:, None]
        offset = 1 if self.bug == "causal mask off by one" else 0
        return torch.arange(columns.start, columns.stop) > row + offset

    def tiles(self, i):
        """The key blocks that a block of queries attends to."""
        last = self.rows[i].stop if self.is_causal else self.n_valid
        return [j for j, columns in enumerate(self.columns) if columns.start < last]

    def forward(self, q, k, v):
        self.prepare(q, k, v)
        o = torch.zeros_like(self.q_raw)
        self.lse = torch.zeros(*o.shape[:2], 1)
        int8 = self.spec.pv.precision is Precision.INT8
        for i, rows in enumerate(self.rows):
            row_max = torch.full_like(self.lse[:, rows], -math.inf)
            row_sum, accumulator = torch.zeros_like(row_max), torch.zeros_like(o[:, rows])
            for j in self.tiles(i):
                s = self.logits("qk", i, j)
                tile_max = s.amax(-1, keepdim=True)
                new_max = torch.maximum(row_max, tile_max)
                correction = torch.exp2(row_max - new_max)
                vc, vs = self.key_operand("pv", "v", self.columns[j])
                if self.bug == "V of the forward not dequantized by channel" and vs is not None:
                    vs = vs.amax(-1, keepdim=True)
                p = torch.exp2(s - new_max)
                row_sum = row_sum * (1.0 if self.bug == "running sum not corrected" else correction)
                row_sum = row_sum + p.sum(-1, keepdim=True)
                if int8:
                    # A row of a tile may be fully masked.
                    finite = tile_max.masked_fill(tile_max == -math.inf, 0.0)
                    e = torch.exp2(s - finite)
                    codes, scale_p = (e * 127).round(), torch.exp2(tile_max - new_max) / 127
                    if self.bug == "codes truncated":
                        codes = (e * 127).trunc()
                    if self.bug == "P rounded by its tile":
                        codes, scale_p = self.psi(p, G.PerTile)
                    accumulator = accumulator * correction + self.dot(codes, vc, scale_p, vs)
                else:
                    p, _ = self.operand(self.spec.pv.precision, None, p)
                    accumulator = accumulator * correction + p @ vc
                row_max = new_max
            o[:, rows] = accumulator * (1 / row_sum)
            self.lse[:, rows] = row_max + torch.log2(row_sum)
        self.o_float = o
        return o.to(self.dtype).reshape(self.b, self.h, self.n_q, self.d)

    def backward(self, q, k, v, o, do):
        spec = self.spec
        do = do.float().reshape(self.q_raw.shape)
        o = o.float().reshape(self.q_raw.shape)
        if self.bug == "delta from O before it is rounded":
            o = self.o_float
        delta = (do * o).sum(-1, keepdim=True)
        if spec.delta is Delta.FROM_P:
            delta = torch.zeros_like(delta)
            for i, rows in enumerate(self.rows):
                for j in self.tiles(i):
                    delta[:, rows] += (self.p(i, j) * self.dp(do, i, j)).sum(-1, keepdim=True)
        if self.bug == "delta forgotten":
            delta = torch.zeros_like(delta)
        if self.bug == "delta of the next row":
            delta = delta.roll(-1, 1)
        dq = torch.zeros_like(self.q)
        dk, dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        for j, columns in enumerate(self.columns):
            kc, ks = self.key_operand("dq", "k", columns)
            if self.bug == "dQ with unsmoothed K":
                kc, ks = self.token("dq", "k", self.k_raw[:, columns])
            for i, rows in enumerate(self.rows):
                if j not in self.tiles(i):
                    continue
                p = self.p(i, j)
                ds = p * (self.dp(do, i, j) - delta[:, rows])
                pc, ps = self.operand(spec.dv.precision, spec.dv.lhs, p)
                doc, dos = self.token("dv", "do", do[:, rows])
                if self.bug == "dO per tensor, not per block" and dos is not None:
                    whole, dos = self.psi(do, G.PerBlock)
                    doc = whole[:, rows]
                part = self.dot(pc.mT, doc, None if ps is None else ps.mT, dos)
                if self.bug == "dV rounded to 16 bit for each tile":
                    part = (dv[:, columns] + part).half().float() - dv[:, columns]
                dv[:, columns] += part
                dsc, dss = self.rounded_ds(spec.dq, ds)
                dq[:, rows] += self.dot(dsc, kc, dss, ks)
                dsc, dss = self.rounded_ds(spec.dk, ds)
                qc, qs = self.token("dk", "q", self.q[:, rows])
                dk[:, columns] += self.dot(dsc.mT, qc, None if dss is None else dss.mT, qs)
                if self.q_means is not None and self.bug != "dK without the mean of Q":
                    dk[:, columns] += ds.sum(1)[..., None] * self.q_means[i]
        if self.bug != "dQ not scaled":
            dq = dq * self.scale
        if self.bug != "dK not scaled":
            dk = dk * self.scale
        pad = (0, 0, 0, self.n_k - self.n_valid)
        dk, dv = (torch.nn.functional.pad(x, pad) for x in (dk, dv))
        grouped = (x.unflatten(0, (self.b, self.h_k, self.groups)) for x in (dk, dv))
        if self.bug == "heads of K by remainder, also in dK":
            grouped = [
                x.unflatten(0, (self.b, self.groups, self.h_k)).transpose(1, 2) for x in (dk, dv)
            ]
        if self.bug == "dK of one query head of the group":
            dk, dv = (x[:, :, 0] for x in grouped)
        else:
            dk, dv = (x.sum(2) for x in grouped)
        return dq.reshape(q.shape).to(self.dtype), dk.to(self.dtype), dv.to(self.dtype)

    def rounded_ds(self, site, ds):
        if self.bug == "dS in bfloat16":
            return ds.bfloat16().float(), torch.ones(1, 1, 1)
        if self.bug == "codes of dS truncated":
            amax = ds.abs().amax(_AXES[site.lhs], keepdim=True)
            inverse = (torch.full_like(amax, 127) / amax).nan_to_num(posinf=0.0)
            return (ds * inverse).trunc(), amax / torch.full_like(amax, 127)
        return self.operand(
            site.precision, G.PerTile if self.bug == "dS per tile" else site.lhs, ds
        )

    def p(self, i, j):
        lse = self.lse[:, self.rows[i]]
        if self.bug == "P of the backward from logits not smoothed":
            smooth, self.k = self.k, self.k_raw
            s = self.logits("qk_recompute", i, j)
            self.k = smooth
        else:
            s = self.logits("qk_recompute", i, j)
        return torch.exp2(s - lse)

    def dp(self, do, i, j):
        rows, columns = self.rows[i], self.columns[j]
        doc, dos = self.token("dp", "do", do[:, rows])
        vc, vs = self.key_operand("dp", "v", columns)
        if self.bug == "dP in 8 bit":
            (doc, dos), (vc, vs) = (
                self.psi(do[:, rows], G.PerToken),
                self.psi(self.v[:, columns], G.PerToken),
            )
        if self.bug == "dP in bfloat16":
            return do[:, rows].bfloat16().float() @ self.v[:, columns].bfloat16().float().mT
        return self.dot(doc, vc.mT, dos, None if vs is None else vs.mT)
