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
    """The program's tile of keys in shared memory: 64 keys for each of two consumers."""

    k8: Any  #: int8 [2, KEYS, D]
    v: Any  #: 16 bit [2, KEYS, D]
    k_t: Any  #: FP8 [4, D / 2, KEYS], keys in pairs; the first two have the first half of channels


class CodedBarriers(NamedTuple):
    """Barriers in shared memory. Both consumers release a buffer."""

    kv_full: Any  #: the tile of keys has arrived
    q_full: Any  #: [stages], Q in INT8, dO in 16 bit and the row statistics have arrived
    right_full: Any  #: [stages], the right operands of dV and dK have arrived
    right_empty: Any  #: [stages], both consumers have finished the step
    ds_full: Any  #: [slots], dS of both consumers is in shared memory
    dq_full: Any  #: [2], a part of dQ is in shared memory, for each consumer
    dq_empty: Any  #: [2], it has been read


class RightScales(NamedTuple):
    """The scales of the blocks of dO and Q, as right operands."""

    do: Any  #: pointer to the first block's, of the program's first query head
    q: Any  #: as do
    stride: Any  #: from a head to the next
