"""The Hopper kernels: odd lengths, sums of dQ, packed sequences, strides, NaN and infinity.

They compute FACTORED_QK at head sizes from 33 to 256. On another GPU the portable kernels would run
instead, so these tests are skipped there. `scripts/gpu_checks.py` leaves out those marked
`exhaustive`, whose parts other combinations have.
"""

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, seed
from hypothesis import strategies as st
from torch import Tensor

from sagesim import FACTORED_QK, Smoothing
from sagesim_kernels import attention, attention_varlen, hopper
from tests.sagesim_kernels.contract import check
from tests.sagesim_kernels.hopper.marks import ON_HOPPER
from tests.sagesim_kernels.kernel_cases import KINDS, LAYOUTS, ORDINARY, KernelCase, low_logits
from tests.support import examples
from tests.support.assertions import assert_bitwise
from tests.support.combinations import combined, numbered
from tests.support.kernels import (
    DEVICE,
    Results,
    all_served,
    assert_same,
    kernel_case,
    poisoned,
    run_kernels,
)
from tests.support.many_steps import ManySteps

pytestmark = [
    *ON_HOPPER,
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]


def by_name(*sizes: int):
    """Head sizes with names for pytest's option -k."""
    return [pytest.param(d, id=f"d{d}") for d in sizes]


MANY_STEPS = tuple(map(ManySteps, (64, 72, 112, 128)))
TILES = (64, ManySteps(64), 128, ManySteps(128), 192, 256)
"""Head sizes of a tile in shared memory."""
HEAD_SIZES = by_name(*TILES)
PAIRS = (
    *((64, 64), (128, 128), (33, 56), (96, 80), (192, 192), (256, 256), (136, 160), (200, 256)),
    *((192, 128), (72, 256), (ManySteps(128), 128), (ManySteps(96), 80), (ManySteps(56), 33)),
)
"""Head sizes of Q and V. Each pair is compiled."""
SIZES = by_name(40, 64, 80, 128, ManySteps(64), ManySteps(80), ManySteps(128), 160, 192, 256)
UNSMOOTHED = replace(FACTORED_QK, smoothing=Smoothing())
SPECS = {"factored_qk": FACTORED_QK, "unsmoothed": UNSMOOTHED}
MASKS = {
    "full": {},
    "upper_left": {"is_causal": True},
    "lower_right": {"is_causal": True, "causal_alignment": "lower_right"},
}
WINDOWS = {
    "causal_window": {"is_causal": True, "window": (200, -1), "causal_alignment": "upper_left"},
    "window": {"window": (70, 130), "causal_alignment": "upper_left"},
    "lower_right_window": {"window": (127, 0), "causal_alignment": "lower_right"},
    "left": {"window": (64, -1), "causal_alignment": "lower_right"},
    "right": {"window": (-1, 40), "causal_alignment": "upper_left"},
}
EVERY_MASK = (
    MASKS
    | WINDOWS
    | {"sinks": WINDOWS["causal_window"]}
    | {"softcap": {"softcap": 2.0, **MASKS["upper_left"]}}
)


def options_of(mask: str, heads: int) -> dict[str, Any]:
    """The options of a call under a mask of EVERY_MASK. "sinks" has those of a window and sinks."""
    options = dict(EVERY_MASK[mask])
    if mask == "sinks":
        options["sinks"] = torch.linspace(-2.0, 6.0, heads, device=DEVICE)
    return options


def named(*values: Any) -> dict[str, Any]:
    """An axis of `combined`, of values that are strings or head sizes."""
    return {x if isinstance(x, str) else f"d{x}": x for x in values}


SOFTCAP_SIZES = named(64, 128, 136, 192, 256)
"""Head sizes for softcaps, with which tiles of many steps have the backward of few."""
EXTRA_SIZES = SOFTCAP_SIZES | named(ManySteps(128))
"""Head sizes for windows, padding and sinks."""
ALL_LENGTHS = (64, 128, 256)
"""Those that are tested with more than one pair of lengths."""


LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 200, 256, 257, 300, 385)


