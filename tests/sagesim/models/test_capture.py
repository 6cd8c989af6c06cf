import copy
import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from sagesim.emulator import exact
from sagesim.models import Call, Capture, capture
from sagesim.problem import AttentionProblem
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound

SITES = ("q", "k", "v", "do")


class Attend(nn.Module):
    """SDPA with the given arguments on parameters q, k and v; keeps o and its gradient."""

    def __init__(self, heads: int = 4, kv_heads: int = 4, n_q: int = 9, n_k: int = 9, **call):
        super().__init__()
        random = torch.Generator().manual_seed(heads * 100 + n_q)
        shapes = {"q": (3, heads, n_q, 8), "k": (3, kv_heads, n_k, 8), "v": (3, kv_heads, n_k, 6)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=random)))
        self.call = {"enable_gqa": heads != kv_heads, **call}

    def forward(self) -> Tensor:
        self.o = F.scaled_dot_product_attention(self.q, self.k, self.v, **self.call)
        self.o.retain_grad()
        return self.o.square().mean()


def record(net: nn.Module, **options) -> Call:
    with capture(**options) as recording:
        net().backward()
    (call,) = recording.result().calls
    return call


def tiny(causal: bool) -> nn.Module:
    """A transformer with random weights: Llama with grouped queries, or BERT."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "attn_implementation": "sdpa",
    }
    if causal:
        return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes))
    return BertModel(BertConfig(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **sizes))


def step(model: nn.Module, padded: bool) -> list[Tensor]:
    """One forward and backward: the output and every gradient."""
    ids = torch.arange(34).view(2, 17)
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, 11:] = 0
    model.zero_grad()
    output = model(input_ids=ids, **({"attention_mask": mask} if padded else {}))[0]
    output.square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_model_computes_the_same_bytes(causal, padded):
    model = tiny(causal)
    expected = step(model, padded)
    with capture() as recording:
        found = step(model, padded)
    assert len(expected) == len(found) > 10
    for a, b in zip(found, expected, strict=True):
        assert_bitwise(actual=a, expected=b, what="output or gradient")
    calls = recording.result().calls
    names = ["model.layers.{}.self_attn", "encoder.layer.{}.attention.self"]
    assert [call.name for call in calls] == [names[not causal].format(i) for i in range(2)]
    assert [call.index for call in calls] == [0, 1]
    for call in calls:
        assert call.q.shape == call.do.shape == (2, 4, 17, 8)
        assert call.attn_mask is None, "recognised"
        assert call.is_causal is causal
        assert call.enable_gqa is (causal and not padded)
        assert (call.key_mask is not None) is padded
        if padded:
            assert not call.key_mask[1, 11:].any()
            assert call.key_mask[0].all() and call.key_mask[1, :11].all()


@pytest.mark.parametrize(
    ("kv_heads", "arguments"),
    [
        (4, {}),
        (2, {"is_causal": True}),
        (4, {"scale": 0.3, "attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()}),
        (4, {"attn_mask": (torch.arange(9) < 7).expand(3, 1, 9, 9)}),
    ],
)
def test_the_recorded_tensors_and_options_are_those_of_the_sdpa_call(kv_heads, arguments):
    net = Attend(kv_heads=kv_heads, **arguments)
    call = record(net)
    for name, x in (("q", net.q), ("k", net.k), ("v", net.v), ("do", net.o.grad)):
        assert_bitwise(actual=getattr(call, name), expected=x.detach(), what=name)
    masks = {name: arguments[name] for name in ("attn_mask", "is_causal") if name in arguments}
    expected = AttentionProblem(q=call.q, k=call.k, v=call.v, do=None, **masks)
    assert torch.equal(call.attends.expand(3, 4, 9, 9), expected.attends.expand(3, 4, 9, 9))
    assert call.scale == arguments.get("scale")
    assert call.enable_gqa is (kv_heads == 2)


def test_recorded_tensors_are_copies():
    net = Attend()
    with capture() as recording:
        loss = net()
        before = net.q.detach().clone()
        loss.backward()
    with torch.no_grad():
        net.q.zero_()
        net.o.grad.zero_()
    call = recording.result().calls[0]
    assert_bitwise(actual=call.q, expected=before, what="q")
    assert call.do.any()
    assert not any(getattr(call, name).requires_grad for name in SITES)


def test_do_is_the_sum_over_all_uses_of_the_output():
    q = torch.randn(1, 1, 4, 2, requires_grad=True)
    with capture() as recording:
        o = F.scaled_dot_product_attention(q, q, q)
        (o.sum() + 3 * o.sum()).backward()
    do = recording.result().calls[0].do
    assert_bitwise(actual=do, expected=torch.full_like(do, 4.0), what="do")
    assert do.is_contiguous()


@pytest.mark.parametrize("backward_inside", [True, False])
def test_the_backward_may_run_inside_or_after_the_context(backward_inside):
    net = Attend()
    with capture() as recording:
        loss = net()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        with pytest.raises(RuntimeError, match="no backward has run through SDPA call 0"):
            recording.result()
        loss.backward()
    do = recording.result().calls[0].do
    assert_bitwise(actual=do, expected=net.o.grad, what="do")


SELECTIONS = [
    ({}, {"tokens": 4}),
    ({"is_causal": True}, {"tokens": 4}),
    ({"is_causal": True, "n_k": 3}, {"tokens": 4}),
    ({"is_causal": True, "n_k": 13}, {"tokens": 4}),
    ({"n_q": 3}, {"tokens": 4}),
    ({"kv_heads": 2, "is_causal": True}, {"heads": [1], "tokens": 4}),
    ({"kv_heads": 2}, {"heads": [1, 0], "batch": [2, 0]}),
    ({"kv_heads": 1}, {"heads": [0], "batch": [1]}),
    ({"attn_mask": torch.rand(3, 4, 9, 9) < 0.6}, {"heads": [3, 1], "batch": [2], "tokens": 5}),
    ({"attn_mask": torch.rand(9, 9) < 0.6}, {"heads": [3, 1], "batch": [2], "tokens": 5}),
    ({"attn_mask": (torch.arange(9) < 6).view(1, 1, 1, 9)}, {"batch": [2], "tokens": 5}),
]


@pytest.mark.parametrize(("arguments", "limits"), SELECTIONS)
def test_a_recorded_part_of_a_call_has_the_o_and_dq_of_the_whole_call(
    as_installed, arguments, limits
):
    """Computed by the float64 reference: a part has whole query rows and all keys that they attend
    to. Its sums have the same terms, but may add them in another order: 2**-53 each."""
    net = Attend(**arguments).double()
    whole, part = record(net), record(net, **limits)
    reference, found = (exact(c) for c in (whole, part))
    groups = whole.q.shape[1] // whole.k.shape[1]
    items = limits.get("batch", range(3))
    heads = [
        h * groups + g for h in limits.get("heads", range(whole.k.shape[1])) for g in range(groups)
    ]
    for name in ("o", "dq"):
        expected = getattr(reference, name)[list(items)][:, heads][:, :, : limits.get("tokens")]
        assert_within_bound(
            actual=getattr(found, name),
            exact=expected,
            bound=expected.norm() * 2.0**-48,
            what=name,
        )
        assert expected.any()


def test_layers_selects_the_calls():
    net = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, 0.0) for _ in range(4)))
    x = torch.randn(5, 1, 8)
    with capture(layers=[0, "2"]) as recording:
        net(x).sum().backward()
    found = [(call.index, call.name) for call in recording.result().calls]
    assert found == [(0, "0.self_attn"), (2, "2.self_attn")]


def test_model_selects_and_names_the_calls():
    mine, other = Attend(), Attend()
    whole = nn.ModuleDict({"other": other, "mine": nn.Sequential(mine)})
    with capture(whole["mine"]) as recording:
        for module in (other, mine):
            module().backward()
    (call,) = recording.result().calls
    assert (call.index, call.name) == (0, "0")
    assert_bitwise(actual=call.q, expected=mine.q.detach(), what="q")
    assert_bitwise(actual=call.do, expected=mine.o.grad, what="dO")
    with pytest.raises(RuntimeError, match="not in the given model"), capture(whole["mine"]):
        other().backward()


def test_unselected_calls_may_have_unsupported_arguments():
    q = torch.randn(1, 1, 4, 2, requires_grad=True)
    with capture(layers=[1]) as recording:
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4))
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert [call.index for call in recording.result().calls] == [1]


def test_checkpointing_changes_no_recorded_bit():
    layers = [nn.TransformerEncoderLayer(8, 2, 8, 0.0) for _ in range(2)]
    x = torch.randn(5, 1, 8, requires_grad=True)

    def run(call) -> Capture:
        with capture() as recording:
            call(layers[1], call(layers[0], x)).square().sum().backward()
        return recording.result()

    plain = run(lambda layer, x: layer(x))
    checkpointed = run(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert len(plain.calls) == len(checkpointed.calls) == 2
    for a, b in zip(plain.calls, checkpointed.calls, strict=True):
        for name in SITES:
            assert_bitwise(actual=getattr(b, name), expected=getattr(a, name), what=name)


def test_autocast_records_the_dtype_that_sdpa_computes_in():
    net = Attend()
    with torch.autocast("cpu", torch.bfloat16):
        call = record(net)
    assert net.q.dtype is torch.float32
    assert_bitwise(actual=call.q, expected=net.q.detach().bfloat16(), what="q")
    assert_bitwise(actual=call.do, expected=net.o.grad, what="do")
    assert call.do.dtype is torch.bfloat16


q4 = torch.zeros(1, 2, 4, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: F.scaled_dot_product_attention(q4, q4, q4, None, 0.1),
            ValueError,
            "dropout_p=0.1",
        ),
        (
            lambda: F.scaled_dot_product_attention(q4, q4, q4, torch.ones(4, 4)),
            ValueError,
            r"call 0: attn_mask is torch.float32 with other numbers than 0 and -inf",
        ),
        (
            lambda: F.scaled_dot_product_attention(q4[0], q4[0], q4[0]),
            ValueError,
            r"query has shape \(2, 4, 8\), not \[b, h, n, d\]",
        ),
        (
            lambda: F.scaled_dot_product_attention(q4.expand(3, 2, 4, 8), q4, q4),
            ValueError,
            r"call 0: batch axes of q and k differ: q \(3, 2, 4, 8\), k \(1, 2, 4, 8\)",
        ),
        (
            lambda: F.scaled_dot_product_attention(*[q4.detach()] * 3),
            RuntimeError,
            "call 0: its output needs no gradient",
        ),
        (lambda: None, RuntimeError, "nothing was recorded"),
    ],
)
def test_unsupported_calls_raise(make, error, message):
    with pytest.raises(error, match=message), capture():
        make()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"heads": []}, r"heads=\[\] selects nothing"),
        ({"batch": []}, r"batch=\[\] selects nothing"),
        ({"heads": [0, 4]}, r"call 0: heads=\[0, 4\] is out of range for size 4"),
        ({"batch": [-1]}, r"call 0: batch=\[-1\] is out of range for size 3"),
        (
            {"layers": [0, 7, "encoder"]},
            "no SDPA call matches 7, 'encoder'; the calls were SDPA call 0",
        ),
        ({"loss_scale": 3.0}, "loss_scale=3.0 is not a power of two"),
        ({"loss_scale": 0.0}, "loss_scale=0.0"),
        ({"loss_scale": "2"}, "loss_scale='2' is not a power of two"),
        ({"source": {"loss": float("nan")}}, "source is not JSON"),
        ({"source": {"path": Path()}}, "source is not JSON"),
        ({"source": {1: "one"}}, "source is not JSON: it would be read back as {'1': 'one'}"),
    ],
)
def test_invalid_arguments_of_capture_raise(as_installed, limits, message):
    with pytest.raises(ValueError, match=message):
        record(Attend(), **limits)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": "self_attn"}, "layers is 'self_attn'; it must be a collection of indices"),
        ({"layers": 0}, "layers is 0; it must be a collection of indices and names, or None"),
        ({"layers": [0.0]}, r"layers is \[0.0\]"),
        ({"heads": 1}, "heads is 1; it must be a sequence of integers, or None"),
        ({"heads": {1}}, "heads is {1}"),
        ({"batch": "01"}, "batch is '01'"),
        ({"batch": [0.0]}, r"batch is \[0.0\]"),
        ({"tokens": "5"}, "tokens is '5'; it must be an integer or None"),
        ({"tokens": 2.5}, "tokens is 2.5"),
        ({"model": "llama"}, "model is 'llama'; it must be a torch.nn.Module or None"),
    ],
)
def test_arguments_of_other_types_raise_before_the_model_runs(as_installed, given, message):
    with pytest.raises(TypeError, match=message), capture(**given):
        pytest.fail("the context was entered")


def test_heads_of_a_range_and_of_numpy_are_integers(as_installed):
    expected = record(Attend(), heads=[0, 1])
    for heads in (range(2), list(np.arange(2))):
        assert_bitwise(actual=record(Attend(), heads=heads).q, expected=expected.q, what="q")


def test_a_second_forward_raises():
    net = Attend()
    with pytest.raises(RuntimeError, match="call 0: made a second time"), capture():
        net()
        net()


def test_a_second_backward_raises():
    with capture():
        loss = Attend()()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="call 0: ran backward a second time"):
            loss.backward()


def test_gradients_that_are_not_finite_raise():
    with capture() as recording:
        (Attend()() * float("inf")).backward()
    with pytest.raises(ValueError, match="call 0: do holds NaN or Inf"):
        recording.result()


def test_an_exception_inside_the_context_is_propagated():
    with pytest.raises(KeyError), capture(layers=[5]):
        raise KeyError


class TestCall:
    def call(self, **changes) -> Call:
        q, k, do = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 6, 8), torch.ones(2, 4, 5, 3)
        fields = {
            "q": q,
            "k": k,
            "v": torch.ones(2, 2, 6, 3),
            "do": do,
            "attn_mask": torch.ones(2, 1, 5, 6, dtype=torch.bool),
            "is_causal": False,
            "scale": None,
            "enable_gqa": True,
            "index": 3,
            "name": "attend",
        }
        return Call(**(fields | changes))

    def test_a_valid_call_prints_its_index_and_module(self):
        assert str(self.call()) == "call 3 in attend"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"q": torch.ones(4, 5, 8)}, r"q has shape \(4, 5, 8\)"),
            ({"v": torch.ones(2, 2, 6, 3).half()}, "v is torch.float16, q is torch.float32"),
            ({"k": torch.full((2, 2, 6, 8), float("inf"))}, "k holds NaN or Inf"),
            ({"do": torch.ones(2, 4, 5, 8)}, "shapes do not fit: .*do"),
            ({"k": torch.ones(2, 2, 7, 8)}, "shapes do not fit"),
            ({"k": torch.ones(2, 2, 6, 4)}, "shapes do not fit"),
            ({"k": torch.ones(2, 3, 6, 8), "v": torch.ones(2, 3, 6, 3)}, "shapes do not fit"),
            ({"k": torch.ones(2, 0, 6, 8), "v": torch.ones(2, 0, 6, 3)}, "shapes do not fit"),
            ({"enable_gqa": False}, "shapes do not fit.*enable_gqa=False"),
            ({"attn_mask": torch.ones(2, 1, 5, 6)}, "attn_mask is torch.float32"),
            ({"is_causal": True}, "attn_mask and is_causal exclude each other"),
            (
                {"attn_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool)},
                r"attn_mask of shape \(2, 1, 5, 5\) does not broadcast to \(2, 4, 5, 6\)",
            ),
            ({"scale": float("nan")}, "scale is nan; it must be from"),
            ({"scale": 1e200}, "scale is 1e[+]200; it must be from"),
            ({"scale": "x"}, "scale is 'x'; it must be a number"),
            ({"q": None}, "q is None; it must be a torch.Tensor"),
            ({"do": np.ones((2, 4, 5, 3))}, "do is a numpy.ndarray"),
            ({"attn_mask": [[True]]}, "attn_mask is a builtins.list"),
            (
                dict.fromkeys("qk", torch.ones(2, 4, 5, 8).to(torch.float8_e4m3fn)),
                "q is torch.float8_e4m3fn; the emulator takes float16, bfloat16, float32, float64",
            ),
            ({"q": torch.ones(2, 4, 5, 8).int()}, "q is torch.int32; the emulator takes float16"),
            (
                {"sinks": torch.ones(4).to(torch.float8_e5m2)},
                "sinks is torch.float8_e5m2; the emulator takes",
            ),
        ],
    )
    def test_an_invalid_tensor_raises_and_is_named(self, as_installed, changes, message):
        with pytest.raises(ValueError, match=f"call 3 in attend: {message}"):
            self.call(**changes)

    @pytest.mark.parametrize("index", [-1, 2**31, True, 0.0])
    def test_an_index_out_of_range_raises(self, as_installed, index):
        with pytest.raises(ValueError, match=f"index {index} of a call is not in 0"):
            self.call(index=index)

    def test_a_name_with_control_characters_prints_in_one_line(self):
        call = self.call(name="a\x1b[2J\nb")
        assert str(call) == r"call 3 in a\x1b[2J\nb"
        assert call.title == r"3 a\x1b[2J\nb"

    def test_a_name_that_no_file_can_hold_raises(self):
        with pytest.raises(ValueError, match="is not Unicode text"):
            self.call(name="\ud800")

    def test_a_name_that_is_no_string_raises(self, as_installed):
        with pytest.raises(ValueError, match="name 3 of a call is not Unicode text"):
            self.call(name=3)


def small() -> Capture:
    """Two calls, one of them masked."""
    mask = (torch.arange(9) < 7).view(1, 1, 1, 9)
    calls = [record(Attend(is_causal=True, scale=2.0)), record(Attend(2, 1, attn_mask=mask))]
    return Capture(
        calls=(calls[0], dataclasses.replace(calls[1], index=1, name="b.c")),
        loss_scale=8.0,
        source={"model": "none", "sizes": [1, 2.5, None]},
        torch_version="2.13.0",
    )


def test_calls_of_equal_index_raise():
    first, second = small().calls
    with pytest.raises(ValueError, match=r"two calls have index 0: call 0 and call 0 in b\.c"):
        dataclasses.replace(small(), calls=(first, dataclasses.replace(second, index=0)))


class TestConversion:
    def converted(self, scale: float, dtype: torch.dtype = torch.float16) -> Call:
        call = small().calls[0]
        return dataclasses.replace(call, do=call.do * (scale / call.do.abs().max())).to(dtype)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_converts_by_rounding_to_nearest(self, dtype):
        before = small()
        after = before.to(dtype)
        for a, b in zip(before.calls, after.calls, strict=True):
            for name in SITES:
                assert_bitwise(
                    actual=getattr(b, name), expected=getattr(a, name).to(dtype), what=name
                )
            assert a.attn_mask is b.attn_mask
        assert (after.loss_scale, after.source) == (before.loss_scale, before.source)

    def test_overflow_raises(self):
        self.converted(65504.0)
        with pytest.raises(ValueError, match=r"call 0: do reaches 6.8e\+04, which overflows"):
            self.converted(68000.0)
        self.converted(68000.0, torch.bfloat16)

    def test_underflow_raises(self):
        """Below 2**-14 the numbers of float16 are 2**-24 apart. Rounding a gradient with an RMS of
        2**-16 makes an RMS error of 2**-24 / sqrt(12), 1e-3 of it; the limit, eps/2, is 5e-4."""
        self.converted(2.0**-10)
        for largest in (2.0**-14, 2.0**-20):
            with pytest.raises(ValueError, match=r"call 0: do underflows .*a larger loss scale"):
                self.converted(largest)
            self.converted(largest, torch.bfloat16)

    def test_underflow_of_one_head_alone_raises(self):
        call = small().calls[0]
        do = call.do.clone()
        do[1, 2] = 2.0**-26
        with pytest.raises(ValueError, match="changes by 1 of its norm, and 54 numbers become 0"):
            dataclasses.replace(call, do=do).to(torch.float16)

    def test_zeros_are_no_underflow(self):
        call = small().calls[0]
        zero = dataclasses.replace(call, do=torch.zeros_like(call.do)).to(torch.float16)
        assert not zero.do.any()


KEY = "sagesim.capture"


def contents(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """The metadata and the tensors of a file."""
    with safetensors.safe_open(path, "pt") as file:
        return json.loads(file.metadata()[KEY]), safetensors.torch.load_file(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, str, dict[str, Tensor]]:
    path = tmp_path_factory.mktemp("saved") / "a"
    small().save(path)
    metadata, tensors = contents(path)
    return path, json.dumps(metadata), tensors


HOSTILE = st.one_of(
    st.sampled_from([None, True, -1, 0, 1, 2**63, 2**2000, 10**400, -0.0, 1e-320, 2.0**-1074]),
    st.floats(),
    st.integers(),
    st.text(max_size=6),
    st.sampled_from(["\ud800", "\x1b[2J", "a\nb", "\x00", "\u202e", "float32"]),
    st.recursive(st.none(), lambda x: st.lists(x, max_size=3), max_leaves=5),
    st.sampled_from(["@deep", "@very deep"]),
)


def mutate(value: dict | list, data) -> None:
    """Change a value at a random place of a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(value[key], dict | list) and data.draw(st.booleans()):
            value = value[key]
            continue
        match data.draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                value[key] = data.draw(HOSTILE)
            case "remove":
                del value[key]
            case "add" if isinstance(value, dict):
                value[data.draw(st.text(max_size=3))] = data.draw(HOSTILE)
            case _:
                value.append(value[key])
        return


