"""The kernels agree with the emulator on random calls: 54 cases by default, 10,000 under the long
profile, 20,000 with `--device cuda`, for each GPU of `--code` as well."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import Phase, example, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from sagesim_kernels import attention, attention_varlen
from tests.sagesim_kernels.contract import (
    OUTPUTS,
    Tally,
    check,
    emulate,
    emulated_case,
    run_kernels,
)
from tests.sagesim_kernels.kernel_cases import PRESETS, Alike, KernelCase, alike, problems
from tests.sagesim_kernels.untraced import (
    check_with_call,
    has_codes_backward,
    has_codes_forward,
    has_fp8_backward,
)
from tests.support import examples
from tests.support.assertions import assert_bitwise
from tests.support.combinations import crossed
from tests.support.inputs import Case
from tests.support.kernels import DEVICE, HERE

pytestmark = [
    *HERE,
    # A gradient beyond float16's range is infinite, in the emulator as well.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
    # In a row of dQ whose unit is NaN, as docs/numerics.md has it for logits of millions in 16 bit,
    # parts are divided by any number.
    pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning"),
]

Run = TypeVar("Run", bound=Callable[..., None])

CASES = {"fast": 54, "long": 10_000, "cuda": 20_000}
PARTS, ALIKE = (14, 160) if DEVICE == "cuda" else (2, 1)
"""Parts into which each preset's cases are split for workers, and cases for each compilation."""

PHASES = (Phase.explicit, Phase.generate) if DEVICE == "cuda" else settings.default.phases
"""On a GPU nothing is shrunk: each attempt runs all cases of a compilation. The error names its
case."""

MOST_DIFFERING = 1e-3
"""Largest share of codes of P and dS that may differ, over ordinary inputs; see docs/numerics.md,
Between implementations."""

ENOUGH = 20_000
"""Codes needed to measure that share: all codes of a row may lie near ties."""


SIMPLEST = 1
"""The first example of hypothesis is always the simplest one, here a query and a key: none is drawn
unless there are more."""

DRAWN = SIMPLEST + 1
"""Examples of which one is drawn."""


def drawn_by_itself(number: int) -> Callable[[Run], Run]:
    """Give each test its own draws: under fixed draws, all would get the same."""
    return seed(number) if settings.default.derandomize else lambda run: run


@pytest.mark.parametrize("preset", PRESETS)
def test_kernels_meet_the_contract_on_one_call(preset: str) -> None:
    @drawn_by_itself(1000 + list(PRESETS).index(preset))
    @examples(DRAWN)
    @given(problems(PRESETS[preset]))
    def run(problem: KernelCase) -> None:
        check_with_call(problem.case, problem.parsed)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("preset", PRESETS)
def test_kernels_meet_the_contract(preset: str, part: int, request: pytest.FixtureRequest) -> None:
    device = request.config.getoption("--device")
    if device != DEVICE:
        pytest.skip(f"the kernels were imported for {DEVICE}; fuzz them with --device {DEVICE}")
    on_cpu = "fast" if settings.default.derandomize else "long"
    profile = "cuda" if device == "cuda" else on_cpu
    total = CASES[profile]
    tally = Tally()

    @drawn_by_itself(list(PRESETS).index(preset) * PARTS + part)
    @settings(max_examples=SIMPLEST + -(-total // (len(PRESETS) * PARTS * ALIKE)), phases=PHASES)
    @given(alike(PRESETS[preset], ALIKE))
    def run(several: Alike) -> None:
        for problem in dict.fromkeys(several):
            try:
                found = check_with_call(problem.case, problem.parsed)
            except Exception as error:
                error.add_note(f"in {problem!r}")
                raise
            if problem.is_ordinary:
                tally.add(found)

    run()
    print(tally)
    assert tally.total <= MOST_DIFFERING * max(ENOUGH, tally.counted), str(tally)


def test_codes_whose_scale_is_noise_are_not_held_to_the_emulators() -> None:
    """In rows 20 and 31 one key has all of P, so that dS, and the row's scale, is the rounding
    error of dP - delta. In one of them it is 20 times the emulator's, and codes are 31 instead of
    1."""
    problem = KernelCase(
        spec="factored round=half_away",
        n_q=63,
        n_k=31,
        d=64,
        d_v=64,
        heads=(1, 1, 1),
        kinds=("outlier_channel", "gaussian", "outlier_channel", "outlier_channel"),
        dtype="float16",
        seed=1557556872,
    )
    tally = check(problem.case, problem.parsed)
    assert tally.entries["dq.ds"] > 1000
    assert tally.differing["dq.ds"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "lengths"),
    crossed([*PRESETS], [(20, 33), (33, 20), (40, 40), (1, 70), (70, 1), (130, 66)], each=2),
)
def test_lower_right_is_the_emulator_under_that_mask(preset: str, lengths: tuple[int, int]) -> None:
    """If there are more queries than keys, the first queries attend to no key and get zeros."""
    n_q, n_k = lengths
    problem = KernelCase(
        spec=f"{preset} block=32x32",
        n_q=n_q,
        n_k=n_k,
        d=16,
        d_v=16,
        heads=(1, 1, 1),
        kinds=("gaussian",) * 4,
        is_causal=True,
        causal_alignment="lower_right",
    )
    check(problem.case, problem.parsed)
    found = run_kernels(problem.case, problem.parsed)
    dead = max(n_q - n_k, 0)
    for name in ("o", "dq", "delta"):
        x = getattr(found, name)[:, :, :dead]
        assert_bitwise(actual=x.abs(), expected=torch.zeros_like(x), what=name)
    lse = found.lse[:, :, :dead]
    assert_bitwise(actual=lse, expected=torch.full_like(lse, -torch.inf), what="lse")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "preset"),
    crossed([(100, 40), (40, 100), (-1, 70), (150, -1)], ["sagebwd", "fpa_fp16"]),
)
def test_windows_of_several_blocks(preset: str, window: tuple[int, int]) -> None:
    """Some blocks are inside of every query's window, and need no mask; others are at an edge."""
    for alignment in ("upper_left", "lower_right"):
        problem = KernelCase(
            spec=f"{preset} block=32x32",
            n_q=200,
            n_k=230,
            d=16,
            d_v=16,
            heads=(1, 1, 1),
            kinds=("gaussian",) * 4,
            window=window,
            causal_alignment=alignment,
        )
        check(problem.case, problem.parsed)


