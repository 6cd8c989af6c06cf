"""What every integration calls: attention by the kernels on CUDA devices, else by the emulator.

The frameworks pass options that SDPA does not have; `Options` holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sagesim import emulator
from sagesim.checks import is_number
from sagesim.problem import NO_WINDOW, autocast, check_is_tensor, check_tensors
from sagesim.spec import FACTORED_QK, AttentionSpec
from sagesim_kernels.integrations.per_tensor import once_per_tensor
from sagesim_kernels.packing import check_packing, check_starts

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of an attention call, those of `sagesim.AttentionOptions` that frameworks have.

    lower_right: how the causal mask and the window are aligned if n_q differs from n_k.
    window: FlashAttention's (left, right).
    sinks: [heads].
    """

    spec: AttentionSpec = FACTORED_QK
    scale: float | None = None
    is_causal: bool = False
    lower_right: bool = True
    window: tuple[int, int] = NO_WINDOW
    softcap: float | None = None
    sinks: Tensor | None = None

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `sagesim.attention` and of the kernels."""
        return {
            "spec": self.spec,
            "scale": self.scale,
            "is_causal": self.is_causal,
            "causal_alignment": "lower_right" if self.lower_right else "upper_left",
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "enable_gqa": True,
        }


def check_name(name: object) -> None:
    """Raise TypeError or ValueError if a name cannot be that of a registered attention."""
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; it must be a str")
    if not name:
        raise ValueError("name is ''; it must not be empty")


def window_of(window_size: object) -> tuple[int, int]:
    """Return FlashAttention's argument `window_size` as the window of `Options`.

    Raises:
        ValueError: if it is not a pair.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"window_size is {window_size!r}; it must be (left, right), -1 for no limit"
        )
    left, right = window_size
    return (left, right)


def softcap_of(softcap: object) -> Any:
    """Return the softcap of `Options` for a framework's softcap, in which 0 means none."""
    return None if is_number(softcap, int | float) and softcap == 0 else softcap


def _as_integer(length: int | Tensor) -> Any:
    """Return a bound on lengths. A tensor of one integer becomes the integer.

    `check_packing` refuses all other values that are no integers.
    """
    if isinstance(length, Tensor) and length.numel() == 1 and length.dtype in _INTEGERS:
        return int(length)
    return length


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, tokens_first: bool = False
) -> Tensor:
    """Compute attention of q [batch, heads, n_q, d] and k, v [batch, kv heads, n_k, d or d_v].

    Returns contiguous o [batch, heads, n_q, d_v].

    Args:
        tokens_first: q, k, v and o are [batch, tokens, heads, d] instead.

    Raises:
        TypeError, ValueError: as `sagesim_kernels.attention` and `sagesim.attention`.
    """
    if not uses_kernels(q):
        if not tokens_first:
            return _emulate(q, k, v, options)
        o = _emulate(*(x.transpose(1, 2) for x in (q, k, v)), options)
        return o.transpose(1, 2).contiguous()
    from sagesim_kernels.api import attention

    o = attention(q, k, v, **options.keywords(), layout="NHD" if tokens_first else "HND")
    assert isinstance(o, Tensor)
    return o.contiguous()  # o has the order of heads and tokens that q has in memory


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int | Tensor,
    longest_k: int | Tensor,
    options: Options,
) -> Tensor:
    """Compute attention of packed sequences: q [tokens, heads, d], k and v [tokens, kv heads, ...].

    Sequence i has tokens cu[i] to cu[i + 1]; `longest` are upper bounds on the lengths. Each
    sequence is computed as if it were alone. Returns contiguous o [tokens, heads, d_v].

    Args:
        cu_q, cu_k: int32 or int64 [sequences + 1], on any device.
        longest_q, longest_k: integers, or tensors of one integer.

    Raises:
        As `attend`. Also TypeError or ValueError if cu_seqlens do not describe the tensors; on a
        CUDA device this is a device-side assertion.
    """
    is_same = cu_k is cu_q  # then keys need no check of their own
    cu_q = _as_int32("q", cu_q, q.device)
    cu_k = cu_q if is_same else _as_int32("k", cu_k, q.device)
    longest_q, longest_k = _as_integer(longest_q), _as_integer(longest_k)
    if not uses_kernels(q):
        return _emulate_packed(q, k, v, cu_q, cu_k, longest_q, longest_k, options)
    from sagesim_kernels.api import attention_varlen

    o = attention_varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, **options.keywords())
    assert isinstance(o, Tensor)
    return o.contiguous()


