"""Calls of `attention` whose arguments have been checked.

To check them takes the host as long as a launch.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sagesim.spec import AttentionSpec
from sagesim_kernels.ops import Call


class KnownCall(NamedTuple):
    """A call whose arguments have been checked."""

    spec: AttentionSpec
    """Kept so that no other one gets its id, which is a part of the signature."""
    call: Call
    is_cast: bool  #: whether autocast changes the tensors


_calls: Final[dict[Any, KnownCall]] = {}
"""By the signature of a call without tensors besides q, k and v."""
_MOST_CALLS: Final = 1024


def known_call(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, options: Any
) -> tuple[Any, KnownCall | None]:
    """Return a signature, which is what checks of these arguments depend on, and its known call.

    The call is None if it has not been checked. The signature is None if checks are due each time.

    options: the window first.

    torch.compile has to see the checks. Symbolic sizes have no hash, and neither have some options
    that the checks refuse. What is no tensor lacks attributes.
    """
    if torch.compiler.is_compiling():
        return None, None
    try:
        device = q.device
        kind = device.type
        signature = (
            *(type(q), type(k), type(v), q.dtype, k.dtype, v.dtype, q.shape, k.shape, v.shape),
            *(device, k.device, v.device, q.layout, k.layout, v.layout, id(spec), options),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            # 1, 1.0 and True are equal, and not all of them are what an option may be.
            *map(type, options),
            *map(type, options[0]),
        )
        return signature, _calls.get(signature)
    except (AttributeError, RuntimeError, TypeError):
        return None, None


def remember_call(signature: Any, known: KnownCall) -> None:
    """Keep a call that has been checked, unless its signature is None."""
    if signature is None:
        return
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[signature] = known