LENGTHS_WITH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "upper left": {"is_causal": True, "has_sinks": True},
    "lower right": {"is_causal": True, "causal_alignment": "lower_right", "softcap": 5.0},
    "window": {"window": (20, 9), "causal_alignment": "lower_right", "has_sinks": True},
}


@pytest.mark.parametrize(
    ("options", "preset"), crossed([*LENGTHS_WITH], ["sagebwd", "factored_qk", "fp8_gradients"])
)
def test_lengths_of_key_sequences(options: str, preset: str) -> None:
    """One sequence has no key, one has all, and what is behind the others' last key is NaN."""
    problem = KernelCase(
        spec=preset,
        n_q=40,
        n_k=70,
        d=16,
        d_v=16,
        heads=(5, 1, 2),
        kinds=("gaussian",) * 4,
        padding="int32 lengths",
        seed=45,
        **LENGTHS_WITH[options],
    )
    assert problem.case.seqused_k is not None
    lengths = problem.case.seqused_k.tolist()
    assert {0, 70} < {*lengths} and len({*lengths}) > 3
    check(problem.case, problem.parsed)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("preset", ["sagebwd", "factored"])
def test_the_mean_of_k_reaches_dq_where_rows_of_ds_do_not_sum_to_0(
    preset: str, softcap: float | None
) -> None:
    """K has a mean that is larger than its deviation."""
    problem = KernelCase(
        spec=preset,
        n_q=40,
        n_k=50,
        d=16,
        d_v=16,
        heads=(1, 1, 2),
        kinds=("gaussian", "offset", "gaussian", "gaussian"),
        has_sinks=True,
        softcap=softcap,
    )
    check(problem.case, problem.parsed)


@pytest.mark.parametrize("preset", ["sagebwd", "factored_qk"])
def test_o_is_not_0_under_a_sink_far_above_the_logits(preset: str) -> None:
    """Their distance is 88 to 100, and exp(-88) is below the smallest normal number. O is not,
    because V is large."""
    problem = KernelCase(
        spec=f"{preset} smooth=none",
        n_q=20,
        n_k=50,
        d=16,
        d_v=16,
        heads=(1, 4, 1),
        kinds=("gaussian", "zeros", "large", "gaussian"),
    )
    sinks = torch.tensor([88.0, 90.0, 94.0, 100.0], device=DEVICE)
    case = replace(problem.case, sinks=sinks)
    assert (
        float(emulate(emulated_case(case), problem.parsed).o[:, :3].abs().amax((-1, -2)).min()) > 0
    )
    check(case, problem.parsed)


@pytest.mark.parametrize("preset", ["sagebwd", "factored", "fpa_fp16"])
def test_a_sum_of_ds_is_not_divided_by_a_small_unit(preset: str) -> None:
    """With K = 0 the unit is 2^-126 in 16 bit. A row of dS that sums to more than 4, divided by it,
    overflows, and infinity times a mean of 0 is NaN."""
    problem = KernelCase(
        spec=f"{preset} smooth=k",
        n_q=40,
        n_k=50,
        d=16,
        d_v=16,
        heads=(1, 1, 1),
        kinds=("gaussian", "zeros", "large", "gaussian"),
        has_sinks=True,
        softcap=5.0,
    )
    assert float((emulate(emulated_case(problem.case), problem.parsed).ds.sum(-1)).abs().max()) > 4
    check(problem.case, problem.parsed)


