"""Hypothesis strategies for attention calls and specs. Needs the extra `fuzz`.

Hypothesis draws names, lengths and a seed; numpy draws the numbers of the tensors. This keeps large
tensors cheap and failing examples readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from sagesim.fuzzing.cases import (
    DTYPES,
    EXTRAS,
    FEATURES,
    HEAD_SIZES,
    KEY_MASKS,
    LAYOUTS,
    FuzzCase,
)
from sagesim.fuzzing.inputs import KINDS
from sagesim.spec import (
    CAUSAL_SAFE,
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    FP8_GRADIENTS,
    HALF_AWAY,
    HALF_EVEN,
    OPERANDS,
    SAGE_FORWARD,
    SAGEBWD,
    SAGEBWD_ALL_INT8,
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    Smoothing,
    with_precision,
)

# Arguments are annotated as Collection, not Sequence: run-time type checkers check a random item of
# a sequence, and Hypothesis warns about other random numbers while it draws.

Draw = Callable[..., Any]
"""Hypothesis's DrawFn. That protocol cannot be checked at run time."""

_BOUND: Final = Granularity.PerRowBound
TOKEN_GRANULARITIES: Final = tuple(g for g in Granularity if not g.is_map)
MAP_GRANULARITIES: Final = tuple(g for g in Granularity if g.is_map and g is not _BOUND)
"""Those whose scales follow from the elements of the map."""

KERNEL_PRESETS: Final = (
    SAGEBWD,
    SAGEBWD_ALL_INT8,
    SAGE_FORWARD,
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    CAUSAL_SAFE,
    FP8_GRADIENTS,
)
"""The presets that kernels are written for."""

_MAP_ENTRIES: Final = 2**17
"""Largest number of elements of S, over all heads of a case. Larger cases only take longer."""

seeds: SearchStrategy[int] = st.integers(0, 2**32 - 1)
roundings: SearchStrategy[Rounding] = st.one_of(
    st.just(HALF_EVEN), st.just(HALF_AWAY), seeds.map(Rounding.stochastic)
)
smoothings: SearchStrategy[Smoothing] = st.builds(Smoothing, q=st.booleans(), k=st.booleans())
all_blocks: SearchStrategy[int] = st.sampled_from((1, 7, 16, 32, 64, 128))


