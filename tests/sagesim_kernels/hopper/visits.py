"""Which blocks of queries and keys the products of a simulated launch of Hopper's kernels read.

A block that TMA loaded is known by its place. Products that sum over tokens read one of the same
block as the products before them that compute P and dS.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sagesim_kernels.hopper.token_loads import SEQUENCE_END
from sagesim_kernels.operands import Copied, KernelProblem, padded, stored_tokens
from tests.support.simulated_kernels import Block, Operands, Run

STEP, ALIGNMENT = 64, 128


class Place(NamedTuple):
    """Where a block of tokens starts."""

    b: int  #: sequence
    h: int  #: head
    token: int


class Sequences:
    """The queries or the keys of a problem, and where they lie."""

    def __init__(self, problem: KernelProblem, *, queries: bool) -> None:
        x, cu = (problem.q, problem.cu_q) if queries else (problem.k, problem.cu_k)
        self.tokens = stored_tokens(cu, x)
        self.ends: list[int] = []  #: see `token_descriptor`
        self.seen = self.lengths = [x.shape[2]] * x.shape[0]  #: tokens that TMA sees
        used = None if queries else problem.extras.seqused_k
        if cu is None:
            stored = -(-x.shape[2] // ALIGNMENT) * ALIGNMENT
            self.starts = [b * stored for b in range(x.shape[0])]
            if used is not None:
                n_q, offset = problem.q.shape[2], problem.longest_offset
                most = x.shape[2] if offset is None else min(n_q + offset, x.shape[2])
                self.seen = used.clamp(0, most).tolist()
                apart = x.stride(0) // x.stride(2)
                self.ends = [b * apart + n for b, n in enumerate(self.seen)]
        else:
            _, *self.ends = starts = cu.tolist()
            self.starts = [(x // ALIGNMENT + b) * ALIGNMENT for b, x in enumerate(starts[:-1])]
            self.seen = self.lengths = np.diff(starts).tolist()

    def stored(self, row: int) -> Place:
        """Return what starts at a row of padded storage, over all heads."""
        h, within = divmod(row, self.tokens)
        b = max(b for b, start in enumerate(self.starts) if start <= within)
        return Place(b, h, within - self.starts[b])

    def coordinates(self, place: Place | None, *, is_stored: bool) -> tuple[int, ...] | None:
        """Return TMA's coordinates of tokens in 16 bit, without the channel.

        is_stored: they lie in padded storage.
        """
        if place is None:
            return None
        b, h, token = place
        if is_stored:
            return 0, h, self.starts[b] + token
        if not self.ends:
            return b, h, token
        row = SEQUENCE_END.value - self.seen[b] + token
        return SEQUENCE_END.value, self.ends[b], h, row


def attended(
    n_q: int, n_k: int, left: int, right: int, lower_right: bool, live: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """The mask from its definition, [queries, keys]. live: keys that are no padding."""
    i, j = np.arange(n_q)[:, None] + (n_k - n_q if lower_right else 0), np.arange(n_k)[None, :]
    result = np.broadcast_to(live, (n_q, n_k)).copy()
    if left >= 0:
        result &= j >= i - left
    if right >= 0:
        result &= j <= i + right
    return result


def _attended_in(problem: KernelProblem, b: int, n_q: int, n_k: int) -> NDArray[np.bool_]:
    """The same for sequence b of a problem."""
    extras = problem.extras
    left, right = extras.window
    live = np.ones(n_k, dtype=np.bool_)
    if extras.seqused_k is not None:
        live &= np.arange(n_k) < int(extras.seqused_k[b])
    if extras.key_mask is not None:
        live &= extras.key_mask[b].numpy()
    return attended(n_q, n_k, left, 0 if problem.is_causal else right, problem.lower_right, live)


class Names(NamedTuple):
    """The arguments of a kernel that are loaded by TMA."""

    left: str  #: of S, the tokens that the program owns
    right: str  #: of S
    others: tuple[str, ...]  #: right operands in 16 bit of other products
    keys: int  #: of a block of keys


KERNELS = {
    "hopper_forward": Names("q8", "k8", ("v",), STEP),
    "hopper_forward_codes": Names("q8", "k8", (), STEP),
    "hopper_p_rows": Names("q8", "k8", ("v",), STEP),
    "hopper_backward": Names("k8", "q8", ("do", "q16"), 2 * STEP),
    "hopper_codes_backward": Names("k8", "q8", ("do",), 2 * STEP),
    "hopper_wide": Names("own_codes", "codes", ("numbers", "right_numbers"), STEP),
}


def check_visits(name: str, run: Run, problem: KernelProblem, copied: Copied) -> None:
    """Check that each query meets all keys that it attends to, and those of its sequence alone.

    copied: operands in 16 bit that lie in padded storage.
    """
    queries, keys = (Sequences(problem, queries=x) for x in (True, False))
    names = KERNELS[name]
    config = run.constants.get("CONFIG")
    owns_queries = names.left == "q8"
    if name == "hopper_wide":
        owns_queries = config.owns_queries
    has_blocks = name == "hopper_backward" and not config.is_joint  # consumers own one each
    if has_blocks:
        names = names._replace(keys=STEP)
    own, streamed = (queries, keys) if owns_queries else (keys, queries)
    is_stored = copied.keys if owns_queries else copied.queries
    visits: Counter[tuple[Place, Place | None]] = Counter()
    steps: dict[int, list[Place | None]] = {}  # of the first consumer of a program
    for (program, group), products in sorted(run.products.items()):
        found = _visits(
            products, names, int(group), own, streamed, steps.get(program), is_stored=is_stored
        )
        steps.setdefault(program, [x for _, x in found])
        if has_blocks and config.has_dq_warps and group == "2":
            assert len(products) == 2 * len(steps[program]), "products of dQ and dK"
        if program in run.stores and group == "0":
            channels = padded(problem.q.shape[3])
            parts = run.stores[program]
            # Each store of a part has some of its channels.
            stores_of_a_part = max(len(parts) // max(len(found), 1), 1)
            expected = [x for _, x in found for _ in range(stores_of_a_part)]
            for part, place in zip(parts, expected, strict=True):
                assert _is_part_of(part, place, channels, queries), "parts of dQ"
        if name == "hopper_forward_codes":  # behind the last block, S is computed of an old K
            found = [x for x, after in pairwise(found) if x[0] == after[0]]
        visits.update(found)
    met: dict[Place, list[int]] = defaultdict(list)
    for (mine, other), count in visits.items():
        assert other is not None, f"{name}: {mine} meets what was not loaded"
        q, k = (mine, other) if owns_queries else (other, mine)
        if has_blocks and k.token % ALIGNMENT and k.token >= keys.lengths[k.b]:
            continue  # the second block of a tile may be behind the last key
        if q.token < queries.lengths[q.b]:
            at = f"{name}: {q} and {k}"
            assert count == 1, f"{at} meet twice"
            assert (k.b, k.h) == (q.b, q.h // problem.groups), f"{at} are of different heads"
            assert k.token < max(keys.lengths[k.b], 1), f"{at}: there are no such keys"
            met[q].append(k.token)
    for b, (n_q, n_k) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        mask = _attended_in(problem, b, n_q, n_k)
        for h, token in product(range(problem.q.shape[1]), range(0, n_q, STEP)):
            rest = np.any(mask[token : token + STEP], axis=0)
            for key in met[Place(b, h, token)]:
                rest[key : key + names.keys] = False
            assert not rest.any(), f"{name}: a block of keys is left out for {b, h, token}"


def _is_part_of(part: Block, place: Place | None, channels: int, queries: Sequences) -> bool:
    """Return whether a part of dQ is of a place. It is stored, or added to sums in rows of 32."""
    if len(part.at) > 2:
        return part.at[:-1] == queries.coordinates(place, is_stored=False)
    return place == queries.stored(part.at[0] // (STEP * channels // 32) * STEP)


def _visits(
    products: list[Operands],
    names: Names,
    group: int,
    own: Sequences,
    streamed: Sequences,
    steps: list[Place | None] | None,
    *,
    is_stored: bool,
) -> list[tuple[Place, Place | None]]:
    """Return what the products S of a group read, and check that the others read the same.

    steps: what the products of a group without S read.
    """
    found: list[tuple[Place, Place | None]] = []
    others: dict[tuple[str, bool], list[tuple[int, ...]]] = defaultdict(list)
    # The tokens of a later consumer may be behind the last of a sequence; those of the first not.
    shift = STEP * group if names.keys == STEP else 0
    for left, right in products:
        if left is not None and left.name == names.left:
            tile = own.stored(left.at[0] - shift)
            place = tile._replace(token=tile.token + shift)
            found.append((place, None if right is None else streamed.stored(right.at[0])))
            continue
        for block, is_right in ((left, False), (right, True)):
            if block is not None and block.name in names.others:
                others[block.name, is_right and left is None].append(block.at[:-1])
    for other, places in others.items():
        blocks = [x for _, x in found] or steps or []
        expected = [streamed.coordinates(x, is_stored=is_stored) for x in blocks]
        assert places == expected, f"{other} is of other blocks than S"
    return found
