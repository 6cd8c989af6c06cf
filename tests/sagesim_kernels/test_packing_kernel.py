"""What the GPU checks of packed sequences."""

import pytest
import torch

from sagesim_kernels.packing_kernel import is_packing
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

LIMIT = 2**31 - 1


@pytest.mark.parametrize(
    ("cu", "most", "fits"),
    [
        ([0], 0, True),
        ([0, 7], 7, True),
        ([0, 3, 3, 7], 4, True),
        ([0, 3, 3, 7], 3, False),
        ([0, 5, 3, 7], 7, False),
        ([1, 7], 7, False),
        ([-1, 7], 8, False),
        ([0, 7, 6], 7, False),
        ([0, LIMIT, -2, 7], LIMIT, False),  # in 32 bits no step is negative
    ],
)
def test_few_sequences(cu: list[int], most: int, fits: bool) -> None:
    beginnings = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    assert bool(is_packing(beginnings, 0 if len(cu) == 1 else 7, most)) is fits


@pytest.mark.parametrize("at", [1, 1023, 1024, 1025, 2048, 2999])
def test_one_of_many_sequences_is_too_long_or_ends_before_it_begins(at: int) -> None:
    cu = torch.arange(0, 6002, 2, dtype=torch.int32, device=DEVICE)  # 3000 sequences of 2 tokens
    assert is_packing(cu, 6000, 2)
    assert not is_packing(cu, 6000, 1)
    assert not is_packing(cu, 6001, 2)
    for moved, most in ((-1, 2), (1, 2), (-3, 5), (3, 5)):
        wrong = cu.clone()
        wrong[at] += moved
        assert not is_packing(wrong, 6000, most)
        assert bool(is_packing(wrong, 6000, most + 1)) is (abs(moved) == 1)
