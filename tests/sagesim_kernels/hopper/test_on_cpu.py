"""Hopper's kernels, run on the CPU from their PTX: see `tests.support.ptx_hopper`."""

from itertools import accumulate

import pytest
import torch

from sagesim import AttentionSpec
from tests.sagesim_kernels.exactness import assert_as_exact_as_the_emulator
from tests.sagesim_kernels.ptx_calls import (
    Call,
    check_masked_results,
    check_results,
    check_rows_that_fail,
    parameters,
)
from tests.support.assertions import assert_bitwise, assert_sqnr_at_least
from tests.support.inputs import Case
from tests.support.many_steps import ManySteps
from tests.support.ptx_worker import PtxRunner

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compiled by the oldest Triton")]

HOPPER = 90
KERNELS = {
    "forward": "hopper_forward",
    "codes forward": "hopper_forward_codes",
    "backward": "hopper_backward",
    "codes backward": "hopper_codes_backward",
    "wide": "hopper_wide",
}

IN_E5M2 = "fp8_gradients delta=p dv=fp8_e5m2 dq=fp8_e5m2 dk=fp8_e5m2 block=64x64"

CALLS = {
    "factored_qk": (Call("factored_qk", 150, 200, heads=2, is_causal=True), "forward", "backward"),
    "one_tile_of_keys_fp16_d40": (
        Call("factored_qk", 70, 100, d=40, dtype=torch.float16), "forward", "backward",
    ),
    "factored_qk_d80": (Call("factored_qk", 70, 150, d=80), "forward", "backward"),
    "factored_d112": (Call("factored", 70, 150, d=112), "codes forward", "codes backward"),
    "sagebwd_grouped": (
        Call("sagebwd", 130, 150, heads=8, heads_k=4, is_causal=True),
        "codes forward", "codes backward",
    ),
    "factored_d128": (
        Call("factored", 70, 200, d=128, heads=2, heads_k=2), "codes forward", "codes backward",
    ),
    "fp8_gradients": (
        Call("fp8_gradients", 300, 200, heads=2, is_causal=True), "forward", "codes backward",
    ),
    "fp8_gradients_d128": (Call("fp8_gradients", 130, 150, d=128), "forward", "codes backward"),
    "fp8_e5m2_d72": (Call(IN_E5M2, 130, 150, d=72, is_causal=True), "forward", "codes backward"),
    "d256": (Call("factored_qk", 130, 100, d=256, is_causal=True), "wide"),
}  # fmt: skip
"""A call, and the kernels that have to compute it."""


COMBINED = ("fp8_gradients_d128", "fp8_e5m2_d72", "lengths_and_sinks")
"""Calls whose features other calls have as well, or tests of compiled code."""


@pytest.mark.parametrize("name", parameters(CALLS, COMBINED))
def test_results_are_as_exact_as_the_emulators(runner: PtxRunner, name: str) -> None:
    call, *kernels = CALLS[name]
    found = check_results(runner, call, HOPPER)
    assert {KERNELS[x] for x in kernels} <= set(found.kernels)


