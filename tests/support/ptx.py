"""Run kernels on the CPU from the PTX that Triton generates for them.

A `Program` is the parsed PTX of a kernel. All threads of several blocks run in lock step, and each
register is a numpy array with one number a thread. So the layouts, copies, products and exchanges
between threads of a kernel can be tested without a GPU.

What a GPU does differently: asynchronous copies are complete at once, additions of products are
exact before they are rounded, exponentials and other approximations are rounded correctly, and
memory that was not written is 0xCD. A wait or a barrier that is missing would therefore change no
result; `shared_races` finds those between warps.

Instructions that no kernel in the tests uses raise an error. `ptx_hopper` has those of Hopper.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.shared_races import Race, SharedAccesses

Numbers = NDArray[Any]
"""One number of each thread."""

WARP = 32
WARP_GROUP = 4 * WARP
"""Threads that issue a product of Hopper together."""

SHARED_BYTES = 227 * 1024
NOWHERE = -1

_MOST_THREADS = 2048
"""Threads that run in lock step. More take longer than the instructions that they save."""

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}

_REGISTERS = re.compile(r"\.reg\s+\.(pred|[a-z]\d+)\s+(%\w+?)<\d+>")
_PARAMETER = re.compile(r"\.param \.[^,)]*?\s(\w+_param_\d+)")
_LABEL = re.compile(r"(\$?\w+):")
_BRANCH_TARGETS = re.compile(r"^[ \t]*(\$?\w+):\s*\.branchtargets\s+([^;]*);", re.MULTILINE)
_LOCAL = re.compile(r"\.reg\s+\.(pred|[a-z]\d+)\s+([a-z]\w*(?:\s*,\s*[a-z]\w*)*)$")
_STATEMENT = re.compile(r"(@!?%\w+\s+)?([\w.:]+)\s*(.*)$", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\w+))?\s*\]")


class Range(NamedTuple):
    """Memory that a kernel may access."""

    first: int
    last: int  #: the first byte behind it

    def bytes(self) -> Numbers:
        """Return the memory itself."""
        size = self.last - self.first
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.first))


class _Statement(NamedTuple):
    guard: str  #: the register that says which threads execute it, or ""
    is_negated: bool  #: whether those execute it whose guard is false
    opcode: tuple[str, ...]  #: the parts between dots
    operands: tuple[str, ...]
    method: str  #: of `Blocks`, which executes it; "" for branches, barriers and the end


@functools.cache
def split(text: str) -> tuple[str, ...]:
    """Split at commas that are not within braces or brackets."""
    if "{" not in text and "[" not in text:
        return tuple(part.strip() for part in text.split(",")) if text else ()
    parts, depth, last = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(text[last:at].strip())
            last = at + 1
    rest = text[last:].strip()
    return (*parts, rest) if rest else tuple(parts)


@functools.cache
def _dtype(name: str) -> Any:
    """The dtype of a type of PTX, such as s32."""
    if name == "pred":
        return np.dtype(np.bool_)
    kinds = {"b": _UNSIGNED, "u": _UNSIGNED, "s": _SIGNED, "f": _FLOAT}
    return np.dtype(kinds[name[0]][int(name[1:])])


@functools.cache
def _register_class(register: str) -> str:
    """Return the name that registers of one type share, such as %rd of %rd12."""
    return re.match(r"%[a-z]+", register)[0]


_PACKED = {"f16x2": "f16", "bf16x2": "bf16", "bf16": "bf16"}
"""A type of which a register has one or two numbers that numpy does not know -> their type."""


def _is_barrier(opcode: tuple[str, ...]) -> bool:
    return opcode[0] in ("bar", "barrier") and opcode[1] == "sync"


class Deadlock(AssertionError):
    """Every thread waits for another one of its block."""


@functools.cache
def _bits(dtype: Any) -> int:
    return np.dtype(dtype).itemsize * 8


class Program:
    """A kernel. ptx: of one kernel, which calls no function."""

    def __init__(self, ptx: str) -> None:
        head, _, body = ptx[ptx.index(".visible .entry") :].partition("{")
        self.parameters: list[str] = _PARAMETER.findall(head)
        body = re.sub(r"//.*", "", body)
        #: the labels among which an index chooses, by their name
        self.branch_targets = {
            name: [label.strip() for label in labels.split(",")]
            for name, labels in _BRANCH_TARGETS.findall(body)
        }
        body = _BRANCH_TARGETS.sub("", body)
        self.register_types = {name: _dtype(kind) for kind, name in _REGISTERS.findall(body)}
        self.types: dict[str, Any] = {}  #: of registers that were used
        self.statements: list[_Statement] = []
        self.labels: dict[str, int] = {}
        self._scopes = 0
        self._locals: dict[str, str] = {}  # of the scope, with their names in the whole program
        for line in map(str.strip, body.splitlines()):
            if line.startswith(".loc"):  # where the source of an instruction is
                continue
            if ":" in line and (label := _LABEL.match(line)):
                self.labels[self._label(label[1])] = len(self.statements)
                line = line[label.end() :]
            for text in filter(None, map(str.strip, line.split(";"))):
                self._add(text)

    def _label(self, name: str) -> str:
        """Return a label's name in the whole program. Those of inline assembly are of a scope."""
        return name if name.startswith("$") else f"{name} {self._scopes}"

    def _add(self, text: str) -> None:
        while text.startswith(("}", "{")):  # of a scope; those of a kernel are not nested
            self._scopes += text.startswith("{")
            self._locals.clear()
            text = text[1:].strip()
        if "}" in text and text.count("}") > text.count("{"):
            text = text[: text.rindex("}")].strip()
        if text.startswith(".") and (found := _LOCAL.match(text)):
            kind, names = found.groups()
            types = self.register_types
            of_kind = next((x for x, dtype in types.items() if dtype == _dtype(kind)), None)
            if of_kind is None:
                of_kind = f"%local{'abcdefgh'[len(types)]}"
                types[of_kind] = _dtype(kind)
            for name in split(names):
                self._locals[name] = f"{of_kind}{10**6 + 100 * self._scopes + len(self._locals)}"
        elif text and not text.startswith("."):
            for name, whole in self._locals.items():
                text = re.sub(rf"(?<![\w.%]){name}(?![\w.])", whole, text)
            guard, name, operands = _STATEMENT.match(text).groups()
            guard, opcode = (guard or "").strip(), tuple(name.split("."))
            if opcode[0] == "bra":
                operands = self._label(operands.strip())
            is_flow = opcode[0] in ("bra", "brx", "ret") or _is_barrier(opcode)
            self.statements.append(
                _Statement(
                    guard.lstrip("@!"),
                    guard.startswith("@!"),
                    opcode,
                    split(operands),
                    "" if is_flow else f"_{opcode[0]}",
                )
            )

    @property
    def barriers(self) -> list[int]:
        """The statements that are barriers of all threads."""
        return [i for i, x in enumerate(self.statements) if _is_barrier(x.opcode)]

    def without(self, statement: int) -> Program:
        """Return the program without a statement."""
        result = copy.copy(self)
        result.statements = self.statements[:statement] + self.statements[statement + 1 :]
        result.labels = {name: at - (at > statement) for name, at in self.labels.items()}
        return result

    def run(
        self,
        arguments: Sequence[int | float],
        grid: int,
        threads: int,
        memory: Sequence[Range],
        make_blocks: Callable[..., Blocks] | None = None,
    ) -> set[int]:
        """Run all blocks of a grid with one axis, and return the `barriers` that threads met.

        arguments: addresses and numbers; 0 for those that are missing at the end.
        memory: what the kernel may access.
        make_blocks: a subclass of `Blocks` with more instructions.

        Raises:
            IndexError: if a thread accesses other memory.
            Race: if the order of two accesses to shared memory is not fixed.
            Deadlock: if the threads of a block wait for each other.
        """
        missing = len(self.parameters) - len(arguments)
        values = dict(zip(self.parameters, [*arguments, *[0] * missing], strict=True))
        met: set[int] = set()
        together = max(1, _MOST_THREADS // threads) if threads % WARP_GROUP == 0 else 1
        for first in range(0, grid, together):
            indices = range(first, min(first + together, grid))
            blocks = (make_blocks or Blocks)(self, values, indices, grid, threads, memory)
            blocks.run()
            met |= blocks.met
        return met

    def races_without_barriers(
        self,
        arguments: Sequence[int | float],
        grid: int,
        threads: int,
        memory: Sequence[Range],
    ) -> list[str]:
        """Return the race without each of the `barriers`, or "" for one that is redundant.

        The last barrier is removed first, and each that is redundant stays removed. So of two
        barriers of which one is enough, the second is redundant, and the first is not.

        Args: see `run`.

        Raises:
            ValueError: if threads do not meet a barrier. Its removal would change nothing.
        """
        launch = arguments, grid, threads, memory
        missed = set(self.barriers) - self.run(*launch)
        if missed:
            raise ValueError(f"threads do not meet {len(missed)} of {len(self.barriers)} barriers")
        program, races = self, []
        for barrier in reversed(self.barriers):
            fewer = program.without(barrier)
            try:
                fewer.run(*launch)
            except Race as race:
                races.append(str(race))
            else:
                races.append("")
                program = fewer
        return races[::-1]


class Blocks:
    """The threads of some blocks, and what they hold. Those of a block follow each other."""

    BLOCKING: frozenset[str] = frozenset()
    """Instructions that may block threads."""

    def __init__(
        self,
        program: Program,
        arguments: dict[str, int | float],
        indices: Sequence[int],
        grid: int,
        threads: int,
        memory: Sequence[Range],
    ) -> None:
        """indices: of the blocks. threads: of each block."""
        self.program, self.arguments, self.count = program, arguments, len(indices)
        self.memory = [(each, each.bytes()) for each in dict.fromkeys(memory)]
        self.shared = np.full(self.count * SHARED_BYTES, 0xCD, np.uint8)
        #: where the shared memory of each thread's block begins
        self.base = np.repeat(np.arange(self.count) * SHARED_BYTES, threads)
        index = np.tile(np.arange(threads, dtype=np.uint32), self.count)
        block = np.repeat(np.array(indices, np.uint32), threads)
        self.threads = threads = self.count * threads
        self.accesses = SharedAccesses(SHARED_BYTES, threads // WARP, self.count)
        self._constants: dict[tuple[str, Any], Numbers] = {}  #: operands that are numbers
        self.at = np.zeros(threads, np.int64)  #: the statement of each thread
        self.running = np.ones(threads, bool)
        self.waits_at = np.full(threads, NOWHERE)  #: a barrier of the block
        self.is_blocked = np.zeros(threads, bool)  #: at its statement, until it can be executed
        self.met: set[int] = set()  #: barriers that threads came to
        zero = np.zeros(threads, np.uint32)
        self.registers: dict[str, Numbers] = {"%tid.x": index}  #: its arrays never change
        self.registers |= {"%ctaid.x": block, "%nctaid.x": zero + grid}
        self.registers |= {f"%ctaid.{axis}": zero for axis in "yz"}
        self.registers |= {f"%nctaid.{axis}": zero + 1 for axis in "yz"}

    # The order of execution

    def run(self) -> None:
        with np.errstate(all="ignore"):
            while self.running.any():
                if self.is_blocked.any():
                    self.is_blocked &= ~self._completed()
                ready = self.running & (self.waits_at == NOWHERE) & ~self.is_blocked
                if not ready.any():
                    self._go_on()
                    continue
                # Those that are behind run until they meet others.
                together = ready & (self.at == self.at[ready].min())
                others = self.at[ready & ~together]
                self._run_together(together, int(others.min()) if others.size else NOWHERE)

    def _go_on(self) -> None:
        """Let all threads run that wait for a barrier, or raise if some wait for something else."""
        most = self._of_blocks(np.where(self.running, self.waits_at, NOWHERE)).max(1)
        places = np.repeat(most, self.threads // self.count)
        if self.is_blocked.any() or (places != self.waits_at)[self.running].any():
            statements = sorted(set(self.at[self.running].tolist()))
            raise Deadlock("all threads wait: " + "; ".join(map(self._text_of, statements)))
        self._release(self.running)

    def _completed(self) -> Numbers:
        """Return which blocked threads may go on."""
        return np.zeros(self.threads, bool)

    def _of_blocks(self, numbers: Numbers) -> Numbers:
        """Return numbers of threads, [blocks, threads of a block]."""
        return numbers.reshape(self.count, -1)

    def _release(self, threads: Numbers) -> None:
        """These threads have met."""
        self.waits_at[threads] = NOWHERE
        is_missing = self._of_blocks(self.running & ~threads).any(1)
        self.accesses.barrier(self._of_blocks(threads).any(1) & ~is_missing)

    def _in_blocks(self, threads: Numbers, chosen: Numbers) -> Numbers:
        """Return those of the threads that are in the chosen blocks."""
        return (self._of_blocks(threads) & chosen[:, None]).reshape(-1)

    def _text_of(self, statement: int) -> str:
        found = self.program.statements[statement]
        return f"{'.'.join(found.opcode)} {', '.join(found.operands)}"

    def _run_together(self, together: Numbers, meeting: int) -> None:
        """Run threads that are at one statement until they part, wait, end or meet others."""
        now = int(self.at[together][0])
        all_together = None if together.all() else together
        statements = self.program.statements
        while True:
            guard, is_negated, opcode, operands, method = statements[now]
            # every: the chosen threads, or None if they are all threads of the block
            chosen, every, are_some = together, all_together, True
            if guard:
                flag = self.read(guard, np.bool_)
                chosen = together & (~flag if is_negated else flag)
                every, are_some = None if chosen.all() else chosen, chosen.any()
            now += 1
            if method:
                if are_some:
                    try:
                        getattr(self, method)(opcode, operands, every)
                    except (AttributeError, KeyError, NotImplementedError) as error:
                        raise NotImplementedError(f"{self._text_of(now - 1)}: {error}") from error
                    if opcode[0] in self.BLOCKING and self.is_blocked[chosen].any():
                        self.at[together] = now
                        self.at[self.is_blocked & chosen] = now - 1
                        return
            elif opcode[0] == "bra":
                self.at[together] = now
                now = self.program.labels[operands[0]] if are_some else now
                self.at[chosen] = now
                if meeting >= 0 or (are_some and not (chosen == together).all()):
                    return
            elif opcode[0] == "brx":
                index = self.read(operands[0], np.uint32)
                targets = self.program.branch_targets[operands[1]]
                labels = np.array([self.program.labels[name] for name in targets])
                self.at[together] = labels[index[together]]
                return
            elif opcode[0] == "ret":
                self.running[chosen] = False
                self.at[together] = now
                if are_some:
                    return
            else:  # a barrier
                self.met.add(now - 1)
                self.at[together] = now
                self.waits_at[together] = int(operands[0], 0)
                if len(operands) > 1:
                    met = self.running & (self.waits_at == int(operands[0], 0))
                    is_full = self._of_blocks(met).sum(1) == int(operands[1], 0)
                    if is_full.any():
                        self._release(self._in_blocks(met, is_full))
                else:
                    is_full = ~self._of_blocks(self.running & ~together).any(1)
                    if is_full.any():
                        self._release(self._in_blocks(together, is_full))
                if (self.waits_at[together] != NOWHERE).any() or meeting >= 0:
                    return
            if now == meeting:
                self.at[together] = now
                return

    # Registers

    def _type_of(self, register: str) -> Any:
        types = self.program.types
        if register not in types:
            types[register] = self.program.register_types[_register_class(register)]
        return types[register]

    def read(self, operand: str, dtype: Any) -> Numbers:
        """Return an operand as numbers of a dtype."""
        found = self.registers.get(operand)
        if found is None:
            if not operand.startswith("%"):
                return self._read_constant(operand, np.dtype(dtype))
            found = np.zeros(self.threads, self._type_of(operand))
        before = found.dtype
        if before is dtype or before.type is dtype:
            return found
        same_size = before.itemsize == np.dtype(dtype).itemsize
        return found.view(dtype) if same_size else found.astype(dtype)

    def _read_constant(self, operand: str, dtype: Any) -> Numbers:
        key = operand, dtype
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = np.full(self.threads, self._constant(operand, dtype))
            found.setflags(write=False)
        return found

    def _constant(self, operand: str, dtype: Any) -> Any:
        """Return the number that an operand stands for in all threads."""
        if operand == "global_smem":
            return dtype.type(0)
        if operand in self.arguments:
            return dtype.type(self.arguments[operand])
        if operand.startswith("0f"):
            return np.uint32(int(operand[2:], 16)).view(dtype)
        if operand.startswith("0d"):
            return np.uint64(int(operand[2:], 16)).view(dtype)
        if dtype == np.bool_:
            return np.bool_(int(operand, 0))
        bits = _bits(dtype)
        return _UNSIGNED[bits](int(operand.rstrip("U"), 0) & (2**bits - 1)).view(dtype)

    def write(self, register: str, numbers: Any, chosen: Numbers | None) -> None:
        """Set a register of the chosen threads, or of all if chosen is None."""
        if register == "_":
            return
        dtype = self._type_of(register)
        numbers = np.ascontiguousarray(numbers)
        if numbers.dtype is not dtype:
            same_size = numbers.dtype.itemsize == dtype.itemsize
            numbers = numbers.view(dtype) if same_size else numbers.astype(dtype)
        if chosen is not None:
            numbers = np.where(chosen, numbers, self.read(register, dtype))
        self.registers[register] = numbers

    def _compute(
        self,
        opcode: tuple[str, ...],
        operands: tuple[str, ...],
        chosen: Numbers | None,
        function: Callable[..., Any],
    ) -> None:
        name = opcode[-1]
        if name in _PACKED:
            numbers = function(*(self._read_16_bit(x, name) for x in operands[1:]))
            bits = _to_16_bit(numbers.astype(np.float32), _PACKED[name])
            self.write(operands[0], bits if bits.ndim == 1 else _words(bits), chosen)
            return
        dtype = _dtype(name)
        numbers = function(*[self.read(x, dtype) for x in operands[1:]])
        self.write(operands[0], np.asarray(numbers).astype(dtype, copy=False), chosen)

    def _read_16_bit(self, operand: str, name: str) -> Numbers:
        """Return float32 of a register with one or two numbers, [threads] or [threads, 2]."""
        if name.endswith("x2"):
            bits = np.ascontiguousarray(self.read(operand, np.uint32)).view(np.uint16)
            bits = bits.reshape(-1, 2)
        else:
            bits = self.read(operand, np.uint16)
        if _PACKED[name] == "bf16":
            return from_bfloat16(bits)
        return bits.view(np.float16).astype(np.float32)

    # Arithmetic

    def _mov(self, opcode, operands, chosen) -> None:
        target, source = operands
        dtype = _dtype(opcode[1])
        if target.startswith("{"):
            parts = split(target[1:-1])
            bits = _bits(dtype) // len(parts)
            whole = self.read(source, _UNSIGNED[_bits(dtype)])
            for i, part in enumerate(parts):
                self.write(
                    part, (whole >> whole.dtype.type(i * bits)).astype(_UNSIGNED[bits]), chosen
                )
        elif source.startswith("{"):
            parts = split(source[1:-1])
            bits, wide = _bits(dtype) // len(parts), _UNSIGNED[_bits(dtype)]
            numbers = np.zeros(self.threads, wide)
            for i, part in enumerate(parts):
                numbers |= self.read(part, _UNSIGNED[bits]).astype(wide) << wide(i * bits)
            self.write(target, numbers, chosen)
        else:
            self.write(target, self.read(source, dtype), chosen)

    def _add(self, *instruction) -> None:
        self._compute(*instruction, lambda a, b: a + b)

    def _sub(self, *instruction) -> None:
        self._compute(*instruction, lambda a, b: a - b)

    def _mul(self, opcode, operands, chosen) -> None:
        self._mad(opcode, (*operands, "0"), chosen)

    def _mad(self, opcode, operands, chosen) -> None:
        if "f" in opcode[-1]:
            self._compute(opcode, operands[:3], chosen, lambda a, b: a * b)
            return
        dtype = _dtype(opcode[-1])
        if opcode[1] not in ("lo", "hi", "wide"):
            raise NotImplementedError(opcode[1])
        wide = _SIGNED if opcode[-1][0] == "s" else _UNSIGNED
        if opcode[1] == "hi":
            # The product of numbers of 64 bit is exact in integers of Python.
            exact = object if _bits(dtype) == 64 else wide[64]
            a, b = (self.read(x, dtype).astype(exact) for x in operands[1:3])
            high = (a * b >> _bits(dtype)).astype(dtype)
            self.write(operands[0], high + self.read(operands[3], dtype), chosen)
            return
        result = wide[_bits(dtype) * (2 if opcode[1] == "wide" else 1)]
        a, b = (self.read(x, dtype).astype(result) for x in operands[1:3])
        self.write(operands[0], a * b + self.read(operands[3], result), chosen)

    def _fma(self, opcode, operands, chosen) -> None:
        """In float64, so that float32 is rounded once, but for ties of the float64 sum."""

        def fused(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
            return a.astype(np.float64) * b + c

        self._compute(opcode, operands, chosen, fused)

    def _rem(self, *instruction) -> None:
        self._compute(*instruction, lambda a, b: np.fmod(a, np.where(b == 0, 1, b)))

    def _div(self, opcode, operands, chosen) -> None:
        dtype = _dtype(opcode[-1])
        a, b = (self.read(x, dtype) for x in operands[1:])
        if np.dtype(dtype).kind == "f":
            self.write(operands[0], a / b, chosen)
        else:
            wide = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
            self.write(operands[0], np.trunc(wide[0] / wide[1]).astype(dtype), chosen)

    def _cvta(self, opcode, operands, chosen) -> None:
        self.write(operands[0], self.read(operands[1], np.uint64), chosen)

    def _neg(self, *instruction) -> None:
        self._compute(*instruction, lambda a: -a)

    def _abs(self, *instruction) -> None:
        self._compute(*instruction, np.abs)

    def _sqrt(self, *instruction) -> None:
        self._compute(*instruction, np.sqrt)

    def _rsqrt(self, *instruction) -> None:
        self._compute(*instruction, lambda a: 1 / np.sqrt(a.astype(np.float64)))

    def _ex2(self, *instruction) -> None:
        self._compute(*instruction, lambda a: np.exp2(a.astype(np.float64)))

    def _lg2(self, *instruction) -> None:
        self._compute(*instruction, lambda a: np.log2(a.astype(np.float64)))

    def _rcp(self, *instruction) -> None:
        self._compute(*instruction, lambda a: 1 / a)

    def _select(self, opcode, operands, chosen, of_all, of_numbers) -> None:
        """Compute a maximum or minimum; .relu replaces a negative result by 0."""
        propagates = "NaN" in opcode or opcode[-1][0] != "f"
        choose = of_all if propagates else of_numbers
        if "relu" in opcode:
            self._compute(opcode, operands, chosen, lambda a, b: np.maximum(choose(a, b), 0))
        else:
            self._compute(opcode, operands, chosen, choose)

    def _max(self, opcode, operands, chosen) -> None:
        self._select(opcode, operands, chosen, np.maximum, np.fmax)

    def _min(self, opcode, operands, chosen) -> None:
        self._select(opcode, operands, chosen, np.minimum, np.fmin)

    # Bits

    def _and(self, *instruction) -> None:
        self._compute(*instruction, lambda a, b: a & b)

    def _or(self, *instruction) -> None:
        self._compute(*instruction, lambda a, b: a | b)

    def _xor(self, *instruction) -> None:
        self._compute(*instruction, lambda a, b: a ^ b)

    def _not(self, *instruction) -> None:
        self._compute(*instruction, lambda a: ~a)

    def _popc(self, *instruction) -> None:
        self._compute(*instruction, np.bitwise_count)

    def _shl(self, opcode, operands, chosen) -> None:
        dtype = _dtype(opcode[-1])
        x, by = self.read(operands[1], dtype), self.read(operands[2], np.uint32)
        last = _bits(dtype) - 1
        shifted = x << np.minimum(by, last).astype(dtype)
        self.write(operands[0], np.where(by > last, 0, shifted).astype(dtype), chosen)

    def _shr(self, opcode, operands, chosen) -> None:
        dtype = _dtype(opcode[-1])
        x, by = self.read(operands[1], dtype), self.read(operands[2], np.uint32)
        last = _bits(dtype) - 1
        shifted = x >> np.minimum(by, last).astype(dtype)
        if np.dtype(dtype).kind == "u":
            shifted = np.where(by > last, 0, shifted)
        self.write(operands[0], shifted.astype(dtype), chosen)

    def _bfe(self, opcode, operands, chosen) -> None:
        x, first, count = (self.read(o, np.uint32) for o in operands[1:])
        numbers = (x >> first) << (32 - count)
        if opcode[-1] == "s32":
            numbers = numbers.view(np.int32)
        self.write(operands[0], numbers >> (32 - count).astype(numbers.dtype), chosen)

    def _bfi(self, opcode, operands, chosen) -> None:
        x, into = (self.read(o, np.uint32) for o in operands[1:3])
        first, count = (self.read(o, np.uint32).astype(np.uint64) for o in operands[3:])
        mask = ((np.uint64(1) << count) - np.uint64(1) << first).astype(np.uint32)
        self.write(operands[0], x << first.astype(np.uint32) & mask | into & ~mask, chosen)

    def _prmt(self, opcode, operands, chosen) -> None:
        low, high, choice = (self.read(o, np.uint32) for o in operands[1:])
        both = np.stack([low, high], 1).view(np.uint8)  # [threads, 8]
        selected = choice[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
        result = np.take_along_axis(both, (selected & 7).astype(np.intp), 1)
        is_sign = (selected & 8).astype(bool)
        if is_sign.any():
            result = np.where(is_sign, np.where(result & 128, 255, 0), result).astype(np.uint8)
        self.write(operands[0], np.ascontiguousarray(result).view(np.uint32)[:, 0], chosen)

    # Comparisons and conversions

    def _selp(self, opcode, operands, chosen) -> None:
        dtype = _dtype(opcode[-1])
        yes, no = (self.read(x, dtype) for x in operands[1:3])
        self.write(operands[0], np.where(self.read(operands[3], np.bool_), yes, no), chosen)

    def _setp(self, opcode, operands, chosen) -> None:
        if len(opcode) == 4 and opcode[2] == "or":
            before = self.read(operands[3], np.bool_)
            self._setp(opcode[:2] + opcode[3:], operands[:3], chosen)
            self.write(operands[0], before | self.read(operands[0], np.bool_), chosen)
            return
        if len(opcode) != 3:
            raise NotImplementedError
        dtype = _dtype(opcode[-1])
        a, b = (self.read(x, dtype) for x in operands[1:3])
        name = opcode[1]
        if dtype.kind != "f":
            self.write(operands[0], _COMPARISONS[name](a, b), chosen)
            return
        unordered = np.isnan(a) | np.isnan(b)
        if name in ("nan", "num"):
            result = unordered if name == "nan" else ~unordered
        elif len(name) == 3 and name.endswith("u"):
            result = _COMPARISONS[name[:2]](a, b) | unordered
        else:
            result = _COMPARISONS[name](a, b) & ~unordered
        self.write(operands[0], result, chosen)

    def _cvt(self, opcode, operands, chosen) -> None:
        target, source = opcode[-2:]
        if target in FP8:
            high, low = (self.read(x, np.float32) for x in operands[1:])
            codes = [_to_fp8(x, target).astype(np.uint16) for x in (low, high)]
            self.write(operands[0], codes[0] | codes[1] << np.uint16(8), chosen)
            return
        if source in FP8:
            pair = self.read(operands[1], np.uint16).view(np.uint8).reshape(-1, 2)
            self.write(operands[0], _words(from_fp8(pair, source).astype(np.float16)), chosen)
            return
        if target in ("bf16x2", "f16x2"):
            high, low = (_to_16_bit(self.read(x, np.float32), target[:-2]) for x in operands[1:])
            self.write(operands[0], _words(np.stack([low, high], 1)), chosen)
            return
        if source == "bf16":
            numbers = from_bfloat16(self.read(operands[1], np.uint16))
        else:
            numbers = self.read(operands[1], _dtype(source))
        to_whole = next((_TO_WHOLE[x] for x in opcode if x in _TO_WHOLE), None)
        if to_whole is not None:
            numbers = to_whole(numbers)
        if target in ("bf16", "f16"):
            self.write(operands[0], _to_16_bit(numbers.astype(np.float32), target), chosen)
            return
        dtype = np.dtype(_dtype(target))
        if dtype.kind in "iu" and numbers.dtype.kind == "f":
            if to_whole is None:
                raise NotImplementedError
            limits = np.iinfo(dtype)
            whole = np.clip(numbers.astype(np.float64), limits.min, limits.max)
            numbers = np.where(np.isnan(whole), 0, whole)
        numbers = numbers.astype(dtype)
        wide = _bits(self._type_of(operands[0]))
        if dtype.kind in "iu" and wide > _bits(dtype):
            numbers = numbers.astype((_SIGNED if dtype.kind == "i" else _UNSIGNED)[wide])
        self.write(operands[0], numbers, chosen)

    # Memory

    def _address(self, operand: str) -> Numbers:
        name, offset = _ADDRESS.match(operand).groups()
        is_wide = name in self.arguments or (
            name.startswith("%") and self._type_of(name) == np.uint64
        )
        address = self.read(name, np.uint64 if is_wide else np.uint32).astype(np.int64)
        return address + int(offset or "0", 0)

    def _memory_at(
        self, addresses: Numbers, count: int
    ) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
        """Find `count` bytes at each address: yield the indices of addresses that are in one range,
        the bytes of the range, and where theirs are, [addresses, count]."""
        _check_aligned(addresses, count)
        if not addresses.size:
            return
        low, high = addresses.min(), addresses.max() + count
        for each, content in self.memory:
            if each.first <= low and high <= each.last:  # as almost always
                places = (addresses - each.first)[:, None] + np.arange(count)
                yield np.arange(len(addresses)), content, places
                return
        left = np.ones(len(addresses), bool)
        for each, content in self.memory:
            found = left & (each.first <= addresses) & (addresses + count <= each.last)
            if found.any():
                left &= ~found
                first = addresses[found] - each.first
                yield np.flatnonzero(found), content, first[:, None] + np.arange(count)
        if left.any():
            address = int(addresses[left][0])
            ranges = [each for each, _ in self.memory]
            raise IndexError(f"{count} bytes at {address:#x} are in none of {ranges}")

    def _load(self, addresses: Numbers, count: int) -> Numbers:
        """Return `count` bytes at each address, [addresses, count]."""
        loaded = np.zeros((len(addresses), count), np.uint8)
        for found, content, places in self._memory_at(addresses, count):
            loaded[found] = content[places]
        return loaded

    def _each(self, chosen: Numbers | None) -> Numbers:
        return np.arange(self.threads) if chosen is None else np.flatnonzero(chosen)

    def _places(self, address: Numbers, count: int, threads: Numbers) -> Numbers:
        """Return where the bytes at each thread's address are in `shared`, [threads, count]."""
        if address.size and (address.min() < 0 or address.max() + count > SHARED_BYTES):
            raise IndexError("an address is not in shared memory")
        _check_aligned(address, count)
        return (self.base[threads] + address)[:, None] + np.arange(count)

    def _read_shared(self, threads: Numbers, places: Numbers) -> None:
        """Tell of a read. places: see `_places`."""
        self.accesses.read(np.repeat(threads // WARP, places.shape[1]), places.reshape(-1))

    def _access(
        self, access: Callable[[int, Numbers], None], threads: Numbers, places: Numbers
    ) -> None:
        """Tell of an access, warp by warp. places: see `_places`."""
        for warp, part in _by_warp(threads):
            access(warp, places[part].reshape(-1))

    def _ld(self, opcode, operands, chosen) -> None:
        dtype = _dtype(opcode[-1])
        if opcode[1] == "param":
            value = self.arguments[operands[1].strip("[]")]
            if isinstance(value, float):
                number = np.float32(value).view(_UNSIGNED[32])
            else:
                bits = _bits(dtype)
                number = _UNSIGNED[bits](value & (2**bits - 1))
            self.write(operands[0], np.full(self.threads, number), chosen)
            return
        targets = split(operands[0].strip("{}"))
        size = np.dtype(dtype).itemsize
        address, threads = self._address(operands[1]), self._each(chosen)
        loaded = np.zeros((self.threads, size * len(targets)), np.uint8)
        if opcode[1] == "shared":
            places = self._places(address[threads], loaded.shape[1], threads)
            self._read_shared(threads, places)
            loaded[threads] = self.shared[places]
        else:
            loaded[threads] = self._load(address[threads], loaded.shape[1])
        for i, target in enumerate(targets):
            column = np.ascontiguousarray(loaded[:, i * size : (i + 1) * size])
            self.write(target, column.view(dtype)[:, 0], chosen)

    def _st(self, opcode, operands, chosen) -> None:
        dtype = _UNSIGNED[_bits(_dtype(opcode[-1]))]
        sources = split(operands[1].strip("{}"))
        columns = [self.read(x, dtype).reshape(-1, 1).view(np.uint8) for x in sources]
        stored = np.concatenate(columns, 1)
        address, threads = self._address(operands[0]), self._each(chosen)
        if opcode[1] == "shared":
            places = self._places(address[threads], stored.shape[1], threads)
            self._store(threads, places, stored[threads])
        else:
            for found, content, places in self._memory_at(address[threads], stored.shape[1]):
                content[places] = stored[threads[found]]

    def _store(self, threads: Numbers, places: Numbers, stored: Numbers) -> None:
        """Store to shared memory, warp by warp. places: see `_places`."""
        for warp, part in _by_warp(threads):
            where, what = places[part], stored[part]
            is_new = self.shared[where] != what
            self.accesses.write(warp, where[is_new], where[~is_new])
            self.shared[where] = what

    def _red(self, opcode, operands, chosen) -> None:
        if opcode[-2] != "add" or opcode[-1] not in ("s32", "u64"):
            raise NotImplementedError
        dtype = np.dtype(_dtype(opcode[-1]))
        address, added = self._address(operands[0]), self.read(operands[1], dtype)
        threads, size = self._each(chosen), dtype.itemsize
        for found, content, places in self._memory_at(address[threads], size):
            aligned = content[: content.size // size * size].view(dtype)
            np.add.at(aligned, places[:, 0] // size, added[threads[found]])

    def _atom(self, opcode, operands, chosen) -> None:
        """One thread after another; the operation and the type are the last words."""
        dtype = _dtype(opcode[-1])
        size = np.dtype(dtype).itemsize
        change = {"add": np.add, "max": np.maximum, "min": np.minimum}[opcode[-2]]
        address, numbers = self._address(operands[1]), self.read(operands[2], dtype)
        before = np.zeros(self.threads, dtype)
        for thread in self._each(chosen):
            for _, content, places in self._memory_at(address[thread : thread + 1], size):
                place = content[places[0, 0] : places[0, 0] + size].view(dtype)
                before[thread] = place[0]
                place[0] = change(place[0], numbers[thread])
        self.write(operands[0], before, chosen)

    def _cp(self, opcode, operands, chosen) -> None:
        threads = self._each(chosen)
        warps = map(int, np.unique(threads // WARP))
        if opcode[2] == "commit_group":
            for warp in warps:
                self.accesses.commit(warp)
            return
        if opcode[2] == "wait_group":
            for warp in warps:
                self.accesses.wait(warp, int(operands[0], 0))
            return
        if opcode[2] not in ("cg", "ca"):
            raise NotImplementedError
        target, source = map(self._address, operands[:2])
        count = int(operands[2], 0)
        used = self.read(operands[3] if len(operands) > 3 else str(count), np.uint32)
        places = self._places(target[threads], count, threads)
        self._access(self.accesses.copy, threads, places)
        copied = np.zeros((len(threads), count), np.uint8)
        for size in np.unique(used[threads]):
            some = used[threads] == size
            if size:
                copied[some, :size] = self._load(source[threads][some], int(size))
        self.shared[places] = copied

    # Between the threads of a warp

    def _bar(self, opcode, operands, chosen) -> None:
        """A barrier of a warp, whose threads run in lock step unless they part."""

    def _elect(self, opcode, operands, chosen) -> None:
        """One thread of each warp gets true, the first."""
        elected = np.zeros(self.threads, bool)
        threads = self._each(chosen)
        elected[threads[np.unique(threads // WARP, return_index=True)[1]]] = True
        self.write(operands[0].partition("|")[2], elected, chosen)

    def _shfl(self, opcode, operands, chosen) -> None:
        lane = np.arange(self.threads) % WARP
        number = self.read(operands[2], np.uint32).astype(np.int64)
        sources = {
            "bfly": lane ^ number,
            "up": np.where(lane < number, lane, lane - number),
            "idx": number,
        }
        source = np.arange(self.threads) - lane + sources[opcode[2]]
        self.write(operands[0], self.read(operands[1], np.uint32)[source], chosen)

    def _vote(self, opcode, operands, chosen) -> None:
        if opcode[2:] != ("any", "pred") or operands[2] != "-1":
            raise NotImplementedError
        flags = self.read(operands[1], np.bool_).reshape(-1, WARP)
        self.write(operands[0], np.repeat(flags.any(1), WARP), chosen)

    def _redux(self, opcode, operands, chosen) -> None:
        dtype = _dtype(opcode[-1])
        reduce = {"max": np.max, "min": np.min, "add": partial(np.sum, dtype=dtype)}[opcode[2]]
        numbers = self.read(operands[1], dtype).reshape(-1, WARP)
        self.write(operands[0], np.repeat(reduce(numbers, axis=1), WARP), chosen)

    def _ldmatrix(self, opcode, operands, chosen) -> None:
        address = self._address(operands[1]).reshape(-1, WARP)
        warps = np.unique(self._each(chosen) // WARP)
        threads = np.repeat(warps, 8) * WARP
        row, pair = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2
        for i, target in enumerate(split(operands[0].strip("{}"))):
            places = self._places(address[warps, 8 * i : 8 * i + 8].reshape(-1), 16, threads)
            self._read_shared(threads, places)
            matrix = self.shared[places].view(np.uint16).reshape(-1, 8, 8)
            if "trans" in opcode:
                matrix = matrix.transpose(0, 2, 1)
            pairs = np.zeros((len(address), WARP, 2), np.uint16)
            pairs[warps] = np.stack([matrix[:, row, pair], matrix[:, row, pair + 1]], -1)
            self.write(target, pairs.view(np.uint32).reshape(-1), chosen)

    def _stmatrix(self, opcode, operands, chosen) -> None:
        address = self._address(operands[0]).reshape(-1, WARP)
        warps = np.unique(self._each(chosen) // WARP)
        threads = np.repeat(warps, 8) * WARP
        row, pair = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2
        for i, source in enumerate(split(operands[1].strip("{}"))):
            pairs = self.read(source, np.uint32).reshape(-1, WARP, 1).view(np.uint16)
            matrix = np.zeros((len(address), 8, 8), np.uint16)
            matrix[:, row, pair], matrix[:, row, pair + 1] = pairs[..., 0], pairs[..., 1]
            if "trans" in opcode:
                matrix = matrix.transpose(0, 2, 1)
            stored = np.ascontiguousarray(matrix[warps]).view(np.uint8).reshape(-1, 16)
            places = self._places(address[warps, 8 * i : 8 * i + 8].reshape(-1), 16, threads)
            self._access(self.accesses.write, threads, places)
            self.shared[places] = stored

    def _mma(self, opcode, operands, chosen) -> None:
        """Multiply-add m16n8k32 of codes, or m16n8k16 of 16-bit numbers."""
        results, left, right, start = (split(x.strip("{}")) for x in operands)
        of_codes = opcode[3] == "m16n8k32"
        if not of_codes and opcode[3] != "m16n8k16":
            raise NotImplementedError
        depth, warps = 32 if of_codes else 16, self.threads // WARP
        of_left, of_right, of_sums = _places_of_mma(depth)

        def numbers(registers: Sequence[str]) -> Numbers:
            """Return numbers of registers, [warps, registers, WARP, numbers of a register]."""
            words = np.stack([self.read(x, np.uint32) for x in registers])
            if of_codes:
                found = words.view(np.int8).astype(np.float64)
            elif "bf16" in opcode:
                found = from_bfloat16(words.view(np.uint16)).astype(np.float64)
            else:
                found = words.view(np.float16).astype(np.float64)
            return found.reshape(len(registers), warps, WARP, -1).swapaxes(0, 1)

        a, b = np.empty((warps, 16, depth)), np.empty((warps, depth, 8))
        a[:, *of_left], b[:, *of_right] = numbers(left), numbers(right)
        products, dtype = (a @ b)[:, *of_sums], np.int32 if of_codes else np.float32
        for i, (register, first) in enumerate(zip(results, start, strict=True)):
            total = products[:, i].reshape(-1) + self.read(first, dtype)
            self.write(register, total.astype(dtype), chosen)


@functools.cache
def _places_of_mma(depth: int) -> tuple[tuple[Numbers, Numbers], ...]:
    """Return rows and columns of what the registers of a warp hold of a product m16n8.

    Those of the left operand and of the right one, which are broadcast to [registers, WARP, numbers
    of a register], and of the sums, [registers, WARP].
    """
    each = depth // 8
    register, lane, number = np.ogrid[:4, :WARP, :each]
    row, column = lane // 4, each * (lane % 4) + number
    left = row + register % 2 * 8, register // 2 * (depth // 2) + column
    right = register[:2] * (depth // 2) + column, row
    sums = (row + register // 2 * 8)[..., 0], (lane % 4 * 2 + register % 2)[..., 0]
    return left, right, sums


FP8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}
"""A conversion's type of two numbers -> their dtype."""


def _to_fp8(x: Numbers, name: str) -> Numbers:
    """Round float32 to the bits of FP8, ties to even; beyond the largest number is that number."""
    dtype = FP8[name]
    most = torch.finfo(dtype).max
    return torch.from_numpy(x).clamp(-most, most).to(dtype).view(torch.uint8).numpy()


def from_fp8(bits: Numbers, name: str) -> Numbers:
    """Return the float32 numbers of bytes."""
    return torch.from_numpy(bits).view(FP8[name]).float().numpy()


def _check_aligned(addresses: Numbers, count: int) -> None:
    """Raise IndexError unless all are multiples of the bytes of an access, as a GPU requires."""
    if (addresses % count).any():
        address = int(addresses[addresses % count != 0][0])
        raise IndexError(f"{address:#x} is no multiple of the {count} bytes of an access")


def _by_warp(threads: Numbers) -> Iterator[tuple[int, slice]]:
    """Yield each warp of these threads, and where its threads are. threads: in ascending order."""
    warps = threads // WARP
    ends = [0, *(np.flatnonzero(np.diff(warps)) + 1), len(warps)]
    for first, last in itertools.pairwise(ends):
        if first < last:
            yield int(warps[first]), slice(first, last)


_TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
"""How a conversion rounds to a whole number."""

_COMPARISONS: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _words(halves: Numbers) -> Numbers:
    """Return a register for each pair of 16 bits, [threads]. halves: [threads, 2]."""
    return np.ascontiguousarray(halves).view(np.uint32)[:, 0]


def from_bfloat16(bits: Numbers) -> Numbers:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_16_bit(x: Numbers, name: str) -> Numbers:
    """Round float32 to the bits of float16 or bfloat16, ties to even."""
    if name == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))
    return np.where(np.isnan(x), 0x7FFF, rounded >> np.uint64(16)).astype(np.uint16)
