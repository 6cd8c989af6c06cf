"""Whether a call is traced: then tensors may have no numbers, and something sees the operators."""

# PyTorch has no public names for what traces a call:
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _python_dispatch

_PLAIN = frozenset({Tensor, Parameter})
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # under is_grads_batched=True


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether something has to see the operators, and tensors may have no numbers."""
    if torch.compiler.is_compiling():
        return True
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or _is_batched(x)):
            return True
    return (
        _python_dispatch._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()  # by torch.jit.trace
    )