def _as_int32(name: str, cu: Tensor, device: torch.device) -> Tensor:
    """cu_seqlens on a device; int64 becomes int32, and `check_packing` refuses other types."""
    if not isinstance(cu, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        return cu
    narrow = cu
    if cu.dtype is torch.int64:
        narrow = cu.to(torch.int32)
        message = f"cu_seqlens_{name} has numbers that int32 does not hold"
        check_starts((narrow == cu).all(), cu, message, lambda: f": {cu.tolist()}")
    return narrow.to(device).contiguous()


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    options: Options,
    *,
    pads_queries: bool,
    packing: Tensor | None = None,
) -> Tensor:
    """Compute attention of padded sequences: the tokens are packed, and 0 fills the output.

    Shapes and errors as `attend` with tokens_first.

    Args:
        keys: bool [batch, n_k]; True is a token, False padding, on either side.
        pads_queries: the queries are the last n_q tokens of the keys, and padded ones are left out.
            Otherwise every query is computed.
        packing: cu_seqlens of sequences among the tokens that are not padding, of which no row
            ends inside one; None if each row is a sequence. It needs n_q = n_k and pads_queries.
    """
    batch, n_q, n_k = q.shape[0], q.shape[1], k.shape[1]
    tokens = tokens_of(keys, n_k)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    k, v = (x.index_select(0, tokens.positions) for x in (k, v))
    if not pads_queries:
        cu_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * n_q
        o = attend_packed(q, k, v, cu_q, tokens.cu, n_q, n_k, options)
        return o.unflatten(0, (batch, n_q))
    queries = tokens_of(keys, n_q)
    q = q.index_select(0, queries.positions)
    if packing is None:
        o = attend_packed(q, k, v, queries.cu, tokens.cu, n_q, n_k, options)
    else:
        longest = longest_of(packing)
        o = attend_packed(q, k, v, packing, packing, longest, longest, options)
    whole = o.new_zeros(batch * n_q, *o.shape[1:]).index_copy(0, queries.positions, o)
    return whole.unflatten(0, (batch, n_q))


class Tokens(NamedTuple):
    """The tokens of a padded batch: their positions in all of it, and their cu_seqlens."""

    positions: Tensor
    cu: Tensor


@once_per_tensor
def tokens_of(keys: Tensor, last: int) -> Tokens:
    """The tokens among the last `last` of keys [batch, n_k]."""
    kept = keys[:, keys.shape[1] - last :]
    cu = F.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return Tokens(kept.flatten().nonzero()[:, 0], cu)


def key_padding(mask: Tensor, q: Tensor, n_k: int) -> Tensor:
    """A mask of SDPA as bool [batch, n_k]: True is a token, False padding.

    q: [batch, ...].

    Raises:
        TypeError: if the mask is no tensor.
        ValueError: if the mask is not boolean, differs between heads or queries, or is on another
            device than q.
    """
    check_is_tensor("attn_mask", mask)
    if mask.device != q.device:
        raise ValueError(f"attn_mask is on {mask.device}, q on {q.device}")
    batch = q.shape[0]
    whole = mask[(None,) * (4 - mask.ndim)] if mask.ndim <= 4 else mask
    fits = whole.ndim == 4 and whole.shape[0] in (1, batch) and whole.shape[3] in (1, n_k)
    if mask.dtype is not torch.bool or not fits or whole.shape[1:3] != (1, 1):
        raise ValueError(
            f"attn_mask is {mask.dtype} {tuple(mask.shape)}; only a boolean mask of padded keys, "
            f"broadcastable to {(batch, 1, 1, n_k)}, is supported (True is a token)"
        )
    return whole[:, 0, 0].expand(batch, n_k)


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
@once_per_tensor
def longest_of(cu: Tensor) -> int:
    """The length of the longest sequence of cu_seqlens, which is read from the device."""
    return int(cu.diff().max()) if cu.shape[0] > 1 else 0


def uses_kernels(q: Tensor) -> bool:
    """Whether the kernels compute attention of q: it is on a CUDA device."""
    return q.is_cuda


# torch.compile would compile many small graphs of the emulator.
@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
def _emulate(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    return emulator.attention(q, k, v, **options.keywords())


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
def _emulate_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    options: Options,
) -> Tensor:
    q, k, v = autocast(q, k, v)
    check_packing(q, k, cu_q, cu_k, longest_q, longest_k)
    check_tensors(*(x.transpose(0, 1) for x in (q, k, v)), enable_gqa=True)
    # Without sequences, an empty one gives the output its shape and its place in the graph.
    lengths_q, lengths_k = (cu.diff().tolist() or [0] for cu in (cu_q, cu_k))
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    outputs = [_emulate(*(x.transpose(0, 1) for x in part), options) for part in parts]
    return torch.cat([o.transpose(0, 1) for o in outputs])
