"""Whether a call pays off, from a table of measured calls with known ratios."""

import math
from types import SimpleNamespace

import pytest
import torch

from sagesim.spec import FACTORED_QK, SAGEBWD
from sagesim_kernels import measured_speed, pays_off
from sagesim_kernels.measured_speed import call_shape, expected

GPU = "Fake 1"


def call(q, k, is_causal, wall, gpu):
    batch, heads, queries, d = q
    kv_heads, keys = k[1:3]
    shape = {
        "batch": batch,
        "heads": heads,
        "queries": queries,
        "head_size": d,
        "kv_heads": kv_heads,
        "keys": keys,
        "is_causal": is_causal,
    }
    of_spec = ({"factored_qk": x} for x in (wall, gpu))
    return {"record": 0, "shape": shape, **dict(zip(("wall", "gpu"), of_spec, strict=True))}


def square(q, is_causal, wall, gpu=1.0):
    return call(q, q, is_causal, wall, gpu)


CALLS = {
    "few": square((8, 16, 512, 64), True, 0.5, 0.9),
    "many": square((2, 32, 4096, 64), True, 1.2, 1.3),
    "grouped": call((2, 32, 4096, 64), (2, 8, 4096, 64), True, 1.1, 1.1),
    "80": square((4, 16, 4096, 80), False, 0.8) | {"record": 1},
    "96": square((4, 16, 4096, 96), False, 1.0),
}
RECORDS = [{"machine": f"Fake 1, torch 2.{i}", "command": "c"} for i in range(2)]
TABLE = {GPU: {"records": RECORDS, "dtype": "bfloat16", "calls": CALLS}}


def ask(q, k=None, *, is_causal=False, host=True, table=TABLE, gpu=GPU, dtype=torch.bfloat16):
    shape = call_shape(q, q if k is None else k, is_causal)
    return expected(table, gpu, shape, "factored_qk", dtype, includes_host=host)


def test_a_measured_call_has_its_own_ratio():
    found = ask((2, 32, 4096, 64), is_causal=True)
    assert found.ratio == pytest.approx(1.2) and found.neighbours == {"many": 1.2}
    assert found and found.includes_host and found.machine == "Fake 1, torch 2.0"
    assert str(found) == (
        "1.20 times as fast as PyTorch's attention, time with the host's, from 1 measured calls on "
        "Fake 1, torch 2.0"
    )
    alone = ask((8, 16, 512, 64), is_causal=True, host=False)
    assert alone.ratio == pytest.approx(0.9) and not alone and not alone.includes_host


def test_the_machine_is_that_of_the_records_of_the_neighbours():
    of_one = {1: "Fake 1, torch 2.1", 0: "Fake 1, torch 2.0"}
    assert ask((4, 16, 4096, 80)).machine == of_one[1]
    assert ask((4, 16, 4096, 96)).machine == of_one[0]
    both = f"{of_one[0]}; {of_one[1]}"
    assert ask((4, 16, 4096, 88)).machine == both
    assert ask((64, 32, 4096, 64)).machine == both, "no neighbour, so all records"


def test_between_measured_calls_logarithms_are_weighted_by_the_inverse_square_of_the_distance():
    found = ask((4, 16, 4096, 88))
    assert set(found.neighbours) == {"80", "96"}

    def distance(d):  # work counts half an octave, head sizes four times
        octaves = abs(math.log2(88 / d))
        return math.hypot(octaves / 2, octaves / 0.25)

    weights = [distance(d) ** -2 for d in (80, 96)]
    mean = (weights[0] * math.log(0.8) + weights[1] * math.log(1.0)) / sum(weights)
    assert found.ratio == pytest.approx(math.exp(mean)) and 0.8 < found.ratio < 1.0


@pytest.mark.parametrize(
    "q",
    [
        (1, 32, 4096, 64),  # half the work
        (8, 32, 4096, 64),  # four times the work
        (8, 32, 2048, 64),  # half as many tokens
        (1, 2, 3, 32, 4096, 64),  # more leading axes
        (2, 32, 4096, 56),
    ],
)
def test_near_a_measured_call(q):
    assert ask(q, is_causal=True).neighbours == {"many": 1.2}


