"""The fault is seen, and nothing else taken for it."""

import pytest

from tests.support.sass import lost_descriptors

KEPT = """
        /*3620*/                   IMAD.MOV.U32 R18, RZ, RZ, RZ ;
        /*3690*/                   IADD3 R19, P0, R17.reuse, 0x2, RZ ;
        /*36b0*/                   IADD3.X R21, R18, -0x7fffffe0, RZ, P0, !PT ;
"""
KEPT_UNIFORM = """
        /*54c0*/                   UMOV UR5, URZ ;
        /*6210*/                   USGXT.U32 UR4, UR9, 0xe ;
        /*5530*/                   UIADD3 UR10, UP1, UR4, 0x2, URZ ;
        /*6240*/                   UIADD3.X UR9, UR5, 0x40000040, URZ, UP1, !UPT ;
"""
LOST = """
        /*16b0*/                   LOP3.LUT R0, R0, 0xf7ffffff, RZ, 0xc0, !PT ;
        /*3690*/                   IADD3 R19, P0, R0.reuse, 0x2, RZ ;
        /*36b0*/                   IADD3.X R21, R0, -0x7fffffe0, RZ, P0, !PT ;
"""
NEVER_GIVEN = """
        /*5530*/                   UIADD3 UR34, UP0, UR34, 0x2, URZ ;
        /*5560*/                   UIADD3.X UR35, UR35, -0x7fffffe0, URZ, UP0, !UPT ;
"""
OVERWRITTEN = """
        /*54c0*/                   CS2R R8, SRZ ;
        /*54d0*/                   IMAD.WIDE.U32 R8, R30, UR6, RZ ;
        /*5560*/                   IADD3.X R21, R9, 0x40000040, RZ, P0, !PT ;
"""
OTHER_NUMBER = """
        /*54c0*/                   IADD3.X R21, R9, 0x7fffffff, RZ, P0, !PT ;
"""


@pytest.mark.parametrize("listing", [KEPT, KEPT_UNIFORM, OTHER_NUMBER])
def test_kept(listing: str) -> None:
    assert lost_descriptors(listing) == []


@pytest.mark.parametrize("listing", [LOST, NEVER_GIVEN, OVERWRITTEN])
def test_lost(listing: str) -> None:
    (instruction,) = lost_descriptors(listing)
    assert instruction.split()[0].endswith("IADD3.X")
