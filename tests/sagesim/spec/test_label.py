from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagesim import (
    FPA,
    HALF_AWAY,
    PRESETS,
    SAGEBWD,
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    Smoothing,
)
from tests.support import examples
from tests.support.strategies import matmuls, specs

parse = AttentionSpec.parse


@pytest.mark.slow
@given(specs())
@examples(300)
def test_parsing_a_label_gives_the_spec_it_was_made_from(spec):
    assert parse(spec.label()) == spec
    assert parse(spec.label()).label() == spec.label()


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_label_is_its_name(name):
    assert PRESETS[name].label() == name
    assert parse(name) == PRESETS[name]


def test_presets_differ():
    assert len(set(PRESETS.values())) == len(PRESETS)


@pytest.mark.parametrize("site", SITES)
@given(data=st.data())
@examples(20)
def test_one_word_sets_any_product(site, data):
    matmul = data.draw(matmuls(site, tuple(Precision)))
    word = f"{site}={matmul.precision.value}@{matmul.lhs.value},{matmul.rhs.value}"
    assert parse(f"fpa {word}") == replace(FPA, **{site: matmul})


@pytest.mark.parametrize(
    ("label", "spec"),
    [
        ("sagebwd dp=fp32", {"dp": replace(SAGEBWD.dp, precision=Precision.FP32)}),
        (
            "sagebwd qk=int8@token,block_channel",
            {"qk": MatmulSpec(Precision.INT8, Granularity.PerToken, Granularity.PerBlockChannel)},
        ),
        ("sagebwd smooth=none", {"smoothing": Smoothing()}),
        ("sagebwd smooth=q", {"smoothing": Smoothing(q=True)}),
        ("sagebwd smooth=qk", {"smoothing": Smoothing(q=True, k=True)}),
        ("sagebwd round=half_away", {"rounding": HALF_AWAY}),
        ("sagebwd round=stochastic@0", {"rounding": Rounding.stochastic(0)}),
        ("sagebwd round=stochastic@4294967295", {"rounding": Rounding.stochastic(2**32 - 1)}),
        ("sagebwd delta=p", {"delta": Delta.FROM_P}),
        ("sagebwd block=128x32", {"block_q": 128, "block_k": 32}),
    ],
)
def test_each_word_replaces_its_field(label, spec):
    assert parse(label) == replace(SAGEBWD, **spec)
    assert replace(SAGEBWD, **spec).label() == label


def test_order_and_white_space_of_words_do_not_matter():
    assert parse("  sagebwd\tdelta=p\n dp=int8 ") == parse("sagebwd dp=int8 delta=p")


def test_labels_begin_with_the_nearest_preset():
    assert parse("sagebwd dp=int8").label() == "sagebwd_all_int8"
    assert replace(FPA, delta=Delta.FROM_P).label() == "fpa delta=p"


@pytest.mark.parametrize(
    ("label", "word", "hint"),
    [
        ("sagebwdd", "sagebwdd", "did you mean 'sagebwd'?"),
        ("dp=int8", "dp=int8", "is not a preset"),
        ("SAGEBWD", "SAGEBWD", "one of fpa, "),
        ("sagebwd fast", "fast", "FIELD=VALUE"),
        ("sagebwd dqq=int8", "dqq=int8", "did you mean 'dq'?"),
        ("sagebwd =int8", "=int8", "is not a field; one of qk, pv"),
        ("sagebwd dq=int9", "dq=int9", "did you mean 'int8'?"),
        ("sagebwd dq=", "dq=", "one of int8, fp8_e4m3"),
        ("sagebwd dq=int8@tile", "dq=int8@tile", "two granularities"),
        ("sagebwd dq=int8@", "dq=int8@", "two granularities"),
        ("sagebwd dq=int8@tile,block,block", "dq=int8@tile,block,block", "two granularities"),
        ("sagebwd dq=int8@token,block", "dq=int8@token,block", "granularity of ds"),
        ("sagebwd dq=int8@tile,tile", "dq=int8@tile,tile", "granularity of k"),
        ("sagebwd dq=int8@tile,blok", "dq=int8@tile,blok", "did you mean 'block'?"),
        ("sagebwd smooth=v", "smooth=v", "one of none, q, k, qk"),
        ("sagebwd round=up", "round=up", "one of half_even, half_away, stochastic"),
        ("sagebwd round=stochastic", "round=stochastic", "stochastic@7"),
        ("sagebwd round=half_even@7", "round=half_even@7", "the others take none"),
        ("sagebwd round=stochastic@", "round=stochastic@", "integer in 0..4294967295"),
        ("sagebwd round=stochastic@-1", "round=stochastic@-1", "integer in 0..4294967295"),
        ("sagebwd round=stochastic@4294967296", "4294967296", "integer in 0..4294967295"),
        ("sagebwd delta=q", "delta=q", "one of o, p"),
        ("sagebwd block=64", "block=64", "block=128x64"),
        ("sagebwd block=0x64", "block=0x64", "positive"),
        ("sagebwd block=\u0664x64", "block=\u0664x64", "positive"),  # a digit 4 in Arabic
        ("sagebwd block=64x-1", "block=64x-1", "positive"),
        ("sagebwd block=64x64x64", "block=64x64x64", "block=128x64"),
        (f"sagebwd block={'9' * 5000}x1", "block=999", "block=128x64"),
        (f"sagebwd round=stochastic@{'9' * 5000}", "@999", "integer in 0..4294967295"),
        ("sagebwd dp=int8 dp=fp16", "dp=fp16", "given twice"),
    ],
)
def test_the_error_names_a_wrong_word_and_what_is_valid(label, word, hint):
    with pytest.raises(ValueError) as error:
        parse(label)
    message = str(error.value)
    assert repr(label) in message
    assert word in message.removeprefix(f"spec label {label!r}")
    assert hint in message


@pytest.mark.parametrize("label", ["", "  \n"])
def test_an_empty_label_raises(label):
    with pytest.raises(ValueError, match="empty spec label; it begins with one of fpa"):
        parse(label)
