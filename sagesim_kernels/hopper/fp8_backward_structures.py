"""The structures that a backward program with FP8 products passes between its functions."""

from __future__ import annotations

from typing import Any, NamedTuple


class CodedQueryInputs(NamedTuple):
    """TMA descriptors of what the producer loads in each step."""

    q8: Any  #: int8 [tokens of all heads, D]
    do: Any  #: 16 bit [sequences, heads, tokens, D]
    q_t: Any  #: FP8 [heads, D, tokens], tokens in register order
    do_t: Any  #: as q_t
    row_stats: Any  #: float32, ROW_STATS times BLOCK_Q for each block of queries


class CodedQueryBuffers(NamedTuple):
    """Blocks of queries in shared memory, one for each stage."""

    q8: Any  #: int8 [stages, BLOCK_Q, D]
    do: Any  #: 16 bit [stages, BLOCK_Q, D]
    q_t: Any  #: FP8 [stages, D, BLOCK_Q]
    do_t: Any  #: as q_t
    row_stats: Any  #: float32 [stages * ROW_STATS, BLOCK_Q]


class CodedKeyBuffers(NamedTuple):
    """The program's tile of keys in shared memory."""

    k8: Any  #: int8 [1, TILE_K, D]
    v: Any  #: 16 bit [1, TILE_K, D]
    k_t: Any  #: FP8 [1, D, TILE_K], keys in pairs


class RightScales(NamedTuple):
    """The scales of the blocks of dO and Q, as right operands."""

    do: Any  #: pointer to the first block's, of the program's first query head
    q: Any  #: as do
    stride: Any  #: from a head to the next
