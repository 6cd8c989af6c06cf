"""What Triton's versions name differently in Gluon."""

# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


def _named(module, newest: str, oldest: str):
    return getattr(module, newest, None) or getattr(module, oldest)


load = _named(tma, "async_load", "async_copy_global_to_shared")
"""Shared memory = global memory, by TMA; a barrier says when."""

store = _named(tma, "async_store", "async_copy_shared_to_global")
"""Global memory = shared memory, by TMA."""

add = getattr(tma, "async_atomic_add", _reduce_add)
"""Global memory += shared memory, by TMA. Triton 3.6 has the operation, but no function for it."""

barrier = _named(gl, "barrier", "thread_barrier")
"""Of the warps of a partition."""


@builtin
def viewed(shared, dtype, shape, layout, _semantic=None):
    """The bytes of a buffer as another one."""
    view = getattr(shared, "reinterpret", None) or shared._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)
