"""aten's FlashAttention is computed by the kernels inside the context, and only there.

On a CPU, PyTorch has no FlashAttention of these operators; the tests install the kernels there and
call the operators as autograd and ring attention do.
"""

import functools
import importlib
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

import sagesim
from sagesim_kernels.integrations.torch import Functions
from sagesim_kernels.integrations.torch_flash import flash_attention
from sagesim_kernels.labels import label_of
from sagesim_kernels.ops import Call, backward_op, forward_op
from tests.support.assertions import assert_bitwise, assert_within_budget
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

ATEN = torch.ops.aten
SPEC = sagesim.SAGEBWD
"""INT8 with K smoothed and delta from O."""
here = functools.partial(flash_attention, device=DEVICE.upper())
GQA = (4, 2)


def draw(n_q: int, n_k: int, *, batch: int = 2) -> tuple[Tensor, ...]:
    """q, k, v and do [batch, heads, tokens, 16], with keys whose mean is far from 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(GQA[0], n_q), (GQA[1], n_k), (GQA[1], n_k), (GQA[0], n_q)]
    q, k, v, do = (torch.randn(batch, *s, 16, generator=generator) for s in shapes)
    return tuple(x.to(DEVICE) for x in (q, k + 2.0, v, do))


def ours(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool) -> list[Tensor]:
    """o, lse, dq, dk and dv of the kernels' own operators."""
    call = Call(
        *(None,) * 8,
        label_of(SPEC),
        0.25,
        causal,
        False,
        left=-1,
        right=-1,
        softcap=None,
    )
    o, lse, lse2, k_mean = forward_op(q, k, v, *call, True)
    return [o, lse, *backward_op(do, None, q, k, v, o, lse2, k_mean, *call)[:3]]


def aten(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool) -> list[Tensor]:
    """The same of SDPA's operator and its derivative."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with here(SPEC):
        o, lse, *_ = ATEN._scaled_dot_product_flash_attention(*leaves, 0.0, causal, scale=0.25)
        return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)]


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool) -> list[Tensor]:
    """o, dq, dk and dv in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.25, enable_gqa=True)
    return [o.detach(), *torch.autograd.grad(o, leaves, do.double())]


def assert_as_accurate(actual: list[Tensor], yardstick: list[Tensor], wanted: list[Tensor]) -> None:
    """The logsumexp in float32 moves P by a few roundings, and codes by 1 here and there."""
    for name, a, y, e in zip(("o", "dq", "dk", "dv"), actual, yardstick, wanted, strict=True):
        assert_within_budget(actual=a, exact=e, yardstick=y, factor=1.1, band=2.0**-18, what=name)


@pytest.mark.parametrize(
    "n_q, n_k, causal",
    [
        (40, 40, True),
        pytest.param(24, 70, False, marks=pytest.mark.slow),
        pytest.param(40, 40, False, marks=pytest.mark.exhaustive),
        pytest.param(24, 70, True, marks=pytest.mark.exhaustive),
    ],
)
def test_sdpa(causal, n_q, n_k):
    """The output is the kernels', bit by bit; the backward computes the mean of K again."""
    tensors = draw(n_q, n_k)
    o, lse, *grads = aten(*tensors, causal=causal)
    own_o, own_lse, *own = ours(*tensors, causal=causal)
    assert_bitwise(actual=o, expected=own_o, what="o")
    assert_bitwise(actual=lse, expected=own_lse, what="lse")
    wanted = exact(*tensors, causal=causal)
    assert_as_accurate([o, *grads], [own_o, *own], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (True, (9, 0))])
def test_packed_sequences(causal, window):
    q, k, v, do = (x[0].transpose(0, 1) for x in draw(40, 70, batch=1))
    cu_q, cu_k = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 15, 40], [0, 30, 70])
    )
    options = (cu_q, cu_k, 25, 40, 0.0, causal)
    sizes = {"window_size_left": window[0], "window_size_right": window[1]}
    with here(SPEC):
        o, lse, *rng = ATEN._flash_attention_forward(q, k, v, *options, False, scale=0.25, **sizes)
        grads = ATEN._flash_attention_backward(
            do, q, k, v, o, lse, *options, rng[0], rng[1], scale=0.25, **sizes
        )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attend = Functions(SPEC).flash_attn_varlen_func
    expected = attend(
        *leaves, cu_q, cu_k, 25, 40, causal=causal, softmax_scale=0.25, window_size=window
    )
    own = [expected.detach(), *torch.autograd.grad(expected, leaves, do)]
    unrounded = [x.detach().requires_grad_() for x in (q, k, v)]
    attend = Functions(sagesim.FPA).flash_attn_varlen_func
    o64 = attend(
        *(x.double() for x in unrounded),
        cu_q,
        cu_k,
        25,
        40,
        causal=causal,
        softmax_scale=0.25,
        window_size=window,
    )
    wanted = [o64.detach(), *(x.double() for x in torch.autograd.grad(o64, unrounded, do.double()))]
    assert_as_accurate([o, *grads], own, wanted)


