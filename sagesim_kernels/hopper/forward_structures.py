"""The structures that a forward program passes between its functions."""

from __future__ import annotations

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """TMA descriptors of the tensors that the producer loads."""

    q8: Any  #: int8 [tokens of all heads, D]
    k8: Any  #: int8 [tokens of all heads, D]
    v: Any  #: 16 bit, `token_descriptor`; or int8 [channels of all heads, tokens]
    k_scale: Any  #: float32 [tokens of all heads], or None if keys of a block share a scale
    v_scale: Any  #: float32 [channels of all blocks], or None if channels of a block share a scale


class StoredScales(NamedTuple):
    """Scales of the codes of Q, K or V, in padded storage."""

    ptr: Any  #: float32, one for each token or block, or for each channel of a block of V
    tokens: Any  #: tokens of a head


class Scales(NamedTuple):
    q: Any  #: `StoredScales`
    k: Any  #: `StoredScales`
    v: Any  #: `StoredScales`, or None in 16 bit


class Buffers(NamedTuple):
    """Tiles in shared memory."""

    q: Any  #: int8 [2 * consumers, BLOCK, D], two for each consumer
    k: Any  #: int8 [stages, BLOCK, D]
    v: Any  #: 16 bit [stages, BLOCK, D], or int8 [stages, D, BLOCK]
    k_scale: Any  #: float32 [stages, BLOCK], or None
    v_scale: Any  #: float32 [stages, D], or None
    tiles: Any  #: two `Tile`, see `dealt_tiles.allocate_tiles`


class Barriers(NamedTuple):
    """Barriers in shared memory; the docstring of `forward_loads` says what each is for."""

    full: Any  #: [stages]
    empty: Any  #: [stages]
    q_full: Any  #: [2 * consumers]
    q_empty: Any  #: [2 * consumers]


class TileScheduler(NamedTuple):
    """The tiles of a launch, and their order; see `tile_scheduler`."""

    heads: Any  #: query heads
    groups: Any  #: query heads for each head of K and V
    packed_tiles: Any  #: see `order_tiles`; None if all sequences have equally many tiles
    head_tiles: Any  #: tiles of a head; of all its sequences, unless packed_tiles is None
    heads_per_group: Any  #: a divisor of the heads with so many tiles
    tiles: Any  #: of all heads and sequences
    programs: Any


class Tile(NamedTuple):
    """The queries that all consumers of a program compute together."""

    b: Any  #: sequence
    h: Any  #: query head
    k_head: Any  #: head of K and V
    first: Any  #: first query; -1 if there is nothing to compute


class KeyBlocks(NamedTuple):
    """The blocks of keys that some queries attend to; `begin` is before `end`.

    The queries attend to all keys of the blocks from `whole` to `whole_end`, but for those that a
    key mask excludes.
    """

    begin: Any
    whole: Any
    whole_end: Any
    end: Any


class Mask(NamedTuple):
    """The keys that the queries of a consumer attend to; see `operands.attends`."""

    queries: Any
    n_k: Any
    offset: Any
    lowest: Any  #: query i attends to no key before i + lowest; None: no limit
    key_mask: Any  #: int8 [n_k], 0 for keys of the sequence that are padding; None: none is
