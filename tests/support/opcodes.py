"""Classes of the machine's instructions: which unit executes an opcode, and the bytes it moves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

LANES = 32
"""Threads of a warp."""

_PRODUCT = re.compile(r"([A-Z]*)MMA\.(\w+)")
_SHAPES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "16832": 16 * 8 * 32, "8816": 8 * 8 * 16}
"""Multiply-adds of one instruction of a warp, by the shape in its opcode."""

_WARPGROUP = re.compile(r"(\d+)x(\d+)x(\d+)")

_UNITS = {
    "fp32": "FADD FMUL FFMA FADD2 FMUL2 FFMA2 HADD2 HMUL2 HFMA2 FSWZADD",
    "imad": "IMAD IMUL IDP",
    "xu": "MUFU I2F F2F I2I FRND POPC FLO BREV",
    "f2i": "F2I",
    "alu": "IADD IADD3 LOP LOP3 PRMT SHF LEA ISETP FSETP HSETP2 FSEL SEL FMNMX FMNMX3 IMNMX VIMNMX "
    "VIMNMX3 VIADDMNMX VIADD PLOP3 MOV MOV32I I2FP F2FP IABS SGXT BMSK FCHK FCMP ICMP LOP32I "
    "IADD32I VABSDIFF VABSDIFF4 P2R R2P HMNMX2 I2IP CS2R",
    "shuffle": "SHFL",
    "shared": "LDS STS LDSM STSM ATOMS",
    "copy": "LDGSTS",
    "global": "LDG STG LD ST",
    "atomic": "RED REDG ATOMG ATOM",
    "local": "LDL STL",
}
_UNIT_OF = {name: unit for unit, names in _UNITS.items() for name in names.split()}

_WIDTH = re.compile(r"\.(?:B?(128|64)\b|[SU](8|16)\b)")
_MATRICES = re.compile(r"\.(4|2)\b")


def unit(opcode: str) -> str:
    """Return the class of an opcode. Products have their kind and shape, as in "HMMA.16816".

    "other" are instructions that only take a slot of the scheduler: jumps, barriers, and those of
    the uniform datapath.

    >>> unit("HMMA.16816.F32.BF16"), unit("MUFU.EX2"), unit("BRA")
    ('HMMA.16816', 'xu', 'other')
    """
    if found := _PRODUCT.match(opcode):
        return f"{found[1]}MMA.{found[2]}"
    return _UNIT_OF.get(opcode.split(".")[0], "other")


def moved(opcode: str) -> int:
    """Return the bytes that an instruction of a warp reads or writes, 0 if it moves none.

    >>> moved("LDSM.16.M88.4"), moved("STS.64"), moved("RED.E.ADD.STRONG.GPU")
    (512, 256, 128)
    """
    kind = unit(opcode)
    if kind not in ("shared", "copy", "global", "atomic", "local"):
        return 0
    if opcode.startswith(("LDSM", "STSM")):
        found = _MATRICES.search(opcode)
        return 128 * int(found[1] if found else 1)
    found = _WIDTH.search(opcode)
    bits = int(found[1] or found[2]) if found else 32
    return LANES * bits // 8


def multiply_adds(opcode: str) -> int:
    """Return the multiply-adds of an instruction of a warp; a quarter of a warpgroup's.

    >>> multiply_adds("IMMA.16832.S8.S8"), multiply_adds("FADD")
    (4096, 0)

    Raises:
        ValueError: if the shape is not known.
    """
    found = _PRODUCT.match(opcode)
    if not found:
        return 0
    if group := _WARPGROUP.fullmatch(found[2]):
        m, n, k = map(int, group.groups())
        return m * n * k // 4
    if found[2] not in _SHAPES:
        raise ValueError(f"{opcode} has a shape that is not known")
    return _SHAPES[found[2]]


def by_unit(issued: Mapping[str, int]) -> dict[str, int]:
    """Return instructions by class, the most frequent first."""
    result: Counter[str] = Counter()
    for opcode, count in issued.items():
        result[unit(opcode)] += count
    return dict(result.most_common())


def bytes_by_unit(issued: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes that the instructions of each class move."""
    result: Counter[str] = Counter()
    for opcode, count in issued.items():
        if number := moved(opcode):
            result[unit(opcode)] += number * count
    return dict(result)
