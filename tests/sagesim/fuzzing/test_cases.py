"""Fuzz cases are reproducible, have the layouts that they name, and cover every kind of call."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory

from sagesim import CAUSAL_SAFE, FP8_GRADIENTS, AttentionSpec, FuzzCase, Precision, attention
from sagesim.fuzzing.cases import DTYPES, EXTRAS, FEATURES, LAYOUTS, PADDINGS
from sagesim.fuzzing.hypothesis_search import find
from sagesim.fuzzing.inputs import KINDS
from sagesim.fuzzing.strategies import cases, specs_for_kernels
from tests.support import examples
from tests.support.assertions import assert_bitwise


def drawn(strategy, count):
    """The examples that the strategy draws with seed 0."""
    seen = []
    find(strategy, lambda example: seen.append(example) or False, cases=count, seed=0)
    return seen


class TestCase:
    @given(cases())
    @examples(50)
    def test_repr_evaluates_to_the_case(self, case):
        assert eval(repr(case), {"FuzzCase": FuzzCase}) == case

    @given(cases(longest=40))
    @examples(20)
    def test_numbers_do_not_depend_on_the_layout(self, case):
        from dataclasses import replace

        plain = replace(case, layout="contiguous", do_layout="contiguous")
        for expected, x in zip(plain.problem().qkvdo, case.problem().qkvdo, strict=True):
            if x.stride() != (0, 0, 0, 0):
                assert_bitwise(actual=x, expected=expected, what="a tensor of the case")
            assert x.dtype is DTYPES[case.dtype] and bool(x.isfinite().all())

    def test_tensors_have_the_layouts_of_the_case(self):
        shape = {"n_q": 5, "n_k": 7, "d": 16, "batch": 2, "kv_heads": 3, "groups": 2}
        for layout in LAYOUTS[:-1]:
            q, k, v, do = FuzzCase(layout=layout, do_layout="expanded", **shape).problem().qkvdo
            assert q.shape == do.shape == (2, 6, 5, 16) and k.shape == v.shape == (2, 3, 7, 16)
            assert q.is_contiguous() == (layout == "contiguous")
            assert k.transpose(1, 2).is_contiguous() == (layout == "token_major")
            assert do.stride() == (0, 0, 0, 0)

    def test_run_passes_the_options_of_sdpa(self):
        case = FuzzCase(n_q=3, n_k=5, d=8, groups=2, is_causal=True, scale=0.25)
        seen = {}

        def function(q, k, v, **options):
            seen.update(options)
            return attention(q, k, v, **options)

        o, dq, dk, dv, dsinks = case.run(function)
        assert seen == {"is_causal": True, "scale": 0.25, "enable_gqa": True}
        assert o.shape == dq.shape == (1, 2, 3, 8) and dk.shape == dv.shape == (1, 1, 5, 8)
        assert dsinks.tolist() == [0.0, 0.0]

    def test_run_passes_lengths_in_place_of_their_mask(self):
        case = FuzzCase(n_q=3, n_k=5, d=8, batch=6, padding="seqused_k", seed=2)
        key_mask = case.problem().key_mask
        seen = {}

        def function(q, k, v, **options):
            seen.update(options)
            return attention(q, k, v, **options)

        found = case.run(function)
        lengths = seen.pop("seqused_k")
        assert seen == {"is_causal": False, "scale": None, "enable_gqa": False}
        assert lengths.dtype is torch.int32 and {0, 5} < {*lengths.tolist()}
        expected = torch.arange(5) < lengths[:, None]
        assert_bitwise(actual=key_mask, expected=expected, what="the mask of the problem")
        assert all(bool(x.isfinite().all()) for x in found)
        assert "seqused_k" in [*case.describe()]

    @pytest.mark.parametrize(
        "field, value",
        [
            ("n_q", 0),
            ("groups", 0),
            ("dtype", "float64"),
            ("layout", "expanded"),
            ("padding", "left lengths"),
            ("do_layout", "x"),
            ("kinds", ("gaussian", "gaussian", "gaussian", "noise")),
        ],
    )
    def test_an_invalid_field_raises_and_is_named(self, field, value):
        with pytest.raises(ValueError, match=f"^{field}"):
            FuzzCase(**({"n_q": 3, "n_k": 3, "d": 8} | {field: value}))


class TestStrategies:
    def test_every_kind_of_call_is_drawn(self):
        seen = drawn(cases(), 400)
        assert {c.dtype for c in seen} == set(DTYPES)
        assert {kind for c in seen for kind in c.kinds} == set(KINDS)
        assert {c.layout for c in seen} == set(LAYOUTS[:-1])
        assert {c.do_layout for c in seen} == set(LAYOUTS)
        assert {gain for c in seen for gain in c.gains} == {-30, -8, -6, 0, 2, 6}
        for number in (1, 63, 64, 65, 127, 128, 129):
            assert any(c.n_q == number for c in seen) and any(c.n_k == number for c in seen)
        for is_kind in (
            lambda c: c.is_causal and c.n_q < c.n_k,
            lambda c: c.is_causal and c.n_q > c.n_k,
            lambda c: c.groups == 3,
            lambda c: c.batch > 1 and c.kv_heads > 1,
            lambda c: c.scale is not None,
            lambda c: c.d & (c.d - 1),
        ):
            assert sum(bool(is_kind(c)) for c in seen) > 10

    @pytest.mark.slow
    @pytest.mark.parametrize("word", FEATURES)
    def test_an_excluded_feature_is_not_drawn(self, word):
        has_feature = {
            "full": lambda c: not c.is_causal,
            "causal": lambda c: c.is_causal,
            "cross": lambda c: c.n_q != c.n_k,
            "tails": lambda c: c.n_q % 32 or c.n_k % 64,
            "gqa": lambda c: c.groups > 1,
            "scale": lambda c: c.scale is not None,
            "strides": lambda c: (c.layout, c.do_layout) != ("contiguous", "contiguous"),
        }
        sizes = {"block_q": 32, "block_k": 64}
        assert any(has_feature[word](c) for c in drawn(cases(**sizes), 40))
        assert not any(has_feature[word](c) for c in drawn(cases(without=[word], **sizes), 40))
        assert drawn(cases(without=FEATURES.keys() - {"full", word}, **sizes), 5)

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            ((), {"none"}),
            (("padding",), {*PADDINGS} - {"seqused_k"}),
            (("seqused_k",), {"none", "seqused_k"}),
            (tuple(EXTRAS), {*PADDINGS}),
        ],
    )
    def test_padding_is_drawn_as_the_named_arguments(self, words, expected):
        # What Hypothesis draws depends on the modules that are loaded. Of 300 cases, none may have
        # lengths, sinks and a softcap.
        seen = drawn(cases(extras=words), 1500 if len(words) > 1 else 300)
        assert {case.padding for case in seen} == expected
        padded = [case for case in seen if case.padding == "seqused_k"]
        if len(words) > 1:
            assert {case.is_causal for case in padded} == {True, False}
            alignments = {case.causal_alignment for case in padded}
            assert alignments == {None, "upper_left", "lower_right"}
            assert any(case.sinks and case.softcap for case in padded)
            assert any(case.groups > 1 for case in padded)

    def test_lengths_head_sizes_and_dtypes_are_limited(self):
        for case in drawn(cases(longest=9, head_sizes=(24,), dtypes=("bfloat16",)), 40):
            assert max(case.n_q, case.n_k) <= 9 and case.d == 24 and case.dtype == "bfloat16"

    @pytest.mark.parametrize(
        ("without", "shortest"), [((), 1), (("tails",), 48), (("tails", "cross"), 96)]
    )
    def test_no_length_exceeds_the_longest(self, without, shortest):
        sizes = {"block_q": 48, "block_k": 32, "without": without}
        for longest in (shortest, shortest + 31):
            for case in drawn(cases(longest=longest, **sizes), 40):
                assert max(case.n_q, case.n_k) <= longest
                assert "tails" not in without or case.n_q % 48 == case.n_k % 32 == 0
        with pytest.raises(ValueError, match=f"max_length={shortest - 1} is less than {shortest}"):
            cases(longest=shortest - 1, **sizes)

    def test_without_a_longest_length_there_is_always_one(self):
        for case in drawn(cases(block_q=48, block_k=112, without=("tails", "cross")), 10):
            assert case.n_q == case.n_k == 336

    def test_specs_for_kernels_cover_every_option(self):
        seen = drawn(specs_for_kernels(), 300)
        assert {s.block_q for s in seen} == {s.block_k for s in seen} == {32, 64, 128}
        assert {(s.smoothing.q, s.smoothing.k) for s in seen} >= {(True, True), (False, False)}
        assert len({s.rounding.mode for s in seen}) == 3 and len({s.delta for s in seen}) == 2
        for site in ("qk", "pv", "dv", "dp", "dq", "dk"):
            precisions = {s.site(site).precision for s in seen}
            fp8 = {Precision.FP8_E4M3} & {FP8_GRADIENTS.site(site).precision}
            assert precisions == {Precision.INT8, Precision.INPUT16} | fp8
        assert CAUSAL_SAFE.smoothing in {s.smoothing for s in seen}

    @given(st.data())
    @examples(20)
    def test_only_supported_specs_are_drawn(self, data):
        spec = data.draw(specs_for_kernels(supported=lambda s: s.block_q == 32))
        assert isinstance(spec, AttentionSpec) and spec.block_q == 32


class TestFind:
    def test_shrinking_gives_the_smallest_example(self):
        numbers = st.integers(0, 10**6)
        assert find(numbers, lambda n: n > 1234, cases=200, seed=0, shrink=True) == 1235
        assert find(numbers, lambda n: n < 0, cases=200, seed=0) is None

    def test_equal_seeds_draw_equal_examples(self):
        assert drawn(cases(), 20) == drawn(cases(), 20)

    def test_an_inconsistent_predicate_still_gives_an_example(self):
        answers = iter([True] + [False] * 10**6)
        found = find(st.integers(0, 99), lambda n: next(answers), cases=50, seed=0, shrink=True)
        assert found is not None

    def test_hypothesis_writes_to_a_temporary_folder_and_its_own_is_restored(self, tmp_path):
        """It caches constants of the loaded code, by default in the current folder."""
        before = storage_directory(intent_to_write=False).home_directory
        homes = []

        def look(number):
            homes.append(storage_directory(intent_to_write=False).home_directory)
            return False

        set_hypothesis_home_dir(tmp_path / "mine")
        try:
            find(st.integers(), look, cases=3, seed=0)
            assert storage_directory(intent_to_write=False).home_directory == tmp_path / "mine"
        finally:
            set_hypothesis_home_dir(before)
        assert homes and not {before, tmp_path / "mine"} & {*homes}
        assert not any(home.exists() for home in homes) and not (tmp_path / "mine").exists()

    def test_global_random_generators_are_not_used(self):
        import numpy as np

        before = np.random.get_state()[1].tolist(), torch.get_rng_state()
        for case in drawn(cases(longest=20), 5):
            case.run(attention)
        after = np.random.get_state()[1].tolist(), torch.get_rng_state()
        assert before[0] == after[0]
        assert_bitwise(actual=after[1], expected=before[1], what="torch's generator")
