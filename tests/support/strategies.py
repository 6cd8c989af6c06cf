"""Hypothesis strategies: tensors and cases by kind, shapes with tails, and whole specs.

Hypothesis draws names, lengths and a seed; numpy draws the numbers, which keeps large tensors
cheap and a failing example readable.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from sagesim import (
    HALF_AWAY,
    HALF_EVEN,
    SAGEBWD,
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    Smoothing,
)
from sagesim.spec import MAPS, OPERANDS
from tests.support.inputs import MILD, Builder, Case, case, random_mask

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 130)
HEAD_SIZES = (1, 8, 16, 40, 64, 72)
BLOCKS = (1, 7, 16, 32, 64, 128)

TOKEN_GRANULARITIES = tuple(g for g in Granularity if not g.is_map)
MAP_GRANULARITIES = tuple(g for g in Granularity if g.is_map)
SCALED = tuple(p for p in Precision if p.is_scaled)

lengths = st.sampled_from(LENGTHS)
head_sizes = st.sampled_from(HEAD_SIZES)
blocks = st.sampled_from(BLOCKS)
seeds = st.integers(0, 2**32 - 1)
few_heads = st.sampled_from([(1,), (2, 1)])
roundings = st.one_of(st.just(HALF_EVEN), st.just(HALF_AWAY), seeds.map(Rounding.stochastic))
smoothings = st.builds(Smoothing, q=st.booleans(), k=st.booleans())


@st.composite
def tensors(draw: st.DrawFn, kinds: dict[str, Builder], *, heads: tuple[int, ...] = (2,)) -> Tensor:
    """A float32 tensor [*heads, n, d] of one of these kinds."""
    build = kinds[draw(st.sampled_from(sorted(kinds)))]
    shape = (*heads, draw(lengths), draw(head_sizes))
    return torch.from_numpy(build(np.random.default_rng(draw(seeds)), shape))


@st.composite
def matmuls(draw: st.DrawFn, site: str, precisions: Sequence[Precision]) -> MatmulSpec:
    """Any product that fits the site."""
    lhs, rhs = (
        draw(st.sampled_from(MAP_GRANULARITIES if t in MAPS else TOKEN_GRANULARITIES))
        for t in OPERANDS[site]
    )
    return MatmulSpec(draw(st.sampled_from(precisions)), lhs, rhs)


@st.composite
def specs(
    draw: st.DrawFn,
    *,
    precisions: Sequence[Precision] = tuple(Precision),
    roundings: st.SearchStrategy[Rounding] = roundings,
    smoothings: st.SearchStrategy[Smoothing] = smoothings,
    blocks: st.SearchStrategy[int] = blocks,
    same_recompute: bool = False,
) -> AttentionSpec:
    """Any spec at all, or any of these precisions, roundings, smoothings, and block sizes.

    same_recompute: the backward's logits are the forward's. Where they are not, exp(S - L) has no
    bound, and finite inputs with large logits may overflow it.
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
def cases(
    draw: st.DrawFn,
    kinds: dict[str, Builder] = MILD,
    *,
    heads: st.SearchStrategy[tuple[int, ...]] = few_heads,
    lengths: st.SearchStrategy[int] = lengths,
    head_sizes: st.SearchStrategy[int] = head_sizes,
    masks: Sequence[str] = ("none", "causal", "random"),
) -> Case:
    """Any attention over these kinds of tensors: n_q and n_k, d and d_v are drawn apart."""
    names = st.sampled_from(sorted(kinds))
    q, k, v, do = (kinds[draw(names)] for _ in range(4))
    seed, n_q, n_k, h = draw(seeds), draw(lengths), draw(lengths), draw(heads)
    mask = draw(st.sampled_from(masks))
    return case(
        seed=seed,
        n_q=n_q,
        n_k=n_k,
        d=draw(head_sizes),
        d_v=draw(head_sizes),
        heads=h,
        kinds=(q, k, v, do),
        is_causal=mask == "causal",
        attn_mask=random_mask(seed, (*h, n_q, n_k), density=0.7) if mask == "random" else None,
    )