@pytest.fixture
def is_served(unplanned, monkeypatch: pytest.MonkeyPatch):
    """Fail the test if the Hopper kernels did not run every problem."""
    with (
        all_served(monkeypatch, hopper, "serves_forward"),
        all_served(monkeypatch, hopper, "serves_backward"),
    ):
        yield


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(
    ("lengths", "d", "dtype", "mask"),
    combined(
        # Every tile with all lengths, and the head sizes that fill one in part with two.
        lambda lengths, d, dtype, _: (
            (dtype == "bfloat16" or d in (64, 128, 256))
            and (d in TILES or lengths in ((300, 300), (65, 400)))
        ),
        numbered("lengths", [(256, 256), (300, 300), (65, 400), (400, 65), (1, 129)]),
        named(33, 40, 64, 72, 80, 112, 128, 136, 160, 192, 200, 256, *MANY_STEPS),
        named("bfloat16", "float16"),
        named(*MASKS),
    ),
)
def test_kernels_meet_the_contract(lengths, d, dtype, mask):
    n_q, n_k = lengths
    problem = KernelCase(
        spec=FACTORED_QK,
        n_q=n_q,
        n_k=n_k,
        d=d,
        d_v=d,
        heads=(2, 2, 2),
        kinds=("gaussian",) * 4,
        dtype=dtype,
        **MASKS[mask],
    )
    check(problem.case, problem.parsed)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", PAIRS, ids=lambda pair: f"d{pair[0]}-{pair[1]}")
def test_unequal_head_sizes_meet_the_contract(sizes, mask):
    d, d_v = sizes
    problem = KernelCase(
        spec=FACTORED_QK,
        n_q=200,
        n_k=257,
        d=d,
        d_v=d_v,
        heads=(2, 1, 2),
        kinds=("gaussian",) * 4,
        dtype="bfloat16",
        **MASKS[mask],
    )
    check(problem.case, problem.parsed)


def problem_with(extras: dict[str, Any], lengths: tuple[int, int], d: int) -> KernelCase:
    """K has a large mean, so that sinks are far above some rows of smoothed logits and far below
    others, and what the mean adds to dQ is large."""
    n_q, n_k = lengths
    return KernelCase(
        **{
            "spec": FACTORED_QK,
            "n_q": n_q,
            "n_k": n_k,
            "d": d,
            "d_v": d,
            "heads": (3, 1, 2),
            "kinds": ("gaussian", "offset", "gaussian", "gaussian"),
            "dtype": "bfloat16",
        }
        | extras
    )


def at_lengths_and_sizes(extras, sizes):
    """Return combinations of lengths, the names of extras and head sizes."""
    return combined(
        lambda lengths, _, d: lengths == (520, 520) or d in ALL_LENGTHS,
        numbered("lengths", [(300, 400), (400, 300), (520, 520), (1, 129)]),
        named(*extras),
        sizes,
    )


SINKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (127, -1)},
    "padding": {"padding": "right"},
    "full": {"heads": (2, 2, 1), "dtype": "float16"},
    "unsmoothed": {"spec": UNSMOOTHED, "is_causal": True, "dtype": "float32"},
    "lower_right": {"is_causal": True, "causal_alignment": "lower_right"},
    "window_and_padding": {"padding": "random", **WINDOWS["window"]},
    "centred": {"is_causal": True, "kinds": ("gaussian",) * 4},
    "groups": {"is_causal": True, "heads": (1, 1, 8)},
}
"""Fields of a `KernelCase` beside sinks."""


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(("lengths", "extras", "d"), at_lengths_and_sizes(SINKS, EXTRA_SIZES))
def test_sinks_meet_the_contract(lengths, extras, d):
    problem = problem_with({**SINKS[extras], "has_sinks": True}, lengths, d)
    check(problem.case, problem.parsed)


