"""Reads machine code: finds a fault of ptxas on Hopper, and counts the instructions of loops."""

import re
from collections import Counter
from typing import NamedTuple

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+ +)?([A-Z0-9_.x]+) ?([^;]*);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_TARGET = re.compile(r"\.L_x_\d+|\b0x[0-9a-f]+")
_REGISTER = re.compile(r"U?R\d+")
_UNIFORM_RESULT = re.compile(r"(?:UP\d, )?UR(\d+)")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_LEFT_IN_REGISTERS = re.compile(r"R\d+, R\d+, gdesc")
_PRODUCT = re.compile(r"[A-Z]*G?MMA\b")
_NEEDED = re.compile(r"[A-Z]*G?MMA\b|LDGSTS\b|UTMALDG\b|UBLKCP\b")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_LAYOUTS = {0x40000040, 0x80000020, 0xC0000010}
"""The high words of a wgmma operand's descriptor, for rows of 128, 64 and 32 bytes."""


class _Instruction(NamedTuple):
    opcode: str
    text: str
    is_conditional: bool


def lost_descriptors(listing: str) -> list[str]:
    """Return the instructions of nvdisasm's listing that use a wrong wgmma descriptor.

    They build the descriptor of a wgmma operand, or multiply by it, from registers that hold other
    values. The descriptor of an operand's second 32 bytes is the address of the first 32 bytes, a
    number below 2**32, plus a constant of 64 bits. ptxas 12.8, which comes with Triton 3.6, loses
    descriptors in two ways; no case with ptxas 12.9 is known.

    - It adds the constant to a register that holds another value. The high word shows this: it has
      to be 0 plus the high word of the constant, but the register was last set to another value.
    - It builds a descriptor before a loop, in code that is skipped if the loop has no iterations,
      and uses the descriptor behind the loop too.
    """
    code, labels = _parsed(listing)
    return [*_added_to_something_else(code), *_not_given_on_each_path(code, labels)]


def _parsed(listing: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Return the instructions, and for each label and address the index of its instruction."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            labels[f"{int(found[1], 16):#x}"] = len(code)
            code.append(_Instruction(found[3], found[4], found[2] is not None))
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
    """Return the wgmma instructions whose descriptor may be read before it is written.

    The descriptor is in uniform registers. Each of them must be written on every path that leads
    to the instruction.
    """
    everything = 2**64 - 1
    # Registers that are written on every path to an instruction, before it; one bit a register.
    given = [everything] * len(code)
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
            first = int(descriptor[1])  # of four registers: two for each operand, left first
            needed = 0b1100 if _LEFT_IN_REGISTERS.search(text) else 0b1111
            if needed << first & ~before:
                found.append(f"{opcode} {text.strip()}")
    return found


def _successors(code: list[_Instruction], labels: dict[str, int], at: int) -> list[int]:
    """Return the indices of the instructions that may run after the one at `at`."""
    opcode, text, is_conditional = code[at]
    name = opcode.split(".")[0]
    targets = _targets(text, labels) if name in ("BRA", "BRX") else []
    # The text of BRA begins with the target, unless the jump has a condition.
    leaves = name in ("BRX", "EXIT", "RET") or (name == "BRA" and text.startswith("`"))
    is_last = at + 1 == len(code)
    return targets if is_last or (leaves and not is_conditional) else [*targets, at + 1]


def _targets(text: str, labels: dict[str, int]) -> list[int]:
    """Return the indices of the instructions that a jump may go to."""
    return [labels[label] for label in _TARGET.findall(text) if label in labels]


def issued_in_loop(listing: str) -> Counter[str]:
    """Return how often a warp issues each opcode in one step of the shortest loop of `loops`.

    The result is empty if no loop multiplies matrices.
    """
    return min((loop.issued for loop in loops(listing)), key=Counter.total, default=Counter())


class Loop(NamedTuple):
    """A loop that multiplies matrices, and contains no other one that does."""

    issued: Counter[str]  #: how often a warp issues each opcode in a step, if every jump is taken
    skipped: Counter[str]  #: the opcodes that these jumps skip


def loops(listing: str) -> list[Loop]:
    """Return the innermost loops that multiply matrices, in the order of the code.

    listing: of nvdisasm, with labels, or of cuobjdump, with addresses.

    Every conditional forward jump in a loop is assumed to be taken, unless it skips a matrix
    product or a copy to shared memory. Jumps that are taken skip masks that the tile does not need,
    and the slow path of divisions. The others skip work that only the last step does not need.
    """
    code, labels = _parsed(listing)
    jumps = [
        (at, to, is_conditional)
        for at, (opcode, text, is_conditional) in enumerate(code)
        if opcode.split(".")[0] == "BRA"
        for to in _targets(text, labels)
    ]
    multiplies = [bool(_PRODUCT.match(each.opcode)) for each in code]
    needed = [bool(_NEEDED.match(each.opcode)) for each in code]
    backwards = sorted({(to, at) for at, to, _ in jumps if to <= at and any(multiplies[to:at])})
    found = []
    for first, last in backwards:
        inside = [x for x in backwards if x != (first, last) and first <= x[0] and x[1] <= last]
        if inside:
            continue
        skipped = {
            i
            for at, to, is_conditional in jumps
            if is_conditional and first <= at < to <= last and not any(needed[at:to])
            for i in range(at + 1, to)
        }
        step = range(first, last + 1)
        found.append(
            Loop(
                Counter(code[i].opcode for i in step if i not in skipped),
                Counter(code[i].opcode for i in step if i in skipped),
            )
        )
    return found


def _is_layout(source: str) -> bool:
    return _NUMBER.fullmatch(source) is not None and int(source, 16) % 2**32 in _LAYOUTS


def _gives_zero(opcode: str, sources: list[str]) -> bool:
    if opcode == "CS2R":
        return sources == ["SRZ"]
    moves = opcode.startswith(("IMAD.MOV", "IMAD.U32", "MOV", "UMOV", "HFMA2"))
    return moves and {"RZ", "URZ", "-RZ", "0", "0x0"}.issuperset(sources)


def _width(opcode: str) -> int:
    """Return how many registers an instruction writes."""
    if ".128" in opcode:
        return 4
    return 2 if ".64" in opcode or "WIDE" in opcode or opcode == "CS2R" else 1
