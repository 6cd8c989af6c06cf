"""The public functions: trainable INT8 attention with SDPA's and FlashAttention's arguments."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, Literal

import torch
from torch import Tensor

from sagesim.problem import (
    NO_WINDOW,
    CausalAlignment,
    autocast,
    check_alignment,
    check_flag,
    check_is_tensor,
    check_key_padding,
    check_lengths,
    check_sinks,
    check_softcap,
    check_spec,
    check_tensors,
    check_window,
    with_four_axes,
)
from sagesim.spec import FACTORED_QK, AttentionSpec
from sagesim_kernels.eager import attend
from sagesim_kernels.interpreter import IS_INTERPRETED
from sagesim_kernels.known_calls import KnownCall, known_call, remember_call
from sagesim_kernels.labels import label_of, parse
from sagesim_kernels.operands import logit_scale
from sagesim_kernels.ops import Call
from sagesim_kernels.packing import check_packing
from sagesim_kernels.support import head_reason, supports
from sagesim_kernels.target import device_reason
from sagesim_kernels.traced import is_traced

Layout = Literal["HND", "NHD"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec = FACTORED_QK,
    is_causal: bool = False,
    causal_alignment: CausalAlignment | None = None,
    window: tuple[int, int] = NO_WINDOW,
    key_mask: Tensor | None = None,
    seqused_k: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout = "HND",
    return_lse: bool = False,
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v on a GPU; `spec` sets the precision of each matrix product.

    Computes what `sagesim.attention` emulates, in memory linear in the number of tokens.
    Differentiable once in q, k, v and sinks, through o and lse.

    Args:
        q: [..., heads, n_q, d] in layout "HND", [..., n_q, heads, d] in layout "NHD"; float16,
            bfloat16 or float32, any strides, d up to 256.
        k: [..., kv heads, n_k, d] or [..., n_k, kv heads, d], with the dtype of q.
        v: [..., kv heads, n_k, d_v] or [..., n_k, kv heads, d_v], with the dtype of q.
        spec: the numerics; `supports` says whether there are kernels for a spec. The default, INT8
            in QK alone, has smaller errors than the paper's scheme and was the fastest spec with
            INT8 on Hopper when all were timed. Another may suit another GPU: `default_spec`.
        is_causal: query i attends to keys 0..i.
        causal_alignment: "lower_right" puts query i at key i + n_k - n_q, for is_causal and window,
            instead of at key i ("upper_left", and None). A window needs it if n_q and n_k differ.
        window: (left, right): a query attends to at most `left` keys before its own and `right`
            keys after it; -1: no limit. Keys outside of every query's window are not read.
        key_mask: bool [..., n_k], the leading shape of q without its heads; True attends. Nothing
            of another key reaches a result, NaN included.
        seqused_k: int32 or int64 [...]: the same as key_mask = arange(n_k) < seqused_k, and faster.
            Later keys are not read. On a GPU, lengths are not checked: those above n_k count as
            n_k, and those below 0 as 0.
        sinks: floating [heads of q], a further logit in the sum of each row's exponentials.
        softcap: c, from 2^-7 to 2^126, replaces each logit S by c tanh(S / c), after the scale.
        scale: the factor of the logits, from -2^100 to 2^100; 1/sqrt(d) by default.
        enable_gqa: each head of k and v serves a group of consecutive heads of q, without being
            expanded in memory.
        layout: the order of the heads and tokens of q, k, v and o.
        return_lse: return (o, lse) instead of o.
        attn_mask, dropout_p: not supported; they exist to raise an error.

    Returns:
        o, in the dtype and layout of q. Heads and tokens have the order in memory that they have in
        q, once its batch axes are joined to one; those of gradients that of q, k and v. lse is
        float32 [..., heads, n_q] in both layouts, the natural logarithm of the sum of exp(logit)
        over a row; -inf if a query attends to no key.

    Raises:
        TypeError: if dtypes differ or are float64, if spec is not an AttentionSpec, or if an option
            has another type.
        ValueError: if shapes do not fit, if there is no kernel for the spec, dtype, head size or
            GPU, or if attn_mask or dropout is given. The message names the value; no kernel is
            launched.
        RuntimeError: if a gradient is differentiated again, or if Triton compiled a kernel wrongly
            and no other one computes the call.

    Source: arXiv 2603.02170, Algorithms 1 and 2; the paper's scheme is spec=SAGEBWD. Unlike the
    paper's, the backward adds in a fixed order and is bit-reproducible. The online softmax only
    regroups sums.

    >>> import torch
    >>> from sagesim_kernels import attention
    >>> q = k = v = torch.randn(1, 8, 1024, 64, device="cuda").half()  # doctest: +SKIP
    >>> attention(q, k, v, is_causal=True).shape  # doctest: +SKIP
    torch.Size([1, 8, 1024, 64])
    """
    _check_unsupported(attn_mask, dropout_p)
    options = (window, is_causal, causal_alignment, softcap, scale, enable_gqa, layout, return_lse)
    signature = known = None
    if key_mask is None and seqused_k is None and sinks is None:
        signature, known = known_call(q, k, v, spec, options)
    if known is None:
        known = _checked(q, k, v, spec, *options, key_mask, seqused_k, sinks)
        remember_call(signature, known)
    if known.is_cast:
        q, k, v = autocast(q, k, v)
    shape = q.shape
    if len(shape) != 4:
        q, k, v = with_four_axes(q), with_four_axes(k), with_four_axes(v)
    if layout == "NHD":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    o, lse = attend(q, k, v, known.call, with_lse=return_lse)
    rows = shape[:-1]
    if layout == "NHD":
        o, rows = o.transpose(1, 2), (*shape[:-3], shape[-2], shape[-3])
    if len(shape) != 4:
        o = o.reshape(*shape[:-1], o.shape[-1])
        lse = None if lse is None else lse.reshape(rows)
    return o if lse is None else (o, lse)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    window: tuple[int, int],
    is_causal: bool,
    causal_alignment: CausalAlignment | None,
    softcap: float | None,
    scale: float | None,
    enable_gqa: bool,
    layout: Layout,
    return_lse: bool,
    key_mask: Tensor | None,
    seqused_k: Tensor | None,
    sinks: Tensor | None,
) -> KnownCall:
    """Check the arguments of `attention`, and return its call; raise as it does."""
    check_device(q)
    given = q, k, v
    q, k, v = autocast(q, k, v)
    is_cast = [x.dtype for x in (q, k, v)] != [x.dtype for x in given]
    if layout not in ("HND", "NHD"):
        raise ValueError(f"layout is {layout!r}; it must be 'HND' or 'NHD'")
    if layout == "NHD":
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim < 3:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; layout 'NHD' needs [..., tokens, heads, "
                    "head size]"
                )
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    check_flag("return_lse", return_lse)
    call = _checked_call(
        q,
        k,
        v,
        spec,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        cu_seqlens=None,
        window=window,
        sinks=sinks,
        softcap=softcap,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    check_key_padding(key_mask, seqused_k, q, k)
    if seqused_k is not None:
        if not (seqused_k.is_cuda or is_traced(seqused_k)):
            check_lengths(seqused_k, k.shape[-2])
        seqused_k = seqused_k.reshape(-1)
    if key_mask is not None:
        key_mask = key_mask.reshape(math.prod(key_mask.shape[:-1]), k.shape[-2])
    return KnownCall(spec, call._replace(key_mask=key_mask, seqused_k=seqused_k), is_cast)


def _checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    is_causal: bool,
    causal_alignment: CausalAlignment | None,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    window: tuple[int, int],
    sinks: Tensor | None,
    softcap: float | None,
    scale: float | None,
    enable_gqa: bool,
) -> Call:
    """Check arguments of `attention` and `attention_varlen`, and return their call.

    The call is dense and without padding. cu_seqlens: of queries and of keys, if they are packed.
    """
    check_call(q, k, v, spec, enable_gqa=enable_gqa)
    check_flag("is_causal", is_causal)
    check_window(window)
    queries, keys = cu_seqlens or (q.shape[-2], k.shape[-2])
    check_alignment(causal_alignment, window, queries, keys)
    check_sinks(sinks, q)
    check_softcap(softcap)
    return Call(
        sinks=sinks,
        key_mask=None,
        seqused_k=None,
        cu_q=None,
        cu_k=None,
        softcap_tensor=None,
        longest_q=None,
        longest_k=None,
        spec=label_of(spec),
        scale=logit_scale(q, scale),
        is_causal=is_causal,
        lower_right=causal_alignment == "lower_right",
        left=_side(window[0]),
        right=_side(window[1]),
        softcap=None if softcap is None else float(softcap),
    )


