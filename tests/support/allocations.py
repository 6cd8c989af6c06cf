"""How much memory tensors take, whatever allocator the device has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Follows the storages that operators return, until they are freed.

    What an operator allocates and frees inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0  #: the most bytes at a time
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in self._bytes:
                self._bytes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._bytes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._bytes.values()))
        return found
