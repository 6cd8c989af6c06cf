"""The warps of a program, its barriers in shared memory and its copies, as they may happen.

A *warp group* here is one function of a warp-specialized kernel. Groups take turns at random where
they meet barriers, and copies by TMA end at random times. Vector clocks tell what happened before:
a read or write of shared memory without an order to another one is an error in every run, however
the turns were.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

Clock = dict[Any, int]

_ENDLESS: Final = 2**62
"""The time of a read that has not ended."""

_YIELDS: Final = 0.2
"""How often a group passes its turn to another one though it need not."""


class ProgramError(AssertionError):
    """A program waits forever, or uses a barrier or shared memory in a wrong way."""


class _Abort(BaseException):
    """Ends the threads of a program in which another one failed."""


def _join(clock: Clock, other: Clock) -> None:
    for key, time in other.items():
        if time > clock.get(key, 0):
            clock[key] = time


@dataclass(eq=False)
class Barrier:
    """An mbarrier."""

    count: int
    pending: int = field(init=False)
    bytes: int = 0  #: that copies of this phase have not brought yet
    phase: int = 0  #: number of phases that are complete
    observed: int = 0  #: the last phase for which a group waited
    copies: int = 0
    arriving: Clock = field(default_factory=dict)
    complete: Clock = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int, clock: Clock) -> None:
        if self.pending < count:
            raise ProgramError("more arrivals at a barrier than it counts")
        self.pending -= count
        _join(self.arriving, clock)

    def advance(self) -> None:
        """Complete the phase, if nothing is missing."""
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            _join(self.complete, self.arriving)
            self.complete[self] = self.phase
            self.arriving, self.pending = {}, self.count

    def has_passed(self, parity: int) -> bool:
        """Return whether a wait for the phase of this parity ends."""
        return self.phase % 2 != parity


@dataclass(eq=False)
class Cell:
    """A piece of shared memory that is written and read as a whole."""

    name: str
    content: Any = None  #: what TMA loaded, or None
    writer: Any = None
    written: int = 0
    readers: Clock = field(default_factory=dict)
    is_fenced: bool = True  #: whether what was stored is visible to TMA and to wgmma


@dataclass(eq=False)
class Product:
    """A product by wgmma, and the cells that it reads."""

    cells: list[Cell]
    has_ended: bool = False


@dataclass(eq=False)
class _Group:
    name: str
    clock: Clock = field(default_factory=dict)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    awaits: tuple[Barrier, int] | None = None
    has_ended: bool = False
    products: list[Product] = field(default_factory=list)  #: in flight
    stores: list[Cell] = field(default_factory=list)  #: by TMA, that read shared memory
    unfenced: list[Cell] = field(default_factory=list)


class Program:
    """A program. The first group is that which starts it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._barriers: list[Barrier] = []
        self._copies: list[tuple[Barrier, int]] = []
        self._error: BaseException | None = None
        self._groups = [_Group("0", {"0": 1})]
        self._current = self._groups[0]

    @property
    def group(self) -> str:
        """The name of the group that has its turn."""
        return self._current.name

    # Barriers

    def barrier(self, count: int) -> Barrier:
        """Return a new barrier."""
        self._barriers.append(Barrier(count))
        return self._barriers[-1]

    def arrive(self, barrier: Barrier, count: int = 1, expected_bytes: int = 0) -> None:
        barrier.bytes += expected_bytes
        barrier.arrive(count, self._current.clock)
        barrier.advance()
        self._current.clock[self._current.name] += 1
        self._maybe_yield()

    def wait(self, barrier: Barrier, parity: int) -> None:
        group = self._current
        if not barrier.has_passed(parity):
            group.awaits = barrier, parity
            self._pass_turn()
            group.awaits = None
        barrier.observed = barrier.phase
        _join(group.clock, barrier.complete)
        self._maybe_yield()

    # Shared memory

    def read(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            self._after_write(cell)
            cell.readers[self._current.name] = self._current.clock[self._current.name]

    def write(self, cells: Iterable[Cell]) -> None:
        group = self._current
        for cell in cells:
            self._after_write(cell)
            self._after_reads(cell)
            cell.writer, cell.written = group.name, group.clock[group.name]
            cell.content = None
            cell.readers.clear()
            cell.is_fenced = False
            group.unfenced.append(cell)

    def fence(self) -> None:
        for cell in self._current.unfenced:
            cell.is_fenced = True
        self._current.unfenced.clear()

    def start_product(self, cells: list[Cell]) -> Product:
        """wgmma reads cells until `finish_products`."""
        self._start_reading(cells)
        self._current.products.append(Product(cells))
        return self._current.products[-1]

    def finish_products(self, most: int) -> None:
        """Wait until at most so many products are in flight."""
        group = self._current
        ended = group.products[: max(len(group.products) - most, 0)]
        group.products = group.products[len(ended) :]
        for product in ended:
            product.has_ended = True
            self._stop_reading(product.cells)

    def start_store(self, cells: list[Cell]) -> None:
        """TMA reads cells until `finish_stores`."""
        self._start_reading(cells)
        self._current.stores += cells

    def finish_stores(self) -> None:
        stores, self._current.stores = self._current.stores, []
        self._stop_reading(stores)

    def copy(self, barrier: Barrier, size: int, cells: list[Cell], content: Any) -> None:
        """TMA writes to cells; the barrier counts the bytes when it has done so."""
        for cell in cells:
            self._after_write(cell)
            self._after_reads(cell)
            cell.writer, cell.written = barrier, barrier.phase + 1
            cell.content = content
            cell.readers.clear()
        barrier.copies += 1
        self._copies.append((barrier, size))
        while self._copies and self._random.random() < 0.5:
            self._end_a_copy()

    def _end_a_copy(self) -> None:
        barrier, size = self._copies.pop(self._random.randrange(len(self._copies)))
        barrier.bytes -= size
        barrier.advance()

    def _start_reading(self, cells: list[Cell]) -> None:
        for cell in cells:
            self._after_write(cell)
            if not cell.is_fenced:
                raise ProgramError(f"{cell.name} is read by TMA or wgmma without a fence")
            cell.readers[self._current.name] = _ENDLESS

    def _stop_reading(self, cells: list[Cell]) -> None:
        group = self._current
        busy = {id(cell) for product in group.products for cell in product.cells}
        busy |= set(map(id, group.stores))
        for cell in cells:
            if id(cell) not in busy:
                cell.readers[group.name] = group.clock[group.name]

    def _after_write(self, cell: Cell) -> None:
        group = self._current
        if cell.writer not in (None, group.name) and group.clock.get(cell.writer, 0) < cell.written:
            raise ProgramError(f"{cell.name} is used while it is written")

    def _after_reads(self, cell: Cell) -> None:
        group = self._current
        for reader, time in cell.readers.items():
            is_own = reader == group.name and time != _ENDLESS
            if not is_own and group.clock.get(reader, 0) < time:
                raise ProgramError(f"{cell.name} is overwritten while it is read")

    # Turns

    def run_groups(self, functions: list[Callable[[], None]]) -> None:
        """Run functions at the same time, the first as the group that calls this."""
        first = self._groups[0]
        for i in range(1, len(functions)):
            self._groups.append(_Group(str(i), {**first.clock, str(i): 1}))
        first.clock["0"] += 1
        threads = [
            threading.Thread(target=self._run, args=each, daemon=True)
            for each in zip(self._groups, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        first.turn.release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Check that nothing is in flight when the program ends."""
        if self._copies or any(x.bytes for x in self._barriers):
            raise ProgramError("the program ends before its copies")
        if any(x.copies and x.observed < x.phase for x in self._barriers):
            raise ProgramError("no group waits for a copy")
        for group in self._groups:
            if group.stores or group.products:
                raise ProgramError(f"group {group.name} ends before its stores or products")

    def _run(self, group: _Group, function: Callable[[], None]) -> None:
        group.turn.acquire()
        try:
            if self._error is None:
                function()
        except _Abort:
            pass
        except BaseException as error:
            self._error = self._error or error
        group.has_ended = True
        try:
            self._next_turn(group)
        except ProgramError as error:
            self._error = self._error or error
        if self._error is not None:
            for other in self._groups:
                other.turn.release()

    def _can_run(self, group: _Group) -> bool:
        return not group.has_ended and (
            group.awaits is None or group.awaits[0].has_passed(group.awaits[1])
        )

    def _next_turn(self, group: _Group) -> None:
        """Give the turn to a group that can run, unless it is this one."""
        while True:
            ready = [x for x in self._groups if self._can_run(x)]
            if ready:
                break
            if all(x.has_ended for x in self._groups):
                while self._copies:
                    self._end_a_copy()
                return
            if not self._copies:
                raise ProgramError("all groups that have not ended wait forever")
            self._end_a_copy()
        chosen = self._random.choice(ready)
        if chosen is not group:
            self._current = chosen
            chosen.turn.release()
            if not group.has_ended:
                group.turn.acquire()
                if self._error is not None:
                    raise _Abort

    def _pass_turn(self) -> None:
        if len(self._groups) == 1:
            raise ProgramError("a group waits before there are others")
        self._next_turn(self._current)

    def _maybe_yield(self) -> None:
        if len(self._groups) > 1 and self._random.random() < _YIELDS:
            self._next_turn(self._current)
