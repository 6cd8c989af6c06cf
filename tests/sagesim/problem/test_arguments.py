"""Arguments that no call can have are refused, and the message names the value."""

import functools
import math
import re

import numpy as np
import pytest
import torch

import sagesim
from sagesim import FPA, SAGEBWD, AttentionProblem, Capture, Precision, exact, trace
from sagesim.analysis import compare
from sagesim.data import LLAMA
from sagesim.emulator import quantize
from tests.support.assertions import assert_within_bound

pytestmark = pytest.mark.usefixtures("as_installed")

Q, K, V, DO = torch.randn(4, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"scale": math.nan}, ValueError, "scale is nan"),
        ({"scale": -math.inf}, ValueError, "scale is -inf"),
        ({"scale": 1e300}, ValueError, "scale is 1e+300; it must be from -2^100 to 2^100"),
        ({"scale": 1j}, TypeError, "scale is 1j"),
        ({"scale": True}, TypeError, "scale is True"),
        ({"scale": "0.1"}, TypeError, "scale is '0.1'"),
        ({"scale": torch.ones(())}, TypeError, "scale is a tensor of torch.float32"),
        ({"softcap": 2.0**-8}, ValueError, "it must be from 2^-7 to 2^126"),
        ({"softcap": 2.0**127}, ValueError, "it must be from 2^-7 to 2^126"),
        ({"softcap": True}, TypeError, "softcap is True"),
        ({"softcap": "20"}, TypeError, "softcap is '20'"),
        ({"is_causal": "yes"}, TypeError, "is_causal is 'yes'; it must be True or False"),
        ({"enable_gqa": None}, TypeError, "enable_gqa is None; it must be True or False"),
        ({"is_causal": 0}, TypeError, "is_causal is 0; it must be True or False"),
        ({"window": (-1.0, -1.0)}, TypeError, "window is (-1.0, -1.0)"),
        ({"window": (4.0, 0)}, TypeError, "window is (4.0, 0)"),
        ({"window": (True, False)}, TypeError, "window is (True, False)"),
        ({"key_mask": [True] * 9}, TypeError, "key_mask is [True, True"),
        ({"sinks": [1.0, 2.0]}, TypeError, "sinks is [1.0, 2.0]"),
    ],
)
def test_options(given, error, words):
    for function in (sagesim.attention, trace):
        with pytest.raises(error, match=re.escape(words)):
            function(Q, K, V, spec=FPA, **given)


@pytest.mark.parametrize("option", [{"scale": np.float32(0.3)}, {"scale": 1}, {"softcap": 3}])
def test_numbers_of_other_types_are_numbers(option):
    expected = {name: float(x) for name, x in option.items()}
    a, b = (sagesim.attention(Q, K, V, spec=SAGEBWD, **x) for x in (option, expected))
    assert torch.equal(a, b)


def test_a_window_wider_than_any_integer_of_a_tensor_is_no_limit():
    expected, found = (
        trace(Q, K, V, DO, spec=SAGEBWD, window=(left, 3), causal_alignment="upper_left").dk
        for left in (-1, 2**70)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["causal", "softcaps", "seqused", "head"])
def test_an_unknown_option_is_answered_with_the_nearest_one(name):
    near = {"causal": "is_causal", "softcaps": "softcap", "seqused": "seqused_k", "head": None}
    words = f"'{name}' is no option" + (f".*did you mean {near[name]}" if near[name] else "")
    with pytest.raises(TypeError, match=words):
        trace(Q, K, V, DO, spec=FPA, **{name: True})


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (None, "(is None|given)"),
        (np.zeros((1, 2, 9, 8)), "is a numpy.ndarray"),
        (Q.to_sparse(), "is a tensor of torch.sparse_coo"),
        (torch.nested.nested_tensor([Q[0, 0]], layout=torch.jagged), "is a nested tensor"),
    ],
    ids=["none", "numpy", "sparse", "nested"],
)
@pytest.mark.parametrize("position", range(3))
def test_only_dense_tensors(x, words, position):
    q, k, v = (x if i == position else y for i, y in enumerate((Q, K, V)))
    for function in (sagesim.attention, trace):
        with pytest.raises(TypeError, match=f"{'qkv'[position]} {words}"):
            function(q, k, v, spec=FPA)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"do": DO[:, :, :1]},
            ValueError,
            "do is torch.float32 (1, 2, 1, 8); the gradient of o is",
        ),
        ({"do": DO.half()}, ValueError, "do is torch.float16 (1, 2, 9, 8); the gradient of o is"),
        ({"do": DO.to("meta")}, ValueError, "do is on meta, q on cpu"),
        ({"do": DO.numpy()}, TypeError, "do is a numpy.ndarray; it must be a torch.Tensor"),
        ({"do": None}, ValueError, "do is None"),
        (dict.fromkeys("qkv", Q.int()), TypeError, "q, k and v are torch.int32"),
        ({"scale": torch.tensor(0.1)}, TypeError, "scale is a tensor of torch.float32"),
        ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, "head size 0"),
        (dict.fromkeys("qkv", Q[0, 0, 0]), ValueError, "q, k and v need [..., tokens, head size]"),
        ({"k": K[:, :1]}, ValueError, "k and v differ in heads or tokens"),
        ({"attn_mask": torch.ones(8, 9).bool()}, ValueError, "attn_mask of shape (8, 9) does not"),
    ],
)
def test_the_reference_refuses_what_the_emulator_refuses(change, error, words):
    given = {"q": Q, "k": K, "v": V, "do": DO} | change
    for function in (exact, functools.partial(trace, spec=FPA), sagesim.attribute):
        with pytest.raises(error, match=re.escape(words)):
            function(**given)


