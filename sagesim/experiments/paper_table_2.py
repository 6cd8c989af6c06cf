"""The paper's Table 2: errors of the intermediates in layer 11 of its 325M model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PAPER_TABLE_2: Final[Mapping[str, tuple[float, float]]] = {
    "delta": (0.9973, 0.0736),
    "p": (0.9917, 0.1293),
    "dp": (1.0000, 0.0000),
    "ds": (0.9789, 0.2045),
    "o": (0.9969, 0.0793),
    "dq": (0.9664, 0.2579),
    "dk": (0.9537, 0.3074),
    "dv": (0.9985, 0.0540),
}
"""(cosine, relative L2 error) by tensor, in the table's order. Source: arXiv 2603.02170, Table 2.

The model has QK-norm and was trained at 2.1M tokens per step.
"""
