"""Hypothesis strategies of tensors and cases, and those of specs that `sagesim.fuzz` uses.

Hypothesis draws kinds, lengths and a seed, and numpy draws the elements. Large tensors are then
fast to draw, and a failing example is short.
"""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from sagesim import Precision
from sagesim.fuzzing.strategies import MAP_GRANULARITIES as MAP_GRANULARITIES
from sagesim.fuzzing.strategies import TOKEN_GRANULARITIES as TOKEN_GRANULARITIES
from sagesim.fuzzing.strategies import all_blocks, seeds
from sagesim.fuzzing.strategies import matmuls as matmuls
from sagesim.fuzzing.strategies import roundings as roundings
from sagesim.fuzzing.strategies import smoothings as smoothings
from sagesim.fuzzing.strategies import specs as specs
from tests.support.inputs import MILD, Builder, Case, case, random_mask

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 130)
HEAD_SIZES = (1, 8, 16, 40, 64, 72)

SCALED = tuple(p for p in Precision if p.is_scaled)

blocks = all_blocks
lengths = st.sampled_from(LENGTHS)
head_sizes = st.sampled_from(HEAD_SIZES)
few_heads = st.sampled_from([(1,), (2, 1)])


@st.composite
def tensors(draw: st.DrawFn, kinds: dict[str, Builder], *, heads: tuple[int, ...] = (2,)) -> Tensor:
    """A float32 tensor [*heads, n, d] of one of these kinds."""
    build = kinds[draw(st.sampled_from(sorted(kinds)))]
    shape = (*heads, draw(lengths), draw(head_sizes))
    return torch.from_numpy(build(np.random.default_rng(draw(seeds)), shape))


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
    """A case of these kinds. n_q and n_k are drawn independently, and so are d and d_v."""
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
