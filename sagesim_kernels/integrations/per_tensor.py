"""Values that are computed from a tensor once, and not in each layer of a model.

Padding and packing are read from the device, for which the host waits. All layers of a model get
the same tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


def once_per_tensor(compute: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of a tensor and of hashable arguments.

    Its values are kept while the tensor lives, and computed again after the tensor has changed.
    """
    kept: Any = WeakTensorKeyDictionary()  # to (version, {others: value})

    @functools.wraps(compute)
    def known(tensor: Tensor, *others: Hashable) -> T:
        if tensor.is_inference():  # PyTorch does not count its changes
            return compute(tensor, *others)
        version, values = kept.get(tensor, (None, {}))
        if version != tensor._version:
            values = {}
            kept[tensor] = tensor._version, values
        if others not in values:
            values[others] = compute(tensor, *others)
        return values[others]

    return known
