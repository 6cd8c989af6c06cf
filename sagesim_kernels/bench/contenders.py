"""Who takes part: our specs, and what people would pick instead."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagesim.spec import AttentionSpec
from sagesim_kernels.api import attention
from sagesim_kernels.bench.cases import PEERS

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k and v [batch, heads, tokens, head size] to o, differentiable."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to compute attention.

    make: (tokens, is_causal, device) -> the function to time; what it prepares is not timed. It or
        the function raises where the contender cannot run.
    tokens_first: whether its own layout is [batch, tokens, heads, head size]: it gets and returns
        views of tensors that lie so in memory, and nothing is copied in the time.
    """

    name: str
    make: Callable[[int, bool, torch.device], Attend]
    spec: AttentionSpec | None = None  #: of ours
    tokens_first: bool = False


def contender(name: str) -> Contender:
    """One of `cases.PEERS`, or ours by the label of its spec.

    Raises:
        ValueError: for what is neither.
    """
    if name in _PEERS:
        return _PEERS[name]
    spec = AttentionSpec.parse(name)

    def make(tokens: int, is_causal: bool, device: torch.device) -> Attend:
        return lambda q, k, v: _only(attention(q, k, v, spec=spec, is_causal=is_causal))

    return Contender(name, make, spec)


def reason(error: Exception) -> str:
    """An error in one line, to be kept in a record.

    >>> reason(ValueError("no  kernel\\nat all"))
    'ValueError: no kernel at all'
    """
    words = " ".join([f"{type(error).__name__}:", *str(error).split()])
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."


_LONGEST: Final = 400


def _only(result: Any) -> Tensor:
    """o, of functions that may return other things with it."""
    return result[0] if isinstance(result, tuple) else result


def _sdpa(name: str, backend: SDPBackend) -> Contender:
    def make(tokens: int, is_causal: bool, device: torch.device) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=is_causal
                )

        _try(attend, is_causal, device)
        return attend

    return Contender(name, make)


def _try(attend: Attend, is_causal: bool, device: torch.device) -> None:
    """Why a backend cannot be used PyTorch says in warnings, and in its error only that it cannot.

    A small problem asks the question of the device; of the shape, the first call does.
    """
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend(x, x, x)
        except RuntimeError as error:
            why = [str(error), *(str(w.message) for w in caught)]
            raise RuntimeError(" ".join(why)) from error


def _flash_attention_4(tokens: int, is_causal: bool, device: torch.device) -> Attend:
    attend: Any = importlib.import_module("flash_attn.cute").flash_attn_func

    def attend_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens_first = (x.transpose(1, 2) for x in (q, k, v))
        return _only(attend(*tokens_first, causal=is_causal)).transpose(1, 2)

    return attend_heads_first


def _flex_attention(tokens: int, is_causal: bool, device: torch.device) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    # Graphs of other lengths count against the limit of recompilations, after which it would be
    # run without being compiled.
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    mask = None
    if is_causal:
        mask = create_block_mask(sees, None, None, tokens, tokens, device=device)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


_PEERS: Final = {
    peer.name: peer
    for peer in (
        _sdpa("sdpa flash", SDPBackend.FLASH_ATTENTION),
        _sdpa("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
        _sdpa("sdpa efficient", SDPBackend.EFFICIENT_ATTENTION),
        Contender("flash-attn-4", _flash_attention_4, tokens_first=True),
        Contender("FlexAttention", _flex_attention),
    )
}
assert tuple(_PEERS) == PEERS
