"""PyTorch's FlashAttention on CUDA devices, replaced by the kernels inside a context: SDPA,
`varlen_attn`, `varlen_attn_out`, ring attention.

PyTorch calls FlashAttention through operators of aten. Their backward gets only q, k, v, the output
and its logsumexp, in ring attention those of keys that it does not get. If the spec smooths K, the
backward computes the mean of its keys and the forward of its keys again.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagesim.problem import NO_WINDOW, check_spec
from sagesim.spec import FACTORED_QK, AttentionSpec, Delta
from sagesim_kernels.api import check_call
from sagesim_kernels.labels import label_of
from sagesim_kernels.launching import on_device_of
from sagesim_kernels.operands import compute_k_means, compute_logit_shift, logit_scale
from sagesim_kernels.ops import Call, backward_op, forward_op
from sagesim_kernels.packing import check_packing
from sagesim_kernels.support import supports

try:
    from torch.nn.attention import (
        _registry,  # pyright: ignore[reportPrivateUsage]
        activate_flash_attention_impl,
        current_flash_attention_impl,
        register_flash_attention_impl,
        restore_flash_attention_impl,
    )
except ImportError as error:
    raise ImportError(
        "torch_flash needs PyTorch 2.11 or later, whose FlashAttention can be replaced; this is "
        f"PyTorch {torch.__version__}"
    ) from error

NAME: Final = "sagebwd"
"""Under which PyTorch lists the implementation while a context is entered."""

_INTO: Final = "_flash_attention_forward_no_dropout_inplace"
"""The operator of `varlen_attn_out`, which older PyTorch lacks."""


@contextlib.contextmanager
def flash_attention(spec: AttentionSpec = FACTORED_QK, *, device: str = "CUDA") -> Generator[None]:
    """Context manager in which PyTorch's FlashAttention is computed by the kernels.

    It applies to the whole process and to CUDA devices. SDPA must choose FlashAttention inside, so
    that a call that FlashAttention does not take (with a mask, or in float32) raises PyTorch's
    error "No available kernel" and is not computed by something else. SDPA of tensors on the CPU
    raises an error: `Functions` and `apply` emulate it. A backward must run inside the context as
    well. At the end, the implementation that was active before is active again.

    If the spec smooths K, the backward runs the forward again, because ring attention needs it. For
    single models, `apply` and the other integrations do not.

    Args:
        spec: the numerics; its delta must be computed from O.
        device: the dispatch key of the operators.

    Raises:
        ValueError: if the spec computes delta from P, or if there are no kernels for it; at a
            call, for dropout, ALiBi, paged keys and lengths in `seqused_k`, for arguments that
            `attention` or `attention_varlen` refuses, and for SDPA of tensors on the CPU.
        TypeError: if spec is not an AttentionSpec; at a call, as `attention`.
        RuntimeError: if a context is entered inside another.
    """
    check_spec(spec)
    if spec.delta is not Delta.FROM_O:
        raise ValueError(
            "the spec's delta is computed from P. Ring attention passes the output and logsumexp "
            "of all keys to the backward of some keys, whose own P gives another delta; use a "
            "spec with delta=o"
        )
    if not (found := supports(spec)):
        raise ValueError(f"no kernel for this spec: {found}")
    before = current_flash_attention_impl()
    if before == NAME:
        raise RuntimeError("flash_attention is already entered; leave the other context first")
    implementations: dict[str, Any] = _registry._FLASH_ATTENTION_IMPLS  # pyright: ignore
    register_flash_attention_impl(NAME, register_fn=lambda: _install(_Operators(spec), device))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*[Oo]verriding a previously registered kernel")
            activate_flash_attention_impl(NAME)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        restore_flash_attention_impl(_raise_warn=False)
        del implementations[NAME]
        if before is not None:
            activate_flash_attention_impl(before)


@dataclass
class _Handle:
    """Keeps the operators replaced until `remove`."""

    library: Library | None

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()  # pyright: ignore[reportPrivateUsage]
        self.library = None


def _install(operators: _Operators, device: str) -> _Handle:
    library = Library("aten", "IMPL")
    replaced: dict[str, Callable[..., Any]] = {
        "_flash_attention_forward": operators.forward,
        "_flash_attention_backward": operators.backward,
        "_scaled_dot_product_flash_attention": operators.sdpa,
        "_scaled_dot_product_flash_attention_backward": operators.sdpa_backward,
    }
    for name, function in replaced.items():
        library.impl(name, function, device)
    if hasattr(torch.ops.aten, _INTO):
        library.impl(_INTO, operators.forward_into, device)
    library.impl("_scaled_dot_product_flash_attention_for_cpu", _refuse_cpu, "CPU")
    return _Handle(library)


def _refuse_cpu(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    raise ValueError(
        f"scaled_dot_product_attention is called with a query {tuple(query.shape)} on the CPU; "
        "torch_flash.flash_attention computes on CUDA devices only. On a CPU, call Functions(spec)"
        ".sdpa or use apply(model, spec) of sagesim_kernels.integrations.torch, which emulate"
    )


@dataclass(frozen=True)
class _Operators:
    """The operators of aten under a spec. Arguments and results are aten's."""

    spec: AttentionSpec

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, ...]:
        """Tokens before heads, packed if there are cu_seqlens; the causal mask is lower-right."""
        _refuse(dropout_p, others, return_debug_mask)
        q, k, v = (_heads_first(x) for x in (query, key, value))
        window = _window(window_size_left, window_size_right)
        packing = (None,) * 4
        if cum_seq_q is not None:
            packing = (cum_seq_q, cum_seq_k, max_q, max_k)
            check_packing(query, key, *packing)
        check_call(q, k, v, self.spec, enable_gqa=True)
        call = self._call(q, scale, is_causal, packing, window, lower_right=True)
        o, lse, _, _ = forward_op(q, k, v, *call, True)
        o, lse = (o[0].transpose(0, 1), lse[0]) if query.ndim == 3 else (o.transpose(1, 2), lse)
        return (_laid_out_as(query, o), lse, *_randomness(query))

    def forward_into(self, out: Tensor, *args: Any, **options: Any) -> Tensor:
        """As `forward`, with the output written to `out`; returns the logsumexp."""
        o, lse, *_ = self.forward(*args, **options)
        out.copy_(o)
        return lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *_randomness: Tensor,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, ...]:
        _refuse(dropout_p, others)
        window = _window(window_size_left, window_size_right)
        packing = (cum_seq_q, cum_seq_k, max_q, max_k) if query.ndim == 3 else (None,) * 4
        tensors = [_heads_first(x) for x in (grad_out, query, key, value, out)]
        lse = logsumexp[None] if query.ndim == 3 else logsumexp
        call = self._call(tensors[1], scale, is_causal, packing, window, lower_right=True)
        grads = _gradients(*tensors, lse, call)
        if query.ndim == 3:
            grads = tuple(x[0].transpose(0, 1) for x in grads)
        else:
            grads = tuple(x.transpose(1, 2) for x in grads)
        inputs = (query, key, value)
        return tuple(_laid_out_as(x, g) for x, g in zip(inputs, grads, strict=True))

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """Heads before tokens; the causal mask is upper-left, as SDPA's."""
        _refuse(dropout_p, {}, return_debug_mask)
        check_call(query, key, value, self.spec, enable_gqa=True)
        call = self._call(query, scale, is_causal, (None,) * 4, NO_WINDOW, lower_right=False)
        o, lse, _, _ = forward_op(query, key, value, *call, True)
        lengths = (query.shape[2], key.shape[2])
        return (_laid_out_as(query, o), lse, None, None, *lengths, *_randomness(query))

    def sdpa_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *_randomness: Tensor,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        _refuse(dropout_p, {})
        call = self._call(query, scale, is_causal, (None,) * 4, NO_WINDOW, lower_right=False)
        grads = _gradients(grad_out, query, key, value, out, logsumexp, call)
        inputs = (query, key, value)
        return tuple(_laid_out_as(x, g) for x, g in zip(inputs, grads, strict=True))

    def _call(
        self,
        q: Tensor,
        scale: float | None,
        is_causal: bool,
        packing: Any,
        window: tuple[int, int],
        *,
        lower_right: bool,
    ) -> Call:
        left, right = window
        cu_q, cu_k, longest_q, longest_k = packing
        return Call(
            sinks=None,
            key_mask=None,
            seqused_k=None,
            cu_q=cu_q,
            cu_k=None if cu_k is cu_q else cu_k,
            softcap_tensor=None,
            longest_q=longest_q,
            longest_k=longest_k,
            spec=label_of(self.spec),
            scale=logit_scale(q, scale),
            is_causal=is_causal,
            lower_right=lower_right,
            left=left,
            right=right,
            softcap=None,
        )


