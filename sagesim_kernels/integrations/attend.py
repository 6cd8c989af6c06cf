"""What every integration calls: attention by the kernels on CUDA devices, else by the emulator.

The frameworks pass options that SDPA does not have. `Options` holds them; an option that is not
computed raises an error here, for all frameworks in the same place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sagesim import emulator
from sagesim.spec import FACTORED_QK, AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of an attention call.

    spec: the numerics.
    scale: the factor of the logits; None is 1/sqrt(d).
    is_causal: query i attends to keys 0..i + n_k - n_q ("lower_right"), or 0..i.
    lower_right: how the causal mask and the window are aligned if n_q differs from n_k.
    window: FlashAttention's (left, right): how many keys before and after its own position a query
        attends to; -1 is no limit.
    softcap: logits x are replaced by softcap * tanh(x / softcap).
    sinks: [heads], one more logit in the denominator of each row.
    """

    spec: AttentionSpec = FACTORED_QK
    scale: float | None = None
    is_causal: bool = False
    lower_right: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Compute attention of q [batch, heads, n_q, d] and k, v [batch, kv heads, n_k, d or d_v].

    Returns o [batch, heads, n_q, d_v].

    Raises:
        ValueError: if an option is not computed on this device; the message names it.
        TypeError, ValueError: as `sagesim_kernels.attention` and `sagesim.attention`.
    """
    if not uses_kernels(q):
        return _emulate(q, k, v, options)
    from sagesim_kernels.api import attention

    o = attention(
        q,
        k,
        v,
        spec=options.spec,
        is_causal=options.is_causal,
        causal_alignment="lower_right" if options.lower_right else "upper_left",
        scale=options.scale,
        enable_gqa=True,
        **_extras(options),
    )
    assert isinstance(o, Tensor)
    return o


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    options: Options,
) -> Tensor:
    """Compute attention of packed sequences: q [tokens, heads, d], k and v [tokens, kv heads, ...].

    Sequence i has tokens cu[i] to cu[i + 1]; `longest` are upper bounds on the lengths. Each
    sequence is computed as if it were alone. Returns o [tokens, heads, d_v].

    Raises:
        As `attend`.
    """
    cu_q, cu_k = (cu.to(q.device, torch.int32).contiguous() for cu in (cu_q, cu_k))
    if not uses_kernels(q):
        return _emulate_packed(q, k, v, cu_q, cu_k, options)
    from sagesim_kernels.api import attention_varlen

    o = attention_varlen(
        q,
        k,
        v,
        cu_q,
        cu_k,
        longest_q,
        longest_k,
        spec=options.spec,
        is_causal=options.is_causal,
        causal_alignment="lower_right" if options.lower_right else "upper_left",
        scale=options.scale,
        enable_gqa=True,
        **_extras(options),
    )
    assert isinstance(o, Tensor)
    return o


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, options: Options, *, pads_queries: bool
) -> Tensor:
    """Compute attention of padded sequences: the tokens are packed, and 0 fills the output.

    Shapes and errors as `attend`.

    Args:
        keys: bool [batch, n_k]; True is a token, False padding, on either side.
        pads_queries: the queries are the last n_q tokens of the keys, and padded ones are left out.
            Otherwise every query is computed.
    """
    batch, n_q = q.shape[0], q.shape[2]
    queries = keys[:, -n_q:] if pads_queries else keys.new_ones(batch, n_q)
    cu_q, cu_k = (F.pad(x.sum(1).cumsum(0), (1, 0)).to(torch.int32) for x in (queries, keys))
    kept = [x.transpose(1, 2)[keep] for x, keep in ((q, queries), (k, keys), (v, keys))]
    o = attend_packed(*kept, cu_q, cu_k, longest_of(cu_q), longest_of(cu_k), options)
    whole = o.new_zeros(batch * n_q, *o.shape[1:])
    whole = whole.index_copy(0, queries.flatten().nonzero()[:, 0], o)
    return whole.unflatten(0, (batch, n_q)).transpose(1, 2)


def key_padding(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask of SDPA as bool [batch, n_k]: True is a token, False padding.

    q, k: [batch, heads, tokens, d].

    Raises:
        ValueError: if the mask is not boolean, or differs between heads or queries.
    """
    batch, n_k = q.shape[0], k.shape[2]
    whole = mask[(None,) * (4 - mask.ndim)] if mask.ndim <= 4 else mask
    fits = whole.ndim == 4 and whole.shape[0] in (1, batch) and whole.shape[3] in (1, n_k)
    if mask.dtype is not torch.bool or not fits or whole.shape[1:3] != (1, 1):
        raise ValueError(
            f"attn_mask is {mask.dtype} {tuple(mask.shape)}; only a boolean mask of padded keys, "
            f"broadcastable to {(batch, 1, 1, n_k)}, is supported (True is a token)"
        )
    return whole[:, 0, 0].expand(batch, n_k)


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
def longest_of(cu: Tensor) -> int:
    """The length of the longest sequence of cu_seqlens, which is read from the device."""
    return int(cu.diff().max()) if cu.shape[0] > 1 else 0


def uses_kernels(q: Tensor) -> bool:
    """Whether the kernels compute attention of q: it is on a CUDA device."""
    return q.is_cuda


def _extras(options: Options) -> dict[str, object]:
    """The options beyond SDPA's, as keyword arguments of the kernels."""
    _refuse_uncomputed(options)
    if options.window != (-1, -1):
        raise ValueError(f"a sliding window of {options.window} is not computed by the kernels")
    return {}


def _refuse_uncomputed(options: Options) -> None:
    if options.softcap is not None:
        raise ValueError(f"softcap={options.softcap} is not computed; set it to None in the config")
    if options.sinks is not None:
        raise ValueError(f"sinks (s_aux) of shape {tuple(options.sinks.shape)} are not computed")


# torch.compile would compile many small graphs of the emulator.
@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
def _emulate(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    _refuse_uncomputed(options)
    is_square = q.shape[-2] == k.shape[-2]
    is_plain = options.window == (-1, -1) and (is_square or not options.lower_right)
    return emulator.attention(
        q,
        k,
        v,
        spec=options.spec,
        is_causal=options.is_causal and is_plain,
        attn_mask=None if is_plain or _sees_all(options) else _mask(q, k, options),
        scale=options.scale,
        enable_gqa=True,
    )


def _sees_all(options: Options) -> bool:
    return options.window == (-1, -1) and not options.is_causal


def _mask(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """Which keys each query attends to, bool [n_q, n_k]."""
    n_q, n_k = q.shape[-2], k.shape[-2]
    left, right = options.window
    if options.is_causal:
        right = 0 if right < 0 else min(right, 0)
    shift = n_k - n_q if options.lower_right else 0
    keys = torch.arange(n_k, device=q.device) - shift
    offset = keys - torch.arange(n_q, device=q.device)[:, None]
    attends = torch.ones_like(offset, dtype=torch.bool)
    if left >= 0:
        attends &= offset >= -left
    if right >= 0:
        attends &= offset <= right
    return attends


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
def _emulate_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, options: Options
) -> Tensor:
    lengths_q, lengths_k = cu_q.diff().tolist(), cu_k.diff().tolist()
    if sum(lengths_q) != q.shape[0] or sum(lengths_k) != k.shape[0]:
        raise ValueError(
            f"cu_seqlens end at {int(cu_q[-1])} and {int(cu_k[-1])}, and there are {q.shape[0]} "
            f"queries and {k.shape[0]} keys"
        )
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    outputs = [_emulate(*(x.transpose(0, 1) for x in part), options) for part in parts]
    return torch.cat([o.transpose(0, 1) for o in outputs])
