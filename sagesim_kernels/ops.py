"""The kernels as operators of PyTorch: `sagebwd::forward` and `sagebwd::backward`.

They take q, k and v as [sequences, heads, tokens, channels] with any strides, or packed sequences
as one batch with their beginnings, and a spec by its label. Each has a fake implementation, so
that torch.compile traces them without running them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sagesim.arguments import resolve_input16
from sagesim.spec import (
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    RoundingMode,
    Smoothing,
)
from sagesim_kernels.backward import Gradients, backward
from sagesim_kernels.forward import ForwardResult, forward
from sagesim_kernels.lse import natural_lse
from sagesim_kernels.problem import Problem

_format = lru_cache(maxsize=256)(AttentionSpec.label)
parse = lru_cache(maxsize=256)(AttentionSpec.parse)


@lru_cache(maxsize=256)
def _resolved(label: str, dtype: torch.dtype) -> AttentionSpec:
    return resolve_input16(parse(label), dtype)


def label_of(spec: AttentionSpec) -> str:
    """spec.label(), kept; for torch.compile a constant, guarded by every field of the spec."""
    if not torch.compiler.is_compiling():
        return _format(spec)
    # Dynamo takes no object of ours for a constant, and traces strings.
    words: list[str] = []
    for site in SITES:
        matmul: MatmulSpec = getattr(spec, site)
        words += [matmul.precision.value, matmul.lhs.value, matmul.rhs.value]
    words += ["1" if spec.smoothing.q else "0", "1" if spec.smoothing.k else "0"]
    seed = spec.rounding.seed
    words += [spec.rounding.mode.value, "-" if seed is None else _bits(seed)]
    words += [spec.delta.value, _bits(spec.block_q), _bits(spec.block_k)]
    return _label_of_fields(" ".join(words))


def _bits(number: int) -> str:
    """Binary digits. torch.compile may hold an integer to be dynamic; a digit it has to look up."""
    return "".join("1" if number // 2**i % 2 == 1 else "0" for i in reversed(range(32)))


@torch.compiler.assume_constant_result
def _label_of_fields(fields: str) -> str:
    """The label of the spec with these fields, in the order of its definition."""
    *words, q, k, mode, seed, delta, block_q, block_k = fields.split()
    triples = [words[i : i + 3] for i in range(0, len(words), 3)]
    matmuls = {
        site: MatmulSpec(Precision(precision), Granularity(lhs), Granularity(rhs))
        for site, (precision, lhs, rhs) in zip(SITES, triples, strict=True)
    }
    spec = AttentionSpec(
        **matmuls,
        smoothing=Smoothing(q=q == "1", k=k == "1"),
        rounding=Rounding(RoundingMode(mode), None if seed == "-" else int(seed, 2)),
        delta=Delta(delta),
        block_q=int(block_q, 2),
        block_k=int(block_k, 2),
    )
    return _format(spec)


def _empty(like: Tensor, channels: int, *, tokens_first: bool) -> Tensor:
    """[sequences, heads, tokens, channels] in like's dtype; in memory tokens before heads, or heads
    before tokens."""
    b, h, n, _ = like.shape
    if tokens_first:
        return like.new_empty((b, n, h, channels)).transpose(1, 2)
    return like.new_empty((b, h, n, channels))


def _problem(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Problem:
    cu_q, cu_k, longest_q, longest_k, spec, scale, is_causal, lower_right = call
    return Problem(
        q=q,
        k=k,
        v=v,
        spec=_resolved(spec, q.dtype),
        scale=scale,
        is_causal=is_causal,
        lower_right=lower_right,
        cu_q=cu_q,
        cu_k=cu_k,
        longest_q=q.shape[2] if longest_q is None else min(longest_q, q.shape[2]),
        longest_k=k.shape[2] if longest_k is None else min(longest_k, k.shape[2]),
    )


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; make it that of x."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@torch.library.custom_op("sagebwd::forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
    spec: str,
    scale: float,
    is_causal: bool,
    lower_right: bool,
    tokens_first: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o [sequences, heads, n_q, d_v], its lse if asked for, and what the backward needs: the lse of
    the smoothed logits and the mean of K. What is not there has no elements."""
    problem = _problem(
        q, k, v, cu_q, cu_k, longest_q, longest_k, spec, scale, is_causal, lower_right
    )
    o = _empty(q, v.shape[3], tokens_first=tokens_first)
    with on_device_of(q):
        result = forward(problem, o)
        lse = natural_lse(problem, result) if with_lse else _nothing(q)
    k_mean = _nothing(q) if result.k_mean is None else result.k_mean
    return o, lse, result.lse2, k_mean


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.float32)


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cu_q, _, _, _, spec, *_, tokens_first, with_lse = call
    lse2 = q.new_empty(q.shape[:3], dtype=torch.float32)
    lse = torch.empty_like(lse2) if with_lse else _nothing(q)
    k_mean = _nothing(q)
    if parse(spec).smoothing.k:
        sequences = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
        k_mean = q.new_empty((sequences, k.shape[1], 1, k.shape[3]), dtype=torch.float32)
    return _empty(q, v.shape[3], tokens_first=tokens_first), lse, lse2, k_mean


@torch.library.custom_op("sagebwd::backward", mutates_args=())
def backward_op(
    do: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None,
    lse2: Tensor,
    k_mean: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
    spec: str,
    scale: float,
    is_causal: bool,
    lower_right: bool,
    tokens_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    problem = _problem(
        q, k, v, cu_q, cu_k, longest_q, longest_k, spec, scale, is_causal, lower_right
    )
    grads = Gradients(*(_empty(x, x.shape[3], tokens_first=tokens_first) for x in (q, k, v)))
    result = ForwardResult(lse2, k_mean if problem.spec.smoothing.k else None)
    with on_device_of(q):
        backward(problem, do, d_lse, o, result, grads)
    return grads.dq, grads.dk, grads.dv


@backward_op.register_fake
def _(
    do: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty(x, x.shape[3], tokens_first=call[-1]) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_q, cu_k, *ctx.call, with_lse = inputs
    o, lse, lse2, k_mean = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse2, k_mean, *([] if with_lse else [lse]))
    needs_o = parse(ctx.call[2]).delta is Delta.FROM_O
    ctx.save_for_backward(q, k, v, o if needs_o else None, lse2, k_mean, cu_q, cu_k)


def _differentiate(
    ctx: Any, do: Tensor | None, d_lse: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse2, k_mean, cu_q, cu_k = ctx.saved_tensors
    nothing: Sequence[None] = (None,) * 10
    if do is None and d_lse is None:
        return (None, None, None, *nothing)
    if do is None:
        do = v.new_zeros((*q.shape[:3], v.shape[3]))
    grads = backward_op(do, d_lse, q, k, v, o, lse2, k_mean, cu_q, cu_k, *ctx.call)
    return (*grads, *nothing)


forward_op.register_autograd(_differentiate, setup_context=_save)


def _refuse_twice(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise RuntimeError(
        "attention was differentiated twice; its gradients are quantized and not differentiable"
    )


backward_op.register_autograd(_refuse_twice)
