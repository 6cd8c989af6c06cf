from dataclasses import FrozenInstanceError, fields, replace

import pytest

import sagesim
from sagesim import (
    HALF_EVEN,
    PRESETS,
    SAGEBWD,
    SITES,
    AttentionSpec,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    RoundingMode,
    Smoothing,
    with_precision,
)
from sagesim.spec import MAPS, OPERANDS


def test_sites_are_the_first_seven_fields_in_the_order_they_run():
    assert tuple(f.name for f in fields(AttentionSpec))[:7] == SITES
    assert SITES == ("qk", "pv", "qk_recompute", "dv", "dp", "dq", "dk")


def test_sites_are_required_and_all_fields_are_keyword_only(as_installed):
    with pytest.raises(TypeError, match="missing 7 required keyword-only"):
        AttentionSpec()
    with pytest.raises(TypeError, match="positional"):
        AttentionSpec(SAGEBWD.qk)


def test_specs_compare_by_value_and_are_immutable():
    same = replace(SAGEBWD)
    assert same == SAGEBWD and hash(same) == hash(SAGEBWD) and same is not SAGEBWD
    with pytest.raises(FrozenInstanceError):
        SAGEBWD.block_q = 1
    assert not hasattr(SAGEBWD, "__dict__")


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("granularity", Granularity)
def test_a_granularity_that_does_not_fit_raises_and_lists_those_that_do(site, side, granularity):
    """Maps take tile, tile_row, tile_column, row and, but for pv, row_bound; others the others."""
    tensor = OPERANDS[site][side]
    is_map = granularity.value in ("tile", "tile_row", "tile_column", "row", "row_bound")
    assert granularity.is_map == is_map
    fits = is_map == (tensor in MAPS) and (site, granularity.value) != ("pv", "row_bound")
    matmul = replace(SAGEBWD.site(site), **{("lhs", "rhs")[side]: granularity})
    if fits:
        assert replace(SAGEBWD, **{site: matmul}).site(site) == matmul
    else:
        with pytest.raises(ValueError) as error:
            replace(SAGEBWD, **{site: matmul})
        message = str(error.value)
        assert f"site {site}: granularity {granularity.value!r} does not fit {tensor}" in message
        assert ("tile_column" if tensor in MAPS else "block_channel") in message


def test_the_maps_are_p_and_ds():
    assert {"p", "ds"} == MAPS
    assert {t for pair in OPERANDS.values() for t in pair} == {"q", "k", "v", "do", "p", "ds"}


@pytest.mark.parametrize("name", ["block_q", "block_k"])
@pytest.mark.parametrize("size", [0, -1, 1.5, 64.0, True])
def test_block_sizes_are_positive_integers(as_installed, name, size):
    with pytest.raises((TypeError, ValueError), match=rf"{name}"):
        replace(SAGEBWD, **{name: size})


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_are_32_bit(seed):
    with pytest.raises(ValueError, match=str(seed)):
        Rounding.stochastic(seed)


@pytest.mark.parametrize("mode", RoundingMode)
@pytest.mark.parametrize("seed", [None, 3])
def test_stochastic_rounding_needs_a_seed_and_other_modes_take_none(mode, seed):
    if (mode is RoundingMode.STOCHASTIC) == (seed is not None):
        assert Rounding(mode, seed).seed == seed
    else:
        with pytest.raises(ValueError, match=f"{mode.value} with seed={seed}"):
            Rounding(mode, seed)


def test_site_raises_and_names_an_unknown_site():
    with pytest.raises(ValueError, match="'qv' is not a site; one of qk, pv"):
        SAGEBWD.site("qv")


def test_int8_and_fp8_are_scaled():
    assert [p.value for p in Precision if p.is_scaled] == ["int8", "fp8_e4m3", "fp8_e5m2"]


def test_a_spec_is_quantized_if_any_site_is_not_fp32():
    plain = with_precision(SAGEBWD, Precision.FP32)
    assert not plain.is_quantized
    for site in SITES:
        assert with_precision(plain, Precision.BF16, site).is_quantized