def _gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, ...]:
    """dq, dk and dv from o and its logsumexp [sequences, heads, tokens], heads before tokens.

    o and lse may be those of more keys than k holds: ring attention passes those of all keys.
    """
    problem = call.problem(q, k, v)
    if not problem.spec.smoothing.k:
        nothing = q.new_empty((0,), dtype=torch.float32)
        return backward_op(do, None, q, k, v, o, _base2(lse), nothing, *call)[:3]
    with on_device_of(q):
        k_mean: Tensor = compute_k_means(problem).ptr
        shift = compute_logit_shift(problem, k_mean)
    assert shift is not None  # as K is smoothed
    dq, dk, dv, _ = backward_op(do, None, q, k, v, o, _base2(lse - shift), k_mean, *call)
    # dQ = dS (K - mean) is dS K only if the rows of dS sum to 0, as they do over all keys.
    sums = _row_sums_of_ds(do, q, k, v, o, lse, call)
    means = _means_of_queries(q, k_mean, call)
    return (dq.float() + sums[..., None] * means * call.scale).to(dq.dtype), dk, dv


def _row_sums_of_ds(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call
) -> Tensor:
    """The sums of P (dP - delta) over the keys, [sequences, heads, tokens]; 0 if k is all keys.

    These keys have a share of each row of P. It follows from their own logsumexp, for which the
    forward is computed again.
    """
    own_o, own_lse, _, _ = forward_op(q, k, v, *call, True)
    share = torch.where(own_lse == -torch.inf, 0.0, (own_lse - lse).exp())
    return share * (do.float() * (own_o.float() - o.float())).sum(-1)


