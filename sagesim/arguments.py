"""What the arguments of an attention call must be and what they mean; nothing is computed here."""

from __future__ import annotations

import torch
from torch import Tensor

from sagesim.presets import with_precision
from sagesim.spec import SITES, AttentionSpec, Precision


def check_spec(spec: object) -> None:
    """Raise TypeError unless it is an AttentionSpec, saying how a label becomes one."""
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"spec is {spec!r}; AttentionSpec.parse makes one of a label")


def check_scale(scale: object) -> None:
    """Raise TypeError for a tensor, which would get no gradient, and for a text."""
    if isinstance(scale, (Tensor, str)):
        what = f"a tensor of {scale.dtype}" if isinstance(scale, Tensor) else repr(scale)
        raise TypeError(f"scale is {what}; a number or None needed (a learned one goes into q)")


def resolve_input16(spec: AttentionSpec, dtype: torch.dtype) -> AttentionSpec:
    """`spec` with INPUT16 replaced by the inputs' own 16-bit format."""
    own = Precision.BF16 if dtype is torch.bfloat16 else Precision.FP16
    sites = [s for s in SITES if spec.site(s).precision is Precision.INPUT16]
    return with_precision(spec, own, *sites) if sites else spec


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's dtype, as SDPA's are cast; as they are where it is off."""
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if _is_cast(x) else x for x in (q, k, v))
    return q, k, v


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype is not torch.float64


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool) -> int:
    """The query heads for each head of k and v [..., heads, tokens, head size].

    Raises:
        TypeError: unequal dtypes.
        ValueError: unequal devices, or shapes that do not fit each other, naming them.
    """
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device}, {v.device}")
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"q, k and v need [..., tokens, head size]; got {_shapes(q, k, v)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"head sizes of q and k differ: {_shapes(q, k, v)}")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"head size 0: {_shapes(q, k, v)}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v differ in heads or tokens: {_shapes(q, k, v)}")
    if q.shape[:-2] == k.shape[:-2]:
        return 1
    if q.ndim != k.ndim or q.ndim < 3 or q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"batch axes of q and k differ: {_shapes(q, k, v)}")
    if not enable_gqa:
        raise ValueError(
            f"q and k differ in heads: {_shapes(q, k, v)}; enable_gqa=True repeats those of k"
        )
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise ValueError(f"the heads of q are no multiple of those of k: {_shapes(q, k, v)}")
    return q.shape[-3] // k.shape[-3]


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
