"""What the kernels computed on the way: codes and scales of every INT8 operand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from sagesim.arguments import check_tensors, resolve_input16
from sagesim.presets import FACTORED_QK
from sagesim.spec import MAPS, OPERANDS, SITES, AttentionSpec, Precision
from sagesim_kernels.api import CausalAlignment, check_call, check_device
from sagesim_kernels.backward import Gradients, backward
from sagesim_kernels.forward import forward
from sagesim_kernels.lse import natural_lse
from sagesim_kernels.maps import MapTrace, MapTraces
from sagesim_kernels.ops import on_device_of
from sagesim_kernels.problem import Problem, logit_scale
from sagesim_kernels.quantize import Operands


class Coded(NamedTuple):
    """codes, int8 [..., rows, columns], and scale, float32, broadcastable to codes."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KernelTrace:
    """Outputs and intermediates of one attention and its backward.

    o, dq, dk, dv: the bytes that `attention` and its backward give.
    lse, delta: float32 [batch, heads, n_q].
    operands: by "site.tensor", as in `sagesim.Trace.operands`, of the sites that are INT8. Maps are
        [batch, heads, n_q, n_k]. The scale of "pv.p" is 1 throughout: a kernel keeps it relative
        to a maximum that still moves.
    """

    spec: AttentionSpec
    o: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    operands: Mapping[str, Coded]


def trace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    spec: AttentionSpec = FACTORED_QK,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "upper_left",
    scale: float | None = None,
    enable_gqa: bool = False,
) -> KernelTrace:
    """Run the kernels on [batch, heads, tokens, head size] and keep what they compute.

    Holds P and dS as each INT8 site rounds them: 5 bytes for each of n_q * n_k entries.

    Args, Raises: as `attention`; do is the gradient of o.
    """
    check_device(q)
    check_tensors(q, k, v, enable_gqa=enable_gqa)
    check_call(q, v, spec, causal_alignment)
    if do.dtype != q.dtype or do.device != q.device:
        raise ValueError(f"q is {q.dtype} on {q.device}, do is {do.dtype} on {do.device}")
    if q.ndim != 4 or do.shape != (*q.shape[:3], v.shape[3]):
        raise ValueError(
            f"q {tuple(q.shape)} and do {tuple(do.shape)}; a trace takes [batch, heads, tokens, "
            "head size], and do is the gradient of o"
        )
    problem = Problem(
        q=q,
        k=k,
        v=v,
        spec=resolve_input16(spec, q.dtype),
        scale=logit_scale(q, scale),
        is_causal=is_causal,
        lower_right=causal_alignment == "lower_right",
        cu_q=None,
        cu_k=None,
        longest_q=q.shape[2],
        longest_k=k.shape[2],
    )
    sites = [s for s in SITES if problem.spec.site(s).precision is Precision.INT8]
    shape = (*q.shape[:3], k.shape[2])
    maps = {
        f"{site}.{OPERANDS[site][0]}": MapTrace.empty(shape, q.device)
        for site in sites
        if OPERANDS[site][0] in MAPS
    }
    with torch.no_grad(), on_device_of(q):
        o = torch.empty_like(do)
        result = forward(problem, o, maps.get("pv.p"))
        lse = natural_lse(problem, result)
        grads = Gradients(*(torch.empty_like(x) for x in (q, k, v)))
        traces = MapTraces(maps.get("dv.p"), maps.get("dq.ds"), maps.get("dk.ds"))
        delta = backward(problem, do, None, o, result, grads, traces)
        found = {name: Coded(*map_trace) for name, map_trace in maps.items()}
        if not problem.is_empty:
            operands = Operands(problem, do, k_mean=result.k_mean)
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
        operands=MappingProxyType(found),
    )


def _unpack(operands: Operands, site: str, tensor: str) -> Coded:
    """An operand's codes and scales in the shape of its tensor."""
    x, coded = operands.tensors[tensor], operands.at(site, tensor)
    assert x is not None
    batch, heads, n, d = x.shape
    tokens = coded.scale.shape[1] * coded.TOKENS.value
    codes = coded.ptr.as_strided(
        (heads, tokens, d), (coded.stride_h, coded.stride_n, coded.stride_d)
    )
    scale = coded.scale.repeat_interleave(coded.TOKENS.value, 1)
    return Coded(*(y.unflatten(1, (batch, -1)).transpose(0, 1)[:, :, :n] for y in (codes, scale)))
