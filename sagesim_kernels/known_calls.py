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


def signature_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, options: Any) -> Any:
    """Return what checks of these arguments depend on; None if they have to be checked each time.

    options: the window first.

    torch.compile has to see the checks. Symbolic sizes have no hash, and neither have some options
    that the checks refuse. What is no tensor lacks attributes.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        device = q.device
        of_tensors = (type(q), type(k), type(v), q.dtype, k.dtype, v.dtype, q.shape, k.shape)
        places = (v.shape, device, k.device, v.device, q.layout, k.layout, v.layout)
        kind = device.type
        cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        # 1, 1.0 and True are equal, and not all of them are what an option may be.
        types = (*map(type, options), *map(type, options[0]))
        signature = (*of_tensors, *places, cast_to, id(spec), options, types)
        hash(signature)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return signature


def known_call(signature: Any) -> KnownCall | None:
    """Return the call of a signature if it has been checked."""
    return None if signature is None else _calls.get(signature)


def remember_call(signature: Any, known: KnownCall) -> None:
    """Keep a call that has been checked, unless its signature is None."""
    if signature is None:
        return
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[signature] = known
