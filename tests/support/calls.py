"""Run the emulator and the reference on a case."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sagesim import AttentionSpec, Trace, attention, exact, trace
from sagesim.emulator import Exact
from tests.support.inputs import Case


class Outputs(NamedTuple):
    """The results of attention and its backward."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def run_attention(case: Case, spec: AttentionSpec) -> Outputs:
    """Return o and the gradients, computed through autograd."""
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    o = attention(replace(case, q=leaves[0], k=leaves[1], v=leaves[2]), spec=spec)
    return Outputs(o.detach(), *torch.autograd.grad(o, leaves, case.do))


def run_trace(case: Case, spec: AttentionSpec) -> Trace:
    return trace(case, spec=spec)


def run_exact(case: Case) -> Exact:
    return exact(case)
