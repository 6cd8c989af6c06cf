import pytest
import torch

from sagesim._attention import attention
from sagesim._exact import exact
from sagesim.captured import Capture
from sagesim.data import MINILM
from sagesim.presets import FPA
from tests.support.assertions import assert_sqnr_at_least


@pytest.fixture(scope="module")
def minilm() -> Capture:
    return Capture.load(MINILM)


def test_is_at_most_8_mb():
    assert MINILM.stat().st_size <= 8_000_000


def test_says_where_it_comes_from(minilm):
    assert set(minilm.source) == {
        "captured",
        "command",
        "loss",
        "model",
        "precision",
        "text",
        "token_ids_sha256",
        "topic",
        "transformers",
        "weights",
    }
    assert "Apache-2.0" in minilm.source["model"]
    assert "PSF-2.0" in minilm.source["text"]
    assert minilm.loss_scale == 2.0**16
    assert minilm.torch_version


def test_holds_every_layer_and_head(minilm):
    assert [call.index for call in minilm.calls] == list(range(6))
    for call in minilm.calls:
        assert call.name == f"encoder.layer.{call.index}.attention.self"
        assert (call.is_causal, call.attn_mask, call.enable_gqa) == (False, None, False)
        for name in ("q", "k", "v", "do"):
            x = getattr(call, name)
            assert x.shape == (1, 12, 256, 32)
            assert x.dtype is torch.float16


def test_float16_holds_its_gradients_well(minilm):
    """Every token's dO in every head is far above float16's smallest normal number, 2**-14."""
    for call in minilm.calls:
        rms = call.do.float().square().mean(-1).sqrt()
        assert rms.min() > 2.0**-10
        assert call.do.abs().max() < 2.0**10


def test_is_a_problem_that_the_emulator_solves(minilm):
    """Unquantized, in float32, two heads of each layer: 60 dB is a thousandth, where float32 errs
    by a millionth."""
    for call in minilm.calls:
        q, k, v, do = (x[:, 5:7].float() for x in (call.q, call.k, call.v, call.do))
        reference = exact(q, k, v, do, **call.options)
        for x in (q, k, v):
            x.requires_grad_()
        o = attention(q, k, v, spec=FPA, **call.options)
        o.backward(do)
        for name, found in (("o", o), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
            assert_sqnr_at_least(
                actual=found, exact=getattr(reference, name), floor_db=60.0, what=name
            )