SOFTCAPS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True, "softcap": 5.0},
    "gemma": {"is_causal": True, "window": (127, -1), "softcap": 50.0},
    "full": {"heads": (2, 2, 1), "dtype": "float16", "softcap": 5.0},
    "padding": {"padding": "random", "softcap": 5.0},
    "unsmoothed": {"spec": UNSMOOTHED, "is_causal": True, "dtype": "float32", "softcap": 5.0},
    "sinks": {"has_sinks": True, "softcap": 5.0, **MASKS["lower_right"]},
    "window_sinks": {"has_sinks": True, "softcap": 5.0, "padding": "right", **WINDOWS["window"]},
    "groups": {"is_causal": True, "heads": (1, 1, 8), "softcap": 5.0},
    "centred": {"kinds": ("gaussian",) * 4, "softcap": 0.5},
}
"""Fields of a `KernelCase`."""


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(("lengths", "extras", "d"), at_lengths_and_sizes(SOFTCAPS, SOFTCAP_SIZES))
def test_softcaps_meet_the_contract(lengths, extras, d):
    problem = problem_with(SOFTCAPS[extras], lengths, d)
    check(problem.case, problem.parsed)


EXTRAS: dict[str, dict[str, Any]] = {
    **WINDOWS,
    "random_padding": {"padding": "random"},
    "left_padding": {"padding": "left", "is_causal": True},
    "right_padding": {"padding": "right"},
    "all": {"padding": "random", **WINDOWS["window"]},
}
"""Fields of a `KernelCase`: windows and padding."""


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(
    ("lengths", "d", "extras"),
    combined(
        lambda lengths, d, _: lengths == (520, 520) or d in ALL_LENGTHS,
        numbered("lengths", [(520, 520), (300, 400), (400, 300), (1, 129)]),
        EXTRA_SIZES,
        named(*EXTRAS),
    ),
)
def test_windows_and_padding_meet_the_contract(lengths, d, extras):
    problem = problem_with(EXTRAS[extras], lengths, d)
    check(problem.case, problem.parsed)


COMPILED: tuple[dict[str, Any], ...] = (
    {"d": 64, "d_v": 64, "dtype": "bfloat16", "left": True},
    {"d": 128, "d_v": 128, "dtype": "float16", "left": True, "right": True},
    {"d": 33, "d_v": 56, "dtype": "float32", "is_causal": True, "left": True},
    {"d": 96, "d_v": 80, "dtype": "bfloat16", "right": True, "padding": "left"},
    {"d": 64, "d_v": 64, "dtype": "float16", "padding": "random", "left": True, "right": True},
    {"d": 128, "d_v": 128, "dtype": "bfloat16", "is_causal": True, "padding": "right"},
    {"d": 128, "d_v": 128, "dtype": "bfloat16", "is_causal": True, "left": True},
    {"d": 33, "d_v": 56, "dtype": "float32", "is_causal": True, "has_sinks": True},
    {"d": 64, "d_v": 64, "dtype": "bfloat16", "left": True, "right": True, "has_sinks": True},
    {"d": 96, "d_v": 80, "dtype": "float16", "padding": "random", "has_sinks": True},
    {"d": 256, "d_v": 256, "dtype": "bfloat16", "is_causal": True, "left": True},
    {"d": 136, "d_v": 160, "dtype": "float16", "left": True, "right": True, "has_sinks": True},
    {"d": 256, "d_v": 200, "dtype": "float32", "padding": "random", "is_causal": True},
    {"d": 192, "d_v": 128, "dtype": "bfloat16", "padding": "left", "left": True, "right": True},
    {"d": 64, "d_v": 64, "dtype": "bfloat16", "is_causal": True, "capped": True},
    {"d": 128, "d_v": 128, "dtype": "float16", "padding": "random", "left": True, "capped": True},
    {"d": 96, "d_v": 80, "dtype": "float32", "has_sinks": True, "capped": True},
    {"d": 256, "d_v": 256, "dtype": "bfloat16", "is_causal": True, "left": True, "capped": True},
    {"d": 136, "d_v": 160, "dtype": "float16", "has_sinks": True, "capped": True},
)
"""Fields of a `KernelCase` that are compiled; and whether its window has a limit on each side, and
whether there is a softcap."""


