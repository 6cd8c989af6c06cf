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


def test_the_file_has_at_most_8_mb():
    assert LLAMA.stat().st_size <= 8_000_000


def test_the_file_records_its_source(llama):
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


def test_the_file_holds_one_head_of_every_layer(llama):
    assert [call.index for call in llama.calls] == list(range(6))
    for call in llama.calls:
        assert call.name == f"layers.{call.index}.attention.core"
        assert (call.is_causal, call.attn_mask, call.enable_gqa) == (True, None, False)
        for name in ("q", "k", "v", "do"):
            x = getattr(call, name)
            assert x.shape == (1, 1, 2048, 64)
            assert x.dtype is torch.bfloat16


def test_float16_represents_the_gradients(llama):
    """The loss scale is neither too small nor too large for float16.

    The conversion to float16 changes do by much less than bfloat16's rounding, 2**-9.
    """
    for call in llama.calls:
        changed = (call.do.half().double() - call.do.double()).norm() / call.do.double().norm()
        assert changed < 2.0**-20
        assert call.do.abs().max() < 2.0**10


def test_the_emulator_agrees_with_exact_on_every_call(llama):
    """Unquantized in float32, with an SQNR of at least 60 dB, an error of a thousandth."""
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
