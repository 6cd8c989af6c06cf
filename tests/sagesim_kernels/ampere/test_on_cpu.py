"""The kernels for mma.sync, run on the CPU from their PTX: see `tests.support.ptx`."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import sagesim
from sagesim import FPA_BF16, AttentionSpec
from tests.sagesim_kernels.contract import OUTPUTS
from tests.sagesim_kernels.exactness import assert_as_exact_as_the_emulator
from tests.sagesim_kernels.ptx_calls import (
    Call,
    check_masked_results,
    check_results,
    check_rows_that_fail,
    parameters,
)
from tests.support.assertions import assert_bitwise, assert_sqnr_at_least, assert_within_budget
from tests.support.inputs import Case
from tests.support.ptx_worker import PtxRunner

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compiled by the oldest Triton")]


CALLS = {
    "sagebwd_grouped": Call("sagebwd", 200, 130, heads=2, is_causal=True),
    "sagebwd_d72": Call("sagebwd", 100, 200, d=72),
    "factored": Call("factored", 70, 200, scale=-0.3),
    "maxima_that_grow": Call("sagebwd", 70, 260, scale=3.0),
    "factored_pv16_d88": Call("factored_pv16", 100, 200, d=88, is_causal=True),
    "factored_qk": Call("factored_qk", 130, 150, is_causal=True),
    "scales_of_blocks": Call(
        "factored_qk qk=int8@block,block qk_recompute=int8@block,block", 130, 100, scale=-0.3
    ),
    "another_s_in_the_forward": Call("factored_qk qk=bf16", 70, 100, scale=3.0),
    "codes_but_of_qk_d128": Call("factored_pv16 qk_recompute=bf16", 70, 100, d=128),
    "one_scale_but_of_dq_d128": Call("sagebwd dq=int8@tile_row,block_channel", 70, 100, d=128),
    "one_scale_but_of_dv_d128": Call("sagebwd dv=int8@tile_column,block", 70, 100, d=128),
    "fpa_fp16_d40": Call("fpa_fp16", 100, 100, d=40, is_causal=True, dtype=torch.float16),
    "factored_qk_grouped_d128": Call("factored_qk", 130, 100, d=128, heads=2, is_causal=True),
    "scales_of_keys_d80": Call("factored_qk qk=int8@token,token", 70, 100, d=80),
    "two_heads_a_program": Call("factored_qk", 70, 100, heads=8, heads_k=2, is_causal=True),
    "two_formats_of_ds": Call("factored_qk delta=p dq=fp16 dk=bf16", 70, 100, is_causal=True),
}


COMBINED = (
    "factored_qk",
    "codes_but_of_qk_d128",
    "one_scale_but_of_dq_d128",
    "one_scale_but_of_dv_d128",
)
"""Calls whose head size and formats other calls have as well."""


@pytest.mark.parametrize("name", parameters(CALLS, COMBINED))
def test_results_are_as_exact_as_the_emulators(runner: PtxRunner, name: str) -> None:
    """Up to one rounding to the dtype of the inputs. The results also meet the contract, for any
    codes of P and dS that it allows, because these kernels do not write them."""
    found = check_results(runner, CALLS[name])
    assert {"ampere_forward", "ampere_backward"} <= set(found.kernels)


def test_operands_that_the_forward_kept(runner: PtxRunner) -> None:
    """`trace` passes the operands of the forward on to the backward."""
    call = Call("factored_qk", 130, 100)
    spec, tensors = AttentionSpec.parse(call.spec), call.tensors()
    kept, anew = (runner.run(tensors, spec, keeps_operands=x) for x in (True, False))
    assert {"ampere_forward", "ampere_backward"} <= set(kept.kernels)
    for name in ("o", "dq", "dk", "dv"):
        assert_bitwise(actual=getattr(kept, name), expected=getattr(anew, name), what=name)


MASKED_CALLS = {
    "window": Call("factored_qk delta=p", 140, 200, window=(50, 10), lower_right=True, heads=2),
    "window_of_codes_d128": Call(
        "sagebwd", 200, 200, d=128, window=(70, -1), dead_keys=(range(9),)
    ),
    "key_mask_and_sinks": Call(
        "factored_pv16 delta=p", 140, 260, heads=2, heads_k=1, window=(30, 10), lower_right=True,
        dead_keys=(range(10), range(100, 190)), sink=5.0,
    ),
    "lengths_and_sinks": Call("factored", 150, 150, is_causal=True, used_keys=70, sink=5.0),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED_CALLS)
def test_masks_and_sinks(runner: PtxRunner, name: str) -> None:
    """Nothing of a token that is masked everywhere reaches a result."""
    found = check_masked_results(runner, MASKED_CALLS[name])
    assert {"ampere_forward", "ampere_backward"} <= set(found.kernels)


class Tile(NamedTuple):
    """How the backward divides its work: fields of `Config`."""

    keys: int
    queries: int
    across: int
    stages: int


TILES = {
    ("factored_pv16", 64): (Tile(64, 64, 1, 2), Tile(128, 64, 1, 1)),
    ("factored_qk", 128): (Tile(128, 64, 2, 1), Tile(64, 32, 2, 1)),
    ("sagebwd", 128): (Tile(64, 64, 2, 2), Tile(64, 64, 2, 1)),
    ("factored_pv16", 128): (Tile(64, 64, 2, 1), Tile(64, 64, 2, 1)),
    ("fpa_bf16", 64): (Tile(128, 32, 1, 1), Tile(128, 64, 2, 1)),
    ("fpa_bf16", 128): (Tile(128, 64, 2, 1), Tile(128, 32, 2, 1)),
}
"""A spec and a head size -> the tiles of GPUs with 163 and with 99 KiB of shared memory a block."""

MORE_TILES = (
    ("factored_pv16", 64),
    ("sagebwd", 128),
    ("factored_pv16", 128),
    ("fpa_bf16", 64),
    ("fpa_bf16", 128),
)
"""Those of which each part is in another case."""


@pytest.mark.parametrize(("spec", "d"), parameters(TILES, MORE_TILES))
def test_tiles_change_no_bit(runner: PtxRunner, spec: str, d: int) -> None:
    call = Call(spec, 70, 100, d=d, is_causal=True)
    runs = [
        runner.run(call.tensors(), AttentionSpec.parse(spec), is_causal=True, capability=x)
        for x in (80, 86)
    ]
    tiles = tuple(Tile(*(run.config[field] for field in Tile._fields)) for run in runs)
    assert tiles == TILES[spec, d]
    for name in ("o", "dq", "dk", "dv"):
        more, less = (getattr(run, name) for run in runs)
        assert_bitwise(actual=less, expected=more, what=name)


class BarrierCall(NamedTuple):
    """A call of whose backward each barrier is removed."""

    call: Call
    capability: int = 80
    redundant: tuple[int, ...] = ()  #: barriers, counted from 0 in the order of the PTX


BARRIER_CALLS = {
    "factored_pv16_d128": BarrierCall(Call("factored_pv16", 140, 64, d=128, window=(127, 12))),
    "sagebwd_d128": BarrierCall(Call("sagebwd", 200, 128, d=128, window=(191, 12)), 86),
    "factored_qk_d128": BarrierCall(Call("factored_qk", 200, 128, d=128, window=(191, 12))),
    "fpa_bf16": BarrierCall(Call("fpa_bf16", 200, 128, window=(191, 12))),
    "two_stages": BarrierCall(
        Call("factored_pv16", 200, 128, window=(191, 12)), redundant=(1, 4, 7)
    ),
    "two_stages_d128": BarrierCall(
        Call("sagebwd", 200, 128, d=128, window=(191, 12)), redundant=(2, 6, 10)
    ),
}
"""Calls with a step of each part: before, among and behind the steps that need no mask.