def test_a_capture_and_a_path_are_not_calls():
    with pytest.raises(TypeError, match="pass one of its calls"):
        trace(Capture.load(LLAMA), spec=FPA)
    with pytest.raises(TypeError, match=r"pass one of the calls of sagesim.Capture.load"):
        trace(str(LLAMA), spec=FPA)


@pytest.mark.parametrize(
    "option", [{"is_causal": False}, {"softcap": None}, {"window": (-1, -1)}, {"other": None}]
)
def test_a_problem_keeps_its_options(option):
    """An option beside it is refused, also one with the value that it has if it is omitted."""
    problem = sagesim.AttentionProblem(q=Q, k=K, v=V, do=DO, is_causal=True, softcap=2.0)
    for function in (exact, functools.partial(trace, spec=FPA), sagesim.attribute):
        with pytest.raises(
            TypeError, match=f"no other tensor or option is accepted: {next(iter(option))}"
        ):
            function(problem, **option)


def test_arguments_of_other_functions():
    with pytest.raises(TypeError, match="base is 'sagebwd', not an AttentionSpec"):
        sagesim.attribute(Q, K, V, DO, base="sagebwd")
    with pytest.raises(TypeError, match="progress is 5; it must be a function or None"):
        sagesim.attribute(Q, K, V, DO, base=SAGEBWD, progress=5)
    with (
        pytest.raises(TypeError, match=r"layers\[0\] is 'x', not an AttentionSpec"),
        sagesim.emulate(FPA, layers={0: "x"}),
    ):
        pass
    with pytest.raises(TypeError, match="spec is called base"):
        sagesim.attribute(Q, K, V, DO, spec=SAGEBWD)
    with pytest.raises(TypeError, match=r"sample is 3; it must be a sagesim.analysis.Sample"):
        sagesim.attribute(Q, K, V, DO, base=SAGEBWD, sample=3)
    with pytest.raises(TypeError, match=r"trace is .*; it must be a sagesim.Trace"):
        compare(exact(Q, K, V, DO), trace(Q, K, V, DO, spec=FPA))
    with pytest.raises(TypeError, match=r"how is 'token'; it must be a sagesim.Granularity"):
        quantize(Q, "token", precision=Precision.INT8, block=4)
    with pytest.raises(TypeError, match="label is None; it must be a str"):
        sagesim.AttentionSpec.parse(None)
    with (
        pytest.raises(TypeError, match=r"layers is \[0\]; it must be a mapping"),
        sagesim.emulate(FPA, layers=[0]),
    ):
        pass


def test_what_is_printed_has_no_numbers_of_tensors():
    problem = sagesim.AttentionProblem(q=Q, k=K, v=V, do=DO, is_causal=True)
    tensors = ", ".join(f"{name}=float32[1, 2, 9, 8]" for name in ("q", "k", "v", "do"))
    assert repr(problem) == f"AttentionProblem({tensors}, is_causal=True)"
    of_trace = repr(trace(problem, spec=SAGEBWD))
    assert of_trace.startswith("Trace(spec=AttentionSpec.parse('sagebwd'), s=float32[1, 2, 9, 9]")
    assert "'dq.ds': QTensor(codes=int8[1, 2, 9, 9], scale=float32[1, 2, 9, 9])" in of_trace
    capture = repr(Capture.load(LLAMA))
    assert "index=5, name='layers.5.attention.core'), loss_scale=" in capture.replace("))", ")")
    for text in (of_trace, capture, repr(exact(problem))):
        assert "\n" not in text and "tensor(" not in text


@pytest.mark.parametrize(
    "padding", [{"key_mask": torch.arange(9) < 5}, {"seqused_k": torch.tensor(5)}]
)
def test_a_problem_of_two_axes_with_padded_keys_is_split(padding):
    x = AttentionProblem.of(Q[0, 0], K[0, 0], V[0, 0], DO[0, 0], **padding)
    (part,) = x.head_groups(entries=0)
    found, expected = trace(part, spec=SAGEBWD), trace(x, spec=SAGEBWD)
    assert torch.equal(found.dk[0, 0], expected.dk)


def test_a_window_without_limits_may_be_a_list_beside_a_mask():
    mask = torch.ones(9, 9, dtype=torch.bool)
    found = sagesim.attention(Q, K, V, spec=FPA, attn_mask=mask, window=[-1, -1])
    assert torch.equal(found, sagesim.attention(Q, K, V, spec=FPA))


def test_no_heads_for_several_heads_of_k():
    with pytest.raises(ValueError, match="heads of q is not a positive multiple of that of k"):
        sagesim.attention(Q[:, :0], K, V, spec=FPA, enable_gqa=True)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((9, 8), {"enable_gqa": True}),
        ((2, 0, 9, 8), {"enable_gqa": True}),
        ((2, 0, 9, 8), {"sinks": torch.zeros(0)}),
        ((0, 2, 9, 8), {"sinks": torch.zeros(2)}),
    ],
)
def test_the_emulator_and_the_reference_accept_the_same_shapes(shape, options):
    x = torch.ones(shape)
    found, expected = trace(x, x, x, x, spec=FPA, **options), exact(x, x, x, x, **options)
    for name in ("o", "dq", "dk", "dv", "dsinks"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert_within_bound(actual=a, exact=b, bound=torch.tensor(1e-6), what=name)
