"""Operations of Gluon that have other names in Triton 3.6 than in the newest Triton."""

# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


def _either(module, newest: str, oldest: str):
    return getattr(module, newest, None) or getattr(module, oldest)


tma_load = _either(tma, "async_load", "async_copy_global_to_shared")
"""Copy global to shared memory by TMA. A barrier signals the end of the copy."""

tma_store = _either(tma, "async_store", "async_copy_shared_to_global")
"""Copy shared to global memory by TMA."""

tma_add = getattr(tma, "async_atomic_add", _reduce_add)
"""Add shared to global memory by TMA. Triton 3.6 has the operation, but no function for it."""

async_load = _either(async_copy, "async_load", "async_copy_global_to_shared")
"""Copy global to shared memory by cp.async."""

barrier = _either(gl, "barrier", "thread_barrier")
"""Synchronize the warps of a program, or of one function of a warp-specialized kernel."""


@builtin
def reinterpret(shared, dtype, shape, layout, _semantic=None):
    """View a buffer in shared memory with another dtype, shape and layout."""
    view = getattr(shared, "reinterpret", None) or shared._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)