def _base2(lse: Tensor) -> Tensor:
    """The logsumexp as the kernels take it: +inf for queries without keys, so that P is 0."""
    return torch.where(lse == -torch.inf, torch.inf, lse / math.log(2)).float().contiguous()


def _means_of_queries(q: Tensor, k_mean: Tensor, call: Call) -> Tensor:
    """The mean of K that belongs to each query, broadcastable to the shape of q."""
    means = k_mean.repeat_interleave(q.shape[1] // k_mean.shape[1], dim=1)
    if call.cu_q is None:
        return means
    lengths = call.cu_q.diff().long()
    of_tokens = means[:, :, 0].repeat_interleave(lengths, dim=0, output_size=q.shape[2])
    return of_tokens.transpose(0, 1)[None]


def _refuse(dropout_p: float, others: dict[str, Any], return_debug_mask: bool = False) -> None:
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p} is not supported; only 0.0 is")
    if return_debug_mask:
        raise ValueError("return_debug_mask=True is not supported")
    for name, value in others.items():
        neutral = {"num_splits": (None, 0, 1)}.get(name, (None,))
        if isinstance(value, Tensor) or value not in neutral:
            raise ValueError(f"{name} is given; it is not supported")


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return (-1 if left is None else left, -1 if right is None else right)


def _heads_first(x: Tensor) -> Tensor:
    """[batch, tokens, heads, d] or [tokens, heads, d] as [batch, heads, tokens, d]."""
    return x.transpose(0, 1)[None] if x.ndim == 3 else x.transpose(1, 2)


def _laid_out_as(x: Tensor, result: Tensor) -> Tensor:
    """`result` with the strides that `empty_like(x)` has, which compiled code relies on."""
    wanted = torch.empty_like(x)
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


def _randomness(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of dropout's random numbers, and the mask for debugging; nothing reads them."""
    state = torch.zeros(2, dtype=torch.uint64, device=like.device)
    return state, torch.zeros((), dtype=torch.uint64, device=like.device), like.new_empty(0)