def lengths(block: int, longest: int, *, tails: bool = True) -> SearchStrategy[int]:
    """Numbers of tokens up to `longest`; half are within 1 of 16 or of a multiple of the block.

    Args:
        block: tokens of a block.
        longest: largest number of tokens.
        tails: also numbers that are no multiple of the block.

    Raises:
        ValueError: if no number is allowed: without tails, if `longest` is less than a block.
    """
    if longest < (1 if tails else block):
        raise ValueError(f"longest={longest} is less than {1 if tails else block}")
    if not tails:
        return st.integers(1, longest // block).map(lambda blocks: blocks * block)
    near = {b + step for b in (16, *range(block, longest + 2, block)) for step in (-1, 0, 1)}
    near = {n for n in near if 0 < n <= longest} or {longest}
    return st.integers(1, longest) | st.sampled_from(sorted(near))


def cases(
    *,
    block_q: int = 64,
    block_k: int = 64,
    dtypes: Collection[str] = tuple(DTYPES),
    head_sizes: Collection[int] = HEAD_SIZES,
    longest: int | None = None,
    without: Collection[str] = (),
    extras: Collection[str] = (),
) -> SearchStrategy[FuzzCase]:
    """Any call: lengths with tails, masks, grouped heads, layouts and kinds of numbers.

    Args:
        block_q, block_k: block sizes of the spec; half of the lengths are close to a multiple.
        dtypes: names in `DTYPES`.
        head_sizes: the head sizes to draw from.
        longest: largest number of tokens; None is 7/3 of the larger block, or more if `without`
            leaves no length up to it.
        without: names in `FEATURES` to exclude.
        extras: names in `EXTRAS` to include.

    Raises:
        ValueError: if `longest` and `without` leave no length. The message calls `longest` as
            `sagesim.fuzz` does.
    """
    assert set(without) <= set(FEATURES) and set(extras) <= set(EXTRAS)
    block, why = max(block_q, block_k), "lengths are multiples of their blocks"
    if "cross" in without and block_q != block_k:
        block = math.lcm(block_q, block_k)
        why = f"equal lengths are multiples of both blocks, {block_q} and {block_k}"
    shortest = block if "tails" in without else 1
    if longest is None:
        longest = max(7 * max(block_q, block_k) // 3, shortest)
    if longest < shortest:
        words = f"; without tails, {why}" if "tails" in without else ""
        raise ValueError(f"max_length={longest} is less than {shortest}{words}")
    return _cases(block_q, block_k, dtypes, head_sizes, longest, without, extras)


@st.composite
def _cases(
    draw: Draw,
    block_q: int,
    block_k: int,
    dtypes: Collection[str],
    head_sizes: Collection[int],
    longest: int,
    without: Collection[str],
    extras: Collection[str],
) -> FuzzCase:
    tails = "tails" not in without
    # Without tails, equal lengths have to be multiples of both blocks.
    block = max(block_q, block_k) if tails else math.lcm(block_q, block_k)
    if "cross" in without or ((tails or block <= longest) and draw(st.booleans())):
        n_q = n_k = draw(lengths(block, longest, tails=tails))
    else:
        n_q = draw(lengths(block_q, longest, tails=tails))
        n_k = draw(lengths(block_k, longest, tails=tails))
    most_heads = max(1, _MAP_ENTRIES // (n_q * n_k))
    groups = 1 if "gqa" in without else min(draw(st.sampled_from((1, 1, 2, 3))), most_heads)
    kv_heads = min(draw(st.sampled_from((1, 2, 3))), most_heads // groups)
    masks = [mask for mask in ("full", "causal") if mask not in without]
    q, k, v, do = (draw(_kinds()) for _ in range(4))
    kinds: tuple[str, str, str, str] = (q, k, v, do)
    layout = do_layout = "contiguous"
    if "strides" not in without:
        layout = draw(st.sampled_from(LAYOUTS[:-1]))
        do_layout = draw(st.sampled_from(LAYOUTS))
    dtype = draw(st.sampled_from(tuple(dtypes)))
    return FuzzCase(
        n_q=n_q,
        n_k=n_k,
        d=draw(st.sampled_from(tuple(head_sizes))),
        dtype=dtype,
        batch=min(draw(st.sampled_from((1, 2))), max(1, most_heads // (groups * kv_heads))),
        kv_heads=max(1, kv_heads),
        groups=groups,
        is_causal=draw(st.sampled_from(masks)) == "causal",
        **_extras(draw, extras, n_q, n_k),
        scale=None if "scale" in without else draw(st.sampled_from((None, None, 0.25, 0.05, 0.5))),
        kinds=kinds,
        gains=_gains(draw(st.sampled_from(("none", "none", *"qkvd"))), draw(st.booleans()), dtype)
        if "half_integer_ties" not in kinds
        else _gains_of_ties(kinds),
        layout=layout,
        do_layout=do_layout,
        seed=draw(seeds),
    )


def _extras(draw: Draw, names: Collection[str], n_q: int, n_k: int) -> dict[str, Any]:
    """The fields of a case for these names of `EXTRAS`; each is left out of half of the cases."""
    found: dict[str, Any] = {}
    if "window" in names and draw(st.booleans()):
        side = st.just(-1) | st.integers(0, max(n_q, n_k))
        found["window"] = draw(side), draw(side)
        found["causal_alignment"] = draw(st.sampled_from(("upper_left", "lower_right")))
    paddings = [*KEY_MASKS] if "padding" in names else []
    if "seqused_k" in names:
        paddings.append("seqused_k")
    if paddings and draw(st.booleans()):
        found["padding"] = draw(st.sampled_from(paddings))
    if "sinks" in names:
        found["sinks"] = draw(st.booleans())
    if "softcap" in names and draw(st.booleans()):
        found["softcap"] = draw(st.sampled_from((1.0, 5.0, 50.0)))
    return found


def _kinds() -> SearchStrategy[str]:
    """At least half of the tensors are Gaussian, the others of any kind."""
    return st.just("gaussian") | st.sampled_from(tuple(KINDS))


def _gains(tensor: str, large: bool, dtype: str) -> tuple[int, int, int, int]:
    """Exponents that make one tensor (q, k, v or d for do) small or large, without overflow."""
    small = -8 if dtype == "float16" else -30
    q, k, v, do = (small if name == tensor else 0 for name in "qkvd")
    if large:  # large q or k give logits of a few hundred, large v or do elements of a few hundred
        q, k, v, do = (
            top if name == tensor else 0 for name, top in zip("qkvd", (2, 2, 6, 6), strict=True)
        )
    return q, k, v, do


def _gains_of_ties(kinds: tuple[str, str, str, str]) -> tuple[int, int, int, int]:
    """Exponents for q, k, v and do: -6 for tensors of ties, 0 for the others.

    This reduces the largest element of tensors of ties from 127 to about 2. They remain ties,
    because a power of two changes elements and scales alike.
    """
    q, k, v, do = (-6 if kind == "half_integer_ties" else 0 for kind in kinds)
    return q, k, v, do


@st.composite
def matmuls(draw: Draw, site: str, precisions: Collection[Precision]) -> MatmulSpec:
    """Any precision and granularities that the site allows."""
    lhs, rhs = (draw(st.sampled_from(Granularity.of(site, tensor))) for tensor in OPERANDS[site])
    return MatmulSpec(draw(st.sampled_from(tuple(precisions))), lhs, rhs)


@st.composite
def specs(
    draw: Draw,
    *,
    precisions: Collection[Precision] = tuple(Precision),
    roundings: SearchStrategy[Rounding] = roundings,
    smoothings: SearchStrategy[Smoothing] = smoothings,
    blocks: SearchStrategy[int] = all_blocks,
    same_recompute: bool = False,
) -> AttentionSpec:
    """Any spec with the given precisions, roundings, smoothings and block sizes; default: all.

    same_recompute: qk_recompute equals qk. If they differ, P = exp(S - L) is not bounded by 1 and
    may overflow for finite inputs with large logits.
    """
    sites = {site: draw(matmuls(site, precisions)) for site in SITES}
    if same_recompute:
        sites["qk_recompute"] = sites["qk"]
    return replace(
        SAGEBWD,
        **sites,
        smoothing=draw(smoothings),
        rounding=draw(roundings),
        delta=draw(st.sampled_from(Delta)),
        block_q=draw(blocks),
        block_k=draw(blocks),
    )


@st.composite
def specs_for_kernels(
    draw: Draw,
    *,
    supported: Callable[[AttentionSpec], bool] = lambda spec: True,
    blocks: Collection[int] = (64, 32, 128),
    same_recompute: bool = True,
) -> AttentionSpec:
    """One of `KERNEL_PRESETS` with some sites, smoothing, rounding, delta or blocks changed.

    Few fields are changed at a time, so that many of the specs are supported by a kernel.

    Args:
        supported: only specs for which it returns True are drawn; it should accept many.
        blocks: the block sizes to draw from.
        same_recompute: qk_recompute has the precision of qk; see `specs`.
    """
    return draw(_specs_for_kernels(blocks, same_recompute).filter(supported))


@st.composite
def _specs_for_kernels(draw: Draw, blocks: Collection[int], same_recompute: bool) -> AttentionSpec:
    spec = draw(st.sampled_from(KERNEL_PRESETS))
    for site in SITES:
        if draw(st.sampled_from((False, False, True))):
            precision = draw(st.sampled_from((Precision.INPUT16, Precision.INT8)))
            spec = with_precision(spec, precision, site)
    if same_recompute:
        spec = with_precision(spec, spec.qk.precision, "qk_recompute")
    changes = st.fixed_dictionaries(
        {},
        optional={"smoothing": smoothings, "rounding": roundings, "delta": st.sampled_from(Delta)},
    )
    size = st.sampled_from(tuple(blocks))
    return replace(spec, **draw(changes), block_q=draw(size), block_k=draw(size))
