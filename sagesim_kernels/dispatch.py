"""Choose the kernels of a problem: Hopper's, else those for mma.sync, else the portable ones."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sagesim.spec import SITES, Precision
from sagesim_kernels import ampere, hopper, portable
from sagesim_kernels.operands import (
    Copied,
    ForwardResult,
    Gradients,
    KernelProblem,
    OperandCache,
    Rows,
    RowStatistics,
    compute_logit_shift,
    sink_gradient,
    sink_logits,
    sink_probabilities,
)
from sagesim_kernels.portable import UNTRACED, MapTrace, MapTraces

_FORWARD: Final = ("qk", "pv")
_BACKWARD: Final = tuple(site for site in SITES if site not in _FORWARD)


def forward(
    problem: KernelProblem,
    o: Tensor,
    trace: MapTrace | None = None,
    operands: OperandCache | None = None,
) -> ForwardResult:
    """Compute attention of all heads into o [sequences, heads, n_q, d_v], any strides.

    trace: where to write the codes of P, if pv is INT8. Only the portable kernels write them.
    operands: the cache in which kernels keep the rounded operands; None makes one for this call
        alone. The Hopper kernels always make their own.
    """
    rows = problem.q.shape[:3]
    if problem.is_empty:
        o.zero_()
        b, heads, d = problem.sequences, problem.k.shape[1], problem.k.shape[3]
        return ForwardResult(
            o.new_full(rows, torch.inf, dtype=torch.float32),
            o.new_zeros((b, heads, 1, d), dtype=torch.float32)
            if problem.spec.smoothing.k
            else None,
        )
    lse2 = torch.empty(rows, dtype=torch.float32, device=o.device)
    if hopper.serves_forward(problem):
        operands = _prepared(problem, copied=hopper.copied(problem))
        if hopper.is_wide(problem):
            from sagesim_kernels.hopper import wide_forward as gluon
        else:
            from sagesim_kernels.hopper import forward as gluon

        shift = _shift(problem, operands)
        sink2 = sink_logits(problem, shift)
        gluon.launch_forward(problem, operands, o, lse2, shift=shift, sink2=sink2)
    else:
        is_for_mma_sync = trace is None and ampere.serves_forward(problem)
        copied = ampere.copied(problem) if is_for_mma_sync else Copied()
        if operands is None or any(copied):
            if is_for_mma_sync and problem.spec.qk.precision is Precision.INT8:
                operands = _prepared(problem, "pv", copied=copied)
            else:
                operands = OperandCache(problem, copied=copied)
        if trace is None and hopper.serves_forward_in_codes(problem):
            from sagesim_kernels.hopper import forward_codes as gluon

            gluon.launch_forward(problem, operands, o, lse2)
        elif is_for_mma_sync:
            from sagesim_kernels.ampere import forward as gluon

            operands.quantize(*_FORWARD)
            sink2 = sink_logits(problem, _shift(problem, operands))
            gluon.launch_forward(problem, operands, o, lse2, sink2=sink2)
        else:
            operands.quantize(*_FORWARD)
            shift = _shift(problem, operands)
            sink2 = sink_logits(problem, shift)
            portable.launch_forward(problem, operands, o, lse2, trace, shift=shift, sink2=sink2)
    return ForwardResult(lse2, None if operands.k_mean is None else operands.k_mean.ptr)


def _prepared(problem: KernelProblem, *others: str, copied: Copied) -> OperandCache:
    from sagesim_kernels.preparation.forward import prepare_forward

    return prepare_forward(problem, *others, copied=copied)


def _shift(problem: KernelProblem, operands: OperandCache) -> Tensor | None:
    """Return what smoothing K subtracted from the logits, if sinks or a softcap need it."""
    is_needed = problem.extras.sinks is not None or problem.extras.softcap is not None
    if not is_needed or operands.k_mean is None:
        return None
    return compute_logit_shift(problem, operands.k_mean.ptr)


def _p_sink(problem: KernelProblem, shift: Tensor | None, lse2: Tensor) -> Tensor | None:
    """Return the share of the sink in each row's sum; None without sinks. shift: see `_shift`."""
    sink2 = sink_logits(problem, shift)
    return None if sink2 is None else sink_probabilities(sink2, lse2)


