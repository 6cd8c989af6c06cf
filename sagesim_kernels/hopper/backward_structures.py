"""The structures that a backward program passes between its functions."""

from __future__ import annotations

from typing import Any, NamedTuple


class QueryInputs(NamedTuple):
    """TMA descriptors of what the producer loads in each step."""

    q8: Any  #: int8 [tokens of all heads, D]
    q16: Any  #: 16 bit [sequences, heads, tokens, D]
    do: Any  #: as q16
    row_stats: Any  #: float32 [ROW_STATS for each block of queries]
    shifts: Any  #: float32 [queries], see `capped_rows`; None if nothing is added to S
    deltas: Any  #: bfloat16 [queries, 8], see `delta_words`; None if no product adds delta


class QueryBuffers(NamedTuple):
    """Blocks of queries in shared memory, one for each stage."""

    q8: Any  #: int8 [stages, BLOCK_Q, D]
    q16: Any  #: 16 bit [2, 3 or 5, BLOCK_Q, D]
    do: Any  #: 16 bit [stages, BLOCK_Q, D]
    row_stats: Any  #: float32 [stages, ROW_STATS]
    shifts: Any  #: float32 [stages, BLOCK_Q], or None
    deltas: Any  #: bfloat16 [stages, BLOCK_Q, 16], of which TMA fills the last 8 with 0; or None


class KeyInputs(NamedTuple):
    """TMA descriptors of what the producer loads for each tile of keys."""

    k8: Any  #: int8 [tokens of all heads, D]
    k16: Any  #: 16 bit [sequences, heads, tokens, D]
    v: Any  #: as k16


class KeyBuffers(NamedTuple):
    """A tile of keys in shared memory."""

    k8: Any  #: int8 [1, TILE_K, D]
    v: Any  #: 16 bit [1, TILE_K, D]
    k16: Any  #: 16 bit [1, TILE_K, D]
    dv: Any  #: 16 bit [1, TILE_K, D]: dV on its way to global memory; may be v
    dk: Any  #: the same for dK; may be v


class Barriers(NamedTuple):
    """Barriers in shared memory; [2] is one for even steps and one for odd steps."""

    ds_full: Any  #: [stages], dS of both blocks is in shared memory; None in `backward_joint`
    dq_full: Any  #: [2], a part of dQ is in shared memory, and dS of its step has been read
    dq_empty: Any  #: [slots], a part of dQ has been read from shared memory
    kv_full: Any  #: codes of K, and V, of a tile have arrived
    kv_empty: Any  #: they have been read
    k16_full: Any  #: K in 16 bit of a tile has arrived
    k16_empty: Any  #: it has been read; None if the warps that read it load the next one
    q_full: Any  #: [stages], a block of queries has arrived
    q_empty: Any  #: [stages], it has been read; None if another barrier says so


class TokenOrigin(NamedTuple):
    """Where a sequence lies for TMA; see `token_descriptor`."""

    b: Any  #: its number; of a packed sequence its first token
    h: Any  #: its first head
    row: Any  #: coordinate of its first token
    length: Any  #: its tokens, if TMA sees its end


class KeyScheduler(NamedTuple):
    """The tiles of keys of a launch, and their order; see `tile_scheduler`."""

    tiles: Any  #: of a head; of all its sequences, unless packed_tiles is None
    heads: Any  #: of K and V, of a sequence
    packed_tiles: Any  #: see `order_tiles`; None if all sequences have equally many tiles
    all_heads: Any  #: of dK and dV, with `tiles` tiles
    heads_per_group: Any  #: see `BackwardOrder`
    programs: Any
    waves: Any  #: tiles that a program computes at most
    tokens_q: Any  #: of a head in padded storage
    tokens_k: Any  #: of a head in padded storage
    found: Any  #: two `FoundTile`, see `dealt_tiles`; None if each warp finds the tiles
    full: Any  #: [2], barriers: the tile of a wave has been found
    empty: Any  #: [2], the warps that need it have read it


class FoundTile(NamedTuple):
    """What has to be found of a tile of keys."""

    first: Any  #: first key of the tile; -1 if there is nothing to compute
    b: Any  #: sequence
    z: Any  #: head of K and V, over all sequences
    head: Any  #: head of K and V
    out_head: Any  #: copy of dK and dV of that head


class KeyTile(NamedTuple):
    """The keys of a tile."""

    first: Any  #: first key of the tile
    length: Any  #: keys of the sequence
    n_live: Any  #: no query attends to keys of the sequence from this one on
    offset: Any  #: query i attends to no key after i + offset
    lowest: Any  #: query i attends to no key before i + lowest; None: no limit


class QueryLoop(NamedTuple):
    """The blocks of queries that attend to a tile of keys.

    The loop goes from `begin` to `end`. Without a limit on either side of the diagonal, iteration i
    computes block i + shift, and after the last block it goes on with the first. Programs that
    start together then add to different sums, and do not wait for each other at the same addresses.
    """

    begin: Any  #: first block
    unmasked: Any  #: first block that needs no mask
    unmasked_end: Any  #: first block after those that need no mask; None: `end`
    end: Any
    shift: Any  #: less than end - begin, or 0; 0 with a limit on either side


class PlacedTile(NamedTuple):
    """A tile of keys that a program computes, and where its tokens lie."""

    b: Any  #: sequence
    z: Any  #: head of K and V, over all sequences
    head: Any  #: head of K and V
    out_head: Any  #: copy of dK and dV of that head
    first_q_head: Any
    keys: Any  #: `KeyTile`
    loop: Any  #: `QueryLoop`
    start_q: Any  #: first query of the sequence in padded storage
    start_k: Any  #: first key of the sequence in padded storage
    row_q: Any  #: the same as start_q, over all heads
    row_k: Any  #: first key of the tile in padded storage, over all heads


class KeyOutputs(NamedTuple):
    """Where a program stores dK and dV of a tile."""

    dk: Any  #: `Strided`
    dv: Any  #: `Strided`
    cu_k: Any
    b: Any
    h: Any
    scale: Any  #: the scale of the logits, a factor of dK
    key_mask: Any = None  #: int8, 0 for keys of the sequence that are padding; None: none is
