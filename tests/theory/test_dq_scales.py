"""Scales of dS and K over the unit of a row of dQ: where their product cannot overflow."""

from dataclasses import replace

import torch

from sagesim import SAGEBWD
from theory.checks.dq_sums import Sums, ds_bound_of, floor_of
from theory.checks.samples import gaussian


def test_a_region_of_ds_that_is_all_0_needs_another_scale_than_1():
    """With the scale 1 of an all-zero region, a product of scales overflows, and 0 codes give NaN.

    The kernels multiply its codes by amax / 127 (`map_step`), which is 0.
    """
    x = gaussian(1.0, 128)
    sample = replace(x, k=1e6 * x.k, do=torch.zeros_like(x.do))
    trace = sample.trace(SAGEBWD)
    floor = floor_of(ds_bound_of(sample, trace), sample, trace)
    ds, k = trace.operands["dq.ds"], trace.operands["dq.k"]
    assert floor is not None and not bool(ds.codes.any()) and bool((ds.scale == 1).all())
    units = Sums.of(sample, SAGEBWD).unit[..., None].float()
    assert bool((units >= floor[..., None].float()).all())
    k_scale = k.scale[..., :1, :].float()
    for scale, holds in ((ds.scale.float(), False), (trace.ds.abs() / 127, True)):
        part = ds.codes.float() * (scale * k_scale / units)
        assert bool((part == 0).all()) == holds
        assert bool(part.isnan().any()) != holds
    assert not bool(Sums.of(sample, SAGEBWD).integers.any())


def test_the_product_of_the_scales_of_other_regions_does_not_overflow():
    """The smallest dS that has codes, and large K: the product over the unit is at most 2^126."""
    x = gaussian(1.0, 128)
    sample = replace(x, k=1e6 * x.k, v=2.0**-60 * x.v, do=2.0**-55 * x.do)
    trace = sample.trace(SAGEBWD)
    ds, k = trace.operands["dq.ds"], trace.operands["dq.k"]
    has_codes = ds.scale < 1
    assert bool(has_codes.any()) and float(ds.scale[has_codes].min()) < 2.0**-110
    units = Sums.of(sample, SAGEBWD).unit[..., None]
    product = ds.scale.double() * float(k.scale.max()) / units
    assert float(product[has_codes.expand_as(product)].max()) <= 2.0**126