def test_with_precision_changes_only_the_named_sites():
    changed = with_precision(SAGEBWD, Precision.FP8_E4M3, "dq", "dk")
    for site in SITES:
        before, after = SAGEBWD.site(site), changed.site(site)
        assert (after.lhs, after.rhs) == (before.lhs, before.rhs)
        expected = Precision.FP8_E4M3 if site in ("dq", "dk") else before.precision
        assert after.precision is expected
    assert replace(changed, dq=SAGEBWD.dq, dk=SAGEBWD.dk) == SAGEBWD


def test_sagebwd_is_the_papers_scheme():
    """arXiv 2603.02170: precisions and granularities of the seven products, smoothing of K."""
    int8, block, tile = Precision.INT8, Granularity.PerBlock, Granularity.PerTile
    assert SAGEBWD.qk == SAGEBWD.qk_recompute == MatmulSpec(int8, block, block)
    assert SAGEBWD.pv == MatmulSpec(int8, Granularity.PerTileRow, block)
    assert SAGEBWD.dv == SAGEBWD.dq == SAGEBWD.dk == MatmulSpec(int8, tile, block)
    assert SAGEBWD.dp.precision is Precision.INPUT16
    assert SAGEBWD.smoothing == Smoothing(k=True, q=False)
    assert SAGEBWD.rounding == HALF_EVEN


@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("factored")])
def test_scales_of_factored_presets_do_not_vary_along_the_contracted_axis(name):
    varies = {
        Granularity.PerBlock: set(),
        Granularity.PerHead: set(),
        Granularity.PerTile: set(),
        Granularity.PerToken: {"token"},
        Granularity.PerBlockChannel: {"channel"},
        Granularity.PerChannel: {"channel"},
        Granularity.PerTileRow: {"query"},
        Granularity.PerRow: {"query"},
        Granularity.PerTileColumn: {"key"},
    }
    contracted = {
        "qk": "channel",
        "qk_recompute": "channel",
        "dp": "channel",
        "pv": "key",
        "dq": "key",
        "dv": "query",
        "dk": "query",
    }
    for site in SITES:
        matmul = PRESETS[name].site(site)
        for granularity, tensor in zip((matmul.lhs, matmul.rhs), OPERANDS[site], strict=True):
            token_axis = "key" if tensor in ("k", "v") else "query"
            axes = {token_axis if axis == "token" else axis for axis in varies[granularity]}
            assert contracted[site] not in axes, (site, tensor)


def test_every_preset_is_exported():
    public = [getattr(sagesim, name) for name in sagesim.__all__]
    exported = {x for x in public if isinstance(x, AttentionSpec)}
    assert {label for label, spec in PRESETS.items() if spec not in exported} == set()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: MatmulSpec("int8", SAGEBWD.dq.lhs, SAGEBWD.dq.rhs), "precision is 'int8'"),
        (lambda: MatmulSpec(Precision.INT8, "tile", SAGEBWD.dq.rhs), "lhs is 'tile'"),
        (lambda: replace(SAGEBWD, delta="p"), "delta is 'p', not a Delta"),
        (lambda: replace(SAGEBWD, rounding="half_away"), "rounding is 'half_away'"),
        (lambda: replace(SAGEBWD, smoothing=True), "smoothing is True"),
        (lambda: replace(SAGEBWD, dq="int8"), "dq is 'int8', not a MatmulSpec"),
        (lambda: Rounding("stochastic", 3), "mode is 'stochastic'"),
    ],
)
def test_a_string_instead_of_an_enum_member_raises(as_installed, make, message):
    """The string equals its member, but code that compares with `is` would take it for another."""
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Smoothing(q=1), "Smoothing: q is 1, not True or False"),
        (lambda: Smoothing(k="yes"), "Smoothing: k is 'yes', not True or False"),
        (lambda: Rounding.stochastic(True), "Rounding: seed is True, not an integer"),
        (lambda: Rounding.stochastic(1.0), "Rounding: seed is 1.0, not an integer"),
    ],
)
def test_flags_and_seeds_of_another_type_raise(as_installed, make, message):
    with pytest.raises(TypeError, match=message):
        make()
