"""What every integration calls: memory of the output, empty batches, and checks of packing."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sagesim
from sagesim_kernels.integrations import attend
from sagesim_kernels.integrations.torch import Functions
from sagesim_kernels.integrations.transformers.attention import LayerAttention
from tests.support.assertions import assert_bitwise

OURS = Functions()


def cu(*ends: float, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(ends, dtype=dtype)


@pytest.fixture(params=["emulator", "kernels"])
def computed_by(request, monkeypatch):
    monkeypatch.setattr(attend, "uses_kernels", lambda q: request.param == "kernels")


CALLS: dict[str, dict[str, Any]] = {
    "dense": {"attention_mask": None},
    "padded": {"attention_mask": torch.arange(6) >= torch.tensor([[0], [2]])},
    "not causal": {"attention_mask": (torch.arange(6) < torch.tensor([[3], [6]]))[:, None]},
    "packed": {"attention_mask": cu(0, 4, 12)},
    "cu_seq_lens": {
        "attention_mask": None,
        "cu_seq_lens_q": cu(0, 4, 12),
        "cu_seq_lens_k": cu(0, 4, 12),
        "max_length_q": 8,
        "max_length_k": 8,
    },
}


@pytest.mark.parametrize("call", CALLS)
def test_the_output_of_a_layer_is_contiguous(call, computed_by):
    """JetMoE and AFMoE join the heads by `view`."""
    x = torch.randn(2, 6, 2, 16, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    o, _ = LayerAttention("sagebwd", sagesim.FACTORED_QK)(nn.Module(), x, x, x, **CALLS[call])
    assert o.shape == (2, 6, 2, 16)
    assert o.is_contiguous()


@pytest.mark.parametrize("tokens_first", [False, True])
def test_both_layouts_are_contiguous_and_have_the_same_bits(tokens_first, computed_by):
    q, k, v = torch.randn(3, 2, 2, 6, 16, generator=torch.Generator().manual_seed(0))
    expected = attend.attend(q, k, v, attend.Options())
    if tokens_first:
        transposed = (x.transpose(1, 2) for x in (q, k, v))
        o = attend.attend(*transposed, attend.Options(), tokens_first=True)
        assert_bitwise(actual=o.transpose(1, 2), expected=expected, what="o")
    else:
        o = expected
    assert o.is_contiguous()


def test_an_empty_batch_has_an_empty_output_in_the_graph(computed_by):
    """Both with a mask, which packs the batch, and packed."""
    x = torch.randn(0, 4, 9, 16).requires_grad_()
    mask = torch.ones(0, 1, 1, 9, dtype=torch.bool)
    packed = torch.randn(0, 4, 16).requires_grad_()
    for leaf, o in (
        (x, OURS.sdpa(x, x, x, attn_mask=mask)),
        (packed, OURS.flash_attn_varlen_func(packed, packed, packed, cu(0), cu(0), 0, 0)),
    ):
        assert o.shape == leaf.shape
        o.sum().backward()
        assert leaf.grad.shape == leaf.shape


SHAPES = {
    "flash_attn_func": ([(9, 4, 8), (1, 1, 9, 4, 8)], "[batch, tokens, heads, head size]"),
    "flash_attn_varlen_func": ([(9, 8), (1, 9, 4, 8)], "[tokens, heads, head size]"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_other_axes_and_what_is_no_tensor_are_refused(name):
    function, (shapes, needed) = getattr(OURS, name), SHAPES[name]
    packing = (cu(0, 9), cu(0, 9), 9, 9) if "varlen" in name else ()
    for shape in shapes:
        x = torch.randn(shape)
        message = f"q has shape {shape}; {name} needs {needed}"
        with pytest.raises(ValueError, match=re.escape(message)):
            function(x, x, x, *packing)
    x = torch.randn(1, 9, 4, 8)
    x = x[0] if packing else x
    with pytest.raises(ValueError, match=re.escape(f"v has shape {tuple(x[0].shape)}")):
        function(x, x, x[0], *packing)
    with pytest.raises(TypeError, match=r"k is None; it must be a torch\.Tensor"):
        function(x, None, x, *packing)


PACKINGS: dict[str, tuple[Any, Any, int]] = {
    r"cu_seqlens_q is torch\.float32": (cu(0, 3.9, 9, dtype=torch.float32), cu(0, 3, 9), 9),
    r"cu_seqlens_k is torch\.int16": (cu(0, 9), cu(0, 9, dtype=torch.int16), 9),
    r"cu_seqlens_q is .* of shape \(1, 2\)": (cu(0, 9)[None], cu(0, 9), 9),
    r"cu_seqlens_q is \[0, 9\]; it must be a tensor": ([0, 9], cu(0, 9), 9),
    r"cu_seqlens_q must ascend from 0 .* got \[1, 4, 10\]": (cu(1, 4, 10), cu(0, 3, 9), 9),
    r"cu_seqlens_k must ascend .* got \[0, 6, 4, 9\]": (cu(0, 3, 6, 9), cu(0, 6, 4, 9), 9),
    r"cu_seqlens_q .* for 9 tokens": (cu(0, 8), cu(0, 9), 9),
    r"max_seqlen_q=3": (cu(0, 9), cu(0, 9), 3),
    r"the same number of sequences": (cu(0, 6, 9), cu(0, 9), 9),
}


@pytest.mark.parametrize("message", PACKINGS)
def test_packing_is_checked(message, computed_by):
    cu_q, cu_k, longest = PACKINGS[message]
    q = k = v = torch.randn(9, 4, 16)
    with pytest.raises((TypeError, ValueError), match=message):
        OURS.flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest, 9)


def test_packed_tensors_are_checked():
    q, k, v = torch.randn(3, 9, 4, 8)
    with pytest.raises(ValueError, match="k and v differ in heads or tokens"):
        OURS.flash_attn_varlen_func(q, k, v[:5], cu(0, 9), cu(0, 9), 9, 9)


def test_packing_may_be_int64(computed_by):
    q, k, v = torch.randn(3, 9, 4, 16, generator=torch.Generator().manual_seed(0))
    found, expected = (
        OURS.flash_attn_varlen_func(q, k, v, ends, ends, 6, 6)
        for ends in (cu(0, 3, 9, dtype=torch.int64), cu(0, 3, 9))
    )
    assert_bitwise(actual=found, expected=expected, what="o")
