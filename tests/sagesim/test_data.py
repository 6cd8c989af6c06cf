import json

import pytest
import torch

from sagesim.data import LLAMA
from sagesim.emulator import attention, exact
from sagesim.models import Capture
from sagesim.spec import FPA
from tests.support.assertions import assert_sqnr_at_least


@pytest.fixture(scope="module")
def llama() -> Capture:
    return Capture.load(LLAMA)


def test_is_at_most_8_mb():
    assert LLAMA.stat().st_size <= 8_000_000


def test_says_where_it_comes_from(llama):
    assert set(llama.source) == {
        "captured",
        "command",
        "data",
        "loss",
        "loss scale",
        "model",
        "run",
    }
    assert json.loads(llama.source["run"])["attention"] == "kernels:sagebwd"
    assert llama.loss_scale == 2.0**16
    assert llama.torch_version


def test_holds_a_head_of_every_layer(llama):
    assert [call.index for call in llama.calls] == list(range(6))
    for call in llama.calls:
        assert call.name == f"layers.{call.index}.attention.core"
        assert (call.is_causal, call.attn_mask, call.enable_gqa) == (True, None, False)
        for name in ("q", "k", "v", "do"):
            x = getattr(call, name)
            assert x.shape == (1, 1, 2048, 64)
            assert x.dtype is torch.bfloat16


def test_float16_holds_its_gradients_well(llama):
    """The loss scale is large enough, and not too large: what float16 changes is less than what
    bfloat16 has rounded away."""
    for call in llama.calls:
        changed = (call.do.half().double() - call.do.double()).norm() / call.do.double().norm()
        assert changed < 2.0**-20
        assert call.do.abs().max() < 2.0**10


def test_is_a_problem_that_the_emulator_solves(llama):
    """Unquantized, in float32: 60 dB is a thousandth, where float32 errs by a millionth."""
    for call in llama.calls:
        short = call.map(lambda x: x[:, :, :512].float())
        reference = exact(short)
        q, k, v, do = short.qkvdo
        for x in (q, k, v):
            x.requires_grad_()
        o = attention(short, spec=FPA)
        o.backward(do)
        for name, found in (("o", o), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
            assert_sqnr_at_least(
                actual=found, exact=getattr(reference, name), floor_db=60.0, what=name
            )
