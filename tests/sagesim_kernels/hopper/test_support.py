"""Which problems the Hopper kernels compute, and which operands have to be copied for them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from sagesim import (
    CAUSAL_SAFE,
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    FP8_GRADIENTS,
    FPA_FP16,
    HALF_AWAY,
    SAGE_FORWARD,
    SAGEBWD,
    SAGEBWD_ALL_INT8,
    AttentionSpec,
    Delta,
    Precision,
    Smoothing,
)
from sagesim.problem import resolve_input16
from sagesim.spec import with_precision
from sagesim_kernels import hopper
from sagesim_kernels.hopper import support
from sagesim_kernels.hopper.descriptors import token_descriptor
from sagesim_kernels.hopper.token_loads import SEQUENCE_END
from sagesim_kernels.operands import NO_EXTRAS, Extras, KernelProblem


def problem(
    spec: AttentionSpec = FACTORED_QK,
    *,
    d: int = 64,
    d_v: int | None = None,
    n_q: int = 5,
    n_k: int = 5,
    heads: int = 2,
    scale: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    extras: Extras = NO_EXTRAS,
    **mask: Any,
) -> KernelProblem:
    sizes = ((n_q, d), (n_k, d), (n_k, d if d_v is None else d_v))
    q, k, v = (torch.empty(1, heads, *size, dtype=dtype, device="meta") for size in sizes)
    return KernelProblem.of(
        q,
        k,
        v,
        spec=resolve_input16(spec, dtype),
        scale=scale,
        is_causal=mask.get("is_causal", False),
        lower_right=mask.get("lower_right", False),
        extras=extras,
    )


BY_TOKEN = replace(FACTORED_QK, qk=FACTORED.qk, qk_recompute=FACTORED.qk)
EXTRAS = {
    "window": Extras(window=(3, 0)),
    "key_mask": Extras(key_mask=torch.ones(1, 5, dtype=torch.bool)),
    "seqused_k": Extras(seqused_k=torch.empty(1, dtype=torch.int32, device="meta")),
    "sinks": Extras(sinks=torch.empty(2, device="meta")),
    "softcap": Extras(softcap=20.0),
    "softcap and sinks": Extras(sinks=torch.empty(2, device="meta"), softcap=20.0),
}

SERVED = {
    "factored_qk": problem(),
    "d 128": problem(d=128),
    "d 33": problem(d=33),
    "d 96": problem(d=96),
    "d 72, d_v 128": problem(d=72, d_v=128),
    "d 129, d_v 192": problem(d=129, d_v=192),
    "d 256, d_v 193": problem(d=256, d_v=193),
    "d 192, d_v 128": problem(d=192, d_v=128),
    "d 65, d_v 256": problem(d=65, d_v=256),
    "float16": problem(dtype=torch.float16),
    "float32": problem(dtype=torch.float32),
    "causal": problem(is_causal=True),
    "unsmoothed": problem(replace(FACTORED_QK, smoothing=Smoothing())),
    "half away": problem(replace(FACTORED_QK, rounding=HALF_AWAY)),
    "scale 0": problem(scale=0.0),
    **{
        f"{name}, d {d}": problem(d=d, extras=extras)
        for name, extras in EXTRAS.items()
        for d in (64, 192)
    },
}
SERVED_IN_FORWARD = {
    "factored_pv16": problem(FACTORED_PV16),
    "causal_safe": problem(CAUSAL_SAFE),
    "K per token": problem(BY_TOKEN, d=128),
    "K per token, softcap": problem(BY_TOKEN, extras=EXTRAS["softcap"]),
    "delta from P": problem(replace(FACTORED_QK, delta=Delta.FROM_P)),
    "recomputation in 16 bit": problem(with_precision(FACTORED_QK, Precision.FP16, "qk_recompute")),
    "two 16-bit formats": problem(with_precision(FACTORED_QK, Precision.FP16, "dv")),
    "blocks of 128 queries": problem(replace(FACTORED_QK, block_q=128)),
    "fp8_gradients": problem(FP8_GRADIENTS, d=128),
    "K per token in the forward alone": problem(replace(FACTORED_QK, qk=FACTORED.qk)),
}
_QK_IN_16_BIT = with_precision(FACTORED_QK, Precision.FP16, "qk")
SERVED_IN_BACKWARD = {
    "PV in INT8": problem(replace(FACTORED_QK, pv=FACTORED.pv)),
    "QK in 16 bit in the forward alone, d 192": problem(_QK_IN_16_BIT, d=192),
}
OTHERS = {
    "factored": problem(FACTORED),
    "fpa_fp16": problem(FPA_FP16),
    "QK in 16 bit in the forward alone": problem(_QK_IN_16_BIT),  # units need row sums of P
    "K per token, d 192": problem(BY_TOKEN, d=192),
    "Q smoothed": problem(replace(FACTORED_QK, smoothing=Smoothing(q=True, k=True))),
    "blocks of 128 keys": problem(replace(FACTORED_QK, block_k=128)),
    "d 32": problem(d=32),
    "d 257": problem(d=257),
    "d 192, d_v 64": problem(d=192, d_v=64),
    "d_v 128": problem(d_v=128),
    "negative scale": problem(scale=-1.0),
    "too many rows": problem(n_q=2**28, heads=2),
    "softcap and a negative scale": problem(scale=-1.0, extras=Extras(softcap=20.0)),
}

CU = torch.empty(2, dtype=torch.int32, device="meta")
P_IN_CODES = {
    "packed": replace(problem(SAGEBWD), cu_q=CU, cu_k=CU),
    "sagebwd": problem(SAGEBWD),
    "sagebwd_all_int8": problem(SAGEBWD_ALL_INT8),
    "sage_forward": problem(SAGE_FORWARD),
    "factored": problem(FACTORED),
    "mixed": problem(replace(SAGEBWD, qk=replace(SAGEBWD.qk, rhs=FACTORED.qk.rhs))),
    "PV in INT8": problem(replace(FACTORED_QK, pv=FACTORED.pv)),
    "d 33": problem(SAGEBWD, d=33),
    "d 72, d_v 128": problem(FACTORED, d=72, d_v=128),
    "float32": problem(SAGEBWD, dtype=torch.float32),
    "causal": problem(SAGEBWD, is_causal=True),
    "unsmoothed": problem(replace(SAGEBWD, smoothing=Smoothing())),
}
P_IN_CODES_OTHERS = {
    "factored_pv16": problem(FACTORED_PV16),
    "QK in 16 bit": problem(with_precision(SAGEBWD, Precision.FP16, "qk")),
    "half away": problem(replace(SAGEBWD, rounding=HALF_AWAY)),
    "Q smoothed": problem(replace(SAGEBWD, smoothing=Smoothing(q=True, k=True))),
    "blocks of 128": problem(replace(SAGEBWD, block_k=128)),
    "d 32": problem(SAGEBWD, d=32),
    "d 129": problem(SAGEBWD, d=129),
    "d_v 128": problem(SAGEBWD, d_v=128),
    "negative scale": problem(SAGEBWD, scale=-1.0),
    "too many rows": problem(SAGEBWD, n_q=2**28, heads=2),
    **{name: problem(SAGEBWD, extras=extras) for name, extras in EXTRAS.items()},
}
_GRADIENTS = ("dv", "dq", "dk")
CODES_SERVED = {
    "packed": replace(problem(SAGEBWD), cu_q=CU, cu_k=CU),
    "sagebwd": problem(SAGEBWD),
    "factored": problem(FACTORED),
    "factored_pv16": problem(FACTORED_PV16),
    "d 128": problem(SAGEBWD, d=128),
    "d 33": problem(SAGEBWD, d=33),
    "d 40, d_v 64": problem(SAGEBWD, d=40, d_v=64),
    "d 72, d_v 128": problem(SAGEBWD, d=72, d_v=128),
    "float32": problem(SAGEBWD, dtype=torch.float32),
    "causal": problem(SAGEBWD, is_causal=True),
    "negative scale": problem(SAGEBWD, scale=-1.0),
    "unsmoothed": problem(replace(SAGEBWD, smoothing=Smoothing())),
    "forward in 16 bit": problem(with_precision(SAGEBWD, Precision.FP16, "qk", "pv")),
    "fp8_gradients": problem(FP8_GRADIENTS),
    "fp8_gradients, d 128": problem(FP8_GRADIENTS, d=128, is_causal=True),
    "E5M2": problem(
        with_precision(FP8_GRADIENTS, Precision.FP8_E5M2, *_GRADIENTS), dtype=torch.float16
    ),
    **{
        name: problem(SAGEBWD, extras=extras)
        for name, extras in EXTRAS.items()
        if extras.softcap is None
    },
}
CODES_OTHERS = {
    "two FP8 formats": problem(with_precision(FP8_GRADIENTS, Precision.FP8_E5M2, "dv")),
    "bounds in INT8": problem(with_precision(FP8_GRADIENTS, Precision.INT8, *_GRADIENTS)),
    "FP8, blocks of 32": problem(replace(FP8_GRADIENTS, block_q=32)),
    "factored_qk": problem(),
    "dP in INT8": problem(SAGEBWD_ALL_INT8),
    "dQ in 16 bit": problem(CAUSAL_SAFE),
    "half away": problem(replace(SAGEBWD, rounding=HALF_AWAY)),
    "Q smoothed": problem(replace(SAGEBWD, smoothing=Smoothing(q=True, k=True))),
    "scales of tiles and of rows": problem(replace(SAGEBWD, dq=FACTORED.dq)),
    "blocks of 128": problem(replace(SAGEBWD, block_q=128)),
    "d 32": problem(SAGEBWD, d=32),
    "d 129": problem(SAGEBWD, d=129),
    "d_v 128": problem(SAGEBWD, d_v=128),
    "too many rows": problem(SAGEBWD, n_q=2**28, heads=2),
    "softcap": problem(SAGEBWD, extras=EXTRAS["softcap"]),
}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hopper.support, "IS_INTERPRETED", False)
    monkeypatch.setattr(hopper.support, "is_hopper", lambda: True)


CASES = {
    **{name: (x, True, True) for name, x in SERVED.items()},
    **{name: (x, True, False) for name, x in SERVED_IN_FORWARD.items()},
    **{name: (x, False, True) for name, x in SERVED_IN_BACKWARD.items()},
    **{name: (x, False, False) for name, x in OTHERS.items()},
}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("x", "forward", "backward"), CASES.values(), ids=CASES)
def test_served(x, forward, backward):
    assert (hopper.serves_forward(x), hopper.serves_backward(x)) == (forward, backward)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", P_IN_CODES)
def test_forward_in_codes(name):
    assert hopper.serves_forward_in_codes(P_IN_CODES[name])
    assert not hopper.serves_forward(P_IN_CODES[name])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", P_IN_CODES_OTHERS)
def test_forward_in_codes_of_other_kernels(name):
    assert not hopper.serves_forward_in_codes(P_IN_CODES_OTHERS[name])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", CODES_SERVED)
def test_backward_in_codes(name):
    assert hopper.serves_codes(CODES_SERVED[name])
    assert not hopper.serves_backward(CODES_SERVED[name])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", CODES_OTHERS)
def test_backward_in_codes_of_other_kernels(name):
    assert not hopper.serves_codes(CODES_OTHERS[name])


@pytest.mark.parametrize("served", SERVED.values(), ids=SERVED)
def test_nothing_is_served_on_another_gpu(served, monkeypatch):
    monkeypatch.setattr(hopper.support, "IS_INTERPRETED", False)
    monkeypatch.setattr(hopper.support, "is_hopper", lambda: False)
    assert not hopper.serves_forward(served) and not hopper.serves_backward(served)
    assert not any(map(hopper.serves_codes, CODES_SERVED.values()))
    assert not any(map(hopper.serves_forward_in_codes, P_IN_CODES.values()))


def test_wide_heads_have_more_than_128_channels():
    assert not hopper.is_wide(problem(d=128))
    assert hopper.is_wide(problem(d=129)) and hopper.is_wide(problem(d=128, d_v=129))


@pytest.mark.parametrize("n_q", [0, 1, 4])
@pytest.mark.parametrize("n_k", [0, 1, 4])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (0, -1), (-1, 1), (2, 1)])
@pytest.mark.parametrize("mask", ["full", "upper_left", "lower_right"])
def test_dead_tokens_are_those_outside_the_mask(n_q, n_k, mask, window):
    extras = Extras(window=window)
    is_causal, lower_right = mask != "full", mask == "lower_right"
    x = problem(n_q=n_q, n_k=n_k, is_causal=is_causal, lower_right=lower_right, extras=extras)
    attends = torch.ones(n_q, n_k, dtype=torch.bool)
    diagonal = n_k - n_q if lower_right else 0
    left, right = window
    if is_causal:
        attends = attends.tril(diagonal)
    if right >= 0:
        attends = attends.tril(diagonal + right)
    if left >= 0:
        attends = attends.triu(diagonal - left)
    if n_q and n_k:
        assert hopper.has_dead_keys(x) == bool((~attends.any(0)).any())
        assert hopper.has_dead_queries(x) == bool((~attends.any(1)).any())
        copied = hopper.copied(x)
        assert copied.keys == hopper.has_dead_keys(x)
        assert copied.queries == hopper.has_dead_queries(x)
    if mask == "full" and window == (-1, -1):  # the alignment has no effect
        assert not any(hopper.copied(replace(x, lower_right=True)))


@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (0, -1), (-1, 1), (2, 1)])
@pytest.mark.parametrize("mask", ["full", "upper_left", "lower_right"])
def test_packed_sequences_of_some_lengths_have_dead_tokens(mask, window):
    """Without the lengths, `has_dead_keys` and `has_dead_queries` say what is possible."""
    is_causal, lower_right = mask != "full", mask == "lower_right"
    options = {"is_causal": is_causal, "lower_right": lower_right}
    extras = Extras(window=window)
    alone = [
        problem(n_q=n_q, n_k=n_k, extras=extras, **options)
        for n_q, n_k in product((1, 4, 9), repeat=2)
    ]
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    packed = replace(problem(extras=extras, **options), cu_q=cu, cu_k=cu)
    assert hopper.has_dead_keys(packed) == any(map(hopper.has_dead_keys, alone))
    assert hopper.has_dead_queries(packed) == any(map(hopper.has_dead_queries, alone))
    assert not any(hopper.copied(replace(packed, has_equal_lengths=True)))


@pytest.mark.parametrize(
    ("mask", "padding", "copied"),
    [
        ({}, "seqused_k", ()),
        ({"is_causal": True}, "seqused_k", ()),
        ({"extras": Extras(window=(3, 0))}, "seqused_k", ("queries",)),
        ({"extras": Extras(window=(-1, 2))}, "seqused_k", ()),
        ({}, "key_mask", ("keys",)),
        ({"is_causal": True}, "key_mask", ("queries", "keys")),
        ({"extras": Extras(window=(3, -1))}, "key_mask", ("queries", "keys")),
        ({"extras": Extras(window=(-1, 2))}, "key_mask", ("queries", "keys")),
    ],
)
def test_what_is_copied_because_of_padding(
    mask: dict[str, Any], padding: str, copied: Sequence[str]
) -> None:
    """Under these masks every query of some padding attends to a key, or else it is copied."""
    x = problem(n_q=9, n_k=9, **mask)
    extras = {padding: getattr(EXTRAS[padding], padding)}
    found = hopper.copied(replace(x, extras=x.extras._replace(**extras)))
    assert [name for name, is_copied in found._asdict().items() if is_copied] == [*copied]


@pytest.mark.parametrize(
    ("shape", "stride", "known"),
    [
        ((3, 2, 5, 64), (640, 320, 64, 1), True),
        ((3, 2, 5, 64), (1920, 64, 384, 1), True),  # between other tensors, heads inside of tokens
        ((3, 2, 5, 64), (128, 64, 384, 1), False),  # sequences inside of tokens
        ((1, 2, 5, 64), (100, 64, 384, 1), True),
        ((3, 2, 5, 64), (0, 320, 64, 1), True),  # is copied
        ((3, 2, 1, 64), (128, 64, 7, 1), True),
        ((3, 2, 5, 64), (2**37, 320, 64, 1), False),
    ],
)
def test_which_sequences_have_known_ends(
    shape: tuple[int, ...], stride: tuple[int, ...], known: bool
) -> None:
    x = torch.empty(0, device="meta").as_strided(shape, stride)
    assert support.have_known_ends(x) is known
    if known and 0 not in stride:
        apart = token_descriptor(x.half(), 64, 64, has_ends=True).shape[0] - SEQUENCE_END.value - 1
        token = stride[2] if shape[2] > 1 else shape[3]
        assert apart == (stride[0] // token if shape[0] > 1 else 1)