def _side(keys: int) -> int:
    """Return a side of a window as a number of 64 bits, which operators of PyTorch take."""
    return keys if isinstance(keys, torch.SymInt) else min(keys, _WIDEST)


_WIDEST: Final = 2**62


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
    causal_alignment: CausalAlignment | None = None,
    window: tuple[int, int] = NO_WINDOW,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attention` of packed sequences of unequal length.

    Each sequence is computed as if it were alone, with its own mean of K and its own blocks.

    Args:
        q: [total tokens, heads, d].
        k, v: [total tokens, kv heads, d] and [total tokens, kv heads, d_v].
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], ascending from 0 to the total. Sequence i
            has tokens cu_seqlens[i] to cu_seqlens[i + 1]. In self-attention pass one tensor for
            both: then the kernels know that the lengths are equal, and do not copy operands.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths of the sequences. If the spec
            smooths Q, the memory for its means grows with sequences * max_seqlen_q.
        Others: see `attention`. FlashAttention aligns the causal mask "lower_right". A window needs
            causal_alignment unless cu_seqlens_q and cu_seqlens_k are one tensor.

    Returns:
        o [total tokens, heads, d_v], with the order of tokens and heads in memory that q has; with
        return_lse, (o, lse), with lse float32 [heads, tokens].

    Raises:
        As `attention`. Also ValueError if cu_seqlens do not describe the tensors. On a GPU this is
        a device-side assertion, because reading them would wait for the device.
    """
    _check_unsupported(None, dropout_p)
    check_flag("return_lse", return_lse)
    check_device(q)
    q, k, v = autocast(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; needed: [tokens, heads, head size]"
            )
    check_packing(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    call = _checked_call(
        q,
        k,
        v,
        spec,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
        window=window,
        sinks=sinks,
        softcap=softcap,
        scale=scale,
        enable_gqa=enable_gqa,
    )._replace(
        cu_q=cu_seqlens_q,
        cu_k=None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k,
        longest_q=max_seqlen_q,
        longest_k=max_seqlen_k,
    )
    o, lse = attend(q, k, v, call, with_lse=return_lse)
    o = o.squeeze(0).transpose(0, 1)  # an index would copy the gradient
    return o if lse is None else (o, lse.squeeze(0))


def check_device(q: Tensor) -> None:
    """Raise ValueError if the kernels do not run on the device of q, TypeError if it has none."""
    check_is_tensor("q", q)
    if q.device.type != ("cpu" if IS_INTERPRETED else "cuda"):
        raise ValueError(
            f"q, k and v are on {q.device}; "
            + (
                "the kernels were imported under TRITON_INTERPRET=1 and run on a CPU"
                if IS_INTERPRETED
                else "the kernels run on CUDA devices (on a CPU under TRITON_INTERPRET=1)"
            )
        )


def _check_unsupported(attn_mask: object, dropout_p: float) -> None:
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is not supported by the kernels; use is_causal, window, key_mask, "
            "attention_varlen, or the emulation of masks in sagesim.attention"
        )
    if isinstance(dropout_p, Tensor) or dropout_p != 0.0:
        raise ValueError(f"dropout_p={dropout_p!r} is not supported; only 0.0 is")


@torch.compiler.assume_constant_result
def _reason_against(label: str, dtype: torch.dtype, device: int | None) -> str | None:
    """Return why there is no kernel for this spec, or None; torch.compile sees a constant.

    device: the number of a CUDA device; None for a CPU.
    """
    return _cached_reason(label, dtype, device)


@lru_cache(maxsize=256)
def _cached_reason(label: str, dtype: torch.dtype, device: int | None) -> str | None:
    of_device = None if device is None else device_reason(device)
    return of_device or supports(parse(label), dtype=dtype).reason


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    enable_gqa: bool,
) -> None:
    """Raise TypeError or ValueError unless there are kernels for these arguments.

    q, k, v: [..., heads, tokens, head size].
    """
    check_flag("enable_gqa", enable_gqa)
    check_tensors(q, k, v, enable_gqa=enable_gqa)
    check_spec(spec)
    device = q.device.index if q.is_cuda else None
    reason = head_reason(max(q.shape[-1], v.shape[-1]))
    reason = reason or _reason_against(label_of(spec), q.dtype, device)
    if reason is not None:
        error = TypeError if q.dtype is torch.float64 else ValueError
        raise error(f"no kernel for this call: {reason}")
