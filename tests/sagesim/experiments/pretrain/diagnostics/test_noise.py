import math

import pytest
import torch

from sagesim.experiments.pretrain.diagnostics import noise
from sagesim.experiments.pretrain.diagnostics.noise import (
    Gradients,
    gradients_of,
    inner_products,
    moments,
)
from tests.sagesim.experiments.pretrain.conftest import ALONE
from theory.noise import sample_moments


def test_moments_of_inner_products_equal_those_of_the_vectors():
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.3
    found, expected = moments(x @ x.mT), sample_moments(x)
    for name in ("mean_square", "mean_square_error", "trace"):
        # The eigenvectors of a 6 x 6 matrix, in float64.
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-10)


def test_moments_of_inner_products_that_are_not_finite_are_nan():
    assert math.isnan(moments(torch.tensor([[math.inf, 0.0], [0.0, 1.0]]).double()).trace)


def test_inner_products_are_over_all_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    found = gradients_of(model, lambda i: model(x[i]).square().sum(), range(5))
    assert all(p.grad is None for p in model.parameters())
    flat = torch.stack([torch.cat([g.flatten() for g in each]) for each in found.examples])
    expected = flat.double() @ flat.double().mT
    assert inner_products(found, found, ALONE, sharded=False).tolist() == [
        pytest.approx(row, rel=1e-12) for row in expected.tolist()
    ]


def test_gradients_less_others_are_their_differences():
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

    def loss(i):
        return model(x[i]).square().sum()

    found = gradients_of(model, loss, range(5))
    assert not inner_products(
        gradients_of(model, loss, range(5), less=found), found, ALONE, sharded=False
    ).any()
    shifted = gradients_of(other, lambda i: other(x[i]).square().sum(), range(5))
    less = gradients_of(model, loss, range(5), less=shifted)
    for a, b, c in zip(found.examples, shifted.examples, less.examples, strict=True):
        assert all(torch.equal(u - v, w) for u, v, w in zip(a, b, c, strict=True))


def test_inner_products_of_large_parameters_are_summed_in_parts(monkeypatch):
    each = [[torch.randn(7, 11, generator=torch.Generator().manual_seed(i))] for i in range(3)]
    whole = inner_products(Gradients(each), Gradients(each), ALONE, sharded=False)
    monkeypatch.setattr(noise, "_PART", 10)
    parts = inner_products(Gradients(each), Gradients(each), ALONE, sharded=False)
    assert parts.flatten().tolist() == pytest.approx(whole.flatten().tolist(), rel=1e-12)
