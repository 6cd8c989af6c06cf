"""What a multiprocessor of each card can do in a clock, with the source of every number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WHITEPAPERS: Final = {
    "A100": "NVIDIA A100 Tensor Core GPU Architecture (whitepaper, 2020)",
    "GA102": "NVIDIA Ampere GA102 GPU Architecture (whitepaper, 2021), appendix A",
    "Ada": "NVIDIA Ada GPU Architecture (whitepaper, 2022), appendix A",
    "L40S": "NVIDIA L40S (data sheet, 2023)",
    "Blackwell": "NVIDIA RTX Blackwell GPU Architecture (whitepaper, 2025), appendix A",
    "H100": "NVIDIA H100 Tensor Core GPU Architecture (whitepaper, 2022)",
    "H200": "NVIDIA H200 Tensor Core GPU (data sheet, 2023)",
    "guide": "CUDA C++ Programming Guide, table 'Throughput of Native Arithmetic Instructions'",
    "measured": "matrix products of 8192 x 8192 by Triton through mma.sync, on one H200",
}
"""The sources by the names that `Card.sources` uses."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. Rates are of one multiprocessor and one clock."""

    name: str
    capability: tuple[int, int]
    is_consumer: bool  #: a GeForce: half the rate of 16-bit products with float32 sums
    multiprocessors: int
    boost_ghz: float
    memory_gb_s: float
    flop_16: int  #: of dense 16-bit products with float32 sums: 2 for a multiply-add
    flop_int8: int  #: of dense INT8 products
    fp32: int  #: float32 additions, multiplications or multiply-adds
    integer: int  #: integer additions, comparisons, logic
    code: int  #: the capability that the code is compiled for that runs there
    sources: tuple[str, ...]  #: keys of WHITEPAPERS
    flop_16_wgmma: int = 0  #: as flop_16, by Hopper's wgmma; 0 on cards without it
    flop_int8_wgmma: int = 0  #: as flop_int8, by wgmma

    @property
    def tflops_16(self) -> float:
        """Dense 16-bit products of the whole card at its boost clock, in TFLOP/s."""
        return self.multiprocessors * self.flop_16 * self.boost_ghz / 1e3

    @property
    def tops_int8(self) -> float:
        """Dense INT8 products of the whole card at its boost clock, in TOP/s."""
        return self.multiprocessors * self.flop_int8 * self.boost_ghz / 1e3


SPECIAL: Final = 16
"""Exponentials, other special functions, and conversions between integers and floats that a
multiprocessor starts in a clock, on all of these cards ("guide")."""

SHARED_BYTES: Final = 128
"""Bytes that a multiprocessor reads or writes in shared memory in a clock: 32 banks of 4 bytes
(CUDA C++ Programming Guide, "Shared Memory" of each compute capability)."""

SHUFFLES: Final = 32
"""Lanes that a multiprocessor shuffles in a clock ("guide")."""

SCHEDULERS: Final = 4
"""Warp schedulers of a multiprocessor, each of which issues an instruction in a clock (CUDA C++
Programming Guide, "Architecture" of each compute capability)."""

CARDS: Final = {
    card.name: card
    for card in (
        # The whitepaper gives 312 TFLOP/s and 624 TOP/s. Memory is that of the 80 GB card.
        Card("A100", (8, 0), False, 108, 1.410, 2039, 2048, 4096, 64, 64, 80, ("A100", "guide")),
        # 71 TFLOP/s, 284 TOP/s
        Card("RTX 3090", (8, 6), True, 82, 1.695, 936, 512, 2048, 128, 64, 86, ("GA102", "guide")),
        # 165.2 TFLOP/s, 660.6 TOP/s
        Card("RTX 4090", (8, 9), True, 128, 2.520, 1008, 512, 2048, 128, 64, 89, ("Ada", "guide")),
        # 209.5 TFLOP/s, 838 TOP/s. Integer rate: as on capability 8.9, the lower of two statements.
        Card(
            "RTX 5090", (12, 0), True, 170, 2.407, 1792, 512, 2048, 128, 64, 120,
            ("Blackwell", "guide"),
        ),
        # 362 TFLOP/s (at 2.49 GHz), 733 TOP/s
        Card("L40S", (8, 9), False, 142, 2.520, 864, 1024, 2048, 128, 64, 89, ("L40S", "guide")),
        # 989 TFLOP/s and 1979 TOP/s are those of wgmma. FlashAttention-2 and code for sm80 use
        # mma.sync: measured in matrix products of a kernel, so its peak is higher.
        Card(
            "H100", (9, 0), False, 132, 1.830, 3352, 1750, 3280, 128, 64, 80,
            ("H100", "guide", "measured"), 4096, 8192,
        ),
        Card(
            "H200", (9, 0), False, 132, 1.830, 4800, 1750, 3280, 128, 64, 80,
            ("H200", "H100", "guide", "measured"), 4096, 8192,
        ),
    )
}  # fmt: skip
"""The cards by name. The rates of matrix products of an RTX card and of the L40S follow from the
TFLOP/s of the source, its multiprocessors and its clock."""
