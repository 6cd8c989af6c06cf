"""The checks of signatures find wrong types and wrong shapes."""

from dataclasses import dataclass

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from sagesim import SAGEBWD, Precision, exact, with_precision

checked = jaxtyping.jaxtyped(typechecker=beartype)  # as the import hook applies it


@checked
def text(x: int) -> str:
    return "1" if x == 1 else x


@checked
def added(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"] | None) -> Tensor:
    return x + y


@checked
@dataclass
class Point:
    x: int
    after: "Point | None" = None


def test_a_wrong_argument_or_result_raises():
    assert text(1) == "1" and Point(1, Point(2)).x == 1
    for call in (lambda: text("1"), lambda: text(2), lambda: Point("1")):
        with pytest.raises(TypeCheckError):
            call()


def test_wrong_shapes_raise():
    assert added(torch.zeros(2, 1), torch.ones(2, 1)).sum() == 2
    with pytest.raises(TypeCheckError):
        added(torch.zeros(2, 1), torch.ones(1, 1))


def test_the_package_is_checked():
    with pytest.raises(TypeCheckError):
        with_precision("sagebwd", Precision.INT8)
    q, k, v, do = torch.zeros(4, 1, 1, 3, 8)
    with pytest.raises(TypeCheckError):
        exact(q, k, v[..., :2, :], do)
    assert with_precision(SAGEBWD, Precision.INT8).dp.precision is Precision.INT8


def test_nothing_is_checked_as_installed(as_installed):
    assert text(2) == 2 and Point("1").x == "1"
