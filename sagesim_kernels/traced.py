"""Whether a call is traced: then tensors may have no numbers, and something sees the operators."""

# PyTorch has no public names for what traces a call:
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN = frozenset({Tensor, Parameter})

# Each is looked up once: a lookup through modules takes as long as the call.
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # under is_grads_batched=True
_has_left_transform = torch._C._functorch.is_dead_tensor_wrapper  # of torch.func
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_transforms = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing  # by torch.jit.trace


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether something has to see the operators, and tensors may have no numbers."""
    if torch.compiler.is_compiling():
        return True
    for x in tensors:
        if x is None:
            continue
        if type(x) not in _PLAIN or _is_batched(x) or _has_left_transform(x):
            return True
    return _dispatch_modes() > 0 or _has_transforms() or _is_tracing()
