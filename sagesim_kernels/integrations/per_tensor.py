"""Values that are computed from a tensor once, and not in each layer of a model.

Padding and packing are read from the GPU, for which the host waits. All layers of a model get the
same tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

_NOTHING: Final = contextlib.nullcontext()


def once_per_tensor(compute: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of one tensor or more, and then of hashable arguments.

    Its values are kept while the tensors live, and computed again after one of them has changed.
    Changes of a tensor through its `.data`, which PyTorch does not count, are not seen on a GPU.
    The host does not wait for a tensor on a CPU, so nothing is kept for it.
    """
    kept: Any = WeakTensorKeyDictionary()  # to (state, what is kept for the other arguments)

    @functools.wraps(compute)
    def known(*arguments: Hashable) -> T:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        others = arguments[len(tensors) :]
        # PyTorch counts no changes of inference tensors, and none that another library makes.
        if any(x.is_cpu or x.is_inference() for x in tensors):
            return compute(*arguments)
        values: Any = kept
        for tensor in tensors:
            now = tensor._version, tensor.data_ptr()
            state, inner = values.get(tensor, (None, None))
            if state != now:
                inner = {} if tensor is tensors[-1] else WeakTensorKeyDictionary()
                values[tensor] = now, inner
            values = inner
        if others not in values:
            # Inference tensors could not be saved for a backward later.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
                values[others] = compute(*arguments)
        return values[others]

    return known