def backward(
    problem: KernelProblem,
    do: Tensor,
    d_lse: Tensor | None,
    o: Tensor | None,
    result: ForwardResult,
    grads: Gradients,
    traces: MapTraces = UNTRACED,
    operands: OperandCache | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Fill the gradients of all heads, and return those of the sinks and delta.

    The gradient of the sinks is [heads] in their dtype, or None. delta is float32 [sequences,
    heads, n_q].

    Args:
        do: the gradient of o, any strides.
        d_lse: the gradient of the logsumexp, with the shape of result.lse2; None for 0.
        o: the output of the forward; None if the spec's delta comes from P.
        result: the other results of the forward.
        traces: where to write the codes of P and dS. Only the portable kernels write them.
        operands: those that the forward kept; None rounds them again. Of the Hopper kernels, only
            a backward in INT8 codes uses them, and only if it needs no copies of operands.
    """
    lse2 = result.lse2
    delta = torch.empty_like(lse2)
    if problem.is_empty:
        zero = 0.0 * problem.scale  # -0.0 for a negative scale, as the kernels store it
        grads.dq.fill_(zero)
        grads.dk.fill_(zero)
        grads.dv.zero_()
        sinks = problem.extras.sinks
        return None if sinks is None else torch.zeros_like(sinks), delta.zero_()
    p_sink = None
    statistics = RowStatistics(Rows.of(lse2), Rows.of(delta))
    d_lse_rows = None if d_lse is None else Rows.of(d_lse.contiguous())
    if hopper.serves_backward(problem):
        assert o is not None
        operands = OperandCache(problem, do, k_mean=result.k_mean, copied=hopper.copied(problem))
        if hopper.is_wide(problem):
            from sagesim_kernels.hopper import wide_backward as gluon
        else:
            from sagesim_kernels.hopper import backward as gluon

        shift = _shift(problem, operands)
        p_sink = _p_sink(problem, shift, lse2)
        gluon.launch_backward(
            problem, operands, o, do, statistics, d_lse_rows, grads, shift=shift, p_sink=p_sink
        )
    elif traces == UNTRACED and hopper.serves_codes(problem):
        from sagesim_kernels.hopper import codes_backward as gluon

        copied, is_fp8 = hopper.copied(problem), hopper.serves_fp8(problem.spec)
        if operands is None or any(copied) or is_fp8:
            operands = OperandCache(
                problem, do, k_mean=result.k_mean, copied=copied, k_in_pairs=is_fp8
            )
        p_sink = _p_sink(problem, _shift(problem, operands), lse2)
        gluon.launch_backward(
            problem, operands, o, do, statistics, d_lse_rows, grads, p_sink=p_sink
        )
    else:
        is_for_mma_sync = traces == UNTRACED and ampere.serves_backward(problem)
        copied = ampere.copied(problem) if is_for_mma_sync else Copied()
        if operands is None or any(copied):
            operands = OperandCache(problem, do, k_mean=result.k_mean, copied=copied)
        shift = _shift(problem, operands)
        p_sink = _p_sink(problem, shift, lse2)
        if is_for_mma_sync:
            from sagesim_kernels.ampere import backward as gluon

            gluon.launch_backward(
                problem, operands, o, do, statistics, d_lse_rows, grads, p_sink=p_sink
            )
        else:
            operands.quantize(*_BACKWARD)
            portable.launch_backward(
                problem,
                operands,
                o,
                do,
                statistics,
                d_lse_rows,
                grads,
                traces,
                shift=shift,
                p_sink=p_sink,
            )
    return None if p_sink is None else sink_gradient(problem, p_sink, delta), delta
