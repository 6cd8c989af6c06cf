"""Calls of `attention` whose arguments have been checked.

To check them takes the host as long as a launch.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from sagesim.spec import AttentionSpec
from sagesim_kernels.ops import Call

_calls: Final[dict[Any, tuple[AttentionSpec, Call]]] = {}
"""By the signature of a call without tensors besides q, k and v: its spec, and the call.

A signature has the id of the spec. The spec is kept, so that no other one gets this id.
"""
_MOST_CALLS: Final = 1024


def signature_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, options: Any) -> Any:
    """Return what checks of these arguments depend on; None if they have to be checked each time.

    options: the window first.

    torch.compile has to see the checks. Symbolic sizes, and options that are no numbers, have no
    hash.
    """
    if torch.compiler.is_compiling():
        return None
    of_tensors = (type(q), type(k), type(v), q.device, k.device, v.device, q.dtype, k.dtype)
    try:
        # 1, 1.0 and True are equal, and not all of them are what an option may be.
        window, *_ = options
        types = (*map(type, options), *map(type, window))
        signature = (*of_tensors, v.dtype, q.shape, k.shape, v.shape, id(spec), options, types)
        hash(signature)
    except TypeError:
        return None
    return signature


def known_call(signature: Any) -> Call | None:
    """Return the call of a signature if it has been checked."""
    found = _calls.get(signature)
    return None if found is None else found[1]


def remember_call(signature: Any, spec: AttentionSpec, call: Call) -> None:
    """Keep a call that has been checked, unless its signature is None."""
    if signature is None:
        return
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[signature] = spec, call
