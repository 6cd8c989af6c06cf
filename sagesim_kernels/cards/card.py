"""What a multiprocessor of each card can do in a clock, with the source of every number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple


class Source(NamedTuple):
    """Where a figure is from."""

    document: str
    basis: str  #: one of BASES


BASES: Final = {
    "read": "the document, or its table, was read",
    "quoted": "read in other documents that quote this one and name the table",
    "measured": "measured, by those who are named",
    "assumed": "no document gives it",
    "not checked": "cited from memory; the document could not be read",
}
"""How far a source was checked."""

SOURCES: Final = {
    "A100": Source(
        "NVIDIA Ampere Architecture In-Depth (2020): table of P100, V100 and A100, and its text",
        "read",
    ),
    "A100 80 GB": Source("NVIDIA A100 80 GB SXM, data sheet: memory bandwidth", "quoted"),
    "GA102": Source(
        "NVIDIA Ampere GA102 GPU Architecture (whitepaper, 2021), appendix A: RTX 3090", "quoted"
    ),
    "GA102 INT8": Source(
        "NVIDIA Ampere GA102 GPU Architecture (whitepaper, 2021), appendix A: 284 TOP/s",
        "not checked",
    ),
    "Ada": Source("NVIDIA Ada GPU Architecture (whitepaper, v2.1), appendix A: RTX 4090", "quoted"),
    "L40S": Source("NVIDIA L40S (data sheet, 2023)", "quoted"),
    "Blackwell": Source(
        "NVIDIA RTX Blackwell GPU Architecture (whitepaper, 2025), table 3: RTX 5090", "quoted"
    ),
    "H100": Source(
        "NVIDIA H100 Tensor Core GPU Architecture (whitepaper, v1.04), table 3; product page",
        "quoted",
    ),
    "H200": Source("NVIDIA H200 Tensor Core GPU (data sheet, 2023)", "quoted"),
    "guide": Source(
        "CUDA C++ Programming Guide, from 13.0 on CUDA C++ Best Practices Guide, table 'Throughput "
        "of Native Arithmetic Instructions'",
        "quoted",
    ),
    "capabilities": Source(
        "CUDA C++ Programming Guide, compute capabilities: unified data cache, shared memory, "
        "registers",
        "quoted",
    ),
    "mma.sync": Source(
        "products of 8192 x 8192 matrices by Triton through mma.sync, on one H200: 405 TFLOP/s in "
        "bfloat16 and 758 TOP/s in INT8, at an assumed 1.755 GHz",
        "measured",
    ),
    "cp.async": Source(
        "github.com/smallscientist1/cuda_microbenchmark: bytes that cp.async reads from the L2 "
        "cache of an A100 (3840 a clock) and of an RTX 4090 (1945.6 a clock)",
        "measured",
    ),
    "as RTX 4090": Source(
        "the L2 cache of the RTX 4090, scaled by the width of the memory interface", "assumed"
    ),
    "as A100": Source("the L2 cache of the A100, in bytes of the whole card a clock", "assumed"),
}


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
    l2_bytes: float  #: from or to the L2 cache
    l1_kb: int  #: KiB of the L1 cache and shared memory together
    shared_kb: int  #: KiB of them that can be shared memory
    code: int  #: the capability that the code is compiled for that runs there
    sources: Mapping[str, str]  #: a group of figures -> its key in SOURCES
    conversions: int = 16  #: of float32 to int32
    integer: int = 64  #: integer additions, comparisons, logic, maxima

    @property
    def tflops_16(self) -> float:
        """Dense 16-bit products of the whole card at its boost clock, in TFLOP/s."""
        return self.multiprocessors * self.flop_16 * self.boost_ghz / 1e3

    @property
    def tops_int8(self) -> float:
        """Dense INT8 products of the whole card at its boost clock, in TOP/s."""
        return self.multiprocessors * self.flop_int8 * self.boost_ghz / 1e3


SPECIAL: Final = 16
"""Exponentials and other special functions that a multiprocessor starts in a clock, on all of these
cards ("guide")."""

SHARED_BYTES: Final = 128
"""Bytes that a multiprocessor reads or writes in shared memory in a clock: 32 banks of 4 bytes
(CUDA C++ Best Practices Guide, "Shared Memory and Memory Banks")."""

SHUFFLES: Final = 32
"""Lanes that a multiprocessor shuffles in a clock ("guide")."""

SCHEDULERS: Final = 4
"""Warp schedulers of a multiprocessor, each of which issues an instruction in a clock (CUDA C++
Programming Guide, "Architecture" of each compute capability)."""

REGISTERS: Final = 65536
"""Of a multiprocessor ("capabilities")."""

_RTX_4090_L2: Final = 1945.6
"""Bytes a clock of the whole card ("cp.async")."""


def _from(products: str, clock: str, memory: str, l2: str, int8: str = "") -> dict[str, str]:
    return {
        "16-bit products": products,
        "INT8 products": int8 or products,
        "multiprocessors and clock": clock,
        "memory": memory,
        "L2 cache": l2,
        "float32, integers, special functions": "guide",
        "L1 cache and shared memory": "capabilities",
    }


CARDS: Final = {
    card.name: card
    for card in (
        # The source gives 312 TFLOP/s and 624 TOP/s. Memory is that of the 80 GB card.
        Card(
            "A100", (8, 0), False, 108, 1.410, 2039, 2048, 4096, 64, 3840 / 108, 192, 164, 80,
            _from("A100", "A100", "A100 80 GB", "cp.async"),
        ),
        # 71 TFLOP/s, 284 TOP/s; 384 bits of memory, as the RTX 4090
        Card(
            "RTX 3090", (8, 6), True, 82, 1.695, 936, 512, 2048, 128, _RTX_4090_L2 / 82,
            128, 100, 86,
            _from("GA102", "GA102", "GA102", "as RTX 4090", "GA102 INT8"),
        ),
        # 165.2 TFLOP/s, 660.6 TOP/s
        Card(
            "RTX 4090", (8, 9), True, 128, 2.520, 1008, 512, 2048, 128, _RTX_4090_L2 / 128,
            128, 100, 89,
            _from("Ada", "Ada", "Ada", "cp.async"),
        ),
        # 209.5 TFLOP/s, 838 TOP/s; 512 bits of memory. The guide gives 128 integer additions, and
        # 64 of the other integer instructions, which are more here; a footnote gives 2 conversions
        # from float32 to int32.
        Card(
            "RTX 5090", (12, 0), True, 170, 2.407, 1792, 512, 2048, 128,
            _RTX_4090_L2 * 512 / 384 / 170, 128, 100, 120,
            _from("Blackwell", "Blackwell", "Blackwell", "as RTX 4090"), conversions=2,
        ),
        # 362 TFLOP/s (at 2.49 GHz), 733 TOP/s; 384 bits of memory
        Card(
            "L40S", (8, 9), False, 142, 2.520, 864, 1024, 2048, 128, _RTX_4090_L2 / 142, 128,
            100, 89,
            _from("L40S", "L40S", "L40S", "as RTX 4090"),
        ),
        # 989 TFLOP/s and 1979 TOP/s are those of wgmma, which FlashAttention-2 and code for sm80 do
        # not use. The clock is that of the tensor cores.
        Card(
            "H100", (9, 0), False, 132, 1.830, 3352, 1750, 3280, 128, 29.1, 256, 228, 80,
            _from("mma.sync", "H100", "H100", "as A100"),
        ),
        Card(
            "H200", (9, 0), False, 132, 1.830, 4800, 1750, 3280, 128, 29.1, 256, 228, 80,
            _from("mma.sync", "H100", "H200", "as A100"),
        ),
    )
}  # fmt: skip
"""The cards by name. The rates of matrix products of an RTX card and of the L40S follow from the
TFLOP/s of the source, its multiprocessors and its clock."""
