"""Missing barriers and waits are found, and correct orders are not reported."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.shared_races import Race, SharedAccesses

BYTES = np.arange(16)
WRONG = {
    "reads without a barrier": lambda x: (x.write(0, BYTES), x.read(1, BYTES)),
    "overwrites without a barrier": lambda x: (x.read(0, BYTES), x.write(1, BYTES)),
    "two write": lambda x: (x.write(0, BYTES), x.write(1, BYTES[:1])),
    "overwrites what several read": lambda x: (
        x.read(0, BYTES),
        x.read(1, BYTES),
        x.write(1, BYTES),
    ),
    "reads before the wait": lambda x: (x.copy(0, BYTES), x.commit(0), x.read(0, BYTES)),
    "waits for too few": lambda x: (
        x.copy(0, BYTES),
        x.commit(0),
        x.wait(0, 1),
        x.read(0, BYTES),
    ),
    "waits after the barrier": lambda x: (
        x.copy(0, BYTES),
        x.commit(0),
        x.barrier(),
        x.wait(0, 0),
        x.read(1, BYTES),
    ),
    "copies over what is read": lambda x: (x.read(1, BYTES), x.copy(0, BYTES)),
    "copies over a copy": lambda x: (x.copy(0, BYTES), x.barrier(), x.copy(0, BYTES)),
}
RIGHT = {
    "barrier between": lambda x: (x.write(0, BYTES), x.barrier(), x.read(1, BYTES)),
    "own bytes": lambda x: (x.write(0, BYTES), x.read(0, BYTES), x.write(0, BYTES)),
    "both read": lambda x: (x.read(0, BYTES), x.read(1, BYTES)),
    "other bytes": lambda x: (x.write(0, BYTES), x.read(1, BYTES + 16)),
    "wait, then barrier": lambda x: (
        x.copy(0, BYTES),
        x.commit(0),
        x.copy(0, BYTES + 16),
        x.commit(0),
        x.wait(0, 1),
        x.barrier(),
        x.read(1, BYTES),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_finds(name: str) -> None:
    order: Callable[[SharedAccesses], object] = WRONG[name]
    with pytest.raises(Race, match="of shared memory"):
        order(SharedAccesses(64, 2))


@pytest.mark.parametrize("name", RIGHT)
def test_accepts(name: str) -> None:
    RIGHT[name](SharedAccesses(64, 2))