A step without a mask needs a full tile, of 64 or of 128 keys. In `sagebwd` at head size 128 another
barrier precedes the first step. There the first barrier of a masked step is needed from the second
step on. Of two tiles of 64 keys, the second one begins with two masked steps.
"""

MORE_BARRIERS = (
    "sagebwd_d128",
    "factored_qk_d128",
    "fpa_bf16",
    "two_stages",
    "two_stages_d128",
)
"""Calls whose barriers are those of other calls, with other layouts."""


@pytest.mark.parametrize("name", parameters(BARRIER_CALLS, MORE_BARRIERS))
def test_a_missing_barrier_is_found(runner: PtxRunner, name: str) -> None:
    """Each part of the loop over queries has barriers of its own, and the call has all parts.

    They are removed from the PTX, because Triton adds a barrier where the source lacks one.

    With two stages Triton adds a barrier to each part, behind the copies to the other stage. It is
    redundant: the kernel has a barrier before these copies, and the step does not read that stage.
    """
    call, capability, redundant = BARRIER_CALLS[name]
    tensors, spec = call.tensors(), AttentionSpec.parse(call.spec)
    found = runner.run(tensors, spec, **call.options, capability=capability, removes_barriers=True)
    assert found.config["stages"] == (2 if redundant else 1)
    assert found.races
    assert tuple(i for i, race in enumerate(found.races) if not race) == redundant, found.races


def test_a_ds_that_overflows_fp16_reaches_its_row_of_dq(runner: PtxRunner) -> None:
    """No int32 is infinite: where a part of dQ is, its row becomes NaN. dP and delta are finite."""
    tensors = Call("fpa_fp16", 70, 90, dtype=torch.float16).tensors()
    tensors["v"] *= 200
    tensors["do"][..., [7, 66], :] *= 2000
    spec = AttentionSpec.parse("fpa_fp16")
    emulated = sagesim.trace(**tensors, spec=spec)
    overflows = (emulated.ds.abs() > torch.finfo(torch.float16).max).any(-1)
    assert overflows.nonzero()[:, -1].tolist() == [7, 66] and bool(emulated.ds.isfinite().all())
    found = runner.run(tensors, spec)
    for dq in (found.dq, emulated.dq):
        assert torch.equal(~dq.isfinite(), overflows[..., None].expand_as(dq))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_factor_that_is_nan_reaches_its_row_alone(runner: PtxRunner, dtype: torch.dtype) -> None:
    """In the forward a masked entry has P = 0, also in a block whose scale is NaN."""
    tensors = Call("factored_qk", 130, 130, dtype=dtype).tensors()
    tensors["k"][0, 0, 100] = torch.nan
    spec = sagesim.AttentionSpec.parse("factored_qk smooth=none")
    found = runner.run(tensors, spec, is_causal=True)
    is_nan = found.o.isnan().all(-1)[0, 0]
    # The block of keys from 64 to 127 has a scale that is NaN.
    assert not is_nan[:64].any() and is_nan[64:].all()


@pytest.mark.parametrize(("spec", "d"), [("sagebwd", 64), ("factored_qk delta=p", 128)])
def test_tiles_without_keys(runner: PtxRunner, spec: str, d: int) -> None:
    """The first 70 queries attend to no key. Copies of a tile are complete before they are read."""
    tensors, parsed = Call(spec, 140, 70, d=d).tensors(), AttentionSpec.parse(spec)
    found = runner.run(tensors, parsed, is_causal=True, lower_right=True)
    problem = Case(**tensors, is_causal=True, causal_alignment="lower_right")
    assert_as_exact_as_the_emulator(found, problem, parsed)
    for name in ("o", "dq", "delta"):
        assert not getattr(found, name)[:, :, :70].any(), name


@pytest.mark.parametrize("spec", ["factored_qk smooth=none", "sagebwd smooth=none"])
def test_huge_logits_give_finite_results(runner: PtxRunner, spec: str) -> None:
    """Beyond 2^28 all P of a row may be 0, because the forward subtracts more than its maximum."""
    tensors = Call("factored_qk", 70, 70).tensors()
    tensors |= {name: tensors[name] * 2.0**18 for name in ("q", "k")}
    found = runner.run(tensors, sagesim.AttentionSpec.parse(spec))
    for name in OUTPUTS:
        assert getattr(found, name).isfinite().all(), name


@pytest.mark.parametrize("of", ("logits", "values"))
def test_rows_that_the_reference_does_not_fit(runner: PtxRunner, of: str) -> None:
    """The reference is the largest logit of the first block of keys."""
    check_rows_that_fail(runner, of, key=200)


def test_the_largest_p_of_16_bit_is_not_rounded(runner: PtxRunner) -> None:
    """One key of the last block has nearly all of P. Results in float32 show the errors of P."""
    tensors = Call("fpa_bf16", 16, 200, d=40, dtype=torch.float32).tensors()
    tensors["q"][..., 0] = 6.0
    tensors["k"][..., 0] = 0.0
    tensors["k"][:, :, 190] = 0.0
    tensors["k"][:, :, 190, 0] = 8.0
    found = runner.run(tensors, FPA_BF16)
    q, k, v = (tensors[name].bfloat16().double() for name in ("q", "k", "v"))
    assert_within_budget(
        actual=found.o,
        exact=F.scaled_dot_product_attention(q, k, v),
        yardstick=sagesim.trace(**tensors, spec=FPA_BF16).o,
        factor=2.0,
        band=0.0,
        what="o",
    )


def test_a_masked_key_is_not_in_the_reference(runner: PtxRunner) -> None:
    """The first 60 queries do not attend to a key whose logits are far above all others."""
    spec = AttentionSpec.parse("factored_qk qk=int8@token,token smooth=none")
    tensors = Call(spec.label(), 70, 70).tensors()
    tensors["k"][:, :, 60] *= 300.0
    found = runner.run(tensors, spec, is_causal=True)
    assert_as_exact_as_the_emulator(found, Case(**tensors, is_causal=True), spec)


@pytest.mark.parametrize(
    "label",
    [
        "sagebwd qk=bf16 smooth=none",
        "fpa_bf16",
        "factored_qk qk=int8@token,token smooth=none",
    ],
)
def test_a_block_of_infinite_logits_has_no_weight(runner: PtxRunner, label: str) -> None:
    """The products of large q and k overflow: all logits of the first block are -inf.

    Those of the other keys are about -200.
    """
    tensors = Call("sagebwd", 70, 130).tensors()
    tensors["q"][:] = 1e20
    tensors["k"][..., :64, :] = -1e20
    tensors["k"][..., 64:, :] = -1e-20 * (25 + tensors["k"][..., 64:, :])
    spec = AttentionSpec.parse(label)
    found = runner.run(tensors, spec)
    emulated = sagesim.trace(**tensors, spec=spec)
    assert_sqnr_at_least(actual=found.o, exact=emulated.o.double(), floor_db=40, what="o")