@pytest.mark.parametrize(
    ("q", "k", "is_causal"),
    [
        ((2, 32, 4096, 64), None, False),  # another mask
        ((2, 32, 4096, 64), (2, 32, 2048, 64), True),  # causal over other numbers of keys
        (
            (2, 32, 1024 + 512, 64),
            None,
            True,
        ),  # between two measured calls
        ((64, 32, 4096, 64), None, True),  # much more work
        ((2, 32, 4096, 32), None, True),  # half the head size
        ((2, 32, 4096, 72), None, True),  # another class of head sizes
        ((4, 16, 4096, 80), (4, 4, 4096, 80), False),  # grouped, and only ungrouped was measured
        ((4, 16, 4096, 80), (4, 16, 1024, 80), False),  # fewer keys
    ],
)
def test_far_from_every_measured_call_nothing_is_known(q, k, is_causal):
    found = ask(q, k, is_causal=is_causal)
    assert found.ratio is None and not found and found.neighbours == {}
    assert str(found).startswith("not measured: no measured call is near CallShape(batch=")


def test_without_measurements_nothing_is_known():
    found = ask((2, 32, 4096, 64), is_causal=True, table={})
    assert found.ratio is None and found.machine is None
    assert str(found) == "not measured: the table has measurements of no GPU, none of Fake 1"


def test_another_gpu_dtype_or_spec_is_not_known():
    q = (2, 32, 4096, 64)
    assert "measurements of Fake 1, none of Fake 2" in str(ask(q, is_causal=True, gpu="Fake 2"))
    half = ask(q, is_causal=True, dtype=torch.float16)
    assert half.reason == "torch.float16; the measured calls are in bfloat16"
    shape = call_shape(q, q, True)
    other = expected(TABLE, GPU, shape, "sagebwd", torch.bfloat16, includes_host=True)
    assert other.reason == "spec 'sagebwd' was not measured" and other.ratio is None


@pytest.mark.parametrize(
    ("q", "k", "words"),
    [
        ((4096, 64), (4096, 64), r"q has shape \(4096, 64\)"),
        ((1, 8, 0, 64), (1, 8, 4, 64), r"q has shape \(1, 8, 0, 64\)"),
        ((1, 8, 4, 64), (2, 8, 4, 64), "leading axes"),
        ((1, 8, 4, 64), (1, 8, 4, 32), "head size"),
        ((1, 8, 4, 64), (1, 3, 4, 64), "multiple"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, words):
    with pytest.raises(ValueError, match=words):
        pays_off(q, k)


@pytest.fixture
def a_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda chosen: asked.append(chosen) or SimpleNamespace(name=GPU),
    )
    monkeypatch.setattr(measured_speed, "_table", lambda: TABLE)
    return asked


def test_the_public_function(a_gpu):
    shape = torch.Size((2, 32, 4096, 64))
    assert pays_off(shape, is_causal=True).ratio == pytest.approx(1.2)
    assert pays_off(shape, is_causal=True, host=False, device=1).ratio == pytest.approx(1.3)
    grouped = pays_off(shape, (2, 8, 4096, 64), is_causal=True, device="cuda:2")
    assert grouped.ratio == pytest.approx(1.1)
    assert a_gpu == [None, torch.device("cuda", 1), torch.device("cuda", 2)]
    assert pays_off(shape, spec=FACTORED_QK, is_causal=True)
    assert pays_off(shape, spec=SAGEBWD, is_causal=True).reason == "spec 'sagebwd' was not measured"
    with pytest.raises(TypeError):
        pays_off(shape, spec="factored_qk")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"q_shape": 5}, "q_shape is 5"),
        ({"q_shape": "abcd"}, "q_shape is 'abcd'"),
        ({"q_shape": (1, 2, 128.5, 64)}, r"q_shape is \(1, 2, 128.5, 64\)"),
        ({"k_shape": (1, 2, None, 64)}, r"k_shape is \(1, 2, None, 64\)"),
        ({"is_causal": "yes"}, "is_causal is 'yes'"),
        ({"host": 1}, "host is 1"),
        ({"dtype": "bf16"}, "dtype is 'bf16'"),
    ],
)
def test_arguments_of_other_types(given, words):
    with pytest.raises(TypeError, match=words):
        pays_off(**{"q_shape": (1, 2, 128, 64)} | given)


def test_other_devices_and_machines_without_a_gpu_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="CUDA devices, not cpu"):
        pays_off((1, 8, 128, 64), device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="PyTorch sees none"):
        pays_off((1, 8, 128, 64))
