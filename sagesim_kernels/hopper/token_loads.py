"""Where tokens in 16 bit lie for TMA, and their loads."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.gluon_compat import reinterpret, tma_load
from sagesim_kernels.hopper.backward_structures import TokenOrigin

SEQUENCE_END = gl.constexpr(2**30)
"""TMA's coordinate of the end of each sequence; see `token_descriptor`."""


@gluon.jit
def origin_of(IS_COPIED: gl.constexpr, cu, b, h, start):
    """Return the `TokenOrigin` of sequence b and head h in a 16-bit tensor.

    IS_COPIED: whether the tensor lies in padded storage. cu: int32 [sequences + 1], the first token
    of each packed sequence; or None. start: the sequence's first token in padded storage.
    """
    zero = gl.program_id(1)  # opaque to the compiler
    if IS_COPIED:
        return TokenOrigin(zero, h, start, zero)
    elif cu is None:
        return TokenOrigin(b, h, zero, zero)
    else:
        begin = gl.load(cu + b)
        length = gl.load(cu + b + 1) - begin
        return TokenOrigin(begin, h, SEQUENCE_END - length, length)


@gluon.jit
def key_origin(x, IS_COPIED: gl.constexpr, cu, b, h, start, live):
    """Return the `TokenOrigin` of the keys of sequence b and head h, in 16 bit.

    x: `token_descriptor` of K or V; None if neither is loaded. live: keys from this one on are
    padding, if x has the ends of sequences. Others: see `origin_of`.
    """
    if x is None or cu is not None:
        return origin_of(IS_COPIED, cu, b, h, start)
    elif len(x.block_shape) == 5:
        return TokenOrigin(b, h, SEQUENCE_END - live, live)
    else:
        return origin_of(IS_COPIED, cu, b, h, start)


@gluon.jit
def of_next_head(origin, heads):
    """Return the `TokenOrigin` of the same sequence, `heads` heads further."""
    return TokenOrigin(origin.b, origin.h + heads, origin.row, origin.length)


@gluon.jit
def from_token(origin, first):
    """Return the `TokenOrigin` of which token 0 is token `first` of origin."""
    return TokenOrigin(origin.b, origin.h, origin.row + first, origin.length)


@gluon.jit
def token_coordinates(x, origin, first, FIRST_CHANNEL: gl.constexpr = 0):
    """Return TMA's coordinates of tokens from `first`.

    x: `token_descriptor`. origin: `TokenOrigin` of the sequence.
    """
    if len(x.block_shape) == 5:  # it has the ends of sequences
        end = origin.b * (x.shape[0] - (SEQUENCE_END + 1)) + origin.length
        return (SEQUENCE_END, end, origin.h, origin.row + first, FIRST_CHANNEL)
    else:
        return (origin.b, origin.h, origin.row + first, FIRST_CHANNEL)


@gluon.jit
def load_tokens(x, origin, first, bar, buffer, FIRST_CHANNEL: gl.constexpr = 0, pred=True):
    """Load tokens from `first` to a buffer [tokens, channels] by TMA, if pred.

    The other arguments: see `token_coordinates`.
    """
    shared = reinterpret(buffer, x.dtype, x.block_shape, x.layout)
    tma_load(x, token_coordinates(x, origin, first, FIRST_CHANNEL), bar, shared, pred=pred)
