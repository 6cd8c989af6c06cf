"""Trace the kernels: outputs, gradients, and the codes and scales of every operand in codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from sagesim.problem import (
    AttentionOptions,
    AttentionProblem,
    check_is_tensor,
    resolve_input16,
)
from sagesim.short_repr import short_repr
from sagesim.spec import FACTORED_QK, MAPS, OPERANDS, SITES, AttentionSpec, Precision
from sagesim_kernels.api import check_call, check_device
from sagesim_kernels.dispatch import backward, forward
from sagesim_kernels.launching import on_device_of
from sagesim_kernels.operands import (
    FP8,
    IN_REGISTERS,
    Extras,
    Gradients,
    KernelProblem,
    OperandCache,
    logit_scale,
    natural_lse,
    stored_tokens,
)
from sagesim_kernels.portable import MapTrace, MapTraces


class Coded(NamedTuple):
    """The codes of an operand [..., rows, columns], and scales that broadcast to them.

    Codes are int8, float8_e4m3fn or float8_e5m2.
    """

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KernelTrace:
    """Outputs and intermediate results of one attention and its backward.

    o, dq, dk, dv: bitwise what `attention` and its backward return, unless another kernel than the
        portable one computes them in codes: only the portable kernels write codes of P and dS.
    lse, delta: float32 [batch, heads, n_q].
    dsinks: [heads] in the dtype of the sinks; None without sinks.
    operands: codes and scales by "site.tensor", with the names of `sagesim.Trace.operands`, for the
        products in INT8 and FP8. Those of P and dS are [batch, heads, n_q, n_k]. The scale of
        "pv.p" is always 1, because P has no scale that is final: its codes are 127 P relative to
        the row's maximum in one tile, and the running maximum of the online softmax may change
        after it.
    """

    spec: AttentionSpec
    o: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    operands: Mapping[str, Coded]

    __repr__ = short_repr


def trace(
    q: Tensor | AttentionProblem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    do: Tensor | None = None,
    *,
    spec: AttentionSpec = FACTORED_QK,
    **options: Unpack[AttentionOptions],
) -> KernelTrace:
    """Run the forward and backward kernels and return their intermediate results.

    Needs 5 bytes for each element of P or dS in each product that rounds it to codes.

    Args:
        q, k, v: [batch, heads, tokens, head size], as in `attention`.
        do: the gradient of o, [batch, heads, n_q, d_v].
        options: see `attention`. Or q is an `AttentionProblem`, such as a recorded call, and the
            other arguments but spec are omitted.

    Raises:
        As `attention`. Also ValueError if do is missing or differs from q in dtype or device, if a
        shape does not fit, or if a problem has an attn_mask.
    """
    given = AttentionProblem.of(q, k, v, do, **options)
    if given.attn_mask is not None:
        raise ValueError(
            "attn_mask: there are no kernels for it; use is_causal, window or key_mask"
        )
    seqused_k = options.get("seqused_k")
    key_mask = given.key_mask if seqused_k is None else None
    q, k, v, do = given.qkvdo
    check_device(q)
    check_call(q, k, v, spec, enable_gqa=given.enable_gqa)
    given.check_options()
    check_is_tensor("do", do)
    if do.dtype != q.dtype or do.device != q.device:
        raise ValueError(
            f"do is {do.dtype} on {do.device}; it must be {q.dtype} on {q.device}, as q is"
        )
    if q.ndim != 4 or do.shape != (*q.shape[:3], v.shape[3]):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and do {tuple(do.shape)}; needed: [batch, heads, "
            "tokens, head size], and for do the shape of o"
        )
    # The kernels read memory, where a tensor with PyTorch's negative bit has the opposite sign.
    q, k, v, do = (x.resolve_neg() for x in (q, k, v, do))
    sinks = None if given.sinks is None else given.sinks.resolve_neg()
    with torch.no_grad(), on_device_of(q):
        problem = KernelProblem.of(
            q,
            k,
            v,
            spec=resolve_input16(spec, q.dtype),
            scale=logit_scale(q, given.scale),
            is_causal=given.is_causal,
            lower_right=given.causal_alignment == "lower_right",
            extras=Extras(given.window, key_mask, seqused_k, sinks, given.softcap),
        )
        sites = [s for s in SITES if problem.spec.site(s).precision.is_scaled]
        shape = (*q.shape[:3], k.shape[2])
        maps = {
            f"{site}.{OPERANDS[site][0]}": MapTrace.empty(
                shape, q.device, problem.spec.site(site).precision
            )
            for site in sites
            if OPERANDS[site][0] in MAPS
        }
        o = torch.empty_like(do)
        operands = None if problem.is_empty else OperandCache(problem, do)
        result = forward(problem, o, maps.get("pv.p"), operands)
        lse = natural_lse(problem, result)
        grads = Gradients(*(torch.empty_like(x) for x in (q, k, v)))
        traces = MapTraces(maps.get("dv.p"), maps.get("dq.ds"), maps.get("dk.ds"))
        dsinks, delta = backward(problem, do, None, o, result, grads, traces, operands)
        found = {
            name: Coded(
                _with_dtype(x.codes, problem.spec.site(name.partition(".")[0]).precision), x.scale
            )
            for name, x in maps.items()
        }
        if operands is not None:
            for site in sites:
                for tensor in OPERANDS[site]:
                    if tensor not in MAPS:
                        found[f"{site}.{tensor}"] = _unpack(operands, site, tensor)
    return KernelTrace(
        spec=spec,
        o=o,
        lse=lse,
        delta=delta,
        dq=grads.dq,
        dk=grads.dk,
        dv=grads.dv,
        dsinks=dsinks,
        operands=MappingProxyType(found),
    )


def _with_dtype(codes: Tensor, precision: Precision) -> Tensor:
    """Return codes as they lie in memory in the dtype of a precision."""
    dtype = FP8.get(precision)
    if dtype is None:
        return codes
    return codes.view(dtype) if codes.element_size() == 1 else codes.to(dtype)


def _unpack(operands: OperandCache, site: str, tensor: str) -> Coded:
    """Return an operand's codes and scales in the shape of its tensor."""
    x, coded = operands.tensors[tensor], operands.get(site, tensor)
    assert x is not None
    batch, heads, _, d = x.shape
    strides = coded.stride_h, coded.stride_n, coded.stride_d
    codes = coded.ptr.as_strided((heads, stored_tokens(None, x), d), strides)
    if coded.ORDER.value == IN_REGISTERS.value:
        codes = codes.unflatten(1, (-1, 4, 2, 2)).transpose(2, 3).flatten(1, 4)
    scale = coded.scale.repeat_interleave(coded.TOKENS.value, 1)
    codes, scale = (
        y.unflatten(1, (batch, -1)).transpose(0, 1)[:, :, : x.shape[2]] for y in (codes, scale)
    )
    return Coded(_with_dtype(codes.contiguous(), operands.precision(site)), scale)
