"""Wrong uses of barriers and shared memory are found, and right ones are not reported."""

from collections.abc import Callable

import pytest

from tests.support.simulated_barriers import Barrier, Cell, Program, ProgramError

BYTES = 128


class Ring:
    """A producer that copies blocks to two stages, and a consumer that multiplies them."""

    def __init__(self, seed: int) -> None:
        self.program = Program(seed)
        self.full = [self.program.barrier(1) for _ in range(2)]
        self.empty = [self.program.barrier(1) for _ in range(2)]
        self.stages = [Cell(f"stage {i}") for i in range(2)]
        self.result = Cell("result")

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.program.wait(barrier, parity)

    def produce(self, *, waits: bool = True, blocks: int = 5, size: int = BYTES) -> None:
        for n in range(blocks):
            stage = n % 2
            if waits:
                self.wait(self.empty[stage], n // 2 % 2 ^ 1)
            self.program.arrive(self.full[stage], expected_bytes=size)
            self.program.copy(self.full[stage], BYTES, [self.stages[stage]], n)

    def consume(
        self, *, waits: bool = True, finishes: bool = True, releases: int = 1, blocks: int = 5
    ) -> None:
        for n in range(blocks):
            stage = n % 2
            if waits:
                self.wait(self.full[stage], n // 2 % 2)
            assert not waits or self.stages[stage].content == n
            self.program.start_product([self.stages[stage]])
            if finishes:
                self.program.finish_products(0)
            for _ in range(releases):
                self.program.arrive(self.empty[stage])
        self.program.finish_products(0)

    def store(self, *, fences: bool = True, finishes: bool = True) -> None:
        self.program.write([self.result])
        if fences:
            self.program.fence()
        self.program.start_store([self.result])
        if finishes:
            self.program.finish_stores()


Functions = Callable[[Ring], list[Callable[[], None]]]
WRONG: dict[str, tuple[Functions, str]] = {
    "overwrites": (lambda x: [lambda: x.produce(waits=False), x.consume], "used|overwritten"),
    "reads too early": (lambda x: [x.produce, lambda: x.consume(waits=False)], "while it is writ"),
    "releases too early": (lambda x: [x.produce, lambda: x.consume(finishes=False)], "overwritten"),
    "never releases": (lambda x: [x.produce, lambda: x.consume(releases=0)], "forever"),
    "releases twice": (lambda x: [x.produce, lambda: x.consume(releases=2)], "forever|more|overwr"),
    "too few blocks": (lambda x: [lambda: x.produce(blocks=4), x.consume], "forever"),
    "too many blocks": (lambda x: [lambda: x.produce(blocks=6), x.consume], "no group waits"),
    "too many bytes": (lambda x: [lambda: x.produce(size=BYTES + 1), x.consume], "forever"),
    "no fence": (lambda x: [lambda: x.store(fences=False), x.produce, x.consume], "fence"),
    "unfinished store": (lambda x: [lambda: x.store(finishes=False), x.produce, x.consume], "ends"),
}


def run(functions: Functions, seed: int) -> None:
    ring = Ring(seed)
    ring.program.run_groups(functions(ring))
    ring.program.end()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WRONG)
def test_finds(name: str, seed: int) -> None:
    functions, message = WRONG[name]
    with pytest.raises(ProgramError, match=message):
        run(functions, seed)


@pytest.mark.parametrize("seed", range(20))
def test_accepts(seed: int) -> None:
    run(lambda x: [x.produce, x.consume, x.store], seed)
