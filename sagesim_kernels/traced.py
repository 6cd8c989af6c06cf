"""Whether a call is traced: then tensors may have no numbers, and something sees the operators."""

# PyTorch has no public names for what traces a call:
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _python_dispatch

_PLAIN = frozenset({Tensor, Parameter})


def is_traced(*tensors: Tensor) -> bool:
    """Whether something has to see the operators, and tensors may have no numbers."""
    return (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(map(type, tensors))
        or _python_dispatch._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))  # is_grads_batched=True
        or torch.jit.is_tracing()
    )
