"""Which specs, head sizes and dtypes the kernels support, and the reason if not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from sagesim.checks import check_number, check_type
from sagesim.problem import check_spec, resolve_input16
from sagesim.spec import MAPS, OPERANDS, SITES, AttentionSpec, Granularity, MatmulSpec, Precision

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD: Final = 256
BLOCKS: Final = (32, 64, 128)

_G = Granularity
_MAP_SCALES: Final = {
    "pv": (_G.PerTileRow,),
    "dv": (_G.PerTileColumn, _G.PerTile, _G.PerRowBound),
    "dq": (_G.PerTileRow, _G.PerTile, _G.PerRowBound),
    "dk": (_G.PerTileColumn, _G.PerTile, _G.PerRowBound),
}
"""Granularities of P and dS in INT8: scales that a tile determines and that factor out of its sums,
or that follow from bounds. In FP8, the latter alone."""

_LONG_BLOCK: Final = 256
"""Queries of a block that no program holds at once."""

_CHANNELS_SUMMED: Final = (_G.PerToken, _G.PerBlock)
_TOKENS_SUMMED: Final = (_G.PerBlockChannel, _G.PerBlock)


@dataclass(frozen=True, slots=True)
class Support:
    """Whether there is a kernel: true, or false with a reason.

    >>> from sagesim import FACTORED, FPA
    >>> print(supports(FACTORED))
    yes
    >>> bool(supports(FPA))
    False
    """

    reason: str | None

    def __bool__(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return self.reason or "yes"


def supports(
    spec: AttentionSpec,
    *,
    head_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> Support:
    """Return whether `attention` supports a spec, and if given, a head size and dtype.

    Every matrix product may be in INT8, FP16, BF16 or INPUT16, and dv, dq and dk in FP8 with scales
    from bounds. Scales must factor out of the sums of a tile, and the tile or a bound must
    determine them. GPUs that do not multiply FP8 multiply the same codes as float16 numbers.

    Args:
        head_size: the larger one, if those of q and v differ.

    Raises:
        TypeError: if spec is not an AttentionSpec, head_size not an integer, or dtype not a
            torch.dtype.

    >>> from sagesim import AttentionSpec
    >>> print(supports(AttentionSpec.parse("sagebwd dq=int8@row,block")))
    site dq: ds per row; the kernels have tile_row, tile, row_bound
    """
    check_spec(spec)
    if head_size is not None:
        check_number("head_size", head_size, int | torch.SymInt, "an integer or None")
    check_type("dtype", dtype, torch.dtype | None, "a torch.dtype, such as torch.float16")
    return Support(_reason(spec, head_size, dtype))


def head_reason(head_size: int) -> str | None:
    """Return why there is no kernel for this head size, or None."""
    if 1 <= head_size <= LARGEST_HEAD:
        return None
    return f"head size {head_size}; the kernels have 1 to {LARGEST_HEAD}"


def _reason(spec: AttentionSpec, head_size: int | None, dtype: torch.dtype | None) -> str | None:
    if head_size is not None and (reason := head_reason(head_size)):
        return reason
    if dtype is not None:
        if dtype not in DTYPES:
            return f"{dtype}; the kernels take float16, bfloat16 and float32"
        spec = resolve_input16(spec, dtype)
    for name, size in (("block_q", spec.block_q), ("block_k", spec.block_k)):
        if size not in BLOCKS and (name, size) != ("block_q", _LONG_BLOCK):
            return f"{name}={size}; the kernels have {', '.join(map(str, BLOCKS))}"
    for site in SITES:
        reason = _site_reason(site, spec.site(site)) or _block_reason(site, spec)
        if reason is not None:
            return f"site {site}: {reason}"
    return None


def _block_reason(site: str, spec: AttentionSpec) -> str | None:
    """Return why there is no kernel for a site with the spec's block_q, or None.

    The loops of the backward add the parts of a long block in float32. A sum of INT8 codes must be
    exact, and a scale of a tile needs the whole tile.
    """
    matmul = spec.site(site)
    if spec.block_q != _LONG_BLOCK or matmul.precision is not Precision.INT8:
        return None
    if site in ("dv", "dk") or (site == "dq" and matmul.lhs is _G.PerTile):
        blocks = ", ".join(map(str, BLOCKS))
        return f"int8 with block_q={spec.block_q}; the kernels have {blocks}"
    return None


def _site_reason(site: str, matmul: MatmulSpec) -> str | None:
    precision = matmul.precision
    left, right = OPERANDS[site]
    is_fp8 = precision.is_scaled and precision is not Precision.INT8
    maps = _MAP_SCALES.get(site, ())
    if precision is Precision.FP32 or (is_fp8 and _G.PerRowBound not in maps):
        also = ", fp8_e4m3, fp8_e5m2" if _G.PerRowBound in maps else ""
        return f"{precision.value}; the kernels have int8{also}, fp16, bf16 and input16"
    if not precision.is_scaled:
        return None
    tokens = _TOKENS_SUMMED if left in MAPS else _CHANNELS_SUMMED
    for tensor, how, known in (
        (left, matmul.lhs, (_G.PerRowBound,) if is_fp8 else maps or tokens),
        (right, matmul.rhs, tokens),
    ):
        if how not in known:
            fitting = ", ".join(g.value for g in known)
            of = f" in {precision.value}" if is_fp8 else ""
            return f"{tensor} per {how.value}{of}; the kernels have {fitting}"
    return None