def differentiate(outputs: Tensor, leaves: list[Tensor], do: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(outputs, leaves, do)
    return dict(zip(("o", "dq", "dk", "dv"), (outputs.detach(), *grads), strict=True))


def run_attention(case: Case, problem: KernelCase, layout: str) -> dict[str, Tensor]:
    """The results of `attention`, on the CPU, as [batch, heads, tokens, channels]."""
    tensors = [x.detach() for x in case.qkvdo]
    if layout == "NHD":
        tensors = [x.transpose(1, 2) for x in tensors]
    *leaves, do = tensors
    leaves = [x.requires_grad_() for x in leaves]
    options = {"spec": problem.parsed, "layout": layout, **case.kernel_options}
    o, lse = attention(*leaves, return_lse=True, **options)
    found = differentiate(o, leaves, do)
    if layout == "NHD":
        found = {name: x.transpose(1, 2) for name, x in found.items()}
    return {name: x.cpu() for name, x in (found | {"lse": lse.detach()}).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "layout"), crossed([*PRESETS], ["HND", "NHD"]))
def test_attention_returns_the_bytes_of_the_trace(preset: str, layout: str) -> None:
    @drawn_by_itself(list(PRESETS).index(preset))
    @examples(DRAWN)
    @given(problems(PRESETS[preset]))
    def run(problem: KernelCase) -> None:
        spec = problem.parsed
        if any(
            f(problem.case, spec) for f in (has_codes_forward, has_codes_backward, has_fp8_backward)
        ):
            return  # A trace runs other kernels; `check_with_call` checks both.
        found = run_attention(problem.case, problem, layout)
        expected = run_kernels(problem.case, spec)
        for name in OUTPUTS:
            if name != "delta":
                assert_bitwise(actual=found[name], expected=getattr(expected, name), what=name)

    run()


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths of packed sequences, for queries and for keys; each list starts with a 0."""
    count = draw(st.integers(1, 3))
    length = st.sampled_from((0, 1, 5, 16, 31, 33, 50, 65))
    several = st.lists(length, min_size=count, max_size=count).filter(any)
    queries = [0, *draw(several)]
    return queries, queries if draw(st.booleans()) else [0, *draw(several)]


PACKED = ("sagebwd", "factored_qk", "fpa_fp16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    [x if x in PACKED else pytest.param(x, marks=pytest.mark.exhaustive) for x in PRESETS],
)
def test_packed_sequences_are_computed_one_by_one(preset: str) -> None:
    """Outputs and gradients are bitwise those of each sequence alone. A sequence may have no
    queries or no keys; its zeros have the sign of the scale."""
    negative = KernelCase(
        spec=PRESETS[preset],
        n_q=1,
        n_k=1,
        d=64,
        d_v=64,
        heads=(1, 1, 1),
        kinds=("gaussian",) * 4,
        dtype="float16",
        scale=-0.3,
    )

    @drawn_by_itself(list(PRESETS).index(preset))
    @examples(DRAWN)
    @given(problems(PRESETS[preset]), cuts())
    @example(negative, ([0, 5, 0, 16], [0, 0, 31, 33]))
    def run(problem: KernelCase, lengths: tuple[list[int], list[int]]) -> None:
        check_packed(problem, *lengths)

    run()


def check_packed(problem: KernelCase, *lengths: list[int]) -> None:
    """Compare attention of packed sequences of these lengths with attention of each of them."""
    starts = [torch.tensor(x).cumsum(0).tolist() for x in lengths]
    n_q, n_k = (x[-1] for x in starts)
    heads = (1, *problem.heads[1:])
    packed = replace(problem, n_q=n_q, n_k=n_k, heads=heads, padding="none")
    options: dict[str, Any] = {"spec": problem.parsed, **packed.case.kernel_options}
    for name in ("attn_mask", "key_mask"):  # packed sequences have none
        assert options.pop(name) is None
    *leaves, do = (x[0].transpose(0, 1).detach() for x in packed.case.qkvdo)
    leaves = [x.requires_grad_() for x in leaves]
    cu = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in starts]
    if starts[0] == starts[1]:  # then the kernels know that lengths are equal
        cu = cu[:1] * 2
    o = attention_varlen(*leaves, *cu, *map(max, lengths), **options)
    found = differentiate(o, leaves, do)
    for i in range(len(lengths[0]) - 1):
        q_part, k_part = (slice(x[i], x[i + 1]) for x in starts)
        parts = [
            x.detach()[part].transpose(0, 1)[None].requires_grad_()
            for x, part in zip(leaves, (q_part, k_part, k_part), strict=True)
        ]
        one_do = do[q_part].transpose(0, 1)[None]
        expected = differentiate(attention(*parts, **options), parts, one_do)
        for name, whole in found.items():
            part = k_part if name in ("dk", "dv") else q_part
            assert_bitwise(
                actual=whole[part],
                expected=expected[name][0].transpose(0, 1),
                what=f"{name} of sequence {i}",
            )