class TestFile:
    def test_load_returns_what_save_wrote(self, tmp_path):
        before = small()
        before.save(tmp_path / "a.safetensors")
        after = Capture.load(tmp_path / "a.safetensors")
        assert (after.loss_scale, after.torch_version) == (8.0, "2.13.0")
        assert after.source == before.source
        assert len(after.calls) == 2
        for a, b in zip(before.calls, after.calls, strict=True):
            for field in dataclasses.fields(Call):
                x, y = getattr(a, field.name), getattr(b, field.name)
                assert torch.equal(x, y) if isinstance(x, Tensor) else x == y, field.name
                assert type(x) is type(y)

    def test_equal_captures_give_equal_bytes(self, tmp_path):
        before = small()
        before.save(tmp_path / "a")
        backwards = dict(reversed(before.source.items()))
        dataclasses.replace(before, source=backwards).save(tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_half_precision_is_kept(self, tmp_path):
        before = small().to(torch.float16)
        before.save(tmp_path / "a")
        after = Capture.load(str(tmp_path / "a"))
        assert_bitwise(actual=after.calls[0].do, expected=before.calls[0].do, what="do")

    def test_tensors_may_share_memory_and_have_any_strides(self, tmp_path):
        x = torch.randn(1, 5, 2, 4).transpose(1, 2)
        call = dataclasses.replace(small().calls[0], q=x, k=x, v=x, do=x[:, :1].expand(1, 2, 5, 4))
        dataclasses.replace(small(), calls=(call,)).save(tmp_path / "a")
        assert_bitwise(actual=Capture.load(tmp_path / "a").calls[0].do, expected=call.do, what="do")

    def test_a_failed_save_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "a"
        path.write_bytes(b"old")

        def fails(*_):
            raise OSError("disk full")

        monkeypatch.setattr(Path, "replace", fails)
        with pytest.raises(OSError, match="disk full"):
            small().save(path)
        assert [p.name for p in tmp_path.iterdir()] == ["a"]
        assert path.read_bytes() == b"old"

    def test_a_missing_file_raises(self, tmp_path):
        with pytest.raises(ValueError, match="nothing: no such file"):
            Capture.load(tmp_path / "nothing")

    def test_a_name_that_no_file_can_have_raises(self, tmp_path):
        with pytest.raises(ValueError, match="aaa: cannot be read: File name too long"):
            Capture.load(tmp_path / ("a" * 300))

    def test_a_directory_raises_and_names_the_command_that_makes_a_capture(self, tmp_path):
        with pytest.raises(ValueError, match="a directory, not a capture; `sagesim capture` makes"):
            Capture.load(tmp_path)

    @pytest.mark.parametrize("data", [b"", b"not a safetensors file", b"\x80\x04}."])
    def test_a_file_that_is_not_safetensors_raises(self, tmp_path, data):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(ValueError, match="a: not a readable safetensors file"):
            Capture.load(tmp_path / "a")

    def test_a_truncated_file_raises(self, tmp_path):
        small().save(tmp_path / "a")
        (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-10])
        with pytest.raises(ValueError, match="a: not a readable safetensors file"):
            Capture.load(tmp_path / "a")

    def test_a_safetensors_file_that_is_not_a_capture_raises(self, tmp_path):
        safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "a")
        with pytest.raises(ValueError, match="a: not a capture: its metadata have no key"):
            Capture.load(tmp_path / "a")

    def test_every_option_survives(self, tmp_path):
        q, k, v, do = torch.randn(4, 2, 3, 7, 8)
        call = Call(
            q=q,
            k=k,
            v=v,
            do=do,
            index=0,
            name="a",
            causal_alignment="lower_right",
            window=(3, 1),
            key_mask=torch.arange(7) < torch.tensor([[5], [7]]),
            sinks=torch.randn(3),
            softcap=20.0,
        )
        before = Capture(calls=(call,), loss_scale=1.0, source={}, torch_version="2.13.0")
        before.save(tmp_path / "a.safetensors")
        (after,) = Capture.load(tmp_path / "a.safetensors").calls
        for name, value in call.options.items():
            found = getattr(after, name)
            same = torch.equal(found, value) if isinstance(value, Tensor) else found == value
            assert same, name

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (
                lambda m, t: m.update(version=3),
                "version 3 of the format; this sagesim reads 1 to 2",
            ),
            (lambda m, t: m.pop("version"), "field 'version' is None"),
            (lambda m, t: m.pop("source"), "field 'source' is None"),
            (lambda m, t: m.update(torch=2.13), "field 'torch' is 2.13"),
            (lambda m, t: m.update(loss_scale=True), "field 'loss_scale' is True"),
            (lambda m, t: m.update(loss_scale=5.0), "loss_scale=5.0 is not a power of two"),
            (lambda m, t: m.update(calls={}), "field 'calls' is {}"),
            (
                lambda m, t: m["calls"].pop(),
                "tensors that belong to no call: 1.do, 1.k, 1.key_mask",
            ),
            (lambda m, t: m.update(calls=[]) or t.clear(), "a capture needs at least one call"),
            (lambda m, t: m["calls"][1].pop("name"), "field 'name' is None"),
            (lambda m, t: m["calls"][1].update(index=0), "two calls have index 0"),
            (lambda m, t: m["calls"][1].update(index=True), "field 'index' is True"),
            (lambda m, t: m["calls"][1].update(index=-1), "index -1 of a call is not"),
            (lambda m, t: m["calls"][1].update(name="\ud800"), "is not Unicode text"),
            (lambda m, t: m["calls"][1].update(scale=10**400), "'scale' is beyond the range"),
            (lambda m, t: m["calls"][1].pop("scale"), "field 'scale' is None"),
            (lambda m, t: m["calls"][1].update(scale=float("inf")), "contain Infinity"),
            (
                lambda m, t: m.update(loss_scale=2**2000),
                "'loss_scale' is beyond the range of float64",
            ),
            (lambda m, t: m.update(source={"x": float("nan")}), "contain NaN, which is not JSON"),
            (lambda m, t: m.update(source={"x": "\ud800"}), "source is not JSON"),
            (lambda m, t: m.update(torch="\ud800"), "torch_version .* is not Unicode text"),
            (lambda m, t: m["calls"][1].update(is_causal=0), "field 'is_causal' is 0"),
            (lambda m, t: m["calls"].append("x"), "field 'tensors' is None"),
            (lambda m, t: t.pop("1.key_mask"), "tensor 1.key_mask is missing"),
            (lambda m, t: t.update({"0.x": torch.ones(1)}), "belong to no call: 0.x"),
            (lambda m, t: t.update({"0.q": t["0.q"][:1]}), r"tensor 0.q is .*1, 4, 9, 8.*say"),
            (lambda m, t: t.update({"0.k": t["0.k"].double()}), "tensor 0.k is .*float64.*say"),
            (lambda m, t: t["1.do"].fill_(float("nan")), "call 1 in b.c: do holds NaN or Inf"),
            (lambda m, t: t["0.v"].fill_(float("inf")), "call 0: v holds NaN or Inf"),
            (
                lambda m, t: m["calls"][0]["tensors"].pop("do") and t.pop("0.do"),
                "call 0 has tensors k, q, v; it needs q, k, v, do and may have attn_mask",
            ),
        ],
    )
    def test_invalid_contents_raise_and_are_named(self, tmp_path, edit, message):
        path = tmp_path / "a.safetensors"
        small().save(path)
        metadata, tensors = contents(path)
        edit(metadata, tensors)
        safetensors.torch.save_file(tensors, path, {KEY: json.dumps(metadata)})
        with pytest.raises(ValueError, match=f"a.safetensors: .*{message}"):
            Capture.load(path)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_a_dtype_that_the_emulator_does_not_take_raises(self, tmp_path, dtype):
        path = tmp_path / "a.safetensors"
        small().save(path)
        metadata, tensors = contents(path)
        for name in SITES:
            tensors[f"0.{name}"] = tensors[f"0.{name}"].to(dtype)
            described = metadata["calls"][0]["tensors"][name]
            described["dtype"] = str(dtype).removeprefix("torch.")
        safetensors.torch.save_file(tensors, path, {KEY: json.dumps(metadata)})
        with pytest.raises(ValueError, match=f"a.safetensors: call 0: q is {dtype}; the emulator"):
            Capture.load(path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"version": 1, "version": 1}', "metadata field 'version' is there twice"),
            ("[" * 100_000, "nested too deeply"),
            ('{"a":' * 100_000, "nested too deeply"),
        ],
    )
    def test_metadata_that_readers_may_read_differently_raise(self, tmp_path, text, message):
        safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "a", {KEY: text})
        with pytest.raises(ValueError, match=f"a: .*{message}"):
            Capture.load(tmp_path / "a")

    @examples(60)
    @given(st.data())
    def test_any_change_of_the_metadata_loads_or_raises_in_one_line(self, saved, data):
        """Replaces a value somewhere in the metadata, removes it, or adds one."""
        path, text, tensors = saved
        metadata = json.loads(text)
        for _ in range(data.draw(st.integers(1, 3))):
            mutate(metadata, data)
        text = json.dumps(metadata)
        for word, depth in (("@deep", 300), ("@very deep", 100_000)):
            text = text.replace(f'"{word}"', "[" * depth + "]" * depth)
        safetensors.torch.save_file(tensors, path, {KEY: text})
        try:
            found = Capture.load(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}: ")
            assert str(error).isprintable()
        else:
            found.save(path)
            assert Capture.load(path).source == found.source
            assert all(str(call).isprintable() for call in found.calls)

    @pytest.mark.parametrize("text", ["{", "[]", "null"])
    def test_metadata_that_are_not_a_json_object_raise(self, tmp_path, text):
        safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "a", {KEY: text})
        with pytest.raises(ValueError, match="a: "):
            Capture.load(tmp_path / "a")

    def test_source_is_read_only(self):
        with pytest.raises(TypeError):
            small().source["model"] = "another"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_an_equal_capture(copied):
    before = small()
    after = copied(before)
    assert after.source == before.source and after.loss_scale == before.loss_scale
    for one, other in zip(after.calls, before.calls, strict=True):
        assert one.q.data_ptr() != other.q.data_ptr()
        assert_bitwise(actual=one.q, expected=other.q, what="q")
    with pytest.raises(TypeError):
        after.source["model"] = "another"


def test_a_scale_of_another_type_of_number_is_saved(as_installed, tmp_path):
    call = dataclasses.replace(record(Attend()), scale=np.float32(0.5))
    made = Capture(calls=(call,), loss_scale=1.0, source={}, torch_version="2.0")
    made.save(tmp_path / "made.safetensors")
    assert Capture.load(tmp_path / "made.safetensors").calls[0].scale == 0.5
