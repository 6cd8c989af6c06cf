"""Opcodes are counted by the unit that executes them, and by the bytes that they move."""

import pytest

from tests.support.opcodes import by_unit, bytes_by_unit, moved, multiply_adds, unit


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("HMMA.16816.F32.BF16", "HMMA.16816"),
        ("IMMA.16832.S8.S8.SAT", "IMMA.16832"),
        ("HGMMA.64x128x16.F32.BF16", "HGMMA.64x128x16"),
        ("FFMA.FTZ", "fp32"),
        ("IMAD.MOV.U32", "imad"),
        ("F2I.NTZ", "f2i"),
        ("F2FP.BF16.PACK_AB", "alu"),
        ("SHFL.BFLY", "shuffle"),
        ("LDSM.16.MT88.4", "shared"),
        ("LDGSTS.E.BYPASS.LTC128B.128", "copy"),
        ("RED.E.ADD.S32.STRONG.GPU", "atomic"),
        ("LDL.LU", "local"),
        ("BAR.SYNC.DEFER_BLOCKING", "other"),
        ("UIADD3", "other"),
    ],
)
def test_each_opcode_has_a_unit(opcode: str, expected: str):
    assert unit(opcode) == expected


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("LDSM.16.M88", 128),
        ("LDSM.16.M88.4", 512),
        ("STS", 128),
        ("STS.U16", 64),
        ("LDS.U8", 32),
        ("LDS.128", 512),
        ("LDGSTS.E.BYPASS.LTC128B.128", 512),
        ("LDGSTS.E", 128),
        ("LDG.E.64", 256),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", 128),
        ("LDL.LU.64", 256),
        ("FADD", 0),
        ("SHFL.BFLY", 0),
    ],
)
def test_bytes_of_a_warp(opcode: str, expected: int):
    assert moved(opcode) == expected


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("HMMA.16816.F32.BF16", 16 * 8 * 16),
        ("HMMA.1688.F32", 16 * 8 * 8),
        ("IMMA.16832.S8.S8", 16 * 8 * 32),
        ("HGMMA.64x128x16.F32.BF16", 64 * 128 * 16 // 4),
        ("FFMA", 0),
    ],
)
def test_multiply_adds_of_a_warp(opcode: str, expected: int):
    assert multiply_adds(opcode) == expected


def test_a_product_of_unknown_shape_is_an_error():
    with pytest.raises(ValueError, match=r"DMMA\.884"):
        multiply_adds("DMMA.884")


def test_counts_are_summed():
    issued = {"LDS": 2, "STS.64": 1, "FADD": 3, "FMUL": 1}
    assert by_unit(issued) == {"fp32": 4, "shared": 3}
    assert bytes_by_unit(issued) == {"shared": 2 * 128 + 256}
