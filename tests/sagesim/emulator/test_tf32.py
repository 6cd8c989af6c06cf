"""The reduced precisions of float32 products are off inside, and afterwards as they were."""

import itertools

import pytest
import torch

from sagesim.emulator.tf32 import WITHOUT_TF32

SETTINGS = [
    ("generic", "all"),
    ("cuda", "all"),
    ("mkldnn", "all"),
    ("cuda", "matmul"),
    ("mkldnn", "matmul"),
]


def read() -> list[str]:
    return [torch._C._get_fp32_precision_getter(*each) for each in SETTINGS]


def write(values) -> None:
    for each, value in zip(SETTINGS, values, strict=True):
        torch._C._set_fp32_precision_setter(*each, value)


def values_after_changes_of_the_parents() -> list[list[str]]:
    """What each setting is after changes of the others; shows which follow which."""
    found = [read()]
    for parent in ("mkldnn", "cuda", "generic"):
        for value in ("ieee", "tf32", "none"):
            torch._C._set_fp32_precision_setter(parent, "all", value)
            found.append(read())
    return found


@pytest.fixture
def restored():
    before = read()
    yield
    write(["none"] * 3 + before[3:])


@pytest.mark.usefixtures("restored")
def test_every_setting_is_what_it_was_and_follows_what_it_followed():
    for values in itertools.product(("none", "ieee", "tf32"), repeat=len(SETTINGS)):
        write(values)
        expected = values_after_changes_of_the_parents()
        write(values)
        with WITHOUT_TF32:
            assert read()[3:] == ["ieee", "ieee"]
        assert values_after_changes_of_the_parents() == expected, values


@pytest.mark.usefixtures("restored")
def test_a_setting_that_followed_the_one_of_all_backends_follows_it_again():
    write(["none"] * 5)
    torch.backends.fp32_precision = "tf32"
    with WITHOUT_TF32:
        pass
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
