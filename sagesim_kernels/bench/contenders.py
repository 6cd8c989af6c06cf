"""The contenders: functions that compute attention, of our specs and of peers."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagesim.spec import AttentionSpec
from sagesim_kernels.api import attention
from sagesim_kernels.bench.cases import PEERS

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [batch, heads, tokens, head size], k and v [batch, kv heads, keys, head size] to o,
differentiable. Each head of k and v serves a group of consecutive heads of q."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to compute attention.

    make: (tokens, is_causal, device) -> the function to time. What `make` prepares is not timed.
        `make` or the function raises if the contender cannot run.
    tokens_first: its own layout is [batch, tokens, heads, head size]. It then gets and returns
        transposed views of tensors in that layout, so no time includes a copy.
    selected: returns a context in which the contender runs. It is entered once for many calls, and
        no time includes it: PyTorch needs longer to enter the context of a backend than to launch.
    """

    name: str
    make: Callable[[int, bool, torch.device], Attend]
    spec: AttentionSpec | None = None  #: None for a peer
    tokens_first: bool = False
    selected: Callable[[], AbstractContextManager[Any]] = nullcontext


def contender(name: str) -> Contender:
    """The contender of a name: one of `cases.PEERS` or the label of a spec.

    Raises:
        ValueError: if the name is neither.
    """
    if name in _PEERS:
        return _PEERS[name]
    spec = AttentionSpec.parse(name)

    def make(tokens: int, is_causal: bool, device: torch.device) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = is_grouped(q, k)
            return _only(attention(q, k, v, spec=spec, is_causal=is_causal, enable_gqa=grouped))

        return attend

    return Contender(name, make, spec)


def is_grouped(q: Tensor, k: Tensor) -> bool:
    """Whether q [batch, heads, ...] has more heads than k."""
    return q.shape[1] != k.shape[1]


def reason(error: Exception) -> str:
    """An error as one line for a record.

    >>> reason(ValueError("no  kernel\\nat all"))
    'ValueError: no kernel at all'
    """
    words = " ".join([f"{type(error).__name__}:", *str(error).split()])
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."


_LONGEST: Final = 400
"""Characters of a reason."""


def _only(result: Any) -> Tensor:
    """o, from a function that may return a tuple that starts with o."""
    return result[0] if isinstance(result, tuple) else result


def _sdpa(name: str, backend: SDPBackend) -> Contender:
    def make(tokens: int, is_causal: bool, device: torch.device) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=is_grouped(q, k)
            )

        with selected():
            _try(attend, is_causal, device)
        return attend

    def selected() -> AbstractContextManager[Any]:
        return sdpa_kernel(backend)

    return Contender(name, make, selected=selected)


def _try(attend: Attend, is_causal: bool, device: torch.device) -> None:
    """Raise if the device does not support a backend, with the reason.

    PyTorch gives the reason in warnings, so they become part of the error. The problem is small:
    whether the backend supports a shape, its first call at that shape shows.
    """
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend(x, x, x)
        except RuntimeError as error:
            why = [str(error), *(str(w.message) for w in caught)]
            raise RuntimeError(" ".join(why)) from error


def _flash_attention_4(name: str, **options: Any) -> Contender:
    def make(tokens: int, is_causal: bool, device: torch.device) -> Attend:
        attend: Any = importlib.import_module("flash_attn.cute").flash_attn_func

        def attend_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tokens_first = (x.transpose(1, 2) for x in (q, k, v))
            return _only(attend(*tokens_first, causal=is_causal, **options)).transpose(1, 2)

        return attend_heads_first

    return Contender(name, make, tokens_first=True)


def _flex_attention(tokens: int, is_causal: bool, device: torch.device) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attends(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    # Graphs of other lengths count towards the limit of recompilations. Beyond the limit PyTorch
    # runs the function without compiling it.
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    mask = None
    if is_causal:
        mask = create_block_mask(attends, None, None, tokens, tokens, device=device)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


_PEERS: Final = {
    peer.name: peer
    for peer in (
        _sdpa("sdpa flash", SDPBackend.FLASH_ATTENTION),
        _sdpa("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
        _sdpa("sdpa efficient", SDPBackend.EFFICIENT_ATTENTION),
        _flash_attention_4("flash-attn-4"),
        _flash_attention_4("flash-attn-4 deterministic", deterministic=True),
        Contender("FlexAttention", _flex_attention),
    )
}
assert tuple(_PEERS) == PEERS
