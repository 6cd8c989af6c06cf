"""Faults of the compiler are found in listings, correct listings pass, and loops are counted."""

import pytest

from tests.support.sass import issued_in_loop, loops, lost_descriptors

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
def test_a_correct_high_word_passes(listing: str) -> None:
    assert lost_descriptors(listing) == []


@pytest.mark.parametrize("listing", [LOST, NEVER_GIVEN, OVERWRITTEN])
def test_a_wrong_high_word_is_reported(listing: str) -> None:
    (instruction,) = lost_descriptors(listing)
    assert instruction.split()[0].endswith("IADD3.X")


SKIPPED = """
        /*0000*/                   UIADD3.64 UR10, UR4, 0x2, URZ ;
        /*0010*/                   UIADD3.64 UR8, UR4, 0x2, URZ ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   UIADD3 UR8, UP1, UR4, 0x2, URZ ;
        /*0040*/                   UIADD3.64 UR8, UR8, 0x80, URZ ;
.L_x_0:
        /*0050*/                   IGMMA.64x64x32.S8.S8 R24, gdesc[UR8], RZ, !UPT ;
        /*0060*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0070*/                   IGMMA.64x64x32.S8.S8 R24, gdesc[UR8], R24, gsb0 ;
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8], R88 ;
        /*0090*/                   EXIT ;
"""
GIVEN_FIRST = "        /*0010*/                   UIADD3.64 UR8, UR4, 0x2, URZ ;\n"


def test_a_descriptor_that_is_written_on_each_path_passes():
    assert lost_descriptors(SKIPPED) == []


def test_a_descriptor_that_is_written_only_before_a_skipped_loop_is_reported():
    (product,) = lost_descriptors(SKIPPED.replace(GIVEN_FIRST, ""))
    assert "RZ" not in product  # the product behind the loop, not the one in it
    assert product.startswith("IGMMA")  # the HGMMA has its left operand in registers


def test_a_descriptor_that_is_written_under_a_condition_is_reported():
    conditional = SKIPPED.replace("     UIADD3.64 UR10", "@P3  UIADD3.64 UR10")
    assert len(lost_descriptors(conditional)) == 3


@pytest.mark.parametrize("jump", ["BRA `(.L_x_3)", 'BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_3"*)'])
def test_jumps_are_followed(jump: str):
    listing = f"""
        /*0000*/                   UIADD3.64 UR10, UR4, 0x2, URZ ;
        /*0010*/                   UIADD3.64 UR8, UR4, 0x2, URZ ;
        /*0020*/                   {jump} ;
        /*0030*/                   EXIT ;
.L_x_3:
        /*0040*/                   IGMMA.64x64x32.S8.S8 R24, gdesc[UR8], R24, gsb0 ;
"""
    assert lost_descriptors(listing) == []
    assert len(lost_descriptors(listing.replace("UR10", "UR12"))) == 1


LOOP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0020*/                   FMUL R4, R24, R5 ;
        /*0030*/              @P0 BRA `(.L_x_1) ;
        /*0040*/                   FSEL R4, R4, -INF , P1 ;
        /*0050*/                   FSEL R6, R6, -INF , P1 ;
.L_x_1:
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/              @!P2 BRA `(.L_x_0) ;
.L_x_2:
        /*0080*/                   FADD R4, R4, R4 ;
        /*0090*/              @!P2 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
"""


def test_instructions_that_a_forward_jump_skips_are_not_counted():
    assert issued_in_loop(LOOP) == {"HGMMA.64x64x16.F32": 1, "FMUL": 1, "BRA": 2, "MUFU.EX2": 1}


def test_without_the_jump_they_are_counted():
    straight = LOOP.replace("@P0 BRA `(.L_x_1)", "NOP")
    assert issued_in_loop(straight)["FSEL"] == 2


def test_a_loop_without_a_matrix_product_is_not_counted():
    assert issued_in_loop(LOOP.replace("HGMMA", "FFMA")) == {}


@pytest.mark.parametrize("product", ["HMMA.16816.F32.BF16", "IMMA.16832.S8.S8", "QMMA.16832.F32"])
def test_loops_with_products_of_a_warp_are_found(product: str):
    listing = LOOP.replace("HGMMA.64x64x16.F32 R24, gdesc[UR4]", f"{product} R24, R8")
    (loop,) = loops(listing)
    assert loop.issued == {product: 1, "FMUL": 1, "BRA": 2, "MUFU.EX2": 1}
    assert loop.skipped == {"FSEL": 2}


def as_cuobjdump(listing: str) -> str:
    """The listing with addresses in the place of labels."""
    lines = listing.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(".L_x_"):
            address = lines[number + 1].split("/*")[1].split("*/")[0]
            listing = listing.replace(f"`({line[:-1]})", f"{int(address, 16):#x}").replace(
                line + "\n", ""
            )
    return listing


def test_a_listing_with_addresses_has_the_same_loops():
    listing = as_cuobjdump(LOOP)
    assert ".L_x" not in listing
    assert loops(listing) == loops(LOOP)


def test_two_loops_are_both_found_and_a_loop_around_them_is_not():
    body = """
        /*00{0}0*/                   HMMA.16816.F32 R24, R8, R24 ;
        /*00{1}0*/                   {2} R4, R4 ;
        /*00{3}0*/              @!P2 BRA 0x{0}0 ;
"""
    listing = body.format(1, 2, "FMUL", 3) + body.format(4, 5, "FSEL", 6)
    listing += "        /*0070*/              @P3 BRA 0x10 ;\n"
    found = [loop.issued for loop in loops(listing)]
    assert found == [
        {"HMMA.16816.F32": 1, "FMUL": 1, "BRA": 1},
        {"HMMA.16816.F32": 1, "FSEL": 1, "BRA": 1},
    ]


@pytest.mark.parametrize("needed", ["LDGSTS.E.BYPASS.128 [R4], [R6]", "HMMA.16816 R4, R5, R6"])
def test_a_jump_over_a_load_or_a_product_is_not_taken(needed: str):
    (loop,) = loops(LOOP.replace("FSEL R6, R6, -INF , P1", needed))
    assert loop.issued["FSEL"] == 1
    assert not loop.skipped


def test_the_shortest_loop_is_the_main_loop():
    longer = LOOP.replace("FADD R4, R4, R4 ;", "HMMA.16816 R4, R5, R6 ;")
    assert issued_in_loop(longer) == {"HMMA.16816": 1, "BRA": 1}