def test_tiles_of_few_and_many_steps_have_the_same_bits(runner: PtxRunner) -> None:
    call = Call("factored_qk", 200, 150, d=80, is_causal=True)
    few, many = (
        check_results(runner, call._replace(d=d), HOPPER) for d in (call.d, ManySteps(call.d))
    )
    assert few.config["is_joint"] and not many.config["is_joint"]
    for name in ("dq", "dk", "dv"):
        assert_bitwise(actual=getattr(many, name), expected=getattr(few, name), what=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_and_two_programs_have_the_same_bits(
    runner: PtxRunner, dtype: torch.dtype, is_causal: bool
) -> None:
    """In float16, P has a running maximum in all blocks of keys, and in bfloat16 a fixed reference
    in those without a mask."""
    call = Call("factored_qk", 200, 270, d=64, is_causal=is_causal, dtype=dtype)
    two, one = (
        check_results(runner, call._replace(d=d), HOPPER) for d in (call.d, ManySteps(call.d))
    )
    assert (two.config["programs"], one.config["programs"]) == (2, 1)
    for name in ("o", "lse"):
        assert_bitwise(actual=getattr(one, name), expected=getattr(two, name), what=name)


MASKED_CALLS = {
    "window": (
        Call("factored_qk", 140, 200, window=(50, 10), lower_right=True, heads=2),
        "forward", "backward",
    ),
    "key_mask": (
        Call("factored_qk", 70, 300, heads=2, dead_keys=(range(10), range(100, 260))),
        "forward", "backward",
    ),
    "softcap": (
        Call("factored_qk", 140, 200, window=(90, -1), lower_right=True, softcap=3.0, scale=0.5),
        "forward", "backward",
    ),
    "key_mask_and_sinks": (
        Call(
            "factored_pv16", 140, 260, heads=2, window=(30, 10), lower_right=True, sink=5.0,
            dead_keys=(range(10), range(100, 190)),
        ),
        "codes backward",
    ),
    "lengths_and_sinks": (
        Call("fp8_gradients", 150, 150, is_causal=True, used_keys=70, sink=5.0), "codes backward",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", parameters(MASKED_CALLS, COMBINED))
def test_masks_and_sinks(runner: PtxRunner, name: str) -> None:
    """Nothing of a token that is masked everywhere reaches a result."""
    call, *kernels = MASKED_CALLS[name]
    found = check_masked_results(runner, call, HOPPER)
    assert {KERNELS[x] for x in kernels} <= set(found.kernels)


def test_sums_of_dq_do_not_overflow_if_the_backward_has_another_s(runner: PtxRunner) -> None:
    """S of the forward is 0. In the backward, K is rounded to INT8, and rows of P sum to 300."""
    spec = AttentionSpec.parse("factored_qk qk=bf16 smooth=none")
    generator = torch.Generator().manual_seed(1)
    k = torch.randint(-45, 46, (1, 1, 512, 64), generator=generator)
    k -= k.sum(-1, keepdim=True) // 64
    k -= (torch.arange(64) < k.sum(-1, keepdim=True)).long()
    signs = torch.randint(0, 2, (1, 1, 512, 1), generator=generator) * 2.0 - 1.0
    ones = torch.ones(1, 1, 64, 64)
    floats = {"q": 8 * ones, "k": k / 16, "v": signs.expand_as(k), "do": ones}
    tensors = {name: x.bfloat16() for name, x in floats.items()}
    found = runner.run(tensors, spec, scale=8.0, capability=HOPPER)
    problem = Case(**tensors, scale=8.0)
    emulated = assert_as_exact_as_the_emulator(found, problem, spec)
    assert emulated.p_recompute.sum(-1).max() > 300


IN_CODES = ("fp8_gradients smooth=none", "sagebwd smooth=none")
"""Calls with these specs are causal, so that few kernels are compiled."""


@pytest.mark.parametrize("spec", IN_CODES)
def test_huge_keys_give_finite_gradients(runner: PtxRunner, spec: str) -> None:
    """Scales of K near the largest float32, and of Q near the smallest: logits are ordinary."""
    tensors, parsed = Call(spec, 70, 100).tensors(), AttentionSpec.parse(spec)
    factor = 2.0**121
    tensors |= {"q": tensors["q"] / factor, "k": tensors["k"] * factor}
    found = runner.run(tensors, parsed, is_causal=True, capability=HOPPER)
    assert KERNELS["codes backward"] in found.kernels
    assert_as_exact_as_the_emulator(found, Case(**tensors, is_causal=True), parsed)


@pytest.mark.parametrize("spec", IN_CODES)
def test_a_nan_of_a_key_reaches_its_queries(runner: PtxRunner, spec: str) -> None:
    """And no query before its tile of 128 keys."""
    tensors = Call(spec, 300, 300).tensors()
    tensors["k"][0, 0, 200, 3] = torch.nan
    found = runner.run(tensors, AttentionSpec.parse(spec), is_causal=True, capability=HOPPER)
    assert KERNELS["codes backward"] in found.kernels
    assert found.dq[0, 0, 200:].isnan().all()
    for name in ("o", "dq"):
        assert getattr(found, name)[0, 0, :128].isfinite().all(), name


@pytest.mark.parametrize(
    ("of", "d"), parameters((("logits", 64), ("values", 64), ("logits", 192)), (("logits", 192),))
)
def test_rows_that_the_reference_does_not_fit(runner: PtxRunner, of: str, d: int) -> None:
    """The reference is the largest logit of the last block of keys."""
    found = check_rows_that_fail(runner, of, key=10, d=d, capability=HOPPER)
    assert KERNELS["forward" if d == 64 else "wide"] in found.kernels


@pytest.mark.parametrize("spec", ["factored_qk", IN_CODES[0]])
def test_nothing_behind_the_used_keys_is_read(runner: PtxRunner, spec: str) -> None:
    """K and V behind the used keys are NaN, and so are the queries of a sequence without keys. Each
    sequence has the bits that it has alone, without its padding."""
    counts, parsed = (70, 0, 260), AttentionSpec.parse(spec)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, n in {"q": 150, "k": 260, "v": 260, "do": 150}.items():  # heads are inside of tokens
        x = torch.randn(len(counts), n, 2, 64, generator=generator).bfloat16()
        tensors[name] = x.transpose(1, 2)
    for b, count in enumerate(counts):
        for name in ("k", "v"):
            tensors[name][b, :, count:] = torch.nan
        if count == 0:
            tensors["q"][b] = tensors["do"][b] = torch.nan
    padding = {"seqused_k": torch.tensor(counts, dtype=torch.int32)}
    found = runner.run(
        tensors | padding, parsed, is_causal=spec != "factored_qk", capability=HOPPER
    )
    assert KERNELS["backward" if spec == "factored_qk" else "codes backward"] in found.kernels
    for b, count in enumerate(counts):
        of_b = {name: getattr(found, name)[b : b + 1] for name in ("o", "lse", "dq", "dk", "dv")}
        assert not of_b["dk"][:, :, count:].any() and not of_b["dv"][:, :, count:].any()
        if count == 0:
            assert not of_b["o"].any() and not of_b["dq"].any()
            continue
        alone = {name: x[b : b + 1] for name, x in tensors.items()}
        alone |= {name: alone[name][:, :, :count].clone() for name in ("k", "v")}
        expected = runner.run(alone, parsed, is_causal=spec != "factored_qk", capability=HOPPER)
        for name, x in of_b.items():
            mine = x[:, :, :count] if name in ("dk", "dv") else x
            assert_bitwise(actual=mine, expected=getattr(expected, name), what=f"{name} of {count}")


@pytest.mark.parametrize(
    "keys", [(150, 3, 40, 65), (70, 5, 0, 300)], ids=["unequal", "as many keys as queries"]
)
@pytest.mark.parametrize(
    "spec",
    parameters(("factored_qk", "fp8_gradients", "sagebwd"), ("factored_qk", "fp8_gradients")),
)
def test_packed_sequences_have_the_bits_that_they_have_alone(
    runner: PtxRunner, spec: str, keys: tuple[int, ...]
) -> None:
    """One of them is NaN, and one has no query."""
    # So unequal that there are as many programs as tiles, with tiles of up to 256 tokens.
    lengths = {"q": (70, 5, 0, 300), "k": keys}
    tensors, parsed = Call(spec, 375, sum(keys)).tensors(), AttentionSpec.parse(spec)
    places = {name: lengths["k" if name in "kv" else "q"] for name in ("q", "k", "v", "do")}
    for name, each in places.items():
        tensors[name].split(each, 2)[1][:] = torch.nan
    cu = {
        f"cu_{name}": torch.tensor([0, *accumulate(x)], dtype=torch.int32)
        for name, x in lengths.items()
        if name == "q" or keys != lengths["q"]
    }
    packed = runner.run(tensors | cu, parsed, is_causal=True, capability=HOPPER)
    for i in (0, 3):
        one = {name: tensors[name].split(each, 2)[i].clone() for name, each in places.items()}
        alone = runner.run(one, parsed, is_causal=True, capability=HOPPER)
        for name in ("o", "dq", "dk", "dv"):
            part = getattr(packed, name).split(places["q" if name == "o" else name[1]], 2)[i]
            assert_bitwise(actual=part, expected=getattr(alone, name), what=f"{name} of {i}")


@pytest.mark.parametrize(
    "spec", parameters(("factored", "factored_qk", "fp8_gradients"), ("fp8_gradients",))
)
def test_the_gradient_of_the_logsumexp(runner: PtxRunner, spec: str) -> None:
    """Without a gradient of O, all of dQ and dK comes from it."""
    tensors = Call(spec, 130, 150).tensors()
    tensors["do"] = torch.zeros_like(tensors["do"])
    d_lse = torch.randn(1, 1, 130, generator=torch.Generator().manual_seed(1))
    found = runner.run(tensors | {"d_lse": d_lse}, AttentionSpec.parse(spec), capability=HOPPER)
    q, k = (tensors[name].double().requires_grad_() for name in ("q", "k"))
    (q @ k.mT / 8).logsumexp(-1).backward(d_lse.double())
    for name, x in (("dq", q), ("dk", k)):
        assert_sqnr_at_least(actual=getattr(found, name), exact=x.grad, floor_db=26, what=name)