@st.composite
def problems_with_extras(draw: st.DrawFn, compiled: dict[str, Any]) -> KernelCase:
    fields = dict(compiled)
    sides = [
        draw(st.sampled_from((0, 1, 5, 40, 63, 64, 65, 127, 128, 200, 300))) if has_limit else -1
        for has_limit in (fields.pop("left", False), fields.pop("right", False))
    ]
    if fields.pop("capped", False):
        fields["softcap"] = draw(st.sampled_from((0.5, 5.0, 50.0)))
    kind = st.sampled_from(draw(st.sampled_from((sorted(ORDINARY), sorted(KINDS)))))
    return KernelCase(
        spec=FACTORED_QK,
        n_q=draw(st.sampled_from(LENGTHS)),
        n_k=draw(st.sampled_from(LENGTHS)),
        heads=draw(st.sampled_from(((2, 1, 1), (1, 2, 2), (3, 1, 3)))),
        kinds=(draw(kind), draw(kind), draw(kind), draw(kind)),
        window=(sides[0], sides[1]),
        causal_alignment=draw(st.sampled_from(("upper_left", "lower_right"))),
        scale=draw(st.sampled_from((None, 0.03, 1.0, 0.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
        do_layout=draw(st.sampled_from((*LAYOUTS, "expanded"))),
        seed=draw(st.integers(0, 2**32 - 1)),
        **fields,
    )


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("part", range(len(COMPILED)))
def test_any_extras_meet_the_contract(part: int) -> None:
    @seed(part)
    @examples(40)
    @given(problems_with_extras(COMPILED[part]))
    def run(problem: KernelCase) -> None:
        check(problem.case, problem.parsed)

    run()


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(
    "mask", ["full", "upper_left", "causal_window", "window", "sinks", "softcap"]
)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_padded_keys_have_no_influence(d, mask):
    """Each sequence of a padded batch has the bits that it has alone, without its padding. The
    padding is NaN. With seqused_k and with a key mask the bits are the same."""
    used = (300, 65, 0, 1, 129, 256, 192)
    n = max(used)
    options = {"spec": FACTORED_QK, "enable_gqa": True, "return_lse": True}
    options |= options_of(mask, heads=4)
    q, do = (torch.randn(len(used), 4, 330, d, device=DEVICE).bfloat16() for _ in range(2))
    k, v = (torch.randn(len(used), 2, n, d, device=DEVICE).bfloat16() for _ in range(2))
    seqused_k = torch.tensor(used, device=DEVICE)
    key_mask = torch.arange(n, device=DEVICE) < seqused_k[:, None]
    for x in (k, v):
        x.masked_fill_(~key_mask[:, None, :, None], math.nan)

    def run(*tensors: Tensor, **padding: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        o, lse = attention(*leaves, **options, **padding)
        return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, tensors[3])]

    padded = run(q, k, v, do, seqused_k=seqused_k)
    names = ("o", "lse", "dq", "dk", "dv")
    for x, y, name in zip(run(q, k, v, do, key_mask=key_mask), padded, names, strict=True):
        assert_bitwise(actual=x, expected=y, what=name)
    for i, count in enumerate(used):
        one = (x[i : i + 1] for x in (q, k[:, :, :count], v[:, :, :count], do))
        for x, y, name in zip(run(*one), padded, names, strict=True):
            found = y[i : i + 1]
            if name in ("dk", "dv"):
                rest = found[:, :, count:]
                assert_bitwise(actual=rest, expected=torch.zeros_like(rest), what=name)
                found = found[:, :, :count]
            assert_bitwise(actual=found, expected=x, what=f"{name} of {count}")


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("at", ["before the first key", "after the last key"])
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_queries_that_padding_leaves_without_keys(d, at):
    """These queries and the gradients of their outputs are NaN, and no other number becomes NaN."""
    c = kernel_case(torch.bfloat16, seed=7, n_q=333, n_k=333, d=d, heads=(2, 2))
    token = torch.arange(333, device=DEVICE)
    if at == "before the first key":
        mask, dead = {"is_causal": True, "key_mask": (token >= 70).expand(2, -1)}, token < 70
    else:
        mask, dead = {"window": (40, 30), "seqused_k": token.new_tensor([200, 200])}, token >= 240
    c.q[..., dead, :] = c.do[..., dead, :] = math.nan
    found = run_kernels(c, FACTORED_QK, **mask)
    for x in (found.o, found.dq):
        assert not bool(x[..., dead, :].any()) and bool(x.isfinite().all())
    assert bool(found.dk.isfinite().all()) and bool(found.dv.isfinite().all())


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_padding_has_no_influence_where_logits_are_low(d):
    check(low_logits(d, 300), UNSMOOTHED)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_a_value_outside_of_the_window_is_not_read(d, value):
    """A NaN reaches queries whose window contains a key of its 128, and no others."""
    n, left = 1024, 200
    c = kernel_case(torch.bfloat16, seed=6, n_q=n, n_k=n, d=d, heads=(1, 2), is_causal=True)
    c = replace(c, window=(left, -1))
    clean = run_kernels(c, UNSMOOTHED)
    for tensor in (c.k, c.v):
        before = tensor[0, 1, 500].clone()
        tensor[0, 1, 500] = value
        found = run_kernels(c, UNSMOOTHED)
        tensor[0, 1, 500] = before
        for name in ("o", "lse", "dq"):
            x, y = getattr(found, name), getattr(clean, name)
            for rows in (slice(0, 384), slice(512 + left + 64, n)):
                assert_bitwise(actual=x[0, 1, rows], expected=y[0, 1, rows], what=name)
            assert_bitwise(actual=x[0, 0], expected=y[0, 0], what=name)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_dq_is_right_or_nan_near_a_nan_outside_of_the_window(d):
    """Queries 704 to 711 attend to keys 504 to 511. The backward may multiply these in one tile
    with key 400, a NaN: dQ may be NaN there, but no other number."""
    n, left, at = 1024, 200, 400
    c = kernel_case(torch.bfloat16, seed=6, n_q=n, n_k=n, d=d, heads=(1, 2), is_causal=True)
    c = replace(c, window=(left, -1))
    clean = run_kernels(c, UNSMOOTHED).dq
    c.k[0, 1, at] = math.nan
    found = run_kernels(c, UNSMOOTHED).dq
    is_nan = found.isnan()
    assert bool((is_nan | (found == clean)).all())
    assert bool(is_nan[0, 1, at : at + left + 1].all())


@st.composite
def problems(draw: st.DrawFn, sizes: tuple[int, int]) -> KernelCase:
    kind = st.sampled_from(draw(st.sampled_from((sorted(ORDINARY), sorted(KINDS)))))
    d, d_v = sizes
    return KernelCase(
        spec=draw(st.sampled_from(list(SPECS.values()))),
        n_q=draw(st.sampled_from(LENGTHS)),
        n_k=draw(st.sampled_from(LENGTHS)),
        d=d,
        d_v=d_v,
        heads=draw(st.sampled_from(((1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 1, 3)))),
        kinds=(draw(kind), draw(kind), draw(kind), draw(kind)),
        dtype=draw(st.sampled_from(("bfloat16", "float16", "float32"))),
        is_causal=draw(st.booleans()),
        causal_alignment=draw(st.sampled_from(("upper_left", "lower_right"))),
        scale=draw(st.sampled_from((None, 0.03, 1.0, 0.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
        do_layout=draw(st.sampled_from((*LAYOUTS, "expanded"))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("sizes", PAIRS, ids=lambda pair: f"d{pair[0]}-{pair[1]}")
def test_any_problem_meets_the_contract(sizes: tuple[int, int], part: int) -> None:
    @seed(part)
    @examples(10)
    @given(problems(sizes))
    def run(problem: KernelCase) -> None:
        check(problem.case, problem.parsed)

    run()


def portable(case, spec, monkeypatch: pytest.MonkeyPatch, **options) -> Results:
    with monkeypatch.context() as patch:
        for serves in ("serves_forward", "serves_backward"):
            patch.setattr(hopper, serves, lambda _: False)
        return run_kernels(case, spec, **options)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(
    ("lengths", "d", "mask", "spec"),
    combined(
        lambda lengths, _, mask, spec: (
            lengths == (129, 513)
            or (mask in ("full", "upper_left", "sinks", "softcap") and spec is FACTORED_QK)
        ),
        numbered("lengths", [(1, 1), (129, 513), (700, 333), (1024, 1024)]),
        named(*TILES),
        named(*EVERY_MASK),
        SPECS,
    ),
)
def test_results_are_those_of_the_portable_kernels(lengths, d, spec, mask, monkeypatch):
    """They differ by rounding only: both add up float32 sums, in different orders."""
    n_q, n_k = lengths
    c = kernel_case(torch.bfloat16, seed=1, n_q=n_q, n_k=n_k, d=d, heads=(2, 4))
    d_lse = torch.randn(c.q.shape[:-1], device=DEVICE)
    options = options_of(mask, heads=4)
    found = run_kernels(c, spec, d_lse=d_lse, **options)
    twin = portable(c, spec, monkeypatch, d_lse=d_lse, **options)
    assert torch.equal(found.lse.isinf(), twin.lse.isinf())
    live = found.lse.isfinite()
    off = (found.lse - twin.lse)[live].abs()
    assert bool((off <= 1e-5 * (1 + twin.lse[live].abs())).all()), float(off.max())
    for name in ("o", "dq", "dk", "dv"):
        x, y = (getattr(each, name).double() for each in (found, twin))
        assert bool(x.isfinite().all())
        # Rounding to bfloat16 is off by 2**-9 of the result at most, and so are P and dS.
        assert float((x - y).norm()) <= 0.004 * float(y.norm()), name


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(
    ("shape", "d", "mask"),
    combined(
        lambda shape, _, mask: (
            shape == (2, 2, 16, 2000) or mask in ("full", "upper_left", "sinks", "softcap")
        ),
        numbered("shape", [(1, 32, 32, 2048), (2, 2, 16, 2000), (1, 1, 1, 8192), (2, 8, 32, 4096)]),
        named(*TILES),
        named(*EVERY_MASK),
    ),
)
def test_repeated_runs_give_the_same_bits(shape, d, mask):
    """Integer sums of dQ do not depend on the order in which programs add their parts."""
    batch, kv_heads, heads, n = shape
    q, do = (torch.randn(batch, heads, n, d, device=DEVICE).bfloat16() for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, n, d, device=DEVICE).bfloat16() for _ in range(2))

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = attention(*leaves, spec=FACTORED_QK, enable_gqa=True, **options_of(mask, heads))
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    once = run()
    assert all(bool(x.isfinite().all()) for x in once)
    for _ in range(20):
        for x, y, name in zip(run(), once, ("o", "dq", "dk", "dv"), strict=True):
            assert_bitwise(actual=x, expected=y, what=name)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(
    ("lengths", "d", "mask"),
    combined(
        lambda lengths, _, mask: lengths == (129, 513) or mask in ("full", "upper_left"),
        numbered("lengths", [(1, 1), (129, 513), (700, 333), (1024, 1024)]),
        named(*TILES),
        named(*EVERY_MASK),
    ),
)
def test_memory_is_written_before_it_is_read(lengths, d, mask):
    """The results do not depend on what padded storage and the sum of dQ held before.

    compute-sanitizer's initcheck cannot test this, because it does not track writes by TMA.
    """
    n_q, n_k = lengths
    c = kernel_case(torch.bfloat16, seed=3, n_q=n_q, n_k=n_k, d=d, heads=(2, 4))
    d_lse = torch.randn(c.q.shape[:-1], device=DEVICE)
    options = options_of(mask, heads=4)
    once = run_kernels(c, FACTORED_QK, d_lse=d_lse, **options)
    with poisoned():
        assert_same(run_kernels(c, FACTORED_QK, d_lse=d_lse, **options), once)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("mask", EVERY_MASK)
@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("is_equal", [False, True], ids=["unequal", "equal"])
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_packed(is_equal, d, mask):
    """The other packed sequences are empty, longer, shorter, or contain NaN.

    is_equal: whether sequences have as many keys as queries, which the kernels know.
    """
    lengths_q = (300, 0, 65, 1, 513, 64, 70, 130)
    lengths_k = lengths_q if is_equal else (300, 40, 200, 1, 400, 0, 129, 77)
    options = {"spec": FACTORED_QK, "enable_gqa": True, **options_of(mask, heads=4)}
    q, do = (torch.randn(sum(lengths_q), 4, d, device=DEVICE).bfloat16() for _ in range(2))
    k, v = (torch.randn(sum(lengths_k), 2, d, device=DEVICE).bfloat16() for _ in range(2))
    spoilt = 4
    for x, lengths in ((q, lengths_q), (do, lengths_q), (k, lengths_k), (v, lengths_k)):
        x.split(lengths)[spoilt][7] = -math.nan
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=DEVICE)
        for x in (lengths_q, lengths_k)
    )
    if is_equal:
        cu_k = cu_q
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention_varlen(*leaves, cu_q, cu_k, max(lengths_q), max(lengths_k), **options)
    together = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    parts = [
        x.split(n)
        for x, n in zip(together, (lengths_q, lengths_q, lengths_k, lengths_k), strict=True)
    ]
    for i, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if i == spoilt or 0 in (n_q, n_k):
            continue
        one = [x.split(n)[i] for x, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))]
        one_do = do.split(lengths_q)[i]
        for copies in (1, 3):
            leaves = [
                x.transpose(0, 1).expand(copies, -1, -1, -1).clone().requires_grad_() for x in one
            ]
            o = attention(*leaves, **options)
            grads = torch.autograd.grad(o, leaves, one_do.transpose(0, 1).expand_as(o))
            for found, part, name in zip((o, *grads), parts, ("o", "dq", "dk", "dv"), strict=True):
                for copy in found.detach():
                    assert_bitwise(
                        actual=part[i].transpose(0, 1), expected=copy, what=f"{name} of {i}"
                    )


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(
    ("d", "queries", "tensor", "value"),
    combined(
        lambda d, _queries, _tensor, value: d == 64 or math.copysign(1.0, value) > 0,
        named(*TILES),
        {"200-True": (200, True), "400-True": (400, True), "400-False": (400, False)},
        {str(tensor): tensor for tensor in range(4)},
        {"nan0": math.nan, "nan1": -math.nan, "inf": math.inf, "-inf": -math.inf},
    ),
)
def test_nan_and_infinity_stay_in_their_head(tensor, value, d, queries):
    """With 200 queries under the causal mask some keys are not attended to, so K is smoothed before
    the kernel. In the other cases the kernel smooths K itself."""
    n_q, is_causal = queries
    c = kernel_case(torch.bfloat16, seed=2, n_q=n_q, n_k=333, d=d, heads=(2, 3))
    c = replace(c, is_causal=is_causal)
    clean = run_kernels(c, FACTORED_QK)
    c.qkvdo[tensor][1, 1, 20, 5] = value
    found = run_kernels(c, FACTORED_QK)
    for name in Results._fields:
        x, y = getattr(found, name), getattr(clean, name)
        touched = torch.zeros(2, 3, dtype=torch.bool)
        touched[1, 1] = True
        assert_bitwise(actual=x[~touched], expected=y[~touched], what=name)
    assert not bool(found.dq[1, 1].isfinite().all())


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("mask", [*MASKS, "softcap"])
@pytest.mark.parametrize("d", SIZES)
def test_a_ds_that_overflows_in_float16_reaches_dq(d, mask):
    """Nothing else is infinite, so that the units do not know of it beforehand."""
    c = kernel_case(torch.float16, seed=5, n_q=200, n_k=200, d=d, heads=(2, 2))
    c = replace(c, v=c.v * 120)
    c.do[..., 1::2, :] *= 8192.0
    options = MASKS.get(mask, {"softcap": 20.0})
    bad = ~run_kernels(c, FACTORED_QK, **options).dq.isfinite().all(-1)
    # The largest |dS| of these rows is from 1.2e5 to 3e6; that of the others is below 1e3.
    assert bool(bad[..., 101::2].all()) and not bool(bad[..., ::2].any())


WITH_DEAD_TOKENS = (
    ("upper_left", (100, 333)),
    ("lower_right", (333, 100)),
    ("left", (100, 333)),
    ("causal_window", (400, 70)),
)
"""Masks and lengths with keys that no query attends to, or queries that attend to no key."""


def dead_tokens(mask: str, n_q: int, n_k: int) -> tuple[slice, slice]:
    """The queries and the keys that a mask of WITH_DEAD_TOKENS excludes."""
    return {
        "upper_left": (slice(0, 0), slice(n_q, n_k)),
        "lower_right": (slice(0, n_q - n_k), slice(0, 0)),
        "left": (slice(0, 0), slice(0, n_k - n_q - 64)),
        "causal_window": (slice(n_k + 200, n_q), slice(0, 0)),
    }[mask]


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(("mask", "lengths"), WITH_DEAD_TOKENS)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_tokens_outside_the_mask_have_no_influence(mask, lengths, d):
    """Keys that no query attends to, and queries that attend to no key, may be NaN."""
    n_q, n_k = lengths
    c = kernel_case(torch.bfloat16, seed=4, n_q=n_q, n_k=n_k, d=d, heads=(2, 2))
    queries, keys = dead_tokens(mask, n_q, n_k)
    dead = [*(x[..., queries, :] for x in (c.q, c.do)), *(x[..., keys, :] for x in (c.k, c.v))]
    found: list[Results] = []
    for value in (0.0, math.nan):
        for x in dead:
            x.fill_(value)
        found.append(run_kernels(c, FACTORED_QK, **EVERY_MASK[mask]))
    assert all(bool(x.isfinite().all()) for x in (found[0].o, *found[0][2:]))
    assert_same(found[1], found[0])


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize(("mask", "lengths"), WITH_DEAD_TOKENS)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_packed_tokens_outside_the_mask_have_no_influence(mask, lengths, d):
    """The first of two sequences has NaN in the tokens that the mask excludes."""
    n_q, n_k = lengths
    queries, keys = dead_tokens(mask, n_q, n_k)
    q, do = (torch.randn(n_q + 9, 4, d, device=DEVICE).bfloat16() for _ in range(2))
    k, v = (torch.randn(n_k + 9, 2, d, device=DEVICE).bfloat16() for _ in range(2))
    cu = (torch.tensor([0, n, n + 9], dtype=torch.int32, device=DEVICE) for n in lengths)
    cu_q, cu_k = cu
    options = {"spec": FACTORED_QK, "enable_gqa": True, **EVERY_MASK[mask]}
    found: list[list[Tensor]] = []
    for value in (0.0, math.nan):
        for x, tokens in ((q, queries), (do, queries), (k, keys), (v, keys)):
            x[tokens] = value
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = attention_varlen(*leaves, cu_q, cu_k, n_q, n_k, **options)
        found.append([o.detach(), *torch.autograd.grad(o, leaves, do)])
    for name, zeros, nans in zip(("o", "dq", "dk", "dv"), *found, strict=True):
        assert bool(zeros.isfinite().all()), name
        assert_bitwise(actual=nans, expected=zeros, what=name)


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_a_query_without_keys_gets_no_nan_of_its_block(d):
    c = kernel_case(torch.bfloat16, seed=6, n_q=333, n_k=100, d=d, heads=(2, 2))
    c.k[..., 0, :] = math.nan
    found = run_kernels(c, FACTORED_QK, **MASKS["lower_right"])
    assert not bool(found.dq[..., :233, :].any()) and not bool(found.o[..., :233, :].any())
    assert bool(found.dq[..., 233:, :].isnan().all())


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_a_key_without_queries_gets_no_nan_of_its_block(d):
    c = kernel_case(torch.bfloat16, seed=6, n_q=100, n_k=333, d=d, heads=(2, 2))
    c.q[..., 0, :] = math.nan
    found = run_kernels(c, FACTORED_QK, **EVERY_MASK["left"])
    for grad in (found.dk, found.dv):
        assert not bool(grad[..., :169, :].any()) and bool(grad[..., 169:, :].isnan().all())


@pytest.mark.usefixtures("is_served")
@pytest.mark.parametrize("d", SIZES)
def test_strides_do_not_change_any_bit(d):
    c = kernel_case(torch.bfloat16, seed=3, n_q=300, n_k=257, d=d, heads=(2, 4), is_causal=True)
    expected = run_kernels(c, FACTORED_QK)
    for lay_out in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1))[..., 3:-1, 1:-2],
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert_same(run_kernels(c.map(lay_out), FACTORED_QK), expected)
    expanded = replace(c, k=c.k[:, :1].expand_as(c.k), v=c.v[:, :1].expand_as(c.v))
    expected = run_kernels(expanded.map(torch.Tensor.contiguous), FACTORED_QK)
    assert_same(run_kernels(expanded, FACTORED_QK), expected)
