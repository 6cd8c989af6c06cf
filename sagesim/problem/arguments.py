"""Checks of the arguments of an attention call, shared by the emulator and the kernels."""

from __future__ import annotations

import reprlib
from numbers import Real
from typing import Final

import torch
from torch import Tensor

from sagesim.checks import check_type, is_number
from sagesim.spec import SITES, AttentionSpec, Precision, with_precision

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of q, k, v and do that the emulator and the reference take."""

_LARGEST: Final = 2.0**100


def check_spec(spec: object, name: str = "spec") -> None:
    """Raise TypeError if spec is not an AttentionSpec, and say how to parse a label.

    name: of the argument.
    """
    if not isinstance(spec, AttentionSpec):
        raise TypeError(
            f"{name} is {reprlib.repr(spec)}, not an AttentionSpec; AttentionSpec.parse makes one "
            "from a label"
        )


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless the value of an option is True or False."""
    check_type(name, value, bool | torch.SymBool, "True or False")


def check_scale(scale: object) -> None:
    """Raise unless scale is None or a number from -2^100 to 2^100.

    The scale of a row of zeros is 1. Times such a number it does not overflow float32, nor does the
    quotient of both and a softcap.

    Raises:
        TypeError: if it is a tensor, which would get no gradient, or no number.
        ValueError: if it is another number.
    """
    if scale is None:
        return
    if not is_number(scale, int | float | torch.SymInt | torch.SymFloat | Real):
        found = f"a tensor of {scale.dtype}" if isinstance(scale, Tensor) else reprlib.repr(scale)
        raise TypeError(
            f"scale is {found}; it must be a number or None (multiply q by a learned scale)"
        )
    # float() of a number would make torch.compile compile it in
    if not -_LARGEST <= scale <= _LARGEST:
        raise ValueError(f"scale is {scale}; it must be from -2^100 to 2^100, or None")


def check_is_tensor(name: str, x: object) -> None:
    """Raise TypeError unless x is a dense tensor."""
    if not isinstance(x, Tensor):
        found = "None" if x is None else f"a {type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(f"{name} is {found}; it must be a torch.Tensor")
    if x.is_nested or x.layout is not torch.strided:
        kind = "a nested tensor" if x.is_nested else f"a tensor of {x.layout}"
        raise TypeError(
            f"{name} is {kind}; it must be dense (packed sequences: attention_varlen of "
            "sagesim_kernels)"
        )


def resolve_input16(spec: AttentionSpec, dtype: torch.dtype) -> AttentionSpec:
    """`spec` with INPUT16 replaced: by the inputs' own dtype if it has 16 bit.

    For float32 and float64 inputs, by FP16 in qk and qk_recompute, and by BF16 in all other sites:
    docs/numerics.md, "INPUT16", says why.
    """
    of_logits = Precision.BF16 if dtype is torch.bfloat16 else Precision.FP16
    others = Precision.FP16 if dtype is torch.float16 else Precision.BF16
    for site in SITES:
        if spec.site(site).precision is Precision.INPUT16:
            precision = of_logits if site in ("qk", "qk_recompute") else others
            spec = with_precision(spec, precision, site)
    return spec


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as SDPA casts them: to autocast's dtype if it is enabled, else unchanged.

    Autocast changes neither integers nor float64.

    Raises:
        TypeError: if one is no dense tensor.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
    device = q.device.type
    # Asking whether the device has autocast would be a graph break in torch 2.11; meta has none.
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if _is_castable(x) else x for x in (q, k, v))
    return q, k, v


def _is_castable(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype is not torch.float64


def with_four_axes(x: Tensor) -> Tensor:
    """Reshape [..., heads, tokens, channels] to [sequences, heads, tokens, channels]."""
    if x.ndim == 4:
        return x
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x.flatten(0, -4)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool) -> int:
    """Check q, k and v [..., heads, tokens, head size]; return the query heads per head of k.

    Raises:
        TypeError: if the dtypes differ, or one is no dense tensor, or a DTensor.
        ValueError: if the devices differ or the shapes do not fit each other.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
        if hasattr(x, "placements"):
            raise TypeError(
                f"{name} is a DTensor, and attention has no sharding strategy; if batch or heads "
                "are sharded, call attention of the shards with "
                "torch.distributed.tensor.experimental.local_map"
            )
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
            f"q and k differ in heads: {_shapes(q, k, v)}; enable_gqa=True repeats k's heads"
        )
    if 0 in (q.shape[-3], k.shape[-3]) or q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"the number of heads of q is not a positive multiple of that of k: {_shapes(q, k, v)}"
        )
    return q.shape[-3] // k.shape[-3]


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
