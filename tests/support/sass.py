"""Hopper's machine code, read for a fault of a compiler, and for what a loop costs."""

import re
from collections import Counter

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ +)?([A-Z0-9_.]+) ?([^;]*);")
_CONDITIONAL = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+@!?U?P\w+ +BRA\b")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_TARGET = re.compile(r"\.L_x_\d+")
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


def issued_in_loop(listing: str) -> Counter[str]:
    """Opcodes of the innermost loop of nvdisasm's listing that multiplies matrices, by how often a
    warp issues them in a step that jumps forward wherever it can: past masks of tiles that need
    none, and past the slow path of divisions."""
    code: list[tuple[str, str, bool]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append((found[1], found[2], _CONDITIONAL.search(line) is not None))
    jumps = [
        (at, labels[target[0]], is_conditional)
        for at, (opcode, text, is_conditional) in enumerate(code)
        if opcode == "BRA" and (target := _TARGET.search(text)) and target[0] in labels
    ]
    loops = [(to, at) for at, to, _ in jumps if to <= at]
    multiplying = [(a, b) for a, b in loops if any("GMMA" in code[i][0] for i in range(a, b))]
    if not multiplying:
        return Counter()
    first, last = min(multiplying, key=lambda loop: loop[1] - loop[0])
    skipped = {
        i
        for at, to, is_conditional in jumps
        if is_conditional and first <= at < to <= last
        for i in range(at + 1, to)
    }
    return Counter(code[i][0] for i in range(first, last + 1) if i not in skipped)


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
