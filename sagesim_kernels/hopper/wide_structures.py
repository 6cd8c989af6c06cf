"""The structures of the kernel for heads with more than 128 channels."""

from __future__ import annotations

from typing import Any, NamedTuple

from sagesim_kernels.operands import Copied


class Tokens(NamedTuple):
    """The tensors of the owned or of the streamed tokens; TMA descriptors or buffers.

    All but `stats` are in parts, see `channel_parts`.
    """

    codes: Any  #: int8, of Q or K
    numbers: Any  #: 16 bit, of dO or V; None without dP
    right: Any  #: 16 bit, the right operand of the gradient: K, Q or dO; None for owned tokens
    stats: Any  #: float32, `ROW_STATS` of each block of streamed queries; otherwise None


class Place(NamedTuple):
    """Where tokens of a sequence and a head lie."""

    origin: Any  #: `TokenOrigin` of the sequence, in 16 bit
    stored_row: Any  #: in padded storage, over all heads
    stored_tokens: Any  #: of a head in padded storage


class Barriers(NamedTuple):
    """Barriers in shared memory."""

    own_full: Any  #: the owned tokens have arrived
    full: Any  #: [stages], codes, numbers and row statistics of a block have arrived
    empty: Any  #: [stages], every consumer has read them
    right_full: Any  #: [right stages], a right operand has arrived
    right_empty: Any  #: [right stages], every consumer has read it


class Walk(NamedTuple):
    """The blocks of streamed tokens that a tile of owned tokens meets, in their order.

    A program that owns queries visits its blocks of keys from the last to the first, one that owns
    keys its blocks of queries from the first to the last. The blocks that need a mask are the first
    ones, and under a limit on the left or a key mask the last ones, too.
    """

    first: Any  #: the first block
    masked_at_begin: Any  #: number of blocks at the beginning that need a mask
    masked_at_end: Any  #: number of blocks at the end that need a mask
    count: Any  #: number of blocks


class BlockMask(NamedTuple):
    """Which of the owned tokens of a consumer and of a streamed block attend to each other."""

    first: Any  #: the first owned token
    n_k: Any  #: no query attends to keys of the sequence from this one on
    offset: Any  #: query i attends to no key after i + offset
    lowest: Any  #: query i attends to no key before i + lowest; None: no limit
    key_mask: Any  #: int8 [n_k], 0 for streamed keys that are padding; None: none is
    keys: Any  #: owned keys, 2^30 for those that no query attends to; None: all before n_k are live


class Config(NamedTuple):
    """The constants of a kernel."""

    is_forward: bool
    """Whether it computes O and the logsumexp, and not a gradient."""
    owns_queries: bool
    """Whether it computes O or dQ, and not dK or dV."""
    has_dp: bool
    """Whether it computes dQ or dK, and not O or dV."""
    stages: int
    """Loads of codes, numbers and row statistics that may be in flight."""
    right_stages: int
    """Loads of right operands that may be in flight."""
    groups: int
    """Query heads for each head of K and V, of a program that owns keys only its own ones."""
    splits: int
    """Programs for each tile of keys. Each computes a part of dK or dV."""
    tile_d: int
    """Channels of a tile of Q and K."""
    tile_dv: int
    """Channels of a tile of V and dO."""
    channels: int
    """Channels of the result."""
    copied: Copied
    """Which 16-bit tensors lie in padded storage."""
    is_fixed: bool
    """Whether the forward has a fixed reference in blocks without a mask, see
    `operands.fixed_reference`: the largest logit of the masked blocks before them."""