INTO = "_flash_attention_forward_no_dropout_inplace"
NEEDS_INTO = pytest.mark.skipif(
    not hasattr(ATEN, INTO), reason="this PyTorch has no varlen_attn_out"
)


@NEEDS_INTO
def test_varlen_attn_out():
    """It writes what `varlen_attn` computes to a tensor of the caller."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

    q, k, v, _ = (x[0].transpose(0, 1) for x in draw(40, 70, batch=1))
    cu_q, cu_k = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 15, 40], [0, 30, 70])
    )
    arguments = (q, k, v, cu_q, cu_k, 25, 40)
    options = {"window_size": (-1, 0), "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    out = torch.full_like(q, torch.nan)
    with here(SPEC):
        o, lse = varlen_attn(*arguments, **options)
        written, written_lse = varlen_attn_out(out, *arguments, **options)
    assert written.data_ptr() == out.data_ptr()
    assert_bitwise(actual=out, expected=o, what="o")
    assert_bitwise(actual=written_lse, expected=lse, what="lse")


@pytest.mark.slow
def test_ring_attention():
    """Halves of the keys are computed apart, merged, and differentiated with the merged results."""
    q, k, v, do = draw(40, 128)
    wanted = exact(q, k, v, do, causal=False)
    _, _, *whole = ours(q, k, v, do, causal=False)
    halves = [(k[:, :, i : i + 64], v[:, :, i : i + 64]) for i in (0, 64)]
    with here(SPEC):
        parts = [
            ATEN._scaled_dot_product_flash_attention(q, *half, 0.0, False, scale=0.25)
            for half in halves
        ]
        lse = torch.stack([part[1] for part in parts]).logsumexp(0)
        o = sum(part[0] * (part[1] - lse).exp()[..., None] for part in parts)
        rest = (None, None, 40, 64, 0.0, False, parts[0][6], parts[0][7])
        grads = [
            ATEN._scaled_dot_product_flash_attention_backward(
                do, q, *half, o, lse, *rest, scale=0.25
            )
            for half in halves
        ]
    (dq0, dk0, dv0), (dq1, dk1, dv1) = grads
    actual = [dq0 + dq1, torch.cat([dk0, dk1], 2), torch.cat([dv0, dv1], 2)]
    for name, a, y, e in zip(("dq", "dk", "dv"), actual, whole, wanted[1:], strict=True):
        # K is smoothed with the mean of each half: other codes of the same accuracy.
        assert_within_budget(actual=a, exact=e, yardstick=y, factor=1.5, band=0.0, what=name)


@pytest.mark.slow
def test_strides_are_those_of_the_inputs():
    """Compiled code relies on them."""
    q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(40, 40))
    o, _, dq, dk, dv = aten(q, k, v, do, causal=True)
    for actual, like in ((o, q), (dq, q), (dk, k), (dv, v)):
        assert actual.stride() == like.stride()


def test_delta_from_p_is_refused():
    with (
        pytest.raises(ValueError, match=r"Ring attention passes the output .* use a spec with del"),
        flash_attention(sagesim.FACTORED),
    ):
        pass


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (sagesim.FPA, "no kernel for this spec: site qk: fp32"),
        (sagesim.AttentionSpec.parse("sagebwd dq=int8@row,block"), "no kernel .* ds per row"),
    ],
)
def test_specs_without_kernels_are_refused(spec, words):
    with pytest.raises(ValueError, match=words), flash_attention(spec):
        pass


@pytest.mark.parametrize(
    ("cu", "words"),
    [
        (torch.tensor([0, 7, 40, 7], dtype=torch.int32)[::2], "must be contiguous int32"),
        (torch.tensor([0, 30], dtype=torch.int32), "must ascend from 0 to the tokens of q"),
    ],
)
def test_sequences_are_checked(cu, words):
    q, k, v, _ = (x[0].transpose(0, 1) for x in draw(40, 40, batch=1))
    cu = cu.to(DEVICE)
    if DEVICE == "cuda" and "ascend" in words:
        pytest.skip("on a GPU this is an assertion on the device, after which it cannot be used")
    with here(SPEC), pytest.raises(ValueError, match=words):
        ATEN._flash_attention_forward(q, k, v, cu, cu, 40, 40, 0.0, False, False)


def test_shapes_are_checked():
    q, k, v, _ = (x.transpose(1, 2) for x in draw(8, 8))
    with here(SPEC), pytest.raises(ValueError, match="k and v differ in heads or tokens"):
        ATEN._flash_attention_forward(q, k, v[:, :5], None, None, 8, 8, 0.0, False, False)


TENSORS = {
    *("query", "key", "value", "grad_out", "out", "logsumexp"),
    *("cum_seq_q", "cum_seq_k", "max_q", "max_k"),
}
"""Those of every call, and of packed sequences."""
HONOURED = {"is_causal", "scale", "window_size_left", "window_size_right"}
REFUSED = {
    "dropout_p": 0.1,
    "return_debug_mask": True,
    "num_splits": 2,
    "seqused_k": torch.ones(1, dtype=torch.int32),
    "alibi_slopes": torch.ones(1),
    "block_table": torch.ones(1, 1, dtype=torch.int32),
}
RANDOMNESS = {"rng_state", "unused", "philox_seed", "philox_offset"}
"""Of dropout, which is refused."""
OPERATORS = [
    f"{name}{backward}"
    for name in ("_flash_attention", "_scaled_dot_product_flash_attention")
    for backward in ("_forward" * (name == "_flash_attention"), "_backward")
]


def arguments_of(operator: str) -> set[str]:
    return {a.name for a in getattr(ATEN, operator).default._schema.arguments}


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_argument_of_the_operators_is_honoured_or_refused(operator):
    assert arguments_of(operator) <= TENSORS | HONOURED | REFUSED.keys() | RANDOMNESS


@pytest.mark.parametrize("argument", REFUSED)
def test_other_options_are_refused(argument):
    if argument not in arguments_of("_flash_attention_forward"):
        pytest.skip(f"this PyTorch has no {argument}")
    q, k, v, _ = (x.transpose(1, 2) for x in draw(8, 8))
    given = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False, "scale": 0.25}
    with here(SPEC), pytest.raises(ValueError, match=argument):
        ATEN._flash_attention_forward(
            q, k, v, None, None, 8, 8, **given | {argument: REFUSED[argument]}
        )


@NEEDS_INTO
def test_varlen_attn_out_has_no_other_arguments():
    assert arguments_of(INTO) == arguments_of("_flash_attention_forward") | {"out"}


@pytest.mark.parametrize("argument", ["dropout_p", "return_debug_mask"])
def test_options_of_sdpa_are_refused(argument):
    q, k, v, _ = draw(8, 8)
    with here(SPEC), pytest.raises(ValueError, match=argument):
        ATEN._scaled_dot_product_flash_attention(q, k, v, **{argument: REFUSED[argument]})


def test_the_context_puts_back_what_was():
    class Handle:
        def remove(self) -> None: ...

    before = list_flash_attention_impls()
    register_flash_attention_impl("other", register_fn=Handle)
    activate_flash_attention_impl("other")
    try:
        with here(SPEC):
            assert current_flash_attention_impl() == "sagebwd"
            with pytest.raises(RuntimeError, match="already entered"), here(SPEC):
                pass
        assert current_flash_attention_impl() == "other"
    finally:
        restore_flash_attention_impl()
        torch.nn.attention._registry._FLASH_ATTENTION_IMPLS.pop("other")
    assert list_flash_attention_impls() == before
    if DEVICE == "cpu":
        q, k, v, _ = draw(8, 8)
        with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
            ATEN._scaled_dot_product_flash_attention(q, k, v)


def test_sdpa_on_a_cpu_is_refused():
    """PyTorch has another operator there, which would compute without the spec."""
    q, k, v, _ = (x.cpu() for x in draw(8, 8))
    plain = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    message = r"query \(2, 4, 8, 16\) on the CPU; .* Functions\(spec\).sdpa or use apply"
    with flash_attention(SPEC), pytest.raises(ValueError, match=message):
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    after = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_bitwise(actual=after, expected=plain, what="o")


def test_an_exception_leaves_nothing_replaced():
    before = (list_flash_attention_impls(), current_flash_attention_impl())
    backends = torch.backends.cuda.math_sdp_enabled()
    q, k, v, _ = (x.cpu() for x in draw(8, 8))
    with pytest.raises(KeyError), flash_attention(SPEC):
        raise KeyError
    assert (list_flash_attention_impls(), current_flash_attention_impl()) == before
    assert torch.backends.cuda.math_sdp_enabled() == backends
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_an_older_pytorch_is_refused(monkeypatch):
    """One whose FlashAttention cannot be replaced."""
    name = flash_attention.__module__
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    message = f"needs PyTorch 2.11 or later, .* this is PyTorch {re.escape(torch.__version__)}"
    with pytest.raises(ImportError, match=message):
        importlib.import_module(name)
