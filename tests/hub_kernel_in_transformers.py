"""transformers trains by the hub kernel that LOCAL_KERNELS names; test_hub_kernel.py runs this."""

from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
import transformers

from sagesim_kernels.integrations.transformers import register, unregister
from tests.sagesim_kernels.integrations.models import TOKENS, model, results, tokens
from tests.support.assertions import assert_bitwise

NAME = "sagebwd/attention"


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    unregister()


def test_transformers_is_the_one_that_was_installed_for_this():
    assert ".hub" in Path(transformers.__file__).parts
    assert kernels.__version__.startswith("0.17.")


PADDING = torch.ones(2, TOKENS, dtype=torch.long)
PADDING[0, :5] = 0
CALLS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "llama"},
    "padded": {"kind": "llama", "attention_mask": PADDING},
    "window and padding": {"kind": "mistral", "attention_mask": PADDING},
    "packed": {  # in one row: transformers sees no packing in several
        "kind": "llama",
        "input_ids": tokens(1),
        "labels": tokens(1),
        "position_ids": torch.tensor([[*range(5), *range(TOKENS - 5)]]),
        "use_cache": False,
    },
    "softcap": {"kind": "gemma2"},
    "sinks and window": {"kind": "gpt_oss"},
    "both directions": {"kind": "bert", "attention_mask": PADDING},
}


@pytest.mark.parametrize("call", CALLS)
def test_it_trains_as_with_the_registered_name(call):
    inputs = {"input_ids": tokens(), "labels": tokens(), **CALLS[call]}
    if "attention_mask" in inputs:
        inputs["labels"] = tokens().masked_fill(PADDING == 0, -100)
    kind = inputs.pop("kind")
    expected = results(model(kind, "sagebwd"), **inputs)
    actual = results(model(kind, NAME), **inputs)
    assert actual.keys() == expected.keys()
    kept = PADDING.bool() if "attention_mask" in inputs else ...
    for name in expected:
        pick = kept if name == "logits" else ...
        assert_bitwise(actual=actual[name][pick], expected=expected[name][pick], what=name)


def test_dropout_is_refused():
    trained = model("bert", NAME, attention_probs_dropout_prob=0.1).train()
    with pytest.raises(ValueError, match=r"dropout_p is 0\.1"):
        trained(tokens())


def test_output_attentions_is_dropped_before_it():
    """What the docs say: transformers does not pass it."""
    assert model("llama", NAME)(tokens(), output_attentions=True).logits.shape[1] == TOKENS
