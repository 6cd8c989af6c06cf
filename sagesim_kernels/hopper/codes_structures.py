"""The structures that a program of the backward in codes passes between its functions."""

from __future__ import annotations

from typing import Any, NamedTuple


class CodeInputs(NamedTuple):
    """TMA descriptors of what the producer loads in each step."""

    q8: Any  #: int8 [tokens of all heads, D]
    do: Any  #: 16 bit [sequences, heads, tokens, D]
    q_right: Any  #: int8 [channels of all heads, tokens], in register order
    do_right: Any  #: as q_right
    row_stats: Any  #: float32 [ROW_STATS for each block of queries]
    channel_scales: Any  #: float32 [2 * D for each block of queries]
    ratios: Any  #: float32 [queries], see `fp8_warps`; None in INT8


class CodeBuffers(NamedTuple):
    """Blocks of queries in shared memory, one for each stage."""

    q8: Any  #: int8 [stages, BLOCK_Q, D]
    do: Any  #: 16 bit [stages, BLOCK_Q, D]
    q_right: Any  #: int8 [stages, D, BLOCK_Q]
    do_right: Any  #: int8 [stages, D, BLOCK_Q]
    row_stats: Any  #: float32 [stages, ROW_STATS], with more stages if other warps compute dQ
    channel_scales: Any  #: float32 [stages, 2 * D], of do_right and of q_right
    ratios: Any  #: float32 [stages, BLOCK_Q], or None


class CodeKeys(NamedTuple):
    """The program's tile of keys in shared memory."""

    k8: Any  #: int8 [1, TILE_K, D]
    v: Any  #: 16 bit [1, TILE_K, D]
    k_right: Any  #: int8 [BLOCKS, D, BLOCK_K]
    right_scales: Any  #: float32 [BLOCKS, D], of k_right


class CodeMaps(NamedTuple):
    """What warps tell each other about P and dS, in shared memory."""

    ds: Any  #: float32 [slots, TILE_K, BLOCK_Q], in the layout `EXCHANGE`
    codes: Any  #: int8 [BLOCKS * BLOCK_Q, BLOCK_K], the codes of dS for dQ
    steps: Any  #: float32 [BLOCKS * BLOCK_Q], the step of each query
    p_maxima: Any  #: float32 [slots, BLOCKS, 4], see `codes_maps.row_maxima`; or None
    ds_maxima: Any  #: as p_maxima


class CodeBarriers(NamedTuple):
    """Barriers in shared memory; [2] is one for even steps and one for odd steps."""

    q_full: Any  #: [stages], a block of queries has arrived
    ds_full: Any  #: [2], dS is in shared memory; None if the warps that compute dS also compute dQ
    ds_empty: Any  #: [2], dS has been read from shared memory; None likewise
    dq_full: Any  #: [2], a part of dQ is in shared memory
    dq_empty: Any  #: [slots], a part of dQ has been read from shared memory
    kv_full: Any  #: the tile of keys has arrived
    scales_full: Any  #: the scales of the right operand of dQ are in shared memory; None likewise


class KeyScales(NamedTuple):
    """Pointers to the scales of a program's keys."""

    rows: Any  #: of K of qk_recompute, of the sequence's first key
    row_stride: Any  #: from one scale to the next
    right: Any  #: of the right operand of dQ, of the sequence's first block
    right_stride: Any  #: from one block to the next
    channel_stride: Any  #: from one channel to the next; 0 if all have the same scale
