"""Triton kernels for every GPU: the forward, and the backward in one pass over the keys."""

from sagesim_kernels.portable.backward import launch_backward, map_product
from sagesim_kernels.portable.forward import compute_failed_rows, launch_forward
from sagesim_kernels.portable.p_and_ds import UNTRACED, MapTrace, MapTraces
from sagesim_kernels.portable.p_rows import launch_p_rows
from sagesim_kernels.portable.tiles import Tile, try_tiles

__all__ = [
    "UNTRACED",
    "MapTrace",
    "MapTraces",
    "Tile",
    "compute_failed_rows",
    "launch_backward",
    "launch_forward",
    "launch_p_rows",
    "map_product",
    "try_tiles",
]
