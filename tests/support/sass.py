"""Hopper's machine code, read for a fault of a compiler."""

import re

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ +)?([A-Z0-9_.]+) ?([^;]*);")
_REGISTER = re.compile(r"U?R\d+")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_LAYOUTS = {0x40000040, 0x80000020, 0xC0000010}
"""The high words of a descriptor of a wgmma operand, for rows of 128, 64 and 32 bytes."""


def lost_descriptors(listing: str) -> list[str]:
    """Instructions of nvdisasm's listing that build the address of a wgmma operand on a register
    which does not hold it.

    The descriptor of the operand's second 32 bytes is its first's address, a number below 2**32,
    plus a constant of 64 bits. ptxas 12.8, which comes with Triton 3.6, sometimes loses the address
    and adds to whatever its register holds. (12.9 does not.) It shows in the high word: a zero plus
    the constant's, where the register was last given something that is not zero.
    """
    is_zero: dict[str, bool] = {}
    found = []
    for opcode, text in _INSTRUCTION.findall(listing):
        first, *sources = (x.strip().split(".")[0] for x in text.split(","))
        if opcode in ("IADD3.X", "UIADD3.X") and any(map(_is_layout, sources)):
            registers = filter(_REGISTER.fullmatch, sources)
            if not all(is_zero.get(register, False) for register in registers):
                found.append(f"{opcode} {text.strip()}")
        if _REGISTER.fullmatch(first):
            bank, number = first.rstrip("0123456789"), int(first.lstrip("UR"))
            for i in range(_width(opcode)):
                is_zero[f"{bank}{number + i}"] = _gives_zero(opcode, sources)
    return found


def _is_layout(source: str) -> bool:
    return _NUMBER.fullmatch(source) is not None and int(source, 16) % 2**32 in _LAYOUTS


def _gives_zero(opcode: str, sources: list[str]) -> bool:
    if opcode == "CS2R":
        return sources == ["SRZ"]
    moves = opcode.startswith(("IMAD.MOV", "IMAD.U32", "MOV", "UMOV", "HFMA2"))
    return moves and {"RZ", "URZ", "-RZ", "0", "0x0"}.issuperset(sources)


def _width(opcode: str) -> int:
    """Registers that an instruction writes."""
    if ".128" in opcode:
        return 4
    return 2 if ".64" in opcode or "WIDE" in opcode or opcode == "CS2R" else 1
