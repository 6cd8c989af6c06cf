"""Hopper's machine code, read for a fault of a compiler, and for what a loop costs."""

import re
from collections import Counter
from typing import NamedTuple

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(@!?U?P\w+ +)?([A-Z0-9_.]+) ?([^;]*);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_TARGET = re.compile(r"\.L_x_\d+")
_REGISTER = re.compile(r"U?R\d+")
_UNIFORM_RESULT = re.compile(r"(?:UP\d, )?UR(\d+)")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_LEFT_IN_REGISTERS = re.compile(r"R\d+, R\d+, gdesc")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_LAYOUTS = {0x40000040, 0x80000020, 0xC0000010}
"""The high words of a descriptor of a wgmma operand, for rows of 128, 64 and 32 bytes."""


class _Instruction(NamedTuple):
    opcode: str
    text: str
    is_conditional: bool


def lost_descriptors(listing: str) -> list[str]:
    """Instructions of nvdisasm's listing that build a wgmma operand's descriptor, or multiply by
    one, on registers which do not hold what they should.

    The descriptor of the operand's second 32 bytes is its first's address, a number below 2**32,
    plus a constant of 64 bits. ptxas 12.8, which comes with Triton 3.6, loses descriptors in two
    ways. (12.9 has not been seen to.) Sometimes it adds to whatever a register holds: it shows in
    the high word, a zero plus the constant's, where the register was last given something that is
    not zero. And sometimes it builds one before a loop, where that is jumped over if the loop takes
    no turn, but multiplies by it behind the loop too.
    """
    code, labels = _parsed(listing)
    return [*_added_to_something_else(code), *_not_given_on_each_path(code, labels)]


def _parsed(listing: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Instructions, and the number of that which follows a label."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append(_Instruction(found[2], found[3], found[1] is not None))
    return code, labels


def _added_to_something_else(code: list[_Instruction]) -> list[str]:
    is_zero: dict[str, bool] = {}
    found = []
    for opcode, text, _ in code:
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


def _not_given_on_each_path(code: list[_Instruction], labels: dict[str, int]) -> list[str]:
    """Products whose descriptor is in uniform registers that some path to them gives nothing."""
    everything = 2**64 - 1
    given = [everything] * len(code)  # before an instruction, on each path to it; a bit a register
    successors = [_successors(code, labels, at) for at in range(len(code))]
    jumped_to = {to for several in successors for to in several}
    waiting = [at for at in range(len(code)) if at not in jumped_to]
    for at in waiting:
        given[at] = 0
    while waiting:
        at = waiting.pop()
        after = given[at]
        opcode, text, is_conditional = code[at]
        if (result := _UNIFORM_RESULT.match(text)) and not is_conditional:
            after |= (2 ** _width(opcode) - 1) << int(result[1])
        for to in successors[at]:
            if given[to] & after != given[to]:
                given[to] &= after
                waiting.append(to)
    found = []
    for before, (opcode, text, _) in zip(given, code, strict=True):
        if "GMMA" in opcode and (descriptor := _DESCRIPTOR.search(text)):
            first = int(descriptor[1])  # of four: two of the left operand, two of the right
            needed = 0b1100 if _LEFT_IN_REGISTERS.search(text) else 0b1111
            if needed << first & ~before:
                found.append(f"{opcode} {text.strip()}")
    return found


def _successors(code: list[_Instruction], labels: dict[str, int], at: int) -> list[int]:
    """The instructions that may come after one."""
    opcode, text, is_conditional = code[at]
    name = opcode.split(".")[0]
    targets = _targets(text, labels) if name in ("BRA", "BRX") else []
    # the text of BRA begins with the target, or with what decides
    leaves = name in ("BRX", "EXIT", "RET") or (name == "BRA" and text.startswith("`"))
    is_last = at + 1 == len(code)
    return targets if is_last or (leaves and not is_conditional) else [*targets, at + 1]


def _targets(text: str, labels: dict[str, int]) -> list[int]:
    """The instructions that a jump may go to."""
    return [labels[label] for label in _TARGET.findall(text) if label in labels]


def issued_in_loop(listing: str) -> Counter[str]:
    """Opcodes of the innermost loop of nvdisasm's listing that multiplies matrices, by how often a
    warp issues them in a step that jumps forward wherever it can: past masks of tiles that need
    none, and past the slow path of divisions."""
    code, labels = _parsed(listing)
    jumps = [
        (at, to, is_conditional)
        for at, (opcode, text, is_conditional) in enumerate(code)
        if opcode == "BRA"
        for to in _targets(text, labels)
    ]
    loops = [(to, at) for at, to, _ in jumps if to <= at]
    multiplying = [(a, b) for a, b in loops if any("GMMA" in code[i].opcode for i in range(a, b))]
    if not multiplying:
        return Counter()
    first, last = min(multiplying, key=lambda loop: loop[1] - loop[0])
    skipped = {
        i
        for at, to, is_conditional in jumps
        if is_conditional and first <= at < to <= last
        for i in range(at + 1, to)
    }
    return Counter(code[i].opcode for i in range(first, last + 1) if i not in skipped)


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
