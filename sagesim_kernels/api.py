"""The public functions: trainable INT8 attention with SDPA's and FlashAttention's arguments."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from sagesim.arguments import autocast, check_spec, check_tensors
from sagesim.presets import FACTORED_QK
from sagesim.spec import AttentionSpec
from sagesim_kernels.ops import forward_op, label_of, parse
from sagesim_kernels.problem import logit_scale
from sagesim_kernels.support import IS_INTERPRETED, head_reason, supports

Layout = Literal["HND", "NHD"]
CausalAlignment = Literal["upper_left", "lower_right"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec = FACTORED_QK,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "upper_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout = "HND",
    return_lse: bool = False,
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v with each product, forward and backward, as `spec` says.

    The numbers are those of `sagesim.attention`, on a GPU and in memory linear in the number of
    tokens. Differentiable once in q, k and v, and through the lse.

    Args:
        q: [..., heads, n_q, d] in layout "HND", [..., n_q, heads, d] in "NHD"; float16, bfloat16 or
            float32, any strides. d up to 256.
        k, v: likewise, [..., kv heads, n_k, d] and [..., kv heads, n_k, d_v].
        spec: the numerics; `supports` says which ones there are kernels for. By default INT8 in QK
            alone, the fastest of those timed on an H200, at smaller errors than the paper's.
        is_causal: query i attends to keys 0..i, or with causal_alignment="lower_right" to
            0..i + n_k - n_q.
        scale: of the logits; 1/sqrt(d) by default.
        enable_gqa: each head of k and v serves a group of consecutive heads of q; neither is
            expanded in memory.
        return_lse: return (o, lse), with lse float32 [..., heads, n_q] in either layout, the
            natural logarithm of the sum of each row's exponentials.
        attn_mask, dropout_p: not supported; anything but the defaults raises.

    Returns:
        o, in the dtype and layout of q.

    Raises:
        TypeError: dtypes that differ, float64, a spec that is none, a scale that is no number.
        ValueError: shapes that do not fit, another dtype or a spec without kernels, a mask or
            dropout, naming what is at fault; nothing is launched.
        RuntimeError: when differentiated twice.

    Source: arXiv 2603.02170, Algorithms 1 and 2; the paper's own scheme is spec=SAGEBWD. Differs
    in: the backward is bit-reproducible, by dQ in a kernel of its own, or parts of it added up in
    one order; the online softmax only regroups sums.
    """
    _refuse(attn_mask, dropout_p)
    check_device(q)
    q, k, v = autocast(q, k, v)
    if layout not in ("HND", "NHD"):
        raise ValueError(f"layout {layout!r}; 'HND' or 'NHD'")
    tokens_first = layout == "NHD"
    if tokens_first:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim < 3:
                raise ValueError(
                    f"{name} of shape {tuple(x.shape)} in layout 'NHD' needs [..., tokens, heads, "
                    "head size]"
                )
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    check_tensors(q, k, v, enable_gqa=enable_gqa)
    check_call(q, v, spec, causal_alignment)
    o, lse, _, _ = forward_op(
        *(_four_axes(x) for x in (q, k, v)),
        None,
        None,
        None,
        None,
        label_of(spec),
        logit_scale(q, scale),
        is_causal,
        causal_alignment == "lower_right",
        tokens_first,
        return_lse,
    )
    if tokens_first:
        o = o.transpose(1, 2).reshape(*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1])
    else:
        o = o.reshape(*q.shape[:-1], v.shape[-1])
    return (o, lse.reshape(q.shape[:-1])) if return_lse else o


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    spec: AttentionSpec = FACTORED_QK,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "upper_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of sequences of unequal length, packed one behind the other.

    Each sequence is computed as if it were alone: its own mean of K, its own blocks.

    Args:
        q: [tokens of all, heads, d]; k, v: [tokens of all, kv heads, d or d_v].
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], ascending from 0 to the number of
            tokens: sequence i has the tokens cu_seqlens[i] up to cu_seqlens[i + 1].
        max_seqlen_q, max_seqlen_k: no sequence is longer. Where Q is smoothed, its means take
            memory as if all were as long.
        Others: as in `attention`. Note that FlashAttention aligns the causal mask lower_right.

    Returns:
        o [tokens, heads, d_v]; with return_lse also lse, float32 [heads, tokens].

    Raises:
        As `attention`; ValueError also for cu_seqlens that do not describe the tensors: at once on
        a CPU, and on a GPU, where looking would wait for it, as a device-side assertion.
    """
    _refuse(None, dropout_p)
    check_device(q)
    q, k, v = autocast(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(f"{name} of shape {tuple(x.shape)}; [tokens, heads, head size] needed")
    _check_packed("q", q, cu_seqlens_q, max_seqlen_q)
    _check_packed("k", k, cu_seqlens_k, max_seqlen_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q of shape {tuple(cu_seqlens_q.shape)} and cu_seqlens_k of shape "
            f"{tuple(cu_seqlens_k.shape)} differ in the number of sequences"
        )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    check_tensors(q, k, v, enable_gqa=enable_gqa)
    check_call(q, v, spec, causal_alignment)
    o, lse, _, _ = forward_op(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        label_of(spec),
        logit_scale(q, scale),
        is_causal,
        causal_alignment == "lower_right",
        True,
        return_lse,
    )
    o = o[0].transpose(0, 1)
    return (o, lse[0]) if return_lse else o


def check_device(q: Tensor) -> None:
    """Raise ValueError unless the kernels run where q is."""
    if q.device.type != ("cpu" if IS_INTERPRETED else "cuda"):
        raise ValueError(
            f"q, k and v are on {q.device}; "
            + (
                "the kernels were imported under TRITON_INTERPRET=1 and run on a CPU"
                if IS_INTERPRETED
                else "the kernels run on CUDA devices (on a CPU under TRITON_INTERPRET=1)"
            )
        )


def _refuse(attn_mask: object, dropout_p: float) -> None:
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is not supported by the kernels; is_causal=True and attention_varlen are "
            "(sagesim.attention emulates masks)"
        )
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p={dropout_p} is not supported; only 0.0 is")


@torch.compiler.assume_constant_result
def _reason_against(label: str, dtype: torch.dtype) -> str | None:
    """Why there is no kernel for this spec; for torch.compile a constant."""
    return _cached_reason(label, dtype)


@lru_cache(maxsize=256)
def _cached_reason(label: str, dtype: torch.dtype) -> str | None:
    return supports(parse(label), dtype=dtype).reason


def check_call(q: Tensor, v: Tensor, spec: AttentionSpec, causal_alignment: str) -> None:
    """Raise for what `check_tensors` does not look at."""
    check_spec(spec)
    if causal_alignment not in ("upper_left", "lower_right"):
        raise ValueError(f"causal_alignment {causal_alignment!r}; 'upper_left' or 'lower_right'")
    reason = head_reason(max(q.shape[-1], v.shape[-1])) or _reason_against(label_of(spec), q.dtype)
    if reason is not None:
        error = TypeError if q.dtype is torch.float64 else ValueError
        raise error(f"no kernel for this call: {reason}")


def _check_kinds(name: str, cu: object, longest: object) -> None:
    if not isinstance(cu, Tensor):
        raise TypeError(f"cu_seqlens_{name} is {cu!r}; a tensor needed")
    if not isinstance(longest, (int, torch.SymInt)):
        raise TypeError(f"max_seqlen_{name} is {longest!r}; an integer needed")


def _check_packed(name: str, x: Tensor, cu: Tensor, longest: int) -> None:
    _check_kinds(name, cu, longest)
    what = f"cu_seqlens_{name}"
    if cu.dtype is not torch.int32 or cu.ndim != 1 or cu.shape[0] == 0 or cu.stride(0) != 1:
        raise ValueError(
            f"{what} is {cu.dtype} of shape {tuple(cu.shape)}; "
            "contiguous int32 [sequences + 1] needed"
        )
    if cu.device != x.device:
        raise ValueError(f"{what} is on {cu.device}, {name} on {x.device}")
    steps = cu.diff()
    fits = (cu[0] == 0) & (cu[-1] == x.shape[0]) & (steps >= 0).all() & (steps <= longest).all()
    message = (
        f"{what} must ascend from 0 to the tokens of {name} in steps of at most max_seqlen_{name}"
    )
    if cu.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(fits, message)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
    elif not fits:
        raise ValueError(f"{message}={longest}; got {cu.tolist()} for {x.shape[0]} tokens")


def _four_axes(x: Tensor) -> Tensor:
    """[..., heads, tokens, channels] as [sequences, heads, tokens, channels]."""
    if x.ndim <= 4:
        return x[(None,) * (4 - x.ndim)]
    return x.flatten(0, -4)
